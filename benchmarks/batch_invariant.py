"""The exact engine beside the default one: whether bytes depend on company, and what it costs.

    python -m benchmarks.batch_invariant --requests=500 --width=128 --repeats=5

Requests of uneven length: groups of eight with one prompt, beginnings that groups share. Bytes: the exact engine answers all of them
together, in two other orders, with a pool of a fifth of the pages, and (every tenth) alone; counted are answers whose ids or log-probs
differ in a byte from the first ones. The default engine in two orders stands beside it. Cost: CPU seconds of both engines on the
same requests, in turns, compiled before; the ratio of each turn, the middle one and the ends. Prints one JSON line; exit code 1 when a byte
of an exact answer differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import statistics
import sys
import time

import jax
import numpy as np

from marl_llm.models import ModelConfig, init_params
from marl_llm.sampling import Engine, EngineConfig, Request
from marl_llm.sampling.model_runner import page_bytes

VOCABULARY, PAGE = 2048, 16
SIZES = EngineConfig(max_num_seqs=64, prompt_tokens=256, response_tokens=64, decode_steps=8, admit=16, page=PAGE, batch_invariant=True)


def config_of(width: int) -> ModelConfig:
    """A model of two layers."""
    return ModelConfig(VOCABULARY, width=width, layers=2, query_heads=4, key_value_heads=2, head_dim=width // 4, feed_forward=2 * width)


def requests_of(count: int, seed: int) -> list[Request]:
    """Groups of eight with one prompt of 10 to 190 tokens, of which half begin alike."""
    rng = np.random.default_rng(seed)

    def ids(n):
        return tuple(int(t) for t in rng.integers(1, VOCABULARY, n))

    common, out = ids(90), []
    for group in range(-(-count // 8)):
        prompt = common[: int(rng.integers(0, 91)) * (group % 2)] + ids(int(rng.integers(10, 101)))
        out += [Request(prompt, (seed, group, branch), int(rng.integers(8, 65)), "a", stop_ids=(0,)) for branch in range(8)]
    return out[:count]


def answers(params: dict, config: ModelConfig, sizes: EngineConfig, requests: list[Request], order: list[int], alone: bool = False) -> dict:
    """Number of a request -> the bytes of its answer."""
    with Engine({"a": (config, params)}, jax.random.key(3), sizes=sizes) as engine:
        if alone:
            replies = [engine.generate_all([requests[i]])[0] for i in order]
        else:
            replies = engine.generate_all([requests[i] for i in order])
    return {i: (np.asarray(x.tokens).tobytes(), np.asarray(x.log_probs).tobytes()) for i, x in zip(order, replies, strict=True)}


def costs(params: dict, config: ModelConfig, requests: list[Request], repeats: int) -> list[tuple[float, float]]:
    """CPU seconds of the exact and of the default engine, turn by turn, with empty pools."""
    models, key = {"a": (config, params)}, jax.random.key(3)
    with Engine(models, key, sizes=SIZES) as exact, Engine(models, key, sizes=dataclasses.replace(SIZES, batch_invariant=False)) as plain:
        pairs = []
        for _ in range(repeats + 2):  # the first two compile
            pair = []
            for engine in (exact, plain):
                engine.set_params("a", params)
                begun = time.process_time()
                engine.generate_all(requests)
                pair.append(time.process_time() - begun)
            pairs.append(tuple(pair))
    return pairs[2:]


def main() -> None:
    """Bytes, then cost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    o = parser.parse_args()
    config = config_of(o.width)
    params = jax.jit(lambda key: jax.tree.map(lambda x: 2.0 * x, init_params(config, key)))(jax.random.key(o.seed))
    requests = requests_of(o.requests, o.seed)
    first, dice = list(range(len(requests))), random.Random(o.seed)
    orders = [dice.sample(first, len(first)) for _ in range(2)]
    whole = SIZES.max_num_seqs * (SIZES.prompt_tokens + SIZES.response_tokens) * page_bytes(config, PAGE) // PAGE
    small = dataclasses.replace(SIZES, cache_bytes=whole // 5)
    plain = dataclasses.replace(SIZES, batch_invariant=False)
    wanted = answers(params, config, SIZES, requests, first)

    def differ(replies, wanted=wanted):
        return sum(replies[i] != wanted[i] for i in replies)

    differing = {
        "orders": [differ(answers(params, config, SIZES, requests, order)) for order in orders],
        "small_pool": differ(answers(params, config, small, requests, orders[0])),
        "alone": differ(answers(params, config, SIZES, requests, first[::10], alone=True)),
    }
    default = differ(answers(params, config, plain, requests, orders[0]), answers(params, config, plain, requests, first))
    ratios = sorted(exact / usual for exact, usual in costs(params, config, requests[:256], o.repeats))
    bad = sum(differing["orders"]) + differing["small_pool"] + differing["alone"]
    print(json.dumps({
        "benchmark": "exact", "requests": o.requests, "width": o.width, "differing_answers": differing,
        "differing_answers_of_the_default_engine_in_another_order": default, "cpu_ratio_to_default": round(statistics.median(ratios), 3),
        "cpu_ratio_range": [round(ratios[0], 3), round(ratios[-1], 3)], "jax": jax.__version__, "machine": platform.machine(),
    }))  # fmt: skip
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
