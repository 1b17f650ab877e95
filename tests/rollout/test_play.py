"""Playing a workflow: branches are values, the second agent sees the first (laws 3, 4, 6), stages, early stop, aborted episodes."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.games import Game, GameRole, JointLetter, PlanPath, Prompt, Rewards, role_of, speaking_order
from marl_llm.models import ModelConfig
from marl_llm.rollout import flatten_rows, pad_to, pick_branch, play, random_player, row_keys, scripted_player
from marl_llm.sampling import Responses
from marl_llm.text import ByteTokenizer
from marl_llm.training import sampling_of
from marl_llm.training.batch import from_pool, pooled, rows_from

GAME = PlanPath(height=3, width=4, min_distance=3, max_distance=8, max_moves=2, max_turns=3, wall_density=0.2)
E, K = 24, 4


class Said(NamedTuple):
    """The latest token of each agent, and how many turns were closed."""

    said: jax.Array
    closed: jax.Array
    limit: jax.Array


@dataclasses.dataclass(frozen=True)
class Workflow:
    """A game of three: `ann` and `bob` act at once, then `cy`. A token is paid to the team and costs its speaker twice as much.

    `limit` (the instance) is the turn after which the episode ends; a negative one cannot be played, though it is over no sooner.
    """

    name: ClassVar[str] = "workflow"
    device: ClassVar[bool] = True
    random_player: ClassVar[dict[str, float]] = {}
    roles = (GameRole("cy", 4, 3), GameRole("bob", 4, 2), GameRole("ann", 4, 1))  # on purpose not in the order of speaking or of names
    stages = (("ann", "bob"), ("cy",))
    max_turns = 3
    tokenizer = ByteTokenizer()
    stop_id = 1

    def instance(self, key, split):
        return jnp.int32(3)

    def valid(self, instance):
        return instance >= 0

    def reset(self, instance):
        return Said(jnp.zeros(3, jnp.int32), jnp.int32(0), instance)

    def _index(self, role):
        return [r.name for r in self.roles].index(role)

    def observe(self, state, role):
        """What all three said last, and who reads."""
        return Prompt(jnp.concatenate([state.said + 10, jnp.int32(self._index(role) + 2)[None]]), jnp.ones(4, bool))

    def act(self, state, role, tokens, where):
        said = state.said.at[self._index(role)].set(jnp.where(where[0], tokens[0], 0))
        return Said(said, state.closed + (role == "cy"), state.limit)

    def rewards(self, before, after, role):
        team = jnp.sum(after.said).astype(jnp.float32)
        local = -2.0 * after.said[self._index(role)].astype(jnp.float32)
        return Rewards(team, local, {}, jnp.bool_(True))

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


FLOW = Workflow()


def numbers(role, states, prompt, keys):
    """A player that says a random number from 2 to 9, as many times as its budget allows."""
    r = {x.name: x.response_tokens for x in FLOW.roles}[role]
    tokens = jax.vmap(jax.vmap(lambda k: jax.random.randint(k, (r,), 2, 10)))(keys).astype(jnp.int32)
    zero = jnp.zeros(tokens.shape, jnp.float32)
    return Responses(tokens, jnp.ones(tokens.shape, bool), zero, zero, zero, jnp.ones(tokens.shape[:2], bool))


@functools.partial(jax.jit, static_argnames=("trajectories", "branches", "pick", "alpha"))
def flow(limits, env, **options):
    return play(FLOW, numbers, limits, env, jax.random.key(0), **options)


def limits(n=6, value=3):
    return jnp.full(n, value, jnp.int32), jnp.arange(n)


@pytest.fixture(scope="module")
def instances():
    return jax.jit(jax.vmap(lambda key: GAME.instance(key, "train")))(jax.random.split(jax.random.key(0), E))


@pytest.fixture(scope="module")
def tree(instances):
    """K branches per prompt of a noisy team, the best one played."""
    script = scripted_player(GAME, noise=0.7)
    run = jax.jit(lambda i: play(GAME, script, i, jnp.arange(E), jax.random.key(1), branches=K, pick="greedy"))
    return run(instances)


@pytest.fixture(scope="module")
def replay(instances, tree):
    """The same episodes by a plain Python loop over turns and roles that only ever calls `act` on the chosen responses."""
    act = {r.name: jax.jit(jax.vmap(lambda s, t, w, r=r: GAME.act(s, r.name, t, w))) for r in GAME.roles}
    observe = {r.name: jax.jit(jax.vmap(lambda s, r=r: GAME.observe(s, r.name))) for r in GAME.roles}
    state = jax.vmap(GAME.reset)(instances)
    prompts, states, alive = [], [], []
    for t in range(GAME.max_turns):
        for (role,) in GAME.stages:
            table = tree.tables[role]
            over = np.asarray(jnp.all(state.position == state.map.goal, axis=-1))
            alive.append((t, role, ~over))
            prompts.append((t, role, observe[role](state)))
            chosen = table.chosen[t, :, 0]

            def pick(x, chosen=chosen, t=t):
                return x[t, jnp.arange(E), 0, chosen]

            new = act[role](state, pick(table.responses.tokens), pick(table.responses.where))

            def keep(a, b, over=over):
                return jnp.where(over.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

            state = jax.tree.map(keep, state, new)
        states.append(state)
    return prompts, states, alive


# --- law 4: values, micro-transitions, the tree goes on -------------------------------------------------------------------


def test_law_4_every_prompt_is_of_the_state_that_the_chosen_branches_led_to(tree, replay):
    for t, role, prompt in replay[0]:
        np.testing.assert_array_equal(tree.tables[role].prompt.ids[t, :, 0], prompt.ids)
        np.testing.assert_array_equal(tree.tables[role].prompt.where[t, :, 0], prompt.where)


def test_law_4_each_turn_starts_where_the_chosen_branch_ended(tree, replay):
    """The frozen tree: prompts of later turns must change as the agent moves."""
    for t, state in enumerate(replay[1]):
        recorded = jax.tree.map(lambda x, t=t: x[t, :, 0], tree.states)
        jax.tree.map(np.testing.assert_array_equal, recorded, state)
    positions = np.asarray(tree.states.position[:, :, 0])
    assert (positions[1] != positions[0]).any(-1).mean() > 0.5
    ids = np.asarray(tree.tables["tool"].prompt.ids[:, :, 0])
    assert (ids[1] != ids[0]).any(-1).all()


def test_rows_count_until_the_episode_is_over_and_its_state_then_stays(tree, replay):
    for t, role, alive in replay[2]:
        np.testing.assert_array_equal(tree.tables[role].where[t, :, 0], alive)
    over = ~np.asarray(tree.tables["tool"].where[1:, :, 0])
    assert over.any()
    same = np.asarray(jnp.all(tree.states.position[1:, :, 0] == tree.states.position[:-1, :, 0], axis=-1))
    assert same[over].all()
    turns = np.asarray(tree.tables["tool"].where[:, :, 0]).sum(0)
    np.testing.assert_array_equal(tree.episodes.turns[:, 0], turns)
    goal = jnp.all(tree.states.position[-1, :, 0] == tree.states.map.goal[-1, :, 0], axis=-1)
    np.testing.assert_array_equal(tree.episodes.outcome[:, 0], goal)
    np.testing.assert_array_equal(tree.episodes.done[:, 0], goal)


def test_law_4_the_planner_reads_the_best_proposal_of_the_tool(tree):
    tool, planner = tree.tables["tool"], tree.tables["planner"]
    total = np.asarray(tool.rewards.team + tool.rewards.local)
    np.testing.assert_array_equal(tool.chosen, total.argmax(-1))
    assert (total.max(-1) > total.min(-1)).mean() > 0.5
    for t in range(GAME.max_turns):
        for e in range(E):
            if not planner.where[t, e, 0]:
                continue
            route = GAME.tokenizer.decode(tool.responses.tokens[t, e, 0, int(tool.chosen[t, e, 0])]).split()[:-1]
            read = GAME.tokenizer.decode(planner.prompt.ids[t, e, 0]).split("|")[1].split()
            assert len(read) == len(route) + 2  # the moves, the status, the reader
            assert read[-1] == "planner"
            if route:
                assert read[0] == route[0][0]  # R1 is proposed as R


def columns(rows):
    """The table of a compiled rollout."""
    return from_pool(jax.jit(pooled)(rows), 8)[1]


def test_the_second_agents_branches_are_paid_each_for_its_own(tree):
    """The order bug: paid after the winner was applied to all branches, the second agent's K rewards would be equal."""
    samples = columns(rows_from(GAME, tree.tables, jnp.arange(E)))
    advantages, metrics, tied = advantages_for(make_recipe("at_grpo"), samples)
    planner = (samples.agent == 1) & samples.where
    paid = np.asarray(tree.tables["planner"].rewards.team)
    where = np.asarray(tree.tables["planner"].where)
    assert (paid.std(-1)[where] > 0).mean() > 0.5
    assert np.abs(np.asarray(advantages)[planner]).mean() > 0.3
    assert float(metrics["mixed_prompt_share"]) == 0.0
    # each branch's pay is that of its own list, played from the state that the tool's choice led to
    act = jax.jit(jax.vmap(jax.vmap(lambda s, t, w: GAME.rewards(s, GAME.act(s, "planner", t, w), "planner"), (None, 0, 0))))
    previous = jax.tree.map(lambda x: x[0, :, 0], tree.states)  # start of turn 1; a planner's pay does not depend on the proposal
    response = tree.tables["planner"].responses
    again = act(previous, response.tokens[1, :, 0], response.where[1, :, 0])
    np.testing.assert_allclose(again.team[where[1, :, 0]], paid[1, :, 0][where[1, :, 0]], atol=1e-6)


