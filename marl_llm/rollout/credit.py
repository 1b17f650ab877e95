"""Exact counterfactual credit: what a team would have got without one response, everything else drawn with the same randomness.

Draws are folded by identity and states are values, so an episode can be played again with one response exchanged. The players that speak
after it read other prompts and draw from the same keys. The difference of the team's last reward is what this response added: the
difference reward of Wolpert and Tumer (2002), and COMA's advantage (Foerster et al. 2018, Eq. 4), measured instead of learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from marl_llm.games import Game, speaking_order
from marl_llm.rollout.play import Player, play, row_keys
from marl_llm.rollout.table import CompiledRollout, Credit


def last_team_reward(game: Game, rollout: CompiledRollout) -> Float[Array, "E B"]:
    """The team reward of the last response of each episode, which `returns="outcome"` reads too; 0 where nobody spoke."""
    alive = by_call(game, {role: table.where for role, table in rollout.tables.items()})
    team = by_call(game, {role: table.rewards.team[..., 0] for role, table in rollout.tables.items()})
    last = jnp.max(jnp.where(alive, jnp.arange(len(alive))[:, None, None], -1), axis=0)
    return jnp.where(last >= 0, jnp.take_along_axis(team, jnp.maximum(last, 0)[None], axis=0)[0], 0)


def by_call(game: Game, columns: dict[str, Array]) -> Array:
    """Columns `[T, E, B]` of all roles as `[C, E, B]`: the calls of an episode in the order of speaking, C = T N."""
    parts = jnp.stack([columns[role] for role in speaking_order(game)], axis=1)
    return parts.reshape((-1, *parts.shape[2:]))


def silence(game: Game, tokens: Int[Array, "E K R"]) -> tuple[Int[Array, "E K R"], Bool[Array, "E K R"]]:
    """An empty response: the stop token alone."""
    first = jnp.broadcast_to(jnp.arange(tokens.shape[-1]) == 0, tokens.shape)
    return jnp.where(first, game.stop_id, game.tokenizer.pad_id).astype(tokens.dtype), first


def exchanging(game: Game, player: Player, exchanged: Key[Array, "E"], other: Key[Array, "E"], exchange: str) -> Player:
    """A player whose one response, that of the key `exchanged`, is drawn from the key `other` or left empty; all others as they were."""

    def respond(role, states, prompt, keys):
        this = jnp.all(jax.random.key_data(keys) == jax.random.key_data(exchanged)[:, None], axis=-1)  # [E, K]
        if exchange == "candidate":
            return player(role, states, prompt, jnp.where(this, other[:, None], keys))
        drawn = player(role, states, prompt, keys)
        tokens, where = (jnp.where(this[..., None], new, old) for new, old in zip(silence(game, drawn.tokens), (drawn.tokens, drawn.where)))
        return drawn._replace(tokens=tokens, where=where)

    return respond


def chosen_calls(keys: Key[Array, "E"], alive: Bool[Array, "C E"], replays: int | None) -> Int[Array, "X E"]:
    """Which calls of each episode are replayed, X of them: all, or as many as asked among those that were made, by identity."""
    calls = len(alive)
    if replays is None or replays >= calls:
        return jnp.broadcast_to(jnp.arange(calls)[:, None], alive.shape)
    place = jax.vmap(lambda key: jax.random.uniform(key, (calls,)), out_axes=1)(keys)
    return jnp.argsort(jnp.where(alive, place, 2.0), axis=0)[:replays]


def counterfactual_credit(
    game: Game,
    player: Player,
    instances,
    env: Int[Array, "E"],
    key: Key[Array, ""],
    rollout: CompiledRollout,
    *,
    exchange: str = "candidate",
    replays: int | None = None,
    step: Int[Array, ""] | int = 0,
) -> dict[str, Credit]:
    """Credit of every response of a rollout without branches, by role: one more `vmap` of `play`, over which call is exchanged.

    Args:
      game, player, instances, env, key, step: those that `rollout` was played with.
      exchange: "candidate": the response is drawn anew, as the second candidate of its prompt (branch B + trajectory); "silence": it is
        empty, the stop token alone.
      replays: at most how many calls of each episode are replayed, drawn by identity; None: every call.

    Raises:
      ValueError: the rollout has several branches, of which only one is played on.
    """
    first = next(iter(rollout.tables.values()))
    if first.responses.tokens.shape[3] != 1:
        raise ValueError("counterfactual_credit replays whole episodes: play with branches=1 and several trajectories")
    order, (turns, e, b) = speaking_order(game), first.where.shape
    agents, rows, calls = len(order), e * b, turns * len(order)
    numbers, trajectory = jnp.repeat(env, b), jnp.tile(jnp.arange(b), e)
    alive = by_call(game, {role: table.where for role, table in rollout.tables.items()}).reshape(calls, rows)
    drawing = row_keys(key, numbers, agents, calls, 1, trajectory, b, step)[:, 0]  # of no response: there is neither this agent nor request
    chosen = chosen_calls(drawing, alive, replays)

    def replay(call):
        keys = row_keys(key, numbers, call % agents, call, 2, trajectory, b, step)
        other = exchanging(game, player, keys[:, 0], keys[:, 1], exchange)
        played = play(game, other, instances, env, key, trajectories=b, step=step)
        drawn = [jnp.sum(t.responses.where & t.where[..., None, None], axis=(0, 3, 4)) for t in played.tables.values()]
        return last_team_reward(game, played).reshape(rows), sum(drawn).reshape(rows)

    without, tokens = jax.vmap(replay)(chosen)
    replayed = jnp.take_along_axis(alive, chosen, axis=0)
    gained = jnp.where(replayed, last_team_reward(game, rollout).reshape(rows) - without, 0)

    def by_role(x) -> dict[str, Array]:
        every = jnp.zeros((calls, rows), x.dtype).at[chosen, jnp.arange(rows)].set(x).reshape(turns, agents, e, b)
        return {role: every[:, agent] for agent, role in enumerate(order)}

    columns = [by_role(x) for x in (gained, jnp.where(replayed, without, 0), replayed, jnp.where(replayed, tokens, 0))]
    return {role: Credit(*(column[role] for column in columns)) for role in order}


def shapley_values(worth: Callable[[frozenset[int]], float], agents: int) -> list[float]:
    """Shapley values of up to five agents, exact: each one's mean gain over all orders in which the team can come together.

    φ_i = Σ_{S ∌ i} |S|! (N − |S| − 1)! / N! · (v(S ∪ {i}) − v(S))   (Shapley 1953)

    Args:
      worth: what a coalition gets, given the agents in it; for example the mean reward of replays in which all others are silent.
      agents: N. `worth` is asked once for each of the 2^N coalitions.

    Returns:
      N values that sum to worth(all) − worth(none).

    Raises:
      ValueError: `agents` is not 1 to 5.

    >>> shapley_values(lambda team: float(len(team) == 2), 2)
    [0.5, 0.5]
    """
    if not 1 <= agents <= 5:
        raise ValueError(f"agents={agents}: Shapley values are enumerated over 2^N coalitions, for 1 to 5 agents.")
    teams = [frozenset(i for i in range(agents) if bits >> i & 1) for bits in range(2**agents)]
    got = {team: float(worth(team)) for team in teams}
    orders = math.factorial(agents)
    share = [math.factorial(size) * math.factorial(agents - size - 1) / orders for size in range(agents)]
    return [sum(share[len(team)] * (got[team | {i}] - got[team]) for team in teams if i not in team) for i in range(agents)]
