"""Workers that run one repetition at a time, as JSON lines on stdin and stdout, so that those of several libraries interleave.

Imported by interpreters that do not have this project: standard library only.
"""

import json
import os
import subprocess
import sys


def pin(threads: int) -> None:
    """Binds this process to `threads` of the cores that it may use. Must run before a library counts them."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[-threads:]))


def serve(prepare) -> None:
    """Answers `{"run": name}` lines with the figures of `prepare()[name]()`, a dict, until stdin ends.

    Whatever libraries print goes to stderr. The first answer says that the worker is ready.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr

    def answer(**fields):
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    tasks = prepare()
    answer(ready=sorted(tasks))
    for line in sys.stdin:
        answer(**tasks[json.loads(line)["run"]]())


class Worker:
    """A process that serves tasks. Raises `RuntimeError` with the end of its stderr when it dies."""

    def __init__(self, command: list[str], log: str, **environment: str):
        self.log = log
        with open(log, "w") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=os.environ | environment
            )
        self.tasks = self._answer()["ready"]

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            with open(self.log) as file:
                raise RuntimeError(f"{' '.join(self.process.args)} ended:\n{file.read()[-2000:]}")
        return json.loads(line)

    def run(self, task: str) -> dict:
        """One repetition."""
        self.process.stdin.write(json.dumps({"run": task}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()
