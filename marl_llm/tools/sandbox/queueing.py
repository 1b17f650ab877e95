"""Which job comes next: one queue per environment, one job of each in turn, so that no environment waits for another's thousands."""

import collections
import dataclasses
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from marl_llm.tools.sandbox.limits import Limits
from marl_llm.tools.sandbox.workspace import Workspace

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin over environments, first in first out within each."""

    def __init__(self):
        self._queues: dict[Hashable, collections.deque[T]] = {}
        self._turns: collections.deque[Hashable] = collections.deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, environment: Hashable, item: T, front: bool = False) -> None:
        """Adds an item; in front for one that has waited already."""
        queue = self._queues.get(environment)
        if queue is None:
            queue = self._queues[environment] = collections.deque()
            self._turns.append(environment)
        (queue.appendleft if front else queue.append)(item)
        self._size += 1

    def pop(self) -> T:
        """The next item; IndexError when there is none."""
        environment = self._turns.popleft()
        queue = self._queues[environment]
        item = queue.popleft()
        self._size -= 1
        if queue:
            self._turns.append(environment)
        else:
            del self._queues[environment]
        return item


@dataclasses.dataclass(frozen=True)
class Submission:
    """One execution that is asked for.

    Attributes:
      code: Python source.
      stdin: standard input.
      profile: `bare`, `numpy`, `data_science` or `reasoning_gym`.
      limits: what it may use; None for the sandbox's own.
      environment: whose turn it takes; requests of different environments are served in turn.
      workspace: files it starts with; if given, the outcome holds the files it leaves.
      seed: of random, numpy and os.urandom.
      deadline_s: seconds from now, queueing included, after which an outcome is of no use: the result is then a failure.
      calls: a description of calls for `judge_calls`.
    """

    code: str
    stdin: str | bytes = ""
    profile: str = "bare"
    limits: Limits | None = None
    environment: Hashable = None
    workspace: Workspace | None = None
    seed: int = 0
    deadline_s: float | int | None = None
    calls: bytes = b""


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way, through as many attempts as the infrastructure needs."""

    number: int
    request: Submission
    limits: Limits
    future: Future
    submitted: float
    expires: float | None
    arrived: Callable[[], None]  # ends the caller's waiting
    attempts: int = 0
    kills: int = 0  # SIGKILLs that neither the program's limits nor the supervisor explain
    started: float = 0.0
    queued: bool = True
    last_problem: str = ""
