"""`check` warns where the recipe's return grows with the number of turns at the same score, and where it does not, it does not."""

import faulty_games
import pytest

from marl_llm import checking
from marl_llm.algorithms import make_recipe
from marl_llm.checking import check, prolonging, report_text
from marl_llm.cli import check as command


def found(environment, **recipe):
    given = {"recipe": make_recipe("grpo", rewards="mixed", **recipe)} if recipe else {}
    (one,) = check(environment, names=("turns",), tasks=2, plays=2, few=2, **given)
    return one


def test_pay_for_every_round_warns_with_returns_that_sum_it_and_says_by_how_much_and_what_to_change():
    one = found(faulty_games.rounds("every round"), returns="trajectory")
    assert (one.status, one.law) == ("warn", 11), one.evidence
    assert "2.00 for checker in plays of 2 turns and 4 responses, 1.00 in plays of 1 turns and 2 responses" in one.evidence
    assert "Set recipe.returns=outcome, or pay the result once" in one.evidence
    assert "look at the warning of turns" in report_text([one])


def test_a_game_whose_own_recipe_is_sound_is_told_of_the_sum_that_would_not_be():
    one = found(faulty_games.rounds("every round"))
    assert one.status == "pass"
    assert "(returns='outcome_plus_local') does not grow" in one.evidence
    assert "with returns='to_go' it would: 3.00 for checker" in one.evidence


@pytest.mark.parametrize("returns", ["to_go", "trajectory"])
def test_pay_for_what_a_round_improved_is_not_accused(returns):
    one = found(faulty_games.rounds("improved"), returns=returns)
    assert (one.status, "it would" in one.evidence) == ("pass", False)


def test_late_plays_that_score_less_are_accused_only_if_they_return_more():
    assert found(faulty_games.rounds("every round", last=0.6), returns="trajectory").status == "warn"
    assert found(faulty_games.rounds("result", last=0.3), returns="trajectory").status == "pass"


def test_late_plays_that_score_nothing_are_not_compared():
    one = found(faulty_games.rounds("every round", last=0.0), returns="trajectory")
    assert one.status == "pass"
    assert "or none scored" in one.evidence


@pytest.mark.parametrize(("fewest", "status"), [(4, "warn"), (5, "pass")])
def test_a_warning_rests_on_that_many_pairs_or_more(monkeypatch, fewest, status):
    """Two tasks, each played twice: every late player has four pairs."""
    monkeypatch.setattr(prolonging, "FEWEST", fewest)
    assert found(faulty_games.rounds("every round"), returns="trajectory").status == status


def test_longer_plays_that_score_more_may_return_more():
    assert found(faulty_games.rounds("result", last=1.5), returns="outcome").status == "pass"


def test_a_reward_that_itself_grows_with_the_turns_warns_with_every_return_and_no_other_return_is_proposed():
    one = found(faulty_games.rounds("lasting"), returns="outcome")
    assert one.status == "warn"
    assert "Pay the result once" in one.evidence
    assert "Set recipe.returns" not in one.evidence


def test_a_scripted_player_that_cannot_go_on_after_junk_is_no_fault():
    environment = faulty_games.rounds("every round")

    def script(turn):
        if turn.turn:
            raise KeyError("no second round")
        return environment.script(turn)

    one = found(faulty_games.dataclasses.replace(environment, script=script), returns="trajectory")
    assert one.status == "pass"


def test_each_role_holds_back_alone_and_all_of_them_together(monkeypatch):
    tried = []
    monkeypatch.setattr(prolonging, "_pairs", lambda subject, kinds: tried.extend(how for how, _ in kinds) or {})
    found(faulty_games.rounds("every round"), returns="trajectory")
    for who in ("speller", "checker", "everybody"):
        assert f"{who} says nothing{prolonging.LATE}" in tried


def test_a_workflow_without_a_loop_is_not_played():
    assert "no loop" in found(faulty_games.team(), returns="to_go").evidence


def test_a_config_is_checked_with_its_own_recipe(monkeypatch):
    seen = {}
    monkeypatch.setattr(checking, "check", lambda environment, **options: seen.update(options) or [])
    monkeypatch.setattr(checking, "first_prompts", lambda environment: {})
    monkeypatch.setattr(command, "cost_of", lambda environment, plan, config: {})
    command.examine("experiments/configs/notes.py", command.parser().parse_args(["experiments/configs/notes.py"]))
    assert (seen["recipe"].name, seen["recipe"].returns) == ("magrpo", "to_go")
