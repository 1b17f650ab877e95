"""Warm start: imitation of the game's scripted noisy player, before any reinforcement.

The traces come from the very rollout that trains later, with the script in the place of the models, so prompts and responses are ids of
the same protocol. The script may know the map; no prompt does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from marl_llm.games import Game
from marl_llm.models import TRAIN, ModelConfig, score_responses
from marl_llm.rollout import play, scripted_player
from marl_llm.training.mesh import data_axis, over_data, position, summed
from marl_llm.training.policy import Policy, step_policy
from marl_llm.training.update import buffer_sizes, rows_from


def make_imitation(
    games: list[Game],
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    environments: int,
    branches: int,
    script: dict | None = None,
):
    """Builds `imitate(policy, step, learning_rate, key) -> (policy, metrics)`, jit-compiled.

    Each call plays `environments` fresh training instances of every game with the scripted player, `branches` independent responses per
    prompt, and steps the policy once on their mean negative log-likelihood. Policy is donated; `key` is folded with `step`.
    Raises `ValueError` when the games do not share one vocabulary or the environments do not divide over the devices.
    """
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1
    if environments < 1 or environments % devices:
        raise ValueError(f"warm_start.environments={environments} do not divide over {devices} devices")
    if len({g.tokenizer for g in games}) != 1:
        raise ValueError("games that share a warm start must share a vocabulary")
    prompt_tokens, response_tokens = buffer_sizes(games)
    share = environments // devices

    def local(policy: Policy, step, learning_rate, key):
        device = position(axis)
        env = step * environments + device * share + jnp.arange(share)
        parts = []
        for number, game in enumerate(games):
            game_key = jax.random.fold_in(key, number)
            instances = jax.vmap(lambda i, g=game, k=game_key: g.instance(jax.random.fold_in(k, i), "train"))(env)
            rollout = play(game, scripted_player(game, **(script or {})), instances, env, game_key, branches=branches)
            parts.append(rows_from(game, rollout.tables, env, prompt_tokens, response_tokens))
        rows = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        where = rows.token_where & rows.where[:, None, None]

        def loss(params):
            scored = score_responses(config, params, rows.prompt, rows.prompt_where, rows.tokens)
            return -jnp.sum(jnp.where(where, scored.log_probs, 0.0))

        total, gradient = jax.value_and_grad(loss)(policy.params)
        total, n, gradient = summed((total, jnp.sum(where), gradient), axis)
        policy, norm = step_policy(policy, jax.tree.map(lambda x: x / n, gradient), learning_rate, optimizer)
        return policy, {"loss": total / n, "grad_norm": norm, "tokens": n}

    mapped = over_data(local, mesh, TRAIN, in_specs=(P(), P(), P(), P()), out_specs=(P(), P()))
    return jax.jit(mapped, donate_argnums=(0,))
