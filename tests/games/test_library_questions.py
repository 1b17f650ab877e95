"""Searcher and answerer on Python's library: questions hide what they ask for, the index holds it, and both are paid for what they do."""

import dataclasses

import pytest

from marl_llm.games.descriptions import SHARES
from marl_llm.games.search.library import library_questions, library_tasks, module_and_name, name_share, rank_pay
from marl_llm.workflows import Controller, Scripted
from marl_llm.workflows.assignment import Assignment
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.rewards import earned
from marl_llm.workflows.samples import sample_table


@pytest.fixture(scope="module")
def environment():
    made = library_questions(top_k=2)
    yield made
    made.close()


def played(environment, task, query, answer):
    said = {"searcher": query, "answerer": answer}
    assignment = Assignment(dict.fromkeys(environment.workflow.roles, "p"), {"p": Scripted(lambda turn: said[turn.role.name])})
    with Controller(environment.workflow, assignment, None, {}) as controller:
        rollout = controller.play([task])
    (path,) = rollout.episodes[0].trajectories
    return path, rollout_metrics(rollout, sample_table(rollout, training=()))


def test_a_question_belongs_to_one_split_and_hides_its_answer():
    tasks = library_tasks()
    questions = {split: {task.fields["question"] for task in part} for split, part in tasks.items()}
    assert set(tasks) == set(SHARES)
    assert not questions["train"] & questions["test"]
    assert not questions["train"] & questions["validation"]
    assert not questions["validation"] & questions["test"]
    assert min(len(part) for part in tasks.values()) > 150
    every = [task for part in tasks.values() for task in part]
    quoted = [(task.fields["question"].split('"')[1].split(), task.hidden["answers"][0]) for task in every]
    assert not [own for words, own in quoted if own in words]
    assert all(len(words) <= 10 for words, _ in quoted)
    assert not [task for task in every if '"it(' in task.fields["question"]]  # a signature


def test_each_function_that_a_question_means_is_right():
    every = [task for part in library_tasks().values() for task in part]
    shared = [task for task in every if len(task.hidden["sources"]) > 1]
    assert shared
    for task in shared:
        names = [source.removesuffix(": ") for source in task.hidden["sources"]]
        assert set(names) <= set(task.hidden["answers"])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("os.path.join", ("os.path", "join")),
        ("os.walk", ("os", "walk")),
        ("datetime.datetime.date", ("datetime", "datetime.date")),
        ("concurrent.futures.Future.result", ("concurrent.futures", "Future.result")),
    ],
)
def test_a_name_is_a_module_and_what_is_in_it(name, parts):
    assert module_and_name(name) == parts


def test_the_searcher_is_paid_for_the_rank_of_the_right_passage_and_both_for_the_name(environment):
    (task,) = environment.tasks("test", 4, 1)
    right, full = task.fields["question"].split('"')[1], task.hidden["answers"][-1]
    last = full.rpartition(".")[2]
    for query, answer, found, name in (
        (right, full, 1.0, 1.0),
        (right, "no idea at all", 1.0, 0.0),
        ("zebra", last, 0.0, 1.0),
        ("", last, 0.0, 1.0),
    ):
        path, figures = played(environment, task, query, answer)
        assert figures["team/name"] == pytest.approx(name)
        assert figures["team/found"] == found
        paid = earned(environment.workflow, path)
        by_role = {call.role: (paid[call.id].team, paid[call.id].local) for call in path.calls}
        assert by_role["searcher"] == pytest.approx((name, 0.5 * found))
        assert by_role["answerer"] == pytest.approx((name, 0.0))


@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("start_tls", 1.0),
        ("asyncio.BaseEventLoop.start_tls", 1.0),
        ("The part is `asyncio.BaseEventLoop.start_tls`.", 0.4),  # one word of four: the harmonic mean of 1 and 1/4
        ("asyncio.AbstractEventLoop.start_tls", 0.8),  # two of three parts right, and both of the short name
        ("start_tls start_tls start_tls start_tls", 0.4),  # only the first of four words counts
        ("`start_tls`, asyncio.start_tls", 2 / 3),
        ("tls", 0.0),
        ("start tls", 0.0),  # as a description may say it
        ("asyncio", 0.0),  # which the question tells
        ("asyncio.", 0.0),
        ("", 0.0),
    ],
)
def test_a_name_that_is_partly_right_earns_a_share(environment, answer, share):
    (task,) = environment.tasks("test", 4, 1)
    path, _ = played(environment, task, "x", "y")
    names = ("start_tls", "BaseEventLoop.start_tls", "asyncio.BaseEventLoop.start_tls")
    said = dataclasses.replace(path, fields={**path.fields, "answer": answer, "answers": names, "module": "asyncio"})
    assert name_share(said) == pytest.approx(share)


def test_the_second_passage_earns_half(environment):
    (task,) = environment.tasks("test", 4, 1)
    path, _ = played(environment, task, task.fields["question"].split('"')[1], "x")
    first, second = path.fields["passages"]
    assert first.startswith(task.hidden["sources"])
    swapped = dataclasses.replace(path, fields={**path.fields, "passages": (second, first)})
    assert rank_pay(swapped) == 0.5


def test_no_passages_are_refused():
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        library_questions(top_k=0)
