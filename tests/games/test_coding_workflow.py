"""Plan, code, verify, reflect: an honest small world, a teacher that solves it, the paper's rewards, reports that leak nothing, data."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.data_files import DataError, read_rows
from marl_llm.games.coding import (
    coding_roles,
    function_player,
    function_renderer,
    function_task,
    function_tokenizer,
    hide_fields,
    load_problems,
    mini_coding_roles,
    mini_plan_code_verify_reflect,
    mini_verifier,
    plan_code_verify_reflect,
    read_plan,
    template_split,
    templates,
    verifier,
)
from marl_llm.games.coding.functions import AMBIGUOUS, BY_NAME, OPS, OTHER, plan_text, program, run_plan
from marl_llm.games.coding.mini import Verdicts
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import Assignment, Controller, FormatError, Scripted
from marl_llm.workflows.metrics import rollout_metrics, team_metrics
from marl_llm.workflows.rewards import earned
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.trajectory import Task

SPLITS = ("train", "validation", "test")


def quickly(code, function, tests):
    """The verdict of the small world without a process: for tests of everything but the sandbox."""
    if not code:
        return {"pass_rate": 0.0, "report": "passed 0 of 9 wrong"}
    names = {}
    exec(code, {"abs": abs, "sorted": sorted, "set": set}, names)
    passed = sum(names["f"](*given) == wanted for given, wanted in tests)
    return {"pass_rate": passed / len(tests), "report": f"passed {passed} of {len(tests)} wrong"}


def scripted(player, roles=None, verify=quickly, **options):
    team = mini_plan_code_verify_reflect(verify, roles, **options)
    return Controller(team, Assignment(dict.fromkeys(team.roles, "t"), {"t": Scripted(player)}), None, function_renderer())


def test_the_teacher_without_noise_solves_everything_and_speaks_the_vocabulary():
    with scripted(function_player()) as controller:
        rollout = controller.play([function_task("test", 0, n) for n in range(80)])
    figures, solved = team_metrics(rollout), {}
    for episode, passed, rounds in zip(rollout.episodes, figures["all_passed"], figures["rounds"]):
        vague = sum(word in ("gap", "cut") for word in episode.task.fields["problem"].split())
        assert passed == 1.0 or vague > 2
        assert rounds <= 1 + vague
        solved.setdefault(vague, []).append(rounds)
    assert set(solved[0]) == {1.0}
    assert 1.0 < np.mean(solved[1]) < 2.0
    table = sample_table(rollout, training=())
    for role in rollout.workflow.roles.values():
        rows = [s for s in table.samples if s.call.role == role.name]
        assert all(s.call.legal for s in rows)
        assert max(s.response_ids.size for s in rows) <= role.max_tokens
    for prompt, response in table.demonstrations():
        assert 1 not in prompt  # <unk>
        assert 1 not in response
    assert function_tokenizer().vocab_size < 160


def test_reflection_earns_its_place_with_the_teacher():
    """Against the blind retry: a reflector that never says anything, so that the planner guesses anew in each round."""
    tasks = [task for task in (function_task("validation", 1, n) for n in range(150)) if "gap" in task.fields["problem"]]
    team = mini_plan_code_verify_reflect(quickly)
    solved = []
    for compute_advantages in (function_player(), lambda turn: "none"):
        models = {"t": Scripted(function_player()), "r": Scripted(compute_advantages)}
        assignment = Assignment({"planner": "t", "coder": "t", "reflector": "r"}, models)
        with Controller(team, assignment, None, function_renderer()) as controller:
            solved.append(np.mean(team_metrics(controller.play(tasks))["all_passed"]))
    assert solved[0] == 1.0
    assert solved[1] < 0.95


def test_a_blanked_field_is_gone_from_its_roles_prompt_only():
    roles = hide_fields(mini_coding_roles(), "planner", "advice")
    with scripted(function_player(), roles) as controller:
        rollout = controller.play([function_task("train", 0, n) for n in range(20)])
    prompts = [call.prompt for way in rollout.trajectories for call in way.by("planner")]
    assert all(prompt.endswith("says none plan:") for prompt in prompts)
    assert any(way.fields["advice"] != "none" for way in rollout.trajectories)
    with pytest.raises(ValueError, match="'coder' does not read 'advice'; it reads plan"):
        hide_fields(roles, "coder", "advice")


def test_noise_is_illegal_or_wrong_and_costs():
    with scripted(function_player(noise=0.5)) as controller:
        rollout = controller.play([function_task("train", 0, n) for n in range(60)])
    assert np.mean(team_metrics(rollout)["all_passed"]) < 0.8
    figures = rollout_metrics(rollout, sample_table(rollout, training=()))
    assert figures["role/planner/well_formed"] < 0.9
    assert figures["role/planner/component/format"] == pytest.approx(figures["role/planner/well_formed"] - 1)


def test_templates_of_the_splits_are_disjoint_whatever_their_order():
    sets = {split: {frozenset(names) for names in templates(split)} for split in SPLITS}
    assert all(len(found) > 8 for found in sets.values())
    assert not sets["train"] & sets["test"]
    assert not sets["train"] & sets["validation"]
    assert not sets["validation"] & sets["test"]
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        templates("dev")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SPLITS), st.integers(0, 10**6), st.integers(0, 10**6))
def test_problems_belong_to_their_split_and_are_what_they_say(split, seed, number):
    task = function_task(split, seed, number)
    plan = task.hidden["plan_gold"]
    assert template_split(tuple(name for name, _ in plan)) == split
    assert task.hidden == function_task(split, seed, number).hidden
    names = {}
    exec(program(plan), names)
    every = (*task.hidden["tests"], *task.hidden["visible_tests"])
    assert len(every) == 12
    assert all(names["f"](*given) == run_plan(plan, *given) == wanted for given, wanted in every)
    assert read_plan(plan_text(plan)) == tuple((name, n if BY_NAME[name].takes_number else 1) for name, n in plan)


def test_hidden_tests_tell_the_readings_of_an_ambiguous_word_apart():
    for number in range(200):
        task = function_task("train", 2, number)
        for i, (name, n) in enumerate(task.hidden["plan_gold"]):
            word = task.fields["problem"].split(" ", 1)[1].split(" then ")[i].split()[0]
            if word == AMBIGUOUS.get(name):
                other = list(task.hidden["plan_gold"])
                other[i] = (OTHER[name], n)
                assert quickly(program(tuple(other)), "f", task.hidden["tests"])["pass_rate"] < 1


def test_every_operation_has_its_own_words():
    words = [word for op in OPS for word in op.words]
    assert len(set(words)) == len(words)
    assert not {"gap", "cut"} & set(words)


@pytest.mark.parametrize(
    "text",
    ["", "add", "add 9", "negate 3", "add 1", "add 1 | add 2 | add 3 | add 4", "add 1 ; add 2", "add one | negate"],
)
def test_plans_out_of_form(text):
    with pytest.raises(FormatError):
        read_plan(text)


# ---- rewards


def rewarded(rates):
    """Components by role and turn when the rounds pass these shares."""
    left = iter(rates)

    def verify(code, function, tests, visible_tests):
        return {"pass_rate": next(left), "report": "r"}

    team = plan_code_verify_reflect(verify)
    said = {"planner": "think", "coder": "```python\npass\n```", "reflector": "no"}
    assignment = Assignment(dict.fromkeys(team.roles, "t"), {"t": Scripted(lambda turn: said[turn.role.name])})
    task = Task(0, {"problem": "p", "visible": "v", "interface": "i"}, {"function": "", "tests": (), "visible_tests": ()})
    with Controller(team, assignment, None, {}) as controller:
        (way,) = controller.play([task]).trajectories
    paid = earned(team, way)
    return way, {(call.role, call.turn): paid[call.id].local for call in way.calls}


def test_rewards_are_those_of_the_paper():
    way, paid = rewarded([0.25, 0.75, 0.5])
    assert paid == {
        ("planner", 0): 0.25, ("coder", 0): 0.25, ("reflector", 0): 0.5,
        ("planner", 1): 0.5, ("coder", 1): 0.5, ("reflector", 1): -0.25,
        ("planner", 2): -0.25, ("coder", 2): -0.25,
    }  # fmt: skip
    assert way.turns == 3


def test_all_passed_stops_at_once():
    way, paid = rewarded([1.0, 0.0])
    assert paid == {("planner", 0): 1.0, ("coder", 0): 1.0}
    assert (way.turns, way.fields["pass_rate"]) == (1, 1.0)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=3, max_size=3))
def test_holding_back_in_an_early_round_earns_nothing(rates):
    _, paid = rewarded(rates)
    assert sum(value for (role, _), value in paid.items() if role == "coder") == pytest.approx(rates[-1])
    assert sum(value for (role, _), value in paid.items() if role == "reflector") == pytest.approx(rates[-1] - rates[0])


def test_a_failed_verification_aborts_the_play():
    def verify(code, function, tests):
        return failed(FailureKind.CRASH, "worker died", 0.0) if len(code) % 2 else success({"pass_rate": 1.0, "report": ""}, 0.0)

    with scripted(function_player(), verify=verify) as controller:
        rollout = controller.play([function_task("train", 0, n) for n in range(20)])
    aborts = [episode for episode in rollout.episodes if episode.aborted]
    assert 0 < len(aborts) < 20
    assert not [s for s in sample_table(rollout).samples if s.excluded == "aborted" and s.where]


# ---- the real sandbox, and what it may tell


def verdict(code, tests, visible=(((1,), 2),), function="f"):
    return asyncio.run(verifier(timeout_s=5)(code, function, tests, visible)).outcome()


SECRET = (((424242,), 424243), ((7,), 8))
PEEK = """
def f(x):
    import sys
    frame, seen = sys._getframe(), ""
    while frame:
        seen, frame = seen + repr(frame.f_locals), frame.f_back
    secret = str(424241 + 1)  # spelled so that the program does not find its own text
    if secret in seen:
        raise type("Leak" + secret, (Exception,), {})(secret)
    raise ValueError("nothing seen")