# --- law 3: who is compared with whom --------------------------------------------------------------------------------------


def test_law_3_in_a_tree_every_group_has_one_prompt_and_keys_are_injective(tree):
    rows = rows_from(GAME, tree.tables, jnp.arange(E))
    identities = np.stack([rows.instance, rows.agent, rows.turn], -1)
    assert len(np.unique(identities, axis=0)) == len(identities) == E * 2 * GAME.max_turns
    samples = columns(rows)
    assert len(np.unique(np.asarray(samples.trajectory))) == E
    _, metrics, _ = advantages_for(make_recipe("at_grpo"), samples)
    assert float(metrics["mixed_prompt_share"]) == 0.0
    assert int(metrics["groups"]) == int(rows.where.sum())
    assert int(metrics["groups_of_one"]) == 0


def test_law_3_in_parallel_sampling_later_turns_are_mixed_and_the_metrics_say_so(instances):
    script = scripted_player(GAME, noise=0.7)
    run = jax.jit(lambda i: play(GAME, script, i, jnp.arange(E), jax.random.key(1), trajectories=K))
    tables = run(instances).tables
    rows = rows_from(GAME, tables, jnp.arange(E))
    first_tool = (rows.turn == 0) & (rows.agent == 0)
    recipe = make_recipe("grpo", group_by="instance,agent,turn", returns="immediate")
    shares = [
        float(advantages_for(recipe, columns(rows._replace(where=rows.where & keep)))[1]["mixed_prompt_share"])
        for keep in (first_tool, rows.turn > 0)
    ]
    assert shares[0] == 0.0
    assert shares[1] > 0.5
    ids = np.asarray(tables["tool"].prompt.ids[0])
    assert np.all(ids == ids[:, :1])  # all K plays of one map begin alike
    assert len(np.unique(columns(rows).trajectory)) == E * K


