"""Optimizers by name against NumPy in float64, and learning-rate schedules against optax's."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_update import assert_close, assert_same

from marl_llm.models import TRAIN, LoraConfig, ModelConfig, init_params, param_shardings
from marl_llm.models.lora import init_adapters
from marl_llm.models.transformer import stack_layers, unstack_layers
from marl_llm.training import (
    Checkpoints,
    decay_share,
    make_mesh,
    make_optimizer,
    make_train_state,
    scheduled_rate,
    state_bytes,
)  # fmt: skip
from marl_llm.training.train_state import apply_gradient

SHAPE = ModelConfig(
    vocab_size=40, width=36, layers=1, query_heads=3, key_value_heads=1, head_dim=32, feed_forward=48, tie_embeddings=False,
    attention_bias=True, value_head=True,
)  # fmt: skip


def leaves_of(tree):
    """(path, leaf) of each leaf."""
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def leaves(tree):
    """Path -> array."""
    return {path: np.asarray(leaf) for path, leaf in leaves_of(tree)}


def steps_of(optimizer, params, gradients):
    """The updates of several steps at the learning rate 1, as a list of path -> array."""
    take, state, updates = jax.jit(optimizer.update), jax.jit(optimizer.init)(params), []
    for gradient in gradients:
        update, state = take(gradient, state, params)
        updates.append(leaves(update))
    return updates


def random_gradients(params, count):
    rng = np.random.default_rng(0)
    return [jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), params) for _ in range(count)]


def orthogonalised(matrix):
    """Newton-Schulz, quintic, five iterations (Jordan 2024)."""
    x = matrix / (np.linalg.norm(matrix) + 1e-8)
    x = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def muon_steps(gradients, rows):
    """Muon's steps for one leaf, seen as a matrix with so many rows (Liu et al., Algorithm 1, with corrected moments)."""
    mean, steps = 0.0, []
    for t, gradient in enumerate(gradients, 1):
        g = np.asarray(gradient, np.float64).reshape(rows, -1)
        mean = 0.95 * mean + 0.05 * g
        ahead = 0.95 * mean / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        steps.append(-0.2 * np.sqrt(max(g.shape)) * orthogonalised(ahead).reshape(gradient.shape))
    return steps


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


SMALL = {"block_0": {"mlp": {"gate": {"kernel": np.ones((40, 48), np.float32)}}}, "final_norm": {"weight": np.ones(40, np.float32)}}


@functools.cache
def fresh():
    params = jax.jit(functools.partial(init_params, SHAPE))(jax.random.key(0))
    return jax.tree.map(lambda x: np.asarray(x, np.float32), params)


def in_double(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.mark.parametrize("layout", ["apart", "stacked"])
def test_muon_steps_the_matrices_of_layers_as_numpy_does(double, layout):
    weights = in_double(fresh())
    gradients = random_gradients(weights, 2)
    of_leaf = [leaves(gradient) for gradient in gradients]
    stack, unstack = (stack_layers, unstack_layers) if layout == "stacked" else (lambda tree: tree,) * 2
    shape, optimizer = jax.tree.structure(stack(weights)), make_optimizer(max_grad_norm=np.inf, name="muon")
    updates = steps_of(optimizer, stack(weights), [stack(gradient) for gradient in gradients])
    updates = [leaves(unstack(jax.tree.unflatten(shape, list(update.values())))) for update in updates]
    rows = {"query": 36, "key": 36, "value": 36, "output": 3 * 32, "gate": 36, "up": 36, "down": 48}
    matrices = [name for name in updates[0] if name.startswith("block") and name.endswith("/kernel")]
    assert len(matrices) == len(rows)
    for name in matrices:
        for update, want in zip(updates, muon_steps([g[name] for g in of_leaf], rows[name.split("/")[-2]]), strict=True):
            np.testing.assert_allclose(update[name], want, atol=1e-6)


def test_muon_leaves_embeddings_heads_norms_and_biases_to_adam(double):
    params = in_double(fresh())
    gradients = random_gradients(params, 2)
    updates = steps_of(make_optimizer(max_grad_norm=np.inf, name="muon"), params, gradients)
    wanted = steps_of(optax.adamw(1.0, b1=0.9, b2=0.99, weight_decay=0.0, nesterov=True), params, gradients)
    same = {name for name in updates[1] if np.allclose(updates[1][name], wanted[1][name], atol=1e-6)}
    others = {name for name in updates[1] if name.startswith("block") and name.endswith("/kernel")}
    assert same == set(updates[1]) - others
    assert {"embedding", "output", "value_head/kernel", "final_norm/weight"} <= same, sorted(same)


def test_muon_steps_both_matrices_of_adapters():
    adapters = init_adapters(SHAPE, jax.random.key(0), LoraConfig(rank=4))
    adapters = {"block_0": {"attention": {name: adapters["block_0"]["attention"][name] for name in ("query", "key", "output")}}}
    updates = steps_of(make_optimizer(name="muon"), adapters, random_gradients(adapters, 1))[0]
    assert len(updates) == 6
    for name, update in updates.items():
        lengths = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(update.shape)))
        assert lengths.min() > 0.3, name
        assert lengths.max() < 1.3, name


