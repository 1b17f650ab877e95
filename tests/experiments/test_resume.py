"""Law 7: a run that is killed anywhere and resumed leaves what an uninterrupted run leaves, byte for byte."""

import json
import os
import pathlib
import random
import shutil
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import resume  # noqa: E402

# a cache of its own: programs compiled for this suite's eight devices are others
CACHE = pathlib.Path(os.environ.get("MARL_LLM_TEST_CACHE", pathlib.Path(tempfile.gettempdir()) / "marl_llm_test_cache")) / "runs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directory of an uninterrupted run, that of one killed three times, and the moments of the kills."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "tiny.py").write_text(resume.CONFIG)
    flags = [f"--config={folder / 'tiny.py'}", f"--compilation_cache={CACHE}"]
    dice = random.Random(os.environ.get("MARL_LLM_TEST_SEED", 7))
    whole = resume.launch(*flags, f"--workdir={folder / 'whole'}")  # beside the other: two cores, two runs
    killed = resume.interrupted(flags, folder / "killed", ["start", "write", "step"], dice, slack_s=8.0)
    resume.finish(whole)
    return folder / "whole", folder / "killed", killed


def test_a_killed_run_ends_with_the_same_bytes(runs):
    whole, killed, moments = runs
    assert moments == ["start", "write", "step"]
    assert resume.differences(whole, killed) == []


def test_the_comparison_sees_one_changed_bit(runs, tmp_path):
    """What would make the test above pass for nothing: no arrays, no lines, or a comparison that does not look."""
    whole, killed, _ = runs
    arrays, records = resume.arrays(whole), resume.records(whole)
    assert {name.split("/")[0] for name in arrays} == {"0", "6", "8"}
    for part in ("8/tool['params']", "8/planner['params']", "8/tool['optimizer']", "8/planner['optimizer']"):
        assert any(name.startswith(part) for name in arrays)
    moved = [n for n in arrays if n.startswith("8/") and arrays[n] != arrays["0" + n[1:]]]
    assert len(moved) >= 40, "training moved nothing, so equal bytes would prove nothing"
    lines = [r["phase"] + str(r["step"]) for r in records["metrics.jsonl"]]
    assert "warm_start60" in lines
    assert [x for x in lines if not x.startswith("warm")] == (
        ["eval0", "train1", "train2", "train3", "train4", "eval4", "train5", "train6", "train7", "train8", "eval8"]
    )
    names = [r["episode"] for r in records["episodes.jsonl"]]
    assert names == ["train-2", "train-4", "train-6", "train-8", "before-0", "after-0"]
    assert [r["episode"] for r in records["episodes_tokens.jsonl"]] == names

    other = tmp_path / "other"
    shutil.copytree(killed, other)
    line = next(r for r in records["metrics.jsonl"] if r["phase"] == "train")
    key = "model/tool/loss"
    text = (other / "metrics.jsonl").read_text().replace(f'"{key}": {json.dumps(line[key])}', f'"{key}": {line[key] + 1e-6}', 1)
    (other / "metrics.jsonl").write_text(text)
    shutil.rmtree(other / "checkpoints" / "8")
    shutil.copytree(other / "checkpoints" / "6", other / "checkpoints" / "8")
    found = resume.differences(whole, other)
    assert sum(name.startswith("metrics.jsonl line ") for name in found) == 1
    assert sum(name.startswith("8/tool['params']") for name in found) >= 5


def test_a_complete_run_says_so_and_changes_nothing(runs):
    whole, _, _ = runs
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in whole.rglob("*") if p.is_file()}
    said = resume.finish(resume.launch(f"--resume={whole}", f"--compilation_cache={CACHE}"))
    assert "is complete" in said
    assert "report.html" in said
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in whole.rglob("*") if p.is_file()} == before
