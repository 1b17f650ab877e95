"""A retriever on another machine: speaks the `/retrieve` form of Search-R1's servers, with the interface of a local index."""

import math
import os
import time
from collections.abc import Sequence
from typing import Any

from marl_llm.tools._calls import Calls
from marl_llm.tools._chat_backends import BackendError, check_key, post_with_key
from marl_llm.tools.results import FINAL_KINDS, FailureKind, ToolResult, failed, success
from marl_llm.tools.retriever.interface import Hit, Hits, check_request
from marl_llm.untrusted import Bounds, read_json

BOUNDS = Bounds(size=64 << 20, values=4_000_000)  # of an answer
KEY_ENV = "MARL_LLM_RETRIEVER_KEY"  # of the server that a run asks
RETRY_PAUSE_S = 0.05  # doubled per attempt: a server that restarts is back within seconds


class RetrieverClient:
    """Asks a server; see `Retriever.search`. Lost connections, broken answers and server errors are tried again until the deadline.

    Args:
      url: of the server, with or without `/retrieve`.
      concurrency: most requests under way at a time; further ones wait, and the wait counts against their deadline.
      attempts: most tries per request.
      key_env: environment variable with the server's key, read anew for each request; None for servers without one.
      allow_plain_http: sends a key over unencrypted http to another machine.

    Raises:
      ValueError: no http(s) URL, attempts below 1, or a key that is not set or would travel unencrypted.
    """

    def __init__(
        self, url: str, concurrency: int = 8, attempts: int = 4, *, key_env: str | None = None, allow_plain_http: bool = False
    ):
        check_key(url, key_env, allow_plain_http)
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self.url = url if url.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
        self.attempts, self._key_env = attempts, key_env
        self._calls: Calls = Calls(self._search, concurrency, "retriever-client")

    def search(self, queries: Sequence[str], topk: int = 5, deadline_s: float = 30.0) -> ToolResult[Hits]:
        """See `Retriever.search`."""
        check_request(queries, topk)
        return self._calls.call((list(queries), topk, time.monotonic(), deadline_s))

    async def asearch(self, queries: Sequence[str], topk: int = 5, deadline_s: float = 30.0) -> ToolResult[Hits]:
        """See `Retriever.asearch`."""
        check_request(queries, topk)
        return await self._calls.acall((list(queries), topk, time.monotonic(), deadline_s))

    def close(self) -> None:
        """Ends the threads."""
        self._calls.close()

    def _search(self, request: tuple[list[str], int, float, float]) -> ToolResult[Hits]:
        queries, topk, start, deadline_s = request
        payload = dict(queries=queries, topk=topk, return_scores=True)
        attempt, kind, message = 0, FailureKind.DEADLINE, "the deadline passed before the request was sent"
        while attempt < self.attempts and (left := start + deadline_s - time.monotonic()) > 0:
            attempt += 1
            try:
                body = post_with_key(self.url, payload, left, self._key_env)
                return success(read_hits(body, len(queries), topk), time.monotonic() - start, attempt)
            except BackendError as error:
                kind, message = error.kind, f"{self.url}: {error}"
                if kind in FINAL_KINDS:
                    break
            except ValueError as error:
                kind, message = FailureKind.BAD_REPLY, f"{self.url}: {error}"
            left = start + deadline_s - time.monotonic()
            time.sleep(max(0.0, min(left, RETRY_PAUSE_S * 2 ** (attempt - 1)) if attempt < self.attempts else 0.0))
        return failed(kind, message, time.monotonic() - start, max(1, attempt))


def open_server(url: str, attempts: int = 4) -> RetrieverClient:
    """A client with the key that `MARL_LLM_RETRIEVER_KEY` holds, if that is set. The key may travel over plain http: a cluster's server has
    no certificate. Raises `ValueError` as `RetrieverClient`."""
    key_env = KEY_ENV if os.environ.get(KEY_ENV) else None
    return RetrieverClient(url, attempts=attempts, key_env=key_env, allow_plain_http=True)


def read_hits(body: bytes, queries: int, topk: int) -> Hits:
    """The hits of an answer in the form `{"result": [[{"document": {...}, "score": ...}, ...], ...]}`.

    Every document has a text in `contents`, and every score is finite.

    Raises:
      ValueError: no JSON, beyond `BOUNDS`, or not of this form.
    """
    parsed = read_json(body, BOUNDS)
    if not parsed.ok:
        raise ValueError(f"the answer is not JSON within bounds ({parsed.problem})")
    answer = parsed.value
    lists = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or len(lists) != queries:
        raise ValueError(f"the answer must have the field 'result' with {queries} lists")
    hits: Hits = []
    for position, documents in enumerate(lists):
        if not isinstance(documents, list) or len(documents) > topk or not all(map(_is_hit, documents)):
            form = "a 'document' (an object with a text in 'contents') and a 'score' (a finite number)"
            raise ValueError(f"result[{position}] must hold at most {topk} objects with {form}")
        hits.append([Hit(hit["document"], float(hit["score"])) for hit in documents])
    return hits


def _is_hit(hit: Any) -> bool:
    if not isinstance(hit, dict) or not isinstance(hit.get("document"), dict) or not isinstance(hit["document"].get("contents"), str):
        return False
    return isinstance(hit.get("score"), int | float) and not isinstance(hit["score"], bool) and math.isfinite(hit["score"])
