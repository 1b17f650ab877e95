"""Exact counterfactual credit: replays by identity, one response exchanged, in games whose contributions are known (laws 6, 8, 9)."""

import dataclasses
import functools
import itertools
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import Samples, advantages_for, make_recipe
from marl_llm.games import GameRole, JointLetter, Prompt, Rewards, speaking_order
from marl_llm.models import ModelConfig, init_params
from marl_llm.reporting.episodes import validate_tokens
from marl_llm.rollout import counterfactual_credit, last_team_reward, play, row_keys, shapley_values
from marl_llm.rollout.credit import exchanging
from marl_llm.sampling import Responses
from marl_llm.text import ByteTokenizer
from marl_llm.training import LearnerOptions, ModelSpec, make_mesh, make_optimizer, make_rollout, make_team, sampling_of
from marl_llm.training.batch import from_pool
from marl_llm.workflows import Assignment, WorkflowError

E, B, T = 4, 2, 3
KEY = jax.random.key(5)


class Sum(NamedTuple):
    """What all have given so far, the latest gift of each agent, the turns that were closed, and after how many it ends."""

    total: jax.Array
    said: jax.Array
    closed: jax.Array
    limit: jax.Array


@dataclasses.dataclass(frozen=True)
class Additive:
    """`ann` and `bob` give at once, then `cy`; the team's reward is the sum of all gifts so far. A stop token gives nothing.

    The instance is the turn after which the episode ends; a negative one cannot be played. `harsh`: a first gift of bob's below 6 ends it.
    """

    harsh: bool = False
    name: ClassVar[str] = "additive"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {}
    roles = (GameRole("cy", 4, 3), GameRole("bob", 4, 2), GameRole("ann", 4, 2))  # not in the order of speaking
    stages = (("ann", "bob"), ("cy",))
    max_turns = T
    tokenizer = ByteTokenizer()
    stop_id = 1

    def instance(self, key, split):
        return jnp.int32(T)

    def valid(self, instance):
        return instance >= 0

    def reset(self, instance):
        return Sum(jnp.int32(0), jnp.zeros(3, jnp.int32), jnp.int32(0), instance)

    def observe(self, state, role):
        ids = jnp.concatenate([state.said + 10, state.total[None] + 30])
        return Prompt(ids, jnp.ones(4, bool))

    def act(self, state, role, tokens, where):
        gift = jnp.where(where[0] & (tokens[0] != self.stop_id), tokens[0], 0)
        ends = self.harsh & (role == "bob") & (gift < 6)
        limit = jnp.where(ends, state.closed, state.limit)
        said = state.said.at[[r.name for r in self.roles].index(role)].set(gift)
        return Sum(state.total + gift, said, state.closed + (role == "cy"), limit)

    def rewards(self, before, after, role):
        return Rewards(after.total.astype(jnp.float32), jnp.float32(0.5), {}, jnp.bool_(True))

    def done(self, state):
        return state.closed >= jnp.abs(state.limit)

    def outcome(self, state):
        return self.done(state).astype(jnp.float32)

    def task(self, instance):
        return {}

    def picture(self, state):
        return None

    def script(self, state, role, key):
        raise NotImplementedError


def givers(game, reading=False):
    """A player that says a random number from 2 to 9; `reading`: plus the last digit of what it reads, so that others change it."""

    def respond(role, states, prompt, keys):
        r = {x.name: x.response_tokens for x in game.roles}[role]
        tokens = jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (r,), 2, 10)))(keys).astype(jnp.int32)
        tokens = tokens + (jnp.sum(prompt.ids, axis=-1)[:, None, None] % 7 if reading else 0)
        zero = jnp.zeros(tokens.shape, jnp.float32)
        return Responses(tokens, jnp.ones(tokens.shape, bool), zero, zero, zero, jnp.ones(tokens.shape[:2], bool))

    return respond


@functools.lru_cache
def credited(game=Additive(), exchange="silence", replays=None, reading=False):
    """(rollout, credit by role) of a game; the instances of `LIMITS`."""

    def run(limits, step):
        player, env = givers(game, reading), jnp.arange(len(limits))
        rollout = play(game, player, limits, env, KEY, trajectories=B, step=step)
        return rollout, counterfactual_credit(game, player, limits, env, KEY, rollout, exchange=exchange, replays=replays, step=step)

    return jax.jit(run)


LIMITS = jnp.asarray([T, 1, -1, T], jnp.int32)  # one ends early, one cannot be played


def gifts(rollout, role):
    return np.asarray(rollout.tables[role].responses.tokens[..., 0, 0], np.float32)


