"""What a plan counts, what it refuses, and that its programs are the trainer's own."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import types

import jax
import numpy as np
import pytest

import experiments.configs
from marl_llm.algorithms import make_recipe
from marl_llm.models import PRESETS, LoraConfig, ModelConfig, for_platform, init_params, make_model_config, tree_kernel, tree_kernel_gpu
from marl_llm.planning import plans
from marl_llm.planning.engine_programs import engine_figures, engine_programs, step_reads
from marl_llm.planning.plan_devices import GPUS, PlanError, mesh_axes
from marl_llm.planning.plan_table import measured_lines, table
from marl_llm.planning.plans import _update_flops, plan
from marl_llm.planning.program_costs import ProgramText
from marl_llm.planning.programs import PlanSizes, memory, programs
from marl_llm.runs.command import ConfigError
from marl_llm.sampling import EngineConfig
from marl_llm.sampling.model_runner import page_bytes
from marl_llm.training import make_mesh, roofline
from marl_llm.training.mesh import serving_mesh


def config_of(preset="qwen3-1.7b", **changes):
    config = importlib.import_module("experiments.configs.plan_path_10x10").get_config()
    config.model.preset = preset
    for key, value in changes.items():
        config.model[key] = value
    return config


def test_published_parameter_counts():
    billions = {
        "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.770,
        "qwen2.5-coder-7b": 7.616, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.768,
        "qwen3-30b-a3b": 30.532, "deepseek-r1-distill-qwen-1.5b": 1.777, "llama-3.2-1b": 1.236, "llama-3.1-8b": 8.030,
        "smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.711,
    }  # fmt: skip
    for name, count in billions.items():
        assert round(make_model_config(name).parameters / 1e9, 3) == count, name
    assert round(make_model_config("qwen3-30b-a3b").active_parameters / 1e9, 2) == 3.35


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_counts_what_its_pytree_holds(name):
    config = make_model_config(name, None if "vocab_size" in PRESETS[name] else 77)
    config = dataclasses.replace(config, layers=2)  # all alike, and counted whole above
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=True))
    assert sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes)) == config.parameters


def test_a_small_preset_needs_a_vocabulary():
    with pytest.raises(ValueError, match="'micro' has no vocabulary"):
        make_model_config("micro")


def test_flops_are_those_of_the_matrix_products_that_run():
    """Against XLA's own count of an unrolled forward; attention is counted for half the row, XLA computes all of it."""
    config = ModelConfig(vocab_size=64, width=32, layers=2, query_heads=4, key_value_heads=2, head_dim=8, feed_forward=64)
    b, length = 4, 16
    from marl_llm.models import log_probs

    tokens = jax.ShapeDtypeStruct((b, length), np.int32)
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    cost = jax.jit(lambda p, t: log_probs(config, p, t).log_probs).lower(params, tokens).compile().cost_analysis()["flops"]
    ours = roofline.forward_flops(config, b * length, length, b * length)
    assert ours <= cost <= 1.35 * ours  # norms, softmax and rotations are not matrix products


def test_the_bytes_of_a_decode_step_are_weights_once_and_a_prompt_once_per_group():
    config = make_model_config("qwen3-0.6b")
    one, many = (roofline.decode_step(config, 1, k, 1000, 0, 1).bytes for k in (1, 8))
    assert one == many
    weights = 2 * (config.parameters - config.layers * 0)
    assert one == pytest.approx(weights + 1000 * 2 * 28 * 8 * 128 * 2)
    assert roofline.decode_step(config, 1, 8, 1000, 100, 4).bytes < one / 2


def test_remat_costs_one_more_forward():
    config = make_model_config("qwen3-0.6b")
    plain, again = (roofline.update(dataclasses.replace(config, remat=r), 4, 4, 100, 50, 1, 1).flops for r in ("none", "full"))
    assert again == pytest.approx(plain * 4 / 3)


