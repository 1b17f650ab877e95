"""Whole plays, written down: `episodes.jsonl`, and the tokens beside it in `episodes_tokens.jsonl`.

Both files hold one JSON object per episode and per line. `episodes.jsonl` is for people and for analysis:

=====================  ============  =================================================================================
field                  type          meaning
=====================  ============  =================================================================================
`episode`              str           identity, unique in the file; an id that occurs again replaces the earlier episode
`step`                 int ≥ 0       the step of training, counted as in `metrics.jsonl`: 1 for the first, 0 before training.
                       or null       null: an evaluation that belongs to no step of a run
`when`                 str           "before" training (after the supervised warm-up), during "train", or "after" it
`task`                 object        the task instance as JSON. Grid games put `map` in it: a list of equally long
                                     strings, one per row: `#` wall, `.` free, `A` agent, `G` goal, `*` agent on the
                                     goal, any other character as itself
`roles`                object        role → name of the model that played it
`status`               str           "success", "partial", "failed", "horizon" (turns ran out), "aborted" (could not be played), or the
                                     game's own word
`turns`                int ≥ 0       turns played
`hidden`               object        optional: fields of the task that no role could read, such as a gold answer
`headline`             str           optional: the metric that decides between success and failure
`score`                float         optional: its value
`failures`             list of str   optional: what went wrong with the play
`tools`                list          optional: one object per tool call, in the order of play
`tools[].after`        int ≥ 0       how many of `steps` came before it
`tools[].node`         str           its name
`tools[].turn`         int ≥ 0       turn, from 0
`tools[].seconds`      float         how long it took
`tools[].reads`        object        optional: field → value that it read
`tools[].writes`       object        field → value that it wrote
`tools[].refused`      str           optional: why a role's call could not be served
`steps`                list          one object per prompt that was answered, in the order of play
`steps[].turn`         int ≥ 0       turn, from 0
`steps[].role`         str           who spoke; a key of `roles`
`steps[].prompt`       str           the prompt as text
`steps[].group`        int or str    id of the group that gives the baseline of these responses
`steps[].responses`    list ≥ 1      the K branches that were sampled from the prompt
`…responses[].text`    str           the response as text, malformed or not
`…responses[].chosen`  bool          did the game go on from this branch? One at most is true; none means that the step
                                     had no effect
`…responses[].team`    float         team reward
`…responses[].local`   float         the role's own reward
`…responses[].components`  object    name → float: the parts that `team` and `local` are made of; may be empty
`…responses[].well_formed` bool      could the role's grammar read it?
`…responses[].truncated`   bool      did it hit the token budget before it ended?
`steps[].state_after`  list of str   optional: the map after the chosen response took effect, in the alphabet of `map`
=====================  ============  =================================================================================

`episodes_tokens.jsonl` holds what the sampler emitted, so that any step can be scored again, token by token:

====================================  =============  ==================================================================
field                                 type           meaning
====================================  =============  ==================================================================
`episode`                             str            the same id
`steps[].turn`, `steps[].role`        int, str       the same turns and roles in the same order
`steps[].prompt_ids`                  list of int    token ids of the prompt, `P` of them, without padding
`steps[].responses[].ids`             list of int    token ids of the response, `R` of them, the end token included
`steps[].responses[].log_probs`       list of float  log-prob (nats) of each of those ids, under the distribution that
                                                     it was drawn from
`steps[].responses[].entropy`         list of float  optional: entropy (nats) of the raw policy at each of those ids
`steps[].responses[].advantage`       float          optional: what the update was told of this sample; sampled plays of
                                                     training only, and recipes without a critic
`pieces`                              object         optional: model → id (as text) → the text of that token; model "" for
                                                     all models. Of the ids of this record
`specials`                            list of str    optional: the spellings of special tokens
====================================  =============  ==================================================================
"""

import json
import math
import numbers
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.errors import UserError
from marl_llm.old_names import convert_line
from marl_llm.reporting import files

WHEN = ("before", "train", "after")
FILE_NAME = "episodes.jsonl"
TOKENS_FILE_NAME = "episodes_tokens.jsonl"
_OPTIONAL = ("hidden", "headline", "score", "failures", "tools")

# of a response: what the update was told, what it added to the team's last reward, and what that would have been without it
WORTH = ("advantage", "credit", "without")


