"""The code sandbox beside what is commonly done: latency, throughput, timeouts, leaks, and workers that are killed under load.

    python -m benchmarks.tools [--rows=latency,data_science,timeouts,leaks,kills,load,pipeline] [--executions=100000] [--kill_seconds=60]

Prints one JSON line per row. Every row that compares measures `subprocess.run` and the usual guard (a process group, RLIMIT_AS, functions
removed, killpg) in the same run, interleaved with the sandbox, so that a busy machine slows all alike. `cpu_ms` is the CPU time of
everything that an execution causes, read from the cpuacct cgroup where it may be made; null elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from absl import app, flags

from marl_llm.tools.sandbox import Limits, Sandbox, Submission

_ROWS = flags.DEFINE_list("rows", ["latency", "data_science", "timeouts", "leaks", "kills", "load", "pipeline"], "Which rows to measure.")
_REPEATS = flags.DEFINE_integer("repeats", 200, "Executions of print(1) per method; a tenth of it for data science.", lower_bound=10)
_EXECUTIONS = flags.DEFINE_integer("executions", 100_000, "Executions of the leak row.", lower_bound=100)
_KILL_SECONDS = flags.DEFINE_integer("kill_seconds", 60, "Length of the row that kills workers.", lower_bound=2)
_WORKERS = flags.DEFINE_integer("workers", os.cpu_count(), "Executions at a time.", lower_bound=1)

DATA_SCIENCE = """
import pandas as pd, numpy as np
from sklearn.linear_model import LinearRegression
df = pd.DataFrame({"a": np.arange(100.0), "b": np.arange(100.0) * 2, "g": list("xy") * 50})
model = LinearRegression().fit(df[["a"]], df["b"])
print(round(float(model.coef_[0]), 6), df.groupby("g").a.sum().to_dict(), len(df.describe().to_string()))
"""
GUARD = """
import faulthandler, os, resource, shutil, subprocess, sys, builtins
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
faulthandler.disable()
os.environ["OMP_NUM_THREADS"] = "1"
for name in "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename truncate unlink chroot".split():
    setattr(os, name, None)
shutil.rmtree = subprocess.Popen = builtins.help = None
exec(compile(sys.stdin.read(), "candidate", "exec"), {"__name__": "__main__"})
"""


def plain(code: str) -> str:
    """What a quick script does: the host's Python and environment."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout


def guarded(code: str) -> str:
    """What released systems do: a process group, a memory limit, dangerous functions removed."""
    command = [sys.executable, "-c", GUARD]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-1, text=True, start_new_session=True)
    try:
        return process.communicate(code, timeout=60)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def cpu_account() -> Iterator[Callable[[], float | None]]:
    """CPU milliseconds of this process and all it starts, from a cgroup of its own; None where that cannot be made."""
    folder = pathlib.Path("/sys/fs/cgroup/cpuacct") / f"bench_{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        yield lambda: None
        return
    try:
        yield lambda: int((folder / "cpuacct.usage").read_text()) / 1e6
    finally:
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(50):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def compare(code: str, profile: str, repeats: int, sandbox: Sandbox, account: Callable[[], float | None]) -> dict:
    """Median latency of one caller, then throughput with all workers, then CPU, per method."""
    sandbox.warm(profile)
    expected = plain(code)
    methods = {
        "sandbox": lambda: sandbox.run(Submission(code, profile=profile)).stdout,
        "subprocess": lambda: plain(code),
        "guard": lambda: guarded(code),
    }
    times, wrong = {name: [] for name in methods}, dict.fromkeys(methods, 0)
    for _ in range(repeats):
        for name, method in methods.items():
            tick = time.perf_counter()
            wrong[name] += method() != expected
            times[name].append(time.perf_counter() - tick)
    row = {}
    for name, method in methods.items():
        many = repeats * 4 if name == "sandbox" else repeats
        before, tick = account(), time.perf_counter()
        if name == "sandbox":
            good = sum(done.stdout == expected for done in sandbox.run_batch([Submission(code, profile=profile)] * many))
        else:
            with concurrent.futures.ThreadPoolExecutor(sandbox.workers) as pool:
                good = sum(out == expected for out in pool.map(lambda _, m=method: m(), range(many)))
        seconds, after = time.perf_counter() - tick, account()
        wrong[name] += many - good
        cpu = None if before is None else round((after - before) / many, 2)
        row[name] = {
            "median_ms": round(statistics.median(times[name]) * 1e3, 2),
            "per_second": round(many / seconds, 1),
            "cpu_ms": cpu,
            "wrong": wrong[name],
        }
    return row


