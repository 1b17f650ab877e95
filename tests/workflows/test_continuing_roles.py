"""Roles that continue: their conversation's ids only grow, in every way through a workflow and for every kind of player."""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from wordy import EOS, SPEECH, TOKENIZER, Says, completion

from marl_llm.sampling.requests import Completion
from marl_llm.text import CHATML, ByteTokenizer, Chat, JinjaTemplate
from marl_llm.tools.results import success
from marl_llm.workflows import (
    Assignment,
    Controller,
    Outside,
    Role,
    RolloutError,
    Scripted,
    Task,
    Workflow,
    WorkflowError,
    call,
    compute,
    each,
    plain,
    repeat,
    sequence,
    shared,
    stop,
    together,
    when,
)
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import broadcast
from marl_llm.workflows.samples import sample_table

TASK = Task(0, {"question": "q?"}, {"gold": "g"})
WORKER = Role("worker", "Solve {question}", plain("said"), {"said": ""}, system="Be brief.", continues=True, observation="It gave {seen}.")


def look(said):
    return said.upper()


def team(role=WORKER, rounds=3, *parts, **options):
    body = repeat(role, compute(look, "seen"), when(lambda seen: seen == "DONE", stop(), name="over"), at_most=rounds)
    return Workflow("w", sequence(*parts, body), ("question",), ("gold",), **options)


def played(workflow, answer, renderer=SPEECH, **options):
    generator = Says(answer)
    with Controller(workflow, shared(workflow), generator, renderer, **options) as controller:
        return controller.play([TASK]), generator.requests


def grows(calls):
    """Whether each prompt holds the one before and its response, in front of something new."""
    known = [(*call.prompt_ids, *call.tokens.tolist()) for call in calls]
    return all(after.prompt_ids[: len(ids)] == ids and len(after.prompt_ids) > len(ids) for ids, after in zip(known, calls[1:]))


def numbered(prompt, request):
    return f"try {prompt.count('It gave')}"


def test_every_prompt_extends_the_last_one_and_its_response_by_the_observation():
    rollout, requests = played(team(), numbered)
    calls = rollout.trajectories[0].calls
    assert [call.text for call in calls] == ["try 0", "try 1", "try 2"]
    assert grows(calls)
    start, end = "Be brief.\nSolve q?", f"try 0{EOS}\nIt gave TRY 0."
    assert TOKENIZER.decode(requests[1].prompt) == f"{start}{end}"
    assert [call.prompt for call in calls] == [start, "It gave TRY 0.", "It gave TRY 1."]
    assert all(row.where for row in sample_table(rollout).samples)


def test_a_chat_closes_the_turn_of_a_response_that_was_cut_off_and_asks_again():
    tokenizer = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
    role = dataclasses.replace(WORKER, max_tokens=4)

    class Long:
        async def generate(self, request):
            return completion("long enough", request)

    workflow = team(role, 2)
    with Controller(workflow, shared(workflow), Long(), Chat(tokenizer, CHATML)) as controller:
        calls = controller.play([TASK]).trajectories[0].calls
    assert grows(calls)
    assert calls[0].truncated
    assert tokenizer.decode(calls[1].prompt_ids).endswith(
        "long<|im_end|>\n<|im_start|>user\nIt gave LONG.<|im_end|>\n<|im_start|>assistant\n"
    )


THINKS = CHATML.source.replace("{{ message.content }}{% for", "{{ message.content.split('</think>')[-1] }}{% for")


@pytest.mark.parametrize(
    ("source", "said", "share"),
    [
        (CHATML.source, "one<|im_end|>", 0.0),
        (THINKS, "one<|im_end|>", 0.0),
        (THINKS, "<think>a</think>one<|im_end|>", 1.0),
    ],
)
def test_prompts_that_the_template_would_have_written_otherwise_are_counted(source, said, share):
    tokenizer = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
    chat = Chat(tokenizer, JinjaTemplate(source))

    class Thinks:
        async def generate(self, request):
            tokens = np.asarray(chat.encode(said), np.int32)
            ones = np.ones(tokens.size)
            return Completion(tokens, -ones, -ones, ones, "stop", 0)

    workflow = team(WORKER, 3)
    with Controller(workflow, shared(workflow), Thinks(), chat) as controller:
        rollout = controller.play([TASK])
    assert [call.rewritten for call in rollout.trajectories[0].calls] == [None, bool(share), bool(share)]
    assert rollout_metrics(rollout, sample_table(rollout))["role/worker/template_mismatch_share"] == share


def test_what_a_template_refuses_is_told_with_its_role():
    tokenizer = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
    refusing = JinjaTemplate("{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}" + CHATML.source)
    workflow = team()
    with Controller(workflow, shared(workflow), Says(None), Chat(tokenizer, refusing)) as controller:
        with pytest.raises(WorkflowError, match=r"role 'worker': the chat template refuses: TemplateError: no system prompts"):
            controller.play([TASK])


