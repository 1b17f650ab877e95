"""Passages on disk: read from jsonl or parquet, kept as one file of JSON lines with an array of offsets, read through a memory map."""

import json
import mmap
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from marl_llm.data_files import located_rows

BLOB, OFFSETS = "passages.jsonl", "passages.offsets.npy"


def read_passages(paths: Sequence[str | pathlib.Path]) -> Iterator[dict[str, Any]]:
    """Yields the passages of `.jsonl`, `.jsonl.gz`, `.parquet` and `.json` files (see `marl_llm.data_files`), in order.

    A passage comes out with `contents` (the field that Search-R1's clients print: the title on the first line, then the text; built
    from `title` and `text` where it is missing) and `id` (its number where it is missing). Other fields are kept.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file that cannot be read (`DataError`), a passage without text, an id that occurs twice.
    """
    seen: set[str] = set()
    row = 0
    for path in map(pathlib.Path, paths):
        for where, fields in located_rows(path):
            passage = _normalised(fields, row, where)
            key = str(passage["id"])
            if key in seen:
                raise ValueError(f"{where}: the id {key!r} occurs twice; ids name passages in transcripts and must differ")
            seen.add(key)
            yield passage
            row += 1


def _normalised(fields: dict[str, Any], row: int, where: str) -> dict[str, Any]:
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
