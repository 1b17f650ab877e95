"""A person's seat in a play: a page on this machine with what the role reads and a place for its answer.

The page asks `/api/turn` for what there is to answer and posts `/api/answer` with the number of its turn: an answer that comes twice
or late is refused. `marl_llm.local_server` refuses what pages of other sites send.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Sequence
from typing import Any

from marl_llm.local_server import Refused
from marl_llm.untrusted import Bounds, read_json
from marl_llm.viewing.server import PageHandler, PageServer

PAGE = pathlib.Path(__file__).parent / "page"
FILES = {"": ("seat.html", "text/html"), "seat.js": ("seat.js", "text/javascript"), "view.css": ("view.css", "text/css")}
MAX_BODY = 1 << 20  # bytes of one answer
SHOW_S = 2.0  # the page looks every half second
BOUNDS = Bounds(size=MAX_BODY)


class _Handler(PageHandler):
    max_body = MAX_BODY

    def is_page(self) -> bool:
        return self.path == "/"

    def get(self) -> None:
        """The page, a file of it, or the turn."""
        name = self.path.partition("?")[0].lstrip("/")
        if name in FILES:
            file, kind = FILES[name]
            return self.send_body(200, (PAGE / file).read_bytes(), kind)
        if name != "api/turn":
            raise Refused(404, "there is no such page")
        self.reply(200, self.server.service.turn())

    def post(self, body: bytes) -> None:
        """An answer."""
        if self.path != "/api/answer":
            raise Refused(404, "answers are posted to /api/answer")
        status, text = self.server.service.answer(body)
        self.reply(status, {"told": text})


class Turns:
    """What a person is asked, one turn at a time, and what is answered; for threads of a play and of a page."""

    def __init__(self):
        self._changed, self._number, self._open = threading.Condition(), 0, False
        self._turn: dict[str, Any] = {}
        self._seen = True  # whether a page has shown what was told last
        self._answer: str | None = None

    def ask(self, role: str, messages: Sequence[tuple[str, str]]) -> str:
        """What the person answers as this role; `messages` are pairs of who says it and the text. Waits as long as it takes."""
        with self._changed:
            self.show(role, messages)
            self._changed.wait_for(lambda: self._answer is not None)
            return self._answer

    def show(self, role: str, messages: Sequence[tuple[str, str]]) -> None:
        """Opens a turn; see `ask`, which waits for its answer."""
        self._number += 1
        self._open, self._answer = True, None
        self._turn = {"role": role, "messages": [{"role": who, "text": text} for who, text in messages]}

    def tell(self, text: str) -> None:
        """Shows a text until the next turn, e.g. how the play ended."""
        with self._changed:
            self._turn, self._seen = {"told": text}, False

    def turn(self) -> dict[str, Any]:
        """What the page shows: `number`, `open` (whether an answer is waited for), and `role` with `messages`, or `told`."""
        with self._changed:
            self._seen = True
            self._changed.notify_all()
            return {"number": self._number, "open": self._open, **self._turn}

    def answer(self, body: bytes) -> tuple[int, str]:
        """(status, a sentence) for what was posted: `{"number": 1, "text": "..."}`. The text is judged where every player's is."""
        parsed = read_json(body, BOUNDS).value
        if not isinstance(parsed, dict) or not isinstance(parsed.get("text"), str) or type(parsed.get("number")) is not int:
            return 400, 'an answer is like {"number": 1, "text": "..."}'
        with self._changed:
            if not self._open or parsed["number"] != self._number:
                return 409, "this turn is over"
            self._open, self._answer = False, parsed["text"]
            self._changed.notify_all()
        return 200, "heard"


class HumanSeat(Turns, PageServer):
    """Serves the page of one person."""

    def __init__(self, port: int = 0):
        Turns.__init__(self)
        PageServer.__init__(self, _Handler, self, port)

    def close(self) -> None:
        """Stops serving; a page that is open has `SHOW_S` to fetch what was told last."""
        with self._changed:
            if self._number:
                self._changed.wait_for(lambda: self._seen, SHOW_S)
        PageServer.close(self)
