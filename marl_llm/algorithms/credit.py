"""Returns from measured credit: what a response changed, found by playing its episode again without it (`rollout.credit`)."""

from jaxtyping import Array

from marl_llm.algorithms._arrays import as_float

EXCHANGES = ("candidate", "silence")


def counterfactual_returns(recipe, samples) -> Array:
    """What each response added to the team's last reward, and its own pay, both as the recipe weighs them `[S]`.

    R_s = α · (r^team − r^team without s) + r_s^local

    Raises:
      ValueError: the table has no column `credit`.
    """
    if samples.credit is None:
        raise ValueError(
            f"Recipe {recipe.name!r}: returns='counterfactual' needs Samples.credit, from episodes that were replayed: play compiled, "
            "or choose another recipe.returns."
        )
    of_team, of_local = recipe.reward_weights
    return of_team * as_float(samples.credit) + of_local * as_float(samples.local)
