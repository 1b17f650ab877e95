"""What must not matter does not: order, padding, micro-batches, devices, reward shifts; and what is degenerate is exact."""

import functools

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import marl_llm.algorithms as rl

# One shape for all examples, so that each function compiles once.
SIZE, WIDTH = 12, 4
RECIPES = [rl.make_recipe("grpo"), rl.make_recipe("at_grpo", statistics_weight="trajectory"), rl.make_recipe("magrpo", gamma=0.5),
           rl.make_recipe("mappa"), rl.make_recipe("grpo", advantage_estimator="leave_one_out", returns="trajectory")]  # fmt: skip
by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.name}-{r.advantage_estimator}")
few = settings(max_examples=12, deadline=None)

# Quarters are exact in floating point, so that ties and shifts are exact too.
quarters = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def tables(draw, size=SIZE):
    """Draw a table of samples with arbitrary identities, rewards in quarters and an arbitrary mask."""
    def integers(high):
        return draw(hnp.arrays(np.int32, size, elements=st.integers(0, high)))

    def rewards():
        return draw(hnp.arrays(np.float64, size, elements=quarters))

    return dict(
        instance=integers(1), env=integers(1), agent=integers(1), turn=integers(2), trajectory=integers(3),
        team=rewards(), local=rewards(), where=draw(hnp.arrays(bool, size)), tokens=integers(5) + 1, kl=rewards(),
    )  # fmt: skip


@functools.cache
def compiled(recipe):
    return jax.jit(lambda columns: rl.advantages_for(recipe, rl.Samples(**columns))[0])


def advantages(recipe, columns):
    with jax.enable_x64(True):
        return np.asarray(compiled(recipe)({name: jnp.asarray(value) for name, value in columns.items()}))


@by_name
@few
@given(columns=tables(), seed=st.integers(0, 99))
def test_order_within_the_batch_does_not_matter(recipe, columns, seed):
    order = np.random.default_rng(seed).permutation(SIZE)
    shuffled = {name: value[order] for name, value in columns.items()}
    oracle.close(advantages(recipe, shuffled), advantages(recipe, columns)[order], 1e-10)


@by_name
@few
@given(columns=tables(SIZE - 3))
def test_padding_rows_do_not_matter(recipe, columns):
    def padded(front, back, garbage):
        def pad(x):
            return np.concatenate([np.full(front, garbage, x.dtype), x, np.full(back, garbage, x.dtype)])

        out = {name: pad(value) for name, value in columns.items()}
        out["where"][:front] = False
        out["where"][SIZE - back :] = False
        return out

    with np.errstate(invalid="ignore"):
        left, right = padded(3, 0, 1), padded(1, 2, 7)
    for name in ("team", "local", "kl"):
        left[name][:3] = np.nan
        right[name][-2:] = np.inf
    oracle.close(advantages(recipe, left)[3:], advantages(recipe, right)[1:-2], 1e-10)


@few
@given(columns=tables(), shift=st.integers(-4, 4))
def test_a_constant_reward_shift_within_a_group_does_not_matter(columns, shift):
    recipe = RECIPES[1]
    moved = columns | dict(local=columns["local"] + shift * (1 + columns["env"]))
    oracle.close(advantages(recipe, moved), advantages(recipe, columns), 1e-10)


@by_name
@few
@given(columns=tables(), level=st.sampled_from([0.1, 1 / 3, 1e9]))
def test_equal_rewards_give_exactly_zero(recipe, columns, level):
    same = columns | {name: np.full(SIZE, level) for name in ("team", "local")} | dict(kl=np.zeros(SIZE))
    if recipe.returns in ("to_go", "trajectory"):  # one sample a trajectory: equal rewards are equal returns
        same |= dict(trajectory=np.arange(SIZE, dtype=np.int32))
    np.testing.assert_array_equal(advantages(recipe, same), np.zeros(SIZE))


@few
@given(columns=tables())
def test_advantages_of_a_group_add_up_to_nothing(columns):
    per_row = advantages(RECIPES[0], columns)
    for instance in range(2):
        for agent in range(2):
            rows = columns["where"] & (columns["instance"] == instance) & (columns["agent"] == agent)
            assert abs(per_row[rows].sum()) < 1e-9
    np.testing.assert_array_equal(per_row[~columns["where"]], 0)


