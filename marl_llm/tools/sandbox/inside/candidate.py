"""The last step before foreign code: rights are given away, sources of chance are fixed, then the program runs as `__main__`."""

import builtins
import gc
import os
import random
import resource
import signal
import sys
import time
import types
from _signal import signal as set_handler
from json import dumps, loads  # by name: a program may replace those of `json`

from . import frames, interpreter, linux, snapshot, values

FROZEN_EPOCH = 1735689600.0  # 2025-01-01 00:00:00 UTC
CLOCK_STEP, CLOCK_TICK = 0.25, 1e-6
SCRIPT = "main.py"
MODULE = "main"  # the name of a program whose function is called


def set_limits(job: dict) -> None:
    """Hard limits of one process. RLIMIT_AS is on top of what the zygote has mapped."""
    cpu = job["cpu"]
    for name, value in (
        ("AS", job["address_space"]),
        ("CPU", cpu),
        ("FSIZE", job["file_bytes"]),
        ("NOFILE", job["open_files"]),
        ("NPROC", job["processes"]),
        ("STACK", job["stack_bytes"]),
        ("CORE", 0),
        ("MEMLOCK", 1 << 16),
        ("MSGQUEUE", 0),
        ("NICE", 0),
        ("RTPRIO", 0),
        ("SIGPENDING", 256),
    ):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        soft = min(wanted, 8 << 20) if name == "STACK" else wanted
        if name == "CPU":  # at its soft limit SIGXCPU, which says why; a second later SIGKILL
            wanted = value + 1 if hard == resource.RLIM_INFINITY else min(value + 1, hard)
        resource.setrlimit(kind, (soft, wanted))


def take_blocks(count: int) -> list[list]:
    """`count` new blocks of each size class of Python's allocator (16 to 512 bytes), in order of address."""
    empty = sys.getsizeof(b"")
    makers = [(lambda n: object()), (lambda n: n + 1000)]  # 16 and 32 bytes
    makers += [(lambda n, size=size: bytes(size - empty)) for size in range(48, 513, 16)]
    return [sorted(map(make, range(count)), key=id) for make in makers]


def order_free_memory() -> None:
    """Puts the heads of the allocator's free lists in order of address.

    A zygote's turn frees a few blocks in another order than it found them, so that every second fork would hand out addresses in another
    order. Taking more blocks of each size class than a turn touches, and giving them back by address, makes them equal again. The zygote
    filled older gaps for good, so few are enough.
    """
    for taken in take_blocks(8):
        while taken:
            taken.pop()


class MovedClock:
    """A wall clock that starts at a fixed moment and shows the same readings to the same program.

    Every reading adds a microsecond, every sleep its own length; real time enters in steps of a quarter second, so that a loop that waits
    for a deadline ends. A program that runs for less than a step prints the same times in every run.
    """

    def __init__(self, start: float, sleep, monotonic):
        self._real_sleep, self._monotonic = sleep, monotonic
        self._origin, self._start, self._now = monotonic(), start, start

    def read(self) -> float:
        """Seconds."""
        self._now += CLOCK_TICK
        behind = self._monotonic() - self._origin - (self._now - self._start)
        if behind > CLOCK_STEP:
            self._now += behind // CLOCK_STEP * CLOCK_STEP
        return self._now

    def sleep(self, seconds) -> None:
        """Sleeps for real, and moves the clock by as much; parallel sleepers move it once."""
        wake = self._now + max(0.0, float(seconds))
        self._real_sleep(seconds)
        self._now = max(self._now, wake)


def fix_chance(seed: int, freeze_clock: bool) -> None:
    """Seeds random and numpy, replaces os.urandom by a seeded stream, and slows the clock's randomness down."""
    stream = random.Random(seed)
    seeded = stream.randbytes

    def urandom(size, /):
        return seeded(size)

    os.urandom = urandom
    random._urandom = urandom
    original = random.Random.seed

    def reseed(self, a=None, version=2):
        original(self, stream.getrandbits(64) if a is None else a, version)

    reseed.__name__, reseed.__qualname__ = "seed", "Random.seed"
    random.Random.seed = reseed
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    if freeze_clock:
        wall = MovedClock(FROZEN_EPOCH, time.sleep, time.monotonic)
        counter = MovedClock(0.0, time.sleep, time.monotonic)

        def sleep(seconds, /):
            counter_wake = counter._now + max(0.0, float(seconds))
            wall.sleep(seconds)
            counter._now = max(counter._now, counter_wake)

        time.sleep = sleep
        time.time, time.time_ns = wall.read, lambda: int(wall.read() * 1e9)
        time.perf_counter, time.perf_counter_ns = counter.read, lambda: int(counter.read() * 1e9)


def give_up_rights(job: dict, fence) -> None:
    """From here on the process has no capability, cannot gain one, and is under the filter."""
    if fence.uid is not None:
        os.setgroups([])
        os.setresgid(fence.uid, fence.uid, fence.uid)
        os.setresuid(fence.uid, fence.uid, fence.uid)
    elif fence.namespaces:
        linux.prctl(linux.PR_CAP_AMBIENT, 4)
        linux.set_capabilities(0)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if fence.ruleset is not None:
        linux.syscall("landlock_restrict_self", fence.ruleset, 0)
        os.close(fence.ruleset)
    if fence.filter is not None:
        linux.install_filter(fence.filter[0])


