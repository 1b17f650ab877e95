"""Real servers of OpenEnv in processes of their own, played over WebSocket. Needs the package `openenv`; the suite does not.

    python -m venv V && V/bin/pip install openenv==0.10.0            # or openenv-core==0.3.0
    OPENENV_PYTHON=V/bin/python python -m pytest -n 0 -s tests/live/openenv_server.py

`OPENENV_PYTHON` runs the servers; this process needs `.[test]` only. The servers are the environment that `openenv init` writes (an echo
with one session) and the game below, with the package's own classes: once with honest seeds, once without.
"""

import os
import pathlib
import re
import resource
import subprocess
import sys
import time

import pytest

from marl_llm.checking import check
from marl_llm.games import GameError, make_game
from marl_llm.workflows import Assignment, Controller, Scripted
from tests.games.test_openenv import Halving

PYTHON = os.environ.get("OPENENV_PYTHON", sys.executable)
LIMIT_S = 300.0
GUESS = dict(action='{"guess": "{int}"}', observation="hint", sayings="3|7|5", turns=5, max_prompt=256, max_tokens=8)
GAME = """
import os, random
from typing import Optional
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    guess: int

class Hint(Observation):
    hint: str = ""

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.steps = 0, 0

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **kwargs):
        self.number = random.Random(seed if os.environ["SEEDS"] == "kept" else None).randrange(10)
        self.steps = 0
        return Hint(hint="guess")

    def step(self, action, timeout_s: Optional[float] = None, **kwargs):
        if action.guess > 99:
            raise ValueError(f"{action.guess} is out of range")
        self.steps += 1
        right = action.guess == self.number
        hint = "right" if right else "higher" if action.guess < self.number else "lower"
        return Hint(hint=hint, reward=float(right), done=right)

    @property
    def state(self):
        return State(step_count=self.steps)

app = create_app(Game, Guess, Hint, env_name="guess", max_concurrent_envs=64)
"""


def started(folder: pathlib.Path, app: str, **environment: str):
    """A server process and its address."""
    log = folder / "server.log"
    command = [PYTHON, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0"]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=os.environ | environment)
    end = time.monotonic() + LIMIT_S
    while (found := re.search(r"running on (http://127.0.0.1:\d+)", log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, "the server did not start"
        time.sleep(0.1)
    return process, found[1]


@pytest.fixture
def server(tmp_path):
    """Starts servers, and ends them."""
    processes = []

    def start(app, **environment):
        process, url = started(tmp_path, app, **environment)
        processes.append(process)
        return process, url

    (tmp_path / "game.py").write_text(GAME)
    yield start
    for process in processes:
        process.kill()
        process.wait()


def played(environment, says, count, **options):
    assignment = Assignment({"player": "s"}, {"s": Scripted(says)})
    with Controller(environment.workflow, assignment, None, environment.renderer, **options) as controller:
        return controller.play(environment.tasks("train", 0, count))


def test_a_game_is_played_with_honest_seeds(server):
    _, url = server("game:app", SEEDS="kept")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()
    with make_game("openenv", url=url, **GUESS) as environment:
        rollout = played(environment, Halving(), 200, concurrency=8)
        scores = [environment.workflow.metrics["score"](path) for path in rollout.trajectories]
        steps = sum(len(path.calls) for path in rollout.trajectories)
    aborted, score = sum(episode.aborted for episode in rollout.episodes), sum(scores) / len(scores)
    print(f"\n{len(scores)} plays, {steps} steps, {aborted} aborted, mean score {score:.3f}, ", end="")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_utime - before:.1f} CPU s, {time.perf_counter() - start:.1f} s")
    assert scores == [1.0] * 200


def test_forks_refused_actions_and_the_checks_of_a_game(server):
    _, url = server("game:app", SEEDS="kept")
    with make_game("openenv", url=url, raises="refuse", **GUESS) as environment:
        rollout = played(environment, lambda turn: str(turn.seed[4] * 40), 4, branching={"player": 2})
        assert not any(episode.aborted for episode in rollout.episodes)
        assert sum(path.fields["raised"] for path in rollout.trajectories) > 0
        findings = check(environment)
    for one in findings:
        print(one.status, one.name, one.evidence)
    assert not [one for one in findings if one.status == "fail"]


def test_a_server_that_ignores_seeds_is_refused(server):
    _, url = server("game:app", SEEDS="ignored")
    with pytest.raises(GameError, match="does not keep seeds") as refused:
        make_game("openenv", url=url, **GUESS | {"sayings": "0|1|2|3|4|5|6|7|8"})
    print(refused.value)


def test_a_server_that_is_killed_aborts_the_plays(server):
    process, url = server("game:app", SEEDS="kept")
    with make_game("openenv", url=url, timeout_s=20.0, **GUESS) as environment:

        def says(turn):
            if turn.seed[1] == 5:
                process.kill()
            return "0"

        rollout = played(environment, says, 20, concurrency=1, attempts=1)
    aborted = [episode.aborted for episode in rollout.episodes]
    print(f"{sum(aborted)} of {len(aborted)} plays aborted: {rollout.episodes[-1].failures[-1]}")
    assert not any(aborted[:5])
    assert all(aborted[6:])


def test_the_environment_that_openenv_init_writes_is_played(server, tmp_path, caplog):
    init = [PYTHON, "-m", "openenv.cli", "init", "parrot", "-o", str(tmp_path)]
    subprocess.run(init, check=True, capture_output=True, timeout=LIMIT_S)
    root = next(path.parent.parent for path in tmp_path.rglob("server/app.py"))
    _, url = server("server.app:app", PYTHONPATH=str(root))
    options = dict(observation="echoed_message", turns=3, most=3.0, pay="steps")
    with pytest.raises(GameError, match="set config.game.sessions"):
        make_game("openenv", url=url, **options)
    with make_game("openenv", url=url, sessions=1, **options) as environment:
        print(caplog.records[-1].message)
        rollout = played(environment, lambda turn: "hello", 6)
    paths = rollout.trajectories
    assert [[call.prompt for call in path.calls][1:] for path in paths] == [["hello", "hello"]] * 6
    assert [path.fields["rewards"] for path in paths] == [(0.5, 0.5, 0.5)] * 6
    assert "one task" in caplog.records[-1].message
