"""Helper and main agent: styles, joint pay per turn, what each reads, feedback without hidden cases, verdicts, the small world."""

import asyncio
import json

import pytest
from debates import SPEECH, Says, played, scores

from marl_llm.games import GameError, make_game
from marl_llm.games.coding.aux_feedback import EXPERT_PROMPT, expert_feedback, read_advice, report_feedback
from marl_llm.games.coding.aux_judge import AuxJudge
from marl_llm.games.coding.aux_team import STYLES, aux_main
from marl_llm.games.coding.functions import SHARES, template_split, unclear_places
from marl_llm.games.coding.helper_functions import (
    HELPER_PARTS,
    MAIN_PARTS,
    WORDS,
    aux_renderer,
    aux_task,
    helper_program,
    main_program,
    mini_aux_roles,
    part_of,
    random_helper,
    read_as,
    readings,
    scripted_expert,
)
from marl_llm.games.coding.helper_functions import HIDDEN as MINI_HIDDEN
from marl_llm.tools.judge import Case
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.workflows import Controller, FormatError, RolloutError, Task, WorkflowError, separate
from marl_llm.workflows.efficiency import critical_path_tokens, sampled_tokens
from marl_llm.workflows.samples import sample_table

HELPER = "def aux(x):\n    return x + 1"
MAIN = "def f(x):\n    y = aux(x)\n    return y * 2"
NONCE = 918273
CASES = (((1,), 4), ((5,), 12), ((NONCE,), 2 * NONCE + 2))


class Quick(AuxJudge):
    """The judge without processes: programs of these tests only."""

    async def states(self, code, entry, cases, loose):
        names = {}
        try:
            exec(code, names)
        except Exception as error:
            return success(tuple(Case("missing", error=str(error)) for _ in cases), 0.0)

        def case(given, wanted):
            try:
                value = names[entry](*given)
            except Exception as error:
                return Case("raised", error=f"{type(error).__name__}: {error}")
            return Case("passed" if value == wanted else "wrong", value)

        return success(tuple(case(*one) for one in cases), 0.0)


class Broken(AuxJudge):
    """The judge whose sandbox is gone."""

    async def states(self, code, entry, cases, loose):
        return failed(FailureKind.CRASH, "no worker", 0.0)


def task(visible=0):
    fields = {"problem": "Twice the next number.", "entry": "f", "parameters": "x", "preamble": ""}
    return Task(0, fields, {"tests": CASES[visible:], "visible_tests": CASES[:visible], "loose": False})


def one(style, script, judge=None, visible=0, **options):
    """A play of the full-size team by a script."""
    judge = judge or Quick()
    return played(aux_main(judge, style=style, **options), [task(visible)], script)


def says(helper=HELPER, main=MAIN):
    return lambda turn: {"helper": helper, "main": main}[turn.role.name]


def pair(helper, main, **options):
    return asyncio.run(Quick(**options).pair(helper, main, "f", "", CASES, False)).value


# ---- styles


def test_each_style_lets_each_agent_read_what_it_may_and_nothing_more():
    seen = {}
    for style in STYLES:
        feedback = report_feedback(Quick(), "plain") if style == "feedback" else None
        rollout = one(style, says(HELPER + "  # mark-h", MAIN + "  # mark-m"), feedback=feedback)
        seen[style] = [(c.role, c.turn, "mark-h" in c.prompt, "mark-m" in c.prompt) for path in rollout.trajectories for c in path.calls]
    assert seen["single"] == [("main", 0, False, False)]
    assert seen["parallel"] == [("helper", 0, False, False), ("main", 0, False, False)]
    assert seen["sequential"] == [("helper", 0, False, False), ("main", 0, True, False)]
    first = [("helper", 0, False, False), ("main", 0, False, False)]
    assert seen["discussion"] == [*first, ("helper", 1, True, True), ("main", 1, True, True)]
    assert seen["feedback"] == [*first, ("helper", 1, True, False), ("main", 1, False, True)]


def test_both_are_paid_each_turns_joint_reward_with_its_levels_apart():
    answers = {("helper", 0): "nonsense (", ("main", 0): MAIN, ("helper", 1): HELPER, ("main", 1): MAIN}
    rollout = one("discussion", lambda turn: answers[turn.role.name, turn.turn])
    rows = sample_table(rollout, training=()).samples
    assert [(r.call.role, r.call.turn, round(r.team, 6), r.local) for r in rows] == [
        ("helper", 0, 0.6, 0.0), ("main", 0, 0.6, 0.0), ("helper", 1, 4.0, 0.0), ("main", 1, 4.0, 0.0),
    ]  # fmt: skip
    assert rows[2].components == {"structure": 1.0, "syntax": 0.5, "tests": 1.0, "cooperation": 1.5}
    assert scores(rollout, "return") == [1.0]
    assert scores(rollout, "first_return") == [pytest.approx(0.15)]


