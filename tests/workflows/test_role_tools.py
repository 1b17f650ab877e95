"""Tools that a role calls within its response: the conversation's ids only grow, and every part that was sampled is a call of its own."""

import json
from fractions import Fraction

import numpy as np
import pytest
from wordy import Says

from marl_llm.sampling.requests import Completion
from marl_llm.text import CHATML, ByteTokenizer, Chat
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import Role, RoleTool, Workflow, plain
from marl_llm.workflows.assignment import shared
from marl_llm.workflows.controller import Controller
from marl_llm.workflows.errors import ToolRefusal
from marl_llm.workflows.trajectory import Task

TOKENIZER = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
CHAT = Chat(TOKENIZER, CHATML)


def lookup(word):
    if word == "down":
        return failed(FailureKind.REFUSED, "down", 0.0)
    if word == "bad":
        raise ToolRefusal("no such word")
    return success(f"<{word}>", 0.0)


TOOL = RoleTool("lookup", lookup, "Looks a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})


def asked(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(answers, n=1, tools=None, **options):
    tools = (TOOL,) if tools is None else tools

    class Chats(Says):
        async def generate(self, request):

            self.requests.append(request)
            tokens = np.asarray([*TOKENIZER.encode(answers[len(self.requests) - 1]), TOKENIZER.eos_id], np.int32)
            return Completion(tokens, -np.ones(tokens.size), -np.ones(tokens.size), np.ones(tokens.size), "stop", 0)

    role = Role("a", "{question}", parse=plain("a"), writes={"a": ""}, tools=tools, **options)
    team = Workflow("w", role, inputs=("question",))
    generator = Chats(None)
    with Controller(team, shared(team), generator, CHAT) as controller:
        return controller.play([Task(i, {"question": "q"}) for i in range(n)]), generator


def test_every_prompt_extends_the_one_before_and_the_answers_stand_in_it():
    rollout, generator = play([asked("lookup", word="x"), asked("lookup", word="y") + asked("lookup", word="z"), "done"])
    (way,) = rollout.trajectories
    first, second, last = way.calls
    for before, after in ((first, second), (second, last)):
        known = (*before.prompt_ids, *before.tokens.tolist())
        assert after.prompt_ids[: len(known)] == known
    assert [e.node for e in way.events] == ["a", "a.lookup", "a", "a.lookup", "a.lookup", "a"]
    assert "<x>" in TOKENIZER.decode(second.prompt_ids)
    text = TOKENIZER.decode(last.prompt_ids)
    assert text.index("<y>") < text.index("<z>")
    assert (first.writes, last.writes, way.fields["a"]) == ({}, {"a": "done"}, "done")
    assert "Looks a word up." in TOKENIZER.decode(first.prompt_ids)
    assert len({request.seed for request in generator.requests}) == 3
    assert [event.parents for event in way.events[1:]] == [(event.id,) for event in way.events[:-1]]


def test_a_role_without_tools_calls_none():
    text = "So " + asked("lookup", word="x")
    rollout, _ = play([text], tools=())
    assert rollout.trajectories[0].fields["a"] == text


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (asked("lookop", word="x"), "error: there is no tool 'lookop'; there are lookup"),
        (asked("lookup", wort="x"), "error: missing a required argument: 'word'"),
        (asked("lookup", word="bad"), "error: no such word"),
    ],
)
def test_a_call_that_cannot_be_served_is_answered_with_the_reason(call, answer):
    rollout, _ = play([call, "done"])
    assert answer in TOKENIZER.decode(rollout.trajectories[0].calls[1].prompt_ids)


def test_an_answer_that_cannot_be_shown_is_a_refusal():
    def power(a, b):
        return Fraction(a) ** b

    tool = RoleTool("power", power, "a to the b", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
    rollout, _ = play([asked("power", a=10, b=5000), "done"], tools=(tool,))
    (path,) = rollout.trajectories
    assert path.events[1].refused == "ValueError"
    assert path.calls[1].prompt.startswith("error: the answer cannot be shown: ValueError: Exceeds the limit")


def test_a_failed_tool_aborts_the_play():
    rollout, _ = play([asked("lookup", word="down"), "fine"], n=2)
    assert sorted(episode.aborted for episode in rollout.episodes) == [False, True]


def test_after_the_last_round_the_response_is_final():
    rollout, generator = play([asked("lookup", word="x")] * 3, max_tool_rounds=2)
    assert len(generator.requests) == 3
    assert rollout.trajectories[0].calls[-1].illegal == "an empty response"


def test_results_beyond_the_prompts_budget_abort_the_play():
    rollout, _ = play([asked("lookup", word="x" * 300), "fine", "fine"], n=2, max_prompt=900)
    failures = [f for episode in rollout.episodes for f in episode.failures]
    assert [f.kind for f in failures] == ["prompt"]
