"""The GGUF format: named metadata, then tensors, which may be quantised.

Read here rather than through `gguf.GGUFReader`, which makes an array per number of the metadata: a file that somebody else made could fill
the memory with it. The library `gguf` (extra `gguf`) turns quantised blocks into numbers. Layout:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from marl_llm.models.tensor_files import MOST_AXES, MOST_NAME, CheckpointFileError
from marl_llm.untrusted import open_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_FIELDS, MOST_TENSORS, MOST_ITEMS, MOST_TEXT = 1 << 12, 1 << 16, 1 << 21, 1 << 20
# the numbers of the format: type -> how `struct` and NumPy call it
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
BLOCK = 8 << 20  # numbers that are made from their quantised blocks at a time


class GgufTensor(NamedTuple):
    """Where a tensor lies. `shape`: its rows first, as NumPy and torch say it. `kind`: the number of its quantisation."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


class GgufFile(NamedTuple):
    """The header of a file: its fields by name, and its tensors by name."""

    path: pathlib.Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def need(self, name: str, kind: type) -> Any:
        """A field that must be there. Raises `CheckpointFileError`."""
        if name not in self.fields:
            raise CheckpointFileError(f"{self.path}: has no field {name!r}")
        return self.get(name, kind)

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """A field, or the default where there is none. Raises `CheckpointFileError` on one of another kind."""
        value = self.fields.get(name, default)
        if name in self.fields and type(value) is not kind:
            shown = repr(value)[:60]
            raise CheckpointFileError(f"{self.path}: the field {name} is {shown}; a value of the kind {kind.__name__} is expected")
        return value

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32. Raises `CheckpointFileError` on numbers that are not finite, and `ImportError` without the extra `gguf`."""
        gguf = load_library()
        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        values = np.empty(tensor.shape, np.float32)
        rows = values.reshape(-1, tensor.shape[-1]) if tensor.shape else values.reshape(1, 1)
        row_bytes = tensor.size // len(rows)
        step = max(1, BLOCK // rows.shape[1])
        with open_file(self.path, CheckpointFileError) as file:
            file.seek(tensor.offset)
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                raw = np.frombuffer(file.read(row_bytes * len(part)), np.uint8)
                if raw.size != row_bytes * len(part):
                    raise CheckpointFileError(f"{self.path}: ended while it was read; was it changed meanwhile?")
                with np.errstate(over="ignore", invalid="ignore"):  # numbers that are not finite are refused below
                    part[...] = gguf.dequantize(raw.reshape(len(part), row_bytes), kind).reshape(part.shape)
        if not np.isfinite(values).all():
            raise CheckpointFileError(f"{self.path}: {name} holds NaN or infinity; its training failed, or it is damaged")
        return values


def read_gguf(path: str | os.PathLike) -> GgufFile:
    """The header of a GGUF file.

    Raises `CheckpointFileError`, naming file and field, on one that is truncated, damaged, or of a version or quantisation that is not
    read; `ImportError` without the extra `gguf`.
    """
    library = load_library()
    path = pathlib.Path(path)
    with open_file(path, CheckpointFileError) as file:
        header = _Header(path, file, os.fstat(file.fileno()).st_size)
        try:
            fields, tensors = header.read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise CheckpointFileError(f"{path}: truncated or damaged in its header ({error}); copy it again") from error
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 16:
        raise CheckpointFileError(f"{path}: general.alignment={str(alignment)[:40]!r} must be an integer from 1 to 65,536")
    start = -(-header.place // alignment) * alignment
    placed = {name: _placed(path, library, start, header.size, name, *about) for name, about in tensors.items()}
    _check_overlaps(path, placed)
    return GgufFile(path, fields, placed)


def load_library():
    """The module `gguf`. Raises `ImportError` without the extra `gguf`."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("reading a GGUF file needs the library `gguf`: pip install 'marl_llm[gguf]'") from error
    return gguf


