"""A foreign program is trained as a run: directory, metrics, plays, checkpoints, resume, evaluation."""

import asyncio
import http.client
import json

import pytest

import marl_llm as ml
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
        assert (row["episodes"], row["void"], row["reencoded"], row["refused"], row["samples"]) == (4, 0, 0, 0, 8 * row["step"])
        assert row["role/checker/local"] > 0 == row["role/solver/local"]
    assert len(metrics(path, "eval")) == 2
    assert results["headline"] == "reward"
    assert results["after"]["tasks"] == 2
    assert (path / "report.html").exists()
    plays = [json.loads(line) for line in (path / "episodes.jsonl").open()]
    assert {step["role"] for play in plays for step in play["steps"]} == {"solver", "checker"}
    assert any("say" in step["prompt"] for step in plays[0]["steps"])
    assert train(path, tiny, 2) == results  # complete: nothing is played again


def test_a_run_that_continues_has_the_data_of_an_uninterrupted_one(whole, tiny, tmp_path):
    path, _ = whole
    train(tmp_path / "run", tiny, 1)
    train(tmp_path / "run", tiny, 2)
    again, once = calls_of(tmp_path / "run"), calls_of(path)
    assert len(once) == 8
    assert again == once
    assert len({str(calls) for calls in once.values()}) == 8  # the plays of a group differ
    assert [row["success"] for row in metrics(tmp_path / "run")] == [row["success"] for row in metrics(path)]


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
