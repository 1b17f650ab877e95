"""Tasks without signal: how many groups have signal with `refills`, with `replay` and with neither, and what each gains at equal tokens.

    python -m benchmarks.refills [--arms=plain,refills,replay] [--seeds=0,1,2] [--refills=5] [--replay=32] [--tasks=32] [--tokens=40000]

Two small models act at once; each sees a digit. The team is paid 1 if at least one of them repeats its own, and nothing otherwise, so most
groups of eight plays are tied while the models know nothing. One arm of GRPO trains on the tasks of each step as they are. The others
replace tasks without signal: by fresh ones (`refills`), by rare successes of earlier steps (`replay`). Each arm trains until it has sampled
the same number of tokens, and all are measured on the same held-out pairs. With `replay` among the arms all of them play hosted and correct
for the sampler; otherwise all play compiled.

Prints one JSON line per arm, and one of all. Of each arm: `signal_before` and `signal_after`, shares of groups whose returns differ in the
tasks as they are drawn and in what is trained on; `cost`, tasks played over tasks of a step; `replayed`, the share of its tasks that are
replayed; all of the first five steps, where signal is rare, and of all steps; the updates; and the success on held-out pairs, sampled, with
its 95 % interval.
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
from marl_llm.training import LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer, make_team
from marl_llm.workflows import Assignment

ARMS = ("plain", "refills", "replay")
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


def made_team(seed: int, options: argparse.Namespace, arm: str):
    """Two models, fresh from a seed."""
    hosted = "replay" in options.arms
    game = Repeat()
    config = ModelConfig(
        vocab_size=game.tokenizer.vocab_size, width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=64
    )
    skips, corrected = dict(filter_zero_variance=True, zero_variance_in_denominator=False), dict(rollout_correction="truncate")
    recipe = make_recipe("grpo", group_size=8, **skips, **(corrected if hosted else {}))
    learner = LearnerOptions(recipe, make_optimizer(), row_tokens=64, minibatch=2 * options.tasks)
    specs = {role.name: ModelSpec(config, init_params(config, jax.random.key(seed))) for role in game.roles}
    ways = dict(refills=options.refills if arm == "refills" else 0, hosted=hosted)
    play = PlayOptions(max_num_seqs=256, decode_steps=2, replay=options.replay if arm == "replay" else 0)
    return make_team(game, Assignment({name: name for name in specs}), specs, learner, make_mesh(1), play=play, seed=seed, **ways)


def trained(seed: int, options: argparse.Namespace, arm: str) -> dict:
    """One arm: figures per step, and success before and after."""
    with made_team(seed, options, arm) as team:
        before = team.evaluate({}, "test", HELD_OUT, plays=PLAYS, temperature=1.0).summary()
        steps, tokens = [], 0
        while tokens < options.tokens:
            batch = team.play(len(steps), len(steps) * options.tasks, options.tasks)
            tokens += int(batch.figures["sampled_tokens"])
            tied = [figures["tied_share"] for figures in team.learn(batch, RATE).values()]
            figures, signal = batch.figures, 1 - statistics.mean(tied)
            signal, played = figures.get("refills/signal_after", signal), figures.get("refills/tasks", float(options.tasks))
            untied = 1 - figures["replay/tied"] / options.tasks if arm == "replay" else signal
            replayed = figures.get("replay/tasks", 0.0) / options.tasks
            steps.append((figures.get("refills/signal_before", untied), signal, played / options.tasks, replayed))
        after = team.evaluate({}, "test", HELD_OUT, plays=PLAYS, temperature=1.0).summary()

    def means(some):
        names = ("signal_before", "signal_after", "cost", "replayed")
        return dict(zip(names, (round(statistics.mean(column), 3) for column in zip(*some))))

    return {
        "seed": seed,
        "arm": arm,
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
    parser.add_argument("--arms", default="plain,refills", type=lambda text: text.split(","), help=f"out of {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--refills", type=int, default=5)
    parser.add_argument("--replay", type=int, default=32)
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40_000, help="sampled by each arm")
    options = parser.parse_args()
    if unknown := sorted(set(options.arms) - set(ARMS)):
        parser.error(f"--arms: {unknown[0]!r} must be one of {', '.join(ARMS)}")
    began, runs = time.time(), []
    for seed in map(int, options.seeds.split(",")):
        for arm in options.arms:
            runs.append(trained(seed, options, arm))
            print(json.dumps(runs[-1]), flush=True)
    hardware = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    print(json.dumps({"runs": runs, **vars(options), "spent_s": round(time.time() - began), "hardware": hardware}))


if __name__ == "__main__":
    main()
