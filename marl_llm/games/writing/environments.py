"""The environment of TLDR, arXiv and descriptions of Python's library for general models; that of tiny ones is `notes`."""

from __future__ import annotations

import dataclasses

from marl_llm.games.descriptions import description_tasks
from marl_llm.games.kit.datasets import check_two_files, split_tasks
from marl_llm.games.writing.graded import Graded
from marl_llm.games.writing.reward import PRESETS
from marl_llm.games.writing.team import FIELDS, TASKS, load_texts, writing_roles, writing_team
from marl_llm.hints import check_word
from marl_llm.workflows import Environment, Task
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rows import without
from marl_llm.workflows.splits import listed_tasks


def writing(
    train: str = "",
    test: str = "",
    task: str = "tldr",
    style: str = "parallel",
    constants: str = "paper",
    grounded: bool = False,
    rows: int = 1000,
    max_prompt: int = 2048,
    max_tokens: int = 256,
) -> Environment:
    """Two writers on posts (TLDR), abstracts (arXiv) or descriptions of Python's library, which every machine has.

    Args:
      train, test: files in the schema of the data sets; the last fifth of the training rows is the validation split. Training texts that
        are test texts too are left out.
        Of "descriptions" none: they come with Python.
      task: "tldr" (field `prompt`), "arxiv" (field `abstract_text`) or "descriptions".
      style: one of `team.STYLES`.
      constants: of the reward, "paper" or "release"; or "graded", which pays by degrees for texts on the post (`graded`).
      grounded: see `reward.Constants`.
      rows: how many of each file; 1,000 are the release's.

    Raises `WorkflowError` for an unknown word, `DataError` for a file that cannot be used.
    """
    check_word("task", task, TASKS, WorkflowError)
    check_word("constants", constants, (*PRESETS, "graded"), WorkflowError)
    if constants == "graded" and grounded:
        raise WorkflowError("grounded=True would have no effect: the graded reward reads the post already")
    of_task = Graded() if constants == "graded" else dataclasses.replace(PRESETS[constants][task], grounded=grounded)
    team = writing_team(of_task, writing_roles(task, style, max_tokens, max_prompt), style)
    if task == "descriptions":
        if train or test:
            raise WorkflowError("train and test would have no effect: descriptions come with Python")
        return Environment(team, listed_tasks(description_tasks()), "return")
    check_two_files(train, test, WorkflowError)
    train_texts, held_out = (load_texts(path, split, FIELDS[task], rows).tasks for path, split in ((train, "train"), (test, "test")))
    tasks = split_tasks(_unlike(train_texts, held_out), held_out, _unlike, train, test)
    return Environment(team, tasks, "return")


def _unlike(tasks: list[Task], others: list[Task]) -> list[Task]:
    return without(tasks, others, "post").tasks
