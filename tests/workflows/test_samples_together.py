"""The table of samples where seats, rounds, histories, forks and missing scores meet: which rows are candidates, and what each is paid."""

import collections

import pytest
from wordy import SPEECH, Says

from marl_llm.tools.results import success
from marl_llm.workflows import Controller, Role, Task, Workflow, compute, each, plain, repeat, sequence, shared, together, tool
from marl_llm.workflows.efficiency import critical_path_tokens, sampled_tokens
from marl_llm.workflows.metrics import episode_metrics, rollout_metrics
from marl_llm.workflows.rewards import Award, absolute, broadcast, scored
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.scoring import Scorer
from marl_llm.workflows.trajectory import Score


def role(name, prompt="the question"):
    return Role(name, prompt, parse=plain(name), writes={name: "0"})


def by_seed(prompt, request):
    return f"w{request.seed[-1] % 7} {len(request.seed)}"


def table_of(workflow, plays=1, tasks=2, **options):
    with Controller(workflow, shared(workflow), Says(by_seed), SPEECH, **options) as controller:
        return sample_table(controller.play([Task(i, {"items": ("x", "y", "z")}) for i in range(tasks)], 0, plays))


def sizes(table, name):
    """How many rows of a role each of its groups has, and what they share."""
    groups = collections.defaultdict(list)
    for row in table.samples:
        if row.call.role == name:
            groups[row.env].append(row)
    return sorted(len(rows) for rows in groups.values()), list(groups.values())


def test_seats_with_the_same_prompt_and_other_histories_are_no_candidates_of_each_other():
    """Each seat drafts and then decides: the drafts answer one state, the decisions follow drafts of their own."""
    body = each("items", "item", sequence(role("draft"), role("decide")), {"decide": "decided"}, 3)
    table = table_of(Workflow("seats", body, ("items",), group_seats=True))
    assert sizes(table, "draft")[0] == [3, 3]
    assert sizes(table, "decide")[0] == [1] * 6
    assert len({row.prompt for row in table.samples}) == 1  # though all are asked the same


def test_seats_of_other_rounds_plays_and_roles_are_no_candidates_of_each_other():
    body = sequence(
        repeat(each("items", "item", role("coder"), {"coder": "coders"}, 3), at_most=2, name="rounds"),
        each("items", "item", role("critic"), {"critic": "critics"}, 3),
    )
    table = table_of(Workflow("seats", body, ("items",), group_seats=True), plays=2, tasks=1)
    assert sizes(table, "coder")[0] == [3] * 4
    assert sizes(table, "critic")[0] == [3] * 2
    for name in ("coder", "critic"):
        for rows in sizes(table, name)[1]:
            assert len({(row.trajectory, row.call.turn, row.call.node) for row in rows}) == 1
    mixed = collections.defaultdict(set)
    for row in table.samples:
        mixed[row.env].add(row.call.role)
    assert all(len(roles) == 1 for roles in mixed.values())


def test_seats_of_two_roles_at_once_and_of_other_outer_items_are_no_candidates_of_each_other():
    """All are asked the same, in the first round, before anything was said."""
    seats = [each("items", "item", role(name), {name: f"{name}s"}, 3) for name in ("coder", "critic")]
    table = table_of(Workflow("seats", together(*seats), ("items",), group_seats=True))
    assert sizes(table, "coder")[0] == sizes(table, "critic")[0] == [3, 3]
    assert len({row.env for row in table.samples}) == 4
    nested = each("items", "item", each("parts", "part", role("coder"), {"coder": "coders"}, 2), {"coders": "all"}, 3)
    workflow = Workflow("nested", nested, ("items",), start={"parts": ("a", "b")}, group_seats=True)
    found, groups = sizes(table_of(workflow, tasks=1), "coder")
    assert found == [2, 2, 2]
    assert [{row.call.items[0] for row in rows} for rows in groups] == [{0}, {1}, {2}]


def test_without_group_seats_every_seat_stays_apart_whatever_else_is_set():
    body = each("items", "item", role("coder"), {"coder": "coders"}, 3)
    assert sizes(table_of(Workflow("seats", body, ("items",)), plays=2), "coder")[0] == [1] * 12


def test_an_action_without_a_score_leaves_out_itself_alone():
    async def judge(view):
        return Score(0.5) if view.call.role == "second" else None

    body = sequence(role("first"), role("second"))
    scorers = (Scorer("judge", judge, missing="mask"),)
    rewards = (scored("judge", weight=4.0), absolute(lambda call, way: 1.0, ("second",), weight=0.25, name="own"))
    table = table_of(Workflow("pair", body, ("items",), scorers=scorers, rewards=rewards))
    assert {(row.call.role, row.where, row.excluded) for row in table.samples} == {("first", False, "no score"), ("second", True, "")}
    assert {row.call.role: dict(row.components) for row in table.samples} == {"first": {}, "second": {"judge": 2.0, "own": 0.25}}


