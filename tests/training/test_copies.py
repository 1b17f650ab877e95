"""What a team keeps on the devices, counted from living arrays: masters, moments, a start where a KL reads it, and what is served."""

import dataclasses
import gc

import jax
import numpy as np
import pytest
from test_team import SHAPE, SPEECH, WORLD

from marl_llm.algorithms import make_recipe
from marl_llm.models import compute_copy, init_params
from marl_llm.training import HostedTeam, LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer
from marl_llm.training.parked import park, unpark
from marl_llm.workflows import separate

CONFIG = dataclasses.replace(SHAPE, width=64, feed_forward=256, compute_dtype="bfloat16")


def live():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.parametrize(("recipe", "masters", "halves"), [("grpo", 3, 1), ("magrpo", 3, 2), ("ppo", 6, 1)])
def test_copies_of_the_parameters_on_the_devices(recipe, masters, halves):
    """`masters` in float32, parameters and both moments of the policy and of a critic; `halves` in bfloat16, what is served and what a KL
    is measured to. Nothing of what the team began with is kept, before and after a swap and an evaluation of the start."""
    options = LearnerOptions(make_recipe(recipe), make_optimizer(), row_tokens=16, minibatch=8)
    before = live()
    specs = {name: ModelSpec(CONFIG, init_params(CONFIG, jax.random.key(n)), SPEECH) for n, name in enumerate(("first", "second"))}
    one = sum(x.nbytes for x in jax.tree.leaves(specs["first"].params))
    play = PlayOptions(slots=2, chunk=2)
    with HostedTeam(WORLD, separate(WORLD.workflow), specs, options, make_mesh(1), play=play) as team:
        cache = sum(figures["cache_bytes"] for name, figures in team._current.engine.stats().items() if name != "engine")
        del specs
        for moment in ("made", "begun", "measured"):
            if moment == "begun":
                team.begin()
            elif moment == "measured":
                team.evaluate({"first": "start"}, "test", 1)
                team._own()
            copies = (live() - before - cache) / (2 * one)
            assert copies == pytest.approx(masters + halves / 2, abs=0.1), moment


def test_what_is_parked_comes_back_as_the_compute_dtype_rounds_it():
    params = init_params(CONFIG, jax.random.key(0))
    want = compute_copy(CONFIG, params)
    got = unpark(park(params, jax.eval_shape(lambda x: compute_copy(CONFIG, x), params)))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
        assert x.sharding == y.sharding
