"""Requests that are sent again, because their client did not read the answer: an episode has one reply to each.

The SDKs of OpenAI and Anthropic send a request again after a lost connection, a time limit or a busy server, and say so in the header
`X-Stainless-Retry-Count`. If the first one's reply was recorded too, the episode would train on a reply that its program never read.
So a reply whose client has left is not recorded, and counts as never drawn; and a request that is sent again gets the reply that was
recorded for it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

RETRIES = "X-Stainless-Retry-Count"
MOST_ANSWERS = 512  # that are kept at a time; a client that asks again does so within seconds


class ClientLeft(Exception):
    """The client closed its connection before its answer was whole."""


@dataclasses.dataclass(frozen=True)
class Connection:
    """On which a request waits for its answer.

    Attributes:
      is_closed: whether the client has closed it.
      is_retry: whether the client sent the same request before.
    """

    is_closed: Callable[[], bool] = lambda: False
    is_retry: bool = False


STAYING = Connection()  # of a client that waits, and sent nothing before


class KeptAnswers:
    """The replies to the requests that were recorded last, for clients that ask again. For threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._answers: collections.OrderedDict[str, list[Any]] = collections.OrderedDict()
        self._turned_away: collections.Counter[str] = collections.Counter()

    def key(self, episode: str, kind: str, body: bytes) -> str:
        """The key of a request; equal requests of an episode share it."""
        return hashlib.sha256(b"%s %s %s" % (episode.encode(), kind.encode(), body)).hexdigest()

    def find(self, key: str, connection: Connection) -> tuple[list[Any] | None, Connection]:
        """(the recorded replies, for a request that is sent again; its connection). A new request forgets them, as it wants others.

        A request that was turned away never had a reply: sent again it is drawn as a new one, and those recorded for its equals stay.
        """
        with self._lock:
            if connection.is_retry and self._turned_away[key]:
                self._turned_away -= collections.Counter([key])
                return None, dataclasses.replace(connection, is_retry=False)
            if connection.is_retry:
                return self._answers.get(key), connection
            self._answers.pop(key, None)
            return None, connection

    def turn_away(self, key: str, connection: Connection) -> None:
        """Counts a request that the server was too busy for; one that is sent again was counted, or had a reply."""
        if connection.is_retry:
            return
        with self._lock:
            self._turned_away[key] += 1
            if len(self._turned_away) > MOST_ANSWERS:
                del self._turned_away[next(iter(self._turned_away))]

    def keep(self, key: str, replies: list[Any]) -> None:
        """Keeps the replies to a request."""
        with self._lock:
            self._answers[key] = replies
            if len(self._answers) > MOST_ANSWERS:
                self._answers.popitem(last=False)


class DrawNumbers:
    """Which draw each of an episode's equal requests has: how many were before it. Not for threads.

    A request that was not answered gives its number back, so that the numbers of the others do not follow from lost connections.
    """

    def __init__(self):
        self._users: collections.Counter[int] = collections.Counter()
        self._answered: set[int] = set()

    def take(self, is_retry: bool) -> int:
        """The smallest free number, from 1. A request that is sent again takes the number of one that is under way: of the one that fewest
        others have, so that equal requests which are all sent again get different replies again."""
        under_way = [number for number in self._users if number not in self._answered] if is_retry else []
        free = next(number for number in itertools.count(1) if number not in self._users)
        number = min(under_way, key=lambda number: (self._users[number], number), default=free)
        self._users[number] += 1
        return number

    def settle(self, number: int, answered: bool) -> None:
        """Ends the use of a number, for good if its request was answered."""
        if answered:
            self._answered.add(number)
            return
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]

    @contextlib.contextmanager
    def using(self, is_retry: bool, lock: threading.Lock) -> Iterator[int]:
        """A number for as long as a request is under way; an error gives it back."""
        with lock:
            number = self.take(is_retry)
        answered = False
        try:
            yield number
            answered = True
        finally:
            with lock:
                self.settle(number, answered)
