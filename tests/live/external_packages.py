"""reasoning-gym and TextArena themselves; run by hand, the suite has stand-ins for them.

    python -m venv V && V/bin/pip install -e '.[rg,ta,test]'
    V/bin/python -m pytest -n 0 tests/live/external_packages.py

What is seen: the nine scorers that execute answers run in the sandbox, pay the generators' own answers and no attack; the sound checks pass
on games of TextArena, junk in each seat loses, and a position is a function of (deal, moves).
"""

import asyncio
import json
import os

import pytest

from marl_llm.checking import check
from marl_llm.games import make_game
from marl_llm.games.external.reasoning_gym import EXECUTING, LIMITS, LITERAL, ReasoningGym
from marl_llm.games.external.textarena import TextArena
from marl_llm.tools.sandbox import Submission, default_sandbox


def scored(one, answer, place):
    return asyncio.run(one.score_in_sandbox(answer, place)).outcome()


@pytest.mark.parametrize("name", EXECUTING)
def test_a_scorer_that_executes_pays_its_own_answer_and_no_attack_and_touches_nothing(name, tmp_path):
    one, mark = ReasoningGym(name, {}), tmp_path / "mark"
    paid = [scored(one, one.entry(place)["answer"], place) for place in range(3) if one.entry(place)["answer"] is not None]
    assert all(verdict == {"score": 1.0, "status": "scored"} for verdict in paid)
    assert paid or name == "puzzle24"
    attacks = (
        f"__import__('pathlib').Path({str(mark)!r}).write_text('x')", f"open({str(mark)!r}, 'w')", "exit()", "print(1.0) or exit()",
        "__import__('os').kill(__import__('os').getppid(), 9)", "[].__class__.__base__.__subclasses__()", "(lambda: 1.0)()",
    )  # fmt: skip
    verdicts = [scored(one, attack, 0) for attack in attacks]
    assert [verdict["score"] for verdict in verdicts] == [0.0] * len(attacks)
    assert not mark.exists()
    wanted = {"raised", "scored"} if name in LITERAL else {"refused"}  # a formula is refused before anything runs
    assert {verdict["status"] for verdict in verdicts} <= wanted


def test_the_sandboxs_profile_holds_the_package_and_nothing_of_this_process():
    os.environ["MARL_LLM_LIVE_MARK"] = "here"
    program = "import json, os, reasoning_gym\nprint(json.dumps([len(reasoning_gym.factory.DATASETS), 'MARL_LLM_LIVE_MARK' in os.environ]))"
    done = default_sandbox().run(Submission(program, "", "reasoning_gym", LIMITS)).outcome()
    assert json.loads(done.stdout.splitlines()[-1]) == [106, False]


@pytest.mark.parametrize("name", ["TicTacToe", "KuhnPoker"])
def test_the_laws_hold_for_games_of_textarena_and_junk_in_a_seat_loses(name):
    with make_game("textarena", game=name, moves=20) as environment:
        found = check(environment, tasks=4, plays=2, few=2)
    assert [one for one in found if one.status == "fail"] == []
    assert "in each seat against the scripted player" in next(one.evidence for one in found if one.name == "junk pay")


def test_a_position_is_a_function_of_deal_and_moves():
    one, other, moves = TextArena("KuhnPoker"), TextArena("KuhnPoker"), ("[check]", "[bet]", "[call]", "[check]")
    ends = [game.step(7, moves[:n], moves[n]) for n in range(4) for game in (one, other)]
    assert ends[6] == ends[7] == TextArena("KuhnPoker").step(7, moves[:3], moves[3])
    assert one.deal(7)["view"] != one.deal(8)["view"]
