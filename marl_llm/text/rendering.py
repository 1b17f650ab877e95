"""Renders a stranger's chat template (Jinja, extra `hf`) in a process of its own, which a deadline and a memory limit end.

A template is a program: it can loop for hours, make texts of gigabytes, or try to leave Jinja's sandbox. So one child per process, started
when it is first needed, renders for all of its threads. It holds no files, can start no processes, and ends with its parent.
"""

from __future__ import annotations

import atexit
import datetime
import importlib.util
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from marl_llm.untrusted import Bounds, read_json, valid_text

CPU_S = 0.5  # of one rendering; ordinary ones take milliseconds
MEMORY = 48 << 20  # bytes of one rendering, its messages included
LARGEST = 4 << 20  # bytes of messages and template, and characters of what is rendered
WAIT_S = 20.0  # until a child that does not answer is given up; it counts where the machine, not the template, is slow
START_S = 60.0
_CHILD = pathlib.Path(__file__).with_name("template_child.py")
_REPLY = Bounds(size=8 * LARGEST)


class TemplateError(ValueError):
    """A template cannot be rendered; the text says why."""


class TemplateLimitError(TemplateError):
    """... because it took more time or memory than a template is given."""


def render(source: str, variables: Mapping[str, Any], now: datetime.datetime, seconds: float = CPU_S) -> str:
    """What a template makes of the variables.

    Args:
      source: the template.
      variables: names and values that JSON can hold.
      now: the time that `strftime_now` tells.
      seconds: of processor time that it may take.

    Raises:
      TemplateError: it is no Jinja, it refuses the variables, or JSON cannot hold them.
      TemplateLimitError: it takes more than `seconds` or `MEMORY` bytes, or makes more than `LARGEST` characters.
    """
    return _CHILD_OF_THIS_PROCESS.ask(source, variables, now, seconds)


def check_syntax(source: str) -> None:
    """Compiles a template. Raises `TemplateError` if it is no Jinja, or compiling takes too much."""
    _CHILD_OF_THIS_PROCESS.ask(source, None, datetime.datetime.min, CPU_S)


class _Child:
    """The process that renders. Threads take turns; after a fork each side has its own."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._link: socket.socket | None = None

    def forget(self) -> None:
        """In a forked process: the child belongs to the process before the fork."""
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self.__init__()

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._link.close()
            self._process = self._link = None

    def ask(self, source: Any, variables: Mapping[str, Any] | None, now: datetime.datetime, seconds: float) -> str:
        """See `render`; without variables the template is compiled only."""
        if not isinstance(source, str):
            raise TemplateError(f"a chat template must be a text, not {type(source).__name__}")
        request = {"source": source, "variables": variables, "now": now.isoformat(), "most": LARGEST, "seconds": seconds}
        try:
            data = json.dumps(request, default=dict).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"what the chat template is given is no JSON: {str(error)[:200]}") from error
        if len(data) > LARGEST:
            raise TemplateLimitError(f"the chat template with its messages has {len(data):,} bytes; at most {LARGEST:,} are rendered")
        with self._lock:
            try:
                reply = self._exchange(data, seconds)
            except BaseException:  # also of the caller's interrupt: what the child says next would answer another question
                self.close()
                raise
            if reply.get("limit"):
                self.close()
        if "syntax" in reply:
            raise TemplateError(f"the chat template is no Jinja: line {reply['syntax']}, {valid_text(str(reply['error']))}")
        if "error" in reply:
            kind = TemplateLimitError if reply.get("limit") else TemplateError
            raise kind(f"the chat template refuses: {valid_text(str(reply['error']))}")
        return valid_text(reply["text"])

    def _exchange(self, data: bytes, seconds: float) -> dict[str, Any]:
        if self._process is not None and self._process.poll() is not None:  # somebody ended it since
            self.close()
        if self._process is None:
            self._start()
        self._link.settimeout(WAIT_S)
        try:
            self._link.sendall(struct.pack("<I", len(data)) + data)
            return self._receive(time.monotonic() + WAIT_S)
        except OSError as error:  # TimeoutError is one
            self._process.kill()
            ended = self._process.wait()
            if ended == -signal.SIGPROF:
                reason = f"it takes more than {seconds} s"
            elif isinstance(error, TimeoutError):
                reason = f"it gave no answer within {WAIT_S:.0f} s"
            else:
                reason = f"the process that renders it ended (status {ended})"
            raise TemplateLimitError(f"the chat template refuses: {reason}") from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        size = struct.unpack("<I", self._bytes(4, deadline))[0]
        reply = read_json(self._bytes(size, deadline), _REPLY) if size <= _REPLY.size else None
        if reply is None or not isinstance(reply.value, dict) or not isinstance(reply.value.get("text", ""), str):
            raise ConnectionError("the child's reply is none")
        return reply.value

    def _bytes(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            self._link.settimeout(max(0.001, deadline - time.monotonic()))
            part = self._link.recv(min(size, 1 << 20))
            if not part:
                raise ConnectionError("closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _start(self) -> None:
        folders = [str(pathlib.Path(_library(name).origin).parent.parent) for name in ("jinja2", "markupsafe")]
        arguments = [str(MEMORY), str(os.getpid()), *dict.fromkeys(folders)]
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_CHILD), *arguments], stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd="/", env={name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}, process_group=0,
            )  # fmt: skip
        try:
            self._receive(time.monotonic() + START_S)
        except OSError as error:
            raise RuntimeError(f"the process that renders chat templates did not start: {sys.executable} -I -S {_CHILD}") from error


def _library(name: str):
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"a checkpoint's chat template needs the library `{name}`: pip install 'marl_llm[hf]'")
    return spec


_CHILD_OF_THIS_PROCESS = _Child()
atexit.register(_CHILD_OF_THIS_PROCESS.close)
os.register_at_fork(after_in_child=_CHILD_OF_THIS_PROCESS.forget)
