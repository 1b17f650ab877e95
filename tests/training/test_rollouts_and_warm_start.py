"""Rollouts, routing of rows to models, evaluation and warm start on a mesh of several devices (laws 2, 5, 6, 8, 10, 12)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.games import JointLetter, PlanPath, split_index
from marl_llm.games.plan_path.maps import fingerprint, in_split
from marl_llm.models import ModelConfig, init_params, score_responses
from marl_llm.rollout import scripted_player
from marl_llm.training import (
    fresh_policy,
    linear_decay,
    make_evaluation,
    make_imitation,
    make_mesh,
    make_optimizer,
    make_policy,
    make_rollout,
    make_update,
)

GAME = PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2)
CONFIG = ModelConfig(GAME.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
# a model this small is seldom understood: the entropy term gives it a gradient even where all branches are paid alike
RECIPE = make_recipe("at_grpo", branches=4, temperature=1.3, entropy_coef=0.05)
# Names on purpose: sorted, the models and the roles come in another order than the game has them.
ASSIGNMENT = {"tool": "zeta", "planner": "alpha"}
CONFIGS = {"zeta": CONFIG, "alpha": CONFIG}
E = 8
OPTIMIZER = make_optimizer()


def start_params():
    make = jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))
    return {"zeta": make(jax.random.key(1)), "alpha": make(jax.random.key(2))}


def plays(model):
    """Which agents a model plays, numbered as the game has its roles."""
    return jnp.asarray([ASSIGNMENT[role.name] == model for role in GAME.roles])


@pytest.fixture(scope="module")
def rollout():
    return make_rollout(GAME, RECIPE, ASSIGNMENT, CONFIGS, make_mesh(2), environments=E)


@pytest.fixture(scope="module")
def batch(rollout):
    return rollout(start_params(), 0, jax.random.key(7))


@pytest.fixture(scope="module")
def update():
    return make_update(RECIPE, CONFIG, OPTIMIZER, make_mesh(2), minibatch=8)


def test_law_6_samples_do_not_depend_on_the_number_of_devices(batch):
    one = make_rollout(GAME, RECIPE, ASSIGNMENT, CONFIGS, make_mesh(1), environments=E)(start_params(), 0, jax.random.key(7))
    for role, table in batch.rollout.tables.items():
        np.testing.assert_array_equal(table.responses.tokens, one.rollout.tables[role].responses.tokens)
        np.testing.assert_array_equal(table.prompt.ids, one.rollout.tables[role].prompt.ids)
        np.testing.assert_array_equal(table.chosen, one.rollout.tables[role].chosen)
        np.testing.assert_allclose(table.responses.log_probs, one.rollout.tables[role].responses.log_probs, atol=1e-5)
    np.testing.assert_array_equal(batch.instances.walls, one.instances.walls)
    for name, value in one.summary.items():
        assert float(batch.summary[name]) == pytest.approx(float(value), abs=1e-5), name


def test_law_6_a_later_call_goes_on_with_the_next_instances(rollout, batch):
    later = rollout(start_params(), 4, jax.random.key(7))
    for name in ("walls", "start", "goal"):
        np.testing.assert_array_equal(getattr(later.instances, name)[:4], getattr(batch.instances, name)[4:])
    tokens = batch.rollout.tables["planner"].responses.tokens
    np.testing.assert_array_equal(later.rollout.tables["planner"].responses.tokens[:, :4], tokens[:, 4:])
    assert len({w.tobytes() + s.tobytes() + g.tobytes() for w, s, g in zip(*map(np.asarray, batch.instances[:3]))}) > 4


def test_law_1_the_rows_that_are_trained_hold_the_very_ids_that_were_sampled(batch):
    rows = batch.rows
    assert set(np.asarray(rows.agent).tolist()) == {0, 1}
    for agent, role in enumerate(GAME.roles):
        table = batch.rollout.tables[role.name]
        for i in np.flatnonzero(np.asarray(rows.agent) == agent):
            t, e = int(rows.turn[i]), int(rows.env[i])
            r = role.response_tokens
            np.testing.assert_array_equal(rows.tokens[i, :, :r], table.responses.tokens[t, e, 0])
            np.testing.assert_array_equal(rows.token_where[i, :, :r], table.responses.where[t, e, 0])
            np.testing.assert_array_equal(rows.log_probs[i, :, :r], table.responses.sampled_log_probs[t, e, 0])
            ids = np.asarray(table.prompt.ids[t, e, 0])[np.asarray(table.prompt.where[t, e, 0])]
            np.testing.assert_array_equal(np.asarray(rows.prompt[i])[np.asarray(rows.prompt_where[i])], ids)
            np.testing.assert_array_equal(rows.team[i], table.rewards.team[t, e, 0])
            np.testing.assert_array_equal(rows.local[i], table.rewards.local[t, e, 0])
            assert bool(rows.where[i]) == bool(table.where[t, e, 0])


def test_agents_are_numbered_as_the_game_has_its_roles_not_as_a_dict_sorts_them(batch):
    """A pytree of tables comes back with sorted keys; numbered by that order, each model would learn from the other's rows."""
    assert list(batch.rollout.tables) == ["planner", "tool"]
    last = np.asarray(batch.rows.prompt)[:, -1]
    names = [role.name for role in GAME.roles]
    assert names == ["tool", "planner"]
    for agent, name in enumerate(names):
        assert set(last[np.asarray(batch.rows.agent) == agent]) == set(GAME.tokenizer.ids_of([name]))