def test_full_remat_does_not_compute_a_layers_last_product_again():
    """By XLA's count of what two widths of the feed-forward differ by, in gradients with and without remat."""
    from marl_llm.models import score_packed
    from marl_llm.planning.program_costs import ProgramText

    config = ModelConfig(vocab_size=64, width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16)
    ids = jax.ShapeDtypeStruct((2, 16), np.int32)

    def again(width):
        def flops(remat):
            shape = dataclasses.replace(config, feed_forward=width, remat=remat)
            params = jax.eval_shape(lambda: init_params(shape, jax.random.key(0)))

            def loss(params, *rows):
                return score_packed(shape, params, *rows).log_probs.sum()

            return ProgramText(jax.jit(jax.grad(loss)).lower(params, *[ids] * 6).compile().as_text()).flops()

        return flops("full") - flops("none")

    forward = 2 * 32 * config.layers * 3 * config.width * 64
    left_out = roofline.left_out(dataclasses.replace(config, feed_forward=64), 32)
    assert again(192) - again(128) == forward - left_out


@pytest.mark.parametrize("kernel", [tree_kernel.kernel_flops, functools.partial(tree_kernel_gpu.kernel_flops, group=2)])
def test_scores_are_one_of_the_two_products_of_a_kernels_forward_pass(kernel):
    """But for the pairs of its blocks that nobody sees."""
    config, rows = make_model_config("qwen3-0.6b"), (8192, 3, 4096)
    forward = kernel(*rows)["tree_attention_forward"]((config.layers, 8, 2, 8192 + 3 * 4096, 128))
    assert 1 < forward / 2 / roofline.scores(config, 1, 3, 8192, 4096) < 1.1
    assert roofline.scores(config, 2.5, 3, 8192, 4096) == pytest.approx(2.5 * roofline.scores(config, 1, 3, 8192, 4096))


def test_a_kernels_scores_count_as_computed_again():
    """A device's share of them, beside what remat repeats."""
    rows = (3, 4, 1024, 512)
    for remat in ("none", "full"):
        shape = dataclasses.replace(make_model_config("qwen3-0.6b"), remat=remat)
        kept, again = (_update_flops(shape, 7.0, in_kernel, rows, 2, 1, 0) for in_kernel in (False, True))
        assert again["again"] - kept["again"] == pytest.approx(roofline.scores(shape, *rows) / 2)
        assert again | {"again": 0} == kept | {"again": 0}
        assert again["compiled"] == 7.0
        assert (kept["again"] == 0) == (remat == "none")


def test_weights_under_adapters_have_no_gradient_to_compute():
    config = make_model_config("qwen3-0.6b")
    plain, adapted = (roofline.update(config, 1, 4, 100, 50, 1, 1, adapters=n) for n in (0, 10**6))
    answers = 4 * 50
    weights = 2 * roofline.matrix_parameters(config) * (100 + answers) + 2 * config.vocab_size * config.width * answers
    assert plain.flops - adapted.flops == pytest.approx(weights - 3 * 2 * 10**6 * (100 + answers))
    assert adapted.bytes == 4 * config.parameters + 7 * 4 * 10**6
    assert roofline.update(config, 1, 4, 100, 50, 2, 1, adapters=10**6).flops == adapted.flops / 2  # what devices repeat is not needed


