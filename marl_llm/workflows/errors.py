"""All errors of workflows: what is wrong with a team, what breaks a response's format, what aborts a play, what ends a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marl_llm.errors import UserError
from marl_llm.tools.results import Failure, InfrastructureError


class WorkflowError(UserError, ValueError):
    """A team that cannot be played as it is written; the message names the node and says what to do."""


class FormatError(ValueError):
    """Raised by a parser: the response breaks the role's format.

    Args:
      why: one line for people and for the transcripts.
      fields: what could be read all the same; the other outputs take their fallbacks.
    """

    def __init__(self, why: str, fields: Mapping[str, Any] | None = None):
        super().__init__(why)
        self.fields = dict(fields or {})


class PromptTooLong(ValueError):
    """A prompt over the role's budget that nothing may be cut from; the message has both lengths."""


class ToolRefusal(ValueError):
    """Raised by the function of a `RoleTool` whose arguments it cannot serve: the role reads the message and goes on."""


class LimitReached(ToolRefusal):
    """Another call of a sub-agent would be beyond its depth, its number of calls or its tokens: its caller reads the message."""


class ToolCallError(RuntimeError):
    """Raised within an `async` team where a tool that it awaits raised; the team may catch it."""


class ReplayError(WorkflowError):
    """The workflow makes something else of the recorded answers than it did; the message says where first."""


class RolloutError(UserError, RuntimeError):
    """Nothing of a rollout could be played: no outcome to train on, and probably a tool or an engine that is down."""


class PlayFailure(Exception):
    """An instance cannot be finished, and nobody is paid for it (law 9).

    Args:
      node: where.
      kind: a `FailureKind`'s value, or "prompt".
      message: one line.
      retriable: whether another attempt could end otherwise.
    """

    def __init__(self, node: str, kind: str, message: str, retriable: bool = True):
        super().__init__(message)
        self.node, self.kind, self.retriable = node, kind, retriable


def from_tool(node: str, failure: Failure) -> PlayFailure:
    """A tool's failure as one of the play."""
    return PlayFailure(node, failure.kind.value, failure.message, failure.retriable)


def from_error(node: str, error: BaseException) -> PlayFailure | None:
    """An exception as a failure of the play, if it is one of the infrastructure; None for a fault of the program."""
    if isinstance(error, InfrastructureError):
        return from_tool(node, error.failure)
    if isinstance(error, OSError):  # connections, files, processes: the machine's doing (TimeoutError is one too)
        return PlayFailure(node, "unavailable", f"{type(error).__name__}: {error}")
    return None
