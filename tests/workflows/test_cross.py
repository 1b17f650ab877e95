"""Cross joint sampling: every response beside every partner's, paid the mean, nothing more sampled; refused where it means nothing."""

import dataclasses
import itertools

import numpy as np
import pytest
from wordy import SPEECH, Says

from marl_llm.text import CHATML, ByteTokenizer, Chat
from marl_llm.tools.results import FailureKind, ToolResult, failed, success
from marl_llm.workflows import (
    AgentTool,
    Assignment,
    Controller,
    Role,
    Scripted,
    Task,
    Workflow,
    WorkflowError,
    compute,
    plain,
    repeat,
    separate,
    sequence,
    together,
    tool,
)
from marl_llm.workflows.cross import check_cross, crossed
from marl_llm.workflows.efficiency import critical_path_tokens
from marl_llm.workflows.rewards import absolute, broadcast
from marl_llm.workflows.samples import sample_table

WORTH = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
GROUP = 4


def team(judge, names=("left", "right"), body=None):
    roles = [Role(name, f"{{word}} {name}", plain(name), {name: ""}) for name in names]
    rewards = (broadcast(lambda path: path.fields["worth"], name="joint"), absolute(lambda call, path: len(call.text), names, name="own"))
    return Workflow("pair", (body or sequence)(together(*roles), judge), ("word",), rewards=rewards)


def product(judged):
    async def judge(left: str, right: str) -> ToolResult:
        judged.append((left, right))
        return success(WORTH[left] * WORTH[right] if (left, right) != ("a", "a") else 100.0, 0.0)

    return tool(judge, "worth")


def says(prompt, request):
    """The k-th play's left says a, b, c, d, and right the other way round."""
    k = request.seed[-1]
    return "abcd"[k] if "left" in prompt else "dcba"[k]


def played(workflow, count=2):
    generator = Says(says)
    with Controller(workflow, separate(workflow), generator, SPEECH) as controller:
        return controller.play([Task(n, {"word": f"w{n}"}) for n in range(count)], plays=GROUP), generator


def paid(rollout):
    """(task, role, what it said) -> team reward of its row."""
    return {(row.instance, row.call.role, row.call.text): row.team for row in sample_table(rollout).samples}


def joint(left, right):
    return 100.0 if left == right == "a" else WORTH[left] * WORTH[right]


def test_every_response_is_paid_the_mean_over_all_partners_and_nothing_more_is_sampled():
    judged = []
    rollout, generator = played(team(product(judged)))
    sampled = len(generator.requests)
    aligned = paid(rollout)
    assert aligned[0, "left", "a"] == joint("a", "d")
    found, judgements = crossed(rollout)
    assert len(generator.requests) == sampled == 2 * 2 * GROUP
    assert judgements == 2 * GROUP**2
    assert set(judged[-judgements:]) == set(itertools.product("abcd", repeat=2))
    rows = paid(found)
    assert len(rows) == len(aligned) == 2 * 2 * GROUP
    for task, mine in itertools.product(range(2), "abcd"):
        assert rows[task, "left", mine] == pytest.approx(np.mean([joint(mine, other) for other in "abcd"]))
        assert rows[task, "right", mine] == pytest.approx(np.mean([joint(other, mine) for other in "abcd"]))
    for row in sample_table(found).samples:
        assert row.components == {"joint": pytest.approx(row.team), "own": 1.0}
        assert row.local == 1.0


def test_rewards_see_the_tokens_the_ending_and_what_came_before():
    class Cut(Says):
        async def generate(self, request):
            return dataclasses.replace(await super().generate(request), finish="length" if request.seed[-1] == 1 else "stop")

    names = ("left", "right")
    roles = [Role(name, f"{{word}}{{said}} {name}", plain(name), {name: ""}) for name in names]
    before, after = compute(lambda word: word * 2, "said", name="before"), compute(lambda left, right: 1.0, "worth", name="after")

    def follows(call, path):
        return float(call.parents == (path.events[0].id,) and bool(call.prompt_ids))

    rewards = (
        broadcast(lambda path: critical_path_tokens(path), name="tokens"),
        absolute(lambda call, path: float(call.truncated), names, name="cut"),
        absolute(follows, names, name="follows"),
    )
    workflow = Workflow("pair", sequence(before, together(*roles), after), ("word",), rewards=rewards)
    generator = Cut(lambda prompt, request: "a" * (1 + 2 * request.seed[-1]))
    with Controller(workflow, separate(workflow), generator, SPEECH) as controller:
        rollout = controller.play([Task(0, {"word": "w"})], plays=GROUP)
    rows = sample_table(crossed(rollout)[0]).samples
    sizes = [row.call.tokens.size for row in rows if row.call.role == "left"]
    for row in rows:
        play = row.call.seed[-1]
        longer = np.mean([max(sizes[play], size) for size in sizes])
        assert row.components == {"tokens": pytest.approx(longer), "cut": float(play == 1), "follows": 1.0}


