"""First floor: a model of this library behind OpenAI's chat completions, on this machine only.

`policy_answers` makes a function from messages to a reply of an engine's model, for a coach in this process; `ChatServer` puts such
functions, by name, behind an address, for another process: as OpenAI's chat completions and responses, and as Anthropic's messages.
Both give the same replies. `python -m marl_llm serve` serves a run's roles or
a checkpoint.
"""

from marl_llm.serving.policy import Answer, PolicyAnswers, policy_answers
from marl_llm.serving.server import ChatServer

__all__ = ["Answer", "ChatServer", "PolicyAnswers", "policy_answers"]
