"""What an optimizer remembers, and what a KL is measured to: the parts of a step that a run of one step cannot show."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marl_llm.algorithms import Samples, make_recipe, next_kl_coef
from marl_llm.models import Decoder, LoraConfig, ModelConfig, attach, init_params, merge, prompt_mask, prompt_positions
from marl_llm.training import TokenSample, make_mesh, make_optimizer
from marl_llm.training.batch import Batch
from marl_llm.training.learner import Learner, ModelSpec
from marl_llm.training.packing import Tokens
from marl_llm.training.team import Team
from marl_llm.training.train_state import apply_gradient, linear_decay, make_train_state
from marl_llm.training.update import LearnerOptions, columns_of
from marl_llm.workflows import Assignment

SHAPE = ModelConfig(vocab_size=8, width=4, layers=1, query_heads=1, key_value_heads=1, head_dim=4, feed_forward=4)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def shifted(tree, by):
    return jax.tree.map(lambda x: x + jnp.asarray(by, x.dtype), tree)


def test_d3_the_optimizers_memory_goes_from_step_to_step():
    """Two steps are optax's two steps; with a memory made anew, the second would be as long as a first one."""
    params, gradients = {"w": jnp.asarray([1.0, -2.0])}, ({"w": jnp.asarray([3.0, 0.1])}, {"w": jnp.asarray([-0.2, 0.4])})
    rate, optimizer = 0.1, make_optimizer(max_grad_norm=1.0)
    policy = make_train_state(params, optimizer)
    reference = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b1=0.9, b2=0.99))
    state = reference.init(params)
    for gradient in gradients:
        policy, norm = apply_gradient(policy, gradient, jnp.float32(rate), optimizer)
        updates, state = reference.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(policy.params["w"], params["w"], atol=1e-6)
        np.testing.assert_allclose(norm, np.linalg.norm(gradient["w"]), rtol=1e-6)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adamw(0.1), optax.lion(0.1), optax.sgd(optax.constant_schedule(0.1))])
def test_any_ordinary_optax_optimizer_moves_a_policy_as_optax_moves_parameters(optimizer):
    params, gradient = {"w": jnp.asarray([1.0, -2.0])}, {"w": jnp.asarray([3.0, -0.1])}
    policy, _ = apply_gradient(make_train_state(params, optimizer), gradient, 1.0, optimizer)
    want = optax.apply_updates(params, optimizer.update(gradient, optimizer.init(params), params)[0])
    np.testing.assert_array_equal(policy.params["w"], want["w"])
    assert np.all(np.sign(policy.params["w"] - params["w"]) == -np.sign(gradient["w"]))


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1), optax.adamw(0.05)])
def test_imitation_with_an_ordinary_optax_optimizer_descends(optimizer):
    options = LearnerOptions(make_recipe("grpo"), optimizer, row_tokens=8, minibatch=1)
    learner = Learner(ModelSpec(SHAPE, init_params(SHAPE, jax.random.key(0))), options, make_mesh(1), jax.random.key(1))
    sample = Tokens.of([TokenSample([1, 2], [3, 4, 5], [0.0] * 3)])
    losses = [float(learner.sft_step(sample, [0], 1.0)["loss"]) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    rates = [float(linear_decay(step, total=10, peak=1.0, warmup=2, floor=0.5)) for step in (0, 1, 2, 6, 10, 20)]
    np.testing.assert_allclose(rates, [0.5, 1.0, 1.0, 0.75, 0.5, 0.5], atol=1e-6)


@pytest.fixture(scope="module")
def learners():
    """Two models of one shape with other parameters, and a KL to where each began."""
    options = LearnerOptions(make_recipe("magrpo", kl_coef=0.1), make_optimizer(), row_tokens=8, minibatch=1)
    mesh = make_mesh(1)
    return [Learner(ModelSpec(SHAPE, init_params(SHAPE, jax.random.key(n))), options, mesh, jax.random.key(9)) for n in range(2)]


def test_d5_the_memory_of_the_warm_up_ends_with_it(learners):
    learner = learners[0]
    fresh = learner.policy.opt_state
    warm = shifted(learner.policy.params, 1.0)
    learner.trained = learner.trained._replace(policy=learner.policy._replace(params=warm, opt_state=shifted(fresh, 3)))
    learner.start_rl()
    assert same(learner.policy.opt_state, fresh)
    assert same(learner.policy.params, warm)
    assert same(learner.start, warm)


def test_d4_the_kl_is_to_where_this_very_model_began(learners, monkeypatch):
    seen = []
    tokens = Tokens.of([])
    zero = np.zeros(0, np.int32)
    table = Samples(instance=zero, env=zero, agent=zero, turn=zero, trajectory=zero, team=zero * 1.0, local=zero * 1.0)
    for learner in learners:
        learner.start_rl()
        begun = jax.tree.map(np.asarray, learner.params)
        learner.trained = learner.trained._replace(policy=learner.policy._replace(params=shifted(learner.policy.params, 0.5)))
        monkeypatch.setattr(learner, "_update", lambda trained, reference, *_, **__: (trained, seen.append(reference) or {}))
        monkeypatch.setattr(learner, "_token_kl", lambda reference, *_: seen.append(reference) or np.zeros((0, 1)))
        learner.learn(tokens, table, np.ones(1, bool), 0.1, None, 0, None, 0.1)
        learner.charged_kl(tokens, zero)
        assert same(seen[-2], begun)
        assert same(seen[-1], begun)
    assert not same(seen[0], seen[2])  # and the two models began apart


def test_adapters_keep_their_own_beginning_and_no_copy_of_the_base():
    options = LearnerOptions(make_recipe("grpo", kl_coef=0.1), make_optimizer(), row_tokens=8, minibatch=1)
    params, lora = init_params(SHAPE, jax.random.key(0)), LoraConfig(rank=2)
    learner = Learner(ModelSpec(SHAPE, params, lora=lora), options, make_mesh(1), jax.random.key(1))
    warm = shifted(learner.policy.params, 0.5)
    learner.start_rl(warm)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(learner.reference["base"])] == [
        x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)
    ]
    later = make_train_state(shifted(warm, 1.0), options.optimizer)
    jax.tree.map(lambda x: x.delete(), learner.policy)  # as an update that donates it
    learner.restore(later, None)
    assert same(learner.begun, warm)
    assert same(learner.start, merge(params, warm, lora))
    assert same(learner.reference, attach(params, warm, lora))
    learner.began_with(later.params)
    assert same(learner.begun, later.params)


