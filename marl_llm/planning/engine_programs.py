"""The engine's programs of a run, lowered for a mesh that need not be there: a decode chunk, a piece of prompts, and a swap of parameters.

Their layers are not stacked, so the compiler's time follows the depth. Unless the whole is asked for, each is compiled with one and with
two layers; what a further layer adds to memory and reads is the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marl_llm.models import SAMPLE, TRAIN, LoraConfig, ModelConfig, attach_many, init_adapters, init_params, param_shardings
from marl_llm.models.attention import platform
from marl_llm.models.page_kernel import NAME, bytes_read
from marl_llm.models.pages import by_kernel, entries_at_once, touched
from marl_llm.models.serving import serving_copy
from marl_llm.models.sharding import spec_for
from marl_llm.planning.program_costs import ProgramText, text_of
from marl_llm.sampling.model_runner import Admission, Row, Rules, admit, decode, init_pages, page_bytes, verify
from marl_llm.sampling.pool import Node
from marl_llm.sampling.requests import Request
from marl_llm.sampling.scheduler import PIECE, PROGRAM_TOKENS
from marl_llm.sampling.sequences import EngineConfig, SequenceState, bucket, page_lists, sampling_metadata
from marl_llm.sampling.stops import stop_rule
from marl_llm.sampling.store import PAGE
from marl_llm.sampling.transfer import layout_of
from marl_llm.training import roofline

RULE_STATES = 16  # of the stop rules of a run: a stop id or a short text
SMALL_GATHER = 2**20  # bytes of a gather inside the decode loop below which it is the draw's, not a weight's


@dataclasses.dataclass(frozen=True)
class EnginePrograms:
    """What a scheduler of the engine runs.

    Attributes:
      lowered: by name: `decode` (a chunk, all slots running), `admit` (pieces of long prompts behind their beginnings), `verify` (a
        step of all slots with drafts, where there are any), `swap`.
      groups: prompts with their responses that decode at a time on each device that rows are split over, half way through, as many as
        slots and pages hold. blocks: how often a layer gathers pages then, for each of a step's lists; `()` where a kernel reads them.
      fetched: bytes that a layer's kernel reads. layers: of the model.
      pool, copy: bytes on a device of all pages, and of what is sampled from.
    """

    lowered: dict[str, Any]
    groups: int
    blocks: tuple[int, ...]
    fetched: float | int
    layers: int
    pool: int
    copy: int


def per_device(tree) -> int:
    """Bytes on a device of arrays with shardings, or of the results of a lowered program."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def running(parts: int, s: int, groups: int, branches: int, sizes: EngineConfig, page: int) -> list[tuple[int, SequenceState]]:
    """(row, request) of `groups` prompts on each of `parts`, a part having s rows; each has `group_size` responses, half way through. Of
    the requests there is what `marl_llm.sampling.sequences.page_lists` reads."""
    full, cached, number = sizes.prompt_tokens // page, sizes.prompt_tokens + sizes.response_tokens // 2, itertools.count()
    rule, out = stop_rule(2, (1,), (), None), []

    def node(owners: int) -> Node:
        made = Node(next(number), None, np.zeros(0, np.int32))
        made.owners = owners
        return made

    for part in range(parts):
        for group in range(groups):
            prompt = [node(branches) for _ in range(full)]
            for k in range(branches):
                nodes = [*prompt, *(node(1) for _ in range(-(-cached // page) - full))]
                request = Request((0,), (group, k), 1)
                sequence = SequenceState(request, Future(), rule, 0.0, part=part, cached=cached, nodes=nodes)
                out.append((part * s + group * branches + k, sequence))
    return out


def _served(config: ModelConfig, mesh: Mesh, trained_on: Mesh, lora: LoraConfig | None, models: int):
    """(abstract parameters that a scheduler samples from, the lowered swap)."""
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), stacked=config.uniform))
    trained = params
    if lora:  # one base, and the adapters of all models on it
        adapters = jax.eval_shape(lambda key: init_adapters(config, key, lora), jax.random.key(0))
        trained = jax.eval_shape(lambda base, adapter: attach_many(base, [adapter] * models, lora), params, adapters)

    def place(tree, mesh, rules):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, param_shardings(tree, mesh, rules)
        )

    trained, copy = place(trained, trained_on, TRAIN), serving_copy(config, mesh)
    served = jax.eval_shape(copy, trained)
    if mesh.shape["tensor"] == 1:
        whole = NamedSharding(mesh, P())
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), served), copy.lower(trained)
    return place(served, mesh, SAMPLE), copy.lower(trained)


