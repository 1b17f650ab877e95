"""A team that is an async function: the same samples as the equal graph, forks by replay, hidden values, tools, faults as data."""

import asyncio
import itertools
import json
import random
import time

import jax
import numpy as np
import pytest
from wordy import SPEECH, Says

import marl_llm as ml
from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.checking import check
from marl_llm.tools.results import FailureKind, failed
from marl_llm.workflows import (
    Controller,
    Hidden,
    HiddenValueError,
    Role,
    RolloutError,
    Task,
    ToolCallError,
    Workflow,
    WorkflowError,
    repeat,
    shared,
    stop,
    to_mermaid,
    when,
)  # fmt: skip
from marl_llm.workflows.function_team import attributes_of
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import absolute, broadcast
from marl_llm.workflows.samples import sample_table

ROWS = [{"question": f"{a}+{b}", "target": str(a + b)} for a in range(1, 6) for b in range(1, 6)]
COUNTER = itertools.count()


def team(function=None, **options):
    made = ml.workflows.team(**{"hidden": ("target",), "tasks": ROWS, "renderer": SPEECH, **options})
    return made if function is None else made(function)


def by_seed(prompt, request):
    value = np.random.default_rng(request.seed).random()
    return ("OK" if value < 0.4 else "no") if prompt.startswith("check") else f"{value:.3f}"


def play(environment, plays=1, tasks=3, answer=by_seed, delay=None, **options):
    assignment = shared(environment.workflow)
    with Controller(environment.workflow, assignment, Says(answer, delay), SPEECH, attempts=1, **options) as controller:
        return controller.play(environment.tasks("train", 0, tasks), step=2, plays=plays)


def failure(environment, **options):
    """How the first play failed."""
    with Controller(environment.workflow, shared(environment.workflow), Says(by_seed), SPEECH, attempts=1, **options) as controller:
        episode = asyncio.run(controller.episode(environment.tasks("train", 0, 1)[0], 0, 0, 1))
    assert episode.aborted
    return episode.failures[0]


# ---- the same as a graph


@team(metrics=("rounds",))
async def solve(t, task):
    remark = ""
    rounds = 0
    for _ in range(2):
        rounds += 1
        draft = await t.solver(f"solve {task.question}{remark}")
        remark = await t.checker(f"check {task.question} {draft}")
        if remark == "OK":
            break
    return ml.Reward(team=float(draft), local={"solver": [0.0] * (rounds - 1) + [0.25]}, metrics={"rounds": rounds})


def graph():
    solver = Role("solver", "solve {question}{remark}", lambda text: {"draft": text}, {"draft": ""})
    checker = Role("checker", "check {question} {draft}", lambda text: {"remark": text}, {"remark": ""})
    body = repeat(solver, checker, when(lambda remark: remark == "OK", stop(), name="done"), at_most=2)
    last = absolute(lambda call, path: 0.25 * (call.turn == path.turns - 1), ("solver",), name="local")
    rewards = (broadcast(lambda path: float(path.fields["draft"]), name="team"), last)
    return Workflow("solve", body, ("question",), start={"remark": ""}, rewards=rewards, score="at_end")


def rows_of(rollout, recipe):
    table = sample_table(rollout)
    rows = [
        (s.call.seed, s.prompt_ids, s.response_ids.tolist(), s.call.turn, s.env, s.trajectory, s.order, s.prompt, s.team, s.local)
        for s in table.samples
    ]
    columns = table.to_samples()
    return rows, jax.tree.leaves(advantages_for(make_recipe(recipe, group_size=4), columns))


