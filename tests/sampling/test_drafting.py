"""Drafts: what a response draws is the same to the byte with any draft or none; a draft only changes how many tokens a step draws."""

import dataclasses

import jax
import numpy as np
import pytest
from test_engine import CONFIG, TOKENIZER, assert_same, plain, random_requests

from marl_llm.models import init_params
from marl_llm.sampling import Engine, EngineConfig, Request, SamplingParams, drafting
from marl_llm.sampling.drafting import Draft, Drafter, copied, expected_tokens, longest_match
from marl_llm.sampling.model_runner import page_bytes

PAGE, K = 8, 4
SIZES = EngineConfig(
    max_num_seqs=8, prompt_tokens=32, response_tokens=16, decode_steps=4, admit=2, reuse=8, page=PAGE, draft_tokens=K
)  # fmt: skip
GREEDY = SamplingParams(0.0)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


def serve(params, requests, sizes=SIZES, rounds=1):
    """The answers of the last of some `rounds` of the same requests, and the engine's figures."""
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        for _ in range(rounds):
            answers = engine.generate_all(requests)
        return answers, engine.stats()["a"]


@pytest.fixture
def always(monkeypatch):
    """Drafts are verified wherever there is one."""
    monkeypatch.setattr(Drafter, "choose", lambda self, rows, places, drafts: self.columns[-1])


def drafting_from(monkeypatch, tokens_of):
    """Every request's draft is what `tokens_of(sequence)` says."""
    def drafts(self, running):
        most = {s: min(self.draft_tokens, s.request.max_tokens - s.drawn - 1) for s in running}
        return {s: Draft(np.asarray(tokens_of(s), np.int32)[: most[s]], 2) for s in running if most[s] > 0}

    monkeypatch.setattr(Drafter, "drafts", drafts)


def test_every_answer_is_the_same_as_without_drafts(params, always):
    """Greedy, warm and truncated draws, stop ids and strings, budgets of 1 to 16, twice: the second time responses of the same task are
    there to quote."""
    requests = random_requests(48, seed=4, models=("a",))
    answers, stats = serve(params, requests, rounds=2)
    without, none = serve(params, requests, dataclasses.replace(SIZES, draft_tokens=0))
    wanted = plain({"a": params}, requests)
    for got, other, want in zip(answers, without, wanted, strict=True):
        assert_same(got, want)
        assert (got.tokens.tobytes(), got.finish) == (other.tokens.tobytes(), other.finish)
        np.testing.assert_allclose(got.entropy, other.entropy, atol=3e-4)
        assert (got.kept_ids is None) == (other.kept_ids is None)
    assert stats["accepted_tokens"] > 100
    assert stats["steps"] < 2 * none["steps"]
    assert "drafted_tokens" not in none


def test_a_wrong_draft_is_never_seen(params, always, monkeypatch):
    requests = [*random_requests(16, seed=4, models=("a",)), *(Request((5, 6, i), (3, i), 16, "a", GREEDY) for i in range(8))]
    wanted = plain({"a": params}, requests)
    drafting_from(monkeypatch, lambda sequence: (sequence.last_token.repeat(K) + 1) % 257)
    answers, stats = serve(params, requests)
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)
    assert stats["drafted_tokens"] > 300
    assert stats["accepted_tokens"] < 0.2 * stats["drafted_tokens"]


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4])
def test_a_run_is_accepted_up_to_its_first_wrong_token(params, always, monkeypatch, right):
    """Prompts of all lengths within a page and budgets within a draft: runs begin and end in every column of a page."""
    requests = [Request((*range(40, 49 + i),), (3, i), 10 + i % 4, "a", (GREEDY, SamplingParams())[i % 2]) for i in range(8)]
    wanted = plain({"a": params}, requests)
    answer = {request.seed: want[0] for request, want in zip(requests, wanted, strict=True)}

    def partly(sequence):
        draft = answer[sequence.request.seed][sequence.drawn :][:K].copy()
        draft[right:] = (draft[right:] + 1) % 257
        return draft

    drafting_from(monkeypatch, partly)
    answers, stats = serve(params, requests)
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)
    one = 1 + right  # tokens of a step
    assert stats["draft_steps"] + stats["steps"] >= stats["draft_steps"]
    assert stats["accepted_tokens"] <= right * stats["drafted_tokens"] / max(1, K)  + right * 8
    longest = max(request.max_tokens - 1 for request in requests)
    assert stats["steps"] == pytest.approx(-(-longest // one), abs=2)


def test_a_response_ends_within_an_accepted_run(params, always, monkeypatch):
    """By a stop id, by a stop string that two tokens complete, and by its budget: the rest of the draft is drawn by nobody."""
    open_end = [Request((*range(60, 70 + i),), (5, i), 16, "a", GREEDY) for i in range(4)]
    texts = [want[0] for want in plain({"a": params}, open_end)]

    def string(i, at):
        return bytes(int(t) for t in texts[i][at : at + 2]).decode("latin-1")

    requests = [dataclasses.replace(open_end[0], stop_ids=(int(texts[0][3]),)), dataclasses.replace(open_end[1], max_tokens=7)]
    wanted = plain({"a": params}, requests)
    answer = {request.seed: texts[request.seed[1]] for request in open_end}
    drafting_from(monkeypatch, lambda sequence: answer[sequence.request.seed][sequence.drawn :][:K])
    answers, stats = serve(params, requests)
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)
    assert [a.finish for a in answers] == ["stop", "length"]
    assert stats["accepted_tokens"] >= 4


def test_a_small_pool_pauses_requests_with_drafts_and_changes_no_answer(params, always):
    rng = np.random.default_rng(1)
    requests = [Request(tuple(int(t) for t in rng.integers(1, 257, 17 + i % 16)), (1, i), 16, "a", GREEDY) for i in range(24)]
    small = dataclasses.replace(SIZES, cache_bytes=17 * page_bytes(CONFIG, PAGE))
    answers, stats = serve(params, requests, small, rounds=2)
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    assert stats["paused"] > 0
    assert stats["accepted_tokens"] > 0
