"""The update of one model from samples of uneven length that were made on the host: agents with tools, chats, checkpoints.

The same step as that of device games (`marl_llm.training.update`): advantages over all samples, minibatches with exact denominators, the
recipe's loss. Only the rows differ: here they are packed on the host (`marl_llm.training.packing`), a minibatch at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from marl_llm.algorithms import Recipe, Samples, advantages_for, count_for
from marl_llm.models import TRAIN, ModelConfig
from marl_llm.models.packed import score_packed
from marl_llm.models.sharding import ways
from marl_llm.sampling.lane import bucket
from marl_llm.training.mesh import data_axis, over_data
from marl_llm.training.packing import PackedRows, TokenSample, families, pack
from marl_llm.training.policy import Policy
from marl_llm.training.steps import Sums, cut, exact_step, microbatch_size, policy_loss


def by_sample(rows: PackedRows, values: Float[Array, "B Q"]) -> Float[Array, "S Q"]:
    """Values per response token as a table with a line per sample, S = B N; what is past a response's end means nothing."""
    q = values.shape[1]
    index = jnp.minimum(rows.first[..., None] + jnp.arange(q), q - 1)  # B N Q
    return jnp.take_along_axis(values[:, None], index, axis=2).reshape(-1, q)


def packed_loss(
    recipe: Recipe, config: ModelConfig, params: dict, reference: dict | None, rows: PackedRows, advantages: Float[Array, "B N"]
) -> tuple[Float[Array, ""], Sums]:
    """The recipe's loss of packed rows as sums, see `policy_loss`. `reference` is needed where the recipe has a KL in its loss."""
    score = lambda p: score_packed(config, p, *rows[:6], recipe.temperature)  # noqa: E731
    scored = score(params)
    ref = None
    if recipe.kl_coef and recipe.kl_in == "loss":
        ref = jax.lax.stop_gradient(by_sample(rows, score(reference).log_probs))
    tables = (by_sample(rows, x) for x in (scored.log_probs, scored.entropy, rows.log_probs))
    where = jnp.arange(rows.targets.shape[1]) < rows.length.reshape(-1, 1)
    return policy_loss(recipe, *tables, advantages.reshape(-1), where, ref)


