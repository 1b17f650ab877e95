"""Whether acting more often is paid: MAPPA's return as printed, and its repairs (docs/mappa.md has these numbers)."""

import itertools

import numpy as np
import pytest

import marl_llm.algorithms as rl

SOLVER, EXECUTOR, VERIFIER = range(3)
GOOD = [(SOLVER, 0.8), (EXECUTOR, 0.9), (VERIFIER, 0.9)]
DAWDLING = [(SOLVER, 0.8), *[(EXECUTOR, 0.5)] * 5, (VERIFIER, 0.2)]


ROWS = 24  # of every table, so that all compile once


def table(*plays):
    rows = [(number, order, agent, score) for number, play in enumerate(plays) for order, (agent, score) in enumerate(play)]
    rows += [(99, 0, 0, 0.0)] * (ROWS - len(rows))
    trajectory, order, agent, local = (np.asarray(column) for column in zip(*rows))
    zeros, tokens = np.zeros(ROWS, int), np.full(ROWS, 7)
    return rl.Samples(
        instance=zeros, env=trajectory, agent=agent, turn=order, trajectory=trajectory, team=zeros * 1.0, local=local, order=order,
        tokens=tokens, where=trajectory != 99,
    )  # fmt: skip


def advantages(*plays, preset="paper", **fields):
    recipe = rl.make_recipe("mappa", preset, kl_coef=0.0, **fields)
    return np.asarray(rl.advantages_for(recipe, table(*plays))[0])[: sum(map(len, plays))]


def returns(*plays):
    t = table(*plays)
    return np.asarray(rl.mean_to_go(t.local, t.order, t.trajectory, t.agent, where=t.where))[: sum(map(len, plays))]


def test_the_printed_return_pays_for_dawdling():
    np.testing.assert_allclose(advantages(GOOD, DAWDLING)[[0, 1, 2]], [0.88, 0.05, -0.88], atol=0.005)
    np.testing.assert_allclose(advantages(GOOD, DAWDLING)[[3, 4, 5, 9]], [1.81, 0.98, 0.46, -1.60], atol=0.01)
    agent = advantages(GOOD, DAWDLING, scope="agent")
    np.testing.assert_allclose([agent[1], agent[4]], [-0.32, 2.10], atol=0.005)
    token = advantages(GOOD, DAWDLING, scope="token")
    np.testing.assert_allclose([token[1], token[4]], [1.34, -0.51], atol=0.01)


REPAIRED = [dict(returns="to_go_mean"), dict(returns="to_go_mean", baseline="role"), dict(returns="to_go_mean", baseline="place")]


@pytest.mark.parametrize("fields", REPAIRED)
def test_the_repaired_return_pays_the_good_play_more_at_every_place(fields):
    found = advantages(GOOD, DAWDLING, **fields)
    assert (found[:3] > found[[3, 4, 9]]).all()
    assert found[2] > 0 > found[9]
    assert (found[1] >= found[4:9]).all()


@pytest.mark.parametrize("fields", REPAIRED)
def test_a_repeated_action_of_an_equal_score_changes_no_order_and_no_return(fields):
    rng = np.random.default_rng(3)
    plays = [[(SOLVER, s), *[(EXECUTOR, e) for e in more], (VERIFIER, v)] for s, v, more in
             zip(rng.random(5), rng.random(5), [rng.random(n) for n in (1, 2, 3, 1, 2)])]  # fmt: skip
    samples, before, plain = table(*plays), advantages(*plays, **fields), returns(*plays)
    places = np.asarray(rl.place_in_play(samples.order, samples.trajectory, samples.agent, where=samples.where))
    for play, place in itertools.product(range(5), range(4)):
        longer = [list(one) for one in plays]
        at = min(place, len(plays[play]) - 1)
        longer[play].insert(at + 1, longer[play][at])
        number = sum(map(len, plays[:play])) + at + 1
        np.testing.assert_allclose(np.delete(returns(*longer), number), plain, atol=1e-6)
        if place != 1:
            continue
        after, now = np.delete(advantages(*longer, **fields), number), table(*longer)
        moved = np.delete(np.asarray(rl.place_in_play(now.order, now.trajectory, now.agent, where=now.where)), number)
        compared = {  # whose advantages have one baseline, before and after
            "place": lambda i, moved=moved: (samples.agent[i], places[i], moved[i]),
            "role": lambda i: samples.agent[i],
        }.get(fields.get("baseline"), lambda i: 0)
        for a, b in itertools.combinations(range(len(before)), 2):
            if compared(a) == compared(b) and abs(before[a] - before[b]) > 1e-4:
                assert (after[a] > after[b]) == (before[a] > before[b])


