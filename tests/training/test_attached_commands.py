"""A person's program as processes: whatever it does, its episode is paid or aborted, and nothing of it stays behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from marl_llm.serving.episodes import EpisodeServer
from marl_llm.tools.chat import ChatReply
from marl_llm.tools.commands import CommandProgram, end_marked
from marl_llm.training.attached import AttachOptions, play_all
from marl_llm.workflows.play import finish

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "agents"
APP = r'''
import json, os, subprocess, sys, time, urllib.error, urllib.request

def call(url, body=None):
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)

def ask(role, text):
    body = {"model": role, "messages": [{"role": "user", "content": text}]}
    return call(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)[1]["choices"][0]["message"]["content"]

def pay(body):
    return call(os.environ["MARL_EPISODE_URL"] + "/reward", body)

task, here = json.loads(os.environ["MARL_TASK"]), os.environ["MARL_EPISODE_URL"]
assert json.loads(sys.argv[1]) == task == call(here + "/task")[1]["task"]
mode = task["mode"]
if mode == "silent":
    assert pay({"reward": 1.0})[0] == 400
    sys.exit()
said = ask("solver", mode)
if mode == "crash":
    print("line one", file=sys.stderr)
    sys.exit("\x1b[31mthe last words")
if mode == "nan":
    assert pay(b'{"reward": NaN}')[0] == pay({"reward": 1e999})[0] == 400
if mode == "stranger":
    assert pay({"rewards": {"nobody": 1.0}})[0] == 400
if mode in ("hang", "daemon"):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open(task["file"], "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600 if mode == "hang" else 0)
if mode in ("twice", "daemon", "good"):
    assert pay({"reward": 0.5, "rewards": {"solver": len(said) / 8}}) == (200, {"episode": here.rpartition("/")[2], "replies": 1})
if mode == "twice":
    assert pay({"reward": 1.0})[0] == 400
'''


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def echo(messages, options):
    return ChatReply(f"<{messages[-1]['content']}>", "stop")


def play(program, tasks, timeout_s=60.0, roles=("solver",)):
    """The episodes of these tasks, and how many requests were refused."""
    with EpisodeServer(dict.fromkeys(roles, echo)) as server:
        found = finish(play_all(server, program, [((0, n), task) for n, task in enumerate(tasks)], AttachOptions(timeout_s, 4)))
        return found, server.stats()["refused"]


@pytest.fixture
def app(tmp_path):
    (tmp_path / "app.py").write_text(APP)
    program = CommandProgram([sys.executable, "-S", "app.py", "{task}"], str(tmp_path))
    yield program
    program.close()


def test_every_end_of_a_program_pays_or_aborts_its_episode(app, tmp_path):
    modes = ("good", "twice", "crash", "silent", "nan", "stranger", "nothing", "daemon")
    found, refused = play(app, [{"mode": mode, "file": str(tmp_path / mode)} for mode in modes])
    by_mode = dict(zip(modes, found, strict=True))
    paid, unpaid = dict.fromkeys(("good", "twice", "daemon"), ""), dict.fromkeys(("silent", "nan", "stranger", "nothing"), "unpaid")
    assert {mode: one.aborted for mode, one in by_mode.items()} == paid | unpaid | {"crash": "failed"}
    assert by_mode["twice"].pay == {"reward": 0.5, "rewards": {"solver": 7 / 8}}  # the first pay counts
    assert by_mode["crash"].message == "CommandFailed: exit code 1; its stderr ends: line one | [31mthe last words"
    assert refused == 5  # silent, nan and 1e999, stranger, twice
    assert not any(map(alive, (tmp_path / "daemon").read_text().split()))


def test_a_program_that_hangs_is_ended_with_all_that_it_started(app, tmp_path):
    start = time.monotonic()
    (one,), _ = play(app, [{"mode": "hang", "file": str(tmp_path / "pids")}], timeout_s=3.0)
    assert (one.aborted, one.message, one.pay) == ("late", "not paid within 3 s", None)
    assert time.monotonic() - start < 20
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_a_command_that_is_not_there_aborts():
    program = CommandProgram(["/no/such/program"], "/")
    (one,), _ = play(program, [{}])
    program.close()
    assert one.aborted == "failed"
    assert "No such file" in one.message


def test_nothing_stays_behind_when_this_process_is_killed(tmp_path):
    (tmp_path / "app.py").write_text("import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(600)")
    code = (
        "import asyncio, sys, types; from marl_llm.tools.commands import CommandProgram\n"
        "client = types.SimpleNamespace(base_url='u', api_key='k', episode_url='e', notes=[])\n"
        f"asyncio.run(CommandProgram([sys.executable, '-S', 'app.py'], {str(tmp_path)!r})({{}}, client))"
    )
    path = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    trainer = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert alive(pid)
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_for(lambda: not alive(pid))


def wait_for(condition):
    for _ in range(600):
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not come to be within 30 s")


def test_the_example_in_bash_asks_two_roles_and_pays_them():
    question = 'Is 2 + "2"\n\\ 4, \u00e4?'
    tasks = [{"question": question, "answer": "2"}, {"question": "1?", "answer": "3"}]
    program = CommandProgram(["bash", str(EXAMPLES / "curl_two_roles.sh")], "/")
    first, second = play(program, tasks, roles=("solver", "checker"))[0]
    program.close()
    asked = [line["messages"][0]["content"] for line in first.replies]
    assert asked[0] == f"{question} Answer with a number."
    assert asked[1] == f"{question}\n<{asked[0]}>\nIs that right? Reply yes or no."
    assert first.pay == {"reward": 1, "rewards": {"checker": 1}}
    assert second.pay == {"reward": 0, "rewards": {"checker": 0}}


def test_only_processes_with_the_mark_are_ended():
    ours, other = (
        subprocess.Popen(["sleep", "600"], env={**os.environ, "MARL_RUN": mark}) for mark in ("a" * 8, "a" * 8 + "b")
    )
    try:
        end_marked("MARL_RUN=" + "a" * 8)
        assert ours.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