def test_in_a_game_of_additive_pay_the_credit_is_each_contribution_exactly():
    rollout, credit = credited()(LIMITS, 0)
    for role, one in credit.items():
        where = np.asarray(rollout.tables[role].where)
        np.testing.assert_array_equal(one.replayed, where)
        np.testing.assert_array_equal(one.gained, np.where(where, gifts(rollout, role), 0))
        total = np.asarray(last_team_reward(rollout=rollout, game=Additive()))
        np.testing.assert_array_equal(one.without, np.where(where, total - gifts(rollout, role), 0))
    np.testing.assert_array_equal(where.sum(0), np.asarray([[T], [1], [0], [T]]) * np.ones(B))  # one over after a turn, one aborted


def test_law_6_a_candidate_is_the_second_of_its_prompt_in_a_tree_by_identity():
    rollout, credit = credited(exchange="candidate")(LIMITS, 3)
    order = speaking_order(Additive())
    for agent, role in enumerate(order):
        for t in range(T):
            keys = jnp.stack([row_keys(KEY, jnp.arange(E), agent, t * 3 + agent, 2, b, B, 3)[:, 1] for b in range(B)], 1)
            size = rollout.tables[role].responses.tokens.shape[-1]
            other = jax.vmap(jax.vmap(lambda k, size=size: jax.random.randint(k, (size,), 2, 10)[0]))(keys)
            where = np.asarray(rollout.tables[role].where[t])
            np.testing.assert_array_equal(credit[role].gained[t], np.where(where, gifts(rollout, role)[t] - other, 0))


def test_law_6_a_replay_without_exchange_is_the_episode_to_the_byte():
    game, player, env = Additive(), givers(Additive(), reading=True), jnp.arange(E)
    nobody = row_keys(KEY, jnp.repeat(env, B), 7, 99, 1)[:, 0]
    other = row_keys(KEY, jnp.repeat(env, B), 7, 98, 1)[:, 0]
    one = play(game, player, LIMITS, env, KEY, trajectories=B)
    for exchange in ("candidate", "silence"):
        same = play(game, exchanging(game, player, nobody, other, exchange), LIMITS, env, KEY, trajectories=B)
        jax.tree.map(np.testing.assert_array_equal, one, same)


def test_what_others_do_because_of_a_response_is_credited_too():
    """By a plain loop over Python numbers: who reads another sum says another number, from the same key."""
    game = Additive()
    rollout, credit = credited(game, "silence", None, True)(LIMITS, 0)
    drawn = {role: np.zeros((T, E, B), np.int32) for role in credit}
    for role, table in rollout.tables.items():
        drawn[role] = gifts(rollout, role).astype(int) - np.asarray(table.prompt.ids).sum(-1) % 7
    columns = [r.name for r in game.roles]

    def total(e, b, silent, turns):
        said, total = dict.fromkeys(columns, 0), 0
        for t in range(turns):
            for stage in game.stages:
                read = (sum(said.values()) + 30 + total + 30) % 7
                new = {role: 0 if (t, role) == silent else int(drawn[role][t, e, b]) + read for role in stage}
                said, total = said | new, total + sum(new.values())
        return total

    for e, b, turns in ((0, 0, T), (0, 1, T), (1, 0, 1), (3, 1, T)):
        for t, role in itertools.product(range(turns), columns):
            assert credit[role].without[t, e, b] == total(e, b, (t, role), turns)
    assert np.any(np.asarray(credit["ann"].gained) != np.where(rollout.tables["ann"].where, gifts(rollout, "ann"), 0))


def test_a_replay_may_end_earlier_or_later_than_its_episode():
    game = Additive(harsh=True)
    rollout, credit = credited(game)(jnp.full(E, T, jnp.int32), 0)
    ended = np.asarray(gifts(rollout, "bob")[0] < 6)
    assert 0 < ended.mean() < 1
    # bob's silence ends the episode in his own turn, where ann and he had spoken
    np.testing.assert_array_equal(credit["bob"].without[0], gifts(rollout, "ann")[0])
    assert not np.asarray(credit["cy"].replayed[0])[ended].any()


def test_replays_bounds_what_is_replayed_and_the_choice_is_by_identity():
    replays = 4
    rollout, credit = credited(replays=replays)(LIMITS, 0)
    _, whole = credited()(LIMITS, 0)
    counts = sum(np.asarray(one.replayed).sum(0) for one in credit.values())
    made = sum(np.asarray(table.where).sum(0) for table in rollout.tables.values())
    np.testing.assert_array_equal(counts, np.minimum(made, replays))
    for role, one in credit.items():
        for x, y in zip(one, whole[role]):
            np.testing.assert_array_equal(x, np.where(one.replayed, y, 0))
    again = credited(replays=replays)(LIMITS, 1)[1]
    assert any(np.any(np.asarray(again[role].replayed != credit[role].replayed)) for role in credit)


def test_a_table_of_several_branches_is_refused():
    game, player = Additive(), givers(Additive())
    rollout = play(game, player, LIMITS, jnp.arange(E), KEY, branches=2)
    with pytest.raises(ValueError, match="branches=1"):
        counterfactual_credit(game, player, LIMITS, jnp.arange(E), KEY, rollout)


