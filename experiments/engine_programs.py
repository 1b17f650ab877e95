"""The engine's programs of a run, lowered for a mesh that need not be there: a decode chunk, a piece of prompts, and a swap of parameters.

Their layers are not stacked, so the compiler's time follows the depth. Unless the whole is asked for, each is compiled with one and with
two layers; what a further layer adds to memory and reads is the difference.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.program_costs import Program
from marl_llm.models import SAMPLE, TRAIN, LoraConfig, ModelConfig, PageList, attach_many, init_adapters, init_params, param_shardings
from marl_llm.models.pages import GROUP, block_pages, touched
from marl_llm.models.serving import serving_copy
from marl_llm.models.sharding import spec_for
from marl_llm.sampling.lane import PAGE, PROGRAM_TOKENS
from marl_llm.sampling.pages import Admission, Row, Rules, admit, decode, init_pages, page_bytes
from marl_llm.sampling.tickets import ENTRIES, SHARED, LaneConfig, bucket, draws_of
from marl_llm.training import roofline

RULE_STATES = 16  # of the stop rules of a run: a stop id or a short text
SMALL_GATHER = 2**20  # bytes of a gather inside the decode loop below which it is the draw's, not a weight's


@dataclasses.dataclass(frozen=True)
class EnginePrograms:
    """What a lane of the engine runs.

    Attributes:
      lowered: by name: `decode` (a chunk, all slots living), `admit` (pieces of long prompts behind their beginnings), `swap`.
      page, block: tokens of a page; pages that a decode step gathers at a time. parts: devices that rows are split over.
      pages: of a part. layers: of the model. pool, copy: bytes on a device of all pages, and of what is sampled from.
    """

    lowered: dict[str, Any]
    page: int
    block: int
    parts: int
    pages: int
    layers: int
    pool: int
    copy: int


def per_device(tree) -> int:
    """Bytes on a device of arrays with shardings, or of the results of a lowered program."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _lists(parts: int, slots: int, entries: int, page: int) -> tuple[PageList, PageList]:
    """The lists of a step as `marl_llm.sampling.tickets.page_lists` shapes them, with room for so many entries of single rows per part."""

    def of(group: int, most: int) -> PageList:
        room = max(block_pages(page), bucket(most, ENTRIES // group, 16))
        real = lambda *shape: jax.ShapeDtypeStruct((parts, room, *shape), np.int32)  # noqa: E731
        return PageList(real(), real(group), real(), jax.ShapeDtypeStruct((), np.int32))

    return of(1, entries), of(GROUP, entries // GROUP)


def _served(config: ModelConfig, mesh: Mesh, lora: LoraConfig | None, models: int):
    """(abstract parameters that a lane samples from, the lowered swap)."""
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=config.uniform))
    trained = params
    if lora:  # one base, and the adapters of all models on it
        adapters = jax.eval_shape(lambda key: init_adapters(config, key, lora), jax.random.key(0))
        trained = jax.eval_shape(lambda base, one: attach_many(base, [one] * models, lora), params, adapters)
    place = lambda tree, rules: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, param_shardings(tree, mesh, rules)
    )
    trained, copy = place(trained, TRAIN), serving_copy(config, mesh)
    served = jax.eval_shape(copy, trained)
    if mesh.shape["tensor"] == 1:
        whole = NamedSharding(mesh, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), served), copy.lower(trained)
    return place(served, SAMPLE), copy.lower(trained)


