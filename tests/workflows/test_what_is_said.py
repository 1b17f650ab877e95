"""What policies, tools and outside models say is valid text of bounded size when it enters a play, and never ends one (A3, law 14)."""

import json
import time
import types
from fractions import Fraction

import numpy as np
import pytest
from wordy import SPEECH, Says

from marl_llm.games import search
from marl_llm.sampling.requests import Completion
from marl_llm.text import CHATML, ByteTokenizer, Chat
from marl_llm.tools.chat import ChatReply
from marl_llm.tools.results import success
from marl_llm.workflows import (
    Role,
    RoleTool,
    Workflow,
    WorkflowError,
    code_block,
    compute,
    json_object,
    plain,
    sequence,
    short_text,
    texts,
    tool,
)
from marl_llm.workflows.assignment import Assignment, Outside, Scripted, shared
from marl_llm.workflows.controller import Controller
from marl_llm.workflows.errors import FormatError
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import from_json, read_trajectories, write_trajectories
from marl_llm.workflows.trajectory import Task

HALF = "\ud83d"  # half of a pair: no UTF-8 text
BEYOND = {"deep": json.loads("[" * 200 + "]" * 200), "cyclic": [], "not finite": float("nan"), "long": 10**400, "many": [0] * 1_100_000}
BEYOND["cyclic"].append(BEYOND["cyclic"])


def role(name, prompt="{question}", **options):
    return Role(name, f"{name}: {prompt}", **dict(parse=plain(name), writes={name: "?"}) | options)


def play(body, answer=lambda prompt, request: "x", assignment=None, questions=("q0",), **options):
    team = Workflow("w", body, inputs=("question",))
    tasks = [Task(number, {"question": question}) for number, question in enumerate(questions)]
    with Controller(team, assignment or shared(team), Says(answer), SPEECH, **options) as controller:
        return controller.play(tasks)


def test_a3_half_a_character_in_a_response_reaches_the_next_prompt_as_a_replacement(tmp_path):
    asks = role("asks", parse=json_object(queries=texts(3)), writes={"queries": ()})
    said = json.dumps({"queries": ["rivers " + HALF, "x"]})

    def answer(prompt, request):
        return said if prompt[0] == "a" else "fine"

    rollout = play(sequence(asks, role("b", "{queries}")), answer, questions=("q", "r"))
    first, second = rollout.trajectories[0].calls
    assert first.writes == {"queries": ("rivers \ufffd", "x")}
    assert (first.legal, first.replaced, second.replaced) == (True, 1, 0)
    assert "rivers \ufffd" in second.prompt
    figures = rollout_metrics(rollout, sample_table(rollout))
    assert (figures["role/asks/replaced_share"], figures["role/b/replaced_share"]) == (1.0, 0.0)
    write_trajectories(tmp_path, rollout)
    assert from_json(read_trajectories(tmp_path)[0]).trajectories[0].calls[0].replaced == 1


def test_a3_workflow_b_answers_a_question_whose_queries_hold_half_a_character():
    def answer(prompt, request):
        if "search queries" in prompt:
            return json.dumps({"queries": ["rivers " + HALF]})
        return json.dumps({"evidence": HALF} if "Copy" in prompt else {"answer": "Nile" + HALF})

    asked = []

    async def retrieve(query):
        asked.append(query)
        return success((f"a page {HALF}",), 0.0)

    team = search.retrieve_extract_answer(retrieve)
    with Controller(team, shared(team), Says(answer), SPEECH) as controller:
        rollout = controller.play([Task(0, {"question": "longest?"}, {"answers": ("Nile",)})])
    assert asked == ["rivers \ufffd"]
    assert rollout.trajectories[0].fields["answer"] == "Nile\ufffd"
    assert [event.replaced for event in rollout.trajectories[0].events] == [1, 1, 1, 1]


