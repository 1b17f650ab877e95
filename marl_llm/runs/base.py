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
from typing import Any

from ml_collections import config_dict

from marl_llm.runs import checks, players
from marl_llm.runs.coaching import check_coach, coach_section, cost_line
from marl_llm.runs.command import ConfigError
from marl_llm.runs.open_options import fill_open_options
from marl_llm.algorithms import Recipe, make_recipe, pay_reach
from marl_llm.games import Found, Game, GameError, find_game
from marl_llm.models import ModelConfig
from marl_llm.reporting.trackers import missing
from marl_llm.untrusted import read_json_file
from marl_llm.workflows import Assignment, Task, World, with_roles

MICROBATCH = 768  # tokens; smaller micro-batches pay for adding gradients up, larger ones fall out of a CPU's caches
ROW_TOKENS = 256  # of a packed row, where no sample is longer
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
    """What may be said of a model; None: as `config.model` has it.

    `kind` is one of `players.KINDS`. A trained or frozen model has a `preset` (random parameters; further keys are fields of `ModelConfig`)
    or a `path` (a Hugging Face checkpoint's directory, whose chat opens as `thinking` says, "on" or "off"), and trains
    adapters if `lora_rank` is set. An outside model has a `url` up to `/chat/completions`, the name `served_as` there, and the environment
    variable `key_env` that holds the key. With `sampler="vllm"` a vLLM server at `url` draws for a trained or frozen model.
    """
    section = config_dict.ConfigDict(
        {
            **_placeholders(dict.fromkeys(_MODEL_KEYS, "str")),
            "lora_rank": config_dict.placeholder(int),  # trains adapters of this rank on the frozen model
            "lora_alpha": config_dict.placeholder(float),  # their scale, divided by the rank
            **_fields(ModelConfig, "vocab_size", "rope_scaling", "dense_layers", "value_head"),
        }
    )
    section.lock().update(values)
    return section


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
    c.model = model_section(kind="trained", preset="micro", lora_alpha=16.0)
    c.models = config_dict.ConfigDict()
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """A resolved config: typed values that were checked one by one and against each other. A context manager, for a world owns tools.

    Attributes:
      found: what the game's name stands for. game: the game, with its options.
      played: the game itself, or, of a value-state game with `config.hosted`, the world that it makes.
      text: budgets of that world, where it is played in ordinary text.
      options: model -> what its section came to. shapes: model of this program -> its shape.
      script: options of the scripted player.
    """

    found: Found
    game: Game | World
    played: Game | World
    text: Any
    recipe: Recipe
    assignment: Assignment
    options: dict[str, dict]
    shapes: dict[str, ModelConfig]
    script: dict[str, Any]

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *_: Any) -> None:
        if isinstance(self.game, World):
            self.game.close()

    @property
    def hosted(self) -> bool:
        """Played through the controller and the engine, not compiled."""
        return isinstance(self.played, World)

    @property
    def headline(self) -> str:
        """The name of the figure that files and tables call "success"."""
        return self.played.headline if isinstance(self.played, World) else "success"

    @property
    def pay(self) -> str:
        """Which pay reaches whom under the recipe, in one line."""
        r, reach = self.recipe, pay_reach(self.recipe)
        said = f"the team's pay reaches {reach['team']}; a role's own (local) pay reaches {reach['local']}"
        return f"pay (rewards={r.rewards}, returns={r.returns}): {said}"

    def unguided(self, config: config_dict.ConfigDict) -> str:
        """A note for a run that begins with random models although there is a scripted player to imitate; else the empty string."""
        w, options = config.warm_start, [self.options[name] for name in self.assignment.trained]
        if w.steps or w.run or w.models or self.game.script is None or all("path" in one for one in options):
            return ""
        return (
            "note: no supervised warm-up (config.warm_start.steps=0), although this game has a scripted player to imitate. A model with "
            "random parameters is paid only for what it says by chance; try --config.warm_start.steps=200"
        )

    @property
    def budgets(self) -> dict[str, tuple[int, int]]:
        """Role -> its longest prompt and its longest response, in tokens."""
        return players.budgets(self.played)

    @property
    def row_tokens(self) -> int:
        """Of a packed row, unless the config says otherwise."""
        return max(ROW_TOKENS, *(prompt + response for prompt, response in self.budgets.values()))

    def table(self, config: config_dict.ConfigDict) -> str:
        """What `--dry_run` prints: roles, models, recipe fields, sizes and shapes; of a workflow, the picture of its graph."""
        g, r, e = self.game, self.recipe, config.rollout.tasks
        k = r.branches
        kind, name = ("workflow", g.workflow.name) if isinstance(g, World) else ("game", config.game.name)
        head = f"{config.name}: {kind} {name}, recipe {r.name} ({r.preset}), {config.steps} steps, seed {config.seed}"
        rows = [head + (", hosted" if config.hosted else ""), "", "roles"]
        for role, (prompt, response) in self.budgets.items():
            said = f"prompt [E={e}, P<={prompt}]  responses [E={e}, K={k}, R<={response}]"
            if isinstance(g, World):
                said += f"  reads {', '.join(g.workflow.roles[role].reads)}; writes {', '.join(g.workflow.roles[role].writes)}"
            elif beside := next([n for n in stage if n != role] for stage in g.stages if role in stage):
                said += f"  together with {', '.join(beside)}"
            rows.append(f"  {role:<10} -> model {self.assignment.roles[role]:<10} {said}")
        rows += ["", f"models (trained: {', '.join(self.assignment.trained)}; each with its own parameters and optimizer)"]
        for model, options in self.options.items():
            m = self.shapes.get(model)
            shape = m and (
                f"  {m.parameters:,} parameters (V={m.vocab_size} D={m.width} Y={m.layers} H={m.query_heads} J={m.key_value_heads} "
                f"d={m.head_dim} F={m.feed_forward})"
            )
            rows.append(f"  {model:<10} " + ", ".join(f"{key}={value}" for key, value in options.items()) + (shape or ""))
        plays = f"{k} candidates per prompt, '{r.pick}' goes on" if r.sampling == "tree" else f"{k} plays each"
        rows += ["", f"per step: {e} tasks, {plays}"]
        if isinstance(g, World):
            rows[-1] += f"; headline figure: {g.headline}"
        else:
            samples = e * k * g.max_turns * len(g.roles)
            rows[-1] += f"; at most {samples:,} samples (E={e} x K={k} x T={g.max_turns} x N={len(g.roles)})"

        def given(name):
            return "default" if config.game[name] is None else config.game[name]

        value = given if isinstance(g, World) else lambda name: getattr(g, name, "")
        rows += [self.pay, *filter(None, [self.unguided(config), cost_line(config, self)])]
        rows += ["", "game", *(f"  {name:<20} {value(name)}" for name in self.found.options)]
        rows += ["", "recipe", *(f"  {f.name:<20} {getattr(r, f.name)}" for f in dataclasses.fields(r))]
        for section in ("rollout", "optimizer", "warm_start", "evaluation", "checkpoint"):
            values = ((name, "default" if value is None else value) for name, value in config[section].items())
            rows += ["", section, *(f"  {name:<20} {value}" for name, value in values)]
        if isinstance(g, World):
            from marl_llm.workflows import to_mermaid

            rows += ["", to_mermaid(g.workflow, dict(self.assignment.roles))]
        return "\n".join(rows)


