"""Chunked log-probs: the numbers and gradients of the naive form, at a fraction of its memory; the vocabulary stays sharded."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from test_files import BASE, SHAPES, params_of

from marl_llm.models import (
    RULES,
    TRAIN,
    frozen_head,
    log_probs,
    param_shardings,
    place,
    score_hidden,
    score_responses,
    stack_layers,
    unstack_layers,
    use_rules,
)

compiled_log_probs = jax.jit(log_probs, static_argnums=0)


def naive(weight, hidden, targets, temperature=1.0):
    logits = jax.nn.log_softmax((hidden @ weight).astype(jnp.float32) / temperature, axis=-1)
    return jnp.take_along_axis(logits, targets[..., None], -1)[..., 0], -jnp.sum(jnp.exp(logits) * logits, -1)


@pytest.mark.parametrize("chunk", [1, 4, 5, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_any_chunk_gives_the_naive_values_and_gradients(chunk, temperature):
    rng = np.random.default_rng(0)
    weight, hidden = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 33), (2, 3, 7, 6)))
    targets = jnp.asarray(rng.integers(0, 33, (2, 3, 7)), jnp.int32)
    mix = jnp.asarray(rng.normal(size=(2, 2, 3, 7)), jnp.float32)

    def loss(f, weight, hidden):
        a, b = f(weight, hidden)
        return jnp.sum(a * mix[0] + b * mix[1])

    def f(w, h):
        return tuple(score_hidden(w, h, targets, temperature, chunk))

    def g(w, h):
        return naive(w, h, targets, temperature)

    for a, b in zip(f(weight, hidden), g(weight, hidden), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for a, b in zip(*(jax.jit(jax.grad(lambda *x, f=f: loss(f, *x), (0, 1)))(weight, hidden) for f in (f, g)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", [0.0, 0.7])
def test_a_frozen_head_gives_the_naive_values_and_gradients(temperature, entropy, monkeypatch):
    monkeypatch.setattr(frozen_head, "CPU_BLOCK", 5)
    rng = np.random.default_rng(0)
    head, hidden = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((33, 6), (2, 9, 6)))
    targets = jnp.asarray(rng.integers(0, 33, (2, 9)), jnp.int32)
    where = jnp.arange(9) < jnp.asarray([[3], [0]])  # two blocks of four have nothing that counts
    mix = jnp.asarray(rng.normal(size=(2, 2, 9)), jnp.float32)

    def loss(f, hidden):
        log_probs, entropies = f(hidden)
        total = jnp.sum(jnp.where(where, log_probs * mix[0], 0))
        return (total + entropy * jnp.sum(jnp.where(where, entropies * mix[1], 0)) if entropy else total), (log_probs, entropies)

    def ours(x):
        return frozen_head.score_frozen(head, x, targets, temperature, where)

    def theirs(x):
        return naive(head.T, x, targets, temperature)

    (gradient, scores), (wanted, all_scores) = (
        jax.jit(jax.grad(functools.partial(loss, f), has_aux=True))(hidden) for f in (ours, theirs)
    )
    np.testing.assert_allclose(gradient, wanted, atol=2e-6)
    for out, plain, wanted in zip(scores, ours(hidden), all_scores, strict=True):
        np.testing.assert_allclose(out[where], wanted[where], atol=2e-6)
        np.testing.assert_array_equal(out, plain)
        assert not np.any(out[1, 1:]), "a block without anything that counts was computed"


def test_a_frozen_head_refuses_to_be_differentiated():
    with pytest.raises(ValueError, match="use score_hidden"):
        jax.grad(lambda head: jnp.sum(frozen_head.score_frozen(head, jnp.ones((2, 6)), jnp.asarray([0, 1])).log_probs))(jnp.ones((9, 6)))


@pytest.mark.parametrize("chunk", [2, 4, 6])
def test_chunks_of_padding_alone_are_not_computed(chunk):
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.normal(size=(6, 33)), jnp.float32)
    hidden, targets = rng.normal(size=(2, 8, 6)).astype(np.float32), jnp.asarray(rng.integers(0, 33, (2, 8)), jnp.int32)
    where = np.arange(8) < np.asarray([[3], [0]])
    hidden[:, -1] = np.nan  # in a chunk of padding

    def loss(hidden, where=None):
        out = score_hidden(weight, hidden, targets, chunk=chunk, where=where)
        return jnp.sum(jnp.where(jnp.arange(8) < jnp.asarray([[3], [0]]), out.log_probs + out.entropy, 0.0))

    out = score_hidden(weight, jnp.asarray(hidden), targets, chunk=chunk, where=jnp.asarray(where))
    np.testing.assert_allclose(out.log_probs[0, :3], naive(weight, hidden, targets)[0][0, :3], atol=1e-5)
    np.testing.assert_array_equal(out.log_probs[:, -1], 0.0)
    found = jax.jit(jax.grad(loss))(jnp.asarray(hidden), jnp.asarray(where))
    wanted = jax.grad(loss)(jnp.nan_to_num(jnp.asarray(hidden)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_chunks_are_of_one_size():
    """400 targets in chunks of at most 170 are three of 134, not two of 170 and one of 60 that is filled up."""
    rows = jax.make_jaxpr(lambda h: score_hidden(jnp.zeros((2, 3)), h, jnp.zeros((1, 400), jnp.int32), chunk=170))(jnp.zeros((1, 400, 2)))
    assert "f32[3,1,134,2]" in str(rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_d8_padding_changes_no_score_and_the_first_real_token_has_none(side):
    tokens = jnp.asarray([[3, 5, 7, 11]], jnp.int32)
    padding, real = jnp.full((1, 2), 9, jnp.int32), jnp.ones((1, 4), bool)

    def join(pad, x):
        return jnp.concatenate([pad, x] if side == "left" else [x, pad], axis=1)

    alone = compiled_log_probs(BASE, params_of(BASE), tokens)
    padded = compiled_log_probs(BASE, params_of(BASE), join(padding, tokens), join(padding < 0, real))
    for whole, part in zip(padded, alone, strict=True):
        np.testing.assert_allclose(whole[:, 2:] if side == "left" else whole[:, :4], part, atol=1e-6)
        np.testing.assert_array_equal(whole[:, :2] if side == "left" else whole[:, 4:], 0.0)
    assert float(alone.log_probs[0, 0]) == 0.0


def test_the_scores_of_all_next_tokens_are_one_distribution():
    rows = jnp.asarray([[3, 5, token, 7] for token in range(BASE.vocab_size)], jnp.int32)
    scores = compiled_log_probs(BASE, params_of(BASE), rows).log_probs
    np.testing.assert_allclose(jnp.sum(jnp.exp(scores[:, 2])), 1.0, rtol=1e-5)
    assert len(np.unique(np.round(scores[:, 1], 5))) == 1  # of the one token 5


def test_extreme_logits_stay_finite():
    weight = jnp.asarray([[1e4, -1e4, 0.0]])
    out = score_hidden(weight, jnp.ones((2, 1)), jnp.asarray([0, 1]))
    np.testing.assert_allclose(out.log_probs, [0.0, -2e4])
    np.testing.assert_allclose(out.entropy, [0.0, 0.0], atol=1e-6)


def test_the_peak_at_a_real_vocabulary_is_an_eighth_of_the_naive_one():
    """Compiled, not run: V = 151,936, L = 4,096."""
    shapes = [jax.ShapeDtypeStruct(s, t) for s, t in (((64, 151_936), jnp.float32), ((1, 4096, 64), jnp.float32), ((1, 4096), jnp.int32))]

    def peak(f):
        def loss(w, h, t):
            return sum(jnp.sum(x) for x in f(w, h, t))

        return jax.jit(jax.grad(loss, (0, 1))).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    ours, theirs = peak(score_hidden), peak(naive)
    assert theirs > 4096 * 151_936 * 4
    assert ours <= theirs / 8


def mesh_of(data, fsdp, tensor):
    devices = np.asarray(jax.devices()[: data * fsdp * tensor]).reshape(data, fsdp, tensor)
    return Mesh(devices, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


CONFIG = dataclasses.replace(BASE, attention_bias=True, output_bias=True, tie_embeddings=False, attention="chunked")


@pytest.mark.parametrize(("rules", "config"), [*((rules, CONFIG) for rules in RULES), ("train", SHAPES["gemma3"])])
def test_eight_devices_give_the_numbers_of_one_under_every_rule_table(rules, config):
    rng = np.random.default_rng(0)
    prompt, responses = (jnp.asarray(rng.integers(0, 24, s), jnp.int32) for s in ((4, 5), (4, 2, 3)))
    where = jnp.asarray(np.arange(5)[None] >= np.asarray([0, 1, 4, 2])[:, None])
    params = stack_layers(params_of(config))

    def run(params, prompt, where, responses):
        def loss(p):
            s = score_responses(config, p, prompt, where, responses)
            return jnp.sum(s.log_probs) + 0.1 * jnp.sum(s.entropy), s

        return jax.value_and_grad(loss, has_aux=True)(params)

    (one, scores), gradient = jax.jit(run)(params, prompt, where, responses)
    mesh = mesh_of(2, 2, 2)
    placed = place(params, mesh, RULES[rules])
    by_row = jax.sharding.NamedSharding(mesh, P(("data", "fsdp")))
    rows = [jax.device_put(x, by_row) for x in (prompt, where, responses)]
    with use_rules(mesh, RULES[rules]):
        (many, scores8), gradient8 = jax.jit(run, out_shardings=((None, None), param_shardings(params, mesh, RULES[rules])))(placed, *rows)
    np.testing.assert_allclose(one, many, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), scores, scores8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-5), gradient, jax.device_get(gradient8))


def test_the_vocabulary_stays_sharded_over_tensor():
    """No array of a chunk's whole logits `[.., V]` exists on any device."""
    config = dataclasses.replace(CONFIG, vocab_size=4096)
    mesh = mesh_of(1, 2, 4)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params_of(config),
        param_shardings(params_of(config), mesh, TRAIN),
    )
    assert shapes["output"].sharding.spec == P("fsdp", "tensor")
    tokens = jax.ShapeDtypeStruct((4, 8), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, P("fsdp")))
    with use_rules(mesh, TRAIN):
        def loss(p, t):
            return jnp.sum(log_probs(config, p, t).log_probs)

        text = jax.jit(jax.grad(loss)).lower(shapes, tokens).compile().as_text()
    shaped = re.findall(r"f32\[([\d,]+)\]", text)
    last = [tuple(map(int, s.split(","))) for s in shaped]
    assert any(s[-1] == 1024 and len(s) >= 2 for s in last)
    assert not [s for s in last if s[-1] == 4096 and len(s) >= 3]


