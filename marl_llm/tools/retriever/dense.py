"""Dense retrieval by exact inner product, behind the interface of BM25. The user brings the embeddings and the query encoder.

Normalise both sides for cosine similarity. The search is a matrix product over blocks of the memory-mapped embeddings: exact, and a few
milliseconds per million passages and query in a batch; approximate indexes are out of scope.
"""

import json
import math
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from marl_llm.tools.retriever.bm25 import FORMATS, read_about
from marl_llm.tools.retriever.interface import LocalRetriever, check_time
from marl_llm.tools.retriever.passages import PassageStore, write_passages

BLOCK = 65_536  # rows of one matrix product
Encoder = Callable[[list[str]], Float[np.ndarray, "B D"]]


def build_dense(
    passages: Iterable[dict[str, Any]], embeddings: Float[np.ndarray, "N D"], folder: str | pathlib.Path, encode: Encoder
) -> "DenseIndex":
    """Saves passages with their embeddings (one row per passage, in the same order) and opens the index.

    Raises:
      FileExistsError: `folder` is there already.
      ValueError: the numbers of passages and rows differ, or an embedding is not finite.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists; an index is never overwritten: remove it, or choose another directory")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    count = sum(1 for _ in write_passages(part, passages))
    if count != len(embeddings):
        raise ValueError(f"{count} passages and {len(embeddings)} embeddings: one row per passage, in the same order")
    for start in range(0, count, BLOCK):
        if not np.isfinite(embeddings[start : start + BLOCK]).all():
            raise ValueError(f"an embedding in rows {start} to {min(count, start + BLOCK) - 1} is not finite")
    np.save(part / "embeddings.npy", np.asarray(embeddings, np.float32))
    (part / "index.json").write_text(
        json.dumps(dict(format=FORMATS["dense"], kind="dense", passages=count, width=int(embeddings.shape[1])))
    )
    part.rename(folder)
    return DenseIndex(folder, encode)


class DenseIndex(LocalRetriever):
    """Embeddings opened for search.

    Args:
      folder: what `build_dense` wrote.
      encode: texts of queries to rows of the same width.
    """

    def __init__(self, folder: str | pathlib.Path, encode: Encoder):
        folder = pathlib.Path(folder)
        self.about = read_about(folder, "dense")
        self.passages = PassageStore(folder)
        self._embeddings = np.load(folder / "embeddings.npy", mmap_mode="r").view(np.ndarray)
        self._encode = encode
        if len(self.passages) != len(self._embeddings):
            raise ValueError(f"{folder}: the files of this index do not fit together: build it again")

    def __len__(self) -> int:
        return len(self.passages)

    def _ranked(self, queries: Sequence[str], topk: int, deadline: float = math.inf) -> Iterator[tuple[Sequence[int], Sequence[float]]]:
        if not queries:
            return
        encoded = np.asarray(self._encode(list(queries)), np.float32)
        if encoded.shape != (len(queries), self._embeddings.shape[1]):
            wanted = (len(queries), self._embeddings.shape[1])
            raise ValueError(f"the query encoder gave the shape {encoded.shape}; this index needs {wanted}")
        best: list[list[tuple[float, int]]] = [[] for _ in queries]
        for start in range(0, len(self._embeddings), BLOCK):
            check_time(deadline)
            scores = encoded @ self._embeddings[start : start + BLOCK].T
            keep = min(topk, scores.shape[1])
            for query, row_scores in enumerate(scores):
                # Everything that ties with the last place stays in, so that the row decides and not the partition.
                rows = np.flatnonzero(row_scores >= np.partition(row_scores, -keep)[-keep])
                ranked = best[query] + [(-float(row_scores[row]), start + int(row)) for row in rows]
                best[query] = sorted(ranked)[:topk]
        for ranked in best:
            yield [row for _, row in ranked], [-negated for negated, _ in ranked]
