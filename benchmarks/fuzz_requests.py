"""Changed and damaged requests to a real server over HTTP: each is answered or refused in one line, in time, and no episode is lost.

    nice -n 10 python -m benchmarks.fuzz_requests [--requests=10000] [--clients=16] [--seed=0]

Starts `marl serve --record` with a tiny random checkpoint whose template knows tools, and sends requests of all its kinds: chats,
completions, Anthropic's messages, OpenAI's responses, streaming and not, pays of episodes and looks at them. Most have values taken away,
exchanged, doubled or renamed; some are cut off, or have another path, method, length or type. Prints one JSON line. `faults` are answers
that are no right answer and no named refusal, among them each status of 500 or more; `lost` replies that were told and not recorded, or
recorded and not told. Exit code 1 if there are any, or if the server said anything on its standard error that is an exception.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import dataclasses
import http.client
import json
import pathlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

LIMIT_S = 600.0  # the engine ends a reply after 120 s
ROLE = "m"
USER = {"role": "user", "content": "Where?"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks at a cell.", "parameters": SCHEMA}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}
STRANGE = [
    None, True, 0, -1, 1e30, 2**70, "", "x", "<|im_end|>", "</tool_call>", "\ud800", [], {}, [None], [[]], {"type": "function"},
    {"type": "text", "text": "x"}, {"role": "user"}, "a" * 200, [{"type": "tool_use"}],
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, float("nan"), float("inf"),
]  # fmt: skip
BODIES = {
    "chat/completions": {
        "model": ROLE, "messages": [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "wall"}]}],
        "tools": [LOOK], "tool_choice": "auto", "n": 2, "max_tokens": 5, "temperature": 0.5, "stop": ["z"], "seed": 1, "stream": False,
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}, "parallel_tool_calls": True,
    },
    "completions": {"model": ROLE, "prompt": ["x", "y"], "max_tokens": 5, "logprobs": 0, "stream": True, "n": 1},
    "messages": {
        "model": ROLE, "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stream": True, "tool_choice": {"type": "any"},
        "messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"x": 1}}]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "wall"}]}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}], "stop_sequences": ["z"],
    },
    "responses": {
        "model": ROLE, "input": [USER, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                                 {"type": "function_call_output", "call_id": "c1", "output": "wall"}],
        "tools": [{"type": "function", "name": "look"}], "text": {"format": {"type": "json_object"}}, "max_output_tokens": 5,
        "instructions": "s", "stream": False, "tool_choice": "auto",
    },
}  # fmt: skip
REWARD = {"reward": 1.0, "rewards": {ROLE: 0.5}, "task": "t"}
PATHS = ("/episodes/{}", "/episodes/{}/task", "/v1/models", "/health", "/", "/episodes//v1/messages", "/v1/chat", "/episodes/%00/reward",
         "/episodes/" + "a" * 129 + "/v1/messages", "/../v1/models", "//v1/models", "/v1/messages?beta=true")  # fmt: skip
ENDS = (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.incomplete"')  # of streams
# Qwen's way to tell of tools and to write calls, in few words
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one as <tool_call>\n{"name": "a", "arguments": {}}\n</tool_call><|im_end|>\n{% endif %}'
    "{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value within a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(pairs):
        yield value, key
        yield from places(item)


def changed(body: dict[str, Any], draw: random.Random) -> Any:
    """A body with one to three of its values taken away, exchanged, doubled or given another name."""
    body = json.loads(json.dumps(body))
    for _ in range(draw.randint(1, 3)):
        container, key = draw.choice(list(places(body)) or [(body, "model")])
        way = draw.randrange(4)
        if way == 0:
            container[key] = copy.deepcopy(draw.choice(STRANGE))
        elif way == 1 and isinstance(container, dict):
            container.pop(key, None)
        elif way == 2 and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif isinstance(container, dict):
            container[draw.choice(["more", "type", "content", "tool_calls", "name"])] = copy.deepcopy(draw.choice(STRANGE))
    return body


@dataclasses.dataclass(frozen=True)
class Sent:
    """A request as it is sent.

    Attributes:
      method, path, headers, body: of HTTP.
      kind: one of `BODIES`, "reward", or "" of a request that is none of them.
      episode: that it is for; None: none.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    kind: str = ""
    episode: str | None = None


def make_requests(count: int, seed: int) -> list[Sent]:
    """What is sent; of the bodies one in six stands as it is."""
    draw, requests = random.Random(seed), []
    for _ in range(count):
        kind, episode = draw.choice([*BODIES, "reward"]), f"e{draw.randrange(1 + count // 20)}"
        behind = kind == "reward" or draw.random() < 0.7
        path = f"/episodes/{episode}/reward" if kind == "reward" else f"{f'/episodes/{episode}' if behind else ''}/v1/{kind}"
        given = BODIES.get(kind, REWARD)
        body = json.dumps(given if draw.random() < 1 / 6 else changed(given, draw)).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        way = draw.random()
        if way < 0.05:
            body = body[: draw.randrange(len(body) + 1)]
            headers["Content-Length"] = str(len(body))
        elif way < 0.08:
            headers[draw.choice(list(headers))] = draw.choice(("", "x", "-1", "9" * 20, "text/plain", "application/json; charset=x"))
        elif way < 0.12:
            requests.append(Sent("GET", draw.choice(PATHS).format(episode), {}, b""))
            continue
        elif way < 0.15:
            requests.append(Sent(draw.choice(("POST", "PUT", "DELETE", "OPTIONS", "x")), draw.choice(PATHS).format(episode), headers, body))
            continue
        requests.append(Sent("POST", path, headers, body, kind, episode if behind else None))
    return requests


