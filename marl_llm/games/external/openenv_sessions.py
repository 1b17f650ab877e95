"""Sessions of an OpenEnv server over its WebSocket, as in openenv-core 0.3.0 and openenv 0.10.0 (`core/env_server/http_server.py`, `/ws`).

    {"type": "reset", "data": {"seed": 7}}     ->  {"type": "observation", "data": {"observation": {...}, "reward": null, "done": false}}
    {"type": "step", "data": {the action}}     ->  the same, or {"type": "error", "data": {"message": "...", "code": "VALIDATION_ERROR"}}
    {"type": "state"}                          ->  {"type": "state", "data": {"episode_id": "...", "step_count": 2, ...}}
    {"type": "close"}                          ->  the server lets the session's environment go and closes the connection

A connection is a session: the server makes an environment for it. `state` is not asked for here: it is the server's own view, and may hold
what the role must not see.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
import urllib.parse
from types import ModuleType
from typing import Any

from marl_llm.games.registry import GameError
from marl_llm.local_server import is_loopback
from marl_llm.tools.results import FailureKind
from marl_llm.tools.waiting import waiting
from marl_llm.untrusted import Bounds, read_json, valid_text

BOUNDS = Bounds(size=1 << 20, depth=32, values=50_000)  # of one message of a server
REASON = 300  # characters of a server's message that are kept
MOST_REWARD = 1e12  # of one answer, in size: sums and means of a play's rewards stay finite
CLOSE_S = 15.0  # how long a server has to let a session's environment go
# What a role's action may be answered with while the session goes on, and the codes of a server that is at its limit.
INVALID, RAISED, FULL = "VALIDATION_ERROR", "EXECUTION_ERROR", "CAPACITY_REACHED"


class Fault(Exception):
    """The connection or the server failed; it says nothing about a role."""

    def __init__(self, kind: FailureKind, message: str):
        super().__init__(message)
        self.kind = kind


class Refusal(Exception):
    """The server answered with an error: its code, and its message as text of at most `REASON` characters."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code

    def fault(self) -> Fault:
        """The same where no role can have caused it."""
        more = "; set config.game.sessions to what the server allows" if self.code == FULL else ""
        return Fault(FailureKind.UNAVAILABLE, f"the server answers {self.code}: {self}{more}")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server says after a reset or a step. `observation` is JSON within `BOUNDS`."""

    observation: dict[str, Any]
    reward: float = 0.0
    done: bool = False


def read_answer(message: str | bytes) -> Answer:
    """The door for a server's message (law 14). Raises `Refusal` for an error, `Fault` for what is no message of the protocol."""
    read = read_json(message, BOUNDS)
    if not read.ok:
        raise Fault(FailureKind.BAD_REPLY, f"the server's message cannot be read: {read.problem}")
    match read.value:
        case {"type": "error", "data": dict(data)}:
            raise Refusal(_short(data.get("code", "no code"), 40), _short(data.get("message", "no message"), REASON))
        case {"type": "observation", "data": {"observation": dict(observation), **rest}}:
            reward, done = rest.get("reward"), rest.get("done", False)
            if isinstance(done, bool) and isinstance(reward, bool | int | float | None):
                if abs(reward or 0.0) > MOST_REWARD:
                    raise Fault(FailureKind.BAD_REPLY, f"the server pays {reward:.3g}; at most {MOST_REWARD:g} in size can be paid")
                return Answer(observation, float(reward or 0.0), done)
    raise Fault(FailureKind.BAD_REPLY, "the server's message is no observation of OpenEnv's protocol")


def _short(value: Any, most: int) -> str:
    return valid_text(str(value)[:most])


def websocket_url(url: str) -> str:
    """The address of a server's WebSocket; `http://host:8000` becomes `ws://host:8000/ws`. Raises `GameError`."""
    scheme, _, rest = url.rstrip("/").rpartition("://")
    scheme = {"": "ws", "http": "ws", "https": "wss"}.get(scheme, scheme)
    if scheme not in ("ws", "wss") or not rest:
        raise GameError(f"config.game.url={url!r} is no address of an OpenEnv server, like http://127.0.0.1:8000")
    return f"{scheme}://{rest}" if rest.endswith("/ws") else f"{scheme}://{rest}/ws"


def websockets_client() -> ModuleType:
    """`websockets.sync.client`. Raises `GameError` where the extra is missing."""
    try:
        import websockets.sync.client
    except ModuleNotFoundError as error:
        raise GameError("this game needs the package websockets: pip install 'marl_llm[openenv]'") from error
    return websockets.sync.client


