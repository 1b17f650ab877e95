"""The packed update and the tree rows of device games take the step of plain unrolled rows, for every recipe (law 5)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_update import CONFIG, SGD, G, K, assert_close, assert_same, make_rows, params, step, table_of

from marl_llm.algorithms import Samples, advantages_for, loss_for, make_recipe
from marl_llm.models import Decoder, packed, prompt_mask, prompt_positions
from marl_llm.training import LearnerOptions, PackingError, TokenSample, Trained, Update, make_mesh, make_train_state
from marl_llm.training.mesh import accepted, update_options
from marl_llm.training.packing import RowShape, Tokens

P_MAX, R_MAX = 6, 5
RELEASED = ("at_grpo", "magrpo", "dr_mas", "mappa")
# The other recipes are these with other numbers in their fields; their objectives are checked in tests/algorithms.
STEPPED = ("grpo", "at_grpo", "magrpo", "dr_mas", "mappa")
PRESETS = [(name, "paper") for name in STEPPED] + [(name, "released") for name in RELEASED]
BOTH = np.asarray([True, True])


def recipe_of(name, preset):
    options = {"group_size": 2} if name != "mappa" else {}
    return make_recipe(name, preset, **options)


@functools.cache
def reference():
    return jax.tree.map(lambda x: x * 0.9 + 0.01, params())


@functools.cache
def make_samples():
    """Four environments, two agents, two turns, 1 to 3 samples of each, of uneven lengths; in most slots they share their prompt."""
    rng = np.random.default_rng(3)
    samples, table = [], []

    def ids(n):
        return rng.integers(1, CONFIG.vocab_size, n)

    for env in range(4):
        for agent in range(2):
            for turn in range(2):
                shared = ids(rng.integers(1, P_MAX + 1))
                for k in range(rng.integers(1, 4)):
                    prompt = shared if turn == 0 or env % 2 else ids(rng.integers(1, P_MAX + 1))
                    r = rng.integers(1, R_MAX + 1)
                    samples.append(TokenSample(prompt, ids(r), rng.normal(-2.5, 0.3, r), f"{env}.{agent}.{turn}.{k}"))
                    table.append((env, agent, turn, 4 * env + k, *rng.normal(size=2), abs(rng.normal())))
    env, agent, turn, trajectory, team, local, kl = map(np.asarray, zip(*table, strict=True))
    team[:3], local[:3] = 0.5, 0.25

    def as_float(x):
        return x.astype(np.float32)

    return samples, Samples(
        instance=env, env=env, agent=agent, turn=turn, trajectory=trajectory, team=as_float(team), local=as_float(local), kl=as_float(kl)
    )


def padded(samples):
    """Plain rows `[S, P + R]`, prompts padded on the left, and what is real in each part."""
    n = len(samples)
    prompt, response = np.zeros((n, P_MAX), np.int32), np.zeros((n, R_MAX), np.int32)
    prompt_where, where, drawn = np.zeros((n, P_MAX), bool), np.zeros((n, R_MAX), bool), np.zeros((n, R_MAX), np.float32)
    for i, s in enumerate(samples):
        prompt[i, P_MAX - s.prompt.size :], prompt_where[i, P_MAX - s.prompt.size :] = s.prompt, True
        response[i, : s.response.size], where[i, : s.response.size], drawn[i, : s.response.size] = s.response, True, s.log_probs
    return prompt, prompt_where, response, where, drawn


@functools.partial(jax.jit, static_argnums=4)
def unrolled(params, prompt, prompt_where, response, temperature):
    """Log-probs and entropies `[S, R]` from plain causal rows, without the packed code."""
    full = jnp.concatenate([prompt, response], axis=1)
    real = jnp.concatenate([prompt_where, jnp.ones(response.shape, bool)], axis=1)
    hidden, _ = Decoder(CONFIG).apply({"params": params}, full, prompt_positions(real), prompt_mask(real))
    r = response.shape[1]
    log_softmax = jax.nn.log_softmax((hidden @ params["embedding"].T)[:, -r - 1 : -1] / temperature)
    return jnp.take_along_axis(log_softmax, response[..., None], axis=-1)[..., 0], -jnp.sum(jnp.exp(log_softmax) * log_softmax, -1)


def plain_step(recipe, samples, table):
    """Loss and gradient of the whole table on plain rows: the definition."""
    *rows, where, drawn = padded(samples)
    lengths = where.sum(1)
    advantages, _, _ = advantages_for(recipe, Samples(**(vars(table) | {"tokens": lengths})))
    ref = unrolled(reference(), *rows, recipe.temperature)[0] if recipe.kl_coef and recipe.kl_where == "loss" else None

    def loss(scores):
        old = jax.lax.stop_gradient(scores[0])
        total, count, _ = loss_for(recipe, scores[0], old, advantages, where=where, entropy=scores[1], reference_log_probs=ref)
        return total / count

    scores, back = jax.vjp(lambda p: unrolled(p, *rows, recipe.temperature), params())
    value, slope = jax.jit(jax.value_and_grad(loss))(scores)
    return float(value), back(slope)[0]


@functools.cache
def packed_for(recipe, devices=1, lora=None, **options):
    settings = dict(row_tokens=32, minibatch=100) | options
    return Update(LearnerOptions(recipe, SGD, **settings), CONFIG, make_mesh(devices), lora)


def in_one_shape(samples, minibatch):
    """The samples as they are; where they are cut into minibatches, with rows of one shape, as these tests wait for compilation."""
    return samples if minibatch is None else dataclasses.replace(Tokens.of(samples), shape=RowShape(8, 32, 24, 16))


def packed_step(recipe, samples, table, plays=BOTH, seed=0, kl_coef=None, **options):
    samples = in_one_shape(samples, options.get("minibatch"))
    ref = reference() if recipe.kl_coef else None
    start = Trained(make_train_state(params(), SGD))
    trained, metrics = packed_for(recipe, **options)(start, ref, samples, table, plays, jnp.float32(1.0), seed, kl_coef=kl_coef)
    return jax.tree.map(np.asarray, trained.policy.params), metrics


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_law_5_packed_rows_take_the_step_of_unrolled_rows(name, preset):
    recipe = recipe_of(name, preset)
    value, gradient = plain_step(recipe, *make_samples())
    moved, metrics = packed_step(recipe, *make_samples(), microbatch_tokens=64)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert scale > 1e-3
    assert_close(jax.tree.map(lambda a, b: a - b, params(), moved), gradient, atol=1e-5 * max(1.0, scale))
    assert metrics["loss"] == pytest.approx(value, rel=1e-5, abs=1e-5)
    assert metrics["updates"] == 1
    assert 0.5 < metrics["packing"] <= 1


@pytest.mark.parametrize(("name", "preset"), [("at_grpo", "paper"), ("magrpo", "paper")])  # what a recipe changes is tested above
def test_law_5_tree_rows_take_the_step_of_unrolled_rows(name, preset):
    """The update of device games on the same footing, in micro-batches."""
    recipe = recipe_of(name, preset)
    if recipe.kl_where == "reward" and recipe.kl_coef:
        recipe = make_recipe(name, preset, kl_coef=0.0)
    rows = make_rows()
    samples, kept = [], []
    for g, k in np.ndindex(G, K):
        if rows.where[g]:
            r = int(rows.token_where[g, k].sum())
            samples.append(TokenSample(rows.prompt[g][rows.prompt_where[g]], rows.tokens[g, k, :r], rows.log_probs[g, k, :r]))
            kept.append(g * K + k)
    table = jax.tree.map(lambda x: x[np.asarray(kept)], table_of(rows)[1])
    value, gradient = plain_step(recipe, samples, table)
    moved, metrics = step(rows, recipe=recipe, microbatch_tokens=80, reference=reference() if recipe.kl_coef else None)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    assert_close(jax.tree.map(lambda a, b: a - b, params(), moved), gradient, atol=1e-5 * max(1.0, scale))
    assert metrics["loss"] == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_law_5_budget_micro_batch_order_and_devices_change_nothing():
    recipe = recipe_of("at_grpo", "paper")
    samples, table = make_samples()
    base, figures = packed_step(recipe, samples, table, minibatch=5)
    assert figures["updates"] > 2
    mixed = np.random.default_rng(5).permutation(len(samples))
    turned = [samples[i] for i in mixed], Samples(**{n: x[mixed] for n, x in vars(table).items() if x is not None})
    assert_same(packed_step(recipe, *turned, minibatch=5)[0], base)  # order is a matter of identity
    for options in (dict(row_tokens=11), dict(devices=2, microbatch_tokens=1)):
        moved, metrics = packed_step(recipe, samples, table, minibatch=5, **options)
        assert_close(moved, base, atol=1e-5 * max(float(np.abs(x).max()) for x in jax.tree.leaves(base)))
        for name in set(figures) - {"packing"}:
            assert metrics[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-5), (name, options)
    assert not np.array_equal(packed_step(recipe, samples, table, minibatch=5, seed=1)[0]["embedding"], base["embedding"])


@pytest.mark.parametrize("name", ["at_grpo", "grpo", "magrpo"])
def test_each_minibatch_has_the_advantages_of_its_own_samples(name):
    """One prompt per step: an index into another minibatch's advantages would agree with itself in every other test."""
    recipe = recipe_of(name, "paper")
    samples, table = make_samples()
    *rows, where, drawn = padded(samples)
    advantages = np.asarray(advantages_for(recipe, Samples(**(vars(table) | {"tokens": where.sum(1)})))[0])
    ref = unrolled(reference(), *rows, recipe.temperature)[0] if recipe.kl_coef and recipe.kl_where == "loss" else None
    prompts = [sample.prompt.tobytes() for sample in samples]
    parts = [np.flatnonzero([one == prompt for one in prompts]) for prompt in dict.fromkeys(prompts)]

    def loss(scores):
        sums = [
            loss_for(recipe, scores[0][i], jax.lax.stop_gradient(scores[0][i]), advantages[i], where=where[i], entropy=scores[1][i],
                     reference_log_probs=None if ref is None else ref[i])[:2]
            for i in parts
        ]  # fmt: skip
        totals, counts = zip(*sums)
        return sum(total / count for total, count in sums), sum(totals) / sum(counts)

    scores, back = jax.vjp(lambda p: unrolled(p, *rows, recipe.temperature), params())
    (_, mean), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(scores)
    update, ref_params = packed_for(recipe, minibatch=1), reference() if recipe.kl_coef else None

    def step(rate):
        return update(Trained(make_train_state(params(), SGD)), ref_params, in_one_shape(samples, 1), table, BOTH, jnp.float32(rate), 0)

    _, metrics = step(0.0)
    assert metrics["updates"] == len(parts)
    assert metrics["loss"] == pytest.approx(float(mean), rel=1e-4, abs=1e-5)
    gradient = back(slope)[0]
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient))
    rate = 1e-4 / max(1, scale)  # so small that the order of the steps does not matter
    moved, _ = step(rate)
    assert_close(jax.tree.map(lambda a, b: (a - b) / rate, params(), moved.policy.params), gradient, atol=0.05 * scale)