def test_a_script_can_show_it_and_its_rows_are_those_that_a_model_would_have():
    workflow = team()
    seen = []

    def script(turn):
        seen.append([(message.role, message.content) for message in turn.messages])
        return f"try {turn.turn}"

    assignment = Assignment({"worker": "t"}, {"t": Scripted(script)})
    with Controller(workflow, assignment, None, SPEECH) as controller:
        shown = sample_table(controller.play([TASK]), training=()).demonstrations()
    calls = played(workflow, numbered)[0].trajectories[0].calls
    assert [(prompt, ids.tolist()) for prompt, ids in shown] == [(call.prompt_ids, call.tokens.tolist()) for call in calls]
    assert seen[1] == [("system", "Be brief."), ("user", "Solve q?"), ("assistant", "try 0"), ("user", "It gave TRY 0.")]
    with Controller(workflow, assignment, None, {}) as controller:
        assert len(controller.play([TASK]).trajectories[0].calls) == 3  # nor does it need ids


CHAT = Chat(ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",)), CHATML)


@pytest.mark.parametrize("renderer", [{}, SPEECH, CHAT], ids=["none", "plain", "chat"])
def test_an_outside_model_reads_the_whole_conversation(renderer):
    heard = []

    class Reply(NamedTuple):
        text: str
        finish_reason: str = "stop"

    class Client:
        async def acomplete(self, messages, draw=0, **options):
            heard.append([message["role"] for message in messages])
            return success(Reply("done" if len(heard) == 2 else "no"), 0.0)

    workflow = team()
    with Controller(workflow, Assignment({"worker": "o"}, {"o": Outside(Client())}), None, renderer) as controller:
        controller.play([TASK])
    assert heard == [["system", "user"], ["system", "user", "assistant", "user"]]


def test_ways_of_a_fork_continue_conversations_of_their_own_and_replay():
    workflow = team(rewards=(broadcast(lambda path: 1.0, name="one"),))

    def answer(prompt, request):
        return f"{prompt.count('It gave')} of {request.seed[-1]}"

    rollout, _ = played(workflow, answer, branching={"worker": 2})
    assert len(rollout.trajectories) == 8
    for path in rollout.trajectories:
        assert grows(path.calls)
    again = replay(rollout.episodes[0], workflow, shared(workflow), SPEECH, branching={"worker": 2})
    assert [path.calls[-1].prompt_ids for path in again.trajectories] == [path.calls[-1].prompt_ids for path in rollout.trajectories]


def test_a_conversation_goes_on_behind_what_ran_beside_it_and_items_have_their_own():
    other = Role("other", "{question}", plain("aside"), {"aside": ""})
    beside = Workflow("w", repeat(together(WORKER, other), compute(look, "seen"), at_most=2), ("question",), ("gold",))
    calls = played(beside, numbered)[0].trajectories[0].by("worker")
    assert grows(calls)
    inner = repeat(dataclasses.replace(WORKER, prompt="{item}"), compute(look, "seen"), at_most=2)
    items = Workflow("w", repeat(each("question", "item", inner, "said", at_most=2), at_most=2), ("question",))
    generator = Says(numbered)
    with Controller(items, shared(items), generator, SPEECH) as controller:
        calls = controller.play([Task(0, {"question": ("a", "b")})]).trajectories[0].calls
    for item in (0, 1):
        first, second, third, fourth = (call for call in calls if call.items == (item,))
        assert grows((first, second))
        assert grows((third, fourth))
        assert third.prompt_ids == first.prompt_ids


def test_an_observation_is_trimmed_to_the_budget_and_otherwise_the_play_is_aborted():
    def answer(prompt, request):
        return "x" * 40

    cut = team(dataclasses.replace(WORKER, max_prompt=90, trim="seen"), 2)
    calls = played(cut, answer)[0].trajectories[0].calls
    assert grows(calls)
    assert len(calls[1].prompt_ids) == 90
    assert calls[1].trimmed > 0
    head = Role("head", "{question}", plain("start"), {"start": ""})
    kept = team(dataclasses.replace(WORKER, max_prompt=90, trim="question"), 2, head)
    generator = Says(answer)
    with Controller(kept, shared(kept), generator, SPEECH) as controller, pytest.raises(RolloutError, match="continues a conversation"):
        controller.play([TASK])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Role("a", "{question}", plain("x"), {"x": ""}, continues=True), "has no observation"),
        (lambda: Role("a", "{question}", plain("x"), {"x": ""}, observation="{seen}"), "is needed for an observation"),
        (lambda: Role("a", lambda question: (1,), plain("x"), {"x": ""}, continues=True, observation="o"), "continues has no effect"),
        (lambda: team(rounds=1), "speaks once"),
        (lambda: team(dataclasses.replace(WORKER, observation="{sene}")), "reads the field 'sene'.*'seen'"),
        (lambda: team(dataclasses.replace(WORKER, observation="{gold}")), "reads the hidden field 'gold'"),
        (
            lambda: Workflow("w", repeat(WORKER, when(lambda said: True, compute(look, "seen"), name="may"), at_most=2), ("question",)),
            "'look' may not have written by then",
        ),
    ],
)
def test_misuse_is_refused_where_it_is_built(build, message):
    with pytest.raises(WorkflowError, match=message):
        build()


def test_a_role_that_continues_cannot_speak_at_two_places_at_once():
    second = call(WORKER, name="again")
    with pytest.raises(WorkflowError, match="cannot speak at two places at once|both write"):
        Workflow("w", repeat(together(WORKER, second), compute(look, "seen"), at_most=2), ("question",))
