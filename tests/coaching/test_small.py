"""What a small coach reads and says, how well it agrees with a rubric, and when it may train nobody."""

import json

import coach_lab as lab
import numpy as np
import pytest
from test_coach import Kept

from marl_llm.coaching import coached, messages_for, read_answer, rubric_coach, small
from marl_llm.coaching.agreement import BANDS, agreement, agreement_text, weighted_kappa
from marl_llm.workflows import WorkflowError


def test_kappa_is_one_minus_disagreement_over_that_of_independent_pairs():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 11, 50).astype(float), rng.integers(0, 11, 50).astype(float)
    chance = np.mean([(a - b) ** 2 for a in one for b in other])
    assert weighted_kappa(one, other) == pytest.approx(1 - np.mean((one - other) ** 2) / chance)
    assert weighted_kappa(one, one) == 1.0
    assert weighted_kappa(one, np.full(50, 5.0)) == pytest.approx(0.0, abs=1e-9)  # a constant coach agrees by chance alone
    assert weighted_kappa(np.full(3, 5.0), np.full(3, 5.0)) == 1.0


def test_agreement_is_told_for_all_and_by_role_with_missing_scores_counted_apart():
    said, rubric, roles = [8.0, 2.0, None, 7.5, 9.0], [8.0, 2.0, 9.0, 8.0, 3.0], ["a", "a", "b", "b", "b"]
    found = agreement(said, rubric, roles)
    assert found["all"]["mae"] == pytest.approx((0 + 0 + 0.5 + 6) / 4)
    assert (found["all"]["actions"], found["all"]["missing"], found["b"]["missing"]) == (5, 1, 1)
    same = {"actions": 2, "missing": 0, "exact": 1.0, "mae": 0.0, "bias": 0.0, "spearman": pytest.approx(1.0), "kappa": 1.0}
    assert found["a"] == same
    assert found["b"]["bias"] == pytest.approx((-0.5 + 6) / 2)
    table = np.asarray(found["bands"])
    assert table.sum() == 4
    assert (table[4, 4], table[1, 1], table[4, 3], table[1, 4]) == (1, 1, 1, 1)  # rows: the rubric's band
    assert table.shape == (len(BANDS), len(BANDS))
    nobody = agreement([None], [5.0], ["a"])
    assert nobody["all"] == {"actions": 1, "missing": 1}
    assert "–" in agreement_text(nobody)


def test_every_score_is_said_to_the_next_quarter_in_the_form_that_every_coach_answers():
    renderer = small.renderer_for(["a x", "b y"])
    for value in np.linspace(0, 10, 81):
        text = small.answer_of(value)
        assert abs(read_answer(text).value - value) <= small.STEP / 2
        ids = [*renderer.tokenizer.encode(text), *renderer.stop_ids]
        assert len(ids) == small.MAX_REPLY
        assert renderer.tokenizer.decode(ids[:-1]) == text
    with pytest.raises(WorkflowError, match="different words: a small coach reads 4096"):
        small.renderer_for([" ".join(map(str, range(5000)))])


@pytest.mark.parametrize("when", ["action", "end"])
def test_it_learns_from_the_views_that_a_coach_gets(when):
    guide = lab.guide()
    kept = Kept(rubric_coach(guide))
    rollout = lab.play(coached(lab.team(), kept, guide, when=when), n=2)
    views = small.views_of(rollout, when)
    want = {view.call.id: messages_for(view, guide) for view in kept.views if view.task["question"] == "q0"}
    assert {view.call.id: messages_for(view, guide) for view in views[: len(views) // 2]} == want
    assert [small.rubric_value(view, guide) for view in views[:3]] == [8, 8, 6.5]
    assert not any(view.truth for view in views)


def test_a_brief_that_is_none_is_named():
    view = small.views_of(lab.play(lab.team()), "end")[0]
    for brief, message in ((None, "has no brief"), (lambda view: "", "must be a text"), (lambda view: 1 / 0, "raised ZeroDivisionError")):
        with pytest.raises(WorkflowError, match=message):
            small.brief_of(view, lab.guide(brief=brief))
    assert small.brief_messages(view, lab.guide(brief=lambda view: " a\n b "))[0][0]["content"] == "a b"


def test_a_small_coach_that_is_none_or_of_another_rubric_or_agrees_too_little_may_train_nobody(tmp_path):
    guide = lab.guide(version="v1")
    good = {"all": {"mae": 0.7, "kappa": 0.8, "actions": 100, "missing": 1}}

    def read(**changes):
        record = {"guide": "v1", "max_prompt": 8, "unseen": {"start": good, "end": good}, **changes}
        (tmp_path / small.RECORD).write_text(json.dumps(record))
        return small.read_record(tmp_path, guide)

    assert read()["max_prompt"] == 8
    refused = [
        (dict(guide="v0"), "learned 'v0'; the environment's is 'v1'"),
        (dict(unseen={}), "measured on no team that it never saw"),
        (dict(max_prompt="long"), "is no small coach"),
        (dict(max_prompt=float("inf")), "is no small coach .*a number that is not finite"),
        (dict(unseen={"start": {"all": {**good["all"], "mae": None}}}), "is no small coach .*TypeError"),
        (dict(unseen={"start": {"all": {**good["all"], "mae": 9, "kappa": "high"}}}), "is no small coach .*ValueError"),
        (dict(unseen={"start": good, "end": {"all": {**good["all"], "mae": 0.71}}}), "on end: mean absolute error 0.71"),
        (dict(unseen={"start": {"all": {**good["all"], "kappa": 0.79}}}), "on start: .* kappa 0.79"),
        (dict(unseen={"start": {"all": {**good["all"], "missing": 2}}}), "2.0% of its replies missing"),
        (dict(unseen={"start": {"all": {"actions": 1, "missing": 1}}}), "agrees too little"),
    ]
    for changes, message in refused:
        with pytest.raises(WorkflowError, match=message):
            read(**changes)
    with pytest.raises(WorkflowError, match="is no small coach .*marl_llm coach"):
        small.read_record(tmp_path / "nowhere", guide)
