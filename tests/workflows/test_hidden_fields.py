"""A10: what comes from a hidden field is hidden, whatever way it takes; only the word `reveals` says otherwise."""

import pytest

from marl_llm.workflows import Role, Workflow, WorkflowError, choose, compute, each, repeat, sequence, stop, together, tool, when
from marl_llm.workflows.roles import Reader


def role(name, prompt="{question}", writes=None, **options):
    writes = {name + "_out": ""} if writes is None else writes
    return Role(name, prompt, parse=lambda text: dict.fromkeys(writes, text), writes=writes, **options)


def copy(gold):
    return gold


def flow(*parts, **options):
    return Workflow("w", sequence(*parts), **{"inputs": ("question",), "hidden": ("gold",), "start": {"x": ""}, **options})


def same(name, into, **options):
    """A computation that copies one field to another."""
    return compute(lambda value: value, into, name=f"{name}_to_{into}", reads=(name,), **options)


READER = role("b", "{x}")
LEAKS = {
    "through each": [each("gold", as_="bar", do=role("b", "{bar}"), collect="b_out", at_most=2)],
    "by the number of items": [each("gold", as_="bar", do=role("b"), collect="b_out", at_most=2)],
    "through compute": [compute(copy, "x"), READER],
    "through a tool": [tool(copy, "x"), READER],
    "through positional reads": [compute(lambda value: value, "x", name="c", reads=("gold",)), READER],
    "over two hops": [same("gold", "y"), same("y", "x"), READER],
    "over three hops and a tool": [same("gold", "y"), same("y", "z"), tool(lambda z: z, "x", name="t"), READER],
    "through collect": [each("gold", "bar", same("bar", "y"), {"y": "x"}, 2), READER],
    "through collect of what each computes from a hidden field": [
        each("question", "q", compute(lambda q, gold: gold, "y", name="c"), {"y": "x"}, 2),
        READER,
    ],
    "through each over what was computed": [same("gold", "y"), each("y", "bar", role("b", "{bar}"), "b_out", 2)],
    "beside others": [together(compute(copy, "x"), role("a")), READER],
    "in the system's message": [compute(copy, "x"), role("b", system="{x}")],
    "into a verdict": [role("a"), tool(lambda a_out, gold: a_out == gold, "x", name="verify"), READER],
    "by one of two cases": [when(lambda question: True, compute(copy, "x"), name="w"), READER],
    "by which case was taken": [
        choose(lambda gold: gold, {1: compute(lambda: "one", "x", name="c1"), 2: compute(lambda: "two", "x", name="c2")}, name="w"),
        READER,
    ],
    "by a case that leaves the field alone": [when(lambda gold: gold, compute(lambda: "yes", "x", name="c"), name="w"), READER],
    "by who may speak": [when(lambda gold: gold, role("b"), role("c"), name="w")],
    "by who speaks after a stop": [repeat(role("a"), when(lambda gold: gold, stop(), name="s"), role("b"), at_most=1)],
    "by whether there is another round": [repeat(role("b"), until=lambda gold: gold, name="loop", at_most=2)],
    "by whether there is another round, over a verdict": [
        repeat(role("b"), compute(lambda b_out, gold: b_out == gold, "ok", name="c"), until=lambda ok: ok, name="loop", at_most=2)
    ],
    "by the number of rounds": [
        repeat(compute(lambda x: x + "1", "x", name="count"), when(lambda gold: gold, stop(), name="s"), at_most=3),
        READER,
    ],
    "in a later round": [repeat(role("b", "{x}"), compute(copy, "x"), at_most=2)],
    "in a round after the next": [repeat(role("b", "{x}"), same("y", "x"), same("gold", "y"), at_most=3, name="l")],
    "by a stop of the whole play": [when(lambda gold: gold, stop(), name="s"), role("b")],
    "by a stop within a case": [
        repeat(when(lambda gold: gold, when(lambda question: True, stop(), name="t"), name="s"), role("b"), at_most=1)
    ],
    "through another output of a tool that reveals one": [
        tool(lambda gold: {"x": 1, "y": 2}, ("x", "y"), name="t", reveals=("y",)),
        READER,
    ],
    "over what was revealed once and is hidden again": [compute(copy, "x", reveals=("x",)), compute(copy, "x", name="again"), READER],
}
START = {"in a round after the next": {"x": "", "y": ""}}


