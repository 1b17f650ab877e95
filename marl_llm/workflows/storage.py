"""Trajectories as JSON lines: for people (`episodes.jsonl`), as graphs (`trajectories.jsonl`), and back, to be replayed.

`trajectories.jsonl` holds one object per episode and per line. It holds everything that the models and the tools answered, so that `replay`
can play the episode again without either and check that the workflow still makes the same prompts of it:

==================  ============  ====================================================================================================
field               type          meaning
==================  ============  ====================================================================================================
`episode`           str           when-step/task/play (of evaluations when-task/play), unique in a run; the same id as in `episodes.jsonl`
`workflow`          str           its name
`when`              str           "before" training, "train", or "after" it
`step`              int or null   of training, as the caller counts it; null: of an evaluation that belongs to no step
`seed_step`         int           the step in the seeds of its draws, which a replay needs; all evaluations share one
`play`              int           which play of the task
`task`              object        `number`, `split`, `stratum`, `cluster`, `fields`, `hidden`
`aborted`              bool          it has no outcome
`failures`          list          objects `node`, `kind`, `message`
`events`            list          role calls and tool calls, parents first; the graph is in `parents`
`events[].id`       str           unique among all plays of the task
`events[].kind`     str           "role", "tool", or "score": what a `scorer` said of its one parent: the fields of `Score`
`events[].parents`  list of str   ids of the events that it followed
`events[].earned`   object        `team`, `local`, `components`; role calls of episodes that are not aborted
`events[]. ...`     ...           the fields of `RoleCall` (but `messages`) or `ToolUse`, arrays as lists
`paths`             list          per trajectory: `branch`, `turns`, `events` (ids in order of play), `fields` at its end, `earned` by call
`candidates`        list          the same for responses that were scored when they were made and not picked; their last role call is it
==================  ============  ====================================================================================================

Field values that are tuples come back as lists do in JSON: as tuples again, because workflows write tuples. A dictionary whose keys are no
texts stands as `{"workspace_sha256": null, "pairs": [[key, value], ...]}`, so that it comes back with its keys. What JSON cannot hold is an
error that names the field.

A field may hold a `Workspace`, or a container of some. The line has its digest, names and sizes; its content lies once in the folder
`workspaces` beside the file, under the digest, and `from_json` reads it from there.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from marl_llm.old_names import convert_line
from marl_llm.reporting import files
from marl_llm.tools.sandbox.workspace import DIGEST, Workspace
from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.samples import Sample, SampleTable
from marl_llm.workflows.trajectory import Earned, Episode, Event, FailedAttempt, RoleCall, Score, Task, ToolUse, Trajectory, state_writes

FILE_NAME = "trajectories.jsonl"
FOLDER_NAME = "workspaces"
_ARRAYS = {
    "tokens": np.int32, "log_probs": np.float64, "sampled_log_probs": np.float64, "entropy": np.float64, "kept_ids": np.int32,
    "versions": np.int32,
}  # fmt: skip


def record_name(episode: Episode, when: str) -> str:
    """Identity of a recorded play within a run. Evaluations draw with one step for all, so only the plays of training have a step in it."""
    return f"{when}-{episode.name if when == 'train' else f'{episode.task.number}/{episode.play}'}"


def _path_names(episode: Episode, when: str) -> list[str]:
    """Identity of each of its paths: the play's own, where it has one path or none."""
    name, paths = record_name(episode, when), episode.trajectories
    return [name] if len(paths) < 2 else [f"{name}/{path.branch}" for path in paths]


def named(episodes: Sequence[Episode], when: str, names: Set[str]) -> tuple[Episode, ...]:
    """The episodes of which `report_episodes` gives a path one of these names."""
    return tuple(episode for episode in episodes if names.intersection(_path_names(episode, when)))


def _step(episode: Episode, when: str, step: int | None) -> int | None:
    return episode.step if step is None and when == "train" else step


