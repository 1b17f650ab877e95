"""The plan with the real TPU compiler. Needs the extra `plan` (libtpu); the test suite proper does not.

    pip install -e '.[test,plan]' && python -m pytest tests/live/plan_with_libtpu.py
"""

import importlib
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from experiments.planning import plan, table


def test_two_small_policies_are_compiled_for_four_chips_with_flash_attention():
    config = importlib.import_module("experiments.configs.plan_path_10x10").get_config()
    config.model.preset = "qwen3-0.6b"
    config.model.layers = 2
    out = plan(config, "v5e:2x2", "2,2", 256, 128, 0, True)
    assert out["compiled"]
    assert out["fits"]
    assert out["parameters_bytes"] > 2 * out["parameters"] * 4 / 4  # norms are on every device
    assert out["update"]["temporary"] > 0
    assert out["peak"] < out["device_memory"]
    assert "fits" in table(out)


def test_what_does_not_fit_is_said_with_a_suggestion():
    config = importlib.import_module("experiments.configs.plan_path_10x10").get_config()
    config.model.preset = "qwen3-8b"
    config.model.layers = 4
    config.rollout.environments = 256
    out = plan(config, "v5e:2x2", "4,1", 2048, 512, 0, True)
    assert not out["fits"]
    assert out["suggestion"]
