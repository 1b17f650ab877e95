"""Rollouts, routing of rows to models, evaluation and supervised warm-up on a mesh of several devices (laws 2, 5, 6, 8, 10, 12)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.algorithms import make_recipe
from marl_llm.games import PlanPath, split_index
from marl_llm.games.plan_path.maps import fingerprint, in_split
from marl_llm.models import ModelConfig, init_params
from marl_llm.rollout import model_player, scripted_player
from marl_llm.sampling.sequences import eighths
from marl_llm.training import (
    LearnerOptions,
    ModelSpec,
    RolloutError,
    linear_decay,
    make_mesh,
    make_optimizer,
    make_rollout,
    make_team,
    sampling_of,
)
from marl_llm.training.batch import from_pool
from marl_llm.training.rollouts import summarise
from marl_llm.training.scoring import make_policy_scorer
from marl_llm.workflows import Assignment, Inside, WorkflowError

GAME = PlanPath(height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=2, wall_density=0.2)
CONFIG = ModelConfig(GAME.tokenizer.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16)
# a model this small is seldom understood: the entropy term gives it a gradient even where all branches are paid alike
RECIPE = make_recipe("at_grpo", group_size=4, temperature=1.3, entropy_coef=0.05)
# Names on purpose: sorted, the models and the roles come in another order than the game has them.
ASSIGNMENT = {"tool": "zeta", "planner": "alpha"}
ROLES = ("tool", "planner")
CONFIGS = {"zeta": CONFIG, "alpha": CONFIG}
E = 8
OPTIONS = LearnerOptions(RECIPE, make_optimizer(), row_tokens=64, minibatch=8)


def start_params():
    make = jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))
    return {"zeta": make(jax.random.key(1)), "alpha": make(jax.random.key(2))}


def rollout_on(mesh, game=GAME, environments=E):
    def player_of(params):
        return model_player(game, ASSIGNMENT, CONFIGS, params, RECIPE.temperature)

    return make_rollout(game, mesh, player_of, environments, **sampling_of(RECIPE))


def team(devices=2, game=GAME, **options):
    specs = {name: ModelSpec(CONFIG, params) for name, params in start_params().items()}
    return make_team(game, Assignment(ASSIGNMENT), specs, OPTIONS, make_mesh(devices), seed=7, **options)


@pytest.fixture(scope="module")
def rollout():
    return rollout_on(make_mesh(2))


@pytest.fixture(scope="module")
def batch(rollout):
    return rollout(start_params(), 0, jax.random.key(7))


@pytest.fixture(scope="module")
def samples(batch):
    """(tokens, columns)"""
    return from_pool(batch.pool, 8)


def test_law_6_samples_do_not_depend_on_the_number_of_devices(batch):
    one = rollout_on(make_mesh(1))(start_params(), 0, jax.random.key(7))
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


def test_law_6_a_task_that_comes_again_in_another_step_is_played_anew(rollout, batch):
    again = rollout(start_params(), 0, jax.random.key(7), step=1)
    jax.tree.map(np.testing.assert_array_equal, again.instances, batch.instances)
    for role in ROLES:
        then, now = (played.rollout.tables[role].responses.tokens for played in (batch, again))
        assert np.any(np.asarray(then != now))


def test_law_1_the_samples_that_are_trained_hold_the_very_ids_that_were_sampled(batch, samples):
    tokens, table = samples
    ids, log_probs = np.asarray(tokens.ids), np.asarray(tokens.log_probs)
    responses = ids[len(ids) - len(log_probs) :]
    assert set(table.agent.tolist()) == {0, 1}
    for i in range(len(tokens)):
        t, e, k = int(table.turn[i]), int(table.instance[i]), int(tokens.rank[i])
        of = jax.tree.map(lambda x: np.asarray(x[t, e, 0]), batch.rollout.tables[ROLES[table.agent[i]]])  # noqa: B023
        at, size = int(tokens.response_at[i]), int(tokens.size[i])
        np.testing.assert_array_equal(responses[at : at + size], of.responses.tokens[k][of.responses.where[k]])
        np.testing.assert_array_equal(log_probs[at : at + size], of.responses.sampled_log_probs[k][of.responses.where[k]])
        at, size = int(tokens.prompt_at[i]), int(tokens.prompt_size[i])
        np.testing.assert_array_equal(ids[at : at + size], of.prompt.ids[of.prompt.where])
        assert (table.team[i], table.local[i]) == (of.rewards.team[k], of.rewards.local[k])
        assert bool(table.where[i]) == bool(of.where)


def test_agents_are_numbered_as_the_game_has_its_roles_not_as_a_dict_sorts_them(batch, samples):
    """A pytree of tables comes back with sorted keys; numbered by that order, each model would learn from the other's rows."""
    assert list(batch.rollout.tables) == ["planner", "tool"]
    tokens, table = samples
    last = np.asarray(tokens.ids)[tokens.prompt_at + tokens.prompt_size - 1]
    assert ROLES == tuple(role.name for role in GAME.roles)
    for agent, name in enumerate(ROLES):
        assert set(last[table.agent == agent]) == set(GAME.tokenizer.ids_of([name]))


