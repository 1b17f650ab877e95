"""The tree of AT-GRPO, Algorithm 1, on the host: K candidates on one state, scored at once, one picked: N·T·K responses per instance."""

import asyncio

import numpy as np
import pytest
from wordy import SPEECH, Says

from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import (
    Controller,
    Role,
    Task,
    Workflow,
    WorkflowError,
    compute,
    each,
    plain,
    repeat,
    sequence,
    shared,
    stop,
    together,
    tool,
    when,
)
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import absolute, broadcast, delayed, delta
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import from_json, to_json

K, T = 4, 3


def role(name, prompt="{question}"):
    return Role(name, f"{name}: {prompt}", parse=plain(name), writes={name: "0"})


def by_seed(prompt, request):
    return f"{np.random.default_rng(request.seed).random():.4f}"


def rate(name, into):
    """A tool that scores what a role wrote."""
    return tool(lambda value: float(value), into, name=into, reads=(name,))


def own(name):
    """Each call is paid what the tool behind it wrote."""
    return absolute(lambda call, way: float(call.text) * (way.fields[f"{name}_rate"] == float(call.text)), (name,), name=name)


def game(**options):
    coder = sequence(role("coder", "{question} {tester}"), rate("coder", "coder_rate"))
    body = repeat(coder, role("tester", "{coder}"), rate("tester", "tester_rate"), at_most=T)
    start = {"tester": "0", "coder_rate": 0.0, "tester_rate": 0.0}
    return Workflow("turns", body, ("question",), start=start, **{"rewards": (own("coder"), own("tester")), **options})


def play(team, n=2, pick="greedy", branching=None, generator=None, **options):
    tasks = [Task(i, {"question": f"q{i}"}) for i in range(n)]
    generator = generator or Says(by_seed)
    branching = branching or dict.fromkeys(team.roles, K)
    with Controller(team, shared(team), generator, SPEECH, branching=branching, pick=pick, **options) as controller:
        return controller.play(tasks, step=5), generator


@pytest.mark.parametrize("pick", ["greedy", "first", "random"])
def test_an_instance_costs_exactly_n_times_t_times_k_responses(pick):
    rollout, generator = play(game(), n=3, pick=pick)
    assert len(generator.requests) == 3 * 2 * T * K
    assert len({request.seed for request in generator.requests}) == len(generator.requests)
    for episode in rollout.episodes:
        assert len(episode.trajectories) == 1
        assert len(episode.candidates) == 2 * T * (K - 1)
        assert sum(event.node in ("coder_rate", "tester_rate") for event in episode.events()) == 2 * T * K
    assert len(sample_table(rollout)) == 3 * 2 * T * K


def test_played_to_the_end_the_same_tree_costs_more():
    _, generator = play(game(score="at_end"), n=1)
    calls = 2 * T
    assert len(generator.requests) == calls + (K - 1) * calls * (calls + 1) // 2
    _, again = play(game(), n=1, score="at_end")
    assert len(again.requests) == len(generator.requests)


def test_the_best_candidate_goes_on_and_all_are_paid_for_themselves():
    rollout, _ = play(game())
    for episode in rollout.episodes:
        (trunk,) = episode.trajectories
        groups = {}
        for call in [*trunk.calls, *(one.calls[-1] for one in episode.candidates)]:
            groups.setdefault(call.group, []).append(call)
        assert {len(members) for members in groups.values()} == {K}
        for members in groups.values():
            assert len({call.prompt_ids for call in members}) == 1
            assert sorted(call.choice for call in members) == list(range(K))
            assert max(members, key=lambda call: float(call.text)).id in {call.id for call in trunk.calls}
    table = sample_table(rollout)
    for row in table.samples:
        assert row.local == pytest.approx(float(row.call.text))
    columns = table.to_samples()
    _, metrics, _ = advantages_for(make_recipe("at_grpo", group_size=K), columns)
    assert (int(metrics["groups"]), float(metrics["mixed_prompt_share"]), int(metrics["groups_of_one"])) == (2 * 2 * T, 0.0, 0)


def test_a_candidates_pay_depends_on_no_sibling_and_on_nothing_later():
    def spiteful(prompt, request):  # everybody but one candidate says something else in the second play
        return by_seed(prompt, request) if request.seed in kept else "0.5"

    first, _ = play(game(), n=1)
    pays = {row.call.seed: row.local for row in sample_table(first).samples}
    fork = [row.call for row in sample_table(first).samples if row.call.request_number == 0]
    kept = {fork[2].seed}
    second, _ = play(game(), n=1, generator=Says(spiteful))
    (row,) = [row for row in sample_table(second).samples if row.call.seed in kept]
    assert row.local == pays[row.call.seed]


