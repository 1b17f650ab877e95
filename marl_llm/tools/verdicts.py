"""Outcomes that were reached once are not reached again: candidates of one problem often write the very same program."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from marl_llm.tools.results import ToolResult
from marl_llm.tools.waiting import waiting


class Verdicts:
    """A cache of tool results. The sandbox gives the same program the same outcome, so nothing changes but the time.

    Failures of the infrastructure are not kept. It holds at most `size` results, and is emptied when it is full.
    """

    def __init__(self, size: int = 65_536):
        self._size = size
        self._known: dict[Hashable, ToolResult] = {}
        self._running: dict[Hashable, asyncio.Future] = {}

    async def of(self, key: Hashable, judge: Callable[[], Awaitable[ToolResult]]) -> ToolResult:
        """The result of this key; `judge()` is awaited by the first who asks, and the others wait for it."""
        if key in self._known:
            return self._known[key]
        if key not in self._running:
            self._running[key] = asyncio.ensure_future(judge())
            self._running[key].add_done_callback(lambda _: self._running.pop(key, None))
        arrived = waiting()  # the judge keeps its own time; whoever waits for another's may wait in a queue
        try:
            found = await asyncio.shield(self._running[key])
        finally:
            arrived()
        if found.ok:
            if len(self._known) >= self._size:
                self._known.clear()
            self._known[key] = found
        return found


def content_key(*parts: Any) -> bytes:
    """A key of 32 bytes, however large the parts are. Texts are told from other values, and one part from two."""
    digest = hashlib.sha256()
    for part in parts:
        text = (part if isinstance(part, str) else repr(part)).encode("utf-8", "surrogatepass")
        digest.update(f"{type(part).__name__} {len(text)} ".encode())
        digest.update(text)
    return digest.digest()
