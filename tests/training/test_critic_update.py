"""PPO with a critic: equal to GAE loops and clipped losses written out on plain rows, whatever the cut (law 5), and over own rows only."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_packed_update import in_one_shape, make_samples, padded, reference, unrolled
from test_update import CONFIG, SGD, assert_close, assert_same, params

from marl_llm.algorithms import Samples, make_recipe
from marl_llm.models import Decoder, LoraConfig, prompt_mask, prompt_positions
from marl_llm.training import LearnerOptions, TokenSample, Trained, Update, make_mesh, make_optimizer, make_train_state, with_value_head
from marl_llm.training.update import explained_variance

CRITIC = dataclasses.replace(CONFIG, value_head=True)
SHARP = dict(dual_clip=1.2, value_clip=0.01, gamma=0.9, gae_lambda=0.8, temperature=1.2)
OWN = make_recipe("ppo", **SHARP)
CHARGED = make_recipe("ppo", kl_coef=0.2, kl_where="reward", kl_kind="k2", **SHARP)
# its two losses have denominators of their own
SHARED = make_recipe(
    "ppo", loss_aggregation="sequence_mean_token_mean", kl_coef=0.1, kl_kind="k3", value_coef=0.7, entropy_coef=0.01, **SHARP
)
FIRST = np.asarray([True, False])
RATES = jnp.float32(0.1), jnp.float32(0.1)


@functools.cache
def critic_params():
    out = with_value_head(jax.tree.map(lambda x: x * 1.1, params()))
    out["value_head"] = {"kernel": 0.3 * jax.random.normal(jax.random.key(2), (CONFIG.width,)), "bias": jnp.float32(0.1)}
    return out


@jax.jit
def unrolled_values(params, prompt, prompt_where, response):
    """Values `[S, R]` of the states in which tokens were chosen, from plain causal rows."""
    full = jnp.concatenate([prompt, response], axis=1)
    real = jnp.concatenate([prompt_where, jnp.ones(response.shape, bool)], axis=1)
    hidden, _ = Decoder(CONFIG).apply({"params": params}, full, prompt_positions(real), prompt_mask(real))
    return (hidden @ params["value_head"]["kernel"] + params["value_head"]["bias"])[:, -response.shape[1] - 1 : -1]


def gae_by_hand(recipe, samples, rewards, values, charge):
    """(whitened advantages, targets) `[S, R]`, a loop over the tokens of each call."""
    advantages, targets = np.zeros(values.shape), np.zeros(values.shape)
    for i, s in enumerate(samples):
        later, after = 0.0, 0.0
        for t in reversed(range(s.response.size)):
            reward = (rewards[i] if t == s.response.size - 1 else 0.0) - recipe.kl_coef * charge[i, t]
            later = reward + recipe.gamma * after - values[i, t] + recipe.gamma * recipe.gae_lambda * later
            advantages[i, t], targets[i, t], after = later, later + values[i, t], values[i, t]
    flat = np.concatenate([a[: s.response.size] for a, s in zip(advantages, samples, strict=True)])
    return (advantages - flat.mean()) / np.sqrt(flat.var(ddof=1) + recipe.epsilon), targets


def plain_update(recipe, samples, table, shared, rates=RATES, by_prompt=False):
    """Steps on the losses written out, on plain rows of the first agent alone: (actor, critic, figures, tokens that each clip held last).

    Two epochs of a single minibatch, or one epoch with a step per prompt, in any order.
    """
    mine = np.flatnonzero(table.agent == 0)
    samples, rewards = [samples[i] for i in mine], (table.team + table.local)[mine]
    *rows, where, drawn = padded(samples)
    actor, critic = (critic_params(), None) if shared else (params(), critic_params())
    values = np.asarray(unrolled_values(actor if shared else critic, *rows), np.float64)
    ref = np.asarray(unrolled(reference(), *rows, recipe.temperature)[0]) if recipe.kl_coef else drawn
    charge = np.where(where, 0.5 * (ref - drawn) ** 2, 0) if recipe.kl_where == "reward" else np.zeros(where.shape)
    advantages, targets = (jnp.asarray(x, jnp.float32) for x in gae_by_hand(recipe, samples, rewards, values, charge))

    names = [s.prompt.tobytes() for s in samples]
    parts = [np.asarray([n == name for n in names]) for name in dict.fromkeys(names)] if by_prompt else [np.ones(len(mine), bool)] * 2

    def mean(x, part, over_calls):
        if over_calls:
            return jnp.sum(jnp.sum(x, axis=1, where=where) / where.sum(1), where=part) / part.sum()
        return jnp.sum(x, where=where & part[:, None]) / jnp.sum(where & part[:, None])

    old = unrolled(actor, *rows, recipe.temperature)[0]

    def policy_loss(p, part):
        log_probs, entropy = unrolled(p, *rows, recipe.temperature)
        ratio = jnp.exp(log_probs - old)
        worst = jnp.maximum(-ratio * advantages, -jnp.clip(ratio, 0.8, 1.2) * advantages)
        bound = (advantages < 0) & (worst > -recipe.dual_clip * advantages) & where
        token = jnp.where(bound, -recipe.dual_clip * advantages, worst)
        if recipe.kl_where == "loss":
            token += recipe.kl_coef * (jnp.exp(ref - log_probs) - (ref - log_probs) - 1)
        return mean(token - recipe.entropy_coef * entropy, part, shared), jnp.sum(bound)

    def value_loss(p, part):
        v = unrolled_values(p, *rows)
        near = jnp.clip(v, values - recipe.value_clip, values + recipe.value_clip)
        bound = ((near - targets) ** 2 > (v - targets) ** 2) & where
        return mean(0.5 * jnp.maximum((v - targets) ** 2, (near - targets) ** 2), part, False), jnp.sum(bound)

    def both(p, part):
        (policy, dual), (value, clipped) = policy_loss(p, part), value_loss(p, part)
        return policy + recipe.value_coef * value, (dual, clipped, value)

    def descend(p, g, rate):
        return jax.tree.map(lambda x, y: x - rate * y, p, g)

    slope_of = jax.jit(jax.value_and_grad(both if shared else policy_loss, has_aux=True))
    value_slope = jax.jit(jax.value_and_grad(value_loss, has_aux=True))
    losses = []
    for part in parts:
        (loss, aux), slope = slope_of(actor, part)
        if shared:
            dual, clipped, value = aux
        else:
            (value, clipped), up = value_slope(critic, part)
            critic, dual = descend(critic, up, rates[1]), aux
        actor = descend(actor, slope, rates[0])
        losses.append((float(loss), float(value)))
    over_calls, over_tokens = [part.sum() for part in parts], [np.sum(where & part[:, None]) for part in parts]
    policy_losses, value_losses = np.transpose(losses)
    if shared:
        policy_losses = policy_losses - recipe.value_coef * value_losses
    value_mean = np.average(value_losses, weights=over_tokens)
    policy_mean = np.average(policy_losses, weights=over_calls if shared else over_tokens)
    flat, goal = values[where], np.asarray(targets, np.float64)[where]
    figures = {
        "loss": policy_mean + (recipe.value_coef * value_mean if shared else 0), "value_loss": value_mean,
        "values_mean": flat.mean(), "explained_variance": 1 - np.var(goal - flat) / np.var(goal),
        "kl": charge.sum() / where.sum(), "groups": len(set(names)),
    }  # fmt: skip
    return actor, critic, figures, (int(dual), int(clipped))


@functools.cache
def update_for(recipe, shared=False, devices=1, fsdp=1, optimizer=SGD, **options):
    settings = dict(row_tokens=32, minibatch=100, critic="head" if shared else "own") | options
    return Update(LearnerOptions(recipe, optimizer, **settings), CONFIG, make_mesh(devices, fsdp))


def ppo_step(recipe, samples, table, shared=False, plays=FIRST, seed=0, rates=RATES, **options):
    policy = make_train_state(critic_params() if shared else params(), SGD)
    critic = None if shared else make_train_state(critic_params(), SGD)
    ref = reference() if recipe.kl_coef else None
    update, rate = update_for(recipe, shared, **options), None if shared else rates[1]
    samples = in_one_shape(samples, options.get("minibatch"))
    trained, metrics = update(Trained(policy, critic), ref, samples, table, plays, rates[0], seed, critic_learning_rate=rate)
    return trained.policy.params, None if trained.critic is None else trained.critic.params, metrics


@pytest.mark.parametrize(("recipe", "shared"), [(OWN, False), (CHARGED, False), (SHARED, True)], ids=["own", "charged", "shared"])
def test_two_epochs_of_ppo_are_those_written_out_on_plain_rows(recipe, shared):
    samples, table = make_samples()
    actor, critic, figures, bound = plain_update(recipe, samples, table, shared)
    assert min(bound) > 0  # the dual clip and the value clip both hold some token in the second epoch
    got_actor, got_critic, metrics = ppo_step(recipe, samples, table, shared, epochs=2, microbatch_tokens=64)
    assert_close(got_actor, actor)
    if not shared:
        assert_close(got_critic, critic)
    for name in figures if recipe is CHARGED else set(figures) - {"kl"}:
        assert metrics[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-5), name
    assert metrics["updates"] == 2
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), got_actor["block_0"], params()["block_0"])
    assert max(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize(("recipe", "shared"), [(OWN, False), (SHARED, True)], ids=["own", "shared"])
def test_each_minibatch_has_the_advantages_and_targets_of_its_own_samples(recipe, shared):
    still = jnp.float32(0), jnp.float32(0)  # so that the order of minibatches plays no part
    samples, table = make_samples()
    _, _, figures, _ = plain_update(recipe, samples, table, shared, still, by_prompt=True)
    _, _, metrics = ppo_step(recipe, samples, table, shared, rates=still, minibatch=1)
    assert metrics["updates"] == figures["groups"] > 8
    for name in ("loss", "value_loss", "values_mean", "explained_variance"):
        assert metrics[name] == pytest.approx(figures[name], rel=1e-4, abs=1e-5), name


def test_law_5_the_cut_of_rows_the_order_and_devices_change_nothing():
    samples, table = make_samples()
    plays = np.asarray([True, True])
    base = ppo_step(OWN, samples, table, plays=plays, minibatch=5)
    assert base[2]["updates"] > 2
    mixed = np.random.default_rng(5).permutation(len(samples))
    turned = [samples[i] for i in mixed], Samples(**{n: x[mixed] for n, x in vars(table).items() if x is not None})
    assert_same(ppo_step(OWN, *turned, plays=plays, minibatch=5)[:2], base[:2])
    for options in (dict(row_tokens=11, microbatch_tokens=1), dict(devices=2, microbatch_tokens=40), dict(fsdp=2)):
        moved = ppo_step(OWN, samples, table, plays=plays, minibatch=5, **options)
        assert_close(moved[:2], base[:2])
        for name in set(base[2]) - {"packing"}:
            assert moved[2][name] == pytest.approx(base[2][name], rel=1e-4, abs=1e-5), (name, options)
    other = ppo_step(OWN, samples, table, plays=plays, minibatch=5, seed=1)
    assert not np.array_equal(other[0]["embedding"], base[0]["embedding"])


def test_a_shared_network_weighs_its_two_losses_exactly_however_rows_are_cut():
    samples, table = make_samples()
    base = ppo_step(SHARED, samples, table, True, epochs=2, microbatch_tokens=64)
    moved = ppo_step(SHARED, samples, table, True, epochs=2, devices=2, row_tokens=11, microbatch_tokens=1)
    assert moved[1] is None
    assert_close(moved[0], base[0])
    assert moved[2]["loss"] == pytest.approx(base[2]["loss"], rel=1e-4)


def test_statistics_are_over_the_rows_that_this_model_trains_on():
    samples, table = make_samples()
    base = ppo_step(OWN, samples, table)
    wild = np.where(table.agent == 1, 1000.0 * table.team + 7.0, table.team).astype(np.float32)
    foreign = [TokenSample(s.prompt[::-1], s.response, s.log_probs - 3) if a else s for s, a in zip(samples, table.agent, strict=True)]
    moved = ppo_step(OWN, foreign, dataclasses.replace(table, team=wild))
    assert_same(moved[:2], base[:2])
    assert moved[2] == base[2]
    own = dataclasses.replace(table, team=np.where(table.agent == 0, 2 * table.team, table.team))
    assert not np.array_equal(ppo_step(OWN, samples, own)[0]["embedding"], base[0]["embedding"])
    # rows that do not count are not read either
    last = int(np.flatnonzero(table.agent == 0)[-1])
    keep = np.delete(np.arange(len(samples)), last)
    less = [samples[i] for i in keep], jax.tree.map(lambda x: x[keep], table)
    aborted = dataclasses.replace(table, where=np.arange(len(samples)) != last)
    assert_same(ppo_step(OWN, samples, aborted)[:2], ppo_step(OWN, *less)[:2])


def test_law_8_nothing_to_learn_from_changes_nothing_and_has_all_figures():
    samples, table = make_samples()
    for recipe, shared in ((CHARGED, False), (SHARED, True)):
        _, _, usual = ppo_step(recipe, samples, table, shared, epochs=2, microbatch_tokens=64)
        actor, critic, metrics = ppo_step(recipe, samples, table, shared, plays=~(FIRST | True), epochs=2, microbatch_tokens=64)
        assert_same(actor, critic_params() if shared else params())
        assert shared or jax.tree.all(jax.tree.map(np.array_equal, critic, critic_params()))
        assert set(metrics) == set(usual)
        assert (metrics["updates"], metrics["groups"], metrics["loss"], metrics["value_loss"]) == (0, 0, 0.0, 0.0)


def test_a_critic_learns_the_returns_and_leaves_the_actor_to_its_own_rate():
    adam = make_optimizer()
    samples, table = make_samples()
    goal = np.where(table.turn == 1, 1.0, -0.5).astype(np.float32)
    table = dataclasses.replace(table, team=goal, local=np.zeros_like(goal))
    update = update_for(make_recipe("ppo"), optimizer=adam, epochs=8)
    trained, figures = Trained(make_train_state(params(), adam), make_train_state(with_value_head(params()), adam)), []
    for step in range(5):
        trained, metrics = update(trained, None, samples, table, FIRST, jnp.float32(0.0), step, critic_learning_rate=jnp.float32(0.02))
        figures.append(metrics)
    assert figures[0]["values_mean"] == 0.0
    assert figures[0]["explained_variance"] == 0.0
    assert figures[-1]["value_error"] < 0.3 * figures[0]["value_error"]
    assert figures[-1]["explained_variance"] > 0.5
    assert_same(trained.policy.params, params())


def test_explained_variance_has_its_known_values():
    where = np.asarray([[True, True, False], [True, True, False]])
    goal = np.asarray([[1.0, 2, 9], [3, 4, 9]], np.float32)
    assert explained_variance(goal, goal, where) == 1.0
    assert explained_variance(np.ones_like(goal), goal, where) == pytest.approx(0.0)
    assert explained_variance(goal, np.ones_like(goal), where) == 0.0
    assert explained_variance(goal, goal, np.zeros_like(where)) == 0.0


def test_law_10_what_cannot_be_done_is_told():
    samples, table = make_samples()
    with pytest.raises(ValueError, match="adapters are trained: use critic='own'"):
        Update(LearnerOptions(OWN, SGD, 32, 4, critic="head"), CONFIG, make_mesh(1), LoraConfig())
    policy, critic = make_train_state(params(), SGD), make_train_state(critic_params(), SGD)
    wrong = [
        (OWN, Trained(policy), {}, "a critic with a network of its own"),
        (make_recipe("at_grpo"), Trained(policy, critic), {}, "a critic with a network of its own"),
        (CHARGED, Trained(policy, critic), {}, "pass the reference's parameters"),
        (OWN, Trained(policy, critic), dict(base=params()), "frozen base"),
    ]
    for recipe, trained, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            update_for(recipe)(trained, None, samples, table, FIRST, RATES[0], 0, **options)
