"""Runs with a model as coach: in this process and behind our own server the same scores, one path to both, and a run that continues."""

import dataclasses
import itertools
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_players import write_checkpoint
from test_runs import in_this_process, run  # noqa: F401
from tokenizers import AddedToken, Tokenizer

from marl_llm.cli.coach import main, measure_model, parser
from marl_llm.coaching import Coaching, rubric_coach
from marl_llm.models import ModelConfig, init_params, save_pretrained
from marl_llm.reporting import read_metrics
from marl_llm.runs.base import base_config
from marl_llm.runs.coaching import cost_line, make_coaching
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.serving import ChatServer
from marl_llm.serving.local import LocalModel, digest_of
from marl_llm.tools.chat import ChatClient
from marl_llm.training import Checkpoints
from marl_llm.workflows.storage import from_json, read_trajectories

OWN = pathlib.Path(__file__).parents[1] / "games" / "own" / "coached.py"
SIZES = dict(max_prompt=2048, max_tokens=1)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """A checkpoint that answers every prompt with one token, a score that hangs on all its digits, those of the boundaries too.

    Of each pair of opposite rows of its head one is above 0, and all pieces but digits are zeros to it.
    """
    folder = tmp_path_factory.mktemp("judge")
    theirs = json.loads((write_checkpoint(folder, "qwen2.5") / "config.json").read_text())
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scores = [f"SCORE: {n}" for n in range(11)]
    tokens.add_tokens([AddedToken(text, normalized=False, special=False) for text in scores])
    shape = ModelConfig(
        vocab_size=512, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16,
        qk_norm=False, attention_bias=True, max_position=4096, tie_embeddings=False,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(shape, jax.random.key(0)))

    def draw(path, leaf):
        return rng.normal(0.0, 0.0 if "bias" in jax.tree_util.keystr(path) else 1.0, leaf.shape).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, shapes)
    digits = [tokens.token_to_id(digit) for digit in "0123456789"]
    params["embedding"][[n for n in range(shape.vocab_size) if n not in digits]] = 0.0
    rows = rng.normal(0.0, 1.0, (shape.width, 5)).astype(np.float32)
    head = np.zeros((shape.width, shape.vocab_size), np.float32)
    head[:, [tokens.token_to_id(text) for text in scores[:10]]] = np.concatenate([rows, -rows], 1)
    params["output"] = jnp.asarray(head.reshape(np.shape(params["output"])))
    save_pretrained(folder, shape, params)
    made = json.loads((folder / "config.json").read_text())
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(theirs | made | {"eos_token_id": theirs["eos_token_id"]}))
    return folder


def config(**coach):
    found = base_config("t", f"{OWN}:echo", "mappa")
    found.model.update(preset="nano", layers=1)
    found.update(steps=1, devices=1)
    found.rollout.tasks, found.recipe.group_size, found.optimizer.minibatch = 4, 2, 8
    found.evaluation.update(every=1000, tasks=2, final_tasks=2, transcripts=0)
    found.checkpoint.every = 1
    found.sft.steps = 0
    found.coach.update(coach)
    return found


def test_a_run_is_scored_alike_by_a_model_in_this_process_and_by_our_server_and_continues(judge, tmp_path, monkeypatch):
    monkeypatch.setattr("marl_llm.viewing.write_report", lambda path: path)  # other runs draw it
    with LocalModel(str(judge), max_num_seqs=4, **SIZES) as model, ChatServer({"judge": model.answers}) as server:
        here = f"model path='{judge}' max_tokens=1 max_prompt=2048 concurrency=4"
        there = f"served url={server.url} served_as=judge max_tokens=1 concurrency=4"
        own = config(kind="ensemble", members=f"{here}; {there}", agreement="mean", when="end", history=3)
        run(own, tmp_path / "run")
        own.steps = 2
        run(own, tmp_path / "run")
        asked = server.stats()
    said = [score["coach"] for line in read_trajectories(tmp_path / "run") for play in from_json(line).trajectories
            for score in play.scores.values()]  # fmt: skip
    steps = [record for record in read_metrics(tmp_path / "run") if record["phase"] == "train"]
    assert [record["step"] for record in steps] == [1, 2]
    assert [(record["coach/asked"], record["coach/missing"]) for record in steps] == [(8, 0), (8, 0)]
    first, second = (Checkpoints(tmp_path / "run" / "checkpoints").state(step)["team"]["history"] for step in (1, 2))
    assert second[:1] == first  # what the coach is told of the run goes on too
    assert [one["success"] for one in second] == [record["success"] for record in steps]
    assert [one["score/speaker"] for one in second] == [record["coach/speaker/score"] for record in steps]
    assert len({one.value for one in said}) > 1
    assert all(one.members[0] == one.members[1] == one.value for one in said)
    assert (asked["refused"], asked["failed"]) == (0, 0)
    assert asked["requests"] > 0


