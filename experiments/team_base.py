"""What a config of a workflow starts from, and what it means: a team on the host with tools, `config.world` instead of `config.game`.

A config file has `get_config(arg=None)`, starts from `team_config(...)` and sets what differs. `config.model` describes every model;
`config.models.<name>`, made by `model_section()`, says how one differs: another shape, a checkpoint, adapters, or that it does not train.
"""

from __future__ import annotations

import dataclasses
import math
import re

from ml_collections import config_dict

from experiments.base import ConfigError, compare_keys, given, open_fields, parse_assignment
from experiments.command import closest
from marl_llm.algorithms import Recipe, make_recipe
from marl_llm.games import GAMES, find_game, make_game
from marl_llm.models import LoraConfig, ModelConfig, make_model_config, read_config
from marl_llm.workflows import Assignment, Outside, Policy, Scripted, WorkflowError, World, alternate, with_roles
from marl_llm.workflows.controller import checked_branching

KINDS = ("trained", "frozen", "outside", "scripted")
_MODEL_KEYS = ("kind", "preset", "path", "lora_rank", "lora_alpha", "url", "served_as", "key_env")
_TYPES = {"int": int, "float": float, "bool": bool}


def model_section(**values) -> config_dict.ConfigDict:
    """What may be said of a model; None: as `config.model` has it.

    `kind` is one of `KINDS`. A trained or frozen model has a `preset` (random parameters; further keys are fields of `ModelConfig`) or a
    `path` (a Hugging Face checkpoint's directory), and trains adapters if `lora_rank` is set. An outside model has a `url` up to
    `/chat/completions`, the name `served_as` there, and the environment variable `key_env` that holds the key.
    """
    section = config_dict.ConfigDict(
        {
            **{key: config_dict.placeholder(str) for key in _MODEL_KEYS},
            "lora_rank": config_dict.placeholder(int),
            "lora_alpha": config_dict.placeholder(float),
            **open_fields(ModelConfig, ("vocab_size", "rope_scaling", "dense_layers", "value_head")),
        }
    )
    section.lock().update(values)
    return section


def team_config(name: str, world: str, recipe: str) -> config_dict.ConfigDict:
    """The locked base of a workflow's config, with the values that small experiments share. Raises `ConfigError` for an unknown world."""
    if not GAMES.get(world, "").startswith("marl_llm.games.worlds"):
        raise ConfigError(f"unknown world {world!r}; the worlds are {', '.join(n for n in GAMES if 'worlds' in GAMES[n])}")
    kinds = {key: _TYPES.get(getattr(p.annotation, "__name__", str(p.annotation)), str) for key, p in find_game(world).options.items()}
    c = config_dict.ConfigDict()
    c.name = name
    c.seed = 0
    c.steps = 100  # optimisation steps: one rollout and one update of each model that trains
    c.world = config_dict.ConfigDict({"name": world, **{key: config_dict.placeholder(kind) for key, kind in kinds.items()}})
    # 'per_role', 'shared', or e.g. 'plan=reason,answer=reason,search=search'
    c.assignment = "per_role"
    # models that train in turns, e.g. 'search:10,reason+answer:10' (steps); empty: all, always
    c.schedule = ""
    c.model = model_section(kind="trained", preset="micro", lora_alpha=16.0)
    c.models = config_dict.ConfigDict()
    c.recipe = config_dict.ConfigDict({"name": recipe, "preset": "paper", **open_fields(Recipe, ("name", "preset"))})
    c.rollout = config_dict.ConfigDict(
        {
            "tasks": 32,  # fresh tasks per step
            "slots": 64,  # requests that each model decodes at once
            "chunk": 8,  # tokens between two looks at the queue
            "attempts": 2,  # before a play is void
            "timeout_s": 600.0,  # of one attempt
            "max_prompt": config_dict.placeholder(int),  # tokens; None: as the roles have it. Their budgets are cut to it
            "max_tokens": config_dict.placeholder(int),  # of a response
            "concurrency": 1024,
        }
    )
    c.optimizer = config_dict.ConfigDict(
        {
            "minibatch": 64,  # prompts per optimizer step
            "epochs": 1,
            "row_tokens": 256,  # of a packed row
            "microbatch_tokens": config_dict.placeholder(int),  # None: 768 on a CPU, 0 (all) elsewhere
            "learning_rate": 6e-4,  # peak; linear decay to 5 % over `steps`
            "critic": "own",  # where the recipe has one: an own network, or a value 'head' on the policy
            "critic_learning_rate": config_dict.placeholder(float),  # None: as the policy's
            "warmup": 10,  # steps
            "max_grad_norm": 1.0,
            "b2": 0.99,
            "weight_decay": 0.0,
        }
    )
    # imitation of the world's scripted player; 0 steps start from what the models are. After `fresh` steps their plays are used again
    c.warm_start = config_dict.ConfigDict({"steps": 0, "tasks": 48, "fresh": config_dict.placeholder(int), "learning_rate": 2e-3})
    c.warm_start.run = ""  # directory of another run: begin with its models, in place of the steps above
    c.warm_start.step = 0  # which of its checkpoints: 0 is where its reinforcement began
    c.warm_start.models = ""  # which of its models, where names differ, e.g. 'shared=reason'
    c.evaluation = config_dict.ConfigDict(
        {
            "every": 40,  # steps between evaluations on the validation split
            "tasks": 100,  # of each
            "final_tasks": 400,  # on the test split, at the end
            "transcripts": 3,
            "put_back": True,  # measure the team with each role's untrained model put back
        }
    )
    c.checkpoint = config_dict.ConfigDict({"every": 100, "keep": 2})
    c.control = config_dict.ConfigDict({"permute_rewards": False})
    c.stacked_layers = False
    c.quick_compile = False
    c.devices = 1  # data-parallel devices; 0: all
    c.mesh = config_dict.ConfigDict({"fsdp": 1, "tensor": 1})
    c.lock()
    c.models.unlock()  # a config file adds sections by name
    return c


