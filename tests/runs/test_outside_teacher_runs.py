"""Runs whose teacher stands behind an endpoint: they learn from it, and a teacher that dies loses nothing."""

import jax
import pytest
from test_configured_teachers import ALONE, ROLES, assert_equal, metrics_of, options_of_student

import marl_llm as ml
from marl_llm.models import init_params, make_model_config
from marl_llm.runs.building import opened
from marl_llm.runs.command import ConfigError, TrainingError
from marl_llm.sampling import Engine, EngineConfig
from marl_llm.serving import ChatServer, policy_answers
from marl_llm.text import ByteTokenizer
from marl_llm.tools import teacher_endpoint
from marl_llm.tools.chat import ChatReply
from marl_llm.training import Checkpoints, processes
from marl_llm.workflows import PlainText

TOKENIZER = ml.make_game("joint_letter", letters=3).tokenizer
STEPS = 4


class Mortal(ChatServer):
    """A server that answers so many more requests, and then none; None: all."""

    left = None
    answered = 0

    def answer(self, *args, **options):
        if self.left is not None and self.answered >= self.left:
            return 503, {"error": {"message": "gone"}}
        self.answered += 1
        return super().answer(*args, **options)


@pytest.fixture(scope="module")
def answers():
    config = make_model_config("nano", TOKENIZER.vocab_size)
    sizes = EngineConfig(max_num_seqs=4, prompt_tokens=32, response_tokens=8, batch_invariant=True)  # the same bits to every run
    params = jax.tree.map(lambda x: x * 3.0, init_params(config, jax.random.key(5)))
    with Engine({"first": (config, params)}, jax.random.key(0), sizes=sizes) as engine:
        yield policy_answers(engine, "first", PlainText(TOKENIZER, (1,)), max_prompt=32, max_tokens=8)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(teacher_endpoint, "PAUSE_S", 0.01)


def train(workdir, url, steps=STEPS):
    game, models, _, options = options_of_student({role: {"url": url, "model": "first"} for role in ROLES})
    return ml.train(game, models, ALONE | {"distill_top_k": 2}, steps=steps, workdir=workdir, **options)


def params_of(run):
    with opened(run) as (_, _, team, _):
        return jax.device_get(team.learners["first_second"].params)


def test_a_teacher_that_dies_in_the_middle_is_named_and_the_same_command_goes_on_as_if_it_had_not(answers, tmp_path):
    with Mortal({"first": answers}) as server:
        train(tmp_path / "whole", server.url)
        for role in ROLES:
            distances = metrics_of(tmp_path / "whole", f"model/first_second/distill_kl/{role}")
            assert distances[-1] < distances[0], distances
        per_step, probe = divmod(server.answered, STEPS)
        assert (per_step > 1, probe) == (True, 1), "one request about the vocabulary, and one a sample"
        server.answered, server.left = 0, 1 + 2 * per_step + 1
        with pytest.raises(TrainingError) as found:
            train(tmp_path / "broken", server.url)
        line = str(found.value)
        assert f"the teacher 'first' at {server.url} gave no prompt log-probs after 4 attempts (unavailable): status 503" in line
        assert ("the same command goes on from the last checkpoint" in line, "\n" in line) == (True, False)
        assert Checkpoints(tmp_path / "broken" / "checkpoints").steps()[-1] == 2, "every third step has one: this is of the failure"
        server.left = None
        train(tmp_path / "broken", server.url)
    for key in ("model/first_second/loss", "model/first_second/distill_kl/first"):
        assert metrics_of(tmp_path / "broken", key) == metrics_of(tmp_path / "whole", key)
    assert_equal(params_of(tmp_path / "broken"), params_of(tmp_path / "whole"))


def test_an_endpoint_that_cannot_teach_is_refused_in_one_line_before_a_directory_is_made(answers, tmp_path, monkeypatch):
    bytes_alone = policy_answers(answers.engine, "first", PlainText(ByteTokenizer(), (1,)), max_prompt=32, max_tokens=8)
    for model, message in (
        (lambda *_: ChatReply("x"), r"gave no prompt log-probs \(refused\): status 400: .*scores no prompts"),
        (bytes_alone, "has another tokenizer than model 'first_second': "),
    ):
        with ChatServer({"first": model}) as server, pytest.raises(ConfigError, match=message) as found:
            train(tmp_path / "run", server.url)
        assert str(found.value).startswith(f"config.teachers.first.url='{server.url}'")
        assert "\n" not in str(found.value)
    with pytest.raises(ConfigError, match=r"gave no prompt log-probs \(unavailable\)"):
        train(tmp_path / "run", server.url)
    monkeypatch.setattr(processes._state(), "num_processes", 2)
    with pytest.raises(ConfigError, match="needs one process, and here are 2: all would ask it"):
        train(tmp_path / "run", server.url)
    assert not (tmp_path / "run").exists()