def make_packed_update(
    recipe: Recipe,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    row_tokens: int,
    minibatch: int,
    epochs: int = 1,
    microbatch_tokens: int = 0,
):
    """Builds `update(policy, reference, samples, table, plays, learning_rate, seed) -> (policy, metrics)`.

    Args:
      recipe: how samples become advantages and a loss. row_tokens: budget of a packed row; no sample may be longer.
      minibatch: prompts per optimizer step, over all devices. epochs: passes over the samples.
      microbatch_tokens: as in `make_update`; a row is never cut.
    `samples` are the S token samples of all agents and `table` their identities and rewards, NumPy or JAX arrays `[S]` in the same order;
    its `tokens` and `prompt_ids` are filled in here. `plays [N]`, `reference` and the metrics are those of `make_update`, and
    `packing` is the share of the rows' tokens that are not padding. `seed`, an int, orders the prompts. The policy is donated.
    One compilation per shape bucket. Raises `ValueError` for a recipe with a critic, `PackingError` for a sample that does not fit.
    """
    if recipe.normaliser == "critic":
        raise ValueError(f"recipe {recipe.name!r} needs a critic, which the packed update does not train")
    for name, value in (("row_tokens", row_tokens), ("minibatch", minibatch), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    microbatch_size(microbatch_tokens, 1, 1)
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1

    def local(policy: Policy, reference, rows: PackedRows, advantages, dilution, learning_rate):
        b, length = rows.tokens.shape
        micro = microbatch_size(microbatch_tokens, length, b, ways("batch") if axis is None else 1)
        part, count, most = cut((rows, advantages), jnp.sum(rows.length[:, 0] > 0), micro)
        loss = lambda params, j: packed_loss(recipe, config, params, reference, *part(j))  # noqa: E731
        return exact_step(policy, loss, count, most, learning_rate, optimizer, axis, dilution)

    specs = (P(), P(), P("data"), P("data"), P(), P())
    step = jax.jit(over_data(local, mesh, TRAIN, in_specs=specs, out_specs=(P(), P(), P())), donate_argnums=(0,))
    advise = jax.jit(lambda table: advantages_for(recipe, table))
    units = jax.jit(lambda length, where, r: count_for(recipe, jnp.arange(r) < jnp.where(where, length, 0)[:, None]), static_argnums=2)

    def update(policy: Policy, reference, samples: Sequence[TokenSample], table: Samples, plays, learning_rate, seed: int):
        samples, table = _ordered(samples, table)
        size, plays = len(samples), np.asarray(plays)
        wide = _widened(table, bucket(size, 16))
        advantages, extra, tied = jax.device_get(advise(wide))
        metrics = {name: float(x) for name, x in extra.items()}
        agent, where, tied = np.asarray(table.agent), wide.where[:size], tied[:size]
        mine = where & plays[agent]
        useful = mine & ~tied if recipe.skip_tied else mine
        for number in range(len(plays)):
            of = where & (agent == number)
            metrics[f"tied_share/{number}"] = float(np.sum(tied & of) / max(np.sum(of), 1))
        dilution = 1.0
        if recipe.tied_in_denominator and useful.any():
            full = lambda w: np.pad(w, (0, wide.where.size - size))  # noqa: E731
            longest = bucket(int(np.max(wide.tokens)))
            dilution = float(units(wide.tokens, full(mine), longest)) / float(units(wide.tokens, full(useful), longest))
        prompts = [f for f in ([i for i in f if useful[i]] for f in families(samples)) if f]
        steps = -(-len(prompts) // minibatch)

        def packed(chosen: list[int]) -> tuple[PackedRows, np.ndarray]:
            rows = pack([samples[i] for i in chosen], row_tokens, devices)
            worth = advantages[np.asarray(chosen)[np.maximum(rows.sample, 0)]]
            return rows, np.where(rows.sample >= 0, worth, 0).astype(np.float32)

        sums, gap, real, made = None, jnp.float32(0), 0, 0
        for epoch in range(epochs if prompts else 0):
            dice = np.random.default_rng((seed, epoch)).permutation(len(prompts))
            for number, part in enumerate(np.array_split(dice, steps)):  # even minibatches
                rows, worth = packed([i for f in sorted(part) for i in prompts[f]])
                real += np.count_nonzero(rows.segments)
                made += np.count_nonzero(rows.length[:, 0]) * rows.tokens.shape[1]
                policy, means, largest = step(policy, reference, rows, worth, jnp.float32(dilution), learning_rate)
                sums = means if sums is None else {name: sums[name] + x for name, x in means.items()}
                gap = largest if epoch == number == 0 else gap
        if sums is None:  # nothing to learn from: the same figures, all zero
            dummy = pack([TokenSample([0], [0], [0.0])], row_tokens, devices)
            shapes = jax.eval_shape(step, policy, reference, dummy, dummy.length.astype(np.float32), jnp.float32(1), learning_rate)[1]
            sums = {name: jnp.zeros(x.shape) for name, x in shapes.items()}
        sums, gap = jax.device_get((sums, gap))
        metrics |= {name: float(x) / max(steps * epochs, 1) for name, x in sums.items()} | {"log_prob_gap": float(gap)}
        everyone = sum(any(mine[i] for i in f) for f in families(samples))
        metrics |= {"updates": steps * epochs, "groups": everyone, "useful_groups": len(prompts), "packing": real / max(made, 1)}
        return policy, metrics

    return update


def _ordered(samples: Sequence[TokenSample], table: Samples) -> tuple[list[TokenSample], Samples]:
    """Samples in the order of their identity, then of their content; columns as NumPy, `where`, `tokens` and `prompt_ids` filled in."""
    columns = {f.name: getattr(table, f.name) for f in dataclasses.fields(Samples)}
    columns = {name: np.asarray(x) for name, x in columns.items() if x is not None}
    for name, x in columns.items():
        if x.shape[:1] != (len(samples),):
            raise ValueError(f"{len(samples)} token samples, but the table's column {name!r} has shape {x.shape}")
    key = lambda i: (  # noqa: E731
        *(int(columns[c][i]) for c in ("agent", "turn", "env", "trajectory")), samples[i].prompt.tobytes(), samples[i].response.tobytes(),
    )  # fmt: skip
    order = sorted(range(len(samples)), key=key)
    samples = [samples[i] for i in order]
    columns = {name: x[order] for name, x in columns.items()}
    columns.setdefault("where", np.ones(len(samples), bool))
    columns["tokens"] = np.asarray([s.response.size for s in samples], np.int32)
    columns["prompt_ids"] = np.zeros(len(samples), np.int32)
    for number, family in enumerate(families(samples)):
        columns["prompt_ids"][family] = number
    return samples, Samples(**columns)


def _widened(table: Samples, size: int) -> Samples:
    """The table with padding up to `size` samples, which do not count."""
    return jax.tree.map(lambda x: np.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)), table)