def test_models_and_ensembles_are_made_of_one_path_and_refused_where_they_cannot_be(judge, tmp_path):
    refused = [
        (dict(kind="model"), "needs path"),
        (dict(kind="model", path=str(tmp_path)), "is no checkpoint: there is no config.json"),
        (dict(kind="model", path=str(judge), url="x"), "coach.url would have no effect: a coach of kind 'model'"),
        (dict(kind="model", path=str(judge), thinking="maybe"), "thinking='maybe' is not one of"),
        (dict(kind="ensemble"), "needs members"),
        (dict(kind="ensemble", members="rubric; "), "has an empty member"),
        (dict(kind="ensemble", members="rubric; ensemble members=x"), "a member's kind"),
        (dict(kind="ensemble", members="rubric; rubric when=end"), "'when=end' is no option of a member"),
        (dict(kind="ensemble", members="rubric; model path=x"), "member 2: config.coach.path='x' is no checkpoint"),
        (dict(kind="ensemble", members="rubric; served url=x served_as=y max_tokens=few"), "'max_tokens=few'"),
        (dict(kind="ensemble", members="rubric"), "needs 2 members or more"),
        (dict(kind="ensemble", members="rubric; rubric", quorum=3), "quorum=3 of 2 members"),
        (dict(kind="ensemble", members="rubric; rubric", study="babbling:0.5"), "give it to a member"),
        (dict(kind="ensemble", members="rubric; rubric", max_tokens=4), "max_tokens would have no effect"),
    ]
    for coach, message in refused:
        with pytest.raises(ConfigError, match=message):
            resolve(config(**coach))
    members = "rubric; rubric study=constant:1; served url=http://127.0.0.1:1 served_as=a deadline_s=400"
    made = config(kind="ensemble", members=members, quorum=2, agreement="trimmed")
    with pytest.raises(ConfigError, match="quorum=2 of 3 members by trimmed"):
        resolve(made)
    made.coach.update(quorum=3, when="end")
    with resolve(made) as plan:
        coaching = make_coaching(made, plan)
        assert coaching.options == {"when": "end", "deadline_s": 1200.0}
        assert len(coaching.clients) == 1
        assert set(coaching.metrics()) >= {"coach/actions", "coach/calls"}
        coaching.close()
        line = cost_line(made, plan)
        assert line.startswith("coach (ensemble): at most 1 actions a play x 2 plays x 4 tasks x 1 steps = 8 calls; rubric; rubric; served")


def test_a_checkpoint_is_measured_as_a_coach_and_told_whether_it_agrees_with_the_rubric(judge, monkeypatch):
    before, told = sorted(judge.iterdir()), []
    short = parser().parse_args(["c.py", "--measure", str(judge), "--max_prompt=1", "--held_out=2", "--unseen=script"])
    assert measure_model(config, short, told.append)["script"]["all"]["missing"] == 2
    assert told[1].startswith("  no score, 2 times refused, such as: ")
    assert "100.0% of its replies missing" in told[2]
    asked = parser().parse_args(["c.py", "--measure", str(judge), "--max_tokens=1", "--held_out=6", "--unseen=script:noise=0.5"])
    figures = measure_model(config, asked, told.append)["script:noise=0.5"]["all"]
    assert (figures["actions"], figures["missing"]) == (6, 0)
    assert figures["mae"] > 0.7
    verdict = f"{judge} should train nobody: it agrees too little with its rubric on script:noise=0.5: mean absolute error "
    assert told[-1].startswith(verdict)

    def rubric_coaching(config, plan):
        return Coaching(rubric_coach(plan.played.guide), plan.played.guide, {})

    monkeypatch.setattr("marl_llm.runs.coaching.make_coaching", rubric_coaching)
    figures = measure_model(config, asked, told.append)["script:noise=0.5"]["all"]
    assert (figures["mae"], figures["kappa"]) == (0.0, 1.0)
    assert told[-1] == f"it agrees with its rubric: --config.coach.kind=model --config.coach.path={judge}"
    assert sorted(judge.iterdir()) == before


