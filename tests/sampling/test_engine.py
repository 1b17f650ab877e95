"""The engine: every answer is the plain sampler's for that request, whatever else it serves; nothing is lost, doubled or leaked."""

import asyncio
import dataclasses
import functools
import gc
import resource
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import TRAIN, ModelConfig, init_params, param_shardings, score_packed
from marl_llm.sampling import Engine, EngineConfig, EngineError, Request, RequestError, SamplingParams, sample, scheduler, stop_rule
from marl_llm.text import ByteTokenizer
from marl_llm.training import make_mesh

TOKENIZER = ByteTokenizer(("<end>",), ("<end>",))
V, P, R = TOKENIZER.vocab_size, 32, 16
CONFIG = ModelConfig(vocab_size=V, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=4, feed_forward=24)
SIZES = EngineConfig(max_num_seqs=8, prompt_tokens=P, response_tokens=R, decode_steps=4, admit=2, reuse=8)
ROOT = 11
DRAWS = (SamplingParams(), SamplingParams(0.0), SamplingParams(0.8, top_k=20, top_p=0.9))
packed = jax.jit(score_packed, static_argnums=(0, 8))
ROWS, STATES = 16, 8  # of the plain sampler's programs
STOPS = (((), ()), (tuple(range(1, 100)), ()), ((257,), ("e", "th")))


@pytest.fixture(scope="module")
def models():
    """Two models whose distributions are neither flat nor certain."""
    make = jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))
    return {"a": make(jax.random.key(0)), "b": make(jax.random.key(1))}


def start(models, **options):
    options = {"sizes": SIZES, "tokenizers": dict.fromkeys(models, TOKENIZER)} | options
    return Engine({n: (CONFIG, p) for n, p in models.items()}, jax.random.key(ROOT), **options)


@pytest.fixture(scope="module")
def engine(models):
    with start(models) as e:
        yield e


def key_of(seed):
    key = jax.random.key(ROOT)
    for n in seed:
        key = jax.random.fold_in(key, n)
    return key


@functools.partial(jax.jit, static_argnames="settings")
def plain_rows(params, prompt, where, keys, budgets, rule, settings):
    """The plain sampler for `ROWS` requests with any one stop rule: one program per settings serves every test of this file."""
    return sample(CONFIG, params, prompt, where, keys, max_tokens=R, stop=rule, pad_id=0, settings=settings, budgets=budgets)


def rule_of(ids, strings):
    """A stop rule widened to `STATES` states, so that all rules have one shape; nothing leads to the added ones."""
    rule = stop_rule(V, ids, strings, TOKENIZER)
    room = STATES - len(rule.ends)
    return rule._replace(table=np.pad(rule.table, ((0, room), (0, 0))), ends=np.pad(rule.ends, (0, room)))


def plain(models, requests):
    """What the plain sampler gives for each request: (tokens, log-probs, sampled log-probs, stopped)."""
    out, kind_of = [None] * len(requests), lambda r: (r.model, r.settings, r.stop_ids, r.stop_strings)
    for kind in sorted(set(map(kind_of, requests)), key=str):
        model, settings, ids, strings = kind
        mine = [i for i, r in enumerate(requests) if kind_of(r) == kind]
        for rows in (mine[n : n + ROWS] for n in range(0, len(mine), ROWS)):
            prompt, where = np.zeros((ROWS, P), np.int32), np.arange(P)[None].repeat(ROWS, 0) == P - 1
            budgets = np.ones((ROWS, 1), np.int32)
            for n, i in enumerate(rows):
                size = len(requests[i].prompt)
                prompt[n, P - size :], where[n, P - size :], budgets[n] = requests[i].prompt, True, requests[i].max_tokens
            keys = jnp.stack([key_of(requests[i].seed) for i in (*rows, *[rows[0]] * (ROWS - len(rows)))])[:, None]
            got = jax.device_get(plain_rows(models[model], prompt, where, keys, budgets, rule_of(ids, strings), settings))
            for n, i in enumerate(rows):
                real = got.where[n, 0]
                out[i] = (got.tokens[n, 0][real], got.log_probs[n, 0][real], got.sampled_log_probs[n, 0][real], not got.truncated[n, 0])
    return out


