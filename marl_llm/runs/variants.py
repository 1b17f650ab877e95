"""The runs of Stronger-MAS's tables and of its Figure 5, as changes of one config: what `marl_llm compare --table=...` compares.

    1         tables 1 and 2: the five variants, what a team and a single agent are before they train, and more imitation as a control
    4         each role trained beside the others as the supervised warm-up left them, these models put together, and the team trained
              together, whose models are also swapped
    6         AT-GRPO with the outcome alone as reward (B.6) beside the reward of the config
    7         tables 7 and 8: a single agent with one turn and with the config's number of turns, before and after GRPO
    figure5   ensembles of 1, 3, 5 and 7 agents, whole plays (GRPO) and candidates (AT-GRPO), with equally many responses per step

Changes are keys of the config and their values as text; `{runs}` and `{seed}` in a value stand for the directory of the runs and the seed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from marl_llm import hints
from marl_llm.runs.command import ConfigError

Changes = Mapping[str, str]

TABLES = ("1", "4", "6", "7", "figure5")
IMITATION = "imitation"
GRPO = {"recipe.name": "grpo", "recipe.rewards": "mixed", "recipe.returns": "trajectory"}
SINGLE = {"assignment": "shared", "game.agents": "single"}
STRONGER_MAS: dict[str, Changes] = {
    "at_grpo_per_role": {"assignment": "per_role"},
    "at_grpo_shared": {"assignment": "shared"},
    "team_grpo": {"assignment": "per_role", **GRPO},
    "team": {"assignment": "per_role", "steps": "0"},
    "single_grpo": SINGLE | GRPO,
    "single": SINGLE | {"steps": "0"},
    IMITATION: {},
}
TEAMS: dict[str, Changes] = {"per_role": {"assignment": "per_role"}, "shared": {"assignment": "shared"}}
SIZES = {1: (1, 0), 3: (1, 1), 5: (2, 2), 7: (3, 3)}  # agents -> reasoners and users; the judge is the last agent where there are users


def usual(config, table: str | None = None) -> dict[str, Changes]:
    """The variants of a table by name. Without one, those of tables 1 and 2 where the config's game offers a single agent, else `TEAMS`.

    Raises `ConfigError` where the game lacks what the table varies.
    """
    needed = {"figure5": ("reasoners", "users"), "6": ("agents", "rewards_form")}.get(table or "", ("agents",))
    missing = [option for option in needed if option not in config.game]
    if table and missing:
        raise ConfigError(f"--table={table} varies config.game.{missing[0]}, which {config.game.name} does not have")
    if missing:
        return TEAMS
    made = {"4": _alone_and_together, "6": _outcome, "7": _once_and_again, "figure5": _ensembles}.get(table or "1")
    return dict(STRONGER_MAS) if made is None else made(config)


def placed(changes: Changes, runs: Any, seed: int) -> dict[str, str]:
    """The changes with the directory of the runs and the seed set in."""
    return {key: value.replace("{runs}", str(runs)).replace("{seed}", str(seed)) for key, value in changes.items()}


def same_samples(config, changes: Changes) -> dict[str, str]:
    """The changes with a minibatch of as many samples: prompts of a tree have K responses, those of whole plays one."""
    from marl_llm.algorithms import make_recipe

    name = changes.get("recipe.name", config.recipe.name)
    if make_recipe(config.recipe.name).sampling != "tree" or make_recipe(name).sampling == "tree" or "optimizer.minibatch" in changes:
        return dict(changes)
    k = int(changes.get("recipe.group_size", config.recipe.group_size or make_recipe(config.recipe.name).group_size))
    return {**changes, "recipe.group_size": str(k), "optimizer.minibatch": str(config.optimizer.minibatch * k)}


def check_variants(config, variants: Mapping[str, Changes], output: Any) -> None:
    """Raises `ConfigError` naming a variant that could not run, before the first one does."""
    from marl_llm.runs.players import without_other_recipe
    from marl_llm.runs.resolve import resolve

    for name, changes in variants.items():
        changed = copy.deepcopy(config)
        try:
            keys = placed(same_samples(config, changes), output, 0)
            for key, text in keys.items():
                set_key(changed, key, text)
            without_other_recipe(changed, keys)  # as of flags
            with resolve(changed):
                pass
        except ValueError as error:
            raise ConfigError(f"variant {name}: {error}") from error


def set_key(config, key: str, text: str) -> None:
    """Sets a key to a value that is written as text, as a flag would. Raises `ConfigError` for an unknown key or another type."""
    section, last = config, key.split(".")[-1]
    for part in key.split(".")[:-1]:
        section = section[part] if part in section else None
        if not isinstance(section, config_dict.ConfigDict):
            raise ConfigError(f"config.{key}: there is no section {part!r}")
    if last not in section:
        raise ConfigError(f"config.{key}: unknown key {last!r}; {hints.suggestion(last, section)}")
    kind = section.get_type(last)
    try:
        if kind is bool:
            section[last] = {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        else:
            section[last] = None if text == "None" and kind is not str else kind(text)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"config.{key}={text} must be of the type {kind.__name__}") from None


def _alone_and_together(config) -> dict[str, Changes]:
    from marl_llm.runs.resolve import resolve

    with resolve(config) as plan:
        roles = list(plan.assignment.roles)
    if len(roles) < 2:
        raise ConfigError(f"--table=4 puts roles that trained alone together; {config.game.name} has one role, {roles[0]}")
    variants: dict[str, Changes] = {}
    for role in roles:
        others = "+".join(other for other in roles if other != role)
        # the phase of the others lies behind the end of the run: they stay as the supervised warm-up left them
        variants[f"{role}_alone"] = {"assignment": "per_role", "schedule": f"{role}:{max(config.steps, 1)},{others}:1"}
    models = ",".join(f"{role}=run:{{runs}}/{role}_alone-{{seed}}" for role in roles)
    together = {"assignment": "per_role", "steps": "0", "sft.models": models}
    return variants | {"alone_then_team": together, "at_grpo_per_role": STRONGER_MAS["at_grpo_per_role"]}


def _outcome(config) -> dict[str, Changes]:
    both = {name: STRONGER_MAS[name] for name in ("single", "team", "at_grpo_per_role")}
    return both | {"at_grpo_outcome": {"assignment": "per_role", "game.rewards_form": "outcome"}}


def _once_and_again(config) -> dict[str, Changes]:
    turns = next((key for key in ("turns", "max_turns") if key in config.game), None)
    if turns is None:
        raise ConfigError(f"--table=7 varies the number of turns, which {config.game.name} does not offer")
    once, again = SINGLE | {f"game.{turns}": "1"}, SINGLE
    return {"once": once | {"steps": "0"}, "again": again | {"steps": "0"}, "once_grpo": once | GRPO, "again_grpo": again | GRPO}


def _ensembles(config) -> dict[str, Changes]:
    responses, variants = config.rollout.tasks * max(SIZES), {}
    for size, (reasoners, users) in SIZES.items():
        keys = {"game.reasoners": str(reasoners), "game.users": str(users), "rollout.tasks": str(responses // size)}
        variants[f"at_grpo_{size}"] = keys
        variants[f"grpo_{size}"] = keys | GRPO
    return variants
