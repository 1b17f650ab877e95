"""What every experiment config starts from, and what a config means.

A config file has `get_config(arg=None)`, starts from `base_config(...)` and sets what differs. The config is locked: a key that
does not exist is refused wherever it is set, in the file or on the command line. Options of the recipe, the game and the model that
are left at None keep the value of the recipe's preset, the game and the model's preset; `--dry_run` prints what they come to.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re

from ml_collections import config_dict

from experiments.command import closest
from marl_llm.algorithms import Recipe, make_recipe
from marl_llm.games import GAMES, Game, find_game, make_game
from marl_llm.models import ModelConfig, make_model_config

MICROBATCH = 768  # tokens; 6 rows of 128. Smaller ones pay for adding gradients up, larger ones fall out of a CPU's caches
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}


class ConfigError(ValueError):
    """The config cannot be run; the message says what, where and what to do."""


def open_fields(cls, skip: tuple[str, ...]) -> dict:
    """One placeholder per field of a dataclass, so that flags know each option's type; None means "not set here"."""
    out = {}
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        first = kind.split("|")[0].strip()
        # a tuple of names is written as one comma-separated string
        out[field.name] = config_dict.placeholder(_TYPES.get(first, str))
    return out


def base_config(name: str, game: str, recipe: str) -> config_dict.ConfigDict:
    """The locked base: every key that an experiment may set, with the values that small experiments share."""
    if game not in GAMES:
        raise ConfigError(f"unknown game {game!r}; the games are {', '.join(GAMES)}")
    c = config_dict.ConfigDict()
    c.name = name
    c.seed = 0
    c.steps = 100  # optimisation steps: one rollout and one update of each model
    c.game = config_dict.ConfigDict({"name": game, **open_fields(find_game(game).thing, ())})
    # 'per_role', 'shared', or e.g. 'tool=a,planner=a,judge=b'
    c.assignment = "per_role"
    c.model = config_dict.ConfigDict({"preset": "micro", **open_fields(ModelConfig, ("vocab_size", "rope_scaling", "dense_layers"))})
    c.recipe = config_dict.ConfigDict({"name": recipe, "preset": "paper", **open_fields(Recipe, ("name", "preset"))})
    c.rollout = config_dict.ConfigDict({"environments": 48})  # E, fresh instances per step
    c.optimizer = config_dict.ConfigDict(
        {
            "minibatch": 32,  # groups per optimizer step
            "epochs": 1,
            # prompt and response tokens whose activations live at a time, per device; 0: the whole minibatch. None: MICROBATCH on a
            # CPU, whose caches decide (a quarter less time than a whole minibatch), and 0 elsewhere, where memory does
            "microbatch_tokens": config_dict.placeholder(int),
            "learning_rate": 1.5e-3,  # peak; linear decay to 5 % over `steps`
            "warmup": 5,  # steps
            "max_grad_norm": 1.0,
            "b2": 0.99,
            "weight_decay": 0.0,
        }
    )
    c.warm_start = config_dict.ConfigDict(
        {
            "steps": 0,  # imitation steps; 0 starts from random parameters
            "environments": 8,  # per step and game
            "branches": 4,  # scripted responses per prompt
            "learning_rate": 2e-3,
            "noise": config_dict.placeholder(float),  # options of the game's scripted player
            "sighted": config_dict.placeholder(float),
            "repeat": config_dict.placeholder(float),
        }
    )
    c.evaluation = config_dict.ConfigDict(
        {
            "every": 40,  # steps between evaluations on the validation split
            "episodes": 128,  # of each
            "final_episodes": 500,  # on the test split, at the end
            "seed": 2026,  # of the instances, independent of the run's seed
            "transcripts": 3,
        }
    )
    c.checkpoint = config_dict.ConfigDict({"every": 100, "keep": 2})
    c.control = config_dict.ConfigDict({"permute_rewards": False})
    c.stacked_layers = False  # one leaf per weight with all layers in front: fewer leaves, faster compilation of deep models
    c.quick_compile = False  # CPU: compile in a quarter of the time, run slower
    c.devices = 0  # data-parallel devices; 0: all (on CPU one per core)
    c.mesh = config_dict.ConfigDict({"fsdp": 1, "tensor": 1})  # further devices per data-parallel one, for models that need them
    return c.lock()


