"""`python -m benchmarks.accelerator`: its parts measure what they say, and a failure is a row, a line of the page and the exit code."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import accelerator
from benchmarks import accelerator_parts as parts
from marl_llm.models import attention, init_params
from marl_llm.training.roofline import decode_step, update
from marl_llm.training.speed import MachineLimits

TINY = parts.Sizes(presets="nano", attention_lengths="16")


def test_a_wrong_attention_path_disagrees_and_one_that_raises_does_not_stop_the_others(monkeypatch):
    def everywhere(queries, keys, values, mask):  # sees padding, later tokens and other branches
        return attention.attend(queries, keys, values, jnp.ones_like(mask.dense()))

    def broken(*_):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(attention, "_chunked", everywhere)
    monkeypatch.setattr(attention, "_tree", broken)
    found = parts.attention_rows(TINY, kinds=("tree",), paths=("chunked", "tree", "cudnn", "xla"), dtypes=("float32",))
    chunked, tree, cudnn, xla = found
    assert "a difference of" in chunked["failed"]
    assert chunked["output"] > 0.1
    assert tree["failed"] == "NotImplementedError: no such kernel"
    assert cudnn["left_out"] == "needs a GPU"
    assert "failed" not in cudnn
    assert "failed" not in xla
    assert xla["output"] <= 1e-6
    assert xla["gradient"] <= 1e-6
    assert xla["auto"]


def test_the_engines_share_is_the_bytes_of_its_steps_over_their_time(monkeypatch):
    monkeypatch.setattr(parts, "limits", lambda dtype: MachineLimits(1e9, 1e12))
    config = parts.model_of(TINY)
    row = parts.engine_row(config, init_params(config, jax.random.key(0)), 2, 8, 9, repeats=1)
    bytes_per_step = decode_step(config, 2, 1, 8, 9, 1, itemsize=4).bytes
    assert row["share"] == pytest.approx(bytes_per_step / 1e12 / (row["step_ms"] / 1e3))
    assert 0 < row["tokens_per_s"] <= 2 * 9 / (8 * row["step_ms"] / 1e3)  # eight steps after the prompt's, and whatever else it took
    assert row["compile_s"] > 0
    assert row["compiled_later_s"] == 0


def test_an_updates_memory_is_that_of_the_program_that_a_plan_compiles(monkeypatch):
    monkeypatch.setattr(parts, "limits", lambda dtype: MachineLimits(1e9, 1e12))
    config = parts.model_of(TINY)
    row = parts.update_row(config, groups=1, branches=2, prompt=8, response=4, repeats=1)
    assert "failed" not in row
    assert row["compiled_bytes"] > row["state_bytes"] == 12 * config.parameters
    assert row["mfu"] * row["seconds"] * 1e9 == pytest.approx(update(config, 1, 2, 8, 4, 1, 1).flops)


def write_run(folder, gap, updates):
    line = {"phase": "train", "model/a/log_prob_gap": gap, "model/a/log_prob_gap_bound": 1e-4, "model/a/updates": updates}
    line |= {"speed/sampled_tokens_per_s": 10.0, "speed/trained_tokens_per_s": 5.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (line, {"phase": "eval"}, line)))
    (folder / "evaluation.json").write_text(json.dumps({"before": {"success": 0.25}, "after": {"success": 0.5}}))
    (folder / "report.html").write_text("")


def test_a_mini_run_must_be_whole_update_something_and_keep_the_gap(tmp_path):
    write_run(tmp_path, 2e-6, 1.0)
    row = parts.run_figures(tmp_path, 2)
    assert (row["before"], row["after"], row["updates"], row["log_prob_gap"]) == (0.25, 0.5, 2, 2e-6)
    assert "failed" not in row
    with pytest.raises(RuntimeError, match="2 of 3 steps"):
        parts.run_figures(tmp_path, 3)
    write_run(tmp_path, 2e-3, 1.0)
    assert parts.run_figures(tmp_path, 2)["failed"] == "a gap between sampler and scorer of 0.002 is above 0.0001"
    write_run(tmp_path, float("nan"), 1.0)
    assert "failed" in parts.run_figures(tmp_path, 2)
    write_run(tmp_path, 0.0, 0.0)
    with pytest.raises(RuntimeError, match="no model was updated"):
        parts.run_figures(tmp_path, 2)


def test_a_process_that_dies_is_a_failure_with_what_it_said():
    (row,) = accelerator.rows_of_process("nothing", TINY, limit_s=120, quick=False)
    assert row["part"] == "nothing"
    assert "ended with 1" in row["failed"]
    assert "KeyError" in row["failed"]


DEVICE = {"part": "device", "platform": "gpu", "kind": "Big GPU", "devices": 2, "memory_bytes": 2**34, "host": "8 cores", "python": "3.12",
          "versions": {"jax": "1"}}  # fmt: skip
GOOD = {"part": "attention", "path": "tree", "mask": "causal", "dtype": "float32", "length": 16, "output": 1e-7, "gradient": 2e-7}
BAD = {"part": "engine", "batch": 8, "prompt": 4, "response": 4, "failed": "XlaRuntimeError: out of memory"}


@pytest.mark.parametrize("bad", [True, False])
def test_the_page_and_the_exit_code_tell_what_failed(bad, tmp_path, monkeypatch, capsys):
    asked = []

    def faked(part, sizes, limit_s, quick):
        asked.append((part, sizes, quick))
        return {"device": [DEVICE], "attention": [GOOD], "engine": [BAD] if bad else []}[part]

    monkeypatch.setattr(accelerator, "rows_of_process", faked)
    code = accelerator.measure(["attention", "engine"], False, {"repeats": 7}, tmp_path / "page.md", 1.0)
    page, lines = (tmp_path / "page.md").read_text(), capsys.readouterr().out.splitlines()
    assert code == bad
    assert [json.loads(line) for line in lines] == [DEVICE, GOOD] + [BAD] * bad
    assert ("- **engine**: 8, 4, 4: XlaRuntimeError: out of memory" in page) == bad
    assert ("## Failures" in page) == bad
    assert "**GPU page**" in page
    assert "No accelerator" not in page
    assert "2 x Big GPU (gpu), 16.00 GiB each" in page
    assert "| tree | causal | float32 | 16 | 1e-07 | 2e-07 |" in page
    assert [(part, sizes.presets, sizes.repeats, quick) for part, sizes, quick in asked] == [
        ("device", "micro", 7, False), ("attention", "qwen3-0.6b,qwen3-1.7b", 7, False), ("engine", "qwen3-0.6b,qwen3-1.7b", 7, False),
    ]  # fmt: skip
