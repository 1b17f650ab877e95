"""A team while it trains: its tasks are demonstrated, played, learned from and measured through one protocol.

    with make_team(game, assignment, models, options, mesh) as team:
        for step in range(300):
            team.sft_step(step, 32, 2e-3)
        team.start_rl()
        for step in range(200):
            batch = team.play(step, first=32 * step, count=32)
            figures = team.learn(batch, 1e-3)
        print(team.evaluate({}, "test", 256).summary())

`marl_llm.training.compiled.CompiledTeam` plays a value-state game as one jitted function; `marl_llm.training.hosted.HostedTeam` plays a
workflow through a controller and an engine. What is here does not know which: models, advantages, updates, checkpoints.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from marl_llm.algorithms import Samples, check_rewards, next_kl_coef, running_means
from marl_llm.evaluation import Evaluation
from marl_llm.training import processes
from marl_llm.training.batch import Batch, check_ids, columns_of, staleness
from marl_llm.training.checkpoints import CheckpointError, Checkpoints
from marl_llm.training.learner import Learner, ModelSpec
from marl_llm.training.minibatches import seed_of_step
from marl_llm.training.packing import Tokens
from marl_llm.training.placement import at_once
from marl_llm.training.refills import Refills, refill_conflict
from marl_llm.training.seats import MODELS, Seat, seat_table
from marl_llm.training.train_state import TrainState
from marl_llm.training.trained_coach import TrainedCoach
from marl_llm.training.update import Advantages, LearnerOptions, compute_advantages
from marl_llm.untrusted import check_count, check_keys, check_number
from marl_llm.workflows import Assignment, WorkflowError

EVALUATION = 2**30  # the step in the seeds of evaluations, which no training step reaches
COACH_POLICY = "trained.coach"  # among a team's policies; no model's name has a dot

_square = jax.jit(lambda params: optax.global_norm(params) ** 2)


def _of_model(value: Any, name: str) -> Any:
    """What a value that is one for all models, or a mapping by model, is for one of them."""
    return value[name] if isinstance(value, Mapping) else value


def by_role(figures: Mapping[str, float], roles: Sequence[str]) -> dict[str, float]:
    """Figures whose last part is an agent's number, as in tied_share/0, under the role's name."""
    names = {name: name.rpartition("/") for name in figures}
    return {f"{kind}/{roles[int(last)]}" if kind and last.isdecimal() else name: figures[name] for name, (kind, _, last) in names.items()}


class Team(abc.ABC):
    """The models of a game's roles; a context manager, for it may own an engine and threads.

    Args:
      roles: names, in the order of agent numbers.
      assignment: who plays whom. Its policies need an entry in `models`, frozen ones too.
      models: name -> how it begins.
      options: how models learn.
      mesh: where they live.
      parts: model -> its part of the mesh, see `training.placement`; None: every model has the whole mesh, by turns.
      seed: of draws, fresh adapters, and the order of prompts.
      permute_rewards: the control that breaks the link between a sample and its reward.
      refills: rounds of further tasks at most, while a step lacks tasks with signal; see `training.refills`.

    Attributes:
      headline: what `Evaluation.success` is, e.g. "success" or "f1".
      learners: name -> `Learner`, frozen models too.
      kl_coef: model -> β of its next step; it moves where `recipe.kl_target` steers it, by the KL of this model alone.
      budgets: the most tokens that each role may say at once `[N]`; set by the kind of play.
      running: each role's running mean return `[N]`, which a recipe with `advantage_estimator="ema"` takes off; otherwise zeros.
    """

    headline = "success"
    budgets: np.ndarray

    def __init__(
        self,
        roles: Sequence[str],
        assignment: Assignment,
        models: Mapping[str, ModelSpec],
        options: LearnerOptions,
        mesh: Mesh,
        *,
        parts: Mapping[str, Mesh] | None = None,
        seed: int = 0,
        permute_rewards: bool = False,
        refills: int = 0,
    ):
        if why := refill_conflict(refills, options.recipe, permuted=permute_rewards):
            raise WorkflowError(why)
        if lacking := [name for name in assignment.policies if name not in models]:
            raise WorkflowError(f"the model {lacking[0]!r} plays a role, but models holds only {', '.join(models) or 'nothing'}")
        self.roles, self.assignment, self.options, self.mesh = tuple(roles), assignment, options, mesh
        self.seed, self.permute_rewards, self.split = seed, permute_rewards, parts is not None
        self.parts = dict.fromkeys(assignment.policies, mesh) if parts is None else {name: parts[name] for name in assignment.policies}
        self._began_from = {name: id(models[name].params) for name in assignment.policies}  # the parameters themselves are not kept
        self.learners: dict[str, Learner] = {}
        bases: dict[tuple[int, Mesh], dict] = {}  # of models with adapters: what is the same object is placed once on the same devices
        for number, name in enumerate(assignment.policies):
            spec, key, part = models[name], jax.random.fold_in(jax.random.key(seed), number), self.parts[name]
            base = bases.get((id(spec.params), part)) if spec.lora else None
            self.learners[name] = Learner(spec, options, part, key, base, self.roles)
            if spec.lora:
                bases[id(spec.params), part] = self.learners[name].base
        self.kl_coef = {name: self.learners[name].options.recipe.kl_coef for name in self.trained}
        self.running = np.zeros(len(self.roles))
        self.refills = Refills(refills, mesh.shape["data"])
        self._warned = self._warned_of_opponents = False
        self.advantages: np.ndarray | None = None  # of the samples of the last batch; None with a critic, which has one per token
        self._taught: dict[tuple[int, int], tuple[Tokens, list[str]]] = {}
        self.corrections = 0.0  # of the learning rate, for a step towards a batch's `corrected`
        self.trained_coach: TrainedCoach | None = None  # that trains beside the team

    # ------------------------------------------------------------------------------------------------ what each kind of play does
    @abc.abstractmethod
    def play(self, step: int, first: int, count: int) -> Batch:
        """Plays tasks `first ... first + count` of the training split as the recipe samples. Raises if not one could be played.

        With `refills` they begin as many tasks later as were drawn in addition before this step, and those without signal are replaced.
        """

    def prepare(self, step: int, first: int, count: int) -> None:
        """Begins to play a step beside what follows, with the parameters of now; `play` of the same tasks then fetches it.

        Raises `NotImplementedError` where play is a program of the devices that learn.
        """
        raise NotImplementedError(f"a {type(self).__name__} cannot play ahead; hosted teams can")

    @abc.abstractmethod
    def demonstrate(self, step: int, count: int) -> tuple[Tokens, list[str]]:
        """Responses of the scripted player on the `count` training tasks that `step` names, and the role that gave each."""

    @abc.abstractmethod
    def evaluate(
        self, seats: Mapping[str, str | Seat], split: str, tasks: int, *, plays: int = 1, temperature: float = 0.0, first: int = 0
    ) -> Evaluation:
        """Plays tasks `first ... first + tasks` of a split, each `plays` times, with these seats; see `marl_llm.training.seats`.

        A split's tasks do not depend on the run's seed, so that every team is measured on the same ones. Temperature 0 is greedy.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Stops what the team owns."""

    @abc.abstractmethod
    def _serve(self, names: Sequence[str]) -> None:
        """Takes the new parameters of these models to where they are sampled from."""

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the models that train at some step."""
        return self.assignment.trained

    # ------------------------------------------------------------------------------------------------ supervised warm-up
    def sft_step(self, step: int, count: int, learning_rate: float | Any) -> dict[str, float]:
        """One step of every trained model towards the scripted player, on the `count` training tasks that `step` names.

        What was played once is kept until `begin`: a step that comes again costs no play. Models of one shape without adapters learn as
        one, from all their roles together, and `begin` gives each a copy: reinforcement then starts from equal models. Returns the mean
        loss and gradient norm, and the tokens. Raises `WorkflowError` if there is no scripted player.
        """
        if (step, count) not in self._taught:
            self._taught[step, count] = self.demonstrate(step, count)
        tokens, speakers = self._taught[step, count]
        metrics = []
        for leader, members in self._families().items():
            chosen = [i for i, role in enumerate(speakers) if self.assignment.roles.get(role) in members]
            metrics.append(self.learners[leader].sft_step(tokens, chosen, learning_rate))
        metrics = jax.device_get(metrics)
        return {name: float(np.mean([of_model[name] for of_model in metrics])) for name in metrics[0]}

    def _families(self) -> dict[str, list[str]]:
        """Trained models of one shape that begin with the same parameters, under the first of them."""
        families: dict[tuple, list[str]] = {}
        for name in self.trained:
            spec = self.learners[name].spec
            start = (spec.config, self._began_from[name], spec.options) if spec.lora is None else (name,)
            families.setdefault(start, []).append(name)
        return {members[0]: members for members in families.values()}

    def start_rl(self) -> None:
        """Ends the supervised warm-up; see `sft_step`."""
        self._taught.clear()
        for leader, members in self._families().items():
            self.learners[leader].start_rl()
            for name in members:
                if name != leader:
                    self.learners[name].start_rl(self.learners[leader].policy.params)
        self._serve(list(self.learners))

    def start_from(self, params: Mapping[str, dict]) -> None:
        """Begins with the parameters (or adapters) of another team of the same models, by name."""
        for name, learner in self.learners.items():
            learner.start_rl(params[name])
        self._serve(list(self.learners))

    # ------------------------------------------------------------------------------------------------ reinforcement
    def learn(
        self,
        batch: Batch,
        learning_rate: float | Any | Mapping[str, Any],
        critic_learning_rate: float | Any | Mapping[str, Any] | None = None,
    ) -> dict[str, dict[str, float]]:
        """One update of every model that trains at the batch's step: its metrics, by name; see `Update`.

        Learning rates are one for all models, or a mapping by model.

        Advantages are computed once, over the whole team's table. Beside the update's metrics: clip_fraction, `staleness`, kl_coef and,
        instead of tied_share/<agent>, tied_share/<role>. A batch without a sample that trains changes nothing and returns {}. Raises
        `TeacherError`, before anything has changed, if a teacher behind an endpoint does not answer.
        """
        names, recipe = self.assignment.training(batch.step), self.options.recipe
        table = self.learned_table(batch)
        if not np.any(table.where):
            return {}
        # before anything is learned
        taught = {name: self.learners[name].ask_teachers(batch.tokens, table, batch.privileged) for name in names}
        plays = {name: np.asarray([self.assignment.roles[role] == name for role in self.roles]) for name in names}
        advantages = None
        if not self.options.has_critic:
            table, advantages = self._advantages_of(batch.tokens, table, plays)
        self.advantages = None if advantages is None else np.asarray(advantages.estimates)
        seed = seed_of_step(self.seed, batch.step)
        rates = {name: (_of_model(learning_rate, name), _of_model(critic_learning_rate, name)) for name in names}
        versions, figures = {name: self.learners[name].version for name in names}, {}

        def learn(name):
            learner = self.learners[name]
            return learner.learn(batch.tokens, table, plays[name], *rates[name], seed, advantages, self.kl_coef[name], taught[name])

        for name, metrics in at_once(self.parts, names, learn).items():
            figures[name] = self.figures_of_update(name, metrics, staleness(batch, plays[name], versions[name]))
            self._steer(name, metrics, int(np.sum(table.where & plays[name][table.agent])))
            if recipe.advantage_estimator == "ema":
                figures[name] |= {f"running_mean/{role}": float(x) for role, x in zip(self.roles, self.running, strict=True)}
        for name in names if batch.corrected is not None else ():
            figures[name] |= self._correct(name, *batch.corrected, rates[name][0])
        self._serve(names)
        return figures

    def learned_table(self, batch: Batch) -> Samples:
        """The columns of a batch that an update reads; samples of roles that do not train at its step count in returns alone.

        Raises `ValueError` for rewards that are not finite, and for tokens that a model does not have.
        """
        table = columns_of(batch.tokens, batch.table)
        trains = np.asarray([self.assignment.roles[role] in self.assignment.training(batch.step) for role in self.roles])[table.agent]
        table = dataclasses.replace(table, where=table.where & trains, played=table.where if table.played is None else table.played)
        check_rewards(table)
        sizes = {name: learner.config.vocab_size for name, learner in self.learners.items()}
        check_ids(batch.tokens, table, [sizes.get(self.assignment.roles[role], 0) for role in self.roles])
        table = self._permuted(table, batch.step) if self.permute_rewards else table
        self._warn_of_unread(table)
        self._warn_of_opponents(table)
        return table

    def figures_of_update(self, name: str, metrics: Mapping[str, float], stale: float) -> dict[str, float]:
        """An update's metrics as `learn` returns them; `stale` is how many updates ago its samples were drawn."""
        clipped = metrics.get("clip_low", 0.0) + metrics.get("clip_high", 0.0)
        return by_role(metrics, self.roles) | {"clip_fraction": clipped, "staleness": stale, "kl_coef": self.kl_coef[name]}

    def _advantages_of(self, tokens: Tokens, table: Samples, plays: Mapping[str, np.ndarray]) -> tuple[Samples, Advantages]:
        """The table with running means and with the KL that is charged, and the advantages of the whole team. Moves the running means.

        `plays`: model -> which agents `[N]` bool it plays.
        """
        recipe = self.options.recipe
        if recipe.advantage_estimator == "ema":
            table = dataclasses.replace(table, running=self.running[table.agent].astype(np.float32))
        charged = table
        if self.options.charges_kl:  # each model has a reference and a β of its own
            charge, betas = np.zeros((2, len(tokens)), np.float32)
            for name, agents in plays.items():
                samples = np.flatnonzero(table.where & agents[table.agent])
                charge[samples] = self.learners[name].charged_kl(tokens, samples) if len(samples) else 0.0
                betas[samples] = self.kl_coef[name]
            table = dataclasses.replace(table, kl=charge)
            charged = dataclasses.replace(table, kl=table.kl * (betas / np.float32(recipe.kl_coef)))
        advantages = compute_advantages(recipe, tokens, charged)
        if recipe.advantage_estimator == "ema":
            returns = advantages.estimates + table.running
            self.running = running_means(self.running, returns, table.agent, table.trajectory, decay=recipe.ema_decay, where=table.where)
        return table, advantages

    def _steer(self, name: str, metrics: Mapping[str, float], samples: int) -> None:
        """Moves a model's β by the KL that its update measured. A model of which no sample was scored has measured none."""
        scored = metrics.get("groups" if self.options.charges_kl else "groups_with_signal", 0)
        if scored and "kl" in metrics:
            self.kl_coef[name] = float(next_kl_coef(self.learners[name].options.recipe, self.kl_coef[name], metrics["kl"], samples=samples))

    def train_coach(self, batch: Batch) -> dict[str, float]:
        """One step of the coach that trains beside the team, on a batch that it has scored; its figures by name. {} where none does."""
        return {} if self.trained_coach is None else self.trained_coach.learn(batch.rollout, self.headline)

    def _correct(self, name: str, tokens: Tokens, speakers: list[str], learning_rate: float | Any) -> dict[str, float]:
        """One step of a model towards what a coach would have had its roles say: how many actions, and their mean loss per token."""
        chosen = [i for i, role in enumerate(speakers) if self.assignment.roles[role] == name]
        metrics = self.learners[name].correct(tokens, chosen, self.corrections * learning_rate) if chosen else {"loss": 0.0}
        return {"corrected": float(len(chosen)), "corrected_loss": float(metrics["loss"])}

    @property
    def _rewarded(self) -> bool:
        """Whether a model learns from rewards, and not from teachers alone."""
        return any(self.learners[name].options.recipe.policy_coef for name in self.trained)

    def _warn_of_unread(self, table: Samples) -> None:
        """Says once which pay the recipe leaves out: a team whose rewards nobody reads would train on nothing, without a word."""
        recipe = self.options.recipe
        left_out = {"team": "local", "local": "team"}.get(recipe.rewards)
        if left_out is None or self._warned or not self._rewarded:
            return
        paid = np.unique(table.agent[table.where & (getattr(table, left_out) != 0)])
        if paid.size:
            self._warned = True
            warnings.warn(
                f"recipe {recipe.name!r} reads {recipe.rewards} rewards only; the {left_out} rewards of "
                f"{', '.join(self.roles[agent] for agent in paid)} train nothing. make_recipe({recipe.name!r}, rewards='mixed') reads both",
                stacklevel=3,
            )

    def _warn_of_opponents(self, table: Samples) -> None:
        """Says once that a recipe deals one seat's result to its opponents too, who would learn to lose."""
        recipe = self.options.recipe
        summed = recipe.returns in ("to_go", "to_go_mean") and recipe.scope != "agent"
        shared = summed or recipe.returns in ("outcome", "outcome_plus_local", "trajectory", "counterfactual")
        if not shared or recipe.rewards == "local" or self._warned_of_opponents or not self._rewarded:
            return
        paid = table.where if table.team_where is None else table.where & table.team_where
        ends = [set(zip(table.trajectory[paid & x], table.agent[paid & x])) for x in (table.team > 0, table.team < 0)]
        lost = dict(ends[1] - ends[0])
        opponents = [(won, lost[play]) for play, won in ends[0] - ends[1] if play in lost]
        if opponents:
            self._warned_of_opponents = True
            winner, loser = (self.roles[agent] for agent in opponents[0])
            warnings.warn(
                f"recipe {recipe.name!r} with returns={recipe.returns!r} gives all roles of a play one return, but {winner} was paid for "
                f"winning and {loser} for losing. Use returns='immediate', where every response has its own seat's result",
                stacklevel=3,
            )

    def _permuted(self, table: Samples, step: int) -> Samples:
        """The same samples with the rewards of each agent dealt out anew among them."""
        rng = np.random.default_rng((self.seed, step, 1))
        order = np.arange(len(table.agent))
        for agent in np.unique(table.agent):
            samples = np.flatnonzero((table.agent == agent) & table.where)
            order[samples] = rng.permutation(samples)
        columns = {name: getattr(table, name) for name in ("team", "local", "team_where", "credit")}
        return dataclasses.replace(table, **{name: x[order] for name, x in columns.items() if x is not None})

    # ------------------------------------------------------------------------------------------------ seats
    def _seated(self, seats: Mapping[str, str | Seat]) -> tuple[dict[str, Seat], dict[str, tuple[Learner, dict]]]:
        """A seat for every role, and for those whose player is a model: role -> (learner that has its shape, parameters)."""
        table = seat_table(seats, self.roles, self.learners)
        models = {}
        for role, seat in table.items():
            if seat.kind in MODELS and not (seat.kind == "trained" and not seat.model and self.assignment.roles[role] not in self.learners):
                name = seat.model if seat.kind != "run" and seat.model else self.assignment.roles[role]
                if name not in self.learners:
                    raise ValueError(f"seats: {role}={seat}: the role's model {name!r} has no parameters; name a model, e.g. start:MODEL")
                models[role] = self.learners[name], self._params(seat, name)
        return table, models

    def _params(self, seat: Seat, name: str) -> dict:
        learner = self.learners[name]
        if seat.kind == "trained":
            return self._in_play(name, learner.policy.params)
        if seat.kind == "start":
            return self._in_play(name, learner.begun)
        checkpoints = Checkpoints(pathlib.Path(seat.place) / "checkpoints")
        step = seat.step if seat.step is not None else max(checkpoints.steps(), default=-1)
        if step not in checkpoints.steps():
            raise CheckpointError(f"seat {seat}: {seat.place} has no checkpoint {'' if step < 0 else step}; it has {checkpoints.steps()}")
        (params,) = checkpoints.restore_params(step, {seat.model or name: learner.policy}).values()
        return self._in_play(name, params)

    def _in_play(self, name: str, trained: dict) -> dict:
        """What a model samples from, with these trained parameters or adapters."""
        return self.learners[name].whole(trained)

    # ------------------------------------------------------------------------------------------------ checkpoints
    def models(self) -> dict[str, TrainState]:
        """The policies of the models alone: where another team of the same models may begin, see `start_from`."""
        return {name: learner.policy for name, learner in self.learners.items()}

    def policies(self) -> dict[str, TrainState]:
        """Everything that training changes, by name; critics as `<model>.critic`, a coach that trains as `trained.coach`."""
        policies = self.models() | ({} if self.trained_coach is None else {COACH_POLICY: self.trained_coach.policy})
        critics = {f"{name}.critic": learner.trained.critic for name, learner in self.learners.items()}
        return policies | {name: critic for name, critic in critics.items() if critic is not None}

    def norm(self) -> float:
        """Global norm of all that training changes, as this process sees it: a checksum between processes; 0 on one process."""
        if not processes.spans(self.mesh):
            return 0.0
        trained = {name: policy.params for name, policy in self.policies().items()}
        return float(np.sqrt(sum(float(_square(params)) for params in trained.values())))

    def state(self) -> dict[str, Any]:
        """What `restore` needs beside policies, as JSON."""
        versions = {name: learner.version for name, learner in self.learners.items()}
        state = {"kl_coef": dict(self.kl_coef), "running": self.running.tolist(), "versions": versions} | self.refills.state()
        return state | ({} if self.trained_coach is None else {COACH_POLICY: self.trained_coach.state()})

    def restore_start(self, params: Mapping[str, dict]) -> None:
        """Takes over with which parameters the models began, and gives up those that they have: `restore` comes next."""
        for name, learner in self.learners.items():
            learner.release()
            learner.began_with(params[name])

    def restore(self, now: Mapping[str, TrainState], state: Mapping[str, Any]) -> None:
        """Goes on from what `policies` and `state` gave. The start is that of `restore_start`.

        Raises `LookupError`, `TypeError` or `ValueError` for a state that no team of these models leaves.
        """
        beta = state["kl_coef"]  # earlier versions had one for all models
        betas = check_keys(beta, "kl_coef", self.kl_coef) if isinstance(beta, Mapping) else dict.fromkeys(self.kl_coef, beta)
        self.kl_coef = {name: check_number(x, f"kl_coef.{name}", 0) for name, x in betas.items()}
        versions = check_keys(state["versions"], "versions", self.learners)
        running = np.asarray([check_number(x, "running") for x in state["running"]])
        if running.shape != self.running.shape:
            raise ValueError(f"running must have one mean for each of {self.running.size} roles, and has {running.size}")
        self.running = running
        self.refills.restore(state)
        for name, learner in self.learners.items():
            learner.restore(now[name], now.get(f"{name}.critic"), check_count(versions[name], f"versions.{name}"))
        if self.trained_coach is not None:
            self.trained_coach.restore(now[COACH_POLICY], state[COACH_POLICY])
        self._serve(list(self.learners))
