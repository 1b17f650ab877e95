"""Adapters of several models on one base: one scheduler serves them all, and each answers as its merged form does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.models import LoraConfig, ModelConfig, attach, init_adapters, init_params, merge, stack_layers
from marl_llm.sampling import Engine, EngineConfig, Request
from marl_llm.sampling.requests import SamplingParams

CONFIG = ModelConfig(vocab_size=48, width=16, layers=2, query_heads=4, key_value_heads=2, head_dim=4, feed_forward=24)
LORA = LoraConfig(rank=4, alpha=8.0)
SIZES = EngineConfig(max_num_seqs=4, prompt_tokens=32, response_tokens=8, decode_steps=4, admit=2, reuse=4)


def adapters(seed):
    """Adapters that change what is drawn."""
    made = init_adapters(CONFIG, jax.random.key(seed), LORA)

    def noise(path, x):
        return x + 0.5 * jax.random.normal(jax.random.fold_in(jax.random.key(seed + 100), len(str(path))), x.shape)

    return jax.tree_util.tree_map_with_path(noise, made)


@pytest.fixture(scope="module")
def base():
    return jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def tuned():
    return {"a": adapters(1), "b": adapters(2)}


def together(base, tuned, sizes=SIZES, **options):
    return Engine({n: (CONFIG, attach(base, x, LORA)) for n, x in tuned.items()}, jax.random.key(3), sizes=sizes, **options)


def merged(base, tuned):
    return Engine({n: (CONFIG, merge(base, x, LORA)) for n, x in tuned.items()}, jax.random.key(3), sizes=SIZES)


def requests(count, seed=0, most=32):
    rng = np.random.default_rng(seed)

    def ids():
        return tuple(int(t) for t in rng.integers(1, 48, rng.integers(1, most)))

    def sample_token(i):
        return SamplingParams(0.0) if i % 5 == 0 else SamplingParams()

    return [Request(ids(), (seed, i), int(rng.integers(1, 9)), "ab"[int(rng.integers(2))], sample_token(i)) for i in range(count)]


def same(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=5e-4)  # weights changed in their last bit move some by 3e-4


def test_each_model_answers_as_its_merged_form(base, tuned):
    asked = requests(40)
    prompt = asked[0].prompt[:12] + tuple(range(1, 12))
    asked += [Request(prompt, (9, i), 8, "ab"[i % 2]) for i in range(8)]  # one prompt, two models: nobody may take over the other's keys
    with merged(base, tuned) as apart:
        want = apart.generate_all(asked)
    with together(base, tuned) as one:
        assert one._schedulers["a"] is one._schedulers["b"]
        assert one._schedulers["a"].sizes.max_num_seqs == 2 * SIZES.max_num_seqs
        same(one.generate_all(asked), want)
        same([one.generate_all([asked[i]])[0] for i in range(4)], want[:4])  # alone
        held = one._schedulers["a"].weights.params
        assert sum(x.size for x in jax.tree.leaves(held["base"])) == CONFIG.parameters  # the base once
    assert any(not np.array_equal(want[-8 + i].tokens, want[-7 + i].tokens) for i in range(0, 8, 2))  # the models differ


def places(tree):
    """Where a tree's arrays lie in memory."""
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("exact", [False, True], ids=["lists", "exact"])
def test_stacked_layers_are_read_where_they_lie_and_answer_alike(base, tuned, exact):
    """Prompts in pieces and behind pages that others computed, many and few rows, and new adapters for one model and for the other."""
    sizes = dataclasses.replace(SIZES, batch_invariant=exact, piece=0 if exact else 8)
    stacked, new, asked = stack_layers(base), adapters(7), requests(30)
    prompt = tuple(range(1, 30))
    asked += [Request(prompt, (9, i), 8, "ab"[i % 2]) for i in range(6)]
    with together(base, tuned, sizes) as apart, together(stacked, tuned, sizes) as one:
        assert places(one._schedulers["a"].weights.params["base"]) == places(stacked)
        assert one.stats()["a"]["cache_bytes"] == apart.stats()["a"]["cache_bytes"]
        first = apart.generate_all(asked)
        same(one.generate_all(asked), first)
        for name in "ab":
            apart.set_params(name, attach(base, new, LORA))
            one.set_params(name, attach(stacked, new, LORA))
            want = apart.generate_all(asked)
            same(one.generate_all(asked), want)
        assert any(not np.array_equal(x.tokens, y.tokens) for x, y in zip(first, want))


