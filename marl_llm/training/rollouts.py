"""Compiled rollouts on the mesh: the pure functions of `marl_llm.rollout`, sharded over environments and jit-compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from marl_llm.algorithms import Recipe
from marl_llm.games import Game, split_index
from marl_llm.models import SAMPLE
from marl_llm.rollout import CompiledRollout, Episodes, Player, counterfactual_credit, play
from marl_llm.training.batch import Pool, pooled, rows_from
from marl_llm.training.mesh import data_axis, over_data, position
from marl_llm.training.processes import replicated

TRAIN = split_index("train")


class Played(NamedTuple):
    """What one compiled rollout yields: tokens and columns, a few figures, and the whole record for transcripts."""

    pool: Pool
    summary: dict[str, Float[Array, ""]]
    rollout: CompiledRollout
    instances: object


def share_of(mesh: Mesh, environments: int, option: str) -> int:
    """Environments per device. Raises `ValueError` naming the option when they do not divide."""
    devices = mesh.shape["data"] if data_axis(mesh) else 1
    if environments < 1 or environments % devices:
        raise ValueError(f"{option}={environments} do not divide over {devices} devices; choose a multiple of {devices}")
    return environments // devices


def summarise(rollout: CompiledRollout) -> dict[str, Float[Array, ""]]:
    """Figures of a rollout: success, turns, samples, tokens, and per role rewards, components, entropy, form and truncation.

    Rewards are means over all sampled branches of the rows that count; entropy is per token, in nats.
    """
    played = ~rollout.episodes.aborted

    def share(x):
        return jnp.sum(jnp.where(played, x, 0)) / jnp.maximum(jnp.sum(played), 1)

    figures = {
        "success": share(rollout.episodes.outcome >= 1.0),
        "turns": share(rollout.episodes.turns),
        "aborted": jnp.mean(rollout.episodes.aborted),
    }
    samples = tokens = prompts = prompt_tokens = 0
    for role, table in rollout.tables.items():
        where = jnp.broadcast_to(table.where[..., None], table.rewards.team.shape)
        token_where = table.responses.where & where[..., None]

        def mean(x, where=where):
            return jnp.sum(jnp.where(where, x, 0)) / jnp.maximum(jnp.sum(where), 1)

        figures |= {
            f"role/{role}/team": mean(table.rewards.team),
            f"role/{role}/local": mean(table.rewards.local),
            f"role/{role}/well_formed": mean(table.rewards.well_formed),
            f"role/{role}/truncated": mean(table.responses.truncated),
            f"role/{role}/entropy": jnp.sum(jnp.where(token_where, table.responses.entropy, 0))
            / jnp.maximum(jnp.sum(token_where), 1),
        }
        figures |= {f"role/{role}/component/{name}": mean(part) for name, part in table.rewards.components.items()}
        samples, tokens = samples + jnp.sum(where), tokens + jnp.sum(token_where)
        prompts = prompts + jnp.sum(table.where)
        prompt_tokens = prompt_tokens + jnp.sum(table.prompt.where & table.where[..., None])
    figures |= summarise_credit(rollout)
    return figures | {"samples": samples, "sampled_tokens": tokens, "prompts": prompts, "prompt_tokens": prompt_tokens}


def summarise_credit(rollout: CompiledRollout) -> dict[str, Float[Array, ""]]:
    """Replays and the tokens that they drew, and per role the mean credit of its replayed responses; {} where nothing was replayed."""
    credits = {role: table.credit for role, table in rollout.tables.items() if table.credit is not None}
    if not credits:
        return {}
    counts = {role: jnp.sum(credit.replayed) for role, credit in credits.items()}
    figures = {f"role/{role}/credit": jnp.sum(credit.gained) / jnp.maximum(counts[role], 1) for role, credit in credits.items()}
    return figures | {"replays": sum(counts.values()), "replayed_tokens": sum(jnp.sum(credit.tokens) for credit in credits.values())}


def make_rollout(game: Game, mesh: Mesh, player_of: Callable[[dict], Player], environments: int, option: str = "tasks", **options):
    """Builds `rollout(params, first, key, split, step) -> Played`, jit-compiled: instances `first ... first + environments` of a split.

    Args:
      player_of: `params -> Player`, for example `model_player(game, ...)`; `params` is any pytree.
      option: the option to name when environments do not divide over the devices.
      options: of `marl_llm.rollout.play`; see `sampling_of`. With `exchange` and `replays`, those of `counterfactual_credit`, every table
        has the credit of its responses.
    Instance `i` is drawn from the key folded with `i`: the data position is `first`. `step` enters the key of every draw, so that a task
    that comes again is played anew. One compilation serves all splits and steps.
    """
    local = _local_rollout(game, player_of, share_of(mesh, environments, option), data_axis(mesh), options)
    by_env = P(None, "data")
    specs = (P("data"), CompiledRollout(by_env, Episodes(*(P("data"),) * 5), by_env), P("data"))
    mapped = over_data(local, mesh, SAMPLE, in_specs=(P(),) * 5, out_specs=specs)

    def run(params, first, key, split=TRAIN, step=0):
        rows, rollout, instances = mapped(params, first, key, *(jnp.asarray(x, jnp.int32) for x in (split, step)))
        pool, summary = replicated((pooled(rows), summarise(rollout)), mesh)  # what every process reads
        return Played(pool, summary, rollout, instances)

    return jax.jit(run)


def make_choice(game: Game, mesh: Mesh) -> Callable:
    """Builds `choose(first, second, index, numbers) -> Played`, jit-compiled: environments `index` of two rollouts, one behind the other.

    `numbers` are those of the chosen tasks; the figures are those of the first rollout.
    """
    def choose(first: Played, second: Played, index: Int[Array, "E"], numbers: Int[Array, "E"]) -> Played:
        def taken(axis: int, a, b):
            return jax.tree.map(lambda x, y: jnp.take(jnp.concatenate([x, y], axis), index, axis), a, b)

        a, b = first.rollout, second.rollout
        rollout = CompiledRollout(taken(1, a.tables, b.tables), taken(0, a.episodes, b.episodes), taken(1, a.states, b.states))
        pool = replicated(pooled(rows_from(game, rollout.tables, numbers)), mesh)
        return Played(pool, first.summary, rollout, taken(0, first.instances, second.instances))

    return jax.jit(choose)


def make_join(game: Game, mesh: Mesh) -> Callable:
    """Builds `join(parts, numbers) -> Played`, jit-compiled: rollouts one behind the other, and the figures of all of them.

    `numbers` are those of all their tasks.
    """
    def join(parts: tuple[Played, ...], numbers: Int[Array, "E"]) -> Played:
        def joined(axis: int, *trees):
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis), *trees)

        tables, episodes, states = zip(*(part.rollout for part in parts))
        rollout = CompiledRollout(joined(1, *tables), joined(0, *episodes), joined(1, *states))
        pool, summary = replicated((pooled(rows_from(game, rollout.tables, numbers)), summarise(rollout)), mesh)
        return Played(pool, summary, rollout, joined(0, *(part.instances for part in parts)))

    return jax.jit(join)


def make_team_rollouts(game: Game, mesh: Mesh, player_of: Callable[[dict], Player], environments: int, **options) -> Callable:
    """Builds `rollouts(params, first, key, split, step) -> Played` of several teams at once, jit-compiled.

    The same as `make_rollout` for each of them; `mesh` is one of teams, and every argument and result has a first axis of teams.
    """
    local = _local_rollout(game, player_of, environments, None, options)

    def run(*arguments):
        rows, rollout, instances = local(*arguments)
        return Played(pooled(rows), summarise(rollout), rollout, instances)

    return jax.jit(over_data(run, mesh, SAMPLE, in_specs=P(), out_specs=P()))


def _local_rollout(game: Game, player_of: Callable[[dict], Player], share: int, axis: str | None, options: dict) -> Callable:
    """`(params, first, key, split, step) -> (rows, rollout, instances)` of the `share` environments of one device along `axis`."""
    replayed = {name: options.pop(name) for name in ("exchange", "replays") if name in options}

    def local(params, first, key, split, step):
        data_key, sample_key = jax.random.split(key)
        env = first + position(axis) * share + jnp.arange(share)
        instances = jax.vmap(lambda i: game.instance(jax.random.fold_in(data_key, i), split))(env)
        player = player_of(params)
        rollout = play(game, player, instances, env, sample_key, step=step, **options)
        if replayed:
            credits = counterfactual_credit(game, player, instances, env, sample_key, rollout, step=step, **replayed)
            rollout = rollout._replace(tables={role: table._replace(credit=credits[role]) for role, table in rollout.tables.items()})
        return rows_from(game, rollout.tables, env), rollout, instances

    return local


def sampling_of(recipe: Recipe) -> dict:
    """How a recipe samples and what it replays, as options of `make_rollout`."""
    alpha, local_weight = recipe.reward_weights
    plays = {"trajectories": recipe.plays, "branches": recipe.candidates}
    replayed = {"exchange": recipe.exchange, "replays": recipe.replays} if recipe.returns == "counterfactual" else {}
    return plays | {"pick": recipe.pick, "alpha": alpha, "local_weight": local_weight} | replayed
