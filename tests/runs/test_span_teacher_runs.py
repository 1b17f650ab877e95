"""A small checkpoint learns from one of another tokenizer: what a run of it writes, what the dry run says, and what is refused."""

import json
import pathlib

import numpy as np
import pytest

import marl_llm as ml
from marl_llm.cli.tiny import make
from marl_llm.runs.api import make_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.teachers import find_teachers, make_teachers, span_rows
from marl_llm.text import Chat
from marl_llm.training import make_mesh
from marl_llm.training.span_teachers import SpanTeacher
from marl_llm.workflows import PlainText

TEAM = f"{pathlib.Path(__file__).parents[2] / 'examples' / 'team_function.py'}:colours"
SIZES = dict(layers=1, width=32, head_dim=8, feed_forward=48)
SMALL = {
    "rollout": {"tasks": 8}, "optimizer": {"learning_rate": 5e-2, "warmup": 0}, "quick_compile": True, "devices": 1,
    "evaluation": {"tasks": 2, "final_tasks": 2, "every": 100, "ablate_roles": False}, "checkpoint": {"every": 100},
}  # fmt: skip
RECIPE = {"name": "grpo", "group_size": 4, "policy_coef": 0.0, "distill_coef": 1.0, "distill_divergence": "sampled"}
WORDS = [{"word": f"{a}{b}"} for a in "abcdefghij" for b in "klmnopqrst"]


@ml.workflows.team(tasks=WORDS, roles={"writer": {"max_prompt": 48, "max_tokens": 6}})
async def write(t, task):
    """One role, which nobody pays."""
    await t.writer(f"Say {task.word}")
    return ml.Reward(team=0.0)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(student, teacher): directories, with 640 and 384 tokens."""
    place = tmp_path_factory.mktemp("checkpoints")
    return make(place / "student", "qwen2", 640, **SIZES), make(place / "teacher", "qwen3", 384, seed=1, **SIZES)


def config_of(student, teachers, game=write, **recipe):
    return make_config(game, ml.load_model(str(student)), RECIPE | recipe, steps=1, teachers=teachers, **SMALL)


def test_a_student_nears_a_teacher_of_another_tokenizer(checkpoints, tmp_path):
    student, teacher = checkpoints
    teachers = {"writer": {"path": str(teacher)}}
    ml.train(write, ml.load_model(str(student)), RECIPE, steps=20, workdir=tmp_path / "run", teachers=teachers, **SMALL)
    rows = [row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["phase"] == "train"]
    kl, gap, long, unread = (
        np.asarray([next(value for key, value in row.items() if key.endswith(f"{name}/writer")) for row in rows])
        for name in ("distill_kl", "teacher_gap", "span_tokens", "unread_tokens")
    )
    assert kl[-3:].mean() < 0.5 * kl[:3].mean(), kl
    np.testing.assert_allclose(kl, gap, rtol=1e-5)
    assert 0 < long.mean() < 1
    assert unread[-3:].mean() < 0.6, unread  # what the teacher cannot read is no way out: as one it is .86, else .2 to .35


def test_who_teaches_by_spans_is_named_and_reads_by_its_own_template(checkpoints):
    student, teacher = checkpoints
    config = config_of(student, {"writer": {"path": str(teacher)}})
    with resolve(config) as plan:
        (row,) = span_rows(config, plan)
        assert row == f"  config.teachers.writer.path={str(teacher)!r} has another tokenizer than its student: compared by spans of text"
        made = make_teachers(find_teachers(config, plan), config, make_mesh(1))["writer"]
    assert isinstance(made, SpanTeacher)
    assert (made.config.vocab_size, made.params["embedding"].shape[0], made.vocab_size) == (384, 384, 640)
    assert isinstance(made.renderer, Chat)
    own = config_of(student, {"writer": {"path": str(student)}})
    with resolve(own) as plan:
        assert span_rows(own, plan) == []


def test_a_model_of_a_run_teaches_by_spans(checkpoints, tmp_path):
    ml.train(TEAM, "nano", "grpo", steps=0, workdir=tmp_path / "run", **SMALL)
    config = config_of(checkpoints[0], {"solver": {"run": str(tmp_path / "run")}}, TEAM)
    with resolve(config) as plan:
        sources = find_teachers(config, plan)
        made = make_teachers(sources, config, make_mesh(1))["solver"]
    assert sources["solver"].by_spans
    assert isinstance(made.renderer, PlainText)
    assert made.config.vocab_size == made.renderer.tokenizer.vocab_size == 258


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ({"distill_divergence": "reverse_kl"}, r"not distributions as recipe\.distill_divergence='reverse_kl': set it to 'sampled'"),
        ({"temperature": 0.5}, r"compared at temperature 1, and recipe\.temperature=0\.5: set it to 1"),
    ],
)
def test_what_spans_do_not_tell_is_refused_with_what_to_do(checkpoints, recipe, why):
    student, teacher = checkpoints
    config = config_of(student, {"writer": {"path": str(teacher)}}, **recipe)
    with resolve(config) as plan, pytest.raises(ConfigError, match=f"has another tokenizer than model 'writer': token .*; .*{why}"):
        find_teachers(config, plan)
