"""Modelling tasks in the schema of DSBench: a text, `train.csv`, `test.csv`, and answers that no role ever sees.

A row of the file of tasks has `prompt`, `answer` (null) and `metadata`: `task_id`, `train_file`, `test_file`, `answer_dir` (in which
`test_answer.csv` lies), and `task_type`, `data_type`, `url`, which are not read: a published `data_type` calls tasks regression whose
answers are classes. What is measured comes from a *manifest* that somebody has reviewed, a table

    task,kind,metric,targets,id_column
    house-prices,regression,rmse,SalePrice,Id

with a line for each task: `kind` and `metric` as in `metrics.METRICS`, several targets with `|` between. A task that is not in it is
refused.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.data_files import DataError, read_rows
from marl_llm.games.pipeline.metrics import KINDS, METRICS
from marl_llm.games.pipeline.runs import limits_for
from marl_llm.games.pipeline.submissions import SubmissionError, join, label, number, same_id
from marl_llm.games.pipeline.team import SUBMISSION
from marl_llm.hints import meant
from marl_llm.tools.sandbox import Workspace
from marl_llm.untrusted import open_file
from marl_llm.workflows import Task

COLUMNS = ("task", "kind", "metric", "targets", "id_column")
ANSWERS = "test_answer.csv"
HIDDEN = ("answers",)
MAX_MB = 64  # of a task's tables: a play keeps a copy of its files after every action


@dataclasses.dataclass(frozen=True)
class Measure:
    """How a task is measured: a line of the manifest."""

    kind: str
    metric: str
    targets: tuple[str, ...]
    id_column: str


@dataclasses.dataclass(frozen=True, eq=False)
class HiddenAnswers:
    """The hidden answers of a task: ids as `same_id` writes them, and target -> values in their order. A record holds their digest only."""

    ids: tuple[str, ...]
    columns: Mapping[str, np.ndarray]

    def to_json(self) -> dict[str, Any]:
        """Digest and number of rows."""
        text = "\n".join([*self.ids, *(f"{name} {value}" for name, values in self.columns.items() for value in values)])
        return {"answers_sha256": hashlib.sha256(text.encode()).hexdigest(), "rows": len(self.ids)}


def load_manifest(path: str | pathlib.Path) -> dict[str, Measure]:
    """The reviewed table: task -> how it is measured.

    Raises:
      DataError: naming the line: missing columns, an unknown kind or metric, a metric of another kind, no target, a task twice.
      OSError: the file cannot be read.
    """
    header, rows = read_csv(path, "the manifest")
    if missing := [name for name in COLUMNS if name not in header]:
        raise DataError(f"{path}: the column {missing[0]!r} is missing; a manifest has {', '.join(COLUMNS)}")
    measures: dict[str, Measure] = {}
    for line, values in enumerate(rows, 2):
        row = {name: value.strip() for name, value in zip(header, values)}
        targets = tuple(part.strip() for part in row["targets"].split("|") if part.strip())
        where = f"{path}, line {line}, task {row['task']!r}"
        if row["kind"] not in KINDS or row["metric"] not in METRICS:
            raise DataError(f"{where}: kind is one of {', '.join(KINDS)} and metric one of {', '.join(METRICS)}")
        if METRICS[row["metric"]].kind != row["kind"]:
            raise DataError(f"{where}: {row['metric']} measures {METRICS[row['metric']].kind}, not {row['kind']}")
        if not row["task"] or not targets or not row["id_column"]:
            raise DataError(f"{where}: task, targets and id_column must be given")
        if row["task"] in measures:
            raise DataError(f"{where}: it is there twice")
        measures[row["task"]] = Measure(row["kind"], row["metric"], targets, row["id_column"])
    return measures


def read_csv(path: str | pathlib.Path, where: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a CSV file. Raises `DataError` for a file without a header, or a row of another length; `OSError`."""
    try:
        with open_file(path, DataError) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file, strict=True) if row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {path} cannot be read as CSV: {error}") from error
    if not rows or len(set(rows[0])) < len(rows[0]) or all(_is_number(name) for name in rows[0]):
        raise DataError(f"{where}: {path} has no header: its first line must hold the names of its columns, each once")
    for line, row in enumerate(rows[1:], 2):
        if len(row) != len(rows[0]):
            raise DataError(f"{where}: {path}, row {line}, has {len(row)} values and the header {len(rows[0])}")
    return [name.strip() for name in rows[0]], rows[1:]