class Told(Team):
    """A team that plays nothing: it learns what it is told."""

    play = demonstrate = evaluate = None

    def close(self):
        pass

    def _serve(self, names):
        pass


ROLES = ("first", "second")


def told(recipe, lora=None):
    """A team of two models that begin apart, and a batch: two tasks, each role asked with the same words in both, two answers each."""
    rng = np.random.default_rng(0)
    ask, where = rng.integers(1, 8, (2, 2)), [(task, agent) for task in range(2) for agent in range(2) for _ in range(2)]
    samples = [TokenSample(ask[agent], rng.integers(1, 8, 2), [-2.0, -2.0]) for _, agent in where]
    instance, agent = np.asarray(where, np.int32).T
    pay = rng.normal(size=8).astype(np.float32)
    trajectory = np.arange(8, dtype=np.int32) % 2
    table = Samples(instance=instance, env=instance, agent=agent, turn=0 * agent, trajectory=trajectory, team=pay, local=0 * pay)
    tokens = Tokens.of(samples)
    batch = Batch(0, ROLES, tokens, columns_of(tokens, table), 0 * agent, {}, lambda count, when: [])
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=8, minibatch=2)
    base = init_params(SHAPE, jax.random.key(0))
    begins = [base, base if lora else init_params(SHAPE, jax.random.key(1))]
    specs = {name: ModelSpec(SHAPE, params, lora=lora) for name, params in zip(ROLES, begins, strict=True)}
    return Told(ROLES, Assignment(dict(zip(ROLES, ROLES))), specs, options, make_mesh(1)), samples, batch


@jax.jit
def token_log_probs(params, ids):
    """Log-probs `[S, 2]` of the last two tokens of `ids [S, 4]`, from plain causal rows."""
    real = jnp.ones(ids.shape, bool)
    hidden, _ = Decoder(SHAPE).apply({"params": params}, ids, prompt_positions(real), prompt_mask(real))
    scores = jax.nn.log_softmax((hidden @ params["embedding"].T)[:, 1:-1])
    return jnp.take_along_axis(scores, ids[:, 2:, None], axis=-1)[..., 0]


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "adapters"])
def test_d4_each_model_of_a_team_is_held_to_where_it_began_itself_by_the_loss(lora):
    """Nothing at first, because it has not moved, and something later; another's beginning would cost something at once."""
    team, _, batch = told(make_recipe("grpo", group_size=2, kl_coef=0.1, kl_where="loss", kl_kind="k3"), lora)
    first, second = (team.learn(batch, 0.05) for _ in range(2))
    for name in ROLES:
        assert first[name]["updates"] == 1
        assert first[name]["groups"] == 2  # one prompt, which two tasks share: a minibatch counts prompts of one task
        assert first[name]["kl"] == pytest.approx(0, abs=1e-6)
        assert second[name]["kl"] > 1e-4


