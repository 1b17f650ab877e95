"""What a dry run says of memory and minutes on this machine: counted as the programs and arrays have it."""

import dataclasses
import types

import jax
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.models import LoraConfig, ModelConfig, init_adapters
from marl_llm.planning import this_machine
from marl_llm.planning.programs import PlanSizes, programs
from marl_llm.planning.programs import memory as memory_of
from marl_llm.planning.this_machine import activations, adapter_parameters, lines, memory, seconds
from marl_llm.runs.base import base_config
from marl_llm.runs.resolve import resolve
from marl_llm.training import make_mesh
from marl_llm.training.speed import MachineLimits

SHAPE = ModelConfig(vocab_size=4096, width=128, layers=6, query_heads=4, key_value_heads=2, head_dim=32, feed_forward=384)
LIMITS = MachineLimits(1e11, 2e10)


def planned(**keys):
    """A config of two writers that are checkpoints, and its plan."""
    config = base_config("x", game="writing", recipe="magrpo")
    config.game.update(task="descriptions", max_prompt=208, max_tokens=48)
    config.rollout.tasks, config.optimizer.row_tokens, config.evaluation.tasks = 4, 400, 16
    config.model.update(preset="smollm2-135m", lora_rank=16)
    config.stacked_layers = True
    config.update_from_flattened_dict(keys)
    with resolve(config, sizes_only=True) as plan:
        return config, plan


@pytest.mark.parametrize("shape", [SHAPE, dataclasses.replace(SHAPE, experts=4, experts_per_token=2, expert_feed_forward=64)])
def test_adapters_are_counted_as_they_are_made(shape):
    made = jax.eval_shape(lambda: init_adapters(shape, jax.random.key(0), LoraConfig(rank=8)))
    assert adapter_parameters(shape, 8) == sum(x.size for x in jax.tree.leaves(made))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_activations_are_about_those_of_the_compiled_update(remat):
    shape, prompt, response, k = dataclasses.replace(SHAPE, remat=remat), 200, 50, 4
    sizes = PlanSizes(make_recipe("magrpo", group_size=k), shape, 1, prompt, response, lora=LoraConfig(rank=4))
    lowered, *_ = programs(sizes, make_mesh(1), 1, 0)
    found, row = memory_of(lowered["update"].compile())["temporary"], prompt + k * response
    assert activations(shape, row, row, adapters=True) == pytest.approx(found, rel=0.5)


def test_memory_follows_from_what_is_kept():
    base = memory(*planned())
    whole = planned()[1].shapes["first"].parameters * 4
    assert base["parameters"] == pytest.approx(whole, rel=0.1)  # once, under the adapters of both
    assert base["served"] < whole / 10
    copies = memory(*planned(), copies=2)
    assert copies["served"] > whole  # where there are several devices each has a copy of what is served
    assert copies["program"] == base["program"]
    merged = memory(*planned(**{"rollout.lora_serving": "merged"}))
    assert merged["served"] == 2 * whole
    full = memory(*planned(**{"model.lora_rank": None}))
    assert full["parameters"] + full["optimizer"] == pytest.approx(2 * 3 * whole)
    assert memory(*planned(**{"rollout.max_num_seqs": 16}))["pages"] == base["pages"] / 4
    assert memory(*planned(**{"rollout.cache_gib": 0.25}))["pages"] == 2**28
    assert memory(*planned(**{"optimizer.microbatch_tokens": 4096}))["update"] > 2 * base["update"]


def test_minutes_follow_from_tasks_and_steps():
    one, more = seconds(*planned(), LIMITS), seconds(*planned(**{"rollout.tasks": 8}), LIMITS)
    assert more["updating"] == pytest.approx(2 * one["updating"], rel=0.1)
    assert more["a validation"] == one["a validation"]
    assert seconds(*planned(**{"evaluation.tasks": 64}), LIMITS)["a validation"] > one["a validation"]
    assert seconds(*planned(stacked_layers=False), LIMITS)["compiling"] > 5 * one["compiling"]
    fast = seconds(*planned(), MachineLimits(1e12, 2e11))
    assert fast["playing"] == pytest.approx(one["playing"] / 10)


def test_a_dry_run_says_what_it_takes_here(monkeypatch):
    monkeypatch.setattr(this_machine, "memory_limit", lambda: 16 * 2**30)
    config, plan = planned(steps=10)
    machine, of_memory, step, run = lines(config, plan, make_mesh(1))
    assert "16.00 GiB" in machine
    assert "parameters 0.5" in of_memory
    assert "TOO MUCH" not in of_memory
    assert "playing" in step
    assert "10 steps, 1 validations" in run
    monkeypatch.setattr(this_machine, "memory_limit", lambda: 2**30)
    assert "THIS IS TOO MUCH" in lines(config, plan, make_mesh(1))[1]
    elsewhere = types.SimpleNamespace(devices=types.SimpleNamespace(flat=[types.SimpleNamespace(platform="gpu")]))
    assert lines(config, plan, elsewhere) == []


def test_of_small_models_only_memory_is_said():
    config = base_config("x", game="plan_path", recipe="at_grpo")
    with resolve(config) as plan:
        assert len(lines(config, plan, make_mesh(1))) == 2
