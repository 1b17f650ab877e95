"""Generators that answer from a function, with log-probs made of the request's seed: a model for tests."""

import asyncio
import dataclasses

import numpy as np

from marl_llm.sampling.requests import Completion
from marl_llm.text import ByteTokenizer
from marl_llm.workflows.renderer import PlainText

EOS = "<eos>"
TOKENIZER = ByteTokenizer(specials=(EOS,), stops=(EOS,))
SPEECH = PlainText(TOKENIZER, TOKENIZER.stop_ids)


@dataclasses.dataclass
class Says:
    """`answer(prompt text, request)` as a `Generator`; `delay(request)` in seconds. Keeps every request."""

    answer: object
    delay: object = None
    requests: list = dataclasses.field(default_factory=list)

    async def generate(self, request):
        self.requests.append(request)
        if self.delay is not None:
            await asyncio.sleep(self.delay(request))
        return completion(self.answer(TOKENIZER.decode(request.prompt), request), request)


def completion(text, request, finish="stop"):
    tokens = np.asarray([*TOKENIZER.encode(text), *TOKENIZER.stop_ids], np.int32)[: request.max_tokens]
    finish = "length" if tokens[-1] != TOKENIZER.eos_id and finish == "stop" else finish
    log_probs = -np.random.default_rng(request.seed).random(tokens.size)
    return Completion(tokens, log_probs, log_probs - 0.1, np.ones(tokens.size), finish, 3)
