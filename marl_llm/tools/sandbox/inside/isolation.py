"""The fences: namespaces with a root of their own, a Landlock ruleset, and the test of which of them this kernel gives."""

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import tempfile

from . import linux, seccomp

BOX_UID = 1000  # inside a user namespace
UID_BASE = 2_000_000  # as root each slot gets UID_BASE + its pid: RLIMIT_NPROC counts per user
DEVICES = ("null", "full")
PROBES = ("user_namespace", "namespaces", "tmpfs", "mount_setattr", "seccomp", "landlock", "no_aslr", "ambient")

# Landlock rights of <linux/landlock.h>, by the version that brought them.
FS_ALL = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1, 2, 4, 8, 1 << 14
RULESET_PATH_BENEATH = 1


def can_map_users() -> bool:
    """Whether this process may give others another user id: root with the range that slots use."""
    if os.geteuid() != 0 or not linux.capabilities() >> linux.CAP_SYS_ADMIN & 1:
        return False
    with open("/proc/self/uid_map") as file:
        spans = [[int(x) for x in line.split()] for line in file]
    return any(start <= UID_BASE and UID_BASE + (1 << 22) < start + count for start, _, count in spans)


def enter_namespaces() -> int | None:
    """New mount, network, IPC and UTS namespaces. Returns the user id for candidates, or None where a user namespace maps only our own."""
    flags = linux.CLONE_NEWNS | linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if can_map_users():
        linux.unshare(flags)
        return UID_BASE + os.getpid()
    enter_user_namespace(flags)
    return None


def enter_user_namespace(flags: int) -> None:
    """A user namespace in which we are `BOX_UID`, with capabilities that reach no further."""
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{BOX_UID} {uid} 1"), ("gid_map", f"{BOX_UID} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def build_root(binds: list[tuple[str, str]], uid: int) -> None:
    """A read-only root of its own: `binds` are (host path, path in the box); everything else is made here. No /proc, no /sys.

    Sources are opened before the new root covers anything, so it may be mounted over a folder that holds one of them.
    """
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    new = tempfile.gettempdir()
    opened = [(os.open(source, os.O_PATH | os.O_CLOEXEC), target) for source, target in binds if os.path.exists(source)]
    opened += [(os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC), f"/dev/{name}") for name in DEVICES]
    links = {name: os.readlink(f"/{name}") for name in ("bin", "lib", "lib64", "lib32") if os.path.islink(f"/{name}")}
    linux.mount("tmpfs", new, "tmpfs", linux.MS_NOSUID, "size=16m,mode=0755")
    for folder in ("usr", "opt", "etc", "dev", "box", "opt/site", "home"):
        os.mkdir(f"{new}/{folder}", 0o755)
    for name, target in links.items():
        os.symlink(target, f"{new}/{name}")
    for name, target in (("tmp", "box/tmp"), ("var", "box"), ("dev/shm", "../box/shm")):
        os.symlink(target, f"{new}/{name}")
    user = f"candidate:x:{uid}:{uid}:candidate:/box/work:/bin/sh\n"
    texts = {
        "passwd": user,
        "group": f"candidate:x:{uid}:\n",
        "hosts": "127.0.0.1 localhost\n",
        "nsswitch.conf": "passwd: files\nhosts: files\n",
    }
    for name, text in texts.items():
        with open(f"{new}/etc/{name}", "w") as file:
            file.write(text)
    write_entropy(f"{new}/dev/urandom")
    with open(f"{new}/dev/zero", "wb") as file:  # of the device, shared mappings could be made that no limit counts
        file.write(bytes(1 << 20))
    os.symlink("urandom", f"{new}/dev/random")
    flags = linux.MS_RDONLY | linux.MS_NOSUID
    for fd, target in opened:
        place = new + target
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(place, exist_ok=True)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/proc/self/fd/{fd}", place, None, linux.MS_BIND | linux.MS_REC)
        linux.set_mount_flags(place, flags if target.startswith("/dev/") else flags | linux.MS_NODEV, recursive=True)
        os.close(fd)
    linux.pivot_to(new)
    linux.set_mount_flags("/", flags | linux.MS_NODEV, recursive=False)