matrices = hnp.arrays(np.float64, (SIZE, WIDTH), elements=st.floats(-12, 12))
masks = hnp.arrays(bool, (SIZE, WIDTH))
LOSSES = [rl.make_recipe("at_grpo", kl_coef=0.1, entropy_coef=0.1), rl.make_recipe("magrpo"),
          rl.make_recipe("at_grpo", "released", importance_level="sequence"),
          rl.make_recipe("grpo", loss_aggregation="constant", max_length=9),
          rl.make_recipe("magrpo", "released")]  # fmt: skip
by_loss = pytest.mark.parametrize("recipe", LOSSES, ids=lambda r: f"{r.name}-{r.importance_level}-{r.loss_aggregation}")


@functools.cache
def loss_and_grad(recipe):
    def loss(new, old, reference, per_row, where):
        entropy = jnp.where(where, new, 0) ** 2
        total, count, metrics = rl.loss_for(recipe, new, old, per_row, where=where, entropy=entropy, reference_log_probs=reference)
        return total, (count, metrics)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def run(recipe, *args):
    with jax.enable_x64(True):
        (total, (count, metrics)), grad = loss_and_grad(recipe)(*map(jnp.asarray, args))
    return np.asarray(total), np.asarray(count), np.asarray(grad), {name: np.asarray(pair) for name, pair in metrics.items()}


@by_loss
@few
@given(new=matrices, where=masks, part=hnp.arrays(np.int32, SIZE, elements=st.integers(0, 2)), seed=st.integers(0, 9))
def test_micro_batches_add_up(recipe, new, where, part, seed):
    rng = np.random.default_rng(seed)
    old, reference, per_row = rng.normal(size=(SIZE, WIDTH)), rng.normal(size=(SIZE, WIDTH)), rng.normal(size=SIZE)
    total, count, grad, metrics = run(recipe, new, old, reference, per_row, where)
    pieces = [run(recipe, new, old, reference, per_row, where & (part == p)[:, None]) for p in range(3)]
    oracle.close(sum(piece[0] for piece in pieces), total, 1e-10)
    assert sum(piece[1] for piece in pieces) == count
    oracle.close(sum(piece[2] for piece in pieces), grad, 1e-10)
    for name, pair in metrics.items():
        oracle.close(sum(piece[3][name] for piece in pieces), pair, 1e-10)


@by_loss
@few
@given(new=matrices, where=masks)
def test_masked_tokens_may_hold_anything(recipe, new, where):
    rng = np.random.default_rng(0)
    old, reference, per_row = rng.normal(size=(SIZE, WIDTH)), rng.normal(size=(SIZE, WIDTH)), rng.normal(size=SIZE)
    clean = run(recipe, new, old, reference, per_row, where)
    junk = ((new, np.nan), (old, -np.inf), (reference, np.inf))
    dirty = run(recipe, *(np.where(where, x, value) for x, value in junk), per_row, where)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty)):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(dirty[2][~where], 0)


@by_loss
def test_an_empty_mask_has_a_finite_gradient(recipe):
    nothing = np.zeros((SIZE, WIDTH), bool)
    bad = np.full((SIZE, WIDTH), np.nan)
    total, count, grad, _ = run(recipe, bad, bad, bad, np.zeros(SIZE), nothing)
    assert total == 0
    assert count == 0
    np.testing.assert_array_equal(grad, 0)
    mean = jax.grad(lambda x: rl.reduce(rl.reinforce(x, jnp.ones(SIZE), where=nothing), where=nothing))(jnp.ones((SIZE, WIDTH)))
    np.testing.assert_array_equal(mean, 0)


@few
@given(new=matrices, where=masks)
def test_padding_length_does_not_matter(new, where):
    rng = np.random.default_rng(1)
    old, per_row = rng.normal(size=(SIZE, WIDTH)), rng.normal(size=SIZE)

    def pad(x, value):
        return np.pad(x, ((0, 0), (1, 2)), constant_values=value)

    recipe = LOSSES[1]
    short = run(recipe, new, old, old, per_row, where)
    long = run(recipe, pad(new, np.nan), pad(old, 3.0), pad(old, np.nan), per_row, pad(where, False))
    oracle.close(long[0] / max(long[1], 1), short[0] / max(short[1], 1), 1e-12)
    oracle.close(long[2][:, 1:-2], short[2], 1e-12)


