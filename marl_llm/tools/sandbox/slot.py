"""One zygote process seen from the host: how it is started, what it is told, and what this machine allows it to be."""

import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile

from marl_llm.tools.sandbox.inside import boot, boxes, candidate, ending, frames, isolation, linux, seccomp, snapshot, values, zygote
from marl_llm.tools.sandbox.limits import MIB, Level, Limits, SandboxError
from marl_llm.tools.sandbox.profiles import Profile

# Imported here so that their bytecode is there before a zygote looks for it.
INSIDE = (boot, boxes, candidate, ending, frames, isolation, linux, seccomp, snapshot, values, zygote)
SOURCE = os.path.dirname(os.path.dirname(os.path.abspath(boot.__file__)))
PREFIX = os.path.abspath(sys.base_prefix)
LIBRARIES = {key: value for key, value in os.environ.items() if key == "LD_LIBRARY_PATH"}  # this interpreter may not start without
EXECUTABLE = os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)
SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/lib32", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/alternatives")
NEEDS = {
    Level.NAMESPACES: ("namespaces", "tmpfs", "mount_setattr", "seccomp", "ambient"),
    Level.LANDLOCK: ("landlock", "seccomp"),
    Level.RLIMITS: (),
}


def command(call: str) -> list[str]:
    """A fresh interpreter that runs `call` with the folder `inside` as its only package."""
    return [EXECUTABLE, *boot.FLAGS, "-c", f"import sys; sys.path.insert(0, {SOURCE!r}); from inside import {call}"]


@functools.cache
def features() -> dict[str, str]:
    """For each kernel feature the empty string if it works for this user, else the reason; asked once, in a process of its own.

    Raises:
      SandboxError: the probe itself did not run.
    """
    done = subprocess.run(command("isolation as i; import json; print(json.dumps(i.probe()))"), capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SandboxError(f"the probe of kernel features ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout)


def missing(level: Level) -> dict[str, str]:
    """What this machine lacks for a level: feature to reason."""
    return {name: features()[name] for name in NEEDS[level] if features()[name]}


def best_level(minimum: Level) -> Level:
    """The strongest level this machine gives.

    Raises:
      SandboxError: weaker than `minimum`; says what is missing.
    """
    level = next(level for level in sorted(Level, reverse=True) if not missing(level))
    if level < minimum:
        lacks = "; ".join(f"{name}: {why}" for name, why in missing(minimum).items())
        raise SandboxError(
            f"this machine gives {level.name}, and {minimum.name} is demanded. Missing: {lacks}. Run outside of the container's filter, "
            f"allow user namespaces, or lower `minimum` (docs/sandbox.md says what that gives up)"
        )
    return level


@functools.cache
def binds(profile: Profile) -> tuple[list[tuple[str, str]], str, str | None]:
    """What a box shows of the host, read only: (host path, box path) pairs, the interpreter's path in the box, and PYTHONHOME."""
    pairs = [(path, path) for path in SYSTEM]
    pairs += [(f"/{name}", f"/{name}") for name in ("bin", "lib", "lib64") if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    executable, home = EXECUTABLE, None
    if PREFIX == "/usr/local":
        pairs += [(f"{PREFIX}/{name}", f"{PREFIX}/{name}") for name in ("bin", "lib")]
    elif PREFIX != "/usr":
        pairs.append((PREFIX, "/opt/python"))
        home, executable = "/opt/python", f"/opt/python/{os.path.relpath(EXECUTABLE, PREFIX)}"
    pairs += [(path, f"/opt/site/{os.path.basename(path)}") for path in profile.entries()]
    pairs.append((os.path.join(SOURCE, "inside"), "/opt/zygote/inside"))
    return pairs, executable, home


class Slot:
    """A zygote, its socket, and a file of its complaints.

    Attributes:
      process: the zygote; its pid stays the same through every exec.
      socket: carries one message out per job; end of file means that the zygote and its supervisors are gone.
      ready: its report once it serves, e.g. {"pid", "uid", "fixed_addresses"}.
    """

    def __init__(self, profile: Profile, level: Level, fixed_addresses: bool):
        pairs, box_executable, home = binds(profile)
        sites = sorted({os.path.dirname(path) for path in profile.entries()})
        self.profile, self.level, self.ready, self.job = profile, level, None, None
        self.scratch = None if level is Level.NAMESPACES else tempfile.mkdtemp(prefix="marl_llm_box_")
        if self.scratch:
            os.chmod(self.scratch, 0o711)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._complaints = os.memfd_create("zygote_stderr")
        namespaces = level is Level.NAMESPACES
        orders = {
            "socket": theirs.fileno(), "level": level.name.lower(), "profile": profile.name, "preload": profile.preload,
            "warm_up": profile.warm_up, "fixed_addresses": fixed_addresses, "binds": pairs, "box_executable": box_executable,
            "box_home": home, "executable": EXECUTABLE, "source": SOURCE, "scratch": self.scratch,
            "site": "/opt/site" if namespaces and sites else os.pathsep.join(sites) or None,
            "readable": [*SYSTEM, PREFIX, *profile.entries(), "/lib", "/lib64", "/bin", "/etc/localtime"],
            "disk_bytes": Limits().disk_mb * MIB, "inodes": Limits().inodes,
        }  # fmt: skip
        stdin = memory_file("orders", json.dumps(orders).encode())
        try:
            self.process = subprocess.Popen(
                command("boot; boot.main()"),
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                pass_fds=(theirs.fileno(),),
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TMPDIR": tempfile.gettempdir(), "PYTHONHASHSEED": "0"} | LIBRARIES,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(stdin)
            theirs.close()
        self.socket.setblocking(False)

    def complaint(self) -> str:
        """The end of what the zygote wrote to its standard error."""
        return frames.read_file(self._complaints)[-2000:].decode("utf-8", "replace").strip() or "it said nothing"

    def send(self, message: dict, fds: list[int]) -> None:
        """Hands a job over; OSError when the zygote is gone."""
        socket.send_fds(self.socket, [frames.dump(message)], fds)

    def close(self) -> None:
        """Ends the zygote, and with it whatever it runs; frees everything it held."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.socket.close()
        os.close(self._complaints)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


def memory_file(name: str, data: bytes) -> int:
    """A sealed memory file with `data`, at offset 0: nobody who gets it can change or grow it."""
    import fcntl

    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        frames.write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
