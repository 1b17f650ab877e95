"""Who plays whom, and who trains when."""

import pytest

from marl_llm.workflows import Role, Workflow, WorkflowError, plain, sequence
from marl_llm.workflows.assignment import (
    Assignment,
    Inside,
    Outside,
    Scripted,
    alternate,
    separate,
    shared,
)


def team():
    roles = [Role(n, "{question}", parse=plain(n + "_out"), writes={n + "_out": ""}) for n in ("plan", "search", "answer")]
    return Workflow("t", sequence(*roles), inputs=("question",))


class Client:
    async def acomplete(self, messages, draw=0, **options):
        raise NotImplementedError


def test_sharing_is_what_the_names_say():
    assert shared(team()).trained == ("policy",)
    assert separate(team()).trained == ("plan", "search", "answer")
    part = Assignment({"plan": "a", "search": "b", "answer": "a"})
    assert part.trained == ("a", "b")
    part.check(team())


def test_frozen_outside_and_scripted_players_are_not_trained():
    models = {"b": Inside(trained=False), "c": Outside(Client()), "d": Scripted(lambda turn: "x")}
    one = Assignment({"plan": "a", "search": "b", "answer": "c", "extra": "d"}, models)
    assert (one.policies, one.trained) == (("a", "b"), ("a",))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Assignment({"plan": "a"}).check(team()), "'search' of workflow 't' is unassigned"),
        (lambda: Assignment({**shared(team()).roles, "anser": "a"}).check(team()), "no role 'anser', did you mean 'answer'"),
        (lambda: Assignment({"plan": "a"}, {"b": Inside()}), "'b' plays no role"),
        (lambda: Assignment({"plan": "a"}, schedule=alternate(("b", 1))), "'b' is no trained model"),
        (lambda: Assignment({"plan": "a"}, {"a": Inside(False)}, alternate(("a", 1))), "'a' is no trained model"),
        (lambda: Assignment({"plan": "a", "answer": "b"}, schedule=alternate(("a", 1))), "'b' never trains"),
        (lambda: alternate(("a", 0)), "at least one of each"),
    ],
)
def test_what_cannot_be_is_refused(build, message):
    with pytest.raises(WorkflowError, match=message):
        build()


def test_schedules_give_turns_again_and_again():
    one = Assignment({"plan": "a", "search": "b", "answer": "c"}, schedule=alternate(("a", 2), (("b", "c"), 1)))
    assert [one.training(step) for step in range(6)] == [("a",), ("a",), ("b", "c")] * 2
    assert Assignment({"plan": "a", "search": "b"}).training(5) == ("a", "b")


def test_a_role_with_tools_cannot_be_played_outside():
    from marl_llm.workflows import RoleTool

    lookup = RoleTool("lookup", lambda q: q, "", {})
    role = Role("plan", "{question}", parse=plain("x"), writes={"x": ""}, tools=(lookup,))
    with pytest.raises(WorkflowError, match="'plan' calls tools"):
        Assignment({"plan": "s"}, {"s": Outside(Client())}).check(Workflow("t", role, inputs=("question",)))
