"""Rollouts on the mesh: the pure functions of `marl_llm.rollout`, sharded over environments and jit-compiled."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from marl_llm.algorithms import Recipe
from marl_llm.games import Game, split_index
from marl_llm.models import SAMPLE, ModelConfig
from marl_llm.rollout import Episodes, Player, Rollout, model_player, play, random_player
from marl_llm.training.mesh import data_axis, over_data, position
from marl_llm.training.update import Rows, buffer_sizes, rows_from

TRAIN = split_index("train")


class Batch(NamedTuple):
    """What one rollout yields: the training rows, a few figures, and the whole record for transcripts."""

    rows: Rows
    summary: dict[str, Float[Array, ""]]
    rollout: Rollout
    instances: object


def share_of(mesh: Mesh, environments: int, what: str) -> int:
    """Environments per device. Raises `ValueError` naming the option when they do not divide."""
    devices = mesh.shape["data"] if data_axis(mesh) else 1
    if environments < 1 or environments % devices:
        raise ValueError(f"{what}={environments} do not divide over {devices} devices; choose a multiple of {devices}")
    return environments // devices


def summarise(rollout: Rollout) -> dict[str, Float[Array, ""]]:
    """Figures of a rollout: success, turns, samples, tokens, and per role rewards, components, entropy, form and truncation.

    Rewards are means over all sampled branches of the rows that count; entropy is per token, in nats.
    """
    played = ~rollout.episodes.void
    share = lambda x: jnp.sum(jnp.where(played, x, 0)) / jnp.maximum(jnp.sum(played), 1)  # noqa: E731
    out = {
        "success": share(rollout.episodes.outcome >= 1.0),
        "turns": share(rollout.episodes.turns),
        "void": jnp.mean(rollout.episodes.void),
    }
    samples = tokens = prompts = prompt_tokens = 0
    for role, table in rollout.tables.items():
        where = jnp.broadcast_to(table.where[..., None], table.rewards.team.shape)
        token_where = table.responses.where & where[..., None]
        mean = lambda x, where=where: jnp.sum(jnp.where(where, x, 0)) / jnp.maximum(jnp.sum(where), 1)  # noqa: E731
        out |= {
            f"role/{role}/team": mean(table.rewards.team),
            f"role/{role}/local": mean(table.rewards.local),
            f"role/{role}/well_formed": mean(table.rewards.well_formed),
            f"role/{role}/truncated": mean(table.responses.truncated),
            f"role/{role}/entropy": jnp.sum(jnp.where(token_where, table.responses.entropy, 0))
            / jnp.maximum(jnp.sum(token_where), 1),
        }
        out |= {f"role/{role}/component/{name}": mean(part) for name, part in table.rewards.components.items()}
        samples, tokens = samples + jnp.sum(where), tokens + jnp.sum(token_where)
        prompts = prompts + jnp.sum(table.where)
        prompt_tokens = prompt_tokens + jnp.sum(table.prompt.where & table.where[..., None])
    return out | {"samples": samples, "sampled_tokens": tokens, "prompts": prompts, "prompt_tokens": prompt_tokens}


def _sharded(game: Game, mesh: Mesh, environments: int, what: str, player_of, **options):
    """The jit-compiled `(params, first, key, split) -> Batch` behind training rollouts and evaluation."""
    share = share_of(mesh, environments, what)
    prompt_tokens, response_tokens = buffer_sizes([game])

    def local(params, first, key, split):
        data_key, sample_key = jax.random.split(key)
        env = first + position(data_axis(mesh)) * share + jnp.arange(share)
        instances = jax.vmap(lambda i: game.instance(jax.random.fold_in(data_key, i), split))(env)
        rollout = play(game, player_of(params), instances, env, sample_key, **options)
        return rows_from(game, rollout.tables, env, prompt_tokens, response_tokens), rollout, instances

    by_env = P(None, "data")
    out = (P("data"), Rollout(by_env, Episodes(*(P("data"),) * 4), by_env), P("data"))
    mapped = over_data(local, mesh, SAMPLE, in_specs=(P(),) * 4, out_specs=out)

    def run(params, first, key, split=TRAIN):
        rows, rollout, instances = mapped(params, first, key, jnp.asarray(split, jnp.int32))
        return Batch(rows, summarise(rollout), rollout, instances)

    return jax.jit(run)


def make_rollout(
    game: Game,
    recipe: Recipe,
    assignment: dict[str, str],
    configs: dict[str, ModelConfig],
    mesh: Mesh,
    *,
    environments: int,
):
    """Builds `rollout(params, first, key) -> Batch`: fresh training instances `first ... first + environments`, sampled as the recipe says.

    `params` maps each model's name to its parameters. Instance `i` is drawn from the key folded with `i`: the data position is `first`.
    Raises `ValueError` on environments that do not divide, and on a recipe that samples with top-k or top-p, which this sampler does not.
    """
    if recipe.top_k is not None or recipe.top_p < 1:
        raise ValueError(
            f"recipe {recipe.name!r} samples with top_k={recipe.top_k}, top_p={recipe.top_p}, but the rollout draws from the whole "
            "distribution; set top_k=None and top_p=1"
        )
    player_of = lambda params: model_player(game, assignment, configs, params, recipe.temperature)  # noqa: E731
    return _sharded(game, mesh, environments, "rollout.environments", player_of, **_shape_of(recipe))


def make_random_rollout(game: Game, recipe: Recipe, mesh: Mesh, *, environments: int):
    """The same rollout with tokens that cost nothing (`random_player`): what is left of its time is prompts, game and rewards."""
    return _sharded(game, mesh, environments, "rollout.environments", lambda params: random_player(game), **_shape_of(recipe))


def _shape_of(recipe: Recipe) -> dict:
    tree = recipe.sampling == "tree"
    return {
        "trajectories": 1 if tree else recipe.branches,
        "branches": recipe.branches if tree else 1,
        "pick": recipe.pick if tree else "first",
        "alpha": recipe.alpha,
    }


def make_evaluation(game: Game, mesh: Mesh, player_of, *, environments: int):
    """Builds `evaluate(params, first, key, split) -> Batch`: one episode on each of `environments` instances of a split (a number).

    `player_of(params)` returns the `Player`, for example `model_player(..., temperature=0)`. One compilation serves all splits.
    """
    return _sharded(game, mesh, environments, "evaluation.episodes", player_of)


__all__ = ["Batch", "Player", "make_evaluation", "make_random_rollout", "make_rollout", "share_of", "summarise"]
