"""Sokoban: rooms, language, rewards, game."""

from marl_llm.games.sokoban.game import Sokoban, SokobanState
from marl_llm.games.sokoban.rooms import Room, Size, random_room, room_from_rows, rows_of, solve

__all__ = ["Room", "Size", "Sokoban", "SokobanState", "random_room", "room_from_rows", "rows_of", "solve"]