@pytest.mark.parametrize("way", LEAKS)
def test_a10_what_comes_from_a_hidden_field_reaches_no_role(way):
    with pytest.raises(WorkflowError, match=r"'b'.*hidden field 'gold'.*reveals"):
        flow(*LEAKS[way], start=START.get(way, {"x": ""}))


REVEALED = {
    "by a computation": [compute(copy, "x", reveals=("x",)), READER],
    "by a tool, into a verdict": [role("a"), tool(lambda a_out, gold: a_out == gold, "x", name="v", reveals=("x",)), READER],
    "by the last of two hops": [same("gold", "y"), same("y", "x", reveals=("x",)), READER],
    "by the first of two hops": [same("gold", "y", reveals=("y",)), same("y", "x"), READER],
    "before each": [same("gold", "y", reveals=("y",)), each("y", "bar", role("b", "{bar}"), "b_out", 2)],
    "by a choice": [when(lambda gold: gold, role("b"), role("c"), name="w", reveals=("gold",))],
    "by a choice of many": [choose(lambda gold: gold, {1: role("b"), 2: role("c")}, name="w", reveals=("gold",))],
    "by a loop": [repeat(role("b"), until=lambda gold: gold, at_most=2, reveals=("gold",))],
    "by a verdict that the loop reads": [
        repeat(role("b"), compute(lambda b_out, gold: b_out == gold, "ok", name="c", reveals=("ok",)), until=lambda ok: ok, at_most=2)
    ],
}
HARMLESS = {
    "a verdict for rewards only": [repeat(role("b"), compute(lambda b_out, gold: b_out == gold, "ok", name="c"), at_most=2)],
    "a field that is written anew before it is read": [compute(copy, "x"), compute(lambda question: question, "x", name="n"), READER],
    "a field that a role writes anew": [compute(copy, "x"), role("a", writes={"x": ""}), READER],
    "a choice that is over": [when(lambda gold: gold, compute(lambda: "yes", "y", name="c"), name="w"), READER],
    "a loop of tools that is over": [repeat(compute(copy, "y"), until=lambda gold: gold, at_most=2), READER],
    "a stop after the last who speaks": [repeat(role("b"), when(lambda gold: gold, stop(), name="s"), at_most=1)],
}


@pytest.mark.parametrize("way", [*REVEALED, *HARMLESS])
def test_what_is_revealed_or_never_read_is_accepted(way):
    flow(*{**REVEALED, **HARMLESS}[way])


def test_the_message_names_the_way_the_field_took_and_the_word_that_would_allow_it():
    with pytest.raises(WorkflowError) as error:
        flow(*LEAKS["over two hops"])
    assert str(error.value) == (
        "node 'b': role 'b' reads 'x', which comes from the hidden field 'gold' by 'y_to_x'; a prompt may not hold it, "
        "unless 'y_to_x' says reveals=('x',)"
    )
    with pytest.raises(WorkflowError) as error:
        flow(*LEAKS["by who may speak"])
    assert str(error.value) == (
        "whether 'b' speaks depends on the hidden field 'gold' by 'w'; its prompt would tell, unless 'w' says reveals=('gold',)"
    )


def test_a_word_that_reveals_nothing_is_refused():
    with pytest.raises(WorkflowError, match="tool 'copy' reveals 'y', which it does not write; did you mean 'yy'"):
        tool(copy, "yy", reveals=("y",))
    with pytest.raises(WorkflowError, match="choice 'copy' reveals 'golf', which it does not read; did you mean 'gold'"):
        when(copy, READER, reveals=("golf",))
    with pytest.raises(WorkflowError, match="loop 'loop' reveals 'ok', which it does not read"):
        repeat(READER, at_most=2, reveals=("ok",))


def test_what_a_parser_makes_of_a_hidden_field_is_hidden():
    grader = Role("a", "{question}", Reader(lambda spoken, gold: {"a": spoken.text == gold}, ("gold",)), {"a": False})
    Workflow("w", grader, ("question",), ("gold",))
    with pytest.raises(WorkflowError, match="role 'b' reads 'a', which comes from the hidden field 'gold' by 'a'.*leaves that to a tool"):
        Workflow("w", sequence(grader, Role("b", "{a}", lambda text: {"b": text}, {"b": ""})), ("question",), ("gold",))