def start(job: dict, fds: list[int], fence, problem_fd: int, module: types.ModuleType) -> None:
    """Runs in the child, never returns. What goes wrong before the program starts is told on `problem_fd`: not the program's doing."""
    code = 70
    try:
        payload, calls = frames.unpack_payload(frames.read_file(fds[frames.PAYLOAD]))
        for number, place in enumerate((frames.STDIN, frames.STDOUT, frames.STDERR)):
            os.dup2(fds[place], number)
        work, script = os.path.join(job["root"], "work"), os.path.join(job["root"], SCRIPT)
        file = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        frames.write_all(file, payload)
        os.close(file)
        os.chdir(work)
        old = frames.read_file(fds[frames.WORKSPACE_IN]) if job["workspace"] else b""
        channel = -1
        if calls:
            channel = 3 if fds[frames.CHANNEL] == 3 else os.dup2(fds[frames.CHANNEL], 3, inheritable=False)
        first, last = 4 if calls else 3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for keep in sorted({problem_fd, *([] if fence.ruleset is None else [fence.ruleset])}):
            os.closerange(first, keep)
            first = keep + 1
        os.closerange(first, last)
        set_limits(job)
        give_up_rights(job, fence)
        if old:
            snapshot.unpack(old, ".")
        del old
        # the C functions: the ones of `signal` turn every answer into an enum
        set_handler(2, signal.default_int_handler)
        set_handler(17, 0)
    except BaseException as error:  # told to the supervisor, which fails the attempt
        os.write(problem_fd, f"{type(error).__name__}: {error}".encode()[:500])
        os._exit(code)
    os.close(problem_fd)
    try:
        code = run(payload, calls, channel, module, job)
    finally:
        os._exit(code)


def main_module(script: str) -> types.ModuleType:
    """A fresh `__main__`, as the interpreter would make it, and nothing of the zygote in `sys`. Made once, before any fork."""
    interpreter.add_site_names()
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __file__=script, __cached__=None, __annotations__={})
    sys.modules["__main__"] = module
    sys.argv = [script]
    sys.orig_argv = [sys.executable, script]
    sys.path[:] = ["", *(p for p in sys.path if p not in ("", "/opt/zygote"))]
    package = __name__.rpartition(".")[0]
    for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
        del sys.modules[name]
    return module


def exit_code(error: SystemExit) -> int:
    """What the interpreter makes of sys.exit(x)."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return int(error.code) & 0xFF if -1 << 63 <= error.code < 1 << 63 else 255
    try:
        print(error.code, file=sys.stderr or sys.__stderr__)
    except BaseException:  # the program's own stream, or a code that cannot be printed
        pass
    return 1


def report(error: BaseException) -> int:
    """Prints the traceback from the program's first frame on."""
    if isinstance(error, SystemExit):
        return exit_code(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    except BaseException:  # the program's own hook
        sys.__excepthook__(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def run(source: bytes, calls: bytes, channel: int, module: types.ModuleType, job: dict) -> int:
    """Compiles, runs and finishes as the interpreter would. Returns the exit code.

    A program whose function is called is a module that was imported: what stands under `if __name__ == "__main__"` does not run. One that
    ends itself (`sys.exit()` in its last line) keeps what it has defined.
    """
    fix_chance(job["seed"], job["freeze_clock"])
    gc.enable()
    order_free_memory()
    interpreter.open_streams()
    interpreter.reach_streams_by_path()
    plan = loads(calls) if calls else None
    if calls:
        module.__name__ = MODULE
        sys.modules[MODULE] = module
        vars(builtins).update(interpreter.contest_names())
    code = 0
    try:
        program = compile(source, module.__file__, "exec", dont_inherit=True)
        try:
            exec(program, module.__dict__)
        except SystemExit:
            if plan is None:
                raise
        if plan is not None:
            call_all(plan, module.__dict__, channel)
    except BaseException as error:  # whatever the program raises, SystemExit included, is its outcome
        code = report(error)
    return interpreter.finish(module.__dict__) or code


class CaseTimeout(BaseException):
    """Raised by the timer of one case. A candidate may swallow it; the limit of the execution then ends the program."""


def call_all(plan: dict, namespace: dict, channel: int) -> None:
    """Calls the function once per case and sends one line per case as soon as it is done."""
    encode, decode, write = values.encode, values.decode, frames.write_all
    now, set_timer = time.monotonic, signal.setitimer

    def on_timer(signum, frame):
        raise CaseTimeout

    def send(number, **line):
        write(channel, dumps({"case": number} | line).encode() + b"\n")

    function = found(namespace, plan["function"])
    if function is None:
        send(0, state="missing")
        return
    limit = plan["case_timeout"]
    signal.signal(signal.SIGALRM, on_timer)
    for number, tree in enumerate(plan["cases"]):
        arguments, tick = decode(tree), now()
        try:
            if limit:
                set_timer(signal.ITIMER_REAL, limit, 0.05)
            try:
                value = function(*arguments)
            finally:
                set_timer(signal.ITIMER_REAL, 0)
            seconds, after, value = now() - tick, encode(list(arguments)), encode(value)
        except CaseTimeout:
            send(number, state="timeout", seconds=now() - tick)
        except BaseException as error:  # SystemExit too: a call that ends the program ends its own case
            send(number, state="raised", error=described(error), seconds=now() - tick)
        else:
            send(number, state="returned", value=value, mutated=after != tree, seconds=seconds)


def found(namespace: dict, name: str):
    """The function of this name, or one that calls the method of a new `Solution`; None where there is neither."""
    if callable(namespace.get(name)):
        return namespace[name]
    kind = namespace.get("Solution")
    if isinstance(kind, type) and callable(getattr(kind, name, None)):
        return lambda *arguments: getattr(kind(), name)(*arguments)
    return None


def described(error: BaseException) -> str:
    """Type and text of what a call raised."""
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # the program's own __str__
        return type(error).__name__
