"""Imitation of given responses: the supervised warm-up, whose scripted players' responses came from the very game that trains later.

The same packed rows and micro-batches as the update (`marl_llm.training.update`), with the plain likelihood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from marl_llm.models import LoraConfig, ModelConfig, score_packed
from marl_llm.training.mesh import compiled_step, data_axis
from marl_llm.training.packing import PackedRows, Tokens, TokenSample
from marl_llm.training.scoring import response_where
from marl_llm.training.steps import Sums, check_base, cut, exact_step, few_shapes, mean_metrics, whole
from marl_llm.training.train_state import TrainState
from marl_llm.training.update import LearnerOptions


def make_sft(options: LearnerOptions, config: ModelConfig, mesh: Mesh, lora: LoraConfig | None = None) -> Callable:
    """Builds `sft_step(policy, tokens, chosen, learning_rate, base=None) -> (policy, metrics)`, one optimizer step on the chosen samples.

    loss = −1/N Σ_i Σ_r log π(response_{i,r} | prompt_i, response_{i,<r}), over the N response tokens of all of them

    Args:
      options: of these `optimizer`, `row_tokens` and `microbatch_tokens` are read. config: the policy's shape.
      lora: the policy's parameters are adapters on the frozen `base` (see `marl_llm.models.lora`).
    `tokens` are `Tokens`, or a list of `TokenSample`, whose log-probs are not read; equal samples count as often as they come. The policy
    is donated. Metrics: loss, grad_norm and tokens (N), floats; all 0 and the policy as it was when nothing is chosen.
    One compilation per shape of rows. Raises `PackingError` for a sample that does not fit, `ValueError` for a base without `lora` or the
    reverse.
    """
    step = sft_program(options, config, mesh, lora)
    devices = mesh.shape["data"] if data_axis(mesh) else 1

    def sft_step(
        policy: TrainState, tokens: Tokens | Sequence[TokenSample], chosen: Sequence[int] | np.ndarray, learning_rate, base: Any = None
    ):
        check_base(base, lora)
        tokens = tokens if isinstance(tokens, Tokens) else Tokens.of(tokens)
        if not len(chosen):
            return policy, {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
        rows = tokens.pack(chosen, options.row_tokens, devices, few_shapes(options.microbatch_tokens))
        policy, metrics = step(policy, base, rows, jnp.float32(learning_rate))
        return policy, metrics | {"tokens": float(np.sum(tokens.size[np.asarray(chosen)]))}

    return sft_step


def sft_program(options: LearnerOptions, config: ModelConfig, mesh: Mesh, lora: LoraConfig | None = None) -> Callable:
    """`(policy, base, rows, learning_rate) -> (policy, means)`, compiled."""
    axis = data_axis(mesh)

    def local(policy: TrainState, base, rows: PackedRows, learning_rate):
        part, count, most = cut((rows,), options.microbatch_tokens, axis)

        def loss(params, j):
            (rows_of_part,) = part(j)
            where = response_where(rows_of_part)
            total = -jnp.sum(score_packed(config, whole(params, base, lora), *rows_of_part.inputs, where=where).log_probs, where=where)
            return total, Sums(jax.lax.stop_gradient(total), jnp.sum(where, dtype=jnp.float32), {}, jnp.float32(0))

        policy, metrics, _ = exact_step(policy, loss, count, most, learning_rate, options.optimizer, axis)
        return policy, mean_metrics([metrics])

    return compiled_step(local, config, mesh, (P(), P(), P("data"), P()), 2)
