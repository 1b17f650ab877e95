"""A critic that is a network of its own: what it reads, its loss on packed rows, its step, and how much of the returns it explains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from marl_llm.algorithms import Recipe, value_loss_for
from marl_llm.models import ModelConfig
from marl_llm.training.mesh import compiled_step, data_axis
from marl_llm.training.packing import PackedRows, Tokens
from marl_llm.training.scoring import packed_values, response_where
from marl_llm.training.steps import Sums, cut, exact_step
from marl_llm.training.train_state import TrainState

if TYPE_CHECKING:
    from marl_llm.training.update import LearnerOptions


def critic_loss(
    recipe: Recipe, values: Float[Array, "B Q"], old: Float[Array, "B Q"], targets: Float[Array, "B Q"], where: Bool[Array, "B Q"]
) -> tuple[Float[Array, ""], Sums]:
    """The clipped value loss of packed rows as sums over response tokens, without `recipe.value_coef`; the first has the gradient."""
    total, count, parts = value_loss_for(dataclasses.replace(recipe, value_coef=1.0), values, old, targets, where=where)
    parts |= {"value_loss": (total, count)}
    return total, jax.lax.stop_gradient(Sums(total, count, parts, jnp.float32(0)))


def read_by_critic(options: LearnerOptions, tokens: Tokens) -> Tokens:
    """What the critic reads in front of each response. Raises `ValueError` where it is centralised and play kept no joint histories."""
    if options.centralised and tokens.joint is None:
        raise ValueError("critic='centralised' needs the joint histories of compiled or hosted play (Tokens.joint): use critic='own'")
    return tokens.joint if options.centralised else tokens


def value_step(options: LearnerOptions, config: ModelConfig, mesh: Mesh) -> Callable:
    """`(critic, rows, arrays, learning_rate) -> (critic, metrics, gap)`, compiled."""
    axis = data_axis(mesh)

    def step(critic: TrainState, rows: PackedRows, arrays: dict, learning_rate):
        part, count, most = cut((rows, arrays), options.microbatch_tokens, axis)

        def loss(params, j):
            microbatch, columns = part(j)
            values, _ = packed_values(config, params, microbatch)
            return critic_loss(options.recipe, values, columns["values"], columns["targets"], response_where(microbatch))

        return exact_step(critic, loss, count, most, learning_rate, options.optimizer, axis)

    return compiled_step(step, config, mesh, (P(), P("data"), P("data"), P()), 3)


def explained_variance(values: Float[np.ndarray, "S R"], targets: Float[np.ndarray, "S R"], where: Bool[np.ndarray, "S R"]) -> float:
    """1 − Var(G − V) / Var(G) over response tokens: 1 for a perfect critic, 0 for a constant. 0 if the targets do not vary."""
    goal, error = targets[where].astype(np.float64), (targets - values)[where].astype(np.float64)
    spread = goal.var() if goal.size else 0.0
    return float(1 - error.var() / spread) if spread > 1e-12 else 0.0
