"""What a team keeps on the devices, counted from living arrays: masters, moments, a start where a KL reads it, and what is served."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_team import ENVIRONMENT, SHAPE, SPEECH

from marl_llm.algorithms import make_recipe
from marl_llm.models import LoraConfig, attach, compute_copy, init_adapters, init_params, score_packed
from marl_llm.sampling import weights
from marl_llm.training import HostedTeam, LearnerOptions, ModelSpec, PlayOptions, learner, make_mesh, make_optimizer, served
from marl_llm.training.host_copies import to_device, to_host
from marl_llm.training.learner import frozen_base
from marl_llm.training.packing import Tokens, TokenSample
from marl_llm.workflows import WorkflowError, separate, shared

CONFIG = dataclasses.replace(SHAPE, width=64, feed_forward=256, compute_dtype="bfloat16")


def live():
    """Bytes of all arrays; two that share their memory count once."""
    gc.collect()
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.live_arrays() if x.nbytes}.values())


@pytest.mark.parametrize(("recipe", "masters", "halves"), [("grpo", 3, 1), ("magrpo", 3, 2), ("ppo", 6, 1)])
def test_copies_of_the_parameters_on_the_devices(recipe, masters, halves):
    """`masters` in float32, parameters and both moments of the policy and of a critic; `halves` in bfloat16, what is served and what a KL
    is measured to. Nothing of what the team began with is kept, before and after a swap and an evaluation of the start."""
    options = LearnerOptions(make_recipe(recipe), make_optimizer(), row_tokens=16, minibatch=8)
    before = live()
    specs = {name: ModelSpec(CONFIG, init_params(CONFIG, jax.random.key(n)), SPEECH) for n, name in enumerate(("first", "second"))}
    one = sum(x.nbytes for x in jax.tree.leaves(specs["first"].params))
    play = PlayOptions(max_num_seqs=2, decode_steps=2)
    with HostedTeam(ENVIRONMENT, separate(ENVIRONMENT.workflow), specs, options, make_mesh(1), play=play) as team:
        cache = sum(figures["cache_bytes"] for name, figures in team._current.engine.stats().items() if name != "engine")
        del specs
        for moment in ("made", "begun", "measured"):
            if moment == "begun":
                team.start_rl()
            elif moment == "measured":
                team.evaluate({"first": "start"}, "test", 1)
                team._own()
            copies = (live() - before - cache) / (2 * one)
            assert copies == pytest.approx(masters + halves / 2, abs=0.1), moment


def test_a_swap_holds_no_copy_more_than_there_was(monkeypatch):
    """While new parameters take their place in the engine: a model's old copy is gone before its new one is there."""
    options = LearnerOptions(make_recipe("grpo"), make_optimizer(), row_tokens=16, minibatch=8)
    before, moments = live(), []
    specs = {name: ModelSpec(CONFIG, init_params(CONFIG, jax.random.key(n)), SPEECH) for n, name in enumerate(("first", "second"))}
    one = sum(x.nbytes for x in jax.tree.leaves(specs["first"].params))
    real = weights.serving_copy

    def counted(config, mesh):
        def run(params):
            traced = isinstance(jax.tree.leaves(params)[0], jax.core.Tracer)
            moments.extend([] if traced else [live()])
            out = real(config, mesh)(params)
            moments.extend([] if traced else [live()])
            return out

        return run

    with HostedTeam(
        ENVIRONMENT, separate(ENVIRONMENT.workflow), specs, options, make_mesh(1), play=PlayOptions(max_num_seqs=2, decode_steps=2)
    ) as team:
        cache = sum(figures["cache_bytes"] for name, figures in team._current.engine.stats().items() if name != "engine")
        del specs
        team.learn(team.play(0, 0, 4), 0.05, None)
        monkeypatch.setattr(weights, "serving_copy", counted)
        team.play(1, 4, 4)
        copies = [(x - before - cache) / (2 * one) for x in moments]
        assert len(copies) == 4  # of two models, before and after
        assert copies == pytest.approx([3.25, 3.5, 3.25, 3.5], abs=0.1)


def adapted(how):
    """(draws of two steps, copies of the base on the devices after them) of two models with adapters on one base."""
    options = LearnerOptions(make_recipe("grpo"), make_optimizer(), row_tokens=16, minibatch=8)
    config, before = dataclasses.replace(CONFIG, compute_dtype="float32"), live()
    params = init_params(config, jax.random.key(0))
    specs = {name: ModelSpec(config, params, SPEECH, LoraConfig(rank=2)) for name in ("first", "second")}
    one = sum(x.nbytes for x in jax.tree.leaves(params))
    play = PlayOptions(max_num_seqs=2, decode_steps=2, lora_serving=how)
    with HostedTeam(ENVIRONMENT, separate(ENVIRONMENT.workflow), specs, options, make_mesh(1), play=play) as team:
        del specs, params
        cache = team._current.engine.stats()["first"]["cache_bytes"] * (1 if how == "multi" else 2)
        batches = [team.play(0, 0, 4)]
        team.learn(batches[0], 0.05, None)
        batches.append(team.play(1, 4, 4))  # with what was learned
        drawn = [(np.asarray(batch.tokens.ids), np.asarray(batch.tokens.log_probs)) for batch in batches]
        del batches
        learned = sum(x.nbytes for learner in team.learners.values() for x in jax.tree.leaves(learner.trained))
        return drawn, (live() - before - cache - learned) / one


