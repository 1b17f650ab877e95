"""A team that plays a value-state game compiled: each rollout is one jitted function on the mesh, and its samples stay there."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from marl_llm.algorithms import Samples
from marl_llm.evaluation import Evaluation, Outcome, episode
from marl_llm.games import Competitive, Game, speaking_order, split_index
from marl_llm.models import SAMPLE, param_shardings
from marl_llm.rollout import Player, model_player, scripted_player
from marl_llm.sampling import SamplingParams
from marl_llm.training import processes
from marl_llm.training.batch import Batch, from_pool
from marl_llm.training.centralised import check_centralised, of_compiled
from marl_llm.training.league import League, LeagueMatch, LeagueOptions, league_conflict, learning_samples
from marl_llm.training.learner import PROGRAMS, ModelSpec
from marl_llm.training.packing import Tokens
from marl_llm.training.processes import fetch, put
from marl_llm.training.refills import RefillRound, chosen_tasks, refill_figures, signal_of, tasks_left_out
from marl_llm.training.rollouts import Played, make_choice, make_join, make_rollout, sampling_of
from marl_llm.training.seats import MODELS, Seat
from marl_llm.training.team import EVALUATION, Team
from marl_llm.training.train_state import TrainState
from marl_llm.training.update import LearnerOptions
from marl_llm.workflows import Assignment, Inside, RolloutError, WorkflowError

DEMONSTRATIONS = 4  # scripted responses per prompt in the supervised warm-up
CHUNK = 128  # tasks of one compiled evaluation


class CompiledTeam(Team):
    """See the module's text and `Team`.

    Args:
      game: a value-state game whose functions are `jnp`.
      evaluation_seed: of the tasks of evaluations, independent of the run's seed.
      script: options of the game's scripted player.
      league: how the team meets its past selves; see `training.league`.

    Raises:
      WorkflowError: a player that is no model of this program, or that has no parameters; a game whose options may change; what cannot be
        had beside a league.
    """

    def __init__(
        self,
        game: Game,
        assignment: Assignment,
        models: Mapping[str, ModelSpec],
        options: LearnerOptions,
        mesh: Mesh,
        *,
        parts: Mapping[str, Mesh] | None = None,
        seed: int = 0,
        evaluation_seed: int = 2026,
        permute_rewards: bool = False,
        refills: int = 0,
        script: Mapping[str, Any] | None = None,
        league: LeagueOptions | None = None,
    ):
        common = dict(parts=parts, seed=seed, permute_rewards=permute_rewards, refills=refills)
        super().__init__(speaking_order(game), assignment, models, options, mesh, **common)
        for name, model in assignment.models.items():
            if not isinstance(model, Inside):
                raise WorkflowError(f"model {name!r} is {type(model).__name__}: compiled play knows policies only; play {game.name} hosted")
        if options.recipe.joint == "cross":
            raise WorkflowError(f"joint='cross': compiled play pairs no responses; play {game.name} hosted")
        if options.centralised:
            check_centralised(options.recipe, assignment)
        if type(game).__hash__ is None:
            raise WorkflowError(f"{game.name} has no hash, for its options may change: make it a frozen dataclass (frozen=True)")
        league = league or LeagueOptions()
        if why := league_conflict(league, roles=len(self.roles), refills=refills, processes=processes.count()):
            raise WorkflowError(f"league.{why}")
        self.league = League(league, seed, isinstance(game, Competitive)) if league.keep else None
        self.game, self.script = game, tuple(sorted((script or {}).items()))
        self._warm_key, self._data_key = warm_and_data_keys(seed)
        self._evaluation_key = jax.random.key(evaluation_seed)
        sizes = {role.name: role.response_tokens for role in game.roles}
        self.budgets = np.asarray([sizes[role] for role in self.roles], np.int32)

    def _sampled_from(self, params: dict) -> dict:
        """The one reshard between update and sampling; nothing moves where the two rule tables agree and all models have all devices."""
        return put(params, param_shardings(params, self.mesh, SAMPLE))

    def close(self) -> None:
        """Nothing to do: compiled functions are shared by teams, and the oldest make room."""

    def _serve(self, names) -> None:
        """Nothing to do: a rollout is given its parameters."""

    # ------------------------------------------------------------------------------------------------ play
    def play(self, step: int, first: int, count: int) -> Batch:
        """See `Team.play`. Raises `RolloutError` if no instance can be played."""
        left_out, matches = None, ()
        if self.refills.limit:
            played, figures, left_out = self._refilled(step, first, count)
        elif self.league is not None:
            played, figures, matches = self._league_rollout(step, first, count)
        else:
            played = self._played(step, first, count)
            figures = self.figures_of(played, step)
        return self.batch_of(played, step, figures, left_out, matches)

    def batch_of(
        self,
        played: Played,
        step: int,
        figures: dict[str, float],
        left_out: tuple[int, ...] | None = None,
        matches: Sequence[LeagueMatch] = (),
    ) -> Batch:
        """The samples of a rollout that this team's parameters drew, with its figures and the tasks that are not trained on.

        Of a league's `matches` those of past selves are marked as not trained on.
        """
        tokens, table = self._trained(played, step)
        if matches:
            table.where[:] &= learning_samples(matches, self.roles, table)
        version = np.asarray([self.learners[self.assignment.roles[role]].version for role in self.roles], np.int32)[table.agent]
        if self.options.centralised:
            tokens, read = of_compiled(self.game.stages, tokens, table, self.options.row_tokens)
            figures = figures | read

        def record(count: int, when: str, advantages: np.ndarray | None = None) -> list[tuple[dict, dict]]:
            by_sample = {} if advantages is None else self._worth(table, tokens, advantages)
            return self._episodes([played], count, when, step + 1, lambda index: self._players(matches, index), by_sample)

        return Batch(step, self.roles, tokens, table, version, figures, record, left_out=left_out)

    def _played(self, step: int, first: int, count: int) -> Played:
        recipe, roles = self.options.recipe, tuple(self.assignment.roles.items())
        configs = tuple((name, learner.config) for name, learner in self.learners.items())
        how = SamplingParams.to_train(recipe.temperature, recipe.top_k, recipe.top_p)
        run = _training_rollout(self.game, self.mesh, count, roles, configs, how, tuple(sampling_of(recipe).items()))
        params = self._sampled_from({name: learner.params for name, learner in self.learners.items()})
        return run(params, jnp.int32(first), self._data_key, step=jnp.int32(step))

    def _league_rollout(self, step: int, first: int, count: int) -> tuple[Played, dict[str, float], list[LeagueMatch]]:
        """A step's matches as one rollout, its figures, and the matches. Raises `WorkflowError` for tasks that do not divide into them."""
        if why := league_conflict(self.league.options, roles=len(self.roles), tasks=count):
            raise WorkflowError(f"league.{why}")
        self.league.keep_self(step, {name: learner.policy.params for name, learner in self.learners.items()})
        training = self.assignment.training(step)
        matches = self.league.matches(step, first, count, [role for role in self.roles if self.assignment.roles[role] in training])
        parts = tuple(self._match_rollout(step, match) for match in matches)
        played = _join(self.game, self.mesh)(parts, jnp.arange(first, first + count, dtype=jnp.int32))
        figures = self.figures_of(played, step)
        return played, figures | self.league.record(matches, fetch(played.rollout.episodes, self.mesh)), matches

    def _match_rollout(self, step: int, match: LeagueMatch) -> Played:
        """The rollout of one match. Its program has a model per role, so that one program plays all matches."""
        recipe, models = self.options.recipe, self.assignment.roles
        present = {name: learner.policy.params for name, learner in self.learners.items()}
        past = present if match.past is None else self.league.selves[match.past].params
        params = {role: self._in_play(name, (present if role in match.learns else past)[name]) for role, name in models.items()}
        configs = tuple((role, self.learners[models[role]].config) for role in self.roles)
        how = SamplingParams.to_train(recipe.temperature, recipe.top_k, recipe.top_p)
        roles = tuple((role, role) for role in self.roles)
        run = _training_rollout(self.game, self.mesh, match.count, roles, configs, how, tuple(sampling_of(recipe).items()))
        return run(self._sampled_from(params), jnp.int32(match.first), self._data_key, step=jnp.int32(step))

    def _players(self, matches: Sequence[LeagueMatch], index: int) -> dict[str, str]:
        """Role -> who played it in an environment of a step: its model, or the model as it was before a step, `MODEL@STEP`."""
        match = matches[index // matches[0].count] if matches else None
        if match is None or match.past is None:
            return dict(self.assignment.roles)
        step = self.league.selves[match.past].step
        return {role: model if role in match.learns else f"{model}@{step}" for role, model in self.assignment.roles.items()}

    # ------------------------------------------------------------------------------------------------ checkpoints
    def policies(self) -> dict[str, TrainState]:
        """See `Team.policies`; past selves as `<model>.past<number>`, without an optimizer."""
        if self.league is None:
            return super().policies()
        stored = self.league.stored({name: learner.policy.params for name, learner in self.learners.items()})
        return super().policies() | {name: TrainState(params, optax.EmptyState()) for name, params in stored.items()}

    def state(self) -> dict[str, Any]:
        """See `Team.state`; with what came of meeting past selves."""
        return super().state() | ({} if self.league is None else {"league": self.league.state()})

    def restore(self, now: Mapping[str, TrainState], state: Mapping[str, Any]) -> None:
        """See `Team.restore`."""
        super().restore(now, state)
        if self.league is not None:
            stored, played = {name: policy.params for name, policy in now.items()}, any(x.version for x in self.learners.values())
            self.league.restore(state["league"], stored, list(self.learners), played)

    # ------------------------------------------------------------------------------------------------ samples and demonstrations
    def figures_of(self, played: Played, step: int) -> dict[str, float]:
        """Figures of a rollout by name. Raises `RolloutError` if no instance could be played."""
        figures = {name: float(x) for name, x in jax.device_get(played.summary).items()}
        if figures["aborted"] == 1.0:
            raise RolloutError(f"step {step}: no instance of {self.game.name} could be played; the game's settings contradict each other")
        for role in self.roles:
            reward = self.options.recipe.reward_of(figures[f"role/{role}/team"], figures[f"role/{role}/local"])
            figures[f"role/{role}/reward"] = reward
        return figures

    def _trained(self, played: Played, step: int) -> tuple[Tokens, Samples]:
        """Tokens and columns of a rollout; `where` is False for roles that do not train at a step."""
        tokens, table = self._drawn(played)
        trains = np.asarray([self.assignment.roles[role] in self.assignment.training(step) for role in self.roles])
        table.where[:] &= trains[table.agent]  # `played` stays: rewards of the others count in returns
        return tokens, dataclasses.replace(table, budget=self.budgets[table.agent])

    def _refilled(self, step: int, first: int, count: int) -> tuple[Played, dict[str, float], tuple[int, ...]]:
        """A step's rounds as one rollout of the chosen tasks, its figures, and the tasks that were left out."""
        def play_round(first: int, count: int, drawn: set[int]) -> RefillRound:
            played = self._played(step, first, count)
            signal = signal_of(self.options.recipe, *self._trained(played, step))
            return RefillRound(tuple(range(first, first + count)), signal, self.figures_of(played, step), played)

        rounds = self.refills.rounds(play_round, step, first, count)
        chosen = chosen_tasks(rounds, count)
        played, numbers = rounds[0].played, list(rounds[0].numbers)
        choose = _choice(self.game, self.mesh)
        for number, refill in enumerate(rounds[1:], 1):
            tasks = [*numbers, *refill.numbers]
            numbers = chosen_tasks(rounds[: number + 1], count)
            index = np.asarray([tasks.index(task) for task in numbers], np.int32)
            played = choose(played, refill.played, index, np.asarray(numbers, np.int32))
        return played, refill_figures(rounds, chosen), tasks_left_out(rounds, chosen)

    def _drawn(self, played: Played) -> tuple[Tokens, Samples]:
        """See `from_pool`. Ids come to the host where models have devices of their own, for all of them must read them."""
        return from_pool(jax.device_get(played.pool) if self.split else played.pool, self.options.minibatch)

    def _worth(self, table: Samples, tokens: Tokens, advantages: np.ndarray) -> dict[tuple, float]:
        """(environment, play, turn, role, candidate) -> advantage, of the samples that count."""
        _, env = np.unique(table.instance, return_inverse=True)
        plays = int(table.trajectory.max() + 1) // (int(env.max()) + 1)
        columns = (env, table.trajectory % plays, table.turn, table.agent, tokens.rank, advantages, table.where)
        return {(e, p, t, self.roles[a], k): float(x) for e, p, t, a, k, x, counts in zip(*(c.tolist() for c in columns)) if counts}

    def demonstrate(self, step: int, count: int) -> tuple[Tokens, list[str]]:
        """See `Team.demonstrate`."""
        played = _scripted_rollout(self.game, self.mesh, count, self.script)({}, jnp.int32(step * count), self._warm_key)
        tokens, table = self._drawn(played)
        return tokens, self._speakers(table)

    def _speakers(self, table: Samples) -> list[str]:
        """The role of each sample; "" where it does not count."""
        return [self.roles[agent] if counts else "" for agent, counts in zip(table.agent, table.where)]

    def evaluate(
        self, seats: Mapping[str, str | Seat], split: str, tasks: int, *, plays: int = 1, temperature: float = 0.0, first: int = 0
    ) -> Evaluation:
        """See `Team.evaluate`. Raises `ValueError` for a seat that compiled play does not have."""
        table, models = self._seated(seats)
        if idle := [role for role, seat in table.items() if seat.kind not in (*MODELS, "scripted", "random")]:
            raise ValueError(f"seats: {idle[0]}={table[idle[0]]}: compiled play has no such seat; play {self.game.name} hosted")

        def kind(role, seat):
            return ("model", models[role][0].config) if role in models else (seat.kind, None)

        seated = tuple((role, *kind(role, seat)) for role, seat in table.items())
        devices = self.mesh.shape["data"]
        count = min(-(-CHUNK // devices), -(-tasks // devices)) * devices
        run = _evaluation_rollout(self.game, self.mesh, count, seated, self.script, plays, float(temperature))
        params = self._sampled_from({role: params for role, (_, params) in models.items()})
        number = jnp.int32(split_index(split))
        chunks = [run(params, jnp.int32(first + s), self._evaluation_key, number, EVALUATION) for s in range(0, tasks, count)]
        seated_by_team = [role for role, seat in table.items() if seat.kind in ("trained", "start") and not seat.model]
        names = {role: self.assignment.roles[role] if role in seated_by_team else str(seat) for role, seat in table.items()}

        def record(n, when, advantages=None):
            return self._episodes(chunks, n, when, None, lambda index: names)

        outcomes, formed = self._outcomes(chunks, tasks, first)
        seat_names = {role: str(seat) for role, seat in table.items()}
        return Evaluation(split, seat_names, temperature, self.headline, outcomes, formed, {}, record)

    def _outcomes(self, chunks: list[Played], tasks: int, first: int) -> tuple[tuple[Outcome, ...], dict[str, float]]:
        ended = [fetch(c.rollout.episodes, self.mesh) for c in chunks]
        ended = jax.tree.map(lambda *x: np.concatenate(x)[:tasks], *ended)
        columns = (ended.outcome.tolist(), ended.turns.tolist(), ended.aborted.tolist())
        results = ended.results or {}
        outcomes = tuple(
            outcome_of(first + task, play, *ending, {f"result_{role}": float(x[task, play]) for role, x in results.items()})
            for task, row in enumerate(zip(*columns))
            for play, ending in enumerate(zip(*row))
        )
        formed = {}
        for role in self.roles:
            parts = [fetch((c.rollout.tables[role].where, c.rollout.tables[role].rewards.well_formed), self.mesh) for c in chunks]
            where = np.concatenate([w for w, _ in parts], axis=1)[:, :tasks]
            well_formed = np.concatenate([f[..., 0] for _, f in parts], axis=1)[:, :tasks]
            formed[role] = float((well_formed & where).sum() / max(where.sum(), 1))
        return outcomes, formed

    def _episodes(
        self,
        chunks: list[Played],
        count: int,
        when: str,
        step: int | None,
        players: Callable[[int], Mapping[str, str]],
        worth: Mapping[tuple, float] | None = None,
    ) -> list[tuple[dict, dict]]:
        """The first `count` plays, those of one task after each other; `worth` as `_worth` gives it, `players` by environment."""
        episodes, tasks = [], 0
        for played in chunks:
            environments, plays = played.rollout.episodes.aborted.shape
            rollout, instances = fetch((played.rollout, played.instances), self.mesh) if count > len(episodes) else (None, None)
            for index, play in list(itertools.product(range(environments), range(plays)))[: count - len(episodes)]:
                name = (f"{when}-{step}-{index}" if when == "train" else f"{when}-{tasks + index}") + (f"/{play}" if play else "")
                advantages = {key[2:]: x for key, x in (worth or {}).items() if key[:2] == (index, play)}
                identity = dict(name=name, step=step, when=when, play=play, advantages=advantages)
                episodes.append(episode(self.game, rollout, instances, index, dict(players(index)), **identity))
            tasks += environments
        return episodes


def outcome_of(
    task: int, play: int, outcome: float, turns: int, aborted: bool, results: Mapping[str, float] | None = None
) -> Outcome:
    """How a compiled play ended: a success with the whole outcome, 1; `results` by name, of a game whose seats win and lose."""
    return Outcome(task, play, float(outcome >= 1.0), float(turns), aborted, {"outcome": outcome} | dict(results or {}))


# --- compiled functions, kept by what they are made of: teams of one game, of one shape and sampling, share them ------------------------


@functools.lru_cache(PROGRAMS)
def _training_rollout(
    game: Game, mesh: Mesh, count: int, roles: tuple[tuple[str, str], ...], configs: tuple, how: SamplingParams, sampling: tuple
) -> Callable:
    """Of roles as (role, model), and shapes as (model, config)."""
    def player_of(params):
        return model_player(game, dict(roles), dict(configs), params, how)

    return make_rollout(game, mesh, player_of, count, "rollout.tasks", **dict(sampling))


@functools.lru_cache(PROGRAMS)
def _join(game: Game, mesh: Mesh) -> Callable:
    return make_join(game, mesh)


@functools.lru_cache(PROGRAMS)
def _choice(game: Game, mesh: Mesh) -> Callable:
    return make_choice(game, mesh)


@functools.lru_cache(PROGRAMS)
def _scripted_rollout(game: Game, mesh: Mesh, count: int, script: tuple[tuple[str, Any], ...]) -> Callable:
    def player_of(params):
        return scripted_player(game, **dict(script))

    return make_rollout(game, mesh, player_of, count, "sft.tasks", branches=DEMONSTRATIONS)


@functools.lru_cache(PROGRAMS)
def _evaluation_rollout(
    game: Game, mesh: Mesh, count: int, seated: tuple[tuple[str, str, Any], ...], script: tuple, plays: int, temperature: float
) -> Callable:
    """Of roles as (role, kind, config): tables of seats of the same kinds share a program."""
    configs = {role: config for role, _, config in seated if config is not None}

    def player_of(params) -> Player:
        models = model_player(game, {role: role for role in configs}, configs, params, temperature)
        scripted, chance = scripted_player(game, **dict(script)), scripted_player(game, **game.random_player)
        players = {role: {"scripted": scripted, "random": chance}.get(kind, models) for role, kind, _ in seated}
        return lambda role, states, prompts, keys: players[role](role, states, prompts, keys)

    return make_rollout(game, mesh, player_of, count, "evaluation.tasks", trajectories=plays)


def warm_and_data_keys(seed: int) -> tuple[Key[Array, ""], Key[Array, ""]]:
    """Of the supervised warm-up's instances and of training's, from a run's seed."""
    _, warm, data, _ = jax.random.split(jax.random.key(seed), 4)
    return warm, data