def test_every_leaf_of_every_shape_has_logical_axes():
    from test_files import SHAPES

    mesh = mesh_of(1, 2, 4)
    for config in SHAPES.values():
        for params in (params_of(config), *([stack_layers(params_of(config))] if config.uniform else [])):
            specs = jax.tree.leaves(param_shardings(params | {}, mesh, TRAIN))
            assert any("tensor" in str(s.spec) for s in specs)
            assert any("fsdp" in str(s.spec) for s in specs)
    critic = params_of(BASE) | {"value_head": {"kernel": jnp.zeros(16), "bias": jnp.zeros(())}}
    assert param_shardings(critic, mesh, TRAIN)["value_head"]["bias"].spec == P()
    with pytest.raises(ValueError, match="no logical axes"):
        param_shardings({"odd": jnp.zeros((2,))}, mesh, TRAIN)


def test_a_moved_model_is_the_same_model():
    mesh = mesh_of(2, 2, 2)
    placed = place(params_of(BASE), mesh, TRAIN)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), jax.device_get(placed), params_of(BASE))
    assert unstack_layers(placed) is placed


def kept_ids_of(rng, targets, v, most):
    """Ids in any order with the target among them, some of fewer than `most`, one position with none."""
    out = np.full((*targets.shape, most), -1, np.int32)
    for i in np.ndindex(targets.shape):
        others = rng.permutation(np.setdiff1d(np.arange(v), targets[i]))[: rng.integers(0, most)]
        ids = rng.permutation(np.append(others, targets[i]))
        out[i][: len(ids)] = ids
    out[0, 0, 3] = -1
    return out


