"""Drafts: what a response draws is the same to the byte with any draft or none; a draft only changes how many tokens a step draws."""

import dataclasses
from concurrent.futures import Future

import jax
import numpy as np
import pytest
import test_adapters
import test_pages
from test_engine import CONFIG, ROOT, SIZES, TOKENIZER, assert_same, plain, random_requests

from marl_llm.models import init_params
from marl_llm.sampling import Engine, EngineConfig, Request, SamplingParams, stop_rule
from marl_llm.sampling.drafting import NO_TOKEN, Draft, Drafter, copy_draft, expected_tokens, longest_match
from marl_llm.sampling.sequences import SequenceState

K = 3  # one program verifies
DRAFTS = dataclasses.replace(SIZES, draft_tokens=K)
GREEDY = SamplingParams(0.0)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


def start(params, sizes=DRAFTS):
    return Engine({"a": (CONFIG, params)}, jax.random.key(ROOT), sizes=sizes, tokenizers={"a": TOKENIZER})


@pytest.fixture(scope="module")
def engine(params):
    with start(params) as engine:
        yield engine


@pytest.fixture
def always(monkeypatch):
    """Drafts are verified wherever there is one."""
    monkeypatch.setattr(Drafter, "choose", lambda self, rows, places, drafts: self.columns[-1])


def draft_as(monkeypatch, tokens_of):
    """Every request's draft is what `tokens_of(sequence)` says, as far as its budget goes."""
    def drafts(self, running):
        most = {s: min(self.draft_tokens, s.request.max_tokens - s.drawn - 1) for s in running}
        return {s: Draft(np.asarray(tokens_of(s), np.int32)[: most[s]], 2) for s in running if most[s] > 0}

    monkeypatch.setattr(Drafter, "drafts", drafts)


def serve(engine, requests):
    """The answers, and what they added to the engine's figures."""
    before = dict(engine.stats()["a"])
    answers = engine.generate_all(requests)
    return answers, {name: value - before.get(name, 0) for name, value in engine.stats()["a"].items()}


def sequence_of(ids, drawn, seed=(0, 0), max_tokens=16):
    """A request that has drawn the last `drawn` of these."""
    request = Request(tuple(ids[: len(ids) - drawn]), seed, max_tokens)
    sequence = SequenceState(request, Future(), stop_rule(CONFIG.vocab_size, ()), 0.0)
    sequence.ids = np.zeros(sequence.longest + 1, np.int32)
    sequence.ids[: len(ids)], sequence.size, sequence.drawn = ids, len(ids), drawn
    return sequence


# ---------------------------------------------------------------------------------------------------- what is drawn
def test_every_answer_is_the_plain_samplers_when_responses_are_quoted(engine, params, always):
    """Greedy, warm and truncated draws, stop ids and strings, budgets of 1 to 16; each is asked twice, so that there is its own response
    to quote."""
    requests = random_requests(60, models=("a",))
    wanted = plain({"a": params}, requests)
    engine.generate_all(requests)
    answers, stats = serve(engine, requests)
    kinds = set()
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)
        kinds.add((got.finish, len(got.tokens) == 1))
    assert kinds == {("stop", True), ("stop", False), ("length", True), ("length", False)}
    assert stats["accepted_tokens"] > 60
    assert stats["draft_steps"] <= stats["steps"]