def test_two_policies_on_gpus_by_arithmetic():
    out = plan(config_of(), "h100:8", "", 8192, 4096, 0, False)
    assert out["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1}
    assert out["parameters_bytes"] == pytest.approx(2 * 1_720_574_976 * 4 / 8)
    assert out["optimizer_bytes"] == 2 * out["parameters_bytes"]
    per_token = 2 * 28 * 8 * 128 * 2
    assert out["kv_cache"] == pytest.approx(48 / 8 * (8192 + 4 * 4096) * per_token)
    assert out["fits"]
    assert "fits" in table(out)
    work = {name: one["seconds"] * 8 for name, one in out["work"].items()}  # of the eight together
    a_response = (4096 * work["decode_step"] + work["prefill"]) / (48 * 4) + work["update_step"] / (8 * 4)
    assert out["chip_hours"] == pytest.approx(a_response / 3.6)
    assert f"1,000 responses, played and learned from: at least {out['chip_hours']:.3g} chip-hours" in table(out)
    small = plan(config_of("qwen3-8b"), "h100:1", "", 8192, 4096, 0, False)
    assert not small["fits"]
    assert "DOES NOT FIT: the" in table(small)


def test_each_phase_of_a_run_says_what_is_alive():
    out = plan(config_of("qwen3-1.7b"), "h100:1", "", 1024, 512, 0, False)
    assert out["phases"].keys() == {"start", "sft", "training", "resume", "export"}
    each = {name: size / (2 * out["parameters"]) for name, size in out["phases"].items()}
    assert each == pytest.approx({"start": 14, "sft": 14, "training": 14, "resume": 12, "export": 12})  # two models begin from one
    assert re.search(r"in training +44\.87 GiB, 14\.0 bytes per trained parameter", table(out))
    kept = config_of("qwen3-1.7b")
    kept.recipe.kl_coef = 0.1
    more = plan(kept, "h100:1", "", 1024, 512, 0, False)["phases"]
    references = 2 * 2 * out["parameters"]
    assert {name: size - out["phases"][name] for name, size in more.items()} == pytest.approx(dict.fromkeys(more, references))


def test_the_phases_of_adapters_are_those_of_their_base():
    config = config_of("qwen3-0.6b")
    config.model.lora_rank = 16
    out = plan(config, "h100:1", "", 1024, 512, 0, False)
    whole, stay = 4 * out["parameters"], out["parameters_bytes"] + out["optimizer_bytes"] + sum(out["beside"].values())
    gradient = out["parameters_bytes"] / 2
    want = {"start": stay + whole, "sft": stay + gradient, "training": stay + gradient, "resume": stay, "export": stay + whole}
    assert out["phases"] == pytest.approx(want)
    assert "bytes per trained parameter" not in table(out)


def test_a_start_that_does_not_fit_is_no_plan_that_fits(monkeypatch):
    assert plan(config_of("qwen3-0.6b"), "h200:8", "", 128, 64, 0, False)["fits"]
    monkeypatch.setattr(plans, "phases", lambda *_: {"start": roofline.CHIPS["h200"].memory})
    assert not plan(config_of("qwen3-0.6b"), "h200:8", "", 128, 64, 0, False)["fits"]


def test_the_times_of_a_shared_and_of_a_split_team_follow_the_waves():
    out = plan(config_of(), "h100:8", "2,1", 1024, 512, 0, False)
    shared, split = out["placement"]["shared"], out["placement"]["split"]
    assert out["placement"]["part"] == (2, 2)
    wave = 512 * out["work"]["decode_step"]["seconds"]
    assert shared["sequence"] == shared["parallel"] == pytest.approx(2 * wave)
    wider = 512 * roofline.decode_step(make_model_config("qwen3-1.7b"), 48 * 2 / 8, 4, 1024, 512, 1).seconds(roofline.CHIPS["h100"])
    assert split["parallel"] == pytest.approx(wider)
    assert split["sequence"] == 2 * split["parallel"]
    assert split["parallel"] < shared["parallel"] < split["sequence"]  # the weights are read once for twice as many rows
    assert shared["update"] == pytest.approx(2 * out["work"]["update_step"]["seconds"])
    assert "placement" in table(out)
    assert "divide neither" not in table(out)
    whole = plan(config_of(), "h100:1", "", 1024, 512, 0, False)
    assert "split" not in whole["placement"]
    assert "2 models divide neither data=1 nor fsdp=1" in table(whole)
    sharded = table(plan(config_of(), "h100:8", "", 1024, 512, 0, False))
    assert "split: with mesh fsdp=4, tensor=1 and config.devices=2" in sharded
    alone = config_of()
    alone.assignment = "shared"
    assert "placement" not in plan(alone, "h100:8", "", 1024, 512, 0, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("z9:2", "", 0, 0, 0, False), "the chips are v4, v5e"),
        (("h100:two", "", 0, 0, 0, False), "number of GPUs"),
        (("v5e:8", "", 0, 0, 0, False), "the shape of the slice, e.g. v5e:4x4"),
        (("h100:8", "3,1", 0, 0, 0, False), "does not divide 8 devices"),
        (("h100:8", "8", 0, 0, 0, False), "two numbers"),
        (("h100:8", "8,1", 0, 0, 12, False), "choose a multiple of 8"),
    ],
)
def test_a_plan_that_cannot_be_made_is_told(arguments, says):
    with pytest.raises(PlanError, match=says):
        plan(config_of(), *arguments)


