"""Every generator of reasoning-gym, or every game of TextArena, played by junk, scripted and random seats: one line of JSON.

    pip install 'marl_llm[rg,ta]'
    nice -n 5 python -m benchmarks.external_games reasoning_gym                    all of its generators
    nice -n 5 python -m benchmarks.external_games reasoning_gym chain_sum maze     some
    nice -n 5 python -m benchmarks.external_games textarena                        all games that are played here

Each generator deals problems of all splits; the junk battery of `marl_llm.checking`, hostile texts, the generator's own answers and answers
of other problems are scored. Nothing may raise, leave the process-wide random state changed, write a file, or start a process of its own
outside the sandbox. `paid` is the mean score of each kind of player; `most_junk` is the most that junk was paid.
Each game of TextArena is played by each kind of seats, and once more from the list of its moves: the same deal and moves must give the
same fields. No play may open a connection.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import json
import os
import pathlib
import random
import resource
import socket
import statistics
import sys
import tempfile
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from marl_llm.checking.junk import TEXTS
from marl_llm.games.external.guards import foreign_package
from marl_llm.games.external.reasoning_gym import EXECUTING, REFUSED, SHARES, ReasoningGym, problems_of
from marl_llm.games.external.textarena import GAMES, TextArena, textarena
from marl_llm.games.registry import GameError
from marl_llm.tools.sandbox import default_sandbox
from marl_llm.workflows import Task

PROBLEMS = 3  # of each split
DEALS, MOVES = 3, 60  # of each game, by each kind of seats; most moves of a play
HOSTILE = {
    "exponent": "1e999999999", "nan": "nan", "power": "9**9**9**9", "nested": "(" * 900 + ")" * 900, "lists": "[[1, 2], [3]]",
    "null": "null", "write": "__import__('pathlib').Path('HOST').write_text('x')", "call": "open('HOST', 'w')", "exit": "exit()",
    "zero": "0", "division": "1/0", "lines": "\n".join("1 2 3" for _ in range(200)), "negative": "-1", "words": "yes no true false",
}  # fmt: skip


def state() -> str:
    """The process-wide random state."""
    return repr((random.getstate(), np.random.get_state()[1].tolist()))  # noqa: NPY002


def scored(game: ReasoningGym, answer: str, place: int) -> dict[str, Any]:
    """The verdict on an answer, wherever its scorer runs. Raises `InfrastructureError` where the sandbox gives none."""
    if game.name in EXECUTING:
        return asyncio.run(game.score_in_sandbox(answer, place)).outcome()
    return game.score(answer, place)


def replay(name: str) -> dict[str, Any]:
    """What one generator's scorer paid each kind of player, and what went wrong."""
    game = ReasoningGym(name, {})
    draw = problems_of(game, 20_000)
    tasks = [task for split in SHARES for task in draw(split, 0, PROBLEMS)]
    scores = {}
    for kind in ("script", "random"):
        scores[kind] = [scored(game, answer, task.hidden["place"]) for task, answer in answers_of(kind, game, tasks)]
    places = (tasks[0],) if name in EXECUTING else tasks[:2]
    scores["junk"] = [scored(game, text, task.hidden["place"]) for task in places for text in (*TEXTS.values(), *HOSTILE.values())]
    scores["junk"] += [scored(game, task.fields["question"], task.hidden["place"]) for task in places]
    every = [verdict for verdicts in scores.values() for verdict in verdicts]
    return {
        "answers": len(every),
        "paid": {kind: round(statistics.fmean(v["score"] for v in verdicts), 3) if verdicts else None for kind, verdicts in scores.items()},
        "most_junk": max(verdict["score"] for verdict in scores["junk"]),
        "raised": sum(verdict["status"] == "raised" for verdict in every),
        "at_limit": sum(verdict["status"] == "limit" for verdict in every),
        "questions": len({task.fields["question"] for task in tasks}),
    }


def answers_of(kind: str, game: ReasoningGym, tasks: list[Task]) -> list[tuple[Task, str]]:
    """What scripted players (the generator's own answers) and random ones (answers of other problems) say."""
    pairs = [(task, task.hidden["target"] if kind == "script" else str(game.entry(number)["answer"])) for number, task in enumerate(tasks)]
    return [(task, answer) for task, answer in pairs if task.hidden["target"]]