@pytest.mark.parametrize("value", [HALF, (HALF,), {"k": [HALF]}, {HALF: 1}, frozenset({HALF})], ids=repr)
def test_a3_texts_from_tools_are_made_valid_wherever_they_stand(value):
    rollout = play(sequence(tool(lambda question: value, "found", name="t"), role("b", "{found}")))
    use, call = rollout.trajectories[0].events
    assert (use.replaced, call.replaced) == (1, 0)
    call.prompt.encode()
    assert "\ufffd" in call.prompt
    assert HALF not in str(rollout.trajectories[0].fields["found"])
    assert rollout_metrics(rollout, sample_table(rollout))["tool/t/replaced_share"] == 1.0


def test_a3_texts_of_outside_models_scripts_and_tasks_are_made_valid():
    class Client:
        async def acomplete(self, messages, draw=0, **options):
            messages[0]["content"].encode()
            return success(ChatReply("said " + HALF), 0.0)

    models = {"o": Outside(Client()), "s": Scripted(lambda turn: "written " + HALF)}
    body = sequence(role("a"), role("b", "{a}"), role("c", "{a}{b}"))
    rollout = play(body, assignment=Assignment({"a": "o", "b": "s", "c": "p"}, models), questions=("half " + HALF,))
    a, b, c = rollout.trajectories[0].calls
    assert (a.text, b.text, a.prompt, c.prompt) == ("said \ufffd", "written \ufffd", "a: half \ufffd", "c: said \ufffdwritten \ufffd")
    assert (a.replaced, b.replaced, c.replaced) == (2, 1, 0)


def test_a3_what_a_field_is_shown_as_is_made_valid():
    class Thing:
        def __str__(self):
            return HALF

    body = sequence(tool(lambda question: Thing(), "thing", name="t"), role("b", "{thing}"), role("c", show={"question": lambda q: HALF}))
    _, b, c = play(body).trajectories[0].events
    assert (b.prompt, b.replaced, c.prompt, c.replaced) == ("b: \ufffd", 1, "c: \ufffd", 1)


@pytest.mark.parametrize("kind", BEYOND)
def test_law_14_a_tools_value_beyond_all_bounds_aborts_its_play_and_names_its_node(kind):
    def page(question):
        return {"found": BEYOND[kind]} if question == "q0" else {"found": "x"}

    rollout = play(sequence(tool(page, "found"), role("b", "{found}")), questions=("q0", "q1"))
    assert [episode.aborted for episode in rollout.episodes] == [True, False]
    assert {(f.node, f.kind) for f in rollout.episodes[0].failures} == {("page", "bad_reply")}


NOT_FINITE = [
    float("nan"), float("inf"), -float("inf"), np.float32("nan"), np.float64("-inf"), np.float16("inf"), np.array([1.0, np.nan]),
    np.array([np.inf], np.float16), [0.0, (1.0, {"k": float("nan")})], {float("inf"): 1}, frozenset({float("nan")}),
    {"k": np.array([[np.nan]])}, 10**400, np.array([None, float("nan")], object), complex("nan"), np.array(np.nan),
    Fraction(10) ** 5000, Fraction(1, 10**5000),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_FINITE, ids=[str(number) for number in range(len(NOT_FINITE))])
def test_law_14_a_number_that_is_not_finite_is_refused_where_it_is_made_and_names_its_node(value, tmp_path):
    def mean(question):
        return {"found": value} if question == "q0" else {"found": 1.0}

    for node in (compute(mean, "found"), tool(mean, "found")):
        rollout = play(sequence(node, role("b", "{found}")), questions=("q0", "q1"))
        assert [episode.aborted for episode in rollout.episodes] == [True, False]
        assert {(f.node, f.kind) for f in rollout.episodes[0].failures} == {("mean", "bad_reply")}
        write_trajectories(tmp_path, rollout)
    call = play(role("a", parse=lambda text: {"a": value})).trajectories[0].calls[0]
    assert call.writes == {"a": "?"}
    assert call.illegal.startswith("a: ")


