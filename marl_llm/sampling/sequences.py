"""What waits and runs in the engine: a request on its way, the sizes of a model's scheduler, and rows of requests as arrays."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from marl_llm.models import PageList, PageTable
from marl_llm.models.pages import GROUP, block_pages, entry_pages, touched
from marl_llm.sampling.model_runner import SEEDS, SamplingMetadata
from marl_llm.sampling.pool import Node
from marl_llm.sampling.requests import Completion, Request, SamplingParams
from marl_llm.sampling.stops import StopRule
from marl_llm.sampling.token_sampling import RowSamplingParams, SampledToken

SHARED = 3  # rows from which on a page is read for all of them at once
MANY = 256  # new tokens of many requests in one program
LEAST_PIECE = 64  # tokens; fewer cost as much
WEIGHT_UPDATES = ("blocking", "in_flight")
BLOCK_POOLS = ("own", "shared")
ENTRIES = 4096  # (page, row) pairs that a list has room for at least: only those that are there are gone through


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of one model. All memory for keys and values is taken when the engine starts; see `cache_bytes`.

    Raises `ValueError` naming a bad field.
    """

    max_num_seqs: int = 32  # requests that decode at once
    prompt_tokens: int = 1024  # longest prompt
    response_tokens: int = 256  # largest budget
    decode_steps: int = 16  # tokens per row between two looks at the queue
    admit: int = 4  # requests computed at once when several of like length wait
    reuse: int = 16  # shortest beginning that is taken over from another request
    rule_states: int = 1024  # states of all stop rules held at a time
    page: int = 0  # tokens of a page; 0: as the platform likes it, see `PAGE`
    piece: int = 0  # prompt tokens that are computed between two chunks; longer prompts enter in pieces. 0: see `PIECE`
    cache_bytes: int = 0  # of keys and values; 0: so many that all slots can hold their longest request
    draft_tokens: int = 0  # tokens of a draft that one step verifies, at most; 0: no drafts. See `marl_llm.sampling.drafting`
    batch_invariant: bool = False  # an answer's bytes depend on nobody else; see `marl_llm.sampling.scheduler`
    block_pool: str = "own"  # "shared": models of one shape with these sizes draw pages from one pool, as large as theirs together
    weight_update: str = (
        "blocking"  # when new parameters take effect: "blocking", once nobody is under way, or "in_flight", between two chunks of answers
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("page", "piece", "cache_bytes", "draft_tokens", "batch_invariant") else 1
            if field.name not in ("block_pool", "weight_update") and getattr(self, field.name) < least:
                raise ValueError(f"EngineConfig.{field.name}={getattr(self, field.name)} must be at least {least}")
        if self.block_pool not in BLOCK_POOLS:
            raise ValueError(f"EngineConfig.block_pool={self.block_pool!r} is unknown; the ways are {', '.join(BLOCK_POOLS)}")
        if self.weight_update not in WEIGHT_UPDATES:
            raise ValueError(f"EngineConfig.weight_update={self.weight_update!r} is unknown; the ways are {', '.join(WEIGHT_UPDATES)}")
        if self.batch_invariant and self.weight_update == "in_flight":
            raise ValueError(
                "EngineConfig.weight_update='in_flight' with batch_invariant=True: when parameters arrive would change an answer's bytes; "
                "use 'blocking'"
            )
        if self.batch_invariant and self.draft_tokens:
            raise ValueError(
                f"EngineConfig.draft_tokens={self.draft_tokens} with batch_invariant=True: a step that verifies drafts rounds otherwise "
                "than one without, and which steps do depends on others; use draft_tokens=0"
            )
        if self.batch_invariant and self.max_num_seqs & (self.max_num_seqs - 1):
            raise ValueError(
                f"EngineConfig.max_num_seqs={self.max_num_seqs} must be a power of two with batch_invariant=True, so that a row's place "
                f"changes no bit"
            )


@dataclasses.dataclass(eq=False)
class SequenceState:
    """A request on its way: where it waits for its answer, what has been drawn so far, and which pages it holds."""

    request: Request
    future: Future
    rule: StopRule
    submitted: float
    cancelled: bool = False
    version: int = 0  # of the parameters that it is served with now
    reused: int = 0
    parts: list[SampledToken] = dataclasses.field(default_factory=list)  # NumPy arrays [n], one part per chunk
    versions: list[int] = dataclasses.field(default_factory=list)  # of the parameters that drew each token
    number: int = dataclasses.field(default_factory=itertools.count().__next__)  # older requests have smaller ones
    ids: np.ndarray | None = None  # prompt and answer, with room for all of it; None until it first enters
    size: int = 0  # how many of them there are
    drawn: int = 0  # ... of which answer
    cached: int = 0  # ... whose keys and values are in pages
    state: int = 0  # of its own stop rule
    part: int = 0
    nodes: list[Node] = dataclasses.field(default_factory=list)  # its pages, in order
    shared: int = 0  # how many of them were full when it entered
    source: Node | None = None  # the page whose beginning is copied when it enters
    on_tokens: Callable[[np.ndarray | None], None] | None = None  # gets the ids of each chunk, see `Engine.submit`

    @property
    def begun(self) -> bool:
        """Whether it has entered before: then it ends with the parameters that it began with, unless these are exchanged at once."""
        return self.ids is not None

    @property
    def last_token(self) -> np.ndarray:
        """The token whose keys and values are computed next, `[1]`."""
        return self.ids[self.size - 1 : self.size]

    @property
    def longest(self) -> int:
        """Tokens of its prompt and its longest answer whose keys and values are ever needed: all but the last."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    def expired(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return self.request.timeout is not None and now - self.submitted >= self.request.timeout

    def answer(self, finish: str) -> None:
        """Resolves the future with what was drawn. The caller may have cancelled it meanwhile."""
        most = self.request.settings.max_kept
        real, nothing = np.zeros(0, np.float32), np.zeros(0, np.int32)
        empty = SampledToken(nothing, real, real, real, *(None, None) if most is None else (np.zeros((0, most), np.int32), real))
        token, *real, kept_ids, kept_log_mass = (None if p[0] is None else np.concatenate(p) for p in zip(empty, *self.parts, strict=True))
        if self.future.set_running_or_notify_cancel():
            first, versions = (self.versions or [self.version])[0], np.asarray(self.versions, np.int32)
            self.future.set_result(Completion(token, *real, finish, first, self.reused, kept_ids, kept_log_mass, versions))

    def add(self, drawn: SampledToken, at: tuple) -> np.ndarray:
        """Takes over what lies at an index of a program's draws; returns the tokens. A program may have more columns of kept ids than this
        request asked for, because others in it did."""
        token, *real, kept_ids, kept_log_mass = (None if x is None else np.asarray(x[at]) for x in drawn)
        most = self.request.settings.max_kept
        self.parts.append(SampledToken(token, *real, *(None, None) if most is None else (kept_ids[:, :most], kept_log_mass)))
        self.versions += [self.version] * len(token)
        self.ids[self.size : self.size + len(token)] = token
        self.size, self.drawn = self.size + len(token), self.drawn + len(token)
        if self.on_tokens is not None:
            self.on_tokens(token)
        return token


def bucket(n: int, least: int = 1, growth: int = 2) -> int:
    """The smallest power of `growth` (itself a power of two) that holds `n`, at least `least`: few shapes, few compilations."""
    digit = growth.bit_length() - 1
    return max(least, 1 << -(-max(0, n - 1).bit_length() // digit) * digit)


def eighths(n: int, least: int = 1) -> int:
    """The smallest number that holds `n` among those with eight steps from a power of two to the next, at least `least`: for memory."""
    step = 1 << max(0, (max(n, least) - 1).bit_length() - 4)
    return -(-max(n, least) // step) * step


def truncation(settings: list[SamplingParams]) -> tuple[bool, int]:
    """Whether any row of a program leaves tokens out, and how many columns of kept ids it needs: a power of two (few programs)."""
    most = max((s.max_kept or 0 for s in settings), default=0)
    return any(s.truncates for s in settings), bucket(most, 16) if most else 0


def drawn_otherwise(sequence: SequenceState, others: Iterable[SequenceState]) -> bool:
    """Whether a request's truncation needs another program than the others'."""
    own = truncation([sequence.request.settings])
    return any(truncation([t.request.settings]) != own for t in others)


def never_served(request: Request, name: str, vocab_size: int, sizes: EngineConfig, page: int, pages: int) -> str | None:
    """Why a model's scheduler can never serve a request, or None. `page`: tokens of a page; `pages`: all that a request may have."""
    prompt = request.prompt
    if not 1 <= len(prompt) <= sizes.prompt_tokens:
        return f"a prompt of {len(prompt)} tokens; this engine takes 1 to {sizes.prompt_tokens} (EngineConfig.prompt_tokens)"
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        return f"prompt ids from {min(prompt)} to {max(prompt)}; the vocabulary of model {name!r} is 0 to {vocab_size - 1}"
    if not 1 <= request.max_tokens <= sizes.response_tokens:
        return f"max_tokens={request.max_tokens}; this engine gives 1 to {sizes.response_tokens} (EngineConfig.response_tokens)"
    if len(request.seed) > SEEDS or any(not 0 <= n < 2**31 for n in request.seed):
        return f"seed={request.seed}; an identity is at most {SEEDS} numbers from 0 to 2**31 - 1"
    if request.timeout is not None and request.timeout <= 0:
        return f"timeout={request.timeout}; it must be positive, in seconds"
    if (need := -(-(len(prompt) + request.max_tokens - 1) // page)) > pages:
        return (
            f"a prompt of {len(prompt)} and max_tokens={request.max_tokens} take {need} pages of {page} tokens; the cache has {pages} "
            "(EngineConfig.cache_bytes, rollout.cache_gib)"
        )
    return None


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning, at most all of `a` but one."""
    n = min(len(a) - 1, len(b))
    same = a[:n] == b[:n]
    return n if same.all() else int(np.argmin(same))


def next_piece(sequence: SequenceState, piece: int, far: float) -> int:
    """How many tokens of a request are computed next, at most `piece`: fewer behind a long beginning, so that each piece costs about the
    same. `far`: tokens of a beginning that cost what the weights do."""
    most = piece
    while most > LEAST_PIECE and most * (1 + sequence.cached / far) > 1.5 * piece:
        most //= 2
    return min(sequence.size - sequence.cached, most)


def together(sizes: EngineConfig, max_num_seqs: int, length: int, tokens: int, small: bool) -> tuple[int, int]:
    """How many requests with `length` new tokens are one program: a few, of `tokens` at most, or many, where they are the ends of prompts
    whose beginnings are there, as those of K branches. `max_num_seqs`: on a device; `small`: the model, which has one size of program for
    all."""
    few = max(1, min(max_num_seqs if small else sizes.admit, tokens // length))
    return few, few if small or sizes.batch_invariant else max(few, min(max_num_seqs, MANY // length))


def sampling_metadata(n: int, rows: list[tuple[int, SequenceState]], rules: dict[int, int], names: tuple[str, ...]) -> SamplingMetadata:
    """How n rows draw; those that are not in `rows` are padding. `rules`: the first state of each stop rule, by its id; `names`: the models
    of the scheduler."""
    def i32(*shape):
        return np.zeros(shape, np.int32)

    seeds, seed_count, count, budget, state, model = i32(n, SEEDS), *(i32(n) for _ in range(5))
    settings = RowSamplingParams(np.ones(n, np.float32), i32(n), np.ones(n, np.float32), np.zeros(n, np.float32), i32(n))
    for i, sequence in rows:
        request = sequence.request
        seeds[i, : len(request.seed)], seed_count[i] = request.seed, len(request.seed)
        count[i], budget[i], state[i] = sequence.drawn, request.max_tokens, rules[id(sequence.rule)] + sequence.state
        model[i] = names.index(request.model)
        s = request.settings
        for field, value in zip(settings, (s.temperature, s.top_k or 0, s.top_p, s.min_p, s.max_kept or 0), strict=True):
            field[i] = value
    return SamplingMetadata(seeds, seed_count, count, budget, state, settings, model)


def new_tokens(
    rows: list[tuple[int, SequenceState, np.ndarray]], shape: tuple[int, int], store: Any
) -> tuple[np.ndarray, ...]:
    """The first six fields of an `Admission` of `shape` (n, L): (row, request, its new tokens) of those that are not padding. store: the
    `PageStore` that their pages lie in."""
    (n, length), page, parts = shape, store.page, store.parts
    tokens, beginning, target = (np.zeros((n, size), np.int32) for size in (length, bucket(store.longest), touched(page, length)))
    new, kept, base = np.zeros((3, n), np.int32)
    new[:], target[:] = 1, store.pools[0].pages
    for i, sequence, ids in rows:
        tokens[i, : len(ids)], new[i], kept[i] = ids, len(ids), sequence.cached
        at = sequence.cached // page
        read = [node.page for node in sequence.nodes[: -(-sequence.cached // page)]]
        if sequence.source is not None:
            read[at] = sequence.source.page
        beginning[i, : len(read)], base[i] = read, read[at] if len(read) > at else 0
        for k in range(max(at, sequence.shared), -(-(sequence.cached + len(ids)) // page)):  # shared pages are full already
            target[i, k - at] = sequence.nodes[k].page
    of_parts = (x.reshape(parts, n // parts, *x.shape[1:]) for x in (beginning, kept, base, target))
    return tokens, new, *of_parts


def last_tokens(rows: list[tuple[int, SequenceState]], n: int, chunk: int, store: Any) -> tuple[np.ndarray, ...]:
    """The first four fields of a `Row` of n rows that decode a chunk of so many tokens."""
    token, length, alive = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, bool)
    target = np.full((n, touched(store.page, chunk)), store.pools[0].pages, np.int32)
    for i, sequence in rows:
        token[i], length[i], alive[i] = sequence.last_token[0], sequence.cached, True
        write = [node.page for node in sequence.nodes[sequence.cached // store.page :]][: target.shape[1]]
        target[i, : len(write)] = write
    return token, length, alive, target.reshape(store.parts, n // store.parts, -1)


class _ReadPage(NamedTuple):
    """A page that rows read."""

    page: int
    tokens: int  # that are there; only a row's last page is not full
    first: int  # position of its first token


def page_lists(rows: list[tuple[int, SequenceState]], s: int, parts: int, size: int, windowed: bool = False) -> tuple[PageList, ...]:
    """Who reads which pages: pages of one row, and pages that several rows share, of up to `GROUP` rows; `entry_pages` an entry.

    A part has s rows, and a page `size` tokens. `windowed`: the lists say where each page begins."""
    by_rows: list[dict[tuple[int, ...], list[_ReadPage]]] = [{} for _ in range(parts)]  # by the rows that read them
    readers: list[dict[_ReadPage, list[int]]] = [{} for _ in range(parts)]
    for i, sequence in rows:
        row, last = i % s, sequence.cached // size
        own = by_rows[sequence.part].setdefault((row,), [])
        for number, node in enumerate(sequence.nodes[:last]):
            page = _ReadPage(node.page, size, number * size)
            if node.owners >= SHARED:
                readers[sequence.part].setdefault(page, []).append(row)
            else:
                own.append(page)
    for part, pages in enumerate(readers):
        for page, sharing in pages.items():
            for at in range(0, len(sharing), GROUP):
                group = sharing[at : at + GROUP]
                for several in [tuple(group)] if len(group) >= SHARED else [(row,) for row in group]:
                    by_rows[part].setdefault(several, []).append(page)
    for i, sequence in rows:
        if more := sequence.cached % size:
            page = sequence.nodes[sequence.cached // size].page
            by_rows[sequence.part][i % s,].append(_ReadPage(page, more, sequence.cached - more))
    single, shared = ([{who: x for who, x in part.items() if (len(who) > 1) == many} for part in by_rows] for many in (False, True))
    lists = _page_list(single, 1, s, size), _page_list(shared, GROUP, s, size)
    return lists if windowed else tuple(x._replace(first=None) for x in lists)


def page_table(rows: list[tuple[int, SequenceState]], s: int, parts: int, room: int) -> PageTable:
    """Each row's own pages, whoever else reads them. A part has s rows, and no row more than `room` pages."""
    page, kept = np.zeros((parts * s, room), np.int32), np.zeros(parts * s, np.int32)
    for i, sequence in rows:
        page[i, : len(sequence.nodes)], kept[i] = [node.page for node in sequence.nodes], sequence.cached
    return PageTable(page.reshape(parts, s, room), kept.reshape(parts, s))


def _page_list(parts: list[dict[tuple[int, ...], list[_ReadPage]]], group: int, s: int, page: int) -> PageList:
    run = entry_pages(page, group)
    entries_of_parts = [[(who, pages[at : at + run]) for who, pages in part.items() for at in range(0, len(pages), run)] for part in parts]
    most = max(map(len, entries_of_parts))
    room = max(block_pages(page), bucket(most, ENTRIES // max(group, run), 16))  # whole blocks
    pages, first = (np.zeros((len(parts), room, run), np.int32) for _ in range(2))
    rows, length = np.full((len(parts), room, group), s, np.int32), np.zeros((len(parts), room), np.int32)
    for part, entries in enumerate(entries_of_parts):
        for i, (who, run_pages) in enumerate(entries):
            rows[part, i, : len(who)] = who
            pages[part, i, : len(run_pages)], first[part, i, : len(run_pages)] = [x.page for x in run_pages], [x.first for x in run_pages]
            length[part, i] = (len(run_pages) - 1) * page + run_pages[-1].tokens
    return PageList(pages, rows, length, np.int32(most), first)
