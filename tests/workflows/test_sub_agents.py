"""Roles as tools of roles: their calls are samples, their limits are told to the caller, and their seeds follow from their places."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
from wordy import Says

import marl_llm as ml
from marl_llm.algorithms import advantages_for, make_recipe
from marl_llm.sampling.requests import Completion
from marl_llm.text import CHATML, ByteTokenizer, Chat
from marl_llm.workflows import (
    AgentTool,
    Controller,
    Role,
    Task,
    Workflow,
    WorkflowError,
    each,
    json_object,
    plain,
    sequence,
    shared,
    short_text,
    with_roles,
)
from marl_llm.workflows.efficiency import (
    critical_path_calls,
    critical_path_cost,
    critical_path_tokens,
    finished_share,
    sampled_tokens,
)
from marl_llm.workflows.metrics import rollout_metrics
from marl_llm.workflows.replay import replay
from marl_llm.workflows.rewards import absolute, broadcast
from marl_llm.workflows.samples import sample_table

TOKENIZER = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
CHAT = Chat(TOKENIZER, CHATML)
SEARCH = AgentTool("searcher", "Looks something up.", at_most=3)
SEARCHER = Role("searcher", "find {query}", plain("found"), {"found": ""}, max_tokens=8)


def asked(name="searcher", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def planner(tool=SEARCH, **options):
    options = {"max_tokens": 400, "max_prompt": 4000} | options
    return Role("planner", "{question}", plain("answer"), {"answer": ""}, tools=(tool,), **options)


def team(role, *agents, body=None, **options):
    found = absolute(lambda call, path: 0.25, tuple(agent.name for agent in agents), name="found")
    rewards = (broadcast(lambda path: 0.5, name="team"), found)
    return Workflow("w", body or role, ("question",), rewards=rewards, sub_agents=agents, **options)


class Chats(Says):
    """A chat model that answers from a function, within the request's budget."""

    async def generate(self, request):
        self.requests.append(request)
        if self.delay is not None:
            await asyncio.sleep(self.delay(request))
        text = self.answer(TOKENIZER.decode(request.prompt), request)
        tokens = np.asarray([*TOKENIZER.encode(text), TOKENIZER.eos_id], np.int32)[: request.max_tokens]
        log_probs = -np.random.default_rng(request.seed).random(tokens.size)
        return Completion(tokens, log_probs, log_probs, np.ones(tokens.size), "stop" if tokens[-1] == TOKENIZER.eos_id else "length", 0)


def scripted(*rounds):
    """The planner says these, one per round of tools; a searcher says what it is asked, in capitals."""

    def answer(prompt, request):
        last = prompt.rpartition("<|im_start|>user\n")[2]
        if last.startswith("find "):
            return last.removeprefix("find ").partition("<|im_end|>")[0].upper()
        return rounds[prompt.count("<|im_start|>assistant\n") - 1]

    return answer


def play(workflow, answer, n=1, delay=None, plays=1):
    generator = Chats(answer, delay)
    with Controller(workflow, shared(workflow), generator, CHAT, attempts=1) as controller:
        return controller.play([Task(i, {"question": "q"}) for i in range(n)], step=3, plays=plays), generator


TWO = scripted(asked(query="x") + asked(query="y"), asked(query="z"), "done")