def test_each_model_learns_from_the_agents_that_it_plays_and_tied_groups_can_be_left_out():
    recipe = make_recipe("at_grpo", group_size=2, filter_zero_variance=True, loss_aggregation="token_mean")
    samples, table = make_samples()
    first = np.asarray([True, False])
    base, metrics = packed_step(recipe, samples, table, plays=first)
    foreign = [
        TokenSample(s.prompt, s.response, s.log_probs - 3.0) if a == 1 else s for s, a in zip(samples, table.agent, strict=True)
    ]
    assert_same(packed_step(recipe, foreign, table, plays=first)[0], base)
    assert metrics["groups_with_signal"] < metrics["groups"]
    # tied groups still count in the denominator: the loss is the mean over all tokens that are played
    mine = np.flatnonzero(table.agent == 0)
    part = Samples(**{n: x[mine] for n, x in vars(table).items() if x is not None})
    everything = make_recipe("at_grpo", group_size=2, loss_aggregation="token_mean")
    value, gradient = plain_step(everything, [samples[i] for i in mine], part)
    assert metrics["loss"] == pytest.approx(value, rel=1e-5, abs=1e-5)
    assert_close(jax.tree.map(lambda a, b: a - b, params(), base), gradient)


def test_law_8_nothing_to_learn_from_changes_nothing_and_has_all_figures():
    recipe = recipe_of("at_grpo", "paper")
    samples, table = make_samples()
    _, usual = packed_step(recipe, samples, table)
    moved, metrics = packed_step(recipe, samples, table, plays=np.asarray([False, False]))
    assert_same(moved, params())
    assert set(metrics) == set(usual)
    assert (metrics["updates"], metrics["groups"], metrics["loss"]) == (0, 0, 0.0)
    aborted = Samples(**(vars(table) | {"where": np.zeros(len(samples), bool)}))
    assert_same(packed_step(recipe, samples, aborted)[0], params())


