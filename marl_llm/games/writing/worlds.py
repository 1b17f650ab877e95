"""The world of TLDR, arXiv and descriptions of Python's library for general models; that of tiny ones is `notes`."""

from __future__ import annotations

import dataclasses

from marl_llm.games.descriptions import description_tasks
from marl_llm.games.writing.graded import Graded
from marl_llm.games.writing.reward import PRESETS
from marl_llm.games.writing.team import FIELDS, TASKS, load_texts, writing_roles, writing_team
from marl_llm.workflows import World
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rows import DataError, without
from marl_llm.workflows.splits import hold_out, listed_tasks


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
) -> World:
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
      max_prompt, max_tokens: of each role.

    Raises `WorkflowError` for an unknown word, `DataError` for a file that cannot be used.
    """
    for name, value, known in (("task", task, TASKS), ("constants", constants, (*PRESETS, "graded"))):
        if value not in known:
            raise WorkflowError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    if constants == "graded" and grounded:
        raise WorkflowError("grounded=True would have no effect: the graded reward reads the post already")
    of_task = Graded() if constants == "graded" else dataclasses.replace(PRESETS[constants][task], grounded=grounded)
    team = writing_team(of_task, writing_roles(task, style, max_tokens, max_prompt), style)
    if task == "descriptions":
        if train or test:
            raise WorkflowError("train and test would have no effect: descriptions come with Python")
        return World(team, listed_tasks(description_tasks()), "return")
    if not train or not test:
        raise WorkflowError("train and test must name parquet, jsonl or json files of texts, e.g. --config.game.train=tldr/train.parquet")
    found, held_out = (load_texts(path, split, FIELDS[task], rows).tasks for path, split in ((train, "train"), (test, "test")))
    found = without(found, held_out, "post").tasks
    if len(found) < 5 or not held_out:
        raise DataError(f"{train} has {len(found)} usable rows and {test} {len(held_out)}; 5 and 1 are needed at least")
    rows_kept, validation = hold_out(found)
    tasks = listed_tasks({"train": without(rows_kept, validation, "post").tasks, "validation": validation, "test": held_out})
    return World(team, tasks, "return")
