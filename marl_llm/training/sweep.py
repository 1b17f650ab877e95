"""Many teams that train side by side in one program: one compilation, and each team with its own seed and rates.

    teams = [CompiledTeam(game, assignment, models(seed), options, mesh, seed=seed) for seed in range(16)]
    sweep = Sweep(teams)
    for step in range(300):
        sweep.sft_step(step, 32, 2e-3)
    sweep.start_rl()
    for step in range(200):
        figures = sweep.step(step, first=32 * step, count=32, learning_rates=1e-3)
    evaluations = sweep.evaluate("test", 256)
    sweep.unstack()                                 # each team is an ordinary one again

Stacked along a first axis, the parameters of all teams go through one program (`jax.vmap`, split over the devices). What the host does
stays as it is for one team: advantages, and which samples share a row. A team in a sweep does the arithmetic of a team alone, up to the
rounding of differently shaped products. On two CPU cores 16 teams take 13.6 times as long as one (`benchmarks.sweep`): a team alone waits
for its small products, not for dispatches. With `jax.lax.map` over the teams in place of `jax.vmap` in the update it is 13.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marl_llm.algorithms import Samples, needs
from marl_llm.evaluation import Evaluation
from marl_llm.games import split_index
from marl_llm.models import log_prob_gap_bound
from marl_llm.rollout import model_player, scripted_player
from marl_llm.sampling import SamplingParams
from marl_llm.training.batch import Batch, by_identity, columns_of, from_pool
from marl_llm.training.compiled import CHUNK, DEMONSTRATIONS, CompiledTeam, outcome_of
from marl_llm.training.distillation import Frozen
from marl_llm.training.learner import PROGRAMS
from marl_llm.training.mesh import TEAMS, teams_mesh
from marl_llm.training.minibatches import minibatches_of, prompts_of, seed_of_step
from marl_llm.training.packing import PackedRows, Tokens
from marl_llm.training.rollouts import TRAIN, make_team_rollouts, sampling_of
from marl_llm.training.scoring import per_sample
from marl_llm.training.sft import sft_program
from marl_llm.training.steps import few_shapes, mean_metrics
from marl_llm.training.team import EVALUATION
from marl_llm.training.train_state import TrainState
from marl_llm.training.update import Advantages, LearnerOptions, Trained, Update, compute_advantages, tied_shares


class SweepError(ValueError):
    """What cannot be trained as a sweep; the message says what and why."""


class Dealt(NamedTuple):
    """What one model of one team learns from in a step."""

    minibatches: list[list[int]]  # the samples of each optimizer step. scales: of their denominators, see `Update`
    scales: list[np.float32]
    metrics: dict[str, float]  # by name, of the whole step

    def minibatch(self, number: int) -> list[int]:
        """The samples of an optimizer step; none where another team has more steps."""
        return self.minibatches[number] if number < len(self.minibatches) else []


class Sweep:
    """Several `CompiledTeam`s of one game, with equal options and models of equal shapes, that train in one program.

    Args:
      teams: they may differ in their seeds and in the parameters that they begin with. They are stale until `unstack`.
      devices: that share the teams; None: all of JAX's, as many as divide the number of teams.

    Raises `SweepError` for teams that differ in more than that, and for recipes whose update needs more than the step's samples: a critic,
    a KL to the start, running means, the largest entropies of a step; adapters; options of one model's own.
    """

    def __init__(self, teams: Sequence[CompiledTeam], devices: Sequence[jax.Device] | None = None):
        check_alike(teams)
        self.teams = tuple(teams)
        self._first = self.teams[0]
        self.mesh = teams_mesh(len(teams), devices)
        self.options = self._first.options
        self._imitated: dict[tuple[int, int], list[tuple[Tokens, list[str]]]] = {}
        self.policies: dict[str, TrainState] = {}
        self._stack_policies()

    def __len__(self) -> int:
        return len(self.teams)

    # ------------------------------------------------------------------------------------------------ parameters
    def _stack_policies(self) -> None:
        names = self._first.learners
        self.policies = {name: self._stacked([team.learners[name].policy for team in self.teams]) for name in names}

    def _stacked(self, trees: Sequence[Any]) -> Any:
        """Equal trees as one, with a first axis of teams, split over the devices."""
        place = NamedSharding(self.mesh, P(TEAMS))
        return jax.tree.map(lambda *x: jax.device_put(np.stack(jax.device_get(x)), place), *trees)

    def _repeated(self, value: Any, dtype: Any = None) -> np.ndarray:
        """A value that is one for all teams, or one for each, along an axis of teams."""
        return np.broadcast_to(np.asarray(value, dtype), (len(self),))

    def unstack(self) -> None:
        """Gives every team its parameters and optimizer back, so that it can be evaluated, kept and exported as always."""
        for name, policy in self.policies.items():
            policy = jax.device_get(policy)
            for number, team in enumerate(self.teams):
                learner = team.learners[name]
                learner.trained = Trained(learner._placed(jax.tree.map(lambda x, number=number: x[number], policy)))

    # ------------------------------------------------------------------------------------------------ supervised warm-up
    def sft_step(self, step: int, count: int, learning_rates: float | Sequence[float]) -> list[dict[str, float]]:
        """`Team.sft_step` of every team: mean loss, gradient norm and tokens of its models. Rates: one for all, or one for each."""
        if (step, count) not in self._imitated:
            self._imitated[step, count] = self._demonstrations(step, count)
        rates, figures_of_models = self._repeated(learning_rates, np.float32), []
        for leader, members in self._first._families().items():
            packed, sizes = [], []
            for team, (tokens, speakers) in zip(self.teams, self._imitated[step, count], strict=True):
                chosen = [i for i, role in enumerate(speakers) if team.assignment.roles.get(role) in members]
                packed.append(tokens.pack(chosen, self.options.row_tokens, 1, few_shapes(self.options.microbatch_tokens)))
                sizes.append(np.sum(tokens.size[np.asarray(chosen, int)]))
            program = _imitation(self.options, self._first.learners[leader].spec.config, self.mesh)
            self.policies[leader], model_figures = program(self.policies[leader], None, stacked_rows(packed), rates)
            figures_of_models.append(jax.device_get(model_figures) | {"tokens": np.asarray(sizes)})
        return [{key: float(np.mean([x[key][n] for x in figures_of_models])) for key in figures_of_models[0]} for n in range(len(self))]

    def _demonstrations(self, step: int, count: int) -> list[tuple[Tokens, list[str]]]:
        run = _scripted_rollouts(self._first.game, self.mesh, count, self._first.script)
        keys = jnp.stack([team._warm_key for team in self.teams])
        none = {"": np.zeros(len(self))}  # a tree without leaves has no axis of teams
        numbers = [self._repeated(x, np.int32) for x in (step * count, TRAIN, 0)]
        pools = jax.device_get(run(none, numbers[0], keys, *numbers[1:]).pool)
        samples = [from_pool(jax.tree.map(lambda x, n=n: x[n], pools), self.options.minibatch) for n in range(len(self))]
        return [(tokens, self._first._speakers(table)) for tokens, table in samples]

    def start_rl(self) -> None:
        """Ends the warm-up of every team; see `Team.start_rl`."""
        self.unstack()
        self._imitated.clear()
        for team in self.teams:
            team.start_rl()
        self._stack_policies()

    # ------------------------------------------------------------------------------------------------ reinforcement
    def step(self, step: int, first: int, count: int, learning_rates: float | Sequence[float]) -> list[dict[str, Any]]:
        """`play`, then `learn`: every team's figures by name, those of models as `model/<name>/<figure>`."""
        batches = self.play(step, first, count)
        figures = [dict(batch.figures) for batch in batches]
        for team_figures, updates in zip(figures, self.learn(batches, learning_rates), strict=True):
            for name, update in updates.items():
                team_figures |= {f"model/{name}/{key}": x for key, x in update.items()}
        return figures

    def play(self, step: int, first: int, count: int) -> list[Batch]:
        """`Team.play` of every team, each on its own tasks `first ... first + count` of the training split.

        Raises `RolloutError` if a team cannot play one instance.
        """
        roles = tuple(self._first.assignment.roles.items())
        configs = tuple((name, learner.config) for name, learner in self._first.learners.items())
        run = _training_rollouts(self._first.game, self.mesh, count, roles, configs, self.options.recipe)
        params = {name: policy.params for name, policy in self.policies.items()}
        keys = jnp.stack([team._data_key for team in self.teams])
        numbers = [self._repeated(x, np.int32) for x in (first, TRAIN, step)]
        played = jax.device_get(run(params, numbers[0], keys, *numbers[1:]))
        batches = []
        for number, team in enumerate(self.teams):
            of_team = jax.tree.map(lambda x, number=number: x[number], played)
            batches.append(team.batch_of(of_team, step, team.figures_of(of_team, step)))
        return batches

    def learn(
        self, batches: Sequence[Batch], learning_rates: float | Sequence[float] | Mapping[str, float | Sequence[float]]
    ) -> list[dict[str, dict[str, float]]]:
        """`Team.learn` of every team on its batch of one step: metrics by model.

        Rates are one for all teams, or one for each; models whose rates differ have them by name.
        """
        step = batches[0].step
        samples = [(batch.tokens, team.learned_table(batch)) for team, batch in zip(self.teams, batches, strict=True)]
        advantages_of_teams = [compute_advantages(self.options.recipe, *team_samples) for team_samples in samples]
        for team, advantages in zip(self.teams, advantages_of_teams, strict=True):
            team.advantages = np.asarray(advantages.estimates)
        updates: list[dict[str, dict[str, float]]] = [{} for _ in self.teams]
        for name in self._first.assignment.training(step):
            rates = learning_rates[name] if isinstance(learning_rates, Mapping) else learning_rates
            model_figures = self._learn(name, step, samples, advantages_of_teams, self._repeated(rates, np.float32))
            for team, (_, table), update, figures in zip(self.teams, samples, updates, model_figures, strict=True):
                if np.any(table.where):
                    update[name] = team.figures_of_update(name, figures, 0.0)
                    team.learners[name].version += 1
        return updates

    def _learn(
        self, name: str, step: int, samples: list, advantages_of_teams: list[Advantages], rates: np.ndarray
    ) -> list[dict[str, float]]:
        """The update of one model of every team; see `Update`. A team without samples for a minibatch keeps its parameters there."""
        update, program = _update(self.options, self._first.learners[name].spec.config, self.mesh)
        plays = np.asarray([self._first.assignment.roles[role] == name for role in self._first.roles])
        teams = zip(self.teams, samples, advantages_of_teams, strict=True)
        dealt_to_teams = [self._dealt(team, step, *team_samples, advantages, plays) for team, team_samples, advantages in teams]
        longest = max(1, *(len(dealt.minibatches) for dealt in dealt_to_teams))  # a minibatch without samples gives the metrics their names
        params, old, parts = self.policies[name].params, [], []
        chosen = [[dealt.minibatch(k) for dealt in dealt_to_teams] for k in range(longest)]
        packed = [self._packed(samples, advantages_of_teams, numbers) for numbers in chosen]
        for rows, _, _ in packed[1:]:
            old.append(update._score_old((params, None), rows))
        for k, (rows, arrays, active) in enumerate(packed):
            arrays |= {"old": np.zeros(rows.targets.shape, np.float32) if k == 0 else old[k - 1]}
            scalars = {"kl_coef": self._repeated(0, np.float32), "first_step": self._repeated(k == 0)}
            scales = np.asarray([dealt.scales[k] if k < len(dealt.scales) else 1.0 for dealt in dealt_to_teams], np.float32)
            self.policies[name], metrics, gap = program(active, self.policies[name], rows, arrays, scalars, scales, rates)
            parts.append((metrics, gap, active, fill_of(rows)))
        bound = {"log_prob_gap_bound": log_prob_gap_bound(self._first.learners[name].config.compute_dtype)}
        figures_of_teams = team_metrics(jax.device_get(parts), len(self))
        return [dealt.metrics | figures | bound for dealt, figures in zip(dealt_to_teams, figures_of_teams, strict=True)]

    def _dealt(self, team: CompiledTeam, step: int, tokens: Tokens, table: Samples, advantages: Advantages, plays: np.ndarray) -> Dealt:
        """The samples of each optimizer step of one team, and what is known of them before the first."""
        recipe, options = self.options.recipe, self.options
        table = columns_of(tokens, table)
        order = by_identity(tokens, table)
        mine = order[(table.where & plays[table.agent])[order]]
        useful = mine[~advantages.zero_variance[mine]] if recipe.filter_zero_variance else mine
        prompts = prompts_of(tokens, table, useful)
        minibatches = minibatches_of(prompts, options.minibatch, options.epochs, seed_of_step(team.seed, step))
        update, _ = _update(options, next(iter(self._first.learners.values())).spec.config, self.mesh)
        metrics = advantages.metrics | tied_shares(table, advantages.zero_variance, len(plays)) | {"masked_truncated": 0.0}
        metrics |= {"groups": float(len(prompts_of(tokens, table, mine))), "groups_with_signal": float(len(prompts))}
        return Dealt(minibatches, update._denominator_scales(tokens, mine, minibatches), metrics)

    def _packed(self, samples: list, of_teams: list[Advantages], chosen: list[list[int]]) -> tuple[PackedRows, dict, np.ndarray]:
        """One minibatch of every team in rows: (rows, arrays beside them, which teams have samples)."""
        few = few_shapes(self.options.microbatch_tokens)
        rows = [tokens.pack(some, self.options.row_tokens, 1, few) for (tokens, _), some in zip(samples, chosen, strict=True)]
        worth = [per_sample(team_rows, advantages.estimates) for team_rows, advantages in zip(rows, of_teams, strict=True)]
        rows = stacked_rows(rows)
        advantages = np.stack([np.pad(x, [(0, rows.tokens.shape[1] - len(x)), (0, 0)]) for x in worth])
        return rows, {"advantages": advantages}, np.asarray([bool(some) for some in chosen])

    # ------------------------------------------------------------------------------------------------ evaluation
    def evaluate(self, split: str, tasks: int) -> list[Evaluation]:
        """Every team on the same tasks of a split, greedily, as `Team.evaluate` does it for one; without transcripts."""
        team, count = self._first, min(CHUNK, tasks)
        configs = tuple((name, learner.config) for name, learner in team.learners.items())
        run = _evaluation_rollouts(team.game, self.mesh, count, tuple(team.assignment.roles.items()), configs)
        params = {name: policy.params for name, policy in self.policies.items()}
        keys = jnp.stack([member._evaluation_key for member in self.teams])
        fixed = [self._repeated(x, np.int32) for x in (split_index(split), EVALUATION)]
        chunks = [jax.device_get(run(params, self._repeated(at, np.int32), keys, *fixed).rollout.episodes) for at in range(0, tasks, count)]
        ended = jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, :tasks, 0], *chunks)
        return [self._evaluation(split, jax.tree.map(lambda x, n=n: x[n], ended)) for n in range(len(self))]

    def _evaluation(self, split: str, ended) -> Evaluation:
        columns = zip(ended.outcome.tolist(), ended.turns.tolist(), ended.aborted.tolist())
        outcomes = [outcome_of(task, 0, *ending) for task, ending in enumerate(columns)]
        seats = dict.fromkeys(self._first.roles, "trained")
        return Evaluation(split, seats, 0.0, self._first.headline, tuple(outcomes), {})