def test_a_sub_agents_calls_are_samples_that_are_paid_and_its_words_are_the_tools_answer():
    workflow = team(planner(), SEARCHER)
    rollout, generator = play(workflow, TWO)
    (path,) = rollout.trajectories
    assert [event.node for event in path.events] == [
        "planner", "planner.searcher", "planner.searcher", "planner.searcher", "planner.searcher", "planner", "planner.searcher",
        "planner.searcher", "planner",
    ]  # fmt: skip
    first, x, y, second, z, last = path.calls
    assert [call.text for call in (x, y, z)] == ["X", "Y", "Z"]
    assert [call.prompt for call in (x, y, z)] == ["find x", "find y", "find z"]
    assert second.prompt == "X\nY"
    assert x.parents == y.parents == (first.id,)
    assert second.parents == tuple(event.id for event in path.events[2:5:2])
    assert second.prompt_ids[: len(first.prompt_ids) + first.tokens.size] == (*first.prompt_ids, *first.tokens.tolist())
    table = sample_table(rollout)
    assert [(row.call.role, row.where, row.team, row.local) for row in table.samples][:2] == [
        ("planner", True, 0.5, 0.0), ("searcher", True, 0.5, 0.25),
    ]  # fmt: skip
    assert len(table.trained()) == 6
    assert {key for key in path.fields} == {"question", "answer"}
    assert path.fields["answer"] == "done"
    assert path.written("found") == ()
    assert len({request.seed for request in generator.requests}) == 6
    assert {request.seed[2] for request in generator.requests} == {workflow.agents["planner"], workflow.agents["searcher"]}
    assert sampled_tokens(path) - critical_path_tokens(path) == x.tokens.size  # x and y ran beside each other
    figures = rollout_metrics(rollout, table)
    assert (figures["role/searcher/calls"], figures["tool/planner.searcher/calls"]) == (3.0, 3.0)
    assert figures["tool/planner.searcher/refused_share"] == 0.0


def test_the_samples_do_not_depend_on_who_answers_first_and_replay_from_the_record():
    workflow = team(planner(), SEARCHER)
    plain_rollout, _ = play(workflow, TWO, plays=2)
    late_x, _ = play(workflow, TWO, plays=2, delay=lambda request: 0.03 if b"find x" in bytes(t % 256 for t in request.prompt[-60:]) else 0)
    late_y, _ = play(workflow, TWO, plays=2, delay=lambda request: 0.03 * (request.seed[3] % 2))

    def rows(rollout):
        return [(s.call.id, s.call.seed, s.prompt_ids, s.response_ids.tolist(), s.call.parents) for s in sample_table(rollout).samples]

    assert rows(plain_rollout) == rows(late_x) == rows(late_y)
    for episode in plain_rollout.episodes:
        assert replay(episode, workflow, plain_rollout.assignment, CHAT, plays=2).trajectories


@pytest.mark.parametrize(
    ("tool", "rounds", "answer"),
    [
        (AgentTool("searcher", "", at_most=1), (asked(query="x"), asked(query="y"), "done"), "'searcher' was called 1 times"),
        (AgentTool("searcher", "", at_most=1), (asked(query="x") + asked(query="y"), "done"), "'searcher' was called 1 times"),
        (AgentTool("searcher", "", max_tokens=2), (asked(query="x"), asked(query="y"), "done"), "'searcher' has used up its 2 tokens"),
        (AgentTool("searcher", "", max_tokens=9), (asked(query="abcdefghi") + asked(query="y") * 2, "done"), "'searcher' has used up its"),
        (SEARCH, (asked(wort="x"), "done"), "'searcher' takes the arguments query, not wort"),
        (SEARCH, (asked(query="x" * 300), "done"), "'searcher' cannot read it: the prompt has"),
        (AgentTool("searcher", "", name="look"), (asked(query="x"), "done"), "there is no tool 'searcher'; there are look"),
    ],
)
def test_beyond_a_limit_the_caller_reads_one_line_that_is_counted(tool, rounds, answer):
    workflow = team(planner(tool), Role("searcher", "find {query}", plain("found"), {"found": ""}, max_tokens=8, max_prompt=100))
    rollout, generator = play(workflow, scripted(*rounds))
    (path,) = rollout.trajectories
    prompt = path.calls[-1].prompt
    assert f"error: {answer}" in prompt.splitlines()[-1]
    figures = rollout_metrics(rollout, sample_table(rollout))
    assert any(value > 0 for name, value in figures.items() if name.endswith("/refused_share"))
    assert path.fields["answer"] == "done"
    if tool.max_tokens:
        assert sum(call.tokens.size for call in path.by("searcher")) <= tool.max_tokens


