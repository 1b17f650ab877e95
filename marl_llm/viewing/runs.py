"""A run's plays, figures and outcomes as the viewer asks for them: a list of short rows, and one play or call at a time.

Files are followed while they grow: only new lines are read, and of each play only its row and its place in the file are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from marl_llm.old_names import convert_evaluation, convert_line
from marl_llm.reporting import episodes, files, metrics
from marl_llm.untrusted import LARGEST_REWARD, check_number, is_bounded_number, open_file, parse_json, read_json_file

SHOWN = 4000  # characters of a response that a play brings with it; the call brings the rest
LONGEST_TITLE = 120
OUTCOMES = "outcomes.jsonl"
_ESCAPE = re.compile(rb"\\[u/]")  # a character of a JSON text that is spelled otherwise than it is searched


class ViewError(ValueError):
    """There is nothing to look at; the message says what is missing and where."""


class Lines:
    """A JSON-lines file that may grow: where each whole line begins, and what was made of it.

    A file that became shorter was rewritten, and is read again from its start. A torn last line waits for its end. A line that cannot be
    read is left out and named in `faults`; so is a file that cannot be opened.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self._read, self._number, self.version, self._known = path, 0, 0, 0, None
        self.faults: list[str] = []

    def news(self, read: Callable[[bytes, str], dict[str, Any]] | None = None) -> Iterator[tuple[int, int, dict[str, Any]] | None]:
        """(offset, length, object) of every new line; None first where everything before is to be forgotten.

        `read`: (line, its place in words) -> object; raises `ValueError` for one that is to be left out.
        """
        try:
            with open_file(self.path) as file:
                yield from self._news(file, read or read_object)
        except FileNotFoundError:
            return
        except ValueError as error:
            self._forget(str(error))

    def _news(self, file: IO[bytes], read: Callable[[bytes, str], dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]] | None]:
        status = os.fstat(file.fileno())
        if status.st_size < self._read or (self._known is not None and status.st_ino != self._known):
            self._forget()
            yield None
        self._known = status.st_ino
        file.seek(self._read)
        while line := file.readline(files.LINE.size + 2):
            length = len(line) if line.endswith(b"\n") else _to_end(file, len(line))
            if length is None:
                break
            start, self._read, self._number = self._read, self._read + length, self._number + 1
            self.version += 1
            if not line.strip():
                continue
            try:
                value = convert_line(read(line, f"{self.path}, line {self._number}"))
            except ValueError as error:
                self.faults.append(str(error))
                continue
            yield start, length, value

    def _forget(self, *faults: str) -> None:
        self._read, self._number, self.version, self.faults = 0, 0, self.version + 1, list(faults)

    def at(self, place: tuple[int, int]) -> dict[str, Any]:
        """The object of a line. Raises `ValueError` where the file has changed meanwhile."""
        return read_object(self.line(place), f"{self.path}, byte {place[0]:,}")

    def line(self, place: tuple[int, int]) -> bytes:
        """A line as it stands in the file."""
        with open_file(self.path) as file:
            return _line_at(file, place)


def _line_at(file: IO[bytes], place: tuple[int, int]) -> bytes:
    file.seek(place[0])
    return file.read(place[1])


def _to_end(file: IO[bytes], length: int) -> int | None:
    """The length of a line, of which so much is read, with all up to its end; None where it has none yet."""
    while rest := file.readline(1 << 20):
        length += len(rest)
        if rest.endswith(b"\n"):
            return length
    return None


def read_object(line: bytes, where: str) -> dict[str, Any]:
    """The object of a line. Raises `ValueError`, beginning with `where`."""
    return parse_json(line, where, dict, files.LINE)


