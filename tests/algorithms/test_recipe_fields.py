"""Every field of a recipe is carried out: changing it changes a number, or a sampler or trainer is named that reads it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marl_llm.algorithms as rl

S, R = 12, 4
PPO = dict(name="ppo")
TO_GO = dict(name="mappa", kl_coef=0.0)
KL = dict(kl_coef=0.5)
CORRECTED = dict(rollout_correction="truncate", rollout_correction_threshold=1.2)
ROLE = dict(rewards="mixed", returns="immediate")

# field -> (what the recipe is, the field's other value). The base is grpo unless it names another recipe.
CARRIED_OUT = {
    "rewards": ({}, "local"),
    "alpha": (ROLE, 3.0),
    "center": (TO_GO, "score"),
    "returns": ({}, "trajectory"),
    "overlong_buffer": ({}, 0.5),
    "overlong_penalty": (dict(overlong_buffer=0.5), 2.0),
    "scope": (TO_GO, "agent"),
    "gamma": (TO_GO, 0.5),
    "gae_lambda": (PPO, 0.5),
    "baseline": (TO_GO, "place"),
    "advantage_estimator": ({}, "leave_one_out"),
    "group_by": ({}, ("instance",)),
    "scale_advantages": ({}, "range"),
    "ddof": ({}, 0),
    "epsilon": ({}, 0.5),
    "ema_decay": (dict(name="spiral"), 0.5),
    "singleton": (dict(group_by=("instance", "agent", "turn", "trajectory")), "raw"),
    "statistics_weight": ({}, "trajectory"),
    "loss": ({}, "reinforce"),
    "importance_level": ({}, "sequence"),
    "clip_low": ({}, 0.01),
    "clip_high": ({}, 0.01),
    "dual_clip": ({}, 1.05),
    "gate_positive": (dict(loss="sapo"), 3.0),
    "gate_negative": (dict(loss="sapo"), 3.0),
    "loss_aggregation": ({}, "token_mean"),
    "max_length": (dict(loss_aggregation="constant", max_length=8), 16),
    "kl_coef": ({}, 0.5),
    "kl_kind": (KL, "k1"),
    "kl_where": (KL, "reward"),
    "kl_target": (KL, 0.01),
    "kl_horizon": (KL | dict(kl_target=0.01), 100.0),
    "entropy_coef": ({}, 0.5),
    "entropy_quantile": ({}, 0.4),
    "off_policy_kl": ({}, 0.01),
    "policy_coef": ({}, 0.5),
    "rollout_correction": ({}, "truncate"),
    "rollout_correction_level": (CORRECTED, "product"),
    "rollout_correction_threshold": (CORRECTED, 1.05),
    "value_coef": (PPO, 2.0),
    "value_clip": (PPO, 0.01),
    "advantages": ({}, lambda samples, returns: 2 * returns),
    "policy_loss": ({}, lambda log_probs, old_log_probs, advantages, mask: -3 * advantages * log_probs),
}


def test_every_field_has_a_reader():
    named = {*CARRIED_OUT, *rl.SAMPLER_FIELDS, *rl.TRAINER_FIELDS, "name", "preset"}
    assert named == {field.name for field in dataclasses.fields(rl.Recipe)}
    assert len(CARRIED_OUT) + len(rl.SAMPLER_FIELDS) + len(rl.TRAINER_FIELDS) == len(rl.FIELDS)


def numbers(recipe):
    """All that the functions of a recipe give on one table: advantages, loss, value loss, targets and the next β."""
    rng = np.random.default_rng(4)

    def integers(high):
        return rng.integers(0, high, S)

    where = (np.arange(R) < rng.integers(1, R + 1, S)[:, None]) & (np.arange(S) < S - 1)[:, None]
    samples = rl.Samples(
        instance=integers(2), env=integers(2), agent=integers(2), turn=integers(3), trajectory=integers(4), team=rng.normal(size=S),
        local=rng.normal(size=S), tokens=where.sum(axis=1), kl=rng.random(S), values=rng.normal(size=(S, R)), token_where=where,
        token_kl=rng.random((S, R)), budget=np.full(S, R),
    )  # fmt: skip
    old, noise = -rng.exponential(size=(S, R)), rng.normal(size=(4, S, R)) / 3
    entropy = rng.random((S, R))
    advantages, _, _ = rl.advantages_for(recipe, samples)
    coef = rl.next_kl_coef(recipe, recipe.kl_coef, 0.3, samples=S)
    inputs = dict(entropy=entropy, reference_log_probs=old + noise[0], sampler_log_probs=old + noise[1], kl_coef=coef)
    threshold = rl.entropy_threshold(entropy, recipe.entropy_quantile, where=where)
    total, count, _ = rl.loss_for(recipe, old + noise[2], old, advantages, where=where, entropy_threshold=threshold, **inputs)
    out = [advantages, total, count]
    if recipe.advantage_estimator == "ema":
        out.append(rl.running_means(np.ones(2), advantages, samples.agent, samples.trajectory, decay=recipe.ema_decay))
    if recipe.advantage_estimator == "critic":
        targets = rl.value_targets_for(recipe, samples)
        out += [targets, rl.value_loss_for(recipe, samples.values + noise[3], samples.values, targets, where=where)[0]]
    return out


@pytest.mark.parametrize("field", CARRIED_OUT)
def test_changing_a_field_changes_a_number(field):
    base, other = CARRIED_OUT[field]
    base = dict(base)
    recipe = rl.make_recipe(base.pop("name", "grpo"), **base)
    changed = dataclasses.replace(recipe, **{field: other})
    assert getattr(changed, field) != getattr(recipe, field)
    with jax.disable_jit():
        before, after = numbers(recipe), numbers(changed)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in (*before, *after))
    assert any(np.shape(a) != np.shape(b) or float(np.max(np.abs(a - b))) > 1e-6 for a, b in zip(before, after))


@pytest.mark.parametrize(("overrides", "names"), [
    ({}, set()), (dict(kl_coef=0.1), {"reference_log_probs"}), (dict(kl_coef=0.1, kl_where="reward"), {"kl"}),
    (dict(rollout_correction="mask"), {"sampler_log_probs"}), (dict(off_policy_kl=0.1), {"sampler_log_probs"}),
    (dict(entropy_coef=0.1), {"entropy"}), (dict(entropy_quantile=0.2), {"entropy", "entropy_threshold"}),
    (dict(statistics_weight="token"), {"tokens"}), (dict(overlong_buffer=0.2), {"tokens", "budget"}),
    (dict(mask_truncated=True), {"truncated"}),
])  # fmt: skip
def test_needs_are_named_and_enough(overrides, names):
    recipe = rl.make_recipe("grpo", **overrides)
    assert rl.needs(recipe) == names
    x = jnp.full((2, 3), -0.5)
    inputs = {name: jnp.float32(0.5) if name == "entropy_threshold" else x for name in names - {"kl", "tokens", "budget", "truncated"}}
    rl.loss_for(recipe, x, x, jnp.ones(2), where=x < 0, **inputs)
    for name in inputs:
        with pytest.raises(ValueError, match=rf"pass .*{name}"):
            rl.loss_for(recipe, x, x, jnp.ones(2), where=x < 0, **{other: inputs[other] for other in inputs if other != name})


def test_tokens_of_low_entropy_leave_the_policy_term_of_any_micro_batch_and_still_count():
    rng = np.random.default_rng(0)
    new, old, entropy = rng.normal(size=(3, 6, 5))
    where, advantages = rng.random((6, 5)) < 0.8, rng.normal(size=6)
    recipe = rl.make_recipe("grpo", entropy_quantile=0.3, loss_aggregation="token_mean", entropy_coef=0.1)
    with jax.enable_x64(True):
        threshold = rl.entropy_threshold(entropy, 0.3, where=where)
        np.testing.assert_allclose(threshold, np.quantile(entropy[where], 0.7), rtol=1e-12)
        args = (new, old, advantages)

        def run(a, b):
            return rl.loss_for(
                    recipe, *(x[a:b] for x in args), where=where[a:b], entropy=entropy[a:b], entropy_threshold=threshold
                )

        total, count, metrics = run(0, 6)
        keep = where & (entropy >= np.quantile(entropy[where], 0.7))
        plain = rl.clipped_ratio(*args, where=where)
        np.testing.assert_allclose(total, np.sum(plain * keep) - 0.1 * entropy[where].sum(), rtol=1e-10)
        assert count == where.sum()
        np.testing.assert_allclose(metrics["left_out"], [(where & ~keep).sum(), where.sum()])
        np.testing.assert_allclose(run(0, 2)[0] + run(2, 6)[0], total, rtol=1e-10)


def test_bad_responses_that_the_policy_has_left_leave_the_policy_term():
    sampler, new = jnp.full((3, 2), -1.0), jnp.array([[-1.0, -1.0], [-3.0, -3.0], [-3.0, -3.0]])
    recipe = rl.make_recipe("grpo", off_policy_kl=1.0, loss_aggregation="token_mean")

    def loss(x):
        return rl.loss_for(
            recipe, x, sampler, jnp.array([-1.0, -1.0, 1.0]), where=jnp.ones((3, 2), bool), sampler_log_probs=sampler
        )

    np.testing.assert_array_equal(jnp.any(jax.grad(lambda x: loss(x)[0])(new) != 0, axis=1), [True, False, True])
    assert [float(x) for x in loss(new)[2]["left_out"]] == [2, 6]


def test_a_steered_coefficient_is_that_of_the_loss_and_of_the_reward():
    recipe = rl.make_recipe("grpo", kl_coef=0.1, kl_target=0.02, kl_horizon=1000.0)
    coef = rl.next_kl_coef(recipe, 0.1, 0.5, samples=100)
    np.testing.assert_allclose(coef, 0.1 * (1 + 0.2 * 100 / 1000), rtol=1e-6)
    assert rl.next_kl_coef(rl.make_recipe("grpo", kl_coef=0.1), 0.3, 0.5, samples=100) == 0.3
    x, inputs = jnp.full((2, 3), -0.5), dict(where=jnp.ones((2, 3), bool), reference_log_probs=jnp.full((2, 3), -0.9))
    steered = rl.loss_for(recipe, x, x, jnp.ones(2), kl_coef=coef, **inputs)[0]
    set_so = rl.loss_for(dataclasses.replace(recipe, kl_coef=float(coef)), x, x, jnp.ones(2), **inputs)[0]
    np.testing.assert_allclose(steered, set_so, rtol=1e-6)
    assert abs(float(steered - rl.loss_for(recipe, x, x, jnp.ones(2), **inputs)[0])) > 1e-4
    table = rl.Samples(**dict.fromkeys(("instance", "env", "agent", "turn"), jnp.zeros(3, int)), trajectory=jnp.arange(3),
                       team=jnp.zeros(3), local=jnp.zeros(3), kl=jnp.array([0.0, 1.0, 3.0]))  # fmt: skip
    paid = dataclasses.replace(recipe, kl_where="reward", scale_advantages="none")
    np.testing.assert_allclose(rl.advantages_for(paid, table, kl_coef=0.3)[0], [0.4, 0.1, -0.5], rtol=1e-5)


def test_b6_a_reward_that_is_not_finite_is_named():
    zeros = jnp.zeros(3, int)
    table = rl.Samples(instance=zeros + 7, env=zeros, agent=jnp.arange(3), turn=zeros, trajectory=zeros + 2,
                       team=jnp.array([0.0, jnp.nan, jnp.inf]), local=jnp.zeros(3), where=jnp.array([True, False, True]))  # fmt: skip
    with pytest.raises(ValueError, match=r"team reward of sample 2 \(instance 7, agent 2, turn 0, trajectory 2\) is inf; 1 are"):
        rl.check_rewards(table)
    rl.check_rewards(dataclasses.replace(table, where=jnp.array([True, False, False])))
    with pytest.raises(TypeError, match="before jit"):
        jax.jit(rl.check_rewards)(table)


class TestSampling:
    @pytest.mark.parametrize(("name", "counts"), [("at_grpo", (1, 4)), ("grpo", (4, 1)), ("mappa", (2, 1)), ("ppo", (1, 1))])
    def test_b17_plays_and_candidates(self, name, counts):
        recipe = rl.make_recipe(name)
        assert (recipe.plays, recipe.candidates) == counts

    @pytest.mark.parametrize("name", ["grpo", "at_grpo", "magrpo", "dr_mas", "dr_grpo", "dapo", "rloo", "gspo"])
    def test_c8_groups_of_one_are_refused(self, name):
        with pytest.raises(ValueError, match="group_size=1 makes groups of one"):
            rl.make_recipe(name, group_size=1)
        with pytest.raises(ValueError, match="group_size=1 makes groups of one"):
            rl.make_recipe(name, group_size=1, group_by="env,agent")

    def test_c8_one_play_is_enough_where_groups_span_instances(self):
        assert rl.make_recipe("mappa", "released", group_size=1).group_size == 1
        assert rl.make_recipe("mappa", group_size=1).group_size == 1


class TestNames:
    @pytest.mark.parametrize(("typed", "name"), [
        ("GRPO", "grpo"), ("Dr_GRPO", "dr_grpo"), ("dr-grpo", "dr_grpo"), ("DAPO", "dapo"), ("RLOO", "rloo"), ("GSPO", "gspo"),
        ("REINFORCE++", "reinforce_pp"), ("Reinforce_PP", "reinforce_pp"), ("AT-GRPO", "at_grpo"),
    ])  # fmt: skip
    def test_c9_names_are_case_blind(self, typed, name):
        assert rl.make_recipe(typed) == rl.make_recipe(name)

    @pytest.mark.parametrize(("typed", "name"), [
        ("drgrpo", "dr_grpo"), ("dappo", "dapo"), ("rlo", "rloo"), ("reinforcepp", "reinforce_pp"), ("reinforce", "reinforce_pp"),
        ("gsp", "gspo"), ("magrp", "magrpo"), ("GRP", "grpo"), ("DrMAS", "dr_mas"),
    ])  # fmt: skip
    def test_c9_near_names_get_a_hint(self, typed, name):
        with pytest.raises(ValueError, match=f"Did you mean '{name}'.*Valid: 'grpo'"):
            rl.make_recipe(typed)

    def test_c9_numpy_scalars_are_numbers(self):
        numpy = rl.make_recipe(
            np.str_("grpo"), group_size=np.int64(6), clip_low=np.float32(0.25), kl_coef=np.array(0.5), filter_zero_variance=np.bool_(True),
            ddof=np.uint8(0), loss=np.str_("cispo"),
        )  # fmt: skip
        plain = rl.make_recipe("grpo", group_size=6, clip_low=0.25, kl_coef=0.5, filter_zero_variance=True, ddof=0, loss="cispo")
        assert numpy == plain
        assert hash(numpy) == hash(plain)
        assert [type(getattr(numpy, f)) for f in rl.FIELDS] == [type(getattr(plain, f)) for f in rl.FIELDS]
        with pytest.raises(ValueError, match="must be a whole number"):
            rl.make_recipe("grpo", group_size=np.float64(2.5))
        with pytest.raises(ValueError, match="must be a number"):
            rl.make_recipe("grpo", group_size=np.bool_(True))


def small_table():
    """Two instances of one agent with three plays each, one token row per play; everything in float64."""
    rng = np.random.default_rng(8)
    instance, size = np.repeat([0, 1], 3), 6
    zeros = np.zeros(size, int)
    where = np.arange(5) < np.array([5, 2, 3, 1, 4, 2])[:, None]
    samples = rl.Samples(instance=instance, env=zeros, agent=zeros, turn=zeros, trajectory=np.arange(size), local=np.zeros(size),
                         team=rng.random(size), tokens=where.sum(axis=1))  # fmt: skip
    old = -rng.exponential(size=(size, 5))
    return samples, old + rng.normal(size=old.shape) / 4, old, where


def oracle(name, reward, new, old, where):
    """Each paper's objective, written down play by play."""
    plays, loss = range(6), 0.0
    lengths = [int(where[s].sum()) for s in plays]
    a = np.zeros(6)
    for s in plays:
        group = [q for q in plays if q // 3 == s // 3]
        mean, std = np.mean(reward[group]), np.std(reward[group], ddof=1)
        others = np.mean([reward[q] for q in group if q != s])
        a[s] = {"dr_grpo": reward[s] - mean, "rloo": reward[s] - others}.get(name, (reward[s] - mean) / (std + 1e-6))
    if name == "reinforce_pp":
        per_token = np.concatenate([np.full(n, r) for n, r in zip(lengths, reward)])
        a = (reward - per_token.mean()) / np.sqrt(per_token.var() + 1e-8)
    for s in plays:
        n, d = lengths[s], (new - old)[s, : lengths[s]]
        low, high = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4)}.get(name, (0.2, 0.2))
        ratio = np.full(n, np.exp(d.mean())) if name == "gspo" else np.exp(d)
        term = -np.minimum(ratio * a[s], np.clip(ratio, 1 - low, 1 + high) * a[s])
        if name == "rloo":
            loss += -a[s] * new[s, :n].sum() / 6
        elif name == "dr_grpo":
            loss += term.sum() / 3000 / 6
        elif name == "gspo":
            loss += term.mean() / 6
        else:
            loss += term.sum() / sum(lengths)
    return a, loss


