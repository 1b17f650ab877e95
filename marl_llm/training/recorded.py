"""Plays of a foreign environment, as `marl_llm.serving.ChatServer` wrote them down, as a batch that a team learns from."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from marl_llm.algorithms import Samples
from marl_llm.training.batch import Batch
from marl_llm.training.packing import Tokens, TokenSample
from marl_llm.untrusted import is_bounded_number, parse_json

ROUNDING = 0.01  # how far above 0 a log-prob may come out


class RecordError(ValueError):
    """A line of a record that cannot be trained on; the message has file and line."""


def read_recorded(path: str | pathlib.Path, roles: Sequence[str], *, step: int = 0, temperature: float | int = 1.0) -> Batch:
    """The plays of a record that were paid, as the samples of one step; `team.learn` takes them.

    A reply is a sample, its tokens those that were drawn (law 1). `instance` is the play's task: the `task` that came with its reward, or
    what its first reply was asked (model and prompt ids), so that plays of one question are compared. `agent` is the model's place in
    `roles`, `turn` counts its replies of the play, `team` is the play's `reward`, `local` what `rewards` says of the model; what was not
    said is 0. A play without a reward takes no part and is counted in `figures["aborted"]`.

    Args:
      roles: of the team, `Team.roles`.
      step: of training.
      temperature: of the recipe that learns: every reply must have been drawn with it, and with `top_p=1` (law 2).

    Raises:
      RecordError: a line that is no reply or reward of such a record, a model that is no role, another temperature, two replies of one
        number, a reply behind its play's reward, or no paid play at all.
      OSError: no file.
    """
    plays: dict[str, dict[int, dict]] = {}
    paid: dict[str, dict] = {}
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            where = f"{path}, line {number}"
            line = _read_line(text, where)
            episode = line["episode"]
            if "ids" not in line:
                if episode in paid:
                    raise RecordError(f"{where}: episode {episode!r} has its reward already")
                _check_reward(line, roles, where)
                paid[episode] = line
                continue
            _check_reply(line, roles, float(temperature), where)
            if episode in paid:
                raise RecordError(f"{where}: a reply of episode {episode!r} behind its reward, which did not pay for it: remove the line")
            if line["number"] in plays.setdefault(episode, {}):
                raise RecordError(f"{where}: episode {episode!r} has its reply {line['number']} already; IDs must be new")
            plays[episode][line["number"]] = line
    if not plays.keys() & paid.keys():
        raise RecordError(f"{path}: no play has a reward; post it to /episodes/ID/reward")
    return batch_of(plays, paid, tuple(roles), step)


def _read_line(text: bytes, where: str) -> dict:
    try:
        line = parse_json(text, where)
    except ValueError as error:
        raise RecordError(f"{where}: no reply and no reward of a play: {str(error).removeprefix(where).lstrip(': ')}") from None
    if not isinstance(line.get("episode"), str):
        raise RecordError(f"{where}: no reply and no reward of a play: its episode is missing")
    return line


def _check_reply(line: dict, roles: Sequence[str], temperature: float, where: str) -> None:
    prompt, ids, log_probs = (line.get(name) for name in ("prompt", "ids", "sampled_log_probs"))
    if not (
        all(isinstance(values, list) for values in (prompt, ids, log_probs))
        and len(ids) == len(log_probs)
        and all(type(value) is int and 0 <= value < 2**31 for value in (line.get("number"), line.get("version"), *prompt, *ids))
    ):
        raise RecordError(f"{where}: a reply needs its number, version, prompt and ids, and as many sampled_log_probs")
    if not all(is_bounded_number(value) and value < ROUNDING for value in log_probs):
        raise RecordError(f"{where}: sampled_log_probs are numbers of at most 0")
    if line.get("model") not in roles:
        raise RecordError(f"{where}: the model {line.get('model')!r} is no role; the roles are {', '.join(roles)}")
    drawn = {"temperature": line.get("temperature"), "top_p": line.get("top_p")}
    if drawn != {"temperature": temperature, "top_p": 1.0}:
        settings = ", ".join(f"{name}={value}" for name, value in drawn.items())
        raise RecordError(f"{where}: it was drawn with {settings}; to be trained on it needs temperature={temperature:g}, top_p=1")


def _check_reward(line: dict, roles: Sequence[str], where: str) -> None:
    by_role = line.get("rewards", {})
    if not isinstance(by_role, dict) or not all(map(is_bounded_number, [line.get("reward", 0.0), *by_role.values()])):
        raise RecordError(f"{where}: a reward is a number, and rewards are one per role")
    if strange := [role for role in by_role if role not in roles]:
        raise RecordError(f"{where}: {strange[0]!r} is paid, which is no role; the roles are {', '.join(roles)}")
    if not isinstance(line.get("task", ""), str):
        raise RecordError(f"{where}: task is a text")


def batch_of(plays: dict[str, dict[int, dict]], paid: dict[str, dict], roles: tuple[str, ...], step: int) -> Batch:
    """Lines of replies, by episode and number, and of pays, by episode, as `read_recorded` gives them."""
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
                identity = (tasks.setdefault(task, len(tasks)), roles.index(role), turns[role] - 1, order, trajectory)
                earned = (float(pay.get("reward", 0.0)), float(pay.get("rewards", {}).get(role, 0.0)), int(line["version"]))
                for column, value in zip(columns.values(), (*identity, *earned), strict=True):
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
        "aborted": float(len(plays) - len(trained)),
        "samples": float(count),
        "prompts": float(len(set(tokens.prompt.tolist()))),
        "prompt_tokens": float(np.sum(tokens.prompt_size)),
        "sampled_tokens": float(np.sum(tokens.size)),
    }
    return Batch(step, roles, tokens, table, version, figures, lambda count, when, advantages=None: [])


__all__ = ["RecordError", "batch_of", "read_recorded"]