def _read_play(line: bytes, where: str) -> dict[str, Any]:
    """A play that follows the schema, so that all who show it know its types, with rewards that can be added up."""
    play = read_object(line, where)
    try:
        episodes.validate_episode(play)
        check_number(play.get("score", 0.0), "score", -LARGEST_REWARD, LARGEST_REWARD)
        for i, step in enumerate(play["steps"]):
            for response in step["responses"]:
                for name, reward in (*((key, response[key]) for key in ("team", "local")), *response["components"].items()):
                    check_number(reward, f"steps[{i}], {ascii(name):.60}", -LARGEST_REWARD, LARGEST_REWARD)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return play


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
        self._files = (self._plays, self._tokens, self._figures, self._outcomes)
        self._rows: dict[str, dict[str, Any]] = {}
        self._place: dict[str, tuple[int, int]] = {}
        self._token_place: dict[str, tuple[int, int]] = {}
        self._records: list[dict[str, Any]] = []
        self._ends: list[dict[str, Any]] = []
        self._damaged: dict[str, str] = {}  # file -> why it cannot be read
        self._lock = threading.Lock()
        self.name = self.path.resolve().name

    def refresh(self) -> int:
        """Reads what is new; a number that grows with every line."""
        with self._lock:
            for new in self._plays.news(_read_play):
                if new is None:
                    self._rows.clear()
                    self._place.clear()
                    continue
                name = new[2]["episode"]
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
            return sum(file.version for file in self._files)

    def faults(self) -> list[str]:
        """What of the run's files could not be read and is left out, each with file, line and reason."""
        self.refresh()
        for name in ("config.json", "evaluation.json"):
            self.read(name)
        return [*self._damaged.values(), *(fault for file in self._files for fault in file.faults)]

    def rows(self) -> list[dict[str, Any]]:
        """One short row per play, in the order of the file; see `row_of`."""
        self.refresh()
        return list(self._rows.values())

    def search(self, text: str) -> list[str]:
        """Ids of the plays in one of whose texts a text occurs: of prompts, responses, tools, task, hidden fields and failures.

        Names of fields are no texts. Upper and lower case, full and half width, composed and decomposed letters are the same.
        """
        self.refresh()
        needle = folded(text)
        if not needle or not self._place:
            return list(self._place)
        with open_file(self._plays.path) as file:
            return [name for name, place in list(self._place.items()) if _has(_line_at(file, place), needle)]

    def play(self, name: str) -> dict[str, Any]:
        """A play without its prompts, long responses cut: `call` has them. Raises `KeyError`."""
        play = self._play(name)
        drawn = self._drawn(name, play)
        for number, step in enumerate(play["steps"]):
            step["number"], step["prompt_characters"] = number, len(step.pop("prompt"))
            for response in step["responses"]:
                if len(response["text"]) > SHOWN:
                    response["characters"] = len(response["text"])
                    response["text"] = response["text"][:SHOWN]
        for step, ids_of in zip(play["steps"], drawn["steps"] if drawn else ()):
            step["prompt_tokens"] = len(ids_of["prompt_ids"])
            for response, ids in zip(step["responses"], ids_of["responses"]):
                response["tokens"] = len(ids["ids"])
                response |= {key: ids[key] for key in episodes.WORTH if key in ids}
        return play

    def _play(self, name: str) -> dict[str, Any]:
        place = self._place[name]
        return convert_line(_read_play(self._plays.line(place), f"{self._plays.path}, byte {place[0]:,}"))

    def _drawn(self, name: str, play: Mapping[str, Any]) -> dict[str, Any] | None:
        """The tokens of a play; None where none were stored, or none that fit it."""
        if name not in self._token_place:
            return None
        try:
            tokens = self._tokens.at(self._token_place[name])
            episodes.validate_tokens(tokens, play)
        except ValueError as error:
            fault = f"{self._tokens.path}, play {name}: {error}"
            if fault not in self._tokens.faults:
                self._tokens.faults.append(fault)
            return None
        return tokens

    def call(self, name: str, number: int) -> dict[str, Any]:
        """One prompt with its responses, whole, and their tokens where they were stored. Raises `KeyError` or `IndexError`."""
        play = self._play(name)
        return self._call(play, self._drawn(name, play), number)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """All that `call` gives of a play."""
        play = self._play(name)
        drawn = self._drawn(name, play)
        return [self._call(play, drawn, number) for number in range(len(play["steps"]))]

    def _call(self, play: Mapping[str, Any], record: Mapping[str, Any] | None, number: int) -> dict[str, Any]:
        step = play["steps"][number]
        out = {"prompt": step["prompt"], "texts": [response["text"] for response in step["responses"]]}
        if record is None:
            return out
        drawn, pieces = record["steps"][number], record.get("pieces", {})
        known = pieces.get(play["roles"][step["role"]], pieces.get("", {}))

        def spell(ids):
            return [known.get(str(i), f"‹{i}›") for i in ids]

        responses = [
            {**{k: x for k, x in response.items() if k != "ids"}, "pieces": spell(response["ids"])} for response in drawn["responses"]
        ]
        return out | {"prompt_pieces": spell(drawn["prompt_ids"]), "specials": list(record.get("specials", ())), "responses": responses}

    def group(self, name: str, number: int) -> list[dict[str, Any]]:
        """The stored samples of a call's group: candidates for its prompt, and calls of its role and turn in other plays of its task at
        the same step."""
        own_row = self._rows[name]
        step = self._play(name)["steps"][number]
        samples = []
        for other, row in self._rows.items():
            if any(row[part] != own_row[part] for part in ("when", "step", "key")):
                continue
            play = self.play(other)
            for other_step in play["steps"]:
                if (other_step["role"], other_step["turn"]) == (step["role"], step["turn"]):
                    same = other == name and other_step["number"] == number
                    if other != name or same:
                        sample = {"play": other, "call": other_step["number"], "same": same}
                        samples += [sample | response for response in other_step["responses"]]
        return samples

    def records(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`."""
        self.refresh()
        return list(self._records)

    def evaluation(self) -> dict[str, Any]:
        """The final evaluation; empty before it."""
        return convert_evaluation(self.read("evaluation.json"))

    def headline(self) -> str:
        """The name of the metric that a play's score is: of the evaluation, else of the config or of a play."""
        evaluation, config = self.read("evaluation.json"), self.read("config.json")
        played = next((row["headline"] for row in self._rows.values() if row["headline"]), None)
        names = (evaluation.get("headline"), find_key(config, "headline"), played)
        return next((name for name in names if isinstance(name, str) and name), "success")

    def outcomes(self) -> dict[str, dict[int, float]]:
        """Table of seats -> task -> mean score of its plays that are not aborted, of the final evaluation."""
        self.refresh()
        scores: dict[str, dict[int, list[float]]] = {}
        for record in self._ends:
            seats, task, score = (record.get(key) for key in ("seats", "task", "score"))
            known = isinstance(seats, str) and type(task) is int and is_bounded_number(score)
            if known and not record.get("aborted"):
                scores.setdefault(seats, {}).setdefault(task, []).append(score)
        return {seats: {task: sum(x) / len(x) for task, x in tasks.items()} for seats, tasks in scores.items()}

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run; empty where it is not there yet, or damaged (then `faults` names it)."""
        self._damaged.pop(name, None)
        try:
            return read_json_file(self.path / name)
        except FileNotFoundError:  # not there yet
            return {}
        except (OSError, ValueError) as error:
            self._damaged[name] = str(error)
            return {}


def find_key(config: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that has a value at the top of a config, else inside one of its objects; None if there is none."""
    inner = [value for value in config.values() if isinstance(value, Mapping)]
    values = (level.get(name) for level in (config, *inner) for name in names)
    return next((value for value in values if value not in (None, "", [], {})), None)


def folded(text: str) -> str:
    """A text as it is searched: NFKC and case folded."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _has(line: bytes, needle: str) -> bool:
    """Whether a folded text occurs in a text of the play that a line holds."""
    if line.isascii() and not _ESCAPE.search(line) and json.dumps(needle)[1:-1].encode() not in line.lower():
        return False  # a line without escapes holds its texts verbatim
    return any(needle in folded(text) for text in texts_of(read_object(line, "the file has changed meanwhile")))


def texts_of(play: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a play that a search looks at."""
    for step in play["steps"]:
        yield step["prompt"]
        yield from (response["text"] for response in step["responses"])
    for use in play.get("tools", ()):
        yield from _texts([use.get("reads"), use["writes"], use.get("refused")])
    yield from _texts([play["task"], play.get("hidden"), play.get("failures")])


def _texts(value: Any) -> Iterator[str]:
    """The texts within a JSON value, without the names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def _head(line: bytes, where: str) -> dict[str, Any]:
    """The id alone of a line of tokens, which are not looked at until they are asked for."""
    match = re.match(rb'\{"episode": ("(?:[^"\\]|\\.)*")', line)
    return read_object(b'{"episode": %b}' % match[1] if match else line, where)


def row_of(play: Mapping[str, Any]) -> dict[str, Any]:
    """What the list shows of a play: who, when, how it ended, and what each role was paid."""
    task, pay, malformed = play.get("task", {}), {}, 0
    for step in play.get("steps", ()):
        for response in step["responses"]:
            if response["chosen"]:
                pay[step["role"]] = pay.get(step["role"], 0.0) + response["team"] + response["local"]
                malformed += not response["well_formed"]
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
        "headline": play.get("headline"),
        "turns": play.get("turns"),
        "calls": len(play.get("steps", ())),
        "tools": len(play.get("tools", ())),
        "paid": pay,
        "malformed": malformed,
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
    outcomes = []
    for run in (first, second):
        known = run.outcomes()
        if seats not in known:
            raise ViewError(f"{run.path} has no outcomes of {seats!r} in {OUTCOMES}: it is not finished, or an older version trained it")
        outcomes.append(known[seats])
    first_scores, second_scores = outcomes
    common = sorted(first_scores.keys() & second_scores.keys())
    if not common:
        raise ViewError(f"{first.path} and {second.path} were evaluated on no common task")
    pairs = [(task, first_scores[task], second_scores[task]) for task in common]
    rows = [{"task": task, "first": a, "second": b, "difference": b - a} for task, a, b in pairs]
    rows.sort(key=lambda row: (-abs(row["difference"]), row["task"]))
    wins = {"first": sum(r["difference"] < 0 for r in rows), "second": sum(r["difference"] > 0 for r in rows)}
    return {"rows": rows, **wins, "ties": len(rows) - sum(wins.values())}
