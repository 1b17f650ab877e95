"""Dynamic sampling: how many groups have signal with and without `refills`, what it costs, and what it gains at equal sampled tokens.

    python -m benchmarks.refills [--seeds=0,1,2] [--refills=5] [--tasks=32] [--tokens=40000]

Two small models act at once; each sees a digit. The team is paid 1 if at least one of them repeats its own, and nothing otherwise, so most
groups of eight plays are tied while the models know nothing. One arm of GRPO trains on the tasks of each step as they are, the other one
replaces tasks without signal. Both train until they have sampled the same number of tokens, and are measured on the same held-out pairs.

Prints one JSON line. Of each arm: `signal_before` and `signal_after`, shares of groups whose returns differ in the tasks as they are drawn
and in what is trained on; `cost`, tasks played over tasks trained on; all of the first five steps, where signal is rare, and of all steps;
the updates; and the success on held-out pairs, sampled, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from typing import ClassVar

import jax
import jax.numpy as jnp

from marl_llm.algorithms import make_recipe
from marl_llm.games import JointLetter, Rewards
from marl_llm.models import ModelConfig, init_params
from marl_llm.training import LearnerOptions, ModelSpec, make_mesh, make_optimizer, make_team
from marl_llm.workflows import Assignment

FIRST = 5  # steps in which signal is rare
RATE = 1e-3
HELD_OUT, PLAYS = 10, 50  # pairs of digits of the test split, plays of each


@dataclasses.dataclass(frozen=True)
class Repeat(JointLetter):
    """Paid 1 if one of both repeats its digit behind any token, else nothing."""

    name: ClassVar[str] = "repeat"

    def rewards(self, before, after, role):
        """The outcome, for the team."""
        paid = self.outcome(after) * jnp.all(after.spoken)
        return Rewards(paid, jnp.float32(0), {"success": paid}, jnp.bool_(True))

    def outcome(self, state):
        """1 if one digit was repeated."""
        return jnp.any(self._parts(state)[0]).astype(jnp.float32)


def made_team(seed: int, tasks: int, refills: int):
    """Two models, fresh from a seed."""
    game = Repeat()
    config = ModelConfig(
        vocab_size=game.tokenizer.vocab_size, width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=64
    )
    recipe = make_recipe("grpo", group_size=8, filter_zero_variance=True, zero_variance_in_denominator=False)
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=64, minibatch=2 * tasks)
    specs = {role.name: ModelSpec(config, init_params(config, jax.random.key(seed))) for role in game.roles}
    return make_team(game, Assignment({name: name for name in specs}), specs, options, make_mesh(1), seed=seed, refills=refills)


def trained(seed: int, options: argparse.Namespace, refills: int) -> dict:
    """One arm: figures per step, and success before and after."""
    with made_team(seed, options.tasks, refills) as team:
        before = team.evaluate({}, "test", HELD_OUT, plays=PLAYS, temperature=1.0).summary()
        steps, tokens = [], 0
        while tokens < options.tokens:
            batch = team.play(len(steps), len(steps) * options.tasks, options.tasks)
            tokens += int(batch.figures["sampled_tokens"])
            tied = [figures["tied_share"] for figures in team.learn(batch, RATE).values()]
            signal = batch.figures.get("refills/signal_after", 1 - statistics.mean(tied))
            played = batch.figures.get("refills/tasks", float(options.tasks))
            steps.append((batch.figures.get("refills/signal_before", signal), signal, played / options.tasks))
        after = team.evaluate({}, "test", HELD_OUT, plays=PLAYS, temperature=1.0).summary()

    def means(some):
        return dict(zip(("signal_before", "signal_after", "cost"), (round(statistics.mean(column), 3) for column in zip(*some))))

    return {
        "seed": seed,
        "refills": refills,
        "first_steps": means(steps[:FIRST]),
        "all_steps": means(steps),
        "updates": len(steps),
        "sampled_tokens": tokens,
        "before": round(before["success"], 3),
        "after": [round(x, 3) for x in (after["success"], *after["interval"])],
    }


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--refills", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40_000, help="sampled by each arm")
    options = parser.parse_args()
    began = time.time()
    runs = [trained(seed, options, refills) for seed in map(int, options.seeds.split(",")) for refills in (0, options.refills)]
    hardware = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    print(json.dumps({"runs": runs, **vars(options), "spent_s": round(time.time() - began), "hardware": hardware}))


if __name__ == "__main__":
    main()
