"""episodes.jsonl: the documented schema, refused when broken, readable after a kill."""

import copy
import errno
import os

import numpy as np
import pytest

from marl_llm.reporting import EpisodeError, EpisodeWriter, WriteError, files, read_episodes, read_tokens, validate_episode, worst_plays


def response(text="R R ;", chosen=True, **changes):
    base = {"text": text, "chosen": chosen, "team": 1.0, "local": 0.5, "components": {"progress": 0.5}}
    return base | {"well_formed": True, "truncated": False} | changes


def episode(name="e0", step=0, when="before"):
    steps = [
        {"turn": 0, "role": role, "prompt": "^ G R 2", "group": group, "state_after": after,
         "responses": [response("L ;", False), response()]}
        for role, group, after in (("tool", 7, ["A.G"]), ("planner", "planner/0", ["..*"]))
    ]  # fmt: skip
    return {
        "episode": name, "step": step, "when": when, "task": {"map": ["A.G"], "distance": 2},
        "roles": {"tool": "a", "planner": "b"}, "status": "success", "turns": 1, "steps": steps,
    }  # fmt: skip


def tokens(name="e0"):
    responses = [{"ids": [5, 1], "log_probs": [-0.5, -0.25]}, {"ids": np.array([6]), "log_probs": np.array([-1.5], np.float32)}]
    steps = [{"turn": 0, "role": role, "prompt_ids": np.arange(4), "responses": responses} for role in ("tool", "planner")]
    return {"episode": name, "steps": steps}


def changed(value, path, new):
    """A deep copy of `value` with the item at `path` replaced, or removed when `new` is KeyError."""
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


def test_what_is_written_is_read(tmp_path):
    with EpisodeWriter(tmp_path / "run") as writer:
        writer.write(episode("e0"), tokens("e0"))
        writer.write(episode("e1"))
    assert read_episodes(tmp_path / "run") == [episode("e0"), episode("e1")]
    (read,) = read_tokens(tmp_path / "run" / "episodes_tokens.jsonl")
    assert read["steps"][1]["prompt_ids"] == [0, 1, 2, 3]
    assert read["steps"][1]["responses"][1] == {"ids": [6], "log_probs": [-1.5]}


STEP = ("steps", 0)
BRANCH = ("steps", 1, "responses", 0)


@pytest.mark.parametrize(
    ("path", "new", "words"),
    [
        (("episode",), 3, "episode: found int"),
        (("status",), KeyError, "status missing"),
        (("extra",), 1, "unknown 'extra'"),
        (("step",), -1, "step: found -1"),
        (("turns",), True, "turns: found True"),
        (("when",), "later", "when: found 'later'.*before, train, after"),
        (("task",), "a map", "task: found str"),
        (("task", "map"), "A.G", "task.map: found str"),
        (("task", "map"), ["A.", "G"], r"task.map\[1\]: 1 characters"),
        (("task", "start"), (np.ones(2), object()), "not valid JSON"),
        (("task", "weight"), float("nan"), "not valid JSON"),
        (("roles", "tool"), None, r"roles\['tool'\]: found NoneType"),
        (("steps",), {}, "steps: found dict"),
        ((*STEP, "role"), "coach", r"steps\[0\].role: found 'coach'.*tool, planner"),
        ((*STEP, "role"), ["tool"], r"steps\[0\].role: found list"),
        ((*STEP, "turn"), 0.5, r"steps\[0\].turn: found 0.5"),
        ((*STEP, "prompt"), [1, 2], r"steps\[0\].prompt: found list"),
        ((*STEP, "group"), 1.5, r"steps\[0\].group: found float"),
        ((*STEP, "group"), KeyError, r"steps\[0\]: group missing"),
        ((*STEP, "responses"), [], r"steps\[0\].responses: found none"),
        ((*STEP, "state_after"), None, r"steps\[0\].state_after: found NoneType"),
        ((*BRANCH, "chosen"), True, r"steps\[1\].responses: \[0, 1\] are all chosen"),
        ((*BRANCH, "text"), b"L", r"steps\[1\].responses\[0\].text: found bytes"),
        ((*BRANCH, "team"), "1", r"steps\[1\].responses\[0\].team: found '1'"),
        ((*BRANCH, "local"), float("inf"), r"steps\[1\].responses\[0\].local: found inf"),
        ((*BRANCH, "components"), [0.5], r"steps\[1\].responses\[0\].components: found list"),
        ((*BRANCH, "components", "goal"), None, r"components\['goal'\]: found None"),
        ((*BRANCH, "components", 3), 0.5, "the key 3 is int"),
        ((*BRANCH, "well_formed"), 1, r"well_formed: found int"),
        ((*BRANCH, "truncated"), KeyError, r"steps\[1\].responses\[0\]: truncated missing"),
    ],
)
def test_an_episode_against_the_schema_is_refused_with_the_place(tmp_path, path, new, words):
    with EpisodeWriter(tmp_path) as writer:
        with pytest.raises(EpisodeError, match=words):
            writer.write(changed(episode(), path, new), tokens())
        assert (tmp_path / "episodes.jsonl").read_bytes() == b""
        assert (tmp_path / "episodes_tokens.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("path", "new", "words"),
    [
        (("episode",), "e9", "tokens.episode: found 'e9'"),
        (("steps",), [], "tokens.steps: 0 steps, the episode has 2"),
        (("steps", 1, "role"), "tool", r"tokens.steps\[1\]: turn and role are \(0, 'tool'\)"),
        (("steps", 0, "prompt_ids"), [0.5], r"tokens.steps\[0\].prompt_ids: found shape"),
        (("steps", 0, "prompt_ids"), [[1], [2, 3]], "ragged"),
        (("steps", 0, "prompt_ids"), "12", r"prompt_ids: found str"),
        (("steps", 0, "responses"), [], r"tokens.steps\[0\].responses: 0 branches, the episode has 2"),
        (("steps", 0, "responses", 0, "log_probs"), [-0.5], r"responses\[0\]: 2 ids, 1 log_probs"),
        (("steps", 0, "responses", 0, "log_probs"), [-0.5, float("-inf")], r"log_probs: not finite"),
        (("steps", 0, "responses", 0, "ids"), KeyError, "ids missing"),
    ],
)
def test_tokens_that_do_not_mirror_the_episode_are_refused(tmp_path, path, new, words):
    with EpisodeWriter(tmp_path) as writer:
        with pytest.raises(EpisodeError, match=words):
            writer.write(episode(), changed(tokens(), path, new))
        assert (tmp_path / "episodes.jsonl").read_bytes() == b""


