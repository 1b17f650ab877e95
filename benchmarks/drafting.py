"""Decoding with drafts beside decoding without, on a team that quotes, one that half quotes and one that does not.

    taskset -c 0 nice -n 19 python -m benchmarks.drafting [--rows=1,2,4,8,16,32] [--teams=quoting,half,none] [--draft=7] [--repeats=3]

The model has the shape of `benchmarks.update` (29.4e6 parameters) and random weights but for the heads of its first layer, set
by hand: they attend to what stood `TEXT` tokens before the token to come and add its embedding, times a strength, to the residual stream.
So the model goes on by repeating the last `TEXT` tokens of its prompt, each with a probability that follows from the strength, and draws
from the whole vocabulary otherwise, at temperature 1. `TEAMS` has the strengths. Nothing tells the engine which team it serves.

Both engines live in one process and answer the same requests in turns, each turn with new prompts. Tokens a second are of CPU seconds of
the process; `ratio` is the median over turns of with over without, `ratio_wall` the same of wall time. `acceptance` is accepted over
drafted tokens, `steps_saved` the share of decode steps that were not needed, `equal` the responses whose ids and finish are equal to the
byte, and `log_prob_difference` the largest of those. A draw from the flat part of a distribution over 8,192 tokens may lie within rounding
of two tokens' border: such a response differs, as it may in other company without drafts. One JSON line for each number of rows.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.update import VOCABULARY, bench_config
from marl_llm.models import ModelConfig, init_params
from marl_llm.models.rotary import frequencies
from marl_llm.sampling import Engine, EngineConfig, Request

TEXT, PROMPT, RESPONSE, SLOTS = 96, 128, 96, 32
TEAMS = {"quoting": 20.0, "half": 12.0, "none": 0.0}  # strength
SHARPNESS = 6.0  # of the first layer's queries and keys


def quoting_params(config: ModelConfig, key: jax.Array, strength: float, distance: int = TEXT) -> dict:
    """Random parameters whose first layer copies from `distance` tokens before the token to come.

    Channel 0 of each embedding is the same number, from which all queries and keys of the layer are made: a rotary score then follows the
    distance alone, and its peak is where the key's phases say. Values are the embedding's other channels, as many as heads hold.
    """
    params = init_params(config, key)
    if not strength:
        return params
    attention, half = dict(params["block_0"]["attention"]), config.head_dim // 2
    phase = np.asarray(frequencies(config)) * (distance - 1)
    constant = jnp.zeros(config.width).at[0].set(1.0)
    query, toward = np.r_[np.ones(half), np.zeros(half)], np.r_[np.cos(phase), np.sin(phase)]

    def repeated(vector, heads):
        return jnp.broadcast_to(constant[:, None, None] * jnp.asarray(vector, jnp.float32), (config.width, heads, config.head_dim))

    copied = min(config.width - 1, config.key_value_heads * config.head_dim)
    value = jnp.eye(config.width, copied, -1)  # channel 1 + i of the embedding to place i
    value = jnp.pad(value, ((0, 0), (0, config.key_value_heads * config.head_dim - copied)))
    value = value.reshape(config.width, config.key_value_heads, config.head_dim)
    group = config.query_heads // config.key_value_heads
    back = jnp.repeat(value, group, axis=1).transpose(1, 2, 0) * strength / (group * config.width**0.5)
    attention |= {
        "query": {"kernel": repeated(query, config.query_heads)}, "key": {"kernel": repeated(toward, config.key_value_heads)},
        "value": {"kernel": value}, "output": {"kernel": back},
        "query_norm": {"weight": jnp.full(config.head_dim, SHARPNESS)}, "key_norm": {"weight": jnp.full(config.head_dim, SHARPNESS)},
    }  # fmt: skip
    embedding = params["embedding"].at[:, 0].set(4 * config.width**-0.5)
    return params | {"embedding": embedding, "block_0": params["block_0"] | {"attention": attention}}


def requests_of(rng: np.random.Generator, rows: int, turn: int) -> list[Request]:
    """Prompts of random tokens, a task each."""
    prompts = [tuple(int(t) for t in rng.integers(3, VOCABULARY, PROMPT)) for _ in range(rows)]
    return [Request(prompt, (turn, turn * SLOTS + i), RESPONSE, "a") for i, prompt in enumerate(prompts)]


def turn_of(engine: Engine, requests: list[Request]) -> tuple[list, float, float]:
    """The answers, CPU seconds and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    answers = engine.generate_all(requests)
    return answers, time.process_time() - cpu, time.perf_counter() - wall


