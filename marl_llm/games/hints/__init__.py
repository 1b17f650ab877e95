"""The hints game, a small Hanabi."""

from marl_llm.games.hints.game import Deal, Hints, HintsState

__all__ = ["Deal", "Hints", "HintsState"]
