"""Two writers on descriptions of Python's library, paid by degrees: for words of the post, for different ones, for fitting lengths."""

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_llm.games.descriptions import MODULES, SHARES, description_tasks, descriptions
from marl_llm.games.writing.environments import writing
from marl_llm.games.writing.graded import Graded
from marl_llm.workflows import Controller, Scripted, WorkflowError, shared
from marl_llm.workflows.assignment import Assignment
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.samples import sample_table

POST = "Return the largest item of a sorted list, or raise ValueError when the list is empty and no default was given."
FIRST = "Finds the item that is largest in a list that is sorted."
SECOND = (
    "Return largest item sorted list. Raise ValueError when list empty and no default given; otherwise the default value comes back to you."
)


@pytest.mark.parametrize(
    ("first", "second", "pays"),
    [
        (FIRST, SECOND, (0.75, 0.75, 0.25, 0.25)),
        ("", "", (0.0, 0.0, 0.0, 0.0)),
        ("the of and to it is so", SECOND, (0.0, 0.75, 0.0, 0.0)),  # no content
        (POST, SECOND, (0.0, 0.75, 0.0, 0.0)),  # a copy
        ("post: post: post: post: post: post:", "post " * 12, (0.0, 0.0, 0.0, 0.0)),
        ("largest item list cat dog cow", SECOND, (0.625, 0.75, 0.25, 0.25)),  # half of its words are the post's, six tenths pay in full
        ("largest item " * 3, SECOND, (0.75 * (1 / 3) / 0.7, 0.75, 0.25, 0.25)),  # a third of its words are different
        ("list sorted item", SECOND, (0.75, 0.75, 0.0, 0.25 * (8 - 22 / 3) / 4)),
        ("sorted item list largest", SECOND, (0.75, 0.75, 0.25 / 3, 0.25 * (8 - 5.5) / 4)),
    ],
)
def test_texts_are_paid_by_degrees(first, second, pays):
    found = Graded().score(first, second, POST)
    assert tuple(found.components) == ("first", "second", "brevity", "detail")
    assert tuple(found.components.values()) == pytest.approx(pays)


@pytest.mark.parametrize(("words", "share"), [(2, 0.0), (3, 0.0), (4, 1 / 3), (6, 1.0), (18, 1.0), (27, 0.5), (36, 0.0), (37, 0.0)])
def test_the_first_text_is_brief(words, share):
    post = " ".join(f"w{i}" for i in range(60))
    text = " ".join(f"w{i * 7 % 60}" for i in range(words))
    assert Graded().score(text, "", post).components["brevity"] == pytest.approx(0.25 * share)


@pytest.mark.parametrize(("words", "share"), [(9, 0.0), (10, 0.0), (12, 0.4), (15, 1.0), (40, 1.0), (60, 0.5), (80, 0.0), (90, 0.0)])
def test_the_second_text_is_longer_than_the_first(words, share):
    post = " ".join(f"w{i}" for i in range(97))
    first, second = (" ".join(f"w{i * step % 97}" for i in range(count)) for step, count in ((7, 10), (11, words)))
    assert Graded().score(first, second, post).components["detail"] == pytest.approx(0.25 * share)


def test_a_text_may_be_a_copy_up_to_its_half():
    post = "alpha beta gamma delta epsilon"
    assert Graded().score("alpha beta delta gamma", "", post).components["first"] > 0
    assert Graded().score("alpha beta gamma epsilon", "", post).components["first"] == 0


@given(st.text(max_size=60), st.text(max_size=60), st.text(max_size=60))
def test_any_texts_earn_between_nothing_and_all(first, second, post):
    found = Graded().score(first, second, post)
    assert all(0.0 <= paid <= Graded().most[name] for name, paid in found.components.items())
    assert 0.0 <= found.grounding <= 1.0
    assert found == Graded().score(first, second, post)


def test_descriptions_are_those_of_the_library_each_once_in_one_split():
    found = descriptions(18, 45)
    assert len(found) > 500
    assert len({text for _, text in found}) == len(found)
    assert all(18 <= len(text.split()) <= 45 for _, text in found)
    assert {min(len(text.split()) for _, text in found), max(len(text.split()) for _, text in found)} == {18, 45}
    assert "json.dumps" in {name for name, _ in descriptions(100, 400)}
    tasks = description_tasks()
    assert list(tasks) == list(SHARES)
    posts = [{task.fields["post"] for task in part} for part in tasks.values()]
    assert sum(map(len, posts)) == len(set().union(*posts)) == len(found)
    assert [task.number for task in tasks["test"]] == list(range(len(tasks["test"])))
    shares = [len(part) / len(found) for part in posts]
    assert shares == pytest.approx(list(SHARES.values()), abs=0.06)


def test_every_module_is_there():
    assert all(importlib.import_module(module).__name__ for module in MODULES)
    assert len(set(MODULES)) == len(MODULES)


def test_the_world_has_these_tasks_and_figures():
    environment = writing(task="descriptions", constants="graded", max_prompt=208, max_tokens=48)
    (one,) = environment.tasks("test", 0, 1)
    said = {"first": FIRST, "second": SECOND}
    assignment = Assignment(dict.fromkeys(environment.workflow.roles, "p"), {"p": Scripted(lambda turn: said[turn.role.name])})
    with Controller(environment.workflow, assignment, None, {}) as controller:
        rollout = controller.play([one])
    figures = rollout_metrics(rollout, sample_table(rollout, training=()))
    assert 0.0 <= figures["team/return"] <= 1.0
    assert {"team/first_share", "team/second_share", "team/brevity_share", "team/detail_share"} <= set(figures)
    assert figures["team/brevity_share"] in (0.0, 1.0)
    assert shared(environment.workflow).roles == {"first": "policy", "second": "policy"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "descriptions", "train": "a.jsonl"}, "train and test would have no effect: descriptions come with Python"),
        ({"task": "descriptions", "test": "a.jsonl"}, "train and test would have no effect"),
        ({"task": "descriptions", "constants": "graded", "grounded": True}, "grounded=True would have no effect"),
        ({"task": "description"}, "is not one of tldr, arxiv, descriptions"),
        ({"task": "descriptions", "constants": "grade"}, "is not one of paper, release, graded"),
    ],
)
def test_options_without_effect_and_unknown_words_are_named(options, message):
    with pytest.raises(WorkflowError, match=message):
        writing(**options)
