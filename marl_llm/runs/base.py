"""What every experiment config starts from, and what a config means.

A config file has `get_config(arg=None)`, starts from `base_config(...)` and sets what differs. The config is locked: a key that
does not exist is refused wherever it is set, in the file or on the command line. Options of the recipe, the game, its scripted player and
the models that are left at None keep the value of the recipe's preset, the game, the player and the model's preset; `--dry_run` prints
what they come to.

`config.game.name` is a game or a workflow of the library, or an object of a file or module of your own (`my_game.py:Lock`); see
`marl_llm.games.make_game`. `config.model` describes every model; `config.models.<name>`, made by `model_section()`, says how one differs.
"""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import re
from typing import Any

from ml_collections import config_dict

from marl_llm.algorithms import LOSS_FIELDS, Recipe
from marl_llm.games import GameError, find_game
from marl_llm.models import ModelConfig
from marl_llm.reporting.trackers import missing
from marl_llm.runs import checks
from marl_llm.runs.coaching import coach_section
from marl_llm.runs.command import ConfigError

MICROBATCH = 768  # tokens; smaller micro-batches pay for adding gradients up, larger ones fall out of a CPU's caches
_TYPES = {"int": int, "float": float, "str": str, "bool": bool}
_MODEL_KEYS = (
    "kind",  # trained, frozen, outside or scripted
    "preset",  # a size of `marl_llm.models.PRESETS`, with random parameters
    "path",  # directory of a Hugging Face checkpoint
    "thinking",  # how the chat of a checkpoint opens: on or off
    "template",  # what its chat template is told, a JSON object, e.g. '{"date_string": "26 Jul 2026"}'
    "url",  # outside: the address up to /chat/completions; with sampler=vllm: that of the vLLM server
    "served_as",  # outside: the model's name there
    "key_env",  # outside, or sampler=vllm: the environment variable that holds the key
    "sampler",  # who draws: "engine" (this program, the default) or "vllm" (a server that is there already, docs/remote.md)
    "folder",  # sampler=vllm: directory that the server sees under the same path, for parameters on their way
)


# what a model may have of its own of `config.optimizer`
OWN_OPTIMIZER = {
    "learning_rate": "float", "critic_learning_rate": "float", "warmup": "int", "max_grad_norm": "float", "b2": "float",
    "weight_decay": "float", "minibatch": "int", "epochs": "int",
}  # fmt: skip


def _placeholders(kinds: dict[str, Any]) -> dict:
    """One placeholder per option, so that flags know its type; None means "not set here". Tuples are written with commas between."""
    def name(kind):
        return (kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))).split("|")[0].strip()

    return {key: config_dict.placeholder(_TYPES.get(name(kind), str)) for key, kind in kinds.items()}


def _fields(cls, *skip: str) -> dict:
    return _placeholders({f.name: f.type for f in dataclasses.fields(cls) if f.name not in skip})


def _options(parameters: dict[str, inspect.Parameter]) -> dict:
    def kind(p):
        return p.annotation if p.annotation is not p.empty else type(p.default)

    return _placeholders({name: kind(p) for name, p in parameters.items()})


def model_section(**values) -> config_dict.ConfigDict:
    """What may be said of one model, `config.models.<name>`; None: as `config.model` has it.

    Its `optimizer` and `recipe` hold what is its own of `config.optimizer` and of the loss in `config.recipe`; None: as the team's.

    `kind` is one of `players.KINDS`. A trained or frozen model has a `preset` (random parameters; further keys are fields of `ModelConfig`)
    or a `path` (a Hugging Face checkpoint's directory, whose chat opens as `thinking` says, "on" or "off"), and trains
    adapters if `lora_rank` is set. An outside model has a `url` up to `/chat/completions`, the name `served_as` there, and the environment
    variable `key_env` that holds the key. With `sampler="vllm"` a vLLM server at `url` draws for a trained or frozen model.
    """
    section = _common_section()
    section.optimizer = config_dict.ConfigDict(_placeholders(OWN_OPTIMIZER))
    section.recipe = config_dict.ConfigDict(_fields(Recipe, *(f.name for f in dataclasses.fields(Recipe) if f.name not in LOSS_FIELDS)))
    section.lock().update(values)
    return section


def _common_section() -> config_dict.ConfigDict:
    """What may be said of all models at once, `config.model`."""
    return config_dict.ConfigDict(
        {
            **_placeholders(dict.fromkeys(_MODEL_KEYS, "str")),
            "lora_rank": config_dict.placeholder(int),  # trains adapters of this rank on the frozen model
            "lora_alpha": config_dict.placeholder(float),  # their scale, divided by the rank
            **_fields(ModelConfig, "vocab_size", "rope_scaling", "dense_layers", "value_head"),
        }
    )


