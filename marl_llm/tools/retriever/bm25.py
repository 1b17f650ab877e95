"""BM25 over a memory-mapped index: bm25s computes and lays out the scores, a search reads only the postings that can matter.

score(q, p) = Σ_{w ∈ q} idf(w) · tf(w, p) / (tf(w, p) + k1 · (1 - b + b · |p| / mean|p|)),   idf(w) = ln(1 + (N - df + ½) / (df + ½))

the form of Lucene (Kamphuis et al., "Which BM25 do you mean?", ECIR 2020), which bm25s calls `lucene`. bm25s stores each word's summand per
passage as a sparse column (Lù, "BM25S", 2024). Its own search adds whole columns into an array over all passages and then selects,
which costs milliseconds per query for a million passages. Here columns are visited by falling upper bound and left out once no
unseen passage can reach the top k (MaxScore: Turtle and Flood, "Query evaluation: strategies and optimizations", 1995); the passages still
in the running are completed by binary search. The result is exact.

Equal scores are ordered by row. So that equal means equal, a score is summed in float64 from the smallest summand to the largest:
neither the order of the words in the query nor the pruning changes a bit of it.
"""

import collections
import functools
import json
import logging
import math
import mmap
import pathlib
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64, Int32

from marl_llm.tools.retriever.interface import LocalRetriever, Overdue, check_time
from marl_llm.tools.retriever.passages import PassageStore, write_passages
from marl_llm.tools.retriever.words import normalised, words
from marl_llm.untrusted import read_json_file

FORMATS = {"bm25": 2, "dense": 1}  # 2: words as `marl_llm.tools.retriever.words` cuts them
PROBES = 32  # passages completed per visited column to raise the threshold early
CACHED_WORDS = 65_536
SLACK = 1.0 - 1e-12  # partial sums are added in another order than final ones: a few units in the last place


def build_bm25(
    passages: Iterable[dict[str, Any]],
    folder: str | pathlib.Path,
    k1: float = 0.9,
    b: float = 0.4,
    stopwords: str | Sequence[str] | None = "en",
    progress: bool = False,
) -> "BM25Index":
    """Builds an index from passages (see `read_passages`) and opens it.

    Args:
      passages: dictionaries with `id` and `contents`; read once.
      folder: a new directory. It appears under its name only when it is complete.
      k1, b: BM25's constants; the defaults are Anserini's, which Search-R1's BM25 uses.
      stopwords: words left out of index and queries: a language that bm25s knows, a list, or None.
      progress: whether bm25s shows its bars.

    Raises:
      FileExistsError: `folder` is there already.
      ValueError: no passage has a word, or `k1` or `b` is out of range.
    """
    import bm25s
    from bm25s.tokenization import Tokenizer

    logging.getLogger(bm25s.__name__).setLevel(logging.WARNING)  # its import asks for every detail
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; an index is never overwritten: remove it, or choose another directory")
    if k1 < 0 or not 0 <= b <= 1:
        raise ValueError(f"k1 must be at least 0 and b between 0 and 1, not k1={k1}, b={b}")
    stopwords = Tokenizer(stopwords=stopwords if isinstance(stopwords, str) else list(stopwords or ())).stopwords
    left_out = frozenset(map(normalised, stopwords))
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)

    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words(passage["contents"], left_out)]
        for passage in write_passages(part, passages)
    ]
    if not vocabulary:
        raise ValueError(f"none of the {len(ids)} passages has a word: nothing to index")
    scorer = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64")
    scorer.index((ids, vocabulary), create_empty_token=False, show_progress=progress)
    del ids
    data, indices, indptr = (scorer.scores[name] for name in ("data", "indices", "indptr"))
    np.save(part / "data.npy", data)
    np.save(part / "rows.npy", indices.astype(np.int32))
    np.save(part / "columns.npy", indptr.astype(np.int64))
    np.save(part / "largest.npy", np.maximum.reduceat(data, indptr[:-1]))
    _save_vocabulary(part, vocabulary)
    about = dict(format=FORMATS["bm25"], kind="bm25", passages=int(scorer.scores["num_docs"]), k1=k1, b=b, stopwords=sorted(left_out))
    (part / "index.json").write_text(json.dumps(about, ensure_ascii=False, indent=1))
    part.rename(folder)
    return BM25Index(folder)