def test_adafactor_divides_by_the_means_of_rows_and_columns_as_numpy_does(double):
    params = in_double({"w": np.ones((40, 32)), "norm": np.ones(40), "narrow": np.ones((40, 31))})
    gradients = random_gradients(params, 3)
    updates = steps_of(make_optimizer(max_grad_norm=np.inf, name="adafactor"), params, gradients)
    rows, columns, whole = 0.0, 0.0, {"norm": 0.0, "narrow": 0.0}
    for t, (gradient, update) in enumerate(zip(gradients, updates, strict=True), 1):
        decay, g = 1 - t**-0.8, {name: np.asarray(x) for name, x in gradient.items()}
        rows = decay * rows + (1 - decay) * (g["w"] ** 2 + 1e-30).mean(1)
        columns = decay * columns + (1 - decay) * (g["w"] ** 2 + 1e-30).mean(0)
        wanted = {"w": g["w"] / np.sqrt(np.outer(rows, columns) / rows.mean())}
        for name in whole:
            whole[name] = decay * whole[name] + (1 - decay) * (g[name] ** 2 + 1e-30)
            wanted[name] = g[name] / np.sqrt(whole[name])
        for name, step in wanted.items():
            np.testing.assert_allclose(update[name], -step / max(1.0, np.sqrt(np.mean(step**2))), atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_law_10_no_optimizer_remembers_a_gradient_that_is_not_finite(name):
    params = SMALL
    optimizer = make_optimizer(name=name, weight_decay=0.1)
    take = jax.jit(lambda state, g: apply_gradient(state, g, jnp.float32(0.1), optimizer))
    good, _ = take(make_train_state(params, optimizer), random_gradients(params, 1)[0])
    for bad in (jnp.nan, jnp.inf):
        kept, norm = take(good, jax.tree.map(functools.partial(jnp.full_like, fill_value=bad), params))
        assert not np.isfinite(norm)
        assert_same(jax.tree.leaves(kept), jax.tree.leaves(good))
    zero, _ = take(good, jax.tree.map(jnp.zeros_like, params))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(zero))


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_weight_decay_is_decoupled_whatever_the_optimizer(name):
    params = {"w": jnp.full((4, 4), 2.0), "norm": jnp.full(4, 2.0)}
    optimizer = make_optimizer(name=name, weight_decay=0.1)
    moved, _ = apply_gradient(make_train_state(params, optimizer), jax.tree.map(jnp.zeros_like, params), 0.5, optimizer)
    np.testing.assert_allclose(moved.params["w"], 2 - 0.5 * 0.1 * 2, rtol=1e-6)
    np.testing.assert_array_equal(moved.params["norm"], params["norm"])


