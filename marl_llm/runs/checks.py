"""What a config may not say, as far as it shows without a game: unknown keys, values out of range, words that cannot be read.

Imports nothing heavy, so that `--help` stays quick; `marl_llm.runs.players` has the rest.
"""

from __future__ import annotations

import re
from typing import Any

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.runs.command import ConfigError

PLACEMENTS = ("shared", "split")
_DIVIDED = ("rollout.tasks", "sft.tasks")


def given(section: config_dict.ConfigDict, skip: tuple[str, ...] = ()) -> dict:
    """The keys of a section that were set."""
    return {key: value for key, value in section.items() if key not in skip and value is not None}


def compare_keys(new, old, path: str, start: str, free: tuple[str, ...] = ()) -> None:
    """Raises `ConfigError` naming a key of `new` that `old` lacks, or the reverse, outside of sections `free`; `start` makes whole ones."""
    for key in old:
        if key not in new:
            raise ConfigError(f"{path}.{key} is missing; start the config from {start}")
    for key in new:
        if key not in old:
            raise ConfigError(f"unknown key {path}.{key}{hints.meant(key, old) or f'; {path} has ' + ', '.join(old)}")
        if isinstance(old[key], config_dict.ConfigDict):
            if not isinstance(new[key], config_dict.ConfigDict):
                raise ConfigError(f"{path}.{key}={new[key]!r} must be a section with {', '.join(old[key]) or 'a section per name'}")
            if f"{path}.{key}" not in free:
                compare_keys(new[key], old[key], f"{path}.{key}", start, free)


def _value(config: config_dict.ConfigDict, path: str) -> Any:
    for part in path.split("."):
        config = config[part]
    return config


def most_devices(config: config_dict.ConfigDict, available: int) -> int:
    """The most of the `available` devices that compiled rollouts divide over."""
    return max(n for n in range(1, available + 1) if not any(value % n for value in _divided(config).values()))


def devices(config: config_dict.ConfigDict, count: int) -> None:
    """Raises `ConfigError` when the tasks of a compiled rollout do not divide over the devices."""
    for path, value in _divided(config).items():
        if value % count:
            raise ConfigError(f"config.{path}={value} does not divide over {count} devices; choose a multiple, or set config.devices")


def _divided(config: config_dict.ConfigDict) -> dict[str, int]:
    return {path: _value(config, path) for path in _DIVIDED if config.sft.steps or not path.startswith("sft")}


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


def parse_sources(text: str) -> dict[str, str]:
    """`model=source,...`; a source is a model's name in the run that is started from, or another run's, `run:DIR[@STEP][#MODEL]`.

    Raises `ConfigError`.
    """
    pairs = [[word.strip() for word in part.partition("=")[::2]] for part in filter(None, text.split(","))]
    bad = any(not all(pair) or ("=" in pair[1] and not elsewhere(pair[1])) for pair in pairs)
    if bad or len({name for name, _ in pairs}) != len(pairs):
        raise ConfigError(
            f"config.sft.models={text!r} is not like 'shared=reason', 'plan=shared,answer=shared' or 'tool=run:runs/a#solo'"
        )
    return dict(pairs)


def elsewhere(source: str) -> bool:
    """Whether a source of `parse_sources` names a run of its own."""
    return source.startswith("run:")


def parse_placement(text: str) -> dict[str, tuple[int, ...]] | str:
    """`shared` or `split`, else model -> positions of `model:0-2,other:3`. Raises `ConfigError`."""
    if text in PLACEMENTS:
        return text
    parts: dict[str, tuple[int, ...]] = {}
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"([\w-]+):(\d+)(?:-(\d+))?", part)
        if match is None:
            known = ", ".join(PLACEMENTS) + hints.meant(text, PLACEMENTS)
            raise ConfigError(f"config.placement={text!r}: {part!r} is not like 'search:0-2' or 'answer:3', and no one of {known}")
        low, high = int(match[2]), int(match[3] or match[2])
        parts[match[1]] = (*parts.get(match[1], ()), *range(low, high + 1))
    return parts


def parse_phases(text: str) -> list[tuple[tuple[str, ...], int]]:
    """`a:10,b+c:5` as phases."""
    phases = []
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"([\w+-]+):(\d+)", part)
        if match is None:
            raise ConfigError(f"schedule={text!r}: {part!r} is not like 'search:10' or 'search+answer:10'")
        phases.append((tuple(match[1].split("+")), int(match[2])))
    return phases
