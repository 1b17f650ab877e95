"""The warm interpreter of one slot, and (below NAMESPACES) the supervisor of each execution.

The zygote forks and does nothing else. It never reads a payload and branches on nothing that depends on time, so every candidate starts
from the same heap, at the same addresses. `boxes` has what it does at NAMESPACES.

At the other levels it forks the next supervisor, waits until that one has taken a job, and starts over. A supervisor takes one job from the
slot's socket, forks the candidate, enforces the clock, the memory and the disk, ends everything that is left, and only then writes the
record. If it dies, the record's pipe closes without one: the host knows that the infrastructure failed, whatever the candidate did.
"""

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import resource
import select
import signal
import socket
import time

from . import boxes, candidate, ending, frames, isolation, linux, seccomp
from .boot import PROC_FD, SOCKET_FD

DRY_TURNS = 4
FOLDERS = ("work", "tmp", "shm")


@dataclasses.dataclass(frozen=True)
class Fence:
    """What holds a candidate: namespaces or not, its own user id or not, a ruleset, a filter (with the memory it lives in)."""

    namespaces: bool
    uid: int | None
    ruleset: int | None
    filter: tuple | None


def usage_of_self() -> dict[str, int]:
    """Bytes of address space and of private memory of this process."""
    status = ending.fields(ending.read_proc("self/status"))
    return {"address_space": int(status["VmSize"].split()[0]) << 10, "anonymous": int(status["RssAnon"].split()[0]) << 10}


