"""The loss of a critic on packed rows, and how much of the returns it explains."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from marl_llm.algorithms import Recipe, value_loss_for
from marl_llm.training.steps import Sums


def critic_loss(
    recipe: Recipe, values: Float[Array, "B Q"], old: Float[Array, "B Q"], targets: Float[Array, "B Q"], where: Bool[Array, "B Q"]
) -> tuple[Float[Array, ""], Sums]:
    """The clipped value loss of packed rows as sums over response tokens, without `recipe.value_coef`; the first has the gradient."""
    total, count, parts = value_loss_for(dataclasses.replace(recipe, value_coef=1.0), values, old, targets, where=where)
    parts |= {"value_loss": (total, count)}
    return total, jax.lax.stop_gradient(Sums(total, count, parts, jnp.float32(0)))


def explained_variance(values: Float[np.ndarray, "S R"], targets: Float[np.ndarray, "S R"], where: Bool[np.ndarray, "S R"]) -> float:
    """1 − Var(G − V) / Var(G) over response tokens: 1 for a perfect critic, 0 for a constant. 0 if the targets do not vary."""
    goal, error = targets[where].astype(np.float64), (targets - values)[where].astype(np.float64)
    spread = goal.var() if goal.size else 0.0
    return float(1 - error.var() / spread) if spread > 1e-12 else 0.0
