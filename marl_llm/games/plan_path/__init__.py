"""Plan-Path: maps, language, rewards, game."""

from marl_llm.games.plan_path.game import PlanPath, PlanPathState
from marl_llm.games.plan_path.maps import Map, distances, map_from_rows, random_map, rows_of

__all__ = ["Map", "PlanPath", "PlanPathState", "distances", "map_from_rows", "random_map", "rows_of"]