def _save_vocabulary(folder: pathlib.Path, vocabulary: dict[str, int]) -> None:
    encoded = sorted((word.encode(), column) for word, column in vocabulary.items())
    (folder / "words.bin").write_bytes(b"".join(word for word, _ in encoded))
    np.save(folder / "words.offsets.npy", np.cumsum([0, *(len(word) for word, _ in encoded)], dtype=np.int64))
    np.save(folder / "words.columns.npy", np.asarray([column for _, column in encoded], np.int32))


class Vocabulary:
    """Words in byte order on disk, found by bisection: opening reads nothing, whatever the number of words."""

    def __init__(self, folder: pathlib.Path):
        with open(folder / "words.bin", "rb") as file:
            self._words = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._offsets = _mapped(folder / "words.offsets.npy")
        self._columns = _mapped(folder / "words.columns.npy")
        self.column = functools.lru_cache(CACHED_WORDS)(self._column)  # queries repeat words; a bisection costs 20 microseconds

    def __len__(self) -> int:
        return len(self._columns)

    def _column(self, word: str) -> int | None:
        """The column of a word; None where no passage has it."""
        wanted = word.encode("utf-8", "surrogatepass")
        low, high = 0, len(self._columns)
        while low < high:
            middle = (low + high) // 2
            middle_word = self._words[self._offsets[middle] : self._offsets[middle + 1]]
            if middle_word == wanted:
                return int(self._columns[middle])
            low, high = (middle + 1, high) if middle_word < wanted else (low, middle)
        return None


def _mapped(path: pathlib.Path) -> np.ndarray:
    # A plain view: slicing np.memmap itself costs microseconds each time.
    return np.load(path, mmap_mode="r").view(np.ndarray)


class _Column:
    """A query word's postings: `rows` ascending, `data` per row, `weight` the word's count in the query, `bound` the largest summand."""

    def __init__(self, rows: np.ndarray, data: np.ndarray, weight: int, bound: float):
        self.rows, self.data, self.weight, self.bound = rows, data, weight, bound

    def add_to(self, sums: np.ndarray) -> np.ndarray:
        """Adds the summands to sums over all passages; returns the new sums of the column's rows."""
        partial = sums.take(self.rows)
        partial += self.data if self.weight == 1 else self.data * self.weight
        sums[self.rows] = partial
        return partial

    def at(self, rows: Int32[np.ndarray, " C"]) -> Float64[np.ndarray, " C"]:
        """The summands of given passages, by binary search; 0 where the word does not occur."""
        position = self.rows.searchsorted(rows)
        np.minimum(position, len(self.rows) - 1, out=position)
        summands = self.data.take(position)
        summands *= self.rows.take(position) == rows
        return summands if self.weight == 1 else summands * self.weight