@pytest.mark.parametrize("value", [float("nan"), (np.float32("inf"),)], ids=str)
def test_a_number_that_is_not_finite_is_refused_in_a_task_and_at_the_start(value):
    with pytest.raises(WorkflowError, match="workflow 'w': start gives 'best' a number that is not finite"):
        Workflow("w", role("a"), ("question",), start={"best": value})
    with pytest.raises(WorkflowError, match="task 0: fields gives 'question' a number that is not finite"):
        play(role("a"), questions=(value,))


FINITE = [0.0, -1e308, np.float32(1), np.arange(3), np.array(["x"]), 10**300, Fraction(1, 3), True, None, "nan", (), object()]


@pytest.mark.parametrize("value", FINITE, ids=[str(number) for number in range(len(FINITE))])
def test_finite_numbers_and_other_objects_pass_a_computation_as_they_are(value):
    rollout = play(sequence(compute(lambda question: value, "found", name="c"), role("b")))
    assert rollout.trajectories[0].fields["found"] is value


@pytest.mark.parametrize("kind", BEYOND)
def test_law_14_a_parsers_value_beyond_all_bounds_is_an_illegal_response(kind):
    call, _ = play(sequence(role("a", parse=lambda text: {"a": BEYOND[kind]}), role("b", "{a}"))).trajectories[0].calls
    assert call.writes == {"a": "?"}
    assert call.illegal.startswith("a: ")


def test_law_14_the_reason_why_a_response_is_illegal_is_short():
    def parse(text):
        raise FormatError(HALF * 100_000)

    (call,) = play(role("a", parse=parse)).trajectories[0].calls
    assert len(call.illegal) <= 300
    call.illegal.encode()


def test_law_14_a_response_from_outside_without_end_is_cut_and_counts_as_truncated():
    class Client:
        async def acomplete(self, messages, draw=0, **options):
            return success(ChatReply("x" * (3 << 20), "stop"), 0.0)

    (call,) = play(role("a"), assignment=Assignment({"a": "o"}, {"o": Outside(Client())})).trajectories[0].calls
    assert (len(call.text), call.truncated) == (1 << 20, True)


@pytest.mark.parametrize("value", [None, 3, types.SimpleNamespace(text=None, finish_reason=None), "text"])
def test_law_14_a_client_that_gives_no_reply_aborts_the_play(value):
    class Client:
        async def acomplete(self, messages, draw=0, **options):
            return success(value if "q0" in messages[0]["content"] else ChatReply("x"), 0.0) if value is not None else None

    body, assignment = role("a"), Assignment({"a": "o"}, {"o": Outside(Client())})
    if value is None:
        with pytest.raises(WorkflowError, match="node 'a'"):
            play(body, assignment=assignment)
    else:
        rollout = play(body, assignment=assignment, questions=("q0", "q1"))
        assert [[f.kind for f in episode.failures] for episode in rollout.episodes] == [["bad_reply"] * 2, []]


def test_a_client_with_a_fault_is_named():
    class Client:
        async def acomplete(self, messages, draw=0, **options):
            raise KeyError("x")

    with pytest.raises(WorkflowError, match="outside model of node 'a' raised KeyError"):
        play(role("a"), assignment=Assignment({"a": "o"}, {"o": Outside(Client())}))


# ---- tools that a role calls

TOKENIZER = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))


def call_tool(function, *bodies):
    """What a role is answered that calls `lookup` with these bodies."""

    class Chats(Says):
        async def generate(self, request):
            self.requests.append(request)
            text = "done" if len(self.requests) > 1 else "".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
            tokens = np.asarray([*TOKENIZER.encode(text), TOKENIZER.eos_id], np.int32)
            return Completion(tokens, -np.ones(tokens.size), -np.ones(tokens.size), np.ones(tokens.size), "stop", 0)

    lookup = RoleTool("lookup", function, "", {"type": "object", "properties": {"word": {"type": "string"}}})
    team = Workflow("w", role("a", tools=(lookup,), max_tokens=100_000), inputs=("question",))
    generator = Chats(None)
    with Controller(team, shared(team), generator, Chat(TOKENIZER, CHATML)) as controller:
        rollout = controller.play([Task(0, {"question": "q"})])
    return TOKENIZER.decode(generator.requests[-1].prompt), rollout


