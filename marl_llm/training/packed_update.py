"""The update of one model from samples of uneven length that were made on the host: agents with tools, chats, checkpoints.

The same step as that of device games (`marl_llm.training.update`): advantages over all samples, minibatches with exact denominators, the
recipe's loss. Only the rows differ: here they are packed on the host (`marl_llm.training.packing`), a minibatch at a time. Recipes with
a critic have an update of their own, `marl_llm.training.critic_update`, which is built from the same parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from marl_llm.algorithms import Recipe, Samples, advantages_for, count_for, kl
from marl_llm.models import TRAIN, LoraConfig, ModelConfig, TokenScores, score_packed
from marl_llm.sampling.lane import bucket
from marl_llm.training.mesh import data_axis, gathered, over_data
from marl_llm.training.packing import PackedRows, TokenSample, families, pack
from marl_llm.training.policy import Policy
from marl_llm.training.steps import Sums, check_base, cut, exact_step, microbatch_size, policy_loss, row_growth, whole


def by_sample(rows: PackedRows, values: Float[Array, "B Q"]) -> Float[Array, "S Q"]:
    """Values per response token as a table with a line per sample, S = B N; what is past a response's end means nothing."""
    q = values.shape[1]
    index = jnp.minimum(rows.first[..., None] + jnp.arange(q), q - 1)  # B N Q
    return jnp.take_along_axis(values[:, None], index, axis=2).reshape(-1, q)


def by_row(rows: PackedRows, table: Float[np.ndarray, "S R"]) -> Float[np.ndarray, "B Q"]:
    """Values per response token of the samples that were packed, laid out as the rows' targets are; 0 where there is none. On the host."""
    out = np.zeros(rows.targets.shape, np.float32)
    for b, n in np.argwhere(rows.sample >= 0):
        start, length = rows.first[b, n], rows.length[b, n]
        out[b, start : start + length] = table[rows.sample[b, n], :length]
    return out


def response_where(rows: PackedRows) -> Bool[Array, "B Q"]:
    """Which of the rows' targets are response tokens; they come before the padding."""
    return jnp.arange(rows.targets.shape[1]) < jnp.sum(rows.length, axis=1, keepdims=True)


def sample_where(rows: PackedRows) -> Bool[Array, "S Q"]:
    """Which places of `by_sample`'s table are response tokens."""
    return jnp.arange(rows.targets.shape[1]) < rows.length.reshape(-1, 1)


def packed_loss(
    recipe: Recipe,
    scored: TokenScores,
    reference: Float[Array, "B Q"] | None,
    rows: PackedRows,
    advantages: Float[Array, "S"] | Float[Array, "S Q"],
) -> tuple[Float[Array, ""], Sums]:
    """The recipe's loss of packed rows as sums, see `policy_loss`. `scored` holds one number per target `[B, Q]`, S = B N."""
    tables = (by_sample(rows, x) for x in (scored.log_probs, scored.entropy, rows.log_probs))
    ref = None if reference is None else jax.lax.stop_gradient(by_sample(rows, reference))
    return policy_loss(recipe, *tables, advantages, sample_where(rows), ref)


def reference_scores(recipe: Recipe, config: ModelConfig, reference: dict | None, rows: PackedRows) -> Float[Array, "B Q"] | None:
    """The reference's log-probs of the targets, where the recipe has a KL in its loss."""
    if not (recipe.kl_coef and recipe.kl_in == "loss"):
        return None
    return score_packed(config, reference, *rows[:6], recipe.temperature).log_probs


def make_scorer(score: Callable, mesh: Mesh, *, row_tokens: int, minibatch: int, microbatch_tokens: int = 0) -> Callable:
    """Builds `score_all(params, samples, chosen, shape) -> table`: one number per response token, by forward passes alone.

    Args:
      score: `(params, rows) -> Float[Array, "B Q"]`, inside jit.
      row_tokens, minibatch, microbatch_tokens: as in `make_packed_update`, so that the rows have the shapes of the update's.
    `chosen` are the indices of the samples to score; the table, NumPy of the given shape `[S, R]`, is 0 elsewhere.
    """
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1

    def local(params, rows: PackedRows):
        part, count, most = cut((rows,), microbatch_tokens, axis)
        if most == 1:
            return gathered(score(params, *part(0)), axis)
        of = jax.eval_shape(part, 0)[0].targets.shape
        fill = lambda j, out: out.at[j].set(score(params, *part(j)))  # noqa: E731
        out = jax.lax.fori_loop(0, count, fill, jnp.zeros((most, *of)))
        return gathered(out.reshape(-1, of[1])[: rows.tokens.shape[0]], axis)

    run = jax.jit(over_data(local, mesh, TRAIN, in_specs=(P(), P("data")), out_specs=P()))

    def score_all(params, samples: Sequence[TokenSample], chosen: Sequence[int], shape: tuple[int, int]):
        table = np.zeros(shape, np.float32)
        prompts = families([samples[i] for i in chosen])
        for start in range(0, len(prompts), minibatch):
            some = [chosen[i] for f in prompts[start : start + minibatch] for i in f]
            rows = pack([samples[i] for i in some], row_tokens, devices, row_growth(microbatch_tokens))
            values = jax.device_get(run(params, rows))
            for b, n in np.argwhere(rows.sample >= 0):
                first, length = rows.first[b, n], rows.length[b, n]
                table[some[rows.sample[b, n]], :length] = values[b, first : first + length]
        return table

    return score_all


