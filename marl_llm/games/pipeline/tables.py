"""Generated tables: 60 rows to learn from and 30 to predict, with gaps in one column and another column on a scale of its own.

A table's *generator* is its kind, the weight of each column, and which columns have gaps and another scale. It belongs to one split by its
hash, so that no seed can make a table of the test split follow a generator that training tables follow (law 12).
"""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from marl_llm.games.kit.miniature import SHARES
from marl_llm.games.pipeline.metrics import KINDS, METRICS
from marl_llm.games.pipeline.submissions import join
from marl_llm.games.pipeline.team import SUBMISSION
from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import Task
from marl_llm.workflows.splits import check_split, split_of

ROWS, TEST_ROWS = 60, 30
WEIGHTS = (-2, -1, 1, 2)
GAPS, CENTRE, SMALL, NOISE = 0.15, 5.0, 0.02, 0.5  # share of gaps; mean and small spread of columns; noise of the target
HIDDEN = ("answers",)
MAX_HEADER = 256  # bytes of the header of an array's file


def draw_generator(rng: random.Random) -> tuple[str, tuple[int, ...], int, int]:
    """Kind, weights, the column with gaps, and the column on a small scale, which is another and matters twice."""
    weights = [rng.choice(WEIGHTS) for _ in range(rng.randint(3, 5))]
    gaps, small = rng.sample(range(len(weights)), 2)
    weights[small] = rng.choice((-2, 2))
    return rng.choice(KINDS), tuple(weights), gaps, small


def generator_text(kind: str, weights: tuple[int, ...], gaps: int, small: int) -> str:
    """What a split is a function of."""
    return f"{kind} weights {' '.join(map(str, weights))} gaps {gaps} small {small}"


def table_task(split: str, seed: int, number: int) -> Task:
    """A table of a split. Fields: `given` (train.csv, test.csv), `kind`, `columns`; hidden: `answers`, id -> value.

    Raises `ValueError` for an unknown split.
    """
    check_split(split, SHARES)
    rng = random.Random(f"table {split} {seed} {number}")
    while True:
        generator = draw_generator(rng)
        if split_of(generator_text(*generator), SHARES) != split:
            continue
        kind, weights, gaps, small = generator
        spread = [SMALL if i == small else 1.0 for i in range(len(weights))]
        rows = [[rng.gauss(0, 1) for _ in weights] for _ in range(ROWS + TEST_ROWS)]
        target = [sum(w * x for w, x in zip(weights, row)) + rng.gauss(0, NOISE) for row in rows]
        values = [float(y > 0) for y in target] if kind == "classification" else [round(10 * y, 3) for y in target]
        if len(set(values[:ROWS])) > 1 and len(set(values[ROWS:])) > 1:
            break
    shown = [[f"{CENTRE + s * x:.6f}" for s, x in zip(spread, row)] for row in rows]
    for row in shown:
        if rng.random() < GAPS:
            row[gaps] = ""
    ids = rng.sample(range(1000, 10_000), ROWS + TEST_ROWS)
    header = ",".join(["id", *(f"c{i}" for i in range(1, len(weights) + 1))])
    lines = [",".join([str(row_id), *row]) for row_id, row in zip(ids, shown)]
    train = "\n".join([f"{header},y", *(f"{line},{value:g}" for line, value in zip(lines[:ROWS], values))])
    files = {"train.csv": train + "\n", "test.csv": "\n".join([header, *lines[ROWS:]]) + "\n"}
    fields = {"given": Workspace.from_files(files), "kind": kind, "columns": f"c{len(weights)}"}
    answers = {str(row_id): value for row_id, value in zip(ids[ROWS:], values[ROWS:])}
    return Task(number, fields, {"answers": answers}, split, kind)


def test_ids(given: Workspace) -> list[str]:
    """The ids of the rows to predict."""
    return [line.split(",", 1)[0] for line in given.files()["test.csv"].decode().splitlines()[1:]]


def grade_table(files: Workspace, kind: str, answers: Mapping[str, float]) -> dict[str, Any]:
    """A submission's grade; of a class the submission holds its probability, in [0, 1], which is rounded to a label."""
    joined = _joined(files, list(answers), kind)
    raw: dict[str, float] = {}
    measured = [metric for metric in METRICS.values() if metric.kind == kind]
    if joined.ok:
        predicted, truth = joined.columns["y"], np.asarray(list(answers.values()))
        for metric in measured:
            raw[metric.name] = metric.function(truth, predicted if metric.numbers else (predicted >= 0.5).astype(np.float64))
    return {"measured": tuple(metric.name for metric in measured), "problem": joined.problem, "detail": joined.detail, "raw": raw}