def smoke(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """The `:smoke` variant: the same code paths in well under a minute."""
    config.quick_compile = True
    config.steps = min(config.steps, 4)
    config.warm_start.steps = min(config.warm_start.steps, 10)
    config.evaluation.every = 2
    config.evaluation.episodes = 16
    config.evaluation.final_episodes = 16
    config.checkpoint.every = 2
    config.rollout.environments = min(config.rollout.environments, 8)
    return config


@dataclasses.dataclass(frozen=True)
class Plan:
    """A resolved config: typed values that were checked one by one and against each other."""

    game: Game
    recipe: Recipe
    model: ModelConfig
    assignment: dict[str, str]  # role -> model
    script: dict[str, float]

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the roles that they play first."""
        return list(dict.fromkeys(self.assignment.values()))

    @property
    def configs(self) -> dict[str, ModelConfig]:
        """Shape of each model."""
        return dict.fromkeys(self.models, self.model)

    def table(self, config: config_dict.ConfigDict) -> str:
        """What `--dry_run` prints: roles, models, recipe fields, sizes and shapes."""
        g, m, r = self.game, self.model, self.recipe
        e, k = config.rollout.environments, r.branches
        rows = [f"{config.name}: {g.name}, recipe {r.name} ({r.preset}), {config.steps} steps, seed {config.seed}", "", "roles"]
        for stage in g.stages:
            for role in (next(x for x in g.roles if x.name == n) for n in stage):
                together = f" together with {', '.join(n for n in stage if n != role.name)}" if len(stage) > 1 else ""
                rows.append(
                    f"  {role.name:<10} -> model {self.assignment[role.name]:<10} prompt [E={e}, P={role.prompt_tokens}]  "
                    f"responses [E={e}, K={k}, R={role.response_tokens}]{together}"
                )
        rows += ["", f"models ({len(self.models)}, each with its own parameters and optimizer)"]
        rows += [
            f"  {name:<10} {m.parameters:,} parameters (V={m.vocab_size} D={m.width} Y={m.layers} H={m.query_heads} "
            f"J={m.key_value_heads} d={m.head_dim} F={m.feed_forward})"
            for name in self.models
        ]
        samples = e * k * g.max_turns * len(g.roles)
        rows += ["", f"samples per step: at most {samples:,} (E={e} x K={k} x T={g.max_turns} x N={len(g.roles)})", "", "game"]
        rows += [f"  {f.name:<20} {getattr(g, f.name)}" for f in dataclasses.fields(g)]
        rows += ["", "recipe"]
        rows += [f"  {f.name:<20} {getattr(r, f.name)}" for f in dataclasses.fields(r)]
        return "\n".join(rows)


def given(section: config_dict.ConfigDict, skip: tuple[str, ...] = ()) -> dict:
    """The keys of a section that were set."""
    return {key: value for key, value in section.items() if key not in skip and value is not None}


def parse_assignment(text: str, roles: list[str]) -> dict[str, str]:
    """`per_role`, `shared`, or `role=model,...` for every role. Raises `ConfigError`."""
    if text == "per_role":
        return {r: r for r in roles}
    if text == "shared":
        return {r: "shared" for r in roles}
    pairs = [p.split("=") for p in text.split(",")]
    if any(len(p) != 2 or not p[0].strip() or not p[1].strip() for p in pairs):
        raise ConfigError(f"assignment={text!r} is not 'per_role', 'shared' or a list like '{roles[0]}=a,...'")
    out = {role.strip(): model.strip() for role, model in pairs}
    for model in out.values():
        if not re.fullmatch(r"[A-Za-z][\w-]*", model):
            raise ConfigError(f"assignment={text!r}: {model!r} names a model and its folder; use letters, digits, - and _")
    if sorted(out) != sorted(roles) or len(out) != len(pairs):
        raise ConfigError(f"assignment={text!r} must name each role once; the game's roles are {', '.join(roles)}")
    return {r: out[r] for r in roles}


def _check_numbers(config: config_dict.ConfigDict) -> None:
    least = {
        "steps": 0,
        "rollout.environments": 1,
        "optimizer.minibatch": 1,
        "optimizer.epochs": 1,
        "optimizer.microbatch_tokens": 0,
        "optimizer.warmup": 0,
        "warm_start.steps": 0,
        "warm_start.environments": 1,
        "warm_start.branches": 1,
        "evaluation.every": 1,
        "evaluation.episodes": 1,
        "evaluation.final_episodes": 1,
        "evaluation.transcripts": 0,
        "checkpoint.every": 1,
        "checkpoint.keep": 1,
        "devices": 0,
        "mesh.fsdp": 1,
        "mesh.tensor": 1,
    }
    for path, low in least.items():
        value = _value(config, path)
        if value is not None and value < low:
            raise ConfigError(f"config.{path}={value} must be at least {low}")
    o, w = config.optimizer, config.warm_start
    for path, value, good, what in (
        ("seed", config.seed, 0 <= config.seed < 2**32, "lie in [0, 2^32)"),
        ("evaluation.seed", config.evaluation.seed, 0 <= config.evaluation.seed < 2**32, "lie in [0, 2^32)"),
        ("optimizer.learning_rate", o.learning_rate, 0 < o.learning_rate < math.inf, "be positive and finite"),
        ("warm_start.learning_rate", w.learning_rate, 0 < w.learning_rate < math.inf, "be positive and finite"),
        ("optimizer.max_grad_norm", o.max_grad_norm, o.max_grad_norm > 0, "be positive (inf switches clipping off)"),
        ("optimizer.weight_decay", o.weight_decay, 0 <= o.weight_decay < math.inf, "be 0 or more, and finite"),
        ("optimizer.b2", o.b2, 0 < o.b2 < 1, "lie between 0 and 1"),
        *((f"warm_start.{k}", w[k], w[k] is None or 0 <= w[k] <= 1, "lie in [0, 1]") for k in ("noise", "sighted", "repeat")),
    ):
        if not good:
            raise ConfigError(f"config.{path}={value} must {what}")


def compare_keys(new, old, path: str, start: str, free: str) -> None:
    """Raises `ConfigError` naming a key of `new` that `old` lacks, or the reverse, outside of section `free`; `start` makes whole ones."""
    for key in old:
        if key not in new:
            raise ConfigError(f"{path}.{key} is missing; start the config from {start}")
    for key in new:
        if key not in old:
            hint = closest(key, list(old)) or f"; {path} has {', '.join(old)}"
            raise ConfigError(f"unknown key {path}.{key}{hint}")
        if isinstance(old[key], config_dict.ConfigDict):
            if not isinstance(new[key], config_dict.ConfigDict):
                raise ConfigError(f"{path}.{key}={new[key]!r} must be a section with {', '.join(old[key]) or 'a section per name'}")
            if f"{path}.{key}" != free:
                compare_keys(new[key], old[key], f"{path}.{key}", start, free)


def _check_keys(config: config_dict.ConfigDict) -> None:
    """Refuses a config that lacks a key of the base or has one more, e.g. one that another version of this library wrote."""
    try:
        base = base_config(config.name, config.game.name, config.recipe.name)
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError("the config lacks a name, a game or a recipe; start from experiments.base.base_config") from error

    compare_keys(config, base, "config", "experiments.base.base_config", free="config.game")  # the game refuses what is not its own


_DIVIDED = ("rollout.environments", "optimizer.minibatch", "warm_start.environments", "evaluation.episodes")


def _value(config: config_dict.ConfigDict, path: str):
    for part in path.split("."):
        config = config[part]
    return config


def _divided(config: config_dict.ConfigDict) -> dict[str, int]:
    paths = [p for p in _DIVIDED if config.warm_start.steps or not p.startswith("warm_start")]
    return {path: _value(config, path) for path in paths}


def most_devices(config: config_dict.ConfigDict, there: int) -> int:
    """The most of `there` devices that environments, minibatches and evaluation divide over."""
    return max(n for n in range(1, there + 1) if not any(value % n for value in _divided(config).values()))


def check_devices(config: config_dict.ConfigDict, devices: int) -> None:
    """Raises `ConfigError` when something does not divide over the devices."""
    for path, value in _divided(config).items():
        if value % devices:
            raise ConfigError(f"config.{path}={value} does not divide over {devices} devices; choose a multiple, or set config.devices")


# What the trainer of device games carries out today; the rest of a recipe's fields are carried out by `marl_llm.algorithms`.
def _check_supported(recipe: Recipe) -> None:
    if recipe.normaliser == "critic":
        raise ConfigError(f"recipe {recipe.name!r} needs a critic, which this trainer does not have; use at_grpo, grpo or magrpo")
    if recipe.kl_coef and recipe.kl_in == "reward":
        raise ConfigError("recipe.kl_in='reward' needs per-sample KL, which this trainer does not compute; use kl_in='loss'")
    if recipe.top_k is not None or recipe.top_p < 1:
        raise ConfigError(
            "recipe.top_k and recipe.top_p would bias the ratio: this sampler draws from the whole (tempered) distribution. Set "
            "top_k to None and top_p to 1"
        )


def row_tokens(game: Game, recipe: Recipe) -> int:
    """Tokens of a group's row in the update: the prompt once, and the responses that were sampled from it."""
    prompt, response = max(r.prompt_tokens for r in game.roles), max(r.response_tokens for r in game.roles)
    return prompt + (recipe.branches if recipe.sampling == "tree" else 1) * response


def _check_microbatch(config: config_dict.ConfigDict, game: Game, recipe: Recipe) -> None:
    tokens, row = config.optimizer.microbatch_tokens, row_tokens(game, recipe)
    if tokens and tokens < row:
        raise ConfigError(f"config.optimizer.microbatch_tokens={tokens} cannot hold one group of {row} tokens, and a group is never cut")
    if tokens and tokens >= config.optimizer.minibatch * row:
        raise ConfigError(
            f"config.optimizer.microbatch_tokens={tokens} would have no effect: a minibatch has "
            f"{config.optimizer.minibatch} x {row} tokens. Set it to 0, or lower"
        )


def microbatch_tokens(config: config_dict.ConfigDict, platform: str) -> int:
    """`optimizer.microbatch_tokens`, or what suits the platform ('cpu', 'gpu' or 'tpu') where it is left open."""
    tokens = config.optimizer.microbatch_tokens
    return (MICROBATCH if platform == "cpu" else 0) if tokens is None else tokens


def resolve(config: config_dict.ConfigDict) -> Plan:
    """Checks a config and turns it into typed values.

    Raises `ConfigError` for an unknown name, an impossible or contradictory value, or an option that would have no effect.
    """
    if "world" in config:
        raise ConfigError(
            "this config trains a workflow, and this command knows device games only: experiments.train trains it, and measures a trained "
            "team again with --config.steps=0 --config.warm_start.run=RUN --config.warm_start.step=STEP"
        )
    _check_keys(config)
    _check_numbers(config)
    try:
        game = make_game(config.game.name, **given(config.game, ("name",)))
        recipe = make_recipe(config.recipe.name, config.recipe.preset, **given(config.recipe, ("name", "preset")))
        model = make_model_config(config.model.preset, game.tokenizer.vocab_size, **given(config.model, ("preset",)))
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
    _check_supported(recipe)
    if any(len(s) > 1 for s in game.stages) and recipe.sampling == "tree":
        raise ConfigError(
            f"{game.name} has roles that act at once, and a tree would score one role's branches before the other has spoken: "
            "use a recipe with sampling='parallel', e.g. magrpo"
        )
    _check_microbatch(config, game, recipe)
    script = given(config.warm_start, ("steps", "environments", "branches", "learning_rate"))
    if script and not config.warm_start.steps:
        raise ConfigError(f"warm_start.{', '.join(script)} would have no effect: warm_start.steps is 0")
    known = [p.name for p in inspect.signature(game.script).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in script:
        if option not in known:
            raise ConfigError(
                f"warm_start.{option} would have no effect: {game.name}'s scripted player has "
                + (f"the options {', '.join(known)}" if known else "no options")
            )
    return Plan(game, recipe, model, parse_assignment(config.assignment, [r.name for r in game.roles]), script)
