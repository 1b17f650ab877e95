"""First floor: one folder per domain. A game is a value (see `protocol`) or a workflow with its tasks and tools (`environments`)."""

from marl_llm.games.joint_letter import JointLetter
from marl_llm.games.matrix import MatrixGame
from marl_llm.games.plan_path import PlanPath
from marl_llm.games.protocol import SPLITS, Competitive, Game, GameRole, Prompt, Rewards, role_of, speaking_order, split_index
from marl_llm.games.registry import GAMES, GameError, GameSpec, find_function, find_game, make_game, picture_lines
from marl_llm.games.sokoban import Sokoban
from marl_llm.games.sudoku import Sudoku

__all__ = [
    "GAMES", "SPLITS", "Competitive", "GameSpec", "Game", "GameError", "GameRole", "JointLetter", "MatrixGame", "PlanPath", "Prompt",
    "Rewards", "Sokoban", "Sudoku", "find_function", "find_game", "make_game", "picture_lines", "role_of", "speaking_order", "split_index",
]  # fmt: skip
