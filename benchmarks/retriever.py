"""The retriever at size: build, open, batches of queries, and the ranks against a BM25 computed from the passages themselves.

  python -m benchmarks.retriever --passages=1000000          # about 8 minutes, 8 GB of memory, 2 GB of disk
  python -m benchmarks.retriever --passages=20000 --checked=50

Passages are drawn from a Zipf-Mandelbrot vocabulary without stop words, so the most frequent words stand in most passages and queries hold
some of them: harder than English text with its stop words removed. A query is a few distinct words of one passage. One line of JSON.
"""

import collections
import json
import math
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from marl_llm.tools.retriever import BM25Index, RetrieverClient, RetrieverServer, build_bm25, read_passages

FLAGS = flags.FLAGS
flags.DEFINE_integer("passages", 1_000_000, "passages to generate")
flags.DEFINE_integer("words", 500_000, "words of the vocabulary")
flags.DEFINE_integer("mean_length", 64, "mean words of a passage; lengths are uniform between half and one and a half of it")
flags.DEFINE_integer("query_words", 8, "most words of a query; lengths are uniform from 3")
flags.DEFINE_integer("batch", 64, "queries per call")
flags.DEFINE_integer("batches", 40, "calls that are timed")
flags.DEFINE_integer("topk", 5, "hits per query")
flags.DEFINE_integer("checked", 20, "queries whose ranks are compared with the reference")
flags.DEFINE_integer("seed", 0, "of passages and queries")
flags.DEFINE_string("folder", None, "keep the index here, and use the one that is there; None: a temporary directory")