def test_law_2_each_sample_scores_alike_under_the_model_that_wrote_it_and_under_no_other(samples):
    tokens, table = samples
    score = make_policy_scorer(RECIPE, CONFIG, make_mesh(2), row_tokens=64, minibatch=64)
    everyone = np.arange(len(tokens))
    where = np.arange(score((start_params()["alpha"], None), tokens, everyone).shape[1]) < tokens.size[:, None]
    drawn = np.zeros(where.shape, np.float32)
    drawn[where] = np.concatenate([np.asarray(tokens.log_probs)[a : a + n] for a, n in zip(tokens.response_at, tokens.size)])
    scored = {name: score((params, None), tokens, everyone)[: len(tokens)] for name, params in start_params().items()}
    gap = {name: np.abs(np.where(where, x - drawn, 0)).max(1) for name, x in scored.items()}
    for agent, role in enumerate(ROLES):
        own = ASSIGNMENT[role]
        assert gap[own][table.agent == agent].max() < 5e-5
        other = gap["alpha" if own == "zeta" else "zeta"]
        assert min(other[table.env == env].max() for env in np.unique(table.env[table.agent == agent])) > 0.01  # every row


def test_a_team_trains_each_model_on_the_samples_of_its_own_role():
    with team() as one:
        begin = {name: learner.start for name, learner in one.learners.items()}
        for step in range(2):
            batch = one.play(step, E * step, E)
            np.testing.assert_array_equal(batch.version, step)
            figures = one.learn(batch, 0.01)
            counted = 0
            for name, found in figures.items():
                assert found["log_prob_gap"] < 5e-5, (step, name)
                assert found["mixed_prompt_share"] == 0
                assert found["updates"] > 0 < found["grad_norm"]
                counted += found["groups"]
            assert set(figures) == {"zeta", "alpha"}
            trained = batch.table.where
            prompts = zip(*(x[trained].tolist() for x in (batch.table.instance, batch.tokens.prompt)))
            assert counted == len(set(prompts))  # every prompt is somebody's
        for name, learner in one.learners.items():
            assert not np.allclose(learner.params["embedding"], begin[name]["embedding"], atol=1e-3)
        assert {f"tied_share/{role}" for role in ROLES} < set(figures["zeta"])


def test_samples_handed_to_the_wrong_model_show_in_the_gap():
    with team() as one:
        batch = one.play(0, 0, E)
        swapped = dataclasses.replace(batch.table, agent=1 - batch.table.agent)
        figures = one.learn(dataclasses.replace(batch, table=swapped), 0.0)
        assert min(found["log_prob_gap"] for found in figures.values()) > 0.1


