"""Ground floor: names of earlier versions, and what they are called now. Run directories, configs and code of that time hold the old ones.

Run directories are converted when they are read. `make_recipe` takes old names with a `FutureWarning`; a flag, a config file or an option
with one is refused in a line that names the new one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

RECIPE_FIELDS = MappingProxyType(
    {
        "branches": "group_size",
        "normaliser": "advantage_estimator",
        "scale": "scale_advantages",
        "weigh": "statistics_weight",
        "skip_tied": "filter_zero_variance",
        "tied_in_denominator": "zero_variance_in_denominator",
        "level": "importance_level",
        "reduce": "loss_aggregation",
        "kl_in": "kl_where",
        "correction": "rollout_correction",
        "correction_level": "rollout_correction_level",
        "correction_cap": "rollout_correction_threshold",
    }
)
ROLLOUT_OPTIONS = MappingProxyType(
    {
        "slots": "max_num_seqs",
        "chunk": "decode_steps",
        "ahead": "max_staleness",
        "over_start": "oversample",
        "swap": "weight_update",
        "adapters": "lora_serving",
        "exact": "batch_invariant",
        "pool": "block_pool",
        "void_limit": "aborted_limit",
    }
)
# of options by their new names
ROLLOUT_VALUES = MappingProxyType({"weight_update": {"now": "in_flight", "drain": "blocking"}, "lora_serving": {"together": "multi"}})
METRICS = MappingProxyType(  # parts of a key
    {
        "useful_groups": "groups_with_signal",
        "old_kl": "approx_kl",
        "over_start": "oversample",
        "void": "aborted",
        "void_share": "aborted_share",
    }
)
ABORTING = MappingProxyType({"coach": ("missing",), "game": ("on_bad_feedback", "raises")})  # options whose value "void" is "abort" now
ENGINE_NAMES = MappingProxyType(  # of `marl_llm.sampling`
    {
        "Settings": "SamplingParams",
        "RowSettings": "RowSamplingParams",
        "Drawn": "SampledToken",
        "draw": "sample_token",
        "LaneConfig": "EngineConfig",
    }
)
MODULE_NAMES = MappingProxyType(  # module -> its names; files of games in run directories import the old ones
    {
        "marl_llm.workflows": {"World": "Environment", "Speech": "Renderer"},
        "marl_llm.training": {
            "Policy": "TrainState",
            "make_policy": "make_train_state",
            "fresh_policy": "fresh_train_state",
            "step_policy": "apply_gradient",
            "Advice": "Advantages",
            "advise": "compute_advantages",
        },
    }
)
SECTIONS = MappingProxyType({"warm_start": "sft"})
PHASES = MappingProxyType({"warm_start": "sft"})
OPTIONS = MappingProxyType(dict(RECIPE_FIELDS) | dict(ROLLOUT_OPTIONS) | dict(SECTIONS))


def new_name(word: object, known: Iterable[object]) -> str | None:
    """What an option or a value of an earlier version is called now, if that is one of the known words.

    >>> new_name("branches", ("group_size", "pick"))
    'group_size'
    """
    words = [OPTIONS.get(str(word)), *(values.get(str(word)) for values in (*ROLLOUT_VALUES.values(), {"void": "abort"}))]
    names = set(map(str, known))
    return next((new for new in words if new in names and str(word) not in names), None)


def new_object(module: str, name: str) -> Any:
    """What a module calls by another name now, with a `FutureWarning`. For its `__getattr__`; raises `AttributeError` for other names."""
    if name not in MODULE_NAMES[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new = MODULE_NAMES[module][name]
    warnings.warn(f"{module}.{name} is called {new} now", FutureWarning, stacklevel=3)
    return getattr(sys.modules[module], new)


def convert_recipe_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe under their new names, with a `FutureWarning` for each old one. Raises `ValueError` for a field under both."""
    for old in fields:
        if old in RECIPE_FIELDS:
            warnings.warn(f"recipe field {old!r} is called {RECIPE_FIELDS[old]!r} now", FutureWarning, stacklevel=3)
    return _renamed(fields, RECIPE_FIELDS, "recipe")


def convert_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run directory with its recipe, its rollout and its models' recipes under their new names.

    Raises `ValueError` for an option under both of its names. Other keys stay as they are: who reads the config refuses unknown ones.
    """
    out = _renamed(config, SECTIONS, "config")
    if isinstance(config.get("recipe"), Mapping):
        out["recipe"] = _renamed(config["recipe"], RECIPE_FIELDS, "config.recipe")
    if isinstance(config.get("rollout"), Mapping):
        out["rollout"] = rollout = _renamed(config["rollout"], ROLLOUT_OPTIONS, "config.rollout")
        for name, values in ROLLOUT_VALUES.items():
            if isinstance(rollout.get(name), str):
                rollout[name] = values.get(rollout[name], rollout[name])
    for section, options in ABORTING.items():
        if isinstance(config.get(section), Mapping):
            out[section] = {k: "abort" if k in options and v == "void" else v for k, v in config[section].items()}
    if isinstance(config.get("models"), Mapping):
        out["models"] = {name: _converted_model(section, name) for name, section in config["models"].items()}
    return out


def convert_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a run's files (metrics, episodes, trajectories, outcomes) with its keys, its phase and its status under their new names.

    >>> convert_line({"step": 1, "model/solver/old_kl": 0.5, "over_start/late": 2, "status": "void"})
    {'step': 1, 'model/solver/approx_kl': 0.5, 'oversample/late': 2, 'status': 'aborted'}
    """
    new = {"/".join(METRICS.get(part, part) for part in key.split("/")): value for key, value in line.items()}
    if new.get("status") == "void":
        new["status"] = "aborted"
    if isinstance(new.get("phase"), str):
        new["phase"] = PHASES.get(new["phase"], new["phase"])
    return new


def convert_evaluation(results: Mapping[str, Any]) -> dict[str, Any]:
    """The content of evaluation.json with the figures of every table of seats, pairs among them, under their new names."""
    tables = {name: convert_line(value) if isinstance(value, Mapping) else value for name, value in results.items()}
    if isinstance(tables.get("pairs"), Mapping):
        tables["pairs"] = {name: convert_line(value) if isinstance(value, Mapping) else value for name, value in tables["pairs"].items()}
    return tables


def _converted_model(section: Any, name: str) -> Any:
    if not isinstance(section, Mapping) or not isinstance(section.get("recipe"), Mapping):
        return section
    return dict(section) | {"recipe": _renamed(section["recipe"], RECIPE_FIELDS, f"config.models.{name}.recipe")}


def _renamed(values: Mapping[str, Any], names: Mapping[str, str], where: str) -> dict[str, Any]:
    """The values under their new names, in the same order."""
    for old, new in names.items():
        if old in values and new in values:
            raise ValueError(f"{where} has both {old!r} and {new!r}, which is its name now: leave {old!r} out")
    return {names.get(name, name): value for name, value in values.items()}
