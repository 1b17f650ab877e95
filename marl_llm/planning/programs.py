"""The real sampler and update of a config, compiled for TPUs or GPUs that need not be there: programs, their memory and their FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any


@dataclasses.dataclass(frozen=True)
class PlanSizes:
    """What a plan needs to know of a config.

    Attributes:
      recipe, shape: of the trained models, which have one shape. models: how many they are.
      prompt, response: the longest, in tokens.
      hosted: play has an engine, whose copies stay through the update. lora: of the adapters that are trained, or None.
      bases: frozen bases under the adapters. critics: critics that are networks of their own. critic: as in `LearnerOptions`, or None.
      max_num_seqs, decode_steps, draft_tokens: of an engine's lane. sft: a run begins with a supervised warm-up. served: devices that
        share a layer's products in an engine; 0: as in the update. sources: checkpoints or random parameters that the models begin from,
        each read once. teachers: parameters of all teachers together. optimizer: its name. critic_tokens: of a centralised critic's rows.
    """

    recipe: Any
    shape: Any
    models: int
    prompt: int
    response: int
    hosted: bool = False
    lora: Any = None
    bases: int = 0
    critics: int = 0
    critic: str | None = None
    max_num_seqs: int = 64
    decode_steps: int = 8
    sft: bool = False
    served: int = 0
    sources: int = 1
    teachers: int = 0
    draft_tokens: int = 0
    optimizer: str = "adamw"
    critic_tokens: int = 0

    @property
    def together(self) -> bool:
        """Whether models are sampled with their adapters on one copy of a base."""
        return self.lora is not None and self.models > 1


def programs(sizes: PlanSizes, mesh, minibatch: int, environments: int):
    """`(lowered, bytes of parameters, of optimizer, of the sampling copy)`: programs by name, and bytes per device.

    The programs are `update`, `sampler` (of compiled play; none without `environments`), with an own critic `critic` and, with a warm-up,
    `sft`. A minibatch is that many rows, each with a prompt and K responses to it; those of a centralised critic have `critic_tokens`. With
    `lora` the parameters are adapters, and their base is an argument of the update.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from marl_llm.algorithms import needs
    from marl_llm.models import SAMPLE, TRAIN, compute_copy, init_adapters, init_params, param_shardings, use_rules
    from marl_llm.planning.engine_programs import per_device
    from marl_llm.sampling import SamplingParams, sample
    from marl_llm.training import LearnerOptions, make_optimizer, make_train_state
    from marl_llm.training.mesh import serving_mesh
    from marl_llm.training.packing import PackedRows
    from marl_llm.training.sft import sft_program
    from marl_llm.training.update import Frozen, policy_step, value_step

    def abstract(tree, rules, on=mesh):
        placed = param_shardings(tree, on, rules)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, placed)

    def whole(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    recipe, prompt, response, lora, critic = sizes.recipe, sizes.prompt, sizes.response, sizes.lora, sizes.critic
    k = recipe.group_size
    length, answers = prompt + k * response, k * response
    options = LearnerOptions(recipe, make_optimizer(name=sizes.optimizer), row_tokens=length, minibatch=minibatch, critic=critic or "own")
    judging = dataclasses.replace(sizes.shape, value_head=critic is not None)
    config = judging if critic == "head" else sizes.shape
    apart = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=config.uniform))
    make = functools.partial(make_train_state, optimizer=options.optimizer)
    base = abstract(jax.eval_shape(lambda x: compute_copy(config, x), params), TRAIN) if lora else None
    if lora:  # adapters are small: every device has them whole
        policy = jax.eval_shape(lambda key: make(init_adapters(config, key, lora, config.uniform)), jax.random.key(0))
        policy = jax.tree.map(lambda x: whole(x.shape, x.dtype), policy)
    else:
        policy = abstract(jax.eval_shape(make, params), TRAIN)
    real, ids = jnp.float32, jnp.int32
    widths = dict(tokens=length, positions=length, segments=length, branches=length, predict=answers, targets=answers)
    widths |= dict(log_probs=answers, sample=k, first=k, length=k)
    rows = PackedRows(**{name: whole((minibatch, width), real if name == "log_probs" else ids) for name, width in widths.items()})
    beside = {"advantages": answers if critic else k, "old": answers}
    judged = {name: whole((minibatch, answers), real) for name in ("values", "targets") if critic}
    arrays = {name: whole((minibatch, width), real) for name, width in beside.items()} | judged
    reference = abstract(jax.eval_shape(lambda x: compute_copy(config, x), params), TRAIN) if recipe.kl_coef else None
    update = policy_step(options, config, mesh, lora, critic == "head")
    numbers = ("kl_coef", "entropy_threshold") if "entropy_threshold" in needs(recipe) else ("kl_coef",)
    scalars = dict.fromkeys(numbers, whole((), real)) | {"first_step": whole((), bool)}
    lowered = {"update": update.lower(policy, base, Frozen(reference), rows, arrays, scalars, whole((), real), whole((), real))}
    if sizes.sft:
        lowered["sft"] = sft_program(options, config, mesh, lora).lower(policy, base, rows, whole((), real))
    if critic not in (None, "head"):
        width = max(length, sizes.critic_tokens)
        read = {name: whole((minibatch, width), ids) for name in ("tokens", "positions", "segments", "branches")}
        judge = abstract(jax.eval_shape(lambda: make(init_params(judging, jax.random.key(0), stacked=config.uniform))), TRAIN)
        lowered["critic"] = value_step(options, judging, mesh).lower(judge, rows._replace(**read), judged, whole((), real))

    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(config.compute_dtype)), apart)
    low = abstract(low, SAMPLE, serving_mesh(mesh, sizes.served or None))
    arrays_bytes = per_device(policy.params), per_device(policy.opt_state), per_device(low)
    if not environments:  # the engine plays
        return lowered, *arrays_bytes
    rows_of, sampling_params = ("data", "fsdp"), SamplingParams(float(recipe.temperature))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), (environments, k)))
    prompts = (environments, prompt)

    def sampler(params, tokens, where, keys):
        with use_rules(mesh, SAMPLE):
            return sample(config, params, tokens, where, keys, max_tokens=response, stop=1, pad_id=0, settings=sampling_params)

    given = whole(prompts, ids, rows_of), whole(prompts, bool, rows_of), whole(keys.shape, keys.dtype, rows_of)
    lowered["sampler"] = jax.jit(sampler).lower(low, *given)
    return lowered, *arrays_bytes


