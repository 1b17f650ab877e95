"""Playing workflows: order, identity, forks, deadlines, failures. Models and tools are functions here."""

import asyncio
import dataclasses
import random
import threading
import time

import numpy as np
import pytest
from wordy import SPEECH, TOKENIZER, Says, completion

from marl_llm.sampling.requests import RequestError, SamplingParams
from marl_llm.tools.results import FailureKind, failed, success
from marl_llm.workflows import (
    NOTHING,
    Role,
    Workflow,
    WorkflowError,
    call,
    choose,
    compute,
    each,
    plain,
    repeat,
    sequence,
    stop,
    together,
    tool,
    when,
)
from marl_llm.workflows.assignment import Assignment, Outside, Scripted, shared
from marl_llm.workflows.controller import Controller
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.trajectory import RoleCall, Task


def role(name, prompt="{question}", field=None, parse=None, **options):
    field = field or name
    return Role(name, f"{name}: {prompt}", parse=parse or plain(field), writes={field: "?"}, **options)


def echo(prompt, request):
    return prompt.split(": ", 1)[1]


def tasks(n=1, **fields):
    return [Task(i, {"question": f"q{i}", **fields}) for i in range(n)]


def play(body, generator=None, given=None, assignment=None, workflow=None, **options):
    step, plays = options.pop("step", 0), options.pop("plays", 1)
    team = workflow or Workflow("w", body, inputs=("question",))
    with Controller(team, assignment or shared(team), generator or Says(echo), SPEECH, **options) as controller:
        return controller.play(given or tasks(), step, plays)


def shout(a):
    return a.upper()


async def twice(a):
    await asyncio.sleep(0)
    return a + a


def test_a_sequence_hands_on_what_was_written():
    rollout = play(sequence(role("a"), tool(shout, "loud"), role("b", "{loud}!"), tool(twice, "more")))
    (way,) = rollout.trajectories
    assert way.fields == {"question": "q0", "a": "q0", "loud": "Q0", "b": "Q0!", "more": "q0q0"}
    assert [event.node for event in way.events] == ["a", "shout", "b", "twice"]
    assert [event.parents for event in way.events] == [(), *((event.id,) for event in way.events[:-1])]
    assert way.turns == 1


def test_the_sampled_ids_and_log_probs_are_kept_as_they_came():
    generator = Says(echo)
    (call_,) = play(role("a"), generator, step=5).trajectories[0].calls
    (request,) = generator.requests
    done = completion("q0", request)
    np.testing.assert_array_equal(call_.tokens, done.tokens)
    np.testing.assert_array_equal(call_.log_probs, done.log_probs)
    np.testing.assert_array_equal(call_.sampled_log_probs, done.sampled_log_probs)
    assert call_.prompt_ids == request.prompt == tuple(TOKENIZER.encode("a: q0"))
    assert (call_.version, call_.finish, call_.text) == (3, "stop", "q0")
    assert request.seed == call_.seed == (5, 0, 0, 0, 0)
    assert request.stop_ids == TOKENIZER.stop_ids


def test_those_who_speak_together_see_the_same_state():
    body = sequence(together(role("a"), role("b")), role("c", "{a}{b}"))
    (way,) = play(body).trajectories
    a, b, c = way.calls
    assert a.parents == b.parents == ()
    assert c.parents == (a.id, b.id)
    assert way.fields["c"] == "q0q0"


def test_each_item_is_served_and_collected_in_order():
    split = compute(lambda question: tuple("xyzw"), "parts", name="split")
    body = sequence(
        split, each("parts", "part", sequence(role("a", "{part}"), tool(shout, "loud")), {"loud": "all"}, at_most=3), role("z", "{all}")
    )
    delay = {"x": 0.02, "y": 0.0, "z": 0.01}
    generator = Says(echo, lambda request: delay.get(TOKENIZER.decode(request.prompt)[-1], 0))
    (way,) = play(body, generator).trajectories
    assert way.fields["all"] == ("X", "Y", "Z")
    assert "part" not in way.fields
    assert [call_.items for call_ in way.by("a")] == [(0,), (1,), (2,)]
    assert way.by("z")[0].parents == tuple(event.id for event in way.events if event.node == "shout")


def test_no_items_is_no_call():
    body = sequence(compute(lambda question: (), "parts", name="none"), each("parts", "p", role("a", "{p}"), "a", 3), role("b", "{a}"))
    (way,) = play(body).trajectories
    assert [call_.role for call_ in way.calls] == ["b"]
    assert way.fields["a"] == ()


