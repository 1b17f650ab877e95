"""Checks mathematical answers, in processes with hard limits. `marl_llm.tools._maths_read` states the rules of what an answer means.

A response's final answer is its last complete `\\boxed{...}`, or else what follows its last `####` (GSM8K, and the Reasoner of
Stronger-MAS). Text before it counts for nothing, so a response cannot list candidates.

Two limits keep outcomes and failures apart. The *CPU* limit of a check is the answer's own affair: an answer that needs more to be
understood is an outcome, "not correct, cpu_limit". The *wall* deadline is the machine's: passing it without having used the CPU time
says that the machine was busy, and is a failure that earns nobody a reward.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from marl_llm.tools._calls import Calls
from marl_llm.tools._maths_text import is_number
from marl_llm.tools._maths_worker import numeq
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.untrusted import read_json, valid_text

__all__ = ["FORMS", "MathsChecker", "Verdict", "extract_answer", "extract_target", "is_number", "numeq"]

FORMS = ("any", "boxed", "hashes")
START_S = 60.0  # a worker that has not imported sympy by then will not
HASHES = re.compile(r"^[ \t]*(\*\*)?####(?!#)[ \t]*(\S[^\n]*?)(?(1)\*\*[ \t\r]*)$", re.MULTILINE)
BRACE = re.compile(r"\\\\?(?:boxed|fbox)\s*(?:(?P<box>\{)|(?P<bare>[-+]?\d[^\s{}\\$]*|[A-Z](?![A-Za-z])))|\\\\|\\[{}]|[{}]")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was found about an answer. This is an outcome: it may become a reward.

    Attributes:
      correct: whether the answer equals the target.
      reason: the rule that decided: `same_text`, `math_verify` (the same meaning) or `numeq` (near enough) for a correct answer;
        `different`, `no_answer` (no box, no hashes), `unparsable`, `too_long`, `cpu_limit` or `crashed` (its parsing crashed the worker)
        for an incorrect one.
      answer: the text of the final answer; None where there is none.
    """

    correct: bool
    reason: str
    answer: str | None


