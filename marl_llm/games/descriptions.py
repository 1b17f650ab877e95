"""Texts that every machine has: descriptions of functions, classes and methods in Python's standard library (PSF licence).

They are the docstrings of the Python that runs, so that another version has slightly other ones. Which split a description belongs to
follows from its text.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from marl_llm.games.kit.miniature import SHARES
from marl_llm.workflows.splits import split_of
from marl_llm.workflows.trajectory import Task

MODULES = (
    "argparse", "ast", "asyncio", "base64", "bisect", "builtins", "bz2", "calendar", "cmath", "codecs", "collections", "concurrent.futures",
    "configparser", "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "dis", "email.message", "enum", "fileinput", "fnmatch",
    "fractions", "functools", "gc", "getpass", "gettext", "glob", "gzip", "hashlib", "heapq", "hmac", "html", "http.client",
    "importlib.util", "inspect", "io", "ipaddress", "itertools", "json", "keyword", "linecache", "locale", "logging", "lzma", "math",
    "mimetypes", "multiprocessing.pool", "numbers", "operator", "os", "os.path", "pathlib", "pickle", "platform", "plistlib", "pprint",
    "queue", "random", "re", "sched", "secrets", "select", "selectors", "shelve", "shlex", "shutil", "signal", "smtplib", "socket",
    "socketserver", "ssl", "stat", "statistics", "string", "struct", "subprocess", "sys", "sysconfig", "tarfile", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "traceback", "types", "unicodedata", "unittest", "urllib.parse",
    "urllib.request", "uuid", "warnings", "wave", "weakref", "xml.etree.ElementTree", "zipfile", "zlib", "zoneinfo",
)  # fmt: skip


@functools.cache
def descriptions(fewest: int, most: int) -> tuple[tuple[str, str], ...]:
    """(name, description) of everything whose description has so many words, in the order of the modules; each text once."""
    names: dict[str, str] = {}
    for name, member in _documented():
        text = " ".join((inspect.getdoc(member) or "").split())
        if fewest <= len(text.split()) <= most:
            names.setdefault(text, name)
    return tuple((name, text) for text, name in names.items())


def _documented() -> Iterator[tuple[str, Any]]:
    """The public functions and classes of the modules, and the methods of the classes."""
    for module in MODULES:
        held = vars(importlib.import_module(module))
        for name, member in held.items():
            if name.startswith("_") or not (inspect.isroutine(member) or inspect.isclass(member)):
                continue
            yield f"{module}.{name}", member
            for own, method in vars(member).items() if inspect.isclass(member) else ():
                if not own.startswith("_") and inspect.isroutine(method):
                    yield f"{module}.{name}.{own}", method


def description_tasks() -> dict[str, list[Task]]:
    """Split -> its tasks, with the description as `post`."""
    parts: dict[str, list[Task]] = {split: [] for split in SHARES}
    for _, text in descriptions(18, 45):
        split = split_of(text, SHARES)
        parts[split].append(Task(len(parts[split]), {"post": text}, {}, split))
    return parts
