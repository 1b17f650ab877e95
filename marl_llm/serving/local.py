"""A checkpoint of Hugging Face's format behind an engine of its own, in this process: for the server, and for a coach of `kind=model`."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from marl_llm.models import is_stacked, load_pretrained, read_config, stack_layers
from marl_llm.models.serving import is_large
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.sampling.requests import RequestError
from marl_llm.serving.policy import policy_answers
from marl_llm.text import load_chat, template_options
from marl_llm.tools.chat import BackendError, ChatReply, Message, Options, PolicyBackend
from marl_llm.tools.results import FailureKind

MAX_PROMPT, MAX_TOKENS, SLOTS = 8192, 1024, 16


class LocalModel:
    """A model that answers chat messages until it is closed; a context manager.

    Args:
      path: directory of the checkpoint.
      max_prompt: tokens of a prompt; None: 8,192, or what the positions that the model knows leave beside `max_tokens`.
      max_tokens: of a reply.
      slots: replies that are sampled at once.
      thinking: "on" or "off", how the chat opens; None: as the checkpoint's template does.
      renderer: how the model reads and writes, of a checkpoint without a chat format; None: as its files say.

    Attributes:
      answers: (messages, options) -> a reply; see `policy_answers`. Equal to that of every other `LocalModel` of these files and sizes,
        as long as nobody calls `renew`.

    Raises:
      ValueError: the files are no checkpoint, or their chat template cannot be used.
    """

    def __init__(
        self,
        path: str,
        *,
        max_prompt: int | None = None,
        max_tokens: int = MAX_TOKENS,
        max_num_seqs: int = SLOTS,
        thinking: str | None = None,
        renderer: Any = None,
    ):
        self._path, name = pathlib.Path(path), "model"
        self._backends: list[tuple[PolicyBackend, str | None]] = []
        config = read_config(path)
        # of a large model on a CPU there is no second copy: it is read where it was loaded, as a base without adapters, its layers stacked
        self._lies = jax.default_backend() == "cpu" and is_large(config, "cpu")
        self._stacked = self._lies and config.uniform
        config, params = load_pretrained(path, stacked=self._stacked)
        chat = renderer or load_chat(path, template_options(thinking))
        if max_prompt is None:
            max_prompt = max(1, min(MAX_PROMPT, config.max_position - max_tokens))
        sizes = EngineConfig(max_num_seqs, prompt_tokens=max_prompt, response_tokens=max_tokens, admit=min(max_num_seqs, 16))
        models = {name: (config, {"base": params, "lora": {}} if self._lies else params)}
        del params
        self._engine = Engine(models, jax.random.key(0), sizes=sizes, tokenizers={name: chat.tokenizer})
        self.answers = policy_answers(self._engine, name, chat, max_prompt=max_prompt, max_tokens=max_tokens)

    def backend(self, content: bool = False) -> PolicyBackend:
        """For a `ChatClient`. With `content` its identity is what the files hold, so that a cache on disk outlives this process."""
        backend = PolicyBackend(self._reply, digest_of(self._path) if content else str(self._path))
        self._backends.append((backend, backend.identity))
        return backend

    def renew(self, params: dict, version: int) -> None:
        """Answers with other parameters of the same shape from now on, while nothing is under way. `version` names them, so that no cache
        mistakes their replies for those of the files, or of another version."""
        if self._lies:  # a copy, for who gave them may go on training them
            params = stack_layers(params) if self._stacked and not is_stacked(params) else params
            params = {"base": jax.tree.map(jnp.copy, params), "lora": {}}
        self._engine.set_params(self.answers.model, params)
        for backend, identity in self._backends:
            backend.identity = f"{identity}+{version}"

    def _reply(self, messages: Sequence[Message], options: Options) -> ChatReply:
        try:
            return self.answers(messages, options)
        except RequestError as error:  # as the server's status 400
            raise BackendError(FailureKind.REFUSED, str(error)) from error

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest_of(folder: pathlib.Path) -> str:
    """SHA-256 of a checkpoint's files, in hex: names and contents of all that lie in the folder itself."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest.update(f"{path.name}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
