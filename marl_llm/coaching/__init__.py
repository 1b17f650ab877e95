"""First floor, above workflows: coaches that score every action of a team (MAPPA). docs/coaches.md shows how.

A coach answers text to messages, whoever it is: a model at an address, a model of this program, a rubric. It reads an `ActionView` and
says a `Score`; `coached` puts it into a workflow, where `rewards.coach_score` pays what it says.
"""

from marl_llm.coaching.answers import Unreadable, break_labels, read_answer, write_answer
from marl_llm.coaching.coach import ChatCoach, Coach, of_client, of_rubric, rubric_coach
from marl_llm.coaching.coached import Coaching, check_coached, check_missing, coached
from marl_llm.coaching.prompts import messages_for
from marl_llm.workflows.rewards import coach_score
from marl_llm.workflows.trajectory import Score
from marl_llm.workflows.views import ActionView, CoachGuide

__all__ = [
    "ActionView", "ChatCoach", "Coach", "CoachGuide", "Coaching", "Score", "Unreadable", "break_labels", "check_coached", "check_missing",
    "coach_score", "coached", "messages_for", "of_client", "of_rubric", "read_answer", "rubric_coach", "write_answer",
]  # fmt: skip
