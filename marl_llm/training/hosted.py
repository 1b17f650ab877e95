"""A team that plays a workflow on the host: a controller and tools over one sampling engine.

Everything is drawn by identity: the same seed, steps and tasks give the same draws, however fast tools and other players were. Log-probs
agree to float32's rounding only, because who decodes beside whom decides the shapes of matrix products; so two runs drift apart, slowly.
With `PlayOptions.batch_invariant` they do not: then all of a run repeats byte for byte on the same hardware.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from marl_llm.algorithms import Recipe
from marl_llm.coaching import Coaching, check_coached, check_missing
from marl_llm.coaching.figures import coach_figures
from marl_llm.evaluation import Evaluation
from marl_llm.sampling import Engine, EngineConfig, Samplers, pick_by_identity
from marl_llm.sampling.requests import Generator, SamplingParams
from marl_llm.serving import PolicyAnswers, policy_answers
from marl_llm.training import processes
from marl_llm.training.batch import Batch, demonstrations, from_table
from marl_llm.training.centralised import check_centralised, of_hosted
from marl_llm.training.corrections import corrected
from marl_llm.training.learner import Learner, ModelSpec
from marl_llm.training.mesh import own_mesh, serving_mesh
from marl_llm.training.oversample import BackgroundRollout, EpisodeQueue, Given, bias_figures, version_of
from marl_llm.training.packing import Tokens
from marl_llm.training.play_options import PlayOptions, check_play
from marl_llm.training.privileged import Prompts
from marl_llm.training.recorder import episode_outcome, hosted_figures, recorder
from marl_llm.training.refills import RefillRound, chosen_tasks, refill_figures, signal_of, tasks_left_out
from marl_llm.training.replay import Replay
from marl_llm.training.seats import Seat, external_player
from marl_llm.training.served import (
    CurrentEngine,
    cache_bytes,
    check_drafts,
    check_pool,
    check_served,
    check_tensor,
    engines,
    on_one_base,
    samplers,
)
from marl_llm.training.span_teachers import teacher_prompts
from marl_llm.training.team import EVALUATION, Team
from marl_llm.training.train_state import TrainState
from marl_llm.training.update import LearnerOptions
from marl_llm.workflows import Assignment, Controller, Environment, Inside, Renderer, Rollout, Scripted, Task, Workflow, WorkflowError
from marl_llm.workflows.controller import EpisodePlayer
from marl_llm.workflows.cross import check_cross, crossed
from marl_llm.workflows.samples import SampleTable, sample_table

CLOSE_S = 10.0  # for a play to notice that its engine is gone


def branching_of(recipe: Recipe, assignment: Assignment) -> dict[str, int]:
    """Role -> K where a recipe samples a tree: every role that trains."""
    if recipe.sampling != "tree":
        return {}
    return {role: recipe.group_size for role, model in assignment.roles.items() if model in assignment.trained}


def with_renderers(models: Mapping[str, ModelSpec], environment: Environment) -> dict[str, ModelSpec]:
    """The models, with the environment's renderer where they have none. Raises `WorkflowError` where it has none either."""
    specs = {name: spec if spec.renderer else dataclasses.replace(spec, renderer=environment.renderer) for name, spec in models.items()}
    if mute := [name for name, spec in specs.items() if spec.renderer is None]:
        name = environment.workflow.name
        raise WorkflowError(f"the model {mute[0]!r} has no renderer, and neither has environment {name!r}: give ModelSpec(renderer=)")
    return specs


