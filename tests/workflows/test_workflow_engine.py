"""Workflows over the real engine: what a team says does not depend on how many play at once, and the rows fit the update."""

import dataclasses

import jax
import numpy as np
import pytest

from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.games.coding import function_renderer, function_task, function_tokenizer, mini_plan_code_verify_reflect
from marl_llm.models import ModelConfig, init_params
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.training.packing import TokenSample, pack
from marl_llm.workflows import Controller, Role, Workflow, repeat, shared
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.replay import replay
from marl_llm.workflows.samples import sample_table

TOKENIZER = function_tokenizer()
CONFIG = ModelConfig(vocab_size=TOKENIZER.vocab_size, width=16, layers=1, query_heads=2, key_value_heads=2, head_dim=8, feed_forward=16)
SIZES = EngineConfig(max_num_seqs=8, prompt_tokens=48, response_tokens=48, decode_steps=8, admit=4)


def grade(code, tests):
    """By length alone: an untrained model writes no program."""
    return {"pass_rate": (len(code.split()) % len(tests)) / len(tests), "report": f"passed {len(code.split()) % 9} of 9 wrong"}


@pytest.fixture(scope="module")
def rollouts():
    team = mini_plan_code_verify_reflect(grade, rounds=2)
    params = jax.jit(lambda key: init_params(CONFIG, key))(jax.random.key(0))
    tasks = [function_task("train", 0, n) for n in range(3)]
    with Engine({"policy": (CONFIG, params)}, jax.random.key(7), sizes=SIZES, tokenizers={"policy": TOKENIZER}) as engine:
        made = [prefixes(engine, tasks)]
        for concurrency in (100, 1):
            with Controller(team, shared(team), engine, function_renderer(), concurrency=concurrency) as controller:
                made.append(controller.play(tasks, step=2, plays=3))
    return made


def prefixes(engine, tasks):
    """Plays a role that continues; how many prompt tokens were not computed again, and how many earlier prompts and responses had.

    Of those that are too short to be taken over, neither is counted.
    """
    role = Role("talker", "{problem}", lambda text: {"said": text}, {"said": ""}, max_prompt=48, max_tokens=6,
                continues=True, observation="planner")  # fmt: skip
    team = Workflow("w", repeat(role, at_most=3), ("problem",), ("function", "tests"))
    before = engine.stats()["policy"].get("reused_tokens", 0)
    with Controller(team, shared(team), engine, function_renderer(), concurrency=1) as controller:
        calls = controller.play([dataclasses.replace(tasks[0], hidden=dict.fromkeys(("function", "tests")))]).trajectories[0].calls
    known = sum(size for call in calls[:-1] if (size := len(call.prompt_ids) + call.tokens.size) > EngineConfig.reuse)
    return engine.stats()["policy"]["reused_tokens"] - before, known


def test_what_was_computed_for_a_conversation_is_not_computed_again(rollouts):
    reused, known = rollouts[0]
    assert known - 2 <= reused <= known  # nobody has read the last token of a response
    assert reused >= EngineConfig.reuse


def test_the_same_is_said_whether_all_play_at_once_or_one_by_one(rollouts):
    many, one = ([call for way in rollout.trajectories for call in way.calls] for rollout in rollouts[1:])
    assert len(many) == len(one) >= 3 * 3 * 4
    for a, b in zip(many, one):
        assert (a.id, a.prompt_ids, a.text) == (b.id, b.prompt_ids, b.text)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
    assert len({call.text for call in many}) > len(many) // 2  # the draws differ


def test_the_rows_fit_the_update_and_the_packing(rollouts):
    table = sample_table(rollouts[1])
    assert all(s.where for s in table.samples)
    advantages, metrics, _ = advantages_for(make_recipe("grpo", group_size=3), table.to_samples())
    assert np.isfinite(np.asarray(advantages)).all()
    assert int(metrics["samples"]) == len(table)
    samples = [TokenSample(s.prompt_ids, s.response_ids, table.log_probs(i), s.name) for i, s in enumerate(table.samples)]
    packed = pack(samples, 256)
    assert int((np.asarray(packed.sample) >= 0).sum()) == len(table)
    assert rollout_metrics(rollouts[1], table)["samples/trained"] == len(table)


def test_an_episode_of_the_engine_replays(rollouts):
    team = mini_plan_code_verify_reflect(grade, rounds=2)
    again = replay(rollouts[1].episodes[4], team, shared(team), function_renderer(), plays=3)
    assert [call.text for call in again.trajectories[0].calls] == [c.text for c in rollouts[1].episodes[4].trajectories[0].calls]
