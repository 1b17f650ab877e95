"""Episodes of a foreign program while they are played: their addresses, their replies, their pay, and how each ends.

An episode is opened before the program hears of it, and its address cannot be guessed. It ends once, paid or aborted; then it takes nothing
more. What a program says is data: a request that cannot be had is refused in one line and counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import json
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marl_llm.serving.completions import CompletionRequest
from marl_llm.serving.policy import Answer
from marl_llm.serving.resent import STAYING, Connection, DrawNumbers
from marl_llm.serving.server import ChatServer, EpisodeRefused


@dataclasses.dataclass
class ForeignEpisode:
    """One play of a task by a foreign program.

    Attributes:
      identity: what its draws follow from, in place of its address: e.g. the run's seed, the step, the task and the play.
      replies: as lines of a record (docs/attach.md), in the order in which they were finished.
      pay: what it was paid; None: it was not.
      aborted: why it takes nothing more without having been paid; "" if it was not aborted.
      message: one line for people about how it ended.
      task: what its program is given at `/episodes/ID/task`, as JSON.
    """

    identity: tuple[int, ...]
    replies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    pay: dict[str, Any] | None = None
    aborted: str = ""
    message: str = ""
    task: Any = None
    draws: dict[str, DrawNumbers] = dataclasses.field(default_factory=lambda: collections.defaultdict(DrawNumbers))


class OpenEpisodes:
    """All episodes of a server, by address. For threads; it stands where a `ChatServer` has the file of its record.

    Attributes:
      refused: how many requests and pays were refused because their episode is not open.
    """

    def __init__(self):
        self._lock, self._open, self.refused = threading.Lock(), {}, 0
        self._stopped = False

    def open(self, identity: Sequence[int], task: Any = None) -> str:
        """The address of a new episode."""
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._open[name] = ForeignEpisode(tuple(identity), task=task)
        return name

    def take(self, name: str, reason: str, message: str = "") -> ForeignEpisode:
        """Ends an episode: one that was not paid is aborted for this reason."""
        with self._lock:
            opened = self._open.pop(name)
            opened.message = message
            if opened.pay is None:
                opened.aborted = reason
            return opened

    def task(self, episode: str) -> Any:
        """The task of an open episode. Raises `EpisodeRefused`."""
        with self._lock:
            return self._of(episode).task

    def check(self, episode: str) -> None:
        """Raises `EpisodeRefused` for an episode that takes no further replies."""
        with self._lock:
            self._of(episode)

    def keep(self, episode: str, *lines: dict[str, Any]) -> None:
        """Keeps the replies to one request. Raises `EpisodeRefused`."""
        with self._lock:
            replies = self._of(episode).replies
            for line in lines:
                replies.append({"episode": episode, "number": len(replies)} | line)

    def about(self, episode: str) -> dict[str, Any]:
        """How many replies of an episode were kept, and whether it was paid."""
        with self._lock:
            opened = self._open.get(episode, ForeignEpisode(()))
            return {"replies": len(opened.replies), "paid": opened.pay is not None}

    def pay(self, episode: str, reward: dict[str, Any]) -> int:
        """Keeps what an episode was paid, and gives the number of its replies. Raises `EpisodeRefused`."""
        with self._lock:
            opened = self._of(episode)
            if not opened.replies:
                self.refused += 1
                raise EpisodeRefused("this episode has no reply: there is nothing to pay for")
            opened.pay = reward
            return len(opened.replies)

    @contextlib.contextmanager
    def draw(self, episode: str, request: str, connection: Connection = STAYING) -> Iterator[int]:
        """The seed of a request while it is under way: of the episode's identity, and of how often it asked the same before."""
        with self._lock:
            opened = self._of(episode)
            numbers = opened.draws[request]
        with numbers.using(connection.is_retry, self._lock) as number:
            digest = hashlib.sha256(json.dumps([opened.identity, number]).encode()).digest()
            yield int.from_bytes(digest[:4], "big") % 2**31

    def close(self) -> None:
        """Nothing is kept any more."""
        with self._lock:
            self._stopped = True

    def _of(self, episode: str) -> ForeignEpisode:
        opened = None if self._stopped else self._open.get(episode)
        if opened is None or opened.pay is not None:
            self.refused += 1
            raise EpisodeRefused("this episode is not open: it has ended, or there never was one of this address")
        return opened


class EpisodeServer(ChatServer):
    """A `ChatServer` whose episodes are opened here, and drawn as a recipe samples, whatever their requests say.

    Args:
      temperature: of every reply, with top_p 1: what is trained on must be drawn so (law 2). 0 is greedy, for evaluations.

    Attributes:
      episodes: open them here before the program asks.
    """

    def __init__(self, models: Mapping[str, Answer], temperature: float | int = 1.0, **options: Any):
        super().__init__(models, **options)
        self.episodes, self._temperature = OpenEpisodes(), float(temperature)
        self._record = self.episodes

    def address(self, episode: str) -> str:
        """The base URL for an episode's clients."""
        return f"{self.url.removesuffix('/v1')}/episodes/{episode}/v1"

    def task(self, episode: str) -> Any:
        """See `ChatServer.task`."""
        return self.episodes.task(episode)

    @contextlib.contextmanager
    def _drawn_as(self, request: CompletionRequest, episode: str | None, connection: Connection) -> Iterator[CompletionRequest]:
        if episode is None:
            raise ValueError("this server answers its own episodes alone: ask at the base URL that the program was given")
        if request.log_probs > 1 and self._temperature:
            raise ValueError(f"top log-probs are not served here: replies are drawn at the temperature {self._temperature:g}, not greedily")
        if not request.scoring.draws:
            yield request
            return
        key = json.dumps([request.model, request.prompt, request.expected.tools.offered], sort_keys=True)
        with self.episodes.draw(episode, key, connection) as seed:
            yield request._replace(options=dataclasses.replace(request.options, temperature=self._temperature, top_p=1.0, seed=seed))
