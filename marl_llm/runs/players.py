"""Who plays whom in a config, and what contradicts: models of the wrong kind, options without effect. Each in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from marl_llm.runs.checks import elsewhere, given, parse_assignment, parse_phases, parse_sources
from marl_llm.runs.command import ConfigError
from marl_llm import hints
from marl_llm.algorithms import RECIPES, Recipe, make_recipe
from marl_llm.games import Game
from marl_llm.models import LoraConfig, ModelConfig, make_model_config, read_config
from marl_llm.untrusted import read_json
from marl_llm.workflows import Assignment, Inside, Outside, Scripted, WorkflowError, World, alternate

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan

KINDS = ("trained", "frozen", "outside", "scripted")
_OUTSIDE = ("url", "served_as", "key_env")
_VLLM = ("url", "folder", "key_env")  # with sampler='vllm'; the first two are needed
_LORA = ("lora_rank", "lora_alpha")
_CHAT = ("thinking", "template")  # of a checkpoint
_NO_SHAPE = {"kind", "preset", "path", *_CHAT, "sampler", *_OUTSIDE, *_VLLM, *_LORA}
SAMPLERS = ("engine", "vllm")
NEEDED = {"url": "the server's address, e.g. http://127.0.0.1:8000/v1", "folder": "a directory that the server sees under the same path"}


def budgets(game: Game | World) -> dict[str, tuple[int, int]]:
    """Role -> its longest prompt and its longest response, in tokens."""
    if isinstance(game, World):
        return {name: (role.max_prompt, role.max_tokens) for name, role in game.workflow.roles.items()}
    return {role.name: (role.prompt_tokens, role.response_tokens) for role in game.roles}


def cast(
    config: config_dict.ConfigDict, game: Game | World, sizes_only: bool = False
) -> tuple[Assignment, dict[str, dict], dict[str, ModelConfig]]:
    """Who plays whom, what each model's section came to, and the shapes of this program's models. Raises `ConfigError`."""
    roles = parse_assignment(config.assignment, list(budgets(game)))
    names = list(dict.fromkeys(roles.values()))
    for name in config.models:
        if name not in names:
            raise ConfigError(f"config.models.{name} plays no role{hints.meant(name, names) or '; the models are ' + ', '.join(names)}")
    options = {name: _options(config, name) for name in names}
    shapes = {name: _shape(name, one, game, sizes_only) for name, one in options.items() if one["kind"] in ("trained", "frozen")}
    models = {name: _player(config, name, options[name], game) for name in names}
    assignment = Assignment(roles, models, alternate(*parse_phases(config.schedule)))
    if isinstance(game, World):
        assignment.check(game.workflow)
    if not assignment.trained:
        raise ConfigError("no model trains: give one kind='trained'")
    return assignment, options, shapes


def _options(config: config_dict.ConfigDict, name: str) -> dict:
    """A model's section, with what it leaves open as `config.model` has it. One that names its own shape inherits no other shape's."""
    common, own = given(config.model), given(config.models[name], ("optimizer", "recipe")) if name in config.models else {}
    kind = own.get("kind") or common.get("kind")
    where = f"config.models.{name}"
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind={kind!r} is unknown; the kinds are {', '.join(KINDS)}")
    if own.get("preset") and own.get("path"):
        raise ConfigError(f"{where}.preset would have no effect: its path names a checkpoint")
    if own.get("preset") or own.get("path"):
        drawn = ("sampler", *_VLLM) if common.get("sampler") == "vllm" else ()
        common = {key: value for key, value in common.items() if key in ("kind", *_CHAT, *drawn, *_LORA)}
    allowed = {"outside": ("kind", *_OUTSIDE), "scripted": ("kind",)}.get(kind)
    if allowed:  # of the shape that others have, nothing is meant
        common = {key: value for key, value in common.items() if key in allowed}
    merged = common | own
    if allowed and (idle := [key for key in merged if key not in allowed]):
        raise ConfigError(f"{where}.{idle[0]} would have no effect: the model is {kind}")
    if kind == "outside" and not (merged.get("url") and merged.get("served_as")):
        raise ConfigError(f"{where} is outside: it needs url and served_as")
    if allowed:
        return merged
    if merged.get("path"):
        merged.pop("preset", None)
    elif idle := [key for key in _CHAT if key in own]:
        raise ConfigError(f"{where}.{idle[0]} would have no effect: only a checkpoint (path) has a chat template")
    else:
        merged = {key: value for key, value in merged.items() if key not in _CHAT}
    template_options(where, merged)
    _check_sampler(where, merged)
    if kind == "frozen":
        if idle := [key for key in _LORA if key in own]:
            raise ConfigError(f"{where}.{idle[0]} would have no effect: the model is frozen")
        merged.pop("lora_rank", None)
    if merged.get("lora_rank") is None:
        if "lora_alpha" in own:
            raise ConfigError(f"{where}.lora_alpha would have no effect: lora_rank is not set")
        merged.pop("lora_alpha", None)
    return merged


def template_options(where: str, merged: dict) -> dict[str, Any]:
    """What a model's options tell the chat template of its checkpoint. Raises `ConfigError`."""
    thinking, written = merged.get("thinking"), merged.get("template") or "{}"
    said = read_json(written)
    if not said.ok or not isinstance(said.value, dict):
        raise ConfigError(f"{where}.template={written!r} is no JSON object; write e.g. '{{\"enable_thinking\": false}}'")
    if thinking is None:
        return said.value
    hints.check_word(f"{where}.thinking", thinking, ("on", "off"), ConfigError)
    if "enable_thinking" in said.value:
        raise ConfigError(f"{where}.thinking and enable_thinking in {where}.template say the same: set one of them")
    return said.value | {"enable_thinking": thinking == "on"}


