"""What every retriever answers, wherever it runs."""

import asyncio
import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor
from typing import Any, Protocol, runtime_checkable

from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.tools.retriever.passages import PassageStore

MAX_QUERY = 16_384  # characters; a search takes microseconds for each
MAX_TOPK = 1000  # a larger request is a mistake, and would let one agent stall the others


@dataclasses.dataclass(frozen=True)
class Hit:
    """One passage that was found.

    Attributes:
      document: the passage as it was indexed, with its text in `contents`; those of this library's indexes have an `id` too.
      score: larger is better; comparable within one query only.
    """

    document: dict[str, Any]
    score: float


Hits = list[list[Hit]]  # per query, best first


@runtime_checkable
class Retriever(Protocol):
    """BM25 or dense, in process or a server: callers see no difference."""

    def search(self, queries: Sequence[str], topk: int = 5, deadline_s: float = 30.0) -> ToolResult[Hits]:
        """A batch of queries; per query at most `topk` hits, best first, equal scores in the order of the index.

        A query that matches nothing has no hits, which is an outcome. A missed deadline or a lost server is a failure of the whole batch.

        Raises:
          ValueError, TypeError: a request that no retriever can serve (see `check_request`).
        """
        ...

    async def asearch(self, queries: Sequence[str], topk: int = 5, deadline_s: float = 30.0) -> ToolResult[Hits]:
        """The same from an event loop."""
        ...


def check_request(queries: Any, topk: Any) -> None:
    """Refuses a request that no retriever can serve.

    Raises:
      TypeError: `queries` is one string, or holds something else than strings; `topk` is no integer.
      ValueError: `topk` is out of range, or a query is longer than `MAX_QUERY`.
    """
    if isinstance(queries, str) or not isinstance(queries, Sequence):
        raise TypeError(f"queries must be a list of strings, not {type(queries).__name__}: put a single query into a list")
    for position, query in enumerate(queries):
        if not isinstance(query, str):
            raise TypeError(f"queries[{position}] must be a string, not {type(query).__name__}")
        if len(query) > MAX_QUERY:
            raise ValueError(f"queries[{position}] has {len(query)} characters; at most {MAX_QUERY} are searched for")
    if isinstance(topk, bool) or not isinstance(topk, int):
        raise TypeError(f"topk must be an integer, not {type(topk).__name__}")
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be between 1 and {MAX_TOPK}, not {topk}")


class Overdue(Exception):
    """The deadline passed within a query."""


def check_time(deadline: float) -> None:
    """Raises `Overdue` once `time.monotonic()` is past the deadline."""
    if time.monotonic() > deadline:
        raise Overdue


class LocalRetriever:
    """The common part of the retrievers that hold their index in this process.

    A subclass gives `_ranked`, a generator of (rows, scores) per query. It raises `Overdue` when the deadline, a time of
    `time.monotonic()`, passes within a query; after each the deadline is checked here.
    """

    passages: PassageStore

    def _ranked(self, queries: Sequence[str], topk: int, deadline: float = math.inf) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        raise NotImplementedError

    def rank(self, queries: Sequence[str], topk: int = 5) -> list[list[tuple[int, float]]]:
        """Rows of the index with their scores, without the passages."""
        check_request(queries, topk)
        return [list(zip(rows, scores)) for rows, scores in self._ranked(queries, topk)]

    def search(self, queries: Sequence[str], topk: int = 5, deadline_s: float = 30.0) -> ToolResult[Hits]:
        """See `Retriever.search`."""
        check_request(queries, topk)
        start = time.monotonic()
        hits: Hits = []
        try:
            for rows, scores in self._ranked(queries, topk, start + deadline_s):
                hits.append([Hit(self.passages[row], score) for row, score in zip(rows, scores)])
                check_time(start + deadline_s)
        except Overdue:
            message = f"{len(hits)} of {len(queries)} queries were answered in {deadline_s} s"
            return failed(FailureKind.DEADLINE, message, time.monotonic() - start)
        except BrokenExecutor as error:
            return failed(FailureKind.CRASH, f"a search process died: {error}", time.monotonic() - start)
        return success(hits, time.monotonic() - start)

    async def asearch(self, queries: Sequence[str], topk: int = 5, deadline_s: float = 30.0) -> ToolResult[Hits]:
        """See `Retriever.asearch`."""
        return await asyncio.to_thread(self.search, queries, topk, deadline_s)