def test_gpus_are_compiled_for_where_jax_has_their_compiler(monkeypatch):
    """Devices of this machine in the place of those that JAX's CUDA plugin describes."""
    asked = []

    def topology(**said):
        asked.append(said)
        return types.SimpleNamespace(devices=jax.devices()[:2])

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", topology)
    found = plan(config_of("nano"), "rtx4090:2", "", 24, 4, 0, True)
    (said,) = asked
    assert (said["platform"], said["topology"]) == ("cuda", "1x1x2")
    assert "major: 8 minor: 9" in said["target_config"]
    assert "device_memory_size: 24000000000" in said["target_config"]
    assert "(compiled in " in table(found)
    assert found["update_flops"]["compiled"] > found["update_flops"]["needed"] > 0
    # of a program in which a kernel attends, scores are computed again too
    monkeypatch.setattr(tree_kernel, "kernel_flops", lambda *_: {"dot_general": lambda _: 0})
    assert plan(config_of("nano"), "rtx4090:2", "", 24, 4, 0, True)["update_flops"]["again"] > found["update_flops"]["again"]


def test_without_their_compiler_gpus_are_counted_and_what_it_says_is_told(monkeypatch):
    def says(error):
        def topology(**_):
            raise error

        monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", topology)
        return plan(config_of(), "a100:8", "", 8192, 4096, 0, True)

    counted = says(NotImplementedError("topology not implemented for cuda"))
    assert "by arithmetic" in table(counted)
    assert counted == plan(config_of(), "a100:8", "", 8192, 4096, 0, False)
    with pytest.raises(PlanError, match=r"a100:8: the GPU compiler did not answer \(no ptxas\); --compile=False counts instead"):
        says(RuntimeError("no ptxas"))


def test_every_chip_that_is_no_tpu_can_be_compiled_for():
    assert set(GPUS) == {name for name in roofline.CHIPS if not re.match(r"v\d|tpu", name)}


def test_imitation_is_planned_where_a_run_begins_with_it():
    config = config_of()
    assert plans.sizes_of(config).sft
    config.sft.run = "runs/other"
    assert not plans.sizes_of(config).sft
    assert not plans.sizes_of(of_text("qwen3-1.7b")).sft


def test_without_a_word_large_meshes_get_tensor_four():
    assert mesh_axes(256, "") == (1, 64, 4)
    assert mesh_axes(8, "") == (1, 8, 1)
    assert mesh_axes(64, "8,2") == (4, 8, 2)


