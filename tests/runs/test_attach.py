"""A foreign program is trained as a run: directory, metrics, plays, checkpoints, resume, evaluation."""

import asyncio
import http.client
import json
import os
import signal
import sys

import pytest

import marl_llm as ml
from marl_llm.cli.attach import main, models_of
from marl_llm.cli.tiny import make
from marl_llm.runs.command import ConfigError
from marl_llm.workflows.storage import from_json, read_trajectories

SIZES = dict(width=32, layers=1, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=32)
ROWS = [{"letter": letter, "number": number} for number in range(10) for letter in "abcde"]
SMALL = {
    "rollout": {"tasks": 2, "max_num_seqs": 8, "max_prompt": 64, "max_tokens": 4, "concurrency": 8, "batch_invariant": True},
    "optimizer": {"row_tokens": 128, "minibatch": 8, "learning_rate": 1e-2, "decay_steps": 2},
    "evaluation": {"tasks": 2, "final_tasks": 2, "every": 10, "ablate_roles": False, "sampled": False},
    "checkpoint": {"every": 1},
    "quick_compile": True,
    "devices": 1,
}
RECIPE = {"name": "grpo", "group_size": 2, "rewards": "mixed", "returns": "outcome_plus_local"}


def post(url, body):
    """(status, JSON) of a request."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("POST", f"/{path}", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


async def ask(client, role, text):
    body = {"model": role, "messages": [{"role": "user", "content": text}]}
    status, found = await asyncio.to_thread(post, f"{client.base_url}/chat/completions", body)
    assert status == 200, found
    return found["choices"][0]["message"]["content"]


async def app(task, client):
    """Pays what is easy to tell of random text."""
    draft = await ask(client, "solver", f"say {task['letter']}")
    remark = await ask(client, "checker", f"is it good: {draft}")
    return {"reward": len(set(draft)) / 32, "rewards": {"checker": len(remark) / 32}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make(tmp_path_factory.mktemp("attach") / "tiny", "qwen2", 320, **SIZES))


def train(path, tiny, steps, play=app, rows=ROWS):
    model = ml.load_model(tiny)
    return ml.attach({"solver": model, "checker": model}, play, rows, RECIPE, steps=steps, workdir=path, **SMALL)


def metrics(path, phase="train"):
    return [row for row in map(json.loads, (path / "metrics.jsonl").open()) if row["phase"] == phase]


def calls_of(path):
    """Episode -> ids that were read and drawn, in training."""
    lines = [line for line in read_trajectories(path) if line["when"] == "train"]
    found = {line["episode"]: [call for one in from_json(line).trajectories for call in one.calls] for line in lines}
    return {name: [(call.role, call.prompt_ids, call.tokens.tolist()) for call in calls] for name, calls in found.items()}


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A finished run of two steps."""
    path = tmp_path_factory.mktemp("attach") / "whole"
    return path, train(path, tiny, 2)


def test_a_program_is_trained_as_a_run(whole, tiny):
    path, results = whole
    rows = metrics(path)
    assert [row["step"] for row in rows] == [1, 2]
    (gap,) = {name for name in rows[0] if name.endswith("log_prob_gap")}
    assert max(row[gap] for row in rows) <= 1e-4
    for row in rows:
        assert (row["episodes"], row["aborted"], row["reencoded"], row["refused"], row["samples"]) == (4, 0, 0, 0, 8 * row["step"])
        assert row["role/checker/local"] > 0 == row["role/solver/local"]
    assert len(metrics(path, "eval")) == 2
    assert results["headline"] == "reward"
    assert results["after"]["tasks"] == 2
    assert (path / "report.html").exists()
    plays = [json.loads(line) for line in (path / "episodes.jsonl").open()]
    assert {step["role"] for play in plays for step in play["steps"]} == {"solver", "checker"}
    assert any("say" in step["prompt"] for step in plays[0]["steps"])
    assert train(path, tiny, 2) == results  # complete: nothing is played again


def test_validation_and_test_tasks_are_never_trained_on(whole):
    path, _ = whole
    tasks = {}
    for line in read_trajectories(path):
        tasks.setdefault(line["when"], set()).add(json.dumps(line["task"]["fields"]))
    assert not tasks["train"] & tasks["after"]


def test_what_cannot_be_attached_is_said_in_one_line(whole, tiny, tmp_path):
    path, _ = whole
    with pytest.raises(ConfigError, match="holds a run of another config"):
        train(path, tiny, 2, rows=ROWS[1:])
    with pytest.raises(ConfigError, match="names no role"):
        ml.attach({}, app, ROWS, steps=1, workdir=tmp_path / "a")
    with pytest.raises(ConfigError, match="has no tasks: give more rows"):
        ml.attach({"solver": tiny}, app, ROWS[:1], steps=1, workdir=tmp_path / "a")
    with pytest.raises(ConfigError, match="tasks='nowhere.jsonl'"):
        ml.attach({"solver": tiny}, app, "nowhere.jsonl", steps=1, workdir=tmp_path / "a")
    with pytest.raises(ml.runs.command.ConfigError, match="cannot be forked: use sampling='parallel'"):
        ml.attach({"solver": tiny}, app, ROWS, "at_grpo", steps=1, workdir=tmp_path / "a", **SMALL)
    assert not (tmp_path / "a").exists()


