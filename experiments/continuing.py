"""How a run goes on where another process of it ended: from which checkpoint, with which record, on which clock."""

from __future__ import annotations

import pathlib
import time

from experiments.building import hardware_of
from experiments.command import ConfigError
from experiments.workdir import taken_over


def up_to(done: list[int], step: int | None) -> list[int]:
    """The checkpoints up to the one that a run goes back to. Raises `ConfigError` if that is not there."""
    if step is None:
        return done
    if step not in done:
        raise ConfigError(f"--step={step}: there is no such checkpoint; there are {', '.join(map(str, done)) or 'none'}")
    return [one for one in done if one <= step]


def goes_on(workdir: pathlib.Path, config, team, checkpoints, done: list[int] | None) -> None:
    """After the first step of a run that continues: what it changed is recorded, and checkpoints behind its start are set aside."""
    from marl_llm.training import processes

    if done is not None and processes.leads():
        taken_over(workdir, config, hardware_of(team.mesh))
        if done:  # without one the run began anew, and checkpoint 0 is its own
            checkpoints.set_aside(done[-1])


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