def test_a_plan_takes_the_mesh_of_its_config():
    assert mesh_axes(16, "", (0, 1)) == (1, 16, 1)  # as a run of a `:full` config has it
    assert mesh_axes(16, "", (0, 2)) == (1, 8, 2)
    assert mesh_axes(16, "", (4, 1)) == (4, 4, 1)
    assert mesh_axes(16, "2,8", (0, 1)) == (1, 2, 8)
    config = of_text("qwen3-1.7b")
    config.mesh.tensor = 2
    assert plan(config, "v5e:2x4", "", 8192, 4096, 0, False)["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    config.mesh.tensor = 3
    with pytest.raises(PlanError, match=r"config\.mesh: fsdp=2 x tensor=3 does not divide 8 devices"):
        plan(config, "v5e:2x4", "", 8192, 4096, 0, False)


@pytest.mark.parametrize("fields", [dict(entropy_quantile=0.2), dict(off_policy_kl=0.1), dict(rollout_correction="truncate")], ids=str)
def test_what_a_recipes_update_needs_is_planned_too(fields):
    config = ModelConfig(vocab_size=64, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    lowered, *_ = programs(PlanSizes(make_recipe("at_grpo", group_size=2, **fields), config, 1, 4, 2), make_mesh(1), 2, 2)
    assert lowered["update"].as_text()


def test_the_planned_programs_compile_on_a_mesh_of_this_machine():
    """The same lowering as for a TPU, on eight host devices: the real update and the real sampler, with memory figures."""
    config = ModelConfig(vocab_size=64, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=8, feed_forward=16, remat="full")
    mesh = make_mesh(1, 4, 2)
    recipe = make_recipe("at_grpo", group_size=2)
    lowered, params, state, copy = programs(PlanSizes(recipe, config, 1, 6, 3, sft=True), mesh, 4, 4)
    assert set(lowered) == {"update", "sampler", "sft"}
    whole = config.parameters * 4
    assert whole / 8 <= params <= whole / 4  # norms are not split
    assert state == pytest.approx(2 * params, rel=0.01)
    assert copy > 1.5 * params
    for program in lowered.values():
        figures = memory(program.compile())
        assert figures["peak"] >= figures["arguments"] > 0


def test_the_engines_programs_are_planned_as_it_calls_them(monkeypatch):
    """On eight host devices: its lists hold a prompt once for all its responses, nothing of the weights is gathered in the decode loop, a
    step reads them all, and two layers tell what a third one adds. Pages that are gathered by fewer at a time are gathered more often."""
    config = ModelConfig(
        vocab_size=64, width=64, layers=3, query_heads=4, key_value_heads=2, head_dim=16, feed_forward=128, compute_dtype="bfloat16"
    )
    sizes, mesh = EngineConfig(16, 64, 16, 4, admit=4, page=8), make_mesh(1, 4, 2)
    programs = engine_programs(config, mesh, sizes, 2**20, branches=4)
    assert set(programs.lowered) == {"decode", "admit", "swap"}
    drafting = engine_programs(config, mesh, dataclasses.replace(sizes, draft_tokens=7), 2**20, branches=4)
    logits = drafting.lowered["verify"].compile().memory_analysis().temp_size_in_bytes
    assert logits > 16 / 4 * 8 * config.vocab_size / 2 * 4  # 8 columns of 4 slots on a device, in float32; two devices share the head
    assert programs.groups == 1  # 16 slots over four devices
    assert programs.blocks == (1, 1)
    extrapolated, whole = (engine_figures(config, mesh, sizes, 2**20, 4, whole=x) for x in (False, True))
    assert (extrapolated["layers"], whole["layers"]) == ([1, 2], [3])
    assert whole["gathered"] == extrapolated["gathered"] == 0
    assert whole["read"] > programs.copy * 0.9
    for name in ("read", "copy", "pool", "swap"):
        assert extrapolated[name] == pytest.approx(whole[name], rel=0.1), name
    assert whole["copy"] == pytest.approx(config.parameters * 2 / 2, rel=0.1)
    monkeypatch.setattr("marl_llm.models.pages.block_pages", lambda page: 1)
    fewer = engine_programs(config, mesh, sizes, 2**19, branches=4)
    assert fewer.blocks == (4, 1)  # of each response an entry, and the prompt once
    text = ProgramText(fewer.lowered["decode"].compile().as_text())
    once = [loop.read for loop in text.loops() if loop.depth == 1]
    assert len(once) == 2 * config.layers
    (chunk,) = (loop.read for loop in text.loops() if loop.depth == 0)
    assert step_reads(text, fewer) == chunk + 3 * sum(once[::2])
    with pytest.raises(ValueError, match="{'loops': 6, 'kernels': 0} over pages in its chunk, not {'loops': 6, 'kernels': 3}"):
        step_reads(text, dataclasses.replace(fewer, fetched=1))
    trained_on = make_mesh(1, 8, 1)
    apart = engine_programs(config, serving_mesh(trained_on, 2), sizes, 2**20, branches=4, trained_on=trained_on)
    assert apart.copy == programs.copy
    compiled = apart.lowered["swap"].compile()
    stacked = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=True))
    largest = max(x.size for x in jax.tree.leaves(stacked)) * 4  # a CPU gathers in float32
    assert 0 < max(g.bytes for g in ProgramText(compiled.as_text()).gathers()) <= largest / 2  # nothing is whole in between
    swap = compiled.memory_analysis()
    assert swap.argument_size_in_bytes == pytest.approx(config.parameters * 4 / 8, rel=0.1)  # in float32, an eighth on each device
    assert swap.output_size_in_bytes == pytest.approx(apart.copy, rel=0.01)