@pytest.mark.parametrize(("main", "pay"), [("def f(x):\n    return 0", 0.6), ("def f(x):\n    pass", 0.0)])
def test_individual_rewards_pay_each_agent_its_own_form_and_no_result(main, pay):
    rollout = one("parallel", says(HELPER, main), individual=True)
    assert [(r.call.role, r.team, r.local) for r in sample_table(rollout, training=()).samples] == [
        ("helper", 0.0, 0.4), ("main", 0.0, pay),
    ]  # fmt: skip


def test_a_single_agent_has_no_level_of_cooperation_and_may_earn_all_others():
    rollout = one("single", lambda turn: "def f(x):\n    return 2 * x + 2")
    assert scores(rollout, "passed") == scores(rollout, "tests") == [1.0]
    assert "cooperation" not in rollout.workflow.metrics
    assert sample_table(rollout, training=()).samples[0].team == 2.5
    assert sample_table(one("single", says(main="def g(x): return 1")), training=()).samples[0].team == 0.0


def test_an_empty_answer_is_illegal_and_a_fence_around_it_all_is_taken_off():
    rollout = one("parallel", says(f"```python\n{HELPER}\n```", "   "))
    helper, main = rollout.trajectories[0].calls
    assert helper.writes["aux_code"] == HELPER
    assert not main.legal
    assert scores(rollout, "structure") == [pytest.approx(0.4)]


def test_a_failed_sandbox_aborts_the_play():
    with pytest.raises(RolloutError, match="failed; the first at node 'judge': crash: no worker"):  # no play was left
        one("parallel", says(), Broken())


def test_unknown_words_and_options_without_effect_are_named():
    with pytest.raises(WorkflowError, match="style='both' is not one of single"):
        aux_main(Quick(), style="both")
    with pytest.raises(WorkflowError, match="belongs to style='feedback'"):
        aux_main(Quick(), style="feedback")
    with pytest.raises(WorkflowError, match="turns=1: feedback needs a second turn"):
        aux_main(Quick(), style="feedback", feedback=report_feedback(Quick(), "plain"), turns=1)
    with pytest.raises(WorkflowError, match="wrapper='words' is not one of"):
        AuxJudge(wrapper="words")
    with pytest.raises(WorkflowError, match="effect='on' is not one of"):
        AuxJudge(effect="on")
    with pytest.raises(WorkflowError, match="feedback='levels' tells of visible cases"):
        make_game("function_problems", humaneval="x.jsonl", style="feedback", feedback="levels")
    with pytest.raises(WorkflowError, match="rows='all' is not one of release, paper, disjoint"):
        make_game("function_problems", humaneval="x.jsonl", rows="all")
    with pytest.raises(GameError, match="no option 'stile'; did you mean 'style'"):
        make_game("helper_functions", stile="single")
    with pytest.raises(WorkflowError, match="feedback='levels': this environment's models read plain, passed, expert"):
        make_game("helper_functions", style="feedback", feedback="levels")


# ---- what cooperation is worth


def test_an_aux_without_effect_loses_the_bonus_only_where_effect_is_required():
    fallback = "def f(x):\n    try:\n        y = aux(x)\n    except Exception:\n        y = x + 1\n    return y * 2"
    idle = "def f(x):\n    y = aux(x)\n    return 2 * x + 2 if y is None else 2 * x + 2"
    for main in (fallback, MAIN):
        assert pair(HELPER, main)["level_cooperation"] == 1.5
    assert [pair(HELPER, main, effect="measure")["aux_matters"] for main in (fallback, MAIN)] == [False, True]
    assert [pair(HELPER, main, effect="require")["level_cooperation"] for main in (fallback, MAIN)] == [0.0, 1.5]
    assert pair(HELPER, idle, effect="require")["level_cooperation"] == 1.5  # an aux that raises breaks it; a static check cannot tell more


def test_a_table_of_the_visible_examples_passes_no_hidden_case():
    table = "def f(x):\n    return {1: 4, 5: 12}.get(x, aux(x))"
    rollout = one("parallel", says("def aux(x):\n    return 0", table), visible=2)
    assert scores(rollout, "tests") == [0.0]


# ---- feedback