def test_state_bytes_are_those_of_the_state():
    params = fresh()
    sizes = {}
    for name in ("adamw", "muon", "adafactor"):
        optimizer = make_optimizer(name=name)
        sizes[name] = state_bytes(optimizer, params)
        assert sizes[name] == sum(x.nbytes for x in jax.tree.leaves(make_train_state(params, optimizer).opt_state) if x.ndim)
        half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
        assert state_bytes(optimizer, half) == sizes[name]
    whole = sum(x.nbytes for x in jax.tree.leaves(params))
    assert sizes["adamw"] == 2 * (whole - 4)  # the bias of the value head is a number, as the count is
    assert 1.0 * whole < sizes["muon"] < 1.2 * whole
    assert sizes["adafactor"] < 0.2 * whole


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_law_7_an_optimizers_state_comes_back_from_a_checkpoint_as_it_was(name, tmp_path):
    optimizer, (first, second) = make_optimizer(name=name), random_gradients(SMALL, 2)
    take = jax.jit(lambda state, gradient: apply_gradient(state, gradient, jnp.float32(0.1), optimizer)[0])
    kept, fresh_start = take(make_train_state(SMALL, optimizer), first), make_train_state(SMALL, optimizer)
    with Checkpoints(tmp_path) as store:
        store.save(1, {"model": kept}, {})
        back = store.restore(1, {"model": fresh_start})["model"]
    assert jax.tree.structure(back) == jax.tree.structure(kept)
    assert_same(jax.tree.leaves(back), jax.tree.leaves(kept))
    assert_same(jax.tree.leaves(take(back, second)), jax.tree.leaves(take(kept, second)))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_law_5_a_split_model_takes_the_same_step_with_every_optimizer(name):
    weights = {"blocks": stack_layers(fresh())["blocks"]}
    optimizer, gradient, after = make_optimizer(name=name), random_gradients(weights, 1)[0], []
    take = jax.jit(lambda state, gradient: apply_gradient(state, gradient, jnp.float32(0.01), optimizer)[0])
    for axes in ((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(*axes, devices=jax.devices()[: math.prod(axes)])
        start = make_train_state(weights, optimizer)
        places = param_shardings(start, mesh, TRAIN)
        after.append(take(jax.device_put(start, places), jax.device_put(gradient, places.params)))
    assert_close(after[1].params, jax.device_get(after[0].params), atol=3e-6)
    gates = {path: tuple(place.spec) for path, place in leaves_of(places) if path.endswith("gate/kernel")}
    assert len(gates) > 1
    for path, spec in gates.items():
        small = "/v_" in path or (name == "adafactor" and path.endswith("/v/blocks/block/gate/kernel"))
        assert spec == ((None,) * len(spec) if small else (None, "fsdp", "tensor")), path


def test_an_unknown_optimizer_and_schedule_are_named():
    with pytest.raises(ValueError, match="name='sgd' is not one of 'adamw', 'muon', 'adafactor'"):
        make_optimizer(name="sgd")
    with pytest.raises(ValueError, match="schedule='step' is not one of 'constant', 'linear', 'cosine', 'wsd'"):
        decay_share("step", 0.5)


def rates_of(steps, decay, *sizes):
    """The learning rates of so many steps."""
    return np.asarray(jax.vmap(lambda step: scheduled_rate(decay, step, *sizes))(jnp.arange(steps)))


def test_schedules_are_those_of_optax_after_the_warm_up():
    total, warmup, floor, cooldown = 45, 5, 0.05, 0.25
    wanted = {
        "constant": optax.constant_schedule(2.0),
        "linear": optax.linear_schedule(2.0, 2.0 * floor, total - warmup),
        "cosine": optax.cosine_decay_schedule(2.0, total - warmup, alpha=floor),
        "wsd": optax.join_schedules([optax.constant_schedule(2.0), optax.linear_schedule(2.0, 2.0 * floor, 10)], [30]),
    }
    for name, schedule in wanted.items():
        rates = rates_of(60, functools.partial(decay_share, name, cooldown=cooldown), total, 2.0, warmup, floor)
        np.testing.assert_allclose(rates[:warmup], np.arange(1, 6) / 5 * 2.0, rtol=1e-6, err_msg=name)
        wanted_rates = np.broadcast_to(schedule(np.arange(55)), 55)
        np.testing.assert_allclose(rates[warmup:], wanted_rates, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("sizes", [(1, 0), (1, 5), (5, 5)])
def test_a_run_as_short_as_its_warm_up_has_finite_rates(schedule, sizes):
    total, warmup = sizes
    rates = rates_of(8, functools.partial(decay_share, schedule), total, 1.0, warmup, 0.05)
    assert np.all(rates > 0)
    assert np.all(rates <= 1)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.05)