def test_of_a_gpus_decode_steps_no_reads_are_said():
    """What its cache keeps is not in a program's text."""
    config = ModelConfig(vocab_size=64, width=32, layers=1, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=32)
    sizes, said = EngineConfig(4, 128, 32, 4), []
    for where, longest in (("gpu", 192), ("cpu", 160)):  # a request of 160 tokens, in pages of 64 and of 16
        with for_platform(where):
            engine = engine_figures(config, make_mesh(1), sizes, 2**20, 2)
            said.append(measured_lines({"engine": engine, "moments": dict.fromkeys(("decode", "admit", "swap"), 0)})[-1])
            assert ("read" in engine) == (where == "cpu")
            assert engine["pool"] == 4 * longest * page_bytes(config, 1)
    assert said[0].startswith("  a decode step needs 0.00 GB of weights and cache of running requests (2 prompts with their responses)")
    assert re.match(r"  a decode step reads .* GB where", said[1])


def of_text(preset, recipe="at_grpo", **changes):
    """A config of hosted play."""
    config = importlib.import_module("experiments.configs.plan_path_text").get_config()
    config.model.preset, config.recipe.name = preset, recipe
    for key, value in changes.items():
        config.model[key] = value
    return config


def test_adapters_on_one_base_are_planned_with_one_copy_of_it():
    whole, adapted = (plan(of_text("qwen3-8b", **x), "h100:2", "", 8192, 4096, 0, False) for x in ({}, {"lora_rank": 32}))
    base, adapters = 8_190_735_360, 87_293_952
    assert adapted["parameters_bytes"] == 2 * adapters * 4
    assert adapted["optimizer_bytes"] == 2 * adapters * 8
    assert adapted["beside"]["bases"] == base * 2 / 2
    assert adapted["beside"]["serving"] == pytest.approx(base * 2 + 2 * adapters * 2)
    assert whole["beside"]["serving"] == pytest.approx(2 * base * 2)
    assert adapted["fits"]
    assert not whole["fits"]
    assert "requests at their longest" in table(adapted)


def test_an_engine_holds_half_of_what_is_free_and_keeps_it_through_the_update():
    out = plan(of_text("qwen3-1.7b"), "h100:8", "", 8192, 4096, 0, False)
    assert out["kv_pool"] == out["kv_cache"]  # all of it fits
    small = plan(of_text("qwen3-8b", lora_rank=32), "h100:2", "", 8192, 4096, 0, False)
    resident = small["parameters_bytes"] + small["optimizer_bytes"] + sum(small["beside"].values())
    assert small["kv_pool"] == pytest.approx((0.95 * 80e9 - resident) / 2)
    assert small["peak_update"] == pytest.approx(resident + small["kv_pool"] + small["update"]["temporary"])
    tight = of_text("qwen3-1.7b")
    told = plan(tight, "v5e:2x4", "4,2", 8192, 4096, 0, False)
    tight.rollout.cache_gib = float(told["suggestion"].split("rollout.cache_gib=")[1].split(",")[0])
    assert not told["fits"]
    assert plan(tight, "v5e:2x4", "4,2", 8192, 4096, 0, False)["fits"]
    fixed = of_text("qwen3-8b", lora_rank=32)
    fixed.rollout.cache_gib = 1.0
    assert plan(fixed, "h100:2", "", 8192, 4096, 0, False)["requests_at_their_longest"] == 0  # 1.7 GiB each


