"""Models of one shape that draw pages from one pool: what one leaves free serves the other, and no answer depends on it."""

import dataclasses

import jax
import numpy as np
import pytest
from test_engine import CONFIG, ROOT, TOKENIZER, assert_same, plain
from test_swap import ask, turn

from marl_llm.models import init_params
from marl_llm.sampling import Engine, EngineConfig, Request
from marl_llm.sampling.model_runner import page_bytes
from marl_llm.sampling.scheduler import Scheduler
from marl_llm.sampling.store import PageStore

PAGE = 8
SIZES = EngineConfig(
    max_num_seqs=8, prompt_tokens=32, response_tokens=16, decode_steps=4, admit=2, reuse=1, page=PAGE, piece=16, block_pool="shared",
    cache_bytes=10 * page_bytes(CONFIG, PAGE),
)  # fmt: skip


@pytest.fixture(scope="module")
def models():
    make = jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))
    return {"a": make(jax.random.key(0)), "b": make(jax.random.key(1))}


def start(models, **sizes):
    served = {name: (CONFIG, params) for name, params in models.items()}
    return Engine(served, jax.random.key(ROOT), sizes=dataclasses.replace(SIZES, **sizes), tokenizers=dict.fromkeys(models, TOKENIZER))


def two(models, **sizes):
    """Two schedulers on one store, as the engine makes them."""
    sizes = dataclasses.replace(SIZES, **sizes)
    store = PageStore("a+b", CONFIG, sizes, None, 2)
    return store, [Scheduler({n: p}, CONFIG, sizes, jax.random.key(ROOT), None, TOKENIZER, store) for n, p in models.items()]


def requests(count, seed, names):
    rng = np.random.default_rng(seed)

    def prompt():
        return tuple(int(t) for t in rng.integers(1, 257, rng.integers(1, 33)))

    starts = [prompt() for _ in range(5)]
    return [
        Request(starts[rng.integers(5)] if i % 2 else prompt(), (seed, i), int(rng.integers(1, 17)), names[i % len(names)])
        for i in range(count)
    ]


def test_answers_are_those_of_pools_of_their_own_and_prompts_are_shared_within_a_model_alone(models):
    """Both models get the same prompts; twenty pages for what wants up to ninety-six."""
    asked = [dataclasses.replace(r, model=name) for r in requests(30, 1, "a") for name in "ab"]
    with start(models) as engine:
        answers, stats = engine.generate_all(asked), engine.stats()
        schedulers = engine._all
        assert len(schedulers) == 2
        assert schedulers[0].store is schedulers[1].store
        assert schedulers[0].pools[0].pages == 20
        assert schedulers[0].pools[0].owned == 0
    for got, want in zip(answers, plain(models, asked), strict=True):
        assert_same(got, want)
    assert stats["a"]["paused"] + stats["b"]["paused"] > 0
    assert stats["a"]["cache_bytes"] == stats["b"]["cache_bytes"] == 2 * SIZES.cache_bytes


def test_a_model_may_use_what_another_leaves_free(models):
    """Four requests of four pages each do not fit into ten pages, and do into twenty."""
    asked = [Request(tuple(range(i, i + 16)), (2, i), 16, "a") for i in (20, 60, 100, 140)]
    paused, most = {}, {}
    for pool in ("own", "shared"):
        with start(models, block_pool=pool) as engine:
            answers, stats = engine.generate_all(asked), engine.stats()["a"]
            paused[pool], most[pool] = stats.get("paused", 0), stats["most_pages"]
        for got, want in zip(answers, plain(models, asked), strict=True):
            assert_same(got, want)
    assert most["own"] <= 10 < most["shared"] == 16
    assert paused["shared"] == 0


def test_the_older_goes_first_whichever_lane_it_is_in(models):
    """Both schedulers are full; the last submitted is paused, and while it lacks pages nobody who is younger enters."""
    store, (a, b) = two(models, cache_bytes=4 * page_bytes(CONFIG, PAGE))  # eight pages
    (first,) = ask(a, Request(tuple(range(1, 24)), (3, 0), 16, "a"))  # three pages, and five at its end
    (second,) = ask(b, Request(tuple(range(50, 73)), (3, 1), 16, "b"))
    for scheduler in (a, b):
        turn(scheduler)
    assert (len(first.nodes), len(second.nodes)) == (4, 4)
    (third,) = ask(a, Request((1, 2), (3, 2), 4, "a"))
    for _ in range(3):
        if second.nodes:
            turn(a)
    assert b.stats["paused"] == 1  # by the other scheduler, whose request is older
    assert not first.future.done()
    (fourth,) = ask(b, Request((5,), (3, 3), 2, "b"))
    turn(b)
    assert b.starved == second.number
    turn(a)
    assert third.ids is None  # younger than the one that lacks pages
    for _ in range(20):
        for scheduler in (a, b):
            turn(scheduler)
    for sequence in (first, second, third, fourth):
        assert_same(sequence.future.result(0), plain(models, [sequence.request])[0])
    assert store.pools[0].owned == 0


def test_a_swap_forgets_the_keys_of_one_model_alone(models):
    prompt = tuple(range(1, 20))
    asked = [Request(prompt, (4, i), 4, name) for i, name in enumerate("ab")]
    with start(models) as engine:
        engine.generate_all(asked)
        engine.set_params("a", models["b"])
        again = engine.generate_all([dataclasses.replace(one, seed=(4, 9)) for one in asked])
    assert [one.reused for one in again] == [0, 18]
    for got, one in zip(again, asked, strict=True):
        assert_same(got, plain(models, [dataclasses.replace(one, seed=(4, 9), model="b")])[0])


def test_models_of_other_shapes_keep_a_pool_of_their_own(models):
    deep = dataclasses.replace(CONFIG, layers=1)
    served = {"a": (CONFIG, models["a"]), "b": (CONFIG, models["b"]), "c": (deep, init_params(deep, jax.random.key(2)))}
    with Engine(served, jax.random.key(ROOT), sizes=SIZES) as engine:
        a, b, c = (engine._schedulers[name].store for name in "abc")
    assert a is b is not c
    with pytest.raises(ValueError, match=r"EngineConfig.block_pool='common' is unknown; the ways are own, shared"):
        EngineConfig(block_pool="common")
