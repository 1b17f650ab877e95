"""What a tool call ends in: what the *program* did, or what the *infrastructure* did. Only the first may become a reward.

A wrong answer, an exception in generated code or an empty list of passages is an outcome. A dead server, a lost worker or a deadline
that the machine missed is a failure: it says nothing about the agent, so the episode that met it is aborted or played again. The two
live in different fields, and `ToolResult.outcome`, the only door to the first, refuses to open when there is only the second.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from marl_llm.errors import UserError

T = TypeVar("T")


class FailureKind(enum.StrEnum):
    """Why the infrastructure gave no outcome."""

    DEADLINE = "deadline"  # the wall clock ran out, and not through the agent's doing
    UNAVAILABLE = "unavailable"  # no connection, a dropped one, or a server error
    RATE_LIMITED = "rate_limited"  # the server asked for a pause longer than the deadline
    REFUSED = "refused"  # the server or the tool will not serve this request, however often it is asked
    BAD_REPLY = "bad_reply"  # an answer came and cannot be read
    BUDGET = "budget"  # the spending cap leaves no room for this call
    CRASH = "crash"  # a worker process died, or could not start
    BAD_INPUT = "bad_input"  # the task's own data is unusable, e.g. a reference answer that does not parse


# Another try cannot change these.
FINAL_KINDS = frozenset({FailureKind.REFUSED, FailureKind.BUDGET, FailureKind.BAD_INPUT})


@dataclasses.dataclass(frozen=True)
class Failure:
    """What the infrastructure did instead of answering. Never a reward.

    Attributes:
      kind: the reason, from a closed list.
      message: one line for people, without secrets.
    """

    kind: FailureKind
    message: str

    @property
    def retriable(self) -> bool:
        """Whether the same call may succeed later."""
        return self.kind not in FINAL_KINDS


class InfrastructureError(UserError, RuntimeError):
    """Raised where an outcome is asked for and only a failure is there."""

    def __init__(self, failure: Failure):
        super().__init__(
            f"the tool gave no outcome ({failure.kind.value}: {failure.message}); nothing here may become a reward: "
            "abort the episode or play it again"
        )
        self.failure = failure


@dataclasses.dataclass(frozen=True)
class ToolResult(Generic[T]):
    """The end of one tool call: exactly one of `value` and `failure` is there.

    Attributes:
      value: what the program, the passage index or the model answered; None after a failure.
      failure: what the infrastructure did; None when there is a value.
      seconds: wall time of the call, waiting and further attempts included.
      attempts: how often the call was tried.
    """

    value: T | None
    failure: Failure | None
    seconds: float
    attempts: int = 1

    def __post_init__(self):
        if (self.value is None) == (self.failure is None):
            raise ValueError(f"a tool result holds a value or a failure, not {'neither' if self.value is None else 'both'}")

    @property
    def ok(self) -> bool:
        """True when there is an outcome (which may well be a wrong answer)."""
        return self.failure is None

    def outcome(self) -> T:
        """What the program did.

        Raises:
          InfrastructureError: there is none, because the infrastructure failed.
        """
        if self.failure is not None:
            raise InfrastructureError(self.failure)
        return self.value

    def map(self, function: Callable[[T], Any]) -> "ToolResult":
        """The same result with `function` of its value; a failure stays as it is."""
        return dataclasses.replace(self, value=function(self.value)) if self.ok else self


def success(value: T, seconds: float, attempts: int = 1) -> ToolResult[T]:
    """A result with an outcome."""
    return ToolResult(value, None, seconds, attempts)


def failed(kind: FailureKind, message: str, seconds: float, attempts: int = 1) -> ToolResult:
    """A result without one."""
    return ToolResult(None, Failure(kind, message), seconds, attempts)


def result_counts(results: Iterable[ToolResult], prefix: str = "tool") -> dict[str, float]:
    """Figures for the metrics of a step: calls, share without an outcome, and a count per kind of failure (zeros included)."""
    results = list(results)
    kinds = [result.failure.kind for result in results if result.failure is not None]
    counts = {f"{prefix}/calls": float(len(results)), f"{prefix}/aborted_share": len(kinds) / max(1, len(results))}
    return counts | {f"{prefix}/failed_{kind.value}": float(kinds.count(kind)) for kind in FailureKind}