def _joined(files: Workspace, ids: list[str], kind: str) -> Any:
    return join(files.files().get(SUBMISSION), ids, "id", ("y",), True, (0.0, 1.0) if kind == "classification" else None)


# --- what files hold, without running anything --------------------------------------------------------------------------------------------


def read_array(data: bytes | None) -> np.ndarray | None:
    """The array of float64 in a .npy file of version 1; None if it holds anything else. Nothing is ever unpickled."""
    if not data or data[:8] != b"\x93NUMPY\x01\x00" or len(data) < 10:
        return None
    start = 10 + int.from_bytes(data[8:10], "little")
    if start > min(len(data), MAX_HEADER):
        return None
    try:
        header = ast.literal_eval(data[10:start].decode("ascii").strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not isinstance(header, dict) or header.get("descr") != "<f8" or header.get("fortran_order") not in (False, True):
        return None
    shape = header.get("shape")
    if not isinstance(shape, tuple) or len(shape) > 2 or any(type(n) is not int or not 0 < n < 1 << 20 for n in shape):
        return None
    if 8 * int(np.prod(shape, dtype=object)) != len(data) - start:
        return None
    return np.frombuffer(data, np.float64, offset=start).reshape(shape, order="F" if header["fortran_order"] else "C")


ARRAYS = ("X_train.npy", "y_train.npy", "X_test.npy", "model.npy")


def array_faults(given: Workspace, files: Workspace) -> dict[str, str]:
    """Which arrays cannot be used, and why: no array, values that are not finite, or shapes that do not fit together."""
    held = files.files()
    faults, arrays = {}, {}
    for name in ARRAYS:
        if not held.get(name):
            continue
        arrays[name] = read_array(held[name])
        if arrays[name] is None:
            faults[name] = "it is no array of numbers"
        elif not np.isfinite(arrays[name]).all():
            faults[name] = "it holds values that are not finite"
    shape = {name: array.shape for name, array in arrays.items() if array is not None}
    x, y, z, model = (shape.get(name, ()) for name in ARRAYS)
    if len(x) not in (0, 2) or x and y and x[0] != y[0]:
        faults.setdefault("X_train.npy", f"its shape is {x}, that of y_train {y}")
    if z and (len(z) != 2 or z[0] != len(test_ids(given)) or x and x[1:] != z[1:]):
        faults.setdefault("X_test.npy", f"its shape is {z}, with {len(test_ids(given))} rows to predict and X_train {x}")
    if model and x and (len(model) != 1 or len(x) == 2 and model[0] != x[1] + 2):
        faults.setdefault("model.npy", f"its shape is {model}, X_train {x}")
    return faults


def submission_fault(given: Workspace, files: Workspace) -> str:
    """Why a submission is invalid; told from the ids of the task and, for a class, from bounds of the training target."""
    values = {line.rsplit(",", 1)[1] for line in given.files()["train.csv"].decode().splitlines()[1:]}
    return _joined(files, test_ids(given), "classification" if values == {"0", "1"} else "regression").problem


def well_made(role: str, given: Workspace, files: Workspace) -> bool:
    """Engineer: columns of like spread, nothing lost. Modeler: errors in training under 0.9 of a constant's. Analyst: no constant."""
    held = files.files()
    arrays = {name: read_array(held.get(name)) for name in ARRAYS}
    x, y, model = arrays["X_train.npy"], arrays["y_train.npy"], arrays["model.npy"]
    if role != "analyst" and (x is None or y is None or array_faults(given, files)):
        return False
    if role == "engineer":
        spread = x.std(axis=0)
        return len(x) == ROWS and bool(spread.max() < 20 * spread.min())
    if role == "modeler":
        score = x @ model[:-2] + model[-2]
        predicted = 1 / (1 + np.exp(-np.clip(score, -500, 500))) if model[-1] else score
        return bool(np.mean((predicted - y) ** 2) < 0.9 * np.var(y))
    joined = _joined(files, test_ids(given), "regression")
    return joined.ok and len(np.unique(joined.columns["y"])) > 1
