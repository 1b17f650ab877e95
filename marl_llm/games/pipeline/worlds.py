"""The data pipeline as a world: `tiny_pipeline` on generated tables."""

from __future__ import annotations

from marl_llm.games.pipeline.metrics import score_cap
from marl_llm.games.pipeline.rubric import FileFacts, pipeline_rubric
from marl_llm.games.pipeline.runs import run_in_workspace
from marl_llm.games.pipeline.statements import (
    FORGETS,
    REQUIRED,
    pipeline_player,
    pipeline_roles,
    pipeline_speech,
    random_player,
    shown_files,
)
from marl_llm.games.pipeline.tables import HIDDEN, SHARES, array_faults, grade_table, submission_fault, table_task, well_made
from marl_llm.games.pipeline.team import pipeline
from marl_llm.tools.sandbox import Limits
from marl_llm.workflows import ActionView, CoachGuide, World
from marl_llm.workflows.splits import drawn_tasks

LIMITS = Limits(timeout_s=5.0, memory_mb=256, disk_mb=8, stdout_bytes=64 * 1024, stderr_bytes=16 * 1024)
TEAM_TEXT = (
    "Three members work on one folder of files, one after the other. The engineer turns train.csv and test.csv into arrays, the modeler "
    "fits a model to them, the analyst writes predictions for the rows of test.csv into submission.csv. A program that fails leaves what "
    "it saved before it failed."
)
ROLE_TEXTS = {
    "engineer": "Must leave X_train, y_train and X_test: no gaps, all rows of the test table, columns on one scale.",
    "modeler": "Must leave the model, of a kind that fits the task: classes or numbers.",
    "analyst": "Must leave submission.csv with every id of the test table once and a finite number, for a class its probability.",
}
SUCCESS = "submission.csv has a valid prediction for every id of the test table"
SCALE = (
    "10 beyond expectation; 8-9 the program ran and saved all files; 6-7 most of them; 4-5 errors; 2-3 it fell to an upstream failure or "
    "is the cause of a later one; 0-1 nothing. Find the root cause first: which file is missing or wrong, and who had to write it."
)


def outcome_cap(view: ActionView) -> int | None:
    """The cap of an analyst's score where the outcome is known; see `metrics.score_cap`."""
    grade = view.truth.get("grade")
    if view.call.role != "analyst" or grade is None or grade.problem:
        return None
    return score_cap(grade.raw.get("auc"), grade.raw.get("rmse"))


def pipeline_guide(facts: FileFacts | None, role_texts: dict[str, str] = ROLE_TEXTS, text: str = TEAM_TEXT) -> CoachGuide:
    """What a coach is told; with `facts` there is a rubric."""
    rubric = None if facts is None else pipeline_rubric(facts)
    return CoachGuide(text, role_texts, SUCCESS, scale=SCALE, rubric=rubric, version="pipeline-1", cap=outcome_cap, when="end")


def tiny_pipeline(tables_seed: int = 0, turns: str = "1,1,1", forgets: float = FORGETS) -> World:
    """Engineer, modeler and analyst on generated tables, with statements for words.

    Args:
      tables_seed: of the tables.
      turns: most programs of engineer, modeler and analyst.
      forgets: how often the scripted team forgets each save.

    Raises:
      ValueError: turns that are not three whole numbers.
    """
    counts = read_turns(turns)
    run = run_in_workspace("numpy", LIMITS, only_named=True)
    roles = pipeline_roles(again=max(counts) > 1)
    workflow = pipeline(
        "tiny_pipeline", roles, REQUIRED, run, grade_table,
        turns=counts, inputs=("columns",), hidden=HIDDEN, list_files=shown_files, timeout_s=60.0,
    )  # fmt: skip
    tasks = drawn_tasks(lambda split, number: table_task(split, tables_seed, number), SHARES)
    guide = pipeline_guide(FileFacts(REQUIRED, array_faults, submission_fault, well_made))
    return World(workflow, tasks, "success", pipeline_speech(), pipeline_player(forgets), random_player, guide=guide)


def read_turns(text: str) -> tuple[int, int, int]:
    """Three numbers with commas between. Raises `ValueError`."""
    parts = [part.strip() for part in str(text).split(",")]
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"turns={text!r} must be three whole numbers above 0, of engineer, modeler and analyst, e.g. 3,5,2")
    return tuple(map(int, parts))