def test_a_base_without_adapters_is_read_where_it_lies(base):
    """Its layers stacked or apart; other parameters of the same layout may take its place."""
    asked = [Request(x.prompt, x.seed, x.max_tokens, "a", x.settings) for x in requests(12)]
    other = jax.tree.map(lambda x: x * 1.5, base)
    with Engine({"a": (CONFIG, base)}, jax.random.key(3), sizes=SIZES) as plain:
        want = plain.generate_all(asked)
        plain.set_params("a", other)
        changed = plain.generate_all(asked)
    for layout in (lambda x: x, stack_layers):
        params = {"base": layout(base), "lora": {}}
        with Engine({"a": (CONFIG, params)}, jax.random.key(3), sizes=SIZES) as engine:
            same(engine.generate_all(asked), want)
            engine.set_params("a", {"base": layout(other), "lora": {}})
            same(engine.generate_all(asked), changed)
            with pytest.raises(ValueError, match="its layers were given (stacked|apart): give them so again"):
                engine.set_params("a", {"base": base if layout is stack_layers else stack_layers(base), "lora": {}})
            with pytest.raises(ValueError, match="of the new parameters do not fit"):
                engine.set_params("a", {"base": layout(base) | {"embedding": base["embedding"][:9]}, "lora": {}})


def test_stacked_and_other_lanes_do_not_share_a_pool(base, tuned):
    models = {"a": attach(base, tuned["a"], LORA), "b": attach(stack_layers(base), tuned["b"], LORA)}
    sizes = dataclasses.replace(SIZES, block_pool="shared")
    with Engine({n: (CONFIG, p) for n, p in models.items()}, jax.random.key(3), sizes=sizes) as engine:
        assert engine._schedulers["a"].store is not engine._schedulers["b"].store
        with merged(base, tuned) as apart:
            same(engine.generate_all(asked := requests(8)), apart.generate_all(asked))


def test_a_swap_exchanges_one_models_adapters(base, tuned):
    new, asked = adapters(7), [Request(tuple(range(1, 20)), (i,), 8, name) for i in range(4) for name in "ab"]
    with merged(base, tuned) as before, merged(base, {"a": tuned["a"], "b": new}) as after:
        old, want = before.generate_all(asked), after.generate_all(asked)
    with together(base, tuned) as one:
        same(one.generate_all(asked), old)
        one.set_params("b", attach(base, new, LORA))
        got = one.generate_all(asked)
        same(got, want)
        assert [c.version for c in got] == [0, 1] * 4
        one.set_params("a", attach(base, new, LORA))
        assert {c.version for c in one.generate_all(asked)} == {1}
    assert any(not np.array_equal(x.tokens, y.tokens) for x, y in zip(old[1::2], want[1::2]))


def test_what_cannot_be_served_together_is_not(base, tuned):
    copy = jax.tree.map(jnp.copy, base)
    models = {"a": attach(base, tuned["a"], LORA), "b": attach(copy, tuned["b"], LORA)}
    small = init_adapters(CONFIG, jax.random.key(1), LoraConfig(rank=2))
    models["c"] = attach(base, small, LoraConfig(rank=2))
    with Engine({n: (CONFIG, p) for n, p in models.items()}, jax.random.key(3), sizes=SIZES) as engine:
        assert len({id(scheduler) for scheduler in engine._schedulers.values()}) == 3
    with together(base, tuned) as one:
        with pytest.raises(ValueError, match="model 'b' is adapters on a base that others share"):
            one.set_params("b", attach(copy, tuned["b"], LORA))
        with pytest.raises(ValueError, match="model 'b' is adapters on a base that others share"):
            one.set_params("b", merge(base, tuned["b"], LORA))
        with pytest.raises(ValueError, match="of the new parameters do not fit"):
            one.set_params("b", attach(base, small, LoraConfig(rank=2)))
        assert one.generate_all(requests(2))[0].version == 0