def test_law_2_the_gap_between_sampler_and_scorer_is_measured():
    recipe = recipe_of("at_grpo", "paper")
    samples, table = make_samples()
    *rows, _, _ = padded(samples)
    exact = np.asarray(unrolled(params(), *rows, 1.0)[0])
    honest = [TokenSample(s.prompt, s.response, exact[i, : s.response.size]) for i, s in enumerate(samples)]
    assert packed_step(recipe, honest, table)[1]["log_prob_gap"] < 1e-5
    off = honest[3].log_probs.copy()
    off[-1] += 0.5
    honest[3] = TokenSample(honest[3].prompt, honest[3].response, off)
    assert packed_step(recipe, honest, table)[1]["log_prob_gap"] == pytest.approx(0.5, abs=1e-3)


def test_b10_the_gap_between_sampler_and_scorer_is_corrected_where_the_recipe_says_so():
    """The sampler's log-probs are off by a known amount per sample: the weight is their exponential, capped."""
    samples, table = make_samples()
    *rows, where, _ = padded(samples)
    exact = np.asarray(unrolled(params(), *rows, 1.0)[0])
    off = np.linspace(-0.5, 1.5, len(samples), dtype=np.float32)
    told = [TokenSample(s.prompt, s.response, exact[i, : s.response.size] - off[i]) for i, s in enumerate(samples)]
    recipe = make_recipe(
        "grpo", group_size=2, rollout_correction="truncate", rollout_correction_threshold=2.0, loss_aggregation="token_mean"
    )
    moved, metrics = packed_step(recipe, told, table, microbatch_tokens=64)
    advantages = np.asarray(advantages_for(recipe, Samples(**(vars(table) | {"tokens": where.sum(1)})))[0])
    weight = np.minimum(np.exp(off), 2.0)[:, None]

    def loss(p):
        ratio = jnp.exp(unrolled(p, *rows, 1.0)[0] - exact)
        return -jnp.sum(weight * ratio * advantages[:, None], where=where) / where.sum()

    assert_close(jax.tree.map(lambda a, b: a - b, params(), moved), jax.grad(loss)(params()))
    assert metrics["corrected"] == pytest.approx(where[off > np.log(2.0)].sum() / where.sum(), abs=1e-5)
    assert metrics["sampler_gap"] == pytest.approx((np.abs(off)[:, None] * where).sum() / where.sum(), rel=1e-3)


