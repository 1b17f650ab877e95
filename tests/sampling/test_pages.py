"""Pages: what is shared is computed once, what does not fit waits or is paused, and no answer depends on it."""

import dataclasses
from concurrent.futures import Future

import jax
import numpy as np
import pytest
from test_engine import CONFIG, TOKENIZER, assert_same, plain

from marl_llm.models import init_params, page_kernel, pages
from marl_llm.sampling import Engine, EngineConfig, Request, RequestError, scheduler
from marl_llm.sampling.model_runner import page_bytes
from marl_llm.sampling.pool import PagePool
from marl_llm.sampling.sequences import SequenceState, next_piece
from marl_llm.sampling.transfer import unpacked
from marl_llm.training import make_mesh

PAGE = 8
CACHE = 17 * page_bytes(CONFIG, PAGE)
SIZES = EngineConfig(
    max_num_seqs=8, prompt_tokens=128, response_tokens=16, decode_steps=4, admit=2, reuse=1, page=PAGE, piece=16, cache_bytes=CACHE
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


@pytest.fixture
def engine(params):
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=SIZES, tokenizers={"a": TOKENIZER}) as engine:
        yield engine


def ids(rng, n):
    return tuple(int(t) for t in rng.integers(1, 257, n))


def pool_of(engine):
    return engine._schedulers["a"].pools[0]


def test_a_small_pool_pauses_requests_and_changes_no_answer(engine, params):
    """Eight rows of up to six pages want 48; there are 17."""
    rng = np.random.default_rng(1)
    requests = [Request(ids(rng, 17 + i % 16), (1, i), 16, "a") for i in range(40)]
    answers = engine.generate_all(requests)
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    stats = engine.stats()["a"]
    assert stats["paused"] > 0
    assert stats["cache_bytes"] == SIZES.cache_bytes
    assert pool_of(engine).owned == 0


def test_nobody_waits_for_pages_that_those_who_decode_will_never_need(params, monkeypatch):
    """A page is all that each request takes, and each of four slots has one."""
    found = []
    real = scheduler.Scheduler.step

    def step(self, now):
        found.append((len(self.waiting), len(self.running)))
        return real(self, now)

    monkeypatch.setattr(scheduler.Scheduler, "step", step)
    sizes = dataclasses.replace(SIZES, max_num_seqs=4, prompt_tokens=4, response_tokens=4, decode_steps=1, cache_bytes=0)
    rng = np.random.default_rng(9)
    requests = [Request(ids(rng, 4), (9, i), 2 + i % 3, "a") for i in range(12)]
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        answers = engine.generate_all(requests)
        assert pool_of(engine).pages == 4
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    assert {running for waiting, running in found if waiting} == {4}


def test_a_conversation_of_eight_turns_computes_each_token_once(engine):
    rng, said = np.random.default_rng(2), ids(np.random.default_rng(3), 11)
    for turn in range(8):
        answer = engine.generate_all([Request(said, (2, turn), 5, "a")])[0]
        said += (*(int(t) for t in answer.tokens), *ids(rng, 3))
    # the first prompt, eight answers and what lies between; the last answer's last token is nobody's past
    assert engine.stats()["a"]["computed_tokens"] == len(said) - 3 - 1


def test_eight_branches_hold_one_copy_of_their_prompt(engine):
    prompt = ids(np.random.default_rng(4), 64)
    answers = engine.generate_all([Request(prompt, (3, branch), 8, "a") for branch in range(8)])
    stats = engine.stats()["a"]
    assert sorted(a.reused for a in answers) == [0] + [63] * 7
    assert stats["computed_tokens"] == 64 + 7 + sum(len(a.tokens) - 1 for a in answers)
    assert stats["most_pages"] <= 64 // PAGE + 8 + 1  # a page each, and one that was copied from
    assert stats.get("paused", 0) == 0


