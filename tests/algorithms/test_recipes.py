"""Recipes: valid as published, settable field by field, and carried out on arrays as the slow twins would."""

import contextlib
import dataclasses

import algorithm_oracles as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl
from marl_llm.algorithms.recipe_rules import CHOICES

PUBLISHED = [(name, "paper") for name in rl.RECIPES] + [(name, "released") for name in ("at_grpo", "magrpo", "dr_mas", "mappa")]


def play(seed=0, instances=3, turns=2, agents=2, branches=4, tokens=5):
    """Return a shuffled table of samples as numpy columns, a tenth of it masked."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*map(np.arange, (instances, turns, agents, branches)), indexing="ij"), axis=-1).reshape(-1, 4)
    instance, turn, agent, branch = rng.permutation(grid).T.astype(np.int32)
    size = len(grid)
    lengths = rng.integers(1, tokens + 1, size)
    return dict(
        instance=instance, env=instance + 10, agent=agent, turn=turn, trajectory=instance * 100 + branch,
        team=rng.integers(0, 3, size) / 2, local=rng.integers(0, 3, size) / 4, where=rng.random(size) < 0.9,
        tokens=lengths, kl=rng.normal(size=size), values=rng.normal(size=(size, tokens)),
        token_where=np.arange(tokens) < lengths[:, None], token_kl=rng.normal(size=(size, tokens)),
    )  # fmt: skip


def samples(columns):
    return rl.Samples(**{name: jnp.asarray(value) for name, value in columns.items()})


def expected(recipe, c):
    """Advantages of a recipe, from the slow twins."""
    where, order = c["where"], c["turn"]
    rewards = {"mixed": recipe.alpha * c["team"] + c["local"], "team": c["team"], "local": c["local"]}[recipe.rewards]
    if recipe.name == "ppo":
        at_end = np.where(np.arange(5) == c["tokens"][:, None] - 1, rewards[:, None], 0)
        inside = c["token_where"] & where[:, None]
        raw, _ = oracle.gae(at_end, c["values"], 1.0, 1.0, inside)
        return np.where(inside, (raw - raw[inside].mean()) / np.sqrt(raw[inside].var(ddof=1) + 1e-8), 0)
    if recipe.kl_where == "reward":
        rewards = rewards - recipe.kl_coef * c["kl"]
    if recipe.advantage_estimator == "ema":  # at the start: the role's own later pay, less nothing
        own = c["trajectory"] * 10 + c["agent"]

        def later(row):
            return where & (own == own[row]) & (order >= order[row])

        return np.array([rewards[later(row)].sum() if where[row] else 0.0 for row in range(len(where))])
    if recipe.returns == "to_go" and recipe.scope != "token":
        rewards = oracle.rewards_to_go(rewards, order, c["trajectory"], recipe.gamma, where, recipe.scope == "joint")
    if recipe.returns == "outcome":
        last = {}
        for row in np.flatnonzero(where):
            last[c["trajectory"][row]] = max(last.get(c["trajectory"][row], -1), order[row])

        def same(row):
            return where & (c["trajectory"] == c["trajectory"][row]) & (order == last.get(c["trajectory"][row]))

        rewards = np.array([rewards[same(row)].mean() if where[row] else 0.0 for row in range(len(where))])
    if recipe.advantage_estimator == "global":
        flat = np.repeat(rewards[where], c["tokens"][where])
        return np.where(where, (rewards - flat.mean()) / np.sqrt(flat.var() + 1e-8), 0)
    ids = oracle.group_ids(np.stack([c[axis] for axis in recipe.group_by], axis=1), where)
    if recipe.advantage_estimator == "leave_one_out":
        return oracle.leave_one_out(rewards, ids, where)
    weights = c["tokens"] if recipe.statistics_weight == "token" else None
    return oracle.group_relative(rewards, ids, where, recipe.scale_advantages, recipe.ddof, recipe.epsilon, weights, recipe.singleton)


@pytest.mark.parametrize(("name", "preset"), PUBLISHED)
def test_advantages_of_every_recipe(name, preset):
    recipe, columns = rl.make_recipe(name, preset), play(1)
    with jax.enable_x64(True):
        advantages, metrics, tied = jax.jit(lambda s: rl.advantages_for(recipe, s))(samples(columns))
        oracle.close(advantages, expected(recipe, columns), 1e-10)
        assert all(np.shape(value) == () for value in metrics.values())
        assert int(metrics["samples"]) == columns["where"].sum()
        assert not np.any(np.asarray(tied) & ~columns["where"])
        assert np.all(np.asarray(advantages)[np.asarray(tied)] == 0)


def test_tied_groups_are_counted_and_said():
    columns = play(2)
    columns["team"] = np.where(columns["instance"] == 0, 0.5, columns["team"])
    columns["local"] = np.zeros_like(columns["local"])
    recipe = rl.make_recipe("at_grpo")
    _, metrics, tied = rl.advantages_for(recipe, samples(columns))
    np.testing.assert_array_equal(np.asarray(tied)[columns["instance"] == 0], columns["where"][columns["instance"] == 0])
    assert int(metrics["groups"]) == 12
    assert 4 <= int(metrics["tied_groups"]) < 12
    np.testing.assert_allclose(metrics["tied_share"], int(metrics["tied_groups"]) / 12, rtol=1e-6)


def test_mixed_prompts_are_a_metric():
    columns = play(2) | dict(where=np.ones(48, bool))
    columns["prompt_ids"] = columns["instance"]
    assert float(rl.advantages_for(rl.make_recipe("grpo"), samples(columns))[1]["mixed_prompt_share"]) == 0.0
    columns["prompt_ids"] = columns["instance"] + 10 * columns["turn"]
    assert float(rl.advantages_for(rl.make_recipe("grpo"), samples(columns))[1]["mixed_prompt_share"]) == 1.0
    assert float(rl.advantages_for(rl.make_recipe("magrpo"), samples(columns))[1]["mixed_prompt_share"]) == 0.0


def test_order_within_a_turn():
    # Planner after tool, two turns; the outcome is what the very last action left behind, and "to go" starts at one's own action.
    zeros = jnp.zeros(4, int)
    table = rl.Samples(instance=zeros, env=zeros, agent=jnp.array([0, 1, 0, 1]), turn=jnp.array([0, 0, 1, 1]), trajectory=zeros,
                       team=jnp.array([1.0, 2.0, 4.0, 8.0]), local=zeros, order=jnp.arange(4))  # fmt: skip

    def paid(**kw):
        return rl.advantages_for(rl.make_recipe("grpo", **kw), table)[1]["return_mean"]

    assert float(paid()) == 8.0
    assert float(paid(returns="to_go")) == (15 + 14 + 12 + 8) / 4
    assert float(paid(returns="to_go", scope="joint")) == (7.5 + 7.5 + 6 + 6) / 4
    assert float(paid(returns="trajectory")) == 7.5
    table = dataclasses.replace(table, order=None)
    assert float(paid()) == 6.0
    assert float(paid(returns="to_go")) == (15 + 15 + 12 + 12) / 4


@pytest.mark.parametrize(("recipe", "field"), [
    (rl.make_recipe("mappa"), "kl"), (rl.make_recipe("mappa", kl_coef=0.0), "tokens"), (rl.make_recipe("ppo"), "values"),
    (rl.make_recipe("ppo", kl_coef=0.1, kl_where="reward"), "token_kl"),
])  # fmt: skip
def test_a_missing_column_is_named(recipe, field):
    with pytest.raises(ValueError, match=rf"needs Samples.{field}:"):
        rl.advantages_for(recipe, dataclasses.replace(samples(play()), **{field: None}))


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(AssertionError):
        rl.advantages_for(rl.make_recipe("grpo"), dataclasses.replace(samples(play()), agent=jnp.zeros(3, int)))


def log_probs(seed=0, shape=(6, 5)):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(size=shape)
    new = old + rng.normal(size=shape) / 3
    return new, old, old + rng.normal(size=shape) / 3, rng.normal(size=shape[0]), rng.random(shape) < 0.7


LOSSES = [
    rl.make_recipe("at_grpo", "released"),
    rl.make_recipe("magrpo"),
    rl.make_recipe("magrpo", "released"),
    rl.make_recipe("grpo", loss_aggregation="constant", max_length=8, entropy_coef=0.1, kl_coef=0.2, kl_kind="k2"),
    rl.make_recipe("grpo", loss="cispo", loss_aggregation="sequence_mean_token_sum", clip_high=0.5),
]


@pytest.mark.parametrize("recipe", LOSSES, ids=lambda r: f"{r.name}-{r.preset}-{r.loss}-{r.loss_aggregation}")
def test_loss_of_a_recipe(recipe):
    new, old, reference, advantages, where = log_probs()
    bonus = np.random.default_rng(9).random(new.shape)
    spread = np.broadcast_to(advantages[:, None], new.shape)
    if recipe.loss == "clip":
        x = oracle.clipped(new, old, spread, recipe.clip_low, recipe.clip_high, recipe.importance_level, recipe.dual_clip, where)
    elif recipe.loss == "cispo":
        x = -np.clip(np.exp(new - old), 1 - recipe.clip_low, 1 + recipe.clip_high) * spread * new
    else:
        x = -spread * new
    d = reference - new
    x = x + recipe.kl_coef * {"k2": d**2 / 2, "k3": np.exp(d) - d - 1}[recipe.kl_kind] - recipe.entropy_coef * bonus
    with jax.enable_x64(True):
        inputs = dict(where=where, entropy=bonus, reference_log_probs=reference)
        total, count, metrics = rl.loss_for(recipe, new, old, advantages, **inputs)
        oracle.close(total / count, oracle.reduced(x, where, recipe.loss_aggregation, recipe.max_length), 1e-10)
        mean = {name: float(s / c) for name, (s, c) in metrics.items()}
        oracle.close(mean["approx_kl"], np.mean((old - new)[where]), 1e-10)
        oracle.close(mean["entropy"], bonus[where].mean(), 1e-10)
        if recipe.importance_level == "token" and recipe.loss == "clip":
            rho = np.exp(new - old)
            oracle.close(mean["ratio"], rho[where].mean(), 1e-10)
            oracle.close(mean["clip_high"], ((rho > 1 + recipe.clip_high) & (spread > 0))[where].mean(), 1e-10)
            oracle.close(mean["clip_low"], ((rho < 1 - recipe.clip_low) & (spread < 0))[where].mean(), 1e-10)


def test_the_sampler_s_gap_is_measured_and_corrected():
    new, old, sampler, advantages, where = log_probs(3)
    plain = rl.make_recipe("grpo", loss_aggregation="token_mean")
    repaired = rl.make_recipe("grpo", loss_aggregation="token_mean", rollout_correction="truncate", rollout_correction_threshold=1.25)
    with jax.enable_x64(True):
        total, count, metrics = rl.loss_for(plain, new, old, advantages, where=where, sampler_log_probs=sampler)
        oracle.close(metrics["sampler_gap"][0], np.abs(old - sampler)[where].sum(), 1e-10)
        assert float(metrics["corrected"][0]) == 0
        untouched = rl.loss_for(plain, new, old, advantages, where=where)[0]
        assert float(total) == float(untouched)
        weights = np.minimum(np.exp(old - sampler), 1.25)
        x = oracle.clipped(new, old, np.broadcast_to(advantages[:, None], new.shape), 0.2, 0.2, "token", None, where)
        total, _, metrics = rl.loss_for(repaired, new, old, advantages, where=where, sampler_log_probs=sampler)
        oracle.close(total, np.sum(weights * x, where=where), 1e-10)
        oracle.close(metrics["corrected"][0], np.sum(np.exp(old - sampler)[where] > 1.25), 1e-10)


@pytest.mark.parametrize(("overrides", "missing"), [
    (dict(kl_coef=0.1), "reference_log_probs"), (dict(entropy_coef=0.1), "entropy"),
    (dict(rollout_correction="mask"), "sampler_log_probs"),
])  # fmt: skip
def test_a_missing_input_is_named(overrides, missing):
    new, old, _, advantages, where = log_probs()
    with pytest.raises(ValueError, match=f"pass {missing}"):
        rl.loss_for(rl.make_recipe("grpo", **overrides), new, old, advantages, where=where)


def test_the_critic_s_side():
    recipe, columns = rl.make_recipe("ppo", value_clip=0.1), play(5)
    with jax.enable_x64(True):
        targets = rl.value_targets_for(recipe, samples(columns))
        inside = columns["token_where"] & columns["where"][:, None]
        # With γ = λ = 1 each token's target is the sample's reward.
        oracle.close(targets, np.where(inside, (columns["team"] + columns["local"])[:, None], 0), 1e-10)
        values = columns["values"] + 0.3
        total, count, metrics = rl.value_loss_for(recipe, values, columns["values"], targets, where=inside)
        error = np.maximum((values - targets) ** 2, (columns["values"] + 0.1 - targets) ** 2)
        oracle.close(total / count, 0.5 * 0.5 * np.mean(np.asarray(error)[inside]), 1e-10)
        oracle.close(metrics["value_error"][0], 0.5 * np.sum(np.asarray((values - targets) ** 2)[inside]), 1e-10)


def own_advantages(samples, returns):
    """Twice the returns."""
    return 2 * returns


def own_loss(log_probs, old_log_probs, advantages, mask):
    """REINFORCE, three times."""
    return -3 * advantages * log_probs


class TestFunctionsOfOnesOwn:
    """`advantages` and `policy_loss` of a recipe."""

    def test_advantages_are_those_of_the_function_and_masked_rows_get_none(self):
        recipe = rl.make_recipe("grpo", advantages=own_advantages)
        rows = dict(instance=[0, 0, 1, 1], env=[0] * 4, agent=[0] * 4, turn=[0] * 4, trajectory=[0, 1, 2, 3])
        table = {name: np.asarray(column) for name, column in rows.items()}
        samples = rl.Samples(**table, team=np.asarray([1.0, 0.0, 0.5, 9.0]), local=np.zeros(4), where=np.asarray([1, 1, 1, 0], bool))
        advantages, metrics, tied = rl.advantages_for(recipe, samples)
        np.testing.assert_allclose(advantages, [2.0, 0.0, 1.0, 0.0])
        assert metrics["groups"] == 2
        assert not tied[0]

    def test_the_loss_is_that_of_the_function_reduced_and_with_the_recipes_other_terms(self):
        new, mask = np.asarray([[-1.0, -2.0], [-3.0, -4.0]]), np.asarray([[1, 1], [1, 0]], bool)
        recipe = rl.make_recipe("grpo", policy_loss=own_loss, loss_aggregation="token_mean", entropy_coef=0.5)
        total, count, metrics = rl.loss_for(recipe, new, new, np.asarray([1.0, 2.0]), where=mask, entropy=np.ones((2, 2)))
        assert count == 3
        assert total == pytest.approx(3 * (1 + 2) + 3 * 2 * 3 - 0.5 * 3)
        assert metrics["policy_loss"][0] == pytest.approx(27)

    def test_its_gradient_is_that_of_the_library_where_it_says_the_same(self):
        def clipped(log_probs, old_log_probs, advantages, mask):
            ratio = jnp.exp(log_probs - old_log_probs)
            return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)

        rng = np.random.default_rng(0)
        new, old = rng.normal(size=(2, 3, 4)) - 2
        advantages, mask = rng.normal(size=3), rng.random((3, 4)) < 0.8

        def gradient(recipe):
            return jax.grad(lambda x: rl.loss_for(recipe, x, old, advantages, where=mask)[0])(new)

        np.testing.assert_allclose(
            gradient(rl.make_recipe("grpo", policy_loss=clipped)), gradient(rl.make_recipe("grpo")), rtol=1e-5, atol=1e-7
        )

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            (dict(policy_loss="clip"), "policy_loss='clip' must be a function"),
            (dict(policy_loss=own_loss, clip_low=0.1), "clip_low=0.1 would have no effect: policy_loss is a function of your own"),
            (dict(advantages=own_advantages, scale_advantages="none"),
             "scale_advantages='none' would have no effect: advantages is a function of your own"),
        ],
    )
    def test_what_would_have_no_effect_is_refused(self, fields, why):
        with pytest.raises(ValueError, match=why):
            rl.make_recipe("grpo", **fields)
        with pytest.raises(ValueError, match="one number per sample, and advantage_estimator='critic' has one per token"):
            rl.make_recipe("ppo", advantages=own_advantages)
        with pytest.raises(ValueError, match="'ema' reads its running means off its own advantages"):
            rl.make_recipe("spiral", advantages=own_advantages)

    def test_a_result_of_another_shape_is_refused(self):
        recipe = rl.make_recipe("grpo", policy_loss=lambda log_probs, *_: log_probs.sum())
        with pytest.raises(ValueError, match=r"recipe.policy_loss returned the shape \[\]; it must return \[1, 2\]"):
            rl.loss_for(recipe, np.zeros((1, 2)), np.zeros((1, 2)), np.ones(1), where=np.ones((1, 2), bool))


class TestMaking:
    def test_the_table_of_the_design(self):
        want = {
            "grpo": ("parallel", "outcome", ("instance", "agent"), "group", 0.0, "token", None),
            "at_grpo": ("tree", "immediate", ("env", "agent", "turn"), "group", 0.0, "token", None),
            "magrpo": ("parallel", "to_go", ("instance", "turn"), "group", 0.02, "product", None),
            "dr_mas": ("parallel", "outcome", ("instance", "agent"), "group", 0.0, "token", None),
            "mappa": ("chain", "to_go", (), "global", 0.01, "token", None),
            "ppo": ("chain", "gae", (), "critic", 0.0, "token", 3.0),
            "dr_grpo": ("parallel", "outcome", ("instance", "agent"), "group", 0.0, "token", None),
            "dapo": ("parallel", "outcome", ("instance", "agent"), "group", 0.0, "token", None),
            "rloo": ("parallel", "outcome", ("instance", "agent"), "leave_one_out", 0.0, "token", None),
            "reinforce_pp": ("chain", "outcome", (), "global", 0.0, "token", None),
            "spiral": ("chain", "to_go", (), "ema", 0.0, "token", None),
            "gspo": ("parallel", "outcome", ("instance", "agent"), "group", 0.0, "sequence", None),
        }
        fields = ("sampling", "returns", "group_by", "advantage_estimator", "kl_coef", "importance_level", "dual_clip")
        assert set(want) == set(rl.RECIPES)
        for name, values in want.items():
            recipe = rl.make_recipe(name)
            assert tuple(getattr(recipe, field) for field in fields) == values, name
        assert (rl.make_recipe("mappa").kl_kind, rl.make_recipe("mappa").kl_where) == ("k1", "reward")

    @pytest.mark.parametrize(("name", "preset"), PUBLISHED)
    def test_published_recipes_are_hashable_data(self, name, preset):
        recipe = rl.make_recipe(name, preset)
        assert hash(recipe) == hash(rl.make_recipe(name, preset))
        assert recipe == dataclasses.replace(recipe)

    def test_every_field_can_be_set_alone_in_some_recipe(self):
        values = dict(
            sampling="chain", group_size=6, pick="first", temperature=0.7, top_k=20, top_p=0.9, rewards="mixed", alpha=0.5,
            returns="trajectory", scope="agent", gamma=0.9, gae_lambda=0.95, advantage_estimator="leave_one_out", group_by="instance,turn",
            scale_advantages="range", ddof=0, epsilon=1e-4, singleton="raw", statistics_weight="trajectory", filter_zero_variance=True,
            loss="cispo",
            importance_level="sequence", clip_low=0.1, clip_high=0.28, dual_clip=4.0, loss_aggregation="token_mean", kl_coef=0.5,
            kl_kind="k2", kl_where="reward",
            entropy_coef=0.01, value_coef=1.0, value_clip=None, rollout_correction="mask", gate_positive=2.0, gate_negative=3.0,
            entropy_quantile=0.2, off_policy_kl=0.1, joint="cross", center="score", baseline="place", ema_decay=0.9,
            advantages=own_advantages, policy_loss=own_loss, overlong_buffer=0.2, mask_truncated=True, policy_coef=0.5,
            distill_coef=0.1,
        )  # fmt: skip
        together = dict(center=dict(returns="to_go"), baseline=dict(advantage_estimator="global"))
        together |= dict(overlong_penalty=dict(overlong_buffer=0.2))
        together |= dict(joint_subset=dict(joint="cross"), gate_positive=dict(loss="sapo"), gate_negative=dict(loss="sapo"),
                        zero_variance_in_denominator=dict(filter_zero_variance=True), max_length=dict(loss_aggregation="constant"),
                        rollout_correction_level=dict(rollout_correction="mask"),
                        rollout_correction_threshold=dict(rollout_correction="mask"),
                        exchange=dict(returns="counterfactual"), replays=dict(returns="counterfactual"),
                        kl_target=dict(kl_coef=0.1), kl_horizon=dict(kl_coef=0.1, kl_target=0.02),
                        distill_divergence=dict(distill_coef=1.0), distill_top_k=dict(distill_coef=1.0),
                        distill_beta=dict(distill_coef=1.0, distill_divergence="jsd"))  # fmt: skip
        extra = dict(zero_variance_in_denominator=False, max_length=64, rollout_correction_level="product",
                     rollout_correction_threshold=3.0, kl_target=0.02,
                     kl_horizon=100.0, joint_subset=16, overlong_penalty=0.5, exchange="silence", replays=3,
                     distill_divergence="jsd", distill_top_k=8, distill_beta=0.3)  # fmt: skip
        assert set(values) | set(extra) == set(rl.FIELDS)
        for field, value in (values | extra).items():
            made = []
            for name in rl.RECIPES:
                with contextlib.suppress(ValueError):
                    made.append(getattr(rl.make_recipe(name, **{field: value}, **together.get(field, {})), field))
            assert made, field
            assert made[0] == (("instance", "turn") if field == "group_by" else value)

    @pytest.mark.parametrize("field", sorted(CHOICES))
    def test_an_unknown_value_lists_the_valid_ones(self, field):
        with pytest.raises(ValueError, match="is unknown.*Valid: ") as error:
            rl.make_recipe("grpo", **{field: CHOICES[field][0] + "x"})
        assert f"Did you mean {CHOICES[field][0]!r}" in str(error.value)

    def test_an_unknown_name_or_field_is_guessed(self):
        with pytest.raises(ValueError, match="Did you mean 'at_grpo'.*'magrpo'"):
            rl.make_recipe("atgrpo")
        with pytest.raises(ValueError, match="Did you mean 'clip_high'"):
            rl.make_recipe("grpo", cliphigh=0.3)
        with pytest.raises(ValueError, match="Did you mean 'agent'"):
            rl.make_recipe("grpo", group_by=("instance", "agnt"))
        with pytest.raises(ValueError, match="preset of grpo"):
            rl.make_recipe("grpo", "released")

    @pytest.mark.parametrize(("name", "overrides"), [
        ("grpo", dict(pick="first")), ("grpo", dict(alpha=1.0)), ("grpo", dict(scope="agent")), ("grpo", dict(gamma=0.9)),
        ("mappa", dict(scope="token", gamma=0.9)), ("grpo", dict(gae_lambda=0.9)), ("grpo", dict(value_coef=1.0)),
        ("mappa", dict(group_by=("agent",))), ("mappa", dict(singleton="raw")), ("mappa", dict(scale_advantages="range")),
        ("grpo", dict(advantage_estimator="leave_one_out", ddof=0)), ("grpo", dict(scale_advantages="none", ddof=0)),
        ("grpo", dict(advantage_estimator="leave_one_out", epsilon=0.0)), ("grpo", dict(scale_advantages="none", epsilon=0.0)),
        ("ppo", dict(statistics_weight="token")), ("mappa", dict(filter_zero_variance=True)),
        ("grpo", dict(zero_variance_in_denominator=False)),
        ("grpo", dict(loss="reinforce", clip_low=0.1)), ("grpo", dict(loss="cispo", dual_clip=3.0)),
        ("grpo", dict(gate_negative=2.0)), ("grpo", dict(loss="vespo", gate_positive=2.0)), ("grpo", dict(loss="sapo", clip_low=0.1)),
        ("grpo", dict(loss="vespo", importance_level="sequence")), ("grpo", dict(loss="sapo", dual_clip=3.0)),
        ("grpo", dict(rollout_correction_threshold=3.0)), ("grpo", dict(kl_kind="k1")), ("grpo", dict(kl_target=0.1)),
        ("grpo", dict(kl_coef=0.1, kl_horizon=10.0)), ("magrpo", dict(kl_coef=0.0, kl_where="reward")),
    ])  # fmt: skip
    def test_what_would_have_no_effect_is_refused(self, name, overrides):
        with pytest.raises(ValueError, match="would have no effect: .+Leave it out"):
            rl.make_recipe(name, **overrides)

    @pytest.mark.parametrize(("name", "overrides", "message"), [
        ("at_grpo", dict(returns="to_go"), "only one candidate per prompt"), ("at_grpo", dict(group_size=1), "groups of one"),
        ("grpo", dict(returns="gae"), "belong together"), ("grpo", dict(advantage_estimator="critic"), "belong together"),
        ("grpo", dict(group_by=()), "group_by is empty"), ("grpo", dict(loss_aggregation="constant"), "belong together"),
        ("grpo", dict(max_length=5), "belong together"),
        ("grpo", dict(advantage_estimator="leave_one_out", statistics_weight="token"), "leave_one_out has statistics_weight='sample'"),
        ("grpo", dict(group_size=0), "must be a number in"), ("grpo", dict(group_size=2.5), "whole number"),
        ("grpo", dict(clip_low=1.5), r"in \[0, 1\]"), ("grpo", dict(dual_clip=1.0), "must be a number"),
        ("grpo", dict(filter_zero_variance="yes"), "True or False"), ("grpo", dict(temperature=float("nan")), "must be a number"),
        ("grpo", dict(group_size=True), "must be a number"), ("grpo", dict(kl_coef="0.1"), "must be a number"),
    ])  # fmt: skip
    def test_contradictions_and_bad_numbers(self, name, overrides, message):
        with pytest.raises(ValueError, match=message):
            rl.make_recipe(name, **overrides)

    def test_whole_numbers_may_stand_for_floats(self):
        assert isinstance(rl.make_recipe("at_grpo", alpha=2).alpha, float)


def test_a_running_mean_per_role_is_taken_off_and_follows_the_plays_in_any_order():
    """SPIRAL: three plays of a zero-sum game, in which agent 0 speaks twice and agent 1 once, paid at the end."""
    recipe = rl.make_recipe("spiral", ema_decay=0.9)
    agent, trajectory = np.tile([0, 1, 0], 3), np.repeat([4, 2, 9], 3)
    local = np.array([0, -1, 1, 0, 1, -1, 0, -1, 1], float)  # each role's own end; agent 0's first response is paid by what follows
    where = np.ones(9, bool)
    where[6:] = False  # the last play is aborted
    running = np.array([0.5, -0.25])
    columns = dict(instance=trajectory, env=trajectory, agent=agent, turn=np.tile([0, 0, 1], 3), order=np.tile([0, 1, 2], 3),
                   trajectory=trajectory, team=np.zeros(9), local=local, where=where, running=running[agent])  # fmt: skip

    def both(order):
        samples = rl.Samples(**{name: x[order] for name, x in columns.items()})
        advantages = np.asarray(rl.advantages_for(recipe, samples)[0])
        returns, who = advantages + samples.running, (samples.agent, samples.trajectory)
        return advantages, rl.running_means(running, returns, *who, decay=recipe.ema_decay, where=samples.where)

    advantages, after = both(np.arange(9))
    np.testing.assert_allclose(advantages, [0.5, -0.75, 0.5, -1.5, 1.25, -1.5, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(after, 0.81 * running + 0.19 * 0, atol=1e-6)  # two plays, won and lost
    again, same = both(np.array([5, 8, 0, 3, 1, 7, 2, 4, 6]))
    np.testing.assert_allclose(again, advantages[[5, 8, 0, 3, 1, 7, 2, 4, 6]])
    np.testing.assert_allclose(same, after)
    one = rl.running_means(np.zeros(2), np.ones(3), np.zeros(3, int), np.full(3, 4), decay=0.9)
    np.testing.assert_allclose(one, [0.1, 0])  # one play, however many responses; nobody else moves


def test_an_outcome_is_read_where_the_team_was_paid():
    """A play that ends with a response of which the team's result does not speak."""
    columns = dict(instance=[0] * 4, env=[0] * 4, agent=[0, 1, 0, 1], turn=[0] * 4, order=[0, 1, 0, 1], trajectory=[0, 0, 1, 1],
                   team=[1.0, 0.0, 0.0, 0.0], local=[0.0] * 4, team_where=[True, False, True, False])  # fmt: skip
    samples = rl.Samples(**{name: np.asarray(x) for name, x in columns.items()})
    recipe = rl.make_recipe("reinforce_pp", statistics_weight="sample")
    advantages = rl.advantages_for(recipe, samples)[0]
    np.testing.assert_allclose(advantages, [1, 1, -1, -1], atol=1e-4)
    everywhere = rl.advantages_for(recipe, dataclasses.replace(samples, team_where=None))[0]
    np.testing.assert_allclose(everywhere, 0, atol=1e-4)  # the last responses were paid nothing