def load_modelling_tasks(
    folder: str | pathlib.Path,
    manifest: str | pathlib.Path,
    rows: str = "tasks.jsonl",
    split: str = "train",
    table_mb: float | int = MAX_MB,
) -> list[Task]:
    """Tasks of a file of rows, each with its tables and hidden answers.

    Args:
      folder: where the rows and the files that they name lie.
      manifest: see the module's text.
      rows: file of rows in `folder`: jsonl, json or parquet.
      split: of the tasks.
      table_mb: most MiB of one task's tables.

    Returns:
      Tasks with the fields `given` (train.csv and test.csv), `kind`, `metric`, `task_text`, `task_id`, `targets`, `id_column`, the stratum
      `kind`, and hidden `answers`.

    Raises:
      DataError: naming task and file: a task that is not in the manifest or comes twice, a missing file or one without a header, an id
        column that is not unique, answers in the test table, answers for other ids than the test's, values that the metric cannot take, a
        target of one class or without a range, tables beyond `table_mb`.
    """
    folder, known = pathlib.Path(folder), load_manifest(manifest)
    tasks: list[Task] = []
    seen: set[str] = set()
    for line, row in enumerate(read_rows(folder / rows), 1):
        meta = row.get("metadata")
        if not isinstance(row.get("prompt"), str) or not isinstance(meta, dict):
            raise DataError(f"{folder / rows}, row {line}: it needs the text prompt and the object metadata")
        name = str(meta.get("task_id", ""))
        where = f"task {name!r} ({folder / rows}, row {line})"
        if name not in known:
            hint = meant(name, list(known)) or "."
            raise DataError(f"{where} is not in the manifest {manifest}{hint} Review what it predicts and add a line, or remove the row")
        if name in seen:
            raise DataError(f"{where} comes twice")
        seen.add(name)
        tasks.append(_task(len(tasks), name, row["prompt"], meta, folder, known[name], where, split, table_mb))
    return tasks


def _task(
    place: int,
    name: str,
    prompt: str,
    meta: Mapping[str, Any],
    folder: pathlib.Path,
    measure: Measure,
    where: str,
    split: str,
    table_mb: float | int,
) -> Task:
    """One task of `load_modelling_tasks`, with all checks of its files."""
    train, test = _inside(folder, meta.get("train_file"), where, "train_file"), _inside(folder, meta.get("test_file"), where, "test_file")
    answers = _inside(folder, meta.get("answer_dir"), where, "answer_dir") / ANSWERS
    for path in (train, test, answers):
        if not path.is_file():
            raise DataError(f"{where}: there is no file {path}")
    size = train.stat().st_size + test.stat().st_size
    if size > table_mb * (1 << 20):
        raise DataError(f"{where}: its tables hold {size:,} bytes, {table_mb} MiB are allowed: raise table_mb, or take a part of the rows")
    try:
        limits_for(size)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    files = {"train.csv": train.read_bytes(), "test.csv": test.read_bytes()}
    _check_train(train, measure, where)
    fields = {
        "given": Workspace.from_files(files), "kind": measure.kind, "metric": measure.metric, "task_text": prompt, "task_id": name,
        "targets": measure.targets, "id_column": measure.id_column,
    }  # fmt: skip
    hidden = {"answers": _answers(test, answers, measure, where)}
    return Task(place, fields, hidden, split, measure.kind)


def _inside(folder: pathlib.Path, path: Any, where: str, key: str) -> pathlib.Path:
    if not isinstance(path, str) or not path:
        raise DataError(f"{where}: metadata.{key} is missing")
    full = (folder / path).resolve()
    if not full.is_relative_to(folder.resolve()):
        raise DataError(f"{where}: metadata.{key}={path!r} lies outside of {folder}")
    return full


