"""A BM25 index searched by several processes, which share its pages. Threads would only fight for the interpreter."""

import concurrent.futures
import math
import multiprocessing
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence

from marl_llm.tools.retriever.bm25 import BM25Index, read_about
from marl_llm.tools.retriever.interface import LocalRetriever, Overdue
from marl_llm.tools.retriever.passages import PassageStore

CHUNK = 8  # queries per task: small enough to even out hard and easy queries, large enough to make the way there cheap

_index: BM25Index | None = None  # of a worker process


def _open(folder: pathlib.Path) -> None:
    global _index
    _index = BM25Index(folder)


def _rank(queries: list[str], topk: int, deadline: float) -> list[list[tuple[int, float]]]:
    # Processes of one machine share the monotonic clock, so that a deadline means the same here.
    return [list(zip(rows, scores)) for rows, scores in _index._ranked(queries, topk, deadline)]


class BM25Pool(LocalRetriever):
    """The same answers as `BM25Index`, from `processes` cores.

    The processes are spawned, not forked, so that threads of JAX in this one do no harm; as always with spawned processes, the main
    module of a script needs its `if __name__ == "__main__":`. A process that dies makes the batches under way a failure (`crash`), and the
    next batch starts a new pool.

    Args:
      folder: what `build_bm25` wrote.
      processes: how many search.
    """

    def __init__(self, folder: str | pathlib.Path, processes: int = 2):
        if processes < 1:
            raise ValueError(f"processes must be at least 1, not {processes}")
        self.folder = pathlib.Path(folder)
        self.about = read_about(self.folder, "bm25")
        self.passages = PassageStore(self.folder)
        self._processes = processes
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.passages)

    def _ranked(self, queries: Sequence[str], topk: int, deadline: float = math.inf) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        pool, tasks = self._started(), []
        try:
            tasks += [pool.submit(_rank, list(queries[start : start + CHUNK]), topk, deadline) for start in range(0, len(queries), CHUNK)]
            for task in tasks:
                left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
                for ranked in task.result(left):
                    yield [row for row, _ in ranked], [score for _, score in ranked]
        except TimeoutError:
            raise Overdue from None
        except concurrent.futures.BrokenExecutor:
            self._drop(pool)
            raise
        finally:
            for task in tasks:
                task.cancel()  # after a missed deadline nobody waits for the rest

    def _started(self) -> concurrent.futures.ProcessPoolExecutor:
        with self._lock:
            if self._pool is None:
                context = multiprocessing.get_context("spawn")
                self._pool = concurrent.futures.ProcessPoolExecutor(self._processes, context, _open, (self.folder,))
            return self._pool

    def _drop(self, pool: concurrent.futures.ProcessPoolExecutor) -> None:
        with self._lock:
            if self._pool is pool:
                self._pool = None
        pool.shutdown(wait=False)

    def close(self) -> None:
        """Ends the processes; a later search starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)
