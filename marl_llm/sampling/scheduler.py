"""The host part of one model of the engine, or of several on one base: who waits, who holds which pages, what decodes next.

With `EngineConfig.batch_invariant` a request gets the same bytes alone, in company, in any order and pool. Programs have one shape: all
`max_num_seqs` rows decode, prompts enter a page at a time. A row reads its own pages, and takes over whole pages of prompts alone. It
enters when there are pages for its longest answer: none is paused. Rows with and without top-k or top-p are never decoded together.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from marl_llm.models import ModelConfig
from marl_llm.sampling.drafting import Draft, Drafter
from marl_llm.sampling.model_runner import Admission, Decoded, Row, Rules, admit, decode, decoded_layout, entered_layout, verify
from marl_llm.sampling.requests import Request, RequestError
from marl_llm.sampling.rule_table import RuleTable
from marl_llm.sampling.sequences import (  # fmt: skip
    EngineConfig,
    SequenceState,
    bucket,
    common_length,
    drawn_otherwise,
    last_tokens,
    never_served,
    new_tokens,
    next_piece,
    page_lists,
    page_table,
    sampling_metadata,
    together,
    truncation,
)
from marl_llm.sampling.stops import StopRule, stop_rule
from marl_llm.sampling.store import PageStore
from marl_llm.sampling.timed import Timed
from marl_llm.sampling.token_sampling import SampledToken
from marl_llm.sampling.transfer import Layout, layout_of, packed, unpacked
from marl_llm.sampling.weights import Weights, served_stacked
from marl_llm.text import Tokenizer

PROGRAM_TOKENS = 1024  # of prompts in one program, about
SMALL = {"cpu": 1e9}  # FLOPs of such a program up to which a model is small, 1e12 on an accelerator: 10 ms
COMPACT = (2, 4, 8)  # with at most this part of its slots running on each device, only that part is computed; and single requests alone
PIECE = {"cpu": 256}  # tokens of a piece, 512 elsewhere: on a CPU about what a chunk of 32 rows takes


class Scheduler:
    """The requests of one model, or of several on one base (`weights`). Not thread-safe: the engine's thread owns it.

    Attributes:
      waiting: who has not entered, or was paused, in the order of their numbers.
      prefilling: who holds pages and whose prompt is not computed to its end. running: who decodes.
    """

    def __init__(
        self, models: Mapping[str, dict], config: ModelConfig, sizes: EngineConfig, root: Key[Array, ""], mesh: Mesh | None,
        tokenizer: Tokenizer | None, store: PageStore | None = None,
    ):  # fmt: skip
        self.names, self.config, self.sizes, self.root, self.mesh, self.tokenizer = tuple(models), config, sizes, root, mesh, tokenizer
        self.name = "+".join(models)
        self.waiting: collections.deque[SequenceState] = collections.deque()
        self.prefilling: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self.on_idle: Callable[[], None] = lambda: None  # called while a program runs, and before one is compiled
        self.starved: int | None = None  # number of the oldest request that lacks pages, if one does
        stacked = served_stacked(config, next(iter(models.values())), mesh)
        self.store = store or PageStore(self.name, config, sizes, mesh, stacked=stacked)
        self.first_model = self.store.join(self, len(models))
        self.parts, self.page, self.pools = self.store.parts, self.store.page, self.store.pools
        self.room = bucket(self.store.longest)  # pages of a request
        self.drafter = Drafter(sizes.draft_tokens) if sizes.draft_tokens else None
        self.shapes: set[tuple] = set()
        self.stats = collections.Counter()
        weights = sum(x.size for x in jax.tree.leaves(next(iter(models.values()))))
        small = SMALL.get(self.store.platform, 1e12) > 2 * PROGRAM_TOKENS * weights
        self.few = small and not sizes.batch_invariant  # few program shapes: an empty place costs less than another program
        self.rules = RuleTable(config.vocab_size, sizes.rule_states, 16 if self.few else 4)
        self.between = sizes.piece or (PIECE.get(self.store.platform, 512) if not small else 512)  # tokens of prompts between two chunks
        self.piece = self.page if sizes.batch_invariant else self.between  # tokens of a prompt in one program, at most
        # tokens before a piece that cost about what the weights do, in multiplications
        self.far = math.inf if sizes.batch_invariant or small else weights / (2 * config.layers * config.query_heads * config.head_dim)
        slots = sizes.max_num_seqs // self.parts
        fewer = () if sizes.batch_invariant or small else (1, *(slots // part for part in COMPACT if slots // part))
        self._places = sorted({*fewer, slots})  # rows of a part that a program decodes
        self._computed = 0  # tokens of a prompt since the last chunk
        with self._program("swap"):
            self.weights = Weights(config, models, mesh)

    # ------------------------------------------------------------------------------------------------ parameters
    @property
    def can_swap(self) -> bool:
        """Whether new parameters may take effect: whenever there are any, or once nobody is under way (`EngineConfig.weight_update`)."""
        return bool(self.weights.pending) and (self.sizes.weight_update == "in_flight" or not self.busy)

    def swap(self) -> None:
        """Takes the new parameters and forgets the keys and values of the old ones.

        Running requests continue with the new ones on keys and values of the old ones, which no other request may reuse. A prompt that
        is not complete begins again, so that others can still share it.
        """
        changed = tuple(self.weights.pending)
        for sequence in [t for t in self.prefilling if t.request.model in changed]:
            self._wait(sequence)
            self.stats["begun_again"] += 1
        with self._program("swap"):
            self.weights.swap()
        for name in changed:
            for pool in self.pools:
                pool.clear(self.first_model + self.names.index(name))
        for sequence in self.running:
            sequence.version = self.weights.versions[sequence.request.model]

    def release(self) -> None:
        """Frees its device memory; it serves no further requests."""
        self.store.pages, self.weights.params = [], None
        self.rules.clear()

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, on all devices together; those of a shared pool are of all its models."""
        return self.store.bytes

    # ------------------------------------------------------------------------------------------------ requests
    def check(self, request: Request) -> StopRule:
        """The request's stop rule. Raises `RequestError` on a request that can never be served here."""
        v, sizes = self.config.vocab_size, self.sizes
        if wrong := never_served(request, request.model, v, sizes, self.page, self.pools[0].pages):
            raise RequestError(f"request refused: {wrong}")
        try:
            rule = stop_rule(v, tuple(request.stop_ids), tuple(request.stop_strings), self.tokenizer)
        except ValueError as error:
            raise RequestError(f"request refused: {error}") from error
        if len(rule.ends) > sizes.rule_states:
            held = f"this engine holds {sizes.rule_states} (EngineConfig.rule_states)"
            raise RequestError(f"request refused: its stop rule has {len(rule.ends)} states; {held}")
        return rule

    @property
    def busy(self) -> bool:
        """Whether anybody has begun and is not answered."""
        return bool(self.prefilling or self.running) or any(t.begun for t in self.waiting)

    @property
    def sequences(self) -> list[SequenceState]:
        """All that are not answered."""
        return [*self.waiting, *self.prefilling, *self.running]

    # ------------------------------------------------------------------------------------------------ pages
    def _enter(self, sequence: SequenceState, reserve: int) -> bool:
        """Gives a request a place and the pages of what it has so far, shared where others hold the same. False if there is no room."""
        taken = collections.Counter(t.part for t in (*self.prefilling, *self.running))
        ids = np.asarray(sequence.request.prompt, np.int32) if sequence.ids is None else sequence.ids[: sequence.size]
        choices = []
        for part, pool in enumerate(self.pools):
            if taken[part] < self.sizes.max_num_seqs // self.parts:
                chain, last, common = pool.find(ids, self._model(sequence), math.inf if self.sizes.batch_invariant else self.sizes.reuse)
                common -= len(chain) * self.page + common == len(ids) and common > 0  # the last token is computed for what follows it
                choices.append((len(chain) * self.page + common, -taken[part], -part, chain, last, common))
        if not choices:
            return False
        kept, _, part, chain, last, common = max(choices, key=lambda x: x[:3])
        if self.sizes.batch_invariant:  # whole pages alone, and of a prompt that is all there the last is computed again, as alone
            chain = chain[: (len(ids) - 1) // self.page]
            kept = len(chain) * self.page
        if kept < self.sizes.reuse:
            kept, chain, last, common = 0, [], None, 0
        pool, held = self.pools[-part], [*chain, *([last] if common else [])]
        pool.own(held)  # before anything is given away
        need = -(-(sequence.longest if self.sizes.batch_invariant else len(ids)) // self.page) - len(chain)
        if pool.available < need + reserve and common:  # the page to copy from may be the one that is needed
            pool.release([held.pop()])
            kept, last, common = kept - common, None, 0
        if pool.available < need + reserve:
            pool.release(held)
            self.starved = sequence.number
            return False
        fresh = [pool.take() for _ in range(need)]
        if not sequence.begun:
            sequence.ids = np.zeros(sequence.longest + 1, np.int32)
            sequence.ids[: len(ids)], sequence.size, sequence.reused = ids, len(ids), min(kept, len(ids) - 1)
            self.stats["prompt_tokens"] += len(ids)
            self.stats["reused_tokens"] += sequence.reused
            self.stats["requests"] += 1
        sequence.part, sequence.nodes, sequence.shared = -part, [*chain, *fresh], len(chain)
        sequence.version = self.weights.versions[sequence.request.model]
        sequence.cached = min(kept, len(ids) - 1)
        sequence.source = last if common else None
        return True

    def _model(self, sequence: SequenceState) -> int:
        return self.first_model + self.names.index(sequence.request.model)

    def _leave(self, sequence: SequenceState) -> None:
        """Gives up a request's place and pages; what they hold stays until the place is needed."""
        pool = self.pools[sequence.part]
        self._copied(sequence)
        pool.release(sequence.nodes)
        sequence.nodes, sequence.cached = [], 0
        for where in (self.prefilling, self.running):
            if sequence in where:
                where.remove(sequence)

    def _copied(self, sequence: SequenceState) -> None:
        if sequence.source is not None:
            self.pools[sequence.part].release([sequence.source])
            sequence.source = None

    def _grown(self, sequence: SequenceState, tokens: int) -> None:
        """Notes that the keys and values of `tokens` further tokens are in pages."""
        pool, begin = self.pools[sequence.part], sequence.cached // self.page
        sequence.cached += tokens
        if self.sizes.batch_invariant and sequence.drawn:
            return  # what was decoded is for nobody else
        for i in range(begin, -(-sequence.cached // self.page)):
            parent = sequence.nodes[i - 1] if i else pool.root(self._model(sequence))
            held = sequence.ids[i * self.page : min((i + 1) * self.page, sequence.cached)]
            sequence.nodes[i] = pool.grown(sequence.nodes[i], parent, held)

    def _allocate_pages(self) -> None:
        """Pages for the next chunk, the oldest first. Where they do not suffice the youngest are paused: their pages are given away as they
        are needed, and what is lost is computed again."""
        most = max(self.sizes.decode_steps, self.sizes.draft_tokens + 1)
        for sequence in sorted(self.running, key=lambda t: t.number):
            pool = self.pools[sequence.part]
            while sequence.nodes and (
                need := -(-min(sequence.cached + most, sequence.longest) // self.page) - len(sequence.nodes)) > 0:
                if pool.available >= need:
                    sequence.nodes += [pool.take() for _ in range(need)]
                else:
                    scheduler, youngest = self.store.youngest(sequence.part)
                    scheduler._pause(youngest)

    def _pause(self, sequence: SequenceState) -> None:
        self._wait(sequence)
        self.stats["paused"] += 1

    def _wait(self, sequence: SequenceState) -> None:
        self._leave(sequence)
        self.waiting = collections.deque(sorted((sequence, *self.waiting), key=lambda t: t.number))

    # ------------------------------------------------------------------------------------------------ admission
    def admit(self) -> tuple[int, bool]:
        """Admits waiting requests while there is room, and runs one program on the prompts of those that entered.

        Returns how many were admitted for the first time, and whether to go on before the next chunk: not once a piece of a long prompt was
        computed while others decode, so that nobody waits for a whole one. With new parameters pending only paused requests go on.
        """
        self.starved = None
        apart = [t for t in self.waiting if not t.begun] if self.weights.pending else []
        if self.weights.pending:
            self.waiting = collections.deque(t for t in self.waiting if t.begun)
        entered, later = 0, []
        most = together(self.sizes, self.sizes.max_num_seqs // self.parts, 8, PROGRAM_TOKENS, self.few)[1]
        while self.waiting and len(self.prefilling) < most * self.parts and len(later) < 4 * most:
            sequence = self.waiting.popleft()
            other_program = self.sizes.batch_invariant and drawn_otherwise(sequence, (*self.prefilling, *self.running))
            full = self.rules.add(sequence.rule, self.busy) is None or other_program
            if full or self._waits_for_shared_prefix(sequence):
                later.append(sequence)
                if full:
                    break
                continue
            new = not sequence.begun
            if self.store.waits(sequence) or not self._enter(sequence, 0 if self.sizes.batch_invariant else self.store.reserve):
                later.append(sequence)
                break
            entered += new
            self.prefilling.append(sequence)
        self.waiting.extendleft(reversed(later))
        self.waiting.extend(apart)
        if not self.prefilling:
            return entered, False
        finished = self._run_admission()
        self._computed += self.piece
        return entered, finished or not self.running or self._computed < self.between

    def _waits_for_shared_prefix(self, sequence: SequenceState) -> bool:
        """Whether a prompt that is being computed will share a longer prefix with this one than it does now."""
        if sequence.size <= self.sizes.reuse and len(sequence.request.prompt) <= self.sizes.reuse:
            return False  # all but the last token may be taken over
        ids = np.asarray(sequence.request.prompt, np.int32) if sequence.ids is None else sequence.ids[: sequence.size]
        for other in self.prefilling:
            if other.request.model != sequence.request.model or not np.array_equal(ids[: self.sizes.reuse], other.ids[: self.sizes.reuse]):
                continue
            common = common_length(ids, other.ids[: other.size])
            common -= common % self.page if self.sizes.batch_invariant else 0
            if common > max(other.cached, self.sizes.reuse - 1):
                return True
        return False

    def _same_shape_batch(self) -> tuple[list[SequenceState], bool, int]:
        """(requests whose next pieces fill the next program, whether it reads pages, its length in tokens)."""
        first = min(self.prefilling, key=lambda t: t.number)
        least = 16 if self.few else self.piece if self.sizes.batch_invariant else 8

        def shape(t):
            length = min(bucket(next_piece(t, self.piece, self.far), least), max(self.piece, least))
            return self.sizes.batch_invariant or self.few or t.cached > 0, length

        same = sorted((t for t in self.prefilling if shape(t) == shape(first)), key=lambda t: t.number)
        if self.few and first.size - first.cached <= self.piece:  # all whose prompts end here, the longest first: few programs
            same = sorted((t for t in self.prefilling if t.size - t.cached <= self.piece), key=lambda t: (-shape(t)[1], t.number))
        return same, *shape(same[0])

    def _run_admission(self) -> bool:
        """Computes the next pieces of the oldest prompts in one program. Returns whether all these prompts are complete."""
        sizes = self.sizes
        same, reuses, length = self._same_shape_batch()
        few, many = together(sizes, sizes.max_num_seqs // self.parts, length, max(2 * self.between, PROGRAM_TOKENS), self.few)
        parts = [[t for t in same if t.part == part][:many] for part in range(self.parts)]
        most = max(map(len, parts))
        b = 1 if most == 1 and not sizes.batch_invariant and not self.few else few if most <= few else many
        rows = [(part * b + i, t) for part, members in enumerate(parts) for i, t in enumerate(members)]
        n = self.parts * b
        counts = [next_piece(t, self.piece, self.far) for _, t in rows]
        pieces = [(i, t, t.ids[t.cached : t.cached + count]) for (i, t), count in zip(rows, counts, strict=True)]
        rules, (truncates, kept_width) = self.rules.arrays(), truncation([t.request.settings for _, t in rows])
        a = Admission(*new_tokens(pieces, (n, length), self.store), sampling_metadata(n, rows, self.rules.starts, self.names))
        with self._program("admit", n, length, not reuses, truncates, kept_width, rules.table.shape, len(rules.classes)):
            done = self._run(admit, a, rules, entered_layout(n, kept_width), fresh=not reuses, truncates=truncates, width=kept_width)
        state, alive = done.state.tolist(), done.alive.tolist()
        self.stats["admit_programs"] += 1
        self.stats["computed_tokens"] += sum(counts)
        finished = True
        for (i, sequence), count in zip(rows, counts, strict=True):
            self._copied(sequence)
            self._grown(sequence, count)
            if sequence.cached < sequence.size:
                finished = False
                continue
            self.prefilling.remove(sequence)
            self.running.append(sequence)
            self._took(sequence, done.drawn, (slice(i, i + 1),), 0, state[i], alive[i])
        return finished

    def _took(self, sequence: SequenceState, drawn: SampledToken, at: tuple, cached: int, state: int, alive: bool) -> None:
        """Takes over what a program drew for a request and that it computed `cached` tokens, and answers the request if it has ended."""
        self.stats["sampled_tokens"] += len(sequence.add(drawn, at))
        self._grown(sequence, cached)
        sequence.state = int(state) - self.rules.starts[id(sequence.rule)]
        if not alive:
            self._leave(sequence)
            if self.drafter is not None:
                self.drafter.leave(sequence)
            sequence.answer("stop" if sequence.rule.ends[sequence.state] else "length")

    # ------------------------------------------------------------------------------------------------ decoding
    def step(self, now: float) -> None:
        """One chunk in all running rows; answers those that ended, were cancelled or ran out of time."""
        for sequence in [t for t in (*self.prefilling, *self.running) if t.cancelled or t.expired(now)]:
            self._leave(sequence)
            sequence.answer("timeout" if sequence.expired(now) and not sequence.cancelled else "cancelled")
        self._allocate_pages()
        self._computed = 0
        if not self.running:
            return
        fullest = max(collections.Counter(t.part for t in self.running).values())
        s = next(n for n in self._places if n >= fullest)
        places, rows = [part * s for part in range(self.parts)], []
        for sequence in self.running:
            rows.append((places[sequence.part], sequence))
            places[sequence.part] += 1
        self._record_peak()
        drafts = self.drafter.drafts(self.running) if self.drafter is not None else {}
        columns = self.drafter.choose(len(rows), s, drafts) if drafts else 1
        began, compiled = time.perf_counter(), self.stats["compilations"]
        steps = self._decode(rows, s, drafts) if columns == 1 else self._verify(rows, s, columns, drafts)
        if self.drafter is not None and self.stats["compilations"] == compiled:
            self.drafter.measure(s, columns, (time.perf_counter() - began) / steps)

    def _decode(self, rows: list[tuple[int, SequenceState]], s: int, drafts: Mapping[SequenceState, Draft]) -> int:
        """A chunk of `rows`, of which a part has s. The drafts are not verified, only compared with what is drawn. Returns its steps."""
        n, chunk = self.parts * s, self.sizes.decode_steps
        own_pages, of = self.sizes.batch_invariant, (rows, s, self.parts)
        lists = page_table(*of, self.room) if own_pages else page_lists(*of, self.page, self.config.windowed)
        rules, (truncates, width) = self.rules.arrays(), truncation([t.request.settings for _, t in rows])
        batch = Row(*last_tokens(rows, n, chunk, self.store), sampling_metadata(n, rows, self.rules.starts, self.names))
        entries, shape = [x.page.shape[1] for x in lists if not own_pages], (*rules.table.shape, len(rules.classes))
        with self._program("decode", chunk, n, *entries, truncates, width, shape):
            done = self._run(decode, (batch, lists), rules, decoded_layout(chunk, n, width), chunk=chunk, truncates=truncates, width=width)
        return self._decoded(rows, done, drafts)

    def _verify(self, rows: list[tuple[int, SequenceState]], s: int, columns: int, drafts: Mapping[SequenceState, Draft]) -> int:
        """A step of `rows` with up to `columns` - 1 tokens of each one's draft. Returns 1: it is one step."""
        n, nothing = self.parts * s, Draft(np.zeros(0, np.int32), 0)
        used = {t: dataclasses.replace(draft, tokens=draft.tokens[: columns - 1]) for t, draft in drafts.items()}
        pieces = [(i, t, np.concatenate([t.last_token, used.get(t, nothing).tokens])) for i, t in rows]
        rules, (truncates, width) = self.rules.arrays(), truncation([t.request.settings for _, t in rows])
        a = Admission(*new_tokens(pieces, (n, columns), self.store), sampling_metadata(n, rows, self.rules.starts, self.names))
        with self._program("verify", columns, n, truncates, width, rules.table.shape, len(rules.classes)):
            done = self._run(verify, a, rules, decoded_layout(columns, n, width), truncates=truncates, width=width)
        extra = int(done.chunk.where[1:, [i for i, _ in rows]].sum())
        drafted = sum(len(draft.tokens) for draft in used.values())
        self.stats.update(draft_steps=1, drafted_tokens=drafted, accepted_tokens=extra, saved_steps=extra / len(rows))
        return self._decoded(rows, done, used, columns)

    def _decoded(
        self, rows: list[tuple[int, SequenceState]], done: Decoded, drafts: Mapping[SequenceState, Draft], columns: int = 1
    ) -> int:
        """Takes over what a program drew in `rows`. Returns its steps, each of so many `columns`."""
        drawn, where = done.chunk
        state, alive = done.state.tolist(), done.alive.tolist()
        steps = 1 if columns > 1 else int(where.any(axis=1).sum())
        self.stats["steps"] += steps
        self.stats["slot_steps"] += steps * len(state)
        for i, sequence in rows:
            count = int(where[:, i].sum())
            self.stats["computed_tokens"] += count
            if sequence in drafts:
                self.drafter.observe(sequence, drafts[sequence], drawn.token[:count, i])
            self._took(sequence, drawn, (slice(0, count), i), count, state[i], alive[i])  # cached: all but the last one drawn
        return steps

    def _run(self, program: Callable, inputs: Any, rules: Rules, gives: Layout, **how: Any) -> Any:
        """Runs a program: one array goes to the devices, and one comes back. The pages are donated."""
        before, layout = self.store.pages, layout_of(inputs)
        pages, out = program(
            self.config, self.weights.params, before, packed(inputs), rules, self.root, mesh=self.mesh, layout=layout, **how
        )
        self.store.place(pages)
        self.on_idle()
        done = unpacked(np.array(out), gives)  # a copy, which holds nothing on a device
        del before  # not earlier: to let go of pages that a program overwrites waits for its end
        return done

    def _record_peak(self) -> None:
        """Notes the peak: pages that are held, and the tokens that are needed of them (shared ones once)."""
        if sum(pool.owned for pool in self.pools) > self.stats["most_pages"]:
            self.stats["most_pages"], self.stats["tokens_then"] = self.store.held()

    def _program(self, *shape):
        if shape not in self.shapes:
            self.on_idle()
        return Timed(self.name, self.stats, self.shapes, shape)