def test_optional_parts_may_be_absent():
    bare = changed(episode(), (*STEP, "state_after"), KeyError)
    bare = changed(bare, ("task",), {})
    bare = changed(bare, (*BRANCH, "components"), {})
    validate_episode(bare)
    nothing_chosen = changed(bare, ("steps", 0, "responses"), [response(chosen=False)])
    validate_episode(nothing_chosen)
    validate_episode(changed(bare, ("steps",), []))


def test_numpy_values_are_written_as_json(tmp_path):
    one = changed(episode(), (*BRANCH, "team"), np.float32(0.25))
    one = changed(one, (*BRANCH, "chosen"), np.bool_(False))
    one = changed(one, ("task", "goal"), np.array([1, 2]))
    one["step"] = np.int64(4)
    with EpisodeWriter(tmp_path) as writer:
        writer.write(one)
    (read,) = read_episodes(tmp_path)
    assert read["step"] == 4
    assert read["task"]["goal"] == [1, 2]
    assert read["steps"][1]["responses"][0]["team"] == 0.25
    assert read["steps"][1]["responses"][0]["chosen"] is False


def test_one_writer_refuses_an_id_twice(tmp_path):
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode())
        with pytest.raises(EpisodeError, match="'e0' was already written"):
            writer.write(episode())
    assert len(read_episodes(tmp_path)) == 1


def test_an_episode_is_looked_at_without_being_written_and_what_is_no_json_is_refused(tmp_path):
    with EpisodeWriter(tmp_path) as writer:
        writer.look(episode())
        for wrong in (float("inf"), {1, 2}):
            with pytest.raises(EpisodeError, match="episode 'e0': "):
                writer.look(episode() | {"task": {"map_size": wrong}})
    assert read_episodes(tmp_path) == []


def test_resume_drops_later_episodes_and_replaces_replayed_ones(tmp_path):
    with EpisodeWriter(tmp_path) as writer:
        for name, step in (("b", 0), ("t2", 2), ("t4", 4), ("t6", 6), ("a", 9)):
            when = {"b": "before", "a": "after"}.get(name, "train")
            writer.write(episode(name, step, when), tokens(name))
    with EpisodeWriter(tmp_path, resume_step=4):
        pass
    assert [e["episode"] for e in read_episodes(tmp_path)] == ["b", "t2", "t4"]
    with EpisodeWriter(tmp_path, resume_step=4) as writer:
        writer.write(changed(episode("t4", 4, "train"), ("status",), "horizon"), tokens("t4"))
    read = {e["episode"]: e["status"] for e in read_episodes(tmp_path)}
    assert read == {"b": "success", "t2": "success", "t4": "horizon"}
    assert [t["episode"] for t in read_tokens(tmp_path)] == ["b", "t2", "t4"]
    with EpisodeWriter(tmp_path, resume_step=-1):
        pass
    assert read_episodes(tmp_path) == read_tokens(tmp_path) == []


def test_torn_last_lines_of_both_files_are_cut_off(tmp_path):
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode("e0"), tokens("e0"))
    for name in ("episodes.jsonl", "episodes_tokens.jsonl"):
        with open(tmp_path / name, "a") as file:
            file.write('{"episode": "e1", "st')
    assert [e["episode"] for e in read_episodes(tmp_path)] == ["e0"]
    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode("e1"), tokens("e1"))
    assert [e["episode"] for e in read_episodes(tmp_path)] == ["e0", "e1"]
    assert [t["episode"] for t in read_tokens(tmp_path)] == ["e0", "e1"]


def test_full_disk_leaves_whole_lines_and_the_episode_can_be_written_later(tmp_path, monkeypatch):
    def refuse(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with EpisodeWriter(tmp_path) as writer:
        writer.write(episode("e0"), tokens("e0"))
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "write", refuse)
            with pytest.raises(WriteError, match="disk is full.*episodes"):
                writer.write(episode("e1"), tokens("e1"))
        writer.write(episode("e1"), tokens("e1"))
    assert [e["episode"] for e in read_episodes(tmp_path)] == ["e0", "e1"]


def test_the_worst_plays_are_those_with_the_lowest_scores_in_their_order_and_aborted_ones_are_none():
    plays = [({"episode": str(n), "status": "played", "score": score}, n) for n, score in enumerate((0.5, 0.1, 0.9, 0.1, 0.3))]
    plays += [({"episode": word, "status": word}, number) for number, word in enumerate(("aborted", "success", "horizon"), 5)]
    assert [number for _, number in worst_plays(plays, 3)] == [1, 3, 7]
    assert [number for _, number in worst_plays(plays, 99)] == [0, 1, 2, 3, 4, 6, 7]
    assert worst_plays(plays, 0) == worst_plays([], 3) == []
