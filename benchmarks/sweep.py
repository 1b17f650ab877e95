"""Many teams in one program beside one team alone: seconds per step of a quickstart-sized team, and of a sweep of them, in turns.

    python -m benchmarks.sweep [--teams=16] [--steps=5] [--repeats=3]

Plan-Path on 6x6 maps, a Tool and a Planner of the preset "micro", AT-GRPO, 32 tasks a step, float32. The team alone has every core as a
device, as in a run; the sweep has its teams spread over the same devices. Both are warmed by as many steps of imitation and one step of
reinforcement, then measured in turns: medians over the repeats. Prints one JSON line; `ratio` is the sweep's time over that of one team.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import jax

from marl_llm.algorithms import make_recipe
from marl_llm.games import PlanPath
from marl_llm.models import init_params, make_model_config
from marl_llm.training import LearnerOptions, ModelSpec, make_mesh, make_optimizer, make_team, use_cpu_devices
from marl_llm.training.sweep import Sweep
from marl_llm.workflows import Assignment

TASKS = 32
WARM_UP = 20


def make_one(game: PlanPath, options: LearnerOptions, seed: int):
    """A team of the quickstart's size, with parameters of its own seed."""
    config = make_model_config("micro", game.tokenizer.vocab_size)
    roles = {role.name: role.name for role in game.roles}
    specs = {name: ModelSpec(config, init_params(config, jax.random.key(seed))) for name in roles}
    return make_team(game, Assignment(roles), specs, options, make_mesh(), seed=seed)


def seconds(step, first: int, steps: int) -> float:
    """Mean seconds of `step(number)` over `steps` of them."""
    start = time.perf_counter()
    for number in range(first, first + steps):
        step(number)
    return (time.perf_counter() - start) / steps


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("teams", 16), ("steps", 5), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    use_cpu_devices()
    game = PlanPath(max_moves=4)
    recipe = make_recipe("at_grpo", entropy_coef=0.01, scale_advantages="none", loss_aggregation="token_mean", filter_zero_variance=True,
                         zero_variance_in_denominator=False)
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=256, minibatch=64, microbatch_tokens=2048)
    single = make_one(game, options, 0)
    sweep = Sweep([make_one(game, options, seed) for seed in range(arguments.teams)])
    for step in range(WARM_UP):
        single.sft_step(step, TASKS, 2e-3)
        sweep.sft_step(step, TASKS, 2e-3)
    single.start_rl()
    sweep.start_rl()

    def alone(step):
        single.learn(single.play(step, TASKS * step, TASKS), 1e-3)

    def together(step):
        sweep.step(step, TASKS * step, TASKS, 1e-3)

    alone(0)
    together(0)
    times = {"one": [], "sweep": []}
    for repeat in range(arguments.repeats):
        first = 1 + repeat * arguments.steps
        times["one"].append(seconds(alone, first, arguments.steps))
        times["sweep"].append(seconds(together, first, arguments.steps))
    medians = {name: statistics.median(each) for name, each in times.items()}
    ratio = medians["sweep"] / medians["one"]
    print(
        json.dumps(
            {"benchmark": "sweep", "teams": arguments.teams, "ratio": round(ratio, 2), "of_its_teams": round(ratio / arguments.teams, 3)}
            | {f"{name}_s": [round(x, 3) for x in each] for name, each in times.items()}
            | {"devices": jax.device_count(), "machine": platform.machine()}
        )
    )


if __name__ == "__main__":
    main()