def engine_programs(
    config: ModelConfig, mesh: Mesh, sizes: EngineConfig, budget: float | int, branches: int, lora: LoraConfig | None = None,
    models: int = 1,
    trained_on: Mesh | None = None,
) -> EnginePrograms:  # fmt: skip
    """The programs of a scheduler, as `marl_llm.sampling.scheduler` calls them.

    Args:
      sizes: of the scheduler; its `cache_bytes` is not read. budget: bytes of pages per device. branches: responses to each prompt.
      lora, models: adapters of so many models on one base, which decode together.
      trained_on: where a swap's parameters come from; None: the same mesh.
    """
    page = sizes.page or PAGE.get(platform(), 16)
    along = mesh.shape["data"] * mesh.shape["fsdp"]
    parts = along if sizes.max_num_seqs % along == 0 else 1
    longest = -(-(sizes.prompt_tokens + sizes.response_tokens) // page)
    heads = spec_for((None, "key_value_heads"), (1, config.key_value_heads), dict(mesh.shape), SAMPLE)
    each = page_bytes(config, page) / (mesh.shape["tensor"] if any(heads) else 1)  # on a device
    count = max(1, min(sizes.max_num_seqs // parts * longest, int(budget // each)))
    placed = NamedSharding(mesh, P(("data", "fsdp") if parts > 1 else None, *heads))
    pages = jax.eval_shape(lambda: init_pages(config, parts, count, page))
    pages = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), pages)
    served, swap = _served(config, mesh, trained_on or mesh, lora, models)

    shapes = (RULE_STATES, 16), (RULE_STATES,), (RULE_STATES,), (1, config.vocab_size)
    rules = Rules(*(jax.ShapeDtypeStruct(shape, bool if n == 1 else np.int32) for n, shape in enumerate(shapes)))
    root = jax.eval_shape(lambda: jax.random.key(0))

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, np.int32)

    def draws(n):
        return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, sampling_metadata(n, [], {}, ())))

    shared = dict(rules=rules, root=root, mesh=mesh, truncates=False, width=0)
    s = sizes.max_num_seqs // parts
    row = Row(
        i32(parts * s),
        i32(parts * s),
        jax.ShapeDtypeStruct((parts * s,), bool),
        i32(parts, s, touched(page, sizes.decode_steps)),
        draws(parts * s),
    )
    tokens = branches * (sizes.prompt_tokens / branches + sizes.response_tokens / 2)  # of a prompt and its responses
    groups = max(1, int(min(s // branches, count * page // tokens)))
    lists = page_lists(running(parts, s, groups, branches, sizes, page), s, parts, page, config.windowed)
    j = config.key_value_heads // (mesh.shape["tensor"] if any(heads) else 1)
    head_shape, size = (j, config.query_heads // config.key_value_heads, config.head_dim), jnp.dtype(config.compute_dtype).itemsize
    blocks, fetched = tuple(-(-int(x.most) // entries_at_once(page, x.rows.shape[-1], x.page.shape[-1])) for x in lists), 0
    if not config.windowed and by_kernel(config.attention, page, s, head_shape, size, lists):
        blocks, fetched = (), bytes_read(np.concatenate([x.length[0] for x in lists]), s, head_shape, page, size)  # all parts have as much

    def packed(tree):
        return dict(given=i32((layout := layout_of(tree)).words), layout=layout)

    lowered = {"decode": decode.lower(config, served, pages, **packed((row, lists)), chunk=sizes.decode_steps, **shared)}
    longest_piece = sizes.piece or PIECE.get(platform(), 512)
    piece = min(longest_piece, bucket(sizes.prompt_tokens, 8))
    b = max(1, min(sizes.admit, max(2 * longest_piece, PROGRAM_TOKENS) // piece))
    room = bucket(longest)

    def admission(rows, columns):
        n = parts * rows
        each = i32(n, columns), i32(n), i32(parts, rows, room), i32(parts, rows), i32(parts, rows)
        return packed(Admission(*each, i32(parts, rows, touched(page, columns)), draws(n)))

    lowered["admit"] = admit.lower(config, served, pages, **admission(b, piece), fresh=False, **shared)
    if sizes.draft_tokens:
        lowered["verify"] = verify.lower(config, served, pages, **admission(s, sizes.draft_tokens + 1), **shared)
    lowered["swap"] = swap
    return EnginePrograms(lowered, groups, blocks, fetched, config.layers, per_device(pages), per_device(served))


def _measured(programs: EnginePrograms, whole: bool) -> dict:
    """Bytes per device of the compiled programs, and what a decode step reads. Of some layers out of many (not `whole`) what a chunk keeps
    on the chip counts as if it lay in main memory: with all layers there would be no room for it. A GPU's program does not say what its
    cache keeps, without which pages, once gathered, would count three times, so of GPUs nothing is said of reads."""
    out: dict[str, Any] = {"pool": programs.pool, "copy": programs.copy, "groups": programs.groups}
    for name, lowered in programs.lowered.items():
        compiled = lowered.compile()
        m = compiled.memory_analysis()
        out[name] = m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        if name == "decode":
            text = ProgramText(text_of(lowered, compiled), known=NAME)
            if platform() != "gpu":
                (chunk,) = (loop.name for loop in text.loops() if loop.depth == 0)
                out["read"] = step_reads(text if whole else text.moved_out(chunk), programs)
            out["gathered"] = sum(g.bytes for g in text.gathers() if g.depth and g.bytes > SMALL_GATHER)
    return out


def step_reads(text: ProgramText, programs: EnginePrograms) -> float | int:
    """Bytes that a step of a decode program reads.

    Its chunk is a loop whose length is data. In it each layer reads its pages by a kernel, or each list of them in such a loop, which runs
    as often as `blocks` says. Raises `ValueError` where the program has other loops or kernels.
    """
    chunk, *others = (loop for loop in text.loops() if loop.depth < 2)
    lists, blocks, layers = [loop for loop in others if loop.depth == 1], programs.blocks, programs.layers
    counts = {"loops": len(lists), "kernels": text.calls(NAME, chunk.name)}
    wanted = {"loops": len(blocks) * layers, "kernels": (programs.fetched > 0) * layers}
    if counts != wanted:
        raise ValueError(f"the decode program has {counts} over pages in its chunk, not {wanted}")
    again = sum((blocks[i % len(blocks)] - 1) * loop.read for i, loop in enumerate(lists))  # once is counted in the chunk
    return chunk.read + again + layers * programs.fetched


def engine_figures(
    config: ModelConfig,
    mesh: Mesh,
    sizes: EngineConfig,
    budget: float | int,
    branches: int,
    lora: LoraConfig | None = None,
    models: int = 1,
    whole: bool = False,
    trained_on: Mesh | None = None,
) -> dict:
    """What the engine's programs need beside parameters and pages, per device, and what a decode step reads.

    Args:
      branches: responses to each prompt. whole: compile all layers. The others: see `engine_programs`.

    Returns bytes: `decode`, `admit`, `verify` (with drafts) and `swap` (temporary, and results that are new), `pool`, `copy`, `read` of a
    decode step (not of GPUs), `needed` of it (the weights once, a prompt's cache once for all its branches), `gathered` (of weights in the
    decode loop), and `layers` compiled.
    """
    depths = (config.layers,) if whole or config.layers < 3 else (1, 2)
    measured = []
    for depth in depths:
        part = dataclasses.replace(config, layers=depth)
        programs = engine_programs(part, mesh, sizes, budget * depth / config.layers, branches, lora, models, trained_on)
        measured.append(_measured(programs, len(depths) == 1))
    out = dict(measured[0])
    if len(measured) > 1:
        further = {name: measured[0][name] + (config.layers - 1) * (measured[1][name] - measured[0][name]) for name in measured[0]}
        out = {name: max(further[name], measured[0][name], measured[1][name]) for name in further}  # the second may need less
    out["needed"] = roofline.decode_step(
        config, out["groups"], branches, sizes.prompt_tokens, sizes.response_tokens, mesh.shape["tensor"]
    ).bytes
    return out | {"layers": list(depths)}
