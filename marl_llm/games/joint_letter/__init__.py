"""The joint-letter game."""

from marl_llm.games.joint_letter.game import JointLetter, JointLetterState

__all__ = ["JointLetter", "JointLetterState"]
