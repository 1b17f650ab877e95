"""Plays of a foreign program as a rollout: paid ones train, whatever else a program does is counted."""

import asyncio
import http.client
import json

import numpy as np
import pytest
from test_team import LETTERS, team

from marl_llm.algorithms import make_recipe
from marl_llm.training.attached import AttachOptions, play_attached
from marl_llm.workflows import RolloutError, WorkflowError

GRPO = make_recipe("grpo", group_size=4, rewards="mixed", returns="immediate", scale_advantages="none")
ROWS = [{"letter": letter} for letter in LETTERS]


def request(url, body):
    """(status, JSON) of a post."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("POST", f"/{path}", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


async def ask(client, role, text):
    body = {"model": role, "messages": [{"role": "user", "content": text}], "temperature": 0, "seed": 7}  # neither is heeded
    status, found = await asyncio.to_thread(request, f"{client.base_url}/chat/completions", body)
    assert status == 200, found
    return found["choices"][0]["message"]["content"][:1]


async def echo(task, client):
    said = await ask(client, "first", f"say {task['letter']}")
    again = await ask(client, "second", f"again {said}" if said in LETTERS else "again")
    return {"reward": float(said == task["letter"]), "rewards": {"second": float(again == task["letter"])}}


def test_a_program_is_played_and_learned_from_and_repeats():
    with team(GRPO) as one:
        first, second = (play_attached(one.answers(), echo, ROWS, GRPO, step=3) for _ in range(2))
        other = play_attached(one.answers(), echo, ROWS, GRPO, step=4)
        figures = one.learn(first, 1e-2)
    for name in ("instance", "agent", "turn", "team", "local"):
        np.testing.assert_array_equal(getattr(first.table, name), getattr(second.table, name))
    np.testing.assert_array_equal(first.tokens.ids, second.tokens.ids)  # the data follows from the step and the rows
    assert first.tokens.ids.shape != other.tokens.ids.shape or np.any(first.tokens.ids != other.tokens.ids)
    assert first.table.instance.tolist() == np.repeat([0, 1, 2], 8).tolist()
    assert first.table.agent.tolist() == [0, 1] * 12
    assert len(set(np.round(first.tokens.log_probs, 3).tolist())) > 6  # the plays of a group differ
    assert max(found["log_prob_gap"] for found in figures.values()) < 1e-4
    assert (first.figures["aborted"], first.figures["reencoded"], first.figures["refused"]) == (0, 0, 0)


def test_what_a_program_does_wrong_aborts_its_play_and_is_counted():
    heard, begun = {}, iter(range(100))

    async def play(task, client):
        which, reward = next(begun), client.base_url.replace("/v1", "/reward")
        if which == 0:
            raise KeyError("a bug of the program")
        if which == 1:
            return 1.0  # it never asked
        await ask(client, "first", f"say {task['letter']}")
        if which == 2:
            await asyncio.sleep(60)
        if which == 3:
            return float("nan")
        if which == 4:
            return {"rewards": {"third": 1.0}}
        if which == 5:
            return object()
        if which == 7:
            raise asyncio.CancelledError
        if which == 8:
            return None
        if which == 6:
            heard["early"] = await asyncio.to_thread(request, reward, {"reward": 0.5})
            heard["twice"] = await asyncio.to_thread(request, reward, {"reward": 0.25})
            heard["guessed"] = await asyncio.to_thread(request, reward.replace("episodes/", "episodes/x"), {"reward": 1.0})
        return 1.0

    with team(GRPO) as one:
        batch = play_attached(one.answers(), play, ROWS, GRPO, options=AttachOptions(timeout_s=4, concurrency=4))
        with pytest.raises(RolloutError, match="every play of the program was aborted"):
            play_attached(one.answers(), lambda task, client: asyncio.sleep(0), ROWS[:1], GRPO)
        with pytest.raises(WorkflowError, match="plays whole episodes"):
            play_attached(one.answers(), play, ROWS, make_recipe("at_grpo", group_size=4))
        with pytest.raises(WorkflowError, match="neither replays nor truncation"):
            play_attached(one.answers(), play, ROWS, make_recipe("grpo", group_size=4, mask_truncated=True))
    aborted = {name.removeprefix("aborted/"): x for name, x in batch.figures.items() if name.startswith("aborted/") and x}
    assert aborted == {"failed": 2, "silent": 1, "late": 1, "refused": 3, "unpaid": 1}
    assert heard["early"][0] == 200
    assert [heard[name][0] for name in ("twice", "guessed")] == [400, 400]
    assert sorted(batch.table.team.tolist()) == [0.5, 1.0, 1.0, 1.0]  # the first pay counts
