"""Doors of the teams whose programs are run (puzzles in text, the two debates, the ensemble), and of the files that tasks are read from.

No process is started: a sandbox is put in their place that gives back, as what the program printed and returned, what was said. So a
program's output and a role's text pass the same code as in a run, at a rate of thousands a second.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.fuzz_input import SECRET, Door, Heard, Input, refused
from marl_llm.games import coding, make_game, maths, programs, search
from marl_llm.games.maths.ensemble import ORDER
from marl_llm.games.plan_path.lines import combinations
from marl_llm.tools.results import success
from marl_llm.tools.sandbox import Execution, Program, Sandbox
from marl_llm.workflows import Assignment, Controller, Role, Scripted, Task, Workflow
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.rows import DataError

# A map, a room and a puzzle that no input solves by chance.
MAP = ("A.....", ".####.", ".#..#.", ".#.##.", ".#....", ".####G")
ROOM = ("######", "#A...#", "#.B..#", "#....#", "#...G#", "######")
PUZZLE = ("2.1.", "1...", "....", "...3")
NUMBER = 987_654_321  # the expected value where it has to be one
ENVIRONMENTS = {
    "plan_path_text": MAP, "sokoban_text": ROOM, "sudoku_text": PUZZLE,
    "plan_path_programs": {"rows": MAP, "dialect": combinations("train")[0]},
}  # fmt: skip


class Echo(Sandbox):
    """A sandbox in which every program prints and returns what was said, and ends in one of several ways."""

    def __init__(self):  # and not the sandbox's own, which starts processes
        self.raw, self.turn = b"", 0

    async def arun(self, request: Any) -> Execution:
        """One execution."""
        del request
        self.turn += 1
        endings = ({"exit_code": 0},) * 4 + ({"exit_code": 1}, {"timed_out": True}, {"memory_exceeded": True}, {"stdout_truncated": True})
        ending = {"exit_code": None, **endings[self.turn % len(endings)]}
        return Execution(Program(self.raw, self.raw, channel=self.raw, **ending), None, 0.0)


class EqualTexts:
    """In place of math-verify's processes, which `tests/tools/test_maths.py` attacks: an answer is right if it is the target's text."""

    async def acheck(self, response: str, target: str, mode: str) -> Any:
        """As `MathsChecker.acheck`."""
        del mode
        return success(mock.Mock(correct=response == f"#### {target}"), 0.0)


@functools.cache
def game_roles() -> tuple[Role, ...]:
    """The roles of these teams and of their single agents."""
    made = [make_game(name, agents=agents) for name in ENVIRONMENTS for agents in ("team", "single")]
    made += [make_game(name) for name in ("helper_functions", "notes")]
    groups = (coding.debate_roles(), coding.function_debate_roles(), maths.debate_roles(), maths.sums_roles())
    alone = (coding.single_coder(), maths.single_reasoner(), maths.judge_role(), maths.sums_judge())
    told = (role for environment in made for role in environment.workflow.roles.values())
    return *told, *(r for group in groups for r in group.values()), *alone


@contextlib.contextmanager
def _echoing(echo: Echo) -> Iterator[None]:
    with mock.patch.object(programs, "default_sandbox", return_value=echo):
        yield


def _play(build: Callable[[Echo], Workflow], headline: str, fields: dict[str, Any], hidden: dict[str, Any]) -> Door:
    """A whole play in which roles and programs say the input. Being readable is paid in most of these teams, so pay is the headline."""
    made: list[tuple[Echo, Workflow]] = []

    def hear(message: Input) -> Heard:
        if not made:
            echo = Echo()
            made.append((echo, build(echo)))
        echo, team = made[0]
        echo.raw = message.raw
        scripts = Assignment(dict.fromkeys(team.roles, "s"), {"s": Scripted(lambda turn: message.text)})
        with _echoing(echo), Controller(team, scripts, None, {}, attempts=1) as controller:
            try:
                (episode,) = controller.play([Task(0, fields, hidden)]).episodes
            except RolloutError:  # every play was aborted, for there is one
                return Heard(aborted=True)
        return Heard(episode.aborted, max([0.0, *(team.metrics[headline](path) for path in episode.trajectories)]))

    return hear


def team_doors() -> dict[str, Door]:
    """One door per team."""
    plays = {}
    for name, instance in ENVIRONMENTS.items():
        for agents in ("team", "single"):
            def build(echo, name=name, agents=agents):
                return make_game(name, agents=agents).workflow

            plays[f"play {name} {agents}"] = _play(build, "solved", {"task": "t", "instance": instance}, {})

    def code(function: str, agents: str) -> Door:
        tests = (((1,), SECRET),) if function else (("1", SECRET),)
        hidden = {"function": function, "tests": tests, "references": ("print(1)",), "mutants": (), "shown": ("1",)}

        def build(echo):
            return coding.code_debate(coding.Runs(sandbox=echo), agents=agents)

        return _play(build, "solved", {"problem": "p", "interface": ""}, hidden)

    for function in ("", "f"):
        for agents in ("team", "single"):
            plays[f"play code_debate {function or 'stdio'} {agents}"] = code(function, agents)
    plan = (("add", 3),)
    hidden = {"function": "f", "tests": (((3,), NUMBER),), "references": (plan,), "mutants": (), "shown": ()}
    words = coding.function_debate_roles()
    plays["play function_debate"] = _play(
        lambda echo: coding.code_debate(coding.FunctionRuns(sandbox=echo), words, inputs=("problem",)), "solved", {"problem": "p"}, hidden
    )

    def answers(echo):
        return maths.Answers(checker=EqualTexts(), sandbox=echo)

    def sums(echo):
        return maths.SumAnswers(sandbox=echo)

    gold, small = {"target": SECRET}, {"target": str(NUMBER), "plan_gold": (1, ())}
    asked, ordered = {"problem": "p"}, {"problem": "p", ORDER: "o"}
    judged = {**maths.sums_roles(), "judge": maths.sums_judge()}
    only, few = ("problem",), tuple(small)
    return plays | {
        "play maths_debate": _play(lambda echo: maths.maths_debate(answers(echo)), "correct", asked, gold),
        "play maths_debate single": _play(lambda echo: maths.maths_debate(answers(echo), agents="single"), "correct", asked, gold),
        "play maths_ensemble": _play(lambda echo: maths.maths_ensemble(answers(echo), 2, 2), "correct", ordered, gold),
        "play sums": _play(
            lambda echo: maths.maths_debate(sums(echo), maths.sums_roles(), inputs=only, hidden=few), "correct", asked, small
        ),
        "play sums_ensemble": _play(
            lambda echo: maths.maths_ensemble(sums(echo), 2, 2, judged, inputs=only, hidden=few), "correct", ordered, small
        ),
    }


def row_doors() -> dict[str, Door]:
    """A file of one row: it is read, or refused by `DataError`; what is read is safe to store."""
    folder = tempfile.TemporaryDirectory()

    def door(load: Callable[[pathlib.Path], Any]) -> Door:
        def hear(message: Input) -> Heard:
            for ending in ("jsonl", "json"):
                path = pathlib.Path(folder.name) / f"rows.{ending}"
                line = message.raw.replace(b"\n", b" ")
                path.write_bytes(line if ending == "jsonl" else b"[" + line + b"]")
                for task in refused(DataError, load, path) or ():
                    repr((task.fields, task.hidden)).encode()
                    json.dumps(task.fields, ensure_ascii=False, allow_nan=False).encode()
            return Heard()

        return hear

    loaders = {
        "contests": lambda path: [*coding.load_contests(path, "train", bad_rows="drop").tasks, *coding.load_contests(path, "train").tasks],
        "problems": lambda path: coding.load_problems(path, "train"),
        "maths": lambda path: [*maths.load_maths(path, "train", bad_rows="drop").tasks, *maths.load_maths(path, "train").tasks],
        "questions": lambda path: search.load_questions(path, "train"),
    }
    return {f"rows {name}": door(load) for name, load in loaders.items()}