def _check_sampler(where: str, merged: dict) -> None:
    """Who draws for a model of this program. Raises `ConfigError`."""
    sampler, kind = merged.get("sampler", "engine"), merged["kind"]
    hints.check_word(f"{where}.sampler", sampler, SAMPLERS, ConfigError)
    if sampler == "vllm" and (lacking := [key for key in _VLLM[:2] if not merged.get(key)]):
        raise ConfigError(f"{where}.sampler='vllm' needs {lacking[0]}: {NEEDED[lacking[0]]}")
    used = _VLLM if sampler == "vllm" else ()
    if idle := [key for key in (*_OUTSIDE, *_VLLM) if merged.get(key) and key not in used]:
        drawn = f", and its sampler {sampler!r}" if idle[0] in _VLLM else ""
        raise ConfigError(f"{where}.{idle[0]} would have no effect: the model is {kind}{drawn}")


def shape_options(options: dict) -> dict:
    """What a model's section says of its shape, beside preset or path."""
    return {key: value for key, value in options.items() if key not in _NO_SHAPE}


def _shape(name: str, options: dict, game: Game | World, sizes_only: bool) -> ModelConfig:
    if options.get("lora_rank") is not None:
        LoraConfig(options["lora_rank"], options["lora_alpha"])
    where, own = f"config.models.{name}", game.speech if isinstance(game, World) else game
    size = own and own.tokenizer.vocab_size  # None where models bring a vocabulary of their own
    if "path" in options:
        try:
            found = read_config(options["path"], **shape_options(options))
        except ValueError as error:
            raise ConfigError(f"{where}.path={options['path']!r}: {error}") from error
        if isinstance(game, Game) and found.vocab_size != size:
            raise ConfigError(f"{where}.path={options['path']!r} has {found.vocab_size} tokens, and the game speaks a language of {size}")
        return found
    if size is None and not (sizes_only and "preset" in options):
        raise ConfigError(f"{where}: this world has no vocabulary of its own; set path to a Hugging Face checkpoint")
    if "preset" not in options:
        raise ConfigError(f"{where} needs a preset or a path")
    return make_model_config(options["preset"], size, **shape_options(options))


def _player(config: config_dict.ConfigDict, name: str, options: dict, game: Game | World) -> Inside | Outside | Scripted:
    kind = options["kind"]
    if kind in ("trained", "frozen"):
        return Inside(trained=kind == "trained")
    if isinstance(game, Game):
        raise ConfigError(f"config.models.{name} is {kind}, and compiled play knows models of this program only: set config.hosted")
    if kind == "outside":
        from marl_llm.tools.chat import ChatClient, OpenAICompatible

        return Outside(ChatClient(OpenAICompatible(options["url"], options["served_as"], options.get("key_env"))))
    if game.script is None:
        raise ConfigError(f"config.models.{name}: the world has no scripted player")
    return Scripted(game.script)