def test_law_2_each_row_scores_alike_under_the_model_that_wrote_it_and_under_no_other(batch):
    rows, params = batch.rows, start_params()
    args = (rows.prompt, rows.prompt_where, rows.tokens, RECIPE.temperature)
    score = jax.jit(lambda p: score_responses(CONFIG, p, *args).log_probs)
    gap = {name: np.abs(np.where(rows.token_where, score(p) - rows.log_probs, 0)).max((1, 2)) for name, p in params.items()}
    for agent, role in enumerate(GAME.roles):
        mine = np.asarray(rows.agent) == agent
        own = ASSIGNMENT[role.name]
        assert gap[own][mine].max() < 5e-5
        assert gap["alpha" if own == "zeta" else "zeta"][mine].min() > 0.01


def test_two_different_models_learn_for_several_steps_and_the_gap_stays_small(rollout, update):
    policies = {name: make_policy(p, OPTIMIZER) for name, p in start_params().items()}
    begin = start_params()
    for i in range(3):
        batch = rollout({name: policy.params for name, policy in policies.items()}, i * E, jax.random.key(7))
        counted = 0
        for name in policies:
            key = jax.random.fold_in(jax.random.key(9), i)
            policies[name], metrics = update(policies[name], None, batch.rows, plays(name), jnp.float32(0.01), key)
            assert float(metrics["log_prob_gap"]) < 5e-5, (i, name)
            assert float(metrics["mixed_prompt_share"]) == 0
            assert int(metrics["updates"]) > 0
            assert float(metrics["grad_norm"]) > 0
            counted += int(metrics["groups"])
        assert counted == int(batch.rows.where.sum())  # every row is somebody's
    for name, policy in policies.items():
        assert not np.allclose(policy.params["embedding"], begin[name]["embedding"], atol=1e-3)


def test_rows_handed_to_the_wrong_model_show_in_the_gap(batch, update):
    policy = make_policy(start_params()["zeta"], OPTIMIZER)
    _, metrics = update(policy, None, batch.rows, plays("alpha"), jnp.float32(0.0), jax.random.key(0))
    assert float(metrics["log_prob_gap"]) > 0.1


def test_the_summary_counts_what_the_tables_hold(batch):
    summary = {k: float(v) for k, v in batch.summary.items()}
    samples = tokens = 0
    for role, table in batch.rollout.tables.items():
        table = jax.tree.map(np.asarray, table)
        rows = np.broadcast_to(table.where[..., None], table.rewards.team.shape)
        for name, values in (
            ("team", table.rewards.team),
            ("local", table.rewards.local),
            ("well_formed", table.rewards.well_formed),
            ("truncated", table.responses.truncated),
            ("component/format", table.rewards.components["format"]),
        ):
            assert summary[f"role/{role}/{name}"] == pytest.approx(values[rows].mean(), abs=1e-5), (role, name)
        written = table.responses.where & rows[..., None]
        assert summary[f"role/{role}/entropy"] == pytest.approx(table.responses.entropy[written].mean(), abs=1e-4)
        samples, tokens = samples + rows.sum(), tokens + written.sum()
        # law 8: what was cut off before its stop word does not parse, and both are counted
        assert not (table.rewards.well_formed & table.responses.truncated).any()
        assert summary[f"role/{role}/truncated"] > 0
        assert summary[f"role/{role}/well_formed"] < 1
    assert summary["samples"] == samples
    assert summary["sampled_tokens"] == tokens
    assert summary["void"] == 0
    assert summary["success"] == pytest.approx(float(jnp.mean(batch.rollout.episodes.outcome)))


