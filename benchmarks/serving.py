"""Clients that ask a served model all at once, every other one streaming: none lost, none doubled, and what a reply costs.

    python -m benchmarks.serving [--clients=200] [--tokens=32]

Prints one JSON line. The clients use the `openai` package, or the standard library where it is not installed. The model is tiny and
random: the figures are those of the server and the engine. Raises `RuntimeError` if a reply is lost or not the one given in process.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import json
import resource
import time
import urllib.request
from collections.abc import Callable

import jax

from marl_llm.models import init_params, make_model_config
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.serving import ChatServer, policy_answers
from marl_llm.text import ByteTokenizer
from marl_llm.tools.chat import Options
from marl_llm.workflows import PlainText

Ask = Callable[[str, int, bool], str]  # (message, most tokens, whether to stream) -> text


def with_openai(url: str) -> Ask:
    """Asks through the `openai` package."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)

    def ask(text: str, tokens: int, stream: bool) -> str:
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], max_tokens=tokens, stream=stream)
        if stream:
            return "".join(event.choices[0].delta.content or "" for event in reply)
        return reply.choices[0].message.content

    return ask


def _request(url: str, body: dict) -> urllib.request.Request:
    return urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})


def with_standard_library(url: str) -> Ask:
    """Asks through `urllib`."""

    def ask(text: str, tokens: int, stream: bool) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "stream": stream}
        with urllib.request.urlopen(_request(url, body), timeout=600) as reply:
            answer = reply.read()
        if not stream:
            return json.loads(answer)["choices"][0]["message"]["content"]
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer.split(b"\n\n")[:-2]]
        return "".join(event["choices"][0]["delta"].get("content", "") for event in events)

    return ask


def measure(clients: int, tokens: int) -> dict:
    """Figures of one crowd of clients."""
    tokenizer = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
    config = make_model_config("nano", tokenizer.vocab_size)
    sizes = EngineConfig(max_num_seqs=16, prompt_tokens=64, response_tokens=tokens, admit=16)
    params, package = init_params(config, jax.random.key(0)), importlib.util.find_spec("openai") is not None
    with Engine({"m": (config, params)}, jax.random.key(1), sizes=sizes, tokenizers={"m": tokenizer}) as engine:
        renderer = PlainText(tokenizer, tuple(tokenizer.stop_ids))
        answers = policy_answers(engine, "m", renderer, max_prompt=64, max_tokens=tokens, timeout_s=None)
        texts = [f"client {number} asks" for number in range(clients)]
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            options = Options(max_tokens=tokens)
            expected = list(pool.map(lambda text: answers([{"role": "user", "content": text}], options).text, texts))
            with ChatServer({"m": answers}, concurrency=32) as server:
                ask = (with_openai if package else with_standard_library)(server.url)
                tick, used = time.perf_counter(), time.process_time()
                got = list(pool.map(lambda n: ask(texts[n], tokens, n % 2 == 1), range(clients)))
                wall, used, counts = time.perf_counter() - tick, time.process_time() - used, server.stats()
    wrong = sum(a != b for a, b in zip(got, expected, strict=True))
    if wrong or counts["requests"] != clients:
        raise RuntimeError(f"{wrong} of {clients} replies differ from those in process; the server counts {counts}")
    return {
        "benchmark": "serving",
        "client": "openai" if package else "urllib",
        "clients": clients,
        "requests": counts["requests"],
        "tokens": counts["tokens"],
        "wrong": wrong,
        "wall_s": round(wall, 2),
        "cpu_s": round(used, 2),
        "peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200, help="at once")
    parser.add_argument("--tokens", type=int, default=32, help="most of a reply")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.clients, arguments.tokens)))


if __name__ == "__main__":
    main()
