"""A league: who meets whom is drawn by identity, past selves are never trained on, and a run that is resumed ends with equal bytes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.games import MatrixGame
from marl_llm.games.matrix import MatrixState
from marl_llm.models import LoraConfig, ModelConfig, init_params
from marl_llm.rollout import Episodes
from marl_llm.runs.measuring import LeagueWatch
from marl_llm.training import Checkpoints, LearnerOptions, ModelSpec, Sweep, make_mesh, make_optimizer, make_team
from marl_llm.training.checkpoints import abstract
from marl_llm.training.league import League, LeagueMatch, LeagueOptions, league_conflict
from marl_llm.training.placement import parts_of, split_evenly
from marl_llm.training.sweep import SweepError
from marl_llm.workflows import Assignment, WorkflowError

HIGHER = MatrixGame(utility="0 0 0; 0 0 0; 0 0 0", first="0 -1 -1; 1 0 -1; 1 1 0", second="0 1 1; -1 0 1; -1 -1 0")  # the higher word wins
RECIPE = make_recipe("grpo", group_size=8, rewards="local", returns="immediate", group_by=("instance", "agent", "turn"))
SHAPE = ModelConfig(
    HIGHER.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16
)  # fmt: skip
E = 8


def team(league, shared=True, lora=None, seed=0, split=False):
    roles = {"first": "x", "second": "x" if shared else "y"}
    params = jax.tree.map(lambda x: 0.1 * x, init_params(SHAPE, jax.random.key(1)))  # nearly uniform: many words are actions
    spec = ModelSpec(SHAPE, params, lora=lora)
    options = LearnerOptions(RECIPE, make_optimizer(), row_tokens=64, minibatch=8)
    models = dict.fromkeys(dict.fromkeys(roles.values()), spec)
    mesh = make_mesh(2 if split else 1)
    parts = parts_of(split_evenly(models, 2), models, mesh) if split else None
    return make_team(HIGHER, Assignment(roles), models, options, mesh, seed=seed, league=league, parts=parts)


LEAGUE = LeagueOptions(keep=2, every=2, matches=4, share=0.75)


def one_step(one, step):
    batch = one.play(step, E * step, E)
    return batch, one.learn(batch, 0.01)


def test_who_meets_whom_depends_on_seed_step_and_match_alone_and_roles_take_turns():
    def drawn(seed, steps):
        league = League(LEAGUE, seed, True)
        for step in (0, 2):
            league.keep_self(step, {})
        return [league.matches(step, E * step, E, ["first", "second"]) for step in steps]

    found = drawn(3, range(40))
    assert drawn(3, [7, 7, 20]) == [found[7], found[7], found[20]]  # no counter runs
    assert drawn(4, range(40)) != found
    assert any(len({match.past for match in step}) > 1 for step in found)  # the matches of a step are drawn apart
    matches = [match for step in found for match in step]
    assert [match.first for match in matches] == list(range(0, E * 40, 2))
    past = [match for match in matches if match.past is not None]
    assert 0.65 < len(past) / len(matches) < 0.85
    assert {match.learns for match in past} == {("first",), ("second",)}
    assert {match.past for match in past} == {0, 1}
    assert all(match.learns == ("first", "second") for match in matches if match.past is None)


def test_who_is_seldom_beaten_is_met_most_and_old_results_fade():
    league = League(dataclasses.replace(LEAGUE, share=1.0), 0, True)
    for step in (0, 2):
        league.keep_self(step, {})
    won, lost = LeagueMatch(0, 20, ("first",), 0), LeagueMatch(20, 20, ("second",), 1)
    results = {"first": np.ones((40, 1)), "second": -np.ones((40, 1))}
    zero = np.zeros((40, 1))
    ended = Episodes(zero, zero, zero.astype(bool), zero.astype(bool), results)
    figures = league.record([won, lost], ended)
    assert [one.win_rate for one in league.selves] == [20.5 / 21, 0.5 / 21]
    assert (figures["league/score"], figures["league/worst"], figures["league/episodes"]) == (0.5, 0.5 / 21, 40.0)
    met = [match.past for step in range(30) for match in league.matches(step, 0, E, ["first"])]
    assert np.mean(met) > 0.95  # (1 - 0.98)^2 against (1 - 0.02)^2
    for _ in range(200):
        league.record([], ended)
    assert all(one.win_rate == pytest.approx(0.5, abs=0.01) for one in league.selves)


def test_only_the_newest_selves_stay_and_one_that_is_kept_is_not_kept_twice():
    league = League(LeagueOptions(keep=2, every=3), 0, False)
    for step in (0, 1, 3, 3, 6, 9):
        league.keep_self(step, {"x": {"w": np.float32(step)}})
    assert [(one.step, float(one.params["x"]["w"])) for one in league.selves] == [(6, 6.0), (9, 9.0)]
    assert league.rating is None


def trained(one):
    """Copies: an update may write over the arrays of the one before."""
    return [np.array(x) for x in jax.tree.leaves(one.learners["x"].policy.params)]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)])
def test_past_selves_are_drawn_from_their_own_parameters_and_never_trained_on(lora):
    """Law 2 shows who spoke; an update does not change when what past selves said is paid a hundred more."""
    ends = []
    for paid in (0.0, 100.0):
        with team(LEAGUE, lora=lora) as one:
            for step in range(4):
                _, figures = one_step(one, step)
                assert figures["x"]["log_prob_gap"] < 1e-4
            batch = one.play(4, 4 * E, E)
            start, table = trained(one), batch.table
            more = paid * ~table.where
            one.learn(dataclasses.replace(batch, table=dataclasses.replace(table, team=table.team + more, local=table.local + more)), 0.01)
            ends.append(trained(one))
    assert any(np.any(a != b) for a, b in zip(start, ends[0], strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(*ends, strict=True))
    check_seats(one, batch)
    rescored = one.play(4, 4 * E, E).tokens  # the parameters have moved, and those of past selves have not
    moved = np.asarray(rescored.log_probs)[rescored.response_at] != np.asarray(batch.tokens.log_probs)[batch.tokens.response_at]
    assert moved[table.where].all()
    assert not moved[~table.where].any()


def check_seats(one, batch):
    """The rows that count are those of roles that learn in their match, and the episodes name who played."""
    step, table = batch.step, batch.table
    matches = one.league.matches(step, E * step, E, list(one.roles))
    assert {match.past is None for match in matches} == {True, False}
    players = [play["roles"] for play, _ in batch.episodes(E * RECIPE.plays, "train")]
    for number, match in enumerate(matches):
        here = (table.instance >= match.first) & (table.instance < match.first + match.count)
        size = match.count * RECIPE.plays
        for agent, role in enumerate(one.roles):
            assert np.all(table.where[here & (table.agent == agent)] == (role in match.learns))
            names = {roles[role] for roles in players[number * size : (number + 1) * size]}
            assert names == ({"x"} if role in match.learns else {f"x@{one.league.selves[match.past].step}"})


def test_matches_without_past_selves_are_what_a_team_without_a_league_plays(monkeypatch):
    monkeypatch.setattr(League, "matches", lambda self, step, first, count, roles: [
        LeagueMatch(first + 2 * number, 2, tuple(roles)) for number in range(4)
    ])  # fmt: skip
    with team(LEAGUE, shared=False) as one, team(LeagueOptions(), shared=False) as plain:
        found, expected = one.play(0, 0, E), plain.play(0, 0, E)
        order = [np.lexsort((b.tokens.rank, b.table.trajectory, b.table.instance, b.table.agent)) for b in (found, expected)]
        for name in ("instance", "agent", "local", "where"):
            assert np.array_equal(getattr(found.table, name)[order[0]], getattr(expected.table, name)[order[1]])
        assert {name: found.figures[name] for name in expected.figures} == pytest.approx(expected.figures)


def test_models_with_devices_of_their_own_meet_the_same_past_selves():
    with team(LEAGUE, shared=False) as one, team(LEAGUE, shared=False, split=True) as split:
        for step in range(3):
            figures = one_step(one, step)[0].figures
            assert one_step(split, step)[0].figures == pytest.approx(figures, abs=1e-5)
        assert one.league.state() == split.league.state()
        stored, there = jax.device_get(one.policies()["y.past0"].params), split.policies()["y.past0"].params
        assert {device.id for x in jax.tree.leaves(there) for device in x.devices()} == {1}
        for a, b in zip(jax.tree.leaves(stored), jax.tree.leaves(there), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_run_that_is_resumed_ends_with_equal_bytes(tmp_path):
    with team(LEAGUE, shared=False) as one:
        for step in range(3):
            one_step(one, step)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(3, one.policies(), {"team": one.state()})
        figures = [one_step(one, step)[0].figures for step in range(3, 6)]
        ended, state = jax.device_get({name: policy.params for name, policy in one.policies().items()}), one.state()
    with team(LEAGUE, shared=False) as other:
        state_there = json.loads(json.dumps(checkpoints.state(3)))
        other.restore(checkpoints.restore(3, abstract(other.policies())), state_there["team"])
        assert [one_step(other, step)[0].figures for step in range(3, 6)] == figures
        assert other.state() == state
        again = jax.device_get({name: policy.params for name, policy in other.policies().items()})
    assert set(again) == {"x", "y", "x.past0", "x.past1", "y.past0", "y.past1"}
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ended), jax.tree.leaves(again), strict=True))


PAST = {"step": 0, "rating": 0.0, "plays": 2.5, "score": 1.5}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"selves": []}, "league.selves are of steps"),
        ({"selves": [PAST | {"step": step} for step in range(3)]}, "there must be 1 to 2 selves"),
        ({"selves": [PAST | {"step": 2}, PAST]}, "the oldest first"),
        ({"selves": [PAST, PAST]}, "the oldest first"),
        ({"selves": [{"step": 0}]}, "must have step, rating, plays, score"),
        ({"selves": [PAST | {"step": -2}]}, "step must be a whole number"),
        ({"selves": [PAST | {"rating": None}]}, "rating must be a number"),
        ({"selves": [PAST | {"plays": -1}]}, "plays must be a number"),
        ({"selves": [PAST | {"score": "x"}]}, "score must be a number"),
        ({"selves": [PAST | {"score": 2.6}]}, r"score must be a number in \[0, 2.5\]"),
        ({"rating": None}, "its seats compete"),
        ({"rating": float("nan")}, "league.rating must be a number"),
        ({"best": None}, "league.best must be a number"),
    ],
)
def test_a_state_that_no_league_leaves_is_refused_by_name(changes, why):
    league, good = League(LEAGUE, 0, True), {"selves": [PAST, PAST | {"step": 2}], "rating": 3.0, "best": 4.0}
    stored = {f"x.past{number}": {} for number in range(3)}
    league.restore(good, stored, ["x"], True)
    with pytest.raises(ValueError, match=why):
        league.restore(good | changes, stored, ["x"], True)
    assert league.state() == good
    with pytest.raises(ValueError, match="its seats compete"):
        League(LEAGUE, 0, False).restore(good, stored, ["x"], True)


def test_a_league_without_a_past_self_is_one_that_has_not_played():
    with team(LEAGUE) as one:
        begun = one.state()
        one.restore(one.policies(), begun)
        assert one.league.selves == []
        one_step(one, 0)
        with pytest.raises(ValueError, match="there must be 1 to 2 selves"):
            one.restore(one.policies(), one.state() | {"league": begun["league"]})


def test_a_team_that_learns_beats_its_start_and_its_rating_says_so():
    with team(dataclasses.replace(LEAGUE, every=100)) as one:
        figures = [one_step(one, step)[0].figures for step in range(25)]
    assert figures[-1]["league/worst"] > 0.6
    assert figures[-1]["league/rating"] > 50


def test_the_higher_word_wins_and_a_word_that_is_no_action_loses():
    def results(*actions):
        state = MatrixState(jnp.asarray(actions), jnp.ones(2, bool))
        return [float(HIGHER.result(state, role)) for role in ("first", "second")]

    assert results(2, 0) == [2.0, -2.0]  # the part that the first is paid, less the other's
    assert results(1, 1) == [0.0, 0.0]
    assert results(-1, 0) == [-1.0, 1.0]
    assert results(-1, -1) == [0.0, 0.0]


def test_what_a_league_cannot_be_had_with_is_refused_in_one_line():
    keep = LeagueOptions(keep=1, matches=3)
    for beside, why in (
        (dict(roles=2, hosted=True), "hosted"), (dict(roles=1), "one role"), (dict(roles=2, refills=1), "refills"),
        (dict(roles=2, processes=2), "plays in one process, and this run has 2"),
        (dict(roles=2, tasks=8), "do not divide into matches=3"),
    ):  # fmt: skip
        assert why in league_conflict(keep, **beside)
        assert not league_conflict(LeagueOptions(), **beside)
    with team(keep) as one, pytest.raises(WorkflowError, match="do not divide"):
        one.play(0, 0, E)
    with team(LEAGUE) as one, pytest.raises(SweepError, match="past selves"):
        Sweep([one])
    for wrong in (dict(keep=-1), dict(every=0), dict(matches=0), dict(share=0.0), dict(priority="easy")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LeagueOptions(**wrong)


def test_the_watch_tells_a_collapse_once_until_it_has_passed():
    told = []
    watch = LeagueWatch(told.append)
    healthy = {"league/selves": 2.0, "league/worst": 0.6, "league/rating_fall": 10.0, "role/first/entropy": 0.5, "role/second/entropy": 0.3}
    watch.look(1, {"role/first/entropy": 0.0})  # no league
    watch.look(2, healthy | {"role/first/entropy": 0.0, "role/second/entropy": 0.0})  # certain, and beaten by none
    assert told == []
    fallen = healthy | {"league/rating_fall": 140.0}
    for step, figures in enumerate((fallen, fallen, healthy, fallen), 3):
        watch.look(step, figures)
    assert [line.partition(":")[0] for line in told] == ["ALARM step 3", "ALARM step 6"]
    watch.look(7, healthy | {"league/worst": 0.2, "role/first/entropy": 0.0, "role/second/entropy": 0.01})
    assert "hardly vary" in told[-1]
    assert len(told) == 3