def test_a_limit_holds_over_all_responses_of_an_episode():
    tool = AgentTool("searcher", "", at_most=2)
    first = planner(tool)
    workflow = team(first, SEARCHER, body=sequence(first, ml.workflows.call(first, "again")))
    rollout, generator = play(workflow, scripted(asked(query="x") + asked(query="y"), "done"))
    (path,) = rollout.trajectories
    assert len(path.by("searcher")) == 2
    assert "was called 2 times" in path.calls[-1].prompt
    assert len({request.seed for request in generator.requests}) == len(generator.requests) == 6


@pytest.mark.parametrize("at_most", [3, 2])
def test_a_call_whose_prompt_is_too_long_keeps_its_place_and_counts(at_most):
    searcher = dataclasses.replace(SEARCHER, max_prompt=80)
    rounds = scripted(asked(query="L" * 300) + asked(query="y"), asked(query="z"), "done")
    rollout, generator = play(team(planner(AgentTool("searcher", "", at_most=at_most), max_tokens=1500), searcher), rounds)
    (path,) = rollout.trajectories
    assert [call.text for call in path.by("searcher")] == ["Y", "Z"][: at_most - 1]
    assert ("was called 2 times" in path.calls[-1].prompt) == (at_most == 2)
    assert len({call.id for call in path.calls}) == len({request.seed for request in generator.requests}) == len(path.calls) == at_most + 2


def test_seats_beside_each_other_have_seeds_and_limits_of_their_own():
    tool = AgentTool("searcher", "", at_most=1)
    seat = Role("planner", "{item}", plain("answer"), {"answer": ""}, tools=(tool,), max_tokens=400)
    start = {"items": ("a", "b")}
    workflow = team(seat, SEARCHER, body=each("items", as_="item", do=seat, collect="answer", at_most=2), start=start)
    rollout, generator = play(workflow, scripted(asked(query="x"), "done"))
    (path,) = rollout.trajectories
    assert [call.items for call in path.by("searcher")] == [(0,), (1,)]
    assert len({request.seed for request in generator.requests}) == 6
    assert len({call.id for call in path.calls}) == 6


def test_a_role_that_is_its_own_tool_ends_at_its_depth():
    tool = AgentTool("planner", "", name="split", depth=2, at_most=1)
    workflow = team(planner(tool))
    assert list(workflow.nodes) == ["planner", "planner.split", "planner.split.split"]
    rollout, _ = play(workflow, lambda prompt, request: "done" if "<tool_response>" in prompt else asked("split", question="q"))
    (path,) = rollout.trajectories
    assert [call.node for call in path.calls][:3] == ["planner", "planner.split", "planner.split"]
    assert "was called 1 times" in next(call.prompt for call in path.calls if call.prompt.startswith("error"))
    deep = team(planner(AgentTool("planner", "", name="split", depth=2, at_most=9)))
    rollout, _ = play(deep, lambda prompt, request: "done" if "<tool_response>" in prompt else asked("split", question="q"))
    assert [call.node for call in rollout.trajectories[0].calls] == [
        "planner", "planner.split", "planner.split.split", "planner.split.split", "planner.split", "planner",
    ]  # fmt: skip
    assert rollout.trajectories[0].calls[3].prompt == "error: 'split' cannot be called at this depth: the limit is 2"


def test_an_answer_that_breaks_its_format_is_data_and_so_is_json():
    parts = Role("searcher", "find {query}", json_object(a=short_text(5), b=short_text(5)), {"a": "", "b": ""}, max_tokens=40)
    workflow = team(planner(), parts)
    plans = scripted(asked(query="x"), "done")
    good, _ = play(workflow, lambda prompt, request: '{"a": "1", "b": "2"}' if "find x<" in prompt else plans(prompt, request))
    assert json.loads(good.trajectories[0].calls[-1].prompt) == {"a": "1", "b": "2"}
    bad, _ = play(workflow, TWO)
    assert bad.trajectories[0].calls[-1].prompt.startswith("error: the answer of 'searcher' broke its format")
    assert [call.legal for call in bad.trajectories[0].by("searcher")] == [False] * 3
    assert (finished_share(good.trajectories[0]), finished_share(bad.trajectories[0])) == (1.0, 0.0)


