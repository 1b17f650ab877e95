"""The plan with XLA's compiler for GPUs, none of which is needed. Needs the extra `cuda`; the test suite proper does not.

    pip install -e '.[test,cuda]' && python -m pytest -n 0 tests/live/plan_with_cuda.py
"""

import json
import os
import subprocess
import sys

import pytest

from marl_llm.planning.plan_devices import GPUS


def plan(config: str, *arguments: str) -> dict:
    """The command in a process of its own, for the suite asks for CPU devices."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "marl_llm", "plan", f"--config=experiments/configs/{config}.py", "--json", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", GPUS)
def test_hosted_play_and_an_update_in_packed_rows_are_compiled_for_each_gpu(name):
    sizes = ("--config.rollout.max_prompt=512", "--config.rollout.max_tokens=128", "--config.rollout.max_num_seqs=16")
    out = plan("plan_path_text", f"--topology={name}:2", "--config.model.preset=qwen3-0.6b", "--config.model.layers=2", *sizes)
    assert out["compiled"]
    assert out["fits"]
    assert out["engine"]["decode"] > 0
    assert out["engine"]["gathered"] == 0
    flops = out["update_flops"]
    assert flops["needed"] < flops["compiled"] < 1.1 * (flops["needed"] + flops["again"])  # one chunk of logits is not computed again


def test_compiled_play_is_compiled_and_what_does_not_fit_is_told():
    shape = "--topology=rtx4090:1", "--config.model.layers=2", "--prompt=2048", "--response=512"
    small = plan("plan_path_10x10", "--config.model.preset=qwen3-0.6b", "--config.rollout.tasks=2", *shape)
    assert small["fits"]
    large = plan("plan_path_10x10", "--config.model.preset=qwen3-8b", "--config.rollout.tasks=256", *shape)
    assert not large["fits"]
    assert large["suggestion"]
