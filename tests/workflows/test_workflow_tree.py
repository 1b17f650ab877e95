"""Tree sampling with one way that forks again: who is compared with whom, who goes on, and what a candidate is paid."""

import numpy as np
import pytest
from wordy import SPEECH, Says

from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.workflows import Controller, Role, Task, Workflow, WorkflowError, compute, plain, repeat, sequence, shared, stop, when
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import absolute, broadcast
from marl_llm.workflows.samples import sample_table

K = 4


def role(name, prompt="{question}"):
    return Role(name, f"{name}: {prompt}", parse=plain(name), writes={name: "?"})


def by_seed(prompt, request):
    return f"{np.random.default_rng(request.seed).random():.4f}"


def end(way):
    return float(way.fields["b"])


PAID = (broadcast(end, name="end"),)


def rounds_team(rewards=PAID):
    """a, then b up to three times, until what b says is above 0.9."""
    look = compute(lambda b: float(b) > 0.9, "done", name="look")
    body = sequence(role("a"), repeat(role("b", "{a}"), look, when(lambda done: done, stop(), name="s"), at_most=3))
    return Workflow("tree", body, ("question",), start={"b": "0"}, rewards=rewards, score="at_end")


def play(team, pick, n=3, branching=None, **weights):
    tasks = [Task(i, {"question": f"q{i}"}) for i in range(n)]
    generator = Says(by_seed)
    with Controller(team, shared(team), generator, SPEECH, branching=branching or {"a": K, "b": K}, pick=pick, **weights) as controller:
        return controller.play(tasks, step=5), generator


@pytest.mark.parametrize("pick", ["first", "random", "greedy"])
def test_each_prompt_of_the_trunk_has_k_candidates_and_the_cost_is_linear(pick):
    rollout, generator = play(rounds_team(), pick)
    seeds = [request.seed for request in generator.requests]
    assert len(set(seeds)) == len(seeds)
    for episode in rollout.episodes:
        groups = {}
        for way in episode.trajectories:
            for call in way.calls:
                groups.setdefault(call.group, {})[call.id] = call
        forks = [members for members in groups.values() if len(members) > 1]
        assert {len(members) for members in forks} == {K}
        for members in forks:
            assert len({call.prompt_ids for call in members.values()}) == 1
            assert sorted(call.choice for call in members.values()) == list(range(K))
        assert len(episode.trajectories) == 1 + (K - 1) * len(forks)  # not K to the power of the calls
        assert len({way.branch for way in episode.trajectories}) == len(episode.trajectories)
        assert 2 <= len(forks) <= 4


def test_greedy_goes_on_from_the_candidate_that_was_paid_most_on_its_own_way():
    rollout, _ = play(rounds_team(), "greedy")
    for episode in rollout.episodes:
        ways = episode.trajectories
        first_fork, later = ways[:K], ways[K:]
        assert {way.calls[0].choice for way in first_fork} == set(range(K))
        best = max(first_fork, key=end)
        assert later
        assert {way.calls[0].id for way in later} == {best.calls[0].id}


def test_d6_greedy_compares_the_pay_of_the_calls_at_the_fork():
    """Only b is paid, for what it says itself: at b's fork the payment of a, the first call of every path, says nothing."""
    by_itself = absolute(lambda call, way: float(call.text), ("b",), name="own")
    rollout, _ = play(rounds_team((by_itself,)), "greedy", n=6)
    later_forks = 0
    for episode in rollout.episodes:
        candidates = {}
        for way in episode.trajectories:
            for call in way.by("b"):
                candidates.setdefault(call.group, {})[call.id] = call
        for members in (list(found.values()) for found in candidates.values() if len(found) == K):
            best = max(members, key=lambda call: float(call.text))
            paths = [{call.id for call in way.calls} for way in episode.trajectories]
            through = [sum(call.id in path for path in paths) for call in members if call is not best]
            assert through == [1] * (K - 1)  # the others are played to one end each, and fork no more
            later_forks += sum(best.id in path for path in paths) > 1
    assert later_forks


def test_first_goes_on_from_the_first_and_random_from_any():
    first, _ = play(rounds_team(), "first", n=12)
    later = [way.calls[0].choice for episode in first.episodes for way in episode.trajectories[K:]]
    assert set(later) == {0}
    chosen, _ = play(rounds_team(), "random", n=12)
    later = {way.calls[0].choice for episode in chosen.episodes for way in episode.trajectories[K:]}
    assert len(later) > 1
    again, _ = play(rounds_team(), "random", n=12)

    def texts(rollout):
        return [call.text for way in rollout.trajectories for call in way.calls]

    assert texts(again) == texts(chosen)


