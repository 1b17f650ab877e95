"""Plays of another program's environment: asked through the server, written down, paid, and learned from."""

import http.client
import json

import numpy as np
import pytest
from test_team import LETTERS, team

from marl_llm.algorithms import make_recipe
from marl_llm.serving import ChatServer
from marl_llm.training import RecordError, read_recorded


def ask(url, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", int(url.split(":")[2].split("/")[0]), timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    assert answer.status == 200, found
    return found


def foreign_play(url, name, letter, seed):
    """An environment of another program: the first model should say a letter, the second one should say it again."""
    said = []
    for model, text in (("first", f"say {letter}"), ("second", None)):
        heard = f"again {said[0]}" if said and said[0] in LETTERS else "again"  # the server refuses words that its vocabulary lacks
        body = {"model": model, "messages": [{"role": "user", "content": text or heard}], "seed": seed}
        said.append(ask(url, f"/episodes/{name}/v1/chat/completions", body)["choices"][0]["message"]["content"][:1])
    ask(url, f"/episodes/{name}/reward", {"reward": (said[0] == letter) / 2 + (said[1] == letter) / 2, "task": letter})


def test_a_foreign_environment_trains_a_team_through_its_server(tmp_path):
    rewards = []
    with team(make_recipe("grpo", group_size=4, scale_advantages="none")) as one:
        for step in range(12):
            one.sft_step(step % 6, 12, 1e-2)
        one.start_rl()
        for step in range(6):
            record = tmp_path / f"{step}.jsonl"
            with ChatServer(one.answers(), record=record) as server:
                for play in range(24):
                    foreign_play(server.url, f"play{play}", LETTERS[play % 3], 24 * step + play)
            batch = read_recorded(record, one.roles, step=step)
            figures = one.learn(batch, 1e-2)
            rewards.append(batch.figures["success"])
            assert all(found["log_prob_gap"] < 1e-4 for found in figures.values())  # what was recorded is what is scored
            np.testing.assert_array_equal(batch.version, step)
    assert len(batch.tokens) == 48
    assert sorted(set(batch.table.instance.tolist())) == [0, 1, 2]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1, rewards


def reply(episode="a", number=0, **more):
    drawn = dict(prompt=[1, 2], ids=[3], sampled_log_probs=[-0.5], version=0, temperature=1.0, top_p=1.0)
    return {"episode": episode, "number": number, "model": "first"} | drawn | more


PAID = {"episode": "a", "reward": 1.0}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([reply(), {"episode": "a"}, PAID], "line 3: episode 'a' has its reward already"),
        ([reply(), reply(), PAID], "line 2: episode 'a' has its reply 0 already"),
        ([reply(model="third"), PAID], "line 1: the model 'third' is no role; the roles are first, second"),
        ([reply(top_p=0.9), PAID], "line 1: it was drawn with temperature=1.0, top_p=0.9; to be trained on it needs"),
        ([reply(temperature=0.5), PAID], "temperature=0.5"),
        ([reply(ids=[3, 4]), PAID], "as many sampled_log_probs"),
        ([reply(version=None), PAID], "needs its number, version"),
        (["{", PAID], "line 1: no reply and no reward"),
        (["[" * 10_000, PAID], "line 1: no reply and no reward"),
        ([reply(), PAID, reply(number=1)], "line 3: a reply of episode 'a' behind its reward"),
        ([PAID, reply()], "line 2: a reply of episode 'a' behind its reward"),
        ([json.dumps(reply()).replace("-0.5", "NaN"), PAID], "line 1: no reply .* not finite"),
        ([json.dumps(reply()).replace("-0.5", "-1e300"), PAID], "line 1: sampled_log_probs"),
        ([reply(sampled_log_probs=[True]), PAID], "line 1: sampled_log_probs"),
        ([reply(sampled_log_probs=[0.5]), PAID], "line 1: sampled_log_probs"),
        ([reply(prompt=5), PAID], "line 1: a reply needs"),
        ([reply(number=[0]), PAID], "line 1: a reply needs"),
        ([reply(ids=[-1]), PAID], "line 1: a reply needs"),
        ([reply(), PAID | {"reward": "1"}], "line 2: a reward is a number"),
        ([reply(), PAID | {"reward": 1e300}], "line 2: a reward is a number"),
        ([reply(), PAID | {"reward": 1e29}], "line 2: a reward is a number"),
        ([reply(), PAID | {"rewards": {"frist": 1}}], "line 2: 'frist' is paid, which is no role"),
        ([reply(), PAID | {"task": ["t"]}], "line 2: task is a text"),
        ([reply(), {"episode": "b", "reward": 1.0}], "no play has a reward; post it"),
    ],
)
def test_a_record_that_cannot_be_trained_on_is_refused_with_its_line(lines, message, tmp_path):
    path = tmp_path / "plays.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    with pytest.raises(RecordError, match=message):
        read_recorded(path, ("first", "second"))


def test_plays_of_one_question_are_compared_and_unpaid_ones_are_counted(tmp_path):
    lines = [reply("a"), reply("a", 1, model="second", ids=[5, 6], sampled_log_probs=[-1.0, -2.0]), reply("a", 2, version=4),
             reply("b"), reply("c", prompt=[9]), reply("d")]  # fmt: skip
    lines += [{"episode": "a", "reward": 1.0, "rewards": {"second": 0.25}}, {"episode": "b", "rewards": {"first": -1}}]
    lines += [{"episode": "c", "reward": 0.0}]
    path = tmp_path / "plays.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = read_recorded(path, ("first", "second"), step=7)
    table = batch.table
    assert (batch.step, batch.figures["aborted"], batch.figures["samples"]) == (7, 1.0, 5.0)
    assert table.instance.tolist() == [0, 0, 0, 0, 1]
    assert table.trajectory.tolist() == [0, 0, 0, 1, 2]
    assert table.agent.tolist() == [0, 1, 0, 0, 0]
    assert table.turn.tolist() == [0, 0, 1, 0, 0]
    assert table.team.tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert table.local.tolist() == [0.0, 0.25, 0.0, -1.0, 0.0]
    assert batch.version.tolist() == [0, 0, 4, 0, 0]
    assert batch.tokens.log_probs.tolist() == [-0.5, -1.0, -2.0, -0.5, -0.5, -0.5]
