"""From a config to a team on devices: what the experiment commands share. JAX is imported when it starts, so that `--help` stays quick."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from marl_llm.activity import doing
from marl_llm.runs import checks
from marl_llm.runs.command import ConfigError
from marl_llm.untrusted import LARGEST_REWARD, check_count, check_number

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan

CACHE = "~/.cache/marl_llm/xla"


def start_jax(config, cache: str | None, processes: int = 1, game_dir: pathlib.Path | None = None):
    """Starts JAX with one CPU device per core (or the accelerators that there are) and a compilation cache on disk; returns the mesh.

    `cache` names the directory of compiled programs, "" none; None leaves it to the environment's JAX_COMPILATION_CACHE_DIR, else `CACHE`.
    `game_dir` is where a run directory keeps a user's file.
    `processes` that take equal parts of the devices have joined before (`marl_llm.training.processes.start`).
    `config.devices` of 0 takes the most devices that a compiled rollout divides over. Where play is hosted it takes all, but one CPU device
    for published models: each device would hold a copy of their parameters, and one uses all cores for them. `config.mesh.fsdp` of 0 takes
    all devices that are left, and `config.devices` is 1 then unless it is set.
    """
    import jax

    from marl_llm.training import compile_quickly, make_mesh, use_cpu_devices

    if config.quick_compile:
        compile_quickly()
    inner = max(1, config.mesh.fsdp) * config.mesh.tensor
    if config.devices * inner % processes:
        devices = f"config.devices={config.devices} x mesh {inner}"
        raise ConfigError(f"{devices} do not divide over {processes} processes; choose a multiple, or config.devices=0")
    try:
        use_cpu_devices((config.devices * inner // processes) if config.devices else (inner if inner > 1 else None))
    except ValueError as error:
        raise ConfigError(f"config.devices={config.devices}: {error}") from error
    if cache is None and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = CACHE
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(cache).expanduser()) if cache else None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    positions = max(1, jax.device_count() // inner)
    count, fsdp = config.devices, config.mesh.fsdp
    if not count and not (config.hosted or is_environment(config, game_dir)):
        count = checks.most_devices(config, positions)
    elif not count:
        on_one = jax.default_backend() == "cpu" and processes == 1 and has_published_model(config)
        count = 1 if on_one else positions
    if not fsdp:
        count = config.devices or 1
        fsdp = max(1, positions // count)
    taken = count * fsdp * config.mesh.tensor
    if processes > 1 and taken != jax.device_count():
        raise ConfigError(
            f"{processes} processes have {jax.device_count()} devices, but this run takes {taken}: every process needs its part. "
            "Set config.devices (and config.rollout.tasks, config.sft.tasks to multiples of it), or start fewer processes"
        )
    return make_mesh(count, fsdp, config.mesh.tensor)


def has_published_model(config) -> bool:
    """Whether a model of a config begins with a checkpoint, or has the shape of one."""
    from marl_llm.models import PRESETS

    sections = (config.model, *config.models.values())
    return any(section.get("path") or "vocab_size" in PRESETS.get(section.get("preset"), {}) for section in sections)


def is_environment(config, game_dir: pathlib.Path | None) -> bool:
    """Whether a config's game is a workflow. A user's own is made to see; a game that cannot be made is none, and `resolve` says why."""
    from marl_llm.games import GAMES, GameError, find_game
    from marl_llm.games.registry import ENVIRONMENTS
    from marl_llm.workflows import Environment

    if config.game.name in GAMES:
        return config.game.name in ENVIRONMENTS
    try:
        game = find_game(config.game.name, game_dir).make(**checks.given(config.game, ("name",)))
    except (GameError, ValueError, TypeError, OSError):
        return False
    if isinstance(game, Environment):
        game.close()
    return isinstance(game, Environment)


@contextlib.contextmanager
def tools_of(config, processes: int = 1) -> Iterator[None]:
    """The place where programs are run, as `config.tools` says, for the whole process. Opened before the game is made, which may ask.

    `processes` share a cluster alike. Raises `SandboxError` where there is no cluster, or a node cannot fence programs in.
    """
    t = config.tools
    if t.backend == "local" and not t.workers:
        yield  # the default, made when a tool first asks
        return
    from marl_llm.tools.sandbox import ClusterSandbox, Sandbox, using
    from marl_llm.tools.sandbox.on_ray import RayCluster

    if t.backend == "local":
        sandbox = Sandbox(t.workers)
    else:
        sandbox = ClusterSandbox(RayCluster(t.address, t.workers, processes), note=lambda line: print(line, file=sys.stderr))
    with using(sandbox):
        yield


def hardware_of(mesh) -> str:
    """The devices in words."""
    device = mesh.devices.flat[0]
    return f"{mesh.devices.size} x {device.device_kind} ({device.platform}), {os.cpu_count()} CPU cores"


def microbatch_tokens(config, plan: Plan, platform: str) -> int:
    """`optimizer.microbatch_tokens`, or what suits the platform ('cpu', 'gpu' or 'tpu') where it is left open."""
    from marl_llm.runs.sections import MICROBATCH

    tokens, row = config.optimizer.microbatch_tokens, config.optimizer.row_tokens or plan.row_tokens
    if tokens is not None:
        return tokens
    if platform == "cpu":
        return max(MICROBATCH, row)
    return row if config.model.remat == "full" else 0  # where layers are computed again, memory decides: one row at a time


def model_specs(plan: Plan, config, mesh, served: bool = True) -> dict:
    """How each model of the team begins: random parameters, the same for equal shapes, or a checkpoint's.

    Without `served` an engine of this program draws for all, whatever `sampler` says.
    """
    import jax

    from marl_llm.models import LoraConfig, init_params, load_pretrained
    from marl_llm.runs.players import shape_options, template_options
    from marl_llm.text import load_chat
    from marl_llm.tools import VllmServer
    from marl_llm.training import ModelSpec
    from marl_llm.workflows import Environment

    made: dict = {}  # what equal sections share: teams of one base begin from one array
    specs = {}
    key, *_ = jax.random.split(jax.random.key(config.seed), 4)
    for name, shape in plan.shapes.items():
        o = plan.options[name]
        lora = LoraConfig(o["lora_rank"], o["lora_alpha"]) if o.get("lora_rank") else None
        chat = template_options(f"config.models.{name}", o)
        section = json.dumps([o.get("path"), o.get("preset"), chat, shape_options(o)], sort_keys=True)
        renderer = plan.played.renderer if isinstance(plan.played, Environment) else None
        if section not in made and "path" in o:
            try:
                loaded = load_pretrained(o["path"], mesh=mesh, stacked=config.stacked_layers, **shape_options(o))
                made[section] = (*loaded, load_chat(o["path"], chat) if plan.hosted else None)
            except ValueError as error:
                raise ConfigError(f"config.models.{name}.path={o['path']!r}: {error}") from error
        elif section not in made:
            made[section] = (shape, init_params(shape, key, stacked=config.stacked_layers), renderer)
        place = VllmServer(o["url"], o["folder"], o.get("key_env")) if served and o.get("sampler") == "vllm" else None
        specs[name] = ModelSpec(*made[section], lora, place)
    return specs


def with_teachers(specs: dict, plan: Plan, config, mesh, sources: dict | None) -> dict:
    """The models with the teachers of their roles, whose parameters are read here; `sources` as `find_teachers` found them, or None."""
    from marl_llm.runs.teachers import find_teachers, make_teachers

    teachers = make_teachers(find_teachers(config, plan) if sources is None else sources, config, mesh)
    taught = {model: {role: teacher for role, teacher in teachers.items() if plan.assignment.roles[role] == model} for model in specs}
    return {model: dataclasses.replace(spec, teachers=taught[model]) for model, spec in specs.items()}


@doing("loading the models")
def build_team(plan: Plan, config, mesh, coached: bool = True, teachers: dict | None = None):
    """The team of a config, at its start. Whoever builds it closes it. Without `coached` nobody coaches or teaches, no server draws and
    every model has all devices: only to be measured. `teachers`: where `find_teachers` has looked them up already."""
    from marl_llm.runs.coaching import make_coaching
    from marl_llm.runs.own_options import learner_options, own_learners
    from marl_llm.training import LeagueOptions, PlayOptions, make_team

    platform = mesh.devices.flat[0].platform
    specs = model_specs(plan, config, mesh, served=coached)
    specs |= {name: dataclasses.replace(specs[name], options=own) for name, own in own_learners(config, plan, platform).items()}
    if config.teachers and coached:
        specs = with_teachers(specs, plan, config, mesh, teachers)
    return make_team(
        plan.game,
        plan.assignment,
        specs,
        learner_options(config, plan, platform),
        mesh,
        parts=placed(plan, config, mesh) if coached else None,
        play=PlayOptions.of(config.rollout),
        seed=config.seed,
        evaluation_seed=config.evaluation.seed,
        permute_rewards=config.control.permute_rewards,
        refills=config.rollout.refills,
        script=plan.script,
        hosted=config.hosted,
        text=plan.text,
        coaching=make_coaching(config, plan) if coached else None,
        league=LeagueOptions.of(config.league),
    )


def placed(plan: Plan, config, mesh) -> dict | None:
    """Model -> its part of the mesh as `config.placement` says; None: all of it. Raises `ConfigError`."""
    from marl_llm.training import PlacementError, parts_of, split_evenly

    table = checks.parse_placement(config.placement)
    if table == "shared":
        return None
    try:
        if table == "split":
            if still := [name for name in plan.shapes if name not in plan.assignment.trained]:
                reason = f"placement='split' gives devices to models that train, and {still[0]!r} does not: name its own, e.g. {still[0]}:0"
                raise PlacementError(reason)
            table = split_evenly(plan.assignment.trained, mesh.shape["data"])
        return parts_of(table, plan.shapes, mesh)
    except PlacementError as error:
        raise ConfigError(f"config.{error}") from error


def begins_elsewhere(start) -> bool:
    """Whether a config's `sft` begins with models of other runs."""
    return bool(start.run or start.models)


