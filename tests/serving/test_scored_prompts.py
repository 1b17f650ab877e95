"""Log-probs of a prompt's own tokens at the endpoint: the model's own numbers, in OpenAI's and in vLLM's form, and never a sample."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_lab import get, post, refusal, scripted

from marl_llm.models import init_params, log_probs, make_model_config
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.sampling.prompt_scores import PromptScores
from marl_llm.serving import ChatServer, policy_answers
from marl_llm.serving.episodes import EpisodeServer
from marl_llm.serving.scored_prompts import echoed_log_probs
from marl_llm.text import ByteTokenizer
from marl_llm.tools.chat import ChatReply
from marl_llm.workflows import PlainText

RENDERER = PlainText(ByteTokenizer(("<end>",), ("<end>",)), (257,))
TOKENIZER = RENDERER.tokenizer
CONFIG = make_model_config("nano", TOKENIZER.vocab_size)
PATH, TEXT = "/v1/completions", "Where is the café?"
IDS = TOKENIZER.encode(TEXT)
SCORED = dict(prompt=TEXT, max_tokens=0, echo=True, logprobs=0)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def answers(params):
    sizes = EngineConfig(max_num_seqs=4, prompt_tokens=32, response_tokens=8, decode_steps=2)
    with Engine({"m": (CONFIG, params)}, jax.random.key(1), sizes=sizes, tokenizers={"m": TOKENIZER}) as engine:
        yield policy_answers(engine, "m", RENDERER, max_prompt=32, max_tokens=8)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return tmp_path_factory.mktemp("scored") / "plays.jsonl"


@pytest.fixture(scope="module")
def server(answers, record):
    with ChatServer({"m": answers, "scripted": scripted("x"), "function": lambda *_: ChatReply("x")}, record=record) as one:
        yield one


@pytest.fixture(scope="module")
def teacher_forced(params):
    """ids -> the log-prob of each but the first, as the learner computes them."""
    score = jax.jit(log_probs, static_argnums=0)

    def of(ids):
        row = np.zeros((1, 40), np.int32)
        row[0, : len(ids)] = ids
        return np.asarray(score(CONFIG, params, jnp.asarray(row), jnp.arange(40)[None] < len(ids)).log_probs)[0, 1 : len(ids)]

    return of


def ask(server, episode=None, **body):
    """The JSON of an answer that must be one; without a socket, whose deadline a compilation would miss."""
    status, answer = server.answer(json.dumps({"model": "m"} | body).encode(), "completions", episode)
    assert status == 200, answer
    return json.loads(json.dumps(answer, allow_nan=False))


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_an_echoed_prompt_has_the_models_own_teacher_forced_log_probs(server, teacher_forced):
    answer = ask(server, **SCORED | dict(logprobs=3))
    (choice,), told = answer["choices"], answer["choices"][0]["logprobs"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert answer["usage"] == {"prompt_tokens": len(IDS), "completion_tokens": 0, "total_tokens": len(IDS)}
    assert (told["ids"], told["token_logprobs"][0], told["top_logprobs"][0]) == (IDS, None, None)
    close(told["token_logprobs"][1:], teacher_forced(IDS))
    assert told["tokens"] == [TOKENIZER.decode([i]) for i in IDS]
    assert [TEXT[at] for at in told["text_offset"][:-3]] == [*TEXT[:-2]], "é has two tokens, which begin at one character"
    assert told["text_offset"][-3:] == [len(TEXT) - 2, len(TEXT) - 2, len(TEXT) - 1]
    for token, value, top in zip(told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert top[token] == value
        assert 1 <= len(top) <= 4
        assert max(top.values()) >= value


def test_the_reply_stands_behind_its_prompt_and_is_scored_with_it(server, teacher_forced):
    drawn = dict(max_tokens=5, temperature=0.7, seed=3)
    alone = ask(server, prompt=TEXT, logprobs=0, **drawn)["choices"][0]
    whole = ask(server, prompt=IDS, echo=True, logprobs=2, **drawn)["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (TEXT + alone["text"], alone["finish_reason"])
    assert whole["logprobs"]["ids"] == IDS + alone["logprobs"]["ids"]
    close(whole["logprobs"]["token_logprobs"][1:], teacher_forced(whole["logprobs"]["ids"]))
    close(whole["logprobs"]["token_logprobs"][len(IDS) :], alone["logprobs"]["token_logprobs"])
    plain = ask(server, prompt=TEXT, echo=True, **drawn)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == (whole["text"], None)
    greedy = ask(server, prompt=TEXT, echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"][0]["logprobs"]
    assert greedy["token_logprobs"][-1] == max(greedy["top_logprobs"][-1].values()), "lm-eval compares them so"


def test_prompt_logprobs_have_vllms_form(server, teacher_forced):
    body = dict(prompt=[IDS, IDS[:1]], prompt_logprobs=3)
    answer = ask(server, **body | dict(max_tokens=0))
    first, second = (choice["prompt_logprobs"] for choice in answer["choices"])
    assert ([choice["text"] for choice in answer["choices"]], first[0], second) == (["", ""], None, [None])
    close([entries[str(i)]["logprob"] for entries, i in zip(first[1:], IDS[1:], strict=True)], teacher_forced(IDS))
    for entries, i in zip(first[1:], IDS[1:], strict=True):
        ranked = sorted(entries.values(), key=lambda entry: entry["rank"])
        assert [entry["logprob"] for entry in ranked] == sorted((entry["logprob"] for entry in ranked), reverse=True)
        assert [entry["rank"] for entry in ranked][:3] == [1, 2, 3]
        assert len(entries) == (3 if entries[str(i)]["rank"] <= 3 else 4)
        assert entries[str(i)]["decoded_token"] == TOKENIZER.decode([i])
    replied = ask(server, **body | dict(prompt=TEXT, prompt_logprobs=0, max_tokens=2, logprobs=0))["choices"][0]
    assert [len(entries) for entries in replied["prompt_logprobs"][1:]] == [1] * (len(IDS) - 1)
    assert len(replied["logprobs"]["ids"]) == 2


def test_a_scored_prompt_may_take_the_place_of_the_reply_too(server):
    assert len(ask(server, **SCORED | dict(prompt="x" * 40))["choices"][0]["logprobs"]["ids"]) == 40
    assert "41 tokens, 1 to 40 are served" in refusal(server, PATH, **SCORED | dict(prompt="x" * 41))
    assert "40 tokens, 1 to 32 are served" in refusal(server, PATH, **SCORED | dict(prompt="x" * 40, max_tokens=1))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (dict(logprobs=21), "logprobs must be 0 to 20"),
        (dict(logprobs=True), "logprobs must be 0 to 20"),
        (dict(echo="yes"), "echo must be true or false"),
        (dict(prompt_logprobs=-1), "prompt_logprobs must be 0 to 20"),
        (dict(prompt_logprobs=1.0), "prompt_logprobs must be 0 to 20"),
        (dict(n=2), "n must be 1 with echo"),
        (dict(stream=True), "stream must be false with echo"),
        (dict(echo=False, logprobs=None), "max_tokens must be at least 1, or 0 with echo or prompt_logprobs"),
        (dict(max_tokens=0.0), "max_tokens is a float"),
        (dict(max_tokens=-1), "max_tokens must be at least 1"),
        (dict(prompt=[300]), "ids from 300 to 300; the vocabulary is 0 to"),
        (dict(prompt=[[1], [True]]), "prompt must be a text or the ids of one"),
        (dict(model="function"), "the model 'function' scores no prompts (echo, prompt_logprobs)"),
        (dict(model="function", prompt=[1], echo=False, logprobs=None, max_tokens=1), "the model 'function' takes no prompt as ids"),
    ],
)
def test_what_is_not_served_is_refused_by_name(server, body, message):
    assert message in refusal(server, PATH, **SCORED | body)


def test_chats_have_no_scored_prompts_and_answers_a_bound(server, monkeypatch):
    for field, value in (("echo", True), ("prompt_logprobs", 1)):
        assert f"{field!r} is not served at /v1/chat/completions" in refusal(server, **{field: value})
    monkeypatch.setattr("marl_llm.serving.scored_prompts.MOST_ENTRIES", 4 * len(IDS))
    assert ask(server, **SCORED | dict(prompt=[IDS] * 4))["choices"]
    assert f"are more than {4 * len(IDS)} log-probs in one answer" in refusal(server, PATH, **SCORED | dict(prompt=[IDS] * 5))


def test_scored_prompts_of_an_episode_are_never_recorded(server, record):
    before = record.read_text()
    assert ask(server, "e", **SCORED)["choices"]
    drawing = refusal(server, f"/episodes/e{PATH}", **SCORED | dict(max_tokens=1))
    assert "max_tokens must be 0 with echo or prompt_logprobs in an episode: a prompt that is scored is no sample" in drawing
    assert (record.read_text(), get(server, "/episodes/e")[1]["replies"]) == (before, 0)
    assert post(server, {"reward": 1}, "/episodes/e/reward")[0] == 400, "there is nothing to pay for"


def test_in_a_runs_episode_they_are_no_samples_and_move_no_draw(answers):
    texts = []
    with EpisodeServer({"m": answers}) as server:
        for scored in (0, 2):
            address = server.episodes.open((1, 2))
            for _ in range(scored):
                assert ask(server, address, **SCORED)["choices"][0]["logprobs"]["ids"] == IDS
            texts.append(ask(server, address, prompt=TEXT, max_tokens=6)["choices"][0]["text"])
            assert len(server.episodes.take(address, "").replies) == 1
        assert "answers its own episodes alone" in refusal(server, PATH, **SCORED)
    assert texts[0] == texts[1]


def test_a_model_whose_log_probs_are_no_numbers_fails_by_name(answers, monkeypatch):
    score = type(answers.engine).score

    def broken(engine, model, prompts, top_k=0):
        return [scores._replace(log_probs=scores.log_probs * np.nan) for scores in score(engine, model, prompts, top_k)]

    monkeypatch.setattr(type(answers.engine), "score", broken)
    with ChatServer({"m": answers}) as server:
        status, _, said = post(server, {"model": "m"} | SCORED, PATH)
    assert (status, "log-probs are not finite" in json.loads(said)["error"]["message"]) == (500, True)


def test_it_is_all_the_same_over_http(server):
    expected = ask(server, **SCORED)["choices"]
    status, _, said = post(server, {"model": "m"} | SCORED, PATH)
    assert (status, json.loads(said)["choices"]) == (200, expected)


def test_of_tokens_with_one_text_the_prompts_own_is_told_and_else_the_likeliest():
    halves = [1 + 0xC3, 1 + 0xA9, 1 + 0xA8]  # bytes that are no character alone
    values = (np.float32([-2]), np.int32([2]), np.int32([halves[:2]]), np.float32([[-1, -3]]))
    told = echoed_log_probs(TOKENIZER, [1 + ord("a"), halves[2]], PromptScores(*values, 0), 2)
    assert told["top_logprobs"] == [None, {"\ufffd": -2.0}]
    told = echoed_log_probs(TOKENIZER, [1 + ord("a"), 1 + ord("b")], PromptScores(*values, 0), 2)
    assert told["top_logprobs"] == [None, {"\ufffd": -1.0, "b": -2.0}]
