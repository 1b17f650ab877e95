"""Forward and backward of the decoder as a share of this machine's measured rate of matrix products.

    python -m benchmarks.model [--preset=bench] [--rows=8] [--tokens=128] [--repeats=5] [--threads=1]

Prints one JSON line per phase: medians over interleaved repetitions. FLOPs are counted by `marl_llm.training.roofline` (two per
multiply-add; the backward pass is twice the forward); the rate is the best of float32 products of several shapes (GEMMS) in the
same run.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time

from absl import app, flags

_PRESET = flags.DEFINE_string("preset", "bench", "A model preset, or 'bench': 29.4e6 parameters, V=16,384.")
_ROWS = flags.DEFINE_integer("rows", 8, "Rows of tokens.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens per row.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Interleaved repetitions.", lower_bound=1)
GEMMS = ((256, 512, 512), (1024, 512, 1280), (1024, 1024, 1024), (1024, 1024, 4096))
_THREADS = flags.DEFINE_integer("threads", 1, "CPU cores to run on; 0: all.", lower_bound=0)


def main(argv) -> None:
    """The command."""
    del argv
    if _THREADS.value:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: _THREADS.value]))
    import jax
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.models import ModelConfig, init_params, log_probs, make_model_config
    from marl_llm.training.roofline import forward_flops

    if _PRESET.value == "bench":
        config = ModelConfig(16_384, width=512, layers=8, query_heads=8, key_value_heads=4, head_dim=64, feed_forward=1280)
    else:
        config = make_model_config(_PRESET.value, vocab_size=512)
    params = init_params(config, jax.random.key(0), stacked=True)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.vocab_size, (_ROWS.value, _TOKENS.value)), jnp.int32)

    def loss(p, t):
        return jnp.sum(log_probs(config, p, t).log_probs)

    n = tokens.size
    once = forward_flops(config, n, _TOKENS.value / 2, n)
    product = jax.jit(jnp.matmul)
    runs = {
        **{f"gemm {m}x{k}x{n_}": (functools.partial(product, jnp.ones((m, k)), jnp.ones((k, n_))), 2 * m * k * n_) for m, k, n_ in GEMMS},
        "forward": (functools.partial(jax.jit(loss), params, tokens), once),
        "forward_and_backward": (functools.partial(jax.jit(jax.grad(loss)), params, tokens), 3 * once),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run, _ in runs.values():
        jax.block_until_ready(run())
    for _ in range(_REPEATS.value):
        for name, (run, _) in runs.items():
            tick = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - tick)
    rate = max(flops / statistics.median(seconds[name]) for name, (_, flops) in runs.items() if name.startswith("gemm"))
    for name, (_, flops) in runs.items():
        took = statistics.median(seconds[name])
        row = {"benchmark": "model", "phase": name, "parameters": config.parameters, "rows": _ROWS.value, "tokens": _TOKENS.value,
               "seconds": round(took, 4), "spread": [round(min(seconds[name]), 4), round(max(seconds[name]), 4)],
               "gflops_per_s": round(flops / took / 1e9, 1), "share_of_gemm": round(flops / took / rate, 3), "threads": _THREADS.value,
               "jax": jax.__version__}  # fmt: skip
        print(json.dumps(row))


if __name__ == "__main__":
    app.run(main)