class ModelSections(config_dict.ConfigDict):
    """`config.models`: a section by model. One that is named first on the command line is made when it is asked for.

    A name that no model has is refused when the config is resolved.
    """

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and re.fullmatch(r"[A-Za-z][\w-]*", key) and key not in self:
            self[key] = model_section()
        return super().__getitem__(key)


def base_config(name: str, game: str, recipe: str, home: pathlib.Path | None = None) -> config_dict.ConfigDict:
    """The locked base: every key that an experiment may set, with the values that small experiments share.

    `home` is where a run directory keeps a user's file. Raises `GameError` for an unknown game.
    """
    found = find_game(game, home)
    c = config_dict.ConfigDict()
    c.name = name  # of the experiment, in reports
    c.seed = 0  # of parameters, plays and permutations
    c.steps = 100  # optimisation steps: one rollout and one update of each model that trains
    c.game = config_dict.ConfigDict({"name": game, **_options(found.options)})
    c.script = config_dict.ConfigDict(_options(found.script_options))  # options of a value-state game's scripted player
    c.hosted = False  # play a value-state game through the controller and the engine, as workflows are, instead of compiled
    # which model plays which role: 'per_role', 'shared', or e.g. 'tool=a,planner=a,judge=b'
    c.assignment = "per_role"
    # models that train in turns, e.g. 'search:10,reason+answer:10' (steps); empty: all, always
    c.schedule = ""
    c.model = _common_section()
    c.model.update(kind="trained", preset="micro", lora_alpha=16.0)
    c.models = ModelSections()
    c.recipe = config_dict.ConfigDict({"name": recipe, "preset": "paper", **_fields(Recipe, "name", "preset")})
    c.coach = coach_section()  # who scores every action of training plays; see `marl_llm.runs.coaching`
    c.rollout = config_dict.ConfigDict(
        {
            "tasks": 48,  # fresh tasks per step
            **_placeholders(dict.fromkeys(("slots", "chunk", "attempts", "concurrency", "ahead", "over_start", "tensor"), "int")),
            **_placeholders({"timeout_s": "float", "cache_gib": "float", "exact": "bool", "adapters": "str", "swap": "str", "pool": "str"}),
            "void_limit": config_dict.placeholder(float),  # hosted play: share of void plays over 20 steps that stops a run; None: 0.2
            "max_prompt": config_dict.placeholder(int),  # tokens; None: as the roles have it. Their budgets are cut to it
            "max_tokens": config_dict.placeholder(int),  # tokens of a response; None: as the roles have it
            "task_list": config_dict.placeholder(str),  # workflows: file of `marl_llm profile --output`; only its tasks are trained on
        }
    )
    # where the programs that models write are run, while a run trains; measuring a run later uses its own host
    c.tools = config_dict.ConfigDict(
        {
            "backend": "local",  # "local": on this host; "ray": on all nodes of a Ray cluster (docs/remote.md)
            "address": config_dict.placeholder(str),  # backend=ray: of the cluster, e.g. 10.0.0.1:6379; None: the one that this host is in
            "workers": config_dict.placeholder(int),  # programs at a time, on this host or on each node; None: one per CPU
        }
    )
    _training_sections(c)
    c.lock()
    c.models.unlock()  # a config file adds sections by name
    return c


