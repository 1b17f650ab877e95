"""A policy loss and advantages of your own in place of the recipe's: two functions of arrays."""

import jax.numpy as jnp

import marl_llm as ml
from marl_llm.algorithms import group_ids, group_keys, group_relative


def asymmetric_clip(log_probs, old_log_probs, advantages, mask):
    """A clipped ratio that lets good responses grow further than bad ones shrink. All `[S, R]`; returns a loss per token."""
    ratio = jnp.exp(log_probs - old_log_probs)
    clipped = jnp.clip(ratio, 0.9, 1.5)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


def ranked(samples, returns):
    """Which third of its group a sample is in, -1, 0 or 1: less sensitive to the size of rewards. `[S]`."""
    groups = group_ids(group_keys(env=samples.env, agent=samples.agent, turn=samples.turn))
    return jnp.round(jnp.clip(group_relative(returns, groups), -1, 1))


def main(workdir: str = "runs/own_loss", steps: int = 300, **options) -> None:
    """Trains; a file works too: `marl train quickstart --config.recipe.policy_loss=examples/own_loss.py:asymmetric_clip`."""
    recipe = {"name": "at_grpo", "policy_loss": asymmetric_clip, "advantages": ranked}
    options = {"sft": {"steps": 250}} | options
    print(ml.train("plan_path", {"tool": "micro", "planner": "micro"}, recipe, steps=steps, workdir=workdir, **options))


if __name__ == "__main__":
    main()