class Session:
    """One session: a connection, and what has been said in it. For one thread at a time.

    Raises `Fault` where no connection is made within `timeout_s`.
    """

    def __init__(self, url: str, timeout_s: float):
        self._timeout_s, self._stack, self._lost = timeout_s, contextlib.ExitStack(), False
        self.position: tuple[Any, ...] = ()  # where it stands, kept by whoever plays in it
        options = {"open_timeout": timeout_s, "max_size": BOUNDS.size, "ping_interval": None, "close_timeout": 1.0, "compression": None}
        if is_loopback(urllib.parse.urlsplit(url).hostname or ""):
            options["proxy"] = None
        try:
            self._socket = self._stack.enter_context(websockets_client().connect(url, **options))
        except (OSError, _socket_error()) as error:
            raise Fault(FailureKind.UNAVAILABLE, f"no connection to {url}: {type(error).__name__}: {error}") from error

    def reset(self, **data: Any) -> Answer:
        """A new episode. Raises `Fault` or `Refusal`."""
        return self._ask({"type": "reset", "data": data})

    def step(self, action: dict[str, Any]) -> Answer:
        """One action. Raises `Fault` or `Refusal`."""
        return self._ask({"type": "step", "data": action})

    def close(self) -> None:
        """Ends the session; the server has let its environment go when this returns, or does not answer."""
        if not self._lost:
            with contextlib.suppress(OSError, _socket_error()):  # that the connection is lost is what was wanted
                self._socket.send('{"type": "close"}')
                ends = time.monotonic() + CLOSE_S
                while (left := ends - time.monotonic()) > 0:
                    self._socket.recv(timeout=left)
        self._stack.close()

    def _ask(self, message: dict[str, Any]) -> Answer:
        try:
            # A server that is full says so and closes, perhaps before it is asked: its message is still there to be read.
            with contextlib.suppress(_socket_error()):
                self._socket.send(json.dumps(message))
            return read_answer(self._socket.recv(timeout=self._timeout_s))
        except TimeoutError as error:
            self._lost = True
            raise Fault(FailureKind.DEADLINE, f"no answer of the server within {self._timeout_s:g} s") from error
        except (OSError, _socket_error()) as error:
            self._lost, reason = True, _short(error, REASON)
            raise Fault(FailureKind.UNAVAILABLE, f"the connection is lost: {type(error).__name__}: {reason}") from error


def _socket_error() -> type[Exception]:
    websockets_client()
    from websockets.exceptions import WebSocketException

    return WebSocketException


class Sessions:
    """At most `most` sessions of one server. For many threads.

    Where all are open, a new one takes the place of the one that rested longest; where all are in use, its thread waits, and the clock of
    its call stands still meanwhile.
    """

    def __init__(self, url: str, most: int, timeout_s: float):
        self._url, self._most, self._timeout_s = url, most, timeout_s
        self._changed = threading.Condition()
        self._resting: list[Session] = []  # the one that rests longest comes first
        self._open, self._closed = 0, False

    def take(self, position: tuple[Any, ...]) -> Session | None:
        """A session that rests at this position, for the caller alone."""
        with self._changed:
            place = next((place for place, session in enumerate(self._resting) if session.position == position), None)
            return None if place is None else self._resting.pop(place)

    def begin(self) -> Session:
        """A new session, for the caller alone. Raises `Fault`."""
        arrived, rested = waiting(), None
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._open < self._most or self._resting)
                if self._closed:
                    raise Fault(FailureKind.UNAVAILABLE, "the game is closed")
                if self._open >= self._most:
                    rested = self._resting.pop(0)
                else:
                    self._open += 1
        finally:
            arrived()
        try:
            if rested is not None:
                rested.close()
            return Session(self._url, self._timeout_s)
        except BaseException:
            self._left()
            raise

    def rest(self, session: Session) -> None:
        """Puts a session back for whoever goes on from its position."""
        with self._changed:
            if not self._closed:
                self._resting.append(session)
                self._changed.notify()
                return
        self.end(session)

    def end(self, session: Session) -> None:
        """Ends a session that the caller has."""
        try:
            session.close()
        finally:
            self._left()

    def close(self) -> None:
        """Ends all that rest, and those in use once they are put back."""
        with self._changed:
            self._closed = True
            resting = list(self._resting)
            self._resting.clear()
            self._changed.notify_all()
        for session in resting:
            self.end(session)

    def _left(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify()
