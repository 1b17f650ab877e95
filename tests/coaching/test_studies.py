"""Ensembles, and coaches that are spoiled on purpose."""

import asyncio

import coach_lab as lab
import numpy as np
import pytest

from marl_llm.coaching import coached, rubric_coach
from marl_llm.coaching.studies import Ensemble, Failing, study
from marl_llm.workflows import WorkflowError
from marl_llm.workflows.samples import sample_table
from marl_llm.workflows.storage import from_json, read_trajectories, write_trajectories


def says(value, correct=None):
    return rubric_coach(lab.guide(rubric=lambda view: (value, correct, f"{value}")))


def view():
    seen = []

    class Keeper:
        async def score(self, view):
            seen.append(view)
            return await says(5).score(view)

    lab.play(coached(lab.team(), Keeper()))
    return seen[0]


VIEW = view()


def ask(coach, view=VIEW):
    return asyncio.run(coach.score(view))


def test_an_ensemble_agrees_by_median_mean_or_trimmed_mean_and_keeps_its_members():
    members = [says(2, True), says(9, True), says(4, False), says(5)]
    for how, value in (("median", 4.5), ("mean", 5), ("trimmed", 4.5)):
        said = ask(Ensemble(members, how)).outcome()
        assert (said.value, said.members, said.correct) == (value, (2, 9, 4, 5), True)
    assert ask(Ensemble([says(1, True), says(2, False)])).outcome().correct is None


def test_a_failed_member_fails_the_score_unless_a_quorum_answers():
    members = [says(2), Failing(None, 1.0), says(4)]
    assert ask(Ensemble(members)).failure.kind.value == "unavailable"
    assert ask(Ensemble(members, quorum=2)).outcome().members == (2, 4)
    assert ask(Ensemble([Failing(None, 1.0)] * 2 + [says(1)], quorum=2)).failure.kind.value == "unavailable"
    for build in (lambda: Ensemble(members, "mode"), lambda: Ensemble([says(1)]), lambda: Ensemble(members, "trimmed", 2),
                  lambda: Ensemble(members[:2], "trimmed"), lambda: Ensemble(members, quorum=4)):  # fmt: skip
        with pytest.raises(WorkflowError):
            build()


def test_what_each_study_does_to_a_score():
    tokens, likely = VIEW.call.tokens.size, float(np.mean(VIEW.call.log_probs))
    for text, value in (("", 5), ("shift:even:1.5", 6.5), ("shift:odd:1.5", 5), ("verbose:0.5", 5 + 0.5 * np.log(tokens)),
                        ("own:2", 5 + 2 * likely), ("constant:3", 3), ("permuted", 5), ("constant:3,shift:even:1", 4)):  # fmt: skip
        assert ask(study(says(5), text)).outcome().value == pytest.approx(value)
    noise = [ask(study(says(5), "noisy:2")).outcome().value for _ in range(2)]
    assert noise[0] == noise[1] != 5
    for text in ("shift:even", "shout:3", "noisy:loud", "constant:5,babbling:1"):
        with pytest.raises(WorkflowError, match="study|babbling"):
            study(says(5), text)


def test_babble_is_unreadable_and_a_failing_coach_aborts_its_share_of_the_plays():
    assert ask(study(says(5), "babbling:1")).failure.kind.value == "bad_reply"
    assert ask(study(says(5), "babbling:0")).outcome().value == 5
    workflow = coached(lab.team(), study(says(5), "failing:0.2"), lab.guide())
    rollout = lab.play(workflow, n=10, attempts=1)
    aborted = [episode for episode in rollout.episodes if episode.aborted]
    assert 2 <= len(aborted) <= 9
    assert all(failure.node == "scorer coach" for episode in aborted for failure in episode.failures)
    assert all(row.excluded == "aborted" for row in sample_table(rollout).samples if row.instance == aborted[0].task.number)


def test_aborted_takes_the_whole_play_where_mask_takes_the_action():
    """The same failures: who is left out differs, and nobody is paid for what was not said."""
    rows = {}
    for missing in ("abort", "mask"):
        workflow = coached(lab.team(), study(says(5), "failing:0.2"), lab.guide(), missing=missing)
        rows[missing] = sample_table(lab.play(workflow, n=10, attempts=1)).samples
    out = {missing: {(row.instance, row.call.id) for row in found if not row.where} for missing, found in rows.items()}
    hit = {instance for instance, _ in out["mask"]}
    assert {row.excluded for row in rows["abort"]} == {"", "aborted"}
    assert {row.excluded for row in rows["mask"]} == {"", "no score"}
    assert hit == {instance for instance, _ in out["abort"]}
    assert len(out["mask"]) < len(out["abort"])


def test_an_ensemble_and_a_study_pass_on_the_counts_of_the_coaches_behind_them():
    coach = study(Ensemble([says(2), study(says(9), "noisy:1"), Failing(says(4), 0.0)]), "shift:even:1")
    ask(coach)
    assert coach.metrics() == {"actions": 3.0, "unreadable": 0.0, "capped": 0.0, "cut": 0.0}


def test_with_missing_mask_only_the_action_is_left_out_and_the_record_says_why(tmp_path):
    workflow = coached(lab.team(), study(says(5), "failing:0.2"), lab.guide(), missing="mask")
    rollout = lab.play(workflow, n=10)
    table = sample_table(rollout)
    masked = [row for row in table.samples if row.excluded == "no score"]
    assert not any(episode.aborted for episode in rollout.episodes)
    assert 2 <= len(masked) <= 14
    assert all(row.components == {} and not row.where for row in masked)
    assert all(row.components == {"coach": 0.5} for row in table.samples if row.where)
    write_trajectories(tmp_path, rollout)
    kept = [from_json(line).trajectories[0].scores for line in read_trajectories(tmp_path)]
    assert kept == [episode.trajectories[0].scores for episode in rollout.episodes]
    assert all("a study lets the coach fail" in kept[row.instance][row.call.id]["coach"].missing for row in masked)