def random_requests(n, seed=0, models=("a", "b")):
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        prompt = tuple(int(t) for t in rng.integers(1, 257, rng.integers(1, P + 1)))
        ids, strings = STOPS[rng.integers(len(STOPS))]
        draws = DRAWS[rng.integers(len(DRAWS))]
        budget = int(rng.integers(1, R + 1))
        out.append(Request(prompt, (seed, i), budget, models[rng.integers(len(models))], draws, ids, strings))
    return out


def assert_same(got, want, finish=None):
    tokens, log_probs, sampled, stopped = want
    np.testing.assert_array_equal(got.tokens, tokens)
    # weights changed in their last bit move the least steady of 2,000 answers by 2e-4
    np.testing.assert_allclose(got.log_probs, log_probs, atol=3e-4)
    np.testing.assert_allclose(got.sampled_log_probs, sampled, atol=3e-4)
    assert got.finish == (finish or ("stop" if stopped else "length"))


def test_every_answer_is_the_plain_samplers(engine, models):
    requests = random_requests(60)
    answers = engine.generate_all(requests)
    kinds = set()
    for got, want in zip(answers, plain(models, requests), strict=True):
        assert_same(got, want)
        kinds.add((got.finish, len(got.tokens) == 1))
    assert kinds == {("stop", True), ("stop", False), ("length", True), ("length", False)}
    alone = engine.generate_all(requests[7:8])[0]  # in an empty engine, another slot
    np.testing.assert_array_equal(alone.tokens, answers[7].tokens)


def test_law_2_truncated_draws_come_back_with_what_they_were_drawn_from(models):
    """Answers with kept ids of several widths, mixed with others in the same programs, scored in packed rows."""
    kinds = [SamplingParams.to_train(0.7, 5), SamplingParams(1.3, top_p=0.9, max_kept=16), SamplingParams.to_train(0.9, 12, 0.8)]
    kinds.append(SamplingParams(0.8, 9))
    requests = [Request((*range(30 + i, 40 + i),), (13, i), 9 + i % 5, "a", kinds[i % 4]) for i in range(8)]
    with start({"a": models["a"]}, sizes=dataclasses.replace(SIZES, max_num_seqs=2, admit=1)) as engine:
        answers = engine.generate_all(requests)
        cut = engine.submit(dataclasses.replace(requests[0], timeout=1e-9)).result(60)
    assert (cut.finish, cut.kept_ids.shape, cut.kept_log_mass.shape) == ("timeout", (0, 5), (0,))
    for request, got in zip(requests, answers, strict=True):
        if request.settings.max_kept is None:
            assert got.kept_ids is None
            assert got.kept_log_mass is None
            continue
        assert got.kept_ids.shape == (len(got.tokens), request.settings.max_kept)
        p, n = len(request.prompt), len(got.tokens)
        row = np.zeros((1, 24), np.int32)
        row[0, : p + n] = (*request.prompt, *got.tokens)
        places = np.arange(24)[None]
        predict = np.minimum(p - 1 + np.arange(R), 23)[None]
        targets, ids = np.zeros((1, R), np.int32), np.full((1, R, request.settings.max_kept), -1, np.int32)
        targets[0, :n], ids[0, :n] = got.tokens, got.kept_ids
        here = (places < p + n).astype(np.int32)
        rows = map(jnp.asarray, (row, places.astype(np.int32), here, here * 0, predict.astype(np.int32), targets))
        scored = packed(CONFIG, models[request.model], *rows, request.settings.temperature, kept_ids=jnp.asarray(ids))
        np.testing.assert_allclose(got.sampled_log_probs, scored.log_probs[0, :n], atol=1e-4)
        assert np.isfinite(scored.log_probs).all()