@pytest.mark.parametrize(
    "forks", [{}, {"branching": {"solver": 3, "checker": 3}, "pick": "greedy"}, {"branching": {"checker": 2, "solver": 2}}]
)
def test_the_samples_and_advantages_are_those_of_the_equal_graph(forks):
    by_function = play(solve, plays=1 if forks else 4, **forks)
    tasks = [Task(one.number, one.fields) for one in solve.tasks("train", 0, 3)]
    with Controller(graph(), shared(graph()), Says(by_seed), SPEECH, attempts=1, **forks) as controller:
        by_graph = controller.play(tasks, step=2, plays=1 if forks else 4)
    (rows, advantages), (others, expected) = (rows_of(one, "at_grpo" if forks else "grpo") for one in (by_function, by_graph))
    assert rows == others
    assert len(rows) > 12
    for one, other in zip(advantages, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.any(np.asarray(advantages[0]) != 0)


def test_plays_replay_from_their_record_and_have_figures():
    rollout = play(solve, plays=2)
    for episode in rollout.episodes:
        assert replay(episode, solve.workflow, rollout.assignment, SPEECH, plays=2).trajectories
    figures = rollout_metrics(rollout, sample_table(rollout))
    assert 1 <= figures["team/rounds"] <= 2
    assert figures["team/errors"] == figures["failed_team"] == 0
    assert "solve: at most 16 requests" in to_mermaid(solve.workflow)


def test_candidates_are_not_scored_before_the_function_has_paid():
    with pytest.raises(WorkflowError, match="says score='at_end'"):
        play(solve, branching={"solver": 2}, pick="greedy", score="when_made")


# ---- many at once


@team(roles=("a", "b"))
async def twice(t, task):
    async def chain(name):
        first = await t.a(f"{name} begins")
        return await t.b(f"{name} after {first}")

    answers = await asyncio.gather(chain("left"), chain("right"), t.a("alone"))
    return ml.Reward(team=float(sum(len(answer) for answer in answers)))


def calls_of(rollout):
    return [[(c.node, c.request_number, c.prompt, c.text) for c in path.calls] for path in rollout.trajectories]


def test_gathered_requests_have_one_order_whoever_answers_first():
    plain = calls_of(play(twice))
    slow_left = calls_of(play(twice, delay=lambda request: 0.02 if request.seed[3] == 0 else 0.0))
    slow_right = calls_of(play(twice, delay=lambda request: 0.02 if request.seed[3] == 2 else 0.0))
    assert plain == slow_left == slow_right
    assert [call[2].split()[0] for call in plain[0]] == ["left", "right", "alone", "left", "right"]


def test_a_gathered_request_forks_and_the_others_stay():
    rollout = play(twice, tasks=1, branching={"a": 2}, pick="first")
    trunk, *others = calls_of(rollout)
    assert len(others) == 3  # one per request of a
    assert {name for path in rollout.trajectories for name in path.fields} == {"question", "target", "paid"}
    for number, path in enumerate(others):
        assert [call[:3] for call in path[:3]] == [call[:3] for call in trunk[:3]]
        assert [call[3] == before[3] for call, before in zip(path[:number], trunk)] == [True] * number
        assert path[number][3] != trunk[number][3]


# ---- hidden values


@pytest.mark.parametrize(
    "write",
    [str, repr, "{}".format, "{!r}".format, json.dumps, lambda v: f"{v}", lambda v: f"{v:>5}", lambda v: f"{[v]}",
     lambda v: "".join(v), lambda v: str(v.upper()), lambda v: f"{v[0]}", lambda v: f"{'x' + v}", float, lambda v: f"{[x for x in v]}",
     lambda v: json.dumps({"v": v})],
)  # fmt: skip
def test_a_hidden_value_refuses_to_become_text(write):
    with pytest.raises((HiddenValueError, TypeError)) as error:
        write(Hidden("42", "target"))
    assert "42" not in str(error.value)


def test_a_hidden_value_compares_and_computes():
    value = Hidden("42", "target")
    assert (value == "42", value != "41", value < "5", "4" in value, len(value), bool(value), {"42": 1}[value]) == (
        True, True, True, True, 2, True, 1,
    )  # fmt: skip
    assert Hidden(3, "n") + 1 == 4
    assert 10 - Hidden(3, "n") == 7
    assert isinstance(value.upper(), Hidden)


def test_a_hidden_prompt_aborts_the_play_with_the_fields_name():
    async def leak(t, task):
        await t.solver(f"{task.question} {task.target}")

    async def leak_whole(t, task):
        await t.solver(task.target)

    for function in (leak, leak_whole):
        found = failure(team(function))
        assert found.kind == "team"
        assert "hidden field 'target'" in found.message


def test_what_is_made_of_hidden_values_is_hidden_unless_revealed():
    seen = []

    async def judge(t, task):
        draft = await t.solver(task.question)
        right = t.compute(lambda a, b: f"{a}={b}", draft, task.target)
        told = await t.tool(lambda a, b: a + b, draft, task.target, reveals=True)
        secret = await t.tool(len, task.target)
        seen.append((type(right), told.removeprefix(draft), type(secret)))
        await t.checker(f"check {told}")
        return right == f"{draft}={task.target and told.removeprefix(draft)}"

    rollout = play(team(judge), tasks=1)
    target = rollout.episodes[0].task.hidden["target"]
    assert seen[-1] == (Hidden, target, Hidden)
    assert rollout.trajectories[0].fields["revealed_values"] == (rollout.trajectories[0].calls[0].text + target,)
    assert sample_table(rollout)[0].team == 1.0


# ---- tools


def test_a_tool_is_called_once_and_its_result_is_recorded():
    made = []

    def look_up(word, times=1):
        made.append(word)
        return {"found": word * times}

    async def waits(word):
        await asyncio.sleep(0.001)
        return word.upper()

    async def search(t, task):
        answer = await t.solver(task.question)
        both = await asyncio.gather(t.tool(look_up, answer, times=2), t.tool(waits, "abc"))
        again = await t.solver(f"{both[0]['found']} {both[1]}")
        return float(len(again))

    environment = team(search)
    rollout = play(environment, tasks=1)
    path = rollout.trajectories[0]
    assert [event.node for event in path.events] == ["solver", "look_up", "waits", "solver", "search"]
    assert len(made) == 1
    assert path.calls[1].prompt == f"{made[0] * 2} ABC"
    assert replay(rollout.episodes[0], environment.workflow, rollout.assignment, SPEECH).trajectories
    assert len(made) == 1


@pytest.mark.parametrize("reveals", [False, True])
@pytest.mark.parametrize("way", ["tool", "compute"])
def test_an_error_tells_no_hidden_value_unless_it_is_revealed(way, reveals):
    def grade(draft, target):
        raise KeyError(f"expected {target}, got {draft}")

    async def solve(t, task):
        draft = await t.solver(task.question)
        try:
            if way == "tool":
                await t.tool(grade, draft, task.target, reveals=reveals)
            else:
                t.compute(grade, draft, target=task.target, reveals=reveals)
        except (ToolCallError, KeyError) as error:
            await t.solver(f"{task.question}: {error}")
        return 1.0

    rows = [{"question": str(n), "target": f"SECRET{n}"} for n in range(30)]
    path = play(team(solve, tasks=rows), tasks=1).trajectories[0]
    told = str([(call.prompt, call.messages) for call in path.calls]) + str([event.writes for event in path.events])
    assert ("SECRET" in told) == reveals
    assert ("KeyError; its text may tell the hidden field 'target': reveals=True shows it" in path.calls[1].prompt) != reveals


def test_what_a_tool_raises_is_raised_in_the_function_and_what_breaks_it_aborts_the_play():
    def wrong(word):
        raise ValueError(f"no {word}")

    def strange():
        return object()

    async def careful(t, task):
        answer = await t.solver(task.question)
        caught = []
        for call in (t.tool(wrong, "way"), t.tool(strange)):
            try:
                await call
            except ToolCallError as error:
                caught.append(str(error))
        assert caught[0] == "tool 'wrong' raised ValueError: no way"
        assert "strange" in caught[1]
        return bool(answer)

    assert sample_table(play(team(careful), tasks=1))[0].team == 1.0

    async def late(t, task):
        await t.tool(lambda: time.sleep(0.5), timeout_s=0.05)

    async def down(t, task):
        await t.tool(lambda: failed(FailureKind.UNAVAILABLE, "gone", 0.0))

    options = {"roles": ("solver",)}
    assert failure(team(late, **options)).kind == "deadline"
    assert failure(team(down, **options)).kind == "unavailable"


# ---- faults


async def forgets(t, task):
    await t.solver(task.question)


async def raises(t, task):
    await t.solver(task.question)
    return {}["key"]


async def never_ends(t, task):
    await t.solver(task.question)
    await asyncio.Event().wait()


async def spins(t, task):
    await t.solver(task.question)
    while True:
        await asyncio.sleep(0)


async def asks_for_ever(t, task):
    while True:
        await t.solver(task.question)


async def not_a_number(t, task):
    await t.solver(task.question)
    return float("nan")


async def pays_a_stranger(t, task):
    await t.solver(task.question)
    return ml.Reward(local={"slover": 1.0})


async def exits(t, task):
    await t.solver(task.question)
    raise SystemExit(1)


async def draws(t, task):
    await t.solver(task.question)
    await t.solver(f"{next(COUNTER)}")
    return 1.0


async def changes_order(t, task):
    await t.solver(task.question)
    await t.solver("again") if next(COUNTER) % 2 else await asyncio.gather(t.solver("again"), t.solver("more"))
    await t.solver("the end")
    return 1.0


async def asks_a_number(t, task):
    await t.solver(3)


FAULTS = {
    forgets: "team is NoneType: return a finite number",
    raises: "raised KeyError: 'key'",
    never_ends: "does not end, nor ask for anything",
    spins: "does not end, nor ask for anything",
    asks_for_ever: "more than at_most=3 requests of roles",
    not_a_number: "team is nan",
    pays_a_stranger: "pays 'slover', which is no role of the team: solver",
    exits: "raised SystemExit: 1",
    draws: "is not deterministic: with the same answers it asked request 1 of 'solver'",
    changes_order: "is not deterministic",
    asks_a_number: "was asked with a int",
}


@pytest.mark.parametrize("function", FAULTS)
def test_a_faulty_function_aborts_the_play_and_says_why(function):
    if function is changes_order:
        next(COUNTER) if next(COUNTER) % 2 else None
    found = failure(team(function, at_most=3, timeout_s=0.2))
    assert FAULTS[function] in found.message
    assert found.kind == ("deadline" if function in (never_ends, spins) else "team")


def test_an_author_may_pay_for_errors_and_sees_how_many_there_were():
    async def reads_a_number(t, task):
        return float(await t.solver(task.question))

    def answer(prompt, request):
        return "two" if request.seed[1] == 1 else "0.5"

    rollout = play(team(reads_a_number, on_error=-1.0), answer=answer)
    assert [s.team for s in sample_table(rollout).samples] == [0.5, -1.0, 0.5]
    assert rollout_metrics(rollout, sample_table(rollout))["team/errors"] == pytest.approx(1 / 3)
    assert "could not convert" in rollout.trajectories[1].fields["paid"]["error"]
    aborted = play(team(reads_a_number), answer=answer)
    assert [episode.aborted for episode in aborted.episodes] == [False, True, False]
    assert rollout_metrics(aborted, sample_table(aborted))["failed_team"] == 1


def test_a_team_that_always_fails_ends_the_run_with_its_error():
    with pytest.raises(RolloutError, match="raised KeyError: 'key'"):
        play(team(raises))


def test_no_play_changes_another_ones_task():
    rows = [{"words": ["b", "a"], "target": str(n)} for n in range(30)]

    async def sorts(t, task):
        task.words.append("c")
        answer = await t.solver(" ".join(task.words))
        return float(len(task.words)) if answer else 0.0

    rollout = play(team(sorts, tasks=rows), plays=2, tasks=2)
    assert {path.calls[0].prompt for path in rollout.trajectories} == {"b a c"}
    assert {s.team for s in sample_table(rollout).samples} == {3.0}


# ---- building and checking


def test_roles_and_fields_are_read_from_the_code():
    assert attributes_of(solve.workflow.body.function) == (("solver", "checker"), ("question",))
    assert list(solve.workflow.roles) == ["solver", "checker"]
    bare = ml.workflows.team(hidden=("target",))(solve.workflow.body.function)
    assert bare.workflow.inputs == ("question",)
    with pytest.raises(WorkflowError, match="has no tasks"):
        bare.tasks("train", 0, 1)


async def no_roles(t, task):
    return 1.0


@pytest.mark.parametrize(
    ("options", "function", "why"),
    [
        ({"hidden": "target"}, forgets, "must be a tuple of names"),
        ({"at_most": 0}, forgets, "must be above 0"),
        ({"metrics": ("errors",)}, forgets, "is there already"),
        ({}, lambda t, task: 1, "async def"),
        ({}, no_roles, "asks no role"),
        ({"roles": ("tool",)}, forgets, "name of a method"),
        ({"roles": {"solver": {"max_token": 3}}}, forgets, "has no option 'max_token'"),
        ({"tasks": ROWS[:1]}, forgets, "has no tasks"),
        ({"tasks": {"train": ROWS}}, forgets, "split 'validation' has no tasks"),
    ],
)
def test_a_team_that_cannot_be_built_says_why(options, function, why):
    with pytest.raises(WorkflowError, match=why):
        team(function, **options)


def scripted(turn):
    return "OK" if turn.role.name == "checker" else turn.fields["target"]


CHECKED = {"script": scripted, "roles": {"solver": {"max_tokens": 8}, "checker": {"max_tokens": 8}}}


async def honest(t, task):
    draft = await t.solver(f"solve {task.question}")
    await t.checker(f"check {draft}")
    return ml.Reward(team=float(draft == task.target))


async def drawn(t, task):
    draft = await t.solver(f"solve {task.question}")
    await t.checker(f"check {draft}")
    return ml.Reward(team=random.random())


async def leaky(t, task):
    letters = "".join(x for x in "0123456789 zqxvktarge" if x in task.target)
    letters = next((y for y in (f"{task.number}", "zq0xtargetvk", "zq1xtargetvk") if y in task.target), letters)
    draft = await t.solver(f"solve {task.question} {letters}")
    await t.checker("check")
    return ml.Reward(team=float(draft == task.target))


@pytest.mark.parametrize(("function", "broken"), [(honest, set()), (drawn, {"same seed"}), (leaky, {"secrets"})])
def test_check_finds_draws_and_leaks(function, broken):
    names = ("same_seed", "forks", "secrets", "junk", "groups", "bounds", "pay", "splits", "people")
    found = check(team(function, **CHECKED), names, tasks=4, plays=2, few=2, held_out=8)
    assert {one.name for one in found if one.status == "fail" and one.name in ("same seed", "secrets", "pay", "splits")} == broken
    assert broken or not [one for one in found if one.status == "fail"]
