"""The sandbox: outcomes and failures kept apart, limits, repetition, workspaces, fairness, killed workers, and what is left behind."""

import asyncio
import collections
import concurrent.futures
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from marl_llm.tools import InfrastructureError
from marl_llm.tools.sandbox import (
    FairQueue,
    Level,
    Limits,
    Profile,
    Sandbox,
    SandboxError,
    Submission,
    Workspace,
    attempt,
    features,
    pool,
    slot,
)
from marl_llm.tools.sandbox.inside import boot, isolation, seccomp, snapshot, values
from marl_llm.tools.sandbox.limits import read_record
from marl_llm.tools.sandbox.profiles import PROFILES
from marl_llm.tools.sandbox.queueing import Job

QUICK = Limits(timeout_s=0.4)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(timeout_s=20)) as made:
        yield made


def run(sandbox, code, **options):
    return sandbox.run(Submission(code, **options))


def children() -> set[int]:
    """Live processes below this one."""
    parents = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, size = {os.getpid()}, 0
    while size != len(found):
        size = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {os.getpid()}


def test_a_program_s_doing(sandbox):
    done = run(sandbox, "import sys\nprint(input()[::-1])\nprint('oh', file=sys.stderr)\nsys.exit(3)", stdin="abc")
    program = done.outcome()
    assert (program.stdout, program.stderr, program.exit_code, program.outcome) == ("cba\n", "oh\n", 3, "error")
    assert (done.level, done.failure, done.attempts) == (Level.NAMESPACES, None, 1)
    assert run(sandbox, "print(1)").outcome().outcome == "ok"


def test_traceback_starts_in_the_program(sandbox):
    text = run(sandbox, "def f():\n    return 1 / 0\nf()").stderr
    assert text.startswith('Traceback (most recent call last):\n  File "/box/main.py", line 3, in <module>\n    f()\n')
    assert text.endswith("ZeroDivisionError: division by zero\n")
    assert "candidate.py" not in text
    assert "SyntaxError" in run(sandbox, "print(").stderr


def test_endings(sandbox):
    assert run(sandbox, "import os\nos.abort()").outcome().signal == signal.SIGABRT
    assert run(sandbox, "import time\nprint('part', flush=True)\ntime.sleep(9)", limits=QUICK).outcome().outcome == "timeout"
    assert run(sandbox, "while 1: pass", limits=Limits(timeout_s=20, cpu_s=1)).timed_out
    deaf = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile 1: pass"
    assert run(sandbox, deaf, limits=Limits(timeout_s=20, cpu_s=1)).timed_out
    full = run(sandbox, "import time\nx = [bytearray(b'x' * (1 << 20)) for _ in range(90)]\ntime.sleep(5)", limits=Limits(memory_mb=64))
    assert full.outcome().outcome == "memory"
    assert full.outcome().seconds < 4
    assert "MemoryError" in run(sandbox, "bytearray(3 << 30)").stderr
    for code, expected in (
        ("raise SystemExit", 0),
        ("raise SystemExit('no')", 1),
        ("raise KeyboardInterrupt", 130),
        ("import os\nos._exit(7)", 7),
    ):
        assert run(sandbox, code).exit_code == expected


def test_partial_output_and_deadline(sandbox):
    done = run(sandbox, "import time\nprint('part', flush=True)\ntime.sleep(9)", limits=QUICK)
    assert (done.stdout, done.timed_out, done.exit_code) == ("part\n", True, None)
    assert done.outcome().seconds >= 0.4


def test_output_is_capped(sandbox):
    program = run(
        sandbox, "import sys\nprint('x' * 5000)\nprint('y' * 50, file=sys.stderr)", limits=Limits(stdout_bytes=1000, stderr_bytes=100)
    ).outcome()
    assert (len(program.stdout_bytes), program.stdout_truncated, program.stderr_truncated) == (1000, True, False)
    assert run(sandbox, "import sys\nsys.stdout.buffer.write(b'\\xffa')").stdout == "\ufffda"


