"""The minibatches of a step: how its prompts are dealt out, and the loop over them that adds up their metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from marl_llm.activity import doing
from marl_llm.algorithms import Samples
from marl_llm.training.packing import Tokens
from marl_llm.training.steps import mean_metrics


def seed_of_step(seed: int, step: int) -> int:
    """The seed of the order of a step's prompts, in a run of this seed."""
    return int(np.random.SeedSequence((seed, step)).generate_state(1)[0]) % 2**31


def prompts_of(tokens: Tokens, table: Samples, chosen: np.ndarray) -> list[list[int]]:
    """The chosen samples that have one prompt of one task, together: what a minibatch counts."""
    prompts: dict[tuple[int, int], list[int]] = {}
    for i in chosen.tolist():
        prompts.setdefault((int(table.instance[i]), int(tokens.prompt[i])), []).append(i)
    return list(prompts.values())


def minibatches_of(prompts: list[list[int]], minibatch: int, epochs: int, seed: int) -> list[list[int]]:
    """The samples of each optimizer step: every epoch deals the prompts out anew, evenly, `minibatch` of them at most to a step.

    `prompts`: the samples of each prompt. `seed`: with the epoch's number, of their order.
    """
    steps, minibatches = -(-len(prompts) // minibatch), []
    for epoch in range(epochs if prompts else 0):
        order = np.random.default_rng((seed, epoch)).permutation(len(prompts))
        minibatches += [[i for prompt in sorted(part) for i in prompts[prompt]] for part in np.array_split(order, steps)]
    return minibatches


def over_minibatches(step: Callable, state, minibatches: Sequence[list[int]], packed: Callable):
    """A step on each minibatch: `(state, metrics)`.

    Args:
      step: `(state, number, rows, arrays) -> (state, metrics, gap)`, metrics as (sum, count) pairs.
      minibatches: the samples of each step. packed: `(samples) -> (rows, arrays)`.
    Sums and counts are added over all steps before the division, so that no metric depends on how the samples were cut (law 5).
    Without minibatches all metrics are there, and zero.
    """
    parts, gaps, real, made = [], [jnp.float32(0)], 0, 0
    with doing("updating: minibatch", len(minibatches)) as work:
        for number, samples in enumerate(minibatches):
            rows, arrays = packed(samples)
            real += np.count_nonzero(rows.segments)
            made += np.count_nonzero(rows.length[:, 0]) * rows.tokens.shape[1]
            state, metrics, gap = step(state, number, rows, arrays)
            parts.append(metrics)  # added up on the host, so that no step waits for a dispatch per figure
            jax.block_until_ready(gaps[-1])  # of the step before: one is under way and one is on its way
            gaps.append(gap)
            work.done = number
        jax.block_until_ready(gaps[-1])
    if not parts:  # nothing to learn from: the same figures, all zero
        shapes = jax.eval_shape(functools.partial(step, number=0), state, **dict(zip(("rows", "arrays"), packed([]))))[1]
        parts.append(jax.tree.map(lambda x: np.zeros(x.shape), shapes))
    parts, gaps = jax.device_get((parts, gaps))
    parts = jax.tree.map(np.float64, parts)
    metrics = {name: float(x) for name, x in mean_metrics(parts).items()} | {"log_prob_gap": float(np.max(gaps))}
    return state, metrics | {"updates": len(minibatches), "packing": real / max(made, 1)}
