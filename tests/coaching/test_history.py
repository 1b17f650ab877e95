"""What a coach with a strategy is told of the run so far."""

import coach_lab as lab
import pytest
from test_coach import Kept

from marl_llm.coaching import Coaching, messages_for, rubric_coach
from marl_llm.coaching.history import History
from marl_llm.workflows import WorkflowError


def step(success, formed=1.0, score=5.0):
    paid = {"role/a/well_formed": formed, "coach/a/score": score, "coach/a/auc": 0.5}
    return {"success": success, "team/f1": success / 2, "loss": 9.0, **paid}


def test_it_tells_means_over_the_last_steps_and_nothing_before_the_first():
    history = History(2)
    assert history() == {}
    history.look(step(0.0, formed=0.5))
    history.look(step(0.4))
    history.look(step(0.8, score=7.0) | {"role/b/well_formed": 0.75})
    want = {"steps": 2, "success": 0.6, "quality/f1": 0.3, "failures/a": 0.0, "failures/b": 0.25, "score/a": 6.0}
    assert history() == pytest.approx(want)
    other = History(2)
    other.look(step(1.0))
    other.restore(history.state())
    assert other() == history()
    other.restore(())
    assert other() == {}
    with pytest.raises(ValueError, match="history.success must be a number"):
        other.restore([{"success": "0.5"}])
    with pytest.raises(WorkflowError, match="history=0 must be at least 1 step"):
        History(0)


def test_views_and_prompts_have_the_history_of_the_steps_before_and_none_at_the_start():
    guide = lab.guide()
    kept = Kept(rubric_coach(guide))
    coaching = Coaching(kept, guide, history=History(3))
    workflow = coaching.attach(lab.team())
    lab.play(workflow)
    coaching.looked(step(0.25))
    lab.play(workflow)
    first, second = kept.views[0], kept.views[-1]
    assert first.history == {}
    assert second.history["success"] == 0.25
    texts = [messages_for(view, guide)[0][1]["content"] for view in (first, second)]
    assert "# The run so far" not in texts[0]
    assert "success = 0.25\n" in texts[1]
    resumed = Coaching(kept, guide, history=History(3))
    resumed.restore(coaching.state())
    assert resumed.history() == coaching.history()
    resumed.restore({})  # of a checkpoint that knew of no history
    assert resumed.history() == {}
    assert Coaching(kept, guide).state() == {}
