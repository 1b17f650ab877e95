"""Replay of rare successes: tasks of earlier steps are trained on again, in place of tasks without signal.

A task whose plays all have the same return teaches nothing, and where successes are rare most tasks are such. As in VL-Rethinker's
selective sample replay (Wang et al. 2025, arXiv:2504.08837) and TRL's GRPO with a replay buffer, a group of an earlier step takes the place
of one without signal. So fresh samples with signal are always trained on, and a step trains on as many tasks as it plays.

A task is kept if it has signal and at most `RARE` of its samples did better than their groups. All its samples are kept, with their rewards
and with the log-probs that they were drawn with. Their groups meet no fresh sample, so their advantages stay as they were, and
`recipe.rollout_correction` weighs each token by min(π / μ, threshold), π the model before the update and μ the one that drew the token. The
least replayed tasks come first, of these the newest. A task is dropped after `TIMES` replays, at the age of `AGE` steps, when a newer play
of it has signal, and when there are more than `replay` or `MOST_BYTES`. Which ones are replayed depends on tasks and their draws alone.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.algorithms import Recipe, Samples
from marl_llm.training.batch import Batch, Plays, check_ids
from marl_llm.training.packing import Tokens
from marl_llm.training.play_options import PlayOptions
from marl_llm.training.recorded import ROUNDING
from marl_llm.training.refills import grouping_conflict
from marl_llm.training.update import compute_advantages
from marl_llm.untrusted import check_count
from marl_llm.workflows import WorkflowError

RARE = 0.25  # share of a task's samples with signal: one of four plays, two of eight
AGE = 8  # steps: truncated weights bound how much an old sample counts, not how far it is from the policy
TIMES = 2  # steps that replay a task
MOST_BYTES = 16 << 20  # of kept arrays; a checkpoint's state is read up to 64 MiB
RENUMBERED = ("env", "trajectory")  # columns whose numbers mean something within a rollout alone
TOKEN_ARRAYS = {field.name for field in dataclasses.fields(Tokens)} - {"names", "shape", "joint"}
FLOATS = {"team", "local", "credit", "kl", "running", "log_probs"}  # float32; MASKS: bool; all other arrays and columns: int32
MASKS = {"where", "played", "team_where", "truncated"}


def replay_conflict(
    replay: int,
    recipe: Recipe,
    *,
    max_staleness: int = 0,
    oversample: int = 0,
    coached: bool = False,
    permuted: bool = False,
    program: bool = False,
    several: bool = False,
) -> str:
    """Why `replay` cannot be had beside these; empty if it can. `program`: a foreign one plays; `several`: processes."""
    grouping, late = grouping_conflict(recipe), "max_staleness" if max_staleness else "oversample"
    reasons = (
        (grouping, grouping),
        (recipe.rollout_correction == "none", "samples of earlier steps met other parameters, which the loss must weigh: set "
         "recipe.rollout_correction=truncate (or mask)"),
        (recipe.sampling == "tree", "a tree is one play of a task, so no play of it succeeds more rarely than others"),
        (recipe.scale_advantages == "batch", "recipe.scale_advantages='batch' divides by the spread of the whole step"),
        (recipe.advantages, "a function in recipe.advantages may compare earlier samples with fresh ones"),
        (recipe.kl_coef and recipe.kl_where == "reward", "recipe.kl_where='reward' pays earlier samples anew at each step"),
        (recipe.distill_coef, "recipe.distill_coef is for samples of the model as it is"),
        (max_staleness or oversample, f"{late} trains on samples of before an update too, and both together were not tried"),
        (coached, "a coach is told of whole steps"),
        (permuted, "control.permute_rewards deals out the rewards of fresh and earlier samples together"),
        (program, "episodes of a foreign program are trained on once"),
        (several, "it was not tried with several processes; use one"),
    )  # fmt: skip
    return next((f"replay={replay}: {why}" for wrong, why in reasons if replay and wrong), "")


@dataclasses.dataclass(frozen=True, eq=False)
class KeptTask:
    """All samples of a task that count, as they were drawn and paid.

    Attributes:
      number: of the task. step: that played it. times: that it was replayed.
      arrays: those of its `Tokens`, the columns of its table and `version`, by name; see `Batch`.
    """

    number: int
    step: int
    times: int
    arrays: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, batch: Batch, number: int) -> KeptTask:
        """A task of a batch."""
        counts = batch.table.where if batch.table.played is None else batch.table.where | batch.table.played
        rows = np.flatnonzero(counts & (batch.table.instance == number))
        columns = {name: x[rows] for name, x in _columns(batch).items()}
        columns |= {name: np.unique(columns[name], return_inverse=True)[1].astype(np.int32) for name in RENUMBERED}
        tokens = vars(Tokens.of(batch.tokens.samples(rows)))
        return cls(number, batch.step, 0, columns | {name: x for name, x in tokens.items() if isinstance(x, np.ndarray)})

    @property
    def tokens(self) -> Tokens:
        """Of its samples."""
        return Tokens(**{name: x for name, x in self.arrays.items() if name in TOKEN_ARRAYS})

    @property
    def table(self) -> Samples:
        """Its columns as an update reads them. Raises `TypeError` for a column that is missing, or that no table has."""
        return Samples(**{name: x for name, x in self.columns.items() if name != "version"})

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Of its samples `[S]`, by name."""
        return {name: x for name, x in self.arrays.items() if name not in TOKEN_ARRAYS}


