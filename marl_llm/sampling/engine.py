"""The engine: many requests of uneven length and several models, by continuous batching.

Requests wait in a queue, enter as slots and pages get free, and all decode together in chunks; between two chunks finished answers leave,
new requests enter, a piece of a long prompt is computed, and cancellations, deadlines and new parameters take effect. One thread does all
of it and owns the devices; callers submit from any thread (`submit`, `generate_all`) or from an event loop (`await generate`). All memory
for keys and values is taken at the start. It is given out page by page: too many requests wait, one that grows beyond it is paused and goes
on later with the same draws, and a full queue holds callers back.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from marl_llm.errors import UserError
from marl_llm.models import ModelConfig
from marl_llm.sampling.bursts import Bursts
from marl_llm.sampling.drafting import DRAFT_COUNTS
from marl_llm.sampling.prompt_scores import PromptScorer, PromptScores
from marl_llm.sampling.requests import Completion, Request, RequestError
from marl_llm.sampling.scheduler import Scheduler
from marl_llm.sampling.sequences import EngineConfig, SequenceState
from marl_llm.sampling.store import PageStore, shape_of
from marl_llm.sampling.weights import grouped, served_stacked
from marl_llm.text import Tokenizer
from marl_llm.tools.mailbox import Mailbox

log = logging.getLogger(__name__)


class EngineError(UserError, RuntimeError):
    """The engine stopped: it was closed, or a device program failed. The cause is chained."""


class Handle:
    """A submitted request."""

    def __init__(self, sequence: SequenceState, wake):
        self._sequence, self._wake = sequence, wake

    def result(self, timeout: float | int | None = None) -> Completion:
        """Waits for the answer. Raises `TimeoutError` after `timeout` seconds (the request goes on), `EngineError` if the engine stops."""
        return self._sequence.future.result(timeout)

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._sequence.future.done()

    def cancel(self) -> None:
        """Ends the request soon; its answer is what was drawn by then, with finish 'cancelled'. No effect on one that has ended."""
        self._sequence.cancelled = True
        self._wake()


class Engine:
    """Serves requests to several models on one mesh. Close it, or use it as a context manager.

    Args:
      models: name -> (config, parameters in any layout). All may share one mesh; each gets slots of its own. Models that carry adapters on
        the very same base (`attach(base, adapters, lora)`, one object `base`) are served together: one copy of it, and one program for all.
      key: the root of all draws; a request's key is folded from it and the request's seed.
      sizes: one `EngineConfig` for all models, or one per name.
      queue: most requests that wait for a slot, over all models; more hold their callers back.
      mesh: slots lie along 'data' and 'fsdp', parameters as the rules for sampling say; None: one device.
      tokenizers: name -> tokenizer, needed for stop strings only.
    """

    def __init__(
        self,
        models: Mapping[str, tuple[ModelConfig, dict]],
        key: Key[Array, ""],
        *,
        sizes: EngineConfig | Mapping[str, EngineConfig] | None = None,
        queue: int = 4096,
        mesh: Mesh | None = None,
        tokenizers: Mapping[str, Tokenizer] | None = None,
    ):
        if not models:
            raise ValueError("an engine needs at least one model")
        if queue < 1:
            raise ValueError(f"queue={queue}: at least one request must be allowed to wait")
        sizes = sizes or EngineConfig()

        def of(name):
            return sizes if isinstance(sizes, EngineConfig) else sizes[name]

        named = tokenizers or {}
        parts = grouped(models, of, named)
        pages = [shape_of(c, size, served_stacked(c, next(iter(members.values())), mesh)) for members, c, size, _ in parts]
        sharing = collections.Counter(shape for shape, (_, _, size, _) in zip(pages, parts, strict=True) if size.block_pool == "shared")
        stores = {}
        for shape, (members, c, size, _) in zip(pages, parts, strict=True):
            if shape in sharing and shape not in stores:
                stores[shape] = PageStore("+".join(members), c, size, mesh, sharing[shape], shape.stacked)
        self._all = [
            Scheduler(members, c, size, key, mesh, words, stores.get(shape))
            for shape, (members, c, size, words) in zip(pages, parts, strict=True)
        ]
        self._schedulers = {name: scheduler for scheduler in self._all for name in scheduler.names}
        self._scorers = {scheduler.name: PromptScorer(scheduler) for scheduler in self._all}
        self._queue = queue
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._space_available = threading.Condition(self._lock)
        self._overflow: collections.deque[tuple[Scheduler, SequenceState]] = collections.deque()  # awaited; no room in the queue yet
        self._waiting = 0  # submitted and not yet in a slot
        self._inbox: list[tuple[Scheduler, SequenceState]] = []
        self._bursts = Bursts(self._release, max(scheduler.sizes.max_num_seqs for scheduler in self._all))
        self._mailboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox] = weakref.WeakKeyDictionary()
        self._pending: set[Mailbox] = set()  # where answers lie of which nobody was told; the thread's own, as is the next
        self._flushed = False  # in this round
        for scheduler in self._all:
            scheduler.on_idle = self._flush
        self._updates: list[tuple[Scheduler, str, dict, Future]] = []
        self._swaps: dict[str, list[Future]] = {scheduler.name: [] for scheduler in self._all}
        self._closing = False
        self._failure: BaseException | None = None
        self._idle_s = 0.0
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="marl_llm engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ callers
    def submit(self, request: Request, on_tokens: Callable[[np.ndarray | None], None] | None = None) -> Handle:
        """Queues a request; blocks while the queue is full. Raises `RequestError`, or `EngineError` after the engine stopped.

        `on_tokens` gets the ids `[n]` of each chunk as soon as they are drawn, and None when the handle is done. The engine's thread calls
        it, so it must return at once and raise nothing: a queue's `put`.
        """
        sequence, scheduler = self._sequence(request)
        if on_tokens is not None:
            sequence.on_tokens = on_tokens
            sequence.future.add_done_callback(lambda _: on_tokens(None))
        with self._lock:
            while self._waiting >= self._queue and not self._stopped():
                self._space_available.wait()
            self._enqueue(scheduler, sequence)
        return Handle(sequence, self._wake)

    def generate_all(self, requests: Iterable[Request]) -> list[Completion]:
        """The answers to all requests, in their order."""
        return [h.result() for h in [self.submit(r) for r in requests]]

    async def generate(self, request: Request) -> Completion:
        """The answer to a request. Those that are made at the same moment are submitted together. Cancelling the task frees its slot.
        Raises as `submit` does."""
        sequence, scheduler = self._sequence(request)
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        with self._lock:
            self._raise_if_stopped()
            mailbox = self._mailboxes.setdefault(loop, Mailbox(loop))
        sequence.future.add_done_callback(lambda done: self._deliver(mailbox, answer, done))
        self._bursts.add((scheduler, sequence))
        try:
            return await answer
        except asyncio.CancelledError:
            sequence.cancelled = True
            self._wake()
            raise

    def score(self, model: str, prompts: Iterable[Sequence[int]], top_k: int = 0) -> list[PromptScores]:
        """What a model says of the tokens of each prompt, and the `top_k` likeliest in their places; nothing is drawn. A prompt has 1 to
        `prompt_tokens + response_tokens` ids. Raises `RequestError`, or `EngineError` if the engine stops."""
        scorer = self._scorers[self._scheduler(model).name]
        requests = [scorer.check(model, ids, top_k) for ids in prompts]
        with self._lock:
            self._raise_if_stopped()
            scorer.waiting.extend(requests)
            self._changed.notify_all()
        return [request.future.result() for request in requests]

    def set_params(self, model: str, params: dict) -> None:
        """New parameters: every request submitted after this call sees them. Returns when they are in force.

        Requests admitted before end with the old ones, or with `EngineConfig.weight_update="in_flight"` go on with the new ones from their
        next chunk; one
        that was paused is computed again with the new ones. No later request finds keys and values of the old ones, or what was computed
        behind them. Raises `ValueError` on parameters of another model, `RequestError` on an unknown name; both leave the old ones.
        """
        scheduler = self._scheduler(model)
        scheduler.weights.check(model, params)
        done: Future = Future()
        with self._lock:
            self._raise_if_stopped()
            self._updates.append((scheduler, model, params, done))
            self._changed.notify_all()
        done.result()

    def stats(self) -> dict[str, dict[str, float | int]]:
        """Per model, since the start: requests, prompt, reused and sampled tokens, steps, seconds of admission, decoding and compilation,
        compilations, the share of slots that were busy, bytes of cache; and under 'engine' seconds in all and idle. Models that are served
        together have one count."""
        out = {}
        for name, scheduler in self._schedulers.items():
            s = dict(scheduler.stats)
            busy = s.get("sampled_tokens", 0) - s.get("accepted_tokens", 0) - s.get("requests", 0)
            out[name] = s | {"cache_bytes": scheduler.cache_bytes, "occupied": busy / max(s.get("slot_steps", 0), 1)}
        out["engine"] = {"seconds": time.perf_counter() - self._started, "idle_s": self._idle_s, "waiting": float(self._waiting)}
        return out

    def draft_counts(self) -> dict[str, float | int]:
        """Since the start, over all models: `drafted_tokens` that were verified, `accepted_tokens` of them, `draft_steps` that did so, and
        `saved_steps`: accepted tokens over the rows of each such step."""
        return {name: sum(scheduler.stats[name] for scheduler in self._all) for name in DRAFT_COUNTS}

    def close(self) -> None:
        """Stops the thread and gives up the devices' memory. Requests that have no answer yet get an `EngineError`."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for scheduler in self._all:
            scheduler.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------ the queue; all with the lock held
    def _scheduler(self, model: str) -> Scheduler:
        if model not in self._schedulers:
            raise RequestError(f"request refused: no model {model!r}; this engine serves {', '.join(self._schedulers)}")
        return self._schedulers[model]

    def _sequence(self, request: Request) -> tuple[SequenceState, Scheduler]:
        scheduler = self._scheduler(request.model)
        return SequenceState(request, Future(), scheduler.check(request), time.monotonic()), scheduler

    def _stopped(self) -> bool:
        return self._closing or self._failure is not None

    def _raise_if_stopped(self) -> None:
        if self._stopped():
            raise EngineError("the engine has stopped" + ("" if self._failure is None else f": {self._failure}")) from self._failure

    def _enqueue(self, scheduler: Scheduler, sequence: SequenceState) -> None:
        self._raise_if_stopped()
        self._waiting += 1
        self._inbox.append((scheduler, sequence))
        self._changed.notify_all()

    def _release(self, burst: list[tuple[Scheduler, SequenceState]]) -> None:
        """Submits a burst, in its event loop. Requests that the queue has no room for wait in order."""
        with self._lock:
            stopped = self._stopped()
            if not stopped:
                self._overflow += burst
                self._fill()
                self._changed.notify_all()
        self._fail(sequence.future for _, sequence in burst if stopped)

    def _fill(self) -> None:
        while self._overflow and self._waiting < self._queue:
            self._inbox.append(self._overflow.popleft())
            self._waiting += 1

    def _wake(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _left_the_queue(self, n: int) -> None:
        self._waiting -= n
        self._fill()
        self._space_available.notify_all()

    # ------------------------------------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            while self._collect():
                self._flushed = False
                for scheduler in self._all:
                    self._serve(scheduler)
                self._score_prompts()
                if not self._flushed:  # no program ran
                    self._flush()
        except BaseException as error:  # whatever a device program raised must reach every caller
            log.exception("the engine failed")
            self._failure = error
        with self._lock:
            self._closing = True
            lost = [t for scheduler in self._all for t in scheduler.sequences]
            lost += [t for _, t in (*self._inbox, *self._overflow)]
            lost += [request for scorer in self._scorers.values() for request in (*scorer.waiting, *scorer.active)]
            futures = [t.future for t in lost] + [f for *_, f in self._updates] + [f for fs in self._swaps.values() for f in fs]
            self._space_available.notify_all()
        self._fail(futures)
        self._flush()

    def _fail(self, futures: Iterable[Future]) -> None:
        for future in futures:
            if not future.done() and future.set_running_or_notify_cancel():
                error = EngineError("the engine stopped before it answered")
                error.__cause__ = self._failure
                future.set_exception(error)

    def _deliver(self, mailbox: Mailbox, answer: asyncio.Future, done: Future) -> None:
        error = done.exception()
        result = None if error else done.result()
        if self._stopped():  # nobody comes to tell of it, and this may be another thread than the engine's
            mailbox.put(answer, result, error)
        else:
            mailbox.lay(answer, result, error)
            self._pending.add(mailbox)

    def _flush(self) -> None:
        """Tells the event loops of their answers. While a program runs: whoever makes requests of them and this thread need one
        interpreter's lock, and the program does not."""
        for mailbox in self._pending:
            mailbox.tell()
        self._pending.clear()
        self._flushed = True

    def _collect(self) -> bool:
        """Takes what callers left; sleeps while there is nothing to do. False once the engine is closing."""
        with self._lock:
            while not self._closing:
                for scheduler, sequence in self._inbox:
                    scheduler.waiting.append(sequence)
                for scheduler, model, params, done in self._updates:
                    scheduler.weights.pending[model] = params
                    self._swaps[scheduler.name].append(done)
                self._inbox, self._updates = [], []
                if any(scheduler.waiting or scheduler.busy or scheduler.weights.pending for scheduler in self._all):
                    return True
                if any(scorer.waiting for scorer in self._scorers.values()):
                    return True
                self._flush()
                slept = time.perf_counter()
                self._changed.wait()
                self._idle_s += time.perf_counter() - slept
            return False

    def _score_prompts(self) -> None:
        """One program of each scheduler whose models are asked for scores, so that whoever decodes goes on behind it."""
        for scorer in self._scorers.values():
            with self._lock:
                batch = scorer.next_batch()
            if batch:
                self._flush()
                scorer.score(batch)

    def _serve(self, scheduler: Scheduler) -> None:
        now = time.monotonic()
        gone = [t for t in scheduler.waiting if t.cancelled or t.expired(now)]
        if gone:
            left = set(gone)
            scheduler.waiting = collections.deque(t for t in scheduler.waiting if t not in left)
            for sequence in gone:
                sequence.answer("cancelled" if sequence.cancelled else "timeout")
        if scheduler.can_swap:
            self._flush()
            scheduler.swap()
            for done in self._swaps[scheduler.name]:
                done.set_result(None)
            self._swaps[scheduler.name] = []
        entered = sum(not t.begun for t in gone)
        while True:
            count, more = scheduler.admit()
            entered += count
            if not more:
                break
        if entered:
            with self._lock:
                self._left_the_queue(entered)
        scheduler.step(now)