@pytest.mark.parametrize("chunk", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_over_kept_ids_are_the_renormalised_ones_in_any_chunk(chunk, temperature):
    rng = np.random.default_rng(1)
    weight, hidden = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 33), (2, 3, 7, 6)))
    targets = rng.integers(0, 33, (2, 3, 7)).astype(np.int32)
    ids = kept_ids_of(rng, targets, 33, 9)
    mask = np.zeros((2, 3, 7, 34), bool)
    np.put_along_axis(mask, np.where(ids < 0, 33, ids), True, -1)
    mask = mask[..., :33] | (ids < 0).all(-1)[..., None]  # no ids: nothing was left out

    def plain(weight, hidden):
        logits = jnp.where(mask, (hidden @ weight) / temperature, -1e30)
        out = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(mask, jnp.exp(out) * out, 0.0), -1)
        return jnp.take_along_axis(out, targets[..., None], -1)[..., 0], entropy

    mix = jnp.asarray(rng.normal(size=(2, 2, 3, 7)), jnp.float32)

    def ours(w, h):
        return tuple(score_hidden(w, h, jnp.asarray(targets), temperature, chunk, jnp.asarray(ids)))

    results = []
    for f in (ours, plain):
        def loss(*x, f=f):
            return sum(jnp.sum(a * m) for a, m in zip(f(*x), mix, strict=True))

        results.append(jax.jit(lambda *x, f=f, loss=loss: (f(*x), jax.grad(loss, (0, 1))(*x)))(weight, hidden))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_kept_tokens_that_have_become_unlikely_are_still_compared_among_themselves():
    """Under the policy that is trained the kept tokens may lie 1e4 below the likeliest one, far past what exp can hold."""
    weight, ids = jnp.asarray([[-1e4, -1e4, 1e4]]), jnp.asarray([[0, 1], [0, -1]])

    def score(w):
        return jnp.sum(score_hidden(w, jnp.ones((2, 1)), jnp.asarray([0, 0]), kept_ids=ids).log_probs)

    out, slope = jax.value_and_grad(score)(weight)
    np.testing.assert_allclose(out, -np.log(2), rtol=1e-6)
    np.testing.assert_allclose(slope, [[0.5, -0.5, 0.0]], atol=1e-6)