class Source(NamedTuple):
    """Where a model begins: a checkpoint of a run, the model's name there, and the config's key that says so."""

    checkpoints: Any
    step: int
    name: str
    key: str


def sources_of(start, models: Iterable[str]) -> dict[str, Source]:
    """Model -> what a config's `sft` begins it from. Raises `ConfigError` if a checkpoint that it asks for is not there."""
    from marl_llm.training import Checkpoints
    from marl_llm.training.seats import Seat, parse_seat

    named, sources = checks.parse_sources(start.models), {}
    for model in models:
        text = named.get(model, model)
        key = f"config.sft.models={start.models!r}" if checks.elsewhere(text) else f"config.sft.run={start.run!r}"
        try:
            seat = parse_seat(text) if checks.elsewhere(text) else Seat("run", text, start.run, start.step)
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        checkpoints = Checkpoints(pathlib.Path(seat.place) / "checkpoints")
        steps = checkpoints.steps()
        step = steps[-1] if seat.step is None and steps else seat.step or 0
        if step not in steps:
            where = f": {seat.place}" if checks.elsewhere(text) else ""
            raise ConfigError(f"{key}{where} has no checkpoint {step}; it has {', '.join(map(str, steps)) or 'none'}")
        sources[model] = Source(checkpoints, step, seat.model or model, key)
    return sources


