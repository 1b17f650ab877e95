"""Every generator of reasoning-gym, played by junk, scripted and random seats: one line of JSON.

    pip install 'marl_llm[rg]'
    nice -n 5 python -m benchmarks.external_games                    all of them
    nice -n 5 python -m benchmarks.external_games chain_sum maze     some

Each generator deals problems of all splits; the junk battery of `marl_llm.checking`, hostile texts, the generator's own answers and answers
of other problems are scored. Nothing may raise, leave the process-wide random state changed, write a file, or start a process of its own
outside the sandbox. `paid` is the mean score of each kind of player; `most_junk` is the most that junk was paid.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pathlib
import random
import resource
import statistics
import sys
import tempfile
from typing import Any

import numpy as np

from marl_llm.checking.junk import TEXTS
from marl_llm.games.external.reasoning_gym import EXECUTING, REFUSED, SHARES, ReasoningGym, problems_of
from marl_llm.games.registry import GameError
from marl_llm.tools.sandbox import default_sandbox
from marl_llm.workflows import Task

PROBLEMS = 3  # of each split
HOSTILE = {
    "exponent": "1e999999999", "nan": "nan", "power": "9**9**9**9", "nested": "(" * 900 + ")" * 900, "lists": "[[1, 2], [3]]",
    "null": "null", "write": "__import__('pathlib').Path('HOST').write_text('x')", "call": "open('HOST', 'w')", "exit": "exit()",
    "zero": "0", "division": "1/0", "lines": "\n".join("1 2 3" for _ in range(200)), "negative": "-1", "words": "yes no true false",
}  # fmt: skip


def state() -> str:
    """The process-wide random state."""
    return repr((random.getstate(), np.random.get_state()[1].tolist()))  # noqa: NPY002


def scored(one: ReasoningGym, answer: str, place: int) -> dict[str, Any]:
    """The verdict on an answer, wherever its scorer runs. Raises `InfrastructureError` where the sandbox gives none."""
    if one.name in EXECUTING:
        return asyncio.run(one.score_in_sandbox(answer, place)).outcome()
    return one.score(answer, place)


def replay(name: str) -> dict[str, Any]:
    """What one generator's scorer paid each kind of player, and what went wrong."""
    one = ReasoningGym(name, {})
    draw = problems_of(one, 20_000)
    tasks = [task for split in SHARES for task in draw(split, 0, PROBLEMS)]
    found = {kind: [scored(one, answer, task.hidden["place"]) for task, answer in said(kind, one, tasks)] for kind in ("script", "random")}
    places = (tasks[0],) if name in EXECUTING else tasks[:2]
    found["junk"] = [scored(one, text, task.hidden["place"]) for task in places for text in (*TEXTS.values(), *HOSTILE.values())]
    found["junk"] += [scored(one, task.fields["question"], task.hidden["place"]) for task in places]
    every = [verdict for verdicts in found.values() for verdict in verdicts]
    return {
        "answers": len(every),
        "paid": {kind: round(statistics.fmean(v["score"] for v in verdicts), 3) if verdicts else None for kind, verdicts in found.items()},
        "most_junk": max(verdict["score"] for verdict in found["junk"]),
        "raised": sum(verdict["status"] == "raised" for verdict in every),
        "at_limit": sum(verdict["status"] == "limit" for verdict in every),
        "questions": len({task.fields["question"] for task in tasks}),
    }


def said(kind: str, one: ReasoningGym, tasks: list[Task]) -> list[tuple[Task, str]]:
    """What scripted players (the generator's own answers) and random ones (answers of other problems) say."""
    pairs = [(task, task.hidden["target"] if kind == "script" else str(one.entry(number)["answer"])) for number, task in enumerate(tasks)]
    return [(task, answer) for task, answer in pairs if task.hidden["target"]]


def main(names: list[str]) -> int:
    """Replays generators and prints the line; 1 if one of them raised or touched the host."""
    import reasoning_gym

    from marl_llm.games.external.guards import foreign_package

    foreign_package("reasoning_gym", "reasoning-gym", "0.1.25", "rg")
    played, failures, refused = {}, {}, []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in names or sorted(reasoning_gym.factory.DATASETS):
            before = state()
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # some generators print
                    played[name] = replay(name)
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
        os.chdir("/")
    if any(name in EXECUTING for name in played):
        default_sandbox().close()
    line = {
        "generators": len(played), "refused": sorted(refused), "refused_as_documented": not names and set(refused) == set(REFUSED),
        "failures": failures, "answers": sum(one["answers"] for one in played.values()),
        "script_below_1": {name: one["paid"]["script"] for name, one in played.items() if one["paid"]["script"] not in (1.0, None)},
        "no_answer_known": [name for name, one in played.items() if one["paid"]["script"] is None],
        "most_junk_above_0.2": {name: round(one["most_junk"], 3) for name, one in played.items() if one["most_junk"] > 0.2},
        "random_above_0.5": {name: one["paid"]["random"] for name, one in played.items() if (one["paid"]["random"] or 0) > 0.5},
        "raised": sum(one["raised"] for one in played.values()), "at_limit": sum(one["at_limit"] for one in played.values()),
        "cpu_s": round(sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)), 1),
    }  # fmt: skip
    print(json.dumps(line))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
