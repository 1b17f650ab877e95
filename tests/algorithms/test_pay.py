"""Whom a pay reaches: what `pay_reach` says in words is what the returns of every recipe do."""

import itertools
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import RECIPES, Samples, make_recipe, pay_reach
from marl_llm.algorithms.apply import _charged_returns
from marl_llm.algorithms.recipe_rules import CHOICES

PLAYS, TURNS, AGENTS = 2, 3, 2
PLAY, TURN, AGENT = (x.ravel() for x in np.meshgrid(*map(np.arange, (PLAYS, TURNS, AGENTS)), indexing="ij"))
S = PLAY.size
LAST = TURN == TURNS - 1


def returns_of(recipe, team, local, kl=None):
    samples = Samples(
        instance=PLAY, env=PLAY, agent=AGENT, turn=TURN, trajectory=PLAY, team=team, local=local, order=TURN * AGENTS + AGENT, kl=kl
    )
    rewards = jnp.asarray(recipe.reward_of(samples.team, samples.local))
    return np.asarray(_charged_returns(recipe, samples, rewards, jnp.ones(S, bool), recipe.kl_coef))


def reached(recipe, name, paid):
    """The responses whose return changes if the response `paid` is paid more."""
    rewards = {"team": np.zeros(S), "local": np.zeros(S)}
    before = returns_of(recipe, **rewards)
    rewards[name] = rewards[name] + (np.arange(S) == paid)
    return set(np.flatnonzero(np.abs(returns_of(recipe, **rewards) - before) > 1e-6))


def meant(words, paid):
    """The responses that the words of `pay_reach` name."""
    play = PLAY == PLAY[paid]
    order = TURN * AGENTS + AGENT
    earlier = play & (order <= order[paid])
    sets = {
        "nobody": np.zeros(S, bool),
        "the response that it is paid to": np.arange(S) == paid,
        "this and the earlier responses of the same role": earlier & (AGENT == AGENT[paid]),
        "this and all earlier responses of the play": earlier,
        "all responses of this turn and of the earlier ones, as the mean of the turn": play & (TURN <= TURN[paid]),
        "all responses of the play, added up over its turns": play,
        "all responses of the play, if it is paid in the last turn; earlier pay reaches nobody": play & (order[paid] == order.max()),
    }
    return set(np.flatnonzero(sets[words]))


PAYS = [
    dict(rewards=rewards, returns=returns, scope=scope)
    for rewards, returns, scope in itertools.product(CHOICES["rewards"], CHOICES["returns"], CHOICES["scope"])
    if returns not in ("gae", "to_go_mean", "counterfactual") and (returns == "to_go" or scope == "trajectory")
    if not (returns == "outcome_plus_local" and rewards != "mixed")
]


@pytest.mark.parametrize("pay", PAYS, ids=lambda pay: "-".join(pay.values()))
def test_the_words_name_the_responses_whose_returns_a_pay_moves(pay):
    if pay["returns"] != "to_go":
        pay = {name: value for name, value in pay.items() if name != "scope"}
    recipe = make_recipe("grpo", **pay)
    for name, paid in itertools.product(("team", "local"), range(S)):
        assert reached(recipe, name, paid) == meant(pay_reach(recipe)[name], paid), (name, paid)


def test_the_outcome_is_shared_and_each_response_keeps_its_own_pay():
    rng = np.random.default_rng(0)
    team, local = np.where(LAST, rng.normal(size=S), 0), rng.normal(size=S)
    recipe = make_recipe("grpo", rewards="mixed", returns="outcome_plus_local", alpha=2.0)
    last = np.asarray([team[(PLAY == play) & LAST & (AGENT == AGENTS - 1)][0] for play in PLAY])
    np.testing.assert_allclose(returns_of(recipe, team, local), 2 * last + local, atol=1e-6)


def test_the_kl_of_each_response_is_taken_off_its_own_return():
    team, kl = np.where(LAST, 1.0, 0.0), np.arange(S) / S
    recipe = make_recipe("grpo", rewards="mixed", returns="outcome_plus_local", kl_coef=0.5, kl_where="reward")
    np.testing.assert_allclose(returns_of(recipe, team, np.zeros(S), kl), 1 - 0.5 * kl, atol=1e-6)


@pytest.mark.parametrize("rewards", ["team", "local"])
def test_two_parts_need_both_kinds_of_pay(rewards):
    with pytest.raises(ValueError, match="has no two parts"):
        make_recipe("grpo", rewards=rewards, returns="outcome_plus_local")


def test_the_docs_say_whom_the_pay_of_each_recipe_reaches():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "team_rules.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    found = {name: (team, local) for names, team, local in rows for name in re.findall(r"\w+", names) if name in RECIPES}
    assert found == {name: tuple(pay_reach(make_recipe(name)).values()) for name in RECIPES}