@pytest.mark.parametrize("recipe", RECIPES[2:4], ids=lambda r: r.name)
def test_jit_equals_no_jit(recipe):
    rng = np.random.default_rng(0)
    names = ("instance", "env", "agent", "turn", "trajectory", "tokens")
    columns = {name: rng.integers(0, 3, SIZE).astype(np.int32) for name in names}
    columns |= {name: rng.normal(size=SIZE) for name in ("team", "local", "kl")} | dict(where=rng.random(SIZE) < 0.8)
    with jax.enable_x64(True), jax.disable_jit():
        plain = rl.advantages_for(recipe, rl.Samples(**{name: jnp.asarray(value) for name, value in columns.items()}))[0]
    oracle.close(advantages(recipe, columns), plain, 1e-12)


@pytest.mark.parametrize("recipe", LOSSES[:2], ids=lambda r: r.name)
def test_the_loss_too(recipe):
    new, old = np.random.default_rng(0).normal(size=(2, SIZE, WIDTH))
    where = np.random.default_rng(1).random((SIZE, WIDTH)) < 0.8
    with jax.enable_x64(True), jax.disable_jit():
        plain = rl.loss_for(recipe, new, old, new[:, 0], where=where, entropy=new**2, reference_log_probs=old)
    oracle.close(run(recipe, new, old, old, new[:, 0], where)[0], plain[0], 1e-12)


def test_samples_are_a_pytree():
    columns = {name: jnp.zeros((2, 3), int) for name in ("instance", "env", "agent", "turn", "trajectory")}
    both = rl.Samples(team=jnp.array([[0.0, 1, 2], [5, 5, 9]]), local=jnp.zeros((2, 3)), **columns)
    stacked = jax.vmap(lambda s: rl.advantages_for(rl.make_recipe("grpo"), s)[0])(both)
    alone = rl.advantages_for(rl.make_recipe("grpo"), jax.tree.map(lambda x: x[1], both))[0]
    np.testing.assert_allclose(stacked[1], alone, rtol=1e-6)
    assert jax.eval_shape(lambda: both).team.shape == (2, 3)


class TestDevices:
    """One device and four give the same numbers, inside shard_map with an axis name and under jit with sharded arrays."""

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def table(self):
        rng = np.random.default_rng(3)
        columns = {name: rng.integers(0, 3, 16).astype(np.int32) for name in ("instance", "env", "agent", "turn")}
        columns["trajectory"] = np.repeat(np.arange(4, dtype=np.int32), 4)  # plays stay whole on one device
        columns |= dict(tokens=rng.integers(1, 9, 16).astype(np.int32), where=rng.random(16) < 0.8)
        return columns | {name: rng.normal(size=16) for name in ("team", "local", "kl")}

    @pytest.mark.parametrize("statistics_weight", ["token", "sample", "trajectory"])
    def test_global_statistics_are_those_of_all_devices(self, statistics_weight):
        recipe = rl.make_recipe("mappa", statistics_weight=statistics_weight)
        with jax.enable_x64(True):
            samples = rl.Samples(**{name: jnp.asarray(value) for name, value in self.table().items()})

            def local(s):
                per_row, metrics, _ = rl.advantages_for(recipe, s, axis_name="data")
                return per_row, metrics["return_mean"]

            sharded = jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=Spec("data"), out_specs=(Spec("data"), Spec())))
            per_row, mean = sharded(samples)
            desired, metrics, _ = rl.advantages_for(recipe, samples)
            oracle.close(per_row, desired, 1e-12)
            oracle.close(mean, metrics["return_mean"], 1e-12)

    def test_denominators_are_those_of_all_devices(self):
        rng = np.random.default_rng(0)
        with jax.enable_x64(True):
            x = jnp.asarray(rng.normal(size=(8, 5)))
            where = jnp.asarray(np.arange(5) < rng.integers(0, 6, 8)[:, None])
            for how in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
                def local(x, where, how=how):
                    return rl.reduce(x, where=where, how=how, axis_name="data")

                specs = dict(mesh=self.mesh, in_specs=(Spec("data"), Spec("data")), out_specs=Spec())
                oracle.close(jax.shard_map(local, **specs)(x, where), rl.reduce(x, where=where, how=how), 1e-12)

    def test_sharded_arrays_under_jit(self):
        recipe = rl.make_recipe("at_grpo")
        with jax.enable_x64(True):
            samples = rl.Samples(**{name: jnp.asarray(value) for name, value in self.table().items()})
            desired = rl.advantages_for(recipe, samples)[0]
            spread = jax.device_put(samples, NamedSharding(self.mesh, Spec("data")))
            oracle.close(jax.jit(lambda s: rl.advantages_for(recipe, s)[0])(spread), desired, 1e-12)