def extract_answer(response: str, form: str = "any") -> str | None:
    """The final answer of a response, or None. Linear in the length of the response.

    What stands before the end of a thought (`</think>`), or in one that does not end, is no answer.

    Args:
      form: `boxed`: the last complete `\\boxed{...}`; `hashes`: the rest of the last line that starts with exactly `####`, without a box
        around it; `any`: the box, and where there is none, the hashes.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {FORMS}, not {form!r}")
    response = response.rpartition("</think>")[2].partition("<think>")[0]
    boxed, hashes = _last_boxed(response), _after_hashes(response)
    if form == "hashes":
        return hashes[0]
    return boxed[0] if boxed[0] is not None or form == "boxed" else hashes[0]


def extract_target(text: str) -> str:
    """The answer of a reference solution: its last box or line behind `####`, whichever comes later; without these the whole text.

    GSM8K's solutions end in `#### 42` and may hold a box in their working; those of MATH end in a box.
    """
    (answer, _) = max(_last_boxed(text), _after_hashes(text), key=lambda candidate: candidate[1] if candidate[0] else -1)
    return (answer or text).strip()


def _after_hashes(text: str) -> tuple[str | None, int]:
    """(the text behind the last `####`, without a box around it; its place)."""
    lines = list(HASHES.finditer(text))
    if not lines:
        return None, -1
    inner, _ = _last_boxed(lines[-1][2])
    return (lines[-1][2] if inner is None else inner).strip() or None, lines[-1].end()


def _last_boxed(text: str) -> tuple[str | None, int]:
    """Content of the box that closes last, so of the outer one of two nested, and where it closes; escaped braces are no braces."""
    opened: list[int | None] = []  # per open brace: where a box's content starts, or None
    start, end, behind = 0, -1, -1
    for brace in BRACE.finditer(text):
        if brace["bare"]:
            start, end, behind = brace.start("bare"), brace.end(), brace.end()
        elif brace["box"] or brace.group() == "{":
            opened.append(brace.end() if brace["box"] else None)
        elif brace.group() == "}" and opened and (inside := opened.pop()) is not None:
            start, end, behind = inside, brace.start(), brace.end()
    return (text[start:end].strip() or None if behind >= 0 else None), behind


class _Lost(Exception):
    """A worker process ended or fell silent."""


class _Worker:
    """One process tree that answers jobs one at a time."""

    def __init__(self, memory_mb: int):
        self._memory_mb = memory_mb
        self._process: subprocess.Popen | None = None
        self._buffer = b""
        self._ready = False

    def start(self) -> None:
        """Starts the process if it is not there, and waits until it takes jobs.

        Raises:
          _Lost: it ended, or was not ready in `START_S` seconds.
        """
        if self._process is None:
            keep = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TMPDIR") if name in os.environ}
            path = os.pathsep.join(entry for entry in sys.path if entry) or os.getcwd()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "marl_llm.tools._maths_worker", str(self._memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=keep | dict(PYTHONPATH=path, PYTHONHASHSEED="0"),
                start_new_session=True,
            )
            self._buffer, self._ready = b"", False
        end = time.monotonic() + START_S
        while not self._ready:
            if self.message(end) is None:
                raise _Lost(f"the worker was not ready in {START_S:.0f} s")

    def send(self, **job: Any) -> None:
        """Hands over one job."""
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise _Lost("the worker process ended") from error

    def message(self, end: float) -> dict | None:
        """The next message, or None when `end` (monotonic seconds) passes."""
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            received = os.read(self._process.stdout.fileno(), 65_536)
            if not received:
                raise _Lost("the worker process ended")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = read_json(line).value
        if not isinstance(message, dict):
            raise _Lost("the worker's message cannot be read")
        if "ready" in message or "died" in message:
            self._ready = "ready" in message
        return message

    def kill(self) -> None:
        """Ends the process and its fork; the next `start` makes new ones."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):  # what was not written has no reader any more
            self._process.stdin.close()
        self._process.stdout.close()
        self._process = None


