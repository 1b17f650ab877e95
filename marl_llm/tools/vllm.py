"""Tokens in, tokens out with a vLLM server: ids and log-probs, never text.

The server is `vllm serve` of version 0.32 or later, with `VLLM_SERVER_DEV_MODE=1` and `--enable-scale-out` (docs/remote.md). It is asked:

    POST /inference/v1/generate   prompt ids and sampling settings; ids, their log-probs and the label of the parameters that drew them
    POST /pause, /resume          no request is under way while parameters change
    POST /collective_rpc          `reload_weights` from a directory of Hugging Face's form
    POST /reset_prefix_cache      keys and values of the parameters before are forgotten
    POST /update_weight_version   the label that answers carry from now on; a server that was started anew has another

An answer is read through the door of `marl_llm.untrusted` and is then either what was asked for, whole and consistent, or a failure.
"""

import concurrent.futures
import dataclasses
import pathlib
import threading
import time
from typing import Any

from marl_llm.tools._calls import Calls
from marl_llm.tools._chat_backends import BackendError, bad_reply, check_key, post_with_key, read_log_prob
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.untrusted import read_json, valid_text

MAX_LABEL = 64  # characters of a foreign label in a message


@dataclasses.dataclass(frozen=True)
class VllmServer:
    """Where a server is, and how parameters reach it.

    Attributes:
      url: its address, with or without `/v1`.
      folder: a directory that this program and the server see under the same absolute path.
      key_env: environment variable with the server's `--api-key`; None: it asks for none.
      reload_s: most seconds for the reload of parameters.

    Raises:
      ValueError: no http(s) URL, or a key that is not set or would travel unencrypted.
    """

    url: str
    folder: str
    key_env: str | None = None
    reload_s: float | int = 600.0

    def __post_init__(self):
        check_key(self.url, self.key_env)
        object.__setattr__(self, "folder", str(pathlib.Path(self.folder).absolute()))

    @property
    def root(self) -> str:
        """The address without `/v1`."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclasses.dataclass(frozen=True)
class Asked:
    """One prompt: ids below `vocab_size`, and how to continue them.

    Attributes:
      label: of the parameters that must have drawn the answer.
      settings: fields of vLLM's `SamplingParams`: temperature, top_p, seed, ...
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...]
    vocab_size: int
    label: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    timeout_s: float | int = 600.0


@dataclasses.dataclass(frozen=True)
class SampledIds:
    """What was drawn: ids `[n]`, their log-probs in nats, and whether a stop id or the budget ended it ("stop", "length")."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish: str


class VllmClient:
    """Asks one server; usable from threads and event loops. Close it.

    Args:
      concurrency: most requests under way; the others wait, which no deadline counts.
    """

    def __init__(self, server: VllmServer, concurrency: int):
        self.server, self._lock = server, threading.Lock()
        self._counts = dict.fromkeys(("requests", "failed", "stale"), 0)
        self._calls: Calls = Calls(self._generate, concurrency, "vllm-client")

    def submit(self, request: Asked) -> "concurrent.futures.Future[ToolResult[SampledIds]]":
        """Begins a request."""
        return self._calls.submit(request)

    async def generate(self, request: Asked) -> ToolResult[SampledIds]:
        """What was drawn, or why nothing usable was."""
        return await self._calls.acall(request)

    def prompt_log_probs(self, ids: tuple[int, ...], label: str) -> list[float]:
        """The raw log-prob of each id but the first, given those before it. Raises `BackendError`."""
        body = {"token_ids": list(ids), "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0.0, "detokenize": False}}
        answer = self._post("/inference/v1/generate", body, self.server.reload_s)
        _checked_label(_one_choice(answer), 1, label)
        entries = answer.get("prompt_logprobs")
        if not isinstance(entries, list) or len(entries) != len(ids):
            raise bad_reply("no prompt_logprobs of the prompt's length")
        return [read_log_prob(_under(entry, str(i)).get("logprob")) for entry, i in zip(entries[1:], ids[1:])]

    def reload(self, directory: str, label: str) -> None:
        """Gives the server the parameters of a directory; answers then carry the label. Raises `BackendError`; the server is resumed."""
        limit = self.server.reload_s
        self._post("/pause?mode=wait", {}, limit)
        try:
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": directory}}, limit)
            if self._post("/reset_prefix_cache", {}, limit).get("success") is not True:
                raise bad_reply("the prefix cache could not be reset: another program's requests are under way")
            self._post("/update_weight_version", {"new_version": label}, limit)
        finally:
            self._post("/resume", {}, limit)

    def stats(self) -> dict[str, int]:
        """Since the start: `requests`, of these `failed`, and of those `stale`, drawn with other parameters than were asked for."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Finishes what is under way."""
        self._calls.close()

    def _generate(self, request: Asked) -> ToolResult[SampledIds]:
        start = time.monotonic()
        drawing = dict(max_tokens=request.max_tokens, stop_token_ids=list(request.stop_ids), ignore_eos=True, logprobs=0, detokenize=False)
        body = {"token_ids": list(request.prompt), "return_token_ids": True, "sampling_params": drawing | request.settings}
        try:
            result = success(_sampled(self._post("/inference/v1/generate", body, request.timeout_s), request), time.monotonic() - start)
        except BackendError as error:
            result = failed(error.kind, str(error), time.monotonic() - start)
            with self._lock:
                self._counts["stale"] += isinstance(error, _Stale)
        with self._lock:
            self._counts["requests"] += 1
            self._counts["failed"] += not result.ok
        return result

    def _post(self, path: str, body: dict, timeout_s: float | int) -> dict:
        """The answer, an object; {} where it is empty."""
        where = f"the vLLM server at {self.server.root}, {path.partition('?')[0]}"
        try:
            answer = post_with_key(self.server.root + path, body, timeout_s, self.server.key_env)
        except BackendError as error:
            raise BackendError(error.kind, f"{where}: {error}") from None
        if not answer:
            return {}
        parsed = read_json(answer)
        if not parsed.ok or not isinstance(parsed.value, dict):
            raise bad_reply(f"{where}: the answer is no JSON object within bounds ({parsed.problem or type(parsed.value).__name__})")
        return parsed.value