def make_token_kl(recipe: Recipe, config: ModelConfig, mesh: Mesh, *, row_tokens: int, minibatch: int, microbatch_tokens: int = 0):
    """Builds `token_kl(reference, samples, chosen=None) -> table`, what `kl_in="reward"` charges for each response token.

    k_{s,r} = kl_kind(log π_{s,r}, log π_ref(response_{s,r} | ...)), with log π as the policy that sampled reported it

    (MAPPA Eq. 2; REINFORCE++ arXiv 2501.03262). Both sides are at the recipe's temperature; under top-k or top-p the sampler's
    log-probs are those of the cut distribution. `reference` is plain full parameters. The table is NumPy `[S, R]`, R a power of two that
    holds the longest response, 0 past a response's end and for samples that are not `chosen` (default: all).
    """
    score = lambda params, rows: score_packed(config, params, *rows[:6], recipe.temperature).log_probs  # noqa: E731
    scorer = make_scorer(score, mesh, row_tokens=row_tokens, minibatch=minibatch, microbatch_tokens=microbatch_tokens)
    charge = jax.jit(lambda new, ref, where: kl(new, ref, kind=recipe.kl_kind, where=where))

    def token_kl(reference, samples: Sequence[TokenSample], chosen: Sequence[int] | None = None):
        if reference is None:
            raise ValueError(f"recipe {recipe.name!r} has kl_coef={recipe.kl_coef}: pass the reference's parameters")
        chosen = range(len(samples)) if chosen is None else chosen
        shape = token_shape(samples)
        drawn, where = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for i in chosen:
            drawn[i, : samples[i].response.size], where[i, : samples[i].response.size] = samples[i].log_probs, True
        table = charge(drawn, scorer(reference, samples, chosen, shape), where)
        return np.asarray(table)[: len(samples)]

    return token_kl


def token_shape(samples: Sequence[TokenSample]) -> tuple[int, int]:
    """Of a table of response tokens: few shapes, whatever the samples."""
    return bucket(len(samples), 16), bucket(max([1, *(s.response.size for s in samples)]))