class _Header:
    """A file that is read from its start on; `place` is where the next byte lies."""

    def __init__(self, path: pathlib.Path, file: Any, size: int):
        self.path, self.file, self.size, self.place, self.items = path, file, size, 0, 0

    def read(self) -> tuple[dict[str, Any], dict[str, tuple]]:
        """Fields, and (shape, kind, offset) of tensors, by name."""
        if self._bytes(4) != MAGIC:
            raise CheckpointFileError(f"{self.path}: no GGUF file (its first four bytes are not GGUF)")
        version = self._number("I")
        if version not in VERSIONS:
            reason = "numbers with the high byte first" if version >= 1 << 16 else f"version {version}"
            raise CheckpointFileError(f"{self.path}: a GGUF file of {reason}; versions 2 and 3, low byte first, are read")
        tensor_count = self._count("tensors", MOST_TENSORS)
        field_count = self._count("fields", MOST_FIELDS)
        fields: dict[str, Any] = {}
        for _ in range(field_count):
            name = self._name()
            if name in fields:
                raise CheckpointFileError(f"{self.path}: has the field {name!r} twice; it is damaged")
            fields[name] = self._value(self._number("I"), name)
        tensors: dict[str, tuple] = {}
        for _ in range(tensor_count):
            name = self._name()
            if name in tensors:
                raise CheckpointFileError(f"{self.path}: has the tensor {name!r} twice; it is damaged")
            axes = self._number("I")
            if axes > MOST_AXES:
                raise CheckpointFileError(f"{self.path}: {name} has {axes:,} axes; at most {MOST_AXES} are read")
            shape = tuple(self._number("Q") for _ in range(axes))[::-1]
            tensors[name] = (shape, self._number("I"), self._number("Q"))
        return fields, tensors

    def _bytes(self, count: int) -> bytes:
        if count > self.size - self.place:
            raise CheckpointFileError(f"{self.path}: truncated or damaged: its header goes on behind its end, byte {self.size:,}")
        self.place += count
        return self.file.read(count)

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise CheckpointFileError(f"{self.path}: says that it has {count:,} {what}; at most {most:,} are read")
        return count

    def _text(self) -> str:
        length = self._count("bytes in one text", MOST_TEXT)
        return self._bytes(length).decode("utf-8")

    def _name(self) -> str:
        name = self._text()
        if not name.isprintable() or not 0 < len(name) <= MOST_NAME:
            raise CheckpointFileError(f"{self.path}: a field or tensor has the name {name[:40]!r}; it is damaged")
        return name

    def _value(self, kind: int, name: str) -> Any:
        if kind == TEXT:
            return self._text()
        if kind in NUMBERS:
            return self._number(NUMBERS[kind])
        if kind != ARRAY:
            raise CheckpointFileError(f"{self.path}: the field {name} is of the unknown type {kind}")
        inner, count = self._number("I"), self._count(f"items in {name}", MOST_ITEMS)
        self.items += count
        if self.items > MOST_ITEMS:
            raise CheckpointFileError(f"{self.path}: its fields have more than {MOST_ITEMS:,} items")
        if inner == TEXT:
            return [self._text() for _ in range(count)]
        if inner not in NUMBERS:
            raise CheckpointFileError(f"{self.path}: the field {name} holds items of type {inner}; numbers and texts are read")
        return np.frombuffer(self._bytes(count * struct.calcsize(NUMBERS[inner])), np.dtype(NUMBERS[inner]).newbyteorder("<")).tolist()


def _placed(path, library, start: int, file_size: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """A tensor with the place of its bytes, which lie within the file."""
    try:
        known = library.GGMLQuantizationType(kind)
        per_block, block_bytes = library.GGML_QUANT_SIZES[known]
        library.dequantize(np.zeros((1, block_bytes), np.uint8), known)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise CheckpointFileError(f"{path}: {name} has the quantisation {kind}, of which the library `gguf` makes no numbers") from error
    if math.prod(shape) <= 0 or not shape or shape[-1] % per_block:
        raise CheckpointFileError(f"{path}: {name} {str(list(shape))[:80]} does not consist of blocks of {per_block} numbers")
    size = math.prod(shape) // per_block * block_bytes
    if start + offset + size > file_size:
        raise CheckpointFileError(f"{path}: truncated: {name} ends behind the file's end, byte {file_size:,}; copy it again")
    return GgufTensor(name, shape, kind, start + offset, size)


def _check_overlaps(path: pathlib.Path, tensors: dict[str, GgufTensor]) -> None:
    """Raises `CheckpointFileError` where two tensors share bytes."""
    in_order = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, tensor in zip(in_order, in_order[1:], strict=False):
        if before.offset + before.size > tensor.offset:
            raise CheckpointFileError(f"{path}: {before.name} and {tensor.name} share bytes; the file is damaged")
