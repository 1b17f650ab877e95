"""The configs of a sweep: one config with all combinations of a few values.

Teams of one program may differ in the keys of `VARIED` alone: their values reach the program as arrays, or stay on the host.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.runs.command import ConfigError
from marl_llm.runs.variants import set_key

VARIED = ("seed", "optimizer.learning_rate", "optimizer.warmup", "optimizer.decay_steps", "sft.learning_rate")


@dataclasses.dataclass(frozen=True)
class SweptConfig:
    """One team of a sweep."""

    name: str  # of its run directory, e.g. "learning_rate=1e-3_seed=0"
    setting: str  # the same without the seed; the config's name if nothing else varies. Teams of one setting are its seeds
    config: config_dict.ConfigDict  # of its run


def sweep_configs(config: config_dict.ConfigDict, texts: Sequence[str]) -> list[SweptConfig]:
    """The configs of all combinations of the values in texts such as "seed=0,1,2"; the last key varies fastest.

    Raises `ConfigError` for a key that cannot differ within one program, for a value of another type, and for one that comes twice.
    """
    values: dict[str, list[str]] = {}
    for text in texts:
        key, _, listed = text.removeprefix("config.").partition("=")
        if key not in VARIED:
            raise ConfigError(f"--vary={text}: {_why_not(config, key)}")
        if key in values:
            raise ConfigError(f"--vary={key} is given twice; write all its values with commas between")
        values[key] = [value.strip() for value in listed.split(",")]
        numbers = [value_at(changed_config(config, {key: value}), key) for value in values[key]]
        if len(set(numbers)) < len(numbers):
            raise ConfigError(f"--vary={text}: a value comes twice")
    if not values:
        raise ConfigError("--vary is missing, e.g. --vary=optimizer.learning_rate=1e-3,3e-4 --vary=seed=0,1,2")
    return [_swept_config(config, dict(zip(values, chosen))) for chosen in itertools.product(*values.values())]


def _why_not(config: config_dict.ConfigDict, key: str) -> str:
    """What may differ instead of a key, and how teams that differ in it are compared."""
    among = f"teams of one program may differ in {', '.join(VARIED)}"
    try:
        value_at(config, key)
    except KeyError:
        return f"{among}{hints.meant(key, VARIED)}"
    return f"{among}; for {key} use `marl compare --variant=NAME:{key}=VALUE`, which trains one team after the other"


def value_at(config: config_dict.ConfigDict, key: str) -> Any:
    """The value of a key with dots. Raises `KeyError` where there is none."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, config_dict.ConfigDict) or part not in value:
            raise KeyError(key)
        value = value[part]
    return value


def changed_config(config: config_dict.ConfigDict, values: Mapping[str, str]) -> config_dict.ConfigDict:
    """A copy with some keys set to values that are written as text. Raises `ConfigError` for one of another type."""
    changed = copy.deepcopy(config)
    for key, value in values.items():
        set_key(changed, key, value)
    return changed


def _swept_config(config: config_dict.ConfigDict, values: dict[str, str]) -> SweptConfig:
    last = [key.rpartition(".")[2] for key in values]
    parts = {key: f"{name if last.count(name) == 1 else key}={values[key]}" for key, name in zip(values, last, strict=True)}
    setting = "_".join(part for key, part in parts.items() if key != "seed")
    return SweptConfig("_".join(parts.values()), setting or config.name, changed_config(config, values))
