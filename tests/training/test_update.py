"""The update: equal to an independent loss, whatever the padding, order and devices (law 5), defined when degenerate (8)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.models import Decoder, ModelConfig, init_params, prompt_mask, prompt_positions
from marl_llm.training import LearnerOptions, Trained, Update, apply_gradient, make_mesh, make_optimizer, make_train_state
from marl_llm.training.batch import Rows, fingerprint, from_pool, pooled
from marl_llm.training.steps import Sums, accumulate, microbatch_size

CONFIG = ModelConfig(vocab_size=17, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
G, P, K, R = 16, 5, 3, 4  # 4 environments, 2 agents, 2 turns
RECIPE = make_recipe("at_grpo", group_size=K, filter_zero_variance=True, loss_aggregation="token_mean", entropy_coef=0.02, temperature=1.3)
CORRECTED = dataclasses.replace(RECIPE, rollout_correction="truncate")  # reads the sampler's log-probs
SGD = optax.sgd(1.0)  # with learning rate 1 the parameters move by the gradient
BOTH = jnp.asarray([True, True])
RATE = jnp.float32(1.0)


@functools.cache
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 1.5, init_params(CONFIG, key)))(jax.random.key(0))


@functools.cache
def unrolled_scores():
    """Log-probs and entropies `[G, K, R]` from K plain causal rows per group, without the packed code."""

    def run(params, rows):
        g, k, r = rows.tokens.shape
        full = jnp.concatenate([jnp.repeat(rows.prompt, k, axis=0), rows.tokens.reshape(g * k, r)], axis=1)
        real = jnp.concatenate([jnp.repeat(rows.prompt_where, k, axis=0), jnp.ones((g * k, r), bool)], axis=1)
        model = Decoder(CONFIG)
        hidden, _ = model.apply({"params": params}, full, prompt_positions(real), prompt_mask(real))
        logits = model.apply({"params": params}, hidden, method="head")[:, -r - 1 : -1] / RECIPE.temperature
        log_softmax = jax.nn.log_softmax(logits)
        log_probs = jnp.take_along_axis(log_softmax, full[:, -r:, None], axis=-1)[..., 0]
        return log_probs.reshape(g, k, r), -jnp.sum(jnp.exp(log_softmax) * log_softmax, -1).reshape(g, k, r)

    return jax.jit(run)


@functools.cache
def make_rows(drift=0.25, full=False):
    """Groups of every kind: short prompts, short responses, equal rewards, and one whose episode was over."""
    rng = np.random.default_rng(0)
    env, agent, turn = (x.reshape(-1) for x in np.meshgrid(np.arange(4), np.arange(2), np.arange(2), indexing="ij"))
    lengths = rng.integers(1, R + 1, (G, K)) if not full else np.full((G, K), R)
    where = np.ones(G, bool)
    team, local = rng.normal(size=(G, K)), rng.normal(size=(G, K))
    if not full:
        where[5] = False
        team[7], local[7] = 0.5, 0.25  # a tied group

    def as_int(x):
        return jnp.asarray(x, jnp.int32)

    rows = Rows(
        prompt=as_int(rng.integers(1, CONFIG.vocab_size, (G, P))),
        prompt_where=jnp.asarray(np.arange(P)[None] >= rng.integers(0, P, (G, 1))),
        tokens=as_int(rng.integers(1, CONFIG.vocab_size, (G, K, R))),
        token_where=jnp.asarray(np.arange(R)[None, None] < lengths[..., None]),
        log_probs=jnp.zeros((G, K, R)),
        team=jnp.asarray(team, jnp.float32),
        local=jnp.asarray(local, jnp.float32),
        instance=as_int(env),
        agent=as_int(agent),
        turn=as_int(turn),
        play=as_int(np.zeros(G)),
        where=jnp.asarray(where),
    )
    drawn = unrolled_scores()(params(), rows)[0] + drift * rng.normal(size=(G, K, R)).astype(np.float32)
    return rows._replace(log_probs=drawn)


@functools.cache
def update_for(devices=1, minibatch=G, recipe=RECIPE, microbatch_tokens=0, epochs=1, mesh=None):
    options = LearnerOptions(recipe, SGD, P + K * R, minibatch, epochs, microbatch_tokens)
    return Update(options, CONFIG, mesh or make_mesh(devices))


def table_of(rows, minibatch=G):
    """Tokens and columns of the rows of a compiled rollout."""
    return from_pool(jax.jit(pooled)(rows), minibatch)


def step(rows, plays=BOTH, rate=RATE, key=0, policy=None, reference=None, **options):
    """(parameters after the update, metrics)"""
    tokens, table = table_of(rows, options.get("minibatch", G))
    start = Trained(make_train_state(params(), SGD) if policy is None else policy)
    trained, metrics = update_for(**options)(start, reference, tokens, table, plays, rate, key)
    return jax.tree.map(np.asarray, trained.policy.params), metrics


def assert_close(got, want, atol=1e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_same(got, want):
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), got, want))


def test_the_step_is_that_of_a_loss_computed_on_plain_rows():
    """AT-GRPO by hand: rewards mixed, centred and scaled per group (ddof 1), a ratio of 1, entropy bonus, mean over tokens."""
    rows = make_rows()
    rewards = np.asarray(RECIPE.alpha * rows.team + rows.local, np.float64)
    spread = rewards.std(-1, ddof=1, keepdims=True)
    advantages = np.where(spread > 0, (rewards - rewards.mean(-1, keepdims=True)) / (spread + 1e-6), 0)
    advantages = jnp.asarray(advantages, jnp.float32)[..., None]
    tied = np.asarray(spread[:, 0] < 1e-12)
    mine = np.asarray(rows.token_where & rows.where[:, None, None])
    useful = jnp.asarray(mine & ~tied[:, None, None])

    def loss(params):
        log_probs, entropy = unrolled_scores()(params, rows)
        ratio = jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))  # the sampler's log-probs play no part
        policy = -ratio * advantages - RECIPE.entropy_coef * entropy
        return jnp.sum(jnp.where(useful, policy, 0.0)) / mine.sum()  # tied groups count in the denominator only

    value, gradient = jax.jit(jax.value_and_grad(loss))(params())
    moved, metrics = step(rows)
    assert_close(moved, jax.tree.map(lambda p, g: p - g, params(), gradient))
    assert metrics["loss"] == pytest.approx(float(value), abs=1e-5)
    assert metrics["grad_norm"] == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-4)
    assert metrics["ratio"] == 1
    assert metrics["clip_low"] + metrics["clip_high"] == 0
    assert tied.sum() == 1
    assert (metrics["groups"], metrics["groups_with_signal"], metrics["updates"]) == (15, 14, 1)
    assert metrics["tied_share"] == pytest.approx(1 / 15)
    assert metrics["mixed_prompt_share"] == 0


def test_rows_of_a_compiled_rollout_have_one_shape_whatever_the_budget_and_the_choice():
    """A prompt with its candidates fills a row; a larger budget would only be padding, and another choice another program."""
    tokens, _ = table_of(make_rows(), 8)
    shapes = {
        tuple(x.shape for x in tokens.pack(chosen, budget, 2) if x is not None)
        for budget in (P + K * R, 256)
        for chosen in (range(3), range(20), range(0, 24, 3))
    }
    assert shapes == {((8, P + K * R),) * 4 + ((8, K * R),) * 3 + ((8, K),) * 3}


@pytest.mark.parametrize("devices", [2, 4])
def test_law_5_the_step_does_not_depend_on_the_number_of_devices(devices):
    """14 groups in four minibatches of at most 4, which do not fill the devices evenly.

    A quarter of the rate, because four steps after each other at 1 make more of rounding, which CPUs do differently, than is asserted.
    """
    one, base = step(make_rows(), minibatch=4, rate=RATE / 4)
    many, metrics = step(make_rows(), devices=devices, minibatch=4, rate=RATE / 4)
    assert_close(many, one)
    assert base["updates"] == 4
    for name, value in base.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(("devices", "tokens"), [(1, 1), (1, 3 * (P + K * R)), (2, 2 * (P + K * R))])
def test_law_5_the_step_does_not_depend_on_the_micro_batches(devices, tokens):
    """14 groups in two minibatches of 7, cut into groups of one, of three or four (the last one ragged), and of two on two devices."""
    whole, base = step(make_rows(), minibatch=8)
    cut, metrics = step(make_rows(), devices=devices, minibatch=8, microbatch_tokens=tokens)
    assert base["updates"] == 2
    assert_close(cut, whole, atol=2e-6)
    for name, value in base.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_micro_batches_are_even_and_hold_whole_rows():
    assert microbatch_size(0, 20, 16) == 16
    assert microbatch_size(1, 20, 16) == 1  # a row is never cut
    assert microbatch_size(100, 20, 16) == 4  # five fit; four micro-batches of four leave no place empty
    assert microbatch_size(100, 20, 7) == 4
    assert microbatch_size(1024, 320, 8) == 2  # three would fit, but leave the last place empty
    assert microbatch_size(10_000, 20, 7) == 7
    assert microbatch_size(40, 20, 16, multiple=4) == 8  # two on each of the four devices that the compiler splits over
    with pytest.raises(ValueError, match="microbatch_tokens=-1"):
        microbatch_size(-1, 20, 16)


def test_micro_batches_without_weight_cost_nothing():
    """A loss that is NaN from the third micro-batch on: it is not run, so the sums stay finite."""

    def loss(params, j):
        value = jnp.where(j < 2, params["w"] * (j + 1), jnp.nan)
        return value, Sums(value, jnp.float32(1.0), {}, jnp.float32(j))

    sums, gradient = jax.jit(lambda n: accumulate(loss, {"w": jnp.float32(2.0)}, n, 5))(jnp.int32(2))
    assert (float(sums.total), float(sums.count), float(sums.gap), float(gradient["w"])) == (6.0, 2.0, 1.0, 3.0)
    empty, gradient = jax.jit(lambda n: accumulate(loss, {"w": jnp.float32(2.0)}, n, 5))(jnp.int32(0))
    assert (float(empty.count), float(gradient["w"])) == (0.0, 0.0)


def test_law_5_every_row_is_stepped_on_exactly_once_per_epoch():
    """With equal minibatches and a tiny rate their gradients add up to that of the whole batch."""
    rows = make_rows(drift=0.0, full=True)
    whole, _ = step(rows)
    rate = 1e-3
    parts, metrics = step(rows, rate=jnp.float32(rate), minibatch=4)
    assert metrics["updates"] == 4
    for before, a, b in zip(*map(jax.tree.leaves, (params(), parts, whole)), strict=True):
        np.testing.assert_allclose((before - a) / (4 * rate), before - b, atol=0.02 * np.abs(before - b).max() + 1e-4)


@pytest.mark.parametrize("skip", [False, True], ids=["tied groups are scored", "tied groups are left out"])
def test_law_5_figures_do_not_depend_on_the_number_of_minibatches(skip):
    """14 or 15 groups of uneven lengths in one minibatch and in four, one group tied, and a sampler that is off."""
    recipe = dataclasses.replace(RECIPE, filter_zero_variance=skip)
    _, base = step(make_rows(), rate=jnp.float32(0), recipe=recipe)
    _, cut = step(make_rows(), rate=jnp.float32(0), recipe=recipe, minibatch=4)
    assert (base.pop("updates"), cut.pop("updates")) == (1, 4)
    for name in set(base) - {"grad_norm", "packing"}:  # of each step, and of its rows
        assert cut[name] == pytest.approx(base[name], rel=1e-5, abs=1e-6), name


def test_law_5_with_tied_groups_left_out_the_gradients_of_minibatches_add_up_to_the_batchs():
    """Groups of uneven lengths, so that the minibatches hold different numbers of tokens."""
    whole, _ = step(make_rows())
    rate = 1e-4
    parts, metrics = step(make_rows(), rate=jnp.float32(rate), minibatch=4)
    assert metrics["updates"] == 4
    for before, a, b in zip(*map(jax.tree.leaves, (params(), parts, whole)), strict=True):
        np.testing.assert_allclose((before - a) / (4 * rate), before - b, atol=0.02 * np.abs(before - b).max() + 1e-4)


def test_law_5_rows_that_do_not_count_do_not_fill_up_the_last_minibatch():
    """14 groups count, so the last of four minibatches has two free places; the row of an episode that was over takes none."""
    rows = make_rows()
    assert not rows.where[5]
    other = rows._replace(tokens=rows.tokens.at[5].set(3), prompt=rows.prompt.at[5].set(2), team=rows.team.at[5].set(50.0))
    assert_same(step(other, minibatch=4)[0], step(rows, minibatch=4)[0])


def test_law_5_the_order_of_rows_and_of_the_minibatch_keys_is_a_matter_of_identity():
    rows = make_rows()
    mixed = jax.tree.map(lambda x: x[np.random.default_rng(1).permutation(G)], rows)
    assert_same(step(mixed, minibatch=4)[0], step(rows, minibatch=4)[0])
    assert not np.array_equal(step(rows, minibatch=4, key=1)[0]["embedding"], step(rows, minibatch=4)[0]["embedding"])


def test_law_5_padding_of_prompts_responses_and_rows_changes_nothing():
    rows = make_rows()
    base, metrics = step(rows)

    def widen(x, left, right, value):
        return jnp.pad(
            x, [(0, 0)] * (x.ndim - 1) + [(left, right)], constant_values=value
        )

    wide = rows._replace(
        prompt=widen(rows.prompt, 3, 0, 7),
        prompt_where=widen(rows.prompt_where, 3, 0, False),
        tokens=widen(rows.tokens, 0, 2, 9),
        token_where=widen(rows.token_where, 0, 2, False),
        log_probs=widen(rows.log_probs, 0, 2, jnp.nan),
    )
    empty = jax.tree.map(lambda x: x[:2], wide)
    empty = empty._replace(where=jnp.zeros(2, bool), instance=empty.instance + 90)
    wide = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), wide, empty)
    padded, more = step(wide)
    assert_close(padded, base)
    for name, value in metrics.items():
        assert more[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_each_model_learns_from_the_agents_that_it_plays_only():
    rows = make_rows()
    only_first = jnp.asarray([True, False])
    base, metrics = step(rows, plays=only_first)
    assert metrics["groups"] == int((rows.where & (rows.agent == 0)).sum())
    others = (rows.agent == 1)[:, None, None]
    foreign = rows._replace(tokens=jnp.where(others, 3, rows.tokens), log_probs=jnp.where(others, -5.0, rows.log_probs))
    assert_same(step(foreign, plays=only_first)[0], base)
    own = rows._replace(tokens=jnp.where(others, rows.tokens, 3))
    assert not np.array_equal(step(own, plays=only_first)[0]["embedding"], base["embedding"])
    idle, metrics = step(rows, plays=jnp.asarray([False, False]))
    assert_same(idle, params())
    assert (metrics["groups"], metrics["updates"]) == (0, 0)


def test_law_2_the_gap_between_sampler_and_scorer_is_measured():
    assert step(make_rows(drift=0.0))[1]["log_prob_gap"] < 1e-5
    rows = make_rows(drift=0.0)
    at = np.argwhere(np.asarray(rows.token_where & rows.where[:, None, None]))[3]
    assert step(rows._replace(log_probs=rows.log_probs.at[tuple(at)].add(0.5)))[1]["log_prob_gap"] == pytest.approx(0.5, abs=1e-3)


def test_law_8_equal_rewards_leave_the_parameters_bit_for_bit_alone_and_are_counted():
    rows = make_rows()
    moved, metrics = step(rows._replace(team=jnp.full((G, K), 0.3), local=jnp.full((G, K), 0.1)))
    assert_same(moved, params())
    assert (metrics["updates"], metrics["groups_with_signal"], metrics["groups"]) == (0, 0, 15)
    assert metrics["tied_share"] == 1
    assert metrics["grad_norm"] == 0
    assert all(np.isfinite(v) for v in metrics.values())


def test_law_8_groups_of_one_teach_nothing_and_are_counted():
    """Here tied groups are not skipped: their gradient is computed, and is exactly zero."""
    recipe = make_recipe("grpo", group_size=2, group_by="instance,agent,turn", returns="immediate")
    rows = make_rows()
    single = rows._replace(**{f: getattr(rows, f)[:, :1] for f in ("tokens", "token_where", "log_probs", "team", "local")})
    moved, metrics = step(single, recipe=recipe)
    assert_same(moved, params())
    assert metrics["groups_of_one"] == 15
    assert metrics["updates"] == 1


def test_law_8_an_empty_mask_is_finite_and_changes_nothing():
    rows = make_rows()
    for empty in (rows._replace(where=jnp.zeros(G, bool)), rows._replace(token_where=jnp.zeros((G, K, R), bool))):
        moved, metrics = step(empty)
        assert_same(moved, params())
        assert all(np.isfinite(v) for v in metrics.values())


def test_law_10_a_gradient_that_is_not_finite_changes_nothing_and_shows():
    rows = make_rows()
    at = np.argwhere(np.asarray(rows.token_where & rows.where[:, None, None]))[0]
    moved, metrics = step(rows._replace(log_probs=rows.log_probs.at[tuple(at)].set(jnp.nan)), recipe=CORRECTED)
    assert_same(moved, params())
    assert not np.isfinite(metrics["grad_norm"])


def test_law_10_the_optimizers_memory_survives_a_gradient_that_is_not_finite():
    optimizer = make_optimizer(max_grad_norm=1.0, weight_decay=0.1)
    take = jax.jit(lambda policy, g: apply_gradient(policy, g, jnp.float32(0.1), optimizer))
    start = make_train_state({"w": jnp.arange(4.0)}, optimizer)
    good, norm = take(start, {"w": jnp.full(4, 3.0)})
    assert float(norm) == pytest.approx(6.0)  # before clipping
    for bad in (jnp.nan, jnp.inf):
        kept, norm = take(good, {"w": jnp.asarray([1.0, bad, 1.0, 1.0])})
        assert not np.isfinite(norm)
        assert_same(jax.tree.leaves(kept), jax.tree.leaves(good))
    after, _ = take(good, {"w": jnp.ones(4)})
    assert not np.array_equal(after.params["w"], good.params["w"])


def test_adam_takes_its_first_step_against_the_gradient_by_the_learning_rate():
    optimizer = make_optimizer()
    start, gradient = make_train_state({"w": jnp.zeros(3)}, optimizer), {"w": jnp.asarray([2.0, -0.1, 0.0])}
    policy, _ = apply_gradient(start, gradient, jnp.float32(0.01), optimizer)
    np.testing.assert_allclose(policy.params["w"], [-0.01, 0.01, 0.0], rtol=1e-4)


def test_a_policy_owns_a_copy_of_its_parameters():
    source = {"w": jnp.ones(3)}
    policy = make_train_state(source, make_optimizer())
    jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(policy)
    np.testing.assert_array_equal(source["w"], 1.0)


def test_the_fingerprint_of_a_prompt_is_blind_to_padding_and_to_nothing_else():
    rng = np.random.default_rng(4)
    n = 4000
    prompt = rng.integers(0, 4, (n, P))
    where = np.arange(P)[None] >= rng.integers(0, P, (n, 1))
    prints = np.asarray(jax.jit(fingerprint)(jnp.asarray(prompt, jnp.int32), jnp.asarray(where)))
    contents = [tuple(p[w]) for p, w in zip(prompt, where, strict=True)]
    for one in prints:  # either half alone
        assert len(set(one.tolist())) == len(set(contents)) > 500
        assert len(set(zip(contents, one.tolist(), strict=True))) == len(set(contents))
    assert not np.array_equal(prints[0], prints[1])


def test_columns_of_a_compiled_rollout_mean_what_the_table_says():
    rows = make_rows()
    tokens, table = table_of(rows)
    np.testing.assert_array_equal(table.instance, np.repeat(rows.instance, K))
    np.testing.assert_array_equal(table.agent, np.repeat(rows.agent, K))
    np.testing.assert_array_equal(table.team, np.asarray(rows.team).reshape(-1))
    np.testing.assert_array_equal(table.tokens, np.asarray(rows.token_where).sum(-1).reshape(-1))
    assert len(set(table.env.tolist())) == G  # the state of each prompt, which its K candidates share
    np.testing.assert_array_equal(table.env, np.repeat(table.env[::K], K))
    np.testing.assert_array_equal(table.trajectory, table.instance)  # one play of each
    np.testing.assert_array_equal(table.order, 2 * table.turn + table.agent)


def test_two_plays_of_an_instance_never_share_a_prompt_state():
    rows = make_rows()._replace(play=jnp.asarray(np.arange(G) % 2, jnp.int32), turn=jnp.zeros(G, jnp.int32))
    _, table = table_of(rows)
    assert len(set(zip(table.env.tolist(), table.instance.tolist()))) == 16
    assert len(set(table.trajectory.tolist())) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(minibatch=0), "minibatch=0 must be at least 1"),
        (dict(epochs=0), "epochs=0"),
        (dict(row_tokens=0), "row_tokens=0"),
        (dict(microbatch_tokens=-3), "microbatch_tokens=-3 must be 0"),
        (dict(critic="both"), "critic='both' is unknown; the kinds are own, head, centralised"),
    ],
)
def test_law_10_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LearnerOptions(RECIPE, SGD, **(dict(row_tokens=8, minibatch=4) | options))


def test_truncated_responses_leave_the_loss_and_its_denominator_and_stay_in_their_groups():
    rows = make_rows()._replace(truncated=jnp.asarray(np.random.default_rng(3).random((G, K)) < 0.3))
    recipe = dataclasses.replace(RECIPE, mask_truncated=True)
    rewards = np.asarray(RECIPE.alpha * rows.team + rows.local, np.float64)
    spread = rewards.std(-1, ddof=1, keepdims=True)
    advantages = jnp.asarray(np.where(spread > 0, (rewards - rewards.mean(-1, keepdims=True)) / (spread + 1e-6), 0), jnp.float32)
    counted = np.asarray(rows.token_where & rows.where[:, None, None] & ~rows.truncated[..., None])
    useful = jnp.asarray(counted & (spread > 1e-12)[..., None])

    def loss(params):
        log_probs, entropy = unrolled_scores()(params, rows)
        policy = -jnp.exp(log_probs - jax.lax.stop_gradient(log_probs)) * advantages[..., None] - RECIPE.entropy_coef * entropy
        return jnp.sum(jnp.where(useful, policy, 0.0)) / counted.sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params())
    moved, metrics = step(rows, recipe=recipe)
    assert_close(moved, jax.tree.map(lambda p, g: p - g, params(), gradient))
    assert metrics["loss"] == pytest.approx(float(value), abs=1e-5)
    assert metrics["masked_truncated"] == pytest.approx(np.mean(np.asarray(rows.truncated)[np.asarray(rows.where)]))
    with pytest.raises(ValueError, match="mask_truncated=True: the table needs its column truncated"):
        step(make_rows(), recipe=recipe)
    nothing, metrics = step(rows._replace(truncated=jnp.ones((G, K), bool)), recipe=recipe)
    assert metrics["updates"] == 0
    assert_same(nothing, jax.tree.map(np.asarray, params()))
