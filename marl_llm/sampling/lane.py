"""The host part of one model's slots: which request sits where, what its prompt can take over, and which shapes are compiled."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from marl_llm.models import SAMPLE, ModelConfig, param_shardings, serving_layout, use_rules
from marl_llm.models.sharding import path_name
from marl_llm.sampling.draws import Drawn, RowSettings
from marl_llm.sampling.requests import Completion, Request, RequestError, Settings
from marl_llm.sampling.slots import SEEDS, Admission, Rules, Slots, admit, cache_bytes, decode, init_slots
from marl_llm.sampling.stops import StopRule, stop_rule
from marl_llm.text import Tokenizer

log = logging.getLogger(__name__)
COMPACT = (2, 4)  # with at most this part of the slots living, only that part is computed


@dataclasses.dataclass(frozen=True)
class LaneConfig:
    """Sizes of one model's slots. All memory is taken when the engine starts; see `cache_bytes`. Raises `ValueError` naming a bad field."""

    slots: int = 32  # requests that decode at once
    prompt_tokens: int = 1024  # longest prompt
    response_tokens: int = 256  # largest budget
    chunk: int = 16  # tokens per slot between two looks at the queue
    admit: int = 4  # requests computed at once when several of like length wait
    reuse: int = 16  # shortest beginning that is taken over from another slot
    rule_states: int = 1024  # states of all stop rules held at a time

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"LaneConfig.{field.name}={getattr(self, field.name)} must be at least 1")


