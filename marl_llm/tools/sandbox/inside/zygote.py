"""The warm interpreter of one slot, and the supervisor of each execution.

The zygote does one thing: it forks the next supervisor, waits until that one has taken a job, and starts over. It never reads a payload and
branches on nothing that depends on time, so every candidate starts from the same heap, at the same addresses.

A supervisor is process 1 of new pid and mount namespaces. It mounts the box while it waits, takes one job from the slot's socket, forks the
candidate, enforces the clock and the memory, ends everything that is left, and only then writes the record. If it dies, the record's pipe
closes without one: the host knows that the infrastructure failed, whatever the candidate did.
"""

import contextlib
import dataclasses
import errno
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import time

from . import candidate, frames, isolation, linux, seccomp, snapshot
from .boot import PROC_FD, SOCKET_FD

DRY_TURNS = 4
MEMORY_TICK = 0.02  # seconds between two looks at the memory of all processes


@dataclasses.dataclass(frozen=True)
class Fence:
    """What holds a candidate: namespaces or not, its own user id or not, a ruleset, a filter (with the memory it lives in)."""

    namespaces: bool
    uid: int | None
    ruleset: int | None
    filter: tuple | None


def usage_of_self() -> dict[str, int]:
    """Bytes of address space and of private memory of this process."""
    with open(os.open("self/status", os.O_RDONLY, dir_fd=PROC_FD)) as file:
        fields = dict(line.split(":", 1) for line in file)
    return {"address_space": int(fields["VmSize"].split()[0]) << 10, "anonymous": int(fields["RssAnon"].split()[0]) << 10}