def test_d2_instances_that_cannot_be_played_train_nobody_win_nothing_and_are_counted(monkeypatch):
    """Every third instance is unplayable; the script, which solves all others, must not win on them."""
    monkeypatch.setattr(PlanPath, "valid", lambda self, instance: (jnp.sum(instance.start) + jnp.sum(instance.goal)) % 3 != 0)
    game = dataclasses.replace(GAME, max_turns=3)
    script = scripted_player(game, noise=0.0, sighted=1.0)
    played = make_rollout(game, make_mesh(1), lambda params: script, 24)({}, 0, jax.random.key(7))
    aborted = np.asarray(played.rollout.episodes.aborted)[:, 0]
    assert 0 < aborted.sum() < 24
    _, table = from_pool(played.pool, 8)
    assert not table.where[np.isin(table.instance, np.flatnonzero(aborted))].any()
    assert table.where[np.isin(table.instance, np.flatnonzero(~aborted)) & (table.turn == 0)].all()
    assert float(played.summary["aborted"]) == pytest.approx(aborted.mean())
    won = np.asarray(played.rollout.episodes.outcome)[:, 0] >= 1
    assert float(played.summary["success"]) == pytest.approx(won[~aborted].mean())
    with team(game=game, script=dict(noise=0.0, sighted=1.0)) as one:
        seats = dict.fromkeys(ROLES, "scripted")
        found = one.evaluate(seats, "test", 24)
        assert 0 < sum(x.aborted for x in found.outcomes) < 24
        assert found.summary()["episodes"] == 24 - sum(x.aborted for x in found.outcomes)
        assert found.success == 1.0
        monkeypatch.setattr(PlanPath, "valid", lambda self, instance: jnp.bool_(False))
    with team(game=dataclasses.replace(game, max_turns=4)) as one:
        with pytest.raises(RolloutError, match="no instance of plan_path could be played"):
            one.play(0, 0, E)


def test_the_summary_counts_what_the_tables_hold(batch):
    summary = {k: float(v) for k, v in batch.summary.items()}
    samples = tokens = prompts = prompt_tokens = 0
    for role, table in batch.rollout.tables.items():
        table = jax.tree.map(np.asarray, table)
        prompts, prompt_tokens = prompts + table.where.sum(), prompt_tokens + table.prompt.where[table.where].sum()
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
    assert (summary["prompts"], summary["prompt_tokens"]) == (prompts, prompt_tokens)
    assert summary["aborted"] == 0
    assert summary["success"] == pytest.approx(float(jnp.mean(batch.rollout.episodes.outcome)))


def test_the_summary_leaves_out_what_does_not_count(batch):
    """The rows of the second turn are those of episodes that were over."""
    tables = {role: table._replace(where=table.where.at[1:].set(False)) for role, table in batch.rollout.tables.items()}
    summary = summarise(batch.rollout._replace(tables=tables))
    first = [jax.tree.map(lambda x: np.asarray(x)[0], table) for table in tables.values()]
    assert summary["prompts"] == sum(table.where.sum() for table in first)
    assert summary["prompt_tokens"] == sum(table.prompt.where.sum() for table in first)
    assert summary["samples"] == 4 * summary["prompts"]
    assert summary["sampled_tokens"] == sum(table.responses.where.sum() for table in first)


def test_law_12_training_and_evaluation_draw_from_their_own_splits(batch):
    script = scripted_player(GAME, noise=0.0, sighted=1.0)
    evaluate = make_rollout(GAME, make_mesh(2), lambda params: script, 16)

    def belongs(drawn, split):
        return [
            bool(in_split(fingerprint(w, s, g), split)) for w, s, g in zip(drawn.walls, drawn.start, drawn.goal, strict=True)
        ]

    assert all(belongs(batch.instances, "train"))
    for split in ("validation", "test"):
        seen = evaluate({}, 0, jax.random.key(3), split_index(split))
        assert all(belongs(seen.instances, split))
        assert float(seen.summary["success"]) == 1.0  # and the sighted script solves them all


def test_imitation_lowers_the_loss_and_begins_all_models_of_one_shape_alike():
    shared = ModelSpec(CONFIG, start_params()["alpha"])
    specs = dict.fromkeys(("zeta", "alpha"), shared)
    with make_team(GAME, Assignment(ASSIGNMENT), specs, OPTIONS, make_mesh(2), script={"noise": 0.2}) as one:
        figures = [one.sft_step(step % 10, 8, 0.02) for step in range(40)]
        one.start_rl()
        losses = [found["loss"] for found in figures]
        assert losses[0] > 5
        assert np.mean(losses[-5:]) < 0.5 * losses[0]
        assert figures[-1]["tokens"] > 0 < figures[-1]["grad_norm"]
        for a, b in zip(*(jax.tree.leaves(one.learners[name].params) for name in ("zeta", "alpha")), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("step", "want"), [(0, 0.25), (1, 0.5), (3, 1.0), (4, 1.0), (14, 0.55), (24, 0.1), (100, 0.1)]
)
def test_linear_decay_warms_up_then_falls_to_its_floor(step, want):
    assert float(linear_decay(step, 24, 2.0, warmup=4, floor=0.1)) == pytest.approx(2.0 * want)