@pytest.mark.parametrize("pick", [None, "first"])
def test_a_call_before_a_fork_is_paid_the_mean_of_what_its_ways_earned(pick):
    """Two parts and a team's pay; only one way pays the team."""
    paid = (
        absolute(lambda call, way: 1.0 + way.calls[-1].choice, ("first",), name="own"),
        absolute(lambda call, way: 4.0 * way.calls[-1].choice, ("first",), name="more"),
        broadcast(lambda way: 2.0 * way.calls[-1].choice, ("second",), name="team"),
    )
    workflow = Workflow("fork", sequence(role("first"), role("second")), ("items",), rewards=paid)
    options = {"branching": {"second": 2}} | ({"pick": pick} if pick else {})
    table = table_of(workflow, tasks=1, **options)
    (first,) = [row for row in table.samples if row.call.role == "first"]
    seconds = sorted(row.team for row in table.samples if row.call.role == "second")
    assert seconds == [0.0, 2.0]
    if pick is None:
        assert (first.local, dict(first.components)) == (pytest.approx(3.5), {"own": pytest.approx(1.5), "more": pytest.approx(2.0)})
        ways = {row.trajectory for row in table.samples}
        assert len(ways) == 2
    else:
        assert first.local == pytest.approx(1.0)
        others = [row for row in table.samples if row.call.choice == 1]
        assert [row.order for row in others] == [1]
        assert first.trajectory not in {row.trajectory for row in others}


def test_a_call_that_the_team_was_paid_for_on_one_way_alone_was_paid_by_the_team():
    def late(way):
        return [Award(way.calls[0], 2.0, "late", team=True)] if way.calls[-1].choice else []

    workflow = Workflow("fork", sequence(role("first"), role("second")), ("items",), rewards=(late,))
    table = table_of(workflow, tasks=1, branching={"second": 2})
    assert {row.call.role: (row.team, row.team_paid) for row in table.samples} == {"first": (1.0, True), "second": (0.0, False)}


def test_candidates_of_several_forks_are_trajectories_of_their_own():
    """Two forks of three: the play goes on with one of each, and the four others end where they were judged."""
    body = repeat(role("coder"), at_most=2)
    table = table_of(Workflow("forks", body, ("items",)), tasks=1, branching={"coder": 3}, pick="first")
    groups = collections.Counter(row.trajectory for row in table.samples)
    assert sorted(groups.values()) == [1, 1, 1, 1, 2]
    assert sorted(row.order for row in table.samples) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("longer", ["left", "right"])
def test_the_critical_path_goes_through_the_longer_of_two_that_speak_at_once_and_all_that_follow(longer):
    sizes = {"left": 3, "right": 5, "last": 2} if longer == "right" else {"left": 5, "right": 3, "last": 2}
    seen = compute(lambda left: left, "seen", name="seen")
    body = sequence(together(role("left", "left"), role("right", "right")), seen, role("last", "last"))
    workflow = Workflow("join", body, ("items",))
    says = Says(lambda prompt, request: "x" * (sizes[prompt] - 1))  # and the stop token
    with Controller(workflow, shared(workflow), says, SPEECH) as controller:
        (path,) = controller.play([Task(0, {"items": ()})]).trajectories
    assert (critical_path_tokens(path), sampled_tokens(path)) == (7.0, 10.0)


def test_figures_of_a_tool_are_its_own_attempts_and_replaced_texts():
    async def look(first: str):
        return success({"seen": "a\ud800"}, 0.5, 3)

    workflow = Workflow("look", sequence(role("first"), tool(look, "seen")), ("items",))
    with Controller(workflow, shared(workflow), Says(by_seed), SPEECH) as controller:
        rollout = controller.play([Task(i, {"items": ()}) for i in range(2)])
    figures = rollout_metrics(rollout, sample_table(rollout))
    (node,) = {name.split("/")[1] for name in figures if name.startswith("tool/")}
    found = {name: figures[f"tool/{node}/{name}"] for name in ("calls", "attempts", "replaced_share", "refused_share")}
    assert found == {"calls": 2.0, "attempts": 3.0, "replaced_share": 1.0, "refused_share": 0.0}


def test_a_metric_that_one_way_of_a_play_has_not_is_no_figure_of_the_play():
    metrics = {"late": lambda way: None if way.calls[-1].choice else 1.0, "all": lambda way: float(way.calls[-1].choice)}
    workflow = Workflow("fork", sequence(role("first"), role("second")), ("items",), metrics=metrics)
    with Controller(workflow, shared(workflow), Says(by_seed), SPEECH, branching={"second": 2}) as controller:
        (episode,) = controller.play([Task(0, {"items": ()})]).episodes
    assert episode_metrics(workflow, episode) == {"all": 0.5}