def test_a_reply_of_a_model_in_this_process_is_taken_though_it_took_more_than_an_attempt_of_a_server(judge, monkeypatch):
    """A core that compiles meanwhile takes minutes. Such replies were dropped and asked for again."""
    monkeypatch.setattr("marl_llm.tools._chat_backends.time", types.SimpleNamespace(monotonic=itertools.count(0, 90).__next__))
    asked = parser().parse_args(["c.py", "--measure", str(judge), "--max_tokens=1", "--held_out=2", "--unseen=script"])
    assert measure_model(config, asked, print)["script"]["all"]["missing"] == 0


@pytest.mark.parametrize(("options", "message"), [
    (["--measure", "DIR", "--epochs=3"], "--epochs would have no effect: --measure trains nobody"),
    (["--measure", "DIR", "--team=script"], "--team would have no effect"),
    (["--out", "NEW", "--max_tokens=3"], "--max_tokens would have no effect: --measure alone reads it"),
])  # fmt: skip
def test_an_option_that_the_other_way_reads_is_refused(options, message, capsys):
    assert main(["experiments/configs/chain_maths.py", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_directory_that_is_no_checkpoint_is_not_measured(capsys):
    assert main(["experiments/configs/chain_maths.py", "--measure", "nowhere"]) == 2
    assert "config.coach.path='nowhere' is no checkpoint" in capsys.readouterr().err


def test_a_coach_that_is_the_teams_own_model_is_warned_of_before_the_run(judge, tmp_path):
    own = config(kind="model", path=str(judge), max_tokens=1)
    with resolve(own) as plan:
        assert "favour its own texts" not in cost_line(own, plan)
        for place, warned in ((judge, True), (judge / ".." / judge.name, True), (tmp_path, False)):
            theirs = dataclasses.replace(plan, options={"speaker": {"path": str(place)}})
            assert ("note: speaker began as the coach's own model" in cost_line(own, theirs)) == warned
    mixed = config(kind="ensemble", members=f"rubric; model path='{judge}' max_tokens=1")
    with resolve(mixed) as plan:
        theirs = dataclasses.replace(plan, options={"speaker": {"path": str(judge)}})
        assert cost_line(mixed, theirs).endswith("see coach/<role>/own_slope")


def test_a_model_refuses_as_the_server_does_and_its_files_name_its_cache(judge, tmp_path):
    with LocalModel(str(judge), max_num_seqs=4, **SIZES) as model:
        with ChatClient(model.backend(content=True), cache=tmp_path / "kept.sqlite") as client:
            failure = client.complete([{"role": "user", "content": "x" * 9000}], max_tokens=1).failure
            assert failure.kind.value == "refused"
            assert "2048 are served" in failure.message
        assert model.backend().identity != model.backend(content=True).identity
    before = digest_of(judge)
    (judge / "note.txt").write_text("other")
    assert digest_of(judge) != before


def test_a_checkpoint_is_served_by_name(judge):
    from marl_llm.cli.serve import answers_of_checkpoint
    from marl_llm.tools.chat import Options

    with answers_of_checkpoint(str(judge), "coach", 2048, 1, max_num_seqs=2) as models:
        replies = [models["coach"]([{"role": "user", "content": f"case {n}"}], Options(temperature=0.0)) for n in (12, 345)]
    assert all(reply.text.startswith("SCORE: ") for reply in replies)
    assert all(reply.completion_tokens == 1 for reply in replies)
    with pytest.raises(ConfigError, match=r"--path='nowhere': .*there is no such directory"), answers_of_checkpoint("nowhere", "coach"):
        pass