def test_alpha_weighs_team_rewards_when_greedy_picks():
    against = absolute(lambda call, way: -2 * end(way), ("a", "b"), name="against")
    team = rounds_team((broadcast(end, name="end"), against))
    light, _ = play(team, "greedy", alpha=1.0)  # end - 2 end: the worst end goes on
    heavy, _ = play(team, "greedy", alpha=4.0)
    alone, _ = play(team, "greedy", local_weight=0.0)
    own, _ = play(team, "greedy", alpha=0.0)
    for rollout, want in ((light, min), (heavy, max), (alone, max), (own, min)):
        for episode in rollout.episodes:
            chosen = want(episode.trajectories[:K], key=end)
            assert {way.calls[0].id for way in episode.trajectories[K:]} == {chosen.calls[0].id}


def test_a_candidate_is_paid_what_its_own_first_way_earned_not_what_picked_successors_did():
    rollout, _ = play(rounds_team(), "greedy")
    table = sample_table(rollout)
    by_id = {(s.instance, s.call.id): s for s in table.samples}
    for episode in rollout.episodes:
        for way in episode.trajectories[:K]:  # the first ways through the candidates of a
            assert by_id[episode.task.number, way.calls[0].id].team == pytest.approx(end(way))
        picked = max(episode.trajectories[:K], key=end)
        mean = np.mean([end(way) for way in episode.trajectories if way.calls[0].id == picked.calls[0].id])
        assert by_id[episode.task.number, picked.calls[0].id].team != pytest.approx(mean)


def test_at_grpo_compares_candidates_of_one_prompt():
    rollout, _ = play(rounds_team(), "greedy")
    columns = sample_table(rollout).to_samples()
    _, metrics, _ = advantages_for(make_recipe("at_grpo", group_size=K), columns)
    assert float(metrics["mixed_prompt_share"]) == 0.0
    assert int(metrics["groups"]) > int(metrics["groups_of_one"])


def test_a_tree_replays():
    team = rounds_team()
    rollout, _ = play(team, "greedy")
    again = replay(rollout.episodes[1], team, shared(team), SPEECH, branching={"a": K, "b": K}, pick="greedy")

    def ends(episode):
        return [(way.branch, end(way)) for way in episode.trajectories]

    assert ends(again) == ends(rollout.episodes[1])


def test_an_unknown_pick_is_refused():
    with pytest.raises(WorkflowError, match="pick='best' is unknown; choose None or one of first, random, greedy"):
        play(rounds_team(), "best")


def test_d6_the_pick_compares_what_the_forks_own_candidates_were_paid_not_what_the_first_call_was():
    own = absolute(lambda call, way: float(call.text), ("b",), name="own")
    against = absolute(lambda call, way: -sum(float(one.text) for one in way.by("b")), ("a",), name="against")
    body = sequence(role("a"), repeat(role("b", "{a}"), at_most=3))
    rollout, _ = play(Workflow("tree", body, ("question",), rewards=(own, against), score="at_end"), "greedy", branching={"b": K})
    for episode in rollout.episodes:
        forks = {}
        for way in episode.trajectories:
            for call in way.by("b"):
                forks.setdefault(call.group, {})[call.id] = float(call.text)
        trunk = episode.trajectories[-1].by("b")  # the last fork's ways have the whole trunk but for their own call
        for call in trunk[:-1]:
            assert float(call.text) == max(forks[call.group].values())


def test_d6_a_loops_condition_is_asked_after_a_round_never_before_the_first():
    asked = []

    def over(b):
        asked.append(b)
        return True

    body = sequence(role("a"), repeat(role("b", "{a}"), at_most=3, until=over))
    rollout, _ = play(Workflow("loop", body, ("question",), start={"b": "start"}), None, n=1, branching={"a": 2})
    assert [len(way.by("b")) for way in rollout.trajectories] == [1, 1]
    assert "start" not in asked


def test_d6_a_stop_within_a_round_is_asked_where_it_stands():
    body = sequence(role("a"), repeat(when(over_before, stop(), name="s"), role("b", "{a}"), at_most=3))
    rollout, _ = play(Workflow("loop", body, ("question",), start={"b": "start"}), None, n=1, branching={"a": 2})
    assert [len(way.by("b")) for way in rollout.trajectories] == [1, 1]


def over_before(b):
    return b != "start"
