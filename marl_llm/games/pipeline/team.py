"""The data pipeline of MAPPA: engineer, modeler and analyst work on shared files, one after the other (section 3.2, Appendix C).

    begin ─▶ [ engineer ─▶ run ] ≤ 3 ─▶ [ modeler ─▶ run ] ≤ 5 ─▶ [ analyst ─▶ run ] ≤ 2 ─▶ grade

Each role writes programs that are run on the team's files, until its program has ended well and the files that it owes are there (a
reading), or its turns are used up. The files are a value of the play, a `Workspace`. The answers are hidden: only `grade` reads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from marl_llm.games.pipeline.metrics import METRICS
from marl_llm.games.pipeline.runs import Run
from marl_llm.tools.results import ToolResult
from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import Role, Trajectory, Workflow, WorkflowError, compute, repeat, sequence, tool
from marl_llm.workflows.graph import Node

ENGINEER, MODELER, ANALYST = "engineer", "modeler", "analyst"
NAMES = (ENGINEER, MODELER, ANALYST)
TURNS = (3, 5, 2)  # the paper's; the release has 4, 4, 4
SUBMISSION = "submission.csv"
RUN_WRITES = ("files", "listing", "state", "printed", "error", "missing", "done")


@dataclasses.dataclass(frozen=True)
class Grade:
    """What a submission is worth."""

    measured: tuple[str, ...]  # names of the metrics that the task is measured by
    problem: str  # why it is invalid, one of `submissions.PROBLEMS`; "" for a valid one
    detail: str  # where, for people
    raw: Mapping[str, float]  # metric -> its value, of a valid submission

    def to_json(self) -> dict[str, Any]:
        """As a dictionary."""
        return dataclasses.asdict(self)


def files_of(*names: str) -> Callable[[Workspace], tuple[str, ...]]:
    """Which of these files are missing; an empty file, a folder or a link of that name is none."""
    return lambda files: tuple(name for name in names if not files.sizes().get(name))


def pipeline(
    name: str,
    roles: Sequence[Role],
    required: Mapping[str, tuple[str, ...]],
    run: Run,
    grade: Callable[..., Mapping[str, Any]],
    *,
    turns: Sequence[int] = TURNS,
    inputs: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (),
    list_files: Callable[[Workspace], str] = str,
    timeout_s: float | int = 300.0,
) -> Workflow:
    """The workflow of the module's text. Tasks give `given`, a `Workspace`, and `kind`, one of `metrics.KINDS`.

    Args:
      roles: engineer, modeler, analyst. Each writes `code` and `note_<role>`, and may read `files`, `listing` (the files as text), the
        notes, and of its own last program in this play `last` and `printed`; `warning` names files of earlier roles that are absent.
      required: role -> files that it owes.
      run: see `run_in_workspace`.
      grade: of the fields that its parameters name, among them hidden ones -> `measured`, `problem`, `detail`, `raw` of a `Grade`.
      turns: most programs of each role.
      inputs, hidden: further fields of the task.
      list_files: how `listing` shows the files.
      timeout_s: of one program, when it has a slot.

    Raises:
      WorkflowError: other roles, or turns that are not three numbers above 0.
    """
    if tuple(role.name for role in roles) != NAMES or len(turns) != len(NAMES) or min(turns) < 1:
        raise WorkflowError(f"{name}: the roles are {', '.join(NAMES)}, with three numbers of turns above 0, not {tuple(turns)}")

    def begin(given: Workspace) -> dict[str, Any]:
        return {"files": given, "listing": list_files(given)}

    parts: list[Node | Role] = [compute(begin, ("files", "listing"))]
    needed: tuple[str, ...] = ()
    for role, at_most in zip(roles, turns, strict=True):
        parts.append(_opening(role.name, needed))
        work = tool(_work(run, required[role.name], list_files), RUN_WRITES, f"run_{role.name}", timeout_s)
        keep = compute(lambda code: code, "last", f"keep_{role.name}")
        parts.append(repeat(role, work, keep, at_most=at_most, until=lambda done: done, name=f"{role.name}_turns"))
        needed = (*needed, *required[role.name])

    graded = tool(grade, ("measured", "problem", "detail", "raw"), "grade")
    named = compute(Grade, "grade", "graded", ("measured", "problem", "detail", "raw"))
    notes = {f"note_{role}": "" for role in NAMES}
    return Workflow(
        name,
        sequence(*parts, graded, named),
        inputs=("given", "kind", *inputs),
        hidden=hidden,
        start=notes,
        metrics=pipeline_metrics(),
        score="at_end",
    )


def _opening(role: str, needed: tuple[str, ...]) -> Node:
    """What a role finds when its first turn begins: nothing of its own, and a warning if files are absent that it needs."""
    absent = files_of(*needed)

    def opening(files: Workspace) -> dict[str, str]:
        lacking = absent(files)
        return {"last": "", "printed": "", "warning": f"Files of earlier roles are missing: {', '.join(lacking)}." if lacking else ""}

    return compute(opening, ("last", "printed", "warning"), f"begin_{role}")


def _work(run: Run, owed: tuple[str, ...], list_files: Callable[[Workspace], str]) -> Callable[..., Any]:
    """The tool behind a role: runs its program on the files, and looks at what is there then."""
    lacking = files_of(*owed)

    async def work(code: str, files: Workspace, given: Workspace) -> ToolResult:
        return (await run(code, files, sum(given.sizes().values()))).map(with_listing)

    def with_listing(ran: dict[str, Any]) -> dict[str, Any]:
        missing = lacking(ran["files"])
        return {**ran, "listing": list_files(ran["files"]), "missing": missing, "done": ran["state"] == "ok" and not missing}

    return work


# --- figures -----------------------------------------------------------------------------------------------------------------------------


def succeeded(path: Trajectory) -> float:
    """Whether the play ended with a valid submission."""
    return float(not path.fields["grade"].problem)


def pipeline_metrics() -> dict[str, Callable[[Trajectory], float | None]]:
    """`success`, of each kind of task too; `raw_<metric>` over successes and `fair_<metric>` over plays of the metric's kind."""
    metrics: dict[str, Callable[[Trajectory], float | None]] = {"success": succeeded}
    for kind in dict.fromkeys(metric.kind for metric in METRICS.values()):
        metrics[f"success_{kind}"] = lambda path, kind=kind: succeeded(path) if path.fields["kind"] == kind else None
    for name in METRICS:
        metrics[f"raw_{name}"] = lambda path, name=name: _raw(path, name)
        metrics[f"fair_{name}"] = lambda path, name=name: _fair(path, name)
    return metrics


def _raw(path: Trajectory, name: str) -> float | None:
    return path.fields["grade"].raw.get(name)


def _fair(path: Trajectory, name: str) -> float | None:
    if name not in path.fields["grade"].measured:
        return None
    return _raw(path, name) if succeeded(path) else METRICS[name].penalty