def to_json(rollout: Rollout, episode: Episode, when: str = "train", step: int | None = None) -> dict[str, Any]:
    """One line of `trajectories.jsonl`; see `write_trajectories`."""
    pay: dict[str, Any] = {}
    scores: dict[str, dict[str, Any]] = {}
    for path in (*episode.trajectories, *episode.candidates):
        for call, pay_of_call in path.earned.items():
            pay.setdefault(call, dataclasses.asdict(pay_of_call))
        for call, by_scorer in path.scores.items():
            for name, score in by_scorer.items():
                head = {"kind": "score", "id": f"{call}:{name}", "parents": [call], "scorer": name}
                scores[head["id"]] = {**head, **dataclasses.asdict(score)}
    task = episode.task
    about = {"number": task.number, "split": task.split, "stratum": task.stratum, "cluster": task.cluster}
    return {
        "episode": record_name(episode, when),
        "workflow": rollout.workflow.name,
        "when": when,
        "step": _step(episode, when, step),
        "seed_step": episode.step,
        "play": episode.play,
        "task": {**about, "fields": _unlike(task.fields), "hidden": _unlike(task.hidden)},
        "aborted": episode.aborted,
        "failures": [dataclasses.asdict(failure) for failure in episode.failures],
        "events": [_event(event, pay.get(event.id)) for event in episode.events() or episode.remains] + list(scores.values()),
        "paths": [_path(path) for path in episode.trajectories],
        "candidates": [_path(path) for path in episode.candidates],
    }


def _path(path: Trajectory) -> dict[str, Any]:
    pays = {call: dataclasses.asdict(pay) for call, pay in path.earned.items()}
    ids = [event.id for event in path.events]
    return {"branch": path.branch, "turns": path.turns, "events": ids, "fields": _unlike(path.fields), "earned": pays}


def _event(event: Event, pay: dict[str, Any] | None) -> dict[str, Any]:
    values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event) if field.name != "messages"}
    values |= {name: values[name].tolist() for name in _ARRAYS if isinstance(values.get(name), np.ndarray)}
    values["writes"] = _unlike(event.writes)
    return {"kind": "role" if isinstance(event, RoleCall) else "tool", **values, **({} if pay is None else {"earned": pay})}


def _unlike(value: Any) -> Any:
    """The value with every dictionary that JSON would not hold as it is in another that looks like a record of a workspace.

    Such are those that look like one themselves, for a policy may say anything; and those with keys that are no texts, as pairs.
    """
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return {DIGEST: None, "pairs": [[key, _unlike(item)] for key, item in value.items()]}
        values = {key: _unlike(item) for key, item in value.items()}
        return {DIGEST: None, "value": values} if DIGEST in values else values
    return [_unlike(item) for item in value] if isinstance(value, list | tuple) else value


def write_trajectories(path: str | pathlib.Path, rollout: Rollout, when: str = "train", step: int | None = None) -> None:
    """Appends every episode of a rollout.

    Args:
      path: a file, or a run's directory, where the file is `trajectories.jsonl`.
      when: "before" training, "train", or "after" it.
      step: of training; None: the rollout's own while it trains, and none of an evaluation.

    Raises:
      WorkflowError: a field holds what JSON cannot; it is named.
      files.WriteError: the file cannot be written.
    """
    file, workspaces = files.LineFile(_file(path)), {}

    def plain(value: Any) -> Any:
        if isinstance(value, Workspace):
            workspaces[value.digest] = value
        return files.to_json(value)

    try:
        for episode in rollout.episodes:
            line = to_json(rollout, episode, when, step)
            try:
                text = json.dumps(line, allow_nan=False, default=plain)
            except (TypeError, ValueError) as error:
                raise WorkflowError(f"episode {episode.name} cannot be written: {_culprit(line)}: {error}") from error
            for digest in list(workspaces):  # before the line, which would else name what is not there
                _keep(_file(path).parent / FOLDER_NAME / digest, workspaces.pop(digest))
            file.append(text)
    finally:
        file.close()


def _keep(path: pathlib.Path, workspace: Workspace) -> None:
    """Writes a workspace's content, unless it is there."""
    if not path.is_file() or path.stat().st_size != len(workspace.data):
        files.replace_file(path, workspace.data)


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
    return list({line["episode"]: convert_line(line) for line in files.read_whole(_file(path))}.values())


