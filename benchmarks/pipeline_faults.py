"""Twelve faults for the small pipeline, each injected alone into perfect plays: does a coach blame the action that is responsible?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from marl_llm.games.pipeline.statements import perfect_player
from marl_llm.games.pipeline.team import ANALYST, ENGINEER, MODELER
from marl_llm.workflows import ScriptTurn


@dataclasses.dataclass(frozen=True)
class InjectedFault:
    """One wrong action.

    Attributes:
      name: what is wrong.
      role: who does it, and is responsible for the end.
      says: its statements; the other roles play perfectly.
      kind: of tasks that it shows on; None: on all.
      modeler: statements of the modeler where the fault needs another right model.
    """

    name: str
    role: str
    says: str
    kind: str | None = None
    modeler: str | None = None


FAULTS = (
    InjectedFault("forgets X_train", ENGINEER, "load fill_mean scale save_ytrain save_xtest"),
    InjectedFault("forgets y_train", ENGINEER, "load fill_mean scale save_xtrain save_xtest"),
    InjectedFault("forgets X_test", ENGINEER, "load fill_mean scale save_xtrain save_ytrain"),
    InjectedFault("leaves gaps", ENGINEER, "load raw save_xtrain save_ytrain save_xtest"),
    InjectedFault("drops rows to predict", ENGINEER, "load drop_rows scale save_xtrain save_ytrain save_xtest"),
    InjectedFault("drops rows of X alone", ENGINEER, "load save_ytrain drop_rows scale save_xtrain save_xtest"),
    InjectedFault("forgets the model", MODELER, "load fit_linear"),
    InjectedFault("classifies numbers", MODELER, "load fit_logistic save_model", "regression"),
    InjectedFault("fits what it did not load", MODELER, "fit_linear load save_model"),
    InjectedFault("forgets the submission", ANALYST, "load_model load_xtest predict ids"),
    InjectedFault(
        "asks a linear model for probabilities", ANALYST, "load_model load_xtest predict_probability ids save", None,
        "load fit_linear save_model",
    ),
    InjectedFault("submits scores for probabilities", ANALYST, "load_model load_xtest predict ids save", "classification"),
)  # fmt: skip


def faulty_player(fault: InjectedFault) -> Callable[[ScriptTurn], str]:
    """The perfect team with this one fault."""

    def play(turn: ScriptTurn) -> str:
        if turn.role.name == fault.role:
            return fault.says
        return fault.modeler if turn.role.name == MODELER and fault.modeler else perfect_player(turn)

    return play