@pytest.mark.parametrize("name", ["dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo"])
def test_c9_a_published_objective(name):
    samples, new, old, where = small_table()
    recipe = rl.make_recipe(name)
    with jax.enable_x64(True):
        advantages, _, _ = rl.advantages_for(recipe, samples)
        total, count, _ = rl.loss_for(recipe, new, old, advantages, where=where)
        desired, loss = oracle(name, samples.team, new, old, where)
        np.testing.assert_allclose(advantages, desired, rtol=1e-10)
        np.testing.assert_allclose(total / count, loss, rtol=1e-10)


def play_of_two_turns(kl):
    """Two plays of one task, two roles that speak in two turns each; both plays end with the same team reward."""
    agent, turn, trajectory = (np.asarray(x) for x in ([0, 1, 0, 1] * 2, [0, 0, 1, 1] * 2, [0] * 4 + [1] * 4))
    zeros = np.zeros(8, int)
    return rl.Samples(instance=zeros, env=zeros, agent=agent, turn=turn, trajectory=trajectory, team=np.where(turn == 1, 1.0, 0.0),
                      local=np.zeros(8), tokens=np.ones(8, int), kl=np.asarray(kl, float))  # fmt: skip


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("rewards", ["team", "mixed", "local"])
@pytest.mark.parametrize("name", ["grpo", "dr_mas", "rloo", "gspo", "dapo", "reinforce_pp"])
def test_with_an_outcome_each_sample_pays_the_kl_of_its_own_response(name, rewards, row):
    of_scale = {} if name in ("rloo", "reinforce_pp") else {"scale_advantages": "none"}
    recipe = rl.make_recipe(name, rewards=rewards, kl_coef=0.1, kl_where="reward", group_size=2, **of_scale)
    assert recipe.returns == "outcome"
    charged = rl.advantages_for(recipe, play_of_two_turns(np.where(np.arange(8) == row, 3.0, 0.0)))[0]
    assert float(charged[row]) < -0.05  # whoever moved, in whichever turn
    assert np.min(np.delete(np.asarray(charged), row)) >= -1e-6  # and nobody else pays


