"""Failures of a play: what voids it, as against what is a fault of the program."""

from __future__ import annotations

from marl_llm.tools.results import Failure, InfrastructureError


class RolloutError(RuntimeError):
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