def test_only_the_tokens_of_the_highest_entropy_are_in_the_policy_term():
    """The threshold is that of the whole step, however it is cut."""
    samples, table = make_samples()
    *rows, where, _ = padded(samples)
    recipe = make_recipe("grpo", group_size=2, entropy_quantile=0.25, loss_aggregation="token_mean")
    entropy = np.asarray(unrolled(params(), *rows, 1.0)[1])
    kept = where & (entropy >= np.quantile(entropy[where], 0.75))
    advantages = np.asarray(advantages_for(recipe, Samples(**(vars(table) | {"tokens": where.sum(1)})))[0])[:, None]

    def loss(p):
        log_probs = unrolled(p, *rows, 1.0)[0]
        ratio = jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))
        return -jnp.sum(ratio * advantages, where=kept) / where.sum()

    for options in (dict(), dict(microbatch_tokens=1)):
        moved, metrics = packed_step(recipe, samples, table, **options)
        assert_close(jax.tree.map(lambda a, b: a - b, params(), moved), jax.grad(loss)(params()))
        assert metrics["left_out"] == pytest.approx(1 - kept.sum() / where.sum(), abs=1e-5)


def test_beta_is_what_the_caller_says_in_the_loss_and_in_the_reward():
    samples, table = make_samples()
    for where, kind in (("loss", "k3"), ("reward", "k1")):
        weak, strong = (make_recipe("grpo", group_size=2, kl_coef=beta, kl_where=where, kl_kind=kind) for beta in (0.1, 0.7))
        bare = dataclasses.replace(table, kl=None)
        steered = packed_step(weak, samples, bare, kl_coef=0.7)[0]
        assert_close(steered, packed_step(strong, samples, bare)[0], atol=1e-6)
        assert not np.allclose(steered["embedding"], packed_step(weak, samples, bare)[0]["embedding"], atol=1e-4)