def generate(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Word numbers of all passages, and where each passage ends."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(FLAGS.mean_length // 2, FLAGS.mean_length * 3 // 2 + 1, FLAGS.passages)
    weights = 1.0 / (np.arange(FLAGS.words) + 2.7) ** 1.05
    edges = np.cumsum(weights / weights.sum())
    return np.searchsorted(edges, rng.random(int(lengths.sum()))).clip(0, FLAGS.words - 1).astype(np.int32), np.cumsum(lengths)


def write_jsonl(path: pathlib.Path, tokens: np.ndarray, ends: np.ndarray) -> None:
    names = [f"w{number}" for number in range(FLAGS.words)]
    start = 0
    with open(path, "w") as file:
        for row, end in enumerate(ends.tolist()):
            text = " ".join([names[number] for number in tokens[start:end].tolist()])
            file.write(f'{{"id": "{row}", "contents": "{text}"}}\n')
            start = end


def make_queries(tokens: np.ndarray, ends: np.ndarray, count: int, seed: int) -> list[str]:
    rng = np.random.default_rng([seed, 1])
    queries = []
    for row in rng.integers(0, len(ends), count).tolist():
        passage = np.unique(tokens[ends[row - 1] if row else 0 : ends[row]])
        picked = rng.choice(passage, min(len(passage), int(rng.integers(3, FLAGS.query_words + 1))), replace=False)
        queries.append(" ".join(f"w{number}" for number in picked))
    return queries


def reference(tokens: np.ndarray, ends: np.ndarray, query: str, topk: int, k1: float, b: float) -> Iterator[tuple[int, float]]:
    """BM25 in the form of Lucene, word by word over all passages, without an index."""
    lengths = np.diff(ends, prepend=0)
    norm = k1 * (1 - b + b * lengths / lengths.mean())
    summands = []
    for word, count in collections.Counter(query.split()).items():
        tf = np.bincount(np.searchsorted(ends, np.flatnonzero(tokens == int(word[1:])), side="right"), minlength=len(ends))
        df = np.count_nonzero(tf)
        summands.append(count * math.log(1 + (len(ends) - df + 0.5) / (df + 0.5)) * tf / (tf + norm))
    scores = sum(np.sort(np.stack(summands), axis=0))
    order = np.lexsort((np.arange(len(ends)), -scores))[:topk]
    return ((int(row), float(scores[row])) for row in order if scores[row] > 0)


def own_bm25s(folder: pathlib.Path, index: BM25Index, queries: list[str], topk: int) -> float:
    """Queries per second of bm25s's own search over the same arrays."""
    import bm25s

    searcher = bm25s.BM25(dtype="float64")
    arrays = dict(data="data.npy", indices="rows.npy", indptr="columns.npy")
    searcher.scores = {name: np.load(folder / file, mmap_mode="r") for name, file in arrays.items()} | dict(num_docs=len(index))
    searcher.nonoccurrence_array = None
    searcher.vocab_dict = {word: index.vocabulary.column(word) for query in queries for word in query.split()}
    searcher.unique_token_ids_set = set(searcher.vocab_dict.values())
    start = time.perf_counter()
    searcher.retrieve([query.split() for query in queries], k=topk, show_progress=False)
    return len(queries) / (time.perf_counter() - start)


def measure(folder: pathlib.Path) -> dict:
    """Builds what is missing, then opens, asks and compares."""
    row: dict = dict(benchmark="retriever", passages=FLAGS.passages, batch=FLAGS.batch, topk=FLAGS.topk)
    tokens, ends = generate(FLAGS.seed)
    if not (folder / "index").exists():
        write_jsonl(folder / "passages.jsonl", tokens, ends)
        start = time.perf_counter()
        build_bm25(read_passages([folder / "passages.jsonl"]), folder / "index")
        row["build_s"] = round(time.perf_counter() - start, 1)
        (folder / "passages.jsonl").unlink()
    opening = "import time; from marl_llm.tools.retriever import BM25Index; start = time.perf_counter(); "
    opening += "index = BM25Index(FOLDER); hits = index.search(['w0 w9 w99'], 5).outcome(); print(time.perf_counter() - start)"
    code = opening.replace("FOLDER", repr(str(folder / "index")))
    row["open_and_first_query_s"] = round(float(subprocess.check_output([sys.executable, "-c", code], text=True)), 3)
    index = BM25Index(folder / "index")
    row |= dict(words_in_index=len(index.vocabulary), index_mb=sum(f.stat().st_size for f in (folder / "index").iterdir()) // 2**20)

    queries = make_queries(tokens, ends, FLAGS.batch * FLAGS.batches, FLAGS.seed)
    batches = [queries[start : start + FLAGS.batch] for start in range(0, len(queries), FLAGS.batch)]
    index.search(batches[0], FLAGS.topk).outcome()
    row["queries_per_s"], row["batch_ms_median"] = timed(lambda batch: index.search(batch, FLAGS.topk).outcome(), batches)
    with RetrieverServer(index) as server:
        client = RetrieverClient(server.url)
        row["http_queries_per_s"], _ = timed(lambda batch: client.search(batch, FLAGS.topk).outcome(), batches)
        client.close()
    row["bm25s_search_queries_per_s"] = round(own_bm25s(folder / "index", index, batches[0], FLAGS.topk), 1)

    about, wrong = index.about, 0
    for query in queries[: FLAGS.checked]:
        expected = list(reference(tokens, ends, query, FLAGS.topk, about["k1"], about["b"]))
        ranked = index.rank([query], FLAGS.topk)[0]
        same_rows = [row for row, _ in ranked] == [row for row, _ in expected]
        wrong += not (same_rows and np.allclose([score for _, score in ranked], [score for _, score in expected], rtol=1e-12))
    row |= dict(ranks_checked=min(FLAGS.checked, len(queries)), ranks_wrong=wrong)
    row["peak_memory_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
    return row | dict(cores=os.cpu_count(), python=platform.python_version(), numpy=np.__version__)


def timed(ask, batches: list[list[str]]) -> tuple[float, float]:
    """Queries per second over all batches, and the median milliseconds of one."""
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        ask(batch)
        seconds.append(time.perf_counter() - start)
    return round(sum(map(len, batches)) / sum(seconds), 1), round(1000 * float(np.median(seconds)), 1)


def main(argv) -> None:
    del argv
    folder = pathlib.Path(FLAGS.folder or tempfile.mkdtemp(prefix="retriever_benchmark_"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        print(json.dumps(measure(folder)), flush=True)
    finally:
        if FLAGS.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    app.run(main)
