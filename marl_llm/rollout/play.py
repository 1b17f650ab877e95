"""Plays a device game with a team: the whole rollout as one pure function `(players, instances, key) -> rollout`.

Tree sampling is Algorithm 1 of Stronger-MAS: at each turn, for each role, K responses are drawn from one prompt, each is scored as a
branch of its own, one is played, and the next role observes what it did. Parallel sampling plays K whole trajectories per
environment, each from its own prompts. States are values: a branch is the state that `act` returns, and choosing is indexing.

Every draw's key is folded from (key, step, task, agent, request, branch), and by the sampler from the position, so a sample does not
depend on the batch, slot or device (law 6). It is the identity that a hosted play of the game gives its requests, so that both draw alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from marl_llm.games import Competitive, Game, Prompt, speaking_order
from marl_llm.rollout.table import CompiledRollout, Episodes, Table
from marl_llm.sampling import Responses, identity_key, random_pick

# (role, states [E], prompts [E], keys [E, K]) -> K responses per prompt
Player = Callable[[str, object, Prompt, Key[Array, "E K"]], Responses]

PICKS = ("greedy", "first", "random")


def row_keys(
    key: Key[Array, ""],
    env: Int[Array, "E"],
    agent: Int[Array, "E"] | int,
    request_number: Int[Array, "E"] | Int[Array, ""] | int,
    branches: int,
    trajectory: Int[Array, "E"] | int = 0,
    trajectories: int = 1,
    step: Int[Array, ""] | int = 0,
) -> Key[Array, "E K"]:
    """Keys by identity, see `sampling.identity_key`: (step, number of the instance, role in the order of speaking, request, branch).

    The request's number counts the responses of one play, T N of them: `turn * N + agent`. The branch counts candidates and the B plays
    of an instance: `candidate * B + trajectory`.
    """
    branch = jnp.arange(branches) * trajectories + jnp.asarray(trajectory)[..., None]
    numbers = [x[..., None] if x.ndim == 1 else x for x in map(jnp.asarray, (step, env, agent, request_number))] + [branch]
    shape = (env.shape[0], branches)
    identity = jnp.stack([jnp.broadcast_to(x, shape) for x in numbers], axis=-1)
    return jax.vmap(jax.vmap(lambda one: identity_key(key, one, len(numbers))))(identity)


def pick_branch(
    rewards: Float[Array, "E K"], keys: Key[Array, "E K"], pick: str
) -> Int[Array, "E"]:
    """The branch to play: 'greedy' the highest reward (ties: the lowest index), 'first', or 'random'. Keys are folded."""
    if pick == "greedy":
        return jnp.argmax(rewards, axis=-1).astype(jnp.int32)
    if pick == "first":
        return jnp.zeros(rewards.shape[:1], jnp.int32)
    if pick == "random":
        return jax.vmap(lambda key: random_pick(key, rewards.shape[1]))(keys[:, 0])
    raise ValueError(f"unknown pick {pick!r}; the picks are {', '.join(PICKS)}")


def _where(condition: Array, new, old):
    """Per-row choice between two batched pytrees."""
    return jax.tree.map(lambda n, o: jnp.where(condition.reshape(condition.shape + (1,) * (n.ndim - 1)), n, o), new, old)


def _pay_of(game: Game, role: str) -> Callable:
    return lambda before, after: game.rewards(before, after, role)


def _split(environments: int, plays: int, x: Array) -> Array:
    return x.reshape((x.shape[0], environments, plays, *x.shape[2:]))


def _act_of(game: Game, role: str) -> Callable:
    return lambda state, tokens, where: game.act(state, role, tokens, where)


def results_of(game: Game, state, shape: tuple[int, int]) -> dict[str, Float[Array, "E B"]] | None:
    """Role -> what its seat won, of the last states; None of a game whose seats share one outcome."""
    if not isinstance(game, Competitive):
        return None
    return {role.name: jax.vmap(lambda s, role=role: game.result(s, role.name))(state).reshape(shape) for role in game.roles}


def play(
    game: Game,
    player: Player,
    instances,
    env: Int[Array, "E"],
    key: Key[Array, ""],
    *,
    trajectories: int = 1,
    branches: int = 1,
    pick: str = "first",
    alpha: float = 1.0,
    local_weight: float | Array = 1.0,
    step: Int[Array, ""] | int = 0,
) -> CompiledRollout:
    """One episode per environment and trajectory, turn by turn, as one traceable function.

    Args:
      game: a device game. player: answers prompts; see `Player`.
      instances: pytree with leading E. env: their numbers, which enter every key. step: of training; enters every key too.
      key: the rollout's key; folded, not consumed.
      trajectories: B plays of each instance (parallel sampling). branches: K responses to each prompt (tree sampling).
      pick: which branch is played. alpha, local_weight: weights of team and own reward where 'greedy' compares; `Recipe.reward_weights`.
    Returns:
      `CompiledRollout` with leading axes `[T, E, B]`. Once an episode is over its rows have `where=False` and its state stays; the
      episode of an instance that cannot be played is aborted: none of its rows counts (law 9).
    """
    e, b = env.shape[0], trajectories
    numbers, trajectory = jnp.repeat(env, b), jnp.tile(jnp.arange(b), e)
    instances = jax.tree.map(lambda x: jnp.repeat(x, b, axis=0), instances)
    valid = jax.vmap(game.valid)(instances)
    state = jax.vmap(game.reset)(instances)
    speakers = speaking_order(game)

    def turn(carry, t):
        state, turns = carry
        turns = turns + (valid & ~jax.vmap(game.done)(state))
        records = {}
        for stage in game.stages:
            before = state
            alive = valid & ~jax.vmap(game.done)(before)
            answers = {}
            for role in stage:
                with jax.named_scope(f"observe_{role}"):
                    prompt = jax.vmap(lambda s, role=role: game.observe(s, role))(before)
                agent = speakers.index(role)
                keys = row_keys(key, numbers, agent, t * len(speakers) + agent, branches, trajectory, b, step)
                with jax.named_scope(f"respond_{role}"):
                    answers[role] = (prompt, player(role, before, prompt, keys), keys)
            scored = {}
            for role in stage:
                prompt, responses, keys = answers[role]
                after = jax.vmap(jax.vmap(_act_of(game, role), (None, 0, 0)))(state, responses.tokens, responses.where)
                if len(stage) == 1 or branches > 1:
                    rewards = jax.vmap(jax.vmap(_pay_of(game, role), (None, 0)))(before, after)
                    chosen = pick_branch(alpha * rewards.team + local_weight * rewards.local, keys, pick)
                    scored[role] = (rewards, chosen)
                else:
                    chosen = jnp.zeros((e * b,), jnp.int32)
                picked = jax.tree.map(lambda x: x[jnp.arange(e * b), chosen], after)  # noqa: B023
                state = _where(alive, picked, state)
            for role in stage:
                prompt, responses, _ = answers[role]
                if role in scored:
                    rewards, chosen = scored[role]
                else:  # roles that act at once are paid for what they did together
                    rewards = jax.tree.map(lambda x: x[:, None], jax.vmap(_pay_of(game, role))(before, state))
                    chosen = jnp.zeros((e * b,), jnp.int32)
                records[role] = Table(prompt, responses, rewards, chosen, alive)
        return (state, turns), (records, state)

    start = (state, jnp.zeros((e * b,), jnp.int32))
    (state, turns), (records, states) = jax.lax.scan(turn, start, jnp.arange(game.max_turns))
    split = functools.partial(_split, e, b)
    columns = (jax.vmap(game.outcome)(state), turns, jax.vmap(game.done)(state), ~valid)
    episodes = Episodes(*(x.reshape(e, b) for x in columns), results_of(game, state, (e, b)))
    return CompiledRollout(jax.tree.map(split, records), episodes, jax.tree.map(split, states))