def test_of_equal_candidates_the_first_goes_on():
    rollout, _ = play(game(), generator=Says(lambda prompt, request: "0.5"))
    assert {call.choice for way in rollout.trajectories for call in way.calls} == {0}


def test_what_a_picked_candidate_was_paid_when_it_was_made_stays_whatever_comes_later():
    late = broadcast(lambda way: float(len(way.calls)), name="length")
    rollout, _ = play(game(rewards=(late,)), n=1)
    (trunk,) = rollout.trajectories
    assert [trunk.earned[call.id].team for call in trunk.calls] == [float(number) for number in range(1, 2 * T + 1)]


def test_roles_that_do_not_fork_are_paid_at_the_end():
    late = broadcast(lambda way: float(len(way.calls)), name="length")
    rollout, generator = play(game(rewards=(late,)), n=1, branching={"coder": K})
    (trunk,) = rollout.trajectories
    assert len(generator.requests) == T * (K + 1)
    assert [trunk.earned[call.id].team for call in trunk.by("tester")] == [2.0 * T] * T


PAIR = (own("coder"), own("tester"))


def pair(**options):
    parts = [sequence(role(name), rate(name, f"{name}_rate")) for name in ("coder", "tester")]
    body = repeat(together(*parts), compute(lambda coder, tester: f"{coder}{tester}", "both", name="join"), at_most=T)
    return Workflow("pair", body, ("question",), **{"rewards": PAIR, **options})


def test_parts_that_run_together_fork_each_on_the_common_state_and_their_picks_are_merged():
    rollout, generator = play(pair())
    assert len(generator.requests) == 2 * 2 * T * K
    assert len({request.seed for request in generator.requests}) == len(generator.requests)
    for episode in rollout.episodes:
        (trunk,) = episode.trajectories
        assert len(trunk.calls) == 2 * T
        events = {event.id for event in episode.events()}
        assert all(set(event.parents) <= events for event in episode.events())
        last = {call.role: call for call in trunk.calls}
        assert all(len(one.calls) == 1 + 2 * one.calls[-1].turn for one in episode.candidates)  # what came before, no sibling
        assert trunk.fields["both"] == last["coder"].text + last["tester"].text
        siblings = [one.calls[-1] for one in episode.candidates if one.calls[-1].group == last["coder"].group]
        assert len(siblings) == K - 1
        assert all(float(one.text) <= float(last["coder"].text) for one in siblings)
    rows = sample_table(rollout).samples
    assert len({(row.instance, row.trajectory) for row in rows}) == 2 * (1 + 2 * T * (K - 1))
    with pytest.raises(WorkflowError, match="runs beside others, where a play cannot fork to its end"):
        play(pair(), score="at_end")


def test_the_items_of_each_fork_each_for_itself():
    body = sequence(
        compute(lambda question: ("x", "y", "z"), "items", name="split"),
        each("items", "item", sequence(role("coder", "{item}"), rate("coder", "coder_rate")), "coder", 3),
    )
    rollout, generator = play(Workflow("items", body, ("question",), rewards=(absolute(lambda call, way: float(call.text), ("coder",)),)))
    assert len(generator.requests) == 2 * 3 * K
    for episode in rollout.episodes:
        (trunk,) = episode.trajectories
        best = {}
        for event in episode.events():
            if event.node == "coder":
                best[event.items] = max(best.get(event.items, 0.0), float(event.text))
        assert [float(text) for text in trunk.fields["coder"]] == [best[number,] for number in range(3)]


def test_a_failure_while_one_candidate_is_scored_aborts_the_instance():
    async def fragile(coder):
        await asyncio.sleep(0)
        return failed(FailureKind.CRASH, "gone", 0.0) if float(coder) > 0.9 else success(float(coder), 0.0)

    body = repeat(role("coder", "{question}"), tool(fragile, "coder_rate"), at_most=2)
    team = Workflow("fragile", body, ("question",), rewards=(own("coder"),))
    rollout, _ = play(team, n=40, attempts=1)
    for episode in rollout.episodes:
        said = [float(event.text) for event in (episode.remains or episode.events()) if event.node == "coder"]
        assert episode.aborted == (max(said) > 0.9)
    assert 0 < sum(episode.aborted for episode in rollout.episodes) < 40