def test_a_target_outside_of_its_kept_ids_is_impossible():
    out = score_hidden(jnp.zeros((1, 4)), jnp.ones((2, 1)), jnp.asarray([0, 3]), kept_ids=jnp.asarray([[0, 1, -1], [0, 1, 2]]))
    np.testing.assert_allclose(out.log_probs, [-np.log(2), -np.inf], rtol=1e-6)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_d8_the_first_real_token_of_a_row_gets_no_score_wherever_padding_ends(start):
    """Nothing real predicts it: the position before it is padding, and padding attends to nothing."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 24, (1, 7)), jnp.int32)
    where = jnp.arange(7)[None] >= start
    scores = compiled_log_probs(BASE, params_of(BASE), tokens, where)
    for x in scores:
        np.testing.assert_array_equal(np.asarray(x[0]) != 0, np.arange(7) > start)


def test_log_probs_have_forward_derivatives_and_hessian_vector_products():
    ids = jnp.asarray(np.random.default_rng(0).integers(1, BASE.vocab_size, (2, 6)), jnp.int32)
    params = params_of(BASE)
    direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)

    def total(params):
        where = jnp.ones(ids.shape, bool)
        return jnp.sum(score_responses(BASE, params, ids[:, :3], where[:, :3], ids[:, None, 3:]).log_probs)

    def inner(a, b):
        return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

    @jax.jit
    def derivatives(params):
        _, forward = jax.jvp(total, (params,), (direction,))
        gradient, curved = jax.jvp(jax.grad(total), (params,), (direction,))
        twice = jax.grad(lambda p: inner(jax.grad(total)(p), direction))(params)
        return forward, *(inner(x, direction) for x in (gradient, curved, twice))

    forward, gradient, curved, twice = derivatives(params)
    np.testing.assert_allclose(forward, gradient, rtol=1e-4)
    np.testing.assert_allclose(curved, twice, rtol=1e-3)
