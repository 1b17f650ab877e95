"""Workflows as values: what is refused when one is built, and how it is drawn."""

import dataclasses
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from marl_llm.workflows import (
    NOTHING,
    Role,
    Workflow,
    WorkflowError,
    call,
    choose,
    compute,
    each,
    repeat,
    sequence,
    stop,
    to_mermaid,
    to_svg,
    together,
    tool,
    when,
    with_roles,
)
from marl_llm.workflows.graph import _node


def role(name, prompt="{question}", writes=None, **options):
    writes = {name + "_out": ""} if writes is None else writes
    return Role(name, prompt, parse=lambda text: dict.fromkeys(writes, text), writes=writes, **options)


def flow(body, **options):
    return Workflow("w", body, **{"inputs": ("question",), **options})


ASK = role("ask")


def find(question):
    return question


REFUSED = {
    "an unknown field": (lambda: flow(role("a", "{questoin}")), "node 'a' reads the field 'questoin'.*did you mean 'question'"),
    "a field written later": (
        lambda: flow(sequence(role("a", "{b_out}"), role("b"))),
        "node 'a' reads the field 'b_out', which 'b' may not have written by then",
    ),
    "a field written on one way only": (
        lambda: flow(sequence(when(lambda question: True, ASK, name="w"), role("b", "{ask_out}"))),
        "node 'b' reads the field 'ask_out', which 'ask' may not",
    ),
    "a field of the partner who speaks at the same time": (
        lambda: flow(together(ASK, role("b", "{ask_out}"))),
        "node 'b' reads the field 'ask_out'",
    ),
    "a field of the item outside of the items": (
        lambda: flow(sequence(each("question", "q", tool(lambda q: q, "p", name="t"), "p", 3), role("b", "{q}"))),
        "node 'b' reads the field 'q'",
    ),
    "a tool's unknown field": (lambda: flow(sequence(ASK, tool(lambda passage: 1, "x", name="t"))), "node 't' reads the field 'passage'"),
    "a condition's unknown field": (
        lambda: flow(sequence(repeat(ASK, until=lambda done: done, at_most=2))),
        "node 'loop' reads the field 'done'",
    ),
    "a hidden field in a prompt": (
        lambda: flow(role("a", "{answers}"), hidden=("answers",)),
        "node 'a': role 'a' reads the hidden field 'answers'",
    ),
    "a task's field written": (lambda: flow(role("a", writes={"question": ""})), "node 'a' writes 'question'"),
    "a field given twice": (lambda: flow(ASK, start={"question": ""}), "'question' is given twice"),
    "an unbounded loop": (lambda: repeat(ASK, at_most=None, name="again"), "loop 'again' is unbounded"),
    "a loop of no rounds": (lambda: repeat(ASK, at_most=0), "loop 'loop' is unbounded: at_most=0"),
    "an unbounded fan-out": (lambda: each("question", "q", ASK, "ask_out", at_most=True), "each over 'question' is unbounded"),
    "a node behind a stop": (lambda: flow(repeat(ASK, stop(), role("b"), at_most=2)), "node 'b' cannot be reached"),
    "a node behind two stops": (
        lambda: flow(repeat(ASK, when(lambda ask_out: True, stop(), stop(), name="w"), role("b"), at_most=2)),
        "node 'b' cannot be reached",
    ),
    "a condition behind a stop": (
        lambda: flow(repeat(ASK, stop(), at_most=2, until=lambda ask_out: True)),
        "condition of loop 'loop' cannot be reached",
    ),
    "a stop beside others": (lambda: flow(together(ASK, sequence(role("b"), stop()))), "a stop inside 'together'"),
    "a name twice": (lambda: flow(sequence(ASK, ASK)), "two nodes are called 'ask'"),
    "two roles of one name": (lambda: flow(sequence(ASK, call(role("ask"), name="b"))), "two different roles are called 'ask'"),
    "nobody": (lambda: flow(compute(lambda question: 1, "x", name="c")), "calls no role"),
    "two writers at once": (
        lambda: flow(together(role("a", writes={"x": ""}), role("b", writes={"x": ""}))),
        "'a' and 'b' run together and both write 'x'",
    ),
    "an uncollectable field": (lambda: flow(each("question", "q", ASK, "y", 2)), "collects 'y', which its body does not write"),
    "an item that exists": (
        lambda: flow(each("question", "q", ASK, "ask_out", 2), start={"q": ""}),
        "the item's field 'q' exists",
    ),
    "together alone": (lambda: together(ASK), "two parts or more"),
    "an empty sequence": (lambda: sequence(), "at least one part"),
    "something else": (lambda: _node("ask"), "'ask' is no part of a workflow"),
    "a lambda without a name": (lambda: tool(lambda question: 1, "x"), "needs name="),
    "a function of anything": (lambda: tool(lambda **fields: 1, "x", name="t"), "names no field"),
    "a tool without time": (lambda: tool(find, "x", timeout_s=0), "timeout_s=0"),
    "a template with positions": (lambda: role("a", "{0}"), "its template holds {0}"),
    "a template with JSON": (lambda: role("a", '{question} {"answer": 1}'), "double braces"),
    "a role that writes nothing": (lambda: role("a", writes={}), "writes no field"),
    "a role with a bad name": (lambda: role("the coder"), "Python identifier"),
    "a shown field that nobody reads": (lambda: role("a", show={"x": str}), "show names 'x'"),
    "a budget of nothing": (lambda: role("a", max_tokens=0), "must be above 0"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_played_is_refused_with_the_nodes_name(fault):
    build, message = REFUSED[fault]
    with pytest.raises(WorkflowError, match=re.escape(message).replace(r"\.\*", ".*")):
        build()


def test_what_is_near_those_faults_is_accepted():
    flow(sequence(when(lambda question: True, ASK, name="w"), role("b", "{ask_out}")), start={"ask_out": ""})
    flow(sequence(when(lambda question: True, ASK, call(ASK, name="other"), name="w"), role("b", "{ask_out}")))
    flow(repeat(ASK, when(lambda ask_out: True, stop(), name="w"), role("b", "{ask_out}"), at_most=2))
    flow(sequence(ASK, call(ASK, name="again")))
    flow(together(ASK, repeat(role("b"), when(lambda b_out: True, stop(), name="w"), role("c"), at_most=2)))


def test_after_a_loop_only_what_every_way_out_has_written_is_there():
    early = repeat(ASK, when(lambda ask_out: True, stop(), name="w"), role("b"), at_most=2)
    flow(sequence(early, role("c", "{ask_out}")))
    with pytest.raises(WorkflowError, match="node 'c' reads the field 'b_out'"):
        flow(sequence(early, role("c", "{b_out}")))


def test_nodes_and_agents_are_numbered_in_the_order_written():
    team = flow(sequence(role("a"), tool(find, "x"), call(ASK), call(role("c", "{x}"))))
    assert list(team.nodes) == ["a", "find", "ask", "c"]
    assert team.agents == {"a": 0, "ask": 1, "c": 2}


def test_places_count_every_request_that_can_be_made():
    body = sequence(
        ASK, repeat(each("question", "q", role("b", "{q}"), "b_out", 3), choose(find, {"x": role("c"), "y": NOTHING}), at_most=4)
    )
    assert flow(body).body.request_count == 1 + 4 * (3 + 1)


def test_a_choices_cases_may_be_any_value():
    team = flow(choose(find, {"x": role("a"), 3: role("b"), None: NOTHING}))
    assert '|"None"|' in to_mermaid(team)


def drawn():
    return flow(
        sequence(
            ASK,
            together(role("a"), tool(find, "x")),
            repeat(role("coder"), when(lambda x: True, stop(), name="done"), role("b"), at_most=3),
        )
    )


def test_mermaid_shows_every_node_and_the_way_back():
    text = to_mermaid(drawn(), models={"coder": "m<1>"})
    assert text.startswith("flowchart TD\n")
    for part in ('("ask")', '["find"]', '{"done?"}', "coder<br/>(m&lt;1&gt;)", "at most 3 rounds", "-.->"):
        assert part in text
    names = set(re.findall(r"^  (n\d+)\W", text, re.M))
    arrows = re.findall(r"(n\d+) -[.-]*> ?(?:\|[^|]*\|)? ?(n\d+)", text)
    assert {end for arrow in arrows for end in arrow} == names  # nothing hangs loose
    assert len([a for a in arrows if a[0] == "n0"]) == 1


def test_svg_is_well_formed_and_its_boxes_do_not_overlap():
    root = ET.fromstring(to_svg(drawn(), models={"ask": "<&>"}))
    texts = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"ask", "(<&>)", "find", "coder", "end"} <= set(texts)
    rects = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in root.iter("{http://www.w3.org/2000/svg}rect")]
    width, height = float(root.get("width")), float(root.get("height"))
    for i, (x, y, w, h) in enumerate(rects):
        assert x >= 0 <= y
        assert x + w <= width
        assert y + h <= height
        for other in rects[i + 1 :]:
            assert x + w <= other[0] or other[0] + other[2] <= x or y + h <= other[1] or other[1] + other[3] <= y


