"""Matrix games of two agents: one word each, at once; the whole reward is known, and so are the equilibria."""

from marl_llm.games.matrix.equilibria import best_responses, mixed_equilibrium, nash_equilibria
from marl_llm.games.matrix.game import POSG_1, POSG_2, MatrixGame, MatrixState, read_matrix

__all__ = ["POSG_1", "POSG_2", "MatrixGame", "MatrixState", "best_responses", "mixed_equilibrium", "nash_equilibria", "read_matrix"]