def over_minibatches(step: Callable, state, packed: Callable, prompts: list[list[int]], minibatch: int, epochs: int, seed: int):
    """Steps on every minibatch of every epoch: `(state, metrics)`.

    Args:
      step: `(state, rows, *arrays) -> (state, means, gap)`. packed: sample indices, perhaps none, to `(rows, *arrays)`.
      prompts: the samples of each prompt. minibatch: prompts per step, cut evenly. seed: with the epoch's number, of their order.
    Metrics are means over the steps, `log_prob_gap` that of the first one. Without prompts they are all there, and zero.
    """
    steps = -(-len(prompts) // minibatch)
    sums, gap, real, made = None, jnp.float32(0), 0, 0
    for epoch in range(epochs if prompts else 0):
        dice = np.random.default_rng((seed, epoch)).permutation(len(prompts))
        for number, part in enumerate(np.array_split(dice, steps)):  # even minibatches
            arrays = packed([i for f in sorted(part) for i in prompts[f]])
            rows = arrays[0]
            real += np.count_nonzero(rows.segments)
            made += np.count_nonzero(rows.length[:, 0]) * rows.tokens.shape[1]
            state, means, largest = step(state, *arrays)
            sums = means if sums is None else {name: sums[name] + x for name, x in means.items()}
            gap = largest if epoch == number == 0 else gap
    if sums is None:  # nothing to learn from: the same figures, all zero
        sums = {name: jnp.zeros(x.shape) for name, x in jax.eval_shape(step, state, *packed([]))[1].items()}
    sums, gap = jax.device_get((sums, gap))
    metrics = {name: float(x) / max(steps * epochs, 1) for name, x in sums.items()} | {"log_prob_gap": float(gap)}
    return state, metrics | {"updates": steps * epochs, "useful_groups": len(prompts), "packing": real / max(made, 1)}


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
    lora: LoraConfig | None = None,
):
    """Builds `update(policy, reference, samples, table, plays, learning_rate, seed, base=None) -> (policy, metrics)`.

    Args:
      recipe: how samples become advantages and a loss. row_tokens: budget of a packed row; no sample may be longer.
      minibatch: prompts per optimizer step, over all devices. epochs: passes over the samples.
      microbatch_tokens: as in `make_update`; a row is never cut.
      lora: the policy's parameters are adapters on the frozen parameters `base`, which get no gradient (see `marl_llm.models.lora`).
    `samples` are the S token samples of all agents and `table` their identities and rewards, NumPy or JAX arrays `[S]` in the same order;
    its `tokens` and `prompt_ids` are filled in here. `plays [N]`, `reference` and the metrics are those of `make_update`, and
    `packing` is the share of the rows' tokens that are not padding. `seed`, an int, orders the prompts. The policy is donated.
    `reference` is always plain full parameters, with `lora` as a rule `base` itself.
    With `kl_in="reward"` the reference charges every sample that counts, other models' too, before the first step; if `table.kl` is given
    (a team whose models have references of their own, see `make_token_kl`), that is charged. `kl` is then its mean per trained token.
    One compilation per shape bucket. Raises `ValueError` for a recipe with a critic, or for a base without `lora` or the reverse,
    `PackingError` for a sample that does not fit.
    """
    if recipe.normaliser == "critic":
        raise ValueError(f"recipe {recipe.name!r} needs a critic: use make_critic_update")
    check_sizes(row_tokens, minibatch, epochs, microbatch_tokens)
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1

    def local(policy: Policy, base, reference, rows: PackedRows, advantages, dilution, learning_rate):
        part, count, most = cut((rows, advantages), microbatch_tokens, axis)

        def loss(params, j):
            some, worth = part(j)
            scored = score_packed(config, whole(params, base, lora), *some[:6], recipe.temperature)
            return packed_loss(recipe, scored, reference_scores(recipe, config, reference, some), some, worth.reshape(-1))

        return exact_step(policy, loss, count, most, learning_rate, optimizer, axis, dilution)

    specs = (P(), P(), P(), P("data"), P("data"), P(), P())
    step = jax.jit(over_data(local, mesh, TRAIN, in_specs=specs, out_specs=(P(), P(), P())), donate_argnums=(0,))
    advise = jax.jit(lambda table: advantages_for(recipe, table))
    units = jax.jit(
        lambda length, where, r: count_for(recipe, where=jnp.arange(r) < jnp.where(where, length, 0)[:, None]), static_argnums=2
    )
    charged = recipe.kl_coef and recipe.kl_in == "reward"
    token_kl = make_token_kl(recipe, config, mesh, row_tokens=row_tokens, minibatch=minibatch, microbatch_tokens=microbatch_tokens)

    def update(
        policy: Policy, reference, samples: Sequence[TokenSample], table: Samples, plays, learning_rate, seed: int, base: dict | None = None
    ):
        check_base(base, lora)
        samples, table = ordered(samples, table)
        if charged and table.kl is None:
            table = dataclasses.replace(table, kl=np.sum(token_kl(reference, samples, np.flatnonzero(table.where).tolist()), axis=1))
        size, plays = len(samples), np.asarray(plays)
        wide = widened(table, bucket(size, 16))
        advantages, extra, tied = jax.device_get(advise(wide))
        metrics = {name: float(x) for name, x in extra.items()}
        agent, where, tied = np.asarray(table.agent), wide.where[:size], tied[:size]
        mine = where & plays[agent]
        useful = mine & ~tied if recipe.skip_tied else mine
        for number in range(len(plays)):
            of = where & (agent == number)
            metrics[f"tied_share/{number}"] = float(np.sum(tied & of) / max(np.sum(of), 1))
        if charged:
            metrics["kl"] = float(np.sum(table.kl[mine]) / max(np.sum(table.tokens[mine]), 1))
        dilution = 1.0
        if recipe.tied_in_denominator and useful.any():
            full = lambda w: np.pad(w, (0, wide.where.size - size))  # noqa: E731
            longest = bucket(int(np.max(wide.tokens)))
            dilution = float(units(wide.tokens, full(mine), longest)) / float(units(wide.tokens, full(useful), longest))

        def packed(chosen: list[int]) -> tuple[PackedRows, np.ndarray]:
            rows = pack([samples[i] for i in chosen], row_tokens, devices, row_growth(microbatch_tokens))
            worth, held = np.zeros(rows.sample.shape, np.float32), rows.sample >= 0
            worth[held] = advantages[np.asarray(chosen, int)[rows.sample[held]]]
            return rows, worth

        take = lambda policy, rows, worth: step(policy, base, reference, rows, worth, jnp.float32(dilution), learning_rate)  # noqa: E731
        prompts = [f for f in ([i for i in f if useful[i]] for f in families(samples)) if f]
        policy, figures = over_minibatches(take, policy, packed, prompts, minibatch, epochs, seed)
        everyone = sum(any(mine[i] for i in f) for f in families(samples))
        return policy, metrics | figures | {"groups": everyone}

    return update


def check_sizes(row_tokens: int, minibatch: int, epochs: int, microbatch_tokens: int) -> None:
    """Raises `ValueError` naming a size that no update can have."""
    for name, value in (("row_tokens", row_tokens), ("minibatch", minibatch), ("epochs", epochs)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    microbatch_size(microbatch_tokens, 1, 1)


def ordered(samples: Sequence[TokenSample], table: Samples) -> tuple[list[TokenSample], Samples]:
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


def widened(table: Samples, size: int) -> Samples:
    """The table with padding up to `size` samples, which do not count."""
    return jax.tree.map(lambda x: np.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1)), table)
