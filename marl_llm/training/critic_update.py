"""PPO of one model from samples of uneven length that were made on the host: an actor, and a critic beside it or in it.

One sample is one call of the model: its reward lies on the last response token, where the episode is over (UnityMAS-O §5.4). Before any
step the critic values every response token, GAE over the tokens of a call gives advantages and targets, and the advantages are whitened
over the rows that this model trains on, and over no one else's. Then follow the minibatches of `marl_llm.training.packed_update`.
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
from jaxtyping import Array, Bool, Float

from marl_llm.algorithms import Recipe, Samples, advantages_for, count_for, value_loss_for, value_targets_for
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
from marl_llm.training.mesh import data_axis, over_data, summed
from marl_llm.training.packed_update import (
    by_row,
    by_sample,
    check_sizes,
    make_scorer,
    make_token_kl,
    ordered,
    over_minibatches,
    packed_loss,
    reference_scores,
    response_where,
    sample_where,
    token_shape,
    widened,
)
from marl_llm.training.packing import PackedRows, TokenSample, families, pack
from marl_llm.training.policy import Policy
from marl_llm.training.steps import Sums, check_base, cut, exact_step, row_growth, whole


def with_value_head(params: dict) -> dict:
    """Plain parameters with a fresh value head, which predicts 0: how a critic starts from the actor's base model."""
    width = params["embedding"].shape[1]
    return params | {"value_head": {"kernel": jnp.zeros((width,)), "bias": jnp.zeros(())}}


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
    scored = None if temperature is None else score_hidden(head_weight(config, params), hidden, rows.targets, temperature)
    return values, scored


def critic_loss(
    recipe: Recipe, values: Float[Array, "B Q"], old: Float[Array, "B Q"], targets: Float[Array, "B Q"], where: Bool[Array, "B Q"]
) -> tuple[Float[Array, ""], Sums]:
    """The clipped value loss of packed rows as sums over response tokens, without `recipe.value_coef`; the first has the gradient."""
    total, count, parts = value_loss_for(dataclasses.replace(recipe, value_coef=1.0), values, old, targets, where=where)
    parts |= {"value_loss": (total, count)}
    return total, jax.lax.stop_gradient(Sums(total, count, parts, jnp.float32(0)))


def explained_variance(values: Float[np.ndarray, "S R"], targets: Float[np.ndarray, "S R"], where: Bool[np.ndarray, "S R"]) -> float:
    """1 − Var(G − V) / Var(G) over response tokens: 1 for a perfect critic, 0 for a constant. 0 if the targets do not vary."""
    goal, error = targets[where].astype(np.float64), (targets - values)[where].astype(np.float64)
    spread = goal.var() if goal.size else 0.0
    return float(1 - error.var() / spread) if spread > 1e-12 else 0.0


