"""The safetensors format by byte range: eight bytes of length, a JSON header, then the tensors' bytes.

Read here rather than through the library because a sharded device array wants *parts* of a tensor, also along its second axis, also in
bfloat16, and never the whole tensor on the host. Layout: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import stat
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from marl_llm.untrusted import Bounds, parse_json, read_json_file

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {v: k for k, v in DTYPES.items()}
BLOCK = 8 << 20  # bytes read at a time
MOST_AXES, MOST_NAME, MOST_SHARDS = 8, 512, 2000
HEADER_BOUNDS = Bounds(values=400_000)  # of about 50,000 tensors; 48 layers of 128 experts have 19,000


class CheckpointFileError(ValueError):
    """A checkpoint's files cannot be used; the message says which file or tensor, why, and what to do."""


class TensorInfo(NamedTuple):
    """Where a tensor lies."""

    file: pathlib.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    name: str = ""

    @property
    def bytes(self) -> int:
        """How many it has in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """The tensors of one file. Raises `CheckpointFileError` on a file that is truncated, corrupt or of an unknown dtype."""
    path = pathlib.Path(path)
    header, start, size = _read_header_json(path)
    header.pop("__metadata__", None)
    out: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if len(name) > MOST_NAME or not name.isprintable():
            raise CheckpointFileError(f"{path}: the header has a tensor whose name is {name[:40]!r}...; the file is corrupt")
        out[name] = _tensor_info(path, name, entry, start, size)
    place, before = start, "the header"
    for info in sorted(out.values(), key=lambda info: (info.offset, info.bytes)):
        if info.offset < place:
            raise CheckpointFileError(
                f"{path}: {before} and {info.name} share bytes; the file is corrupt, or no safetensors file"
            )
        if info.offset > place:
            raise CheckpointFileError(f"{path}: no tensor has the {info.offset - place:,} bytes before {info.name}; the file is corrupt")
        place, before = info.offset + info.bytes, info.name
    if place != size:
        raise CheckpointFileError(f"{path}: no tensor has its last {size - place:,} bytes; the file is corrupt")
    return out


def _read_header_json(path: pathlib.Path) -> tuple[dict, int, int]:
    """The header of a file, where its tensors begin, and the file's size."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointFileError(f"{path}: not a regular file")
        with path.open("rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 2 <= length <= about.st_size - 8:
                message = f"{path}: not a safetensors file, or truncated in its header ({about.st_size} bytes); copy it again"
                raise CheckpointFileError(message)
            if length > HEADER_BOUNDS.size:
                raise CheckpointFileError(f"{path}: its header has {length:,} bytes; at most {HEADER_BOUNDS.size:,} are read")
            text = file.read(length)
    except CheckpointFileError:
        raise
    except (OSError, ValueError) as e:  # ValueError: a path with a null character
        raise CheckpointFileError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e
    return parse_json(text, f"{path}: its header", bounds=HEADER_BOUNDS, error=CheckpointFileError), 8 + length, about.st_size


def _tensor_info(path: pathlib.Path, name: str, entry: Any, data: int, size: int) -> TensorInfo:
    """One entry of a header. `data`: where the tensors begin; `size`: of the file."""
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > MOST_AXES:
            raise ValueError(f"{len(shape):,} axes; at most {MOST_AXES} are read")
        if any(type(n) is not int or n < 0 for n in (*shape, start, end)) or type(kind) is not str:
            raise ValueError("sizes and offsets are integers of at least 0, a dtype is a string")
    except (KeyError, TypeError, ValueError) as e:
        raise CheckpointFileError(f"{path}: the header's entry for {name!r} is malformed ({str(e)[:200]!r}); the file is corrupt") from e
    if kind not in DTYPES:
        known = f"{', '.join(DTYPES)} are read (quantised files are not)"
        raise CheckpointFileError(f"{path}: {name} has dtype {repr(kind[:40])[1:-1]}; {known}")
    if end - start != math.prod(shape) * DTYPES[kind].itemsize:
        raise CheckpointFileError(
            f"{path}: {name} {str(list(shape))[:80]} {kind} does not fill its {_short(end - start)} bytes; the file is corrupt"
        )
    if data + end > size:
        raise CheckpointFileError(
            f"{path}: truncated: {name} ends at byte {_short(data + end)}, the file at {size}; copy it again"
        )
    return TensorInfo(path, DTYPES[kind], shape, data + start, name)


def _short(number: int) -> str:
    return str(number) if abs(number) < 10**20 else f"{str(number)[:20]}..."


def find_tensors(directory: str | os.PathLike) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names.

    Raises `CheckpointFileError` where both are there and mean different weights: other readers would take the single file.
    """
    directory = pathlib.Path(directory)
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index.exists():
        if not single.exists():
            raise CheckpointFileError(f"{directory}: has neither model.safetensors nor model.safetensors.index.json")
        return read_header(single)
    placed = read_json_file(index, error=CheckpointFileError).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointFileError(f"{index}: not a safetensors index (weight_map must be an object: tensor to file name)")
    if outside := [name for name in placed.values() if pathlib.PurePath(name).name != name or len(name) > 255 or not name.isprintable()]:
        raise CheckpointFileError(f"{index}: {outside[0][:200]!r} is no file name in {directory}")
    if len(set(placed.values())) > MOST_SHARDS:
        raise CheckpointFileError(f"{index}: names {len(set(placed.values())):,} files; at most {MOST_SHARDS:,} are read")
    if single.exists() and single.name not in placed.values():
        raise CheckpointFileError(
            f"{directory}: holds two sets of weights, {single.name} and the shards of {index.name}, which does not name it; delete the one "
            "that is out of date (the index with its shards, or the single file)"
        )
    files = {name: read_header(directory / name) for name in sorted(set(placed.values()))}
    seen: dict[str, str] = {}
    for name, file in files.items():
        if twice := sorted(seen.keys() & file.keys()):
            raise CheckpointFileError(f"{index}: {twice[0]} is in {seen[twice[0]]} and in {name}; which is meant?")
        seen |= dict.fromkeys(file, name)
    missing = [f"{name} (in {file})" for name, file in placed.items() if name not in files[file]]
    if missing:
        raise CheckpointFileError(f"{index}: names tensors that its shards do not hold: {', '.join(missing[:8])}")
    return {name: info for file in files.values() for name, info in file.items()}


def read_into(out: np.ndarray, info: TensorInfo, rows: slice, columns: slice, transpose: bool = False) -> None:
    """Fills `out` with `tensor[rows, columns]` (or its transpose), a block of rows at a time, converting the dtype on the way.

    A vector counts as one column. Only the rows' bytes are read; beside `out` at most a block of them is held.
    """
    width = math.prod(info.shape[1:])
    first, last, _ = rows.indices(info.shape[0] if info.shape else 1)
    target = out.T if transpose else out
    stride = max(1, min(BLOCK, max(1 << 16, out.nbytes // 16)) // max(1, width * info.dtype.itemsize))
    with info.file.open("rb") as file:
        for start in range(first, last, stride):
            stop = min(start + stride, last)
            file.seek(info.offset + start * width * info.dtype.itemsize)
            raw = file.read((stop - start) * width * info.dtype.itemsize)
            block = np.frombuffer(raw, info.dtype)
            if len(block) != (stop - start) * width:
                raise CheckpointFileError(f"{info.file}: ended while it was read; was it changed meanwhile?")
            block = block.reshape(stop - start, width)[:, columns]
            part = target[start - first : stop - first]
            with np.errstate(over="ignore", invalid="ignore"):  # what the wanted dtype cannot hold is infinite, and refused
                part[...] = block if target.ndim == 2 else block[:, 0]
            if not np.isfinite(part).all():
                raise CheckpointFileError(
                    f"{info.file}: {info.name} holds NaN, infinity or a number beyond {target.dtype}; its training failed, or it is damaged"
                )


class Entry(NamedTuple):
    """A tensor to write: its shape and a function that makes its values when its turn comes."""

    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def write_tensors(path: str | os.PathLike, tensors: Iterable[tuple[str, Entry]], dtype) -> int:
    """Writes one file, a tensor at a time, atomically; returns the bytes of tensor data."""
    path, dtype = pathlib.Path(path), np.dtype(dtype)
    tensors, header, at = list(tensors), {"__metadata__": {"format": "pt"}}, 0
    for name, entry in tensors:
        size = math.prod(entry.shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, entry in tensors:
            values = np.ascontiguousarray(entry.make().astype(dtype, copy=False))
            if values.shape != entry.shape:
                raise ValueError(f"{name}: made values of shape {values.shape} for an entry of shape {entry.shape}")
            file.write(values.tobytes() if values.ndim == 0 else memoryview(values.view(np.uint8)))
    partial.replace(path)
    return at