def main() -> None:
    """Loads the profile, reports, and serves until the host goes away."""
    orders = json.loads(frames.read_file(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    for fd in (SOCKET_FD, PROC_FD):
        os.set_inheritable(fd, False)
    level, links, pid, sock = orders["level"], None, os.getpid(), socket.socket(fileno=SOCKET_FD)
    if level == "namespaces":
        # the libraries of some profiles look for the box's folders when they are imported
        linux.mount("tmpfs", "/box", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=16m,mode=0755")
        links = boxes.split(sock, orders)
    make_folders(orders["root"])
    os.chdir(f"{orders['root']}/work")
    for name in orders["preload"]:
        importlib.import_module(name)
    ruleset = None
    if level == "landlock":
        writable = [f"{orders['root']}/{name}" for name in FOLDERS]
        ruleset = isolation.landlock_ruleset([*orders["readable"], orders["root"]], writable)
    fence = Fence(
        namespaces=level == "namespaces",
        uid=orders["uid"],
        ruleset=ruleset,
        filter=None if level == "rlimits" else seccomp.prepared(seccomp.program(None, level == "namespaces", level == "namespaces")),
    )
    for program in orders["warm_up"]:
        exec(program, {})
    orders["main"] = candidate.main_module(os.path.join(orders["root"], candidate.SCRIPT))
    gc.collect()
    orders["gaps"] = candidate.take_blocks(400)  # kept: see candidate.order_free_memory
    gc.freeze()
    with open(os.open("self/maps", os.O_RDONLY, dir_fd=PROC_FD)) as file:
        pages = linux.collapse_anonymous(file.read())
    orders["base"] = usage_of_self()
    ready = {"ready": True, "pid": pid, "uid": fence.uid, "huge_pages": pages} | orders["base"]
    ready["fixed_addresses"] = orders["fixed_addresses"]
    if links:
        os.write(links.answers[1], frames.dump(ready))
        boxes.make_all(links, fence, orders)
    sock.send(frames.dump(ready))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    serve(sock, fence, orders)


def serve(sock: socket.socket, fence: Fence, orders: dict) -> None:
    """One supervisor after another, after a few that leave at once: from then on every turn finds the heap as the last one left it."""
    gone = select.poll()
    gone.register(SOCKET_FD, 0)
    turns = 0
    while True:  # one loop for both: a loop that ends frees a block
        turn(gone, sock, fence, orders, turns < DRY_TURNS)
        turns = min(turns + 1, DRY_TURNS)


def turn(gone, sock: socket.socket, fence: Fence, orders: dict, dry: bool) -> None:
    """Forks one supervisor and waits until it has a job, or is dead. `gone` is a poll object that sees the host leave."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            if not dry:
                supervise(sock, writer, fence, orders)
        finally:
            os._exit(71)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    if gone.poll(0):
        os._exit(0)


def make_folders(root: str, uid: int | None = None) -> None:
    """work, tmp and shm."""
    for name in FOLDERS:
        os.makedirs(f"{root}/{name}", 0o755, exist_ok=True)
        os.chmod(f"{root}/{name}", 0o755)
        if uid is not None:
            os.chown(f"{root}/{name}", uid, uid)


def wipe(root: str) -> None:
    """Empties the scratch folder of the levels without a mount of their own, but for its three folders, which a ruleset names by inode.

    Follows no link, and needs neither deep paths nor a deep stack: a folder in a folder is first moved up to `root`.
    """
    for path, mode in ((os.path.dirname(root), 0o711), (root, 0o755)):
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, mode)
    if not os.path.isdir(root) or os.path.islink(root):
        return
    numbers = itertools.count()
    for name in FOLDERS:
        empty(f"{root}/{name}", root, numbers, keep=True)
    while others := [entry.name for entry in os.scandir(root) if entry.name not in FOLDERS]:
        for name in others:
            empty(f"{root}/{name}", root, numbers, keep=False)


def empty(path: str, root: str, numbers, keep: bool) -> None:
    """Removes a file, or the files of a folder, whose folders go up to `root`; and the folder, unless it is one to keep."""
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    for entry in list(os.scandir(path)):
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
            continue
        os.chmod(entry.path, 0o700)
        place = next(place for number in numbers if not os.path.lexists(place := f"{root}/{number}"))
        os.rename(entry.path, place)
    if not keep:
        os.rmdir(path)


def supervise(sock: socket.socket, writer: int, fence: Fence, orders: dict) -> None:
    """One execution, from the empty folder to the record."""
    ending.die_with_parent()
    orphaned = select.poll()
    orphaned.register(writer, 0)
    if orphaned.poll(0):  # the zygote died before it could take us along
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    root, base = orders["root"], orders["base"]
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    message, ancillary, _, _ = sock.recvmsg(frames.MAX_MESSAGE, socket.CMSG_SPACE(4 * frames.FD_COUNT), socket.MSG_CMSG_CLOEXEC)
    if not message:
        os._exit(0)
    fds = list(memoryview(ancillary[0][2]).cast("i")) if ancillary else []
    os.close(writer)
    sock.close()
    job = json.loads(message) | {"root": root}
    job["address_space"] += base["address_space"]
    record = {"id": job["id"]}
    try:
        wipe(root)
        make_folders(root, fence.uid)
        os.chdir(f"{root}/work")
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)  # whatever the program puts in its place
        start = time.monotonic()
        problems, problem_fd = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(problems)
            candidate.start(job, fds, fence, problem_fd, orders["main"])
        os.close(problem_fd)
        if fence.uid is not None:
            ending.go_first()
        for place, fd in enumerate(fds):
            if place not in (frames.RECORD, frames.WORKSPACE_OUT):
                os.close(fd)
        own = os.readlink("self", dir_fd=PROC_FD)

        def look() -> str:
            reap_others(child)
            if ending.memory_of(ending.descendants(own), base["anonymous"], job["memory"]) > job["memory"]:
                return "memory_exceeded"
            return "disk_exceeded" if ending.disk_of(root, job["disk_bytes"], job["inodes"]) else ""

        why = ending.watch(child, start + job["wall"], fds[frames.RECORD], look)
        if why:
            os.kill(child, signal.SIGKILL)
        record |= {"status": os.waitpid(child, 0)[1], **why, "seconds": time.monotonic() - start}
        end_all(fence)
        if told := os.read(problems, 500):
            record["failure"] = f"the program was not started: {told.decode(errors='replace')}"
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        record |= {"cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss << 10}
        if job["workspace"]:
            record["workspace"] = ending.save_workspace(folder, fds[frames.WORKSPACE_OUT], job, fence.uid)
        os.chdir("/")
        wipe(root)
    except OSError as error:
        end_all(fence)
        record["failure"] = f"{type(error).__name__}: {error}"[:500]
    ending.report(job, record, fds[frames.RECORD])
    os._exit(0)


def reap_others(child: int) -> None:
    """Takes the exit status of orphans, but leaves the candidate's for `supervise`."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid == child:
            return
        os.waitpid(ended.si_pid, 0)


def end_all(fence: Fence) -> None:
    """Ends and reaps every process of the execution; afterwards none is left and none can appear."""
    if fence.uid is not None:
        helper = os.fork()
        if helper == 0:
            os.setresuid(fence.uid, fence.uid, fence.uid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
    own = os.readlink("self", dir_fd=PROC_FD)
    while True:
        try:
            if fence.uid is not None:
                os.waitpid(-1, 0)
                continue
            for pid in ending.descendants(own):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return
