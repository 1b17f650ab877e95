"""Two agents who write two texts on one post: the reward and team of MAGRPO's writing tasks, loaders, and a small world of notes."""

from marl_llm.games.writing.reward import PRESETS, Band, Constants, WritingScore, writing_score
from marl_llm.games.writing.team import load_texts, writing_roles, writing_team

__all__ = ["PRESETS", "Band", "Constants", "WritingScore", "load_texts", "writing_roles", "writing_score", "writing_team"]