def test_credit_reaches_the_advantages_and_what_was_not_replayed_trains_nobody():
    recipe = make_recipe("grpo", group_size=B, rewards="mixed", alpha=2.0, returns="counterfactual", exchange="silence", replays=4)
    game = Additive()
    run = make_rollout(game, make_mesh(1), lambda params: givers(game), E, **sampling_of(recipe))
    played = run({}, 0, KEY)
    _, table = from_pool(played.pool, 8)
    assert table.where.sum() == E * B * 4 == float(played.summary["replays"])
    earned = {role: (float(played.summary[f"role/{role}/credit"])) for role in speaking_order(game)}
    for agent, role in enumerate(speaking_order(game)):
        mine = table.where & (table.agent == agent)
        assert earned[role] == pytest.approx(table.credit[mine].mean())
        np.testing.assert_array_equal(table.credit[mine] >= 2, True)
    _, metrics, _ = advantages_for(recipe, table)
    assert float(metrics["return_mean"]) == pytest.approx(2 * table.credit[table.where].mean() + 0.5)
    sizes = {role.name: role.response_tokens for role in game.roles}
    drawn = T * sum(sizes.values())  # of which a silent one has a single token
    for role, one in ((role, t.credit) for role, t in played.rollout.tables.items()):
        np.testing.assert_array_equal(one.tokens, np.where(one.replayed, drawn - sizes[role] + 1, 0))
    assert float(played.summary["replayed_tokens"]) == sum(int(t.credit.tokens.sum()) for t in played.rollout.tables.values())


def test_models_learn_from_credit_and_the_record_tells_what_the_team_would_have_got():
    game = JointLetter(letters=2)
    shape = dict(width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    config = ModelConfig(game.tokenizer.vocab_size, **shape)
    recipe = make_recipe("grpo", group_size=2, returns="counterfactual", replays=1)
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=64, minibatch=8)
    specs, shared = {"m": ModelSpec(config, init_params(config, jax.random.key(1)))}, Assignment({"first": "m", "second": "m"})
    with make_team(game, shared, specs, options, make_mesh(2), seed=7) as team:
        batch = team.play(0, 0, 4)
        figures = team.learn(batch, 1e-3)
        assert np.isfinite(figures["m"]["loss"])
        assert batch.figures["replays"] == batch.table.where.sum() > 0
        (episode, tokens), *_ = batch.episodes(1, "train", team.advantages)
    validate_tokens(tokens, episode)
    told = [said for step in tokens["steps"] for said in step["responses"] if "without" in said]
    assert len(told) == 1
    last = episode["steps"][-1]["responses"][0]["team"]
    for said in told:
        assert said["credit"] + said["without"] == pytest.approx(last, abs=1e-6)
    with pytest.raises(WorkflowError, match="replays compiled play only"):
        make_team(game, shared, specs, options, make_mesh(2), hosted=True)


def test_a_table_without_credit_is_refused_in_one_line():
    zero = np.zeros(2)
    recipe = make_recipe("grpo", returns="counterfactual")
    with pytest.raises(ValueError, match=r"needs Samples.credit.*play compiled"):
        advantages_for(recipe, Samples(instance=zero, env=zero, agent=zero, turn=zero, trajectory=zero, team=zero, local=zero))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (dict(name="at_grpo", returns="counterfactual"), "needs plays that go on"),
        (dict(name="grpo", returns="counterfactual", rewards="local"), "leaves that out"),
        (dict(name="grpo", exchange="silence"), "replays nothing"),
        (dict(name="grpo", replays=2), "replays nothing"),
        (dict(name="grpo", returns="counterfactual", exchange="silnce"), "Did you mean 'silence'"),
        (dict(name="grpo", returns="counterfactual", replays=0), r"must be a number in \[1"),
    ],
)
def test_recipes_that_mean_nothing_are_refused(overrides, why):
    with pytest.raises(ValueError, match=why):
        make_recipe(**overrides)


@pytest.mark.parametrize("agents", [1, 2, 3, 5])
def test_shapley_values_are_the_mean_gain_over_all_orders(agents):
    rng = np.random.default_rng(agents)
    worth = {team: rng.normal() for n in range(agents + 1) for team in map(frozenset, itertools.combinations(range(agents), n))}
    oracle = np.zeros(agents)
    for order in itertools.permutations(range(agents)):
        for place, agent in enumerate(order):
            oracle[agent] += worth[frozenset(order[: place + 1])] - worth[frozenset(order[:place])]
    np.testing.assert_allclose(shapley_values(worth.__getitem__, agents), oracle / math.factorial(agents), atol=1e-12)


@pytest.mark.parametrize("agents", [0, 6])
def test_shapley_values_are_for_one_to_five_agents(agents):
    with pytest.raises(ValueError, match="1 to 5"):
        shapley_values(lambda team: 0.0, agents)
