"""Served models that say what a test wants, and requests to them."""

import http.client
import json
import re
import types

import numpy as np
from checkpoint_text import SPECIALS, chat_of

from marl_llm.sampling.prompt_scores import PromptScores
from marl_llm.sampling.requests import Completion
from marl_llm.serving import policy_answers

USER = {"role": "user", "content": "Where?"}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a cell.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


def post(server, body, path="/v1/chat/completions", **headers):
    """(status, headers, body) of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[2].split("/")[0]), timeout=30)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def get(server, path):
    """(status, JSON) of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.split(":")[2].split("/")[0]), timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def ask(server, path="/v1/chat/completions", **body):
    """The JSON of an answer that must be one; the model is `m`, the question `USER` unless it is given."""
    body = {"messages": [USER]} | body if path.endswith("chat/completions") else body
    status, _, said = post(server, {"model": "m"} | body, path)
    assert status == 200, said
    return json.loads(said)


def refusal(server, path="/v1/chat/completions", **body):
    """The message of a refusal, which must be one line."""
    body = {"messages": [USER]} | body if path.endswith("chat/completions") else body
    status, _, said = post(server, {"model": "m"} | body, path)
    message = json.loads(said)["error"]["message"]
    assert (status, "\n" in message) == (400, False), said
    return message


def events(server, path="/v1/chat/completions", **body):
    """The events of a stream of OpenAI's chat completions, which must end as one does."""
    body = {"model": "m", "messages": [USER], "stream": True} | body
    status, headers, said = post(server, body, path)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream"), said
    *found, done, rest = said.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in found]


class ScriptedEngine:
    """An engine without a model: each request draws the ids of the next text, a few at a time; the last text is drawn again and again.

    Attributes:
      asked: the requests.
    """

    def __init__(self, chat, texts, size=5):
        specials = chat.tokenizer.special_ids
        pattern = re.compile(f"({'|'.join(map(re.escape, sorted(specials, key=len, reverse=True)))})")
        self._drawn = [
            [i for part in pattern.split(text) for i in ([specials[part]] if part in specials else chat.tokenizer.encode(part))]
            for text in texts
        ]
        self._size, self.asked, self.cancelled = size, [], []

    def submit(self, request, on_tokens=None):
        """As `Engine.submit`."""
        ids = self._drawn[min(len(self.asked), len(self._drawn) - 1)][: request.max_tokens]
        self.asked.append(request)
        for at in range(0, len(ids), self._size):
            if on_tokens is not None:
                on_tokens(np.asarray(ids[at : at + self._size]))
        if on_tokens is not None:
            on_tokens(None)
        value = np.full(len(ids), -0.5, np.float32)
        finish = "stop" if ids and ids[-1] in request.stop_ids else "length"
        done = Completion(np.asarray(ids), value, value, value, finish, 0)
        return types.SimpleNamespace(result=lambda: done, cancel=lambda: self.cancelled.append(request))

    def score(self, model, prompts, top_k=0):
        """As `Engine.score`: each token has the log-prob -0.5 and is the likeliest."""
        def scores(ids):
            value, rank = np.full(len(ids) - 1, -0.5, np.float32), np.ones(len(ids) - 1, np.int32)
            top = np.tile(np.arange(top_k, dtype=np.int32), (len(ids) - 1, 1))
            return PromptScores(value, rank, top, np.full(top.shape, -0.5, np.float32), 0)

        return list(map(scores, prompts))


def scripted(*texts, family="qwen2.5", size=5, chat=None, max_prompt=2000, max_tokens=400, **options):
    """A served model of the family's chat format that says the texts, one after the other."""
    chat = chat or chat_of(family, **options)
    return policy_answers(ScriptedEngine(chat, texts, size), "m", chat, max_prompt=max_prompt, max_tokens=max_tokens)


def ended(text, family="qwen2.5"):
    """A text with the token that ends a reply of the family."""
    return text + SPECIALS[family][1][0]