class EpisodeError(UserError, ValueError):
    """An episode that does not follow the schema. The message says where, what was found, and what belongs there."""


class EpisodeWriter:
    """Appends episodes to `episodes.jsonl` and their tokens to `episodes_tokens.jsonl`; a context manager.

    Args:
      workdir: the run's directory, made if need be.
      resume_step: None appends to whatever is there. A step says that the run goes on from the checkpoint of that step:
        episodes of later steps are dropped, and those of that step are replaced when they are played again (same id).
        -1 drops everything: nothing was saved, the run starts over.

    Raises:
      files.WriteError: when the work directory cannot be written.
      files.LineError: when `resume_step` is given and a line before the last is not JSON.
    """

    def __init__(self, workdir: files.Path, resume_step: int | None = None):
        workdir = pathlib.Path(workdir)
        if resume_step is not None:
            kept = set()
            if (workdir / FILE_NAME).exists():
                kept = {e.get("episode") for e in read_episodes(workdir) if (e.get("step") or 0) <= resume_step}
            files.keep_lines(workdir / FILE_NAME, lambda episode: episode.get("episode") in kept)
            files.keep_lines(workdir / TOKENS_FILE_NAME, lambda tokens: tokens.get("episode") in kept)
        self._episodes = files.LineFile(workdir / FILE_NAME)
        self._tokens = files.LineFile(workdir / TOKENS_FILE_NAME)
        self._written: set[str] = set()

    def look(self, episode: Mapping[str, Any], tokens: Mapping[str, Any] | None = None) -> list[str]:
        """The lines of the tokens and of the episode, without writing them. Raises `EpisodeError` for what cannot be written."""
        validate_episode(episode)
        if tokens is not None:
            validate_tokens(tokens, episode)
        try:
            return [json.dumps(part, default=files.to_json, allow_nan=False) for part in (tokens, episode)]
        except (TypeError, ValueError) as error:
            raise EpisodeError(f"episode {episode['episode']!r}: {error}") from error

    def write(self, episode: Mapping[str, Any], tokens: Mapping[str, Any] | None = None) -> None:
        """Checks and appends one episode, and its tokens unless they are None (a team without tokens of its own).

        Raises:
          EpisodeError: against the schema, or an id that this writer has already written. Nothing is written then.
          files.WriteError: disk full or unwritable; the episodes before stay readable.
        """
        name = episode.get("episode")
        if name in self._written:
            raise EpisodeError(f"episode: the id {name!r} was already written: give every episode its own id")
        lines = self.look(episode, tokens)
        if tokens is not None:
            self._tokens.append(lines[0])  # first, so that an episode in the file always has its tokens
        self._episodes.append(lines[1])
        self._written.add(name)

    def close(self) -> None:
        """Closes both files; a second call does nothing."""
        try:
            self._episodes.close()
        finally:
            self._tokens.close()

    def __enter__(self) -> "EpisodeWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_episodes(path: files.Path) -> list[dict[str, Any]]:
    """All episodes of an `episodes.jsonl`, given as that file or as its work directory.

    A torn last line is left out, and of two episodes with one id the later counts.

    Raises:
      FileNotFoundError: when there is no such file.
      files.LineError: for any other line that is not a JSON object.
    """
    return _read(path, FILE_NAME)


def read_tokens(path: files.Path) -> list[dict[str, Any]]:
    """All token records of an `episodes_tokens.jsonl`; as `read_episodes`."""
    return _read(path, TOKENS_FILE_NAME)


def _read(path: files.Path, name: str) -> list[dict[str, Any]]:
    path = pathlib.Path(path)
    objects = files.read_whole(path / name if path.is_dir() else path)
    return list({o.get("episode"): convert_line(o) for o in objects}.values())


def worst_plays(plays: Sequence[tuple[dict[str, Any], Any]], count: int) -> list[tuple[dict[str, Any], Any]]:
    """The `count` plays of `(episode, tokens)` with the lowest scores, in their order; of equal ones the first. Aborted plays have none."""

    def score(number: int) -> float:
        episode = plays[number][0]
        return episode.get("score", float(episode["status"] == "success"))

    played = [number for number, (episode, _) in enumerate(plays) if episode["status"] != "aborted"]
    return [plays[number] for number in sorted(sorted(played, key=score)[:count])]