def test_a_long_prompt_enters_in_pieces_and_others_decode_between(engine, params):
    """Eight pieces; a request that decodes meanwhile gets its chunks between them, and the answer is that of one whole pass."""
    rng = np.random.default_rng(5)
    prompt = ids(rng, 120)
    whole = EngineConfig(max_num_seqs=1, prompt_tokens=128, response_tokens=4, decode_steps=4, admit=1)
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=whole) as other:
        want = other.generate_all([Request(prompt, (4, 0), 4, "a")])[0]
    handles = [engine.submit(Request(ids(rng, 5), (4, 1), 16, "a")), engine.submit(Request(prompt, (4, 0), 4, "a"))]
    short, got = (handle.result(60) for handle in handles)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.log_probs, want.log_probs, atol=2e-5)  # doubled weights: up to 1.4e-5 over 24 prompts
    assert len(short.tokens) == 16
    assert engine.stats()["a"]["admit_programs"] >= 8  # the short one enters beside the first piece


def test_a_request_that_can_never_fit_is_refused_at_submission(engine):
    with pytest.raises(RequestError, match="take 18 pages of 8 tokens; the cache has 17"):
        engine.submit(Request((1,) * 125, (5, 0), 16, "a"))
    with pytest.raises(ValueError, match="bytes hold no page"):
        Engine({"a": (CONFIG, init_params(CONFIG, jax.random.key(0)))}, jax.random.key(0), sizes=dataclasses.replace(SIZES, cache_bytes=1))


@pytest.mark.parametrize("run", [1, 2])
def test_a_kernel_reads_the_pages_that_are_listed_for_it(params, monkeypatch, run):
    """Four branches of two prompts, and two requests alone: answers as by loops over smaller pages."""
    monkeypatch.setattr(pages, "by_kernel", lambda attention, page, *sizes: page == 128)
    monkeypatch.setattr(pages, "ENTRY", {1: 128 * run, pages.GROUP: 128 * run})
    calls, real = [], page_kernel.over_lists
    monkeypatch.setattr(page_kernel, "over_lists", lambda *given: calls.append(given[3][0][0].shape[1]) or real(*given))
    rng = np.random.default_rng(6)
    prompts = [ids(rng, n) for n in (300, 256)]
    requests = [Request(prompt, (6, i, k), 6 + k, "a") for i, prompt in enumerate(prompts) for k in range(4)]
    requests += [Request(ids(rng, n), (7, n), 9, "a") for n in (20, 290)]
    sizes = EngineConfig(max_num_seqs=16, prompt_tokens=384, response_tokens=16, decode_steps=3 + run, admit=2, reuse=1, page=128)
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        answers = engine.generate_all(requests)
        assert engine.stats()["a"]["reused_tokens"] >= 3 * (256 + 255)
    assert set(calls) == {run}
    loops = EngineConfig(max_num_seqs=16, prompt_tokens=384, response_tokens=16, decode_steps=4, admit=2, page=16)
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=loops, tokenizers={"a": TOKENIZER}) as engine:
        for got, want in zip(answers, engine.generate_all(requests), strict=True):
            np.testing.assert_array_equal(got.tokens, want.tokens)
            np.testing.assert_allclose(got.log_probs, want.log_probs, atol=2e-5)


def test_a_full_page_that_another_holds_too_is_free_again():
    pool, ids = PagePool(4, 2), np.asarray([1, 2], np.int32)
    first, second = pool.take(), pool.take()
    assert pool.grown(first, pool.root(), ids) is first
    assert pool.grown(second, pool.root(), ids) is first
    assert (first.owners, pool.owned, len(pool.free)) == (2, 1, 3)