def params_of(start, like: dict) -> dict:
    """The parameters that a config starts from, by model, in the shapes of the policies `like`. Raises `ConfigError` if the other run's are
    not of this kind."""
    from marl_llm.training import CheckpointError

    params = {}
    for model, source in sources_of(start, like).items():
        try:
            params[model] = source.checkpoints.restore_params(source.step, {source.name: like[model]})[source.name]
        except CheckpointError as error:
            folder = source.checkpoints.directory / str(source.step) / "policies"
            names = ", ".join(sorted(path.name for path in folder.glob("*"))) or "none"
            why = f"{error.__cause__}. It has {names}; config.sft.models can name another, e.g. {model}=..."
            raise ConfigError(f"{source.key} cannot begin this team: {why}") from error
    return params


def restored(team, checkpoints, step: int) -> dict:
    """Puts a team where a checkpoint left it, and returns the run's state there.

    Raises `CheckpointError` for a checkpoint that is damaged, or whose state is none of this team.
    """
    from marl_llm.training import CheckpointError
    from marl_llm.training.checkpoints import abstract

    state, like = checkpoints.state(step), abstract(team.policies())
    for saved_step in (0, step):
        checkpoints.check(saved_step, like)
    kinds = {"step": int, "seed": int, "samples": int, "sampled_tokens": int, "wall_s": float | int, "cpu_s": float | int}
    path = checkpoints.directory / str(step) / "state.json"
    for key, kind in (kinds | {"silent": dict, "team": dict}).items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            raise CheckpointError(f"{path}: {key} is missing or of another kind: {ascii(state.get(key)):.60}")
    if state["step"] != step:
        raise CheckpointError(f"{path}: it is of step {state['step']}, not {step}")
    try:
        for key in ("samples", "sampled_tokens", "wall_s", "cpu_s"):
            check_number(state[key], key, 0)
        for name, steps in state["silent"].items():
            check_count(steps, f"silent.{name}")
        check_count(state.get("decay_steps", 0), "decay_steps")
        if "pays" in state:  # earlier versions kept none
            check_count(state["paid_samples"], "paid_samples")
            state["pays"] = [check_number(pay, "pays", -LARGEST_REWARD, LARGEST_REWARD) for pay in state["pays"]]
        team.restore_start(checkpoints.restore_params(0, {name: like[name] for name in team.models()}))
        team.restore(checkpoints.restore(step, like), state["team"])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise CheckpointError(f"{path}: it cannot be taken over ({why})") from error
    return state


@contextlib.contextmanager
def opened(run: str | pathlib.Path, step: int | None = None, trusted: bool = False, **changes: Any) -> Iterator[tuple]:
    """`(config, plan, team, step)` of a checkpoint of a run, the newest by default; `changes` are keys of `config.evaluation`.

    Raises `ConfigError` if there is no such run or checkpoint, or if it is neither this user's nor `trusted` (`marl_llm.runs.trust`).
    """
    from marl_llm.runs.resolve import resolve
    from marl_llm.runs.workdir import game_dir_of, read_config

    config = read_config(pathlib.Path(run), trusted)
    config.evaluation.update({name: value for name, value in changes.items() if value is not None})
    mesh = start_jax(config, None, game_dir=game_dir_of(pathlib.Path(run)))
    from marl_llm.training import Checkpoints

    checkpoints = Checkpoints(pathlib.Path(run) / "checkpoints")
    steps = checkpoints.steps()
    if not steps or (step is not None and step not in steps):
        raise ConfigError(f"{run} has no checkpoint {'' if step is None else step}; it has steps {steps or 'none'}")
    step = steps[-1] if step is None else step
    with resolve(config, game_dir_of(pathlib.Path(run))) as plan, build_team(plan, config, mesh, coached=False) as team:
        restored(team, checkpoints, step)
        yield config, plan, team, step
