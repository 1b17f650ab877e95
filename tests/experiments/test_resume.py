"""Law 7: a run that is killed anywhere and resumed leaves what an uninterrupted run leaves, byte for byte.

The run is the smoke variant of the quickstart on small maps, as a user starts it; the uninterrupted one also shows that every promised file
is there.
"""

import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

from marl_llm.games import make_game
from marl_llm.reporting import read_episodes, read_metrics, read_tokens, validate_episode
from marl_llm.text import PieceTokenizer

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import resume  # noqa: E402

# a cache of its own: programs compiled for this suite's eight devices are others
CACHE = pathlib.Path(os.environ.get("MARL_LLM_TEST_CACHE", pathlib.Path(tempfile.gettempdir()) / "marl_llm_test_cache")) / "runs"
# enough of a supervised warm-up that there is something to learn from, and one step more than the checkpoints need
SMALL = {"height": 3, "width": 3, "min_distance": 2, "max_distance": 4}
SETTINGS = ("model.preset=nano", *(f"game.{name}={value}" for name, value in SMALL.items()))
SETTINGS += ("devices=2", "steps=6", "sft.steps=60", "recipe.alpha=0.5")
FLAGS = ["--config=experiments/configs/quickstart.py:smoke", *(f"--config.{s}" for s in SETTINGS), f"--compilation_cache={CACHE}"]
MOMENTS = ["warm", "write", "saved"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of an uninterrupted run with what it said, that of one killed three times, and the moments of the kills."""
    folder = tmp_path_factory.mktemp("resume")
    dice = random.Random(os.environ.get("MARL_LLM_TEST_SEED", 7))
    (whole,) = resume.launch(1, *FLAGS, f"--workdir={folder / 'whole'}")
    while whole.poll() is None and not (folder / "whole" / "checkpoints" / "2").exists():
        time.sleep(0.1)  # until all is compiled, so that the other finds it in the cache
    killed = resume.interrupted(FLAGS, folder / "killed", MOMENTS, dice, slack_s=8.0)
    return folder / "whole", resume.finish([whole])[0], folder / "killed", *killed


def test_a_killed_run_ends_with_the_same_bytes(runs):
    """d1: the last kill came when checkpoint 2 was whole, so data position, keys, schedule and optimizer went on from a step above 0."""
    whole, _, killed, moments, found, said = runs
    assert moments == MOMENTS
    assert found[-1] == 2
    assert f"continuing {killed} after step 2" in said
    assert resume.differences(whole, killed) == []


def test_the_comparison_sees_what_differs(runs, tmp_path):
    """What would make the test above pass for nothing: no arrays, no lines, or a comparison that does not look."""
    whole, _, killed, *_ = runs
    arrays, records = resume.arrays(whole), resume.records(whole)
    assert {name.split("/")[0] for name in arrays} == {"0", "4", "6"}
    for part in ("6/tool['params']", "6/planner['params']", "6/tool['optimizer']", "6/planner['optimizer']"):
        assert any(name.startswith(part) for name in arrays)
    moved = [n for n in arrays if n.startswith("6/") and arrays[n].tobytes() != arrays["0" + n[1:]].tobytes()]
    assert len(moved) == len(arrays) // 3, "training moved not everything, so equal bytes would prove less"
    other = tmp_path / "other"
    shutil.copytree(killed, other)
    line = next(r for r in records["metrics.jsonl"] if r["phase"] == "train")
    key = "model/tool/loss"
    text = (other / "metrics.jsonl").read_text().replace(f'"{key}": {json.dumps(line[key])}', f'"{key}": {line[key] + 1e-6}', 1)
    (other / "metrics.jsonl").write_text(text)
    shutil.rmtree(other / "checkpoints" / "6")
    shutil.copytree(other / "checkpoints" / "4", other / "checkpoints" / "6")
    found = resume.differences(whole, other)
    assert sum(name.startswith("metrics.jsonl line ") for name in found) == 1
    assert sum(name.startswith("6/tool['params']") for name in found) >= 5


def test_a_complete_run_says_so_and_changes_nothing(runs):
    whole, *_ = runs
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in whole.rglob("*") if p.is_file()}
    said = resume.finish(resume.launch(1, f"--resume={whole}", f"--compilation_cache={CACHE}"))[0]
    assert "is complete" in said
    assert "report.html" in said
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in whole.rglob("*") if p.is_file()} == before


def test_every_promised_file_is_there(runs):
    path, said, *_ = runs
    assert "Traceback" not in said
    assert "step 0: validation success" in said
    assert f"report: {path / 'report.html'}" in said
    assert {p.name for p in path.iterdir()} == {
        "config.json", "metrics.jsonl", "tensorboard", "episodes.jsonl", "episodes_tokens.jsonl", "checkpoints", "tokenizer.model",
        "evaluation.json", "outcomes.jsonl", "report.html", "plots",
    }  # fmt: skip
    assert list((path / "tensorboard").iterdir())
    assert sorted(int(p.name) for p in (path / "checkpoints").iterdir()) == [0, 4, 6]
    assert {p.name for p in (path / "checkpoints" / "6" / "policies").iterdir()} == {"tool", "planner"}
    assert PieceTokenizer.load(path / "tokenizer.model") == make_game("plan_path", **SMALL, max_moves=4).tokenizer
    page = (path / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "quickstart" in page
    assert any(p.suffix == ".png" and p.stat().st_size > 5000 for p in (path / "plots").iterdir())


def test_config_json_says_what_ran(runs):
    path, *_ = runs
    record = json.loads((path / "config.json").read_text())
    assert record["config"]["recipe"]["alpha"] == 0.5
    assert record["config"]["game"]["max_moves"] == 4
    assert record["config"]["evaluation"]["tasks"] == 16
    assert f"--config.recipe.alpha=0.5 --compilation_cache={CACHE} --workdir={path}" in record["command"]
    assert record["config_file"] == "experiments/configs/quickstart.py:smoke"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert record["commit"] == "unknown" or len(record["commit"].removesuffix("+changes")) == 40
    assert (record["commit"] == "unknown") == (not head)
    assert record["hardware"].startswith("2 x cpu (cpu), ")
    assert (record["seed"], record["headline"]) == (0, "success")


def test_the_lines_of_a_run(runs):
    path, *_ = runs
    metrics = read_metrics(path)
    assert [r["step"] for r in metrics if r["phase"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in metrics if r["phase"] == "eval"] == [0, 2, 4, 6]
    assert max(r["step"] for r in metrics if r["phase"] == "sft") == 60
    train = [r for r in metrics if r["phase"] == "train"]
    assert all(r[f"model/{m}/log_prob_gap"] <= 1e-4 for r in train for m in ("tool", "planner"))  # law 2
    plays, tokens = read_episodes(path), read_tokens(path)
    assert [p["episode"] for p in plays] == [t["episode"] for t in tokens]
    when = [p["episode"].rpartition("-")[0] for p in plays]  # the first plays, and but for "before" the three worst of those behind them
    assert when == ["train-2"] * 4 + ["train-4"] * 4 + ["train-6"] * 4 + ["before"] * 3 + ["after"] * 6
    firsts = {"train-2-0", "train-4-0", "train-6-0", *(f"{name}-{i}" for name in ("before", "after") for i in range(3))}
    assert firsts <= {p["episode"] for p in plays}
    for play in plays:
        validate_episode(play)
        assert list(play["roles"].items()) == [("tool", "tool"), ("planner", "planner")]
    results = json.loads((path / "evaluation.json").read_text())
    assert set(results) >= {"before", "after", "random", "swapped", "pairs", "split", "seed", "steps"}
    assert (results["split"], results["after"]["episodes"], results["steps"]) == ("test", 16, 6)
    assert len(results["pairs"]) == 2