def engine_programs(
    config: ModelConfig, mesh: Mesh, sizes: LaneConfig, budget: float | int, lora: LoraConfig | None = None, models: int = 1
) -> EnginePrograms:
    """The programs of a lane, as `marl_llm.sampling.lane` calls them.

    Args:
      sizes: of the lane; its `cache_bytes` is not read. budget: bytes of pages per device.
      lora, models: adapters of so many models on one base, which decode together.
    """
    page = sizes.page or PAGE["tpu"]
    along = mesh.shape["data"] * mesh.shape["fsdp"]
    parts = along if sizes.slots % along == 0 else 1
    longest = -(-(sizes.prompt_tokens + sizes.response_tokens) // page)
    heads = spec_for((None, "key_value_heads"), (1, config.key_value_heads), dict(mesh.shape), SAMPLE)
    each = page_bytes(config, page) / (mesh.shape["tensor"] if any(heads) else 1)  # on a device
    count = max(1, min(sizes.slots // parts * longest, int(budget // each)))
    placed = NamedSharding(mesh, P(("data", "fsdp") if parts > 1 else None, *heads))
    pages = jax.eval_shape(lambda: init_pages(config, parts, count, page))
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), pages)
    served, swap = _served(config, mesh, lora, models)

    rules = Rules(jax.ShapeDtypeStruct((RULE_STATES, config.vocab_size), np.int32), jax.ShapeDtypeStruct((RULE_STATES,), bool))
    root = jax.eval_shape(lambda: jax.random.key(0))
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)  # noqa: E731
    draws = lambda n: jax.eval_shape(lambda: jax.tree.map(jnp.asarray, draws_of(n, [], {}, ())))  # noqa: E731
    plain = dict(mesh=mesh, truncates=False, width=0)
    s = sizes.slots // parts
    row = Row(
        i32(parts * s),
        i32(parts * s),
        jax.ShapeDtypeStruct((parts * s,), bool),
        i32(parts, s, touched(page, sizes.chunk)),
        draws(parts * s),
    )
    lists = _lists(parts, s, min(count, s * longest), page)
    low = {"decode": decode.lower(config, served, pages, row, lists, rules, root, chunk=sizes.chunk, **plain)}
    piece = min(sizes.piece, bucket(sizes.prompt_tokens, 8))
    b = max(1, min(sizes.admit, max(2 * sizes.piece, PROGRAM_TOKENS) // piece))
    n, room = parts * b, bucket(longest)
    entering = Admission(
        i32(n, piece), i32(n), i32(parts, b, room), i32(parts, b), i32(parts, b), i32(parts, b, touched(page, piece)), draws(n)
    )
    low["admit"] = admit.lower(config, served, pages, entering, rules, root, fresh=False, **plain)
    low["swap"] = swap
    return EnginePrograms(low, page, block_pages(page), parts, count, config.layers, per_device(pages), per_device(served))


def _measured(programs: EnginePrograms, branches: int, sizes: LaneConfig) -> dict:
    """Bytes per device of the compiled programs, and what a decode step reads half way through the responses, with as many rows living as
    the pages hold then."""
    out: dict[str, Any] = {}
    for name, lowered in programs.lowered.items():
        compiled = lowered.compile()
        m = compiled.memory_analysis()
        out[name] = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        if name != "decode":
            continue
        text = Program(compiled.as_text())
        chunk, *lists = (loop for loop in text.loops() if loop.depth < 2)
        each = sizes.prompt_tokens / branches + sizes.response_tokens / 2  # tokens of a row, its part of the prompt with it
        groups = max(1, int(min(sizes.slots // programs.parts, programs.pages * programs.page / each) // branches))
        own = groups * branches * math.ceil(sizes.response_tokens / 2 / programs.page)
        prompts = groups * math.ceil(sizes.prompt_tokens / programs.page) * (1 if branches >= SHARED else branches)
        own, prompts = (own, prompts) if branches >= SHARED else (own + prompts, 0)
        times = [math.ceil(entries / programs.block) for entries in (own, prompts)]  # the lists of a layer, as `page_lists` orders them
        found = [loop for loop in lists if loop.depth == 1]
        if len(found) != 2 * programs.layers:
            raise ValueError(
                f"the decode program has {len(found)} loops over pages in its chunk, not two per layer; its reads are not known"
            )
        out["read"] = chunk.read + sum((times[i % 2] - 1) * loop.read for i, loop in enumerate(found))
        out["groups"] = groups
        out["gathered"] = sum(g.bytes for g in text.gathers() if g.depth and g.bytes > SMALL_GATHER)
    return out


def engine_figures(
    config: ModelConfig,
    mesh: Mesh,
    sizes: LaneConfig,
    budget: float | int,
    branches: int,
    lora: LoraConfig | None = None,
    models: int = 1,
    whole: bool = False,
) -> dict:
    """What the engine's programs need beside parameters and pages, per device, and what a decode step reads.

    Args:
      branches: responses to each prompt. whole: compile all layers. The others: see `engine_programs`.

    Returns bytes: `decode`, `admit` and `swap` (temporary, and results that are new), `pool`, `copy`, `read` of a decode step, `needed` of
    it (the weights once, a prompt's cache once for all its branches), `gathered` (of weights in the decode loop), and `layers` compiled.
    """
    depths = (config.layers,) if whole or config.layers < 3 else (1, 2)
    found = []
    for depth in depths:
        part = dataclasses.replace(config, layers=depth)
        programs = engine_programs(part, mesh, sizes, budget * depth / config.layers, lora, models)
        found.append(_measured(programs, branches, sizes) | {"pool": programs.pool, "copy": programs.copy})
    out = dict(found[0])
    if len(found) > 1:
        out = {name: found[0][name] + (config.layers - 1) * (found[1][name] - found[0][name]) for name in found[0]}
    out["needed"] = roofline.decode_step(
        config, out["groups"], branches, sizes.prompt_tokens, sizes.response_tokens, mesh.shape["tensor"]
    ).bytes
    return out | {"layers": list(depths)}
