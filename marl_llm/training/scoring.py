"""Forward passes over the samples of a step: log-probs, values and KL of packed rows, and tables `[S, R]` of them.

A number per response token has two layouts: `[B, Q]` beside packed rows, and `[S, R]` with a line per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from marl_llm.algorithms import Recipe, kl
from marl_llm.models import (
    TRAIN,
    Decoder,
    LoraConfig,
    ModelConfig,
    TokenScores,
    head_weight,
    is_stacked,
    packed_mask,
    score_hidden,
    score_packed,
)
from marl_llm.sampling.sequences import eighths
from marl_llm.training.mesh import data_axis, gathered, over_data, update_options
from marl_llm.training.packing import PackedRows, Tokens
from marl_llm.training.processes import fetch
from marl_llm.training.steps import cut, few_shapes, whole


def by_sample(rows: PackedRows, values: Float[Array, "B Q"]) -> Float[Array, "S Q"]:
    """Values per response token as a table with a line per sample, S = B N; what is past a response's end means nothing."""
    q = values.shape[1]
    index = jnp.minimum(rows.first[..., None] + jnp.arange(q), q - 1)  # B N Q
    return jnp.take_along_axis(values[:, None], index, axis=2).reshape(-1, q)


def by_row(rows: PackedRows, table: Float[np.ndarray, "S R"]) -> Float[np.ndarray, "B Q"]:
    """Values per response token of all samples, laid out as the rows' targets are; 0 where there is none. On the host."""
    out = np.zeros(rows.targets.shape, np.float32)
    for b, n in np.argwhere(rows.sample >= 0):
        start, length = rows.first[b, n], rows.length[b, n]
        out[b, start : start + length] = table[rows.sample[b, n], :length]
    return out


def per_sample(rows: PackedRows, values: Float[np.ndarray, "S"]) -> Float[np.ndarray, "B N"]:
    """One number per sample beside the rows that hold them; 0 where there is none. On the host."""
    return np.where(rows.sample >= 0, np.append(values, 0)[rows.sample], 0).astype(np.float32)


def response_where(rows: PackedRows) -> Bool[Array, "B Q"]:
    """Which of the rows' targets are response tokens; they come before the padding."""
    return jnp.arange(rows.targets.shape[1]) < jnp.sum(rows.length, axis=1, keepdims=True)


def beside_inputs(rows: PackedRows) -> dict:
    """What `score_packed` reads of rows beside their inputs."""
    return {"kept_ids": rows.kept_ids, "where": response_where(rows)}


def sample_where(rows: PackedRows) -> Bool[Array, "S Q"]:
    """Which places of `by_sample`'s table are response tokens."""
    return jnp.arange(rows.targets.shape[1]) < rows.length.reshape(-1, 1)


def reference_scores(recipe: Recipe, config: ModelConfig, reference: dict | None, rows: PackedRows) -> Float[Array, "B Q"] | None:
    """The reference's log-probs of the targets, where the recipe has a KL in its loss."""
    if not (recipe.kl_coef and recipe.kl_where == "loss"):
        return None
    return score_packed(config, reference, *rows.inputs, recipe.temperature, **beside_inputs(rows)).log_probs


def packed_values(
    config: ModelConfig, params: dict, rows: PackedRows, temperature: float | None = None
) -> tuple[Float[Array, "B Q"], TokenScores | None]:
    """V of each response token, the value of the state in which it was chosen; with a temperature also its `score_packed`.

    Both come from one forward pass. `config` has a value head.
    """
    model = Decoder(config, stacked=is_stacked(params))
    hidden, _ = model.apply({"params": params}, rows.tokens, rows.positions, packed_mask(rows.segments, rows.branches))
    hidden = jnp.take_along_axis(hidden, rows.predict[..., None], axis=1)
    values = model.apply({"params": params}, hidden, method="value")
    if temperature is None:
        return values, None
    return values, score_hidden(head_weight(config, params), hidden, rows.targets, temperature, **beside_inputs(rows))


def _microbatched(score: Callable, microbatch_tokens: int, axis: str | None) -> Callable:
    """`(params, rows) -> Float[Array, "B Q"]`, one micro-batch of the rows after the other; see `cut`."""

    def score_rows(params, rows: PackedRows):
        part, count, most = cut((rows,), microbatch_tokens, axis)
        if most == 1:
            return score(params, *part(0))
        shape = jax.eval_shape(part, 0)[0].targets.shape

        def fill(j, scores):
            return scores.at[j].set(score(params, *part(j)))

        scores = jax.lax.fori_loop(0, count, fill, jnp.zeros((most, *shape)))
        return scores.reshape(-1, shape[1])[: rows.tokens.shape[0]]

    return score_rows