def main() -> None:
    """Loads the profile, reports, and serves until the host goes away."""
    orders = json.loads(frames.read_file(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    for fd in (SOCKET_FD, PROC_FD):
        os.set_inheritable(fd, False)
    level = orders["level"]
    if level == "namespaces":
        # the libraries of some profiles look for the box's folders when they are imported
        linux.mount("tmpfs", "/box", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=16m,mode=0755")
    make_folders(orders["root"])
    os.chdir(f"{orders['root']}/work")
    for name in orders["preload"]:
        importlib.import_module(name)
    fence = Fence(
        namespaces=level == "namespaces",
        uid=orders["uid"],
        ruleset=isolation.landlock_ruleset(orders["readable"], orders["scratch"]) if level == "landlock" else None,
        filter=None if level == "rlimits" else seccomp.prepared(seccomp.program(None, level == "namespaces", level == "namespaces")),
    )
    for program in orders["warm_up"]:
        exec(program, {})
    gc.collect()
    orders["gaps"] = candidate.take_blocks(400)  # kept: see candidate.order_free_memory
    gc.freeze()
    with open(os.open("self/maps", os.O_RDONLY, dir_fd=PROC_FD)) as file:
        pages = linux.collapse_anonymous(file.read())
    base = usage_of_self()
    sock = socket.socket(fileno=SOCKET_FD)
    ready = {"ready": True, "pid": os.getpid(), "uid": fence.uid, "huge_pages": pages, "fixed_addresses": orders["fixed_addresses"], **base}
    sock.send(frames.dump(ready))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    serve(sock, fence, orders, base)


def serve(sock: socket.socket, fence: Fence, orders: dict, base: dict) -> None:
    """One supervisor after another, after a few that leave at once: from then on every turn finds the heap as the last one left it."""
    gone = select.poll()
    gone.register(SOCKET_FD, 0)
    for _ in range(DRY_TURNS):
        turn(gone, sock, fence, orders, base, True)
    while True:
        turn(gone, sock, fence, orders, base, False)


def turn(gone, sock: socket.socket, fence: Fence, orders: dict, base: dict, dry: bool) -> None:
    """Forks one supervisor and waits until it has a job, or is dead. `gone` is a poll object that sees the host leave."""
    reader, writer = os.pipe()
    pid = linux.fork_into(linux.CLONE_NEWPID | linux.CLONE_NEWNS) if fence.namespaces else os.fork()
    if pid == 0:
        try:
            os.close(reader)
            if not dry:
                supervise(sock, writer, fence, orders, base)
        finally:
            os._exit(71)
    os.close(writer)
    os.read(reader, 1)
    os.close(reader)
    if gone.poll(0):
        os._exit(0)


def make_folders(root: str, uid: int | None = None) -> None:
    """work, tmp and shm, and nothing else."""
    for name in ("work", "tmp", "shm"):
        os.makedirs(f"{root}/{name}", 0o755, exist_ok=True)
        if uid is not None:
            os.chown(f"{root}/{name}", uid, uid)


def wipe(root: str) -> None:
    """Empties a scratch folder of the levels without a mount of their own. Follows no link."""
    if not os.path.isdir(root):
        return
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            wipe(entry.path)
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


def mount_options(orders: dict, job: dict) -> str:
    """Of the box's tmpfs."""
    return f"size={job.get('disk_bytes', orders['disk_bytes'])},nr_inodes={job.get('inodes', orders['inodes'])},mode=0755"


def supervise(sock: socket.socket, writer: int, fence: Fence, orders: dict, base: dict) -> None:
    """One execution, from the empty box to the record."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    orphaned = select.poll()
    orphaned.register(writer, 0)
    if orphaned.poll(0):  # the zygote died before it could take us along
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    problem, root = None, orders["root"]
    try:
        if fence.namespaces:
            linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, mount_options(orders, {}))
            make_folders(root, fence.uid)
        else:
            linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    except OSError as error:
        problem = str(error)
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
        if problem:
            raise OSError(problem)
        if not fence.namespaces:
            wipe(root)
            make_folders(root, fence.uid)
        elif (job["disk_bytes"], job["inodes"]) != (orders["disk_bytes"], orders["inodes"]):
            linux.mount("tmpfs", root, None, linux.MS_REMOUNT | linux.MS_NOSUID | linux.MS_NODEV, mount_options(orders, job))
        os.chdir(f"{root}/work")
        start = time.monotonic()
        problems, problem_fd = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(problems)
            candidate.start(job, fds, fence, problem_fd)
        os.close(problem_fd)
        if fence.uid is not None:  # root: a supervisor that is late must not wait behind the processes it is to end
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        for place, fd in enumerate(fds):
            if place not in (frames.RECORD, frames.WORKSPACE_OUT):
                os.close(fd)
        record |= watch(child, start, job, fds[frames.RECORD], base["anonymous"], fence)
        record["seconds"] = time.monotonic() - start
        end_all(fence)
        if told := os.read(problems, 500):
            record["failure"] = f"the program was not started: {told.decode(errors='replace')}"
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        record |= {"cpu": usage.ru_utime + usage.ru_stime, "peak": usage.ru_maxrss << 10}
        if record["status"] & 0x7F == signal.SIGKILL and record["cpu"] >= job["cpu"]:  # it ignored SIGXCPU
            record["timed_out"] = True
        if job["workspace"]:
            record["workspace"] = save_workspace(f"{root}/work", fds[frames.WORKSPACE_OUT], job["disk_bytes"], fence)
        if not fence.namespaces:
            os.chdir("/")
            wipe(root)
    except OSError as error:
        end_all(fence)
        record["failure"] = f"{type(error).__name__}: {error}"[:500]
    with contextlib.suppress(BrokenPipeError):  # the host gave the job up
        os.write(fds[frames.RECORD], frames.dump(record))
    os._exit(0)


def watch(child: int, start: float, job: dict, record_fd: int, base: int, fence: Fence) -> dict:
    """Waits for the candidate's end, or brings it about: clock, memory of all processes, disk without a cap, a host that left."""
    wanted = select.poll()
    pidfd = os.pidfd_open(child)
    wanted.register(pidfd, select.POLLIN)
    wanted.register(record_fd, 0)
    deadline = start + job["wall"]
    own, killed, pause = os.readlink("self", dir_fd=PROC_FD), {}, MEMORY_TICK
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            killed = {"timed_out": True}
            break
        ready = wanted.poll(max(1.0, min(left, pause) * 1e3))
        if any(fd == pidfd for fd, _ in ready):
            break
        if ready:
            killed = {"failure": "given up by the host"}
            break
        looked = time.monotonic()
        reap_others(child)
        if memory_of(own, base, job["memory"]) > job["memory"]:
            killed = {"memory_exceeded": True}
            break
        if not fence.namespaces and disk_of(job["root"], job["disk_bytes"], job["inodes"]):
            killed = {"disk_exceeded": True}
            break
        pause = max(MEMORY_TICK, 2 * (time.monotonic() - looked))  # many processes take long to look at
    if killed:
        os.kill(-1 if fence.namespaces else child, signal.SIGKILL)
        if fence.namespaces and fence.uid is not None:  # a killed process ends when it is scheduled next: let that be now
            os.setpriority(os.PRIO_USER, fence.uid, -20)
    status = os.waitpid(child, 0)[1]
    return {"status": status, **killed}


def reap_others(child: int) -> None:
    """Takes the exit status of orphans, but leaves the candidate's for `watch`."""
    while True:
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == child:
            return
        os.waitpid(found.si_pid, 0)


def descendants(pid: str) -> list[str]:
    """All processes below `pid`, as the host's /proc names them."""
    found, stack = [], [pid]
    while stack:
        parent = stack.pop()
        try:
            threads = tasks(parent)
            for thread in threads:
                children = read_proc(f"{parent}/task/{thread}/children").split()
                found += children
                stack += children
        except OSError:  # it ended while we looked
            continue
    return found


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


def _kilobytes(text: str, *names: str) -> int:
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.partition(":")[0] in names)


def memory_of(own: str, base: int, limit: int) -> int:
    """Bytes that the candidate's processes hold beyond what they share with the zygote.

    First a cheap upper bound (private and shared pages, less the zygote's own, per process); the exact proportional sum only above the
    limit.
    """
    below = descendants(own)
    bound = 0
    for pid in below:
        with contextlib.suppress(OSError):
            bound += _kilobytes(read_proc(f"{pid}/status"), "RssAnon", "RssShmem")
    if bound - base <= limit:
        return bound - base
    exact = 0
    for pid in below:
        with contextlib.suppress(OSError):
            exact += _kilobytes(read_proc(f"{pid}/smaps_rollup"), "Pss_Anon", "Pss_Shmem")
    return exact - base // 2


def disk_of(root: str, size: int, inodes: int) -> bool:
    """Whether a scratch folder holds more than it may."""
    total = count = 0
    for folder, names, files in os.walk(root):
        count += len(names) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
        if total > size or count > inodes:
            return True
    return False


def end_all(fence: Fence) -> None:
    """Ends and reaps every process of the execution; afterwards none is left and none can appear."""
    if fence.namespaces:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif fence.uid is not None:
        helper = os.fork()
        if helper == 0:
            os.setresuid(fence.uid, fence.uid, fence.uid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os._exit(0)
    own = os.readlink("self", dir_fd=PROC_FD)
    while True:
        try:
            if fence.namespaces or fence.uid is not None:
                os.waitpid(-1, 0)
                continue
            for pid in descendants(own):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:
            return


def save_workspace(folder: str, fd: int, limit: int, fence: Fence) -> str:
    """Packs the folder with the candidate's rights: 'saved', or 'too large'."""
    packer = os.fork()
    if packer == 0:
        code = 1
        try:
            if fence.uid is not None:
                os.setgroups([])
                os.setresgid(fence.uid, fence.uid, fence.uid)
                os.setresuid(fence.uid, fence.uid, fence.uid)
            try:
                data = snapshot.pack(folder, limit)
            except ValueError:
                code = 2
            else:
                frames.write_all(fd, data)
                code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(packer, 0)[1])
    if code not in (0, 2):
        raise OSError(errno.EIO, f"the workspace could not be read (exit {code})")
    return "saved" if code == 0 else "too large"
