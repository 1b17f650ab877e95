"""Work counted against sums by hand, limits that programs cannot pass, compilations counted."""

import jax
import jax.numpy as jnp
import pytest

from marl_llm.models import ModelConfig
from marl_llm.training import make_mesh, speed
from marl_llm.training.roofline import Work

CONFIG = ModelConfig(vocab_size=11, width=8, layers=1, query_heads=2, key_value_heads=1, head_dim=4, feed_forward=16)
FIGURES = {"prompts": 3.0, "prompt_tokens": 30.0, "samples": 12.0, "sampled_tokens": 60.0, "turns": 2.0}
# multiply-adds of a token: q 8x8, k and v 8x4 each, output 8x8, three feed-forward matrices 8x16; its norms count with them
MATRICES = 64 + 2 * 32 + 64 + 3 * 128
NORMS = 8 + 8 + 8 + 4 + 4


def test_the_work_of_a_step_is_that_of_its_tokens():
    head, seen = 2 * 11 * 8, 4 * 2 * 4
    prompt = 30 * (2 * (MATRICES + NORMS) + seen * 5)
    response = 60 * (2 * (MATRICES + NORMS) + seen * (10 + 2.5) + head)
    sampled = speed.rollout_work(CONFIG, FIGURES, roles=2, devices=2)
    assert sampled.flops == pytest.approx(prompt + response + 3 * head)
    assert sampled.bytes == pytest.approx(4 * (MATRICES + NORMS + 88) * 2 * 2 * 2 * (1 + 5))
    learnt = speed.update_work(CONFIG, FIGURES, share=0.5, epochs=2)
    assert learnt.flops == pytest.approx(3 * 2 * 0.5 * (prompt + response))
    products = 90 * 2 * (MATRICES + NORMS) + 60 * head
    frozen = speed.update_work(CONFIG, FIGURES, share=0.5, epochs=2, frozen=True)
    assert frozen.flops == pytest.approx(2 * 0.5 * (3 * (prompt + response) - products))


def test_limits_are_those_of_all_devices_together():
    limits = speed.machine_limits(make_mesh(2), repeats=1)
    assert limits.flops > 1e9
    assert limits.bandwidth > 1e8
    assert limits.seconds(Work(limits.flops, 0)) == pytest.approx(1.0)
    assert limits.seconds(Work(0, 3 * limits.bandwidth)) == pytest.approx(3.0)


def test_each_new_program_is_counted_once():
    count = speed.Compilations()
    f = jax.jit(lambda x: x * 2 + 1)
    inputs = [jnp.ones(3), jnp.ones(3), jnp.ones(4)]
    before = count.programs
    for x in inputs:
        f(x).block_until_ready()
    assert count.programs == before + 2


def test_the_summary_leaves_the_compiling_step_out():
    def row(sample):
        return {
            "time/sample": sample, "time/update": 1.0, "time/other": 0.0, "speed/sampled_tokens_per_s": 100 / sample,
            "speed/trained_tokens_per_s": 7.0, "speed/sample_roofline": 0.5 / sample, "speed/update_roofline": 0.25,
        }  # fmt: skip

    text = speed.summary_text([row(10.0), row(1.0), row(1.0)], speed.Compilations())
    assert "sampled 100 tokens/s (50% of the roofline)" in text
    assert "playing 50%, scores and update 50%, evaluation and idle 0%" in text


def test_a_machines_limits_are_measured_once_and_a_step_compiles_nothing_for_them():
    mesh = make_mesh(1)
    first, before = speed.machine_limits(mesh), speed.Compilations()
    assert speed.machine_limits(mesh) is first
    assert before.programs == 0
