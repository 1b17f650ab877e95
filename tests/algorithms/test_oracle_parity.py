"""Figures of two popular trainers, in float64 with gradients, reproduced by composing this package's functions.

tests/data/algorithms_trl.npz was computed with TRL 1.16.0, tests/data/algorithms_verl.npz with verl 0.9.1. Where a trainer has
a convention of its own (an epsilon, a group of one, empty rows that count) the test passes it by argument: that is the
documentation of the difference.
"""

import functools
import pathlib
import re
import types

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

DATA = pathlib.Path(__file__).parents[1] / "data"
DTYPES = (pytest.param(np.float64, 1e-10, id="f64"), pytest.param(np.float32, 1e-5, id="f32"))


@functools.cache
def figures(name):
    with np.load(DATA / f"algorithms_{name}.npz") as data:
        return {key: data[key] for key in data.files}


def column(data, key, dtype):
    return jnp.asarray(data[key].astype(dtype)) if data[key].dtype == np.float64 else jnp.asarray(data[key])


TRL_REDUCTIONS = dict(
    grpo=dict(how="sequence_mean_token_mean", empty_rows=True),
    bnpo=dict(how="token_mean"),
    dapo=dict(how="token_mean"),
    dr_grpo=dict(how="constant", max_length=16, empty_rows=True),
    luspo=dict(how="sequence_mean_token_sum", empty_rows=True),
)
PLAIN = re.compile(r"([a-z_]+)_([\d.]+)_([\d.]+)_b([\d.]+)_(token|sequence)")
TRL_KEYS = sorted(
    key
    for key in figures("trl")
    if PLAIN.fullmatch(key) or re.fullmatch(rf"({'|'.join(TRL_REDUCTIONS)})_(onpolicy|delta1.5|toolmask|advtoken)", key)
)


def test_every_figure_is_in_the_net():
    assert len(TRL_KEYS) == 5 * (2 * 2 * 2 + 4)


def trl_loss(key, dtype):
    """Return (loss function of the new log-probs, new log-probs) for one TRL configuration."""
    data = figures("trl")
    name, low, high, beta, level, dual = key.rsplit("_", 1)[0], 0.2, 0.2, 0.0, "token", None
    old, advantages = column(data, "old", dtype), column(data, "adv", dtype)
    where = jnp.asarray(data["mask"] > 0)
    counted = where
    if match := PLAIN.fullmatch(key):
        name, level = match[1], match[5]
        low, high, beta = float(match[2]), float(match[3]), float(match[4])
    elif key.endswith("onpolicy"):
        old = column(data, "new", dtype)
    elif key.endswith("delta1.5"):
        dual = 1.5
    elif key.endswith("advtoken"):
        advantages = column(data, "adv_token", dtype)
    else:
        where = where & jnp.asarray(data["tool_mask"] > 0)
        counted = counted if name == "dapo" else where

    def loss(new):
        x = rl.clipped_ratio(new, old, advantages, clip_low=low, clip_high=high, level=level, dual_clip=dual, where=where)
        total, count = rl.reduce_parts(x, where=where, **TRL_REDUCTIONS[name])
        if beta:
            penalty = rl.kl(new, column(data, "ref", dtype), kind="k3", where=where)
            total += beta * rl.reduce_parts(penalty, where=where, **TRL_REDUCTIONS[name])[0]
        return total / (count if counted is where else rl.reduce_parts(x, where=counted, **TRL_REDUCTIONS[name])[1])

    return loss, column(data, "new", dtype)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("key", TRL_KEYS)
def test_trl_losses_and_gradients(key, dtype, rtol):
    with jax.enable_x64(dtype == np.float64):
        loss, new = trl_loss(key, dtype)
        value, grad = jax.value_and_grad(loss)(new)
        assert value.dtype == dtype
        oracle.close(value, figures("trl")[key], rtol)
        oracle.close(grad, figures("trl")[f"{key}/grad"], rtol)