def arena(name: str) -> dict[str, Any]:
    """Plays of one game by each kind of seats, and what went wrong. Raises `AssertionError` where a replay is another game."""
    environment = textarena(name, moves=MOVES)
    game, counts = TextArena(name), collections.Counter()
    texts = [*TEXTS.values(), *HOSTILE.values(), "[0]", "[-1]", "[9999999999]", "[a b]", "[1e999]"]
    seats = {"junk": None, "script": environment.script, "random": environment.random_player}
    for kind, says in seats.items():
        for deal in range(DEALS):
            fields, moves, dice = game.deal(deal), [], random.Random(f"{name} {kind} {deal}")
            while not fields["over"] and len(moves) < MOVES:
                move = dice.choice(texts) if says is None else says(types.SimpleNamespace(fields=fields, random=dice))
                fields = game.step(deal, tuple(moves), move[:1000])
                moves.append(move[:1000])
            again = TextArena(name)
            again.deal(deal)
            replayed = again.step(deal, tuple(moves[:-1]), moves[-1])  # nothing is kept for the last position: played from the start
            assert replayed == fields, f"{kind}, deal {deal}: a replay of the same moves differs"
            counts += collections.Counter(plays=1, moves=len(moves), invalid=len(fields["invalid"]), raised=fields["raised"])
            counts += collections.Counter({f"{kind}_finished": fields["over"]})
    return {"players": game.players, **counts}


class _Offline:
    """No connection can be opened within; `tried` counts who tries."""

    def __enter__(self) -> _Offline:
        self.tried, self._real = 0, socket.socket.connect

        def refuse(*_: Any) -> None:
            self.tried += 1
            raise OSError("this benchmark opens no connection")

        socket.socket.connect = refuse
        return self

    def __exit__(self, *_: Any) -> None:
        socket.socket.connect = self._real


def each(names: list[str], play: Callable[[str], dict[str, Any]]) -> tuple[dict, dict, list[str]]:
    """(what was played, what failed, what was refused), each game in an empty folder and without a connection."""
    played, failures, refused = {}, {}, []
    with tempfile.TemporaryDirectory() as folder, _Offline() as network:
        os.chdir(folder)
        for name in names:
            before, tried = state(), network.tried
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # some games print
                    played[name] = play(name)
            except GameError:
                refused.append(name)
                continue
            except Exception as error:  # any exception is what this is looking for
                failures[name] = f"{type(error).__name__}: {error}"[:200]
            print(name, json.dumps(played.get(name) or failures[name]), file=sys.stderr, flush=True)
            if state() != before:
                failures[name] = "the process-wide random state was changed"
            if left := [path.name for path in pathlib.Path(folder).iterdir()]:
                failures[name] = f"files were written: {left}"
            if network.tried != tried:
                failures[name] = "a connection was tried"
        os.chdir("/")
    return played, failures, sorted(refused)


def generators(names: list[str]) -> dict[str, Any]:
    """The figures of reasoning-gym."""
    package = foreign_package("reasoning_gym", "reasoning-gym", "0.1.25", "rg")
    played, failures, refused = each(names or sorted(package.factory.DATASETS), replay)
    if any(name in EXECUTING for name in played):
        default_sandbox().close()
    return {
        "generators": len(played), "refused": refused, "refused_as_documented": not names and set(refused) == set(REFUSED),
        "failures": failures, "answers": sum(row["answers"] for row in played.values()),
        "script_below_1": {name: row["paid"]["script"] for name, row in played.items() if row["paid"]["script"] not in (1.0, None)},
        "no_answer_known": [name for name, row in played.items() if row["paid"]["script"] is None],
        "most_junk_above_0.2": {name: round(row["most_junk"], 3) for name, row in played.items() if row["most_junk"] > 0.2},
        "random_above_0.5": {name: row["paid"]["random"] for name, row in played.items() if (row["paid"]["random"] or 0) > 0.5},
        "raised": sum(row["raised"] for row in played.values()), "at_limit": sum(row["at_limit"] for row in played.values()),
    }  # fmt: skip


def games(names: list[str]) -> dict[str, Any]:
    """The figures of TextArena."""
    played, failures, refused = each(names or sorted(GAMES), arena)
    sums = sum((collections.Counter({key: row[key] for key in row if key != "players"}) for row in played.values()), collections.Counter())
    never = [name for name, row in played.items() if not any(row.get(f"{kind}_finished") for kind in ("junk", "script", "random"))]
    return {"games": len(played), "refused": refused, "failures": failures, **sums, "never_finished": never,
            "raised_in": {name: row["raised"] for name, row in played.items() if row.get("raised")}}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Replays games and prints the line; 1 if one of them raised or touched the host."""
    packages = {"reasoning_gym": generators, "textarena": games}
    if not arguments or arguments[0] not in packages:
        sys.exit(f"name the package first: {' or '.join(packages)}")
    line = packages[arguments[0]](arguments[1:])
    line["cpu_s"] = round(sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)), 1)
    print(json.dumps(line))
    return int(bool(line["failures"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