def test_law_12_training_and_evaluation_draw_from_their_own_splits(batch):
    script = scripted_player(GAME, noise=0.0, sighted=1.0)
    evaluate = make_evaluation(GAME, make_mesh(2), lambda params: script, environments=16)
    belongs = lambda drawn, split: [  # noqa: E731
        bool(in_split(fingerprint(w, s, g), split)) for w, s, g in zip(drawn.walls, drawn.start, drawn.goal, strict=True)
    ]
    assert all(belongs(batch.instances, "train"))
    for split in ("validation", "test"):
        seen = evaluate({}, 0, jax.random.key(3), split_index(split))
        assert all(belongs(seen.instances, split))
        assert float(seen.summary["success"]) == 1.0  # and the sighted script solves them all


def test_imitation_lowers_the_loss_of_a_model_that_is_shared_by_all_roles():
    imitate = make_imitation([GAME], CONFIG, OPTIMIZER, make_mesh(2), environments=8, branches=2, script={"noise": 0.2})
    policy, losses = fresh_policy(CONFIG, jax.random.key(0), OPTIMIZER), []
    for i in range(40):
        policy, metrics = imitate(policy, jnp.int32(i), jnp.float32(0.02), jax.random.key(1))
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(CONFIG.vocab_size), rel=0.1)
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert float(metrics["tokens"]) > 0
    assert np.isfinite(float(metrics["grad_norm"]))


@pytest.mark.parametrize(
    ("step", "want"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (14, 0.55), (24, 0.1), (100, 0.1)]
)
def test_linear_decay_warms_up_then_falls_to_its_floor(step, want):
    assert float(linear_decay(step, 24, 2.0, warmup=4, floor=0.1)) == pytest.approx(2.0 * want)


def test_linear_decay_without_warm_up_starts_at_its_peak_and_ends_at_zero():
    rates = [float(linear_decay(s, 10, 3.0)) for s in (jnp.float32(0), jnp.int32(5), 10.0)]
    assert rates == pytest.approx([3.0, 1.5, 0.0])


def test_law_10_what_does_not_divide_or_does_not_fit_is_refused_by_name():
    mesh, other = make_mesh(4), PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=3)
    with pytest.raises(ValueError, match="rollout.environments=6 do not divide over 4 devices; choose a multiple of 4"):
        make_rollout(GAME, RECIPE, ASSIGNMENT, CONFIGS, mesh, environments=6)
    with pytest.raises(ValueError, match="rollout.environments=0"):
        make_rollout(GAME, RECIPE, ASSIGNMENT, CONFIGS, mesh, environments=0)
    with pytest.raises(ValueError, match="=5 do not divide over 4 devices"):
        make_evaluation(GAME, mesh, lambda p: None, environments=5)
    with pytest.raises(ValueError, match="top_k=20, top_p=0.9"):
        make_rollout(GAME, make_recipe("at_grpo", "released"), ASSIGNMENT, CONFIGS, mesh, environments=8)
    for environments in (0, 6):
        with pytest.raises(ValueError, match=f"warm_start.environments={environments} do not divide over 4 devices"):
            make_imitation([GAME], CONFIG, OPTIMIZER, mesh, environments=environments, branches=2)
    for foreign in (other, JointLetter()):
        with pytest.raises(ValueError, match="share a vocabulary"):
            make_imitation([GAME, foreign], CONFIG, OPTIMIZER, mesh, environments=8, branches=2)
    for devices in (0, 9):
        with pytest.raises(ValueError, match=f"data={devices} x fsdp=1 x tensor=1 devices asked for, 8 are there"):
            make_mesh(devices)
