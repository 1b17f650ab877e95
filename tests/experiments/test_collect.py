"""Runs of workflows in one table and one picture: the right figures from the right files, and plain words for what is missing."""

import json

import pytest

from experiments.base import ConfigError
from experiments.collect import curve, draw, read_groups, table


def part(success, turns=1.5):
    return {"success": success, "turns": turns}


def write_run(folder, after, sampled_tokens, untrained=0.2):
    """Two steps; validation rises from 0.1 to `after` and is measured at 0 and 2."""
    folder.mkdir()
    pairs = {"answer untrained": part(untrained)}
    kinds = {"before": part(0.1, 2.0), "after": part(after), "pairs": pairs}
    sampled = {"before": part(0.05, 3.0), "after": part(after / 2, 2.0), "pairs": {"answer untrained": part(untrained / 2)}}
    evaluation = {"headline": "f1", "seed": 0, "steps": 2, "train_wall_s": 10.0, **kinds, "sampled": sampled}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    lines = [{"phase": "warm_start", "step": 1}, {"phase": "eval", "step": 0, "success": 0.1}]
    lines += [{"phase": "train", "step": n, "sampled_tokens": n * sampled_tokens // 2} for n in (1, 2)]
    lines += [{"phase": "eval", "step": 2, "success": after}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def groups(tmp_path):
    a0, a1 = write_run(tmp_path / "a0", 0.5, 1000), write_run(tmp_path / "a1", 0.7, 1000)
    b0 = write_run(tmp_path / "b0", 0.9, 4000)
    return read_groups([f"A:{a0},{a1}", f"B:{b0}"])


def test_the_table_has_means_spreads_gains_and_the_figure_at_equal_tokens(groups):
    head, _, a, b = table(groups).splitlines()
    cells = lambda row: [cell.strip() for cell in row.strip("|").split("|")]  # noqa: E731
    named = dict(zip(cells(head), cells(a)))
    assert len(cells(head)) == len(cells(a)) == len(cells(b))
    assert named["seeds"] == "2"
    assert named["greedy after"] == "0.600 [0.500, 0.700]"
    assert cells(a)[4] == "0.500 [0.400, 0.600]"  # the gain of greedy play
    assert named["turns sampled"] == "3.00 → 2.00"
    assert named["one role untrained: greedy / sampled"] == "answer 0.200 / 0.100"
    assert "validation at 1,000 tokens" in named
    assert dict(zip(cells(head), cells(b)))["validation at 1,000 tokens"] == "0.300"  # a quarter of the way from 0.1 to 0.9
    assert named["sampled tokens"] == "1,000"


def test_curves_go_over_steps_or_tokens_and_are_drawn(groups, tmp_path):
    assert curve(groups["B"][0], "step") == ([0.0, 2.0], [0.1, 0.9])
    assert curve(groups["B"][0], "sampled_tokens") == ([0.0, 4000.0], [0.1, 0.9])
    draw(groups, "sampled_tokens", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ConfigError, match="--group='runs/a' is not like 'shared:runs/s0,runs/s1'"):
        read_groups(["runs/a"])
    with pytest.raises(ConfigError, match="nothing is no finished run: .*evaluation.json"):
        read_groups([f"A:{tmp_path / 'nothing'}"])
