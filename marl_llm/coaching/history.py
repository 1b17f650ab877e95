"""What a strategic coach knows of the run so far (MAPPA, Appendix E.4): rolling success, quality and failures of each role."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

from marl_llm.untrusted import check_number
from marl_llm.workflows.errors import WorkflowError


class History:
    """Means of the figures of a run's last steps; call it for `ActionView.history`.

    `steps`: how many there are; `success`: the headline; `quality/<metric>`: the workflow's metrics; `failures/<role>`: the share
    of its responses that broke the format; `score/<role>`: the coach's mean score. Empty before the first step is over. All actions of a
    step see the same history. It is part of a checkpoint, so that a run that continues goes on with it.

    Args:
      window: steps that are looked back on.

    Raises:
      WorkflowError: a window below 1.
    """

    def __init__(self, window: int):
        if window < 1:
            raise WorkflowError(f"history={window} must be at least 1 step")
        self._steps: collections.deque[dict[str, float]] = collections.deque(maxlen=window)

    def look(self, figures: Mapping[str, float]) -> None:
        """Takes in the figures of a step that is over."""
        step = {}
        for name, value in figures.items():
            kind, _, rest = name.partition("/")
            role, _, figure = rest.partition("/")
            if name == "success":
                step[name] = float(value)
            elif kind == "team":
                step[f"quality/{rest}"] = float(value)
            elif (kind, figure) == ("role", "well_formed"):
                step[f"failures/{role}"] = 1.0 - float(value)
            elif (kind, figure) == ("coach", "score"):
                step[f"score/{role}"] = float(value)
        self._steps.append(step)

    def __call__(self) -> dict[str, float]:
        """The means, by name; of each over the steps that had it."""
        names = dict.fromkeys(name for step in self._steps for name in step)
        values = {name: [step[name] for step in self._steps if name in step] for name in names}
        means = {name: sum(series) / len(series) for name, series in values.items()}
        return {"steps": float(len(self._steps)), **means} if self._steps else {}

    def state(self) -> list[dict[str, float]]:
        """What `restore` takes, as JSON."""
        return [dict(step) for step in self._steps]

    def restore(self, steps: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from what `state` gave, or from nothing. Raises `AttributeError`, `TypeError` or `ValueError` for what is no figures."""
        figures = [{name: check_number(x, f"history.{name}") for name, x in step.items()} for step in steps]
        self._steps.clear()
        self._steps.extend(figures)
