"""One call of a role: what it asks for and what was drawn are passed on whole, and each bound holds exactly."""

import dataclasses

import numpy as np
import pytest
from wordy import SPEECH, TOKENIZER

from marl_llm.sampling.requests import Completion, SamplingParams
from marl_llm.text import CHATML, ByteTokenizer, Chat
from marl_llm.tools.chat import ChatReply
from marl_llm.tools.results import success
from marl_llm.workflows import Role, RoleTool, Workflow, calls, plain
from marl_llm.workflows.assignment import Assignment, Outside, shared
from marl_llm.workflows.controller import Controller
from marl_llm.workflows.errors import RolloutError, ToolRefusal
from marl_llm.workflows.trajectory import Task

OWN = SamplingParams(temperature=0.5, top_p=0.9)


def role(**options):
    return Role("a", "{question}", parse=plain("a"), writes={"a": ""}, **options)


def play(body, generator=None, assignment=None, renderer=SPEECH, n=1, **options):
    team = Workflow("w", body, inputs=("question",))
    renderer = renderer if generator is not None else {}
    with Controller(team, assignment or shared(team), generator, renderer, attempts=1, **options) as controller:
        return controller.play([Task(number, {"question": f"q{number}"}) for number in range(n)], step=6)


class Draws:
    """Gives one completion, and keeps the requests."""

    def __init__(self, done):
        self.done, self.requests = done, []

    async def generate(self, request):
        self.requests.append(request)
        return self.done


def drawn(**other):
    """A completion whose fields all differ."""
    tokens = np.asarray([*TOKENIZER.encode("ab"), *TOKENIZER.stop_ids], np.int32)
    one, kept = np.arange(3, dtype=np.float32), np.arange(6, dtype=np.int32).reshape(3, 2)
    return dataclasses.replace(Completion(tokens, -one, -one - 1, one + 1, "stop", 4, kept_ids=kept), **other)


@pytest.mark.parametrize("settings", [None, SamplingParams(temperature=0.25)], ids=["own", "controllers"])
def test_a_policy_is_asked_for_all_that_its_role_says(settings):
    generator = Draws(drawn())
    play(role(settings=OWN, max_tokens=7, stop=("z", "y"), timeout_s=9), generator, settings=settings)
    (request,) = generator.requests
    assert TOKENIZER.decode(request.prompt) == "q0"
    assert (request.max_tokens, request.stop_strings, request.timeout, request.model) == (7, ("z", "y"), 9.0, "policy")
    assert request.settings == (settings or OWN)
    assert request.stop_ids == tuple(SPEECH.stop_ids)
    assert request.seed[0] == 6


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(("versions", "told"), [(None, False), ([4, 4, 4], False), ([4, 4, 5], True)], ids=str)
def test_what_was_drawn_is_kept_whole(finish, versions, told):
    done = drawn(finish=finish, versions=None if versions is None else np.asarray(versions, np.int32))
    (call,) = play(role(), Draws(done)).trajectories[0].calls
    for name in ("tokens", "log_probs", "sampled_log_probs", "entropy", "kept_ids"):
        np.testing.assert_array_equal(getattr(call, name), getattr(done, name))
    assert (call.version, call.finish, call.truncated, call.text) == (4, finish, finish == "length", "ab")
    assert (call.versions is not None) == told
    assert not told or call.versions.tolist() == versions


@pytest.mark.parametrize("finish", ["timeout", "cancelled"])
def test_a_response_that_was_ended_from_outside_aborts_its_play_and_says_after_how_many_tokens(finish):
    with pytest.raises(RolloutError, match=rf"deadline.*the response was {finish} after 3 tokens"):
        play(role(), Draws(drawn(finish=finish)))


@pytest.mark.parametrize("settings", [None, SamplingParams(temperature=0.25)], ids=["own", "controllers"])
def test_a_model_from_outside_is_asked_for_all_that_its_role_says_and_its_own_options_come_first(settings):
    asked = []

    class Client:
        async def acomplete(self, messages, draw=0, **options):
            asked.append(options)
            return success(ChatReply("x", "stop"), 0.0)

    for stop, own in (((), {}), (("z",), {"seed": 3, "max_tokens": 2})):
        assignment = Assignment({"a": "o"}, {"o": Outside(Client(), own)})
        play(role(settings=OWN, max_tokens=7, stop=stop), assignment=assignment, settings=settings)
        how = settings or OWN
        usual = {"max_tokens": 7, "temperature": how.temperature, "top_p": how.top_p, "stop": stop or None}
        assert asked.pop() == usual | own


@pytest.mark.parametrize(
    ("size", "finish", "truncated"), [(5, "stop", False), (5, None, False), (5, "length", True), (6, "stop", True), (0, "stop", False)]
)
def test_a_response_from_outside_of_just_the_most_characters_is_whole(size, finish, truncated, monkeypatch):
    monkeypatch.setattr(calls, "MAX_TEXT", 5)

    class Client:
        async def acomplete(self, messages, draw=0, **options):
            return success(ChatReply("x" * size, finish), 0.0)

    (call,) = play(role(), assignment=Assignment({"a": "o"}, {"o": Outside(Client())})).trajectories[0].calls
    assert (call.text, call.truncated) == ("x" * min(size, 5), truncated)
    assert (call.tokens.size, call.log_probs, call.sampled_log_probs, call.version) == (0, None, None, 0)