def write_entropy(path: str, size: int = 1 << 20) -> None:
    """A file of fixed pseudo-random bytes in the place of /dev/urandom: what C code reads when getrandom(2) is not there."""
    import random

    with open(path, "wb") as file:
        file.write(random.Random(0).randbytes(size))


def landlock_version() -> int:
    """The Landlock ABI of the kernel; OSError when there is none."""
    return linux.syscall("landlock_create_ruleset", None, 0, 1)


def landlock_ruleset(readable: list[str], writable: list[str]) -> int:
    """A ruleset that lets a program read `readable`, change `writable`, open no port, and (ABI 6) signal nobody outside."""
    version = landlock_version()
    handled = FS_ALL[max(v for v in FS_ALL if v <= version)]
    attributes = struct.pack("<QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = linux.syscall("landlock_create_ruleset", ctypes.create_string_buffer(attributes, 24), size, 0)
    read = EXECUTE | READ_FILE | READ_DIR
    rules = [(path, read) for path in readable] + [
        ("/dev/null", READ_FILE | WRITE_FILE),
        ("/dev/urandom", READ_FILE),
    ]
    for path, rights in [*rules, *((path, handled & ~(1 << 15)) for path in writable)]:
        if not os.path.exists(path):
            continue
        if not os.path.isdir(path):
            rights &= EXECUTE | READ_FILE | WRITE_FILE
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("<Qi", rights & handled, fd)
        linux.syscall("landlock_add_rule", ruleset, RULESET_PATH_BENEATH, ctypes.create_string_buffer(rule, 12), 0)
        os.close(fd)
    return ruleset


def _in_child(step) -> str:
    """Runs `step` in a forked process; the empty string, or what went wrong."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = ""
        try:
            step()
        except Exception as error:  # the probe's answer is the error itself
            text = str(error) or type(error).__name__
        finally:
            with contextlib.suppress(OSError):
                os.write(writer, text.encode()[:500])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    status = os.waitpid(pid, 0)[1]
    return text or ("" if status == 0 else f"the probe died with status {status}")


def probe() -> dict[str, str]:
    """For each feature the empty string when it works here, else why it does not. Each is tried for real, in a process of its own."""

    def user_namespace():
        enter_user_namespace(0)

    def namespaces():
        enter_namespaces()
        stack = mmap.mmap(-1, 1 << 14, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + len(stack)
        pidfd = os.pidfd_open(linux.start_idle(top, linux.CLONE_NEWPID))
        linux.setns(pidfd, linux.CLONE_NEWPID)
        pid = linux.fork_into(linux.CLONE_NEWNS)
        if pid == 0:
            os._exit(0 if os.getpid() == 2 else 1)
        status = os.waitpid(pid, 0)[1]
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if status:
            raise OSError("the second process of a new pid namespace does not have the number 2")

    def tmpfs():
        enter_namespaces()
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        linux.mount("tmpfs", tempfile.gettempdir(), "tmpfs", linux.MS_NOSUID, "size=1m,nr_inodes=8")

    def mount_setattr():
        tmpfs()
        linux.set_mount_flags(tempfile.gettempdir(), linux.MS_RDONLY, recursive=True)

    def filter_program():
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        structure, memory = seccomp.prepared(seccomp.program())
        linux.install_filter(structure)
        del memory
        try:
            linux.unshare(0)
        except PermissionError:
            return
        raise OSError("the filter lets unshare(2) pass")

    def landlock():
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        linux.syscall("landlock_restrict_self", landlock_ruleset(["/usr"], ["/dev/null"]), 0)
        try:
            os.listdir("/")
        except PermissionError:
            return
        raise OSError("the ruleset lets / be read")

    def no_aslr():
        linux.check(linux.libc.personality(linux.ADDR_NO_RANDOMIZE), "personality")

    def ambient():
        enter_namespaces()
        linux.keep_capabilities_over_exec()

    steps = (user_namespace, namespaces, tmpfs, mount_setattr, filter_program, landlock, no_aslr, ambient)
    return {name: _in_child(step) for name, step in zip(PROBES, steps)}
