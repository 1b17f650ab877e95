"""Log-probs of a prompt's own tokens, in the two forms that programs ask for: OpenAI's `echo` and vLLM's `prompt_logprobs`.

A scored prompt is no sample: nothing of it was drawn, and nothing of it is recorded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.sampling.prompt_scores import PromptScores
from marl_llm.serving.policy import ModelRequest, PolicyAnswers
from marl_llm.text import TextStream, Tokenizer, pieces_of, stream_text
from marl_llm.tools.chat import ChatReply

MOST_TOP = 20  # likeliest tokens of a place, as of a vLLM server
MOST_ENTRIES = 1 << 18  # log-probs in an answer, about 16 MB


class PromptScoring(NamedTuple):
    """What a request asks of its prompt's tokens.

    Attributes:
      echo: whether the reply stands behind its prompt.
      top: with `echo`, how many likeliest tokens are told beside each; None: no log-probs.
      prompt_top: of `prompt_logprobs`, likewise.
      draws: whether there is a reply.
    """

    echo: bool = False
    top: int | None = None
    prompt_top: int | None = None
    draws: bool = True

    @property
    def is_asked(self) -> bool:
        """Whether the request asks anything of its prompt."""
        return self.echo or self.prompt_top is not None

    @property
    def most(self) -> int | None:
        """How many likeliest tokens are needed; None: no log-probs."""
        return max((top for top in (self.top, self.prompt_top) if top is not None), default=None)


class ScoredPrompt(NamedTuple):
    """The answer to a request that asks for scores: the reply, with `echo` behind its prompt, and the two fields of log-probs."""

    reply: ChatReply
    log_probs: dict[str, Any] | None
    prompt_log_probs: list[dict[str, Any] | None] | None


def read_scoring(fields: Mapping[str, Any]) -> PromptScoring:
    """The fields of completions that concern their prompt. Raises `ValueError` with a field's name."""
    echo, prompt_top = fields.get("echo", False), fields.get("prompt_logprobs")
    if not isinstance(echo, bool):
        raise ValueError("echo must be true or false")
    top = fields.get("logprobs") if echo else None
    for name, value in (("logprobs", top), ("prompt_logprobs", prompt_top)):
        if value is not None and (type(value) is not int or not 0 <= value <= MOST_TOP):
            raise ValueError(f"{name} must be 0 to {MOST_TOP}")
    scoring = PromptScoring(echo, top, prompt_top, not _is_zero(fields.get("max_tokens")))
    if not scoring.is_asked:
        if not scoring.draws:
            raise ValueError("max_tokens must be at least 1, or 0 with echo or prompt_logprobs, which score the prompt")
        return scoring
    name = "echo" if echo else "prompt_logprobs"
    if fields.get("n", 1) != 1:
        raise ValueError(f"n must be 1 with {name}: the prompt is scored once")
    if fields.get("stream", False):
        raise ValueError(f"stream must be false with {name}")
    return scoring


def _is_zero(value: Any) -> bool:
    return type(value) is int and value == 0


def score_prompt(model: PolicyAnswers, request: ModelRequest, scoring: PromptScoring, prompts: int = 1) -> ScoredPrompt:
    """The scores of a prompt, one of `prompts` in its request. With `echo` the tokens of the reply are scored anew, as the prompt's are.

    Raises `RequestError`, and `ValueError` where the answer would be too large.
    """
    ids, tokenizer = model.scored_ids(request), model.renderer.tokenizer
    if scoring.most is not None and len(ids) * (1 + scoring.most) * prompts > MOST_ENTRIES:
        entries = f"logprobs or prompt_logprobs={scoring.most} of {prompts} prompts like one of {len(ids)} tokens"
        raise ValueError(f"{entries} are more than {MOST_ENTRIES:,} log-probs in one answer: send fewer prompts in a request")
    reply: ChatReply = ChatReply("", "length", len(ids), 0)
    whole = ids
    if scoring.draws:
        reply = model.reply_to(request)
        whole = (*ids, *reply.sampled["ids"])
    log_probs = of_prompt = None
    if scoring.most is not None:
        scores = model.score(whole if scoring.echo else ids, scoring.most)
        log_probs = None if scoring.top is None else echoed_log_probs(tokenizer, whole, scores, scoring.top)
        of_prompt = None if scoring.prompt_top is None else prompt_log_probs(tokenizer, ids, scores, scoring.prompt_top)
    if scoring.echo:
        prompt = request.messages if isinstance(request.messages, str) else tokenizer.decode(ids)
        reply = dataclasses.replace(reply, text=prompt + reply.text)
    return ScoredPrompt(reply, log_probs, of_prompt)


def prompt_log_probs(tokenizer: Tokenizer, ids: Sequence[int], scores: PromptScores, top: int) -> list[dict[str, Any] | None]:
    """vLLM's field `prompt_logprobs`: None for the first token, and of each other one its own log-prob, its rank and those of the `top`
    likeliest, by id."""
    texts = _texts(tokenizer, ids, scores, top)

    def entry(token: int, log_prob: float, rank: int) -> dict[str, Any]:
        return {"logprob": log_prob, "rank": rank, "decoded_token": texts[str(token)]}

    entries_of_tokens: list[dict[str, Any] | None] = [None]
    for place, token in enumerate(ids[1:]):
        likeliest = zip(scores.top_ids[place, :top].tolist(), scores.top_log_probs[place, :top].tolist(), itertools.count(1))
        likeliest_entries = {str(token_id): entry(token_id, log_prob, rank) for token_id, log_prob, rank in likeliest}
        drawn_entry = {str(token): entry(token, float(scores.log_probs[place]), int(scores.ranks[place]))}
        entries_of_tokens.append(drawn_entry | likeliest_entries | drawn_entry)
    return entries_of_tokens


def echoed_log_probs(tokenizer: Tokenizer, ids: Sequence[int], scores: PromptScores, top: int) -> dict[str, Any]:
    """OpenAI's field `logprobs` of a prompt with its reply: the first token has none before it, and so no log-prob."""
    texts = _texts(tokenizer, ids, scores, top)
    offsets, stream, characters = [], TextStream(), 0
    for token in ids:
        offsets.append(characters)
        stream, text = stream_text(tokenizer, stream, [token])
        characters += len(text)
    likeliest: list[dict[str, float] | None] = [None]
    for place, token in enumerate(ids[1:]):
        pairs = zip(scores.top_ids[place, :top].tolist(), scores.top_log_probs[place, :top].tolist())
        entries = {}
        for token_id, log_prob in pairs:
            entries.setdefault(texts[str(token_id)], log_prob)  # the likeliest of those with one text
        likeliest.append(entries | {texts[str(token)]: float(scores.log_probs[place])})
    return {
        "tokens": [texts[str(token)] for token in ids],
        "token_logprobs": [None, *scores.log_probs.tolist()],
        "text_offset": offsets,
        "top_logprobs": likeliest if top else None,
        "ids": list(ids),
    }


def _texts(tokenizer: Tokenizer, ids: Sequence[int], scores: PromptScores, top: int) -> dict[str, str]:
    """The text of every token that is told, by id."""
    return pieces_of(tokenizer, [*ids, *scores.top_ids[:, :top].reshape(-1).tolist()])
