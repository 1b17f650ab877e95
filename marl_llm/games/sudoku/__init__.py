"""Sudoku 4x4: puzzles, language, rewards, game."""

from marl_llm.games.sudoku.game import Sudoku, SudokuState
from marl_llm.games.sudoku.puzzles import GRIDS, Puzzle, puzzle_from_rows, puzzles_from_rows, random_puzzle, rows_of

__all__ = ["GRIDS", "Puzzle", "Sudoku", "SudokuState", "puzzle_from_rows", "puzzles_from_rows", "random_puzzle", "rows_of"]