def test_an_answer_that_is_no_json_is_data():
    class Mute:
        __str__ = None

    def parse(text):
        return {"found": Mute()}

    rollout, _ = play(team(planner(), Role("searcher", "find {query}", parse, {"found": ""}, max_tokens=8)), TWO)
    assert rollout.trajectories[0].calls[-1].prompt.startswith("error: the answer of 'searcher' is no JSON: TypeError")


# ---- what is made of them


def test_every_play_has_one_vote_in_a_sub_agents_statistics_however_often_it_was_called():
    counts, outcomes = {0: 1, 1: 3, 2: 2, 3: 0}, {0: 1.0, 1: 0.0, 2: 0.25, 3: 1.0}

    def answer(prompt, request):
        return scripted(asked(query="x") * counts[request.seed[4]] or "done", "done")(prompt, request)

    def score(path):
        return outcomes[path.branch]

    workflow = Workflow("w", planner(), ("question",), rewards=(broadcast(score),), sub_agents=(SEARCHER,))
    rollout, _ = play(workflow, answer, plays=4)
    table = sample_table(rollout)
    columns = table.to_samples()
    rows = [row for row in table.samples if row.call.role == "searcher"]
    assert [sum(row.trajectory == play for row in rows) for play in range(4)] == [1, 3, 2, 0]
    paid = np.asarray([outcomes[0], outcomes[1], outcomes[2]], np.float64)  # one number per play that called it
    expected = {True: (paid - paid.mean()) / (np.sqrt(((paid - paid.mean()) ** 2).sum() / 2) + 1e-4)}
    repeated = np.repeat(paid, [1, 3, 2])
    expected[False] = ((repeated - repeated.mean()) / (repeated.std(ddof=1) + 1e-4))[[0, 1, 4]]
    for one_vote in (True, False):
        weight = "trajectory" if one_vote else "sample"
        recipe = make_recipe("grpo", group_size=4, ddof=1, epsilon=1e-4, statistics_weight=weight)
        found = np.asarray(advantages_for(recipe, columns)[0])
        for row, advantage in zip(table.samples, found, strict=True):
            if row.call.role == "searcher":
                np.testing.assert_allclose(advantage, expected[one_vote][row.trajectory], rtol=1e-5)
    assert np.abs(expected[True] - expected[False]).min() > 0.01


def test_terms_for_the_critical_path_and_for_finished_sub_tasks():
    rollout, _ = play(team(planner(), SEARCHER), TWO)
    (path,) = rollout.trajectories
    assert finished_share(path) == 1.0
    assert critical_path_calls(path) == 5.0  # of 6 responses, two of which ran beside each other
    assert critical_path_cost(1e6)(path) == -critical_path_tokens(path) / 1e6
    assert critical_path_cost(1)(path) == -1.0
    refused, _ = play(team(planner(AgentTool("searcher", "", at_most=1)), SEARCHER), TWO)
    assert finished_share(refused.trajectories[0]) == 1 / 3
    cut, _ = play(team(planner(), SEARCHER), scripted(asked(query="abcdefghi"), "done"))
    assert finished_share(cut.trajectories[0]) == 0.0
    alone, _ = play(team(planner(), SEARCHER), scripted("done"))
    assert finished_share(alone.trajectories[0]) == 0.0
    with pytest.raises(WorkflowError, match="budget=0 tokens must be above 0"):
        critical_path_cost(0)


# ---- in a team that is a function


ROLES = {"planner": {"tools": (AgentTool("searcher", "Looks something up.", at_most=3),), "max_tokens": 400}, "searcher": {"max_tokens": 8}}
ROWS = [{"question": str(n)} for n in range(30)]


@ml.workflows.team(tasks=ROWS, roles=ROLES, renderer=CHAT)
async def solve(t, task):
    answer = await t.planner(task.question)
    more = await t.searcher("find w")
    return ml.Reward(team=float(answer == "done"), local={"searcher": 0.25 if more == "W" else 0.0, "planner": [0.5]})


