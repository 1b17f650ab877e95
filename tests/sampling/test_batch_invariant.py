"""The exact engine: a request's bytes are the same alone, in company, in any order and with any pool."""

import dataclasses

import jax
import numpy as np
import pytest
from test_engine import CONFIG, TOKENIZER, assert_same, plain, random_requests

from marl_llm.models import init_params
from marl_llm.sampling import Engine, EngineConfig, Request, scheduler
from marl_llm.sampling.model_runner import page_bytes

PAGE = 8
SIZES = EngineConfig(
    max_num_seqs=8, prompt_tokens=64, response_tokens=16, decode_steps=4, admit=2, reuse=1, page=PAGE, piece=16, batch_invariant=True
)
SMALL = dataclasses.replace(SIZES, cache_bytes=14 * page_bytes(CONFIG, PAGE))  # eight of the longest requests want 80 pages


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


def served(params, sizes, requests, apart=1):
    """The answers, in `apart` calls one after the other, and the engine's figures."""
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        parts = [requests[i::apart] for i in range(apart)]
        answers = [engine.generate_all(part) for part in parts]
        return [answers[i % apart][i // apart] for i in range(len(requests))], engine.stats()["a"]


def bytes_of(answer):
    arrays = (answer.tokens, answer.log_probs, answer.sampled_log_probs, answer.entropy, answer.kept_ids, answer.kept_log_mass)
    return [None if x is None else np.asarray(x).tobytes() for x in arrays]


def assert_equal_bytes(found, wanted):
    assert [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if bytes_of(a) != bytes_of(b)] == []


def test_bytes_depend_on_nobody_else(params):
    """Greedy, warm and truncated draws; then conversations that go on, whose past was decoded in one engine and is only read in another."""
    rng = np.random.default_rng(0)
    shared = tuple(int(t) for t in rng.integers(1, 257, 40))
    plainly = random_requests(32, seed=4, models=("a",))
    first = [dataclasses.replace(r, prompt=(shared[: 4 * (i % 11)] + r.prompt)[:64]) if i % 2 else r for i, r in enumerate(plainly)]
    answers, stats = served(params, SIZES, first)
    assert stats.get("paused", 0) == 0 < stats["reused_tokens"]
    for got, want in zip(answers[::2], plain({"a": params}, first[::2]), strict=True):
        assert_same(got, want)
    said = [(*r.prompt, *(int(t) for t in a.tokens)) for r, a in zip(first, answers, strict=True)]
    then = [Request((*s, 7)[:64], (9, i), 8, "a") for i, s in enumerate(said)]
    requests = [*first, *then]
    together, _ = served(params, SIZES, requests)
    assert_equal_bytes(together[: len(first)], answers)
    back, order = [None] * len(requests), rng.permutation(len(requests))
    others, stats = served(params, SMALL, [requests[i] for i in order])
    for i, answer in zip(order, others, strict=True):
        back[i] = answer
    assert_equal_bytes(back, together)
    assert stats.get("paused", 0) == 0
    one_by_one, _ = served(params, SIZES, requests[20:44], apart=24)
    assert_equal_bytes(one_by_one, together[20:44])


def test_only_whole_pages_of_prompts_are_taken_over(params):
    """Of a beginning that ends within a page, the pages before it; of an answer nothing."""
    begin = tuple(range(20, 20 + 2 * SIZES.page + 3))
    first, second = Request((*begin, 1, 2), (1, 0), 16, "a"), Request((*begin, 3, 4), (1, 1), 4, "a")
    answers, stats = served(params, SIZES, [first, second], apart=2)
    assert stats["reused_tokens"] == 2 * SIZES.page
    third = Request((*first.prompt, *(int(t) for t in answers[0].tokens), 5), (1, 2), 4, "a")
    _, stats = served(params, SIZES, [first, third], apart=2)
    assert stats["reused_tokens"] == len(first.prompt) // SIZES.page * SIZES.page
    whole = dataclasses.replace(first, prompt=begin[: 2 * SIZES.page])
    (one, again), stats = served(params, SIZES, [whole, whole], apart=2)
    assert stats["reused_tokens"] == SIZES.page
    assert_equal_bytes([again], [one])


def test_who_leaves_tokens_out_is_computed_apart(params, monkeypatch):
    """Their draws are another program, which need not round as the plain one does."""
    together = []

    def noted(settings):
        together.append({scheduler_of([s]) for s in settings})
        return scheduler_of(settings)

    scheduler_of = scheduler.truncation
    monkeypatch.setattr(scheduler, "truncation", noted)
    requests = random_requests(32, seed=4, models=("a",))
    assert len({scheduler_of([r.settings]) for r in requests}) > 1
    served(params, SIZES, requests)
    assert max(map(len, together)) == 1


def test_there_is_one_shape_per_kind_of_program(params):
    rng = np.random.default_rng(1)
    requests = [Request(tuple(int(t) for t in rng.integers(1, 257, 1 + 3 * i)), (1, i), 1 + i % 16, "a") for i in range(20)]
    _, stats = served(params, SIZES, requests)
    assert stats["compilations"] == 3  # swap, admit, decode


def test_the_number_of_slots_must_leave_no_row_aside():
    with pytest.raises(ValueError, match=r"EngineConfig\.max_num_seqs=12 must be a power of two with batch_invariant=True"):
        dataclasses.replace(SIZES, max_num_seqs=12)