ROWS = dict(how="sequence_mean_token_mean", empty_rows=True)
TRL_OTHERS = {
    "gspo_3e-4_4e-4_grpo": lambda x, d: rl.reduce(
        rl.clipped_ratio(x, d.old, d.adv, clip_low=3e-4, clip_high=4e-4, level="sequence", where=d.where), where=d.where, **ROWS
    ),
    "cispo_hi5": lambda x, d: rl.reduce(rl.cispo(x, d.old, d.adv, clip_low=1.0, clip_high=4.0, where=d.where), where=d.where),
    "cispo_hi1.2": lambda x, d: rl.reduce(rl.cispo(x, d.old, d.adv, clip_low=1.0, clip_high=0.2, where=d.where), where=d.where),
    "sapo": lambda x, d: rl.reduce(rl.sapo(x, d.old, d.adv, where=d.where), where=d.where, **ROWS),
    "vespo": lambda x, d: rl.reduce(rl.vespo(x, d.old, d.adv, where=d.where), where=d.where),
    "grpo_biaskl": lambda x, d: rl.reduce(
        rl.clipped_ratio(x, d.old, d.adv, where=d.where)
        + 0.04 * rl.importance_ratio(x, d.old, level="token", where=d.where) * rl.kl(x, d.ref, kind="k3", where=d.where),
        where=d.where, **ROWS,
    ),
    "grpo_topentropy0.2": lambda x, d: rl.reduce(
        rl.high_entropy(d.entropies, 0.2, where=d.where) * rl.clipped_ratio(x, d.old, d.adv, where=d.where), where=d.where, **ROWS
    ),
    "grpo_opsm0.1": lambda x, d: rl.reduce(
        rl.on_policy_rows(x, d.old, d.adv, max_kl=0.1, where=d.where) * rl.clipped_ratio(x, d.old, d.adv, where=d.where),
        where=d.where, **ROWS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("key", TRL_OTHERS)
def test_other_trl_losses_and_gradients(key, dtype, rtol):
    data = figures("trl")
    with jax.enable_x64(dtype == np.float64):
        d = types.SimpleNamespace(where=jnp.asarray(data["mask"] > 0),
                                  **{name: column(data, name, dtype) for name in ("old", "ref", "adv", "entropies")})  # fmt: skip
        value, grad = jax.value_and_grad(TRL_OTHERS[key])(column(data, "new", dtype), d)
        assert value.dtype == dtype
        oracle.close(value, data[key], rtol)
        oracle.close(grad, data[f"{key}/grad"], rtol)


@pytest.mark.parametrize(("loss", "key", "reduction"), [
    ("sapo", "sapo", "sequence_mean_token_mean"), ("vespo", "vespo", "token_mean"),
])  # fmt: skip
def test_trl_losses_as_recipes(loss, key, reduction):
    # Row 7 of the figures is empty and counts in TRL's row means; here it does not.
    data = figures("trl")
    with jax.enable_x64(True):
        recipe = rl.make_recipe("grpo", loss=loss, loss_aggregation=reduction)
        total, count, _ = rl.loss_for(recipe, data["new"], data["old"], data["adv"], where=data["mask"] > 0)
        oracle.close(total / count * (7 / 8 if reduction.startswith("sequence") else 1), data[key], 1e-10)


def test_trl_logged_metrics():
    data = figures("trl")
    key = "grpo_0.2_0.28_b0.04_token"
    where = jnp.asarray(data["mask"] > 0)
    with jax.enable_x64(True):
        new, old = jnp.asarray(data["new"]), jnp.asarray(data["old"])
        recipe = rl.make_recipe("grpo", clip_high=0.28, kl_coef=0.04, kl_kind="k3")
        advantages = jnp.asarray(data["adv"])
        _, _, metrics = rl.loss_for(recipe, new, old, advantages, where=where, reference_log_probs=jnp.asarray(data["ref"]))
        mean = {name: float(total / count) for name, (total, count) in metrics.items()}
        oracle.close(mean["kl"], data[f"{key}/kl"], 1e-10)
        oracle.close(mean["clip_low"], data[f"{key}/clip_low_mean"], 1e-10)
        oracle.close(mean["clip_high"], data[f"{key}/clip_high_mean"], 1e-10)
        oracle.close(mean["clip_low"] + mean["clip_high"], data[f"{key}/clip_region_mean"], 1e-10)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("case", ["one", "two", "nan", "binary"])
def test_trl_advantages(case, dtype, rtol):
    data = figures("trl")
    parts = data[f"adv/{case}/rewards_per_func"] * data[f"adv/{case}/weights"]
    where = jnp.asarray(~np.isnan(parts).all(axis=1))
    with jax.enable_x64(dtype == np.float64):
        rewards = jnp.asarray(np.where(np.isnan(parts).all(axis=1), np.nan, np.nansum(parts, axis=1)).astype(dtype))
        for size in (4, 2, 1):
            ids = jnp.arange(12) // size
            for theirs, ours in (("group", "std"), ("batch", "batch"), ("none", "none")):
                actual = rl.group_relative(rewards, ids, where=where, scale=ours, ddof=1, epsilon=1e-4)
                oracle.close(actual, data[f"adv/{case}/n{size}_{theirs}"], rtol)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("case", ["two", "nan", "binary"])
def test_trl_normalize_then_sum(case, dtype, rtol):
    data = figures("trl")
    rewards = data[f"adv/{case}/rewards_per_func"]
    with jax.enable_x64(dtype == np.float64):
        weights = data[f"adv/{case}/weights"]
        actual = rl.decoupled(jnp.asarray(rewards.astype(dtype)), jnp.arange(12) // 4, weights, where=~np.isnan(rewards))
        assert actual.dtype == dtype
        oracle.close(actual, data[f"adv/{case}/n4_normalize_then_sum"], rtol)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
def test_verl_outcome_advantages(dtype, rtol):
    data = {key[4:]: value for key, value in figures("verl").items() if key.startswith("adv/")}
    where = jnp.asarray(data["mask"] > 0)
    with jax.enable_x64(dtype == np.float64):
        scores = column(data, "scores", dtype)
        ids = rl.group_ids(rl.group_keys(prompt=jnp.asarray(data["index"].astype(np.int32))))
        lengths = jnp.sum(where, axis=1)

        def per_token(x):
            return jnp.where(where, x[:, None], 0)

        centred = rl.group_relative(scores, ids, scale="none", singleton="raw")
        cases = {
            "grpo_norm1": per_token(rl.group_relative(scores, ids, ddof=1, epsilon=1e-6, singleton="raw")),
            "grpo_norm0": per_token(centred),
            "opo": per_token(rl.group_relative(scores, ids, scale="none", weights=lengths, singleton="raw")),
            "rfpp_baseline": rl.whiten(per_token(centred), where=where, ddof=1, count_epsilon=1e-8),
        }
        for key, actual in cases.items():
            oracle.close(actual, data[key], rtol)
        # Computed in float32 inside verl, whatever the input: 1e-7 is all that these figures hold.
        oracle.close(per_token(centred), data["grpo_vec_norm0"], max(rtol, 1e-7))
        oracle.close(per_token(rl.leave_one_out(scores, ids, singleton="raw")), data["rloo"], max(rtol, 1e-7))
        oracle.close(per_token(rl.leave_one_out(scores, ids)), data["rloo_vec"], max(rtol, 1e-7))


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("suffix", ["", "_hole"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_verl_reinforce_plus_plus_and_remax(gamma, suffix, dtype, rtol):
    data = {key[4:]: value for key, value in figures("verl").items() if key.startswith("adv/")}
    where = jnp.asarray(data[f"mask{suffix}"] > 0)
    with jax.enable_x64(dtype == np.float64):
        to_go = rl.token_rewards_to_go(column(data, "token_level_rewards_dense", dtype), gamma=gamma, where=where)
        oracle.close(to_go, np.where(where, data[f"rfpp_ret_g{gamma}{suffix}"], 0), rtol)
        advantages = rl.whiten(to_go, where=where, ddof=1, count_epsilon=1e-8)
        oracle.close(advantages, data[f"rfpp_adv_g{gamma}{suffix}"], rtol)
        if gamma == 1.0 and not suffix:
            baseline = column(data, "remax_baselines", dtype)[:, None]
            oracle.close(jnp.where(where, to_go - baseline, 0), data["remax_adv"], rtol)


@pytest.mark.parametrize(("dtype", "rtol"), DTYPES)
@pytest.mark.parametrize("suffix", ["", "_hole"])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.0)])
def test_verl_gae(gamma, lam, suffix, dtype, rtol):
    data = {key[4:]: value for key, value in figures("verl").items() if key.startswith("gae/")}
    where = jnp.asarray(data[f"mask{suffix}"] > 0)
    key = f"g{gamma}_l{lam}{suffix}"

    def inside(x):
        return np.where(where, x, 0)

    with jax.enable_x64(dtype == np.float64):
        rewards, values = column(data, "token_level_rewards", dtype), column(data, "values", dtype)
        advantages, targets = rl.gae(rewards, values, gamma=gamma, gae_lambda=lam, where=where)
        oracle.close(advantages, inside(data[f"rawadv_{key}"]), rtol)
        oracle.close(targets, inside(data[f"ret_{key}"]), rtol)
        whitened = rl.whiten(advantages, where=where, ddof=1, count_epsilon=1e-8)
        oracle.close(whitened, inside(data[f"adv_{key}"]), rtol)