def compare(engines: tuple[Engine, Engine], make, rows: int, repeats: int) -> dict:
    """A line of `rows` requests at a time: engines (with, without) in turns. Turns that compile are not counted."""
    ratios, walls, speeds, counts, equal, total, difference, turn = [], [], ([], []), [], 0, 0, 0.0, 0
    while len(ratios) < repeats:
        turn += 1
        requests, figures = make(rows, turn), []
        before = [dict(e.stats()["a"]) for e in engines]
        for engine in engines[:: 1 if turn % 2 else -1]:
            figures.append(turn_of(engine, requests))
        figures = figures[:: 1 if turn % 2 else -1]
        after = [dict(e.stats()["a"]) for e in engines]
        for with_, without in zip(figures[0][0], figures[1][0], strict=True):
            same = with_.tokens.tobytes() == without.tokens.tobytes() and with_.finish == without.finish
            equal, total = equal + same, total + 1
            if same:
                difference = max(difference, float(np.abs(with_.log_probs - without.log_probs).max()))
        if any(a["compilations"] != b["compilations"] for a, b in zip(after, before, strict=True)):
            continue
        tokens = [sum(len(a.tokens) for a in answers) for answers, *_ in figures]
        rates = [n / cpu for n, (_, cpu, _) in zip(tokens, figures, strict=True)]
        ratios.append(rates[0] / rates[1])
        walls.append(figures[1][2] / figures[0][2])
        for speed, rate in zip(speeds, rates, strict=True):
            speed.append(rate)
        counts.append({n: after[0].get(n, 0) - before[0].get(n, 0) for n in ("drafted_tokens", "accepted_tokens", "saved_steps", "steps")})
    drafted, accepted, saved, steps = (sum(c[n] for c in counts) for n in ("drafted_tokens", "accepted_tokens", "saved_steps", "steps"))
    return {
        "ratio": round(statistics.median(ratios), 3), "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "ratio_wall": round(statistics.median(walls), 3), "tokens_per_s": [round(statistics.median(s), 1) for s in speeds],
        "acceptance": round(accepted / drafted, 3) if drafted else None, "steps_saved": round(saved / (saved + steps), 3),
        "equal": f"{equal}/{total}", "log_prob_difference": float(f"{difference:.1e}"),
    }  # fmt: skip


def main() -> None:
    """Prints the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,2,4,8,16,32")
    parser.add_argument("--teams", default=",".join(TEAMS))
    parser.add_argument("--draft", type=int, default=7, help="EngineConfig.draft_tokens")
    parser.add_argument("--repeats", type=int, default=3)
    o = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(pathlib.Path("~/.cache/marl_llm/xla").expanduser()))
    config = bench_config()
    for team in o.teams.split(","):
        params = jax.jit(lambda key, strength=TEAMS[team]: quoting_params(config, key, strength))(jax.random.key(0))
        rng = np.random.default_rng(1)
        sizes = [EngineConfig(SLOTS, PROMPT, RESPONSE, decode_steps=8, admit=16, draft_tokens=k) for k in (o.draft, 0)]
        engines = [Engine({"a": (config, params)}, jax.random.key(3), sizes=size) for size in sizes]
        for rows in map(int, o.rows.split(",")):
            line = compare(tuple(engines), lambda n, turn, rng=rng: requests_of(rng, n, turn), rows, o.repeats)
            head = {"benchmark": "drafting", "team": team, "rows": rows, "draft_tokens": o.draft, "parameters": config.parameters}
            print(json.dumps(head | line | {"jax": jax.__version__, "machine": platform.machine()}), flush=True)
        for engine in engines:
            engine.close()


if __name__ == "__main__":
    main()
