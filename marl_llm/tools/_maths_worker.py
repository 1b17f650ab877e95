"""The process in which answers are parsed and compared: `python -m marl_llm.tools._maths_worker`, spoken to by `marl_llm.tools.maths`.

The first process imports math-verify once and forks; the fork answers jobs, one JSON line each, until one of them kills it, and the next
fork is there within milliseconds. The CPU time of a job is bounded by the kernel (`ITIMER_PROF` with its default action, death), so that
neither a regular expression nor a power tower in C code can outlive it, and the signal tells the answer's doing from the machine's.
"""

import functools
import json
import logging
import os
import resource
import signal
import sys
from typing import Any


def numeq(a: Any, b: Any, delta: float = 1e-6) -> bool:
    """Numeric equality of a value and a reference: |a - b| ≤ δ or |a - b| / max(1, |b|) ≤ δ (Stronger-MAS, Appendix B.1).

    As printed in the paper: integers above 1/δ pass with a neighbour (1,000,001 equals 1,000,000). False if either is not finite.
    """
    gap = abs(a - b)
    return bool(gap <= delta) or bool(gap / max(1, abs(b)) <= delta)


@functools.lru_cache(4096)
def parsed(text: str) -> list:
    """What math-verify makes of an answer: an expression, then its text; empty where it makes nothing of it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    config = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(f"\\boxed{{{text}}}", config, parsing_timeout=None)


def number(expressions: list) -> Any:
    """The finite number that an answer is, with 30 digits (integers: all of them); None for any other answer. Of `x = 5` it is 5."""
    import sympy

    value = next((item for item in expressions if isinstance(item, sympy.Basic)), None)
    if isinstance(value, sympy.Eq):
        value = value.rhs
    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return None
    try:
        value = value.doit()
        value = value if value.is_Integer else sympy.N(value, 30)
        return value if value.is_number and value.is_finite else None
    except (ArithmeticError, AttributeError, NotImplementedError, RecursionError, TypeError, ValueError):
        return None  # sympy cannot say which number it is


@functools.lru_cache(4096)
def reference(text: str) -> tuple[list, Any]:
    """A target, parsed and evaluated, so that one that is too hard is found before any answer is blamed for it."""
    expressions = parsed(text)
    return expressions, number(expressions)


def compare(answer: str, target: str, delta: float, exact_integers: bool) -> tuple[bool, str]:
    """Whether an answer equals a target, and by which rule."""
    from math_verify import verify

    if " ".join(answer.split()) == " ".join(target.split()):
        return True, "same_text"
    expressions = parsed(answer)
    if not expressions:
        return False, "unparsable"
    wanted, b = reference(target)
    if verify(wanted, expressions, timeout_seconds=None):
        return True, "math_verify"
    a = number(expressions)
    if a is None or b is None or (exact_integers and a.is_Integer and b.is_Integer):
        return False, "different"
    return (True, "numeq") if numeq(a, b, delta) else (False, "different")


def answer_jobs(lines, say, memory_mb: int) -> None:
    """Answers jobs until the input ends."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else open(os.devnull) as file:
        pages = file.read().split()
    if pages:  # elsewhere the address space has no useful limit, and the CPU limit alone must do
        limit = int(pages[0]) * os.sysconf("SC_PAGE_SIZE") + memory_mb * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    say(ready=True)
    while line := lines.readline():
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["cpu_s"])
        if not reference(job["target"])[0]:
            reply = dict(bad_target=True)
        else:
            say(job=job["job"], stage="answer")
            correct, reason = compare(job["answer"], job["target"], job["delta"], job["exact_integers"])
            reply = dict(correct=correct, reason=reason)
        signal.setitimer(signal.ITIMER_PROF, 0)
        say(job=job["job"], **reply)


def main() -> None:
    """Forks a process that answers jobs, and another one whenever it dies."""
    logging.disable(logging.CRITICAL)
    # Replies go through a private descriptor, so that nothing that a library prints can be taken for one.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    parsed("1")  # imports math-verify and builds its grammar before the first fork
    parsed.cache_clear()
    while True:
        child = os.fork()
        if child == 0:
            answer_jobs(sys.stdin.buffer, say, int(sys.argv[1]))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            return
        say(died=os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


if __name__ == "__main__":
    main()
