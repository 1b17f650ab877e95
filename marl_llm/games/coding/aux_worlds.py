"""Worlds of helper and main agent: `helper_functions` for tiny models, `function_problems` for HumanEval and CoopHumanEval."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from marl_llm.games.coding.aux_data import ROWS, load_function_problems
from marl_llm.games.coding.aux_feedback import asking, check_mode, expert_feedback, report_feedback
from marl_llm.games.coding.aux_judge import AuxJudge
from marl_llm.games.coding.aux_team import INPUTS, aux_main, aux_roles
from marl_llm.games.coding.functions import SHARES
from marl_llm.games.coding.helper_functions import (
    HIDDEN,
    WORDS,
    aux_speech,
    aux_task,
    helper_player,
    mini_aux_roles,
    random_helper,
    scripted_expert,
)
from marl_llm.workflows import Task, World
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rows import DataError, without
from marl_llm.workflows.splits import Tasks, drawn_tasks, hold_out, listed_tasks

log = logging.getLogger(__name__)
MINI_FEEDBACK = ("plain", "passed", "expert")
SPLITS = (*ROWS, "disjoint")


def helper_functions(
    functions_seed: int = 0,
    style: str = "parallel",
    feedback: str = "expert",
    truth: float = 1.0,
    turns: int = 2,
    visible: int = 3,
    individual: bool = False,
    wrapper: str = "flow",
    effect: str = "off",
    noise: float = 0.05,
    heed: float = 0.5,
    lean: float = 0.0,
    ambiguous: float = 0.0,
    timeout_s: float = 2.0,
) -> World:
    """Helper and main agent on generated functions, judged in the real sandbox.

    Args:
      style: one of `aux_team.STYLES`.
      feedback, truth, turns: of style "feedback": "plain", "passed" or "expert", whose advice is right in this share.
      visible: cases that feedback may know; the others are hidden.
      individual: each agent is paid for its own function's form, as a local reward.
      wrapper, effect: as `AuxJudge`.
      noise, heed, lean: habits of the scripted player, see `helper_player`.
      ambiguous: share of the operations which have a word with two readings that are told by it. Only the expert knows what is meant.
      timeout_s: of one case.
    """
    judge = AuxJudge(timeout_s, wrapper, effect)
    tool = None
    if not 0 <= ambiguous <= 1:
        raise WorkflowError(f"ambiguous={ambiguous} is not in [0, 1]")
    if style == "feedback":
        if feedback not in MINI_FEEDBACK:
            raise WorkflowError(f"feedback={feedback!r}: this world's models read {', '.join(MINI_FEEDBACK)}")
        tool = scripted_expert(truth) if feedback == "expert" else report_feedback(judge, check_mode(feedback, visible))
    workflow = aux_main(judge, mini_aux_roles(style == "single"), style, WORDS, tool, turns, individual, INPUTS, HIDDEN)
    tasks = drawn_tasks(lambda split, number: aux_task(split, functions_seed, number, visible, ambiguous), SHARES)
    script = helper_player(noise, heed, lean, style == "single")
    return World(workflow, tasks, "passed", aux_speech(ambiguous > 0), script, random_helper)


def function_problems(
    humaneval: str = "",
    coop: str = "",
    rows: str = "paper",
    style: str = "parallel",
    feedback: str = "levels",
    turns: int = 2,
    visible: int = 0,
    url: str = "",
    served_as: str = "",
    on_bad_feedback: str = "void",
    individual: bool = False,
    wrapper: str = "flow",
    effect: str = "off",
    timeout_s: float = 10.0,
    max_prompt: int = 2048,
    max_tokens: int = 256,
) -> World:
    """Helper and main agent on HumanEval, CoopHumanEval, or both one after the other.

    Args:
      humaneval, coop: files of the two data sets; at least one.
      rows: which rows are for training and for the test: "release", "paper" (see `aux_data.ROWS`), or "disjoint", the release's without
        training problems that are test problems of either data set.
      style, feedback, turns, individual: as `helper_functions`; feedback is one of `aux_feedback.MODES`.
      visible: cases of each problem that feedback may know. They are not paid.
      url, served_as: the expert outside, up to `/chat/completions`, and its name there.
      on_bad_feedback: what an unreadable reply of the expert comes to, "void" or "plain".
      wrapper, effect, timeout_s: as `AuxJudge`.
      max_prompt, max_tokens: of each role.

    Raises `WorkflowError` for unknown words, `DataError` for files that cannot be used.
    """
    judge, client, tool = AuxJudge(timeout_s, wrapper, effect), None, None
    if rows not in SPLITS:
        raise WorkflowError(f"rows={rows!r} is unknown; choose one of {', '.join(SPLITS)}")
    if not humaneval and not coop:
        raise WorkflowError("humaneval or coop must name a file, e.g. --config.game.humaneval=HumanEval.jsonl.gz")
    if style == "feedback" and check_mode(feedback, visible) == "expert":
        if not url or not served_as:
            raise WorkflowError("feedback='expert' needs the model's url and the name served_as")
        from marl_llm.tools.chat import ChatClient, OpenAICompatible

        client = ChatClient(OpenAICompatible(url, served_as))
        tool = expert_feedback(asking(client), on_bad_feedback)
    elif style == "feedback":
        tool = report_feedback(judge, feedback)
    roles = aux_roles(max_tokens, max_prompt, style == "single")
    workflow = aux_main(judge, roles, style, feedback=tool, turns=turns, individual=individual)
    tasks = split_rows(humaneval, coop, rows, visible)
    return World(workflow, tasks, "passed", close=client.close if client else lambda: None)


def split_rows(humaneval: str, coop: str, rows: str, visible: int) -> Tasks:
    """Tasks of both files; the last fifth of the training rows is the validation split. Raises `DataError`."""
    parts: dict[str, list[Task]] = {"train": [], "test": []}
    for name, path in (("humaneval", humaneval), ("coop", coop)):
        for split, which in zip(parts, ROWS["release" if rows == "disjoint" else rows][name]) if path else ():
            found = load_function_problems(path, split, visible, which)
            for reason, count in found.dropped.items():
                log.warning("%s: %d problems are left out: %s", path, count, reason)
            parts[split] += found.tasks
    train, test = parts["train"], parts["test"]
    if rows == "disjoint":
        train = apart(train, test)
    if len(train) < 5 or not test:
        raise DataError(f"{humaneval or coop}: {len(train)} training problems and {len(test)} for the test; 5 and 1 are needed at least")
    kept, validation = hold_out(train)
    return listed_tasks({"train": apart(kept, validation), "validation": validation, "test": test})


def apart(tasks: Sequence[Task], others: Sequence[Task]) -> list[Task]:
    """Tasks that share neither the problem's text nor the entry point's name with the others."""
    names = {task.fields["entry"] for task in others}
    return [task for task in without(list(tasks), list(others), "problem").tasks if task.fields["entry"] not in names]
