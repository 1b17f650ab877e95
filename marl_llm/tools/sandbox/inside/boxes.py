"""Level NAMESPACES: who makes a box, who watches it, and what it is.

Four kinds of process, so that one execution costs one fork of the warm interpreter:

- The *anchor* is what the host started. It sleeps; when it is killed, the supervisor is, and with the supervisor all of its namespace.
- The *supervisor* is process 1 of the slot's pid namespace and serves all executions of the slot, one at a time. It hands a job to a box,
  enforces the clock and the memory, ends everything that is left, and only then writes the record. It opens no payload.
- The *zygote* holds the warm interpreter. It makes the next box while the present one runs, so a job never waits for a fork. It reads
  nothing but one byte per box, so every candidate starts from the same heap, at the same addresses.
- A *box* is an idle first process in a pid namespace of its own, whose end is the end of all in it, and the candidate, a fork of the
  zygote in a mount namespace of its own. It is used once.
"""

import ctypes
import dataclasses
import errno
import json
import marshal
import mmap
import os
import select
import signal
import socket
import struct
import time

from . import candidate, ending, frames, linux
from .boot import PROC_FD

IDLE_STACK = 1 << 14
PIDS = struct.Struct("=ii")  # idle process, candidate
HELD = struct.Struct("=ii")  # descriptors: working folder, mount namespace
SHARED_PROCESSES = 6  # of one user: anchor, supervisor, zygote, two idle processes, and the next candidate


@dataclasses.dataclass(frozen=True)
class Links:
    """What joins supervisor and zygote.

    Attributes:
      orders, answers: (read end, write end) of the pipes to and from the zygote.
      doors: (supervisor's end, box's end) of the sockets to a box; they are used in turn, because the next box exists before the last ends.
    """

    orders: tuple[int, int]
    answers: tuple[int, int]
    doors: tuple[tuple[socket.socket, socket.socket], ...]