def resolve(config: config_dict.ConfigDict, home: pathlib.Path | None = None, sizes_only: bool = False) -> Plan:
    """Checks a config and turns it into typed values. Whoever resolves it closes it (`with resolve(config) as plan`).

    `home` is where a run directory keeps a user's file. `sizes_only` is for `marl_llm plan`, which needs no parameters: a world whose
    models are checkpoints may name a published preset in place of a `path`.

    Options that are left open and depend on the models are set in the config (`marl_llm.runs.open_options`). Raises `ConfigError` for an
    unknown name, an impossible or contradictory value, or an option that would have no effect.
    """
    check(config, home)
    given = checks.given
    try:
        recipe = make_recipe(config.recipe.name, config.recipe.preset, **given(config.recipe, ("name", "preset")))
        found = find_game(config.game.name, home)
        game = found.make(**given(config.game, ("name",)))
    except FileNotFoundError as error:
        raise ConfigError(_missing_file(config, error)) from error
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(str(error)) from error
    try:
        if isinstance(game, World):
            game = _listed(_cut(game, config.rollout), config.rollout.task_list)
        played, text = game, None
        if config.hosted and isinstance(game, Game):
            played, text = players.hosted_world(config, game, recipe)
        assignment, options, shapes = players.cast(config, played, sizes_only)
        fill_open_options(config, [options[name] for name in assignment.trained])
        plan = Plan(found, game, played, text, recipe, assignment, options, shapes, given(config.script))
        players.contradictions(config, plan)
        check_coach(config, plan)
        return plan
    except (ValueError, TypeError) as error:
        if isinstance(game, World):
            game.close()
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def _missing_file(config: config_dict.ConfigDict, error: FileNotFoundError) -> str:
    """Which option of the game names a file that is not there, as a person reads it."""
    file = str(error.filename or error)
    keys = [f"config.game.{key}" for key, value in config.game.items() if isinstance(value, str) and value and value in file]
    reason = f"there is no file {file} (from {pathlib.Path.cwd()})" if error.filename else file
    return f"{keys[0] if keys else config.game.name}: {reason}"


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


def _cut(world: World, rollout: config_dict.ConfigDict) -> World:
    """The world with its roles' budgets cut to what the config allows."""
    most = {name: rollout[name] for name in ("max_prompt", "max_tokens") if rollout[name] is not None}

    def cut(role):
        return dataclasses.replace(role, **{name: min(value, getattr(role, name)) for name, value in most.items()})

    return dataclasses.replace(world, workflow=with_roles(world.workflow, cut)) if most else world


def _listed(world: World, path: str | None) -> World:
    """The world whose training tasks are those of a list, again and again. Raises `ConfigError` for a file that holds no list."""
    if not path:
        return world
    try:
        numbers = read_json_file(path)["tasks"]
        if not isinstance(numbers, list) or not numbers or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError("its 'tasks' are no list of task numbers, or an empty one")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"config.rollout.task_list={path!r} cannot be used ({error}); make it with marl_llm profile --output") from error

    def tasks(split: str, first: int, count: int) -> list[Task]:
        if split != "train":
            return world.tasks(split, first, count)
        at = [numbers[number % len(numbers)] for number in range(first, first + count)]
        return [dataclasses.replace(world.tasks("train", one, 1)[0], number=number) for number, one in enumerate(at, first)]

    return dataclasses.replace(world, tasks=tasks)
