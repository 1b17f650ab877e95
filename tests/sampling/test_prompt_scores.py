"""Prompts scored by the engine: the model's own teacher-forced log-probs, whoever else is served."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_adapters import CONFIG, LORA, SIZES, adapters

from marl_llm.models import Decoder, attach, init_params, merge, prompt_mask, prompt_positions
from marl_llm.sampling import Engine, EngineError, Request, RequestError
from marl_llm.training import make_mesh

PROMPTS = [tuple(np.random.default_rng(n).integers(1, 48, n).tolist()) for n in (1, 2, 7, 16, 17, 40)]


@pytest.fixture(scope="module")
def base():
    return jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, jax.random.key(0)))


@pytest.fixture(scope="module")
def engine(base):
    with Engine({"a": (CONFIG, base)}, jax.random.key(3), sizes=SIZES) as one:
        yield one


@jax.jit
def distributions(params, ids):
    """Log-probs `[L, V]` behind each id: the plain model, in one row without padding to the right."""
    where = jnp.arange(40)[None] < 40
    hidden, _ = Decoder(CONFIG).apply({"params": params}, ids[None], prompt_positions(where), prompt_mask(where))
    return jax.nn.log_softmax(hidden[0] @ params["embedding"].T)


def expected(params, ids):
    """(log-prob of each id but the first, `[L - 1, V]` of all)."""
    row = jnp.asarray((*ids, *[0] * (40 - len(ids))))
    table = np.asarray(distributions(params, row))[: len(ids) - 1]
    return table[np.arange(len(ids) - 1), np.asarray(ids[1:], int)], table


def test_scores_are_the_models_own_teacher_forced_log_probs(engine, base):
    for ids, scores in zip(PROMPTS, engine.score("a", PROMPTS, top_k=5), strict=True):
        log_probs, table = expected(base, ids)
        np.testing.assert_allclose(scores.log_probs, log_probs, atol=1e-4, rtol=0)
        least, most = ((table > log_probs[:, None] + gap).sum(1) for gap in (1e-4, -1e-4))
        assert np.all((least < scores.ranks) & (scores.ranks <= most))
        np.testing.assert_allclose(scores.top_log_probs, -np.sort(-table, axis=1)[:, :5], atol=1e-4, rtol=0)
        np.testing.assert_allclose(np.take_along_axis(table, scores.top_ids, 1), scores.top_log_probs, atol=1e-4, rtol=0)
        assert scores.version == 0


def test_as_many_likeliest_tokens_as_the_vocabulary_has_may_be_asked_for(engine, base):
    for top_k in (33, CONFIG.vocab_size):  # the next power of two is beyond the vocabulary
        scores = engine.score("a", [PROMPTS[2]], top_k)[0]
        np.testing.assert_allclose(scores.top_log_probs, -np.sort(-expected(base, PROMPTS[2])[1], axis=1)[:, :top_k], atol=1e-4, rtol=0)


def test_they_are_those_of_the_parameters_in_force_and_do_not_disturb_who_is_served(engine, base):
    request = Request(PROMPTS[2], (1,), 8, "a")
    alone = engine.submit(request).result()
    handle = engine.submit(request)
    scores = engine.score("a", [PROMPTS[2]])[0]
    np.testing.assert_array_equal(handle.result().tokens, alone.tokens)
    assert scores.top_ids.shape == (6, 0)
    again = engine.score("a", [(*PROMPTS[2], *alone.tokens.tolist())])[0]
    np.testing.assert_allclose(again.log_probs[6:], alone.log_probs, atol=1e-4, rtol=0)
    engine.set_params("a", jax.tree.map(lambda x: x * 1.1, base))
    changed = engine.score("a", [PROMPTS[2]])[0]
    assert changed.version == 1
    assert np.abs(changed.log_probs - scores.log_probs).max() > 1e-3
    engine.set_params("a", base)


def test_each_model_on_a_common_base_is_scored_with_its_own_adapters(base):
    tuned = {"a": adapters(1), "b": adapters(2)}
    models = {name: (CONFIG, attach(base, one, LORA)) for name, one in tuned.items()}
    with Engine(models, jax.random.key(3), sizes=SIZES) as engine:
        for name, one in tuned.items():
            np.testing.assert_allclose(
                engine.score(name, PROMPTS[2:3])[0].log_probs, expected(merge(base, one, LORA), PROMPTS[2])[0], atol=1e-4, rtol=0
            )


def test_a_mesh_gives_the_same(base, engine):
    with Engine({"a": (CONFIG, base)}, jax.random.key(3), sizes=SIZES, mesh=make_mesh(2)) as spread:
        for one, other in zip(spread.score("a", PROMPTS, 3), engine.score("a", PROMPTS, 3), strict=True):
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4, rtol=0)
            np.testing.assert_array_equal(one.top_ids, other.top_ids)


def test_what_cannot_be_scored_is_refused_in_one_line(base):
    with Engine({"a": (CONFIG, base)}, jax.random.key(3), sizes=SIZES) as engine:
        for model, ids, top_k, message in (
            ("b", (1,), 0, "no model 'b'"),
            ("a", (), 0, "a prompt of 0 tokens; prompts of 1 to 40 are scored"),
            ("a", (1,) * 41, 0, "a prompt of 41 tokens"),
            ("a", (1, 48), 0, "ids from 1 to 48; the vocabulary is 0 to 47"),
            ("a", (1,), 49, "the 49 likeliest tokens are asked for; the vocabulary has 48"),
        ):
            with pytest.raises(RequestError, match=message) as found:
                engine.score(model, [ids], top_k)
            assert "\n" not in str(found.value)
    with pytest.raises(EngineError):
        engine.score("a", [(1,)])