def asked(**arguments):
    return json.dumps({"name": "lookup", "arguments": arguments})


def test_a3_arguments_and_answers_of_a_roles_tools_are_made_valid():
    given = []

    def lookup(word):
        given.append(word)
        return word + HALF

    text, rollout = call_tool(lookup, asked(word="x" + HALF))
    assert given == ["x\ufffd"]
    assert "x\ufffd\ufffd" in text
    assert [event.replaced for event in rollout.trajectories[0].events] == [0, 2, 0]


@pytest.mark.parametrize(
    ("function", "argument", "answer"),
    [
        (lambda word: word.upper(), 3, "error: AttributeError: 'int' object has no attribute 'upper'"),
        (lambda word: {}[word], "x", "error: KeyError: 'x'"),
        (lambda word: open(word).read(), "/no/such/file", "error: FileNotFoundError"),
        (lambda word: 10**5000, "x", "error: the answer cannot be read: number"),
        (lambda word: BEYOND["cyclic"], "x", "error: the answer cannot be read: too_deep"),
    ],
)
def test_law_14_what_a_role_asks_of_a_tool_cannot_end_the_rollout(function, argument, answer):
    text, rollout = call_tool(function, asked(word=argument))
    assert answer in text
    figures = rollout_metrics(rollout, sample_table(rollout))
    assert figures["tool/a.lookup/refused_share"] == 1.0


LONG_NUMBER = '{"name": "lookup", "arguments": {"word": ' + "9" * 5000 + "}}"


@pytest.mark.parametrize("body", [LONG_NUMBER, "[" * 100_000, "{" + HALF, '{"name": 1}'], ids=["number", "deep", "half", "name"])
def test_law_14_a_tool_call_that_cannot_be_read_is_none(body):
    _, rollout = call_tool(lambda word: "x", body.replace(HALF, "\\ud83d"))
    assert not rollout.episodes[0].aborted


# ---- time


@pytest.mark.parametrize("parse", [json_object(a=short_text()), code_block("code")], ids=["json", "code"])
@pytest.mark.parametrize(
    "unit", ["\n", "```python\n", "```json\n", "```\n", " ", "`", "[", '{"a":', "\n```", "\t\n", "```python\nx\n```\n", "9"]
)
def test_law_14_parsers_take_linear_time(parse, unit):
    for start, end in (("", ""), ("```json\n", ""), ("```python\n", "\n```"), ("```", "\n x")):
        text = start + unit * (200_000 // len(unit)) + end
        tick = time.process_time()
        try:
            parse(text)
        except FormatError:
            pass
        assert time.process_time() - tick < 1  # quadratic would be minutes


@pytest.mark.parametrize("unit", ["<tool_call>", "<tool_call></tool_call>", "</tool_call>", "<tool_call>{", "<think>", "</think>"])
def test_law_14_reading_a_conversation_takes_linear_time(unit):
    chat = Chat(TOKENIZER, CHATML)
    start = chat.start(role("a").messages({"question": "q"}))
    conversation = chat.reply(start, TOKENIZER.encode(unit * (200_000 // len(unit))))
    tick = time.process_time()
    chat.read(conversation, True)
    assert time.process_time() - tick < 2


def test_law_14_a_field_far_over_the_budget_is_trimmed_without_reading_it_all():
    pages = tool(lambda question: ("word " * 1_000_000,), "pages", name="t")
    text = tool(lambda question: "word " * 1_000_000, "pages", name="t")
    tick = time.process_time()
    for found, shown in ((pages, 0), (text, 40)):
        rollout = play(sequence(found, role("b", "{pages}", max_prompt=50, trim="pages", show={"pages": "".join})))
        call = rollout.trajectories[0].calls[0]
        assert shown <= len(call.prompt_ids) <= 50
        assert call.trimmed
    assert time.process_time() - tick < 2