def test_linear_decay_without_warm_up_starts_at_its_peak_and_ends_at_zero():
    rates = [float(linear_decay(s, 10, 3.0)) for s in (jnp.float32(0), jnp.int32(5), 10.0)]
    assert rates == pytest.approx([3.0, 1.5, 0.0])


def test_a_rollout_samples_as_its_recipe_says():
    """Candidates and their pick in a tree; whole plays, each with one response to a prompt, in parallel."""
    tree = make_recipe("at_grpo", group_size=3, pick="random", rewards="mixed", alpha=0.5)
    assert sampling_of(tree) == {"trajectories": 1, "branches": 3, "pick": "random", "alpha": 0.5, "local_weight": 1.0}
    plays = sampling_of(make_recipe("grpo", group_size=3, rewards="team"))
    assert (plays["trajectories"], plays["branches"]) == (3, 1)
    assert (plays["alpha"], plays["local_weight"]) == (1.0, 0.0)


def test_seats_of_compiled_play():
    with team(script=dict(noise=0.0, sighted=1.0)) as one:
        def page(**seats):
            return one.evaluate(seats, "test", 10)

        before = page()
        assert before.summary()["episodes"] == 10
        assert page(tool="scripted", planner="scripted").success == 1.0
        assert page(tool="scripted", planner="scripted").well_formed == {"tool": 1.0, "planner": 1.0}
        floor = page(tool="random", planner="random")
        assert floor.well_formed == {"tool": 1.0, "planner": 1.0}
        assert floor.success < 1
        params = one.learners["zeta"].params
        one.learners["zeta"].start_rl(jax.tree.map(jnp.zeros_like, params))  # says the same whatever it reads

        def asked(**seats):
            plays = [play for play, _ in page(**seats).episodes(4, "x")]
            return [step["responses"][0]["text"] for play in plays for step in play["steps"] if step["role"] == "tool"]

        assert len(set(asked())) == 1
        assert asked(tool="trained:alpha") == asked(tool="start:alpha") != asked()
        twice = one.evaluate({}, "validation", 3, plays=2, temperature=1.0, first=5)
        assert [(x.task, x.play) for x in twice.outcomes] == [(t, p) for t in (5, 6, 7) for p in (0, 1)]
        for seat, message in (("human", "compiled play has no such seat"), ("start:beta", "no model 'beta'; the models are zeta, alpha")):
            with pytest.raises(ValueError, match=message):
                page(tool=seat)


def test_frozen_models_stay_and_others_than_policies_are_refused():
    specs = {name: ModelSpec(CONFIG, params) for name, params in start_params().items()}
    frozen = Assignment(ASSIGNMENT, {"alpha": Inside(trained=False)})
    with make_team(GAME, frozen, specs, OPTIONS, make_mesh(1)) as one:
        batch = one.play(0, 0, E)
        assert set(batch.table.agent[batch.table.where]) == {0}
        assert set(one.learn(batch, 0.01)) == {"zeta"}
    with pytest.raises(WorkflowError, match="models holds only zeta"):
        make_team(GAME, Assignment(ASSIGNMENT), {"zeta": specs["zeta"]}, OPTIONS, make_mesh(1))


def test_law_10_what_does_not_divide_is_refused_by_name():
    for environments in (0, 6):
        with pytest.raises(ValueError, match=f"tasks={environments} do not divide over 4 devices; choose a multiple of 4"):
            rollout_on(make_mesh(4), environments=environments)
    for devices in (0, 9):
        with pytest.raises(ValueError, match=f"data={devices} x fsdp=1 x tensor=1 devices asked for, 8 are there"):
            make_mesh(devices)


def test_a_minibatch_beyond_the_prompts_has_rows_for_the_prompts_alone(batch):
    tokens, _ = from_pool(batch.pool, 100_000)
    assert tokens.shape.rows == batch.pool.size.shape[0]
    assert from_pool(batch.pool, 2)[0].shape.rows == 2


def test_tables_have_an_eighth_more_than_they_need_at_most():
    sizes = [eighths(n) for n in range(1, 5000)]
    assert all(n <= size <= max(n + 1, n * 9 / 8) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 9 * 12
    assert (eighths(3, 64), eighths(0, 4), eighths(1030), eighths(4100)) == (64, 4, 1152, 4608)
