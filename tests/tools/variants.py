"""Attacks on how a box is made and ended, behind `namespaces`: what got through, as JSON. Started by the lab as root and as a user.

python tests/tools/lab.py {root,user} tests/tools/variants.py
"""

import json
import os
import pathlib

from marl_llm.tools.sandbox import Limits, Sandbox, Submission, Workspace

NEIGHBOUR = "print('well')"
GROUP = "import os, signal\nos.kill(0, signal.SIGKILL)"
FIRST = """
import os, signal
for pid in (1, -1, os.getppid() or 1):
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)  # reaches nobody: -1 leaves out its sender and process 1
        except OSError:
            pass
print(os.getpid(), os.getppid(), os.getpgrp() == os.getpid())
"""
DESCRIPTORS = """
import os
for fd in range(3, 256):
    try:
        os.fstat(fd)
        print('BREACH', fd)
    except OSError:
        pass
"""
LEFT = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            time.sleep(0.01)
            open('/box/work/late', 'a').write('x')
    os._exit(0)
print(os.path.exists('late'), sorted(os.listdir('/box')), sorted(os.listdir('/dev/shm')))
open('/dev/shm/mine', 'w').close()
"""
RENAMED = """
import os
open('kept', 'w').write('mine')
try:
    os.rename('/box/work', '/box/other')
    os.symlink('/usr/lib', '/box/work')
except OSError:
    pass
"""
SLEEPERS = "import os\nfor _ in range(4):\n    os.fork()\nimport signal\nsignal.pause()"
ZOMBIES = """
import os, time
for _ in range(60):
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.001)
print('all')
"""


def shared_mappings(anchor: int) -> list[str]:
    """Writable shared mappings of the anchor and of all below it."""
    found, stack = [], [anchor]
    while stack:
        pid = stack.pop()
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines()
        found += [f"{pid} {line}" for line in maps if line.split()[1][1::2] == "ws"]
        stack += map(int, pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return found


def main() -> None:
    """Prints a list of breaches."""
    breaches = []

    def expect(good: bool, what: str, seen) -> None:
        if not good:
            breaches.append(f"{what}: {seen}"[:300])

    with Sandbox(workers=1) as sandbox:
        killed = sandbox.run(Submission(GROUP))
        expect(killed.outcome().signal == 9, "signal to the own group", killed)
        expect(sandbox.metrics()["sandbox/zygotes_lost"] == 0, "signal to the group of the zygote", sandbox.metrics())
        first = sandbox.run(Submission(FIRST))
        expect(first.stdout == "2 0 True\n" and first.attempts == 1, "signal to process 1", first)
        if os.geteuid() == 0:
            waits = sandbox.submit(Submission("import time\nprint(flush=True)\ntime.sleep(1)"))
            shared = shared_mappings(sandbox.zygotes()[0])
            expect(not shared and waits.result().ok, "memory that a program shares with others", shared)
        seen = sandbox.run(Submission(DESCRIPTORS)).stdout
        expect(seen == "", "an open descriptor", seen)
        pages = [sandbox.run(Submission(LEFT)).stdout for _ in range(3)]
        expect(set(pages) == {"False ['main.py', 'shm', 'tmp', 'work'] []\n"}, "left behind", pages)
        moved = sandbox.run(Submission(RENAMED, workspace=Workspace())).outcome()
        expect(moved.workspace is not None and moved.workspace.files() == {"kept": b"mine"}, "another folder as the workspace", moved)
        early = sandbox.run(Submission("import time\ntime.sleep(9)", limits=Limits(timeout_s=1e-6)))
        expect(early.timed_out, "ended before it began", early)
        after = sandbox.run_batch([Submission(NEIGHBOUR)] * 3)
        expect([done.stdout for done in after] == ["well\n"] * 3, "a job that nobody took was played later", after)
        slept = sandbox.run(Submission(SLEEPERS, limits=Limits(timeout_s=0.5)))
        expect(slept.timed_out and slept.seconds < 20, "sleepers", slept)
        many = sandbox.run(Submission(ZOMBIES, limits=Limits(processes=16, timeout_s=60)))
        expect(many.stdout == "all\n", "orphans are not reaped", many)
        expect(sandbox.metrics()["sandbox/zygotes_lost"] == 0, "a zygote was lost", sandbox.metrics())
    print(json.dumps(breaches))


if __name__ == "__main__":
    main()
