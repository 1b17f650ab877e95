"""A hosted team whose models a vLLM server draws for: versions, gap, a server that dies, lies or was started anew."""

import dataclasses
import itertools
import pathlib

import jax
import numpy as np
import pytest
from test_team import ECHO, ENVIRONMENT, PARAMS, SHAPE, SPEECH, same
from vllm_stand_in import StandIn

from marl_llm.algorithms import make_recipe
from marl_llm.models import init_params
from marl_llm.sampling import EngineConfig, EngineError, Request, RequestError, SamplingParams, VllmSampler
from marl_llm.sampling.vllm import seed_of
from marl_llm.tools import VllmServer
from marl_llm.training import LearnerOptions, ModelSpec, PlayOptions, make_mesh, make_optimizer, make_team
from marl_llm.training.team import EVALUATION
from marl_llm.workflows import WorkflowError, shared
from marl_llm.workflows.errors import RolloutError

SETTINGS = dict(group_size=4, rewards="mixed", returns="immediate", scale_advantages="none")
RECIPE = make_recipe("grpo", rollout_correction="truncate", **SETTINGS)


@pytest.fixture
def server():
    with StandIn(SHAPE, init_params(SHAPE, jax.random.key(9))) as one:  # other parameters than the team's
        yield one


def team(server, folder, recipe=RECIPE):
    """Served by `server`; None: by an engine of this program."""
    options = LearnerOptions(recipe, make_optimizer(), row_tokens=64, minibatch=8)
    spec = ModelSpec(SHAPE, PARAMS, SPEECH, sampler=None if server is None else VllmServer(server.url, str(folder)))
    return make_team(ENVIRONMENT, shared(ECHO), {"policy": spec}, options, make_mesh(1), play=PlayOptions(max_num_seqs=16, decode_steps=2))


def names(folder):
    return [path.name for path in pathlib.Path(folder).iterdir()]


def test_a_team_learns_from_what_a_server_draws_with_the_parameters_of_each_step(server, tmp_path):
    with team(server, tmp_path) as one:
        for step in range(2):
            before = len(server.asked)
            batch = one.play(step, 6 * step, 6)
            asked = [one["sampling_params"] for one in server.asked[before:] if "seed" in one["sampling_params"]]
            assert np.all(batch.version == step)
            assert len(batch.tokens) == len(asked) == len({p["seed"] for p in asked}) == 48
            assert {p["temperature"] for p in asked} == {1.0}
            figures = one.learn(batch, 1e-2)["policy"]
            assert figures["log_prob_gap"] < 1e-3
            assert figures["grad_norm"] > 0
        after = one.evaluate({}, "test", 6)  # greedy, by the server, with what was learned last
        assert after.summary()["aborted"] == 0
        assert len(server.reloads) == 3  # at the start, and after each update when it is played next
        assert names(tmp_path) == [pathlib.Path(server.reloads[-1]).name]  # only the newest stays
        assert server.label.endswith("-2")
        start = one.evaluate({"first": "start"}, "test", 6)  # two sets of parameters: by an engine of this program
        assert start.summary()["aborted"] == 0
    assert names(tmp_path) == []


def three_steps(one):
    """(what each of three steps held and an evaluation saw, the parameters then)."""
    found = []
    for step in range(3):
        batch = one.play(step, 6 * step, 6)
        figures = one.learn(batch, 1e-2)["policy"] | batch.figures
        columns = {column.name: getattr(batch.table, column.name) for column in dataclasses.fields(batch.table)}
        tokens = {name: getattr(batch.tokens, name) for name in ("ids", "log_probs", "size", "prompt", "rank")}
        found.append(columns | tokens | {"version": batch.version, "worth": one.advantages, "figures": figures})
    found.append({"seen": np.asarray([outcome.score for outcome in one.evaluate({}, "test", 6, temperature=1.0).outcomes])})
    return found, jax.device_get(one.learners["policy"].params)


def test_a_server_that_draws_what_the_engine_draws_gives_the_same_samples_and_the_same_parameters(tmp_path):
    """Nothing between a draw and the update depends on who drew: with equal draws three steps are equal, and an evaluation too."""
    key = jax.random.split(jax.random.key(0))[1]  # of the draws of a team with seed 0
    with team(None, tmp_path) as one:
        drawn, engines = three_steps(one)
    places = [(step, 6 * step + task) for step in range(3) for task in range(6)] + [(EVALUATION, task) for task in range(6)]
    calls = list(itertools.product(range(2), range(2), range(4)))  # agent, request, branch
    identities = {seed_of(key, (*place, *call)): (*place, *call) for place in places for call in calls}
    with StandIn(SHAPE, init_params(SHAPE, jax.random.key(9)), key, identities) as server, team(server, tmp_path) as one:
        answered, servers = three_steps(one)
    for step, (mine, found) in enumerate(zip(drawn, answered, strict=True)):
        for name in mine.keys() - {"figures"}:
            x, y = mine[name], found[name]
            assert (x is None and y is None) or np.allclose(x, y, atol=1e-5), f"step {step}: {name}"

        def quiet(figures):
            return {k: v for k, v in figures.items() if "seconds" not in k and "entropy" not in k and "time" not in k}

        a, b = quiet(mine.get("figures", {})), quiet(found.get("figures", {}))
        assert a.keys() == b.keys()
        assert {k: (a[k], b[k]) for k in a if not np.isclose(a[k], b[k], atol=1e-4)} == {}
    assert same(engines, servers, 1e-5)
    assert not same(engines, jax.device_get(PARAMS), 1e-3)