class HostedTeam(Team):
    """See the module's text and `Team`. It owns an engine and threads: close it.

    Args:
      environment: a workflow with tasks, tools, and perhaps a scripted player.
      play: how they play.
      draws: the root of every draw's key; by default it follows from the seed.
      coaching: who scores every action of training plays; supervised warm-up and evaluations need no coach. Closed with the team.

    Raises:
      WorkflowError: an assignment or a model that does not fit the workflow, a recipe that samples a tree where a role that trains
        speaks beside others, or `play.max_staleness` where this process has several devices.
    """

    def __init__(
        self,
        environment: Environment,
        assignment: Assignment,
        models: Mapping[str, ModelSpec],
        options: LearnerOptions,
        mesh: Mesh,
        *,
        parts: Mapping[str, Mesh] | None = None,
        play: PlayOptions | None = None,
        seed: int = 0,
        permute_rewards: bool = False,
        refills: int = 0,
        draws: Key[Array, ""] | None = None,
        coaching: Coaching | None = None,
    ):
        play = play or PlayOptions()
        assignment.check(environment.workflow)
        roles, specs = list(environment.workflow.roles), with_renderers(models, environment)
        super().__init__(roles, assignment, specs, options, mesh, parts=parts, seed=seed, permute_rewards=permute_rewards, refills=refills)
        self.environment, self.headline, self._options, self._coaching = environment, environment.headline, play, coaching
        self.budgets = np.asarray([role.max_tokens for role in environment.workflow.roles.values()], np.int32)
        self.corrections, self.trained_coach = (coaching.corrections, coaching.trained) if coaching else (0.0, None)
        trained = environment.workflow if coaching is None else coaching.attach(environment.workflow)
        check_missing(trained, options.recipe.returns, options.recipe.scope)
        check_coached(trained)
        recipe, remote = options.recipe, [name for name in self.learners if self.learners[name].spec.sampler is not None]
        for name in remote:
            check_served(name, recipe, name in assignment.trained, jax.process_count())
        self._engine_key = jax.random.split(jax.random.key(seed))[1] if draws is None else draws
        self._pick = pick_by_identity(self._engine_key)
        self.plays = options.recipe.plays
        self._current = CurrentEngine()
        self._ahead: BackgroundRollout | None = None  # the next step, of `prepare`
        self._together = on_one_base(self.learners, play.lora_serving, mesh)
        check_pool(self.learners, play.block_pool, self._together)
        check_tensor(self.learners, play.tensor)
        check_drafts(self.learners, play.draft_tokens, play.batch_invariant)
        self._unserved: set[str] = set()  # models whose new parameters the engine has not been given
        self._given: dict[str, list[int]] = {}  # of the team's own models: the versions that the engine was given, in order
        check_play(play, recipe, mesh, coaching=coaching, refills=refills, served=remote)
        recipes = [recipe, *(self.learners[name].options.recipe for name in self.trained)]
        beside = dict(coached=coaching is not None, permuted=permute_rewards, program=environment.program is not None)
        players = [self.learners.get(assignment.roles[role]) for role in self.roles]
        vocabularies = [player.config.vocab_size if player else 0 for player in players]  # a scripted role draws no tokens
        self._replay = Replay(play, recipes, vocabularies, several=processes.spans(mesh), **beside)
        self._own()
        if recipe.joint == "cross":
            check_cross(environment.workflow)
        if options.centralised:
            check_centralised(options.recipe, assignment, environment, self._renderers())
        self._role_teachers = {role: teacher for spec in specs.values() for role, teacher in spec.teachers.items()}
        self._training = self._training_controller(trained)
        self._queue = EpisodeQueue(self._training, self.plays, functools.partial(environment.tasks, "train")) if play.oversample else None

    def _training_controller(self, workflow: Workflow) -> EpisodePlayer:
        """Who plays to train, as the recipe samples; the engine is closed if the workflow cannot be played so."""
        recipe, branching = self.options.recipe, branching_of(self.options.recipe, self.assignment)
        settings = SamplingParams.to_train(recipe.temperature, recipe.top_k, recipe.top_p)
        try:
            return self._controller(self._current, self.assignment, settings, branching, recipe.pick if branching else None, workflow)
        except WorkflowError:
            self._current.close()
            raise

    def _own(self) -> None:
        """Makes sure that the team's own models are served, as they are now. With another engine nothing may be under way."""
        if self._current.models != tuple(self.learners):
            self._current.serve(tuple(self.learners), self._samplers)
            self._given = {name: [learner.version] for name, learner in self.learners.items()}
        else:
            for name in sorted(self._unserved):
                params = processes.local(self._sampled(name), self.mesh, own_mesh(self.mesh))
                self._given[name].append(self.learners[name].version)  # before a call that they drew can end
                self._current.engine.set_params(name, params)
        self._unserved.clear()

    def _in_play(self, name: str, trained: dict) -> dict:
        """See `Team._in_play`: whole parameters, or adapters on the base that they share."""
        learner = self.learners[name]
        return learner.attached(trained) if name in self._together else learner.whole(trained)

    def _sampled(self, name: str) -> dict:
        """What a model of the team samples from now."""
        return self._in_play(name, self.learners[name].policy.params)

    def _samplers(self) -> Engine | Samplers:
        """Who draws for the team's own models."""
        models = {name: (learner, self._sampled(name)) for name, learner in self.learners.items()}
        return samplers(models, self._engine, self._engine_key, self._sizes(1, self.mesh))

    def _sizes(self, models: int, mesh: Mesh) -> EngineConfig:
        """What the roles of each of `models` on a mesh may read and say."""
        roles, o = self.environment.workflow.roles, self._options
        return EngineConfig(
            max_num_seqs=o.max_num_seqs,
            prompt_tokens=max(role.max_prompt for role in roles.values()),
            response_tokens=max(role.max_tokens for role in roles.values()),
            decode_steps=o.decode_steps,
            admit=min(o.max_num_seqs, 16),
            cache_bytes=cache_bytes(o.cache_gib, models, own_mesh(mesh)),
            batch_invariant=o.batch_invariant,
            weight_update=o.weight_update,
            block_pool=o.block_pool,
            draft_tokens=o.draft_tokens,
        )

    def _engine(self, models: Mapping[str, tuple[Learner, dict]]) -> Engine | Samplers:
        """An engine of this program; where models have devices of their own, one for the models of each part, all at the same time."""
        return engines(models, self._engine_on)

    def _engine_on(self, mesh: Mesh, models: Mapping[str, tuple[Learner, dict]]) -> Engine:
        """An engine on this process's part of a mesh: it samples in step with no other process."""
        mesh = serving_mesh(own_mesh(mesh), self._options.tensor)
        served = {name: (learner.config, processes.local(params, self.mesh, mesh)) for name, (learner, params) in models.items()}
        tokenizers = {name: learner.spec.renderer.tokenizer for name, (learner, _) in models.items()}
        place = None if mesh.size == 1 and mesh.devices.flat[0] == jax.local_devices()[0] else mesh
        return Engine(served, self._engine_key, sizes=self._sizes(len(models), mesh), mesh=place, tokenizers=tokenizers)

    def _controller(
        self,
        engine: Generator | None,
        assignment: Assignment,
        settings: SamplingParams,
        branching: Mapping[str, int] | None = None,
        pick: str | None = None,
        workflow: Workflow | None = None,
    ) -> Controller:
        options, (alpha, local_weight) = self._options, self.options.recipe.reward_weights
        return Controller(
            workflow or self.environment.workflow, assignment, engine, self._renderers(), branching=branching, settings=settings, pick=pick,
            draw=self._pick, alpha=alpha, local_weight=local_weight, attempts=options.attempts, timeout_s=options.timeout_s,
            concurrency=options.concurrency,
        )  # fmt: skip

    def _renderers(self) -> dict[str, Renderer]:
        """Of the models, and of those that take a role's seat in an evaluation."""
        renderers = {name: learner.spec.renderer for name, learner in self.learners.items()}
        return renderers | {f"{role} as {name}": renderers[name] for role, name in self.assignment.roles.items() if name in renderers}

    def close(self) -> None:
        """Stops engines and threads. A step that is being played ahead is given up."""
        self._training.close()
        if self._coaching is not None:
            self._coaching.close()
        self._current.close()
        self._wait(CLOSE_S)  # requests have failed; a tool may still hold a play

    def _wait(self, seconds: float | None = None) -> None:
        """Until nothing is played in the background."""
        if self._ahead is not None:
            self._ahead.thread.join(seconds)
        if self._queue is not None:
            self._queue.wait(seconds)

    def state(self) -> dict[str, Any]:
        """See `Team.state`; with what the coach is told of the run so far, and what is replayed."""
        parts = filter(None, (self._coaching, self._queue, self._replay))
        return super().state() | {name: value for part in parts for name, value in part.state().items()}

    def restore(self, now: Mapping[str, TrainState], state: Mapping[str, Any]) -> None:
        """See `Team.restore`."""
        super().restore(now, state)
        for part in filter(None, (self._coaching, self._queue, self._replay)):
            part.restore(state)

    def _serve(self, names: Sequence[str]) -> None:
        self._unserved.update(names)  # when they play next, or at once
        if self._options.weight_update == "in_flight" and self._ahead is not None and self._ahead.thread.is_alive():
            self._own()

    # ------------------------------------------------------------------------------------------------ play
    def play(self, step: int, first: int, count: int, over: int = 0) -> Batch:
        """See `Team.play`. Waits for these plays if `prepare` began them. Raises `RolloutError` if every play failed.

        `over`: with `PlayOptions.oversample`, how many groups may be left to the next step (`training.oversample`).
        """
        if self.refills.limit:
            return self._replay.fill(self._refilled(step, first, count))
        rollout, given = self._rollout(step, first, count, over)
        joints, recipe = {}, self.options.recipe
        if recipe.joint == "cross":
            rollout, judged = crossed(rollout, recipe.joint_subset)
            joints = {"joints": float(judged)}
        samples = sample_table(rollout)
        tokens, table = from_table(samples, self.budgets)
        trained = samples.trained()
        rows = [samples[number] for number in samples.in_batch_order()]
        version = np.asarray([version_of(given[row.instance], row.call) for row in rows], np.int32)
        late = bias_figures(rollout, self.headline, over) if self._queue is not None else {}
        figures = hosted_figures(rollout, samples, self.headline, recipe) | late | joints | coach_figures(rollout, self.headline)
        if self._options.weight_update == "in_flight":
            figures["mixed_share"] = float(np.mean([s.call.versions is not None for s in trained])) if trained else 0.0
        figures |= self._current.draft_figures() if self._options.draft_tokens else {}
        figures |= self._coaching.looked(figures) if self._coaching else {}
        if self.options.centralised:
            tokens, read = of_hosted(rollout, samples, tokens, table, self.options.row_tokens)
            figures |= read
        better = corrected(rollout, samples, self._renderers()) if self.corrections else None
        record, prompts = self._recorder(rollout, samples), self._privileged(rollout, samples)
        return self._replay.fill(Batch(step, self.roles, tokens, table, version, figures, record, better, rollout, privileged=prompts))

    def _rollout(self, step: int, first: int, count: int, over: int) -> tuple[Rollout, Mapping[int, Given]]:
        """A step's episodes, and for each task's number what its engine was given."""
        ahead, self._ahead = self._ahead, None
        tasks = self.environment.tasks("train", first, count)
        if ahead is not None and (ahead.step, ahead.places) == (step, range(first, first + count)):
            rollout = self._shared(self._training, tasks, step, self.plays, ahead.rollout.result)
            return rollout, {task.number: ahead.given for task in tasks}
        if ahead is not None:  # of other tasks: given up
            ahead.thread.join()
        self._own()
        if self._queue is not None:
            return self._queue.play(step, first, count, over, self._given)
        return self._shared(self._training, tasks, step, self.plays), {task.number: self._given for task in tasks}

    def _refilled(self, step: int, first: int, count: int) -> Batch:
        """`play`, in rounds: see `training.refills`."""
        def play_round(first: int, count: int, drawn: set[int]) -> RefillRound | None:
            tasks = self.environment.tasks("train", first, count)
            numbers = tuple(task.number for task in tasks)
            if drawn & set(numbers):
                return None
            rollout = self._shared(self._training, tasks, step, self.plays)
            samples = sample_table(rollout)
            figures = hosted_figures(rollout, samples, self.headline, self.options.recipe)
            return RefillRound(numbers, signal_of(self.options.recipe, *from_table(samples, self.budgets)), figures, rollout)

        self._own()
        rounds = self.refills.rounds(play_round, step, first, count)
        chosen = chosen_tasks(rounds, count)
        episodes = [episode for refill in rounds for episode in refill.played.episodes if episode.task.number in set(chosen)]
        rollout = dataclasses.replace(rounds[0].played, episodes=tuple(episodes))
        samples = sample_table(rollout)
        version = np.asarray([version_of(self._given, samples[number].call) for number in samples.in_batch_order()], np.int32)
        figures, record = refill_figures(rounds, chosen), self._recorder(rollout, samples)
        figures |= self._current.draft_figures() if self._options.draft_tokens else {}
        rest = dict(rollout=rollout, left_out=tasks_left_out(rounds, chosen), privileged=self._privileged(rollout, samples))
        return Batch(step, self.roles, *from_table(samples, self.budgets), version, figures, record, **rest)

    def _privileged(self, rollout: Rollout, samples: SampleTable) -> Prompts | None:
        """What teachers read in place of their students' prompts; None where nobody reads another."""
        return teacher_prompts(rollout, samples, self._renderers(), self._role_teachers)

    def _recorder(self, rollout: Rollout, trained: SampleTable | None = None) -> Callable:
        tokenizers = {name: renderer.tokenizer for name, renderer in self._renderers().items()}
        return recorder(rollout, tokenizers, self.headline, trained)

    def prepare(self, step: int, first: int, count: int) -> None:
        """See `Team.prepare`: these tasks are played in a thread of their own, with the parameters of now to their end."""
        if self._ahead is not None:
            raise RuntimeError("prepare: the step before is still to be fetched with play")
        self._own()
        play = functools.partial(self._played, self._training, self.environment.tasks("train", first, count), step, self.plays)
        self._ahead = BackgroundRollout.start(play, step, range(first, first + count), self._given)

    def _played(self, controller: EpisodePlayer, tasks: list[Task], step: int, plays: int) -> Rollout:
        """A rollout of this process's part of the tasks: task i is played by process i mod n."""
        if not processes.spans(self.mesh):
            return controller.play(tasks, step, plays)
        return controller.play(tasks[jax.process_index() :: jax.process_count()], step, plays, share=True)

    def _shared(
        self, controller: EpisodePlayer, tasks: list[Task], step: int, plays: int, play: Callable[[], Rollout] | None = None
    ) -> Rollout:
        """A rollout of these tasks: every process plays its part (or fetches it with `play`) and gets all, in the order of one process.

        Raises what any process met, and `RolloutError` if every play failed.
        """
        play = play or (lambda: self._played(controller, tasks, step, plays))
        if not processes.spans(self.mesh):
            return play()
        share, parts = processes.gathered_from_all(play, lambda rollout: (rollout.episodes, dict(rollout.hung)))
        order = {task.number: place for place, task in enumerate(tasks)}
        episodes = [episode for episodes, _ in parts for episode in episodes]
        episodes.sort(key=lambda episode: (order[episode.task.number], episode.play))
        controller.check_played(episodes)
        hung: collections.Counter = collections.Counter()
        for _, counts in parts:
            hung.update(counts)
        return dataclasses.replace(share, episodes=tuple(episodes), hung=dict(hung))

    def demonstrate(self, step: int, count: int) -> tuple[Tokens, list[str]]:
        """See `Team.demonstrate`. Raises `WorkflowError` if the environment has no scripted player."""
        if self.environment.script is None:
            raise WorkflowError(f"{self.environment.workflow.name!r} has no scripted player to imitate: start from checkpoints instead")
        players = {name: Scripted(self.environment.script) for name in self.learners}
        teachers = Assignment(self.assignment.roles, {**self.assignment.models, **players})
        with self._controller(None, teachers, SamplingParams()) as controller:
            rollout = self._shared(controller, self.environment.tasks("train", step * count, count), step, 1)
        return demonstrations(sample_table(rollout, training=()))

    def answers(self) -> dict[str, PolicyAnswers]:
        """Role -> how its model answers as it is now, for a `marl_llm.serving.ChatServer`; see docs/serving.md. After `learn`, and after an
        evaluation of other models than the team's own, ask again."""
        self._own()
        roles = {role: name for role, name in self.assignment.roles.items() if name in self.learners}
        answers = {}
        for role, name in roles.items():
            learner, sizes = self.learners[name], self.environment.workflow.roles[role]
            answers[role] = policy_answers(
                self._current.engine, name, learner.spec.renderer, max_prompt=sizes.max_prompt, max_tokens=sizes.max_tokens,
                version=learner.version,
            )  # fmt: skip
        return answers

    # ------------------------------------------------------------------------------------------------ measuring
    def evaluate(
        self, seats: Mapping[str, str | Seat], split: str, tasks: int, *, plays: int = 1, temperature: float = 0.0, first: int = 0
    ) -> Evaluation:
        """See `Team.evaluate`."""
        table, models = self._seated(seats)
        self._wait()  # there is one engine, with one set of parameters
        engine, names, players = self._players(table, models)
        settings = SamplingParams(temperature=float(temperature))
        with self._controller(engine, Assignment(names, players), settings) as controller:
            rollout = self._shared(controller, self.environment.tasks(split, first, tasks), EVALUATION, plays)
        samples = sample_table(rollout, training=())
        figures = hosted_figures(rollout, samples, self.headline, self.options.recipe)
        outcomes = [episode_outcome(rollout.workflow, episode, self.headline) for episode in rollout.episodes]
        formed = {role: figures[f"role/{role}/well_formed"] for role in self.roles}
        seated = {role: str(seat) for role, seat in table.items()}
        return Evaluation(split, seated, temperature, self.headline, tuple(outcomes), formed, figures, self._recorder(rollout), rollout)

    def _players(
        self, table: Mapping[str, Seat], models: Mapping[str, tuple[Learner, dict]]
    ) -> tuple[Generator | None, dict[str, str], dict[str, Any]]:
        """(who answers, role -> name of its player, name -> player) of a table of seats.

        Other models than the team's own take the place of these in the engine: there is one at a time, with one budget.
        """
        if all(seat == Seat() for seat in table.values()):  # the team itself
            self._own()
            frozen = {name: Inside(trained=False) for name in self.learners}
            return self._current, dict(self.assignment.roles), {**self.assignment.models, **frozen}
        names, players, served = {}, {}, {}
        for role, seat in table.items():
            if role in models:
                name = f"{role} as {self.assignment.roles[role]}"
                names[role], players[name], served[name] = name, Inside(trained=False), models[role]
            elif seat == Seat():  # the assignment's own outside or scripted player
                names[role] = self.assignment.roles[role]
                players[names[role]] = self.assignment.models[names[role]]
            else:
                names[role], players[str(seat)] = str(seat), external_player(self.environment, role, seat)
        if not served:
            return None, names, players
        key = tuple((name, served[name][0].config, served[name][0].mesh) for name in sorted(served))
        if self._current.models == key:
            for name, (_, params) in served.items():
                self._current.engine.set_params(name, processes.local(params, self.mesh, own_mesh(self.mesh)))
        else:
            self._current.serve(key, lambda: self._engine(served))
        return self._current, names, players