def test_d4_each_model_of_a_team_is_charged_against_where_it_began_itself_in_its_rewards():
    """k1 is what was drawn less what the beginning says of it, at the first step and when the models have moved."""
    team, samples, batch = told(make_recipe("grpo", group_size=2, kl_coef=0.1, kl_where="reward", kl_kind="k1"))
    want = {}
    for agent, name in enumerate(ROLES):
        ids = np.asarray([[*s.prompt, *s.response] for s, a in zip(samples, batch.table.agent, strict=True) if a == agent])
        want[name] = float(np.mean(-2.0 - token_log_probs(team.learners[name].params, ids)))
    assert abs(want["first"] - want["second"]) > 0.01
    for _ in range(2):
        figures = team.learn(batch, 0.05)
        assert {name: figures[name]["kl"] for name in ROLES} == pytest.approx(want, abs=1e-4)


STEERED = dict(group_size=2, kl_coef=0.1, kl_target=0.02, kl_horizon=50.0)


def without(batch, role):
    """The same batch in which one role has not spoken."""
    where = batch.table.agent != ROLES.index(role)
    return dataclasses.replace(batch, table=dataclasses.replace(batch.table, where=where))


@pytest.mark.parametrize("kl_where", ["loss", "reward"])
def test_each_models_beta_is_steered_by_its_own_kl_and_a_silent_models_stays(kl_where):
    recipe = make_recipe("grpo", kl_where=kl_where, kl_kind="k3" if kl_where == "loss" else "k1", **STEERED)
    team, _, batch = told(recipe)
    figures = team.learn(without(batch, "second"), 0.05)
    moved = next_kl_coef(recipe, 0.1, figures["first"]["kl"], samples=4)  # its own samples, and nobody's zeros
    assert team.kl_coef == {"first": pytest.approx(moved), "second": 0.1}
    assert moved != 0.1
    figures = team.learn(batch, 0.05)
    assert {name: figures[name]["kl_coef"] for name in ROLES} == {"first": pytest.approx(moved), "second": 0.1}
    assert team.kl_coef["second"] == pytest.approx(next_kl_coef(recipe, 0.1, figures["second"]["kl"], samples=4))


def test_each_sample_is_charged_with_the_beta_of_its_own_model():
    team, _, batch = told(
        make_recipe("grpo", scale_advantages="none", group_by=("instance", "agent"), kl_where="reward", kl_kind="k1", **STEERED)
    )
    team.learn(batch, 0.0)
    start = team.advantages.copy()
    team.kl_coef = {"first": 0.1, "second": 0.7}
    team.learn(batch, 0.0)
    changed = np.abs(team.advantages - start) > 1e-6
    assert not changed[batch.table.agent == 0].any()
    assert changed[batch.table.agent == 1].all()


def test_the_kl_of_the_update_never_passes_for_the_kl_to_the_start():
    team, _, batch = told(make_recipe("grpo", group_size=2))
    for figures in team.learn(batch, 0.05).values():
        assert "kl" not in figures
        assert "approx_kl" in figures


def test_betas_are_kept_in_a_checkpoint_and_an_older_one_had_one_for_all():
    team, _, batch = told(make_recipe("grpo", kl_where="loss", **STEERED))
    team.kl_coef = {"first": 0.1 + 1e-17, "second": 1 / 3}
    state = json.loads(json.dumps(team.state()))
    team.kl_coef["first"] = 5.0  # what was said is a copy
    again, _, _ = told(make_recipe("grpo", kl_where="loss", **STEERED))
    again.restore(again.policies(), state)
    assert again.kl_coef == {"first": 0.1 + 1e-17, "second": 1 / 3}
    again.restore(again.policies(), state | {"kl_coef": 0.25})
    assert again.kl_coef == {"first": 0.25, "second": 0.25}
    for part, value, why in (
        ("kl_coef", {}, "kl_coef must have first, second"),
        ("kl_coef", {"first": 0.1, "second": "x"}, "kl_coef.second must be a number"),
        ("kl_coef", {"first": -1, "second": 0.1}, "kl_coef.first must be a number"),
        ("kl_coef", math.nan, "kl_coef.first must be a number"),
        ("versions", {"first": 1}, "versions must have first, second"),
        ("versions", {"first": 1, "second": 2.0}, "versions.second must be a whole number"),
        ("running", [0.0], "running must have one mean for each of 2 roles, and has 1"),
        ("running", [0.0, math.inf], "running must be a number"),
    ):
        with pytest.raises(ValueError, match=why):
            again.restore(again.policies(), state | {part: value})
