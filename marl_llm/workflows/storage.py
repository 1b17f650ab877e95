"""Trajectories as JSON lines: for people (`episodes.jsonl`), as graphs (`trajectories.jsonl`), and back, to be replayed.

`trajectories.jsonl` holds one object per episode and per line. It holds everything that the models and the tools answered, so that `replay`
can play the episode again without either and check that the workflow still makes the same prompts of it:

==================  ============  ====================================================================================================
field               type          meaning
==================  ============  ====================================================================================================
`episode`           str           step/task/play, unique in a run
`workflow`          str           its name
`step`, `play`      int           of training; which play of the task
`task`              object        `number`, `split`, `fields`, `hidden`
`void`              bool          it has no outcome
`failures`          list          objects `node`, `kind`, `message`
`events`            list          role calls and tool calls, parents first; the graph is in `parents`
`events[].id`       str           unique among all plays of the task
`events[].kind`     str           "role", "tool", or "score": what a `scorer` said of its one parent, with `value` and `message`
`events[].parents`  list of str   ids of the events that it followed
`events[].earned`   object        `team`, `local`, `components`; role calls of episodes that are not void
`events[]. ...`     ...           the fields of `RoleCall` or `ToolUse`, arrays as lists
`ways`              list          per trajectory: `branch`, `turns`, `events` (ids in order of play), `fields` at its end, `earned` by call
`candidates`        list          the same for responses that were scored when they were made and not picked; their last role call is it
==================  ============  ====================================================================================================

Field values that are tuples come back as lists do in JSON: as tuples again, because workflows write tuples. What JSON cannot hold is an
error that names the field.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from marl_llm.reporting import files
from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.samples import SampleTable
from marl_llm.workflows.trajectory import Earned, Episode, Event, Failure, RoleCall, Score, Task, ToolUse, Trajectory

FILE_NAME = "trajectories.jsonl"
_ARRAYS = {"tokens": np.int32, "log_probs": np.float64, "sampled_log_probs": np.float64, "entropy": np.float64, "kept_ids": np.int32}


def to_json(rollout: Rollout, episode: Episode) -> dict[str, Any]:
    """One line of `trajectories.jsonl`."""
    pay: dict[str, Any] = {}
    scores: dict[str, dict[str, Any]] = {}
    for way in (*episode.trajectories, *episode.candidates):
        for call, one in way.earned.items():
            pay.setdefault(call, dataclasses.asdict(one))
        for call, said in way.scores.items():
            for name, score in said.items():
                head = {"kind": "score", "id": f"{call}:{name}", "parents": [call], "scorer": name}
                scores[head["id"]] = {**head, **dataclasses.asdict(score)}
    task = episode.task
    return {
        "episode": episode.name,
        "workflow": rollout.workflow.name,
        "step": episode.step,
        "play": episode.play,
        "task": {"number": task.number, "split": task.split, "fields": dict(task.fields), "hidden": dict(task.hidden)},
        "void": episode.void,
        "failures": [dataclasses.asdict(failure) for failure in episode.failures],
        "events": [_event(event, pay.get(event.id)) for event in episode.events() or episode.remains] + list(scores.values()),
        "ways": [_way(way) for way in episode.trajectories],
        "candidates": [_way(way) for way in episode.candidates],
    }


def _way(way: Trajectory) -> dict[str, Any]:
    pays = {call: dataclasses.asdict(one) for call, one in way.earned.items()}
    ids = [event.id for event in way.events]
    return {"branch": way.branch, "turns": way.turns, "events": ids, "fields": dict(way.fields), "earned": pays}


def _event(event: Event, pay: dict[str, Any] | None) -> dict[str, Any]:
    found = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    found |= {name: found[name].tolist() for name in _ARRAYS if isinstance(found.get(name), np.ndarray)}
    found["writes"] = dict(event.writes)
    return {"kind": "role" if isinstance(event, RoleCall) else "tool", **found, **({} if pay is None else {"earned": pay})}


def write_trajectories(path: str | pathlib.Path, rollout: Rollout) -> None:
    """Appends every episode of a rollout.

    Args:
      path: a file, or a run's directory, where the file is `trajectories.jsonl`.

    Raises:
      WorkflowError: a field holds what JSON cannot; it is named.
      files.WriteError: the file cannot be written.
    """
    out = files.LineFile(_file(path))
    try:
        for episode in rollout.episodes:
            line = to_json(rollout, episode)
            try:
                text = json.dumps(line, allow_nan=False, default=files.to_json)
            except (TypeError, ValueError) as error:
                raise WorkflowError(f"episode {episode.name} cannot be written: {_culprit(line)}: {error}") from error
            out.append(text)
    finally:
        out.close()


def _culprit(line: dict[str, Any]) -> str:
    """Which field of an episode JSON cannot hold."""
    places = [("task.fields", line["task"]["fields"]), ("task.hidden", line["task"]["hidden"])]
    places += [(f"the output of {event['node']!r}", event["writes"]) for event in line["events"]]
    for where, fields in places:
        for name, value in fields.items():
            try:
                json.dumps(value, allow_nan=False, default=files.to_json)
            except (TypeError, ValueError):
                return f"{where}, field {name!r}, holds {type(value).__name__}"
    return "a number that is not finite"


def read_trajectories(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """All lines of a `trajectories.jsonl`, as objects; a torn last line is left out, and of equal ids the later counts."""
    return list({line["episode"]: line for line in files.read_whole(_file(path))}.values())


def _file(path: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(path)
    return path if path.suffix == ".jsonl" else path / FILE_NAME


def from_json(line: Mapping[str, Any]) -> Episode:
    """An episode as it was, without its wall time."""
    task = Task(line["task"]["number"], _tuples(line["task"]["fields"]), _tuples(line["task"]["hidden"]), line["task"]["split"])
    events = {event["id"]: _read_event(event) for event in line["events"] if event["kind"] != "score"}
    scores: dict[str, dict[str, Score]] = {}
    for one in line["events"]:
        if one["kind"] == "score":
            scores.setdefault(one["parents"][0], {})[one["scorer"]] = Score(one["value"], one["message"])
    ways = [_read_way(way, task, events, scores) for way in line["ways"]]
    candidates = tuple(_read_way(way, task, events, scores) for way in line.get("candidates", ()))
    failures = tuple(Failure(**failure) for failure in line["failures"])
    remains = tuple(events.values()) if line["void"] else ()
    return Episode(task, line["step"], line["play"], tuple(ways), failures, len(failures) + (not line["void"]), remains, 0.0, candidates)


def _read_way(line: Mapping[str, Any], task: Task, events: Mapping[str, Event], scores: Mapping[str, Mapping[str, Score]]) -> Trajectory:
    own = tuple(events[name] for name in line["events"])
    said = {event.id: scores[event.id] for event in own if event.id in scores}
    pays = {call: Earned(**pay) for call, pay in line.get("earned", {}).items()}
    return Trajectory(task, own, _tuples(line["fields"]), line["turns"], line["branch"], said, pays)


def _read_event(line: Mapping[str, Any]) -> Event:
    values = {name: value for name, value in line.items() if name not in ("kind", "earned")}
    values |= {name: tuple(values[name]) for name in ("parents", "items", "seed", "prompt_ids") if name in values}
    values |= {name: np.asarray(values[name], dtype) for name, dtype in _ARRAYS.items() if values.get(name) is not None}
    values["writes"] = _tuples(values["writes"])
    return (RoleCall if line["kind"] == "role" else ToolUse)(**values)


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def report_episodes(rollout: Rollout, table: SampleTable, when: str = "train") -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Episodes and their tokens for `marl_llm.reporting.EpisodeWriter`: one per trajectory, with a role call per step.

    The candidates of a fork are the step's responses, and the one on this way is chosen. Void plays are episodes of status "void".
    """
    rows = {(s.instance, s.call.id): s for s in table.samples}
    for episode in rollout.episodes:
        siblings: dict[str, list[RoleCall]] = {}
        for event in episode.events() or episode.remains:
            if isinstance(event, RoleCall):
                siblings.setdefault(event.group, []).append(event)
        ways = [(f"/{way.branch}", way.calls, way.turns) for way in episode.trajectories]
        ways = ways or [("", tuple(e for e in episode.remains if isinstance(e, RoleCall)), 0)]
        for suffix, calls, turns in ways:
            name = episode.name + (suffix if len(ways) > 1 else "")
            head = {
                "episode": name,
                "step": episode.step,
                "when": when,
                "task": json.loads(json.dumps({"number": episode.task.number, **episode.task.fields}, default=files.to_json)),
                "roles": dict(rollout.assignment.roles),
                "status": "void" if episode.void else "played",
                "turns": turns,
            }
            steps, tokens = [], []
            for call in calls:
                group = [(other, rows[episode.task.number, other.id]) for other in siblings[call.group]]
                responses = [
                    {
                        "text": other.text,
                        "chosen": other is call,
                        "team": row.team,
                        "local": row.local,
                        "components": dict(row.components),
                        "well_formed": other.legal,
                        "truncated": other.truncated,
                    }
                    for other, row in group
                ]
                steps.append({"turn": call.turn, "role": call.role, "prompt": call.prompt, "group": call.group, "responses": responses})
                drawn = [
                    {"ids": other.tokens, "log_probs": np.zeros(other.tokens.size) if other.log_probs is None else other.sampled_log_probs}
                    for other, _ in group
                ]
                tokens.append(
                    {"turn": call.turn, "role": call.role, "prompt_ids": np.asarray(call.prompt_ids, np.int32), "responses": drawn}
                )
            yield {**head, "steps": steps}, {"episode": name, "steps": tokens}
