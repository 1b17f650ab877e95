"""The world of TLDR and arXiv for general models; that of tiny ones is `notes`."""

from __future__ import annotations

import dataclasses

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
    """Two writers on posts (TLDR) or abstracts (arXiv).

    Args:
      train, test: files in the schema of the data sets; the last fifth of the training rows is the validation split. Training texts that
        are test texts too are left out.
      task: "tldr" (field `prompt`) or "arxiv" (field `abstract_text`).
      style: one of `team.STYLES`.
      constants: of the reward, "paper" or "release".
      grounded: see `reward.Constants`.
      rows: how many of each file; 1,000 are the release's.
      max_prompt, max_tokens: of each role.

    Raises `WorkflowError` for an unknown word, `DataError` for a file that cannot be used.
    """
    for name, value, known in (("task", task, TASKS), ("constants", constants, tuple(PRESETS))):
        if value not in known:
            raise WorkflowError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}")
    if not train or not test:
        raise WorkflowError("train and test must name parquet, jsonl or json files of texts, e.g. --config.game.train=tldr/train.parquet")
    found, held_out = (load_texts(path, split, FIELDS[task], rows).tasks for path, split in ((train, "train"), (test, "test")))
    found = without(found, held_out, "post").tasks
    if len(found) < 5 or not held_out:
        raise DataError(f"{train} has {len(found)} usable rows and {test} {len(held_out)}; 5 and 1 are needed at least")
    rows_kept, validation = hold_out(found)
    tasks = listed_tasks({"train": without(rows_kept, validation, "post").tasks, "validation": validation, "test": held_out})
    of_task = dataclasses.replace(PRESETS[constants][task], grounded=grounded)
    return World(writing_team(of_task, writing_roles(task, style, max_tokens, max_prompt), style), tasks, "return")