def test_sub_agents_in_a_team_that_is_a_function_are_paid_and_replayed():
    answer = scripted(asked(prompt="find x") + asked(prompt="find y"), "done")
    with Controller(solve.workflow, shared(solve.workflow), Chats(answer), CHAT, attempts=1) as controller:
        rollout = controller.play(solve.tasks("train", 0, 2), plays=2)
    table = sample_table(rollout)
    rows = [(row.call.node, row.call.text if row.call.role == "searcher" else "", row.team, row.local) for row in table.samples[:5]]
    assert rows == [
        ("planner", "", 1.0, 0.5), ("planner.searcher", "X", 1.0, 0.25), ("planner.searcher", "Y", 1.0, 0.25), ("planner", "", 1.0, 0.5),
        ("searcher", "W", 1.0, 0.25),
    ]  # fmt: skip
    assert len({row.call.seed for row in table.samples}) == len(table) == 20
    for episode in rollout.episodes:
        assert replay(episode, solve.workflow, rollout.assignment, CHAT, plays=2).trajectories


def test_no_two_requests_of_a_function_have_one_place():
    node = solve.workflow.body
    spans = [(node.place(name, number), call.request_count) for name, call in node.calls.items() for number in range(node.at_most)]
    places = [place for start, count in spans for place in range(start, start + count)]
    assert len(set(places)) == len(places) == node.tool_place(0) == max(places) + 1


# ---- building


def test_other_budgets_reach_sub_agents():
    smaller = with_roles(team(planner(), SEARCHER), lambda role: dataclasses.replace(role, max_tokens=5))
    assert {role.max_tokens for role in smaller.roles.values()} == {5}
    assert smaller.nodes["planner.searcher"].role is smaller.roles["searcher"]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: team(planner(AgentTool("sercher", "")), SEARCHER), "AgentTool 'sercher' names the role 'sercher'|sub_agents has"),
        (lambda: team(planner(AgentTool("sercher", ""))), "names the role 'sercher', which the team does not have"),
        (lambda: team(planner(AgentTool("planner", "", name="x"))), "own tool .planner → planner. without a bound: .* depth=2"),
        (lambda: team(planner(), Role("searcher", "{q}", plain("a"), {"a": ""}, tools=(AgentTool("planner", ""),))), "planner → searcher"),
        (lambda: AgentTool("a", "", at_most=0), "at_most=0 must be a whole number"),
        (lambda: AgentTool("a", "", depth=0), "depth=0 must be"),
        (lambda: AgentTool("a", "", depth=9), "depth=9 is above 8"),
        (lambda: AgentTool("a", "", max_tokens=True), "max_tokens=True must be"),
        (lambda: AgentTool("a", "", arguments="q"), "must be a tuple of names"),
        (lambda: AgentTool("a", "", name="a b"), "'a b': a name has"),
        (lambda: team(planner(AgentTool("searcher", "", arguments=("a", "b"))), SEARCHER), "reads .'query',.: name each once"),
        (lambda: Role("a", "{q}", plain("x"), {"x": ""}, tools=(SEARCH, SEARCH)), "two tools of the name 'searcher'"),
        (lambda: team(Role("a", "{question}", plain("x"), {"x": ""}), SEARCHER), "'searcher', which is a tool of no role"),
        (lambda: team(planner(AgentTool("searcher", "", at_most=2**31)), SEARCHER), "could make .* requests: lower at_most"),
    ],
)
def test_what_cannot_be_built_says_why(build, why):
    with pytest.raises(WorkflowError, match=why) as error:
        build()
    assert "\n" not in str(error.value)


def test_a_sub_agent_cannot_fork():
    workflow = team(planner(), SEARCHER)
    with pytest.raises(WorkflowError, match="'searcher' is a tool of 'planner' and speaks within its response"):
        Controller(workflow, shared(workflow), Chats(TWO), CHAT, branching={"searcher": 2})