def test_a_run_that_sigterm_stops_continues_with_the_data_of_an_uninterrupted_one(whole, tiny, tmp_path):
    path, _ = whole
    asked = []

    async def app(task, client):
        if not asked and (tmp_path / "run" / "metrics.jsonl").exists() and metrics(tmp_path / "run", "eval"):  # in the first step
            asked.append(os.kill(os.getpid(), signal.SIGTERM))
        return await globals()["app"](task, client)

    with pytest.raises(SystemExit) as stopped:
        train(tmp_path / "run", tiny, 2, play=app)
    assert stopped.value.code == 143
    assert asked
    assert len(metrics(tmp_path / "run")) == 1
    train(tmp_path / "run", tiny, 2, play=app)
    again, once = calls_of(tmp_path / "run"), calls_of(path)
    assert again == once
    assert len({str(calls) for calls in once.values()}) == 8  # the plays of a group differ
    assert [row["success"] for row in metrics(tmp_path / "run")] == [row["success"] for row in metrics(path)]


PROGRAM = """
import json, os, sys, urllib.request

def call(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=60))

def ask(role, text):
    body = {"model": role, "messages": [{"role": "user", "content": text}]}
    return call(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]

draft = ask("solver", "say " + sys.argv[1])
remark = ask("checker", draft)
if sys.argv[2] == "d 0":
    sys.exit("it crashes for this task")
call(os.environ["MARL_EPISODE_URL"] + "/reward", {"reward": len(set(draft)) / 32, "rewards": {"checker": len(remark) / 32}})
"""


def test_a_command_is_trained_continued_and_evaluated_from_its_directory(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sections = {key: value for key, value in SMALL.items() if isinstance(value, dict)}
    settings = [f"--set={key}.{name}={json.dumps(x)}" for key, values in sections.items() for name, x in values.items()]
    flags = [f"--roles=solver+checker={tiny}", "--tasks=tasks.jsonl", "--workdir=run", "--steps=1", "--group_size=2", "--processes=2"]
    settings += ["--set=recipe.rewards=mixed", "--set=quick_compile=true", "--set=devices=1"]
    with pytest.raises(SystemExit) as ended:
        main([*flags, *settings, "--", sys.executable, "-S", "app.py", "{letter}", "{letter} {number}", "--resume=nothing"])
    assert not ended.value.code
    (row,) = metrics(tmp_path / "run")
    assert (row["episodes"], row["aborted/failed"], row["failed_team"], row["aborted"]) == (4, 2, 2, 0.5)
    assert row["samples/trained"] == 4  # nothing of aborted episodes
    line = "step 1: 2 of 4 episodes were aborted; the first: failed: CommandFailed: exit code 1; its stderr ends: it crashes for this task"
    assert line in capsys.readouterr().err
    kept = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").open()]
    assert any("exit code 1; its stderr ends: it crashes for this task" in str(play.get("failures")) for play in kept)
    monkeypatch.chdir("/")
    kept_tasks = (tmp_path / "tasks.jsonl").read_text()
    (tmp_path / "tasks.jsonl").write_text(kept_tasks + json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ConfigError, match=r"config\.game\.tasks: .*tasks\.jsonl has other bytes than when the run began"):
        ml.resume(tmp_path / "run", steps=2)
    (tmp_path / "tasks.jsonl").write_text(kept_tasks)
    results = ml.resume(tmp_path / "run", steps=2)
    assert results["steps"] == 2
    assert ml.evaluate(tmp_path / "run", tasks=4)["after"]["tasks"] <= 4
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    record["config"]["game"]["command"] = "touch " + str(tmp_path / "harm")
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="use game.command='touch"):
        ml.evaluate(tmp_path / "run", tasks=4)
    assert not (tmp_path / "harm").exists()


def test_wrong_flags_are_said_in_one_line(tiny, tmp_path, capsys):
    for flags, why in (
        (["--roles=", "--", "true"], "--roles is missing"),
        ([f"--roles=solver={tiny}", "--tasks=t.jsonl", "--workdir=w"], "-- PROGRAM is missing"),
        (["--roles=solver", "--tasks=t.jsonl", "--workdir=w", "--", "true"], "'solver' must be ROLE=CHECKPOINT"),
        ([f"--roles=solver={tiny}", "--tasks=t.jsonl", "--workdir=w", "--", "true"], "there is no file"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(flags) if "--" in flags else main([*flags, "--"])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
    shared = models_of([f"a+b={tiny}", f"c={tiny}"], None)
    assert shared["a"] is shared["b"] is not shared["c"]
