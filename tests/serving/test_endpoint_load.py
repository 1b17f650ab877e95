"""`benchmarks.endpoint_load` in small: its clients lose and double nothing, and its audit sees what is lost or doubled."""

import json
import threading

import pytest
from serving_lab import ended, scripted

from benchmarks.endpoint_audit import Notes, audit_episode, read_ledger, read_lines
from benchmarks.endpoint_load import FAULTS, ROLE, Crowd, Load, figures, make_tasks, play_attached_clients
from marl_llm.serving import ChatServer

LOAD = Load(episodes=20, clients=5, faults=0.7, max_tokens=400, seed=5)
SOUND = {"lost": 0, "doubled": 0, "stray": 0}


class SlowReplies:
    """The engine of scripted replies, one at a time, each a little late: clients are killed before it, in it and behind it."""

    def __init__(self, engine):
        self._engine, self._lock = engine, threading.Lock()

    def submit(self, request, on_tokens=None):
        with self._lock:
            threading.Event().wait(0.004)
            return self._engine.submit(request, on_tokens)


@pytest.fixture(scope="module")
def answers():
    found = scripted(*(ended(f"reply {number}") for number in range(1000)))
    object.__setattr__(found, "engine", SlowReplies(found.engine))
    return found


def tasks_with_short_delays(monkeypatch):
    import benchmarks.endpoint_load as module

    tasks = [task | {"delay_s": task["delay_s"] / 10} for task in make_tasks(LOAD)]
    assert {task["fault"] for task in tasks} == {"none", *FAULTS}
    monkeypatch.setattr(module, "make_tasks", lambda load: tasks)
    return tasks


def test_a_crowd_of_killed_clients_loses_and_doubles_nothing_of_a_record(answers, tmp_path, monkeypatch):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    with ChatServer({ROLE: answers}, record=tmp_path / "plays.jsonl") as server:
        crowd = Crowd(tasks_with_short_delays(monkeypatch), ledger, server.url.removesuffix("/v1"))
        crowd.run(LOAD.clients)
    found = figures(read_ledger(ledger), read_lines(tmp_path / "plays.jsonl"), 1.0)
    assert {name: found[name] for name in SOUND} == SOUND, found
    assert found["begun"] == crowd.done == LOAD.episodes
    assert 0 < found["aborted"] < found["finished"]
    assert found["refused"] > 2


def test_a_crowd_of_killed_workers_loses_and_doubles_nothing_of_attached_episodes(answers, tmp_path, monkeypatch):
    tasks_with_short_delays(monkeypatch)
    found = play_attached_clients(LOAD, tmp_path, answers)
    assert {name: found[name] for name in SOUND} == SOUND, found
    assert (found["begun"], found["aborts"]) == (LOAD.episodes, {"failed": found["aborted"]})
    assert found["finished"] > found["aborted"] > 0


def reply(number, request, *ids):
    return {"number": number, "ids": list(ids), "messages": [{"role": "user", "content": f"task 3 request {request}"}]}


HEARD = Notes({0, 1}, {0: [1], 1: [2]}, [], 3.0, True)
GOOD = [reply(0, 0, 1), reply(1, 1, 2), {"reward": 3.0}]


@pytest.mark.parametrize(
    ("notes", "lines", "fault"),
    [
        (HEARD, GOOD, {}),
        (HEARD, GOOD[:1] + GOOD[2:], {"lost": 1}),
        (HEARD, [reply(0, 0, 9), *GOOD[1:]], {"lost": 1}),
        (HEARD, GOOD[:2], {"lost": 1}),
        (HEARD, [], {"lost": 3}),
        (HEARD, [GOOD[0], reply(2, 0, 5), *GOOD[1:]], {"doubled": 1}),
        (HEARD, [GOOD[0], reply(0, 1, 2), GOOD[2]], {"doubled": 1}),
        (HEARD, [*GOOD, {"reward": 3.0}], {"doubled": 1}),
        (HEARD, [*GOOD[:2], {"reward": 4.0}], {"stray": 1, "lost": 1}),
        (HEARD, [GOOD[0], GOOD[2], GOOD[1]], {"stray": 1}),
        (HEARD, [*GOOD[:2], reply(2, 2, 7), GOOD[2]], {"stray": 1, "unheard": 1}),
        (Notes(), GOOD[2:], {"stray": 1}),
        (Notes({0, 1}, {0: [1]}, [], 3.0), GOOD, {"unheard": 1}),
        (Notes({0, 1}, {0: [1]}), GOOD[:2], {}),
        (Notes({0, 1}, {0: [1], 1: [2]}, [], 3.0, True, wrong=2), GOOD, {"stray": 2}),
    ],
)
def test_the_audit_names_what_is_lost_doubled_or_stray(notes, lines, fault):
    found = audit_episode(notes, lines)
    assert {name: found[name] for name in (*SOUND, "unheard")} == SOUND | {"unheard": 0} | fault


def test_a_ledger_is_read_by_episode(tmp_path):
    lines = [["begun", 3], ["asked", 3, 0], ["heard", 3, 0, [1], 0.5], ["pay", 3, 3.0], ["paid", 3], ["refused", 3, "x"], ["begun", 4]]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "2.jsonl").write_text('["wrong", 4, "x"]\n')
    assert read_ledger(tmp_path) == {3: Notes({0}, {0: [1]}, [0.5], 3.0, True, 1), 4: Notes(wrong=1)}