class _Stale(BackendError):
    """Drawn with other parameters."""


def _under(value: Any, name: str) -> dict:
    """The object under a name, or an empty one."""
    inner = value.get(name) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _one_choice(answer: dict) -> dict:
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise bad_reply("the answer has not one choice")
    return choices[0]


def _checked_label(choice: dict, size: int, label: str) -> None:
    """Raises unless all of the drawn tokens carry the label of the parameters that were asked for."""
    spans = choice.get("weight_versions")
    if not isinstance(spans, list) or not spans or not all(isinstance(span, dict) for span in spans):
        raise bad_reply("the answer does not say which parameters drew it (weight_versions): vLLM 0.32 or later is needed")
    if (spans[0].get("start"), spans[-1].get("end")) != (0, size) or any(span.get("version") != label for span in spans):
        names = ", ".join(valid_text(str(span.get("version"))[:MAX_LABEL]) for span in spans[:4])
        why = f"drawn with the parameters {names!r}, not {label!r}: the server was started anew, or someone else gave it parameters"
        raise _Stale(FailureKind.UNAVAILABLE, why)


def _sampled(answer: dict, request: Asked) -> SampledIds:
    """The one choice of an answer, if it is what was asked for. Raises `BackendError`."""
    choice = _one_choice(answer)
    if answer.get("prompt_token_ids") != list(request.prompt):
        raise bad_reply("the answer is to another prompt")
    ids, finish = choice.get("token_ids"), choice.get("finish_reason")
    if not isinstance(ids, list) or not 1 <= len(ids) <= request.max_tokens:
        raise bad_reply(f"the answer has no 1 to {request.max_tokens} token_ids")
    if not all(type(i) is int and 0 <= i < request.vocab_size for i in ids):
        raise bad_reply(f"the answer has ids outside of the vocabulary of {request.vocab_size}")
    ends = [place for place, i in enumerate(ids) if i in request.stop_ids]
    good = {"stop": ends == [len(ids) - 1], "length": ends in ([], [len(ids) - 1]) and len(ids) == request.max_tokens}
    if not (isinstance(finish, str) and good.get(finish)):
        drawn = f"{len(ids)} ids of at most {request.max_tokens}, with stop ids at {ends[:4]}"
        raise bad_reply(f"{drawn}, cannot have ended by {str(finish)[:20]!r}")
    content = _under(choice, "logprobs").get("content")
    if not isinstance(content, list) or len(content) != len(ids) or not all(isinstance(entry, dict) for entry in content):
        raise bad_reply("the answer has not one log-prob per id")
    if [entry.get("token_id") for entry in content] != ids:
        raise bad_reply("the answer's log-probs are of other ids")
    _checked_label(choice, len(ids), request.label)
    return SampledIds(tuple(ids), tuple(read_log_prob(entry.get("logprob")) for entry in content), finish)