def test_law_10_what_cannot_be_done_is_told():
    recipe = recipe_of("at_grpo", "paper")
    samples, table = make_samples()
    with pytest.raises(PackingError, match=r"tokens, more than a row's 5: raise row_tokens"):
        packed_step(recipe, samples, table, row_tokens=5)
    with pytest.raises(ValueError, match=r"3 token samples, but the table's column 'instance' has shape"):
        packed_step(recipe, samples[:3], table)
    with pytest.raises(ValueError, match=r"Trained\.critic is given exactly where"):
        packed_step(make_recipe("ppo"), samples, table)
    for options in (dict(row_tokens=0), dict(minibatch=0), dict(epochs=0), dict(microbatch_tokens=-1)):
        with pytest.raises(ValueError, match=next(iter(options))):
            packed_for(recipe, **options)


def test_every_head_is_told_which_targets_are_padding(monkeypatch):
    """Rows have room for as many targets as tokens; what a head is not told to leave out, it computes."""
    told = []

    def spy(*given, where=None, **more):
        told.append(where)
        return score_hidden(*given, where=where, **more)

    score_hidden = packed.score_hidden
    monkeypatch.setattr(packed, "score_hidden", spy)
    packed_for.cache_clear()
    packed_step(make_recipe("grpo", kl_coef=0.1, kl_where="loss", group_size=2), *make_samples(), minibatch=5)
    packed_for.cache_clear()
    assert len(told) >= 3  # the policy, the reference, and the scores of later minibatches
    assert all(where is not None for where in told)


def test_updates_of_large_models_leave_products_to_eigen(monkeypatch):
    large = dataclasses.replace(CONFIG, vocab_size=2**20, width=64)
    assert update_options(CONFIG) == {}
    (option,) = update_options(large)
    assert update_options(large)[option] == ""
    assert accepted("xla_cpu_no_such_option", "") == {}
    product = jax.jit(lambda a, b: jnp.max(a @ b, axis=1), compiler_options=update_options(large))
    assert "ynn" not in product.lower(jnp.ones((196, 576)), jnp.ones((576, 4096))).compile().as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert update_options(large) == {}