@dataclasses.dataclass
class Ticket:
    """A request on its way: where it waits for its answer and what has been drawn so far."""

    request: Request
    future: Future
    rule: StopRule
    submitted: float
    cancelled: bool = False
    version: int = 0
    reused: int = 0
    parts: list[Drawn] = dataclasses.field(default_factory=list)  # NumPy arrays [n], one part per chunk

    @property
    def drawn(self) -> int:
        """Tokens so far."""
        return sum(len(p.token) for p in self.parts)

    def expired(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return self.request.timeout is not None and now - self.submitted >= self.request.timeout

    def answer(self, finish: str) -> None:
        """Hands over what there is. Whoever asked may have given up meanwhile."""
        most = self.request.settings.max_kept
        real, nothing = np.zeros(0, np.float32), np.zeros(0, np.int32)
        empty = Drawn(nothing, real, real, real, *(None, None) if most is None else (np.zeros((0, most), np.int32), real))
        token, *real, kept_ids, kept_log_mass = (None if p[0] is None else np.concatenate(p) for p in zip(empty, *self.parts, strict=True))
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(Completion(token, *real, finish, self.version, self.reused, kept_ids, kept_log_mass))

    def add(self, drawn: Drawn, at: tuple) -> np.ndarray:
        """Takes over what lies at an index of a program's draws; returns the tokens. A program may have more columns of kept ids than this
        request asked for, because others in it did."""
        token, *real, kept_ids, kept_log_mass = (None if x is None else np.asarray(x[at]) for x in drawn)
        most = self.request.settings.max_kept
        self.parts.append(Drawn(token, *real, *(None, None) if most is None else (kept_ids[:, :most], kept_log_mass)))
        return token


def bucket(n: int, least: int = 1, growth: int = 2) -> int:
    """The smallest power of `growth` (itself a power of two) that holds `n`, at least `least`: few shapes, few compilations."""
    digit = growth.bit_length() - 1
    return max(least, 1 << -(-max(0, n - 1).bit_length() // digit) * digit)


class Lane:
    """One model's slots, and what the host knows of them. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self, name: str, config: ModelConfig, params: dict, sizes: LaneConfig, root: Key[Array, ""], mesh: Mesh | None,
        tokenizer: Tokenizer | None,
    ):  # fmt: skip
        self.name, self.config, self.sizes, self.root, self.mesh, self.tokenizer = name, config, sizes, root, mesh, tokenizer
        self.version = -1
        self.pending: dict | None = None
        self.waiting: collections.deque[Ticket] = collections.deque()
        self.slots: Slots = self._placed(init_slots(config, sizes.slots, sizes.prompt_tokens, sizes.response_tokens))
        self.tickets: list[Ticket | None] = [None] * sizes.slots
        self.held: list[np.ndarray] = [np.zeros(0, np.int32)] * sizes.slots  # the prompt whose columns each slot holds
        self.said: list[list[np.ndarray]] = [[] for _ in range(sizes.slots)]  # what each slot drew behind it
        self.used: list[int] = [0] * sizes.slots  # when a slot was last given away
        self.turn = 0
        self.rules: dict[int, int] = {}  # id of a rule -> its first state
        self._rules: list[StopRule] = []
        self._table: Rules | None = None
        self.shapes: set[tuple] = set()
        self.stats = collections.Counter()
        self._few = [] if mesh is not None else [sizes.slots // part for part in COMPACT if sizes.slots // part]
        self.pending = params
        self.swap()

    # ------------------------------------------------------------------------------------------------ parameters and placement
    def _placed(self, slots: Slots) -> Slots:
        if self.mesh is None:
            return slots
        ways = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        by_slot = NamedSharding(self.mesh, P(("data", "fsdp")) if self.sizes.slots % ways == 0 else P())
        everywhere = NamedSharding(self.mesh, P())
        return jax.device_put(slots, jax.tree.map(lambda x: by_slot if x.ndim else everywhere, slots))

    def check_params(self, params: dict) -> None:
        """Raises `ValueError` when parameters, in any layout, are not of this lane's model."""
        with use_rules(self.mesh, SAMPLE) if self.mesh is not None else contextlib.nullcontext():
            try:
                new = jax.eval_shape(serving_layout, params)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"model {self.name!r}: these are no parameters of a decoder ({error!r})") from error
        flat = lambda tree: {path_name(p): (x.shape, x.dtype) for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}  # noqa: E731
        new, old = flat(new), flat(self.params)
        differ = sorted(n for n in new.keys() | old if new.get(n) != old.get(n))
        wrong = [f"{n}: {new.get(n, 'missing')} instead of {old.get(n, 'nothing')}" for n in differ]
        if wrong:
            raise ValueError(f"model {self.name!r}: {len(wrong)} of the new parameters do not fit: {'; '.join(wrong[:4])}")

    def swap(self) -> None:
        """Takes the new parameters and forgets all keys and values of the old ones. Only when no slot is busy."""
        params, self.pending = self.pending, None
        # copied, because an update may donate what it was given
        served = jax.jit(lambda p: jax.tree.map(jnp.copy, serving_layout(p)))
        if self.mesh is not None:
            params = jax.device_put(params, param_shardings(params, self.mesh, SAMPLE))
            with use_rules(self.mesh, SAMPLE):
                self.params = served(params)
        else:
            self.params = served(jax.device_put(params, jax.local_devices()[0]))
        self.held = [np.zeros(0, np.int32)] * self.sizes.slots
        self.said = [[] for _ in range(self.sizes.slots)]
        self.version += 1

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, on all devices together."""
        return cache_bytes(self.config, self.sizes.slots, self.sizes.prompt_tokens, self.sizes.response_tokens)

    # ------------------------------------------------------------------------------------------------ requests
    def check(self, request: Request) -> StopRule:
        """The request's stop rule. Raises `RequestError` on a request that can never be served here."""
        v, sizes = self.config.vocab_size, self.sizes
        prompt = request.prompt
        wrong = None
        if not 1 <= len(prompt) <= sizes.prompt_tokens:
            wrong = f"a prompt of {len(prompt)} tokens; this engine takes 1 to {sizes.prompt_tokens} (LaneConfig.prompt_tokens)"
        elif min(prompt) < 0 or max(prompt) >= v:
            wrong = f"prompt ids from {min(prompt)} to {max(prompt)}; the vocabulary of model {self.name!r} is 0 to {v - 1}"
        elif not 1 <= request.max_tokens <= sizes.response_tokens:
            wrong = f"max_tokens={request.max_tokens}; this engine gives 1 to {sizes.response_tokens} (LaneConfig.response_tokens)"
        elif len(request.seed) > SEEDS or any(not 0 <= n < 2**31 for n in request.seed):
            wrong = f"seed={request.seed}; an identity is at most {SEEDS} numbers from 0 to 2**31 - 1"
        elif request.timeout is not None and request.timeout <= 0:
            wrong = f"timeout={request.timeout}; it must be positive, in seconds"
        if wrong:
            raise RequestError(f"request refused: {wrong}")
        try:
            rule = stop_rule(v, tuple(request.stop_ids), tuple(request.stop_strings), self.tokenizer)
        except ValueError as error:
            raise RequestError(f"request refused: {error}") from error
        if len(rule.ends) > sizes.rule_states:
            raise RequestError(
                f"request refused: its stop rule has {len(rule.ends)} states; this engine holds {sizes.rule_states} "
                "(LaneConfig.rule_states)"
            )
        return rule

    def _rule(self, rule: StopRule) -> int | None:
        """First state of the rule in the common table; None when there is no room before all slots are empty."""
        if id(rule) not in self.rules:
            states = sum(len(r.ends) for r in self._rules)
            if states + len(rule.ends) > self.sizes.rule_states:
                if self.busy:
                    return None
                self.rules, self._rules, states = {}, [], 0
            self.rules[id(rule)] = states
            self._rules.append(rule)  # which also keeps its id from being used again
            self._table = None
        return self.rules[id(rule)]

    def _tables(self) -> Rules:
        if self._table is None:
            starts = [self.rules[id(r)] for r in self._rules]
            states = sum(len(r.ends) for r in self._rules)
            room = bucket(states, 4)
            table, ends = np.zeros((room, self.config.vocab_size), np.int32), np.zeros(room, bool)
            for start, rule in zip(starts, self._rules, strict=True):
                table[start : start + len(rule.ends)], ends[start : start + len(rule.ends)] = rule.table + start, rule.ends
            self._table = Rules(jnp.asarray(table), jnp.asarray(ends))
        return self._table

    # ------------------------------------------------------------------------------------------------ admission
    @property
    def busy(self) -> bool:
        """Whether any slot is answering."""
        return any(t is not None for t in self.tickets)

    def _beginning(self, prompt: np.ndarray) -> tuple[int, int, int]:
        """(source, prompt columns, own tokens) of the slot that holds most of a prompt's beginning; all of it but one token at most."""
        best = (0, 0, 0)
        for s in range(self.sizes.slots):
            own = self.said[s]
            length = len(self.held[s])
            if length == 0:
                continue
            have = np.concatenate([self.held[s], *own]) if own else self.held[s]
            have = have[: len(have) - 1] if own else have  # the last token drawn has no keys yet
            n = min(len(have), len(prompt) - 1)
            same = have[:n] == prompt[:n]
            n = n if same.all() else int(np.argmin(same))
            if n > best[1] + best[2]:
                best = (s, min(n, length), n - min(n, length))
        return best if best[1] + best[2] >= self.sizes.reuse else (0, 0, 0)

    def admit(self) -> int:
        """Moves waiting requests into free slots, as many as belong into one program. Returns how many."""
        if self.pending is not None:
            return 0
        free = sorted((s for s, t in enumerate(self.tickets) if t is None), key=lambda s: self.used[s])
        batch: list[tuple[Ticket, np.ndarray, int, tuple[int, int, int], int]] = []
        later: list[Ticket] = []
        shape = None
        while self.waiting and free and len(batch) < self.sizes.admit and len(later) < 4 * self.sizes.admit:
            ticket = self.waiting.popleft()
            prompt = np.asarray(ticket.request.prompt, np.int32)
            start = self._rule(ticket.rule)
            if start is None:
                later.append(ticket)
                break
            source = self._beginning(prompt)
            kept = source[1] + source[2]
            # a sibling that is about to be computed may leave more to take over than any slot does now
            if any(_common(prompt, other) >= max(kept + self.sizes.reuse, 1) for _, other, *_ in batch):
                later.append(ticket)
                continue
            this = (kept > 0, bucket(len(prompt) - kept, 8))
            if shape not in (None, this):
                later.append(ticket)
                continue
            shape = this
            slot = source[0] if source[0] in free and kept else free[0]
            free.remove(slot)
            batch.append((ticket, prompt, slot, source, start))
        self.waiting.extendleft(reversed(later))
        if batch:
            self._run_admission(batch, *shape)
        return len(batch)

    def _run_admission(self, batch, reuses: bool, length: int) -> None:
        n = 1 if len(batch) == 1 else bucket(len(batch), self.sizes.admit)
        i32 = lambda *shape: np.zeros(shape, np.int32)  # noqa: E731
        tokens, seeds = i32(n, length), i32(n, SEEDS)
        new, slot, source, keep_prompt, keep_own, count, budget, state = (i32(n) for _ in range(8))
        new[:], budget[:], slot[:] = 1, 1, self.sizes.slots  # rows of padding lie outside
        settings = RowSettings(np.ones(n, np.float32), i32(n), np.ones(n, np.float32), np.zeros(n, np.float32), i32(n))
        for i, (ticket, prompt, at, (src, in_prompt, own), start) in enumerate(batch):
            request = ticket.request
            fresh = prompt[in_prompt + own :]
            tokens[i, : len(fresh)], new[i] = fresh, len(fresh)
            slot[i], source[i], keep_prompt[i], keep_own[i] = at, src, in_prompt, own
            self.tickets[at] = ticket  # before the device program runs: should it fail, the caller must be found
            seeds[i, : len(request.seed)], count[i] = request.seed, len(request.seed)
            budget[i], state[i] = request.max_tokens, start
            s = request.settings
            for field, value in zip(settings, (s.temperature, s.top_k or 0, s.top_p, s.min_p, s.max_kept or 0), strict=True):
                field[i] = value
        rows = Admission(tokens, new, slot, source, keep_prompt, keep_own, seeds, count, budget, state, settings)
        rules = self._tables()
        truncates, width = _truncation([t.request.settings for t, *_ in batch])
        with self._program("admit", n, length, not reuses, truncates, width, len(rules.ends)):
            self.slots, drawn, alive = admit(
                self.config, self.params, self.slots, rows, rules, self.root, fresh=not reuses, truncates=truncates, width=width
            )
            self.slots = self._placed(self.slots)
            drawn, alive = jax.device_get((drawn, alive))
        self.turn += 1
        for i, (ticket, prompt, at, (_, in_prompt, own), _start) in enumerate(batch):
            ticket.version, ticket.reused = self.version, in_prompt + own
            self.held[at], self.said[at], self.used[at] = prompt, [ticket.add(drawn, (slice(i, i + 1),))], self.turn
            self.stats["prompt_tokens"] += len(prompt)
            self.stats["reused_tokens"] += in_prompt + own
            self.stats["sampled_tokens"] += 1
            self.stats["requests"] += 1
            if not alive[i]:
                self._finish(at)

    # ------------------------------------------------------------------------------------------------ decoding
    def step(self, now: float) -> None:
        """One chunk in all busy slots; answers those that ended, were cancelled or ran out of time."""
        stop = np.zeros(self.sizes.slots, bool)
        for s, ticket in enumerate(self.tickets):
            if ticket is not None and (ticket.cancelled or ticket.future.cancelled() or ticket.expired(now)):
                ticket.answer("timeout" if ticket.expired(now) and not ticket.cancelled else "cancelled")
                self.tickets[s], stop[s] = None, True
        living = [s for s, t in enumerate(self.tickets) if t is not None]
        if not living and not stop.any():
            return
        longest = max((len(self.held[s]) for s in living), default=1)
        window = min(bucket(longest, 64), self.sizes.prompt_tokens)
        truncates, width = _truncation([self.tickets[s].request.settings for s in living])
        rules = self._tables()
        rows, columns = None, {s: s for s in living}
        computed = min((n for n in self._few if n >= len(living)), default=self.sizes.slots)
        if computed < self.sizes.slots:
            rows = np.asarray([*living, *(s for s in range(self.sizes.slots) if self.tickets[s] is None)][:computed], np.int32)
            columns = {int(s): i for i, s in enumerate(rows)}
        with self._program("decode", self.sizes.chunk, window, computed, truncates, width, len(rules.ends)):
            self.slots, chunk = decode(
                self.config, self.params, self.slots, rules, stop, rows, chunk=self.sizes.chunk, window=window, truncates=truncates,
                width=width,
            )  # fmt: skip
            self.slots = self._placed(self.slots)
            (drawn, where), alive = jax.device_get((chunk, self.slots.alive))
        steps = int(where.any(axis=1).sum())
        self.stats["steps"] += steps
        self.stats["slot_steps"] += steps * computed
        for s in living:
            real = where[:, columns[s]]
            self.said[s].append(self.tickets[s].add(drawn, (real, columns[s])))
            self.stats["sampled_tokens"] += int(real.sum())
            if not alive[s]:
                self._finish(s)

    def _finish(self, slot: int) -> None:
        ticket = self.tickets[slot]
        self.tickets[slot] = None
        tokens = np.concatenate(self.said[slot])
        self.said[slot] = [tokens]
        state = 0
        for t in tokens:
            state = ticket.rule.table[state, t]
        ticket.answer("stop" if ticket.rule.ends[state] else "length")

    # ------------------------------------------------------------------------------------------------ programs
    def _program(self, *shape):
        return _Timed(self, shape)


class _Timed:
    """Counts the seconds of a program, and logs the first run of each shape, which compiles it."""

    def __init__(self, lane: Lane, shape: tuple):
        self.lane, self.shape = lane, shape

    def __enter__(self):
        self.started = time.perf_counter()

    def __exit__(self, kind, error, trace):
        took = time.perf_counter() - self.started
        if self.shape not in self.lane.shapes and error is None:
            self.lane.shapes.add(self.shape)
            self.lane.stats["compilations"] += 1
            self.lane.stats["compile_s"] += took
            log.info("engine: model %s compiled %s in %.1f s (%d shapes)", self.lane.name, self.shape, took, len(self.lane.shapes))
        else:
            self.lane.stats[f"{self.shape[0]}_s"] += took


def _truncation(settings: list[Settings]) -> tuple[bool, int]:
    """Whether any row of a program leaves tokens out, and how many columns of kept ids it needs: a power of two (few programs)."""
    most = max((s.max_kept or 0 for s in settings), default=0)
    return any(s.truncates for s in settings), bucket(most, 16) if most else 0


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning, at most all of `a` but one."""
    n = min(len(a) - 1, len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))
