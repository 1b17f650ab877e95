"""Programs that work on shared files: run in the sandbox from a workspace, which is a value, to another."""

from __future__ import annotations

import ast
from collections.abc import Awaitable, Callable
from typing import Any

from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.sandbox import Limits, Program, Submission, Workspace, default_sandbox
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.untrusted import read_text

SHOWN = 4000  # characters of what a program said; more is cut in the middle (the release cuts at 2,000)
# What became of a program. "lost": it left more than a workspace may hold, or paths that cannot be kept; the files are those before it.
STATES = ("ok", "no_program", "error", "signal", "timeout", "memory", "disk", "lost")
MOST_DISK, MOST_MEMORY = 2048, 8192  # MiB
MAX_CODE = 100_000  # characters of a program that are looked through for texts
Run = Callable[[str, Workspace, int], Awaitable[ToolResult]]


def run_in_workspace(
    profile: str, limits: Limits | Callable[[int], Limits], sandbox: Any = None, only_named: bool = False, kept: int = 65_536
) -> Run:
    """An async function (code, files, bytes of the task's tables) -> a result of `files`, `state`, `printed` and `error`.

    Equal programs on equal files run once.

    Args:
      profile: of the sandbox.
      limits: of a program, or a function of the bytes of the task's tables.
      sandbox: a `Sandbox`; by default the process's own.
      only_named: the program gets only the files whose names stand in it as texts, and the others are kept for it: more calls are equal.
        For small languages in which nothing else can be read.
      kept: most results that are kept, each with its files.
    """
    done = Verdicts(kept)

    async def run(code: str, files: Workspace, data_bytes: int = 0) -> ToolResult:
        if not code.strip():
            return success({"files": files, "state": "no_program", "printed": "", "error": "there is no program"}, 0.0)
        contents = files.files()
        used = {name: content for name, content in contents.items() if name in texts_of(code)} if only_named else contents
        start = Workspace.from_files(used) if only_named else files

        allowed = limits(data_bytes) if callable(limits) else limits

        async def once() -> ToolResult:
            ran = await (sandbox or default_sandbox()).arun(Submission(code, "", profile, allowed, workspace=start))
            return ran.map(lambda program: ending(program, start))

        def with_others(value: dict[str, Any]) -> dict[str, Any]:
            others = {name: content for name, content in contents.items() if name not in used}
            return {**value, "files": Workspace.from_files({**others, **value["files"].files()})}

        result = await done.of(content_key(code, start.digest, allowed), once)
        return result.map(with_others) if only_named else result

    return run


def ending(program: Program, before: Workspace) -> dict[str, object]:
    """What a program left and said: `files`, `state` of `STATES`, what it `printed`, and of its complaint the last line as `error`."""
    lost = program.workspace is None
    state = "lost" if lost and program.outcome == "ok" else program.outcome
    printed, complained = read_text(program.stdout_bytes).value, read_text(program.stderr_bytes).value
    last = complained.strip().splitlines()[-1] if complained.strip() else state
    error = "" if state == "ok" else f"files lost: {program.workspace_lost}" if state == "lost" else last[:SHOWN]
    output = "\n".join(part.strip() for part in (printed, complained) if part.strip())
    return {"files": before if lost else program.workspace, "state": state, "printed": cut_middle(output), "error": error}


def cut_middle(text: str, most: int = SHOWN) -> str:
    """The beginning and the end of a text that is longer, with a note between them."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n[... {len(text) - most} characters left out ...]\n{text[-(most - most // 2) :]}"


def texts_of(code: str) -> frozenset[str]:
    """The texts that stand in a program's calls, such as names of files; comments are none. Of what is no program: nothing."""
    try:
        tree = ast.parse(code[:MAX_CODE])
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    arguments = [argument for call in calls for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    return frozenset(argument.value for argument in arguments if isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def limits_for(data_bytes: int, timeout_s: float | int = 60.0) -> Limits:
    """Limits of a program on tables of `data_bytes` in all: disk for six times the tables, memory for 20 times (a frame of pandas and the
    copies that fitting makes), and at least what the libraries need.

    Raises `ValueError` if these are beyond `MOST_DISK` or `MOST_MEMORY`.
    """
    mib = -(-data_bytes // (1 << 20))
    disk, memory = 64 + 6 * mib, 1024 + 20 * mib
    if disk > MOST_DISK or memory > MOST_MEMORY:
        needs = f"need {disk} MiB of disk and {memory} MiB of memory"
        raise ValueError(f"its tables hold {mib} MiB and {needs}; {MOST_DISK} and {MOST_MEMORY} are allowed")
    return Limits(timeout_s=timeout_s, disk_mb=disk, memory_mb=memory, address_space_mb=2 * memory)
