"""One model of a team on the host while it trains: its policy, or adapters on a frozen base, its critic, and the steps that change them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from marl_llm.algorithms import Recipe, Samples
from marl_llm.models import TRAIN, LoraConfig, ModelConfig, init_adapters, merge, param_shardings
from marl_llm.training.critic_update import make_critic_update, with_value_head
from marl_llm.training.packed_imitation import make_packed_imitation
from marl_llm.training.packed_update import make_packed_update, make_token_kl
from marl_llm.training.packing import TokenSample
from marl_llm.training.policy import Policy, make_policy
from marl_llm.workflows import Speech

CRITICS = ("own", "head")


@dataclasses.dataclass(frozen=True)
class LearnerOptions:
    """How models are updated; the same for all of a team.

    Attributes:
      recipe: see `marl_llm.algorithms`.
      optimizer: of policies and critics.
      row_tokens: budget of a packed row.
      minibatch: prompts per optimizer step. epochs: passes over a step's samples.
      microbatch_tokens: tokens whose activations live at a time; 0: all.
      critic: where a recipe has one: "own", a network of the policy's shape that begins as its copy, or "head", a value head on the
        policy itself.

    Raises:
      ValueError: an unknown kind of critic, or "head" together with adapters (`Learner`).
    """

    recipe: Recipe
    optimizer: optax.GradientTransformation
    row_tokens: int
    minibatch: int
    epochs: int = 1
    microbatch_tokens: int = 0
    critic: str = "own"

    def __post_init__(self):
        if self.critic not in CRITICS:
            raise ValueError(f"critic={self.critic!r} is unknown; the kinds are {', '.join(CRITICS)}")

    @property
    def has_critic(self) -> bool:
        """Whether the recipe learns values."""
        return self.recipe.normaliser == "critic"


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model as a team begins with it.

    Attributes:
      config: its shape.
      params: its parameters, of the frozen base where it has adapters.
      speech: between text and its ids.
      lora: adapters are trained instead of the parameters.
    """

    config: ModelConfig
    params: dict
    speech: Speech
    lora: LoraConfig | None = None


@functools.cache
def _updates(config: ModelConfig, lora: LoraConfig | None, mesh: Mesh, options: LearnerOptions) -> tuple[Callable, Callable]:
    """(imitate, update), compiled once for all models of one shape."""
    shared: dict[str, Any] = dict(row_tokens=options.row_tokens, microbatch_tokens=options.microbatch_tokens, lora=lora)
    imitate = make_packed_imitation(config, options.optimizer, mesh, **shared)
    shared |= dict(minibatch=options.minibatch, epochs=options.epochs)
    if not options.has_critic:
        return imitate, make_packed_update(options.recipe, config, options.optimizer, mesh, **shared)
    critic = dataclasses.replace(config, value_head=True) if options.critic == "own" else None
    return imitate, make_critic_update(options.recipe, config, options.optimizer, mesh, critic=critic, **shared)


@functools.cache
def _token_kl(config: ModelConfig, mesh: Mesh, options: LearnerOptions) -> Callable:
    sizes = dict(row_tokens=options.row_tokens, minibatch=options.minibatch, microbatch_tokens=options.microbatch_tokens)
    return make_token_kl(options.recipe, config, mesh, **sizes)


class Learner:
    """A model that learns.

    Args:
      spec: as it begins.
      options: how it is updated.
      mesh: where it lives.
      key: of fresh adapters.

    Attributes:
      policy: parameters (or adapters) and optimizer. critic: the same of its own critic, or None.
      start: parameters before reinforcement, whole ones; the reference of KL terms.
    """

    def __init__(self, spec: ModelSpec, options: LearnerOptions, mesh: Mesh, key: Key[Array, ""]):
        if options.has_critic and options.critic == "head" and spec.lora is not None:
            raise ValueError("critic='head' lies on the policy's own parameters, but this model trains adapters only: use critic='own'")
        self.spec, self.options, self.mesh = spec, options, mesh
        self.config = dataclasses.replace(spec.config, value_head=True) if options.has_critic and options.critic == "head" else spec.config
        self.base = self._placed(spec.params) if spec.lora else None
        trained = init_adapters(spec.config, key, spec.lora) if spec.lora else self._headed(spec.params)
        self.policy = self._policy(trained)
        self.critic: Policy | None = None
        self.imitate_step, self.update_step = _updates(self.config, spec.lora, mesh, options)
        self.begin()

    def _headed(self, params: dict) -> dict:
        return with_value_head(params) if self.config.value_head and "value_head" not in params else params

    def _placed(self, params: dict) -> dict:
        return jax.device_put(params, param_shardings(params, self.mesh, TRAIN))

    def _policy(self, params: dict) -> Policy:
        policy = make_policy(params, self.options.optimizer)
        if self.base is not None and params.keys() != self.base.keys():  # adapters are small: every device has them whole
            return jax.device_put(policy, NamedSharding(self.mesh, PartitionSpec()))
        return jax.device_put(policy, param_shardings(policy, self.mesh, TRAIN))

    @property
    def params(self) -> dict:
        """Whole parameters, adapters merged in: what the sampling engine serves."""
        return self.policy.params if self.base is None else merge(self.base, self.policy.params, self.spec.lora)

    def imitate(self, pairs: Sequence[tuple[Any, Any]], learning_rate: float | Array) -> dict[str, float]:
        """One step towards given responses, `(prompt ids, response ids)`."""
        self.policy, figures = self.imitate_step(self.policy, pairs, learning_rate, self.base)
        return {name: float(x) for name, x in figures.items()}

    def begin(self, trained: dict | None = None) -> None:
        """Ends the warm start: what is there now (or `trained`, parameters or adapters of another) is where reinforcement begins."""
        self.policy = self._policy(self.policy.params if trained is None else trained)
        self.start = jax.tree.map(jnp.copy, self.params)
        if self.options.has_critic and self.options.critic == "own":
            self.critic = self._policy(with_value_head(self.start))

    def restore(self, policy: Policy, critic: Policy | None) -> None:
        """Takes over what a checkpoint held."""
        self.policy, self.critic = policy, critic

    def charged_kl(self, samples: Sequence[TokenSample], chosen: Sequence[int]) -> np.ndarray:
        """KL of each chosen sample to this model as it began, summed over its tokens: what `kl_in="reward"` charges. `[len(chosen)]`."""
        table = _token_kl(self.config, self.mesh, self.options)(self.start, samples, chosen)
        return np.asarray(table).sum(axis=1)[np.asarray(chosen)]

    def learn(
        self,
        samples: Sequence[TokenSample],
        table: Samples,
        plays: Sequence[bool] | np.ndarray,
        learning_rate: float | Array,
        critic_learning_rate: float | Array,
        seed: int,
    ) -> dict[str, float]:
        """One step of reinforcement on the team's samples; `plays [N]` says whose are this model's. Returns the update's metrics."""
        reference = self.start if self.options.recipe.kl_coef else None
        if self.options.has_critic:
            self.policy, self.critic, figures = self.update_step(
                self.policy, self.critic, reference, samples, table, plays, learning_rate, critic_learning_rate, seed, self.base
            )
        else:
            self.policy, figures = self.update_step(self.policy, reference, samples, table, plays, learning_rate, seed, self.base)
        return {name: float(x) for name, x in figures.items()}