def smoke_team(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """The `:smoke` variant: the same code paths in about a minute."""
    config.quick_compile = True
    config.steps = min(config.steps, 2)
    config.warm_start.steps = min(config.warm_start.steps, 4)
    config.warm_start.tasks = 8
    config.rollout.tasks = 4
    config.rollout.slots = 16
    config.evaluation.every = 1
    config.evaluation.tasks = config.evaluation.final_tasks = 8
    config.checkpoint.every = 1
    return config


def variant(name: str, arg: str | None, known: tuple[str, ...]) -> str:
    """The variant that a config file was asked for; "" for none. Raises `ValueError` listing those that it has."""
    if arg in (None, ""):
        return ""
    if arg not in known:
        raise ValueError(f"{name} has no variant {arg!r}; it has {', '.join(known)}")
    return arg


def mini_search(name: str, world: str) -> config_dict.ConfigDict:
    """What the three question-answering workflows have in common in the small world of facts."""
    c = team_config(name, world, "grpo")
    c.steps = 120
    c.warm_start.steps = 700
    c.recipe.branches = 8
    c.recipe.rewards = "mixed"
    c.recipe.returns = "immediate"  # a call is paid for itself: the workflow's rewards say what it earned
    c.recipe.scale = "none"
    c.recipe.reduce = "token_mean"
    c.recipe.skip_tied = True
    c.recipe.tied_in_denominator = False
    return c


def full_size(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """The sizes of UnityMAS-O's experiments: PPO with a critic per model, learning rates 1e-6 and 1e-5, minibatches of 64."""
    config.steps = 300
    config.model.preset = None
    config.rollout.tasks = 128
    config.rollout.slots = 128
    config.rollout.chunk = 32
    config.rollout.timeout_s = 900.0
    config.optimizer.minibatch = 64
    config.optimizer.row_tokens = 16_384
    config.optimizer.learning_rate = 1e-6
    config.optimizer.critic_learning_rate = 1e-5
    config.optimizer.b2 = 0.999
    config.evaluation.every = 10
    config.devices = 0
    return config


def full_search(name: str, world: str) -> config_dict.ConfigDict:
    """Workflows A, B and C at the paper's size."""
    return full_size(team_config(name, world, "ppo"))


@dataclasses.dataclass(frozen=True)
class TeamPlan:
    """A resolved config of a workflow: typed values that were checked. Whoever resolves it closes the world."""

    world: World
    assignment: Assignment
    recipe: Recipe
    options: dict[str, dict]  # model -> what its section came to

    def table(self, config: config_dict.ConfigDict) -> str:
        """What `--dry_run` prints: roles, models, samples, the recipe and the picture of the graph."""
        from marl_llm.workflows import to_mermaid

        w, r = self.world.workflow, self.recipe
        rows = [f"{config.name}: workflow {w.name}, recipe {r.name} ({r.preset}), {config.steps} steps, seed {config.seed}", "", "roles"]
        rows += [
            f"  {name:<10} -> model {self.assignment.roles[name]:<10} prompt <= {role.max_prompt}, response <= {role.max_tokens} tokens; "
            f"reads {', '.join(role.reads)}; writes {', '.join(role.writes)}"
            for name, role in w.roles.items()
        ]
        rows += ["", f"models (trained: {', '.join(self.assignment.trained) or 'none'})"]
        for name, options in self.options.items():
            rows.append(f"  {name:<10} " + ", ".join(f"{key}={value}" for key, value in options.items()))
        k, e = r.branches, config.rollout.tasks
        plays = f"{k} candidates per prompt, '{r.pick}' forks again" if r.sampling == "tree" else f"{k} plays each"
        rows += ["", f"per step: {e} tasks, {plays}; headline figure: {self.world.headline}", "", "recipe"]
        rows += [f"  {f.name:<20} {getattr(r, f.name)}" for f in dataclasses.fields(r)]
        return "\n".join([*rows, "", to_mermaid(w, dict(self.assignment.roles))])


def check_team(config: config_dict.ConfigDict) -> None:
    """Raises `ConfigError` for keys that are missing or unknown, and for numbers out of range. Builds nothing."""
    _check_keys(config)
    _check_numbers(config)


def resolve_team(config: config_dict.ConfigDict) -> TeamPlan:
    """Checks a config and builds its world.

    Raises `ConfigError` for an unknown name, an impossible or contradictory value, or an option that would have no effect.
    """
    check_team(config)
    try:
        recipe = make_recipe(config.recipe.name, config.recipe.preset, **given(config.recipe, ("name", "preset")))
        world = make_game(config.world.name, **given(config.world, ("name",)))
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    try:
        return _with_models(config, _cut(world, config.rollout), recipe)
    except (ValueError, TypeError) as error:
        world.close()
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _cut(world: World, rollout: config_dict.ConfigDict) -> World:
    """The world with its roles' budgets cut to what the config allows."""
    most = {name: rollout[name] for name in ("max_prompt", "max_tokens") if rollout[name] is not None}
    cut = lambda role: dataclasses.replace(role, **{name: min(value, getattr(role, name)) for name, value in most.items()})  # noqa: E731
    return dataclasses.replace(world, workflow=with_roles(world.workflow, cut)) if most else world


def _with_models(config: config_dict.ConfigDict, world: World, recipe: Recipe) -> TeamPlan:
    roles = parse_assignment(config.assignment, list(world.workflow.roles))
    names = list(dict.fromkeys(roles.values()))
    for name in config.models:
        if name not in names:
            raise ConfigError(f"config.models.{name} plays no role{closest(name, names) or '; the models are ' + ', '.join(names)}")
    options = {name: _options(config, name) for name in names}
    models = {name: _player(name, options[name], world) for name in names}
    assignment = Assignment(roles, models, alternate(*_phases(config.schedule)))
    assignment.check(world.workflow)
    if not assignment.trained:
        raise ConfigError("no model trains: give one kind='trained'")
    _check_start(config.warm_start, list(assignment.trained))
    if recipe.top_k is not None or recipe.top_p < 1:
        raise ConfigError("recipe.top_k and recipe.top_p would bias the ratio: the scorer does not know what was kept. Set None and 1")
    if config.warm_start.steps and world.script is None:
        raise ConfigError(f"warm_start.steps={config.warm_start.steps}: world {config.world.name} has no scripted player to imitate")
    if recipe.normaliser != "critic" and config.optimizer.critic_learning_rate is not None:
        raise ConfigError(f"optimizer.critic_learning_rate would have no effect: recipe {recipe.name} has no critic")
    _check_critic(config, recipe, options)
    _check_tree(world, recipe, assignment)
    if config.model.lora_alpha not in (None, LoraConfig.alpha) and not any("lora_alpha" in one for one in options.values()):
        raise ConfigError(f"config.model.lora_alpha={config.model.lora_alpha} would have no effect: no model has a lora_rank")
    longest = max(r.max_prompt + r.max_tokens for r in world.workflow.roles.values())
    if config.optimizer.row_tokens < longest:
        tokens = config.optimizer.row_tokens
        raise ConfigError(f"optimizer.row_tokens={tokens} is less than a role's longest prompt and response, {longest}")
    return TeamPlan(world, assignment, recipe, options)


def _check_start(start: config_dict.ConfigDict, trained: list[str]) -> None:
    if idle := [key for key in ("step", "models") if start[key] and not start.run]:
        raise ConfigError(f"config.warm_start.{idle[0]}={start[idle[0]]!r} would have no effect: warm_start.run names no run")
    for name in parse_sources(start.models):
        if name not in trained:
            hint = closest(name, trained) or f"; {', '.join(trained)} do"
            raise ConfigError(f"config.warm_start.models={start.models!r}: no model {name!r} trains{hint}")


def parse_sources(text: str) -> dict[str, str]:
    """`model=its name in the run that is started from,...`. Raises `ConfigError`."""
    pairs = [[word.strip() for word in part.split("=")] for part in filter(None, text.split(","))]
    if any(len(pair) != 2 or not all(pair) for pair in pairs) or len({name for name, *_ in pairs}) != len(pairs):
        raise ConfigError(f"config.warm_start.models={text!r} is not like 'shared=reason' or 'plan=shared,answer=shared'")
    return dict(pairs)


def _check_tree(world: World, recipe: Recipe, assignment: Assignment) -> None:
    from marl_llm.training.team import branching_of  # takes a second to import

    try:
        checked_branching(world.workflow, branching_of(recipe, assignment), recipe.pick)
    except WorkflowError as error:
        raise ConfigError(f"recipe {recipe.name} samples a tree; {error}: use a recipe with sampling='parallel', e.g. grpo") from error


def _check_critic(config: config_dict.ConfigDict, recipe: Recipe, options: dict[str, dict]) -> None:
    from marl_llm.training.learner import CRITICS  # takes a second to import

    critic = config.optimizer.critic
    if critic not in CRITICS:
        raise ConfigError(f"config.optimizer.critic={critic!r} is unknown; the kinds are {', '.join(CRITICS)}")
    if critic == "head" and recipe.normaliser != "critic":
        raise ConfigError(f"config.optimizer.critic='head' would have no effect: recipe {recipe.name} has no critic")
    if critic == "head" and (adapted := [name for name, one in options.items() if one.get("lora_rank")]):
        raise ConfigError(f"config.optimizer.critic='head' lies on a policy's own parameters, but {adapted[0]} trains adapters: use 'own'")


def _options(config: config_dict.ConfigDict, name: str) -> dict:
    """A model's section, with what it leaves open as `config.model` has it. One that names its own shape inherits no other shape's."""
    common, own = given(config.model), given(config.models[name]) if name in config.models else {}
    kind = own.get("kind") or common.get("kind")
    if kind not in KINDS:
        raise ConfigError(f"config.models.{name}.kind={kind!r} is unknown; the kinds are {', '.join(KINDS)}")
    if own.get("preset") and own.get("path"):
        raise ConfigError(f"config.models.{name}.preset would have no effect: its path names a checkpoint")
    if own.get("preset") or own.get("path"):
        common = {key: value for key, value in common.items() if key in ("kind", "lora_rank", "lora_alpha")}
    allowed = {"outside": ("kind", "url", "served_as", "key_env"), "scripted": ("kind",)}.get(kind)
    if allowed:  # of the shape that others have, nothing is meant
        common = {key: value for key, value in common.items() if key in allowed}
    merged = common | own
    if allowed and (idle := [key for key in merged if key not in allowed]):
        raise ConfigError(f"config.models.{name}.{idle[0]} would have no effect: the model is {kind}")
    if kind == "outside" and not (merged.get("url") and merged.get("served_as")):
        raise ConfigError(f"config.models.{name} is outside: it needs url and served_as")
    if kind in ("trained", "frozen"):
        if merged.get("path"):
            merged.pop("preset", None)
        if idle := [key for key in ("url", "served_as", "key_env") if merged.get(key)]:
            raise ConfigError(f"config.models.{name}.{idle[0]} would have no effect: the model is {kind}")
        if kind == "frozen":
            if idle := [key for key in ("lora_rank", "lora_alpha") if key in own]:
                raise ConfigError(f"config.models.{name}.{idle[0]} would have no effect: the model is frozen")
            merged.pop("lora_rank", None)
        if merged.get("lora_rank") is None:
            if "lora_alpha" in own:
                raise ConfigError(f"config.models.{name}.lora_alpha would have no effect: lora_rank is not set")
            merged.pop("lora_alpha", None)
    return merged


def _player(name: str, options: dict, world: World) -> Policy | Outside | Scripted:
    if options["kind"] == "scripted":
        if world.script is None:
            raise ConfigError(f"config.models.{name}: the world has no scripted player")
        return Scripted(world.script)
    if options["kind"] == "outside":
        from marl_llm.tools.chat import ChatClient, OpenAICompatible

        return Outside(ChatClient(OpenAICompatible(options["url"], options["served_as"], options.get("key_env"))))
    if options.get("lora_rank") is not None:
        LoraConfig(options["lora_rank"], options["lora_alpha"])
    shape = {key: value for key, value in options.items() if key not in _MODEL_KEYS}
    if "path" in options:
        try:
            read_config(options["path"], **shape)
        except ValueError as error:
            raise ConfigError(f"config.models.{name}.path={options['path']!r}: {error}") from error
    else:
        if world.speech is None:
            raise ConfigError(f"config.models.{name}: this world has no vocabulary of its own; set path to a Hugging Face checkpoint")
        if "preset" not in options:
            raise ConfigError(f"config.models.{name} needs a preset or a path")
        make_model_config(options["preset"], world.speech.tokenizer.vocab_size, **shape)
    return Policy(trained=options["kind"] == "trained")


def _phases(text: str) -> list[tuple[tuple[str, ...], int]]:
    """`a:10,b+c:5` as phases."""
    phases = []
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"([\w+-]+):(\d+)", part)
        if match is None:
            raise ConfigError(f"schedule={text!r}: {part!r} is not like 'search:10' or 'search+answer:10'")
        phases.append((tuple(match[1].split("+")), int(match[2])))
    return phases


_LEAST = {
    "steps": 0, "rollout.tasks": 1, "rollout.slots": 1, "rollout.chunk": 1, "rollout.attempts": 1, "rollout.concurrency": 1,
    "rollout.max_prompt": 1, "rollout.max_tokens": 1,
    "optimizer.minibatch": 1, "optimizer.epochs": 1, "optimizer.row_tokens": 2, "optimizer.microbatch_tokens": 0, "optimizer.warmup": 0,
    "warm_start.steps": 0, "warm_start.tasks": 1, "warm_start.fresh": 1, "warm_start.step": 0,
    "evaluation.every": 1, "evaluation.tasks": 1, "evaluation.final_tasks": 1,
    "evaluation.transcripts": 0, "checkpoint.every": 1, "checkpoint.keep": 1, "devices": 0, "mesh.fsdp": 1, "mesh.tensor": 1,
}  # fmt: skip
_POSITIVE = ("rollout.timeout_s", "optimizer.learning_rate", "optimizer.critic_learning_rate", "optimizer.max_grad_norm",
             "warm_start.learning_rate")  # fmt: skip


def _check_numbers(config: config_dict.ConfigDict) -> None:
    value_of = lambda path: config[path.split(".")[0]][path.split(".")[1]] if "." in path else config[path]  # noqa: E731
    for path, least in _LEAST.items():
        if (value := value_of(path)) is not None and value < least:
            raise ConfigError(f"config.{path}={value} must be at least {least}")
    for path in _POSITIVE:
        if (value := value_of(path)) is not None and not value > 0:
            raise ConfigError(f"config.{path}={value} must be positive")
    o = config.optimizer
    for path, good, what in (
        ("optimizer.learning_rate", o.learning_rate < math.inf, "be finite"),
        ("optimizer.critic_learning_rate", o.critic_learning_rate is None or o.critic_learning_rate < math.inf, "be finite"),
        ("warm_start.learning_rate", config.warm_start.learning_rate < math.inf, "be finite"),
        ("optimizer.b2", 0 < o.b2 < 1, "lie between 0 and 1"),
        ("optimizer.weight_decay", 0 <= o.weight_decay < math.inf, "be 0 or more, and finite"),
    ):
        if not good:
            raise ConfigError(f"config.{path}={value_of(path)} must {what}")
    if not 0 <= config.seed < 2**31:
        raise ConfigError(f"config.seed={config.seed} must lie in [0, 2^31)")


def _check_keys(config: config_dict.ConfigDict) -> None:
    """Refuses a config that lacks a key of the base or has one more."""
    try:
        base = team_config(config.name, config.world.name, config.recipe.name)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError("the config lacks a name, a world or a recipe; start from experiments.team_base.team_config") from error

    start = "experiments.team_base.team_config"
    compare_keys(config, base, "config", start, free="config.models")
    for name in config.models:
        if not isinstance(config.models[name], config_dict.ConfigDict):
            raise ConfigError(f"config.models.{name}={config.models[name]!r} must be made by experiments.team_base.model_section")
        compare_keys(config.models[name], model_section(), f"config.models.{name}", start, free="")


__all__ = ["KINDS", "TeamPlan", "model_section", "resolve_team", "smoke_team", "team_config"]