def split(host: socket.socket, orders: dict) -> Links:
    """Becomes anchor, supervisor and zygote; only the zygote returns."""
    reader, writer = os.pipe()
    supervisor = linux.fork_into(linux.CLONE_NEWPID)
    if supervisor:
        host.close()
        os.close(writer)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]) and 1)
    ending.die_with_parent()
    os.close(reader)
    orphaned = select.poll()
    orphaned.register(writer, 0)
    if orphaned.poll(0):  # the anchor died before it could take us along
        os._exit(0)
    pairs = tuple(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    links = Links(os.pipe(), os.pipe(), pairs)
    if os.fork() == 0:
        host.close()
        os.close(links.orders[1])
        os.close(links.answers[0])
        return links
    os.close(links.orders[0])
    os.close(links.answers[1])
    ready = os.read(links.answers[0], frames.MAX_MESSAGE)
    if not ready:  # its complaint is on standard error
        os._exit(1)
    host.send(ready)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if orders["uid"] is not None:
        ending.go_first()
    supervise_all(host, links, orders, json.loads(ready))


# ---- the zygote's side


def make_all(links: Links, fence, orders: dict) -> None:
    """Makes one box per byte that the supervisor writes; ends with the supervisor."""
    own = os.open("self/ns/pid", os.O_RDONLY | os.O_CLOEXEC, dir_fd=PROC_FD)
    stacks = mmap.mmap(-1, len(links.doors) * IDLE_STACK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    below = ctypes.addressof(ctypes.c_char.from_buffer(stacks))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the idle process of a box inherits this, and so reaps orphans
    if os.getpid() != 2:
        raise OSError(errno.EINVAL, f"the zygote must be process 2 of the slot, not {os.getpid()}")  # see linux.fork_warm
    reader, writer = links.orders[0], links.answers[1]
    while True:
        for turn, (_, door) in enumerate(links.doors):
            if not os.read(reader, 1):
                os._exit(0)
            idle = linux.start_idle(below + (turn + 1) * IDLE_STACK, linux.CLONE_NEWPID | linux.CLONE_PARENT)
            pidfd = os.pidfd_open(idle)
            linux.setns(pidfd, linux.CLONE_NEWPID)
            pid = linux.fork_warm(linux.CLONE_NEWNS | linux.CLONE_PARENT)
            if pid == 0:
                try:
                    live(door, fence, orders)
                finally:
                    os._exit(71)
            linux.setns(own, linux.CLONE_NEWPID)
            os.close(pidfd)
            os.write(writer, PIDS.pack(idle, pid))


def mount_options(job: dict) -> str:
    """Of the box's tmpfs."""
    return f"size={job['disk_bytes']},nr_inodes={job['inodes']},mode=0755"


def live(door: socket.socket, fence, orders: dict) -> None:
    """A candidate from its first moment: it mounts its box, says so, waits for a job, and becomes the program."""
    root, flags = orders["root"], linux.MS_NOSUID | linux.MS_NODEV
    try:
        os.setsid()  # a signal to the program's process group reaches nobody else
        linux.mount("tmpfs", root, "tmpfs", flags, mount_options(orders))
        for name in ("work", "tmp", "shm"):
            os.mkdir(f"{root}/{name}", 0o755)
            if fence.uid is not None:
                os.chown(f"{root}/{name}", fence.uid, fence.uid)
        work = os.open(f"{root}/work", os.O_RDONLY | os.O_DIRECTORY)
        mounts = os.open("self/ns/mnt", os.O_RDONLY, dir_fd=PROC_FD)
    except OSError as error:
        door.send(str(error).encode()[:500])
        return
    door.sendmsg([b"ready"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, HELD.pack(work, mounts))])
    message, ancillary, _, _ = door.recvmsg(frames.MAX_MESSAGE, socket.CMSG_SPACE(4 * frames.FD_COUNT), socket.MSG_CMSG_CLOEXEC)
    fds = list(memoryview(ancillary[0][2]).cast("i"))
    job = marshal.loads(message)
    job["root"] = root
    job["address_space"] += orders["base"]["address_space"]
    if fence.uid is None:
        job["processes"] += SHARED_PROCESSES
    try:
        if (job["disk_bytes"], job["inodes"]) != (orders["disk_bytes"], orders["inodes"]):
            linux.mount("tmpfs", root, None, linux.MS_REMOUNT | flags, mount_options(job))
    except OSError as error:
        door.send(str(error).encode()[:500])
        return
    candidate.start(job, fds, fence, door.fileno(), orders["main"])


# ---- the supervisor's side


@dataclasses.dataclass(frozen=True)
class Box:
    """A box that waits for its job: its processes, its working folder and mount namespace (open descriptors), and the socket to it.

    While `mounts` is open, the end of the candidate does not take the namespace down. That waits for a kernel thread, which took up to a
    second beside 32 spinning processes, and now happens when the record is written.
    """

    idle: int
    candidate: int
    folder: int
    mounts: int
    door: socket.socket
    far_door: socket.socket

    def members(self) -> list[str]:
        """All processes of the box, as the host's /proc names them, without the idle one (whose memory is the zygote's)."""
        first = ending.name_on_host(self.candidate)
        return [first, *ending.descendants(first), *ending.descendants(ending.name_on_host(self.idle))]


def supervise_all(host: socket.socket, links: Links, orders: dict, ready: dict) -> None:
    """One execution after another. Whatever breaks between supervisor and zygote ends the slot: the host starts another."""
    os.write(links.orders[1], b"n")
    either = select.poll()
    either.register(host, select.POLLIN)
    either.register(links.answers[0], 0)  # the zygote's end
    turn = 0
    while True:
        if any(fd == links.answers[0] for fd, _ in either.poll()):
            os._exit(1)
        message, ancillary, _, _ = host.recvmsg(frames.MAX_MESSAGE, socket.CMSG_SPACE(4 * frames.FD_COUNT), socket.MSG_CMSG_CLOEXEC)
        if not message:
            os._exit(0)
        execute(message, list(memoryview(ancillary[0][2]).cast("i")), links, links.doors[turn], orders, ready)
        turn = (turn + 1) % len(links.doors)


def take(links: Links, door: socket.socket, far_door: socket.socket) -> tuple[Box, str]:
    """The box that was asked for, as soon as it is ready, and the empty string, or what went wrong in it."""
    answer = os.read(links.answers[0], PIDS.size)
    if len(answer) < PIDS.size:
        os._exit(1)
    idle, child = PIDS.unpack(answer)
    text, ancillary, _, _ = door.recvmsg(512, socket.CMSG_SPACE(HELD.size), socket.MSG_CMSG_CLOEXEC)
    folder, mounts = HELD.unpack(ancillary[0][2]) if ancillary else (-1, -1)
    return Box(idle, child, folder, mounts, door, far_door), "" if ancillary else text.decode()


def end(box: Box, uid: int | None) -> None:
    """Kills the candidate and all it has started. A killed process ends when it is scheduled next: root can let that be now."""
    for pid in (box.candidate, box.idle):
        os.kill(pid, signal.SIGKILL)
        if uid is not None:  # after the kill: a program never runs a line of its own in real time
            ending.now(pid)
    if uid is not None:
        ending.prioritise(os.PRIO_USER, uid, -20)


def unread(door: socket.socket) -> bytes:
    """A message that nobody has read; empty if there is none. Descriptors that came with it are dropped."""
    try:
        return door.recv(512, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return b""


def execute(message: bytes, fds: list[int], links: Links, doors, orders: dict, ready: dict) -> None:
    """One execution, from a ready box to the record. What the supervisor cannot explain ends the slot, box and all."""
    job, uid, record_fd = json.loads(message), orders["uid"], fds[frames.RECORD]
    record, broken = {"id": job["id"]}, False
    try:
        box, problem = take(links, *doors)
        if problem:
            raise OSError(errno.EIO, problem)
        if uid is not None:
            ending.prioritise(os.PRIO_PROCESS, box.idle, -20)
        start = time.monotonic()
        box.door.sendmsg([marshal.dumps(job)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))])
        os.write(links.orders[1], b"n")
        for place, fd in enumerate(fds):
            if place not in (frames.RECORD, frames.WORKSPACE_OUT):
                os.close(fd)

        def look() -> str:
            held = ending.memory_of(box.members(), ready["anonymous"], job["memory"]) + ending.socket_memory()
            return "memory_exceeded" if held > job["memory"] else ""

        why = ending.watch(box.candidate, start + job["wall"], record_fd, look)
        if why:
            end(box, uid)
        os.kill(box.idle, signal.SIGKILL)
        _, status, usage = os.wait4(box.candidate, 0)
        record |= {"status": status, **why, "seconds": time.monotonic() - start}
        rest = os.wait4(box.idle, 0)[2]  # comes back when the last process of the box is gone
        record["cpu"] = usage.ru_utime + usage.ru_stime + rest.ru_utime + rest.ru_stime
        record["peak"] = usage.ru_maxrss << 10
        if told := unread(box.door):
            record["failure"] = f"the program was not started: {told.decode(errors='replace')}"
        elif unread(box.far_door) and not why:
            record["failure"] = "the program was not started: it did not take its job"
        if job["workspace"]:
            record["workspace"] = ending.save_workspace(box.folder, fds[frames.WORKSPACE_OUT], job, uid)
    except OSError as error:
        record["failure"], broken = f"{type(error).__name__}: {error}"[:500], True
    ending.report(job, record, record_fd)
    if broken:
        os._exit(1)
    for fd in (record_fd, fds[frames.WORKSPACE_OUT], box.folder, box.mounts):
        os.close(fd)