def test_the_same_steps_are_drawn_again_from_the_same_server(server, tmp_path):
    drawn = []
    for _ in range(2):
        with team(server, tmp_path) as one:
            drawn.append(np.asarray(one.play(0, 0, 6).tokens.ids))
    assert np.array_equal(*drawn)


def test_a_server_that_dies_aborts_plays_stops_the_next_step_and_trains_nothing_more(server, tmp_path):
    with team(server, tmp_path) as one:
        server.answers = 30  # of 48
        batch = one.play(0, 0, 6)
        assert 0 < batch.figures["aborted"] < 1
        assert batch.figures["failed_unavailable"] >= 18
        one.learn(batch, 1e-2)
        params = jax.device_get(one.learners["policy"].params)
        with pytest.raises(EngineError, match=r"'policy' could not be given to its sampler: .*/pause.* same command goes on"):
            one.play(1, 6, 6)
        assert jax.tree.all(jax.tree.map(np.array_equal, params, jax.device_get(one.learners["policy"].params)))
        server.answers, server.label = None, "default"  # it is back
        assert one.play(1, 6, 6).figures["aborted"] == 0
        server.answers = 0
        with pytest.raises(RolloutError, match="all 24 plays .* unavailable: the vLLM server at"):
            one.play(2, 12, 6)


def test_a_server_that_was_started_anew_aborts_every_play(server, tmp_path):
    with team(server, tmp_path) as one:
        server.label = "default"  # and, for all that is known, other parameters
        with pytest.raises(RolloutError, match="drawn with the parameters 'default', not '.*-0': the server was started anew"):
            one.play(0, 0, 6)


def test_parameters_that_a_server_did_not_take_are_noticed(server, tmp_path):
    server.stubborn = True
    with pytest.raises(EngineError, match=r"log-probs differ from this program's by .* nats: more than 0\.001; is it the same model"):
        team(server, tmp_path)
    assert names(tmp_path) == []
    server.stubborn = False
    with team(server, tmp_path) as one:
        one.learn(one.play(0, 0, 6), 2e-6)  # so little that the bound alone would let it pass
        server.stubborn = True
        with pytest.raises(EngineError, match="nats: they are those of before"):
            one.play(1, 6, 6)


def test_an_answer_that_is_none_aborts_the_play(server, tmp_path):
    with team(server, tmp_path) as one:
        server.spoil = lambda answer: answer | {"prompt_token_ids": [1, 2]}
        with pytest.raises(RolloutError, match="bad_reply: the answer is to another prompt"):
            one.play(0, 0, 6)


def test_a_request_by_itself_ends_where_its_stop_rule_says_and_what_cannot_be_served_is_refused(server, tmp_path):
    tokenizer, (stop,) = SPEECH.tokenizer, SPEECH.stop_ids
    sizes, place = EngineConfig(max_num_seqs=2, prompt_tokens=4, response_tokens=2), VllmServer(server.url, str(tmp_path))
    one = VllmSampler("policy", SHAPE, PARAMS, place, jax.random.key(1), sizes=sizes, tokenizer=tokenizer)
    try:
        on_tokens = []
        greedy = one.submit(Request((1, 2), (0,), 2, settings=SamplingParams(temperature=0.0)), on_tokens.append).result()
        assert [None if x is None else x.tolist() for x in on_tokens] == [greedy.tokens.tolist(), None]
        assert np.all(greedy.sampled_log_probs == 0)  # the likeliest token is certain
        assert np.all(greedy.log_probs < 0)
        assert (greedy.finish, greedy.entropy, greedy.version) == ("length", None, 0)
        said = tokenizer.decode(greedy.tokens[:1].tolist())
        cut = one.submit(Request((1, 2), (0,), 2, settings=SamplingParams(temperature=0.0), stop_strings=(said,))).result()
        assert (cut.tokens.tolist(), cut.finish) == (greedy.tokens[:1].tolist(), "stop")
        ended = one.submit(Request((1, 2), (0,), 2, settings=SamplingParams(temperature=0.0), stop_ids=(int(greedy.tokens[0]),))).result()
        assert (ended.tokens.tolist(), ended.finish) == (greedy.tokens[:1].tolist(), "stop")
        for bad, why in (
            (Request((1, 2, 3, 4, 5), (0,), 2), "a prompt of 5"),
            (Request((1,), (0,), 3), "an answer of 3 tokens"),
            (Request((1, 99), (0,), 2), r"\[99\] are outside of the vocabulary of 10"),
            (Request((1,), (0,), 2, settings=SamplingParams(temperature=0.5)), "temperature=0.5"),
            (Request((1,), (0,), 2, model="other"), "no model 'other'; served are policy"),
        ):
            with pytest.raises(RequestError, match=why):
                one.submit(bad)
        assert one.stats() == {"policy": {"requests": 3, "failed": 0, "stale": 0}}
    finally:
        one.close()
    with pytest.raises(EngineError, match="is not served"):
        one.submit(Request((1,), (stop,), 2))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (dict(rollout_correction="none"), r"draws in another program, .* set recipe\.rollout_correction=truncate"),
        (dict(temperature=0.7), r"temperature=0\.7, .* draws are at temperature 1"),
        (dict(top_k=5), "top_k=5"),
        (dict(top_p=0.9), r"top_p=0\.9"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_is_asked(server, tmp_path, settings, why):
    with pytest.raises(WorkflowError, match=why):
        team(server, tmp_path, make_recipe("grpo", **SETTINGS | {"rollout_correction": "truncate"} | settings))
    assert server.reloads == []