def test_models_with_adapters_on_one_base_hold_it_once():
    """Sampled together or merged, the same draws; together the base lies there once, and merged once more for each model."""
    (together, copies), (merged, more) = adapted("multi"), adapted("merged")
    assert copies == pytest.approx(1, abs=0.2)  # and the adapters as they began, and as they are served
    assert more == pytest.approx(3, abs=0.2)
    for (ids, log_probs), (others, expected) in zip(together, merged, strict=True):
        np.testing.assert_array_equal(ids, others)
        np.testing.assert_allclose(log_probs, expected, atol=1e-4)
    assert not np.array_equal(together[0][0], together[1][0])


def test_an_engine_that_is_closed_holds_nothing_on_the_devices():
    """Not even while somebody still has the engine."""
    options = LearnerOptions(make_recipe("grpo"), make_optimizer(), row_tokens=16, minibatch=8)
    before = live()
    specs = {name: ModelSpec(CONFIG, init_params(CONFIG, jax.random.key(n)), SPEECH) for n, name in enumerate(("first", "second"))}
    play = PlayOptions(max_num_seqs=2, decode_steps=2)
    team = HostedTeam(ENVIRONMENT, separate(ENVIRONMENT.workflow), specs, options, make_mesh(1), play=play)
    engine = team._current.engine
    team.play(0, 0, 4)
    team.close()
    learned = sum(x.nbytes for learner in team.learners.values() for x in jax.tree.leaves((learner.trained, learner.begun)))
    began = sum(x.nbytes for spec in specs.values() for x in jax.tree.leaves(spec.params))
    assert engine.stats()["first"]["cache_bytes"] > 0
    assert live() - before - learned - began < 4096


def places(tree):
    """Where a tree's arrays lie in memory."""
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def with_seats(monkeypatch, assignment, large):
    """Draws of a step, and how an evaluation went in which the start plays the first role, of adapters on one base; a `large` one is read
    where it lies all the time."""
    options, config = LearnerOptions(make_recipe("grpo"), make_optimizer(), 16, 8), dataclasses.replace(CONFIG, compute_dtype="float32")
    params = init_params(config, jax.random.key(0))
    specs = {name: ModelSpec(config, params, SPEECH, LoraConfig(rank=2)) for name in assignment.policies}
    with monkeypatch.context() as patch:
        patch.setattr(served, "is_large", lambda *_: large)
        with HostedTeam(ENVIRONMENT, assignment, specs, options, make_mesh(1), play=PlayOptions(max_num_seqs=2, decode_steps=2)) as team:
            if large:
                patch.setattr(learner, "merge", None)  # which would be called
            batch = team.play(0, 0, 4)
            team.learn(batch, 0.05)
            measured = team.evaluate({"first": "start"}, "test", 4, temperature=1.0)
            for lane in team._current.engine._all:
                assert ("base" in lane.weights.params) == large
                assert not large or places(lane.weights.params["base"]) == places(params)
    return np.asarray(batch.tokens.ids), measured.outcomes


@pytest.mark.parametrize("assignment", [separate(ENVIRONMENT.workflow), shared(ENVIRONMENT.workflow)], ids=["two", "one"])
def test_large_adapted_models_are_never_merged_on_a_cpu(monkeypatch, assignment):
    """Nor one alone, nor the start in an evaluation; what they play is what merged copies play."""
    (ids, outcomes), (merged_ids, merged_outcomes) = (with_seats(monkeypatch, assignment, large) for large in (True, False))
    np.testing.assert_array_equal(ids, merged_ids)
    assert outcomes == merged_outcomes


def test_a_frozen_base_lies_there_in_the_compute_dtype():
    """And scores with adapters on it are the same bits."""
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    params, lora = init_params(config, jax.random.key(0)), LoraConfig(rank=2)
    adapters = jax.tree.map(lambda x: x + 0.1, init_adapters(config, jax.random.key(1), lora))
    base = frozen_base(config, params, make_mesh(1))
    matrices = [x for x in jax.tree.leaves(base) if x.ndim > 1]
    assert matrices
    assert {x.dtype for x in matrices} == {jnp.dtype("bfloat16")}
    rows = Tokens.of([TokenSample([1, 2, 3], [4, 5], [0.0, 0.0]), TokenSample([3, 2], [1], [0.0])]).pack([0, 1], 16)
    rows = jax.tree.map(jnp.asarray, rows)
    one, other = (score_packed(config, attach(x, adapters, lora), *rows.inputs).log_probs for x in (params, base))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, score_packed(config, params, *rows.inputs).log_probs)


def test_ways_of_sampling_adapters_that_cannot_be_are_refused():
    options = LearnerOptions(make_recipe("grpo"), make_optimizer(), row_tokens=16, minibatch=8)
    specs = {name: ModelSpec(CONFIG, init_params(CONFIG, jax.random.key(0)), SPEECH) for name in ("first", "second")}
    for how, message in (("apart", "play.lora_serving='apart' is unknown"), ("multi", "no two models of this process have adapters")):
        with pytest.raises(WorkflowError, match=message):
            HostedTeam(ENVIRONMENT, separate(ENVIRONMENT.workflow), specs, options, make_mesh(1), play=PlayOptions(lora_serving=how))


def test_what_is_parked_comes_back_as_the_compute_dtype_rounds_it():
    params = init_params(CONFIG, jax.random.key(0))
    want = compute_copy(CONFIG, params)
    got = to_device(to_host(params, jax.eval_shape(lambda x: compute_copy(CONFIG, x), params)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
        assert x.sharding == y.sharding
