"""Transcripts say what was sampled: the very ids, in the order of play, by the schema of the reports."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.evaluation import episode
from marl_llm.games import GameError, make_game, picture_lines
from marl_llm.reporting import validate_episode
from marl_llm.reporting.episodes import validate_tokens
from marl_llm.rollout import play, scripted_player

E, K = 6, 3
GAME = make_game("plan_path", height=3, width=3, min_distance=2, max_distance=4, max_moves=2, max_turns=3)
LETTERS = make_game("joint_letter", letters=3)
ASSIGNMENT = {"tool": "a", "planner": "b"}


@functools.cache
def played(game, branches=K):
    """Scripted plays whose log-probs are made up, so that each can be told from every other."""

    def player(role, states, prompt, keys):
        said = scripted_player(game, **(dict(noise=0.7) if game is GAME else {}))(role, states, prompt, keys)
        size = said.tokens.size
        return said._replace(sampled_log_probs=-(1 + jnp.arange(size, dtype=jnp.float32)).reshape(said.tokens.shape) / size)

    @jax.jit
    def run(key):
        instances = jax.vmap(lambda i: game.instance(jax.random.fold_in(key, i), "train"))(jnp.arange(E))
        return play(game, player, instances, jnp.arange(E), key, branches=branches, pick="greedy"), instances

    return run(jax.random.key(3))


def told(index=0, game=GAME, rollout=None, **options):
    real, instances = played(game, K if game is GAME else 1)
    names = ASSIGNMENT if game is GAME else {"first": "m", "second": "m"}
    options = dict(name="x", step=5, when="train") | options
    return episode(game, rollout or real, instances, index, names, **options)


@pytest.mark.parametrize("game", [GAME, LETTERS], ids=lambda g: g.name)
def test_episodes_follow_the_schema(game):
    for index in range(E):
        record, tokens = told(index, game)
        validate_episode(record)
        validate_tokens(tokens, record)


def test_ids_are_those_that_were_sampled():
    rollout, _ = played(GAME)
    for index in range(E):
        record, tokens = told(index)
        for said, ids in zip(record["steps"], tokens["steps"], strict=True):
            table = jax.tree.map(lambda x: np.asarray(x)[ids["turn"], index, 0], rollout.tables[ids["role"]])  # noqa: B023
            assert ids["prompt_ids"] == table.prompt.ids[table.prompt.where].tolist()
            assert said["prompt"] == GAME.tokenizer.decode(np.asarray(ids["prompt_ids"]))
            for k, (text, one) in enumerate(zip(said["responses"], ids["responses"], strict=True)):
                where = table.responses.where[k]
                assert one["ids"] == table.responses.tokens[k][where].tolist()
                assert one["log_probs"] == table.responses.sampled_log_probs[k][where].tolist()
                assert text["text"] == GAME.tokenizer.decode(np.asarray(one["ids"]))
                assert text["chosen"] == (k == table.chosen)
                assert (text["team"], text["local"]) == (table.rewards.team[k], table.rewards.local[k])
                assert text["components"] == {n: c[k] for n, c in table.rewards.components.items()}
                assert text["well_formed"] == table.rewards.well_formed[k]
                assert text["truncated"] == table.responses.truncated[k]


def test_steps_come_in_the_order_of_play():
    """The Tool before the Planner in every turn, although JAX sorts the keys of a dict; turns that were not played are absent."""
    rollout, _ = played(GAME)
    lengths = set()
    for index in range(E):
        record, _ = told(index)
        turns = int(rollout.episodes.turns[index, 0])
        lengths.add(turns)
        assert record["turns"] == turns
        order = [(s["turn"], s["role"]) for s in record["steps"]]
        full = [(t, r) for t in range(turns) for r in ("tool", "planner")]
        # the Tool only proposes, so a turn once begun is played by both
        assert order == full
        assert list(record["roles"].items()) == [("tool", "a"), ("planner", "b")]
        groups = [s["group"] for s in record["steps"]]
        assert len(set(groups)) == len(groups)
    assert len(lengths) > 1
    assert [s["role"] for s in told(game=LETTERS)[0]["steps"]] == ["first", "second"]


def test_the_map_is_drawn_after_the_last_role_of_a_turn():
    record, _ = told()
    assert [("state_after" in s) for s in record["steps"]] == [s["role"] == "planner" for s in record["steps"]]
    start = record["task"]["map"]
    assert len(start) == 3
    assert sum(row.count("A") for row in start) == 1
    for index in range(E):
        record, _ = told(index)
        last = "".join(record["steps"][-1]["state_after"])
        assert ("*" in last) == (record["status"] == "success")
        assert "".join(record["task"]["map"]).replace("A", ".").replace("G", ".") == (
            last.replace("A", ".").replace("G", ".").replace("*", ".")
        )
    assert not any("state_after" in s for s in told(game=LETTERS)[0]["steps"])


@pytest.mark.parametrize(
    ("outcome", "done", "aborted", "status"),
    [(1.0, True, False, "success"), (0.5, True, False, "failed"), (0.0, False, False, "horizon"), (1.0, True, True, "aborted")],
)
def test_status(outcome, done, aborted, status):
    rollout, _ = played(GAME)

    def like(value, x):
        return jnp.full_like(x, value)

    ended = rollout.episodes._replace(
        outcome=like(outcome, rollout.episodes.outcome),
        done=like(done, rollout.episodes.done),
        aborted=like(aborted, rollout.episodes.aborted),
    )
    record, _ = told(rollout=rollout._replace(episodes=ended))
    assert record["status"] == status
    assert (record["episode"], record["step"], record["when"]) == ("x", 5, "train")


def test_an_episode_that_was_not_played_has_no_steps():
    rollout, _ = played(GAME)
    tables = {r: t._replace(where=jnp.zeros_like(t.where)) for r, t in rollout.tables.items()}
    record, tokens = told(rollout=rollout._replace(tables=tables))
    assert record["steps"] == tokens["steps"] == []
    validate_episode(record)


def test_a_picture_is_a_list_of_lines_and_a_text_is_split_into_them(monkeypatch):
    def drawn(value):
        monkeypatch.setattr(type(LETTERS), "picture", lambda game, state: value)
        return picture_lines(LETTERS, None)

    assert drawn("ab\nc") == ["ab", "c "]
    assert drawn(("a", "b")) == ["a", "b"]
    assert drawn(None) is None
    for wrong in (3, [3], {"a": "b"}):
        with pytest.raises(GameError, match="joint_letter: picture returned .*a list of lines"):
            drawn(wrong)