def test_a_loop_ends_by_its_condition_its_stop_or_its_bound():
    grow = compute(lambda n: n + 1, "n", name="grow")
    for body, rounds in (
        (repeat(role("a"), grow, until=lambda n: n == 2, at_most=9), 2),
        (repeat(role("a"), grow, when(lambda n: n == 3, stop(), name="w"), compute(lambda n: n, "m", name="m"), at_most=9), 3),
        (repeat(role("a"), grow, at_most=4), 4),
        (repeat(role("a"), grow, until=lambda n: n >= 0, at_most=4), 1),  # d6: the condition is asked after a round, not before it
    ):
        team = Workflow("w", sequence(body, role("last")), inputs=("question",), start={"n": 0, "m": 0})
        (way,) = play(None, workflow=team).trajectories
        assert len(way.by("a")) == rounds == way.turns
        assert [call_.turn for call_ in way.calls] == [*range(rounds), rounds - 1]
        assert [turn for turn, _ in way.written("n")] == list(range(rounds))


def test_a_role_before_the_loop_has_turn_zero_for_itself():
    (way,) = play(sequence(role("plan"), repeat(role("a"), role("b"), at_most=2))).trajectories
    assert [(c.role, c.turn) for c in way.calls] == [("plan", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_loops_inside_loops_stop_one_by_one():
    inner = repeat(role("a"), when(lambda a: True, stop(), name="w"), at_most=5, name="inner")
    (way,) = play(sequence(repeat(inner, role("b"), at_most=3), role("c"))).trajectories
    assert [c.role for c in way.calls] == ["a", "b"] * 3 + ["c"]


def test_a_stop_outside_of_loops_ends_the_workflow():
    (way,) = play(sequence(role("a"), when(lambda a: a == "q0", stop(), name="w"), role("b"))).trajectories
    assert [c.role for c in way.calls] == ["a"]


def test_a_choice_takes_one_way_and_refuses_others():
    body = choose(lambda question: question, {"q0": role("a"), "q1": role("b"), "q2": NOTHING}, name="which")
    rollout = play(sequence(role("first"), body), given=tasks(3))
    assert [[c.role for c in way.calls] for way in rollout.trajectories] == [["first", "a"], ["first", "b"], ["first"]]
    with pytest.raises(WorkflowError, match="choice 'which' returned 'q3', which is none of its cases"):
        play(sequence(role("first"), body), given=tasks(4))


def test_what_breaks_the_format_goes_on_with_the_fallback():
    rollout = play(sequence(role("a"), role("b", "{a}")), Says(lambda prompt, request: "" if prompt[0] == "a" else prompt))
    a, b = rollout.trajectories[0].calls
    assert (a.illegal, a.legal, a.writes) == ("an empty response", False, {"a": "?"})
    assert (b.legal, b.prompt) == (True, "b: ?")


def test_a_response_at_its_budget_is_marked():
    (way,) = play(role("a", max_tokens=2)).trajectories
    assert (way.calls[0].truncated, way.calls[0].text) == (True, "q0")


# ---- identity


def busy():
    split = compute(lambda question: ("x", "y", "z"), "parts", name="split")
    inner = each("parts", "part", role("a", "{part}"), "a", at_most=3)
    grow = compute(lambda a, b: len(a) + len(b), "n", name="grow")
    return sequence(split, repeat(inner, together(role("b", "{a}"), role("c", "{a}")), grow, at_most=3))


def summary(rollout):
    return [[(e.id, e.parents, dict(e.writes), getattr(e, "seed", None)) for e in way.events] for way in rollout.trajectories]


def speak_by_seed(prompt, request):
    return f"{random.Random(repr(request.seed)).random():.3f}"


def test_who_is_faster_and_who_else_plays_changes_nothing():
    def rollout(delays, given, **options):
        wait = random.Random(delays)
        return summary(play(busy(), Says(speak_by_seed, lambda request: wait.random() * 0.003), given, plays=2, step=7, **options))

    whole = rollout(0, tasks(6))
    assert whole == rollout(1, tasks(6))
    assert whole == rollout(2, tasks(6), concurrency=1)
    assert whole[6:8] == rollout(3, tasks(6)[3:4])


def test_seeds_tell_every_request_apart():
    generator = Says(speak_by_seed)
    play(busy(), generator, tasks(3), plays=4)
    seeds = [request.seed for request in generator.requests]
    assert len(seeds) == 3 * 4 * (3 + 2) * 3
    assert len(set(seeds)) == len(seeds)
    assert {len(seed) for seed in seeds} == {5}
    assert {seed[2] for seed in seeds} == {0, 1, 2}


def test_settings_of_the_controller_stand_in_place_of_the_roles():
    hot, cold = SamplingParams(temperature=0.7), SamplingParams(temperature=0.0)
    for given, wanted in ((None, hot), (cold, cold)):
        generator = Says(echo)
        play(role("a", settings=hot), generator, settings=given)
        assert [request.settings for request in generator.requests] == [wanted]


def test_a_notebook_whose_event_loop_is_running_can_play():
    async def cell():
        return play(sequence(role("a"), tool(shout, "loud")), given=tasks(3))

    rollout = asyncio.run(cell())
    assert [way.fields["loud"] for way in rollout.trajectories] == ["Q0", "Q1", "Q2"]


def test_another_step_is_another_draw():
    first, second = Says(speak_by_seed), Says(speak_by_seed)
    play(role("a"), first, step=1)
    play(role("a"), second, step=2)
    assert first.requests[0].seed[1:] == second.requests[0].seed[1:]
    assert first.requests[0].seed != second.requests[0].seed


def test_a_fork_carries_on_every_candidate_from_the_same_prompt():
    generator = Says(speak_by_seed)
    body = sequence(role("a"), tool(shout, "loud"), role("b", "{a}"), role("c", "{b}"))
    rollout = play(body, generator, plays=2, branching={"a": 2, "b": 3})
    assert len(rollout.episodes) == 2
    for episode in rollout.episodes:
        assert len(episode.trajectories) == 6
        assert len(episode.events()) == 2 + 2 + 6 + 6
        for way in episode.trajectories:
            a, b, c = way.calls
            assert (b.parents, c.parents) == ((way.events[1].id,), (b.id,))
            assert b.prompt == f"b: {a.text}"
        by_group = {}
        for event in episode.events():
            if isinstance(event, RoleCall):
                by_group.setdefault(event.group, []).append(event)
        assert sorted(map(len, by_group.values())) == [1] * 6 + [2, 3, 3]
        for members in by_group.values():
            assert len({m.prompt_ids for m in members}) == 1
            assert [m.choice for m in members] == list(range(len(members)))
    seeds = [request.seed for request in generator.requests]
    assert len(set(seeds)) == len(seeds) == 2 * (2 + 6 + 6)
    ids = [event.id for episode in rollout.episodes for event in episode.events()]
    assert len(set(ids)) == len(ids)


def test_ways_with_different_numbers_of_forks_never_share_a_seed():
    body = sequence(role("a"), when(lambda a: int(a[-1]) % 2, role("b"), name="odd"), role("c"))
    generator = Says(speak_by_seed)
    play(body, generator, tasks(5), plays=3, branching={"a": 3, "b": 2, "c": 2})
    seeds = [request.seed for request in generator.requests]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("branching", "message"),
    [
        ({"x": 2}, "no role 'x'"),
        ({"a": 1}, "a=1 forks nothing"),
        ({"b": 2}, "node 'b' runs beside others"),
    ],
)
def test_forks_that_cannot_be_are_refused(branching, message):
    with pytest.raises(WorkflowError, match=message):
        play(sequence(role("a"), together(role("b"), role("c"))), branching=branching)


# ---- failures


def test_a_failed_tool_aborts_its_instance_only_and_says_why():
    def fragile(question):
        return failed(FailureKind.BAD_INPUT, "no such page", 0.0) if question == "q1" else success("ok", 0.0)

    rollout = play(sequence(role("a"), tool(fragile, "page")), given=tasks(3), attempts=3)
    assert [episode.aborted for episode in rollout.episodes] == [False, True, False]
    aborted = rollout.episodes[1]
    assert [(f.node, f.kind, f.message) for f in aborted.failures] == [("fragile", "bad_input", "no such page")]
    assert aborted.attempts == 1  # another try cannot change a bad input
    assert [event.node for event in aborted.remains] == ["a"]


def test_a_passing_failure_is_played_again_from_the_start_with_the_same_seeds():
    calls = []

    def flaky(question):
        calls.append(question)
        return failed(FailureKind.UNAVAILABLE, "down", 0.0) if len(calls) < 3 else success("ok", 0.0, attempts=2)

    generator = Says(speak_by_seed)
    rollout = play(sequence(role("a"), tool(flaky, "page")), generator, attempts=3)
    (episode,) = rollout.episodes
    assert (episode.aborted, episode.attempts, len(episode.failures)) == (False, 3, 2)
    assert len({request.seed for request in generator.requests}) == 1
    assert episode.trajectories[0].events[-1].attempts == 2


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), TimeoutError("slow"), OSError("disk")])
def test_lost_connections_are_the_infrastructures(error):
    def broken(question):
        if question == "q0":
            raise error
        return "ok"

    rollout = play(sequence(role("a"), tool(broken, "page")), given=tasks(2), attempts=2)
    assert [episode.aborted for episode in rollout.episodes] == [True, False]
    assert rollout.episodes[0].failures[0].kind == "unavailable"
    assert rollout.episodes[0].attempts == 2


