"""New parameters while requests are under way (`weight_update="in_flight"`): who decodes goes on with them, each token has its version,
and what was
computed with earlier parameters, or behind it, is for nobody else. Most tests drive a scheduler by hand, as the engine's thread does."""

import dataclasses
import gc
import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_adapters import CONFIG as SMALL
from test_adapters import LORA, adapters
from test_engine import CONFIG, ROOT, TOKENIZER, assert_same, packed, plain

from marl_llm.models import attach, init_params
from marl_llm.sampling import Engine, EngineConfig, Request, SamplingParams, weights
from marl_llm.sampling.model_runner import page_bytes
from marl_llm.sampling.pool import PagePool
from marl_llm.sampling.scheduler import Scheduler
from marl_llm.sampling.sequences import SequenceState

PAGE, WIDTH = 8, 64
SIZES = EngineConfig(
    max_num_seqs=8, prompt_tokens=32, response_tokens=16, decode_steps=4, admit=2, reuse=1, page=PAGE, piece=16, weight_update="in_flight"
)
PROMPT = (*range(40, 58),)


@pytest.fixture(scope="module")
def old():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


@pytest.fixture(scope="module")
def new():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(1))


@pytest.fixture(scope="module")
def head(old):
    """Parameters with the keys and values of `old`, and other logits."""
    scale = jax.random.uniform(jax.random.key(5), (CONFIG.width,), minval=-1.0, maxval=2.0)
    return old | {"final_norm": {"weight": old["final_norm"]["weight"] * scale}}


def scheduler_of(params, **sizes):
    models = params if "a" in params else {"a": params}
    config = CONFIG if "a" not in params else SMALL
    return Scheduler(models, config, dataclasses.replace(SIZES, **sizes), jax.random.key(ROOT), None, TOKENIZER)


def ask(scheduler, *requests):
    sequences = [SequenceState(request, Future(), scheduler.check(request), time.monotonic()) for request in requests]
    scheduler.waiting.extend(sequences)
    return sequences


def turn(scheduler, params=None, model="a"):
    """What the engine's thread does between two chunks, and a chunk; `params` arrive before it."""
    if params is not None:
        scheduler.weights.pending[model] = params
    if scheduler.can_swap:
        scheduler.swap()
    while scheduler.admit()[1]:
        pass
    scheduler.step(time.monotonic())


def finish(scheduler, *sequences):
    while scheduler.busy or scheduler.waiting:
        turn(scheduler)
    return [sequence.future.result(0) for sequence in sequences]


def score(params, prompt, tokens):
    """Log-probs of tokens behind a prompt, from one forward pass."""
    n, p = len(tokens), len(prompt)
    row, targets = np.zeros((1, WIDTH), np.int32), np.zeros((1, 16), np.int32)
    row[0, : p + n], targets[0, :n] = [*prompt, *tokens], tokens
    places = np.arange(WIDTH, dtype=np.int32)[None]
    here = (places < p + n).astype(np.int32)
    predict = np.minimum(p - 1 + np.arange(16), WIDTH - 1).astype(np.int32)[None]
    scored = packed(CONFIG, params, *map(jnp.asarray, (row, places, here, here * 0, predict, targets)), 1.0)
    return np.asarray(scored.log_probs[0, :n])


@pytest.mark.parametrize("settings", [SamplingParams(), SamplingParams(0.0)])
def test_a_request_in_flight_goes_on_with_the_new_parameters_and_says_which_drew_each_token(old, head, settings):
    """The first token comes with the prompt, then a chunk of four; the keys of both versions are the same, so one forward pass with each
    is the oracle of its part."""
    request = Request(PROMPT, (1, 0), 16, "a", settings)
    scheduler = scheduler_of(old)
    (sequence,) = ask(scheduler, request)
    turn(scheduler)
    turn(scheduler, head)
    (got,) = finish(scheduler, sequence)
    assert got.versions.dtype == np.int32
    np.testing.assert_array_equal(got.versions, [0] * 5 + [1] * 11)
    assert (got.version, got.mixed, got.finish) == (0, True, "length")
    tokens, log_probs, *_ = plain({"a": old}, [request])[0]
    np.testing.assert_array_equal(got.tokens[:5], tokens[:5])
    np.testing.assert_allclose(got.log_probs[:5], log_probs[:5], atol=1e-4)
    before, after = (score(params, PROMPT, got.tokens) for params in (old, head))
    np.testing.assert_allclose(got.log_probs[:5], before[:5], atol=1e-4)
    np.testing.assert_allclose(got.log_probs[5:], after[5:], atol=1e-4)
    assert np.abs(before - after)[5:].min() > 1e-3
    assert scheduler.pools[0].owned == 0


