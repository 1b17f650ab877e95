"""Who plays whom in a config: each model's options, its shape, and what plays in its place. Errors are one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.algorithms import RECIPES, Recipe, make_recipe
from marl_llm.games import Game
from marl_llm.models import LoraConfig, ModelConfig, make_model_config, read_config
from marl_llm.runs.checks import given, parse_assignment, parse_phases
from marl_llm.runs.command import ConfigError
from marl_llm.untrusted import read_json
from marl_llm.workflows import Assignment, Environment, Inside, Outside, Scripted, alternate

KINDS = ("trained", "frozen", "outside", "scripted")
_OUTSIDE = ("url", "served_as", "key_env")
VLLM = ("url", "folder", "key_env")  # with sampler='vllm'; the first two are needed
_LORA = ("lora_rank", "lora_alpha")
CHAT = ("thinking", "template")  # of a checkpoint
_NO_SHAPE = {"kind", "preset", "path", *CHAT, "sampler", *_OUTSIDE, *VLLM, *_LORA}
SAMPLERS = ("engine", "vllm")
NEEDED = {"url": "the server's address, e.g. http://127.0.0.1:8000/v1", "folder": "a directory that the server sees under the same path"}


def budgets(game: Game | Environment) -> dict[str, tuple[int, int]]:
    """Role -> its longest prompt and its longest response, in tokens."""
    if isinstance(game, Environment):
        return {name: (role.max_prompt, role.max_tokens) for name, role in game.workflow.roles.items()}
    return {role.name: (role.prompt_tokens, role.response_tokens) for role in game.roles}


def resolve_models(
    config: config_dict.ConfigDict, game: Game | Environment, sizes_only: bool = False
) -> tuple[Assignment, dict[str, dict], dict[str, ModelConfig]]:
    """Who plays whom, what each model's section came to, and the shapes of this program's models. Raises `ConfigError`."""
    roles = parse_assignment(config.assignment, list(budgets(game)))
    names = list(dict.fromkeys(roles.values()))
    for name in config.models:
        if name not in names:
            raise ConfigError(f"config.models.{name} plays no role{hints.meant(name, names) or '; the models are ' + ', '.join(names)}")
    options = {name: _options(config, name) for name in names}
    inside = {name: section for name, section in options.items() if section["kind"] in ("trained", "frozen")}
    shapes = {name: _shape(name, section, game, sizes_only) for name, section in inside.items()}
    models = {name: _player(config, name, options[name], game) for name in names}
    assignment = Assignment(roles, models, alternate(*parse_phases(config.schedule)))
    if isinstance(game, Environment):
        assignment.check(game.workflow)
    if not assignment.trained:
        raise ConfigError("no model trains: give one kind='trained'")
    return assignment, options, shapes


def _options(config: config_dict.ConfigDict, name: str) -> dict:
    """A model's section; options that it leaves open come from `config.model`. One that names its own shape inherits no other."""
    common, of_model = given(config.model), given(config.models[name], ("optimizer", "recipe")) if name in config.models else {}
    kind = of_model.get("kind") or common.get("kind")
    where = f"config.models.{name}"
    if kind not in KINDS:
        raise ConfigError(f"{where}.kind={kind!r} is unknown; the kinds are {', '.join(KINDS)}")
    if of_model.get("preset") and of_model.get("path"):
        raise ConfigError(f"{where}.preset would have no effect: its path names a checkpoint")
    if of_model.get("preset") or of_model.get("path"):
        drawn = ("sampler", *VLLM) if common.get("sampler") == "vllm" else ()
        common = {key: value for key, value in common.items() if key in ("kind", *CHAT, *drawn, *_LORA)}
    allowed = {"outside": ("kind", *_OUTSIDE), "scripted": ("kind",)}.get(kind)
    if allowed:  # it has no shape, so none is inherited
        common = {key: value for key, value in common.items() if key in allowed}
    merged = common | of_model
    if allowed and (idle := [key for key in merged if key not in allowed]):
        raise ConfigError(f"{where}.{idle[0]} would have no effect: the model is {kind}")
    if kind == "outside" and not (merged.get("url") and merged.get("served_as")):
        raise ConfigError(f"{where} is outside: it needs url and served_as")
    if allowed:
        return merged
    if merged.get("path"):
        merged.pop("preset", None)
    elif idle := [key for key in CHAT if key in of_model]:
        raise ConfigError(f"{where}.{idle[0]} would have no effect: only a checkpoint (path) has a chat template")
    else:
        merged = {key: value for key, value in merged.items() if key not in CHAT}
    template_options(where, merged)
    _check_sampler(where, merged)
    if kind == "frozen":
        if idle := [key for key in _LORA if key in of_model]:
            raise ConfigError(f"{where}.{idle[0]} would have no effect: the model is frozen")
        merged.pop("lora_rank", None)
    if merged.get("lora_rank") is None:
        if "lora_alpha" in of_model:
            raise ConfigError(f"{where}.lora_alpha would have no effect: lora_rank is not set")
        merged.pop("lora_alpha", None)
    return merged


