"""What a small coach reads of an action of the small pipeline: which programs ran, which files there were, and no judgement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from marl_llm.games.pipeline.rubric import Action, FileFacts, actions_of
from marl_llm.games.pipeline.runs import texts_of
from marl_llm.games.pipeline.team import NAMES, SUBMISSION
from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import ActionView


def pipeline_brief(facts: FileFacts) -> Callable[[ActionView], str]:
    """The brief of an environment of the pipeline: view -> a text of a few different words.

        engineer ok X_train.npy writes there y_train.npy writes there X_test.npy omits none plain then modeler ok
        then analyst error names X_test.npy finds X_test.npy none end none

    First the role, what became of its program, and of each file that it owes whether its program names it and what is there now: `none`,
    `there`, or `odd` where its content cannot be used. Then what it found, what became of the later programs, which files of earlier roles
    these met that were not there or odd, and which files their complaints name. Last the submission, where the play is over.
    """

    def brief(view: ActionView) -> str:
        call = view.call
        if not view.call.legal:
            return f"{call.role} illegal"
        given, over = view.task["given"], bool(view.outcome)
        actions = actions_of((*view.earlier, call, *(view.later if over else view.observations)), given)
        at = next(number for number, action in enumerate(actions) if action.call.id == call.id)
        words = [call.role, *_own(actions[at], given, facts), *_met(actions[at], given, facts)]
        for action in actions[at + 1 :]:
            words += ["then", action.call.role, action.state, *_met(action, given, facts)]
        if over:
            words += ["end", *_end(actions, given, facts)]
        return " ".join([*words, *["repeated"] * min(3, sum(earlier.text == call.text for earlier in view.own_earlier))])

    return brief


def _own(own: Action, given: Workspace, facts: FileFacts) -> list[str]:
    named, role, left = texts_of(own.call.writes["code"]), own.call.role, own.after.sizes()
    words = [own.state]
    for file in facts.owed[role]:
        words += [file, "writes" if file in named else "omits", _found(file, given, own.after, facts)]
    complete = own.state == "ok" and all(left.get(file) for file in facts.owed[role])
    return [*words, "rich" if complete and facts.well_made(role, given, own.after) else "plain"]


def _met(action: Action, given: Workspace, facts: FileFacts) -> list[str]:
    """Of a program that failed: the files of earlier roles that its complaint names, and those that were not as they should be."""
    if action.state == "ok":
        return []
    earlier = _files_before(action.call.role, facts)
    named = [file for file in earlier if file in action.use.writes["error"]]
    return [*(["names", *named] if named else []), *_amiss(earlier, given, action.before, facts)]


def _end(actions: Sequence[Action], given: Workspace, facts: FileFacts) -> list[str]:
    files = actions[-1].after
    if not files.sizes().get(SUBMISSION):
        return ["none"]
    invalid = bool(facts.submission_fault(given, files))
    return ["invalid", *_amiss(_files_before(actions[-1].call.role, facts), given, files, facts)] if invalid else ["valid"]


def _amiss(names: Sequence[str], given: Workspace, files: Workspace, facts: FileFacts) -> list[str]:
    states = [(file, _found(file, given, files, facts)) for file in names]
    words = [word for file, state in states if state != "there" for word in (file, state)]
    return ["finds", *words] if words else []


def _found(file: str, given: Workspace, files: Workspace, facts: FileFacts) -> str:
    if not files.sizes().get(file):
        return "none"
    return "odd" if file in facts.faults(given, files) else "there"


def _files_before(role: str, facts: FileFacts) -> list[str]:
    return [file for earlier_role in NAMES[: NAMES.index(role)] for file in facts.owed[earlier_role]]
