"""The `openai` package against a served role. Needs that package; the suite does not.

    python -m venv V && V/bin/pip install -e '.[test]' openai
    V/bin/python -m pytest -n 0 -s tests/live/openai_client.py

What is seen: chats and completions, streaming and not; log-probs equal to the recorded ones; 200 clients at once.
"""

import collections
import concurrent.futures
import json
import resource
import time

import jax
import openai
import pytest

from marl_llm.models import init_params, make_model_config
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.serving import ChatServer, policy_answers
from marl_llm.text import ByteTokenizer
from marl_llm.workflows import PlainText

SPEECH = PlainText(ByteTokenizer(specials=("<eos>",), stops=("<eos>",)), (257,))
CLIENTS = 200


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A tiny random model behind a server that records; the server and its file."""
    config = make_model_config("nano", SPEECH.tokenizer.vocab_size)
    sizes = EngineConfig(max_num_seqs=16, prompt_tokens=64, response_tokens=16, decode_steps=4)
    file = tmp_path_factory.mktemp("record") / "plays.jsonl"
    models = {"coder": (config, init_params(config, jax.random.key(0)))}
    with Engine(models, jax.random.key(1), sizes=sizes, tokenizers={"coder": SPEECH.tokenizer}) as engine:
        answers = policy_answers(engine, "coder", SPEECH, max_prompt=64, max_tokens=16)
        with ChatServer({"coder": answers}, concurrency=32, record=file) as server:
            yield server, file


def client_of(server, episode=None):
    url = server.url if episode is None else server.url.replace("/v1", f"/episodes/{episode}/v1")
    return openai.OpenAI(base_url=url, api_key="none", timeout=600, max_retries=0)


def test_chats_and_completions_streaming_and_not_with_the_log_probs_of_the_record(served):
    server, file = served
    options = dict(model="coder", max_tokens=12, seed=5, temperature=0.8)
    client = client_of(server, "one")
    chat = dict(messages=[{"role": "user", "content": "who?"}], **options)
    whole = client.chat.completions.create(logprobs=True, **chat).choices[0]
    pieces = [event.choices[0] for event in client.chat.completions.create(stream=True, logprobs=True, **chat)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].logprobs.model_dump() == whole.logprobs.model_dump()
    text = client.completions.create(prompt="who?", logprobs=0, **options).choices[0]
    streamed = list(client.completions.create(prompt="who?", logprobs=0, stream=True, **options))
    assert "".join(event.choices[0].text for event in streamed) == text.text
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2, 3]
    for line in lines[:2]:
        assert [(one.id, one.logprob) for one in whole.logprobs.content] == list(zip(line["ids"], line["log_probs"]))
    for line, told in zip(lines[2:], (text.logprobs, streamed[-1].choices[0].logprobs)):
        assert (told.ids, told.token_logprobs) == (line["ids"], line["log_probs"])
    print(f"\n{len(lines)} recorded replies, {sum(len(line['ids']) for line in lines)} tokens, all log-probs equal")


def test_what_is_not_served_is_a_bad_request(served):
    client = client_of(served[0])
    messages = [{"role": "user", "content": "who?"}]
    for wrong in (dict(logprobs=True, top_logprobs=2), dict(n=0), dict(model="nobody"), dict(max_tokens=0)):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**dict(model="coder", messages=messages) | wrong)


def test_two_hundred_clients_at_once_each_get_their_own_recorded_reply(served):
    server, file = served
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_utime, time.perf_counter()

    def ask(number):
        body = dict(model="coder", messages=[{"role": "user", "content": f"client {number}"}], max_tokens=12, logprobs=True)
        client = client_of(server, f"c{number}")
        if number % 2:
            events = [event.choices[0] for event in client.chat.completions.create(stream=True, **body)]
            return "".join(event.delta.content or "" for event in events), events[-1].logprobs.content
        reply = client.chat.completions.create(**body).choices[0]
        return reply.message.content, reply.logprobs.content

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        replies = list(pool.map(ask, range(CLIENTS)))
    seconds, cpu = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    lines = {one["episode"]: one for one in map(json.loads, file.read_text().splitlines())}
    counts = collections.Counter(json.loads(line)["episode"] for line in file.read_text().splitlines())
    for number, (text, told) in enumerate(replies):
        line = lines[f"c{number}"]
        assert (counts[f"c{number}"], line["text"], line["messages"][0]["content"]) == (1, text, f"client {number}")
        assert [one.logprob for one in told] == line["log_probs"]
    print(f"\n{CLIENTS} replies, half of them streamed, {cpu:.1f} CPU s with the clients, {seconds:.1f} s")
