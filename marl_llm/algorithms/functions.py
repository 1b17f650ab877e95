"""Advantages and a policy loss of the user's own, as a recipe's fields `advantages` and `policy_loss` hold them."""

import typing

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marl_llm.algorithms._arrays import as_float
from marl_llm.algorithms.recipes import Recipe


def own_advantages(recipe: Recipe, samples: typing.Any, earned: Float[Array, "S"], where: Bool[Array, "S"]) -> Float[Array, "S"]:
    """What the user's function `recipe.advantages` says of each sample, 0 where masked.

    It is called as `advantages(samples, returns)` inside jit, where `returns` `[S]` are those of the recipe, and gives one finite number
    per sample. Groups that the recipe calls tied may still be left out of the step (`filter_zero_variance`).

    Raises `ValueError` for a result of another shape.
    """
    assert recipe.advantages is not None
    return jnp.where(where, as_float(_checked(recipe.advantages(samples, earned), earned.shape, "advantages")), 0)


def own_policy_loss(
    recipe: Recipe, new: Float[Array, "S R"], old: Float[Array, "S R"], advantages: Float[Array, "S #R"], where: Bool[Array, "S R"]
) -> Float[Array, "S R"]:
    """What the user's function `recipe.policy_loss` says of each token, 0 where masked: a loss, to be minimised.

    It is called as `policy_loss(log_probs, old_log_probs, advantages, mask)` inside jit, with advantages `[S, 1]` (or `[S, R]` with a
    critic). Masked log-probs are 0. The recipe reduces it to one number, and adds its KL and entropy terms.

    Raises `ValueError` for a result of another shape.
    """
    assert recipe.policy_loss is not None
    return jnp.where(where, as_float(_checked(recipe.policy_loss(new, old, advantages, where), where.shape, "policy_loss")), 0)


def _checked(result: typing.Any, shape: tuple[int, ...], name: str) -> Array:
    if jnp.shape(result) != shape:
        raise ValueError(f"recipe.{name} returned the shape {list(jnp.shape(result))}; it must return {list(shape)}")
    return result
