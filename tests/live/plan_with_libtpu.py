"""The plan with the real TPU compiler. Needs the extra `plan` (libtpu); the test suite proper does not.

    pip install -e '.[test,plan]' && python -m pytest -n 0 tests/live/plan_with_libtpu.py
"""

import json
import os
import subprocess
import sys

import pytest


def run(*arguments: str) -> str:
    """A process of its own: libtpu refuses the suite's CPU flags in XLA_FLAGS."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plan(*arguments: str, config: str = "plan_path_10x10") -> dict:
    """The command's answer."""
    return json.loads(run("-m", "marl_llm", "plan", f"--config=experiments/configs/{config}.py", "--json", *arguments))


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


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_hosted_decode_step_reads_its_pages_once(topology):
    sizes = ("--config.rollout.max_prompt=4096", "--config.rollout.max_tokens=512", "--config.rollout.tensor=4")
    given = (f"--topology={topology}", "--config.model.preset=qwen3-8b", "--config.model.layers=4", *sizes)
    out = plan(*given, config="plan_path_text")
    engine, flops = out["engine"], out["update_flops"]
    assert engine["gathered"] < 1e7  # what a draw needs of the other devices; a layer's weights are 96e6
    assert 0.95 < engine["read"] / engine["needed"] < 1.3
    assert 1 < (flops["compiled"] - flops["again"]) / flops["needed"] < 1.15
    if topology == "v5p:2x2x1":  # where XLA's loops keep what they gather in main memory
        assert plan(*given, "--config.model.attention=tree", config="plan_path_text")["engine"]["read"] > 1.1 * engine["read"]


SHAPES = """
import itertools
import jax
from jax.sharding import SingleDeviceSharding
from marl_llm.planning.plan_devices import devices_of
from marl_llm.models.page_kernel import over_lists

for topology in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"):
    here = SingleDeviceSharding(devices_of(topology)[2][0])
    a = lambda kind, *shape: jax.ShapeDtypeStruct(shape, kind, sharding=here)
    sizes = [(32, 2, 2, 16, 128, 8), (8, 4, 7, 80, 128, 8), (256, 8, 8, 128, 128, 8), (16, 1, 5, 128, 256, 4), (64, 2, 4, 256, 1024, 1)]
    for (s, j, g, d, t, run), group, kind in itertools.product(sizes, (1, 8), ("bfloat16", "float32")):
        lists = [(a("int32", n, run), a("int32", n, group), a("int32", n), a("int32")) for n, group in ((512, 1), (256, group))]
        jax.jit(over_lists).lower(a(kind, s, j, g, d), a(kind, 99, j, d, t), a(kind, 99, j, t, d), lists).compile()
        print(topology, s, j, g, d, t, run, group, kind)
"""


def test_the_kernel_of_pages_compiles_for_any_heads_and_types():
    assert len(run("-c", SHAPES).splitlines()) == 3 * 5 * 2 * 2