def validate_episode(episode: Mapping[str, Any]) -> None:
    """Raises `EpisodeError` unless `episode` follows the schema at the head of this module."""
    _keys(episode, "episode", ("episode", "step", "when", "task", "roles", "status", "turns", "steps"), _OPTIONAL)
    _text(episode["episode"], "episode")
    if episode["step"] is not None:
        _count(episode["step"], "step")
    if episode["when"] not in WHEN:
        raise EpisodeError(f"when: found {episode['when']!r}; put one of {', '.join(WHEN)}")
    _mapping(episode["task"], "task")
    if "map" in episode["task"]:
        _rows(episode["task"]["map"], "task.map")
    _mapping(episode["roles"], "roles")
    for role, model in episode["roles"].items():
        _text(model, f"roles[{role!r}]")
    _text(episode["status"], "status")
    _count(episode["turns"], "turns")
    _mapping(episode.get("hidden", {}), "hidden")
    _text(episode.get("headline", ""), "headline")
    _finite(episode.get("score", 0.0), "score")
    for i, failure in enumerate(_sequence(episode.get("failures", ()), "failures")):
        _text(failure, f"failures[{i}]")
    for i, step in enumerate(_sequence(episode["steps"], "steps")):
        _validate_step(step, f"steps[{i}]", episode["roles"])
    for i, use in enumerate(_sequence(episode.get("tools", ()), "tools")):
        _validate_tool(use, f"tools[{i}]", len(episode["steps"]))
    try:
        json.dumps(episode, default=files.to_json, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise EpisodeError(f"episode {episode['episode']!r}: not valid JSON ({error}); put JSON values only") from error


def _validate_tool(use: Any, where: str, steps: int) -> None:
    _keys(use, where, ("after", "node", "turn", "seconds", "writes"), optional=("refused", "reads"))
    _count(use["after"], f"{where}.after")
    if use["after"] > steps:
        raise EpisodeError(f"{where}.after: found {use['after']}, the episode has {steps} steps; count the steps that came before it")
    _text(use["node"], f"{where}.node")
    _count(use["turn"], f"{where}.turn")
    _finite(use["seconds"], f"{where}.seconds")
    _mapping(use["writes"], f"{where}.writes")
    _mapping(use.get("reads", {}), f"{where}.reads")
    _text(use.get("refused", ""), f"{where}.refused")


def _validate_step(step: Any, where: str, roles: Mapping[str, Any]) -> None:
    _keys(step, where, ("turn", "role", "prompt", "responses", "group"), optional=("state_after",))
    _count(step["turn"], f"{where}.turn")
    _text(step["role"], f"{where}.role")
    if step["role"] not in roles:
        raise EpisodeError(f"{where}.role: found {step['role']!r}; put one of the episode's roles: {', '.join(roles)}")
    _text(step["prompt"], f"{where}.prompt")
    group = step["group"]
    if isinstance(group, bool) or not isinstance(group, numbers.Integral | str):
        raise EpisodeError(f"{where}.group: found {type(group).__name__}; put the group's id, an int or a str")
    if "state_after" in step:
        _rows(step["state_after"], f"{where}.state_after")
    responses = _sequence(step["responses"], f"{where}.responses")
    if not responses:
        raise EpisodeError(f"{where}.responses: found none; put every branch that was sampled, one at least")
    for k, response in enumerate(responses):
        _validate_response(response, f"{where}.responses[{k}]")
    chosen = [k for k, response in enumerate(responses) if response["chosen"]]
    if len(chosen) > 1:
        raise EpisodeError(f"{where}.responses: {chosen} are all chosen; the game can go on from one branch only")


def _validate_response(response: Any, where: str) -> None:
    _keys(response, where, ("text", "chosen", "team", "local", "components", "well_formed", "truncated"))
    _text(response["text"], f"{where}.text")
    for flag in ("chosen", "well_formed", "truncated"):
        if not isinstance(response[flag], bool | np.bool_):
            raise EpisodeError(f"{where}.{flag}: found {type(response[flag]).__name__}; put True or False")
    for reward in ("team", "local"):
        _finite(response[reward], f"{where}.{reward}")
    _mapping(response["components"], f"{where}.components")
    for name, value in response["components"].items():
        _finite(value, f"{where}.components[{name!r}]")


def validate_tokens(tokens: Mapping[str, Any], episode: Mapping[str, Any]) -> None:
    """Raises `EpisodeError` unless `tokens` follows the schema and mirrors `episode`, step by step, branch by branch."""
    _keys(tokens, "tokens", ("episode", "steps"), optional=("pieces", "specials"))
    _mapping(tokens.get("pieces", {}), "tokens.pieces")
    if tokens["episode"] != episode["episode"]:
        raise EpisodeError(f"tokens.episode: found {tokens['episode']!r}; put the episode's id {episode['episode']!r}")
    steps = _sequence(tokens["steps"], "tokens.steps")
    if len(steps) != len(episode["steps"]):
        raise EpisodeError(f"tokens.steps: {len(steps)} steps, the episode has {len(episode['steps'])}; write one for each")
    for i, (step, played) in enumerate(zip(steps, episode["steps"])):
        where = f"tokens.steps[{i}]"
        _keys(step, where, ("turn", "role", "prompt_ids", "responses"))
        if (step["turn"], step["role"]) != (played["turn"], played["role"]):
            written, expected = (step["turn"], step["role"]), (played["turn"], played["role"])
            raise EpisodeError(f"{where}: turn and role are {written}, in the episode {expected}; keep the order of play")
        _array(step["prompt_ids"], f"{where}.prompt_ids", "iu")
        responses = _sequence(step["responses"], f"{where}.responses")
        if len(responses) != len(played["responses"]):
            raise EpisodeError(
                f"{where}.responses: {len(responses)} branches, the episode has {len(played['responses'])}; write one for each"
            )
        for k, response in enumerate(responses):
            here = f"{where}.responses[{k}]"
            _keys(response, here, ("ids", "log_probs"), optional=("entropy", *WORTH))
            for name in WORTH:
                _finite(response.get(name, 0.0), f"{here}.{name}")
            ids = _array(response["ids"], f"{here}.ids", "iu")
            log_probs = _array(response["log_probs"], f"{here}.log_probs", "fiu")
            if ids.size != log_probs.size:
                raise EpisodeError(f"{here}: {ids.size} ids, {log_probs.size} log_probs; write one log-prob per token")
            if "entropy" in response and _array(response["entropy"], f"{here}.entropy", "fiu").size != ids.size:
                raise EpisodeError(f"{here}: {ids.size} ids, {len(response['entropy'])} entropies; write one per token")
            if not np.isfinite(log_probs).all():
                raise EpisodeError(f"{here}.log_probs: not finite; a token that was drawn has a finite log-prob")


def _keys(value: Any, where: str, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    _mapping(value, where)
    missing = [key for key in required if key not in value]
    if missing:
        raise EpisodeError(f"{where}: {', '.join(missing)} missing; see the schema in marl_llm/reporting/episodes.py")
    unknown = [key for key in value if key not in required and key not in optional]
    if unknown:
        known = ", ".join([*required, *optional])
        raise EpisodeError(f"{where}: unknown {', '.join(map(repr, unknown))}; the schema knows {known}")


def _mapping(value: Any, where: str) -> None:
    if not isinstance(value, Mapping):
        raise EpisodeError(f"{where}: found {type(value).__name__}; put an object (dict)")
    for key in value:
        if not isinstance(key, str):
            raise EpisodeError(f"{where}: the key {key!r} is {type(key).__name__}; JSON keys are strings")


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise EpisodeError(f"{where}: found {type(value).__name__}; put a list")
    return value


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise EpisodeError(f"{where}: found {type(value).__name__}; put a string")


def _count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise EpisodeError(f"{where}: found {value!r:.60}; put an int, 0 or more")


def _finite(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise EpisodeError(f"{where}: found {value!r:.60}; put a finite number")


def _rows(value: Any, where: str) -> None:
    for i, row in enumerate(_sequence(value, where)):
        _text(row, f"{where}[{i}]")
        if len(row) != len(value[0]):
            raise EpisodeError(f"{where}[{i}]: {len(row)} characters, the first row has {len(value[0])}; make rows equal")


def _array(value: Any, where: str, kinds: str) -> np.ndarray:
    flat = value if isinstance(value, np.ndarray) else list(_sequence(value, where))
    try:
        array = np.asarray(flat)
    except ValueError as error:  # lists of unequal length inside
        raise EpisodeError(f"{where}: found a ragged list; put a flat list of numbers") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in kinds):
        want = "ints" if kinds == "iu" else "floats"
        raise EpisodeError(f"{where}: found shape {array.shape} of {array.dtype}; put a flat list of {want}")
    return array
