"""A person's program that stays: a worker plays one episode after the other, and a broken one is replaced."""

import pathlib
import sys
import time

import pytest

from marl_llm.serving.episodes import EpisodeServer
from marl_llm.tools.chat import ChatReply
from marl_llm.tools.workers import WorkerProgram
from marl_llm.training.attached import AttachOptions, play_all
from marl_llm.workflows.play import finish

APP = r'''
import json, os, subprocess, sys, time, urllib.error, urllib.request

def call(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

for line in sys.stdin:
    episode = json.loads(line)
    mode = episode["task"]["mode"]
    print("about " + mode, file=sys.stderr)
    body = {"model": "solver", "messages": [{"role": "user", "content": mode}]}
    said = call(episode["base_url"] + "/chat/completions", body)[1]["choices"][0]["message"]["content"]
    if mode == "crash":
        sys.exit("the last words")
    if mode == "leave":
        sys.exit()
    if mode == "hang":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(episode["task"]["file"], "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    assert call(episode["episode_url"] + "/reward", {"reward": float(os.getpid()), "rewards": {"solver": len(said)}})[0] == 200
    if mode == "twice":
        assert call(episode["episode_url"] + "/reward", {"reward": 1.0})[0] == 400
    if mode == "last":
        sys.exit()
'''


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def play(program, tasks, timeout_s=60.0, concurrency=1):
    """The episodes of these tasks, and how many requests were refused."""
    with EpisodeServer({"solver": lambda messages, options: ChatReply(f"<{messages[-1]['content']}>", "stop")}) as server:
        options = AttachOptions(timeout_s, concurrency)
        found = finish(play_all(server, program, [((0, n), task) for n, task in enumerate(tasks)], options))
        return found, server.stats()["refused"]


@pytest.fixture
def app(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    program = WorkerProgram([sys.executable, "-S", "app.py"], str(tmp_path))
    yield program
    program.close()


def pid_of(episode):
    return int(episode.pay["reward"])


def test_a_worker_plays_on_and_a_broken_one_is_replaced(app):
    modes = ("good", "twice", "crash", "good", "last", "good", "leave", "good")
    found, refused = play(app, [{"mode": mode} for mode in modes])
    assert [one.aborted for one in found] == ["", "", "failed", "", "", "", "unpaid", ""]
    assert refused == 1
    assert found[2].message == "CommandFailed: exit code 1; its stderr ends: about crash | the last words"  # nothing of the episodes before
    assert found[6].message == "it ended without a reward; its stderr ends: about leave"
    workers = [pid_of(one) for one in found if one.pay is not None]
    assert workers[0] == workers[1] != workers[2]
    assert workers[2] == workers[3] != workers[4]
    again, _ = play(app, [{"mode": "good"}])  # of the next rollout, with a server of its own
    assert pid_of(again[0]) == workers[5]
    app.close()
    assert not any(map(alive, workers))


def test_a_worker_that_hangs_is_ended_with_all_that_it_started(app, tmp_path):
    start = time.monotonic()
    (late, good), _ = play(app, [{"mode": "hang", "file": str(tmp_path / "pids")}, {"mode": "good"}], timeout_s=3.0)
    assert (late.aborted, late.message) == ("late", "not paid within 3 s; its stderr ends: about hang")
    assert good.pay["rewards"] == {"solver": 6}
    assert time.monotonic() - start < 30
    assert not any(map(alive, (tmp_path / "pids").read_text().split()))


def test_there_are_as_many_workers_as_episodes_at_once(app):
    found, _ = play(app, [{"mode": "good"}] * 12, concurrency=3)
    assert 1 <= len({pid_of(one) for one in found}) <= 3
    assert all(one.pay is not None for one in found)


def test_a_worker_that_reads_nothing_is_late_however_long_its_task_is(tmp_path):
    program = WorkerProgram(["sleep", "600"], str(tmp_path))
    (one,), _ = play(program, [{"text": "x" * 1_000_000}], timeout_s=1.0)
    program.close()
    assert one.aborted == "late"


def test_a_program_that_is_not_there_aborts():
    program = WorkerProgram(["/no/such/program"], "/")
    (one,), _ = play(program, [{}])
    program.close()
    assert (one.aborted, "No such file" in one.message) == ("failed", True)


def test_the_guard_ends_workers_too(app):
    (one,), _ = play(app, [{"mode": "good"}])
    assert alive(pid_of(one))
    app._guard.close()  # as when this process ends
    for _ in range(200):
        if not alive(pid_of(one)):
            break
        time.sleep(0.05)
    assert not alive(pid_of(one))
