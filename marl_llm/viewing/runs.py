"""A run's plays, figures and outcomes as the viewer asks for them: a list of short rows, and one play or call at a time.

Files are followed while they grow: only new lines are read, and of each play only its row and its place in the file are kept.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import pathlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from marl_llm.reporting import episodes, files, metrics

SHOWN = 4000  # characters of a response that a play brings with it; the call brings the rest
LONGEST_TITLE = 120
OUTCOMES = "outcomes.jsonl"


class ViewError(ValueError):
    """There is nothing to look at; the message says what is missing and where."""


class Lines:
    """A JSON-lines file that may grow: where each whole line begins, and what was made of it.

    A file that became shorter was rewritten, and is read again from its start. A torn last line waits for its end.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self._read, self.version, self._known = path, 0, 0, None

    def news(self, read: Callable[[bytes], Any] = json.loads) -> Iterator[tuple[int, int, dict[str, Any]] | None]:
        """(offset, length, object) of every new line; None first where everything before is to be forgotten. `read`: line to object."""
        try:
            status = self.path.stat()
        except OSError:
            return
        if status.st_size < self._read or (self._known is not None and status.st_ino != self._known):
            self._read, self.version = 0, self.version + 1
            yield None
        self._known = status.st_ino
        with self.path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start, self._read = self._read, self._read + len(line)
                self.version += 1
                try:
                    value = read(line)
                except ValueError:  # a damaged line is left out, as in the report
                    continue
                if isinstance(value, dict):
                    yield start, len(line), value

    def at(self, place: tuple[int, int]) -> dict[str, Any]:
        """The object of a line."""
        with self.path.open("rb") as file:
            file.seek(place[0])
            return json.loads(file.read(place[1]))


class StoredRun:
    """A run directory. Safe to ask from several threads.

    Raises `ViewError` for a directory without the files of a run.
    """

    def __init__(self, path: files.Path):
        self.path = pathlib.Path(path)
        if not any((self.path / name).is_file() for name in (episodes.FILE_NAME, metrics.FILE_NAME, "config.json")):
            raise ViewError(f"{self.path} is no run directory: it has neither config.json nor {episodes.FILE_NAME}")
        self._plays, self._tokens = Lines(self.path / episodes.FILE_NAME), Lines(self.path / episodes.TOKENS_FILE_NAME)
        self._figures, self._outcomes = Lines(self.path / metrics.FILE_NAME), Lines(self.path / OUTCOMES)
        self._rows: dict[str, dict[str, Any]] = {}
        self._place: dict[str, tuple[int, int]] = {}
        self._token_place: dict[str, tuple[int, int]] = {}
        self._records: list[dict[str, Any]] = []
        self._ends: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self.name = self.path.resolve().name

    def refresh(self) -> int:
        """Reads what is new; a number that grows with every line."""
        with self._lock:
            for new in self._plays.news():
                if new is None:
                    self._rows.clear()
                    self._place.clear()
                    continue
                name = str(new[2].get("episode"))
                self._rows[name], self._place[name] = row_of(new[2]), new[:2]
            for new in self._tokens.news(_head):
                if new is None:
                    self._token_place.clear()
                else:
                    self._token_place[str(new[2].get("episode"))] = new[:2]
            for lines, kept in ((self._figures, self._records), (self._outcomes, self._ends)):
                for new in lines.news():
                    if new is None:
                        kept.clear()
                    else:
                        kept.append(new[2])
            return sum(one.version for one in (self._plays, self._tokens, self._figures, self._outcomes))

    def rows(self) -> list[dict[str, Any]]:
        """One short row per play, in the order of the file; see `row_of`."""
        self.refresh()
        return list(self._rows.values())

    def search(self, text: str) -> list[str]:
        """Ids of the plays in whose texts (prompts, responses, tools, task) a text occurs; case does not matter."""
        self.refresh()
        needle = json.dumps(text)[1:-1].lower().encode()
        if not needle or not self._place:
            return list(self._place)
        names = sorted(self._place, key=lambda name: self._place[name])
        starts, data = [self._place[name][0] for name in names], self._plays.path.read_bytes().lower()
        found, at = [], data.find(needle)
        while at >= 0:
            number = bisect.bisect_right(starts, at) - 1
            end = sum(self._place[names[number]]) if number >= 0 else 0
            if at < end:
                found.append(names[number])
            elif number + 1 < len(starts):  # a line that a later one replaced
                end = starts[number + 1]
            else:
                break
            at = data.find(needle, end)
        return found

    def play(self, name: str) -> dict[str, Any]:
        """A play without its prompts, long responses cut: `call` has them. Raises `KeyError`."""
        play = self._plays.at(self._place[name])
        for number, step in enumerate(play["steps"]):
            step["number"], step["prompt_characters"] = number, len(step.pop("prompt"))
            for response in step["responses"]:
                if len(response["text"]) > SHOWN:
                    response["characters"] = len(response["text"])
                    response["text"] = response["text"][:SHOWN]
        tokens = self._token_place.get(name)
        if tokens is not None:
            for step, drawn in zip(play["steps"], self._tokens.at(tokens)["steps"]):
                step["prompt_tokens"] = len(drawn["prompt_ids"])
                for response, ids in zip(step["responses"], drawn["responses"]):
                    response["tokens"] = len(ids["ids"])
                    response |= {key: ids[key] for key in ("advantage",) if key in ids}
        return play

    def call(self, name: str, number: int) -> dict[str, Any]:
        """One prompt with its responses, whole, and their tokens where they were stored. Raises `KeyError` or `IndexError`."""
        step = self._plays.at(self._place[name])["steps"][number]
        out = {"prompt": step["prompt"], "texts": [response["text"] for response in step["responses"]]}
        place = self._token_place.get(name)
        if place is None:
            return out
        record = self._tokens.at(place)
        drawn, pieces = record["steps"][number], record.get("pieces", {})
        roles = self._plays.at(self._place[name])["roles"]
        known = pieces.get(roles.get(step["role"], ""), pieces.get("", {}))
        spell = lambda ids: [known.get(str(i), f"‹{i}›") for i in ids]  # noqa: E731
        responses = [{**{k: x for k, x in one.items() if k != "ids"}, "pieces": spell(one["ids"])} for one in drawn["responses"]]
        return out | {"prompt_pieces": spell(drawn["prompt_ids"]), "specials": list(record.get("specials", ())), "responses": responses}

    def group(self, name: str, number: int) -> list[dict[str, Any]]:
        """The samples that a sample is compared with, as far as they are stored: candidates for its prompt, and calls of the same role and
        turn in other plays of its task at the same step."""
        mine = self._rows[name]
        step = self._plays.at(self._place[name])["steps"][number]
        found = []
        for other, row in self._rows.items():
            if any(row[part] != mine[part] for part in ("when", "step", "key")):
                continue
            play = self.play(other)
            for there in play["steps"]:
                if (there["role"], there["turn"]) == (step["role"], step["turn"]):
                    same = other == name and there["number"] == number
                    if other != name or same:
                        found += [{"play": other, "call": there["number"], "same": same, **one} for one in there["responses"]]
        return found

    def figures(self) -> dict[str, Any]:
        """Lines of `metrics.jsonl` that curves are drawn of, the headline's name, and the final evaluation."""
        self.refresh()
        keep = lambda name: name in ("phase", "step", "success", "turns", "void", "success_low", "success_high") or name.startswith("role/")  # noqa: E731
        records = [{k: x for k, x in one.items() if keep(k)} for one in self._records if one.get("phase") in ("train", "eval")]
        config, evaluation = self._whole("config.json"), self._whole("evaluation.json")
        parts = {name: part for name, part in evaluation.items() if isinstance(part, Mapping) and "success" in part}
        return {"headline": config.get("headline", "success"), "records": records, "evaluation": parts, "config": config}

    def outcomes(self) -> dict[str, dict[int, float]]:
        """Table of seats -> task -> mean score of its plays that are not void, of the final evaluation."""
        self.refresh()
        found: dict[str, dict[int, list[float]]] = {}
        for one in self._ends:
            if not one.get("void"):
                found.setdefault(one["seats"], {}).setdefault(one["task"], []).append(one["score"])
        return {seats: {task: sum(x) / len(x) for task, x in tasks.items()} for seats, tasks in found.items()}

    def _whole(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.path / name).read_bytes())
        except (OSError, ValueError):  # not there yet
            return {}
        return value if isinstance(value, dict) else {}


