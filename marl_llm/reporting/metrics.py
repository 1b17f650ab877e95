"""The figures of a run: `metrics.jsonl`, one JSON object per line, and the same scalars in TensorBoard.

Every line has two fixed keys, the rest is free:

- `phase`: `"sft"` (imitation before the first update), `"train"` or `"eval"` (fresh instances).
- `step`: how many steps of that phase were finished when the line was written; `eval` counts train steps.
- any other key: a float, an int, a bool or a string; `/` groups keys, as in `role/tool/reward`.

JSON has no NaN and no infinity: such a value is written as null, and the list `non_finite` of the line names its key.
`metrics.jsonl` is the truth; the TensorBoard files are derived from it, and made again when a run resumes.
"""

import json
import math
import numbers
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from marl_llm.old_names import convert_line
from marl_llm.reporting import files
from marl_llm.reporting.trackers import Tracker

PHASES = ("sft", "train", "eval")
FILE_NAME = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_FLUSH_EVERY_S = 10.0  # TensorBoard's flush waits for the disk; metrics.jsonl is flushed with every line


class MetricsWriter:
    """Appends records to `metrics.jsonl` and to TensorBoard; a context manager.

    A resumed run's file equals that of an uninterrupted one, apart from wall times, if the loop writes the record of a
    step before it saves the checkpoint of that step.

    Args:
      workdir: the run's directory, made if need be.
      resume_step: None appends to whatever is there. A step says that the run goes on from the checkpoint of that step:
        `train` and `eval` lines of later steps are dropped, and `sft` lines stay. -1 says that the run starts over
        because nothing was saved: all lines are dropped.
      tensorboard: False leaves TensorBoard out.
      tracker: gets every record too, and is closed with this; see `trackers.Tracker`.

    Raises:
      files.WriteError: when the work directory cannot be written.
      files.LineError: when `resume_step` is given and a line before the last is not JSON.
    """

    def __init__(
        self, workdir: files.Path, resume_step: int | None = None, tensorboard: bool = True, tracker: Tracker | None = None
    ):
        self._tracker = tracker
        self.path = pathlib.Path(workdir) / FILE_NAME
        if resume_step is not None:
            files.keep_lines(self.path, lambda record: _survives(convert_line(record), resume_step))
        self._lines = files.LineFile(self.path)
        self._board = _Board(self.path.parent / TENSORBOARD) if tensorboard else None
        if self._board is not None and resume_step is not None:
            self._board.rebuild(read_metrics(self.path))

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one record.

        Raises:
          ValueError: unknown phase, missing or negative step, reserved key.
          TypeError: a value that is no scalar.
          files.WriteError: disk full or unwritable; the lines before stay readable.
        """
        clean, scalars = _checked(record)
        self._lines.append(json.dumps(clean, allow_nan=False))
        if self._board is not None:
            self._board.add(clean["phase"], clean["step"], scalars)
        if self._tracker is not None:
            self._tracker.add(clean["phase"], clean["step"], scalars)

    def close(self) -> None:
        """Flushes TensorBoard and closes both; a second call does nothing."""
        try:
            self._lines.close()
        finally:
            if self._tracker is not None:
                self._tracker.close()
            if self._board is not None:
                self._board.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(path: files.Path) -> list[dict[str, Any]]:
    """All records of a `metrics.jsonl`, given as that file or as its work directory; a torn last line is left out.

    Raises:
      FileNotFoundError: when there is no such file.
      files.LineError: for any other line that is not a JSON object.
    """
    path = pathlib.Path(path)
    return [convert_line(record) for record in files.read_whole(path / FILE_NAME if path.is_dir() else path)]


def _survives(record: dict[str, Any], resume_step: int) -> bool:
    if resume_step < 0:
        return False
    return record.get("phase") == "sft" or record.get("step", 0) <= resume_step


def _checked(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
    """The record as valid JSON, and its scalars (NaN and infinity included) by key."""
    phase, step = record.get("phase"), record.get("step")
    if phase not in PHASES:
        raise ValueError(f"record['phase'] is {phase!r}: set it to one of {', '.join(PHASES)}")
    if isinstance(step, bool) or not isinstance(step, numbers.Integral) or step < 0:
        raise ValueError(f"record['step'] is {step!r}: set it to an int, 0 or more")
    if "non_finite" in record:
        raise ValueError("record['non_finite'] is written by MetricsWriter itself: choose another key")
    clean: dict[str, Any] = {"phase": phase, "step": int(step)}
    scalars, non_finite = {}, []
    for key, value in record.items():
        if key in clean:
            continue
        if isinstance(value, str):
            clean[key] = value
            continue
        clean[key] = number = _number(key, value)
        scalars[key] = float(number)
        if not math.isfinite(number):
            clean[key] = None
            non_finite.append(key)
    if non_finite:
        clean["non_finite"] = non_finite
    return clean, scalars


def _number(key: str, value: Any) -> bool | int | float:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)  # Python and NumPy floats, and arrays of one element
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"record[{key!r}] is {type(value).__name__} {value!r:.80}: pass a float, an int, a bool or a string, "
            f"one key per figure"
        ) from error


class _Board:
    """A TensorBoard event file, written in this thread so that a full disk is an error here and not a silent loss."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._writer: Any = None
        self._flushed = time.monotonic()

    def add(self, phase: str, step: int, scalars: Mapping[str, float]) -> None:
        with files.explained(self._directory):
            self._write(phase, step, scalars)
            if time.monotonic() - self._flushed > _FLUSH_EVERY_S:
                self._writer.flush()
                self._flushed = time.monotonic()

    def rebuild(self, records: list[dict[str, Any]]) -> None:
        """Replaces the event files of earlier processes by one that holds exactly `records`."""
        with files.explained(self._directory):
            old = sorted(self._directory.glob("events.out.tfevents.*"))
            for record in records:
                non_finite = dict.fromkeys(record.get("non_finite", ()), math.nan)
                numeric = {k: float(v) for k, v in record.items() if k != "step" and isinstance(v, int | float)}
                self._write(record["phase"], record["step"], numeric | non_finite)
            if self._writer is not None:
                self._writer.flush()
            for path in old:
                path.unlink()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with files.explained(self._directory):
                writer.close()

    def _write(self, phase: str, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboardX.proto import event_pb2, summary_pb2

        if self._writer is None:
            from tensorboardX.event_file_writer import EventsWriter

            self._directory.mkdir(parents=True, exist_ok=True)
            suffix = f".{os.getpid()}.{time.time_ns()}"  # two processes within one second must not share a file
            self._writer = EventsWriter(str(self._directory / "events"), suffix)
        values = [summary_pb2.Summary.Value(tag=f"{phase}/{key}", simple_value=value) for key, value in scalars.items()]
        event = event_pb2.Event(wall_time=time.time(), step=step, summary=summary_pb2.Summary(value=values))
        self._writer.write_event(event)
