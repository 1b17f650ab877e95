"""`config.coach` in a run: refused where it means nothing, asked and paid where it is; the budget, missing scores, the cost line."""

import pathlib

import pytest

from marl_llm.runs.base import base_config
from marl_llm.runs.coaching import CoachWatch, cost_line, make_coaching
from marl_llm.runs.command import ConfigError, TrainingError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.workdir import differences

OWN = pathlib.Path(__file__).parents[1] / "games" / "own" / "coached.py"


def config(**coach):
    found = base_config("t", f"{OWN}:echo", "mappa")
    found.coach.update(coach)
    return found


REFUSED = [
    (dict(url="http://127.0.0.1:1"), "coach.url would have no effect: config.coach.kind is not set"),
    (dict(kind="rubrik"), "did you mean 'rubric'"),
    (dict(kind="rubric", url="http://127.0.0.1:1"), "coach.url would have no effect: a coach of kind 'rubric' does not read it"),
    (dict(kind="served", url="http://127.0.0.1:1", served_as="a", key_env="HOME"), "coach.key_env would have no effect"),
    (dict(kind="endpoint", url="http://127.0.0.1:1"), "needs served_as"),
    (dict(kind="endpoint", url="http://127.0.0.1:1", served_as="a", cap_usd=1.0), "cap_usd and config.coach.prices belong together"),
    (dict(kind="endpoint", url="http://127.0.0.1:1", served_as="a", cap_usd=1.0, prices="1"), "is not 'PROMPT,REPLY'"),
    (dict(kind="endpoint", url="http://127.0.0.1:1", served_as="a", concurrency=0), "concurrency=0 must be above 0"),
    (dict(kind="rubric", backward="1,1"), "has no contribution, which a rubric needs"),
    (dict(kind="served", url="http://127.0.0.1:1", served_as="a", backward="1"), "backward='1' is not two numbers"),
    (dict(kind="served", url="http://127.0.0.1:1", served_as="a", backward="1,-1"), "beta=-1.0 must be 0 or more"),
    (dict(kind="served", url="http://127.0.0.1:1", served_as="a", backward="1,1", when="action"), "set config.coach.when=end"),
    (dict(kind="served", url="http://127.0.0.1:1", served_as="a", backward="1,1", study="noisy:1"), "neither a tree of samples nor"),
    (dict(kind="ensemble", members="rubric; rubric", backward="1,1"), "a coach of kind 'ensemble' cannot go backwards"),
    (dict(kind="rubric", corrections=0.3), "the guide of environment 'echo' has no better, which a rubric needs"),
    (dict(kind="served", url="http://127.0.0.1:1", served_as="a", corrections=0.0), "corrections=0.0 must be above 0"),
    (dict(kind="ensemble", members="rubric; rubric", corrections=0.3), "a coach of kind 'ensemble' says scores alone"),
    (dict(kind="served", url="http://a", served_as="a", study="permuted", corrections=0.3), "what another should have said"),
    (dict(kind="rubric", history=0), "history=0 must be above 0"),
    (dict(kind="rubric", when="later"), "when='later' is unknown"),
    (dict(kind="rubric", missing="mask"), "missing='mask', but returns='to_go' adds up"),
    (dict(kind="rubric", study="shout:1"), "study='shout:1' is none of shift"),
]


@pytest.mark.parametrize(("coach", "message"), REFUSED)
def test_a_coach_that_cannot_be_is_refused(coach, message):
    with pytest.raises(ConfigError, match=message):
        resolve(config(**coach))


def test_a_coach_is_refused_where_nobody_reads_its_scores_or_there_is_nothing_to_tell_it():
    team = config(kind="rubric")
    team.recipe.update(name="grpo")
    with pytest.raises(ConfigError, match="recipe grpo reads team rewards only"):
        resolve(team)
    other = base_config("t", "functions", "mappa")
    other.coach.kind = "rubric"
    with pytest.raises(ConfigError, match="has no guide"):
        resolve(other)
    strategic = base_config("t", "chain_maths", "mappa")
    strategic.coach.kind, strategic.game.phase_at = "rubric", 0.8
    with pytest.raises(ConfigError, match="config.coach.history is not set, and the rubric of this environment reads it"):
        resolve(strategic)
    strategic.coach.history = 5
    with resolve(strategic) as plan:
        assert plan.played.guide.strategic
        assert make_coaching(strategic, plan).history() == {}
    strategic.coach.update(backward="0.5,5", when="end")
    with resolve(strategic) as plan:
        options = make_coaching(strategic, plan).options
        assert options["result"] is plan.played.workflow.metrics["correct"]
        assert options["deadline_s"] == 5 * 300.0  # four actions, there and back
        assert "x 2, there and back, = " in cost_line(strategic, plan)
    compiled = base_config("t", "plan_path", "mappa")
    compiled.coach.kind = "rubric"
    with pytest.raises(ConfigError, match="a value-state game has rewards of its own"):
        resolve(compiled)


def test_what_a_run_may_ask_and_cost_is_said_before_it():
    with resolve(config(kind="rubric")) as plan:
        assert "at most 1 actions a play x 2 plays x 48 tasks x 100 steps = 9,600 calls" in plan.table(config(kind="rubric"))
        assert make_coaching(config(kind="rubric"), plan).options == {}
        priced = config(kind="endpoint", url="http://127.0.0.1:1", served_as="a", cap_usd=5.0, prices="1,2", max_tokens=100)
        assert "at most 100 written each" in cost_line(priced, plan)
        assert "USD without a second attempt; the cap is 5.00 USD" in cost_line(priced, plan)


def test_a_run_stops_when_its_coach_is_out_of_money_or_mostly_silent_and_notes_less():
    figures = dict(success=0.5, **{"coach/asked": 100.0, "coach/missing": 2.0, "coach/score": 5.0})
    said = []
    watch = CoachWatch(said.append)
    for step in range(3):
        watch.look(step, figures, lambda: "deadline: late")
    assert said == ["note step 0: 2.0% of the coach's scores are missing; deadline: late"]
    with pytest.raises(TrainingError, match="of the last 4 steps are missing; the first: deadline: late"):
        watch.look(3, figures | {"coach/missing": 90.0}, lambda: "deadline: late")
    with pytest.raises(TrainingError, match="budget is used up.*--resume with a larger --config.coach.cap_usd"):
        CoachWatch(said.append).look(3, figures | {"coach/failed_budget": 1.0})
    alarms = []
    watch = CoachWatch(alarms.append)
    for step in range(30):
        watch.look(step, dict(success=1 - step / 40, **{"coach/asked": 1.0, "coach/missing": 0.0, "coach/score": step / 10}))
    assert len(alarms) == 1
    assert "scores rose while success fell" in alarms[0]
    for step in range(30, 90):  # it ends, and begins again
        success = 0.5 if step < 60 else 1 - step / 90
        watch.look(step, dict(success=success, **{"coach/asked": 1.0, "coach/missing": 0.0, "coach/score": step / 10}))
    assert len(alarms) == 2


def test_a_coachs_learning_rate_is_a_fraction():
    assert config(kind="small", learn=1e-4).coach.learn == 1e-4


def test_a_section_that_is_newer_than_a_run_is_no_difference():
    assert differences({"a": 1}, {"a": 1, "coach": {"kind": None}}) == []
    assert differences({"a": 1}, {"a": 1, "coach": {"kind": "rubric"}}) != []
