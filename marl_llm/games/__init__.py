"""First floor: one folder per domain, each a game as a value (see `protocol`)."""

from __future__ import annotations

import dataclasses
import difflib

from marl_llm.games.joint_letter import JointLetter
from marl_llm.games.plan_path import PlanPath
from marl_llm.games.protocol import SPLITS, Game, Prompt, Rewards, Role, role_of, split_index

GAMES = {game.name: game for game in (PlanPath, JointLetter)}


def make_game(name: str, **options) -> Game:
    """The game of that name with its options. Raises `ValueError` listing the games, or the game's options."""
    if name not in GAMES:
        raise ValueError(f"unknown game {name!r}; the games are {', '.join(GAMES)}")
    known = [f.name for f in dataclasses.fields(GAMES[name])]
    for option in options:
        if option not in known:
            close = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ValueError(f"{name} has no option {option!r}{hint} Its options are {', '.join(known)}")
    return GAMES[name](**options)


__all__ = ["GAMES", "SPLITS", "Game", "JointLetter", "PlanPath", "Prompt", "Rewards", "Role", "make_game", "role_of", "split_index"]
