"""Passages on disk: read from jsonl or parquet, kept as one file of JSON lines with an array of offsets, read through a memory map."""

import gzip
import json
import mmap
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

BLOB, OFFSETS = "passages.jsonl", "passages.offsets.npy"


def read_passages(paths: Sequence[str | pathlib.Path]) -> Iterator[dict[str, Any]]:
    """Yields the passages of `.jsonl`, `.jsonl.gz` and `.parquet` files, in order.

    A passage comes out with `contents` (the field that Search-R1's clients print: the title on the first line, then the text; built
    from `title` and `text` where it is missing) and `id` (its number where it is missing). Other fields are kept.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an unknown ending, a line that is no JSON object, a passage without text, an id that occurs twice.
    """
    seen: set[str] = set()
    row = 0
    for path in map(pathlib.Path, paths):
        for where, fields in _records(path):
            passage = _normalised(fields, row, where)
            key = str(passage["id"])
            if key in seen:
                raise ValueError(f"{where}: the id {key!r} occurs twice; ids name passages in transcripts and must differ")
            seen.add(key)
            yield passage
            row += 1


def _records(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        opener = gzip.open if path.name.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    yield f"{path}:{number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"{path}:{number}: not a line of JSON ({error}); one JSON object per line is expected") from error
    elif path.name.endswith(".parquet"):
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(f"{path}: reading parquet needs pyarrow: pip install 'marl_llm[tools]'") from error
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for fields in batch.to_pylist():
                yield f"{path}, row {number}", fields
                number += 1
    else:
        raise ValueError(f"{path}: passages are read from .jsonl, .jsonl.gz or .parquet files")


def _normalised(fields: Any, row: int, where: str) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise ValueError(f"{where}: a passage is a JSON object, not {type(fields).__name__}")
    contents = fields.get("contents")
    if contents is None and isinstance(fields.get("text"), str):
        title = fields.get("title")
        contents = f"{title}\n{fields['text']}" if isinstance(title, str) and title else fields["text"]
    if not isinstance(contents, str):
        raise ValueError(f"{where}: a passage needs the field 'contents', or 'text' with an optional 'title'; it has {sorted(fields)}")
    identity = fields.get("id")
    return {**fields, "id": str(row) if identity is None else identity, "contents": contents}


def write_passages(folder: pathlib.Path, passages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Writes passages into `folder` while they pass through; the files are complete once the iterator is exhausted."""
    offsets = [0]
    with open(folder / BLOB, "wb") as blob:
        for passage in passages:
            offsets.append(offsets[-1] + blob.write(json.dumps(passage, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"))
            yield passage
    np.save(folder / OFFSETS, np.asarray(offsets, np.int64))


class PassageStore:
    """Passages by row, read through a memory map: opening takes no time, and processes share the pages."""

    def __init__(self, folder: pathlib.Path):
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r").view(np.ndarray)
        with open(folder / BLOB, "rb") as file:
            size = file.seek(0, 2)
            if size != self._offsets[-1]:
                raise ValueError(f"{folder / BLOB} has {size} bytes, its index says {self._offsets[-1]}: build the index again")
            self._blob = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> dict[str, Any]:
        return json.loads(self._blob[self._offsets[row] : self._offsets[row + 1]])
