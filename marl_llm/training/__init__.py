"""Third floor: policies on the mesh, the table of samples, the update, teams, checkpoints."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from marl_llm.coaching import Coaching
from marl_llm.games import Game
from marl_llm.games.hosted import TextBudget
from marl_llm.games.hosted import hosted as host
from marl_llm.old_names import new_object
from marl_llm.training.attached_team import AttachedTeam
from marl_llm.training.batch import Batch
from marl_llm.training.checkpoints import CheckpointError, Checkpoints
from marl_llm.training.compiled import CompiledTeam, warm_and_data_keys
from marl_llm.training.hosted import HostedTeam
from marl_llm.training.league import LeagueOptions, league_conflict
from marl_llm.training.learner import Learner, ModelSpec, with_value_head
from marl_llm.training.mesh import compile_quickly, make_mesh, over_data, use_cpu_devices
from marl_llm.training.packing import PackingError, Tokens, TokenSample, pack
from marl_llm.training.placement import PlacementError, parts_of, split_evenly
from marl_llm.training.play_options import PlayOptions
from marl_llm.training.recorded import RecordError, read_recorded
from marl_llm.training.rollouts import make_rollout, sampling_of, summarise
from marl_llm.training.scoring import make_token_kl
from marl_llm.training.seats import Seat, parse_seat, parse_seats
from marl_llm.training.sft import make_sft
from marl_llm.training.sweep import Sweep
from marl_llm.training.team import Team
from marl_llm.training.train_state import (
    TrainState,
    apply_gradient,
    decay_share,
    decayed,
    fresh_train_state,
    linear_decay,
    make_optimizer,
    make_train_state,
    scheduled_rate,
    state_bytes,
)
from marl_llm.training.update import Advantages, LearnerOptions, Trained, Update, compute_advantages
from marl_llm.workflows import Assignment, Environment, RolloutError, WorkflowError


def make_team(
    game: Game | Environment,
    assignment: Assignment,
    models: Mapping[str, ModelSpec],
    options: LearnerOptions,
    mesh: Mesh,
    *,
    parts: Mapping[str, Mesh] | None = None,
    play: PlayOptions | None = None,
    seed: int = 0,
    evaluation_seed: int = 2026,
    permute_rewards: bool = False,
    refills: int = 0,
    script: Mapping[str, Any] | None = None,
    hosted: bool = False,
    text: TextBudget | None = None,
    coaching: Coaching | None = None,
    league: LeagueOptions | None = None,
) -> Team:
    """The team of a game, see `Team`: a `CompiledTeam` for a value-state game, a `HostedTeam` for a workflow's `Environment`, an
    `AttachedTeam` for a program's.

    Args:
      parts: model -> its part of the mesh, from `parts_of`; None: every model has the whole mesh.
      play: of hosted teams. evaluation_seed: of the tasks of a value-state game's evaluations; an environment has its own.
      refills: rounds of further tasks while a step lacks tasks with signal; see `marl_llm.training.refills`.
      script: options of a value-state game's scripted player.
      hosted: play a value-state game through a controller and an engine; the same seed gives the same samples (law 13).
      text: hosted in ordinary text, for chat models; see `marl_llm.games.hosted`.
      coaching: who scores every action of a workflow; see `marl_llm.coaching`.
      league: how a team that plays compiled meets its past selves, if it does; see `marl_llm.training.league`.
    """
    common = dict(parts=parts, seed=seed, permute_rewards=permute_rewards, refills=refills)
    if options.recipe.returns == "counterfactual" and (hosted or isinstance(game, Environment)):
        raise WorkflowError("recipe.returns='counterfactual' replays compiled play only: play a value-state game compiled (hosted=False)")
    hosts = hosted or isinstance(game, Environment)
    if league is not None and (why := league_conflict(league, roles=2, hosted=hosts)):
        raise WorkflowError(f"league.{why}")
    if isinstance(game, Environment):
        kind = HostedTeam if game.program is None else AttachedTeam
        return kind(game, assignment, models, options, mesh, play=play, coaching=coaching, **common)
    if coaching is not None:
        raise WorkflowError("coaching: the game is no workflow, and its rewards are its own; coach an Environment")
    if not hosted:
        compiled_play = dict(evaluation_seed=evaluation_seed, script=script, league=league)
        return CompiledTeam(game, assignment, models, options, mesh, **compiled_play, **common)
    _, data_key = warm_and_data_keys(seed)
    tree = options.recipe.sampling == "tree"
    environment = host(game, data_key, evaluation_key=jax.random.key(evaluation_seed), script=script, text=text, tree=tree)
    draws = jax.random.split(data_key)[1]  # those of compiled play
    return HostedTeam(environment, assignment, models, options, mesh, play=play, draws=draws, **common)


__all__ = [
    "Advantages", "AttachedTeam", "Batch", "CheckpointError", "Checkpoints", "CompiledTeam", "HostedTeam", "Learner", "LeagueOptions",
    "LearnerOptions", "ModelSpec", "PackingError", "PlacementError", "PlayOptions", "TrainState", "RecordError", "RolloutError", "Seat",
    "Sweep", "Team", "TokenSample",
    "Tokens", "Trained", "Update", "compute_advantages", "compile_quickly", "decay_share", "decayed", "fresh_train_state", "linear_decay",
    "make_mesh", "make_optimizer", "make_sft", "make_train_state", "make_rollout", "make_team", "make_token_kl", "over_data", "pack",
    "parse_seat", "parse_seats", "parts_of", "read_recorded", "sampling_of", "scheduled_rate", "split_evenly", "apply_gradient",
    "state_bytes", "summarise", "use_cpu_devices", "with_value_head",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return new_object(__name__, name)