def _columns(batch: Batch) -> dict[str, np.ndarray]:
    """The columns of a batch by name, `version` among them."""
    columns = {field.name: getattr(batch.table, field.name) for field in dataclasses.fields(Samples)} | {"version": batch.version}
    return {name: np.asarray(x) for name, x in columns.items() if x is not None}


def success_shares(recipe: Recipe, tokens: Tokens, table: Samples) -> dict[int, float]:
    """Task -> the share of its samples that did better than their groups, of those whose groups have signal; 0 if none has."""
    advantages, shares = compute_advantages(recipe, tokens, table), {}
    for number in np.unique(table.instance[table.where]).tolist():
        differing = table.where & (table.instance == number) & ~advantages.zero_variance
        shares[number] = float(np.sum(advantages.estimates[differing] > 0) / max(np.sum(differing), 1))
    return shares


def with_replayed(batch: Batch, out: Sequence[int], kept: Sequence[KeptTask]) -> Batch:
    """The batch with these tasks behind its samples. The samples of the tasks `out` count no longer; the plays stay those of the batch."""
    samples = batch.tokens.samples(range(len(batch.tokens)))
    tokens = Tokens.of([*samples, *(sample for task in kept for sample in task.tokens.samples(range(len(task.tokens))))])
    parts = [_columns(batch)]
    parts[0]["where"] = parts[0]["where"] & ~np.isin(parts[0]["instance"], out)
    for task in kept:
        following = {name: int(parts[-1][name].max()) + 1 for name in RENUMBERED}
        parts.append(task.columns | {name: task.columns[name] + following[name] for name in RENUMBERED})

    def column(name: str) -> np.ndarray:  # those that a rollout may lack are masks, which mean all samples then
        return np.concatenate([part.get(name, np.ones(len(part["instance"]), bool)) for part in parts])

    def episodes(count: int, when: str, advantages: np.ndarray | None = None) -> Plays:
        return batch.episodes(count, when, None if advantages is None else advantages[: len(samples)])

    columns = {name: column(name) for name in set().union(*parts)} | {"prompt_ids": tokens.prompt}
    version = columns.pop("version")
    return dataclasses.replace(batch, tokens=tokens, table=Samples(**columns), version=version, episodes=episodes)


def _bounded(tasks: Sequence[KeptTask], step: int, limit: int) -> tuple[KeptTask, ...]:
    """Those that `step` may replay, the newest first."""
    young = [task for task in tasks if task.times < TIMES and step - task.step <= AGE]
    newest = sorted(young, key=lambda task: (-task.step, task.number))[:limit]
    sizes = np.cumsum([sum(x.nbytes for x in task.arrays.values()) for task in newest])
    return tuple(task for task, total in zip(newest, sizes) if total <= MOST_BYTES)


