"""How a run goes on where another process of it ended: from which checkpoint, with which record, on which clock."""

from __future__ import annotations

import pathlib
import sys
import time

from marl_llm.runs.building import hardware_of
from marl_llm.runs.command import ConfigError
from marl_llm.runs.workdir import read_record, taken_over
from marl_llm.untrusted import read_json_file


def up_to(done: list[int], step: int | None) -> list[int]:
    """The checkpoints up to the one that a run goes back to. Raises `ConfigError` if that is not there."""
    if step is None:
        return done
    if step not in done:
        raise ConfigError(f"--step={step}: there is no such checkpoint; there are {', '.join(map(str, done)) or 'none'}")
    return [checkpoint for checkpoint in done if checkpoint <= step]


def results_of(workdir: pathlib.Path, config, done: list[int]) -> dict | None:
    """The final evaluation of a complete run: one whose newest checkpoint is its last, and which was evaluated there and reported.

    None for a run that goes on. Raises `ConfigError` for an evaluation.json that cannot be read.
    """
    whole = done and done[-1] == config.steps and all((workdir / name).exists() for name in ("evaluation.json", "report.html"))
    results = read_json_file(workdir / "evaluation.json", error=ConfigError) if whole else {}
    return results if results.get("steps") == config.steps else None


def goes_on(workdir: pathlib.Path, config, team, checkpoints, done: list[int] | None) -> None:
    """After the first step of a run that continues: what it changed is recorded, and checkpoints behind its start are set aside.

    The evaluation of an earlier end is removed: nobody may take it for that of the longer run.
    """
    from marl_llm.training import processes

    if done is not None and processes.leads():
        taken_over(workdir, config, hardware_of(team.mesh))
        if not done or done[-1] < config.steps:
            for name in ("evaluation.json", "outcomes.jsonl", "before_after.md"):
                (workdir / name).unlink(missing_ok=True)
        if done:  # without one the run began anew, and checkpoint 0 is its own
            checkpoints.set_aside(done[-1])


def continued(config, workdir: pathlib.Path, state: dict) -> dict:
    """The state of a run that continues, with the length of its learning rate's schedule: what the config says, else what it began with.

    Where the run is longer than its schedule, or the schedule has changed, one line says which rate follows.
    """
    print(f"continuing {workdir} after step {state['step']}", file=sys.stderr)
    before = state.get("decay_steps", read_record(workdir)["config"]["steps"])  # earlier versions kept none
    decay_steps = config.optimizer.decay_steps or before or config.steps
    if config.optimizer.schedule == "constant":
        return state | {"decay_steps": decay_steps}
    if config.steps > decay_steps:
        other = "config.optimizer.decay_steps=N sets another length"
        print(f"note: the learning rate decays until step {decay_steps} and then stays at 5 % of its peak; {other}", file=sys.stderr)
    elif decay_steps != before:
        print(f"note: the learning rate now decays until step {decay_steps}, before until step {before}", file=sys.stderr)
    return state | {"decay_steps": decay_steps}


class Stopwatch:
    """Wall and CPU seconds of a run, those of processes before this one included."""

    def __init__(self):
        self._started, self._cpu, self._before = time.time(), time.process_time(), (0.0, 0.0)

    def now(self) -> dict[str, float]:
        """`wall_s`, `cpu_s`."""
        return {"wall_s": time.time() - self._started + self._before[0], "cpu_s": time.process_time() - self._cpu + self._before[1]}

    def goes_on(self, state: dict) -> None:
        """Takes over what earlier processes took."""
        now = self.now()
        self._before = (state["wall_s"] - now["wall_s"], state["cpu_s"] - now["cpu_s"])