class BM25Index(LocalRetriever):
    """An index opened for search. Safe to use from several threads, which take turns; keeps one float64 per passage.

    Args:
      folder: what `build_bm25` wrote.

    Raises:
      FileNotFoundError, ValueError: there is no index of this kind.
    """

    def __init__(self, folder: str | pathlib.Path):
        folder = pathlib.Path(folder)
        self.about = read_about(folder, "bm25")
        self.passages = PassageStore(folder)
        self.stopwords = frozenset(self.about["stopwords"])
        self.vocabulary = Vocabulary(folder)
        self._data, self._rows = _mapped(folder / "data.npy"), _mapped(folder / "rows.npy")
        self._columns, self._largest = _mapped(folder / "columns.npy"), _mapped(folder / "largest.npy")
        if len(self.passages) != self.about["passages"] or len(self._data) != self._columns[-1]:
            raise ValueError(f"{folder}: the files of this index do not fit together: build it again")
        self._sums = np.zeros(len(self.passages), np.float64)
        self._lock = threading.Lock()
        self._deadline = math.inf  # of the query under way; like `_sums`, whoever holds the lock owns it

    def __len__(self) -> int:
        return len(self.passages)

    def _ranked(self, queries: Sequence[str], topk: int, deadline: float = math.inf) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        for query in queries:
            # Two threads would only fight for the interpreter: 435 queries/s instead of 580.
            if not self._lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
                raise Overdue
            try:
                self._deadline = deadline
                rows, scores = self._top(query, topk)
            finally:
                self._lock.release()
            yield rows.tolist(), scores.tolist()

    def _query_columns(self, query: str) -> list[_Column]:
        """The columns of a query's known words, by falling bound."""
        columns = []
        for word, weight in collections.Counter(words(query, self.stopwords)).items():
            check_time(self._deadline)
            column = self.vocabulary.column(word)
            if column is not None:
                part = slice(self._columns[column], self._columns[column + 1])
                columns.append(_Column(self._rows[part], self._data[part], weight, weight * float(self._largest[column])))
        return sorted(columns, key=lambda column: (-column.bound, len(column.rows)))

    def _top(self, query: str, topk: int) -> tuple[Int32[np.ndarray, " C"], Float64[np.ndarray, " C"]]:
        columns = self._query_columns(query)
        rest = np.cumsum([column.bound for column in columns][::-1])[::-1].tolist() + [0.0]  # most that columns i, i+1, ... can add
        sums = self._sums
        threshold = 0.0  # at least topk passages are known to reach it
        visited = 0
        try:
            for column in columns:
                if rest[visited] < threshold * SLACK:
                    break
                check_time(self._deadline)
                visited += 1
                partial = column.add_to(sums)
                threshold = max(threshold, self._raised(column.rows, partial, columns[visited:], topk, threshold - rest[visited]))
            rows, partial = self._survivors(columns[:visited], sums, threshold * SLACK - rest[visited])
        finally:
            for column in columns[:visited]:
                sums[column.rows] = 0.0
        for later in range(visited, len(columns)):
            if len(rows) <= PROBES:
                break
            check_time(self._deadline)
            partial = partial + columns[later].at(rows)
            if len(rows) > topk:
                threshold = max(threshold, float(np.partition(partial, len(rows) - topk)[len(rows) - topk]))
            promising = partial >= threshold * SLACK - rest[later + 1]
            rows, partial = rows[promising], partial[promising]
        scores = _completed(rows, columns)
        order = np.lexsort((rows, -scores))[:topk]
        return rows[order], scores[order]

    @staticmethod
    def _survivors(columns: list[_Column], sums: np.ndarray, floor: float) -> tuple[np.ndarray, np.ndarray]:
        """Passages of some columns whose sum is at least `floor`, once each, with the sums. Overwrites the sums that it takes."""
        rows, partial = [np.zeros(0, np.int32)], [np.zeros(0, np.float64)]
        for column in columns:
            values = sums.take(column.rows)
            taken = np.flatnonzero(values >= max(floor, 0.0))
            rows.append(column.rows.take(taken))
            partial.append(values.take(taken))
            sums[rows[-1]] = -1.0
        rows, partial = np.concatenate(rows), np.concatenate(partial)
        order = rows.argsort(kind="stable")
        return rows.take(order), partial.take(order)

    @staticmethod
    def _raised(rows: np.ndarray, partial: np.ndarray, unvisited: list[_Column], topk: int, floor: float) -> float:
        """A score that at least `topk` passages reach, found by completing the most promising of `rows`; 0 if there are too few."""
        if floor > 0.0:
            promising = np.flatnonzero(partial >= floor)
            rows, partial = rows[promising], partial[promising]
        probes = max(PROBES, 2 * topk)
        if len(rows) > probes:
            best = np.argpartition(partial, len(rows) - probes)[len(rows) - probes :]
            rows, partial = rows[best], partial[best]
        if len(rows) < topk:
            return 0.0
        for column in unvisited:
            partial = partial + column.at(rows)
        return float(np.partition(partial, len(rows) - topk)[len(rows) - topk])


def _completed(rows: Int32[np.ndarray, " C"], columns: list[_Column]) -> Float64[np.ndarray, " C"]:
    """Whole scores of given passages: summands added from the smallest to the largest."""
    summands = np.zeros((len(columns), len(rows)), np.float64)
    for summand, column in zip(summands, columns):
        summand[:] = column.at(rows)
    summands.sort(axis=0)
    total = np.zeros(len(rows), np.float64)
    for summand in summands:  # np.sum would add pairwise, in an order that depends on the shape
        total += summand
    return total


def read_about(folder: pathlib.Path, kind: str | None = None) -> dict[str, Any]:
    """What an index says about itself.

    Raises:
      FileNotFoundError: `folder` holds no index.
      ValueError: an index of another kind or of another version of the format.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no index: build one with `python -m marl_llm.tools.retriever build`")
    about = read_json_file(path)
    wanted = kind or about.get("kind")
    if about.get("kind") != wanted or about.get("format") != FORMATS.get(wanted):
        actual = f"kind {about.get('kind')!r}, format {about.get('format')!r}"
        raise ValueError(f"{folder} holds an index of {actual}; expected kind {wanted!r}, format {FORMATS.get(wanted)}: build it again")
    return about
