"""The data pipeline as an environment: `tiny_pipeline` on generated tables, `data_pipeline` on modelling tasks in DSBench's schema."""

from __future__ import annotations

from typing import Any

from marl_llm.games.pipeline import prompts, tasks
from marl_llm.games.pipeline.brief import pipeline_brief
from marl_llm.games.pipeline.metrics import score_cap
from marl_llm.games.pipeline.rubric import FileFacts, pipeline_rubric
from marl_llm.games.pipeline.runs import limits_for, run_in_workspace
from marl_llm.games.pipeline.statements import (
    FORGETS,
    REQUIRED,
    pipeline_player,
    pipeline_renderer,
    pipeline_roles,
    random_player,
    shown_files,
)
from marl_llm.games.pipeline.tables import HIDDEN, SHARES, array_faults, grade_table, submission_fault, table_task, well_made
from marl_llm.games.pipeline.team import pipeline
from marl_llm.tools.sandbox import Limits
from marl_llm.workflows import ActionView, CoachGuide, Environment, Task
from marl_llm.workflows.rows import DataError
from marl_llm.workflows.splits import drawn_tasks, hold_out, listed_tasks

LIMITS = Limits(timeout_s=5.0, memory_mb=256, disk_mb=8, stdout_bytes=64 * 1024, stderr_bytes=16 * 1024)
TEAM_TEXT = (
    "Three members work on one folder of files, one after the other. The engineer turns train.csv and test.csv into arrays, the modeler "
    "fits a model to them, the analyst writes predictions for the rows of test.csv into submission.csv. A program that fails leaves what "
    "it saved before it failed."
)
ROLE_TEXTS = {
    "engineer": "Must leave X_train, y_train and X_test: no gaps, all rows of the test table, columns of numbers that can be learned from.",
    "modeler": "Must leave the model, of a kind that fits the task: classes or numbers.",
    "analyst": "Must leave submission.csv with every id of the test table once and a valid prediction for each.",
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


QUESTIONS = {
    "engineer": ("Are all required files there, with every row and like columns?", "Does any later failure come from what it left?"),
    "modeler": ("Was a model saved, and does it suit task and metric?", "If it failed: by its own program, or by a file that was wrong?"),
    "analyst": ("Is there a submission with every id once?", "If it failed: by its own program, or by a file that was wrong?"),
}


def pipeline_guide(facts: FileFacts | None = None, **options: Any) -> CoachGuide:
    """What a coach is told; with `facts` there is a rubric. `options` are further fields of the guide."""
    rubric = None if facts is None else pipeline_rubric(facts)
    fixed = dict(scale=SCALE, rubric=rubric, version="pipeline-1", cap=outcome_cap, when="end")
    return CoachGuide(TEAM_TEXT, ROLE_TEXTS, SUCCESS, QUESTIONS, **fixed, **options)


def tiny_pipeline(tables_seed: int = 0, turns: str = "1,1,1", forgets: float = FORGETS) -> Environment:
    """Engineer, modeler and analyst on generated tables, with statements for words.

    Args:
      tables_seed: of the tables.
      turns: most programs of engineer, modeler and analyst.
      forgets: how often the scripted team forgets each save.

    Raises:
      ValueError: turns that are not three whole numbers.
    """
    counts = read_turns(turns)
    run = run_in_workspace("numpy", LIMITS, only_named=True, kept=4096)
    roles = pipeline_roles(again=max(counts) > 1)
    workflow = pipeline(
        "tiny_pipeline", roles, REQUIRED, run, grade_table,
        turns=counts, inputs=("columns",), hidden=HIDDEN, list_files=shown_files, timeout_s=60.0,
    )  # fmt: skip
    drawn = drawn_tasks(lambda split, number: table_task(split, tables_seed, number), SHARES)
    facts = FileFacts(REQUIRED, array_faults, submission_fault, well_made)
    guide = pipeline_guide(facts, brief=pipeline_brief(facts))
    return Environment(workflow, drawn, "success", pipeline_renderer(), pipeline_player(forgets), random_player, guide=guide)


def read_turns(text: str) -> tuple[int, int, int]:
    """Three numbers with commas between. Raises `ValueError`."""
    parts = [part.strip() for part in str(text).split(",")]
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"turns={text!r} must be three whole numbers above 0, of engineer, modeler and analyst, e.g. 3,5,2")
    return tuple(map(int, parts))


def data_pipeline(
    folder: str = "",
    manifest: str = "",
    train: str = "train.jsonl",
    test: str = "test.jsonl",
    turns: str = "3,5,2",
    timeout_s: float = 60.0,
    table_mb: float = tasks.MAX_MB,
    max_prompt: int = 24_576,
    max_tokens: int = 16_384,
) -> Environment:
    """Engineer, modeler and analyst on modelling tasks in DSBench's schema, with pandas and scikit-learn in the sandbox.

    Args:
      folder, manifest: see `tasks.load_modelling_tasks`.
      train, test: files of rows in the folder; the last fifth of the first is the validation split.
      turns: most programs of each role: the paper's 3,5,2 or the release's 4,4,4.
      timeout_s: of one program.
      table_mb: most MiB of one task's tables. A play keeps its files after every action, in memory and, where it is recorded, on disk.

    Raises:
      ValueError: no folder or manifest, or turns that are not three numbers.
      DataError: see `load_modelling_tasks`; or a task, or a training table, that is in both files.
    """
    if not folder or not manifest:
        raise ValueError("folder and manifest must be given, e.g. --config.game.folder=dsbench --config.game.manifest=dsbench/reviewed.csv")

    def load(rows, split):
        return tasks.load_modelling_tasks(folder, manifest, rows, split, table_mb)

    rows, held_out = load(train, "train"), load(test, "test")
    kept, validation = hold_out(rows)
    if not kept or not validation or not held_out:
        raise DataError(f"{train} has {len(rows)} tasks, {test} {len(held_out)}; 5 and 1 are needed, the last fifth for validation")
    _check_apart({train: kept, f"{train}, its last fifth": validation, test: held_out})

    def limits(size: int) -> Any:
        return limits_for(size, timeout_s)

    workflow = pipeline(
        "data_pipeline", prompts.data_roles(max_tokens, max_prompt, timeout_s), prompts.REQUIRED,
        run_in_workspace("data_science", limits, kept=16), tasks.grade_submission,
        turns=read_turns(turns), inputs=("metric", "task_text", "task_id", "targets", "id_column"), hidden=tasks.HIDDEN,
        list_files=prompts.list_files, timeout_s=timeout_s + 60.0,
    )  # fmt: skip
    listed = listed_tasks({"train": kept, "validation": validation, "test": held_out})
    return Environment(workflow, listed, "success", guide=pipeline_guide(feedback=prompts.feedback))


def _check_apart(parts: dict[str, list[Task]]) -> None:
    """Raises `DataError` for a task, or a table to learn from, that is in two parts (law 12)."""
    seen: dict[Any, tuple[str, str]] = {}
    for part, part_tasks in parts.items():
        for task in part_tasks:
            name = task.fields["task_id"]
            for key in (name, task.fields["given"].files()["train.csv"]):
                other, where = seen.setdefault(key, (name, part))
                if where != part:
                    raise DataError(f"task {name!r} of {part} is, or has the table of, task {other!r} of {where}: keep it in one")