class Replay:
    """Keeps tasks of earlier steps and fills batches up with them, see the module's text.

    Args:
      play: its `replay` is the number of tasks that are kept at most; 0: every batch stays as it is.
      recipes: of the team, and of its models.
      vocabularies: number of tokens of each role's model, in the order of the roles; what a checkpoint holds must be within them.
      beside: see `replay_conflict`, which raises `WorkflowError` here.

    Attributes:
      kept: step -> tasks that were kept before it, for the step that was played last and the one behind it.
    """

    def __init__(self, play: PlayOptions, recipes: Sequence[Recipe], vocabularies: Sequence[int], **beside: bool):
        self.limit, self._recipe, self._vocabularies = play.replay, recipes[0], vocabularies
        for recipe in recipes:
            if why := replay_conflict(self.limit, recipe, max_staleness=play.max_staleness, oversample=play.oversample, **beside):
                raise WorkflowError(why)
        self.kept: dict[int, tuple[KeptTask, ...]] = {}

    def fill(self, batch: Batch) -> Batch:
        """The batch with kept tasks in place of those without signal; its own rare successes are kept for later steps.

        Further figures: `replay/tied`, fresh tasks without signal; `replay/tasks`, tasks that took their places; `replay/age`, mean steps
        since these were played; `replay/kept`, tasks that are kept now.
        """
        if not self.limit:
            return batch
        step, before = batch.step, self.kept.get(batch.step, self.kept[max(self.kept)] if self.kept else ())
        shares = success_shares(self._recipe, batch.tokens, batch.table)
        tied = [number for number, share in shares.items() if not share]
        usable = [task for task in before if task.number not in shares]
        chosen = sorted(usable, key=lambda task: (task.times, -task.step, task.number))[: len(tied)]
        rest = [dataclasses.replace(task, times=task.times + (task in chosen)) for task in before if not shares.get(task.number)]
        rare = [KeptTask.of(batch, number) for number, share in shares.items() if 0 < share <= RARE]
        self.kept = {step: before, step + 1: _bounded([*rest, *rare], step + 1, self.limit)}
        counts = {"tied": len(tied), "tasks": len(chosen), "kept": len(self.kept[step + 1])}
        counts |= {"age": sum(step - task.step for task in chosen) / max(len(chosen), 1)}
        figures = batch.figures | {f"replay/{name}": float(count) for name, count in counts.items()}
        return dataclasses.replace(with_replayed(batch, tied[: len(chosen)], chosen) if chosen else batch, figures=figures)

    def state(self) -> dict[str, Any]:
        """As JSON, for a checkpoint; empty where nothing is replayed. An array is its dtype, its shape and its bytes in base64."""
        if not self.limit:
            return {}
        tasks = {f"{task.step}.{task.number}": task for kept in self.kept.values() for task in kept}
        kept = {str(step): [[task.number, task.step, task.times] for task in tasks] for step, tasks in self.kept.items()}
        return {"replay": {"kept": kept, "arrays": {name: _as_json(task.arrays) for name, task in tasks.items()}}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`; checkpoints of runs without replay have none. Raises `LookupError`, `TypeError` or `ValueError` for a
        state that holds no tasks."""
        saved = state.get("replay", {"kept": {}, "arrays": {}})
        arrays = {name: _from_json(texts) for name, texts in saved["arrays"].items()}
        self.kept = {
            int(step): tuple(_restored(*counts, arrays[f"{counts[1]}.{counts[0]}"]) for counts in tasks)
            for step, tasks in saved["kept"].items()
        }
        for step, tasks in self.kept.items():
            if len({task.number for task in tasks}) < len(tasks) or any(task.step >= step for task in tasks):
                raise ValueError(f"replay: tasks before step {step} must be distinct and of earlier steps")
            for task in tasks:
                agents = task.table.agent
                if np.any((agents < 0) | (agents >= len(self._vocabularies))):
                    raise ValueError(f"replay: task {task.number} names a role that the team does not have")
                check_ids(task.tokens, task.table, self._vocabularies)


def _restored(number: Any, step: Any, times: Any, arrays: Mapping[str, np.ndarray]) -> KeptTask:
    """A task of a checkpoint, which anybody may have written: its arrays must be what their names say, and fit each other."""
    counts = {"number": number, "step": step, "times": times}
    task = KeptTask(**{name: check_count(x, f"replay: {name} of a task") for name, x in counts.items()}, arrays=arrays)
    for name, x in arrays.items():
        _check_array(f"replay: {name} of task {number}", name, x)
    tokens, table = task.tokens, task.table
    alike = {len(x) for name, x in arrays.items() if name not in ("ids", "log_probs", "kept_ids")}
    places = np.concatenate([tokens.ids, tokens.prompt_at, tokens.prompt_size, tokens.response_at, tokens.size, arrays["version"]])
    does_fit = alike == {len(tokens)} and np.all(tokens.prompt_at + tokens.prompt_size <= len(tokens.ids) - len(tokens.log_probs))
    does_fit &= all(np.all((arrays[name] >= 0) & (arrays[name] < len(tokens))) for name in RENUMBERED)
    if not does_fit or np.any(places < 0) or np.any(tokens.response_at + tokens.size > len(tokens.log_probs)):
        raise ValueError(f"replay: the arrays of task {number} do not fit each other")
    if np.any(table.instance != number):
        raise ValueError(f"replay: the samples of task {number} are another's")
    return task


def _check_array(where: str, name: str, x: np.ndarray) -> None:
    """Raises `ValueError` for an array of a checkpoint whose values are not of its name's kind."""
    dtype = np.dtype(np.float32 if name in FLOATS else bool if name in MASKS else np.int32)
    if x.dtype != dtype or x.ndim != (2 if name == "kept_ids" else 1):
        raise ValueError(f"{where} is {x.dtype}{list(x.shape)}, but must be {dtype}")
    if name in FLOATS and not np.all(np.isfinite(x)):
        raise ValueError(f"{where} is not finite")
    if name == "log_probs" and np.any(x > ROUNDING):
        raise ValueError(f"{where} holds a log-prob of {x.max():g}, above 0")
    if name == "budget" and np.any(x < 1):
        raise ValueError(f"{where} leaves no room for a token")


def _as_json(arrays: Mapping[str, np.ndarray]) -> dict[str, list]:
    return {name: [x.dtype.str, list(x.shape), base64.b64encode(x.tobytes()).decode()] for name, x in arrays.items()}


def _from_json(texts: Mapping[str, list]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(base64.b64decode(text), dtype).reshape(shape) for name, (dtype, shape, text) in texts.items()}