def fill_of(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of every team's rows, and how many their rows could hold: what `packing` is the share of. `[teams]` each."""
    return np.count_nonzero(rows.segments, axis=(1, 2)), np.count_nonzero(rows.length[:, :, 0], axis=1) * rows.tokens.shape[2]


def team_metrics(parts: list[tuple], teams: int) -> list[dict[str, float]]:
    """Each team's metrics of an update: means over its own minibatches, see `mean_metrics`; zeros for a team that has none."""
    out = []
    for number in range(teams):
        active_parts = [(metrics, gap) for metrics, gap, active, _ in parts if active[number]]
        picked = [jax.tree.map(lambda x, number=number: np.float64(x[number]), metrics) for metrics, _ in active_parts]
        means = {name: float(x) for name, x in mean_metrics(picked).items()} if picked else dict.fromkeys(parts[0][0], 0.0)
        gap = max((float(gap[number]) for _, gap in active_parts), default=0.0)
        tokens, room = (sum(int(fill[k][number]) for *_, fill in parts) for k in (0, 1))
        out.append(means | {"log_prob_gap": gap, "updates": float(len(active_parts)), "packing": tokens / max(room, 1)})
    return out


def check_alike(teams: Sequence[CompiledTeam]) -> None:
    """Raises `SweepError` naming what keeps these teams from training in one program."""
    if not teams:
        raise SweepError("a sweep needs at least one team")
    first = teams[0]
    for team in teams:
        if not isinstance(team, CompiledTeam):
            raise SweepError(f"a {type(team).__name__} cannot be swept: sweeps are of games that are played compiled")
        shapes = [{name: learner.spec.config for name, learner in x.learners.items()} for x in (first, team)]
        for part, same in (
            ("game", team.game == first.game and team.script == first.script),
            ("options", team.options == first.options),
            ("assignment", team.assignment == first.assignment),
            ("models' shapes", shapes[0] == shapes[1]),
            ("groups of models that begin alike", team._families() == first._families()),
        ):
            if not same:
                raise SweepError(f"teams of a sweep differ in their {part}; they may differ in seeds, parameters and learning rates")
        if why := _unsweepable(team):
            raise SweepError(f"a sweep cannot have {why}: train these teams one by one")


def _unsweepable(team: CompiledTeam) -> str:
    """What a team has that a sweep cannot have; empty if there is nothing."""
    recipe = team.options.recipe
    reasons = {
        "a critic": team.options.has_critic,
        "a KL to the start": bool(recipe.kl_coef),
        "running means (advantage_estimator='ema')": recipe.advantage_estimator == "ema",
        "the entropies of a whole step": "entropy_threshold" in needs(recipe),
        "truncated responses left out of the loss": recipe.mask_truncated,
        "teachers (distill_coef)": recipe.distill_coef > 0,
        "replays (returns='counterfactual')": recipe.returns == "counterfactual",
        "adapters or options of one model's own": any(x.base is not None or x.spec.options is not None for x in team.learners.values()),
        "models on devices of their own": team.split,
        "tasks that are played in place of others (refills)": bool(team.refills.limit),
        "past selves (league)": team.league is not None,
    }
    return next((reason for reason, present in reasons.items() if present), "")


def stacked_rows(rows: Sequence[PackedRows]) -> PackedRows:
    """Rows of several teams with a first axis of teams, filled up with empty rows to as many as the largest has. NumPy."""
    most = max(team_rows.tokens.shape[0] for team_rows in rows)

    def filled(team_rows: PackedRows) -> PackedRows:
        lacking = most - team_rows.tokens.shape[0]
        padded = jax.tree.map(lambda x: np.pad(x, [(0, lacking)] + [(0, 0)] * (x.ndim - 1)), team_rows)
        padded.sample[most - lacking :] = -1
        return padded

    return jax.tree.map(lambda *x: np.stack(x), *map(filled, rows))


# --- compiled programs, kept by what they are made of -------------------------------------------------------------------------------------


@functools.lru_cache(PROGRAMS)
def _training_rollouts(game, mesh: Mesh, count: int, roles: tuple, configs: tuple, recipe) -> Callable:
    settings = SamplingParams.to_train(recipe.temperature, recipe.top_k, recipe.top_p)

    def player_of(params):
        return model_player(game, dict(roles), dict(configs), params, settings)

    return make_team_rollouts(game, mesh, player_of, count, **sampling_of(recipe))


@functools.lru_cache(PROGRAMS)
def _evaluation_rollouts(game, mesh: Mesh, count: int, roles: tuple, configs: tuple) -> Callable:
    def player_of(params):
        return model_player(game, dict(roles), dict(configs), params, 0.0)

    return make_team_rollouts(game, mesh, player_of, count, trajectories=1)


@functools.lru_cache(PROGRAMS)
def _scripted_rollouts(game, mesh: Mesh, count: int, script: tuple) -> Callable:
    def player_of(_):
        return scripted_player(game, **dict(script))

    return make_team_rollouts(game, mesh, player_of, count, branches=DEMONSTRATIONS)


@functools.lru_cache(PROGRAMS)
def _imitation(options: LearnerOptions, config, mesh: Mesh) -> Callable:
    return sft_program(options, config, mesh)


@functools.lru_cache(PROGRAMS)
def _update(options: LearnerOptions, config, mesh: Mesh) -> tuple[Update, Callable]:
    """The update of one model of all teams, and `(active, policy, rows, arrays, scalars, scales, rates) -> (policy, metrics, gap)`."""
    update = Update(options, config, mesh)

    def program(active, policy: TrainState, rows, arrays, scalars, scales, rates):
        new, metrics, gap = update._act(policy, None, Frozen(), rows, arrays, scalars, scales, rates)

        def chosen(new, old):
            return jnp.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(chosen, new, policy), metrics, gap

    return update, jax.jit(program, donate_argnums=(1,))
