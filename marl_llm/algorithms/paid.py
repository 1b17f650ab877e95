"""What a recipe pays for each sample, before anything is taken off for comparison."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from marl_llm.algorithms._arrays import as_mask
from marl_llm.algorithms.apply import Samples, _played, _returns, _rewards
from marl_llm.algorithms.recipes import Recipe


def returns_for(recipe: Recipe, samples: Samples) -> Float[Array, "S"]:
    """Return of each sample before any KL penalty, 0 where masked: what the recipe pays for it, with nothing taken off for comparison.

    With a critic it is the reward of the response, which GAE spreads over its tokens.
    """
    where = as_mask(samples.where, jnp.shape(samples.team))
    played = _played(samples, where)
    rewards = jnp.where(played, _rewards(recipe, samples), 0)
    return jnp.where(where, _returns(recipe, samples, rewards, played), 0)