@pytest.mark.parametrize("mode", ["plain", "passed", "levels_short", "levels", "expert"])
def test_no_hidden_case_stands_in_any_prompt(mode):
    asked = []

    def ask(prompt, number):
        asked.append(prompt)
        return success('{"aux": "OK", "main": "add one"}', 0.0)

    tool = expert_feedback(ask) if mode == "expert" else report_feedback(Quick(), mode)
    rollout = one("feedback", says(HELPER, "def f(x):\n    return aux(x)"), visible=1, feedback=tool)
    prompts = [call.prompt for path in rollout.trajectories for call in path.calls] + asked
    assert len(prompts) == 4 + (mode == "expert")
    assert not any(str(NONCE) in prompt for prompt in prompts)
    assert not any("12" in prompt for prompt in prompts)
    wanted = {"plain": "return aux(x)", "passed": "Not all examples pass.", "levels_short": "examples passed: 0 of 1",
              "levels": "f(1) should be 4, but returned 2", "expert": "add one"}[mode]  # fmt: skip
    assert wanted in prompts[3]
    assert ("add one" in prompts[2]) is False


def test_levels_tell_of_a_syntax_error_by_its_line():
    rollout = one("feedback", says(HELPER, "def f(x):\n    return (x"), visible=1, feedback=report_feedback(Quick(), "levels"))
    assert "error: f, line 2:" in rollout.trajectories[0].calls[3].prompt


def test_an_unreadable_expert_is_asked_once_more_with_the_reason_and_then_aborts_the_play_or_says_nothing():
    asked = []

    def ask(prompt, number):
        asked.append((prompt, number))
        return success("I would rather not", 0.0)

    with pytest.raises(RolloutError, match="at node 'feedback': bad_reply: the expert's reply cannot be used: not a JSON object"):
        one("feedback", says(), visible=1, feedback=expert_feedback(ask))
    assert asked[1][1] == 1
    assert "could not be used: not a JSON object" in asked[1][0]
    plain = one("feedback", says(), visible=1, feedback=expert_feedback(ask, "plain"))
    assert not plain.episodes[0].aborted
    with pytest.raises(WorkflowError, match="on_bad_feedback='zero'"):
        expert_feedback(ask, "zero")


def test_a_dead_expert_aborts_the_play():
    dead = expert_feedback(lambda prompt, number: failed(FailureKind.UNAVAILABLE, "gone", 0.0), "plain")
    with pytest.raises(RolloutError, match="unavailable: gone"):
        one("feedback", says(), feedback=dead)


def test_advice_is_an_object_with_two_texts():
    assert read_advice('```json\n{"aux": " a ", "main": "b"}\n```') == {"note_aux": "a", "note_main": "b"}
    for text in ("[]", "{", '{"aux": 1, "main": "b"}', '{"aux": "a"}', ""):
        with pytest.raises(FormatError):
            read_advice(text)
    assert json.loads('{"aux": "x"}')["aux"] in EXPERT_PROMPT.format(problem="x", entry="f", aux_code="", main_code="", examples="")


# ---- the small world


def test_the_parts_of_a_problem_fit_together_as_they_should():
    for number in range(6):
        one_task = aux_task("test", 0, number)
        problem, plan = one_task.fields["problem"], one_task.hidden["plan_gold"]
        assert template_split(tuple(name for name, _ in plan)) == "test"
        for helper in HELPER_PARTS:
            assert part_of(problem, plan, helper_program(plan, helper)) in HELPER_PARTS
            for main, goes_with in MAIN_PARTS.items():
                codes = helper_program(plan, helper), main_program(plan, main)
                found = asyncio.run(Quick().pair(*codes, "f", "", one_task.hidden["tests"], False)).value
                if goes_with in (None, helper):
                    assert found["passed"]
                    assert found["level_cooperation"] == {"rest": 1.5, "before": 1.5, "wrap": 0.5, "alone": 0.0}[main]
    assert part_of(problem, plan, "def aux ( x ) : return x") is None


def test_unclear_words_cap_the_first_turn_and_the_expert_alone_settles_them():
    """A perfect player guesses at half of the unclear words; only right advice passes what a wrong guess lost."""
    found = {}
    for truth in (1.0, 0.0):
        environment = make_game("helper_functions", style="feedback", ambiguous=1.0, truth=truth, noise=0.0, heed=1.0, lean=1.0)
        mini = {"views": WORDS, "feedback": scripted_expert(truth), "hidden": MINI_HIDDEN}
        flow = aux_main(Quick(), mini_aux_roles(), "feedback", **mini)
        rollout = played(flow, environment.tasks("test", 0, 80), environment.script, aux_renderer(True))
        for path in rollout.trajectories:
            unclear = unclear_places(path.fields["problem"])
            (_, before), (_, after) = path.written("passed")
            found.setdefault((truth, bool(unclear)), []).append((before, after))
        ids = [i for row in sample_table(rollout, training=()).samples for i in (*row.call.prompt_ids, *row.response_ids)]
        assert 1 not in ids  # <unk>
    share = {key: tuple(sum(map(bool, one)) / len(pairs) for one in zip(*pairs)) for key, pairs in found.items()}
    assert len(found[1.0, True]) >= 25
    assert share[1.0, False] == (1.0, 1.0)
    assert 0.3 < share[1.0, True][0] < 0.7
    assert share[1.0, True][1] == 1.0
    assert share[0.0, True][1] <= share[0.0, True][0]
    plan = (("less", 2), ("from", 3), ("add", 1))
    assert len(readings("number gap 2 then gap 3 then plus 1", plan)) == 4
    assert read_as("number gap 2 then gap 3 then plus 1", plan, ("from", "from")) == (("from", 2), ("from", 3), ("add", 1))
    assert read_as("number gap 2 then gap 3 then plus 1", plan, ("from",)) is None
    assert part_of("number gap 2 then plus 1", (("less", 2), ("add", 1)), "def aux ( x ) : x = 2 - x ; return x") == "first"  # misread
    with pytest.raises(WorkflowError, match=r"ambiguous=1.5 is not in \[0, 1\]"):
        make_game("helper_functions", ambiguous=1.5)


