"""What an ordinary interpreter has and does around a program, for one that starts as a fork of the zygote and ends with `os._exit`.

Standard streams that know the descriptors that they write to, the names of `site` (`exit`, `quit`), the files /dev/stdin and its like
without a /proc, and the end: threads joined, exit functions, everything flushed that the interpreter would flush.
"""

import atexit
import builtins
import gc
import io
import os
import site
import sys
import threading

from . import linux

# Files that are one of the program's own descriptors; on Linux they lead to /proc, which no box has.
STREAMS = {f"{folder}/{number}": number for folder in ("/dev/fd", "/proc/self/fd") for number in range(3)}
STREAMS |= {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
# What LeetCode's and LiveCodeBench's judges import in front of a solution; later ones win.
CONTEST_MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics", "itertools", "functools",
    "operator", "io", "sys", "json", "typing",
)  # fmt: skip


def add_site_names() -> None:
    """`exit`, `quit`, `help` and the like. The zygote starts without `site`, which would look for packages."""
    site.setquit()
    site.setcopyright()
    site.sethelper()


def reach_streams_by_path() -> None:
    """Lets `open` and `os.open` find the files of `STREAMS`."""

    def reaching(original):
        def open(file, *args, **kwargs):
            path = file.__fspath__() if hasattr(file, "__fspath__") else file
            number = STREAMS.get(path) if type(path) is str else None
            return original(file if number is None else os.dup(number), *args, **kwargs)

        open.__doc__, open.__module__ = original.__doc__, original.__module__
        return open

    def os_open(path, flags, mode=0o777, *, dir_fd=None):
        number = STREAMS.get(path) if type(path) is str else None
        return original_os_open(path, flags, mode, dir_fd=dir_fd) if number is None else os.dup(number)

    original_os_open = os.open
    os_open.__name__ = os_open.__qualname__ = "open"
    builtins.open = io.open = reaching(io.open)
    os.open = os_open


class ListNode:
    """A node of a linked list, as judges of contests define it."""

    def __init__(self, val=0, next=None):
        self.val, self.next = val, next


class TreeNode:
    """A node of a binary tree, as judges of contests define it."""

    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right


def contest_names() -> dict:
    """Names that a solution of a contest takes for granted: nodes, each module of `CONTEST_MODULES`, and what it exports."""
    names = {"ListNode": ListNode, "TreeNode": TreeNode}
    for module in map(__import__, CONTEST_MODULES):
        exported = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in exported}
    names |= {name: sys.modules[name] for name in CONTEST_MODULES if name != "datetime"}  # `datetime` is the class, as there
    return {name: value for name, value in names.items() if not hasattr(builtins, name)}


def open_streams() -> None:
    """`sys.stdin`, `sys.stdout` and `sys.stderr` for the present descriptors 0 to 2, as the interpreter makes them.

    Those of the zygote believe that they are /dev/null, which can seek.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        buffer = open(number, f"{mode}b", closefd=False)
        buffer.raw.name = f"<{name}>"
        errors = "backslashreplace" if number == 2 else "surrogateescape"
        text = io.TextIOWrapper(buffer, "utf-8", errors, newline="\n", line_buffering=number == 2)
        text.mode = mode
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def finish(namespace: dict) -> int:
    """Ends as the interpreter does: threads, exit functions, streams, then globals and what they alone held. Returns 0, or 120 where
    standard output or error could not be flushed.

    The interpreter clears every module. Here the main one is cleared, and of what other modules still hold the files are flushed.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    code = flush_streams()
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    for name in sorted((n for n in namespace if type(n) is str), key=lambda n: not n.startswith("_")):
        if name != "__builtins__":
            namespace[name] = None
    gc.collect()
    for held in gc.get_objects():  # the zygote's own are frozen, and not among them
        if type(held) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            try:
                held.flush()
            except (OSError, ValueError):  # closed, detached, or for reading only
                pass
    linux.libc.fflush(None)  # what a C library printed
    return code


def flush_streams() -> int:
    """Flushes `sys.stdout` and `sys.stderr`, whatever a program put there; 120 if one cannot be, as the interpreter ends then, else 0."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not is_closed(stream):
                stream.flush()
        except BaseException:  # whatever a program's own stream raises
            code = 120
    return code


def is_closed(stream) -> bool:
    """Whether a stream says that it is closed; one that cannot say is not."""
    try:
        return bool(stream.closed)
    except Exception:
        return False