def test_old_keys_stay_and_neither_company_nor_pages_change_what_is_said(old, new):
    found = []
    for sizes, others in (({}, 0), ({"page": 16, "piece": 8}, 6)):
        scheduler = scheduler_of(old, **sizes)
        (sequence,) = ask(scheduler, Request(PROMPT, (1, 0), 16, "a"))
        ask(scheduler, *(Request(PROMPT[:4] + (i,), (2, i), 16, "a") for i in range(others)))
        while not sequence.drawn:
            turn(scheduler)
        turn(scheduler, new)
        found += finish(scheduler, sequence)
    for got in found:
        np.testing.assert_array_equal(got.tokens, found[0].tokens)
        np.testing.assert_array_equal(got.versions, found[0].versions)
        np.testing.assert_allclose(got.log_probs, found[0].log_probs, atol=1e-4)
    again = score(new, PROMPT, found[0].tokens)
    assert np.abs(found[0].log_probs - again)[5:].max() > 1e-2  # the new parameters alone would say otherwise


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:3]])  # whole pages of it, and one page that both versions write into
@pytest.mark.parametrize("ended", [False, True])
def test_nobody_finds_what_was_computed_before_a_swap_or_behind_it(old, new, prompt, ended):
    scheduler = scheduler_of(old)
    (sequence,) = ask(scheduler, Request(prompt, (1, 0), 16, "a"))
    turn(scheduler)
    turn(scheduler, new)
    turn(scheduler)
    said = tuple(int(t) for t in sequence.ids[: sequence.size])
    assert sequence.versions[0] == 0 < sequence.versions[-1]
    if ended:
        finish(scheduler)
        assert scheduler.pools[0].available == len(scheduler.pools[0].free)  # nothing of it is kept
    later = [Request(p, (3, i), 12, "a") for i, p in enumerate((prompt, said, said[:-2] + (7,)))]
    for request in later:  # one after the other, so that the next may take over pages of the new version
        (again,) = ask(scheduler, request)
        while not again.future.done():
            turn(scheduler)
        got = again.future.result(0)
        assert_same(got, plain({"a": new}, [request])[0])
        np.testing.assert_array_equal(got.versions, 1)
        if request is later[0]:
            assert got.reused == 0
    assert got.reused >= len(said) - 2 - PAGE  # pages of the new version are shared as ever
    finish(scheduler)
    assert scheduler.pools[0].owned == 0


def test_branches_in_flight_go_on_with_their_common_pages_and_a_later_one_computes_the_prompt(old, new):
    """Two of them draw the same tokens, one before the swap and one after it: their pages are not the same."""
    scheduler = scheduler_of(old)
    sequences = ask(scheduler, *(Request(PROMPT, (4, i), 16, "a") for i in range(4)))
    turn(scheduler)
    held = scheduler.pools[0].owned
    turn(scheduler, new)
    assert scheduler.pools[0].owned <= held + 4
    turn(scheduler)
    for sequence in sequences[1:]:  # as if they had drawn alike: nothing may be merged
        assert not {node.page for node in sequence.nodes[3:]} & {node.page for node in sequences[0].nodes[3:]}
    answers = finish(scheduler, *sequences)
    for i, got in enumerate(answers):
        (alone,) = ask(other := scheduler_of(old), Request(PROMPT, (4, i), 16, "a"))
        turn(other)
        turn(other, new)
        (want,) = finish(other, alone)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-4)
    pool = scheduler.pools[0]
    assert (pool.owned, len(pool.free)) == (0, pool.pages)