def test_the_next_turn_takes_over_the_keys_of_the_last_and_says_the_same(engine, models):
    """Law 1's prompts extend the ids of the turn before; what is taken over must not change what is said."""
    first = Request((*range(40, 50),), (1, 0), 12, "a")
    answer = engine.generate_all([first])[0]
    for i in range(2):  # others decode meanwhile, all around the ring
        engine.generate_all([Request((200 + i, 201), (1, 9, i), R, "a")])
    again = first.prompt + tuple(int(t) for t in answer.tokens) + (7, 8, 9)
    turns = [Request(again, (1, 1), 10, "a"), Request(again + (3,) * 4, (1, 2), R, "a"), Request(again[:15] + (1, 2), (1, 3), R, "a")]
    for turn in turns:
        got = engine.generate_all([turn])[0]
        assert got.reused >= 15
        assert_same(got, plain(models, [turn])[0])
    assert engine.generate_all([Request(again, (1, 1), 10, "b")])[0].reused == 0  # another model's keys are of no use


def test_branches_of_one_prompt_compute_it_once(engine, models):
    before = engine.stats()["b"]
    requests = [Request((*range(100, 130),), (2, branch), R, "b") for branch in range(6)]
    answers = engine.generate_all(requests)
    for got, want in zip(answers, plain(models, requests), strict=True):
        assert_same(got, want)
    assert sorted(a.reused for a in answers) == [0] + [29] * 5
    assert engine.stats()["b"]["reused_tokens"] - before.get("reused_tokens", 0) == 29 * 5
    assert len({tuple(a.tokens) for a in answers}) > 1


def test_slots_on_two_devices_say_the_same(models):
    requests = random_requests(12, seed=3)
    with start(models, mesh=make_mesh(data=2, devices=jax.devices()[:2])) as wide:
        for got, want in zip(wide.generate_all(requests), plain(models, requests), strict=True):
            assert_same(got, want)


@pytest.mark.parametrize(("ways", "max_num_seqs", "parts"), [(1, 8, 1), (2, 8, 2), (2, 7, 1)])
def test_few_rows_decode_as_few(models, monkeypatch, ways, max_num_seqs, parts):
    """A model that is not small computes 1, an eighth, a quarter, half or all of its slots on each device, as many as the fullest has.
    Where slots do not divide over the devices, each computes all rows."""
    monkeypatch.setattr(scheduler, "SMALL", {"cpu": 0})
    # the short ones all lie on the second device
    requests = [Request(r.prompt, r.seed, (R, 2)[i % 2], "a") for i, r in enumerate(random_requests(8, seed=5))]
    mesh = make_mesh(data=ways, devices=jax.devices()[:ways]) if ways > 1 else None
    with start({"a": models["a"]}, mesh=mesh, sizes=dataclasses.replace(SIZES, max_num_seqs=max_num_seqs)) as engine:
        for few, rows in ((1, parts), (2, 2 if max_num_seqs == 8 else 3), (8, max_num_seqs)):
            before = engine.stats()["a"]
            for got, want in zip(engine.generate_all(requests[:few]), plain(models, requests[:few]), strict=True):
                assert_same(got, want)
            steps, computed = (engine.stats()["a"][name] - before.get(name, 0) for name in ("steps", "slot_steps"))
            assert 0 < parts * steps <= computed <= rows * steps, (few, computed, steps)


