"""A team on the host while it trains: the models of a workflow over one sampling engine, played, imitated, updated and measured.

    with make_game("fact_parallel") as world, Team(world, separate(world.workflow), models, options, mesh) as team:
        for step in range(300):
            team.imitate(step, 32, 2e-3)
        team.begin()
        for step in range(200):
            rollout = team.play(step, first=32 * step, count=32)
            figures = team.learn(rollout, 1e-3)
        print(team.evaluate("test", 256, greedy=True)[0])

A step's samples are those of all roles; each model trains on the rows of the roles that it plays. Everything is drawn by identity: the
same seed, steps and tasks give the same draws, however fast tools and other players were. Log-probs agree to float32's rounding only,
because who decodes beside whom decides the shapes of matrix products; so two runs drift apart, slowly.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from marl_llm.algorithms import Recipe, Samples
from marl_llm.sampling import Engine, LaneConfig
from marl_llm.sampling.requests import Settings
from marl_llm.training.learner import Learner, LearnerOptions, ModelSpec
from marl_llm.training.packing import TokenSample
from marl_llm.training.policy import Policy
from marl_llm.workflows import Assignment, Controller, Rollout, Scripted, Workflow, WorkflowError, World
from marl_llm.workflows import Policy as PolicyPlayer
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.samples import Sample, SampleTable, sample_table

START = "@start"  # behind the name of a model: the same as it began
EVALUATION = 2**30  # the step in the seeds of evaluations, which no training step reaches


@dataclasses.dataclass(frozen=True)
class PlayOptions:
    """How a team plays.

    Attributes:
      slots: requests that each model decodes at once. chunk: tokens between two looks at the queue.
      attempts, timeout_s, concurrency: see `marl_llm.workflows.Controller`.
    """

    slots: int = 64
    chunk: int = 8
    attempts: int = 2
    timeout_s: float | int | None = None
    concurrency: int = 1024


def branching_of(recipe: Recipe, assignment: Assignment) -> dict[str, int]:
    """Role -> K where a recipe samples a tree: every role that trains."""
    if recipe.sampling != "tree":
        return {}
    return {role: recipe.branches for role, model in assignment.roles.items() if model in assignment.trained}


class Team:
    """The models of a workflow; a context manager, for it owns an engine and threads.

    Args:
      world: what is played.
      assignment: who plays whom. Its policies need an entry in `models`, frozen ones too.
      models: name -> how it begins.
      options: how models learn.
      mesh: where they live.
      play: how they play.
      seed: of all draws.
      permute_rewards: the control that breaks the link between a sample and its reward: rewards are dealt anew among the samples of a role.

    Raises:
      WorkflowError: a policy without a model, an assignment that does not fit the workflow, or a recipe that samples a tree where a role
        that trains speaks beside others.
    """

    def __init__(
        self,
        world: World,
        assignment: Assignment,
        models: Mapping[str, ModelSpec],
        options: LearnerOptions,
        mesh: Mesh,
        *,
        play: PlayOptions = PlayOptions(),
        seed: int = 0,
        permute_rewards: bool = False,
    ):
        assignment.check(world.workflow)
        if lacking := [name for name in assignment.policies if name not in models]:
            raise WorkflowError(f"the model {lacking[0]!r} plays a role, but models holds only {', '.join(models) or 'nothing'}")
        self.world, self.assignment, self.options, self.mesh = world, assignment, options, mesh
        self.play_options, self.seed, self.permute_rewards = play, seed, permute_rewards
        keys = jax.random.split(jax.random.key(seed), 2)
        self.learners = {
            name: Learner(models[name], options, mesh, jax.random.fold_in(keys[0], number))
            for number, name in enumerate(assignment.policies)
        }
        self.plays = 1 if options.recipe.sampling == "tree" else options.recipe.branches
        self._engine_key = keys[1]
        self.engine = self._engine({name: (learner, learner.params) for name, learner in self.learners.items()})
        try:
            self._controllers, self._teachers = self._all_controllers()
        except WorkflowError:
            self.engine.close()
            raise
        self._warned = False
        self._taught: dict[tuple[int, int], dict[str, list]] = {}  # (step, count) -> leader -> pairs

    # ------------------------------------------------------------------------------------------------ what is built once
    def _all_controllers(self) -> tuple[dict[str, Controller], Controller | None]:
        """Those of training and of evaluations, and that of the scripted player, if there is one."""
        world, assignment, recipe = self.world, self.assignment, self.options.recipe
        branching = branching_of(recipe, assignment)
        drawn, greedy = Settings(temperature=recipe.temperature, top_k=recipe.top_k, top_p=recipe.top_p), Settings(temperature=0.0)
        controllers = {
            "train": self._controller(self.engine, assignment, drawn, branching, recipe.pick if branching else None),
            "sampled": self._controller(self.engine, assignment, drawn),
            "greedy": self._controller(self.engine, assignment, greedy),
        }
        if world.script is None:
            return controllers, None
        scripted = {name: Scripted(world.script) for name in self.learners}
        return controllers, self._controller(None, Assignment(assignment.roles, {**assignment.models, **scripted}), drawn)

    def _engine(self, models: Mapping[str, tuple[Learner, dict]]) -> Engine:
        """An engine whose lanes hold what the roles of each model may read and say."""
        roles = self.world.workflow.roles
        p = self.play_options
        sizes = LaneConfig(
            slots=p.slots,
            prompt_tokens=max(role.max_prompt for role in roles.values()),
            response_tokens=max(role.max_tokens for role in roles.values()),
            chunk=p.chunk,
            admit=min(p.slots, 16),
        )
        served = {name: (learner.config, params) for name, (learner, params) in models.items()}
        tokenizers = {name: learner.spec.speech.tokenizer for name, (learner, _) in models.items()}
        return Engine(served, self._engine_key, sizes=sizes, mesh=self.mesh if self.mesh.size > 1 else None, tokenizers=tokenizers)

    def _controller(
        self,
        engine: Engine | None,
        assignment: Assignment,
        settings: Settings,
        branching: Mapping[str, int] | None = None,
        pick: str | None = None,
    ) -> Controller:
        speech = {name.removesuffix(START): learner.spec.speech for name, learner in self.learners.items()}
        speech |= {name + START: one for name, one in speech.items()}
        p = self.play_options
        return Controller(
            self.world.workflow, assignment, engine, speech, branching=branching, attempts=p.attempts, timeout_s=p.timeout_s,
            concurrency=p.concurrency, settings=settings, pick=pick, alpha=self.options.recipe.alpha,
        )  # fmt: skip

    def close(self) -> None:
        """Stops engine and threads."""
        for controller in [*self._controllers.values(), *([self._teachers] if self._teachers else [])]:
            controller.close()
        self.engine.close()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def workflow(self) -> Workflow:
        """What is played."""
        return self.world.workflow

    # ------------------------------------------------------------------------------------------------ warm start
    def imitate(self, step: int, count: int, learning_rate: float | Any) -> dict[str, float]:
        """One step of every trained model towards the scripted player, on the `count` tasks of the training split that `step` names.

        What was played once is kept until `begin`: a step that comes again costs no tools.

        Models of one shape without adapters learn as one, from all their roles together, and `begin` gives each a copy: reinforcement
        then starts from equal models. Returns the mean loss, gradient norm and the tokens.

        Raises `WorkflowError` if the world has no scripted player.
        """
        if self._teachers is None:
            raise WorkflowError(f"world {self.workflow.name!r} has no scripted player to imitate: start from checkpoints instead")
        if (step, count) not in self._taught:
            table = sample_table(self._teachers.play(self.world.tasks("train", step * count, count), step), training=())
            roles_of = lambda members: [role for role in self.workflow.roles if self.assignment.roles[role] in members]  # noqa: E731
            self._taught[step, count] = {leader: table.imitation(roles_of(members)) for leader, members in self._families().items()}
        found = [self.learners[leader].imitate(pairs, learning_rate) for leader, pairs in self._taught[step, count].items()]
        return {name: float(np.mean([figures[name] for figures in found])) for name in found[0]}

    def _families(self) -> dict[str, list[str]]:
        """Trained models of one shape that begin with the same parameters, under the first of them."""
        found: dict[tuple, list[str]] = {}
        for name in self.assignment.trained:
            spec = self.learners[name].spec
            found.setdefault((spec.config, id(spec.params)) if spec.lora is None else (name,), []).append(name)
        return {members[0]: members for members in found.values()}

    def begin(self) -> None:
        """Ends the warm start; see `imitate`."""
        self._taught.clear()
        for leader, members in self._families().items():
            trained = self.learners[leader].policy.params
            for name in members:
                self.learners[name].begin(trained)
        self._serve(self.learners)

    def start_from(self, policies: Mapping[str, Policy]) -> None:
        """Begins where another team of the same models began: its policies at that time."""
        for name, learner in self.learners.items():
            learner.begin(policies[name].params)
        self._serve(self.learners)

    def _serve(self, names: Sequence[str] | Mapping[str, Any]) -> None:
        for name in names:
            self.engine.set_params(name, self.learners[name].params)

    # ------------------------------------------------------------------------------------------------ reinforcement
    def play(self, step: int, first: int, count: int) -> Rollout:
        """Plays tasks `first ... first + count` of the training split as the recipe says. Raises `RolloutError` if every play failed."""
        return self._controllers["train"].play(self.world.tasks("train", first, count), step, self.plays)

    def learn(
        self, rollout: Rollout, learning_rate: float | Any, critic_learning_rate: float | Any | None = None
    ) -> tuple[dict[str, dict[str, float]], SampleTable]:
        """One update of every model that trains at the rollout's step; the engine then serves the new ones.

        Returns each model's metrics (see `make_packed_update`, `make_critic_update`) and the table of samples.
        """
        table = sample_table(rollout)
        keep = [number for number, sample in enumerate(table.samples) if sample.where]
        names = self.assignment.training(rollout.step)
        if not keep:
            return {}, table
        samples = [self._tokens(table, number) for number in keep]
        every = table.to_samples()
        fields = {f.name: getattr(every, f.name) for f in dataclasses.fields(Samples)}
        columns = {name: np.asarray(x)[np.asarray(keep)] for name, x in fields.items() if x is not None}
        if self.permute_rewards:
            columns |= self._permuted(columns, rollout.step)
        recipe = self.options.recipe
        self._warn_of_unread([table[number] for number in keep])
        if recipe.kl_coef and recipe.kl_in == "reward" and not self.options.has_critic:  # each model has a reference of its own
            columns["kl"] = np.zeros(len(keep), np.float32)
            for name in names:
                mine = [place for place, number in enumerate(keep) if table[number].call.model == name]
                columns["kl"][mine] = self.learners[name].charged_kl(samples, mine) if mine else 0.0
        figures = {}
        for name in names:
            plays = np.asarray([self.assignment.roles[role] == name for role in self.workflow.roles])
            value_rate = learning_rate if critic_learning_rate is None else critic_learning_rate
            seed = int(np.random.SeedSequence((self.seed, rollout.step)).generate_state(1)[0]) % 2**31
            figures[name] = self.learners[name].learn(samples, Samples(**columns), plays, learning_rate, value_rate, seed)
        self._serve(names)
        return figures, table

    def _warn_of_unread(self, samples: Sequence[Sample]) -> None:
        """Says once which pay the recipe leaves out: a team whose rewards nobody reads would train on nothing, without a word."""
        recipe = self.options.recipe
        left_out = {"team": "local", "local": "team"}.get(recipe.rewards)
        if left_out is None or self._warned:
            return
        roles = dict.fromkeys(s.call.role for s in samples if getattr(s, left_out))
        if roles:
            self._warned = True
            warnings.warn(
                f"recipe {recipe.name!r} reads {recipe.rewards} rewards only; the {left_out} rewards of {', '.join(roles)} train nothing. "
                f"make_recipe({recipe.name!r}, rewards='mixed') reads both",
                stacklevel=3,
            )

    def _tokens(self, table: SampleTable, number: int) -> TokenSample:
        sample = table[number]
        return TokenSample(sample.prompt_ids, sample.response_ids, table.log_probs(number), sample.name)

    def _permuted(self, columns: Mapping[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, step, 1))
        order = np.arange(len(columns["agent"]))
        for agent in np.unique(columns["agent"]):
            mine = np.flatnonzero(columns["agent"] == agent)
            order[mine] = rng.permutation(mine)
        return {name: columns[name][order] for name in ("team", "local", "team_where") if name in columns}

    # ------------------------------------------------------------------------------------------------ measuring
    def figures(self, rollout: Rollout, table: SampleTable | None = None) -> dict[str, float]:
        """Per team, role and tool; see `marl_llm.workflows.metrics.rollout_metrics`."""
        return rollout_metrics(rollout, sample_table(rollout, training=()) if table is None else table)

    def evaluate(self, split: str, count: int, greedy: bool, first: int = 0) -> tuple[dict[str, float], Rollout]:
        """One play each of `count` tasks of a split: the figures of `rollout_metrics`, and the plays."""
        controller = self._controllers["greedy" if greedy else "sampled"]
        rollout = controller.play(self.world.tasks(split, first, count), EVALUATION)
        return rollout_metrics(rollout, sample_table(rollout, training=())), rollout

    def evaluate_mixed(self, untrained: Sequence[Sequence[str]], split: str, count: int, greedy: bool) -> list[dict[str, float]]:
        """The same with some roles played by their models as they began: per set of roles, its figures. What a role's training is worth."""
        both = {name: (learner, learner.params) for name, learner in self.learners.items()}
        both |= {name + START: (learner, learner.start) for name, learner in self.learners.items()}
        settings = self._controllers["greedy" if greedy else "sampled"].settings
        found = []
        with self._engine(both) as engine:
            for roles in untrained:
                if unknown := [role for role in roles if role not in self.workflow.roles]:
                    raise WorkflowError(f"there is no role {unknown[0]!r}; the roles are {', '.join(self.workflow.roles)}")
                chosen = {r: m + START if r in roles and m in self.learners else m for r, m in self.assignment.roles.items()}
                frozen = {name: PolicyPlayer(trained=False) for name in chosen.values() if name.removesuffix(START) in self.learners}
                others = {name: one for name, one in self.assignment.models.items() if name in chosen.values() and name not in frozen}
                with self._controller(engine, Assignment(chosen, {**others, **frozen}), settings) as controller:
                    rollout = controller.play(self.world.tasks(split, 0, count), EVALUATION)
                found.append(rollout_metrics(rollout, sample_table(rollout, training=())))
        return found

    # ------------------------------------------------------------------------------------------------ checkpoints
    def policies(self) -> dict[str, Policy]:
        """Everything that training changes, by name; critics as `<model>.critic`."""
        found = {name: learner.policy for name, learner in self.learners.items()}
        return found | {f"{name}.critic": learner.critic for name, learner in self.learners.items() if learner.critic is not None}

    def restore(self, start: Mapping[str, Policy], now: Mapping[str, Policy]) -> None:
        """Goes on from what `policies` gave after `begin` (`start`) and later (`now`)."""
        for name, learner in self.learners.items():
            learner.begin(start[name].params)
            learner.restore(now[name], now.get(f"{name}.critic"))
        self._serve(self.learners)