def hosted_world(config: config_dict.ConfigDict, game: Game, recipe: Recipe) -> tuple[World, Any]:
    """A value-state game as a world, and its budgets: in text if models bring a language of their own, else in the game's words."""
    import jax

    from marl_llm.games.hosted import TextBudget, hosted

    sections = [config.model, *config.models.values()]
    text = None
    if any(one.get("path") or one.get("kind") == "outside" for one in sections):
        r = config.rollout
        text = TextBudget(**{name: x for name, x in (("prompt_tokens", r.max_prompt), ("response_tokens", r.max_tokens)) if x is not None})
    elif idle := [key for key in ("max_prompt", "max_tokens") if config.rollout[key] is not None]:
        raise ConfigError(f"config.rollout.{idle[0]} would have no effect: the budgets of {config.game.name}'s roles are part of the game")
    key = jax.random.key(config.seed)  # what is played has keys of its own; here it is only looked at
    return hosted(game, key, script=given(config.script), text=text, tree=recipe.sampling == "tree"), text


# --- what contradicts ------------------------------------------------------------------------------------------------------------------


def contradictions(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Raises `ConfigError` for values that cannot stand together, and for options that would have no effect."""
    game = plan.game
    if config.hosted and isinstance(game, World):
        raise ConfigError("config.hosted=True would have no effect: a workflow is always played hosted")
    if config.rollout.task_list and isinstance(game, Game):
        raise ConfigError("config.rollout.task_list would have no effect: only tasks of a workflow have numbers that a list can name")
    if not plan.hosted and (idle := list(given(config.rollout, ("tasks",)))):
        raise ConfigError(f"config.rollout.{idle[0]}={config.rollout[idle[0]]} would have no effect: the game is played compiled")
    if config.rollout.void_limit is not None and not 0 <= config.rollout.void_limit <= 1:
        raise ConfigError(f"config.rollout.void_limit={config.rollout.void_limit} must lie in [0, 1]; 1 never stops a run")
    if not plan.hosted and (config.tools.backend != "local" or config.tools.workers):
        raise ConfigError("config.tools would have no effect: the game is played compiled, without tools")
    _words(config)
    _ahead(config, plan)
    _over_start(config, plan)
    _swap(config, plan)
    _served(plan)
    _exact(config, plan)
    _tree(plan)
    _joint(plan)
    _critic(config, plan)
    _sizes(config, plan)
    _start(config, plan)
    adapted = any("lora_alpha" in one for one in plan.options.values())
    if config.model.lora_alpha not in (None, LoraConfig.alpha) and not adapted:
        raise ConfigError(f"config.model.lora_alpha={config.model.lora_alpha} would have no effect: no model has a lora_rank")
    for key in _CHAT:
        if config.model[key] and not any(key in one for one in plan.options.values()):
            raise ConfigError(f"config.model.{key}={config.model[key]!r} would have no effect: no model is a checkpoint")
        if not plan.hosted and (models := [name for name, one in plan.options.items() if key in one]):
            raise ConfigError(f"config.models.{models[0]}.{key} would have no effect: compiled play has no chat; set config.hosted")


def _words(config: config_dict.ConfigDict) -> None:
    if config.rollout.adapters is None and config.rollout.pool is None:
        return
    from marl_llm.training.served import ADAPTERS, POOLS  # takes a second to import

    for name, words in (("adapters", ADAPTERS), ("pool", POOLS)):
        if (how := config.rollout[name]) is not None and how not in words:
            raise ConfigError(f"config.rollout.{name}={how!r} is unknown; the ways are {', '.join(words)}")


def _ahead(config: config_dict.ConfigDict, plan: Plan) -> None:
    ahead = config.rollout.ahead or 0
    if ahead > 1:
        raise ConfigError(f"config.rollout.ahead={ahead} must be 0 or 1: at most one step is played beside an update")
    if ahead and plan.recipe.correction == "none":
        raise ConfigError(
            "config.rollout.ahead=1 trains on samples of the parameters before the last update, which the loss must weigh: set "
            "config.recipe.correction=truncate (or mask)"
        )


def _over_start(config: config_dict.ConfigDict, plan: Plan) -> None:
    over = config.rollout.over_start or 0
    if not over:
        return
    from marl_llm.training.over_start import conflict  # takes a second to import

    if over >= config.rollout.tasks:
        raise ConfigError(f"config.rollout.over_start={over} must be below config.rollout.tasks={config.rollout.tasks}")
    if config.checkpoint.every == 1 or config.steps == 1:
        raise ConfigError(
            f"config.rollout.over_start={over} would have no effect: the step before a checkpoint leaves no play behind, and here a "
            "checkpoint follows each step; set config.checkpoint.every"
        )
    served = [name for name, one in plan.options.items() if one.get("sampler") == "vllm"]
    why = conflict(
        over, config.rollout.ahead or 0, plan.recipe, coached=bool(config.coach.kind), exact=bool(config.rollout.exact), served=served
    )
    if why:
        raise ConfigError(f"config.rollout.{why}")


def _swap(config: config_dict.ConfigDict, plan: Plan) -> None:
    rollout = config.rollout
    if rollout.swap is None:
        return
    from marl_llm.training.over_start import swap_conflict  # takes a second to import

    served = [name for name, one in plan.options.items() if one.get("sampler") == "vllm"]
    if why := swap_conflict(
        rollout.swap, rollout.over_start or 0, rollout.ahead or 0, plan.recipe, exact=bool(rollout.exact), served=served
    ):  # fmt: skip
        raise ConfigError(f"config.rollout.{why}")


def _served(plan: Plan) -> None:
    servers = {name: one["url"].rstrip("/") for name, one in plan.options.items() if one.get("sampler") == "vllm"}
    if servers and not plan.hosted:
        raise ConfigError(f"config.models.{next(iter(servers))}.sampler='vllm': compiled play draws in its own program; set config.hosted")
    if twice := [name for name in servers if list(servers.values()).count(servers[name]) > 1]:
        raise ConfigError(f"config.models.{twice[0]}.url={servers[twice[0]]!r} is also that of {twice[1]}: each model needs its own server")
    if servers:
        from marl_llm.training.served import check_served  # takes a second to import

        for name in servers:
            try:
                check_served(name, plan.recipe, name in plan.assignment.trained)
            except WorkflowError as error:
                raise ConfigError(str(error)) from error


def _exact(config: config_dict.ConfigDict, plan: Plan) -> None:
    if not config.rollout.exact:
        return
    from marl_llm.training import PlayOptions  # takes a second to import

    if servers := [name for name, one in plan.options.items() if one.get("sampler") == "vllm"]:
        raise ConfigError(f"config.rollout.exact=True promises nothing of what a server draws: config.models.{servers[0]}.sampler='vllm'")
    slots = config.rollout.slots or PlayOptions.slots
    if slots & (slots - 1):
        raise ConfigError(f"config.rollout.slots={slots} must be a power of two with rollout.exact, so that a row's place changes no bit")


def _tree(plan: Plan) -> None:
    recipe, game = plan.recipe, plan.played
    instead = "use a recipe with sampling='parallel', e.g. magrpo or grpo"
    if recipe.sampling != "tree":
        return
    if isinstance(game, Game) and any(len(stage) > 1 for stage in game.stages):
        raise ConfigError(
            f"{game.name} has roles that act at once, and a tree would score one role's branches before the other has spoken: {instead}"
        )
    if isinstance(game, World):
        from marl_llm.training.hosted import branching_of  # takes a second to import
        from marl_llm.workflows.controller import checked_branching

        try:
            checked_branching(game.workflow, branching_of(recipe, plan.assignment), recipe.pick)
        except WorkflowError as error:
            raise ConfigError(f"recipe {recipe.name} samples a tree; {error}: {instead}") from error


def _joint(plan: Plan) -> None:
    from marl_llm.workflows.cross import check_cross  # takes a second to import

    if plan.recipe.joint != "cross":
        return
    if isinstance(plan.played, Game):
        raise ConfigError(f"recipe.joint='cross': compiled play pairs no responses; set config.hosted, or leave {plan.played.name} aligned")
    try:
        check_cross(plan.played.workflow)
    except WorkflowError as error:
        raise ConfigError(f"recipe.{error}") from error


def without_other_recipe(config: config_dict.ConfigDict, flags: Mapping[str, Any]) -> None:
    """Drops what a config file set for its own recipe, where `flags` exchange that for one which would refuse it.

    `flags` has what the command line changes, by name. What was itself given there stays, and `resolve` refuses it; what the other recipe
    takes too stays as well, such as `branches` or `temperature`.
    """
    section, name = config.recipe, config.recipe.name
    if "recipe.name" not in flags or name not in RECIPES:
        return
    if "recipe.preset" not in flags and not _makes(name, section.preset, {}):
        section.preset = "paper"
    if "recipe.returns" not in flags and section.returns == "outcome_plus_local" and make_recipe(name).returns != "outcome":
        section.returns = None  # it takes the place of an outcome, and of no other return
    options = given(section, ("name", "preset"))
    of_file = [field for field in options if f"recipe.{field}" not in flags]
    if not _makes(name, section.preset, options):
        kept = {field: value for field, value in options.items() if field not in of_file}
        for field in of_file * 2:  # twice, for those that have an effect beside a later one
            if _makes(name, section.preset, kept | {field: options[field]}):
                kept[field] = options[field]
        section.update({field: None for field in of_file if field not in kept})
    if not _makes(name, section.preset, given(section, ("name", "preset")), "critic"):
        for option, default in (("critic_learning_rate", None), ("critic", "own")):
            if f"optimizer.{option}" not in flags:
                config.optimizer[option] = default


def _makes(name: str, preset: str, options: Mapping[str, Any], normaliser: str | None = None) -> bool:
    """Whether a recipe can be made with these options; with this normaliser, if one is named."""
    try:
        recipe = make_recipe(name, preset, **options)
    except ValueError:
        return False
    return normaliser in (None, recipe.normaliser)


def _critic(config: config_dict.ConfigDict, plan: Plan) -> None:
    from marl_llm.training.update import CRITICS  # takes a second to import

    o, learns = config.optimizer, plan.recipe.normaliser == "critic"
    if o.critic not in CRITICS:
        raise ConfigError(f"config.optimizer.critic={o.critic!r} is unknown; the kinds are {', '.join(CRITICS)}")
    if not learns and o.critic_learning_rate is not None:
        raise ConfigError(f"optimizer.critic_learning_rate would have no effect: recipe {plan.recipe.name} has no critic")
    if not learns and o.critic == "head":
        raise ConfigError(f"config.optimizer.critic='head' would have no effect: recipe {plan.recipe.name} has no critic")
    if o.critic == "head" and (adapted := [name for name, one in plan.options.items() if one.get("lora_rank")]):
        raise ConfigError(f"config.optimizer.critic='head' lies on a policy's own parameters, but {adapted[0]} trains adapters: use 'own'")


def _sizes(config: config_dict.ConfigDict, plan: Plan) -> None:
    o = config.optimizer
    longest, row, micro = max(map(sum, plan.budgets.values())), o.row_tokens or plan.row_tokens, o.microbatch_tokens
    if row < longest:
        raise ConfigError(f"optimizer.row_tokens={row} is less than a role's longest prompt and response, {longest}")
    if micro and micro < row:
        raise ConfigError(f"config.optimizer.microbatch_tokens={micro} cannot hold one row of {row} tokens, and a row is never cut")
    prompts, responses = zip(*plan.budgets.values())
    most = o.minibatch * (max(prompts) + plan.recipe.candidates * max(responses))
    if micro and micro >= max(most, row):
        raise ConfigError(
            f"config.optimizer.microbatch_tokens={micro} would have no effect: a minibatch has at most {most} tokens. Set it to 0, or lower"
        )


def _start(config: config_dict.ConfigDict, plan: Plan) -> None:
    w, trained, name = config.warm_start, list(plan.assignment.trained), config.game.name
    script = plan.script
    plays = any(one["kind"] == "scripted" for one in plan.options.values())
    known = list(plan.found.script_options)
    for option in script:
        if option not in known:
            what = f"has no option {option!r}; {hints.suggestion(option, known)}" if known else "has no options"
            raise ConfigError(f"config.script.{option} would have no effect: {name}'s scripted player {what}")
    if script and not w.steps and not plays:
        raise ConfigError(f"config.script.{next(iter(script))} would have no effect: warm_start.steps is 0")
    if w.steps and (plan.game.script is None):
        raise ConfigError(f"warm_start.steps={w.steps}: {name} has no scripted player to imitate")
    sources = parse_sources(w.models)
    runs = w.run or any(map(elsewhere, sources.values()))
    if idle := [key for key in ("step", "models") if w[key] and not (runs if key == "models" else w.run)]:
        raise ConfigError(f"config.warm_start.{idle[0]}={w[idle[0]]!r} would have no effect: warm_start.run names no run")
    for model in sources:
        if model not in trained:
            raise ConfigError(f"config.warm_start.models={w.models!r}: no model {model!r} trains; {hints.suggestion(model, trained)}")
    if lost := [model for model in trained if sources and not w.run and not elsewhere(sources.get(model, ""))]:
        raise ConfigError(f"config.warm_start.models={w.models!r} names no run for model {lost[0]!r}, nor does warm_start.run")
