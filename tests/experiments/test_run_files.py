"""Which plays of a run are kept."""

import types

import pytest

from marl_llm.runs.run_files import AMONG, WORST, RunFiles


class Plays:
    """A batch whose plays have these scores."""

    def __init__(self, scores):
        self.scores = scores

    def episodes(self, count, when, advantages=None):
        plays = [{"episode": f"{when}-{n}", "status": "failed", "score": score} for n, score in enumerate(self.scores)]
        return [(play, None) for play in plays[:count]]


def kept(scores, count, when):
    files = RunFiles.__new__(RunFiles)
    files.hosted, found = False, []
    files.episodes = types.SimpleNamespace(write=lambda play, tokens: found.append(play))
    files.plays(Plays(scores), count, when, 7)
    assert all(play["step"] == 7 for play in found)
    return [int(play["episode"].split("-")[1]) for play in found]


@pytest.mark.parametrize("when", ["train", "after"])
def test_the_first_plays_are_kept_and_the_worst_behind_them(when):
    assert kept([1.0, 1.0, 1.0, 0.5, 1.0, 0.0, 0.2], 2, when) == [0, 1, 3, 5, 6]
    assert kept([0.0, 1.0], 2, when) == [0, 1]


def test_however_many_there_are_few_are_kept_and_few_are_looked_at():
    scores = [1.0] * (4 + AMONG) + [0.0] * 100
    assert kept(scores, 4, "train") == [0, 1, 2, 3, *range(4, 4 + WORST)]


def test_before_training_and_without_plays_to_keep_the_worst_are_left_out():
    assert kept([1.0, 0.0, 0.0], 1, "before") == [0]
    assert kept([1.0, 0.0, 0.0], 0, "train") == []
