"""Cross against aligned joint sampling at equal sampled responses: how much the advantage of one fixed response depends on its partners.

    python -m benchmarks.cross_sampling [--tasks=20] [--draws=30] [--group_size=4]

Scripted players write programs of `helper_functions`, judged in the sandbox; no model takes part. In each of `--draws` groups of a task the
helper's first response is the same, and all others are drawn anew. Prints one JSON line: the variance of that response's advantage (return
minus the mean of the helper's group, no scale) over the draws, mean over tasks, and the joint actions that were judged.
"""

from __future__ import annotations

import json
import time

import numpy as np
from absl import app, flags

from marl_llm.games import make_game
from marl_llm.games.coding.helper_functions import helper_program
from marl_llm.tools.sandbox import default_sandbox
from marl_llm.workflows import Assignment, Controller, Scripted
from marl_llm.workflows.cross import crossed
from marl_llm.workflows.samples import sample_table

TASKS = flags.DEFINE_integer("tasks", 20, "Test problems.", lower_bound=1)
DRAWS = flags.DEFINE_integer("draws", 30, "Groups of each problem.", lower_bound=2)
BRANCHES = flags.DEFINE_integer("branches", 4, "Plays of a group, G.", lower_bound=2)


def advantages(rollout) -> np.ndarray:
    """Of the helper's response in play 0 of each task, `[tasks]`."""
    rows = [row for row in sample_table(rollout, training=()).samples if row.call.role == "helper"]
    team = np.asarray([row.team for row in rows]).reshape(-1, rollout.plays)  # in the order of task, then play
    return team[:, 0] - team.mean(axis=1)


def main(argv) -> None:
    """Prints the line."""
    began = time.process_time()
    with make_game("helper_functions") as environment:

        def script(turn):
            fixed = turn.role.name == "helper" and turn.seed[-1] == 0
            return helper_program(turn.fields["plan_gold"], "first") if fixed else environment.script(turn)

        players = Assignment(dict.fromkeys(environment.workflow.roles, "script"), {"script": Scripted(script)})
        tasks, estimates, judged = environment.tasks("test", 0, TASKS.value), {"aligned": [], "cross": []}, {"aligned": 0, "cross": 0}
        with Controller(environment.workflow, players, None, {}) as controller:
            for draw in range(DRAWS.value):
                rollout = controller.play(tasks, draw, BRANCHES.value)
                both, count = crossed(rollout)
                estimates["aligned"].append(advantages(rollout))
                estimates["cross"].append(advantages(both))
                judged = {"aligned": judged["aligned"] + len(rollout.episodes), "cross": judged["cross"] + count}
    default_sandbox().close()
    variance = {name: float(np.var(np.stack(values), axis=0, ddof=1).mean()) for name, values in estimates.items()}
    mean = {name: float(np.mean(values)) for name, values in estimates.items()}
    line = {"variance": variance, "mean": mean, "judged": judged, "responses": 2 * BRANCHES.value * DRAWS.value * TASKS.value}
    print(json.dumps(line | {"cpu_s": time.process_time() - began}))


if __name__ == "__main__":
    app.run(main)
