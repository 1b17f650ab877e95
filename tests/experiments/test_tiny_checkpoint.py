"""The small checkpoint that a command writes is read like a real one."""

import json

import numpy as np
import pytest

from marl_llm.cli.tiny import make
from marl_llm.models import load_pretrained
from marl_llm.runs.command import ConfigError
from marl_llm.text import Message, load_chat


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_a_tiny_checkpoint_is_loaded_with_its_chat(family, tmp_path):
    sizes = dict(vocabulary=512, layers=1, width=32, head_dim=8, feed_forward=48)
    out = make(tmp_path / "tiny", family, **sizes)
    config, params = load_pretrained(out)
    assert (config.vocab_size, config.layers, config.width, config.qk_norm) == (512, 1, 32, family == "qwen3")
    assert all(np.isfinite(leaf).all() for leaf in map(np.asarray, (params["embedding"],)))
    chat = load_chat(out, {"enable_thinking": False} if family == "qwen3" else None)
    ids = chat.start([Message("user", "count 123, naïve 中")]).ids
    assert max(ids) < 512
    said = chat.tokenizer.decode(ids)
    assert "count 123, naïve 中" in said
    assert ("</think>" in said) == (family == "qwen3")
    assert set(chat.stop_ids) == set(json.loads((out / "generation_config.json").read_text())["eos_token_id"])
    again = make(tmp_path / "again", family, **sizes)
    for name in ("tokenizer.json", "model.safetensors"):
        assert (out / name).read_bytes() == (again / name).read_bytes()


def test_a_directory_in_use_and_sizes_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out=.* exists; choose a new directory"):
        make(tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint of these sizes: .*query_heads"):
        make(tmp_path / "new", query_heads=3, key_value_heads=2)
    with pytest.raises(ConfigError, match="no checkpoint of these sizes: .*no Hugging Face architecture"):
        make(tmp_path / "new", "qwen2", width=32)
    assert not (tmp_path / "new").exists()