def test_an_outcome_without_its_kl_and_the_kl_alone_add_up():
    recipe = rl.make_recipe("grpo", scale_advantages="none", kl_coef=0.5, kl_where="reward", group_size=2, group_by=("instance",))
    kl = np.arange(8.0)
    earned = rl.advantages_for(recipe, play_of_two_turns(kl))[0]
    np.testing.assert_allclose(earned, -0.5 * (kl - kl.mean()), atol=1e-6)


@pytest.mark.parametrize(("returns", "extra"), [("to_go", {"scope": "joint"}), ("to_go", {"scope": "agent"}), ("trajectory", {}),
                                                ("immediate", {}), ("to_go_mean", {})])  # fmt: skip
def test_no_return_loses_the_kl_of_an_early_turn(returns, extra):
    recipe = rl.make_recipe("grpo", returns=returns, scale_advantages="none", kl_coef=0.1, kl_where="reward", group_size=2, **extra)
    assert float(rl.advantages_for(recipe, play_of_two_turns([3.0] + [0.0] * 7))[0][0]) < -0.01


def weights_of(recipe):
    """The least and the largest weight that the loss gives to log-probs whose ratios lie far below and far above 1."""
    new, old = jnp.array([[-9.0, -0.1]]), jnp.array([[-0.1, -9.0]])
    gradient = jax.grad(lambda x: rl.loss_for(recipe, x, old, jnp.ones(1), where=jnp.ones((1, 2), bool))[0])(new)
    return np.abs(np.asarray(gradient))[0]