def moment_bytes(optimizer: str, shape, lora=None) -> int:
    """Bytes of an optimizer's state beside a model's parameters, or beside its adapters."""
    import jax

    from marl_llm.models import init_adapters, init_params
    from marl_llm.training import make_optimizer, state_bytes

    make = functools.partial(init_adapters, lora=lora) if lora else init_params
    return state_bytes(make_optimizer(name=optimizer), jax.eval_shape(lambda: make(shape, jax.random.key(0), stacked=shape.uniform)))


def memory(compiled) -> dict:
    """Bytes per device of a compiled program."""
    m = compiled.memory_analysis()
    peak = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return {"arguments": m.argument_size_in_bytes, "temporary": m.temp_size_in_bytes, "peak": peak}


def estimate(config, k: int, prompt: int, response: int, per: float | int, tensor: int) -> float:
    """Temporary bytes of the update where no compiler answers: each layer's input kept, one layer and one block of logits live."""
    tokens = per * (prompt + k * response)
    kept = tokens * config.width * 2 * config.layers
    one_layer = tokens * (6 * config.width + (2 * config.query_heads * config.head_dim + 3 * config.feed_forward) / tensor) * 2
    return kept + one_layer + 3 * 2**25


def compile_programs(sizes: PlanSizes, mesh, minibatch: int, environments: int):
    """`(memory by program, (FLOPs of the update, whether kernels attend in it), bytes of parameters, of optimizer, of the sampling copy)`,
    as the compiler says."""
    from marl_llm.models import for_platform, tree_kernel, tree_kernel_gpu
    from marl_llm.planning.program_costs import ProgramText, text_of

    where = mesh.devices.flat[0].platform
    with for_platform(where):
        lowered, *bytes_ = programs(sizes, mesh, minibatch, environments)
        compiled = {name: _compile(program) for name, program in lowered.items()}
    figures = {name: program if isinstance(program, dict) else memory(program) for name, program in compiled.items()}
    tree = sizes.prompt, sizes.recipe.group_size, sizes.response
    if where == "gpu":
        kernels = tree_kernel_gpu.kernel_flops(*tree, sizes.shape.query_heads // sizes.shape.key_value_heads)
    else:
        kernels = tree_kernel.kernel_flops(*tree)
    update = compiled["update"]
    text = "" if isinstance(update, dict) else text_of(lowered["update"], update)
    flops = ProgramText(text, kernels).flops() if text else 0.0, any(name in text for name in kernels)
    return figures, flops, *bytes_


def compile_engine(sizes: PlanSizes, mesh, budget: float | int, whole: bool) -> dict:
    """`engine_figures` of a lane."""
    from marl_llm.models import for_platform
    from marl_llm.planning.engine_programs import engine_figures
    from marl_llm.sampling import EngineConfig
    from marl_llm.training.mesh import serving_mesh

    models = sizes.models if sizes.together else 1
    lane = EngineConfig(
        sizes.max_num_seqs * models, sizes.prompt, sizes.response, sizes.decode_steps, admit=min(sizes.max_num_seqs, 16),
        draft_tokens=sizes.draft_tokens,
    )  # fmt: skip
    with for_platform(mesh.devices.flat[0].platform):
        on = serving_mesh(mesh, sizes.served or None)
        return engine_figures(sizes.shape, on, lane, budget, sizes.recipe.group_size, sizes.lora, models, whole, mesh)


def _compile(lowered):
    """The compiled program, or what the compiler said when it does not fit."""
    try:
        return lowered.compile()
    except Exception as e:  # XLA reports exhausted memory as a runtime error whose text holds the figures
        text = str(e)
        used = re.search(r"Used ([\d.]+)([GM]) of", text)
        if not used:
            raise
        needs = float(used.group(1)) * (2**30 if used.group(2) == "G" else 2**20)
        return {"error": text.splitlines()[0][:200], "needs": needs, "arguments": 0.0, "temporary": needs}