# --- stages, picks, budgets ----------------------------------------------------------------------------------------------


def test_a_game_written_for_a_test_is_a_game():
    assert isinstance(FLOW, Game)


def test_roles_of_one_stage_read_the_same_state_and_the_next_stage_reads_them():
    rollout = flow(*limits())
    said = {role: np.asarray(rollout.tables[role].responses.tokens[:, :, 0, 0, 0]) for role in ("ann", "bob", "cy")}
    prompts = {role: np.asarray(rollout.tables[role].prompt.ids[:, :, 0, :3]) - 10 for role in said}
    cy, bob, ann = 0, 1, 2
    assert np.all(prompts["ann"][0] == 0)
    np.testing.assert_array_equal(prompts["ann"], prompts["bob"])  # bob does not hear ann in the same turn
    for role in ("ann", "bob"):
        for column, name in ((cy, "cy"), (bob, "bob"), (ann, "ann")):
            np.testing.assert_array_equal(prompts[role][1:, :, column], said[name][:-1])
    np.testing.assert_array_equal(prompts["cy"][:, :, ann], said["ann"])
    np.testing.assert_array_equal(prompts["cy"][:, :, bob], said["bob"])


def test_roles_of_one_stage_are_paid_for_what_they_did_together():
    tables = flow(*limits()).tables
    said = {role: tables[role].responses.tokens[..., 0].astype(jnp.float32) for role in tables}
    before = jnp.concatenate([jnp.zeros_like(said["cy"][:1]), said["cy"][:-1]])
    for role in ("ann", "bob"):
        np.testing.assert_array_equal(tables[role].rewards.team, said["ann"] + said["bob"] + before)
        np.testing.assert_array_equal(tables[role].rewards.local, -2 * said[role])


