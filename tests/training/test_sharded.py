"""A mesh with parameters split over 'fsdp' and 'tensor' gives the step and the rollout of one device."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_update import SGD, assert_close, make_rows, params, step, table_of, update_for

from marl_llm.algorithms import make_recipe
from marl_llm.games import make_game
from marl_llm.models import SAMPLE, TRAIN, ModelConfig, init_params, param_shardings, place, stack_layers, unstack_layers
from marl_llm.rollout import model_player
from marl_llm.training import Trained, make_mesh, make_rollout, make_train_state, sampling_of


@pytest.mark.parametrize("axes", [(2, 2, 2), (1, 4, 2)])
def test_law_5_a_split_model_takes_the_same_step(axes):
    rows = make_rows()
    want, figures = step(rows, minibatch=8)
    mesh = make_mesh(*axes)
    start = make_train_state(stack_layers(params()), SGD)
    kept = param_shardings(start.params, mesh, TRAIN)
    placed = jax.device_put(start, param_shardings(start, mesh, TRAIN))
    spec = placed.params["blocks"]["block"]["attention"]["query"]["kernel"].sharding.spec
    assert tuple(spec) == (None, "fsdp", "tensor", None)
    tokens, table = table_of(rows, 8)
    update = update_for(minibatch=8, mesh=mesh, microbatch_tokens=20)  # a row per device that splits them
    trained, metrics = update(Trained(placed), None, tokens, table, np.asarray([True, True]), jnp.float32(1.0), 0)
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), trained.policy.params, kept))
    assert_close(unstack_layers(jax.device_get(trained.policy.params)), want, atol=3e-5)
    for name in ("loss", "grad_norm", "log_prob_gap", "groups_with_signal"):
        np.testing.assert_allclose(metrics[name], figures[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_query_biases_are_split_as_queries_are_where_all_share_one_key():
    config = ModelConfig(32, 16, 1, query_heads=4, key_value_heads=1, head_dim=8, feed_forward=16, attention_bias=True)
    placed = param_shardings(init_params(config, jax.random.key(0)), make_mesh(1, 1, 2, devices=jax.devices()[:2]), TRAIN)
    attention = placed["block_0"]["attention"]
    assert attention["query"]["bias"].spec[0] == attention["query"]["kernel"].spec[1] == "tensor"
    for name in ("key", "value"):
        assert attention[name]["bias"].spec[0] is None
        assert attention[name]["kernel"].spec[1] is None


def test_law_6_a_split_sampler_gives_the_same_rollout():
    game = make_game("joint_letter")
    config = ModelConfig(game.tokenizer.vocab_size, 16, 1, query_heads=2, key_value_heads=2, head_dim=8, feed_forward=16)
    names = [r.name for r in game.roles]
    models = {n: init_params(config, jax.random.key(i)) for i, n in enumerate(names)}
    recipe = make_recipe("magrpo", group_size=2)
    out = []
    for axes in ((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(*axes)

        def player_of(params):
            return model_player(game, {n: n for n in names}, dict.fromkeys(names, config), params, 1.0)

        rollout = make_rollout(game, mesh, player_of, 4, **sampling_of(recipe))
        out.append(rollout({n: place(p, mesh, SAMPLE) for n, p in models.items()}, jnp.int32(0), jax.random.key(1)).pool)
    np.testing.assert_array_equal(out[0].ids, out[1].ids)
    np.testing.assert_allclose(out[0].log_probs, out[1].log_probs, atol=2e-5)


def test_a_mesh_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"data=2 x fsdp=4 x tensor=4 devices asked for, 8 are there"):
        make_mesh(2, 4, 4)