def template_options(where: str, merged: dict) -> dict[str, Any]:
    """What a model's options tell the chat template of its checkpoint. Raises `ConfigError`."""
    thinking, written = merged.get("thinking"), merged.get("template") or "{}"
    value = read_json(written)
    if not value.ok or not isinstance(value.value, dict):
        raise ConfigError(f"{where}.template={written!r} is no JSON object; write e.g. '{{\"enable_thinking\": false}}'")
    if thinking is None:
        return value.value
    hints.check_word(f"{where}.thinking", thinking, ("on", "off"), ConfigError)
    if "enable_thinking" in value.value:
        raise ConfigError(f"{where}.thinking and enable_thinking in {where}.template say the same: set one of them")
    return value.value | {"enable_thinking": thinking == "on"}


def _check_sampler(where: str, merged: dict) -> None:
    """Who draws for a model of this program. Raises `ConfigError`."""
    sampler, kind = merged.get("sampler", "engine"), merged["kind"]
    hints.check_word(f"{where}.sampler", sampler, SAMPLERS, ConfigError)
    if sampler == "vllm" and (lacking := [key for key in VLLM[:2] if not merged.get(key)]):
        raise ConfigError(f"{where}.sampler='vllm' needs {lacking[0]}: {NEEDED[lacking[0]]}")
    used = VLLM if sampler == "vllm" else ()
    if idle := [key for key in (*_OUTSIDE, *VLLM) if merged.get(key) and key not in used]:
        drawn = f", and its sampler {sampler!r}" if idle[0] in VLLM else ""
        raise ConfigError(f"{where}.{idle[0]} would have no effect: the model is {kind}{drawn}")


def shape_options(options: dict) -> dict:
    """What a model's section says of its shape, beside preset or path."""
    return {key: value for key, value in options.items() if key not in _NO_SHAPE}


def _shape(name: str, options: dict, game: Game | Environment, sizes_only: bool) -> ModelConfig:
    if options.get("lora_rank") is not None:
        LoraConfig(options["lora_rank"], options["lora_alpha"])
    where, own = f"config.models.{name}", game.renderer if isinstance(game, Environment) else game
    size = own and own.tokenizer.vocab_size  # None where models bring a vocabulary of their own
    if "path" in options:
        try:
            shape = read_config(options["path"], **shape_options(options))
        except ValueError as error:
            raise ConfigError(f"{where}.path={options['path']!r}: {error}") from error
        if isinstance(game, Game) and shape.vocab_size != size:
            raise ConfigError(f"{where}.path={options['path']!r} has {shape.vocab_size} tokens, and the game speaks a language of {size}")
        return shape
    if size is None and not (sizes_only and "preset" in options):
        raise ConfigError(f"{where}: this environment has no vocabulary of its own; set path to a Hugging Face checkpoint")
    if "preset" not in options:
        raise ConfigError(f"{where} needs a preset or a path")
    return make_model_config(options["preset"], size, **shape_options(options))


def _player(config: config_dict.ConfigDict, name: str, options: dict, game: Game | Environment) -> Inside | Outside | Scripted:
    kind = options["kind"]
    if kind in ("trained", "frozen"):
        return Inside(trained=kind == "trained")
    if isinstance(game, Game):
        raise ConfigError(f"config.models.{name} is {kind}, and compiled play knows models of this program only: set config.hosted")
    if kind == "outside":
        from marl_llm.tools.chat import ChatClient, OpenAICompatible

        return Outside(ChatClient(OpenAICompatible(options["url"], options["served_as"], options.get("key_env"))))
    if game.script is None:
        raise ConfigError(f"config.models.{name}: the environment has no scripted player")
    return Scripted(game.script)


def hosted_environment(config: config_dict.ConfigDict, game: Game, recipe: Recipe) -> tuple[Environment, Any]:
    """A value-state game as an environment, and its budgets: in text if models bring a language of their own, else in the game's words."""
    import jax

    from marl_llm.games.hosted import TextBudget, hosted

    sections = [config.model, *config.models.values()]
    text = None
    if any(section.get("path") or section.get("kind") == "outside" for section in sections):
        r = config.rollout
        text = TextBudget(**{name: x for name, x in (("prompt_tokens", r.max_prompt), ("response_tokens", r.max_tokens)) if x is not None})
    elif idle := [key for key in ("max_prompt", "max_tokens") if config.rollout[key] is not None]:
        raise ConfigError(f"config.rollout.{idle[0]} would have no effect: the budgets of {config.game.name}'s roles are part of the game")
    key = jax.random.key(config.seed)  # what is played has keys of its own; here it is only looked at
    return hosted(game, key, script=given(config.script), text=text, tree=recipe.sampling == "tree"), text


def without_other_recipe(config: config_dict.ConfigDict, flags: Mapping[str, Any]) -> None:
    """Drops what a config file set for its own recipe, where `flags` exchange that for one which would refuse it.

    `flags` has what the command line changes, by name. What `flags` set stays, and `resolve` refuses it; what the other recipe takes
    too stays as well, such as `group_size` or `temperature`.
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


def _makes(name: str, preset: str, options: Mapping[str, Any], advantage_estimator: str | None = None) -> bool:
    """Whether a recipe can be made with these options; with this advantage estimator, if one is named."""
    try:
        recipe = make_recipe(name, preset, **options)
    except ValueError:
        return False
    return advantage_estimator in (None, recipe.advantage_estimator)