def test_what_is_sampled_from_is_planned_on_the_devices_that_share_it():
    config = of_text("qwen3-8b")
    told, copies = plan(config, "v5p:2x2x1", "", 8192, 4096, 0, False), 2 * 8_190_735_360 * 2
    assert not told["fits"]
    assert told["beside"]["serving"] == copies
    config.rollout.tensor = int(told["suggestion"].split("rollout.tensor=")[1].split(",")[0])
    shared = plan(config, "v5p:2x2x1", "", 8192, 4096, 0, False)
    assert (shared["served"], shared["fits"]) == (4, True)
    assert shared["beside"]["serving"] == copies / 4
    assert shared["kv_cache"] == told["kv_cache"]  # heads instead of rows
    for name in ("parameters_bytes", "optimizer_bytes", "update"):
        assert shared[name] == told[name]
    read, less = (one["work"]["decode_step"]["bytes"] for one in (told, shared))
    assert read - less == pytest.approx(3 / 4 * copies / 2, rel=0.1)  # of one model
    assert "tensor 1, engine on tensor 4;" in table(shared)
    both = of_text("qwen3-8b")
    told = plan(both, "v6e:4x4", "16,1", 8192, 4096, 0, False)["suggestion"]
    both.rollout.tensor, both.rollout.cache_gib = int(told.split("rollout.tensor=")[1].split(",")[0]), float(told.split("cache_gib=")[1])
    assert plan(both, "v6e:4x4", "16,1", 8192, 4096, 0, False)["fits"]
    config.rollout.tensor = 3
    with pytest.raises(PlanError, match=r"config\.rollout\.tensor=3 must divide fsdp=4"):
        plan(config, "v5p:2x2x1", "", 8192, 4096, 0, False)
    config.rollout.tensor = 4
    with pytest.raises(PlanError, match=r"needs tensor=1 in the update's mesh"):
        plan(config, "v5p:2x2x1", "2,2", 8192, 4096, 0, False)


def test_a_tpu_is_planned_by_arithmetic_without_its_compiler():
    for topology, count in (("v5e:2x4", 8), ("v5p:2x2x2", 8), ("tpu7x:2x2x1", 8)):
        out = plan(config_of(), topology, "", 8192, 4096, 0, False)
        assert (out["mesh"]["fsdp"], out["compiled"]) == (count, False)


@pytest.mark.parametrize("topology", ["h100:②", "h100:0", "v5e:2x②"])
def test_a_shape_is_written_in_decimals(topology):
    with pytest.raises(PlanError, match="write the (number of GPUs|shape of the slice)"):
        plan(config_of(), topology, "", 8192, 4096, 0, False)


def test_critics_and_references_are_counted():
    plain = plan(of_text("qwen3-0.6b"), "h200:8", "", 2048, 512, 0, False)
    critics = plan(of_text("qwen3-0.6b", "ppo"), "h200:8", "", 2048, 512, 0, False)
    assert plain["beside"]["critics"] == 0
    assert critics["beside"]["critics"] == pytest.approx(2 * 596_049_920 * 12 / 8)
    config = of_text("qwen3-0.6b", "ppo")
    config.optimizer.update(critic="centralised", row_tokens=32_768)
    central = plan(config, "h200:8", "", 2048, 512, 0, False)
    assert central["beside"] == critics["beside"]
    assert central["update"]["temporary"] > 3 * critics["update"]["temporary"]  # its rows are 12.8 times as long
    assert plan(of_text("qwen3-0.6b", "magrpo"), "h200:8", "", 2048, 512, 0, False)["beside"]["references"] == 2 * 596_049_920 * 2 / 8


