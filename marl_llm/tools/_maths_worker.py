"""The process in which answers are parsed and compared: `python -m marl_llm.tools._maths_worker`, spoken to by `marl_llm.tools.maths`.

The first process imports sympy once and forks; the fork answers jobs, one JSON line each, until one of them kills it, and the next fork is
there within milliseconds. The CPU time of a job is bounded by the kernel (`ITIMER_PROF` with its default action, death), so that neither a
regular expression nor a power tower in C code can outlive it, and the signal tells the answer's doing from the machine's.
"""

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


def readable(target: str) -> bool:
    """Whether a target says anything. It is evaluated too, so that one that is too hard is found before any answer is blamed for it."""
    from marl_llm.tools._maths_read import read
    from marl_llm.tools._maths_values import Words, single_number

    value = read(target)
    single_number(value)
    return value != Words("")


def compare(answer: str, target: str, delta: float, exact_integers: bool) -> tuple[bool, str]:
    """Whether an answer equals a target, and by which rule; `target` has been read before."""
    from marl_llm.tools._maths_read import read
    from marl_llm.tools._maths_text import LETTER, choice_letter, unwrap
    from marl_llm.tools._maths_values import Words, same, single_number

    if " ".join(answer.split()) == " ".join(target.split()):
        return True, "same_text"
    choice = choice_letter(answer) if LETTER.fullmatch(unwrap(target)) else None
    if choice and not isinstance(read(choice[1]), Words):
        answer = choice[0]
    a, b = read(answer), read(target)
    if a == Words(""):
        return False, "unparsable"
    if same(a, b, 0):
        return True, "math_verify"
    if exact_integers:
        return (True, "numeq") if delta > 0 and same(a, b, delta) else (False, "different")
    numbers = [single_number(value) for value in (a, b)]
    return (True, "numeq") if None not in numbers and numeq(*numbers, delta) else (False, "different")


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
        try:
            if not readable(job["target"]):
                reply = dict(bad_target=True)
            else:
                say(job=job["job"], stage="answer")
                correct, reason = compare(job["answer"], job["target"], job["delta"], job["exact_integers"])
                reply = dict(correct=correct, reason=reason)
        except Exception:  # sympy raises all kinds; the parent calls it "crashed", or a bad target
            os._exit(1)
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

    readable("x + 1")  # imports sympy and builds the grammar before the first fork
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
