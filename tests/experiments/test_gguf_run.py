"""A whole run on a GGUF file of a tiny model: trained, resumed, evaluated, looked at, and exported merged and as PEFT's adapters."""

import json
import os
import pathlib
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

from test_gguf import random_model, write  # noqa: E402
from test_players import read_flags  # noqa: E402

from marl_llm.cli import export  # noqa: E402
from marl_llm.models import load_adapters, load_pretrained, merge  # noqa: E402
from marl_llm.reporting import read_episodes, read_metrics  # noqa: E402
from marl_llm.runs import (  # noqa: E402
    building,
    train_run,
    workdir,
)
from marl_llm.runs.command import ConfigError  # noqa: E402
from marl_llm.text import load_tokenizer  # noqa: E402
from marl_llm.training import make_mesh  # noqa: E402

SMALL = (
    "model.lora_rank=2", "recipe.temperature=1.0", "rollout.tasks=2", "evaluation.tasks=2", "evaluation.final_tasks=2",
    "evaluation.every=9", "checkpoint.every=1", "devices=1",
)  # fmt: skip
TEAM = """
from marl_llm.workflows import Role, Task, Workflow, Environment, plain, together
from marl_llm.workflows.rewards import broadcast
from marl_llm.workflows.splits import listed_tasks


def share(path):
    said = path.fields["a"] + path.fields["b"]
    return sum("!" <= letter <= "O" for letter in said) / max(1, len(said))


def low() -> Environment:
    roles = [Role(name, "{word}", plain(name), {name: ""}, max_prompt=300, max_tokens=8) for name in "ab"]
    team = Workflow("low", together(*roles), ("word",), rewards=(broadcast(share),), metrics={"share": share})
    tasks = {split: [Task(n, {"word": f"{split} {n}"}, {}, split) for n in range(4)] for split in ("train", "validation", "test")}
    return Environment(team, listed_tasks(tasks), "share")
"""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_letters():
    """GPT-2's letter of every byte: printable ones stand for themselves, the others for letters behind them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_tiny(path):
    """A GGUF file of one layer that reads bytes, with ChatML's template."""
    tokens = [*SPECIALS, *byte_letters(), "ab"]
    words = tokens, [3 if token in SPECIALS else 1 for token in tokens], [("a", "b")], CHATML
    config, _, tensors = random_model("qwen3", vocab_size=len(tokens), width=16, layers=1, feed_forward=32, max_position=2048)
    return write(path, "qwen3", config, tensors, words=words)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run directory of two steps, of which a resumed run made the second."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / "low.py").write_text(TEAM)
    config = f"{ROOT}/experiments/configs/smol_game.py"
    given = (f"model.path={write_tiny(folder / 'tiny.gguf')}", *SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_run, "start_jax", lambda *_, **__: make_mesh(1))
        patch.setattr(building, "start_jax", lambda *_, **__: make_mesh(1))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for steps in (1, 2):
            flags = [f"--config.{one}" for one in (*given, f"steps={steps}")]
            train_run.train_run(read_flags(f"--config={config}:{folder}/low.py:low", *flags), folder / "run", train_run.Launch(config, ""))
            let_go()
        yield folder / "run"
        let_go()


def let_go():
    """What the end of a process does."""
    for handle in workdir._HELD.values():
        os.close(handle)
    workdir._HELD.clear()


def test_a_gguf_file_trains_resumes_and_can_be_looked_at(run):
    results = json.loads((run / "evaluation.json").read_text())
    assert (results["steps"], results["after"]["episodes"], results["sampled"]["after"]["episodes"]) == (2, 2, 2)
    trained = [line for line in read_metrics(run) if line["phase"] == "train"]
    assert [line["step"] for line in trained] == [1, 2]
    assert all(line["model/a/log_prob_gap"] <= 1e-4 for line in trained)
    assert {play["when"] for play in read_episodes(run)} == {"before", "train", "after"}


def test_its_adapters_are_exported_alone_or_merged_and_mean_the_same(run, tmp_path):
    export.export(str(run), "a", tmp_path / "merged")
    assert load_tokenizer(tmp_path / "merged").encode("ab!") == load_tokenizer(run.parent / "tiny.gguf").encode("ab!")
    assert (tmp_path / "merged" / "generation_config.json").is_file()
    export.export(str(run), "a", tmp_path / "alone", adapters=True)
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    base = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())["base_model_name_or_path"]
    config, params = load_pretrained(base)
    adapters, lora = load_adapters(tmp_path / "alone", config)
    assert max(float(abs(x).max()) for path, x in jax.tree_util.tree_leaves_with_path(adapters) if path[-1].key == "b") > 0
    merged = load_pretrained(tmp_path / "merged")[1]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), merge(params, adapters, lora), merged)
    with pytest.raises(ConfigError, match="--dtype=bfloat16 has no effect on --adapters"):
        export.export(str(run), "a", tmp_path / "narrow", dtype="bfloat16", adapters=True)