def test_one_vote_per_agent_not_per_action():
    """With one vote per action a repeated good action would raise what the solver is paid."""
    plain, repeated = [0.2, 0.9, 0.1], [0.2, 0.9, 0.9, 0.1]
    assert np.mean(repeated) > np.mean(plain)
    found = returns([(0, 0.2), (1, 0.9), (2, 0.1)], [(0, 0.2), (1, 0.9), (1, 0.9), (2, 0.1)], [(1, 0.3), (1, 0.9), (2, 0.1)])
    np.testing.assert_allclose(found, [0.4, 0.5, 0.1, 0.4, 0.5, 0.5, 0.1, 0.35, 0.5, 0.1], atol=1e-6)


def oracle(rewards, turn, trajectory, agent, where):
    """`mean_to_go` as its equation reads, in float64."""
    out = np.zeros(len(rewards))
    for t in np.flatnonzero(where):
        votes = []
        for i in np.unique(agent[where & (trajectory == trajectory[t]) & (turn >= turn[t])]):
            mine = where & (trajectory == trajectory[t]) & (agent == i)
            last = rewards[mine & (turn == turn[mine].max())].mean()
            votes.append((rewards[t] + last) / 2 if i == agent[t] else last)
        out[t] = np.mean(votes)
    return out


def test_the_mean_to_go_is_its_equation_with_ties_gaps_and_holes():
    rng = np.random.default_rng(0)
    rewards, turn, trajectory, agent = rng.normal(size=40), *(rng.integers(0, n, 40) for n in (7, 4, 3))
    where = rng.random(40) < 0.8
    turn *= 3
    found = rl.mean_to_go(np.where(where, rewards, np.nan), turn, trajectory, agent, where=where)
    np.testing.assert_allclose(found, oracle(rewards, turn, trajectory, agent, where), atol=1e-5)
    own = rl.mean_to_go(rewards, turn, trajectory, agent, where=where, scope="agent")
    np.testing.assert_allclose(own, oracle(rewards, turn, trajectory * 10 + agent, agent, where), atol=1e-5)
    np.testing.assert_array_equal(rl.mean_to_go(rewards, turn, trajectory, agent, where=where, scope="token"), np.float32(rewards) * where)


def test_a_baseline_per_role_and_place_takes_off_what_a_role_is_always_paid():
    """An executor that is always paid more than a solver does not push the right solver down."""
    plays = [[(SOLVER, s), (EXECUTOR, e)] for s, e in ((0.8, 0.95), (0.2, 0.9), (0.8, 0.9), (0.2, 0.95))]
    plain, repaired = (advantages(*plays, scope="token", **more) for more in ({}, dict(baseline="place")))
    assert plain[0] < plain[3]  # a right solver gets less than an executor at its worse
    np.testing.assert_allclose(repaired[[0, 2, 4, 6]], [1.41, -1.41, 1.41, -1.41], atol=0.01)
    np.testing.assert_allclose(repaired.reshape(4, 2).sum(axis=0), 0, atol=1e-5)


def test_a_centred_score_makes_bad_actions_cost():
    """With the sum to go, two more actions of 0.4 lower what precedes them instead of raising it."""
    long, short = [(0, 0.6), (1, 0.4), (1, 0.4)], [(0, 0.6), (1, 0.4)]
    assert advantages(long, short)[0] > advantages(long, short)[3]
    assert advantages(long, short, center="score")[0] < advantages(long, short, center="score")[3]
    with pytest.raises(ValueError, match="center='score' would have no effect"):
        rl.make_recipe("mappa", returns="to_go_mean", center="score")
    with pytest.raises(ValueError, match="baseline='place' would have no effect"):
        rl.make_recipe("grpo", baseline="place")
    with pytest.raises(ValueError, match="gamma=0.5 would have no effect"):
        rl.make_recipe("mappa", returns="to_go_mean", gamma=0.5)


def test_table_7_prints_two_samples_per_prompt_for_both_tasks():
    assert rl.make_recipe("mappa").plays == rl.make_recipe("mappa", "released").plays == 2


@pytest.mark.parametrize("value", [0.5, 0.7, 0.1])
@pytest.mark.parametrize("fields", [dict(preset="released", group_by="agent,turn"), dict(returns="immediate"), *REPAIRED[:2]])
def test_a_constant_coach_gives_exactly_zero_advantages_to_plays_of_any_length(value, fields):
    plays = [[(agent, value) for agent, _ in play] for play in (GOOD, DAWDLING, DAWDLING[:4])]
    assert not advantages(*plays, **fields).any()