def test_a_tree_scored_when_made_is_read_as_it_was_written_and_replays():
    team = pair()
    rollout, _ = play(team)
    found = from_json(to_json(rollout, rollout.episodes[1]))
    again = replay(found, team, shared(team), SPEECH, branching={"coder": K, "tester": K}, pick="greedy")
    for one in (found, again):
        assert one.trajectories[0].earned == rollout.episodes[1].trajectories[0].earned
        assert [way.earned for way in one.candidates] == [way.earned for way in rollout.episodes[1].candidates]
        assert [event.id for event in one.events()] == [event.id for event in rollout.episodes[1].events()]


def test_a_stop_that_the_candidate_brought_about_is_part_of_its_score():
    body = repeat(role("coder"), when(lambda coder: float(coder) > 0.5, stop(), name="s"), at_most=2)
    team = Workflow("stops", sequence(body, compute(lambda coder: 1.0, "over", name="over")), ("question",), start={"over": 0.0},
                    rewards=(absolute(lambda call, way: float(way.fields["over"]), ("coder",)),))  # fmt: skip
    rollout, _ = play(team, n=4)
    rows = sample_table(rollout).samples
    assert all(row.local == float(float(row.call.text) > 0.5) for row in rows if row.call.turn == 1)
    assert all(row.local == 1.0 for row in rows if row.call.turn == 2)


LATE = {
    "a delayed reward": ((delayed("coder_rate", ("tester",)),), r"delayed.*pays 'tester' later.*score='at_end'"),
    "a field that another role's tool writes": (
        (delta("tester_rate", ("coder",)),),
        r"delta.*pays 'coder' for 'tester_rate', which nothing writes between it and the next role.*score='at_end'",
    ),
    "a field of the end": (
        (broadcast(lambda way: way.fields["summary"]),),
        r"raised KeyError: 'summary'.*task [01]; candidates are scored when they are made.*score='at_end'",
    ),
}


@pytest.mark.parametrize("late", LATE)
def test_pay_that_shows_later_is_refused_unless_the_workflow_says_so(late):
    rewards, message = LATE[late]
    with pytest.raises(WorkflowError, match=message):
        play(game(rewards=rewards))


def test_words_about_scoring_that_cannot_be_are_refused():
    with pytest.raises(WorkflowError, match="score='now' is unknown; choose None or one of when_made, at_end"):
        play(game(), score="now")
    with pytest.raises(WorkflowError, match="score='end' is unknown; choose one of when_made, at_end"):
        game(score="end")
    with pytest.raises(WorkflowError, match="workflow 'turns' says score='at_end'"):
        play(game(score="at_end"), score="when_made")
    with pytest.raises(WorkflowError, match="say which with pick="):
        play(game(), pick=None, score="when_made")


def test_a_reward_is_asked_once_per_candidate_and_once_for_the_trajectory():
    asked = []

    def counted(way):
        asked.append(way)
        return []

    rollout, _ = play(game(rewards=(counted,)), n=1)
    sample_table(rollout)
    to_json(rollout, rollout.episodes[0])
    assert len(asked) == 2 * T * K + 1


@pytest.mark.parametrize("k", [1, 2])
def test_seats_that_are_asked_the_same_prompt_are_a_group_without_a_fork(k):
    """Three seats with one prompt, two rounds; one seat of the second workflow reads its own item, and stays apart."""
    def seats(prompt, group_seats):
        body = repeat(each("items", "item", role("coder", prompt), "coder", 3), at_most=2)
        return Workflow("seats", body, ("question", "items"), group_seats=group_seats)

    def groups(team):
        tasks = [Task(i, {"question": f"q{i}", "items": ("x", "x", "y")}) for i in range(2)]
        with Controller(team, shared(team), Says(by_seed), SPEECH, branching={"coder": k} if k > 1 else None, pick="first") as controller:
            table = sample_table(controller.play(tasks))
        by_env = {}
        for row in table.samples:
            by_env.setdefault(row.env, set()).add(row.prompt_ids)
        assert all(len(prompts) == 1 for prompts in by_env.values())  # law 3
        return sorted(sum(row.env == env for row in table.samples) for env in by_env)

    assert groups(seats("{question}", True)) == [3 * k] * 4
    assert groups(seats("{question}", False)) == [k] * 12
    assert groups(seats("{question} {item}", True)) == [k] * 4 + [2 * k] * 4