@pytest.mark.parametrize("where", ["tool", "condition", "parser", "script"])
def test_a_fault_of_the_program_ends_the_rollout_with_its_name(where):
    def bad(question):
        return {}[question]

    body = {
        "tool": sequence(role("a"), tool(bad, "x")),
        "condition": sequence(role("a"), when(bad, role("b"))),
        "parser": role("a", parse=bad),
        "script": role("a"),
    }[where]
    assignment = Assignment({"a": "s"}, {"s": Scripted(bad)}) if where == "script" else None
    with pytest.raises(WorkflowError, match=r"'(bad|a)' raised"):
        play(body, assignment=assignment, given=tasks(3))


def test_when_everything_fails_the_rollout_does():
    def down(question):
        raise ConnectionRefusedError("nobody there")

    with pytest.raises(RolloutError, match="all 4 plays.*node 'down': unavailable: ConnectionRefusedError: nobody there"):
        play(sequence(role("a"), tool(down, "x")), given=tasks(2), plays=2)


def test_a_refused_request_is_a_fault_of_the_configuration():
    def refuse(prompt, request):
        raise RequestError("too long")

    with pytest.raises(WorkflowError, match="node 'a': the engine refuses its request: too long"):
        play(role("a"), Says(refuse))


@pytest.mark.parametrize("slow", ["plain tool", "async tool", "model", "instance", "engine"])
def test_deadlines_abort_the_late_instance_and_no_other(slow):
    def nap(question):
        time.sleep(0.3 if question == "q1" and slow == "plain tool" else 0)
        return "x"

    async def anap(question):
        await asyncio.sleep(30 if question == "q1" and slow in ("async tool", "instance") else 0)
        return "y"

    class Engine(Says):
        async def generate(self, request):
            done = await super().generate(request)
            late = slow == "engine" and request.seed[1] == 1
            return completion("part", request, "timeout") if late else done

    limit = 0.05
    body = sequence(
        role("a", timeout_s=limit if slow == "model" else 9.0),
        tool(nap, "x", timeout_s=limit if slow == "plain tool" else 9.0),
        tool(anap, "y", timeout_s=limit if slow == "async tool" else 9.0),
    )
    generator = Engine(echo, lambda request: 30 if slow == "model" and request.seed[1] == 1 else 0)
    rollout = play(body, generator, tasks(3), attempts=2, timeout_s=0.1 if slow == "instance" else None)
    assert [episode.aborted for episode in rollout.episodes] == [False, True, False]
    node = {"plain tool": "nap", "async tool": "anap", "instance": "anap"}.get(slow, "a")
    assert [(f.node, f.kind) for f in rollout.episodes[1].failures] == [(node, "deadline")] * 2