def test_critics_have_programs_of_their_own_shape():
    config = ModelConfig(vocab_size=64, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
    own, plain, *_ = programs(PlanSizes(make_recipe("ppo"), config, 1, 4, 2, critic="own"), make_mesh(1), 2, 0)
    assert set(own) == {"update", "critic"}
    sizes = PlanSizes(make_recipe("ppo"), config, 1, 4, 2, critic="centralised", critic_tokens=32)
    central, *_ = programs(sizes, make_mesh(1), 2, 0)
    assert ["tensor<2x32xi32>" in lowered["critic"].as_text() for lowered in (own, central)] == [False, True]
    head, more, *_ = programs(PlanSizes(make_recipe("ppo"), config, 1, 4, 2, critic="head"), make_mesh(1), 2, 0)
    assert set(head) == {"update"}
    assert more == plain + 4 * (16 + 1)  # the value head lies on the policy


def test_the_update_of_adapters_is_the_one_that_is_planned():
    config = ModelConfig(vocab_size=64, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=8, feed_forward=16, remat="full")
    recipe, lora = make_recipe("at_grpo", group_size=2), LoraConfig(rank=2)
    lowered, params, state, copy = programs(PlanSizes(recipe, config, 1, 4, 2, lora=lora), make_mesh(1), 2, 0)
    assert set(lowered) == {"update"}  # the engine samples
    assert state == pytest.approx(2 * params, rel=0.01)
    assert params < copy / 2
    assert memory(lowered["update"].compile())["arguments"] > config.parameters * 4  # the base is one


PRINTED = sorted((pathlib.Path(__file__).parents[2] / "docs" / "printed_plans").glob("*.txt"))
SHOWN = [re.fullmatch(r"\$ python -m marl_llm plan (.*?)\n\n(.*)\n", p.read_text(encoding="utf-8"), re.DOTALL).groups() for p in PRINTED]


def test_the_page_on_plans_shows_every_printed_plan():
    page = (PRINTED[0].parents[1] / "plans.md").read_text(encoding="utf-8")
    assert len(PRINTED) == 10
    for path in PRINTED:
        assert f"(printed_plans/{path.name})" in page


@pytest.mark.parametrize(("flags", "printed"), SHOWN, ids=[re.search(r"topology=(\S+)", flags)[1] for flags, _ in SHOWN])
def test_the_plans_of_the_page_are_those_that_the_command_prints(flags, printed):
    """Of a plan that a compiler made, the lines that need none."""
    said = dict(re.findall(r"--([\w.]+)=(\S+)", flags))
    file, topology = pathlib.Path(said.pop("config")), said.pop("topology")
    config = importlib.import_module(f"experiments.configs.{file.stem}").get_config()
    with config.unlocked():
        for path, value in said.items():
            config.update_from_flattened_dict({path.removeprefix("config."): ast.literal_eval(value) if value[0].isdigit() else value})
    now = table(plan(config, topology, "", 0, 0, 0, False)).splitlines()
    shown = printed.splitlines()
    if "(compiled in " in printed:
        counted = re.compile(r"  (decode_step|prefill|update_step|1,000 responses|placement|of  |bases|  shared|  split)")
        now, shown = ([lines[0].split(" (")[0], *filter(counted.match, lines)] for lines in (now, shown))
    assert shown == now, "run: python -m benchmarks.plans --hosts"
    assert printed.endswith("\n  fits")


NEED = {"math_chat": "must name parquet, jsonl or json files", "openenv": "needs its option 'url'"}
NEED |= {} if importlib.util.find_spec("reasoning_gym") else dict.fromkeys(("reasoning_gym", "smol_reasoning"), "needs the package")
NEED |= {} if importlib.util.find_spec("bm25s") else {"smol_search": "needs the library 'bm25s'"}
NEED |= {} if importlib.util.find_spec("textarena") else {"textarena": "needs the package"}


@pytest.mark.parametrize("name", sorted(p.stem for p in pathlib.Path(experiments.configs.__path__[0]).glob("*.py")))
def test_every_config_can_be_planned(name):
    """Those that need no file, server or further package to be made; the others name what they need."""
    module = importlib.import_module(f"experiments.configs.{name}")
    if not hasattr(module, "get_config") or name in ("game", "smol_game", "distill"):  # a user's own game or run
        return
    config = module.get_config()
    config.model.preset = config.model.preset or "qwen3-1.7b"
    if name in NEED:
        with pytest.raises(ConfigError, match=NEED[name]):
            plan(config, "h100:8", "", 0, 0, 0, False)
        return
    assert plan(config, "h100:8", "", 0, 0, 0, False)["peak"] > 0