@dataclasses.dataclass(frozen=True)
class Progress(Workflow):
    """Pays the team what a stage has added to what is said, and its speaker the number of turns that were closed before it."""

    def rewards(self, before, after, role):
        gained = (jnp.sum(after.said) - jnp.sum(before.said)).astype(jnp.float32)
        return Rewards(gained, before.closed.astype(jnp.float32), {}, jnp.bool_(True))


@pytest.mark.parametrize("branches", [1, 2])
def test_roles_are_paid_for_what_changed_since_their_stage_began(branches):
    """Both sides of the reward: the state that a stage found, and the one that it left."""
    starts, env = limits()
    tables = play(Progress(), numbers, starts, env, jax.random.key(0), branches=branches).tables
    said = {role: np.asarray(table.responses.tokens[..., 0], np.float32) for role, table in tables.items()}
    was = {role: np.concatenate([np.zeros_like(x[:1]), x[:-1]])[..., :1] for role, x in said.items()}  # the first branch is played
    gained = {role: said[role] - was[role] for role in said}
    together = gained["ann"] + gained["bob"]
    turns = np.broadcast_to(np.arange(FLOW.max_turns)[:, None, None, None], said["cy"].shape)
    if branches == 1:
        for role in ("ann", "bob"):
            np.testing.assert_array_equal(tables[role].rewards.team, together)
    np.testing.assert_array_equal(tables["cy"].rewards.team, gained["cy"])
    for role in tables:
        np.testing.assert_array_equal(tables[role].rewards.local, turns)


def test_each_role_speaks_within_its_own_budget():
    tables = flow(*limits()).tables
    assert {role: t.responses.tokens.shape[-1] for role, t in tables.items()} == {"ann": 1, "bob": 2, "cy": 3}
    wide = pad_to(tables["ann"], 6, 3, 1, FLOW.tokenizer.pad_id)
    np.testing.assert_array_equal(wide.prompt.where[0, 0, 0], [False, False, True, True, True, True])
    np.testing.assert_array_equal(wide.prompt.ids[..., 2:], tables["ann"].prompt.ids)
    np.testing.assert_array_equal(wide.responses.where[0, 0, 0, 0], [True, False, False])
    np.testing.assert_array_equal(wide.responses.tokens[..., :1], tables["ann"].responses.tokens)
    assert flatten_rows(wide).prompt.ids.shape == (FLOW.max_turns * 6, 6)