def test_new_parameters_serve_the_next_request_and_old_keys_are_dropped(models):
    """Those in slots end with the old ones; those still waiting get the new ones, or a steady stream would put them off for ever."""
    prompt = (*range(40, 70),)  # with the seed 4 one draw lies 6e-7 from a token's border, and falls elsewhere with JAX 0.12
    requests = [Request(prompt, (6, i), 3 + i % 11, "a") for i in range(30)]  # slots never end all at once
    with start({"a": models["a"]}) as engine:
        handles = [engine.submit(r) for r in requests]
        while engine.stats()["a"].get("requests", 0) < 1:
            time.sleep(0.001)
        engine.set_params("a", models["b"])
        handles.append(engine.submit(dataclasses.replace(requests[0], seed=(6, 99))))
        answers = [h.result() for h in handles]
    versions = [a.version for a in answers]
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert versions[29:] == [1, 1]
    assert answers[versions.index(1)].reused == 0
    want = [plain({"a": models[m]}, [*requests, dataclasses.replace(requests[0], seed=(6, 99))]) for m in "ab"]
    for i, got in enumerate(answers):
        assert_same(got, want[got.version][i])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ()}, "a prompt of 0 tokens"),
        ({"prompt": (1,) * (P + 1)}, f"a prompt of {P + 1} tokens; this engine takes 1 to {P}"),
        ({"prompt": (1, V)}, f"vocabulary of model 'a' is 0 to {V - 1}"),
        ({"max_tokens": R + 1}, f"max_tokens={R + 1}; this engine gives 1 to {R}"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"seed": (-1,)}, "identity"),
        ({"seed": (1,) * 9}, "at most 8 numbers"),
        ({"timeout": 0.0}, "timeout"),
        ({"model": "c"}, "no model 'c'; this engine serves a, b"),
        ({"stop_ids": (V,)}, "outside the vocabulary"),
        ({"stop_strings": ("x" * 2000,)}, "2,000 characters together; at most 1,023 bytes are served"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_a_reason(engine, change, message):
    with pytest.raises(RequestError, match=message):
        engine.submit(dataclasses.replace(Request((1, 2), (0,), 4, "a"), **change))


def test_deadlines_and_cancellation_hand_over_what_there_is(models):
    slow = EngineConfig(max_num_seqs=1, prompt_tokens=P, response_tokens=4096, decode_steps=1, admit=1)
    long = Request((5, 6, 7), (5, 0), 4096, "a")
    with start({"a": models["a"]}, sizes=slow) as engine:
        running = engine.submit(long)
        while engine.stats()["a"].get("steps", 0) < 3:
            time.sleep(0.001)
        queued = engine.submit(dataclasses.replace(long, seed=(5, 1), timeout=0.01))
        assert queued.result(60).finish == "timeout"  # while the other still runs: it never had a slot
        assert len(queued.result().tokens) == 0
        running.cancel()
        got = running.result(60)
        assert got.finish == "cancelled"
        assert 3 <= len(got.tokens) < 4096
        limited = engine.submit(dataclasses.replace(long, timeout=0.3)).result(60)
        assert limited.finish == "timeout"
        n = min(len(limited.tokens), len(got.tokens))
        np.testing.assert_array_equal(limited.tokens[:n], got.tokens[:n])


def test_a_full_queue_holds_callers_back(models):
    narrow = EngineConfig(max_num_seqs=1, prompt_tokens=P, response_tokens=R, decode_steps=1, admit=1)
    requests = [Request((9, i + 1), (6, i), R, "a") for i in range(12)]
    with start({"a": models["a"]}, sizes=narrow, queue=2) as engine:
        most = [0]

        async def one(request):
            answer = await engine.generate(request)
            most[0] = max(most[0], int(engine.stats()["engine"]["waiting"]))
            return answer

        async def all_of_them():
            return await asyncio.gather(*map(one, requests))

        answers = asyncio.run(all_of_them())
        assert most[0] <= 2
        for got, want in zip(answers, plain(models, requests), strict=True):
            assert_same(got, want)
        threads = [threading.Thread(target=engine.submit, args=(r,)) for r in requests]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
            assert not t.is_alive()


def test_a_cancelled_task_frees_its_slot(models):
    one = EngineConfig(max_num_seqs=1, prompt_tokens=P, response_tokens=4096, decode_steps=1, admit=1)
    with start({"a": models["a"]}, sizes=one) as engine:

        async def give_up():
            task = asyncio.ensure_future(engine.generate(Request((5, 6), (7, 0), 4096, "a")))
            while engine.stats()["a"].get("steps", 0) < 2:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await engine.generate(Request((5, 6), (7, 1), 2, "a"))

        assert len(asyncio.run(give_up()).tokens) == 2


@pytest.mark.parametrize("mesh", [None, 2])
def test_an_update_may_donate_the_parameters_that_the_engine_was_given(models, mesh):
    mesh = mesh and make_mesh(data=mesh, devices=jax.devices()[:mesh])
    given, request = jax.tree.map(jnp.copy, models["a"]), Request((1, 2, 3), (12, 0), R, "a")
    with start({"a": given}, mesh=mesh) as engine:
        for x in jax.tree.leaves(given):
            x.delete()
        assert_same(engine.generate_all([request])[0], plain(models, [request])[0])


def test_parameters_that_lie_on_many_devices_serve_an_engine_on_one(models):
    split = jax.device_put(models["a"], param_shardings(models["a"], make_mesh(fsdp=2, devices=jax.devices()[:2]), TRAIN))
    request = Request((1, 2, 3), (12, 1), R, "a")
    with start({"a": split}) as engine:
        assert_same(engine.generate_all([request])[0], plain(models, [request])[0])


def test_parameters_of_another_model_are_refused_and_change_nothing(models):
    other = jax.eval_shape(lambda: init_params(dataclasses.replace(CONFIG, feed_forward=25), jax.random.key(0)))
    with start({"a": models["a"]}) as engine:
        with pytest.raises(ValueError, match="gate_up/kernel.*48, 16.*instead|gate_up/kernel.*instead of"):
            engine.set_params("a", other)
        with pytest.raises(ValueError, match="no parameters of a decoder"):
            engine.set_params("a", {"block_0": {}})
        with pytest.raises(RequestError, match="no model 'b'"):
            engine.set_params("b", models["b"])
        request = Request((1, 2, 3), (10, 0), R, "a")
        assert_same(engine.generate_all([request])[0], plain(models, [request])[0])


@pytest.mark.parametrize("where", ["marl_llm.sampling.scheduler.decode", "marl_llm.sampling.scheduler.admit"])
def test_a_failing_device_program_reaches_every_caller(models, monkeypatch, where):
    with start({"a": models["a"]}) as engine:

        def fails(*_, **__):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(where, fails)
        handle = engine.submit(Request((1, 2), (8, 0), R, "a"))
        with pytest.raises(EngineError) as caught:
            handle.result(60)
        assert "device is gone" in str(caught.value.__cause__)
        with pytest.raises(EngineError, match="device is gone"):
            engine.submit(Request((1, 2), (8, 1), R, "a"))


def test_closing_answers_everyone(models):
    engine = start({"a": models["a"]}, sizes=EngineConfig(max_num_seqs=1, prompt_tokens=P, response_tokens=4096, decode_steps=1, admit=1))
    handles = [engine.submit(Request((1, 2), (9, i), 4096, "a")) for i in range(3)]
    engine.close()
    for handle in handles:
        with pytest.raises(EngineError, match="before it answered"):
            handle.result(60)
    with pytest.raises(EngineError, match="has stopped"):
        engine.submit(Request((1, 2), (9, 5), 4, "a"))


def test_stress_two_thousand_requests_with_cancellations_and_deadlines(engine, models):
    """Two models, random lengths, settings and stop rules; nothing lost, nothing leaked, every answer the plain sampler's."""
    requests = random_requests(2000, seed=20)
    engine.generate_all(random_requests(100, seed=21))  # all shapes compiled
    gc.collect()
    live, memory = len(jax.live_arrays()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rng = np.random.default_rng(22)
    fate = rng.choice(["none", "cancel", "timeout"], 2000, p=[0.8, 0.1, 0.1])
    handles = []
    for request, what in zip(requests, fate, strict=True):
        timeout = float(rng.choice([1e-6, 0.05, 0.5])) if what == "timeout" else None
        handles.append(engine.submit(dataclasses.replace(request, timeout=timeout)))
        if what == "cancel" and rng.random() < 0.5:
            handles[rng.integers(len(handles))].cancel()
    for handle, what in zip(handles, fate, strict=True):
        if what == "cancel":
            handle.cancel()
    answers = [h.result(120) for h in handles]
    assert engine.stats()["engine"]["waiting"] == 0
    whole = cut = 0
    for got, want in zip(answers, plain(models, requests), strict=True):
        if got.finish in ("cancelled", "timeout"):
            cut += 1
            np.testing.assert_array_equal(got.tokens, want[0][: len(got.tokens)])
            assert len(got.tokens) <= len(want[0])
        else:
            whole += 1
            assert_same(got, want)
    assert whole > 1000
    assert cut > 50
    gc.collect()
    assert len(jax.live_arrays()) <= live + 40  # the plain sampler's inputs and the stop tables
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 300 * 1024, f"{grown / 1024:.0f} MiB"
