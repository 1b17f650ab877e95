"""Imitation of given responses: the warm start of host workflows, whose scripted players wrote text that became ids.

The same packed rows and micro-batches as the update of host samples (`marl_llm.training.packed_update`), with the plain likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from marl_llm.models import TRAIN, LoraConfig, ModelConfig, score_packed
from marl_llm.training.mesh import data_axis, over_data
from marl_llm.training.packed_update import response_where
from marl_llm.training.packing import PackedRows, TokenSample, pack
from marl_llm.training.policy import Policy
from marl_llm.training.steps import Sums, check_base, cut, exact_step, microbatch_size, row_growth, whole


def make_packed_imitation(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    row_tokens: int,
    microbatch_tokens: int = 0,
    lora: LoraConfig | None = None,
):
    """Builds `imitate(policy, pairs, learning_rate, base=None) -> (policy, metrics)`, one optimizer step on all pairs.

    loss = −1/N Σ_i Σ_r log π(response_{i,r} | prompt_i, response_{i,<r}), over the N response tokens of all pairs

    Args:
      row_tokens: budget of a packed row; no pair may be longer.
      microbatch_tokens: as in `make_update`; a row is never cut.
      lora: the policy's parameters are adapters on the frozen `base` (see `marl_llm.models.lora`).
    `pairs` are `(prompt ids, response ids)`, as of `SampleTable.imitation()`; equal pairs count as often as they come. The policy is
    donated. Metrics: loss, grad_norm and tokens (N), floats; all 0 and the policy as it was when there is no pair.
    One compilation per shape bucket. Raises `PackingError` for a pair that is empty or does not fit, `ValueError` for a base without
    `lora` or the reverse.
    """
    if row_tokens < 1:
        raise ValueError(f"row_tokens={row_tokens} must be at least 1")
    microbatch_size(microbatch_tokens, 1, 1)
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1

    def local(policy: Policy, base, rows: PackedRows, learning_rate):
        part, count, most = cut((rows,), microbatch_tokens, axis)

        def loss(params, j):
            (some,) = part(j)
            where = response_where(some)
            total = -jnp.sum(score_packed(config, whole(params, base, lora), *some[:6]).log_probs, where=where)
            return total, Sums(jax.lax.stop_gradient(total), jnp.sum(where, dtype=jnp.float32), {}, jnp.float32(0))

        policy, metrics, _ = exact_step(policy, loss, count, most, learning_rate, optimizer, axis)
        return policy, metrics

    specs = (P(), P(), P("data"), P())
    step = jax.jit(over_data(local, mesh, TRAIN, in_specs=specs, out_specs=(P(), P())), donate_argnums=(0,))

    def imitate(policy: Policy, pairs: Sequence[tuple[Any, Any]], learning_rate, base: dict | None = None):
        check_base(base, lora)
        samples = [TokenSample(p, r, np.zeros(np.size(r)), f"pair {i}") for i, (p, r) in enumerate(pairs)]
        if not samples:
            return policy, {"loss": 0.0, "grad_norm": 0.0, "tokens": 0.0}
        policy, metrics = step(policy, base, pack(samples, row_tokens, devices, row_growth(microbatch_tokens)), jnp.float32(learning_rate))
        metrics = {name: float(x) for name, x in jax.device_get(metrics).items()}
        return policy, metrics | {"tokens": float(sum(s.response.size for s in samples))}

    return imitate