# ---- tools that a role calls

CHAT_TOKENIZER = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
CHAT = Chat(CHAT_TOKENIZER, CHATML)


class Chats:
    """Calls tools in its first response and ends with its second."""

    def __init__(self, first):
        self.answers, self.requests = [first, "done"], []

    async def generate(self, request):
        self.requests.append(request)
        tokens = np.asarray([*CHAT_TOKENIZER.encode(self.answers[len(self.requests) - 1]), CHAT_TOKENIZER.eos_id], np.int32)
        return Completion(tokens, -np.ones(tokens.size), -np.ones(tokens.size), np.ones(tokens.size), "stop", 0)


def calling(word, times=1):
    return f'<tool_call>\n{{"name": "lookup", "arguments": {{"word": "{word}"}}}}\n</tool_call>' * times


def asking(function):
    return dict(tools=(RoleTool("lookup", function, "Looks up.", {"type": "object", "properties": {}}),))


@pytest.mark.parametrize(("times", "made"), [(1, 1), (3, 3), (4, 3)])
def test_as_many_tool_calls_as_a_response_may_make_are_made_and_the_role_is_told_of_more(times, made, monkeypatch):
    monkeypatch.setattr(calls, "MAX_TOOL_CALLS", 3)
    heard = []
    way = play(role(**asking(lambda word: heard.append(word) or "found")), Chats(calling("x", times)), renderer=CHAT).trajectories[0]
    assert len(heard) == made
    uses = way.events[1:-1]
    assert [event.id.rpartition(":")[2] for event in uses] == [str(number) for number in range(made)]
    assert [event.parents for event in way.events[1:]] == [(event.id,) for event in way.events[:-1]]
    prompt = CHAT_TOKENIZER.decode(way.calls[1].prompt_ids)
    assert prompt.count("found") == made
    assert ("error: only the first 3 calls were made" in prompt) == (times > made)


@pytest.mark.parametrize(
    ("answer", "attempts", "refused", "replaced", "told"),
    [
        (lambda word: success("found", 0.0, 4), 4, None, 0, "found"), (lambda word: "fo\ud800und", 1, None, 1, "fo\ufffdund"),
        (lambda word: {"n": 3}, 1, None, 0, "{'n': 3}"), (lambda: "x", 1, "TypeError", 0, "error: got an unexpected keyword"),
    ],
)  # fmt: skip
def test_a_use_of_a_tool_tells_its_attempts_what_was_replaced_and_why_it_was_refused(answer, attempts, refused, replaced, told):
    way = play(role(**asking(answer)), Chats(calling("x")), renderer=CHAT).trajectories[0]
    asked, use, last = way.events
    assert (use.attempts, use.refused, use.replaced) == (attempts, refused, replaced)
    assert (use.node, use.id, use.parents, last.parents) == ("a.lookup", f"{asked.id}:lookup:0", (asked.id,), (use.id,))
    assert (use.turn, use.request_number, use.items, use.branch, use.writes) == (0, asked.request_number, (), asked.branch, {})
    assert use.seconds >= 0
    assert told in CHAT_TOKENIZER.decode(last.prompt_ids)


def test_an_error_of_a_tool_is_told_by_its_kind_and_cut(monkeypatch):
    monkeypatch.setattr(calls, "MAX_REASON", 20)

    def refuses(word):
        raise ToolRefusal("y" * 50) from KeyError("cause")

    way = play(role(**asking(refuses)), Chats(calling("x")), renderer=CHAT).trajectories[0]
    assert way.events[1].refused == "KeyError"
    prompt = CHAT_TOKENIZER.decode(way.calls[1].prompt_ids)
    assert "error: " + "y" * 13 in prompt
    assert "y" * 14 not in prompt


def test_tool_results_may_fill_the_prompt_to_its_last_token():
    found = asking(lambda word: "found")
    longest = len(play(role(**found), Chats(calling("x")), renderer=CHAT).trajectories[0].calls[1].prompt_ids)
    whole = play(role(**found, max_prompt=longest), Chats(calling("x")), renderer=CHAT)
    assert len(whole.trajectories[0].calls[1].prompt_ids) == longest
    with pytest.raises(RolloutError, match=f"tool results grew the prompt to {longest} tokens"):
        play(role(**found, max_prompt=longest - 1), Chats(calling("x")), renderer=CHAT)


def test_a_role_may_use_its_tools_in_just_so_many_rounds():
    for rounds in (1, 2):
        chats = Chats(calling("x"))
        chats.answers = [calling("x")] * 3
        way = play(role(**asking(lambda word: "found"), max_tool_rounds=rounds), chats, renderer=CHAT).trajectories[0]
        assert len(chats.requests) == rounds + 1
        assert [event.node for event in way.events] == ["a", "a.lookup"] * rounds + ["a"]
        first = way.calls[0].request_number
        assert [call.request_number for call in way.calls] == list(range(first, first + rounds + 1))
        assert len({call.group for call in way.calls}) == rounds + 1
