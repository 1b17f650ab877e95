"""The viewer's server: the page and its data, on this machine alone. It answers GET only; `marl_llm.local_server` guards it."""

from __future__ import annotations

import gzip
import pathlib
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.local_server import LocalHandler, LocalServer
from marl_llm.viewing.runs import StoredRun, ViewError, compared
from marl_llm.viewing.summary import summary

PAGE = pathlib.Path(__file__).parent / "page"
KINDS = {"index.html": "text/html", "view.js": "text/javascript", "view.css": "text/css"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
MOST_FAULTS = 20  # that the page lists
SMALL = 1024  # bytes that are not worth compressing


def answer(runs: Sequence[StoredRun], path: str, query: dict[str, str]) -> Any:
    """The data behind an address `/api/...`. Raises `KeyError`, `IndexError` or `ValueError` for what there is not."""
    if path == "/api/runs":
        return [{"name": run.name, "path": str(run.path), "headline": run.headline(), "faults": run.faults()[:MOST_FAULTS]} for run in runs]
    if path == "/api/versions":
        return [run.refresh() for run in runs]
    if path == "/api/compare":
        return compared(runs[int(query["first"])], runs[int(query["second"])], query.get("seats", "after"))
    run = runs[int(query.get("run", "0"))]
    if path == "/api/plays":
        return run.rows()
    if path == "/api/search":
        return run.search(query["text"])
    if path == "/api/play":
        return run.play(query["id"])
    if path == "/api/call":
        return run.call(query["id"], int(query["call"]))
    if path == "/api/group":
        return run.group(query["id"], int(query["call"]))
    if path == "/api/summary":
        return summary(run, run.rows())
    raise KeyError(path)


class PageHandler(LocalHandler):
    """What the viewer's servers have in common: no page runs scripts of others, and nothing is kept."""

    more_headers = {"Cache-Control": "no-store", "Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"}

    def send_body(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        """Sends an answer, packed where that is worth it."""
        more = dict(headers or {})
        if len(body) > SMALL and not self.refused and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, more["Content-Encoding"] = gzip.compress(body, 2), "gzip"
        super().send_body(status, body, f"{kind}; charset=utf-8", more)


class _Handler(PageHandler):
    def is_page(self) -> bool:
        return urllib.parse.urlsplit(self.path).path in ("/", "/index.html")

    def get(self) -> None:
        """The page, a file of it, or data."""
        url = urllib.parse.urlsplit(self.path)
        name = url.path.lstrip("/") or "index.html"
        if name in KINDS:
            return self.send_body(200, (PAGE / name).read_bytes(), KINDS[name])
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            response = answer(self.server.service, url.path, query)
        except ViewError as error:
            return self.reply(400, self.error(str(error)))
        except (KeyError, IndexError, ValueError):
            return self.reply(404, self.error(f"there is no {url.path} {query}"))
        self.reply(200, response)


class PageServer(LocalServer):
    """Serves pages until it is closed; a context manager. Raises `ViewError` when the port is taken (0: a free one)."""

    def __init__(self, handler: type[PageHandler], service: Any, port: int):
        super().__init__(handler, service, port, error=ViewError)
        self.url += "/"


class ViewServer(PageServer):
    """Serves runs, at least one."""

    def __init__(self, runs: Sequence[StoredRun], port: int = 0):
        super().__init__(_Handler, tuple(runs), port)
