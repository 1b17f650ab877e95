"""The pages of one scheduler's cache on the devices, or of several schedulers that draw from one pool (`EngineConfig.block_pool="shared"`).

Schedulers of one shape can share a pool: a page of one holds keys and values for another as well. What is free then serves whoever needs
it. The older request goes first, whichever scheduler it is in: nobody enters before an older one that lacks pages, and where a chunk lacks
pages the youngest of all schedulers is paused. So the oldest request always goes on.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marl_llm.models import SAMPLE, ModelConfig, Pages
from marl_llm.models.sharding import spec_for
from marl_llm.sampling.model_runner import init_pages, page_bytes
from marl_llm.sampling.pool import PagePool
from marl_llm.sampling.sequences import EngineConfig, SequenceState

PAGE = {"tpu": 128, "gpu": 64}  # tokens of a page; a TPU's lanes are 128 wide. Elsewhere 16: a page costs what it holds


class PoolShape(NamedTuple):
    """Schedulers for which this is equal can share a pool."""

    layers: int
    key_value_heads: int
    head_dim: int
    compute_dtype: str
    sizes: EngineConfig
    stacked: bool


def shape_of(config: ModelConfig, sizes: EngineConfig, stacked: bool = False) -> PoolShape:
    """Of a scheduler."""
    return PoolShape(config.layers, config.key_value_heads, config.head_dim, config.compute_dtype, sizes, stacked)


@runtime_checkable
class Tenant(Protocol):
    """What a store asks of a scheduler."""

    starved: int | None
    prefilling: list[SequenceState]
    running: list[SequenceState]


class PageStore:
    """Pages in `parts` of the devices, with a pool each. Not thread-safe: the engine's thread owns it.

    Args:
      name: for errors. config, sizes, stacked: of each scheduler, as far as `shape_of` goes.
      count: of schedulers; the pages are so many times more.

    Attributes:
      page: tokens of a page. page_bytes: of one, all layers. longest: pages that a request needs at most.
      pages: of all layers, on the devices; programs donate them. pools: who holds which, by part.
      schedulers: that draw from here.
    """

    def __init__(self, name: str, config: ModelConfig, sizes: EngineConfig, mesh: Mesh | None, count: int = 1, stacked: bool = False):
        self.mesh, self._models = mesh, 0
        self.schedulers: list[Tenant] = []
        shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
        self.parts = shards if sizes.max_num_seqs % shards == 0 else 1
        self.platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        self.page = sizes.page or PAGE.get(self.platform, 16)
        self.page_bytes = page_bytes(config, self.page)
        self.longest = -(-(sizes.prompt_tokens + sizes.response_tokens) // self.page)
        number = count * (sizes.max_num_seqs // self.parts) * self.longest
        if sizes.cache_bytes:
            number = min(number, count * sizes.cache_bytes // self.parts // self.page_bytes)
        if number < 1:
            raise ValueError(f"model {name!r}: {sizes.cache_bytes:,} bytes hold no page of {self.page_bytes:,} (rollout.cache_gib)")
        self.pools = [PagePool(number, self.page) for _ in range(self.parts)]
        self.pages = init_pages(config, self.parts, number, self.page, stacked)
        self.place(self.pages)

    def place(self, pages: list[Pages]) -> None:
        """Takes over what a program wrote. Pages lie along the devices that rows are split over, and their heads along 'tensor'."""
        if self.mesh is not None:
            heads = spec_for((None, "key_value_heads"), pages[0].keys.shape[1:3], dict(self.mesh.shape), SAMPLE)
            spec = P(("data", "fsdp") if self.parts > 1 else None, *heads)
            pages = jax.device_put(pages, NamedSharding(self.mesh, spec))
        self.pages = pages

    def join(self, scheduler: Tenant, models: int) -> int:
        """A further scheduler with so many models; the number of its first one in the pools."""
        self.schedulers.append(scheduler)
        self._models += models
        return self._models - models

    @property
    def bytes(self) -> int:
        """Of keys and values, on all devices together."""
        return self.parts * self.pools[0].pages * self.page_bytes

    @property
    def reserve(self) -> int:
        """Pages to leave to those that decode: one for each that may yet need another."""
        return sum(len(sequence.nodes) * self.page < sequence.longest for scheduler in self.schedulers for sequence in scheduler.running)

    def waits(self, sequence: SequenceState) -> bool:
        """Whether an older request of another scheduler lacks pages."""
        return any(scheduler.starved is not None and scheduler.starved < sequence.number for scheduler in self.schedulers)

    def youngest(self, part: int) -> tuple[Tenant, SequenceState]:
        """Of all that hold pages of a part, the last that was submitted."""
        held = ((scheduler, sequence) for scheduler in self.schedulers for sequence in (*scheduler.prefilling, *scheduler.running))
        return max((holder for holder in held if holder[1].part == part), key=lambda holder: holder[1].number)

    def held(self) -> tuple[int, int]:
        """Pages that have an owner, and the tokens that are needed of them (shared ones once)."""
        sequences = [sequence for scheduler in self.schedulers for sequence in (*scheduler.prefilling, *scheduler.running)]
        tokens = {(t.part, node.page): len(node.tokens) for t in sequences for node in t.nodes}
        return sum(pool.owned for pool in self.pools), sum(tokens.values())
