"""The update of one model from the samples of a step, whoever played them: policy, critic, KL, adapters, any mesh.

Advantages come from the whole team's table, once per step (`compute_advantages`). Minibatches of prompts follow: each is packed into rows
(`marl_llm.training.packing`), every device takes its share, a micro-batch at a time, and sums and counts are added over micro-batches and
devices before the division, so that loss and gradient depend on neither (law 5).

A recipe with a critic first values every response token; GAE over the tokens of a call gives advantages and targets, and advantages are
whitened over the rows that this model trains on (UnityMAS-O §5.4: a call's reward lies on its last token, where the episode is over).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from marl_llm.algorithms import Recipe, Samples, advantages_for, count_for, entropy_threshold, needs, value_targets_for
from marl_llm.models import LoraConfig, ModelConfig, TokenScores, score_packed
from marl_llm.sampling.sequences import bucket
from marl_llm.training.batch import by_identity, columns_of, rows_of
from marl_llm.training.critic import critic_loss, explained_variance, read_by_critic, value_step
from marl_llm.training.distillation import Frozen, Teaching, add_distillation, agents_beside, score_taught
from marl_llm.training.mesh import compiled_step, data_axis, summed
from marl_llm.training.minibatches import minibatches_of, over_minibatches, prompts_of
from marl_llm.training.outside_teachers import TaughtTokens
from marl_llm.training.packing import PackedRows, Tokens, TokenSample
from marl_llm.training.scoring import (
    beside_inputs,
    by_row,
    by_sample,
    make_policy_scorer,
    make_row_scorer,
    make_scorer,
    make_token_kl,
    packed_values,
    per_sample,
    reference_scores,
    response_where,
    sample_where,
    table_shape,
)
from marl_llm.training.steps import Sums, check_base, cut, exact_step, few_shapes, microbatch_size, policy_loss, whole
from marl_llm.training.train_state import TrainState


class Trained(NamedTuple):
    """What an update changes: a policy, and its critic where that is a network of its own."""

    policy: TrainState
    critic: TrainState | None = None


class Advantages(NamedTuple):
    """What a step's table says of each sample, in the table's order."""

    estimates: Any  # [S], or [S, R] with a critic
    zero_variance: Any  # [S] bool: its group has equal returns
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class LearnerOptions:
    """How a model is updated; the same for all of a team.

    Attributes:
      recipe: see `marl_llm.algorithms`. optimizer: of policies and critics, any of optax's, see `apply_gradient` for its rate.
      row_tokens: budget of a packed row; no sample may be longer.
      minibatch: prompts per optimizer step, over all devices. epochs: passes over a step's samples.
      microbatch_tokens: tokens of packed rows whose activations live at a time on a device; a row is never cut. 0: all at once.
      critic: where the recipe has one: "own", a network of the policy's shape, "head", a value head on the policy itself, or
        "centralised", an own network that also reads what all roles have read and said before, see `training.centralised`.

    Raises `ValueError` naming a size that no update can have, or an unknown kind of critic.
    """

    recipe: Recipe
    optimizer: optax.GradientTransformation
    row_tokens: int
    minibatch: int
    epochs: int = 1
    microbatch_tokens: int = 0
    critic: str = "own"

    def __post_init__(self):
        for name in ("row_tokens", "minibatch", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        microbatch_size(self.microbatch_tokens, 1, 1)
        if self.critic not in CRITICS:
            raise ValueError(f"critic={self.critic!r} is unknown; the kinds are {', '.join(CRITICS)}")

    @property
    def has_critic(self) -> bool:
        """Whether the recipe learns values."""
        return self.recipe.advantage_estimator == "critic"

    @property
    def own_critic(self) -> bool:
        """Whether values are those of a network beside the policy."""
        return self.has_critic and self.critic != "head"

    @property
    def centralised(self) -> bool:
        """Whether values are read behind what all roles have read and said."""
        return self.has_critic and self.critic == "centralised"

    @property
    def charges_kl(self) -> bool:
        """Whether the KL to the reference is taken off the rewards."""
        return bool(self.recipe.kl_coef) and self.recipe.kl_where == "reward"

    @property
    def sizes(self) -> dict[str, int]:
        """What the forward passes of `marl_llm.training.scoring` need to know."""
        return {name: getattr(self, name) for name in ("row_tokens", "minibatch", "microbatch_tokens")}


CRITICS = ("own", "head", "centralised")


@functools.lru_cache(32)
def _advantages(recipe: Recipe) -> Callable:
    return jax.jit(lambda table, kl_coef: advantages_for(recipe, table, kl_coef=kl_coef))


def compute_advantages(recipe: Recipe, tokens: Tokens, table: Samples, kl_coef: float | None = None) -> Advantages:
    """The advantages of a step: once, over the whole team's table. Padding and order change nothing (law 5).

    `recipe` has no critic. `kl_coef`: β of this step where it is steered; by default the recipe's.
    """
    order = by_identity(tokens, table)
    table = dataclasses.replace(table, where=np.ones(len(order), bool)) if table.where is None else table
    beta = np.float32(recipe.kl_coef if kl_coef is None else kl_coef)
    advantages, metrics, tied = jax.device_get(_advantages(recipe)(rows_of(table, order, bucket(len(order), 64, growth=4)), beta))
    out = np.zeros(len(order), np.float32), np.zeros(len(order), bool)
    out[0][order], out[1][order] = advantages[: len(order)], tied[: len(order)]
    return Advantages(*out, {name: float(x) for name, x in metrics.items()})


def packed_loss(
    recipe: Recipe,
    scored: TokenScores,
    reference: Float[Array, "B Q"] | None,
    rows: PackedRows,
    advantages: Float[Array, "B N"] | Float[Array, "B Q"],
    old: Float[Array, "B Q"],
    scalars: dict[str, Array],
) -> tuple[Float[Array, ""], Sums]:
    """The recipe's loss of packed rows as sums, see `policy_loss`. `scored` holds one number per target `[B, Q]`, S = B N.

    `old`: log-probs of the old policy. In the first step, where `scalars["first_step"]` is true, they are not read: its parameters are
    still the old ones, so the ratio is 1.
    """
    advantages = by_sample(rows, advantages) if recipe.advantage_estimator == "critic" else advantages.reshape(-1)
    new, entropy, sampled = (by_sample(rows, x) for x in (scored.log_probs, scored.entropy, rows.log_probs))
    scalars = dict(scalars)
    old = jax.lax.stop_gradient(jnp.where(scalars.pop("first_step"), new, by_sample(rows, old)))
    reference = None if reference is None else jax.lax.stop_gradient(by_sample(rows, reference))
    return policy_loss(recipe, new, entropy, sampled, advantages, sample_where(rows), reference, old, **scalars)


def policy_step(
    options: LearnerOptions,
    config: ModelConfig,
    mesh: Mesh,
    lora: LoraConfig | None = None,
    head: bool = False,
    teaching: Teaching | None = None,
) -> Callable:
    """`(policy, base, frozen, rows, arrays, scalars, denominator_scale, learning_rate) -> (policy, metrics, gap)`, compiled."""
    recipe, axis = options.recipe, data_axis(mesh)

    def step(policy: TrainState, base, frozen: Frozen, rows: PackedRows, arrays: dict, scalars: dict, denominator_scale, learning_rate):
        part, count, most = cut((rows, arrays), options.microbatch_tokens, axis)
        if head:  # the two losses may have denominators of their own, so that of the policy loss divides both
            units, tokens = count_for(recipe, where=sample_where(rows)), jnp.sum(rows.length, dtype=jnp.float32)
            units, tokens = summed((units, tokens), axis)
            weight = recipe.value_coef * units / jnp.maximum(tokens, 1)

        def loss(params, j):
            microbatch, columns = part(j)
            model = config, whole(params, base, lora)
            if head:
                values, scored = packed_values(*model, microbatch, recipe.temperature)
            elif teaching:
                scored, taught = score_taught(recipe, teaching, model, frozen.teachers, microbatch, columns)
            else:
                scored = score_packed(*model, *microbatch.inputs, recipe.temperature, **beside_inputs(microbatch))
            ref = reference_scores(recipe, config, frozen.reference, microbatch)
            total, sums = packed_loss(recipe, scored, ref, microbatch, columns["advantages"], columns["old"], scalars)
            if teaching:
                total, sums = add_distillation(recipe, teaching, (total, sums), microbatch, taught)
            if head:
                error, of_values = critic_loss(recipe, values, columns["values"], columns["targets"], response_where(microbatch))
                total = total + weight * error
                sums = sums._replace(parts=sums.parts | of_values.parts)  # the total remains that of the policy
            return total, sums

        return exact_step(policy, loss, count, most, learning_rate, options.optimizer, axis, denominator_scale)

    return compiled_step(step, config, mesh, (P(), P(), P(), P("data"), P("data"), P(), P(), P()), 3)


def _run_critic(options: LearnerOptions, config: ModelConfig, mesh: Mesh) -> Callable:
    """`(params, reference, tokens, table, chosen, kl_coef) -> (Advantages, values, targets)`: the critic before any step, `[S, R]`."""
    recipe = options.recipe
    value_all = make_scorer(lambda params, rows: packed_values(config, params, rows)[0], mesh, **options.sizes)
    token_kl = make_token_kl(recipe, dataclasses.replace(config, value_head=False), mesh, **options.sizes)
    run = jax.jit(lambda t, beta: (*advantages_for(recipe, t, kl_coef=beta)[:2], value_targets_for(recipe, t, kl_coef=beta)))

    def judge(params, reference, tokens: Tokens, table: Samples, chosen: np.ndarray, kl_coef):
        values = value_all(params, read_by_critic(options, tokens), chosen)
        charge = token_kl(reference, tokens, chosen) if options.charges_kl else np.zeros_like(values)
        size = bucket(len(chosen), 64, growth=4)

        def lines(x):
            return np.pad(x[chosen], [(0, size - len(chosen)), (0, 0)])

        where = np.arange(values.shape[1]) < np.pad(tokens.size[chosen], (0, size - len(chosen)))[:, None]
        plain = dataclasses.replace(table, values=None, token_where=None, token_kl=None)
        padded = dataclasses.replace(rows_of(plain, chosen, size), values=lines(values), token_where=where, token_kl=lines(charge))
        estimates, metrics, goals = jax.device_get(run(padded, kl_coef))
        advantages, targets = np.zeros_like(values), np.zeros_like(values)
        advantages[chosen], targets[chosen] = estimates[: len(chosen)], goals[: len(chosen)]
        count = max(np.sum(where), 1)
        metrics = {name: float(x) for name, x in metrics.items()} | {"values_mean": float(np.sum(lines(values)) / count)}
        metrics["explained_variance"] = explained_variance(lines(values), goals, where)
        if options.charges_kl:
            metrics["kl"] = float(np.sum(charge) / count)
        return Advantages(advantages, np.zeros(len(table.team), bool), metrics), values, targets

    return judge


def _check(options: LearnerOptions, config: ModelConfig, lora: LoraConfig | None, teaching: Teaching | None) -> ModelConfig:
    """The config of the network that judges. Raises `ValueError` for a combination that no update can have."""
    if not options.has_critic:
        return config
    if options.critic == "head" and teaching:
        raise ValueError("critic='head' and a teacher's distribution are not computed in one pass: use critic='own'")
    if options.critic == "head" and lora is not None:
        raise ValueError("critic='head' lies on the policy's own parameters, but adapters are trained: use critic='own'")
    return dataclasses.replace(config, value_head=True)


class Update:
    """The update of one model: `(trained, reference, tokens, table, plays, learning_rate, seed, ...) -> (trained, metrics)`.

    Args:
      options: the recipe and the sizes. config: the policy's shape. lora: the policy's parameters are adapters on a frozen `base`.
      teaching: which agents learn from teachers; None: nobody.

    Metrics, floats: loss, entropy, approx_kl, ratio, clip_low, clip_high and kl (means over the units of all steps), grad_norm,
    log_prob_gap (largest |sampler − scorer| in nats before the first step), updates, groups (prompts of this model), groups_with_signal
    (of these, prompts that were scored), packing (share of the rows' tokens that are not padding), tied_share/<agent number>, and those of
    `advantages_for`;
    with a critic also value_loss (clipped), value_error (not clipped), values_mean, explained_variance and, for its own network,
    critic_grad_norm. One compilation per shape of rows, see `Tokens.pack`.

    Raises `ValueError` for a critic that adapters leave no room for.
    """

    def __init__(
        self,
        options: LearnerOptions,
        config: ModelConfig,
        mesh: Mesh,
        lora: LoraConfig | None = None,
        teaching: Teaching | None = None,
    ):
        self.options, self.recipe, self.lora = options, options.recipe, lora
        head = options.has_critic and options.critic == "head"
        judging, self._teaching = _check(options, config, lora, teaching), teaching
        self._devices = mesh.shape["data"] if data_axis(mesh) else 1
        self._act = policy_step(options, judging if head else config, mesh, lora, head, teaching)
        self._learn_values = value_step(options, judging, mesh) if options.own_critic else None
        self._run_critic = _run_critic(options, judging, mesh) if options.has_critic else None
        self._charged = options.charges_kl and not options.has_critic
        self._token_kl = make_token_kl(self.recipe, config, mesh, **options.sizes)
        score = functools.partial(make_policy_scorer, self.recipe, config, mesh, lora, **options.sizes)
        self._score_old = make_row_scorer(self.recipe, config, mesh, lora, options.microbatch_tokens, head=judging if head else None)
        self._score_entropy = score(entropy=True) if "entropy_threshold" in needs(self.recipe) else None

        def lengths(length, where, r):
            return jnp.arange(r) < jnp.where(where, length, 0)[:, None]

        self._units = jax.jit(lambda n, where, r: count_for(self.recipe, where=lengths(n, where, r)), static_argnums=2)

    def __call__(
        self,
        trained: Trained,
        reference,
        tokens: Tokens | Sequence[TokenSample],
        table: Samples,
        plays,
        learning_rate,
        seed: int,
        *,
        critic_learning_rate=None,
        base: dict | None = None,
        advantages: Advantages | None = None,
        kl_coef: float | None = None,
        teachers: tuple = (),
        taught: TaughtTokens | None = None,
    ) -> tuple[Trained, dict[str, float | int]]:
        """One step's update.

        Args:
          trained: donated. Its `critic` is there exactly where the recipe has a critic and `options.critic` is "own".
          reference: whole parameters, or a base with adapters attached, that the KL is measured to; None where `recipe.kl_coef` is 0.
          tokens, table: `Tokens` (or a list of `TokenSample`) of all samples of the team, and their columns `[S]` in the same order.
          plays: `[N]` bool, which agents the model plays and is trained on.
          learning_rate: float. seed: int, with the epoch's number it orders the prompts. teachers: parameters, as `teaching.configs`.
          taught: of `ask_teachers`, where `teaching.outside` names agents.
          critic_learning_rate: of a critic of its own; None: as the policy's. base: frozen parameters under adapters.
          advantages: of this table; None: they are computed here. kl_coef: β where it is steered; None: the recipe's.
        With `kl_where="reward"` and no critic, `table.kl` is charged; if it is None, the reference charges every sample that counts.

        Raises:
          ValueError: a critic or a base that is given where there is none, or the reverse; columns of another length.
          PackingError: a sample that does not fit in a row.
        """
        recipe, options = self.recipe, self.options
        check_base(base, self.lora)
        if (trained.critic is not None) != options.own_critic:
            raise ValueError("Trained.critic is given exactly where the recipe has a critic with a network of its own")
        tokens = tokens if isinstance(tokens, Tokens) else Tokens.of(tokens)
        table, plays = columns_of(tokens, table), np.asarray(plays)
        order = by_identity(tokens, table)
        if self._charged and table.kl is None:
            table = dataclasses.replace(table, kl=self._token_kl(reference, tokens, order[table.where[order]])[: len(tokens)].sum(axis=1))
        samples = order[(table.where & plays[table.agent])[order]]
        beta = np.float32(recipe.kl_coef if kl_coef is None else kl_coef)
        critic_arrays = {}
        if self._run_critic is not None:
            judge = trained.critic if options.own_critic else trained.policy
            advantages, values, targets = self._run_critic(judge.params, reference, tokens, table, samples, beta)
            critic_arrays = {"values": values, "targets": targets}
        elif advantages is None:
            advantages = compute_advantages(recipe, tokens, table, float(beta))
        kept, scored, metrics = self._select(table, samples, advantages, len(plays))
        scalars = self._scalars((trained.policy.params, base), tokens, scored) | {"kl_coef": beta}
        prompts = prompts_of(tokens, table, scored)
        frozen, minibatches = Frozen(reference, teachers), minibatches_of(prompts, options.minibatch, options.epochs, seed)

        def packed(chosen: list[int]) -> tuple[PackedRows, dict]:
            rows = self._pack(tokens, chosen)
            arrays = self._beside_values(tokens, chosen, rows, critic_arrays) | agents_beside(self._teaching, rows, table.agent)
            arrays |= {} if taught is None else taught.beside(tokens, rows)
            spread = per_sample if advantages.estimates.ndim == 1 else by_row
            return rows, arrays | {"advantages": spread(rows, advantages.estimates)}

        # Only these scores are kept: the rows of a later minibatch are packed again when its turn comes.
        old = [self._score_old((trained.policy.params, base), packed(chosen)[0]) for chosen in minibatches[1:]]
        scales = self._denominator_scales(tokens, kept, minibatches)
        rates = learning_rate, learning_rate if critic_learning_rate is None else critic_learning_rate

        def take(trained: Trained, number: int, rows: PackedRows, arrays: dict):
            arrays |= {"old": np.zeros(rows.targets.shape, np.float32) if number == 0 else old[number - 1]}
            numbers, of_critic = scalars | {"first_step": np.bool_(number == 0)}, arrays.pop("critic", None)
            return self._step(trained, (base, frozen, rows, arrays, numbers, scales[number]), of_critic, rates)

        trained, figures = over_minibatches(take, trained, minibatches, packed)
        if options.has_critic and not options.own_critic:
            figures["loss"] += recipe.value_coef * figures["value_loss"]
        return trained, metrics | figures | {"groups": len(prompts_of(tokens, table, samples)), "groups_with_signal": len(prompts)}

    def _select(
        self, table: Samples, samples: np.ndarray, advantages: Advantages, agents: int
    ) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
        """Of this model's samples those that the loss counts, of these those that are scored, and metrics of both."""
        kept, tied = in_loss(self.recipe, table, samples), advantages.zero_variance
        scored = kept[~tied[kept]] if self.recipe.filter_zero_variance else kept
        metrics = advantages.metrics | tied_shares(table, tied, agents) | {"masked_truncated": 1 - len(kept) / max(len(samples), 1)}
        if self._charged:
            metrics["kl"] = float(np.sum(table.kl[samples]) / max(np.sum(table.tokens[samples]), 1))
        return kept, scored, metrics

    def _pack(self, tokens: Tokens, chosen: list[int]) -> PackedRows:
        return tokens.pack(chosen, self.options.row_tokens, self._devices, few_shapes(self.options.microbatch_tokens))

    def _beside_values(self, tokens: Tokens, chosen: list[int], rows: PackedRows, columns: dict[str, np.ndarray]) -> dict[str, Any]:
        """Columns `[S, R]` of a critic beside rows of the chosen samples; those of an own network with the rows that it reads."""
        seen = self._pack(read_by_critic(self.options, tokens), chosen) if self.options.centralised else rows
        arrays = {name: by_row(seen, x) for name, x in columns.items()}
        return {"critic": (seen, arrays)} if self.options.own_critic else arrays

    def _step(self, trained: Trained, inputs: tuple, of_critic: tuple | None, rates: tuple) -> tuple[Trained, dict[str, tuple], Array]:
        """One step of the policy on `inputs`, see `policy_step`, and of a critic that is a network of its own on its rows and arrays."""
        policy, parts, gap = self._act(trained.policy, *inputs, rates[0])
        if of_critic is None:
            return Trained(policy), parts, gap
        critic, more, _ = self._learn_values(trained.critic, *of_critic, rates[1])
        parts |= {"critic_grad_norm": more["grad_norm"], "value_loss": more["value_loss"], "value_error": more["value_error"]}
        return Trained(policy, critic), parts, gap

    def _scalars(self, params, tokens: Tokens, scored: np.ndarray) -> dict[str, Any]:
        """What the recipe needs to know of the whole step before its first update."""
        if self._score_entropy is None:
            return {}
        entropy = self._score_entropy(params, tokens, scored)
        sizes = np.where(np.isin(np.arange(len(entropy)), scored), _filled(tokens.size, len(entropy)), 0)
        where = np.arange(entropy.shape[1]) < sizes[:, None]
        return {"entropy_threshold": entropy_threshold(entropy, self.recipe.entropy_quantile, where=where)}

    def _denominator_scales(self, tokens: Tokens, kept: np.ndarray, minibatches: list[list[int]]) -> list[np.float32]:
        """How many times the units that each minibatch scores its denominator counts; of one empty minibatch if there are none.

        Where skipped samples count in the denominator, every minibatch divides by the units of all samples over the number of
        minibatches of an epoch. The mean of an epoch's gradients is then that of the whole batch, however it was cut.
        """
        if not (self.recipe.filter_zero_variance and self.recipe.zero_variance_in_denominator and minibatches):
            return [np.float32(1)] * max(len(minibatches), 1)
        lines, longest = table_shape(tokens)
        sizes = _filled(tokens.size, lines)

        def units(samples) -> float:
            return float(self._units(sizes, np.isin(np.arange(lines), samples), longest))

        share = units(kept) * self.options.epochs / len(minibatches)
        return [np.float32(share / units(samples)) for samples in minibatches]


def _filled(column: np.ndarray, size: int) -> np.ndarray:
    """A column with zeros up to `size`."""
    return np.pad(column, (0, size - len(column)))


def in_loss(recipe: Recipe, table: Samples, samples: np.ndarray) -> np.ndarray:
    """Of these samples those that the loss counts: all, or with `mask_truncated` those that ended before their budget did."""
    if not recipe.mask_truncated:
        return samples
    if table.truncated is None:
        raise ValueError(f"recipe {recipe.name!r} has mask_truncated=True: the table needs its column truncated")
    return samples[~table.truncated[samples]]


def tied_shares(table: Samples, tied: np.ndarray, agents: int) -> dict[str, float]:
    """`tied_share/<agent number>`: the share of each agent's samples whose group has equal returns."""
    samples = [table.where & (table.agent == number) for number in range(agents)]
    return {f"tied_share/{number}": float(np.sum(tied & where) / max(np.sum(where), 1)) for number, where in enumerate(samples)}
