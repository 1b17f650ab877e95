"""Plays of a foreign environment, as `marl_llm.serving.ChatServer` wrote them down, as a batch that a team learns from."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from marl_llm.algorithms import Samples
from marl_llm.training.batch import Batch
from marl_llm.training.packing import Tokens, TokenSample


class RecordError(ValueError):
    """A line of a record that cannot be trained on; the message has file and line."""


def read_recorded(path: str | pathlib.Path, roles: Sequence[str], *, step: int = 0, temperature: float | int = 1.0) -> Batch:
    """The plays of a record that were paid, as the samples of one step; `team.learn` takes them.

    A reply is a sample, its tokens those that were drawn (law 1). `instance` is the play's task: the `task` that came with its reward, or
    what its first reply was asked (model and prompt ids), so that plays of one question are compared. `agent` is the model's place in
    `roles`, `turn` counts its replies of the play, `team` is the play's `reward`, `local` what `rewards` says of the model; what was not
    said is 0. A play without a reward takes no part and is counted in `figures["void"]`.

    Args:
      roles: of the team, `Team.roles`.
      step: of training.
      temperature: of the recipe that learns: every reply must have been drawn with it, and with `top_p=1` (law 2).

    Raises:
      RecordError: a line that is no reply or reward of such a record, a model that is no role, another temperature, two replies of one
        number, or no paid play at all.
      OSError: no file.
    """
    plays: dict[str, dict[int, dict]] = {}
    paid: dict[str, dict] = {}
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            where = f"{path}, line {number}"
            line = _object(text)
            if not isinstance(line.get("episode"), str):
                raise RecordError(f"{where}: no reply and no reward of a play")
            if "ids" in line:
                replies = plays.setdefault(line["episode"], {})
                if replies.setdefault(line.get("number"), line) is not line:
                    raise RecordError(f"{where}: episode {line['episode']!r} has its reply {line['number']} already; IDs must be new")
                _check(line, roles, float(temperature), where)
            elif paid.setdefault(line["episode"], line) is not line:
                raise RecordError(f"{where}: episode {line['episode']!r} has its reward already")
    if not plays.keys() & paid.keys():
        raise RecordError(f"{path}: no play has a reward; post it to /episodes/ID/reward")
    return _batch(plays, paid, tuple(roles), step)


def _object(text: str) -> dict:
    """A line's JSON object; {} for anything else, as what a write that was cut short leaves."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _check(line: dict, roles: Sequence[str], temperature: float, where: str) -> None:
    lists = [line.get(name) for name in ("prompt", "ids", "sampled_log_probs")]
    if not all(isinstance(one, list) for one in lists) or len(lists[1]) != len(lists[2]) or not all(
        isinstance(line.get(name), int) for name in ("number", "version")
    ):
        raise RecordError(f"{where}: a reply needs its number, version, prompt and ids, and as many sampled_log_probs")
    if line.get("model") not in roles:
        raise RecordError(f"{where}: the model {line.get('model')!r} is no role; the roles are {', '.join(roles)}")
    drawn = {"temperature": line.get("temperature"), "top_p": line.get("top_p")}
    if drawn != {"temperature": temperature, "top_p": 1.0}:
        said = ", ".join(f"{name}={value}" for name, value in drawn.items())
        raise RecordError(f"{where}: it was drawn with {said}; to be trained on it needs temperature={temperature:g}, top_p=1")


def _batch(plays: dict[str, dict[int, dict]], paid: dict[str, dict], roles: tuple[str, ...], step: int) -> Batch:
    samples, tasks = [], {}
    columns: dict[str, list[Any]] = {name: [] for name in ("instance", "agent", "turn", "order", "trajectory", "team", "local", "version")}
    trained = [episode for episode in plays if episode in paid]
    for trajectory, episode in enumerate(trained):
        replies, pay = sorted(plays[episode].items()), paid[episode]
        first, turns = replies[0][1], dict.fromkeys(roles, 0)
        task = pay["task"] if "task" in pay else (first["model"], *first["prompt"])
        for order, line in replies:
            role = line["model"]
            turns[role] += 1
            if line["ids"]:  # a reply without a token is nothing to learn from
                samples.append(TokenSample(line["prompt"], line["ids"], line["sampled_log_probs"], f"{episode}, reply {order}"))
                found = (tasks.setdefault(task, len(tasks)), roles.index(role), turns[role] - 1, order, trajectory)
                earned = (float(pay.get("reward", 0.0)), float(pay.get("rewards", {}).get(role, 0.0)), int(line["version"]))
                for column, value in zip(columns.values(), (*found, *earned), strict=True):
                    column.append(value)
    tokens, count = Tokens.of(samples), len(samples)
    version = np.asarray(columns.pop("version"), np.int32)
    kinds = {name: np.float32 if name in ("team", "local") else np.int32 for name in columns}
    table = Samples(
        **{name: np.asarray(column, kinds[name]) for name, column in columns.items()},
        env=np.arange(count, dtype=np.int32),  # no reply has a second candidate
        where=np.ones(count, bool),
        tokens=tokens.size,
        prompt_ids=tokens.prompt,
    )
    rewards = [float(paid[episode].get("reward", 0.0)) for episode in trained]
    figures = {
        "success": float(np.mean(rewards)),
        "turns": count / len(trained),
        "void": float(len(plays) - len(trained)),
        "samples": float(count),
        "prompts": float(len(set(tokens.prompt.tolist()))),
        "prompt_tokens": float(np.sum(tokens.prompt_size)),
        "sampled_tokens": float(np.sum(tokens.size)),
    }
    return Batch(step, roles, tokens, table, version, figures, lambda count, when, advantages=None: [])


__all__ = ["RecordError", "read_recorded"]