def test_a_wrong_draft_is_never_seen(engine, params, always, monkeypatch):
    """Neither in the answer nor in what later requests take over: the pages hold keys of the wrong tokens behind the real ones."""
    requests = [Request((*range(40, 49 + i),), (3, i), 12, "a", (GREEDY, SamplingParams())[i % 2]) for i in range(8)]
    draft_as(monkeypatch, lambda sequence: (sequence.last_token.repeat(K) + 1) % 257)
    answers, stats = serve(engine, requests)
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    assert stats["drafted_tokens"] > 8 * 8 * K
    assert stats["accepted_tokens"] < 0.1 * stats["drafted_tokens"]
    assert engine.stats()["a"]["occupied"] <= 1
    last = [(*r.prompt, *(int(t) for t in a.tokens[:-1])) for r, a in zip(requests, answers, strict=True)]
    after = [Request((*ids, *((ids[-1] + 1) % 257,) * 3)[-32:], (4, i), 4, "a") for i, ids in enumerate(last)]
    for got, want in zip(engine.generate_all(after), plain({"a": params}, after), strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("right", range(K + 1))
def test_a_run_is_accepted_up_to_its_first_wrong_token(engine, params, always, monkeypatch, right):
    """Prompts of 9 to 16 tokens and budgets of 12 to 15: runs begin and end in every column of a page, and before and behind its end."""
    requests = [Request((*range(40, 49 + i),), (3, i), 12 + i % 4, "a", (GREEDY, SamplingParams())[i % 2]) for i in range(8)]
    wanted = plain({"a": params}, requests)
    answer = {request.seed: want[0] for request, want in zip(requests, wanted, strict=True)}

    def partly(sequence):
        draft = answer[sequence.request.seed][sequence.drawn :][:K].copy()
        draft[right:] = (draft[right:] + 1) % 257
        return draft

    draft_as(monkeypatch, partly)
    answers, stats = serve(engine, requests)
    for got, want in zip(answers, wanted, strict=True):
        assert_same(got, want)
    drawn = [(r.max_tokens, n) for r in requests for n in range(1, r.max_tokens, right + 1)]  # before each step of each request
    assert stats["accepted_tokens"] == sum(min(right, most - n - 1) for most, n in drawn)


def test_a_response_ends_within_an_accepted_run(engine, params, always, monkeypatch):
    """By a stop id, a stop string or its budget; what the draft says behind the end is drawn by nobody."""
    open_end = [Request((*range(60, 70 + i),), (5, i), 16, "a", GREEDY) for i in range(3)]
    texts = [want[0] for want in plain({"a": params}, open_end)]
    first = {text.tolist().index(token) for text in texts[:1] for token in text[6:7]}
    string = next(s for t in texts[1][3:] if (s := TOKENIZER.decode([int(t)])).isascii() and s)
    requests = [
        dataclasses.replace(open_end[0], stop_ids=(int(texts[0][6]),)),
        dataclasses.replace(open_end[1], stop_strings=(string,)),
        dataclasses.replace(open_end[2], max_tokens=8),
    ]
    answer = {request.seed: text for request, text in zip(open_end, texts, strict=True)}
    draft_as(monkeypatch, lambda sequence: answer[sequence.request.seed][sequence.drawn :][:K])
    answers, stats = serve(engine, requests)
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    assert [a.finish for a in answers] == ["stop", "stop", "length"]
    assert len(answers[0].tokens) == first.pop() + 1
    assert stats["accepted_tokens"] > 2


def test_a_small_pool_pauses_requests_with_drafts_and_changes_no_answer(params, always):
    rng = np.random.default_rng(1)
    requests = [Request(test_pages.ids(rng, 17 + i % 16), (1, i), 16, "a", GREEDY) for i in range(24)]
    with start(params, dataclasses.replace(test_pages.SIZES, draft_tokens=K)) as small:
        small.generate_all(requests)
        answers, stats = serve(small, requests)
        assert test_pages.pool_of(small).owned == 0
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    assert stats["paused"] > 0
    assert stats["accepted_tokens"] > 24


def test_each_row_of_drafts_reads_its_own_models_adapters(always, monkeypatch):
    base = jax.tree.map(lambda x: x * 2.0, init_params(test_adapters.CONFIG, jax.random.key(0)))
    tuned, asked = {"a": test_adapters.adapters(1), "b": test_adapters.adapters(2)}, test_adapters.requests(24)
    with test_adapters.together(base, tuned, dataclasses.replace(test_adapters.SIZES, draft_tokens=K)) as one:
        with monkeypatch.context() as never:
            never.setattr(Drafter, "choose", lambda *_: 1)
            wanted = one.generate_all(asked)
        test_adapters.same(one.generate_all(asked), wanted)
        assert one.stats()["a"]["accepted_tokens"] > 24
        assert one.draft_counts()["accepted_tokens"] == one.stats()["b"]["accepted_tokens"]  # they have one count


# ---------------------------------------------------------------------------------------------------- when drafts are verified
def test_a_stream_that_quotes_nothing_verifies_nothing_and_one_that_does_soon_begins(engine, params, monkeypatch):
    def measure(self, places, columns, seconds):
        self._seconds[places, columns] = 1.0 if columns == 1 else 1.2

    monkeypatch.setattr(Drafter, "measure", measure)
    rng = np.random.default_rng(0)
    new = [Request(test_pages.ids(rng, 20), (8, i), 16, "a") for i in range(16)]
    engine._schedulers["a"].drafter = Drafter(K)
    _, stats = serve(engine, new)
    assert stats["draft_steps"] == 0
    answers, stats = serve(engine, new)  # the very same: each response stands in what was said of its task
    assert stats["accepted_tokens"] > 0.4 * 16 * 16
    assert 0 < stats["saved_steps"] <= stats["accepted_tokens"]
    for got, want in zip(answers, plain({"a": params}, new), strict=True):
        assert_same(got, want)


def test_drafts_are_verified_where_they_promise_more_tokens_a_second():
    drafter, sequence, draft = Drafter(7), sequence_of((*range(9),), 4), Draft(np.arange(7), 8)
    assert drafter.columns == (4, 8)
    assert drafter.choose(1, 1, {sequence: draft}) == 1  # nothing is measured
    drafter.measure(1, 1, 1.0)
    assert drafter.choose(1, 1, {sequence: draft}) == 1  # nothing is known of acceptance
    for _ in range(4):
        assert drafter.observe(sequence, draft, np.arange(8)) == 7
    assert drafter.rate(sequence, draft) > 0.8
    assert drafter.choose(1, 1, {}) == 1
    assert drafter.choose(1, 1, {sequence: draft}) == 8
    assert drafter.choose(16, 1, {sequence: draft}) == 1  # fifteen others would wait for one
    drafter.measure(1, 8, 8.0)
    drafter.measure(1, 4, 1.5)
    assert drafter.choose(1, 1, {sequence: draft}) == 4  # the wider program is too slow
    drafter.measure(2, 1, 1.0)
    for columns in drafter.columns:
        drafter.measure(2, columns, 9.0)
    choices = [drafter.choose(2, 2, {sequence: draft}) for _ in range(400)]
    assert choices[0] == 1
    assert choices[-1] > 1  # it is tried again at times: what was measured once may have been somebody else's load
    for _ in range(20):
        drafter.observe(sequence, draft, np.arange(1, 9))
    assert drafter.rate(sequence, draft) < 0.3
    assert drafter.choose(1, 1, {sequence: draft}) == 1


def test_expected_tokens_are_those_of_independent_draws():
    rng = np.random.default_rng(0)
    runs = [next((i for i, x in enumerate(draws) if x > 0.7), 5) for draws in rng.random((20_000, 5))]
    assert expected_tokens(0.7, 5) == pytest.approx(np.mean(runs), abs=0.05)
    assert (expected_tokens(1.0, 5), expected_tokens(0.0, 5)) == (5.0, 0.0)


# ---------------------------------------------------------------------------------------------------- what is drafted
def test_the_longest_match_is_found_and_of_equals_the_last():
    rng = np.random.default_rng(0)
    for _ in range(200):
        text, end = rng.integers(0, 3, rng.integers(2, 30)), rng.integers(0, 3, rng.integers(1, 6))
        lengths = {
            place: next((n for n in range(min(place, len(end)), 0, -1) if (text[place - n : place] == end[-n:]).all()), 0)
            for place in range(1, len(text))
        }
        longest = max(lengths.values())
        want = (max(p for p, n in lengths.items() if n == longest), longest) if longest else (0, 0)
        assert longest_match(text, end) == want


def test_a_draft_is_copied_from_the_prompt_the_response_or_what_was_said_of_the_task():
    drafter = Drafter(4)
    quoting = sequence_of((5, 6, 7, 8, 9, 10, 1, 5, 6), 2)
    (draft,) = drafter.drafts([quoting]).values()
    assert (draft.tokens.tolist(), draft.match) == ([7, 8, 9, 10], 2)
    (draft,) = drafter.drafts([sequence_of((1, 2, 3, 2, 3, 2, 3), 6)]).values()
    assert draft.tokens.tolist() == [2, 3, 2, 3]  # a repetition goes on beyond its end
    assert drafter.drafts([sequence_of((1, 2, 3, 4), 2), sequence_of((5, 6, 7, 5, 6), 2, max_tokens=3)]) == {}  # no match; one token left
    drafter.leave(sequence_of((20, 21, 22, 23, 24, 25), 4, seed=(0, 7)))
    drafter.leave(sequence_of((30, 31, 32), 2, seed=(3, 7)))
    other = sequence_of((9, 9, 22, 23), 1, seed=(4, 7))
    assert drafter.drafts([other])[other].tokens.tolist() == [24, 25]  # to the end of that response, not into the next
    assert drafter.drafts([sequence_of((9, 9, 22, 23), 1, seed=(4, 8))]) == {}  # of another task
    assert copy_draft(other.ids[:4], np.asarray([22, 23, NO_TOKEN], np.int32), 4) is None


def test_what_was_said_is_kept_of_the_latest_tasks_and_tokens(monkeypatch):
    monkeypatch.setattr("marl_llm.sampling.drafting.MOST_TASKS", 2)
    monkeypatch.setattr("marl_llm.sampling.drafting.MOST_TOKENS", 6)
    drafter = Drafter(4)
    for task in range(3):
        for _ in range(2):
            drafter.leave(sequence_of((1, 2, 10 * task, 3, 4), 4, seed=(0, task)))
    assert {task: said.tolist() for task, said in drafter._said.items()} == {t: [NO_TOKEN, 2, 10 * t, 3, 4, NO_TOKEN] for t in (1, 2)}


def test_drafts_cannot_keep_the_bytes_of_the_exact_engine():
    with pytest.raises(ValueError, match=r"EngineConfig\.draft_tokens=4 with batch_invariant=True: .* use draft_tokens=0"):
        EngineConfig(max_num_seqs=8, draft_tokens=4, batch_invariant=True)
    with pytest.raises(ValueError, match=r"EngineConfig\.draft_tokens=-1 must be at least 0"):
        EngineConfig(draft_tokens=-1)