def test_an_unexplained_kill_is_believed_the_second_time(sandbox):
    done = run(sandbox, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (done.outcome().signal, done.attempts) == (9, 2)


def test_the_same_program_prints_the_same():
    code = (
        "import random, time, uuid, os, tempfile\nclass A: pass\n"
        "print(id(A()), id(A), {'a', 'b', 'c'}, hash('x'), random.random(), random.Random().random(), uuid.uuid4(), os.getpid())\n"
        "print(time.time(), time.perf_counter(), os.urandom(3), tempfile.mktemp())"
    )
    seen = set()
    for _ in range(2):
        with Sandbox(workers=2) as made:
            seen |= {done.stdout for done in made.run_batch([Submission(code, environment=i) for i in range(6)])}
    if features()["no_aslr"]:
        seen = {text.split(" ", 2)[2] for text in seen}
    assert len(seen) == 1
    with Sandbox(workers=1) as made:
        assert made.run(Submission(code, seed=1)).stdout not in seen


def test_numpy_is_seeded_and_loaded(sandbox):
    code = "import sys\nassert 'numpy' in sys.modules\nimport numpy as np\nprint(np.random.rand(), np.random.default_rng().random())"
    first, second = sandbox.run_batch([Submission(code, profile="numpy")] * 2)
    assert first.stdout == second.stdout
    assert first.exit_code == 0
    assert "ModuleNotFoundError" in run(sandbox, "import numpy").stderr


def test_workspace_is_a_value(sandbox):
    start = Workspace.from_files({"in.txt": "7", "d/e.bin": b"\x00"})
    write = (
        "import os\nn = int(open('in.txt').read())\nopen('out.txt', 'w').write(str(n * 6))\n"
        "os.symlink('/etc/passwd', 'l')\nos.remove('d/e.bin')"
    )
    after = run(sandbox, write, workspace=start).outcome().workspace
    assert after.files() == {"in.txt": b"7", "out.txt": b"42"}
    assert start.files()["d/e.bin"] == b"\x00"
    assert (
        run(sandbox, "import os\nprint(open('out.txt').read(), os.path.islink('l'), os.listdir('d'))", workspace=after).stdout
        == "42 True []\n"
    )
    assert run(sandbox, "import os\nprint(os.listdir('.'))").stdout == "[]\n"
    big = run(
        sandbox,
        "f = open('s', 'wb')\nf.truncate(3 << 20)\nf = open('t', 'wb')\nf.truncate(3 << 20)",
        workspace=start,
        limits=Limits(disk_mb=4),
    )
    assert big.exit_code == 0
    assert big.outcome().workspace is None


@pytest.mark.parametrize("path", ["/a", "../a", "a/../b", "", "a//b", "a\0b"])
def test_workspace_refuses_paths_that_leave(path):
    with pytest.raises(ValueError, match="plain relative path"):
        Workspace.from_files({path: b""})


def test_what_fails_before_the_program_is_not_its_doing(sandbox):
    large = Workspace.from_files({"a": b"x" * (6 << 20)})
    done = run(sandbox, "print(1)", workspace=large, limits=Limits(disk_mb=4))
    assert done.failure.kind.value == "crash"
    assert "No space left" in done.failure.message
    assert done.attempts == 10


def test_damaged_snapshots_are_refused():
    data = snapshot.dump_entries([("f", "a", 0o644, b"12345")])
    for bad in (data[:-1], data[:5], b"q" + data[1:]):
        with pytest.raises(ValueError, match="snapshot"):
            snapshot.load_entries(bad)


def test_a_folder_is_packed_up_to_its_limits_in_pages_and_unpacked_as_it_was(tmp_path):
    folder, copy = tmp_path / "folder", tmp_path / "copy"
    (folder / "d").mkdir(parents=True)
    for name, size, mode in (("empty", 0, 0o600), ("small", 1, 0o640), ("d/large", 4097, 0o755)):
        (folder / name).write_bytes(b"x" * size)
        (folder / name).chmod(mode)
    (folder / "link").symlink_to("d/large")
    os.mkfifo(folder / "pipe")  # is left out, and counts for nothing
    whole, entries = (1 + 2 + 1) * snapshot.PAGE, 5  # a link's text takes a page too
    data = snapshot.pack(str(folder), whole, entries)
    for bytes_, inodes in ((whole - 1, entries), (whole, entries - 1)):
        with pytest.raises(snapshot.TooLarge):
            snapshot.pack(str(folder), bytes_, inodes)
    copy.mkdir()
    snapshot.unpack(data, str(copy))
    assert snapshot.pack(str(copy), whole, entries) == data
    assert (copy / "d/large").stat().st_mode & 0o777 == 0o755
    assert (os.readlink(copy / "link"), (copy / "small").read_bytes()) == ("d/large", b"x")
    assert sorted(path.name for path in copy.iterdir()) == ["d", "empty", "link", "small"]


@pytest.mark.parametrize(("size", "more"), [(0, False), (9, False), (10, False), (11, True), (9000, True)])
def test_each_stream_is_kept_up_to_its_own_limit_and_more_is_told(size, more):
    limits = Limits(stdout_bytes=10, stderr_bytes=20_000)
    job = Job(0, Submission(""), limits, concurrent.futures.Future(), 0.0, None, lambda: None)
    run = attempt.Attempt(job, slot.Slot.__new__(slot.Slot), limits)
    pipes = [os.pipe() for _ in range(2)]
    run.streams = [reader for reader, _ in pipes]
    try:
        for place, (reader, writer) in enumerate(pipes):
            os.set_blocking(reader, False)
            assert not run.drain(place)  # nothing is there yet
            for part in (b"x" * (size // 2), b"y" * (size - size // 2)):
                os.write(writer, part)
                assert not run.drain(place)
            os.close(writer)
            assert run.drain(place)
    finally:
        for reader in run.streams:
            os.close(reader)
    said = b"x" * (size // 2) + b"y" * (size - size // 2)
    assert run.outputs() == [(said[:10], more), (said, False), (b"", False)]


def test_fair_between_environments():
    queue = FairQueue()
    for item in range(5):
        queue.push("greedy", f"g{item}")
    queue.push("small", "s0")
    queue.push("greedy", "g-again", front=True)
    assert [queue.pop() for _ in range(len(queue))] == ["g-again", "s0", "g0", "g1", "g2", "g3", "g4"]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_small_environment_does_not_wait_for_a_large_one():
    with Sandbox(workers=1) as made:
        made.warm()
        order = []
        large = [made.submit(Submission("print(1)", environment="large")) for _ in range(30)]
        small = made.submit(Submission("print(2)", environment="small"))
        for name, future in [("large", large[-1]), ("small", small)]:
            future.add_done_callback(lambda _, name=name: order.append((name, sum(f.done() for f in large))))
        assert small.result().stdout == "2\n"
        assert all(f.result().stdout == "1\n" for f in large)
    assert order[0][0] == "small"
    assert order[0][1] < 10


def test_async_and_deadline_in_the_queue():
    async def play(made):
        slow = [made.arun(Submission("import time\ntime.sleep(0.5)")) for _ in range(2)]
        late = made.arun(Submission("print(1)", deadline_s=0.2))
        ticks, done = 0, asyncio.gather(*slow, late)
        while not done.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, await done

    with Sandbox(workers=1) as made:
        made.warm()
        ticks, (first, second, late) = asyncio.run(play(made))
    assert ticks > 5
    assert first.ok
    assert second.ok
    assert late.failure.kind.value == "deadline"
    with pytest.raises(InfrastructureError, match="abort the episode"):
        _ = late.stdout


def test_deadline_of_a_running_program_is_a_failure():
    with Sandbox(workers=1) as made:
        made.warm()
        done = made.run(Submission("import time\ntime.sleep(30)", limits=Limits(timeout_s=60), deadline_s=0.5))
        assert done.failure.kind.value == "deadline"
        assert done.seconds < 20
        assert made.run(Submission("print(3)")).stdout == "3\n"


@pytest.mark.parametrize("late", [1, 100])
def test_a_supervisor_that_is_late_is_asked_again_though_nobody_else_waits(monkeypatch, late):
    """As after a suspension of the machine. The only program there is goes back into its queue, and no event follows."""
    patience = iter([-1.0] * late)
    monkeypatch.setattr(attempt, "waiting_s", lambda limits, packs: next(patience, 30.0))
    with Sandbox(workers=1) as made:
        made.warm()
        done = made.submit(Submission("import time\ntime.sleep(0.3)\nprint(3)")).result(timeout=30)
        assert made.metrics()["sandbox/retried"] == min(late, pool.MAX_ATTEMPTS - 1)
    if late == 1:
        assert done.stdout == "3\n"
    else:
        assert done.failure.kind.value == "crash"
        assert "did not report in time" in done.failure.message


def test_each_option_of_a_submission_and_of_a_sandbox_reaches_the_program():
    draws, clock = "import random\nprint(random.random())", "import time\nprint(time.time())"
    with Sandbox(workers=1, limits=Limits(timeout_s=0.3), freeze_clock=False) as made:
        made.warm()
        assert len(made.zygotes()) == made.workers == 1
        first = made.submit(Submission("import time\ntime.sleep(0.5)\nprint('slept')", limits=Limits(timeout_s=20)))
        asked = [Submission(draws, seed=seed, limits=Limits(timeout_s=20)) for seed in (0, 1, 1)]
        asked += [Submission("import sys\nprint(sys.stdin.buffer.read())", b"\xff", limits=Limits(timeout_s=20)),
                  Submission(clock, limits=Limits(timeout_s=20)), Submission("while True: pass")]  # fmt: skip
        zero, one, again, data, now, endless = made.run_batch(asked)
        assert (zero.stdout != one.stdout, one.stdout == again.stdout, data.stdout) == (True, True, "b'\\xff'\n")
        assert abs(float(now.stdout) - time.time()) < 100  # the sandbox's clock is that of this machine
        assert endless.timed_out  # by the sandbox's own limit
        assert first.result().stdout == "slept\n"  # by its own
        assert all(done.seconds >= done.queued_s > 0 for done in (zero, one, again))
        assert {done.level for done in (zero, one, first.result())} == {Level.NAMESPACES}
        figures = made.metrics()
        names = ("submitted", "done", "failed", "retried", "waiting", "running")
        assert [figures[f"sandbox/{name}"] for name in names] == [7, 7, 0, 0, 0, 0]
        made._pid += 1
        with pytest.raises(SandboxError, match="made before a fork"):
            made.submit(Submission("print(1)"))


def test_as_many_zygotes_as_workers_are_warm_and_those_that_begin_are_not_counted():
    with Sandbox(workers=2) as made:
        with made._lock:
            made._spawn("bare")
            assert made.zygotes() == []
        made.warm(timeout_s=30)
        assert len(set(made.zygotes())) == 2
        assert made.metrics()["sandbox/zygotes_started"] == 2


def test_a_job_is_tried_so_often_and_waits_in_front_each_time(monkeypatch):
    monkeypatch.setattr(pool, "MAX_ATTEMPTS", 3)
    with Sandbox(workers=1) as made:
        made.warm()
        order, start = [], made._start

        def lost(job, zygote):
            """Loses every attempt of the first job before it is sent."""
            order.append(job.request.code)
            if job.number:
                return start(job, zygote)
            job.attempts += 1
            return made._again(job, "lost on the way")

        monkeypatch.setattr(made, "_start", lost)
        with made._lock:
            jobs = [made.submit(Submission(code, environment="e")) for code in ("print(0)", "print(1)", "print(2)")]
        first, *others = [job.result(60) for job in jobs]
        assert made.metrics()["sandbox/retried"] == 2
    assert order == ["print(0)"] * 3 + ["print(1)", "print(2)"]
    assert first.failure.message == "3 attempts ended without an outcome; the last: lost on the way"
    assert (first.failure.kind.value, first.attempts, [other.attempts for other in others]) == ("crash", 3, [1, 1])


def test_killed_zygotes_lose_and_double_nothing():
    with Sandbox(workers=2) as made:
        made.warm()
        stop = threading.Event()

        def kill():
            for _ in range(4):
                if stop.wait(0.3):
                    return
                for pid in made.zygotes()[:1]:
                    os.kill(pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        codes = [f"import time\ntime.sleep(0.05)\nprint({i})\nraise SystemExit({i % 3})" for i in range(40)]
        results = made.run_batch([Submission(code, environment=i % 7) for i, code in enumerate(codes)])
        stop.set()
        killer.join()
        metrics = made.metrics()
    assert [(r.stdout, r.exit_code) for r in results] == [(f"{i}\n", i % 3) for i in range(40)]
    assert metrics["sandbox/zygotes_lost"] > 0
    assert metrics["sandbox/done"] == 40
    assert metrics["sandbox/failed"] == 0


def test_a_killed_program_process_is_played_again():
    with Sandbox(workers=1) as made:
        made.warm()
        future = made.submit(Submission("import time\ntime.sleep(1)\nprint('whole')"))
        victims = set()
        while not victims:  # the candidate is the process with a user id of its own
            for pid in children():
                try:
                    status = pathlib.Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue
                if "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status:
                    victims.add(pid)
        os.kill(victims.pop(), signal.SIGKILL)
        done = future.result()
    assert (done.stdout, done.attempts) == ("whole\n", 2)


def held() -> collections.Counter[str]:
    """What this process holds: open files, mounts and threads. What earlier tests forgot may go at any time, so tests ask what is new."""
    with os.scandir("/proc/self/fd") as entries:
        files = [os.readlink(entry.path) for entry in entries]
    mounts = pathlib.Path("/proc/self/mounts").read_text().splitlines()
    return collections.Counter([*files, *mounts, *map(repr, threading.enumerate())])


def test_nothing_is_left_behind():
    before, running = held(), children()
    with Sandbox(workers=2) as made:
        made.run_batch([Submission("print(1)")] * 4)
        made.run(Submission("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(99)"))
        during = held()
        made.run_batch([Submission("print(1)", environment=i) for i in range(40)])
        assert held() <= during
    assert held() <= before
    assert children() == running


def test_close_fails_what_waits():
    made = Sandbox(workers=1)
    futures = [made.submit(Submission("import time\ntime.sleep(9)", environment=i)) for i in range(3)]
    made.close()
    made.close()
    assert {future.result().failure.kind.value for future in futures} == {"unavailable"}
    with pytest.raises(SandboxError, match="closed"):
        made.submit(Submission("print(1)"))


def test_level_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(slot, "features", lambda: dict.fromkeys(isolation.PROBES, "") | {"namespaces": "[Errno 1] unshare"})
    assert slot.best_level(Level.RLIMITS) is Level.LANDLOCK
    with pytest.raises(SandboxError, match=r"gives LANDLOCK, and NAMESPACES is demanded. Missing: namespaces: \[Errno 1\] unshare"):
        Sandbox()
    with pytest.raises(SandboxError, match="below the demanded minimum"):
        Sandbox(level=Level.RLIMITS)


def test_a_zygote_that_does_not_start_is_a_failure_with_its_reason(monkeypatch):
    monkeypatch.setitem(PROFILES, "broken", Profile("broken", preload=("no_such_module",)))
    with Sandbox(workers=1) as made:
        done = made.run(Submission("print(1)", profile="broken"))
        assert done.failure.kind.value == "crash"
        assert "no_such_module" in done.failure.message
        assert made.run(Submission("print(1)")).stdout == "1\n"
    monkeypatch.setitem(PROFILES, "absent", Profile("absent", distributions=("no-such-distribution",)))
    with Sandbox(workers=1) as made, pytest.raises(SandboxError, match="pip install"):
        made.submit(Submission("print(1)", profile="absent"))


@pytest.mark.parametrize("field", ["timeout_s", "memory_mb", "processes", "stdout_bytes"])
def test_limits_are_checked(field):
    with pytest.raises(ValueError, match=field):
        Limits(**{field: 0})


def test_unknown_profile(sandbox):
    with pytest.raises(KeyError, match="data_science"):
        sandbox.submit(Submission("print(1)", profile="torch"))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_is_well_formed(machine):
    """Every jump of the program lands inside it, and it refuses by the architecture's own numbers."""
    code = seccomp.program(machine)
    instructions = [code[i : i + 8] for i in range(0, len(code), 8)]
    for place, ins in enumerate(instructions):
        opcode, yes, no = int.from_bytes(ins[:2], "little"), ins[2], ins[3]
        if opcode & 7 == 5:
            assert max(yes, no) + place + 1 < len(instructions)
    assert instructions[-1] == seccomp._ins(seccomp.RET, seccomp.ALLOW)
    column = ["x86_64", "aarch64"].index(machine)
    for name in ("ptrace", "process_vm_readv"):
        assert seccomp._ins(seccomp.JEQ, seccomp.OTHER_PROCESSES[name][column], 0, 1) in instructions
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64")


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1 << 90, -1.5, float("inf"), "é\ud800", b"\x00", [1, (2,)], {"a": {1: [2]}, 2.5: None}, {1, 2}, frozenset("a"), 1 + 2j],
)
def test_values_cross_with_their_types(value):
    import json

    back = values.decode(json.loads(json.dumps(values.encode(value))))
    assert back == value
    assert type(back) is type(value)


def test_host_package_is_light_and_knows_no_jax():
    code = "import sys, marl_llm.tools.sandbox, marl_llm.tools.judge; print([m for m in ('jax', 'numpy', 'flax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2])
    assert done.stdout == "[]\n"


def test_timeouts_are_close_to_the_limit(sandbox):
    done = sandbox.run_batch([Submission("while 1: pass", limits=QUICK, environment=i) for i in range(4)])
    assert all(d.timed_out for d in done)
    assert all(0.4 <= d.outcome().seconds < 5 for d in done)


def test_time_passes_in_sleep_and_loops(sandbox):
    code = "import time\na = time.time()\ntime.sleep(0.3)\nb = time.time()\nwhile time.time() - b < 0.5: pass\nprint(0.3 <= b - a < 0.31)"
    assert run(sandbox, code).stdout == "True\n"


FRAMES = """
import sys
frame, seen = sys._getframe(), []
while frame:
    seen += [f"{name}={value!r}" for name, value in frame.f_locals.items() if frame.f_code.co_name != "<module>" or name != "needles"]
    frame = frame.f_back
needles = sys.stdin.read().split()
print(len(seen) > 20, [needle for needle in needles if any(needle in text for text in seen)])
"""


def test_a11_the_frames_below_a_program_name_no_path_of_the_host(sandbox):
    needles = {slot.SOURCE, slot.PREFIX, slot.EXECUTABLE, str(pathlib.Path(__file__).parents[2]), *(p for p in sys.path if len(p) > 12)}
    for profile in ("bare", "numpy"):
        seen = run(sandbox, FRAMES, stdin=" ".join(needles), profile=profile)
        assert seen.stdout == "True []\n", seen.stderr


def test_a11_host_files_are_neither_watched_nor_locked(sandbox):
    code = """
import ctypes, fcntl, os, sqlite3, struct
libc = ctypes.CDLL(None, use_errno=True)
calls = (libc.inotify_init, ()), (libc.inotify_init1, (0,)), (libc.inotify_add_watch, (0, b"/usr/lib", 0xfff))
print(*(call(*arguments) for call, arguments in calls), len({(call(*arguments), ctypes.get_errno()) for call, arguments in calls}))
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return True
    return False
shared, folder = open("/etc/passwd"), os.open("/usr/lib", os.O_RDONLY)
lock = struct.pack("hhqqi", fcntl.F_RDLCK, 0, 0, 0, 0)
print(refused(fcntl.flock, shared, fcntl.LOCK_SH), refused(fcntl.fcntl, shared, 1024, fcntl.F_RDLCK), refused(fcntl.fcntl, folder, 1026, 1),
      refused(fcntl.fcntl, shared, 37, lock))
own = open("own", "w")
fcntl.lockf(own, fcntl.LOCK_EX)
print(refused(fcntl.fcntl, own, 1024, fcntl.F_WRLCK))  # a lease on a file of one's own, which the kernel would grant
base = sqlite3.connect("base")
base.execute("create table t (x)")
base.commit()
print(fcntl.fcntl(own, fcntl.F_GETFD), os.path.getsize("base") > 0)
"""
    done = run(sandbox, code)
    assert done.stdout == "-1 -1 -1 1\nTrue True True True\nTrue\n1 True\n", done.stderr


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b"null", b"{}", b'{"status": 0}', b'{"status": "0", "seconds": 1, "cpu": 1, "peak": 1}', b"\xff" * 100, b"9" * 5000,
     b'{"status": 0, "seconds": NaN, "cpu": 1, "peak": 1}', b'{"status": -1, "seconds": 1, "cpu": 1, "peak": 1}', b"[" * 4000,
     b'{"status": 0, "seconds": 1, "cpu": 1, "peak": 1, "failure": "\\ud800"}', b'{"status": true, "seconds": 1, "cpu": 1, "peak": 1}'],
)  # fmt: skip
def test_a_record_of_another_form_is_no_outcome(data):
    record, problem = read_record(data)
    assert record == {}
    assert problem.encode()


@pytest.mark.parametrize(("home", "seen"), [(None, "/opt/own/lib"), ("/opt/python", "/opt/python/lib")])
def test_an_interpreter_that_needs_a_library_path_has_it(monkeypatch, home, seen):
    """A shared libpython elsewhere than where it was built: the host's path, and in a box of its own root the box's."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/own/lib")
    assert boot.environment("/box", home, None)["LD_LIBRARY_PATH"] == seen
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert boot.environment("/box", None, None).get("LD_LIBRARY_PATH") is None


@pytest.mark.parametrize(
    "call",
    [
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)",
        "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, 32, 1 << 30)",
        "fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
        "mmap.mmap(-1, 1 << 20)",
    ],
)
def test_kernel_memory_that_no_limit_counts_is_refused(sandbox, call):
    done = run(sandbox, f"import fcntl, mmap, os, socket\ntry:\n    {call}\nexcept PermissionError:\n    print('refused')\n")
    assert done.stdout == "refused\n"


def test_memory_of_a_mapped_device_cannot_be_shared(sandbox):
    code = "import mmap\ntry:\n    print(len(mmap.mmap(open('/dev/zero', 'rb').fileno(), 2 << 20, prot=mmap.PROT_READ)))\n"
    done = run(sandbox, code + "except (OSError, ValueError):\n    print('refused')\n")
    assert done.stdout == "refused\n"


def test_sockets_count_as_memory_and_a_few_hundred_are_fine(sandbox):
    code = "import socket, time\nkept = [socket.socketpair() for _ in range(100)]\ntime.sleep(0.2)\nprint('fine')\n"
    assert run(sandbox, code).stdout == "fine\n"
    many = "import os, socket, time\nfor _ in range(20):\n    if os.fork() == 0:\n        break\n"
    many += "kept = [socket.socketpair() for _ in range(100)]\n"
    assert run(sandbox, many + "time.sleep(30)\n").outcome().outcome == "memory"