def test_sub_agents_are_part_of_the_response_that_asked_them():
    chat = Chat(ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",)), CHATML)
    asks = '<tool_call>\n{"name": "helper", "arguments": {"query": "x"}}\n</tool_call>'

    def answer(turn):
        return "found" if turn.role.name == "helper" else asks if len(turn.messages) == 1 and turn.role.name == "left" else "done"

    tools = (AgentTool("helper", "Helps."),)
    left = Role("left", "{word}", plain("left"), {"left": ""}, tools=tools, max_tokens=400, max_prompt=4000)
    helper, right = Role("helper", "{query}", plain("found"), {"found": ""}), Role("right", "{word}", plain("right"), {"right": ""})
    judge = compute(lambda left, right: 1.0, "worth", name="judge")
    rewards = (broadcast(lambda path: float(len(path.calls)), name="calls"),)
    workflow = Workflow("pair", sequence(together(left, right), judge), ("word",), rewards=rewards, sub_agents=(helper,))
    players = Assignment(dict.fromkeys(workflow.roles, "script"), {"script": Scripted(answer)})
    with Controller(workflow, players, None, chat) as controller:
        rollout = controller.play([Task(0, {"word": "w"})], plays=2)
    found, judged = crossed(rollout)
    assert judged == 2**2
    assert [(row.call.node, row.team) for row in sample_table(found).samples] == [
        (node, 4.0) for node in ("left", "left.helper", "left", "right")
    ] * 2  # fmt: skip


def test_a_balanced_subset_judges_each_response_equally_often():
    judged = []
    rollout, _ = played(team(product(judged)), count=1)
    judged.clear()
    found, judgements = crossed(rollout, subset=2 * GROUP)
    assert judgements == len(judged) == len(set(judged)) == 2 * GROUP
    for side in (0, 1):
        assert sorted(pair[side] for pair in judged) == sorted("abcd" * 2)
    wanted = {mine: np.mean([joint(*pair) for pair in judged if pair[0] == mine]) for mine in "abcd"}
    assert {mine: paid(found)[0, "left", mine] for mine in "abcd"} == pytest.approx(wanted)
    with pytest.raises(ValueError, match="subset=6 must be a multiple"):
        crossed(rollout, subset=6)


def test_a_broken_joint_action_counts_for_nobody_and_a_aborted_play_aborts_its_task():
    broken = set()

    async def judge(left: str, right: str) -> ToolResult:
        if (left, right) in broken:
            return failed(FailureKind.CRASH, "no worker", 0.0)
        return success(joint(left, right), 0.0)

    rollout, _ = played(team(tool(judge, "worth")))
    broken.add(("a", "a"))
    found, _ = crossed(rollout)
    assert paid(found)[0, "left", "a"] == pytest.approx(np.mean([joint("a", other) for other in "bcd"]))
    broken.add(("b", "c"))  # an aligned pair: that play is aborted
    short, _ = played(team(tool(judge, "worth")), count=2)
    assert sum(episode.aborted for episode in short.episodes) == 2
    found = crossed(short)[0]
    assert all(episode.aborted and episode.failures[-1].message.endswith("no worker") for episode in found.episodes)
    assert {row.excluded for row in sample_table(found).samples} == {"aborted"}
    assert len(sample_table(found)) == len(sample_table(short)) == 2 * 2 * GROUP
    broken |= {("c", other) for other in "abcd"}
    left_out = [episode.play for episode in crossed(rollout)[0].episodes if episode.aborted]
    assert left_out == [2, 2]


def test_a_workflow_whose_roles_do_not_speak_once_and_at_once_is_refused_by_its_node():
    judge = product([])
    check_cross(team(judge))
    loop = team(judge, body=lambda *parts: repeat(*parts, at_most=2, name="turns"))
    with pytest.raises(WorkflowError, match="joint='cross': .*turns.* lets roles speak more than once"):
        check_cross(loop)
    one = Role("one", "{word}", plain("left"), {"left": ""})
    two = Role("two", "{word}", plain("right"), {"right": ""})
    with pytest.raises(WorkflowError, match="one.* does not speak beside all the others"):
        check_cross(Workflow("line", sequence(one, two, judge), ("word",)))
    with pytest.raises(WorkflowError, match="one.* does not speak beside all the others"):
        check_cross(Workflow("alone", sequence(one, tool(lambda left: 1.0, "worth", name="judge")), ("word",)))


def test_the_config_says_where_cross_sampling_is_refused():
    from experiments.configs import joint_letter, notes
    from marl_llm.algorithms import make_recipe
    from marl_llm.runs.command import ConfigError
    from marl_llm.runs.resolve import resolve

    config = notes.get_config()
    config.recipe.joint, config.recipe.joint_subset = "cross", 16
    with resolve(config) as plan:
        assert (plan.recipe.joint, plan.recipe.joint_subset) == ("cross", 16)
    config.game.style = "discussion"
    with pytest.raises(ConfigError, match="recipe.joint='cross': .*turns.* lets roles speak more than once"):
        resolve(config)
    letter = joint_letter.get_config()
    letter.recipe.joint = "cross"
    with pytest.raises(ConfigError, match="compiled play pairs no responses"):
        resolve(letter)
    with pytest.raises(ValueError, match="joint_subset=6 must be a multiple of group_size=4"):
        make_recipe("magrpo", joint="cross", joint_subset=6)
    with pytest.raises(ValueError, match="joint='cross' pairs responses of several plays"):
        make_recipe("at_grpo", joint="cross")
    with pytest.raises(ValueError, match="joint_subset=8 would have no effect"):
        make_recipe("magrpo", joint_subset=8)


def test_which_joint_actions_of_a_part_are_judged_is_drawn_anew_in_every_step():
    judged = []
    rollout, _ = played(team(product(judged)), count=3)
    found = {}
    for step in (0, 0, 1):
        judged.clear()
        crossed(dataclasses.replace(rollout, step=step), subset=2 * GROUP)
        assert found.setdefault(step, sorted(judged)) == sorted(judged)
    assert found[0] != found[1]
