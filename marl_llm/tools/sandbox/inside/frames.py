"""What crosses the fence: a job goes in as one message with file descriptors, a record comes out through a pipe, payloads are files.

The zygote never reads a payload, so no later candidate finds an earlier one in its memory: code, standard input and workspace are memory
files that only the process of one execution opens.
"""

import json
import os
import struct

# The descriptors of a job message, in order. An unused place holds /dev/null.
PAYLOAD, STDIN, STDOUT, STDERR, RECORD, WORKSPACE_IN, WORKSPACE_OUT, CHANNEL = range(8)
FD_COUNT = 8
MAX_MESSAGE = 4096  # bytes of a job message, and of a record: one atomic write to a pipe
_HEAD = struct.Struct("<QQ")


def pack_payload(code: bytes, calls: bytes = b"") -> bytes:
    """Source and the (possibly empty) description of calls, as one string of bytes."""
    return _HEAD.pack(len(code), len(calls)) + code + calls


def unpack_payload(data: bytes) -> tuple[bytes, bytes]:
    """Inverse of `pack_payload`."""
    code, calls = _HEAD.unpack_from(data)
    start = _HEAD.size
    return data[start : start + code], data[start + code : start + code + calls]


def read_file(fd: int) -> bytes:
    """All of a memory file, without moving its offset."""
    size, parts, at = os.fstat(fd).st_size, [], 0
    while at < size:
        part = os.pread(fd, size - at, at)
        if not part:
            break
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def write_all(fd: int, data: bytes) -> None:
    """Writes all bytes, or raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def dump(message: dict) -> bytes:
    """A message or record; ValueError when it would not fit one atomic write."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(data)} bytes does not fit {MAX_MESSAGE}")
    return data
