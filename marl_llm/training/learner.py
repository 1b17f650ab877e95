"""One model of a team while it trains: its policy, or adapters on a frozen base, its critic and reference, and what changes them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key

from marl_llm.algorithms import Samples
from marl_llm.models import (
    TRAIN,
    LoraConfig,
    ModelConfig,
    attach,
    compute_copy,
    init_adapters,
    is_stacked,
    log_prob_gap_bound,
    merge,
    param_shardings,
)
from marl_llm.text.spans import SpanReader
from marl_llm.training.distillation import Teacher, Teaching, teaching_of
from marl_llm.training.host_copies import to_device, to_host
from marl_llm.training.outside_teachers import OutsideTeacher, TaughtTokens, ask_teachers
from marl_llm.training.packing import Tokens
from marl_llm.training.privileged import ModelScorer, SelfTeacher
from marl_llm.training.processes import put
from marl_llm.training.scoring import make_token_kl
from marl_llm.training.sft import make_sft
from marl_llm.training.span_teachers import SpanScores, SpanTeacher, alignment_figures
from marl_llm.training.train_state import TrainState, make_plain_optimizer, make_train_state
from marl_llm.training.update import Advantages, LearnerOptions, Trained, Update

PROGRAMS = 16  # compiled functions of one kind that are kept at a time


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSpec:
    """A model as a team begins with it.

    Attributes:
      config: its shape.
      params: its parameters, of the frozen base where it has adapters.
      renderer: between text and its ids, a `marl_llm.workflows.Renderer`; None in a game that is played compiled, in its own language.
      lora: adapters are trained instead of the parameters.
      sampler: the vLLM server that draws for it in hosted play, a `marl_llm.tools.VllmServer`; None: an engine of this program.
      options: how it is updated, where that differs from the team's; its recipe differs in `LOSS_FIELDS` at most. None: as the team's.
      teachers: role -> the frozen model that the role learns from, where the recipe has a `distill_coef`.
    """

    config: ModelConfig
    params: dict
    renderer: Any = None
    lora: LoraConfig | None = None
    sampler: Any = None
    options: LearnerOptions | None = None
    teachers: Mapping[str, Teacher | OutsideTeacher | SelfTeacher | SpanTeacher] = dataclasses.field(default_factory=dict)


def with_value_head(params: dict) -> dict:
    """Plain parameters with a fresh value head, which predicts 0: how a critic starts from the actor's base model."""
    width = params["embedding"].shape[1]
    return params | {"value_head": {"kernel": jnp.zeros((width,)), "bias": jnp.zeros(())}}


@functools.lru_cache(PROGRAMS)
def _programs(
    config: ModelConfig, lora: LoraConfig | None, mesh: Mesh, options: LearnerOptions, teaching: Teaching | None
) -> tuple[Callable, Callable, Callable]:
    """(sft_step, update, token_kl), compiled once for all models of one shape."""
    sft_step, update = make_sft(options, config, mesh, lora), Update(options, config, mesh, lora, teaching)
    return sft_step, update, make_token_kl(options.recipe, config, mesh, **options.sizes)


@functools.lru_cache(PROGRAMS)
def _corrects(config: ModelConfig, lora: LoraConfig | None, mesh: Mesh, options: LearnerOptions) -> Callable:
    """Imitation whose optimizer has no memory."""
    return make_sft(dataclasses.replace(options, optimizer=make_plain_optimizer()), config, mesh, lora)


def frozen_base(config: ModelConfig, params: dict, mesh: Mesh) -> dict:
    """Parameters under adapters, placed for training and, since nothing adds to them, as the model reads them (`compute_copy`).

    Parameters that are so already are taken as they are, not copied.
    """
    placed = put(params, param_shardings(params, mesh, TRAIN))
    read = jax.eval_shape(functools.partial(compute_copy, config), placed)
    if all(x.dtype == wanted.dtype for x, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(read), strict=True)):
        return placed
    return jax.jit(functools.partial(compute_copy, config), out_shardings=jax.tree.map(lambda x: x.sharding, placed))(placed)


