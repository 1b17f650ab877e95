"""Second floor: a game or a workflow is checked against the laws before anyone pays for training it. No model is needed.

`check(environment)` plays it with its scripted player, its random player and with junk: one `Finding` per check. A value-state game
is played as the environment that `marl_llm.games.hosted` makes of it. docs/check.md says what each check proves and what it cannot.
"""

from marl_llm.checking.plays import CheckError, Subject
from marl_llm.checking.report import first_prompts, report_text
from marl_llm.checking.verdict import Finding
from marl_llm.checking.verdicts import CHECKS, check

__all__ = ["CHECKS", "CheckError", "Subject", "Finding", "check", "first_prompts", "report_text"]
