"""The engine of a model with sliding windows and all else that Gemma has: what it draws is what a forward pass over the whole row says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import CONFIG as PLAIN
from test_engine import TOKENIZER
from test_swap import ask, finish, turn

from marl_llm.models import init_params, log_probs
from marl_llm.sampling import Engine, EngineConfig, Request
from marl_llm.sampling.drafting import Drafter
from marl_llm.sampling.scheduler import Scheduler

CONFIG = dataclasses.replace(
    PLAIN, window_pattern=(5, 0), local_rope_theta=100.0, post_norms=True, unit_offset=True, scale_embeddings=True, activation="gelu_tanh",
    query_scalar=6.0,
)  # fmt: skip
SIZES = EngineConfig(max_num_seqs=8, prompt_tokens=40, response_tokens=16, decode_steps=4, admit=2, reuse=1, page=8, piece=16)
PROMPTS = (3, 5, 6, 17, *(34,) * 5)  # shorter than the window, as long, longer; in pieces; siblings that read their pages together


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: jax.tree.map(lambda x: x * 2.0, init_params(CONFIG, key)))(jax.random.key(0))


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"draft_tokens": 3}])
def test_log_probs_of_windows_across_pages_are_those_of_the_whole_row(params, options, monkeypatch):
    monkeypatch.setattr(Drafter, "choose", lambda self, *_: self.columns[-1])  # drafts are verified wherever there is one
    rng = np.random.default_rng(0)
    prompts = [tuple(int(t) for t in rng.integers(1, 257, n)) for n in PROMPTS]
    prompts[-5:] = [prompts[-1]] * 5
    requests = [Request(prompt, (i,), 16, "a") for i, prompt in enumerate(prompts)]
    sizes = dataclasses.replace(SIZES, **options)
    with Engine({"a": (CONFIG, params)}, jax.random.key(11), sizes=sizes, tokenizers={"a": TOKENIZER}) as engine:
        answers = engine.generate_all(requests)
        if "draft_tokens" in options:
            answers = engine.generate_all(requests)  # each quotes its own first answer
            assert engine.stats()["a"]["accepted_tokens"] > 60
    rows, where = np.zeros((len(prompts), 56), np.int32), np.zeros((len(prompts), 56), bool)
    for row, real, prompt, answer in zip(rows, where, prompts, answers, strict=True):
        said = (*prompt, *answer.tokens)
        row[: len(said)], real[: len(said)] = said, True
    for config, equal in ((CONFIG, True), (dataclasses.replace(CONFIG, window_pattern=(6, 0)), False)):
        scores = jax.jit(log_probs, static_argnums=0)(config, params, jnp.asarray(rows), jnp.asarray(where)).log_probs
        gaps = [
            np.abs(answer.log_probs - scores[i, len(prompt) : len(prompt) + len(answer.tokens)]).max()
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        assert (max(gaps) < 1e-4) == equal


def test_a_swap_in_the_middle_of_an_answer_leaves_its_windows_as_they_are(params):
    """`new` has the keys and values of `params` and other logits, so one forward pass with each is the oracle of its tokens."""
    scale = jax.random.uniform(jax.random.key(5), (CONFIG.width,), minval=-1.0, maxval=2.0)
    new = params | {"final_norm": {"weight": scale}}
    prompt = tuple(range(40, 74))
    scheduler = Scheduler({"a": params}, CONFIG, dataclasses.replace(SIZES, weight_update="in_flight"), jax.random.key(11), None, TOKENIZER)
    (sequence,) = ask(scheduler, Request(prompt, (1, 0), 16, "a"))
    turn(scheduler)
    turn(scheduler, new)
    (answer,) = finish(scheduler, sequence)
    np.testing.assert_array_equal(answer.versions, [0] * 5 + [1] * (len(answer.tokens) - 5))
    assert len(answer.tokens) > 2 * CONFIG.window_pattern[0]
    row = np.zeros((1, 56), np.int32)
    row[0, : 34 + len(answer.tokens)] = [*prompt, *answer.tokens]
    score = jax.jit(log_probs, static_argnums=0)
    for window, equal in ((5, True), (6, False)):
        config = dataclasses.replace(CONFIG, window_pattern=(window, 0))
        old_scores, new_scores = (
            score(config, weights, jnp.asarray(row), row > 0).log_probs[0, 34 : 34 + len(answer.tokens)] for weights in (params, new)
        )
        wanted = np.concatenate([old_scores[:5], new_scores[5:]])
        assert (np.abs(answer.log_probs - wanted).max() < 1e-4) == equal