class MathsChecker:
    """Compares responses with target answers.

    Args:
      workers: processes, and checks at a time; each takes about 100 MB.
      deadline_s: wall time of one check, from when a worker takes it up.
      cpu_s: CPU time that one answer may use.
      memory_mb: memory that one answer may use.
      max_chars: longest answer that is looked at.
      delta: by what part of the target a decimal may differ from it; 0: by nothing.
      exact_integers: whether numbers that are written exactly, integers above all, are compared exactly, and only decimals with `delta`.
        False is the paper: any two numbers are compared by `numeq`, which equates neighbours above 1/δ and all numbers below δ.
      attempts: most tries of a check whose worker was lost or starved.

    Raises:
      ImportError: math-verify is not installed.
    """

    def __init__(
        self,
        workers: int = 2,
        deadline_s: float = 10.0,
        cpu_s: float = 1.0,
        memory_mb: int = 512,
        max_chars: int = 2000,
        delta: float | int = 1e-6,
        exact_integers: bool = True,
        attempts: int = 2,
    ):
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("checking answers needs math-verify: pip install 'marl_llm[tools]'")
        if not 0 < cpu_s < deadline_s:
            raise ValueError(f"cpu_s ({cpu_s}) must be positive and below deadline_s ({deadline_s}): else every hard answer is a failure")
        if attempts < 1 or delta < 0:
            raise ValueError(f"attempts must be at least 1 and delta at least 0, not {attempts} and {delta}")
        self.deadline_s, self.cpu_s, self.max_chars, self.attempts = deadline_s, cpu_s, max_chars, attempts
        self._rules = dict(cpu_s=cpu_s, delta=delta, exact_integers=exact_integers)
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._workers = [_Worker(memory_mb) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._calls: Calls = Calls(self._check, workers, "maths-checker")
        self._jobs, self._lock = 0, threading.Lock()

    def check(self, response: str, target: str, form: str = "any") -> ToolResult[Verdict]:
        """Whether the final answer of `response` equals `target` (an answer, or a solution that ends in one)."""
        return self._calls.call(self._request(response, target, form))

    def check_batch(self, responses: Sequence[str], targets: Sequence[str], form: str = "any") -> list[ToolResult[Verdict]]:
        """Many checks, in order."""
        return self._calls.batch([self._request(*pair, form) for pair in zip(responses, targets, strict=True)])

    async def acheck(self, response: str, target: str, form: str = "any") -> ToolResult[Verdict]:
        """`check` from an event loop."""
        return await self._calls.acall(self._request(response, target, form))

    async def acheck_batch(self, responses: Sequence[str], targets: Sequence[str], form: str = "any") -> list[ToolResult[Verdict]]:
        """`check_batch` from an event loop."""
        return await self._calls.abatch([self._request(*pair, form) for pair in zip(responses, targets, strict=True)])

    def close(self) -> None:
        """Ends threads and processes."""
        self._calls.close()
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "MathsChecker":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _request(self, response: str, target: str, form: str) -> tuple[str | None, str]:
        return extract_answer(valid_text(response), form), extract_target(target)

    def _check(self, request: tuple[str | None, str]) -> ToolResult[Verdict]:
        answer, target = request
        start = time.monotonic()
        if not target or len(target) > self.max_chars:
            return failed(FailureKind.BAD_INPUT, f"the target has {len(target)} characters; 1 to {self.max_chars} can be checked", 0.0)
        if answer is None:
            return success(Verdict(False, "no_answer", None), 0.0)
        if len(answer) > self.max_chars:
            return success(Verdict(False, "too_long", answer[: self.max_chars]), 0.0)
        worker = self._idle.get()
        try:
            for attempt in range(1, self.attempts + 1):
                try:
                    verdict = self._ask(worker, answer, target)
                except _Lost as error:
                    worker.kill()
                    kind, message = FailureKind.CRASH, str(error)
                else:
                    if isinstance(verdict, Verdict):
                        return success(verdict, time.monotonic() - start, attempt)
                    kind, message = verdict
                    if kind == FailureKind.BAD_INPUT:
                        break
            return failed(kind, message, time.monotonic() - start, attempt)
        finally:
            self._idle.put(worker)

    def _ask(self, worker: _Worker, answer: str, target: str) -> Verdict | tuple[FailureKind, str]:
        worker.start()
        with self._lock:
            self._jobs += 1
            job = self._jobs
        worker.send(job=job, answer=answer, target=target, **self._rules)
        end = time.monotonic() + self.deadline_s
        on_answer = False
        while (message := worker.message(end)) is not None:
            if "died" in message:
                return _after_death(message["died"], on_answer, answer, target)
            if message.get("job") != job:
                continue
            if "stage" in message:
                on_answer = True
            elif "bad_target" in message:
                return FailureKind.BAD_INPUT, f"nothing can be read in the target {target!r}"
            else:
                return Verdict(message["correct"], message["reason"], answer)
        worker.kill()
        return FailureKind.DEADLINE, f"no verdict in {self.deadline_s} s of wall time, and the CPU limit of {self.cpu_s} s was not reached"


def _after_death(sent: int, on_answer: bool, answer: str, target: str) -> Verdict | tuple[FailureKind, str]:
    """What the death of a fork says (`sent`: the signal, 0 for an exception): the answer's doing, the target's, or the machine's."""
    if sent not in (0, signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
        return FailureKind.CRASH, f"the worker was ended from outside (signal {sent})"
    if not on_answer:
        return FailureKind.BAD_INPUT, f"the target {target!r} cannot be parsed within the limits (signal {sent})"
    return Verdict(False, "cpu_limit" if sent == signal.SIGPROF else "crashed", answer)