def test_a_failure_beside_others_cancels_them_and_aborts_the_instance():
    cancelled = []

    async def forever(question):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(question)
            raise

    async def fails(question):
        return failed(FailureKind.CRASH, "died", 0.0) if question == "q0" else "fine"

    body = sequence(role("a"), together(tool(fails, "x"), when(lambda question: question == "q0", tool(forever, "y"), name="w")))
    rollout = play(body, given=tasks(2), attempts=1)
    assert [episode.aborted for episode in rollout.episodes] == [True, False]
    assert cancelled == ["q0"]


def test_a_slow_tool_of_one_does_not_hold_up_the_others():
    done, others = [], threading.Event()

    def nap(question):
        if question == "q0":
            return others.wait(30)  # as long as the others need, who would need forever if they had to wait for this
        done.append(question)
        return True

    def last(at):
        if len(done) == 19:
            others.set()
        return at

    rollout = play(sequence(role("a"), tool(nap, "at"), role("b"), tool(last, "end")), given=tasks(20), threads=4)
    assert all(way.fields["at"] for way in rollout.trajectories)
    assert len(done) == 19


# ---- who plays


def test_scripts_and_outside_models_play_beside_policies():
    class Client:
        asked = []

        async def acomplete(self, messages, draw=0, **options):
            self.asked.append((messages, draw, options))
            from marl_llm.tools.chat import ChatReply

            return success(ChatReply("from outside", "length"), 0.0)

    def script(turn):
        return f"{turn.fields['question']} {turn.turn} {turn.random.random() < 1}"

    body = sequence(role("a"), role("b", system="Be brief."), role("c", "{b}"))
    models = {"s": Scripted(script), "o": Outside(Client(), {"seed": 1})}
    rollout = play(body, assignment=Assignment({"a": "s", "b": "o", "c": "p"}, models), plays=2)
    a, b, c = rollout.trajectories[1].calls
    assert (a.text, b.text, c.text) == ("q0 0 True", "from outside", "from outside")
    assert a.log_probs is None
    assert b.log_probs is None
    assert TOKENIZER.decode(a.tokens) == "q0 0 True" + "<eos>"
    assert (b.tokens.size, b.truncated, c.model) == (0, True, "p")
    messages, draw, options = Client.asked[1]
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "b: q0"}]
    assert (draw, options["seed"], options["max_tokens"]) == (1, 1, 256)