@pytest.mark.parametrize("asked", [(3, 3, 1), (6, 0, 1), (6, 3, 2)])
def test_law_10_a_table_cannot_be_padded_to_less_or_to_other_branches(asked):
    table = flow(*limits()).tables["ann"]
    with pytest.raises(ValueError, match="cannot pad prompts"):
        pad_to(table, *asked, FLOW.tokenizer.pad_id)


def test_the_greedy_pick_compares_alpha_team_plus_local():
    """A token pays the team 1 and costs 2: with alpha 1 the lowest is best, with alpha 3 the highest."""
    for alpha, best in ((1.0, "argmin"), (3.0, "argmax")):
        table = flow(*limits(), branches=4, pick="greedy", alpha=alpha).tables["cy"]
        tokens = np.asarray(table.responses.tokens[..., 0])
        np.testing.assert_array_equal(table.chosen, getattr(tokens, best)(-1))
        assert len(np.unique(table.chosen)) > 1


def test_picks_first_random_and_greedy_with_ties():
    rewards = jnp.asarray([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    keys = row_keys(jax.random.key(0), jnp.arange(2), 0, 0, 4)
    np.testing.assert_array_equal(pick_branch(rewards, keys, "greedy"), [1, 0])
    np.testing.assert_array_equal(pick_branch(rewards, keys, "first"), [0, 0])
    many = row_keys(jax.random.key(0), jnp.arange(2000), 0, 0, 4)
    counts = np.bincount(pick_branch(jnp.zeros((2000, 4)), many, "random"), minlength=4)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    with pytest.raises(ValueError, match="unknown pick 'best'; the picks are greedy, first, random"):
        pick_branch(rewards, keys, "best")


# --- early stop, aborted episodes, identities ---------------------------------------------------------------------------------


def test_law_9_d2_an_episode_that_ends_early_freezes_alone_and_one_that_cannot_be_played_is_aborted():
    """The unplayable ones are not over: only that they are unplayable keeps their rows out and their states as they were."""
    asked = jnp.asarray([1, 2, 3, 9, -2, -9], jnp.int32)
    rollout = flow(asked, jnp.arange(6))
    played = np.asarray(rollout.tables["cy"].where[:, :, 0])
    np.testing.assert_array_equal(played.sum(0), [1, 2, 3, 3, 0, 0])
    np.testing.assert_array_equal(rollout.episodes.turns[:, 0], [1, 2, 3, 3, 0, 0])
    np.testing.assert_array_equal(rollout.episodes.aborted[:, 0], [False, False, False, False, True, True])
    assert not np.asarray(rollout.states.closed[:, 4:]).any()
    assert not np.asarray(rollout.states.said[:, 4:]).any()
    _, table = from_pool(jax.jit(pooled)(rows_from(FLOW, rollout.tables, jnp.arange(6))), 8)
    assert set(table.instance[table.where]) == {0, 1, 2, 3}
    np.testing.assert_array_equal(rollout.episodes.done[:4, 0], [True, True, True, False])
    np.testing.assert_array_equal(rollout.states.closed[:, 0, 0], [1, 1, 1])
    np.testing.assert_array_equal(rollout.states.said[2, 0, 0], rollout.states.said[0, 0, 0])
    for role in rollout.tables:
        np.testing.assert_array_equal(rollout.tables[role].where[:, :, 0], played)


def test_law_6_an_episode_depends_on_its_own_identity_only():
    whole = flow(*limits(), branches=3, pick="random")
    order = jnp.asarray([4, 1, 5])
    part = flow(limits()[0][order], order, branches=3, pick="random")
    for role in whole.tables:
        np.testing.assert_array_equal(part.tables[role].responses.tokens, whole.tables[role].responses.tokens[:, order])
        np.testing.assert_array_equal(part.tables[role].chosen, whole.tables[role].chosen[:, order])
    np.testing.assert_array_equal(part.states.said, whole.states.said[:, order])


def test_law_6_no_two_draws_of_a_rollout_share_a_key():
    key, env = jax.random.key(0), jnp.arange(7)
    data = [jax.random.key_data(row_keys(key, env, t, r, 5)).reshape(-1, 2) for t in range(4) for r in range(3)]
    data = np.concatenate([np.asarray(d) for d in data])
    assert len(np.unique(data, axis=0)) == len(data) == 7 * 4 * 3 * 5
    single = row_keys(key, jnp.asarray([3]), 2, 1, 5)
    np.testing.assert_array_equal(
        jax.random.key_data(single)[0], jax.random.key_data(row_keys(key, env, 2, 1, 5))[3]
    )


def test_law_6_no_candidate_of_one_play_shares_a_key_with_one_of_another():
    env, number = jnp.zeros(3, jnp.int32), jnp.arange(3)
    data = np.asarray(jax.random.key_data(row_keys(jax.random.key(0), env, 2, 1, 2, trajectory=number, trajectories=3)))
    assert len(np.unique(data.reshape(6, -1), axis=0)) == 6


def test_trajectories_of_one_instance_are_different_plays():
    tokens = np.asarray(flow(*limits(), trajectories=4).tables["cy"].responses.tokens[..., 0, :])
    assert tokens.shape[:3] == (3, 6, 4)
    assert len(np.unique(tokens.transpose(1, 2, 0, 3).reshape(24, -1), axis=0)) == 24


def test_the_random_player_stops_at_the_first_stop_word():
    game = JointLetter(letters=2)
    run = jax.jit(lambda keys: random_player(game)("first", None, None, keys))
    out = jax.tree.map(np.asarray, run(row_keys(jax.random.key(0), jnp.arange(40), 0, 0, 50)))
    tokens, where = out.tokens.reshape(-1, 2), out.where.reshape(-1, 2)
    stopped = tokens[:, 0] == game.stop_id
    assert stopped.any()
    assert where[:, 0].all()
    np.testing.assert_array_equal(where[:, 1], ~stopped)
    np.testing.assert_array_equal(out.truncated.reshape(-1), ~((tokens == game.stop_id) & where).any(-1))
    counts = np.bincount(tokens[:, 0], minlength=game.tokenizer.vocab_size)
    assert counts[0] == 0  # padding is never said
    assert scipy.stats.chisquare(counts[1:]).pvalue > 1e-3


def test_players_draw_one_token_where_the_episode_is_over(monkeypatch, instances):
    from marl_llm.rollout import players

    asked = []

    def sample(*given, budgets, **options):
        asked.append(np.asarray(budgets))

    monkeypatch.setattr(players, "sample", sample)
    monkeypatch.setattr(players, "serving_layout", lambda params: params)
    states = jax.vmap(FLOW.reset)(instances)
    role = speaking_order(FLOW)[0]
    prompt = jax.vmap(lambda state: FLOW.observe(state, role))(states)
    over = np.arange(prompt.ids.shape[0]) % 2 == 1
    monkeypatch.setattr(type(FLOW), "done", lambda self, state: state)
    respond = players.model_player(FLOW, {role: "m"}, {"m": ModelConfig(8, 8, 1, 1, 1, 8, 8)}, {"m": {}}, 1.0)
    respond(role, jnp.asarray(over), prompt, jax.random.split(jax.random.key(0), (over.size, 3)))
    most = role_of(FLOW, role).response_tokens
    assert asked[0].tolist() == [[1 if gone else most] * 3 for gone in over]


@pytest.mark.parametrize(("rewards", "best"), [("mixed", "argmin"), ("team", "argmax"), ("local", "argmin")])
def test_the_greedy_pick_compares_the_reward_of_the_recipe(rewards, best):
    """A token pays the team 1 and costs its role 2."""
    recipe = make_recipe("at_grpo", rewards=rewards, group_size=4)
    sampling = {name: value for name, value in sampling_of(recipe).items() if name != "trajectories"}
    table = flow(*limits(), **sampling).tables["cy"]
    np.testing.assert_array_equal(table.chosen, getattr(np.asarray(table.responses.tokens[..., 0]), best)(-1))