def send(port: int, request: Sent) -> tuple[int, str, bytes, float]:
    """(status, type, body, seconds) of the answer; status 0 and a reason as the type if none came in time."""
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        connection.putrequest(request.method, request.path)
        for header in request.headers.items():
            connection.putheader(*header)
        connection.endheaders(request.body)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read(), time.monotonic() - start
    except (OSError, http.client.HTTPException) as error:
        return 0, f"{type(error).__name__}: {error}", b"", time.monotonic() - start
    finally:
        connection.close()


def fault_of(request: Sent, status: int, content_type: str, body: bytes) -> str:
    """What is wrong with an answer; "" if it is a right answer or a named refusal."""
    if status == 0:
        return f"no answer ({content_type})"
    if status >= 500 and not (status == 501 and request.method != "POST"):
        return f"status {status}: {body[:200]!r}"
    try:
        if content_type == "text/event-stream":
            whole = replies_in(body, True) and any(end in body[-4000:] for end in ENDS)
            return "" if whole or _is_named(_last_event(body)) else f"a stream without an end: {body[-200:]!r}"
        answer = json.loads(body, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return f"no JSON: {body[:200]!r}"
    if status == 200:
        if request.method == "GET" or request.kind == "reward":
            return ""
        return "" if replies_in(body, False) else f"an answer without a reply: {body[:200]!r}"
    return "" if _is_named(answer) else f"status {status} without a reason in one line: {body[:200]!r}"


def _is_named(answer: Any) -> bool:
    """Whether an answer is a refusal with a reason in one line."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return isinstance(message, str) and 0 < len(message) < 2000 and "\n" not in message


def _last_event(body: bytes) -> Any:
    """The last event of a stream; a stream ends with an error where its episode was paid before the reply was whole."""
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    return json.loads(lines[-1].removeprefix(b"data: ")) if lines else None


def replies_in(body: bytes, stream: bool) -> int:
    """How many replies an answer holds."""
    if not stream:
        answer = json.loads(body)
        return len(answer["choices"]) if "choices" in answer else int("content" in answer or "output" in answer)
    events = [json.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n") if line.startswith(b"data: {")]
    ended = {choice["index"] for event in events for choice in event.get("choices", ()) if choice["finish_reason"]}
    return len(ended) or sum(event.get("type") in ("message_stop", "response.completed", "response.incomplete") for event in events)


def measure(port: int, record: pathlib.Path, sent: list[Sent], clients: int) -> dict[str, Any]:
    """Sends everything and compares the answers with the record."""
    for kind, body in BODIES.items():  # whatever is to be compiled is
        data = json.dumps(body).encode()
        send(port, Sent("POST", f"/v1/{kind}", {"Content-Type": "application/json", "Content-Length": str(len(data))}, data))
    start = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda request: send(port, request), sent))
    seconds, told, paid = time.monotonic() - start, collections.Counter(), collections.Counter()
    faults = [f"{request.method} {request.path} {request.body[:300]!r}: {fault}" for request, answer in zip(sent, answers, strict=True)
              if (fault := fault_of(request, *answer[:3]))]  # fmt: skip
    for request, (status, content_type, body, _) in zip(sent, answers, strict=True):
        if status == 200 and request.kind == "reward":
            paid[request.episode] += 1
        elif status == 200 and request.episode is not None and request.kind:
            told[request.episode] += replies_in(body, content_type == "text/event-stream")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    recorded = collections.Counter(line["episode"] for line in lines if "ids" in line)
    pays = collections.Counter(line["episode"] for line in lines if "ids" not in line)
    lost = [name for name in told.keys() | recorded.keys() | paid.keys() | pays.keys()
            if told[name] != recorded[name] or paid[name] != pays[name]]  # fmt: skip
    statuses = collections.Counter(str(status) for status, *_ in answers)
    return {
        "requests": len(sent), "statuses": dict(sorted(statuses.items())), "replies": sum(told.values()), "paid": sum(paid.values()),
        "episodes": len(recorded), "lost": len(lost), "faults": len(faults), "first_faults": [*faults[:3], *sorted(lost)[:3]],
        "slowest_s": round(max((answer[3] for answer in answers), default=0.0), 2), "wall_s": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    """Measures and prints."""
    from benchmarks.endpoint_load import ServedRecord
    from marl_llm.cli.tiny import make

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=16, help="at once")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        config = make(folder / "tiny", "qwen3", 1024, 0) / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        with ServedRecord(folder, f"--name={ROLE}", "--max_prompt=1500", "--max_tokens=12") as server:
            figures = measure(server.port, server.record, make_requests(arguments.requests, arguments.seed), arguments.clients)
        log = (folder / "server.log").read_text()
    figures["exceptions"] = log.count("Traceback")
    print(json.dumps({"benchmark": "fuzz_requests", "clients": arguments.clients, "seed": arguments.seed, **figures}))
    sys.exit(bool(figures["faults"] + figures["lost"] + figures["exceptions"]))


if __name__ == "__main__":
    main()