def _head(line: bytes) -> dict[str, Any]:
    """The id alone of a line of tokens, which are not looked at until they are asked for."""
    found = re.match(rb'\{"episode": ("(?:[^"\\]|\\.)*")', line)
    return {"episode": json.loads(found[1])} if found else json.loads(line)


def row_of(play: Mapping[str, Any]) -> dict[str, Any]:
    """What the list shows of a play: who, when, how it ended, and what each role was paid."""
    task, pay = play.get("task", {}), {}
    for step in play.get("steps", ()):
        for response in step["responses"]:
            if response["chosen"]:
                pay[step["role"]] = pay.get(step["role"], 0.0) + response["team"] + response["local"]
    score = play.get("score", {"success": 1.0, "failed": 0.0, "horizon": 0.0}.get(str(play.get("status"))))
    return {
        "id": str(play.get("episode")),
        "when": play.get("when"),
        "step": play.get("step"),
        "task": title_of(task),
        "key": hashlib.sha1(json.dumps(task, sort_keys=True).encode()).hexdigest()[:12],  # plays of one task have one key
        "number": task.get("number") if isinstance(task, Mapping) else None,
        "status": play.get("status"),
        "score": score,
        "turns": play.get("turns"),
        "calls": len(play.get("steps", ())),
        "tools": len(play.get("tools", ())),
        "paid": pay,
        "malformed": sum(not one["well_formed"] for step in play.get("steps", ()) for one in step["responses"] if one["chosen"]),
    }


def title_of(task: Any) -> str:
    """A task in one short line."""
    if not isinstance(task, Mapping):
        return str(task)[:LONGEST_TITLE]
    texts = [f"{key}: {value if isinstance(value, str) else json.dumps(value)}" for key, value in task.items() if key != "number"]
    return " · ".join(texts)[:LONGEST_TITLE]


def compared(first: StoredRun, second: StoredRun, seats: str = "after") -> dict[str, Any]:
    """Two runs on the same tasks of the final evaluation: `{rows: [{task, first, second, difference}], first, second, ties}`.

    Raises `ViewError` where a run has no outcomes of these seats, or where they share no task.
    """
    found = []
    for run in (first, second):
        known = run.outcomes()
        if seats not in known:
            raise ViewError(f"{run.path} has no outcomes of {seats!r} in {OUTCOMES}: it is not finished, or an older version trained it")
        found.append(known[seats])
    one, other = found
    common = sorted(one.keys() & other.keys())
    if not common:
        raise ViewError(f"{first.path} and {second.path} were evaluated on no common task")
    rows = [{"task": task, "first": one[task], "second": other[task], "difference": other[task] - one[task]} for task in common]
    rows.sort(key=lambda row: (-abs(row["difference"]), row["task"]))
    wins = {"first": sum(r["difference"] < 0 for r in rows), "second": sum(r["difference"] > 0 for r in rows)}
    return {"rows": rows, **wins, "ties": len(rows) - sum(wins.values())}