def test_who_hears_nothing_writes_the_same_again():
    environment = make_game("helper_functions", style="feedback", feedback="plain", ambiguous=1.0, heed=1.0)
    flow = aux_main(Quick(), mini_aux_roles(), "feedback", views=WORDS, feedback=_silent, hidden=MINI_HIDDEN)
    for path in played(flow, environment.tasks("test", 0, 12), environment.script, aux_renderer(True)).trajectories:
        assert [path.calls[0].text, path.calls[1].text] == [path.calls[2].text, path.calls[3].text]


def _silent() -> ToolResult:
    return success({"note_aux": "", "note_main": ""}, 0.0)


def test_no_problem_of_one_split_is_one_of_another():
    texts = {split: {aux_task(split, 0, n).fields["problem"] for n in range(80)} for split in SHARES}
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["validation"]
    assert not texts["validation"] & texts["test"]
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        make_game("helper_functions").tasks("dev", 0, 1)


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_the_small_world_is_spoken_in_known_words_within_the_budgets(style):
    environment = make_game("helper_functions", style=style)
    judge_free = aux_main(Quick(), mini_aux_roles(style == "single"), style, **_mini(environment, style))
    rollout = played(judge_free, environment.tasks("test", 0, 12), environment.script, aux_renderer())
    for row in sample_table(rollout, training=()).samples:
        role = rollout.workflow.roles[row.call.role]
        assert 1 not in (*row.call.prompt_ids, *row.response_ids)  # <unk>
        assert len(row.call.prompt_ids) <= role.max_prompt
        assert row.response_ids.size <= role.max_tokens
        assert row.call.legal
    floor = played(judge_free, environment.tasks("test", 0, 12), random_helper, aux_renderer())
    assert sum(scores(floor, "passed")) <= 1


def _mini(environment, style):
    return {"views": WORDS, "feedback": scripted_expert() if style == "feedback" else None, "hidden": MINI_HIDDEN}


def test_a_parallel_team_has_its_longer_answer_on_the_critical_path_and_a_sequential_one_both():
    workflow = {style: aux_main(Quick(), style=style) for style in ("parallel", "sequential")}
    for style, flow in workflow.items():
        generator = Says(lambda prompt, request: HELPER if "Name the function aux" in prompt else MAIN)
        with Controller(flow, separate(flow), generator, SPEECH) as controller:
            path = controller.play([task()]).trajectories[0]
        sizes = [len(call.tokens) for call in path.calls]
        assert sampled_tokens(path) == sum(sizes)
        assert critical_path_tokens(path) == (max(sizes) if style == "parallel" else sum(sizes))


def test_the_sandbox_judges_a_pair_of_the_small_world_and_programs_that_cheat_pass_nothing():
    environment = make_game("helper_functions", effect="measure")
    rollout = played(environment.workflow, environment.tasks("test", 0, 2), lambda turn: helper_program(turn.fields["plan_gold"], "first")
                     if turn.role.name == "helper" else main_program(turn.fields["plan_gold"], "rest"), environment.renderer)  # fmt: skip
    assert scores(rollout, "return") == scores(rollout, "aux_matters") == [1.0, 1.0]
    cheats = (
        "import sys\ndef f(x, y=sys.exit(0)):\n    return aux(x)",
        "class E(int):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return E(aux(x))",
        "import builtins\nbuiltins.abs = None\ndef f(x):\n    return f(aux(x))",
    )
    judge = AuxJudge(2.0)
    for main in cheats:
        found = asyncio.run(judge.pair("def aux(x):\n    return x", main, "f", "", CASES, False))
        assert found.outcome()["level_tests"] == 0.0
