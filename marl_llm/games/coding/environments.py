"""The environments of coding. Of workflow D (UnityMAS-O): `functions`, `problems`. Coder and unit tester (Stronger-MAS): `function_debate`,
`one_line_debate`, `code_debate`. Helper and main agent (MAGRPO): `helper_functions`, `function_problems`. All but the last of each are
generated.
"""

from __future__ import annotations

from collections.abc import Sequence

from marl_llm.games.coding.aux_data import ROWS, load_function_problems
from marl_llm.games.coding.aux_feedback import asking, check_mode, expert_feedback, report_feedback
from marl_llm.games.coding.aux_judge import AuxJudge
from marl_llm.games.coding.aux_team import INPUTS, aux_main, aux_roles
from marl_llm.games.coding.contests import check_references, load_contests
from marl_llm.games.coding.data import load_problems
from marl_llm.games.coding.debate import HIDDEN as DEBATE_HIDDEN
from marl_llm.games.coding.debate import code_debate as debate_team
from marl_llm.games.coding.debate import debate_roles, single_coder
from marl_llm.games.coding.function_debate import FunctionRuns, debate_renderer, debate_task, function_debate_player, function_debate_roles
from marl_llm.games.coding.functions import function_renderer, function_task
from marl_llm.games.coding.helper_functions import (
    HIDDEN,
    WORDS,
    aux_renderer,
    aux_task,
    helper_player,
    mini_aux_roles,
    random_helper,
    scripted_expert,
)
from marl_llm.games.coding.mini import function_player, mini_coding_roles, mini_plan_code_verify_reflect, mini_verifier
from marl_llm.games.coding.mini import hide_fields as hide_field
from marl_llm.games.coding.one_line import one_line_roles, one_line_task
from marl_llm.games.coding.runs import Runs
from marl_llm.games.coding.team import ROUNDS, plan_code_verify_reflect, verifier
from marl_llm.games.kit.datasets import apart_from_test, check_two_files, disjoint_files, split_tasks, unlike
from marl_llm.games.kit.miniature import SHARES
from marl_llm.hints import check_word
from marl_llm.workflows import Environment, Task
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rows import log_dropped, without
from marl_llm.workflows.splits import Tasks, drawn_tasks

MINI_FEEDBACK = ("plain", "passed", "expert")
SPLITS = (*ROWS, "disjoint")


def functions(
    functions_seed: int = 0,
    ambiguous_share: float = 1.0,
    rare: float = 0.25,
    noise: float = 0.1,
    ignore_advice: float = 0.5,
    withhold_advice: float = 0.5,
    rounds: int = ROUNDS,
    hide_fields: str = "",
) -> Environment:
    """Workflow D on generated functions, judged in the real sandbox.

    Args:
      ambiguous_share, rare: how often an operation is told by a word with two readings, which only the tests tell apart, and how much
        more seldom the second of them is meant: see `coding.function_task`.
      noise, ignore_advice, withhold_advice: habits of the scripted player, see `coding.function_player`.
      rounds: most rounds.
      hide_fields: ablations, `role.field` with commas between, e.g. `planner.advice`: the role never sees the field.
    """
    roles = mini_coding_roles()
    for pair in filter(None, (part.strip() for part in hide_fields.split(","))):
        role, _, field = pair.partition(".")
        if role not in roles:
            raise ValueError(f"hide_fields={pair!r}: there is no role {role!r}; the roles are {', '.join(roles)}")
        roles = hide_field(roles, role, field)
    workflow = mini_plan_code_verify_reflect(mini_verifier(), roles, rounds)
    tasks = drawn_tasks(lambda split, number: function_task(split, functions_seed, number, ambiguous_share, rare), SHARES)
    return Environment(workflow, tasks, "all_passed", function_renderer(), function_player(noise, ignore_advice, withhold_advice))


def problems(train: str = "", test: str = "", rounds: int = ROUNDS, bad_rows: str = "refuse") -> Environment:
    """Workflow D on problems with tests (DeepCoder's mix: `coding.data`), judged in the sandbox."""
    tasks = disjoint_files(load_problems, train, test, "problem", bad_rows)
    if rounds < 1:
        raise WorkflowError(f"rounds={rounds} must be at least 1")
    return Environment(plan_code_verify_reflect(verifier(), rounds=rounds), tasks, "all_passed")


def function_debate(
    functions_seed: int = 0,
    rare: float = 0.25,
    agents: str = "team",
    turns: int = 3,
    rewards_form: str = "safe",
    noise: float = 0.15,
    misreading: float = 1.0,
    slip: float = 0.3,
    trivial: float = 0.2,
    keep: float = 0.5,
) -> Environment:
    """Coder and unit tester on generated functions of numbers; programs run in the sandbox.

    Args:
      rare: how much more seldom the second reading of `gap` is meant.
      agents: "team", or "single": the coder alone.
      rewards_form: "paper" (Appendix B.2), "safe" or "outcome" (B.6), see `workflows.forms`.
      noise, misreading, slip, trivial, keep: habits of the scripted player, see `coding.function_debate_player`.
    """
    roles = function_debate_roles()
    roles = roles if agents == "team" else {"coder": roles["coder"]}
    workflow = debate_team(FunctionRuns(), roles, agents, turns, rewards_form, ("problem",), DEBATE_HIDDEN)
    tasks = drawn_tasks(lambda split, number: debate_task(split, functions_seed, number, rare), SHARES)
    return Environment(workflow, tasks, "solved", debate_renderer(), function_debate_player(noise, misreading, slip, trivial, keep))