"""


def test_programs_are_judged_and_the_world_agrees():
    task = function_task("train", 0, 3)
    code = program(task.hidden["plan_gold"])
    found = asyncio.run(mini_verifier(timeout_s=5)(code, "f", task.hidden["tests"])).outcome()
    assert found == {"pass_rate": 1.0, "report": "passed 9 of 9 wrong"}
    assert verdict("def f(x): return x + 1", SECRET) == {"pass_rate": 1.0, "report": "hidden tests: 2 of 2 passed"}
    assert verdict("", SECRET)["pass_rate"] == 0.0


@pytest.mark.parametrize(
    "code",
    [
        PEEK,
        "def f(x): raise ValueError(x)",
        "def f(x): print(x); return x",
        "seen = []\ndef f(x):\n    seen.append(x)\n    return seen",
        "def f(x): return {'input': x, 'all': 424242 if x == 424242 else 0}",
    ],
)
def test_no_report_carries_a_hidden_input(code):
    found = verdict(code, SECRET)
    assert "424242" not in found["report"]
    assert "Leak" not in found["report"]
    assert "example 1" in found["report"]
    assert found["pass_rate"] == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
        "def f(x): return {1: 2}[x]",
        "raise SystemExit(0)",
    ],
)
def test_leaving_early_equalling_everything_and_tables_of_examples_fail(code):
    assert verdict(code, SECRET)["pass_rate"] == 0.0


def test_visible_tests_are_reported_in_full_and_do_not_count():
    found = verdict("def f(x):\n    if x == 1: raise KeyError('one')\n    return x + 1", SECRET)
    assert found["pass_rate"] == 1.0
    assert "example 1: raised; input (1,), expected 2; KeyError: 'one'" in found["report"]


@pytest.mark.parametrize(
    ("body", "function"),
    [
        ("raise ValueError(chr(0xd800))", "f"), ("return 10 ** 5000", "f"), ("return [10 ** 5000, {chr(0xdc00): 1}]", "f"),
        ("raise type(chr(0xd800), (Exception,), {})(x)", "f"), ("import sys; sys.exit(chr(0xd800))", ""), ("print('1e' + '9' * 30)", ""),
    ],
)  # fmt: skip
def test_a1_a3_whatever_a_program_says_its_report_is_text_for_a_prompt(body, function):
    code = f"def f(x):\n    {body}" + ("" if function else "\nf(0)")
    visible = (((1,), 10**6000),) if function else (("1", "2.5"),)
    found = verdict(code, SECRET if function else (("1", "2.5"),), visible, function)
    assert found["pass_rate"] == 0.0
    assert "example 1: " in found["report"]
    found["report"].encode()


def test_programs_that_read_and_print():
    found = verdict("print(int(input()) + 1)", (("1\n", "2"), ("5\n", "7")), (("3\n", "4"),), function="")
    assert found == {"pass_rate": 0.5, "report": "hidden tests: 1 of 2 passed; 1 wrong"}


def test_roles_never_read_what_is_hidden():
    for roles, hidden in ((coding_roles(), ("tests", "visible_tests")), (mini_coding_roles(), ("tests", "plan_gold", "visible_tests"))):
        assert not {field for role in roles.values() for field in role.reads} & set(hidden)


# ---- data

STDIN = {"problem": "add one", "tests": [{"input": f"{i}\n", "output": f"{i + 1}\n", "testtype": "stdin"} for i in range(6)]}
CALLS = {
    "question": "add",
    "starter_code": "class Solution:\n    def __init__(self):\n        pass\n    def add(self, a, b):\n",
    "tests": json.dumps([{"input": "[1]\n2", "output": "3", "testtype": "functional"}] * 2),
}
TACO = {"prompt": "sum", "input_output": json.dumps({"inputs": [[1, 2], [3, 4]], "outputs": [3, 7], "fn_name": "total"})}
LINES = {"problem": "p", "input_output": {"inputs": [["1", "2"], "3"], "outputs": ["3", ["3"]]}}
PAIRS = {"problem": "p", "test_cases": [["1", "2"], ["2", "3"]]}


def test_the_schemas_of_the_published_files_load(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [STDIN, CALLS, TACO, LINES, PAIRS])))
    tasks = load_problems(path, "train")
    hidden = [(task.hidden["function"], task.hidden["visible_tests"], task.hidden["tests"]) for task in tasks]
    assert hidden[0][1] == (("0\n", "1\n"), ("1\n", "2\n"), ("2\n", "3\n"))
    assert len(hidden[0][2]) == 3
    assert hidden[1] == ("add", ((([1], 2), 3),), ((([1], 2), 3),))
    assert hidden[2] == ("total", (((1, 2), 3),), (((3, 4), 7),))
    assert hidden[3] == ("", (("1\n2", "3"),), (("3", "3"),))
    assert hidden[4] == ("", (("1", "2"),), (("2", "3"),))
    assert "output: 2" in tasks[4].fields["visible"]
    assert "Begin with:\nclass Solution" in tasks[1].fields["interface"]
    assert not any(str(given) in task.fields["visible"] for task in tasks[4:] for given, _ in [("3", "")])


def test_parquet_loads(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([STDIN, STDIN]), path)
    assert len(load_problems(path, "test", visible=2)) == 2
    assert len(load_problems(path, "test", visible=2, limit=1)[0].hidden["tests"]) == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tests": [1]}, "no problem"),
        ({"problem": "p"}, "no tests"),
        ({"problem": "p", "tests": "{"}, "not JSON"),
        ({"problem": "p", "tests": {"inputs": [1], "outputs": []}}, "equally long"),
        ({"problem": "p", "tests": [["1", "2"]]}, "1 tests; one to show and one to hide"),
        ({"problem": "p", "tests": [1, 2]}, "unknown form"),
        ({"problem": "p", "tests": [{"input": "1", "output": "2", "testtype": "functional"}] * 2}, "neither fn_name nor starter_code"),
        ({"problem": "p", "tests": [{"input": "x", "output": "2", "fn_name": "f", "type": "functional"}] * 2}, "one JSON value per line"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, row, message):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=f"row 0: .*{message}"):
        load_problems(path, "train")


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_text("{}\n\n[1]\n{")
    (tmp_path / "x.csv").write_text("")
    with pytest.raises(DataError, match="line 3: a JSON list"):
        list(read_rows(tmp_path / "x.jsonl"))
    with pytest.raises(DataError, match="unknown kind of file"):
        load_problems(tmp_path / "x.csv", "train")


def test_a_rare_reading_is_rare_and_its_split_does_not_move():
    def readings(rare):
        found = []
        for task in (function_task("train", 0, n, ambiguous_share=1.0, rare=rare) for n in range(400)):
            words = [part.split()[0] for part in task.fields["problem"].split(" ", 1)[1].split(" then ")]
            found += [name for word, (name, _) in zip(words, task.hidden["plan_gold"]) if word in ("gap", "cut")]
        return np.mean([name in ("less", "head") for name in found])

    assert 0.4 < readings(1.0) < 0.6
    assert 0.72 < readings(0.25) < 0.88


def test_the_teachers_habits_are_what_they_are_called():
    tasks = [function_task("validation", 1, n, ambiguous_share=1.0) for n in range(60)]

    def played(**habits):
        with scripted(function_player(**habits)) as controller:
            return controller.play(tasks).trajectories

    deaf = [way.by("planner") for way in played(ignore_advice=1.0) if way.turns > 1]
    assert deaf
    assert all(len({call.text for call in calls}) == 1 for calls in deaf)
    silent = [call.text for way in played(withhold_advice=1.0) for call in way.by("reflector")]
    assert set(silent) == {"none"}
    spoken = [call.text for way in played() for call in way.by("reflector")]
    assert sum(text != "none" for text in spoken) > len(spoken) / 2


def test_one_program_is_judged_once_and_failures_are_not_kept():
    judged = []

    async def judge(outcome):
        judged.append(outcome)
        await asyncio.sleep(0.01)
        return outcome

    good, bad = success({"x": 1}, 0.0), failed(FailureKind.CRASH, "lost", 0.0)

    async def ask():
        verdicts = Verdicts()
        assert await asyncio.gather(*(verdicts.of("a", lambda: judge(good)) for _ in range(5))) == [good] * 5
        assert await verdicts.of("a", lambda: judge(bad)) is good
        assert await verdicts.of("b", lambda: judge(bad)) is bad
        assert await verdicts.of("b", lambda: judge(good)) is good

    asyncio.run(ask())
    assert judged == [good, bad, good]


def test_rows_that_are_too_deep_are_refused_and_half_characters_are_replaced(tmp_path):
    path, deep = tmp_path / "rows.jsonl", "[" * 100_000 + "]" * 100_000
    called = {"output": "1", "testtype": "functional", "fn_name": "f"}
    for tests in (deep, [{**called, "input": deep}] * 2):
        path.write_text(json.dumps({"problem": "p", "tests": tests}))
        with pytest.raises(DataError, match="row 0"):
            load_problems(path, "train")
    path.write_text(json.dumps({"problem": "p", "tests": [{**called, "input": "1", "output": deep}] * 2}))
    assert load_problems(path, "train")[0].hidden["tests"][0][1] == deep  # a text is a text
    path.write_text(json.dumps({"problem": "p\ud800", "tests": [["1", "\udfff"], ["2", "3"]]}))
    (task,) = load_problems(path, "train")
    assert (task.fields["problem"], task.hidden["visible_tests"]) == ("p\ufffd", (("1", "\ufffd"),))