def _training_sections(c: config_dict.ConfigDict) -> None:
    """How the samples are learned from, what is measured and kept, and on how many devices: for games and workflows alike."""
    c.optimizer = config_dict.ConfigDict(
        {
            "minibatch": 32,  # prompts per optimizer step
            "epochs": 1,  # passes over the samples of a step
            "row_tokens": config_dict.placeholder(int),  # of a packed row. None: ROW_TOKENS, or the longest sample
            # tokens whose activations live at a time, per device; 0: the whole minibatch. None: MICROBATCH on a CPU, whose caches decide
            # (a quarter less time than a whole minibatch); elsewhere, where memory does, one row with `model.remat="full"`, and 0 without
            "microbatch_tokens": config_dict.placeholder(int),
            # peak; linear decay to 5 % over `decay_steps`. None: 1.5e-3; with checkpoints 1e-6, or 1e-4 for their adapters
            "learning_rate": config_dict.placeholder(float),
            # after which the learning rate stays at 5 %. None: the `steps` that the run began with; a run that is continued keeps it
            "decay_steps": config_dict.placeholder(int),
            "critic": "own",  # where the recipe has one: an own network, or a value 'head' on the policy
            "critic_learning_rate": config_dict.placeholder(float),  # None: as the policy's
            "warmup": 5,  # steps in which the learning rate rises to its peak
            "max_grad_norm": 1.0,  # gradients are scaled down to this norm
            "b2": 0.99,  # of Adam
            # of AdamW; falls on the matrices of layers, heads and adapters, not on norms, biases and embeddings
            "weight_decay": 0.0,
        }
    )
    c.warm_start = config_dict.ConfigDict(
        {
            "steps": 0,  # of imitation; 0: start from what the models are
            "tasks": 8,  # plays of the scripted player per step
            "fresh": config_dict.placeholder(int),  # after so many steps their plays are used again; None: never
            # of imitation: peak; linear decay to 10 %. None: 2e-3; with checkpoints 1e-5, or 1e-4 for their adapters
            "learning_rate": config_dict.placeholder(float),
        }
    )
    c.warm_start.run = ""  # directory of another run: begin with its models, in place of the steps above
    c.warm_start.step = 0  # which of its checkpoints: 0 is where its reinforcement began
    c.warm_start.models = ""  # which of its models, where names differ, e.g. 'shared=reason'; or other runs': 'tool=run:runs/a@24#solo'
    c.evaluation = config_dict.ConfigDict(
        {
            "every": 40,  # steps between evaluations on the validation split
            "tasks": config_dict.placeholder(int),  # of each evaluation on the validation split. None: 128; with checkpoints 32
            "final_tasks": config_dict.placeholder(int),  # tasks of the test split, at the end. None: 500; with checkpoints 64
            "seed": 2026,  # of the evaluations, independent of the run's seed
            "transcripts": 3,  # plays of the final evaluation that are kept whole
            "ablate_roles": True,  # measure the team with models swapped, and with each role's untrained model put back
            "sampled": False,  # measure it at a temperature too, beside greedy
            "samples": 1,  # plays of each task at that temperature, whose mean counts
            "temperature": config_dict.placeholder(float),  # None: the recipe's
        }
    )
    c.checkpoint = config_dict.ConfigDict(
        {
            "every": 100,  # steps between checkpoints
            "keep": 2,  # how many stay, besides step 0
            "background": False,  # written from copies of the arrays while training goes on, not before
        }
    )
    c.logger = ""  # "wandb" or "trackio": the figures go there too (extras of those names), offline unless their settings say otherwise
    # the control: rewards are dealt anew among the samples of a role
    c.control = config_dict.ConfigDict({"permute_rewards": False})
    c.stacked_layers = False  # one leaf per weight with all layers in front: fewer leaves, faster compilation of deep models
    c.quick_compile = False  # CPU: compile in a quarter of the time, run slower
    c.devices = 0  # data-parallel devices; 0: all (on CPU one per core, but one in all for published models)
    # who has which devices along `data`: "shared": every model all of them, by turns; "split": each trained model an equal part, all at
    # once; or a table, e.g. 'search:0-2,answer:3' (docs/pods.md). Anything but "shared" needs one process
    c.placement = "shared"
    c.mesh = config_dict.ConfigDict(
        {
            "fsdp": 1,  # devices that share each model's parameters; 0: all that there are
            "tensor": 1,  # devices that share each layer's products
        }
    )


def variant(name: str, arg: str | None, known: tuple[str, ...]) -> str:
    """The variant that a config file was asked for; "" for none. Raises `ConfigError` listing those that it has."""
    if arg in (None, ""):
        return ""
    if arg not in known:
        raise ConfigError(f"{name} has no variant {arg!r}; it has {', '.join(map(repr, known))}")
    return arg


def smoke(config: config_dict.ConfigDict) -> config_dict.ConfigDict:
    """The `:smoke` variant: the same code paths in about a minute."""
    config.quick_compile = True
    config.steps = min(config.steps, 4)
    config.warm_start.update(steps=min(config.warm_start.steps, 10), tasks=min(config.warm_start.tasks, 8))
    config.evaluation.update(every=2, tasks=16, final_tasks=16)
    config.checkpoint.every = 2
    config.rollout.tasks = min(config.rollout.tasks, 8)
    return config


def check(config: config_dict.ConfigDict, home: pathlib.Path | None = None) -> None:
    """Raises `ConfigError` for keys that are missing or unknown, and for numbers out of range. Makes no game."""
    start = "marl_llm.runs.base.base_config"
    try:
        base = base_config(config.name, config.game.name, config.recipe.name, home)
    except GameError as error:
        raise ConfigError(str(error)) from error
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"the config lacks a name, a game or a recipe; start from {start}") from error
    free = ("config.game", "config.script", "config.models")  # the game refuses what is not its own
    checks.compare_keys(config, base, "config", start, free)
    for name in config.models:
        if not isinstance(config.models[name], config_dict.ConfigDict):
            raise ConfigError(f"config.models.{name}={config.models[name]!r} must be made by marl_llm.runs.base.model_section")
        checks.compare_keys(config.models[name], model_section(), f"config.models.{name}", start)
    checks.numbers(config)
    checks.tools(config)
    checks.parse_placement(config.placement)
    if config.logger and (why := missing(config.logger)):
        raise ConfigError(f"config.logger={config.logger!r} {why}")
