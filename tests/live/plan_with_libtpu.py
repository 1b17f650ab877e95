"""The plan with the real TPU compiler. Needs the extra `plan` (libtpu); the test suite proper does not.

    pip install -e '.[test,plan]' && python -m pytest -n 0 tests/live/plan_with_libtpu.py
"""

import json
import os
import subprocess
import sys

import pytest


def plan(*arguments: str) -> dict:
    """The command in a process of its own: libtpu refuses the suite's CPU flags in XLA_FLAGS."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "experiments.plan", "--config=experiments/configs/plan_path_10x10.py", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("fits", "arguments"),
    [
        (True, ("--config.model.preset=qwen3-0.6b", "--mesh=2,2", "--prompt=256", "--response=128")),
        (False, ("--config.model.preset=qwen3-8b", "--mesh=4,1", "--prompt=2048", "--response=512", "--config.rollout.tasks=256")),
    ],
)
def test_two_policies_of_two_layers_are_compiled_for_four_chips(fits, arguments):
    out = plan("--topology=v5e:2x2", "--config.model.layers=2", *arguments)
    assert out["compiled"]
    assert out["parameters_bytes"] > 2 * out["parameters"] * 4 / 4  # norms are on every device
    assert out["update"]["temporary"] > 0
    assert (out["fits"], out["suggestion"] == "") == (fits, fits)
    assert (out["peak"] < out["device_memory"]) == fits