class TestOwnLossOfAModel:
    """`with_loss`: what one model of a team may have of its own."""

    def test_the_loss_changes_and_the_rest_stays(self):
        team = rl.make_recipe("at_grpo")
        own = rl.with_loss(team, kl_coef=0.1, loss="cispo")
        assert (own.kl_coef, own.loss, own.clip_high, own.sampling) == (0.1, "cispo", 4.0, "tree")
        assert rl.with_loss(team) == team

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            (dict(group_size=2), "recipe field of a model='group_size' is unknown"),
            (dict(returns="outcome"), "recipe field of a model='returns' is unknown"),
            (dict(kl_kind="k1"), "kl_kind='k1' would have no effect: kl_coef=0"),
            (dict(clip_low=3.0), r"clip_low=3.0 must be a number in \[0, 1\]"),
        ],
    )
    def test_what_is_the_teams_is_refused(self, fields, why):
        with pytest.raises(ValueError, match=why):
            rl.with_loss(rl.make_recipe("grpo"), **fields)

    def test_a_kl_in_the_reward_is_all_models_or_none(self):
        with pytest.raises(ValueError, match="kl_coef=0 for one model: with kl_where='reward' all models have a KL, or none"):
            rl.with_loss(rl.make_recipe("mappa"), kl_coef=0.0)
        assert rl.with_loss(rl.make_recipe("mappa"), kl_coef=0.5).kl_coef == 0.5