def test_an_outside_models_failure_aborts_the_play():
    class Client:
        async def acomplete(self, messages, draw=0, **options):
            return failed(FailureKind.BUDGET, "spent", 0.0) if "q1" in messages[0]["content"] else success(reply(), 0.0)

    def reply():
        from marl_llm.tools.chat import ChatReply

        return ChatReply("x")

    rollout = play(role("a"), assignment=Assignment({"a": "o"}, {"o": Outside(Client())}), given=tasks(2))
    assert [episode.aborted for episode in rollout.episodes] == [False, True]


def test_prompts_over_budget_are_trimmed_where_the_role_says_so():
    docs = ("one ", "two ", "three ", "four ")
    lines = role("a", "{docs}", max_prompt=17, trim="docs", show={"docs": "".join})
    team = Workflow("w", lines, inputs=("question", "docs"))
    rollout = play(None, workflow=team, given=tasks(docs=docs))
    (call_,) = rollout.trajectories[0].calls
    assert (call_.prompt, call_.trimmed) == ("a: one two three ", 1)
    assert rollout.trajectories[0].fields["docs"] == docs
    history = dataclasses.replace(lines, trim_from="start")
    rollout = play(None, workflow=Workflow("w", history, inputs=("question", "docs")), given=tasks(docs=docs))
    (call_,) = rollout.trajectories[0].calls
    assert (call_.prompt, call_.trimmed) == ("a: three four ", 2)
    rigid = Workflow("w", role("a", "{docs}", max_prompt=17), inputs=("question", "docs"))
    rollout = play(None, workflow=rigid, given=[*tasks(docs="short"), Task(1, {"question": "", "docs": "x" * 99})])
    assert rollout.episodes[1].failures[0].kind == "prompt"
    assert "102 tokens, 17 are allowed" in rollout.episodes[1].failures[0].message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Task(0, {})], "fields lacks 'question'"),
        ([Task(0, {"question": "", "gold": 1})], "fields holds 'gold'"),
        ([Task(0, {"question": ""}, {"gold": 1})], "hidden holds 'gold'"),
        ([*tasks(), *tasks()], "numbers must be distinct"),
        ([Task(2**31, {"question": ""})], "below 2\\*\\*31"),
    ],
)
def test_tasks_that_do_not_fit_are_refused(given, message):
    with pytest.raises(WorkflowError, match=message):
        play(role("a"), given=given)


def test_a_field_on_the_wrong_side_is_told_where_it_belongs():
    team = Workflow("w", role("a"), inputs=("question",), hidden=("gold",))
    for fields, hidden, message in (
        ({"question": "", "gold": 1}, {}, "fields holds 'gold', which workflow 'w' declares as hidden: give it in hidden"),
        ({}, {"question": "", "gold": 1}, "hidden holds 'question', which workflow 'w' declares as inputs: give it in fields"),
    ):
        with pytest.raises(WorkflowError, match=message) as error:
            play(None, workflow=team, given=[Task(0, fields, hidden)])
        assert error.value.__context__ is None  # nothing stands before it in a traceback


def test_a_script_that_gives_no_text_is_named():
    team = Workflow("w", role("a"), inputs=("question",))
    assignment = Assignment({"a": "s"}, {"s": Scripted(lambda turn: 42)})
    with pytest.raises(WorkflowError, match="the scripted player of node 'a' returned int; it must return text"):
        play(None, workflow=team, assignment=assignment)


def test_a_role_may_speak_at_two_places():
    a = role("a")
    (way,) = play(sequence(a, call(a, name="again"))).trajectories
    assert [(c.node, c.role, c.agent) for c in way.calls] == [("a", "a", 0), ("again", "a", 0)]
    assert len({c.seed for c in way.calls}) == 2
