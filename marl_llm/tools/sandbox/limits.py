"""How strong the fence is, what a program may use, and what became of it."""

import dataclasses
import enum
import signal as signals
from typing import Any

from marl_llm.errors import UserError
from marl_llm.tools.results import FailureKind, ToolResult
from marl_llm.tools.sandbox.workspace import Workspace
from marl_llm.untrusted import Bounds, read_json, valid_text

MIB = 1 << 20


class Level(enum.IntEnum):
    """The fence in force, strongest last. docs/sandbox.md says what each contains."""

    RLIMITS = 1  # a process of its own, limits, a supervisor
    LANDLOCK = 2  # and a Landlock ruleset and a seccomp filter
    NAMESPACES = 3  # and mount, pid, network, IPC and UTS namespaces with a root of its own


class SandboxError(UserError, RuntimeError):
    """The sandbox cannot do what it is asked, e.g. give the level that was demanded."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one execution may use. Every one is enforced by the kernel or by a supervisor outside the program.

    Attributes:
      timeout_s: wall-clock seconds from the start of the program to its end, exit handlers included.
      cpu_s: CPU seconds of one process; None for the wall clock's limit and one more.
      memory_mb: MiB that all processes together may hold beyond the preloaded libraries.
      address_space_mb: MiB that one process may map beyond the preloaded libraries.
      disk_mb: MiB of files (working folder, /tmp and /dev/shm together).
      inodes: files and folders.
      processes: processes and threads at a time.
      open_files: descriptors of one process.
      stack_mb: hard limit of the stack.
      stdout_bytes, stderr_bytes: kept of each stream; the rest is read and thrown away, and the result says so.
    """

    timeout_s: float | int = 10.0
    cpu_s: float | int | None = None
    memory_mb: int = 512
    address_space_mb: int = 1024
    disk_mb: int = 64
    inodes: int = 4096
    processes: int = 64
    open_files: int = 256
    stack_mb: int = 64
    stdout_bytes: int = 2 * MIB
    stderr_bytes: int = MIB // 4

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ValueError(f"Limits.{field.name} must be positive, not {value!r}")
        if self.processes > 4096 or self.inodes < 16:
            raise ValueError(f"Limits allow at most 4096 processes and need at least 16 inodes, not {self.processes} and {self.inodes}")

    def message(self) -> dict[str, Any]:
        """The fields as a supervisor reads them."""
        return {
            "wall": self.timeout_s,
            "cpu": int((self.timeout_s if self.cpu_s is None else self.cpu_s) + 0.999) + (self.cpu_s is None),
            "memory": self.memory_mb * MIB,
            "address_space": self.address_space_mb * MIB,
            "disk_bytes": self.disk_mb * MIB,
            "file_bytes": self.disk_mb * MIB,
            "inodes": self.inodes,
            "processes": self.processes,
            "open_files": self.open_files,
            "stack_bytes": self.stack_mb * MIB,
        }


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program did. All of it is the program's own doing and may become a reward.

    Attributes:
      stdout_bytes, stderr_bytes: what it wrote, up to the limits.
      exit_code: None when a signal ended it.
      signal: the number of that signal, or None.
      timed_out: it was ended at its wall-clock or CPU limit.
      memory_exceeded: it was ended because its processes together held too much.
      disk_exceeded: it was ended because it wrote too much (levels below NAMESPACES; there, writes fail instead).
      stdout_truncated, stderr_truncated: it wrote more than is kept.
      seconds, cpu_seconds, peak_bytes: wall time, CPU time of all processes, largest resident size of one (shared libraries included).
      workspace: the files it left, when a workspace was given in; None when they are lost.
      workspace_lost: why they are lost: `too large`, or `unreadable` (a path of over 1,000 bytes, say); else the empty string.
      channel: raw lines of a judged call.
    """

    stdout_bytes: bytes
    stderr_bytes: bytes
    exit_code: int | None
    signal: int | None = None
    timed_out: bool = False
    memory_exceeded: bool = False
    disk_exceeded: bool = False
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    workspace: Workspace | None = None
    workspace_lost: str = ""
    channel: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def stdout(self) -> str:
        """Standard output; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error, likewise."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def outcome(self) -> str:
        """One word: ok, error, signal, timeout, memory or disk."""
        if self.timed_out:
            return "timeout"
        if self.memory_exceeded or self.disk_exceeded:
            return "memory" if self.memory_exceeded else "disk"
        return "signal" if self.exit_code is None else "ok" if self.exit_code == 0 else "error"


def read_record(data: bytes) -> tuple[dict[str, Any], str]:
    """A supervisor's record, and the empty string or why there is no outcome: the supervisor's own reason, or a record of another form.

    Nothing that a program does reaches the record's pipe, but at the weakest level programs share a user with their supervisors.
    """
    parsed = read_json(data, Bounds(size=1 << 16))
    record = parsed.value
    if not isinstance(record, dict):
        return {}, f"the record cannot be read ({parsed.problem or 'no object'})"
    if "failure" in record:
        return {}, valid_text(str(record["failure"]))[:500]
    whole = all(type(record.get(name)) is int and 0 <= record[name] < 1 << 62 for name in ("status", "peak"))
    if not whole or not all(type(record.get(name)) in (int, float) and record[name] >= 0 for name in ("seconds", "cpu")):
        return {}, "the record has not the form of a supervisor's"
    return record, ""


def program_of(record: dict, outputs: list[tuple[bytes, bool]], workspace: Workspace | None) -> Program:
    """The outcome that a supervisor's record (see `read_record`) and the drained streams tell."""
    status = record["status"]
    number = status & 0x7F or None
    flags = {name: record.get(name) is True for name in ("timed_out", "memory_exceeded", "disk_exceeded")}
    flags["timed_out"] |= number == signals.SIGXCPU
    (out, out_cut), (err, err_cut) = outputs[:2]
    kept = record.get("workspace")
    return Program(
        stdout_bytes=out,
        stderr_bytes=err,
        exit_code=None if number or any(flags.values()) else status >> 8 & 0xFF,
        signal=number,
        stdout_truncated=out_cut,
        stderr_truncated=err_cut,
        seconds=float(record["seconds"]),
        cpu_seconds=float(record["cpu"]),
        peak_bytes=record["peak"],
        workspace=workspace,
        workspace_lost=kept if kept in ("too large", "unreadable") else "",
        channel=outputs[2][0] if len(outputs) > 2 else b"",
        **flags,
    )


@dataclasses.dataclass(frozen=True)
class Execution(ToolResult[Program]):
    """A tool result whose value is a `Program`; the shortcuts raise InfrastructureError where there is none.

    Attributes:
      level: the fence it ran behind.
      queued_s: seconds it waited for a slot.
    """

    level: Level = Level.RLIMITS
    queued_s: float = 0.0

    @property
    def stdout(self) -> str:
        """`outcome().stdout`."""
        return self.outcome().stdout

    @property
    def stderr(self) -> str:
        """`outcome().stderr`."""
        return self.outcome().stderr

    @property
    def exit_code(self) -> int | None:
        """`outcome().exit_code`."""
        return self.outcome().exit_code

    @property
    def timed_out(self) -> bool:
        """`outcome().timed_out`."""
        return self.outcome().timed_out


__all__ = ["Execution", "FailureKind", "Level", "Limits", "Program", "SandboxError", "program_of", "read_record"]