def make_critic_update(
    recipe: Recipe,
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    critic: ModelConfig | None,
    critic_optimizer: optax.GradientTransformation | None = None,
    row_tokens: int,
    minibatch: int,
    epochs: int = 1,
    microbatch_tokens: int = 0,
    lora: LoraConfig | None = None,
):
    """Builds `update(policy, critic, reference, samples, table, plays, learning_rate, critic_learning_rate, seed, base=None)`.

    It returns `(policy, critic, metrics)`. Policy and critic are donated.

    Args:
      recipe: one with a critic, such as `make_recipe("ppo")`.
      critic: config of the critic's own network, with a value head: it is a `Policy` of its own, stepped with its own learning rate on the
        value loss itself (UnityMAS-O: a network of the same base model, 1e-5 against the actor's 1e-6; see `with_value_head`). None: the
        policy's own value head, `config.value_head`; one loss = policy loss + `recipe.value_coef` · value loss, and the arguments `critic`
        and `critic_learning_rate` and the returned critic are None.
      critic_optimizer: None takes `optimizer`.
      row_tokens, minibatch, epochs, microbatch_tokens: as in `make_packed_update`; the critic steps on the same minibatches.
      lora: the policy's parameters are adapters on the frozen `base`. The critic then needs a network of its own; it is trained whole.
    `samples`, `table`, `plays`, `reference` and `seed` are those of `make_packed_update`. Only rows of agents that `plays` marks are read:
    statistics are over these. `values`, `token_where` and, with `kl_in="reward"`, `token_kl` of the table are computed here.

    Metrics: those of `make_packed_update`, over the rows that are trained on; value_loss (clipped) and value_error (not), means over
    optimizer steps; values_mean and explained_variance before the first step; critic_grad_norm where the critic is a network of its own.
    Compilations, each per shape bucket: the actor's step, the critic's, the forward pass of the values, that of the KL in the reward.

    Raises:
      ValueError: a recipe without a critic, a config without a value head, adapters on a shared network, a critic, or a base, given
        where there is none or the reverse.
      PackingError: a sample that does not fit.
    """
    if recipe.normaliser != "critic":
        raise ValueError(f"recipe {recipe.name!r} has no critic: use make_packed_update")
    own, judging = critic is not None, critic or config  # from here on `critic` is a Policy
    if not judging.value_head:
        raise ValueError("the critic's network has no value head: set value_head of its ModelConfig")
    if lora is not None and not own:
        raise ValueError("the value head lies in the base, which adapters leave frozen: give the critic a network of its own (critic=)")
    if critic_optimizer is not None and not own:
        raise ValueError("critic_optimizer is for a critic with a network of its own (critic=)")
    check_sizes(row_tokens, minibatch, epochs, microbatch_tokens)
    sizes = dict(row_tokens=row_tokens, minibatch=minibatch, microbatch_tokens=microbatch_tokens)
    axis = data_axis(mesh)
    devices = mesh.shape["data"] if axis else 1
    critic_optimizer = critic_optimizer or optimizer

    def actor_step(policy: Policy, base, reference, rows: PackedRows, advantages, old, targets, learning_rate):
        part, count, most = cut((rows, advantages, old, targets), microbatch_tokens, axis)
        # the two losses may have denominators of their own, so that of the policy loss divides both
        units, tokens = count_for(recipe, where=sample_where(rows)), jnp.sum(rows.length, dtype=jnp.float32)
        units, tokens = summed((units, tokens), axis)
        weight = recipe.value_coef * units / jnp.maximum(tokens, 1)

        def loss(params, j):
            some, worth, old, targets = part(j)
            if own:
                scored = score_packed(config, whole(params, base, lora), *some[:6], recipe.temperature)
            else:
                values, scored = packed_values(config, params, some, recipe.temperature)
            total, sums = packed_loss(recipe, scored, reference_scores(recipe, config, reference, some), some, by_sample(some, worth))
            if not own:
                error, of_values = critic_loss(recipe, values, old, targets, response_where(some))
                total = total + weight * error
                sums = sums._replace(total=jax.lax.stop_gradient(total), parts=sums.parts | of_values.parts)
            return total, sums

        return exact_step(policy, loss, count, most, learning_rate, optimizer, axis)

    def critic_step(policy: Policy, rows: PackedRows, old, targets, learning_rate):
        part, count, most = cut((rows, old, targets), microbatch_tokens, axis)

        def loss(params, j):
            some, old, targets = part(j)
            return critic_loss(recipe, packed_values(judging, params, some)[0], old, targets, response_where(some))

        return exact_step(policy, loss, count, most, learning_rate, critic_optimizer, axis)

    def program(f, specs):
        return jax.jit(over_data(f, mesh, TRAIN, in_specs=specs, out_specs=(P(), P(), P())), donate_argnums=(0,))

    by_data = P("data")
    act = program(actor_step, (P(), P(), P(), by_data, by_data, by_data, by_data, P()))
    judge = program(critic_step, (P(), by_data, by_data, by_data, P()))
    value_all = make_scorer(lambda params, rows: packed_values(judging, params, rows)[0], mesh, **sizes)
    token_kl = make_token_kl(recipe, config, mesh, **sizes)
    advise = jax.jit(lambda table: (*advantages_for(recipe, table)[:2], value_targets_for(recipe, table)))

    def update(
        policy: Policy,
        critic: Policy | None,
        reference,
        samples: Sequence[TokenSample],
        table: Samples,
        plays,
        learning_rate,
        critic_learning_rate,
        seed: int,
        base: dict | None = None,
    ):
        check_base(base, lora)
        if (critic is not None) != own:
            raise ValueError("a critic's Policy is given exactly where it has a network of its own (critic=)")
        samples, table = ordered(samples, table)
        plays = np.asarray(plays)
        mine = np.flatnonzero(table.where & plays[table.agent])
        samples, table = [samples[i] for i in mine], jax.tree.map(lambda x: x[mine], table)
        shape = token_shape(samples)
        where = np.arange(shape[1]) < np.pad(table.tokens, (0, shape[0] - len(samples)))[:, None]
        values = value_all((critic if own else policy).params, samples, range(len(samples)), shape)
        table = dataclasses.replace(table, values=None, token_where=None, token_kl=None)
        charge = np.zeros(shape, np.float32)
        if recipe.kl_coef and recipe.kl_in == "reward":
            charge[: len(samples)] = token_kl(reference, samples)
        table = dataclasses.replace(widened(table, shape[0]), values=values, token_where=where, token_kl=charge)
        advantages, extra, targets = jax.device_get(advise(table))
        metrics = {name: float(x) for name, x in extra.items()} | {f"tied_share/{number}": 0.0 for number in range(len(plays))}
        metrics["values_mean"] = float(np.sum(values) / max(np.sum(where), 1))
        metrics["explained_variance"] = explained_variance(values, targets, where)
        if recipe.kl_coef and recipe.kl_in == "reward":
            metrics["kl"] = float(np.sum(charge) / max(np.sum(where), 1))

        def packed(chosen: list[int]):
            rows = pack([samples[i] for i in chosen], row_tokens, devices, row_growth(microbatch_tokens))
            return rows, *(by_row(rows, x[np.asarray(chosen, int)]) for x in (advantages, values, targets))

        def take(state, rows, worth, old, targets):
            policy, critic = state
            policy, means, gap = act(policy, base, reference, rows, worth, old, targets, learning_rate)
            if own:
                critic, more, _ = judge(critic, rows, old, targets, critic_learning_rate)
                means |= {"critic_grad_norm": more["grad_norm"]} | {name: more[name] for name in ("value_loss", "value_error")}
            return (policy, critic), means, gap

        prompts = families(samples)
        (policy, critic), figures = over_minibatches(take, (policy, critic), packed, prompts, minibatch, epochs, seed)
        return policy, critic, metrics | figures | {"groups": len(prompts)}

    return update