def _file(path: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(path)
    return path if path.suffix == ".jsonl" else path / FILE_NAME


def from_json(line: Mapping[str, Any], folder: str | pathlib.Path | None = None) -> Episode:
    """An episode as it was, without its wall time.

    `folder` is that of its file, where the content of workspaces lies. Raises `WorkflowError` for a workspace whose content is not there.
    """
    about, place = line["task"], None if folder is None else pathlib.Path(folder) / FOLDER_NAME
    fields, hidden = _values(about["fields"], place), _values(about["hidden"], place)
    task = Task(about["number"], fields, hidden, about["split"], about.get("stratum", ""), about.get("cluster", ""))
    events = {event["id"]: _read_event(event, place) for event in line["events"] if event["kind"] != "score"}
    scores: dict[str, dict[str, Score]] = {}
    for score in line["events"]:
        if score["kind"] == "score":
            values = {field.name: _values(score[field.name], place) for field in dataclasses.fields(Score) if field.name in score}
            scores.setdefault(score["parents"][0], {})[score["scorer"]] = Score(**values)
    paths = [_read_path(path, task, events, scores, place) for path in line["paths"]]
    candidates = tuple(_read_path(path, task, events, scores, place) for path in line.get("candidates", ()))
    failures = tuple(FailedAttempt(**failure) for failure in line["failures"])
    remains = tuple(events.values()) if line["aborted"] else ()
    attempts, step = len(failures) + (not line["aborted"]), line.get("seed_step", line["step"])
    return Episode(task, step, line["play"], tuple(paths), failures, attempts, remains, 0.0, candidates)


def _read_path(
    line: Mapping[str, Any],
    task: Task,
    events: Mapping[str, Event],
    scores: Mapping[str, Mapping[str, Score]],
    place: pathlib.Path | None,
) -> Trajectory:
    path = tuple(events[name] for name in line["events"])
    path_scores = {event.id: scores[event.id] for event in path if event.id in scores}
    pays = {call: Earned(**pay) for call, pay in line.get("earned", {}).items()}
    return Trajectory(task, path, _values(line["fields"], place), line["turns"], line["branch"], path_scores, pays)


def _read_event(line: Mapping[str, Any], place: pathlib.Path | None) -> Event:
    values = {name: value for name, value in line.items() if name not in ("kind", "earned")}
    values |= {name: tuple(values[name]) for name in ("parents", "items", "seed", "prompt_ids") if name in values}
    values |= {name: np.asarray(values[name], dtype) for name, dtype in _ARRAYS.items() if values.get(name) is not None}
    values["writes"] = _values(values["writes"], place)
    return (RoleCall if line["kind"] == "role" else ToolUse)(**values)


def _values(value: Any, place: pathlib.Path | None) -> Any:
    """A field's value as it was: tuples for lists, and workspaces from their folder."""
    if isinstance(value, Mapping):
        if value.get(DIGEST):
            return _workspace(value[DIGEST], place)
        if DIGEST in value and "pairs" in value:
            return dict(_values(value["pairs"], place))
        value = value["value"] if DIGEST in value else value
        return {key: _values(item, place) for key, item in value.items()}
    return tuple(_values(item, place) for item in value) if isinstance(value, list | tuple) else value


def _workspace(digest: str, place: pathlib.Path | None) -> Workspace:
    """The workspace of this digest. Raises `WorkflowError` if it is not there, or holds something else."""
    if place is None:
        raise WorkflowError("the line holds a workspace without its content: give the folder of its file, as in from_json(line, run)")
    try:
        workspace = Workspace((place / digest).read_bytes())
    except OSError as error:
        raise WorkflowError(f"the content of a workspace cannot be read: {error}; keep the folder {FOLDER_NAME} beside its file") from error
    if workspace.digest != digest:
        raise WorkflowError(f"{place / digest} does not hold what its name says: restore it, or remove the lines that name it")
    return workspace


def report_episodes(
    rollout: Rollout,
    table: SampleTable,
    when: str = "train",
    *,
    step: int | None = None,
    headline: str | None = None,
    advantages: Mapping[tuple[int, str], float] | None = None,
) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """Episodes and their tokens for `marl_llm.reporting.EpisodeWriter`: one per trajectory, with a role call per step.

    The candidates of a fork are the step's responses, and the one on this trajectory is chosen. Hidden fields and tool calls are recorded
    too: the report is read by people.

    Args:
      rollout, table: what was played, and its samples.
      when, step: see `write_trajectories`.
      headline: the workflow's metric that decides between the statuses "success" (1 or more), "partial" and "failed" (0 or less). Without
        one the status is "played". Aborted plays have the status "aborted", and their failures.
      advantages: of samples that trained, by task number and call id.

    Raises:
      WorkflowError: a field holds what JSON cannot, or the headline is no metric of the workflow.
    """
    if headline is not None and headline not in rollout.workflow.metrics:
        raise WorkflowError(f"headline {headline!r} is no metric of the workflow; it has {', '.join(rollout.workflow.metrics) or 'none'}")
    rows = {(s.instance, s.call.id): s for s in table.samples}
    worth = {} if advantages is None else advantages
    for episode in rollout.episodes:
        siblings: dict[str, list[RoleCall]] = {}
        for event in episode.events() or episode.remains:
            if isinstance(event, RoleCall):
                siblings.setdefault(event.group, []).append(event)
        task, head = episode.task, {"step": _step(episode, when, step), "when": when} | _head(rollout, episode)
        ends = [(path.events, path.turns, _outcome(rollout, path, headline)) for path in episode.trajectories]
        ends = ends or [(episode.remains, 0, {"status": "aborted"})]
        for name, (events, turns, outcome) in zip(_path_names(episode, when), ends, strict=True):
            calls = [event for event in events if isinstance(event, RoleCall)]
            steps = [_reported(call, [(other, rows[task.number, other.id]) for other in siblings[call.group]], worth) for call in calls]
            tools = _tools(rollout, task, events)
            played = head | outcome | {"episode": name, "turns": turns, "steps": [record for record, _ in steps], "tools": tools}
            yield played, {"episode": name, "steps": [drawn for _, drawn in steps]}


def _head(rollout: Rollout, episode: Episode) -> dict[str, Any]:
    """What the lines of all of an episode's trajectories say: its task, who plays, and what failed."""
    task = episode.task
    head: dict[str, Any] = {
        "task": _readable({"number": task.number, **task.fields}, f"task {task.number}"),
        "roles": dict(rollout.assignment.roles),
    }
    if task.hidden:
        head["hidden"] = _readable(task.hidden, f"task {task.number}, hidden")
    if episode.failures:
        head["failures"] = [f"{failure.node}: {failure.kind}: {failure.message}" for failure in episode.failures]
    return head


def _outcome(rollout: Rollout, path: Trajectory, headline: str | None) -> dict[str, Any]:
    """Status and score of a trajectory."""
    if headline is None:
        return {"status": "played"}
    score = float(rollout.workflow.metrics[headline](path))
    status = "success" if score >= 1 else "partial" if score > 0 else "failed"
    return {"status": status, "headline": headline, "score": score}


def _reported(
    call: RoleCall, group: list[tuple[RoleCall, Sample]], advantages: Mapping[tuple[int, str], float]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One step of an episode, and its tokens: a call among the candidates for its prompt."""
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

    def silent(other):
        return np.zeros(other.tokens.size) if other.log_probs is None else other.sampled_log_probs

    drawn = [{"ids": other.tokens, "log_probs": silent(other)} for other, _ in group]
    for responses_drawn, (other, row) in zip(drawn, group):
        responses_drawn |= {} if other.entropy is None else {"entropy": other.entropy}
        responses_drawn |= {"advantage": advantages[row.instance, other.id]} if (row.instance, other.id) in advantages else {}
    record = {"turn": call.turn, "role": call.role, "prompt": call.prompt, "group": call.group, "responses": responses}
    return record, {"turn": call.turn, "role": call.role, "prompt_ids": np.asarray(call.prompt_ids, np.int32), "responses": drawn}


def _tools(rollout: Rollout, task: Task, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Tool calls with what they read, and how many role calls came before each. Items of an `each` are no fields, and left out."""
    uses, role_calls = [], 0
    fields = {**rollout.workflow.start, **task.fields, **task.hidden}
    for event in events:
        if isinstance(event, RoleCall):
            role_calls += 1
        else:
            node = rollout.workflow.nodes.get(event.node)  # None: a tool that a role called within its response
            reads = {field: fields[field] for field in (node.reads if node else ()) if field in fields}
            use = {"after": role_calls, "node": event.node, "turn": event.turn, "seconds": event.seconds}
            use |= {"reads": _readable(reads, f"the input of {event.node!r}")} if node else {}
            use["writes"] = _readable(event.writes, f"the output of {event.node!r}")
            uses.append(use | ({} if event.refused is None else {"refused": event.refused}))
        fields |= state_writes(event)
    return uses


def _readable(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields as JSON values. Raises `WorkflowError` naming the one that JSON cannot hold."""
    readable = {}
    for name, value in fields.items():
        try:
            readable[name] = json.loads(json.dumps(value, allow_nan=False, default=files.to_json))
        except (TypeError, ValueError) as error:
            raise WorkflowError(f"{where}, field {name!r}, cannot be written: {error}") from error
    return readable