def test_the_room_itself_needs_no_jax():
    program = """
import sys
import marl_llm.workflows, marl_llm.workflows.metrics, marl_llm.workflows.replay, marl_llm.workflows.samples
assert "jax" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_workflow_is_a_value():
    team = drawn()
    with pytest.raises(dataclasses.FrozenInstanceError):
        team.name = "other"


def test_a_role_that_speaks_at_two_places_stays_one_role():
    first = role("a")
    team = Workflow("w", sequence(first, call(first, name="again")), inputs=("question",))
    small = with_roles(team, lambda one: dataclasses.replace(one, max_tokens=3))
    assert small.nodes["a"].role is small.nodes["again"].role
    assert small.roles["a"].max_tokens == 3


def test_roles_are_replaced_wherever_they_speak_and_nothing_else_is():
    body = sequence(
        ASK,
        together(role("b"), role("c")),
        repeat(choose(lambda question: 1, {1: role("d"), 2: NOTHING}, name="one"), tool(find, "found"), at_most=2),
        each("items", "item", role("e", "{item}"), "e_out", at_most=2),
    )
    team = flow(body, inputs=("question", "items"))
    small = with_roles(team, lambda one: dataclasses.replace(one, max_tokens=3))
    assert [one.max_tokens for one in small.roles.values()] == [3] * 5
    assert list(small.nodes) == list(team.nodes)
    assert to_mermaid(small) == to_mermaid(team)
    assert all(one.max_tokens != 3 for one in team.roles.values())
