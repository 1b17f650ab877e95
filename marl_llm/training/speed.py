"""How fast a run is and how fast it could be: this machine's limits measured once, the work of a step counted, compilations counted."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marl_llm.models import ModelConfig
from marl_llm.training.roofline import Work, forward_flops, weight_bytes


@dataclasses.dataclass(frozen=True)
class MachineLimits:
    """What all devices of a mesh do together: FLOP/s of the best matrix product, bytes/s of reading memory."""

    flops: float
    bandwidth: float

    def seconds(self, work: Work) -> float:
        """No program does this work faster."""
        return max(work.flops / self.flops, work.bytes / self.bandwidth)


@functools.cache
def machine_limits(mesh: Mesh, dtype: str = "float32", repeats: int = 5) -> MachineLimits:
    """Measures a matrix product and a matrix-vector product that run on all devices at once; best of `repeats`. Once per process."""
    size, long = (1024, 4096) if mesh.devices.flat[0].platform == "cpu" else (8192, 16384)
    n = mesh.size
    split = NamedSharding(mesh, P(mesh.axis_names))
    make = jax.jit(lambda m, k: jnp.ones((n, m, k), dtype), static_argnums=(0, 1), out_shardings=split)
    product = jax.jit(lambda a, b: a @ b, out_shardings=split)

    def best(a, b) -> float:
        product(a, b).block_until_ready()
        times = []
        for _ in range(repeats):
            tick = time.perf_counter()
            product(a, b).block_until_ready()
            times.append(time.perf_counter() - tick)
        return min(times)

    square, wide = make(size, size), make(long, long)
    flops = 2 * n * size**3 / best(square, square)
    return MachineLimits(flops, wide.nbytes / best(wide, make(long, 1)))


def rollout_work(config: ModelConfig, figures: dict, roles: int, devices: int) -> Work:
    """What a rollout needed: every prompt once, every sampled token once, and the weights once per decode step on each device.

    `figures` are those of `summarise`. Steps are counted as the mean response is long, which is fewer than are run.
    """
    prompts, samples = max(figures["prompts"], 1), max(figures["samples"], 1)
    prompt, response = figures["prompt_tokens"] / prompts, figures["sampled_tokens"] / samples
    flops = forward_flops(config, figures["prompt_tokens"], prompt / 2, prompts)
    flops += forward_flops(config, figures["sampled_tokens"], prompt + response / 2, figures["sampled_tokens"])
    weights = weight_bytes(config, jnp.dtype(config.compute_dtype).itemsize)
    return Work(flops, weights * devices * figures["turns"] * roles * (1 + response))


def update_work(config: ModelConfig, figures: dict, share: float, epochs: int, frozen: bool = False) -> Work:
    """What an update on `share` of a rollout's rows needed: forward and twice that backward, a prompt once for all its responses. Of a
    `frozen` base under adapters no gradient of the weights is needed, which leaves once that for its products."""
    prompts, samples = max(figures["prompts"], 1), max(figures["samples"], 1)
    prompt, response = figures["prompt_tokens"] / prompts, figures["sampled_tokens"] / samples
    once = forward_flops(config, figures["prompt_tokens"], prompt / 2, 0)
    once += forward_flops(config, figures["sampled_tokens"], prompt + response / 2, figures["sampled_tokens"])
    weights = forward_flops(config, figures["prompt_tokens"] + figures["sampled_tokens"], 0, figures["sampled_tokens"])
    return Work(epochs * share * (3 * once - weights * frozen), 0)


def summary_text(clock: list[dict[str, float]], compilations: Compilations) -> str:
    """Medians over steps, the first left out (it compiles), and the split of time over the rest; shares of the roofline where counted.

    Playing is prompts, sampling, the game and rewards; a compiled rollout is one dispatch. An update is one dispatch a minibatch, and
    those behind the first are scored before it.
    """
    rows = clock[1:] or clock

    def median(name):
        return statistics.median(r[f"speed/{name}"] for r in rows)

    times = {name: sum(r[f"time/{name}"] for r in rows) for name in ("sample", "update", "other")}
    parts = {"playing": times["sample"], "scores and update": times["update"], "evaluation and idle": times["other"]}

    def share(name):
        return f" ({median(name):.0%} of the roofline)" if f"speed/{name}" in rows[0] else ""

    all_seconds = max(sum(parts.values()), 1e-9)
    return (
        f"sampled {median('sampled_tokens_per_s'):,.0f} tokens/s{share('sample_roofline')}, "
        f"trained on {median('trained_tokens_per_s'):,.0f} tokens/s{share('update_roofline')}; time: "
        + ", ".join(f"{name} {x / all_seconds:.0%}" for name, x in parts.items())
        + f"; {compilations.programs} programs compiled in {compilations.seconds:.0f} s, {compilations.cached} of them from the cache"
    )


class Compilations:
    """Counts programs that XLA was asked for since this was made, and how many of them the cache on disk had."""

    def __init__(self):
        self.programs, self.seconds, self.cached = 0, 0.0, 0
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        jax.monitoring.register_event_listener(self._event)

    def _compiled(self, event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.programs, self.seconds = self.programs + 1, self.seconds + seconds

    def _event(self, event: str, **_) -> None:
        self.cached += event == "/jax/compilation_cache/cache_hits"
