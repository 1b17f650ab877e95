"""Roles and parsers: what a prompt holds, and what counts as the format."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_llm.workflows import (
    FormatError,
    Role,
    WorkflowError,
    after_hashes,
    code_block,
    json_object,
    numbered,
    plain,
    short_text,
    tagged,
    texts,
)

WORDS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="<>`"), min_size=1, max_size=12)


def test_a_prompt_holds_its_fields_as_shown_and_braces_as_text():
    role = Role(
        "answer",
        '{question}\n{passages}\nReply {{"answer": ...}}',
        parse=plain("answer"),
        writes={"answer": ""},
        system="Be {tone}.",
        show={"passages": numbered},
    )
    assert role.reads == ("tone", "question", "passages")
    system, user = role.messages({"question": "who {x}?", "passages": ["a", "b"], "tone": "brief", "unread": 1})
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (user.role, user.content) == ("user", 'who {x}?\n[1] a\n[2] b\nReply {"answer": ...}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompt="{question"), "role 'r': its template cannot be read: expected '}'.*double braces that are text"),
        (dict(trim_from="front", trim="question"), "role 'r': trim_from='front' is neither 'start' nor 'end'"),
        (dict(trim_from="start"), "role 'r': trim_from would have no effect"),
        (dict(prompt="question}"), "role 'r': its template cannot be read: Single '}'"),
    ],
)
def test_a_role_that_cannot_be_is_named(change, message):
    with pytest.raises(WorkflowError, match=message):
        Role(**(dict(name="r", prompt="{question}", parse=plain("plan"), writes={"plan": ""}) | change))


def test_what_breaks_the_format_takes_the_fallbacks_and_keeps_what_was_read():
    def parse(text):
        raise FormatError("no second line", {"first": text})

    role = Role("a", "{q}", parse=parse, writes={"first": "-", "second": "-"})
    assert role.read("x") == ({"first": "x", "second": "-"}, "no second line")


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        (lambda text: {"other": 1}, r"gave \['other'\], while the role writes \['a'\]"),
        (lambda text: {}["x"], "raised KeyError"),
    ],
)
def test_a_parser_with_a_fault_is_no_policys_fault(parse, message):
    role = Role("scribe", "{q}", parse=parse, writes={"a": ""})
    with pytest.raises(WorkflowError, match=f"the parser of role 'scribe' {message}"):
        role.read("x")


READ_QUERIES = json_object(queries=texts(3))


@given(st.lists(WORDS.filter(str.strip).map(str.strip), min_size=1, max_size=3, unique=True))
def test_json_gives_back_what_was_written(queries):
    written = json.dumps({"queries": queries})
    assert READ_QUERIES(written) == {"queries": tuple(queries)}
    assert READ_QUERIES(f"```json\n{written}\n```") == {"queries": tuple(queries)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("[1]", "a JSON list"),
        ("{}", "'queries' is missing"),
        ('{"queries": ["a"], "x": 1}', "'x' belongs to no field"),
        ('{"queries": "a"}', "not a list"),
        ('{"queries": []}', "at least one"),
        ('{"queries": ["a", " "]}', "an empty one"),
        ('{"queries": ["a", 1]}', "not a text"),
        ('{"queries": ["a", "a"]}', "twice"),
        ('{"queries": ["a", "b", "c", "d"]}', "4 texts, 3 are allowed"),
        ('Sure! {"queries": ["a"]}', "not JSON"),
        ('{"queries": ["a"]} {"queries": ["b"]}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_json_that_is_not_the_format(text, why):
    with pytest.raises(FormatError, match=why):
        READ_QUERIES(text)


def test_a_surplus_of_texts_may_be_cut():
    assert json_object(q=texts(2, cut=True))('{"q": ["a", "b", "c"]}') == {"q": ("a", "b")}


@given(WORDS, WORDS)
def test_tags_give_back_what_was_written(thought, answer):
    parse = tagged({"think": "why", "final": "answer"})
    text = f"\n<think>{thought}</think> \n<final>{answer}</final>"
    assert parse(text) == {"why": thought.strip(), "answer": answer.strip()}


@pytest.mark.parametrize(
    "text",
    [
        "<a>1</a>",
        "<b>2</b><a>1</a>",
        "hello <a>1</a><b>2</b>",
        "<a>1</a><b>2</b> bye",
        "<a>1</a> and <b>2</b>",
        "<a>1</a><b>2</b><b>3</b>",
        "<a>1<b>2</b></a>",
        "<a>1</a><b>2",
        "<a><b>1</a></b>",
    ],
)
def test_tags_out_of_place_are_illegal(text):
    with pytest.raises(FormatError):
        tagged(("a", "b"))(text)


def test_one_block_of_code():
    parse = code_block("code")
    assert parse("Here:\n```python\ndef f():\n    return 1\n```\nDone.") == {"code": "def f():\n    return 1\n"}
    for text in ("def f(): pass", "```python\n\n```", "```python\nx\n```\n```python\ny\n```", "```js\nx\n```", "```python\nx"):
        with pytest.raises(FormatError):
            parse(text)


def test_the_last_line_that_begins_with_hashes_is_the_answer():
    parse = after_hashes("moves", lambda text: [int(word) for word in text.split(",")])
    assert parse("I think #### 7\n#### 1, 2\nor rather:\n  ####3,4  \nDone.") == {"moves": [3, 4]}
    assert after_hashes("answer")("####  forty two ") == {"answer": "forty two"}
    assert after_hashes("answer")("#### 42\n\n##### Check\n6 * 7 = 42") == {"answer": "42"}
    wrong = {"": "no line", "so #### 3": "no line", "### 3": "no line", "#### 3\n####": "nothing stands", "#### x": "moves: "}
    for text, why in wrong.items():
        with pytest.raises(FormatError, match=why):
            parse(text)


def test_plain_and_short_texts():
    assert plain("answer", max_words=2)(" a b \n") == {"answer": "a b"}
    for text in (" ", "a b c"):
        with pytest.raises(FormatError):
            plain("answer", max_words=2)(text)
        with pytest.raises(FormatError):
            short_text(2)(text)


def test_a_fenced_block_with_windows_line_ends_is_read():
    assert code_block("code")("Here:\r\n```python\r\nprint(1)\r\nprint(2)\r\n```\r\n") == {"code": "print(1)\nprint(2)\n"}