def test_pages_of_two_versions_are_never_merged_or_found():
    """The same tokens: one sequence began before the swap and ends behind it, the other is new."""
    pool, tokens = PagePool(9, 2), np.arange(6, dtype=np.int32)
    mixed = [pool.take() for _ in range(3)]
    mixed[0] = pool.grown(mixed[0], pool.root(), tokens[:2])
    mixed[1] = pool.grown(mixed[1], mixed[0], tokens[2:3])
    pool.clear()
    for i in (1, 2):
        mixed[i] = pool.grown(mixed[i], mixed[i - 1], tokens[2 * i : 2 * i + 2])
    assert pool.find(tokens) == ([], None, 0)
    fresh = [pool.take() for _ in range(3)]
    for i in range(3):
        fresh[i] = pool.grown(fresh[i], fresh[i - 1] if i else pool.root(), tokens[2 * i : 2 * i + 2])
    assert not {node.page for node in fresh} & {node.page for node in mixed}
    assert pool.find(tokens)[0] == fresh
    pool.release(mixed)
    assert (pool.owned, len(pool.free)) == (3, 6)
    pool.release(fresh)
    assert pool.find(tokens)[0] == fresh  # kept for others, as long as nothing else needs the place
    first = pool.take()
    pool.grown(first, pool.root(), tokens[:1])
    pool.clear()
    pool.release([first])
    assert sorted(pool.free) == list(range(9))


def test_a_prompt_that_is_not_whole_begins_again(old, new):
    request, scheduler = Request((*range(60, 92),), (5, 0), 8, "a"), scheduler_of(old, piece=8)
    ask(scheduler, Request(PROMPT[:5], (5, 1), 16, "a"))  # decodes meanwhile
    turn(scheduler)
    sequences = ask(scheduler, request, dataclasses.replace(request, seed=(5, 2)))  # the second waits for what the first computes
    turn(scheduler)
    assert 0 < sequences[0].cached < 32
    turn(scheduler, new)
    assert scheduler.stats["begun_again"] == 1
    for sequence, got in zip(sequences, finish(scheduler, *sequences), strict=True):
        assert_same(got, plain({"a": new}, [sequence.request])[0])
        np.testing.assert_array_equal(got.versions, 1)
    assert sequences[1].reused == 31


@pytest.mark.parametrize("late", [False, True])
def test_who_is_paused_is_computed_again_with_the_newest_parameters(old, new, late):
    """Paused before the parameters change, or after it: what is drawn from then on is what the new ones alone say."""
    scheduler = scheduler_of(old)
    (sequence,) = ask(scheduler, Request(PROMPT, (6, 0), 16, "a"))
    turn(scheduler)
    if late:
        turn(scheduler, new)
    scheduler._pause(sequence)
    drawn = sequence.drawn
    turn(scheduler, None if late else new)
    (got,) = finish(scheduler, sequence)
    np.testing.assert_array_equal(got.versions, [0] * 5 + [1] * 11)
    np.testing.assert_allclose(got.log_probs[drawn:], score(new, PROMPT, got.tokens)[drawn:], atol=1e-4)
    np.testing.assert_allclose(got.log_probs[:5], score(old, PROMPT, got.tokens)[:5], atol=1e-4)


def test_many_requests_swaps_and_pauses_lose_nothing(old, new):
    """A pool of a third of what all slots need. Up to the first new token an answer is the one of a scheduler that was never swapped."""
    rng = np.random.default_rng(7)

    def prompt():
        return tuple(int(t) for t in rng.integers(1, 257, rng.integers(1, 33)))

    starts = [prompt() for _ in range(6)]
    requests = [Request(starts[rng.integers(6)] if i % 2 else prompt(), (7, i), int(rng.integers(1, 17)), "a") for i in range(60)]
    still = scheduler_of(old)
    want = finish(still, *ask(still, *requests))
    scheduler, turns = scheduler_of(old, cache_bytes=17 * page_bytes(CONFIG, PAGE)), 0
    sequences = ask(scheduler, *requests)
    while scheduler.busy or scheduler.waiting:
        turns += 1
        turn(scheduler, (new if turns % 14 else old) if turns % 7 == 0 else None)
        pool = scheduler.pools[0]
        owned = {node.page for t in (*scheduler.prefilling, *scheduler.running) for node in t.nodes}
        owned |= {t.source.page for t in scheduler.prefilling if t.source is not None}
        assert pool.owned == len(owned)
        assert not owned & set(pool.free)
        assert len(set(pool.free)) == len(pool.free)
    answers = [sequence.future.result(0) for sequence in sequences]
    mixed = 0
    for got, still, request in zip(answers, want, requests, strict=True):
        assert len(got.tokens) == len(got.versions) == request.max_tokens
        assert (np.diff(got.versions) >= 0).all()
        assert got.version == got.versions[0]
        first = int((got.versions == 0).sum())
        np.testing.assert_array_equal(got.tokens[:first], still.tokens[:first])
        np.testing.assert_allclose(got.log_probs[:first], still.log_probs[:first], atol=1e-4)
        mixed += got.mixed
    assert mixed >= 5
    assert scheduler.stats["paused"] > 0
    assert answers[-1].version >= 2