def test_a_page_that_somebody_has_yet_to_copy_from_stays_though_another_holds_the_same():
    pool, ids = PagePool(4, 2), np.asarray([1, 2], np.int32)
    first, second = pool.take(), pool.take()
    pool.grown(first, pool.root(), ids)
    pool.grown(second, pool.root(), ids[:1])
    pool.own([second])  # a request that waits with its admission, and begins with ids[:1]
    assert pool.grown(second, pool.root(), ids) is second
    assert (second.owners, pool.owned, second.page in pool.free) == (2, 2, False)
    for _ in range(2):
        pool.release([second])
    pool.release([first])
    assert pool.available == 4


def test_the_page_that_was_given_up_first_is_given_away_first():
    pool = PagePool(2, 2)
    old, new = (pool.grown(pool.take(), pool.root(), np.asarray(ids, np.int32)) for ids in ([1, 2], [3, 4]))
    pool.release([old])
    pool.release([new])
    assert pool.take().page == old.page
    assert pool.find(np.asarray([1, 2], np.int32))[0] == []
    assert pool.find(np.asarray([3, 4], np.int32))[0] == [new]


def test_the_pool_never_gives_a_page_to_two_and_forgets_nothing_that_is_owned():
    """Random sequences over two tokens, so that they often begin alike; some grow, and some pages are to be copied from for a while."""
    rng, pool, held, sources = np.random.default_rng(6), PagePool(40, 4), [], []
    for step in range(3000):
        if sources and rng.random() < 0.3:
            node, beginning = sources.pop(rng.integers(len(sources)))
            np.testing.assert_array_equal(node.tokens[: len(beginning)], beginning)
            pool.release([node])
        for place, (tokens, nodes) in enumerate(held):
            if len(tokens) % 4 and rng.random() < 0.2:
                tokens, first = np.append(tokens, rng.integers(0, 2)).astype(np.int32), 4 * len(nodes) - 4
                nodes[-1] = pool.grown(nodes[-1], nodes[-2] if first else pool.root(), tokens[first:])
                held[place] = tokens, nodes
        if held and (rng.random() < 0.5 or pool.available < 6):
            pool.release(held.pop(rng.integers(len(held)))[1])
            continue
        tokens = rng.integers(0, 2, rng.integers(1, 17)).astype(np.int32)
        chain, last, common = pool.find(tokens)
        for i, node in enumerate(chain):
            np.testing.assert_array_equal(node.tokens, tokens[4 * i : 4 * i + 4])
        if last is not None:
            np.testing.assert_array_equal(last.tokens[:common], tokens[4 * len(chain) :][:common])
            if len(sources) < 6:
                pool.own([last])
                sources.append((last, last.tokens[:common].copy()))
        pool.own(chain)
        nodes = [*chain, *(pool.take() for _ in range(-(-len(tokens) // 4) - len(chain)))]
        for i in range(len(chain), len(nodes)):
            nodes[i] = pool.grown(nodes[i], nodes[i - 1] if i else pool.root(), tokens[4 * i : 4 * i + 4])
        held.append((tokens, nodes))
        living = [node for _, nodes in held for node in nodes] + [node for node, _ in sources]
        owned = {node.page: node for node in living}
        assert pool.owned == len(owned)
        assert len(set(map(id, living))) == len(owned)
        assert not set(pool.free) & set(owned)
        for tokens, nodes in held if step % 50 == 0 else ():
            np.testing.assert_array_equal(np.concatenate([node.tokens for node in nodes]), tokens)
    for nodes in [nodes for _, nodes in held] + [[node] for node, _ in sources]:
        pool.release(nodes)
    assert pool.available == 40


def test_a_beginning_is_looked_for_among_the_latest_pages_and_only_where_it_would_do():
    pool = PagePool(100, 4)
    for i in range(60):
        pool.grown(pool.take(), pool.root(), np.asarray([1, i + 2], np.int32))

    def find(last, **more):
        return pool.find(np.asarray([1, last], np.int32), **more)[1:]

    newest, common = find(61)
    assert (list(newest.tokens), common) == ([1, 61], 2)
    assert find(2)[1] == 1  # there is one that says [1, 2], but it is too long ago
    assert find(61, least=3) == (None, 0)
    assert find(61, model=1) == (None, 0)  # other adapters computed it


@pytest.mark.parametrize("mesh", [None, (2, 2)])
def test_no_program_copies_the_cache(params, monkeypatch, mesh):
    """Both programs read pages and write others in place: what they hold beside their arguments is less than half of them."""
    mesh = mesh and make_mesh(1, *mesh, devices=jax.devices()[:4])
    temporary = {}

    def watch(name, real):
        def watched(*args, **kw):
            temporary[name] = real.lower(*args, **kw).compile().memory_analysis().temp_size_in_bytes
            return real(*args, **kw)

        monkeypatch.setattr(scheduler, name, watched)

    watch("admit", scheduler.admit)
    watch("decode", scheduler.decode)
    large = dataclasses.replace(SIZES, prompt_tokens=8192, cache_bytes=0)
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=large, mesh=mesh) as engine:
        engine.generate_all([Request((1,) * 20, (6,), 2, "a")])
        cache = engine.stats()["a"]["cache_bytes"] / (mesh.size if mesh else 1)
    assert set(temporary) == {"admit", "decode"}
    assert max(temporary.values()) < cache / 2, f"{temporary} bytes; the cache has {cache:,}"


@pytest.mark.parametrize(("running", "rows"), [(1, {1}), (2, {2}), (3, {4})])
def test_a_few_living_requests_are_decoded_as_a_few_rows(params, monkeypatch, running, rows):
    """Of 16 slots, with a model that is not small, an eighth, a quarter, a half, or a single one; the answers are the plain sampler's."""
    monkeypatch.setattr(scheduler, "SMALL", {"cpu": 0.0})
    computed = set()
    real = scheduler.decode

    def watched(config, served, pages, given, *args, layout, **kw):
        row, _ = unpacked(given, layout)
        computed.add(row.token.shape[0])
        return real(config, served, pages, given, *args, layout=layout, **kw)

    monkeypatch.setattr(scheduler, "decode", watched)
    sizes = dataclasses.replace(SIZES, max_num_seqs=16, admit=4, cache_bytes=0)
    rng = np.random.default_rng(8)
    requests = [Request(ids(rng, 9), (8, i), 4, "a") for i in range(running)]
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        answers = engine.generate_all(requests)
    assert computed <= rows | {1}, computed  # who answered is gone before the last chunk
    assert computed & rows
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)


def test_the_branches_of_a_prompt_enter_together_and_long_beginnings_make_short_pieces(params, monkeypatch):
    """As with a model that is not small: two prompts of eight branches, whose ends are one program. Behind a long beginning pieces are
    shorter."""
    monkeypatch.setattr(scheduler, "SMALL", {"cpu": 0.0})
    sizes = dataclasses.replace(SIZES, max_num_seqs=16, admit=1, piece=64, cache_bytes=0)
    rng = np.random.default_rng(7)
    # with the seed 7 one draw lies at a token's border, and falls on its other side with JAX 0.12
    requests = [Request(prompt, (8, i, j), 4, "a") for i, prompt in enumerate((ids(rng, 25), ids(rng, 31))) for j in range(8)]
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        answers = engine.generate_all(requests)
        programs = engine.stats()["a"]["admit_programs"]
    for got, want in zip(answers, plain({"a": params}, requests), strict=True):
        assert_same(got, want)
    assert programs <= 6, f"{programs} programs for two prompts and their branches"
    sequence = SequenceState(requests[0], Future(), engine._schedulers["a"].check(requests[0]), 0.0, size=1000)
    pieces = [next_piece(dataclasses.replace(sequence, cached=n), 256, 1000.0) for n in (0, 400, 600, 990)]
    assert pieces == [256, 256, 128, 10]
    assert next_piece(dataclasses.replace(sequence, size=10**6, cached=10**5), 256, 1000.0) == 64
