"""How an execution is watched and ended: the clock, the memory of all its processes, its disk, and what it leaves in its folder."""

import contextlib
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Callable

from . import frames, linux, snapshot
from .boot import PROC_FD

PACK_CPU_S = 5  # a folder within the limits takes a tenth of it
SOCKET_BYTES = 1 << 18  # what one socket may hold: wmem_default and a message
SLOT_SOCKETS = 8  # a slot's own, and a few
MEMORY_TICK = 0.02  # seconds between two looks at the memory of all processes


def watch(child: int, deadline: float, record_fd: int, look: Callable[[], str]) -> dict:
    """Waits for the candidate's end, or says why it must be brought about: clock, what `look` finds every 20 ms, a host that left.

    Returns the empty dict when the candidate ended by itself, else the field of the record that says why.
    """
    wanted = select.poll()
    pidfd = os.pidfd_open(child)
    wanted.register(pidfd, select.POLLIN)
    wanted.register(record_fd, 0)
    pause = MEMORY_TICK
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return {"timed_out": True}
            ready = wanted.poll(max(1.0, min(left, pause) * 1e3))
            if any(fd == pidfd for fd, _ in ready):
                return {}
            if ready:
                return {"failure": "given up by the host"}
            looked = time.monotonic()
            if exceeded := look():
                return {exceeded: True}
            pause = max(MEMORY_TICK, 2 * (time.monotonic() - looked))  # many processes take long to look at
    finally:
        os.close(pidfd)


def descendants(pid: str) -> list[str]:
    """All processes below `pid`, as the host's /proc names them."""
    pids, stack = [], [pid]
    while stack:
        parent = stack.pop()
        try:
            threads = tasks(parent)
            for thread in threads:
                children = read_proc(f"{parent}/task/{thread}/children").split()
                pids += children
                stack += children
        except OSError:  # it ended while we looked
            continue
    return pids


def tasks(pid: str) -> list[str]:
    """Thread ids."""
    fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=PROC_FD)
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def read_proc(path: str) -> str:
    """A small file of /proc."""
    fd = os.open(path, os.O_RDONLY, dir_fd=PROC_FD)
    try:
        return os.read(fd, 1 << 16).decode()
    finally:
        os.close(fd)


def fields(text: str) -> dict[str, str]:
    """The lines 'name: value' of a file of /proc."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def name_on_host(pid: int) -> str:
    """The number by which the host's /proc knows a process of a namespace of ours."""
    pidfd = os.pidfd_open(pid)
    try:
        return fields(read_proc(f"self/fdinfo/{pidfd}"))["Pid"].strip()
    finally:
        os.close(pidfd)


def _kilobytes(text: str, *names: str) -> int:
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.partition(":")[0] in names)


def memory_of(pids: list[str], base: int, limit: int) -> int:
    """Bytes that the candidate's processes hold beyond what they share with the zygote.

    First a cheap upper bound (private and shared pages, less the zygote's own, per process); the exact proportional sum only above the
    limit.
    """
    bound = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            bound += _kilobytes(read_proc(f"{pid}/status"), "RssAnon", "RssShmem")
    if bound - base <= limit:
        return bound - base
    exact = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            exact += _kilobytes(read_proc(f"{pid}/smaps_rollup"), "Pss_Anon", "Pss_Shmem")
    return exact - base // 2


def socket_memory() -> int:
    """Bytes that the sockets of our network namespace may hold: those of the candidate, sent or open, beyond a few."""
    return max(0, read_whole("self/net/unix").count(b"\n") - 1 - SLOT_SOCKETS) * SOCKET_BYTES


def read_whole(path: str) -> bytes:
    """A file of /proc of any size."""
    with open(os.open(path, os.O_RDONLY, dir_fd=PROC_FD), "rb") as file:
        return file.read()


def disk_of(root: str, size: int, inodes: int) -> bool:
    """Whether a scratch folder holds more than it may. A folder that cannot be looked into counts as too much."""
    total, count, stack = 0, 0, [root]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > size or count > inodes:
                        return True
        except FileNotFoundError:  # it was removed while we looked
            continue
        except OSError:  # no right to read it, or a path that is too long
            return True
    return False


def save_workspace(folder: int, fd: int, job: dict, uid: int | None) -> str:
    """Packs an open folder with the candidate's rights: 'saved', 'too large' or 'unreadable'.

    Whatever the candidate made of its folder is its own doing. Only a packer killed from outside is a failure of the infrastructure.

    Raises:
      OSError: no packer could be started, or it was killed.
    """
    packer = os.fork()
    if packer == 0:
        code = 3
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (PACK_CPU_S, PACK_CPU_S + 1))
            os.fchmod(folder, 0o755)
            os.fchdir(folder)
            if uid is not None:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            frames.write_all(fd, snapshot.pack(".", job["disk_bytes"], job["inodes"]))
            code = 0
        except snapshot.TooLarge:
            code = 2
        finally:  # any other exception is what the candidate left behind
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(packer, 0)[1])
    if code < 0 and code != -signal.SIGXCPU:
        raise OSError(errno.EIO, f"the workspace could not be read (signal {-code})")
    return {0: "saved", 2: "too large"}.get(code, "unreadable")


def prioritise(which: int, who: int, value: int) -> None:
    """setpriority(2), where it is allowed: a container's root may lack CAP_SYS_NICE, and is only later then."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpriority(which, who, max(-20, value))


def now(pid: int) -> None:
    """Real-time scheduling of one process (not of its children), where it is allowed: it runs before any that has only a nice value."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.sched_setscheduler(pid, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def go_first() -> None:
    """Root: a supervisor that wakes late must not wait behind the processes it is to end. It sleeps nearly always."""
    prioritise(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 10)
    now(0)


def report(job: dict, record: dict, fd: int) -> None:
    """Adds what follows from the rest, and writes the record; a host that gave the job up does not read it."""
    if record.get("status", 0) & 0x7F == signal.SIGKILL and record["cpu"] >= job["cpu"]:  # it ignored SIGXCPU
        record["timed_out"] = True
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, frames.dump(record))


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