def test_a_swap_of_one_models_adapters_leaves_the_requests_and_pages_of_another_alone():
    base = jax.tree.map(lambda x: x * 2.0, init_params(SMALL, jax.random.key(0)))
    tuned = {name: attach(base, adapters(seed), LORA) for name, seed in (("a", 1), ("b", 2))}
    requests = [Request(tuple(range(1, 20)), (8, i), 12, name) for i, name in enumerate("ab")]
    still, scheduler = scheduler_of(tuned), scheduler_of(tuned)
    _, want = finish(still, *ask(still, *requests))
    sequences = ask(scheduler, *requests)
    turn(scheduler)
    turn(scheduler, attach(base, adapters(7), LORA))
    changed, same = finish(scheduler, *sequences)
    np.testing.assert_array_equal(changed.versions, [0] * 5 + [1] * 7)
    np.testing.assert_array_equal(same.versions, 0)
    np.testing.assert_array_equal(same.tokens, want.tokens)
    np.testing.assert_allclose(same.log_probs, want.log_probs, atol=1e-4)
    again = finish(scheduler, *ask(scheduler, *(dataclasses.replace(one, seed=(8, 9)) for one in requests)))
    assert [one.reused for one in again] == [0, 18]


@pytest.mark.parametrize(("weight_update", "versions"), [("in_flight", [0] * 5 + [1] * 11), ("blocking", [0] * 16)])
def test_the_engine_swaps_between_two_chunks_or_once_nobody_is_under_way(old, head, weight_update, versions):
    """The callback holds the engine's thread until new parameters have arrived."""
    request, sizes = Request(PROMPT, (9, 0), 16, "a"), dataclasses.replace(SIZES, weight_update=weight_update)
    with Engine({"a": (CONFIG, old)}, jax.random.key(ROOT), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        setting, chunks = threading.Thread(target=engine.set_params, args=("a", head)), []

        def on_tokens(ids):
            chunks.append(ids)
            if len(chunks) == 2:  # the first token, then a chunk
                setting.start()
                while not engine._updates:
                    time.sleep(0.001)

        got = engine.submit(request, on_tokens).result()
        setting.join()
        (after,) = engine.generate_all([request])
    np.testing.assert_array_equal(got.versions, versions)
    assert_same(after, plain({"a": head}, [request])[0])
    if weight_update == "blocking":
        assert_same(got, plain({"a": old}, [request])[0])


def test_a_swap_in_flight_holds_no_more_copies_than_a_drained_one(old, new, monkeypatch):
    """Bytes of all arrays just before the new copy is made and just after it; pages of requests lie in the pool, which is there anyway."""
    moments, real = [], weights.serving_copy

    def live():
        gc.collect()
        return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if x.nbytes}.values())

    def counted(config, mesh):
        def run(params):
            moments.append(live())
            out = real(config, mesh)(params)
            moments.append(live())
            return out

        return run

    scheduler = scheduler_of(old)
    (sequence,) = ask(scheduler, Request(PROMPT, (10, 0), 16, "a"))
    turn(scheduler)
    held, one = live(), sum(x.nbytes for x in jax.tree.leaves(scheduler.weights.params))
    monkeypatch.setattr(weights, "serving_copy", counted)
    turn(scheduler, new)
    assert sequence.versions[-1] == 1
    assert moments == [held - one, held]


def test_what_a_lane_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"EngineConfig.weight_update='soon' is unknown; the ways are blocking, in_flight"):
        EngineConfig(weight_update="soon")
    with pytest.raises(
        ValueError, match=r"weight_update='in_flight' with batch_invariant=True: when parameters arrive would change an answer's bytes"
    ):
        EngineConfig(weight_update="in_flight", batch_invariant=True)