def one_line_debate(
    problems_seed: int = 0,
    agents: str = "team",
    turns: int = 1,
    rewards_form: str = "safe",
    timeout_s: float = 10.0,
    max_prompt: int = 288,
    max_tokens: int = 64,
) -> Environment:
    """Coder and unit tester on generated problems of one line, in plain English, for a checkpoint; programs run in the sandbox.

    Args:
      agents, turns, rewards_form: as `function_debate`.
      timeout_s: of one program on one test.
    """
    roles = one_line_roles(max_tokens, max_prompt, agents)
    workflow = debate_team(Runs(timeout_s), roles, agents, turns, rewards_form)
    return Environment(workflow, drawn_tasks(lambda split, number: one_line_task(split, problems_seed, number), SHARES), "solved")


def code_debate(
    train: str = "",
    test: str = "",
    agents: str = "team",
    turns: int = 4,
    rewards_form: str = "safe",
    difficulty: str = "",
    train_tests: int = 16,
    bad_rows: str = "refuse",
    references: str = "run",
    timeout_s: float = 10.0,
    max_prompt: int = 8192,
    max_tokens: int = 4096,
) -> Environment:
    """Coder and unit tester on programming problems in the schemas of `coding.contests`, judged in the sandbox.

    Args:
      train, test: files; the last rows of the first are the validation split. Training problems that are test problems too are left out.
      agents, turns, rewards_form: as `function_debate`; the single agent of the paper has one turn.
      difficulty: only training rows of this difficulty, e.g. APPS's "introductory".
      train_tests: most golden tests of a training problem; tests of the others all count.
      references: "run" those of the training problems and leave out those that fail, or "trust" them.
      timeout_s: of one program on one test.
    """
    check_two_files(train, test)
    check_word("references", references, ("run", "trust"))
    rows = load_contests(train, "train", difficulty, train_tests, bad_rows)
    test_set = load_contests(test, "test", bad_rows=bad_rows)
    tasks = apart_from_test(rows, test_set, "problem", train, test)
    if references == "run":
        tasks = log_dropped(train, check_references(tasks))
    roles = debate_roles(max_tokens, max_prompt) if agents == "team" else {"coder": single_coder(max_tokens, max_prompt)}
    workflow = debate_team(Runs(timeout_s), roles, agents, turns, rewards_form)
    return Environment(workflow, split_tasks(tasks, test_set.tasks, unlike("problem"), train, test), "solved")


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
) -> Environment:
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
            raise WorkflowError(f"feedback={feedback!r}: this environment's models read {', '.join(MINI_FEEDBACK)}")
        tool = scripted_expert(truth) if feedback == "expert" else report_feedback(judge, check_mode(feedback, visible))
    workflow = aux_main(judge, mini_aux_roles(style == "single"), style, WORDS, tool, turns, individual, INPUTS, HIDDEN)
    tasks = drawn_tasks(lambda split, number: aux_task(split, functions_seed, number, visible, ambiguous), SHARES)
    script = helper_player(noise, heed, lean, style == "single")
    return Environment(workflow, tasks, "passed", aux_renderer(ambiguous > 0), script, random_helper)


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
    on_bad_feedback: str = "abort",
    individual: bool = False,
    wrapper: str = "flow",
    effect: str = "off",
    timeout_s: float = 10.0,
    max_prompt: int = 2048,
    max_tokens: int = 256,
) -> Environment:
    """Helper and main agent on HumanEval, CoopHumanEval, or both one after the other.

    Args:
      humaneval, coop: files of the two data sets; at least one.
      rows: which rows are for training and for the test: "release", "paper" (see `aux_data.ROWS`), or "disjoint", the release's without
        training problems that are test problems of either data set.
      style, feedback, turns, individual: as `helper_functions`; feedback is one of `aux_feedback.MODES`.
      visible: cases of each problem that feedback may know. They are not paid.
      url, served_as: the expert outside, up to `/chat/completions`, and its name there.
      on_bad_feedback: what an unreadable reply of the expert comes to, "abort" or "plain".
      wrapper, effect, timeout_s: as `AuxJudge`.

    Raises `WorkflowError` for unknown words, `DataError` for files that cannot be used.
    """
    judge, client, tool = AuxJudge(timeout_s, wrapper, effect), None, None
    check_word("rows", rows, SPLITS, WorkflowError)
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
    return Environment(workflow, tasks, "passed", close=client.close if client else lambda: None)


def split_rows(humaneval: str, coop: str, rows: str, visible: int) -> Tasks:
    """Tasks of both files; the last fifth of the training rows is the validation split. Raises `DataError`."""
    parts: dict[str, list[Task]] = {"train": [], "test": []}
    for name, path in (("humaneval", humaneval), ("coop", coop)):
        for split, which in zip(parts, ROWS["release" if rows == "disjoint" else rows][name]) if path else ():
            problems = load_function_problems(path, split, visible, which)
            parts[split] += log_dropped(path, problems)
    train, test = parts["train"], parts["test"]
    if rows == "disjoint":
        train = apart(train, test)
    file = humaneval or coop
    return split_tasks(train, test, apart, file, file)


def apart(tasks: Sequence[Task], others: Sequence[Task]) -> list[Task]:
    """Tasks that share neither the problem's text nor the entry point's name with the others."""
    names = {task.fields["entry"] for task in others}
    return [task for task in without(list(tasks), list(others), "problem").tasks if task.fields["entry"] not in names]
