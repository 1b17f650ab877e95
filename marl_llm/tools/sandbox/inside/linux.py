"""The Linux calls that Python 3.11 does not have, through the C library. Each raises OSError with the name of the call."""

import ctypes
import os
import platform
import signal
import struct

CLONE_VM, CLONE_PARENT = 0x00000100, 0x00008000
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
ADDR_NO_RANDOMIZE = 0x0040000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 24, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47
SECCOMP_MODE_FILTER = 2
MADV_COLLAPSE = 25
AT_EMPTY_PATH, AT_RECURSIVE, AT_FDCWD = 0x1000, 0x8000, -100
MOUNT_ATTR = {MS_RDONLY: 1, MS_NOSUID: 2, MS_NODEV: 4, MS_NOEXEC: 8}
CAP_SYS_ADMIN = 21

# The numbers differ by architecture only below 424.
SYSCALLS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "capget": 125},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "capget": 90},
}
COMMON = {"mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_add_rule": 445, "landlock_restrict_self": 446}

libc = ctypes.CDLL(None, use_errno=True)
holding_gil = ctypes.PyDLL(None, use_errno=True)
holding_gil.syscall.restype = ctypes.c_long
holding_gil.syscall.argtypes = (ctypes.c_long,) * 6
holding_gil.clone.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
api = ctypes.pythonapi
platform_machine = platform.machine()
libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.prctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong)
libc.personality.argtypes = (ctypes.c_ulong,)
libc.syscall.restype = ctypes.c_long


class SockFprog(ctypes.Structure):
    """struct sock_fprog of <linux/filter.h>."""

    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def check(value: int, what: str) -> int:
    """`value`, or OSError with errno when it is negative."""
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return value


def syscall(name: str, *arguments) -> int:
    """One raw system call. Integers are passed as 64 bits: the variadic `syscall` reads whole registers."""
    table = SYSCALLS.get(platform.machine())
    if table is None:
        raise OSError(38, f"{name}: no system call numbers for {platform.machine()}")
    number = COMMON.get(name) or table[name]
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check(libc.syscall(ctypes.c_long(number), *wide), name)


def unshare(flags: int) -> None:
    """unshare(2)."""
    check(libc.unshare(flags), f"unshare({flags:#x})")


def fork_into(flags: int) -> int:
    """fork() whose child starts in new namespaces.

    A raw clone(2), because unshare(CLONE_NEWPID) works once per process. The C library is not told: fine for a supervisor that only makes
    system calls and forks (a fork after it puts the library right again).
    """
    api.PyOS_BeforeFork()
    number = SYSCALLS[platform_machine]["clone"]
    pid = holding_gil.syscall(number, flags | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone({flags:#x}): {os.strerror(error)}")
    return pid


def fork_warm(flags: int) -> int:
    """A fork for one that has a single thread, holds no lock, and is process 2 in its pid namespace as its child will be.

    Neither Python nor the C library is told: their work after a fork (new locks, new seeds, thread ids) would touch 250 pages of the child,
    a sixth of the cost of an execution, to no effect here. Locks are free, chance is seeded later, and the cached thread id is right.
    """
    return check(holding_gil.syscall(SYSCALLS[platform_machine]["clone"], flags | signal.SIGCHLD, 0, 0, 0, 0), f"clone({flags:#x})")


def start_idle(stack_top: int, flags: int) -> int:
    """Starts a process that shares our memory and sleeps in pause(2) until it is killed: no page is copied, and nothing of Python runs.

    As the first process of a pid namespace it ends all others when it ends, and (its SIGCHLD is ours: ignored) reaps what they leave.
    """
    sleep = ctypes.cast(libc.pause, ctypes.c_void_p).value
    return check(holding_gil.clone(sleep, stack_top, flags | CLONE_VM | signal.SIGCHLD, None), f"clone({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    check(libc.setns(fd, flags), f"setns({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    check(
        libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, data.encode()), f"mount {source} on {target}"
    )


def set_mount_flags(path: str, flags: int, recursive: bool) -> None:
    """Adds flags to a mount and, if asked, to all below it; mount_setattr(2), Linux 5.12. Never takes a (locked) flag away."""
    bits = sum(attribute for flag, attribute in MOUNT_ATTR.items() if flags & flag)
    attributes = struct.pack("QQQQ", bits, 0, 0, 0)
    syscall("mount_setattr", AT_FDCWD, path.encode(), AT_RECURSIVE if recursive else 0, attributes, len(attributes))


def pivot_to(path: str) -> None:
    """Makes `path` (a mount) the root and drops the old one, both held by '.', as pivot_root(2) suggests."""
    os.chdir(path)
    syscall("pivot_root", b".", b".")
    check(libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int = 0, third: int | None = None, fourth: int = 0) -> int:
    """prctl(2)."""
    return check(libc.prctl(option, value, third, fourth, 0), f"prctl({option})")


def capabilities() -> int:
    """The effective capability set as a bit mask."""
    header, data = struct.pack("=Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    syscall("capget", header, data)
    low, _, _, high, _, _ = struct.unpack("=6I", data.raw)
    return low | high << 32


def set_capabilities(mask: int, inheritable: int = 0) -> None:
    """Effective = permitted = `mask`."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    ilow, ihigh = inheritable & 0xFFFFFFFF, inheritable >> 32
    syscall("capset", struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", low, low, ilow, high, high, ihigh))


def keep_capabilities_over_exec() -> None:
    """Raises every held capability into the ambient set: a user id other than 0 would lose them at exec."""
    mask = capabilities()
    set_capabilities(mask, mask)
    for cap in range(64):
        if mask >> cap & 1:
            prctl(PR_CAP_AMBIENT, 2, cap)


def install_filter(program: SockFprog) -> None:
    """The seccomp filter of this process and all that come from it. Needs no_new_privs."""
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def collapse_anonymous(maps: str) -> int:
    """Asks for huge pages under the large private mappings, so that a fork copies 512 times fewer entries. Returns how many were made."""
    huge, made = 2 << 20, 0
    for line in maps.splitlines():
        area, rights, _, _, inode = line.split()[:5]
        if inode != "0" or "w" not in rights or line.endswith("[stack]"):
            continue
        start, end = (int(x, 16) for x in area.split("-"))
        for page in range(-(-start // huge) * huge, end - huge + 1, huge):
            made += libc.madvise(page, huge, MADV_COLLAPSE) == 0
    return made