class Learner:
    """A model that learns.

    What lives on the devices: parameters, both moments (all float32), the same of an own critic, and the start where a KL reads it: in the
    compute dtype, of adapters these alone. Of the spec nothing is kept but a base that has the compute dtype already.

    Args:
      spec: as it begins.
      options: how it is updated, unless the spec says otherwise.
      mesh: where it lives.
      key: of fresh adapters; consumed.
      base: `frozen_base` of the spec's parameters, where another model has its adapters on it too; None: it is made here.
      roles: of the team, in the order of agent numbers; needed where the spec has teachers.

    Attributes:
      trained: parameters (or adapters) with their optimizer, and the same of its own critic, or None.
      version: how often its parameters have changed since `begin`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        options: LearnerOptions,
        mesh: Mesh,
        key: Key[Array, ""],
        base: dict | None = None,
        roles: Sequence[str] = (),
    ):
        options = spec.options or options
        head = options.has_critic and options.critic == "head"
        self.spec, self.options, self.mesh = dataclasses.replace(spec, params={}, teachers={}), options, mesh
        teaching, teachers = teaching_of(spec.config, roles, spec.teachers if options.recipe.distill_coef else {})
        self._outside = {agent: spec.teachers[roles[agent]] for agent in (teaching.outside if teaching else ())}
        self._teachers = tuple(frozen_base(teacher.config, teacher.params, mesh) for teacher in teachers)
        self.config = dataclasses.replace(spec.config, value_head=True) if head else spec.config
        self._imitate, self._update, self._token_kl = _programs(spec.config, spec.lora, mesh, options, teaching)
        self.base = (frozen_base(spec.config, spec.params, mesh) if base is None else base) if spec.lora else None
        params = with_value_head(spec.params) if head and "value_head" not in spec.params else spec.params
        stacked = self.base is not None and is_stacked(self.base)
        self.trained = Trained(self._policy(init_adapters(spec.config, key, spec.lora, stacked) if spec.lora else params))
        self.start_rl()

    def _policy(self, params: dict) -> TrainState:
        """A copy of parameters with a fresh optimizer state, in its place."""
        return self._placed(make_train_state(params, self.options.optimizer))

    def _placed(self, policy: TrainState) -> TrainState:
        params = policy.params
        if self.base is not None and params.keys() != self.base.keys():  # adapters are small: every device has them whole
            return put(policy, jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), policy))
        return put(policy, param_shardings(policy, self.mesh, TRAIN))

    @property
    def policy(self) -> TrainState:
        """Parameters, or adapters, with their optimizer."""
        return self.trained.policy

    @property
    def params(self) -> dict:
        """Whole parameters, adapters merged in: what is sampled from."""
        return self.whole(self.policy.params)

    def attached(self, adapters: dict) -> dict:
        """The base with adapters on it, not merged; the base is the same object for all models on it."""
        return attach(self.base, adapters, self.spec.lora)

    def whole(self, trained: dict) -> dict:
        """Whole parameters of a policy of this shape: adapters are merged in."""
        return trained if self.base is None else merge(self.base, trained, self.spec.lora)

    def sft_step(self, tokens: Tokens, chosen: Sequence[int] | np.ndarray, learning_rate: float | Array) -> dict[str, Any]:
        """One step towards the chosen responses; see `make_sft`."""
        policy, figures = self._imitate(self.policy, tokens, chosen, learning_rate, self.base)
        self.trained = self.trained._replace(policy=policy)
        return figures

    def correct(self, tokens: Tokens, chosen: Sequence[int] | np.ndarray, learning_rate: float | Array) -> dict[str, Any]:
        """One step towards the chosen responses beside those of reinforcement, whose optimizer keeps its moments; see `make_sft`."""
        sft_step = _corrects(self.spec.config, self.spec.lora, self.mesh, self.options)
        policy, figures = sft_step(TrainState(self.policy.params, optax.EmptyState()), tokens, chosen, learning_rate, self.base)
        self.trained = self.trained._replace(policy=self.policy._replace(params=policy.params))
        return figures

    def start_rl(self, trained: dict | None = None) -> None:
        """Ends SFT: reinforcement begins with what is there, or with a copy of `trained`, parameters or adapters of another."""
        own = self.policy.params if trained is None else None
        self.release()  # old moments go before the new ones come
        policy = self._policy(trained) if own is None else self._placed(TrainState(own, self.options.optimizer.init(own)))
        self.trained, self.version = Trained(policy), 0
        self.began_with(policy.params)
        if self.options.own_critic:
            self.trained = Trained(policy, self._policy(with_value_head(self.params)))

    def began_with(self, trained: dict) -> None:
        """Takes a copy of parameters, or of adapters, as those before reinforcement."""
        self._begun: Any = None  # before the new ones, so that there are never two
        if self.base is not None:
            self._begun = jax.tree.map(jnp.copy, trained)
        elif self.options.recipe.kl_coef:
            self._begun = compute_copy(self.config, trained)
        else:
            self._begun = to_host(trained, jax.eval_shape(lambda x: compute_copy(self.config, x), trained))

    @property
    def begun(self) -> dict:
        """Adapters before reinforcement, or parameters, in the compute dtype. These lie on the devices only where a KL reads them;
        otherwise on the host, and each call brings a copy."""
        return self._begun if self.base is not None or self.options.recipe.kl_coef else to_device(self._begun)

    @property
    def start(self) -> dict:
        """Whole parameters before reinforcement, adapters merged in: a seat in evaluations."""
        return self.whole(self.begun)

    @property
    def reference(self) -> dict | None:
        """What KL terms measure to: parameters, or adapters on their base, before reinforcement. None where there is no KL."""
        if not self.options.recipe.kl_coef:
            return None
        return self.begun if self.base is None else self.attached(self.begun)

    def release(self) -> None:
        """Gives up policy and critic, so that others find room; `begin` with parameters or `restore` comes next."""
        self.trained = None

    def restore(self, policy: TrainState, critic: TrainState | None, version: int = 0) -> None:
        """Takes over what a checkpoint held."""
        self.trained, self.version = Trained(policy, critic), version

    def charged_kl(self, tokens: Tokens, chosen: np.ndarray) -> np.ndarray:
        """KL of each chosen sample to this model as it began, summed over its tokens: what `kl_where="reward"` charges. `[len(chosen)]`."""
        return self._token_kl(self.reference, tokens, chosen)[chosen].sum(axis=1)

    def ask_teachers(self, tokens: Tokens, table: Samples, privileged: Sequence[Any] | None = None) -> TaughtTokens | None:
        """What teachers behind endpoints or of another tokenizer, and this model with privileged context, say of a step's samples, for
        `learn`; None where no role of this model has one. `privileged`: what such a teacher reads in place of its student's prompt, by
        sample. Raises `TeacherError`, and `ValueError` without these."""
        o, scorers = self.options, {}
        scorer = functools.partial(ModelScorer, mesh=self.mesh, minibatch=o.minibatch, microbatch_tokens=o.microbatch_tokens)
        own = scorer(self.spec.config, self.spec.lora, weights=(self.policy.params, self.base))
        for teacher in self._outside.values():
            if isinstance(teacher, SelfTeacher | SpanTeacher) and privileged is None:
                raise ValueError("a teacher with privileged context, or another tokenizer, needs prompts that hosted play of text gives")
            if isinstance(teacher, SpanTeacher):
                foreign = scorer(teacher.config, None, weights=(teacher.params, None))
                scorers[id(teacher)] = SpanScores(self._reader(teacher), foreign, teacher.vocab_size)
            else:
                scorers[id(teacher)] = own if isinstance(teacher, SelfTeacher) else teacher
        by_agent = {agent: scorers[id(teacher)] for agent, teacher in self._outside.items()}  # agents of one teacher are scored together
        return ask_teachers(o.recipe, by_agent, tokens, table, privileged)

    def _reader(self, teacher: SpanTeacher) -> SpanReader:
        """Reads this model's responses for a teacher of another tokenizer."""
        own, foreign = self.spec.renderer, teacher.renderer
        return SpanReader(own.tokenizer, foreign.tokenizer, tuple(own.stop_ids), next(iter(foreign.stop_ids), None))

    def learn(
        self,
        tokens: Tokens,
        table: Samples,
        plays: np.ndarray,
        learning_rate: float | Array,
        critic_learning_rate: float | Array | None,
        seed: int,
        advantages: Advantages | None,
        kl_coef: float,
        taught: TaughtTokens | None = None,
    ) -> dict[str, float]:
        """One step of reinforcement on the team's samples: the update's metrics and, beside `log_prob_gap`, the bound of a healthy one for
        this dtype. `plays [N]` says whose samples are this model's; `taught` is what `ask_teachers` gave. Raises `ValueError` if the recipe
        distils and no role of this model has a teacher."""
        if self.options.recipe.distill_coef and not (self._teachers or self._outside):
            raise ValueError(f"distill_coef={self.options.recipe.distill_coef:g} needs a teacher for a role of the model: set teachers")
        self.trained, figures = self._update(
            self.trained, self.reference, tokens, table, plays, learning_rate, seed,
            critic_learning_rate=critic_learning_rate, base=self.base, advantages=advantages, kl_coef=kl_coef, teachers=self._teachers,
            taught=taught,
        )  # fmt: skip
        self.version += 1
        bound = log_prob_gap_bound(self.config.compute_dtype)  # beside the gap, for whoever judges it
        foreign = [agent for agent, teacher in self._outside.items() if isinstance(teacher, SpanTeacher)]
        if foreign:
            figures |= alignment_figures(taught, tokens, {n: np.flatnonzero(table.where & (table.agent == n)) for n in foreign})
        return {name: float(x) for name, x in figures.items()} | {"log_prob_gap_bound": bound}