def timeouts(sandbox: Sandbox) -> dict:
    """How far behind its limit a program is ended, under load: spinning, sleeping, deaf to signals, with children."""
    programs = [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import signal, time\nfor s in range(1, 32):\n  if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)",
        "import os\nfor _ in range(5): os.fork()\nwhile True: pass",
        "pow(7, 10**9)",
    ]
    late = []
    for limit in (0.3, 1.0):
        for done in sandbox.run_batch([Submission(code, limits=Limits(timeout_s=limit)) for code in programs * 4]):
            if not done.timed_out:
                raise RuntimeError(f"not ended at its limit: {done}")
            late.append(done.outcome().seconds - limit)
    return {"programs": len(late), "late_ms_median": round(statistics.median(late) * 1e3, 1), "late_ms_max": round(max(late) * 1e3, 1)}


def held(root: int) -> dict[str, int]:
    """Descriptors, mounts, processes, and memory of this process and of all below it."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = (int(fields[1]), fields[0])
    tree, size = {root}, 0
    while size != len(tree):
        size = len(tree)
        tree |= {pid for pid, (parent, _) in parents.items() if parent in tree}
    memory = descriptors = mounts = 0
    for pid in tree:
        with contextlib.suppress(OSError):
            memory += int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
            descriptors += len(os.listdir(f"/proc/{pid}/fd"))
            mounts += len(pathlib.Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    files = sum(len(os.listdir(folder)) for folder in ("/tmp", "/dev/shm"))
    zombies = sum(parents[pid][1] == "Z" for pid in tree if pid in parents)
    return {
        "processes": len(tree),
        "zombies": zombies,
        "descriptors": descriptors,
        "mounts": mounts,
        "memory_mb": memory >> 20,
        "files": files,
    }


def leaks(sandbox: Sandbox, executions: int) -> dict:
    """What a long run leaves: the same counts before and after, programs that misbehave among them."""
    mixture = [("print(1)", 30), ("raise ValueError", 5), ("import os, time\nif os.fork() == 0: os.setsid(), time.sleep(60)", 2),
               ("open('f', 'w').write('x' * 100000)\nopen('/dev/shm/s', 'w').write('y')", 3), ("import os\nos.abort()", 1)]  # fmt: skip
    codes = random.Random(0).choices([code for code, _ in mixture], [weight for _, weight in mixture], k=executions)
    sandbox.run_batch([Submission(code) for code in codes[:200]])
    time.sleep(1)
    before, tick, done = held(os.getpid()), time.perf_counter(), 0
    for start in range(0, executions, 2000):
        requests = [Submission(code, environment=i % 16) for i, code in enumerate(codes[start : start + 2000])]
        done += sum(result.ok for result in sandbox.run_batch(requests))
    seconds = time.perf_counter() - tick
    time.sleep(1)
    after = held(os.getpid())
    return {"executions": executions, "with_outcome": done, "per_second": round(executions / seconds, 1), "before": before, "after": after}


def kills(sandbox: Sandbox, seconds: int) -> dict:
    """A zygote is killed every second under load: every job must end once, with its own output and its own exit code."""
    end, killed, counts = time.monotonic() + seconds, 0, {"jobs": 0, "lost": 0, "doubled": 0, "wrong": 0, "failed": 0}
    stop = threading.Event()

    def kill():
        nonlocal killed
        while not stop.wait(1):
            for pid in random.sample(sandbox.zygotes(), min(1, len(sandbox.zygotes()))):
                os.kill(pid, signal.SIGKILL)
                killed += 1

    thread = threading.Thread(target=kill)
    thread.start()
    number, attempts = 0, 0
    while time.monotonic() < end:
        answers: dict[int, int] = {}
        futures = {}
        for _ in range(100):
            number += 1
            code = f"import time\ntime.sleep({random.random() * 0.05:.3f})\nprint({number})\nraise SystemExit({number % 5})"
            future = sandbox.submit(Submission(code, environment=number % 9))
            future.add_done_callback(lambda _, n=number, a=answers: a.__setitem__(n, a.get(n, 0) + 1))
            futures[number] = future
        for n, future in futures.items():
            result = future.result(timeout=120)
            attempts += result.attempts
            counts["failed"] += not result.ok
            counts["wrong"] += result.ok and (result.stdout, result.exit_code) != (f"{n}\n", n % 5)
        counts["jobs"] += len(futures)
        counts["lost"] += sum(n not in answers for n in futures)
        counts["doubled"] += sum(times > 1 for times in answers.values())
    stop.set()
    thread.join()
    return {"seconds": seconds, "killed": killed, "attempts": attempts, **counts}


def load(hanging: int = 32, honest: int = 32, limit_s: float = 1.0) -> dict:
    """Programs that hang beside honest ones on two workers: who passes, who is ended by the own limit, and how long each waited."""
    with Sandbox(workers=2) as sandbox:
        sandbox.warm()
        codes = ["while True: pass"] * hanging + ["print(1)"] * honest
        order = random.Random(0).sample(range(len(codes)), len(codes))
        limits = Limits(timeout_s=limit_s)
        done = sandbox.run_batch([Submission(codes[place], limits=limits, environment=place) for place in order])
    waits = sorted(result.queued_s for result in done)
    return {
        "workers": 2,
        "hanging": hanging,
        "honest": honest,
        "aborted": sum(not result.ok for result in done),
        "hanging_timed_out": sum(result.ok and result.timed_out for place, result in zip(order, done) if place < hanging),
        "honest_right": sum(result.ok and result.stdout == "1\n" for place, result in zip(order, done) if place >= hanging),
        "waiting_s_median": round(statistics.median(waits), 2),
        "waiting_s_p95": round(waits[int(0.95 * (len(waits) - 1))], 2),
    }


def pipeline(account: Callable[[], float | None], steps: int = 3, tables: int = 24, plays: int = 8) -> dict:
    """Steps of the small data pipeline with its scripted team, other tables in each: no model, so all but the tools is the controller.

    `programs` were asked for and `ran` went into a box, as the memo did not know them; `cpu_s` is the CPU time of host and boxes together.
    """
    from marl_llm.cli.coach import scripted
    from marl_llm.games import make_game
    from marl_llm.tools.sandbox import default_sandbox

    environment, seconds, used, asked, ran, whole = make_game("tiny_pipeline"), [], [], [], [], []
    scripted(environment, environment.script, environment.tasks("train", 0, 1), 1)  # starts the boxes
    for step in range(1, steps + 1):
        tasks, done, cpu_ms = environment.tasks("train", step * tables, tables), default_sandbox().metrics()["sandbox/done"], account()
        busy, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        rollout = scripted(environment, environment.script, tasks, plays)
        seconds.append(round(time.perf_counter() - begin, 2))
        after = resource.getrusage(resource.RUSAGE_SELF)
        used.append(round(after.ru_utime + after.ru_stime - busy.ru_utime - busy.ru_stime, 2))
        asked.append(sum(event.node.startswith("run_") for path in rollout.trajectories for event in path.events))
        ran.append(int(default_sandbox().metrics()["sandbox/done"] - done))
        whole.append(None if cpu_ms is None else round((account() - cpu_ms) / 1000, 2))
    return {"plays": tables * plays, "programs": asked, "ran": ran, "wall_s": seconds, "host_cpu_s": used, "cpu_s": whole}


def main(argv) -> None:
    """Measures and prints."""
    del argv
    with cpu_account() as account, Sandbox(workers=_WORKERS.value) as sandbox:
        sandbox.warm()
        rows = {
            "latency": lambda: compare("print(1)", "bare", _REPEATS.value, sandbox, account),
            "data_science": lambda: compare(DATA_SCIENCE, "data_science", max(5, _REPEATS.value // 10), sandbox, account),
            "timeouts": lambda: timeouts(sandbox),
            "leaks": lambda: leaks(sandbox, _EXECUTIONS.value),
            "kills": lambda: kills(sandbox, _KILL_SECONDS.value),
            "load": load,
            "pipeline": lambda: pipeline(account),
        }
        for name in _ROWS.value:
            if name not in rows:
                raise app.UsageError(f"no row {name!r}; there are {', '.join(rows)}")
            load_before = os.getloadavg()[0]
            row = {"level": sandbox.level.name, "workers": sandbox.workers} | rows[name]()
            print(
                json.dumps({"row": name, **row, "load_before": round(load_before, 1), "load_after": round(os.getloadavg()[0], 1)}),
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