def make_scorer(score: Callable, mesh: Mesh, *, row_tokens: int, minibatch: int, microbatch_tokens: int = 0) -> Callable:
    """Builds `score_all(params, tokens, chosen) -> table`: one number per response token, by forward passes alone.

    Args:
      score: `(params, rows) -> Float[Array, "B Q"]`, inside jit.
      row_tokens, minibatch, microbatch_tokens: as in `Update`, so that the rows have the shapes of the update's.
    `chosen` are the numbers of the samples to score; the table, NumPy of `table_shape(tokens)`, is 0 elsewhere.
    """
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1

    score_rows = _microbatched(score, microbatch_tokens, axis)

    def local(params, rows: PackedRows):
        return gathered(score_rows(params, rows), axis)

    run = jax.jit(over_data(local, mesh, TRAIN, in_specs=(P(), P("data")), out_specs=P()))

    def score_all(params, tokens: Tokens, chosen: Sequence[int] | np.ndarray):
        table = np.zeros(table_shape(tokens), np.float32)
        prompts = tokens.families(chosen)
        for start in range(0, len(prompts), minibatch):
            samples = [i for f in prompts[start : start + minibatch] for i in f]
            rows = tokens.pack(samples, row_tokens, devices, few_shapes(microbatch_tokens))
            values = fetch(run(params, rows), mesh)
            for b, n in np.argwhere(rows.sample >= 0):
                first, length = rows.first[b, n], rows.length[b, n]
                table[rows.sample[b, n], :length] = values[b, first : first + length]
        return table

    return score_all


def table_shape(tokens: Tokens) -> tuple[int, int]:
    """Of a table of response tokens: few shapes, whatever the samples, and at most an eighth more than they need along each axis."""
    return eighths(len(tokens), 64), eighths(int(max([1, *tokens.size])), 4)


def make_policy_scorer(
    recipe: Recipe, config: ModelConfig, mesh: Mesh, lora: LoraConfig | None = None, *, entropy: bool = False, **sizes: int
) -> Callable:
    """`make_scorer` of log-probs, or of entropies, at the recipe's temperature; its parameters are `(params, base)`, see `steps.whole`."""

    def score(weights, rows: PackedRows):
        scored = score_packed(config, whole(*weights, lora), *rows.inputs, recipe.temperature, **beside_inputs(rows))
        return scored.entropy if entropy else scored.log_probs

    return make_scorer(score, mesh, **sizes)


def make_row_scorer(
    recipe: Recipe, config: ModelConfig, mesh: Mesh, lora: LoraConfig | None, microbatch_tokens: int, head: ModelConfig | None = None
) -> Callable:
    """Builds `score((params, base), rows) -> Float[Array, "B Q"]`: the log-probs of the very rows that an update reads, laid out alike.

    A micro-batch at a time and over the same devices as the update, so that both round alike: with the parameters as they were, the ratio
    of a later step is 1. The result stays on the devices. `head`: the config of a policy with a value head, or None.
    """

    def log_probs(weights, rows: PackedRows):
        if head is not None:
            return packed_values(head, weights[0], rows, recipe.temperature)[1].log_probs
        return score_packed(config, whole(*weights, lora), *rows.inputs, recipe.temperature, **beside_inputs(rows)).log_probs

    score_rows = _microbatched(log_probs, microbatch_tokens, data_axis(mesh))
    mapped = over_data(score_rows, mesh, TRAIN, in_specs=(P(), P("data")), out_specs=P("data"))
    return jax.jit(mapped, compiler_options=update_options(config))


def make_token_kl(recipe: Recipe, config: ModelConfig, mesh: Mesh, **sizes: int) -> Callable:
    """Builds `token_kl(reference, tokens, chosen) -> table`, what `kl_where="reward"` charges for each response token.

    k_{s,r} = kl_kind(log π_{s,r}, log π_ref(response_{s,r} | ...)), with log π as the policy that sampled reported it

    (MAPPA Eq. 2; REINFORCE++ arXiv 2501.03262). Both sides are at the recipe's temperature. `reference` is whole parameters, or a base with
    adapters on it; `sizes` are those of `make_scorer`. The table is NumPy `[S, R]`, 0 past a response's end and for samples that are not
    `chosen`.
    Raises `ValueError` without a reference.
    """
    scorer = make_policy_scorer(recipe, config, mesh, **sizes)
    charge = jax.jit(lambda new, ref, where: kl(new, ref, kind=recipe.kl_kind, where=where))

    def token_kl(reference, tokens: Tokens, chosen: Sequence[int] | np.ndarray):
        if reference is None:
            raise ValueError(f"recipe {recipe.name!r} has kl_coef={recipe.kl_coef}: pass the reference's parameters")
        scored = scorer((reference, None), tokens, chosen)
        drawn, where = np.zeros_like(scored), np.zeros(scored.shape, bool)
        log_probs = np.asarray(tokens.log_probs)
        for i in chosen:
            start, size = int(tokens.response_at[i]), int(tokens.size[i])
            drawn[i, :size], where[i, :size] = log_probs[start : start + size], True
        return np.asarray(charge(drawn, scored, where))

    return token_kl