def test_a_loss_clips_by_its_own_defaults_and_what_is_set_is_kept():
    cispo = rl.make_recipe("grpo", loss="cispo", loss_aggregation="sequence_mean_token_sum")
    np.testing.assert_allclose(weights_of(cispo), [np.exp(-8.9), 5.0], rtol=1e-5)
    assert [(r.clip_low, r.clip_high) for r in (cispo, rl.make_recipe("grpo"))] == [(1.0, 4.0), (0.2, 0.2)]
    chosen = rl.make_recipe("grpo", loss="cispo", loss_aggregation="sequence_mean_token_sum", clip_low=0.2, clip_high=0.2)
    np.testing.assert_allclose(weights_of(chosen), [0.8, 1.2], rtol=1e-5)
    assert rl.make_recipe("gspo", loss="cispo", clip_high=2.0).clip_high == 2.0


def test_the_clips_of_a_recipe_belong_to_its_own_loss():
    for name in ("gspo", "dapo"):
        other = rl.make_recipe(name, loss="cispo")
        assert (other.clip_low, other.clip_high) == (1.0, 4.0)
        assert rl.make_recipe(name, loss="clip").clip_high == rl.make_recipe(name).clip_high < 0.3
    replaced = dataclasses.replace(rl.make_recipe("grpo"), loss="cispo")
    assert (replaced.clip_low, replaced.clip_high) == (1.0, 4.0)
    assert dataclasses.replace(rl.make_recipe("grpo", clip_low=0.2), loss="cispo").clip_low == 0.2