def _check_train(path: pathlib.Path, measure: Measure, where: str) -> None:
    header, rows = read_csv(path, where)
    for target in measure.targets:
        if target not in header:
            raise DataError(f"{where}: {path} lacks the target {target!r}; its columns are {', '.join(header)}")
        place = header.index(target)
        values = {row[place].strip() for row in rows} - {""}
        if len(values) < 2:
            raise DataError(f"{where}: the target {target!r} of {path} has {len(values)} different values: there is nothing to learn")


def _answers(test: pathlib.Path, path: pathlib.Path, measure: Measure, where: str) -> HiddenAnswers:
    header, rows = read_csv(test, where)
    if leaks := [target for target in measure.targets if target in header]:
        raise DataError(f"{where}: {test} holds the target {leaks[0]!r}, which roles would read: remove the column")
    ids = _ids(test, header, rows, measure.id_column, where)
    known_header, known_rows = read_csv(path, where)
    known = _ids(path, known_header, known_rows, measure.id_column, where)
    if set(ids) != set(known):
        other = sorted(set(ids) ^ set(known))
        raise DataError(f"{where}: {path} answers other ids than {test} asks: {len(other)} are in one only, e.g. {other[0]!r}")
    columns = {}
    for target in measure.targets:
        if target not in known_header:
            raise DataError(f"{where}: {path} lacks the target {target!r}; its columns are {', '.join(known_header)}")
        place = known_header.index(target)
        columns[target] = _values([row[place].strip() for row in known_rows], measure, f"{where}: {path}, {target!r}")
    return HiddenAnswers(tuple(known), columns)


def _ids(path: pathlib.Path, header: Sequence[str], rows: Sequence[Sequence[str]], column: str, where: str) -> list[str]:
    if column not in header:
        raise DataError(f"{where}: {path} lacks the id column {column!r}; its columns are {', '.join(header)}")
    ids = [same_id(row[header.index(column)].strip()) for row in rows]
    if len(set(ids)) < len(ids) or not ids:
        seen: set[str] = set()
        twice = next((row_id for row_id in ids if row_id in seen or seen.add(row_id)), None)
        raise DataError(f"{where}: the id column {column!r} of {path} is {'empty' if twice is None else f'not unique: {twice!r}'}")
    return ids


def _values(texts: Sequence[str], measure: Measure, where: str) -> np.ndarray:
    """HiddenAnswers as the metric reads them."""
    metric = METRICS[measure.metric]
    try:
        values = np.asarray([number(text) if metric.numbers else label(text) for text in texts], np.float64 if metric.numbers else object)
    except SubmissionError as error:
        raise DataError(f"{where}: {error.detail!r} is no value that {metric.name} can take ({error.problem})") from error
    classes = len(set(values.tolist()))
    if classes < 2 or metric.name == "auc" and classes != 2:
        raise DataError(f"{where}: {classes} different answers; {metric.name} needs {'two' if metric.name == 'auc' else 'at least two'}")
    return values


def _is_number(text: str) -> bool:
    try:
        number(text.strip())
    except SubmissionError:
        return False
    return True


def grade_submission(
    files: Workspace, kind: str, metric: str, targets: tuple[str, ...], id_column: str, answers: HiddenAnswers
) -> dict[str, Any]:
    """A submission's grade: the task's metric and the others of its form, each the mean over targets; labels or numbers as it asks."""
    numbers = METRICS[metric].numbers
    alike = [similar for similar in METRICS.values() if similar.kind == kind and similar.numbers == numbers]
    joined = join(files.files().get(SUBMISSION), answers.ids, id_column, targets, numbers)
    raw = {}
    for similar in alike if joined.ok else ():
        raw[similar.name] = float(np.mean([similar.function(answers.columns[name], joined.columns[name]) for name in targets]))
    return {"measured": tuple(similar.name for similar in alike), "problem": joined.problem, "detail": joined.detail, "raw": raw}
