"""Who is to blame when a pipeline breaks, and a coach that scores each action by facts: no model, and nothing that programs print.

| what happened to the program | score |
|---|---|
| there was none, or the response breaks its format | 0 |
| it ended in an error of its own | 3 |
| it ran and left k of the n files that its role owes | 2 + 6·k/n; 9 with all and well made |
| it fell to a file that an earlier role owed, or left in a bad shape | as if it had run: 2 + 6 for the files it would have written |
| a later program, or the submission, failed because of it | 2 |

The blame: a file that is absent → the last action of the role that owes it; an upstream file of a bad shape, or with values that are not
finite → the action that wrote it last; anything else → the failing action itself. Where the blamed action could not do its own work because
of another one, that one is blamed. What an error's text says decides nothing by itself: the
file that it names must really be absent, the shapes must really differ. Each repetition of an identical program costs 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from marl_llm.games.pipeline.runs import texts_of
from marl_llm.games.pipeline.team import NAMES, SUBMISSION
from marl_llm.tools.sandbox import Workspace
from marl_llm.workflows import ActionView, RoleCall, ToolUse
from marl_llm.workflows.trajectory import Event

NOTHING, OWN_ERROR, BLAMED, EMPTY_HANDED, ALL, WELL_MADE = 0.0, 3.0, 2.0, 2.0, 8.0, 9.0
NO_FAULT_OF_FILES = ("no_program", "timeout", "memory", "disk", "signal", "lost")


@dataclasses.dataclass(frozen=True)
class Action:
    """One action of a play: what was said, what the program did, and the files before and after."""

    call: RoleCall
    use: ToolUse
    before: Workspace

    @property
    def after(self) -> Workspace:
        """The files that it left."""
        return self.use.writes["files"]

    @property
    def state(self) -> str:
        """One of `runs.STATES`."""
        return self.use.writes["state"]


@dataclasses.dataclass(frozen=True)
class FileFacts:
    """What an environment can tell of files, on the host, without running or unpickling anything.

    Attributes:
      owed: role -> files that it owes.
      faults: (the task's files, files now) -> file -> why its content cannot be used.
      submission_fault: (the task's files, files now) -> why the submission is invalid as far as the task's open files tell, or "".
      well_made: (role, the task's files, files now) -> whether what the role left is better than merely there.
    """

    owed: Mapping[str, tuple[str, ...]]
    faults: Callable[[Workspace, Workspace], Mapping[str, str]]
    submission_fault: Callable[[Workspace, Workspace], str]
    well_made: Callable[[str, Workspace, Workspace], bool]


def actions_of(events: Sequence[Event], given: Workspace) -> list[Action]:
    """The actions of a play, or of its beginning, in order."""
    actions, files, call = [], given, None
    for event in events:
        if isinstance(event, RoleCall):
            call = event
        elif call is not None and event.node == f"run_{call.role}":
            actions.append(Action(call, event, files))
            files, call = event.writes["files"], None
    return actions


def blame(actions: Sequence[Action], given: Workspace, facts: FileFacts, over: bool) -> dict[str, str]:
    """Id of an action -> why it is to blame for a failure, its own or a later one's.

    `over`: whether these are all actions of the play, so that its submission can be judged.
    """
    reasons: dict[str, str] = {}
    writer: dict[str, str] = {}  # file -> the action that wrote it last
    latest: dict[str, str] = {}  # role -> its latest action
    culprits: dict[str, str] = {}  # action that failed by another's fault -> that other one
    for action in actions:
        name = action.call.id
        if action.state != "ok":
            culprit, why = _responsible(action, given, facts, writer, latest)
            culprit = culprits.get(culprit, culprit)  # if that one failed by a third one's fault, the third one is to blame
            if culprit != name:
                culprits[name] = culprit
            reasons.setdefault(culprit, why)
        latest[action.call.role] = name
        before, after = action.before.files(), action.after.files()
        writer |= {file: name for file, content in after.items() if before.get(file) != content}
    if over and actions and actions[-1].state == "ok":
        end = actions[-1].after
        fault = facts.submission_fault(given, end)
        if fault and end.sizes().get(SUBMISSION):
            upstream = _faulty(given, end, facts, writer, actions[-1].call.role)
            file, why = upstream or (SUBMISSION, fault)
            reasons.setdefault(writer.get(file, actions[-1].call.id), f"{file}: {why}")
    return reasons


def _responsible(
    action: Action, given: Workspace, facts: FileFacts, writer: Mapping[str, str], latest: Mapping[str, str]
) -> tuple[str, str]:
    """The action that is responsible for a failure of this one, and why."""
    own = (action.call.id, f"{action.state}: {action.use.writes['error'][:200]}")
    if action.state in NO_FAULT_OF_FILES:
        return own
    role, present = action.call.role, action.before.sizes()
    for earlier in NAMES[: NAMES.index(role)]:
        for file in facts.owed[earlier]:
            if not present.get(file) and file in action.use.writes["error"]:
                return latest.get(earlier, action.call.id), f"{file} was not there when the {role} needed it"
    upstream = _faulty(given, action.before, facts, writer, role)
    return own if upstream is None else (writer[upstream[0]], f"{upstream[0]}: {upstream[1]}")


def _faulty(given: Workspace, files: Workspace, facts: FileFacts, writer: Mapping[str, str], role: str) -> tuple[str, str] | None:
    """The first file of an earlier role whose content cannot be used, and why."""
    earlier = [file for earlier_role in NAMES[: NAMES.index(role)] for file in facts.owed[earlier_role]]
    faults = facts.faults(given, files)
    return next(((file, faults[file]) for file in earlier if file in faults and file in writer), None)


def pipeline_rubric(facts: FileFacts) -> Callable[[ActionView], tuple[float, None, str]]:
    """The rubric of the module's text: view -> (score, None, reason). With `when="action"` it cannot see what an action leads to."""

    def rubric(view: ActionView) -> tuple[float, None, str]:
        if not view.call.legal:
            return NOTHING, None, f"broken format: {view.call.illegal}"
        given, call = view.task["given"], view.call
        over = bool(view.outcome)
        seen = (*view.earlier, call, *(view.later if over else view.observations))
        actions = actions_of(seen, given)
        own = next(action for action in actions if action.call.id == call.id)
        if own.state == "no_program":
            return NOTHING, None, "there is no program"
        guilty = blame(actions, given, facts, over)
        score, why = _score(own, given, facts, guilty)
        repeated = sum(earlier.text == call.text for earlier in view.own_earlier)
        return max(NOTHING, score - repeated), None, why + (f"; the same program for the {repeated + 1}th time" if repeated else "")

    return rubric


def _score(own: Action, given: Workspace, facts: FileFacts, guilty: Mapping[str, str]) -> tuple[float, str]:
    name, role = own.call.id, own.call.role
    owed, left = facts.owed[role], own.after.sizes()
    if own.state != "ok" and name in guilty:
        return OWN_ERROR, guilty[name]
    if own.state != "ok":
        named = texts_of(own.call.writes["code"])
        share = sum(file in named for file in owed) / len(owed)
        return EMPTY_HANDED + (ALL - EMPTY_HANDED) * share, "it fell to what an earlier role left"
    if name in guilty:
        return BLAMED, guilty[name]
    share = sum(bool(left.get(file)) for file in owed) / len(owed)
    if share < 1:
        return EMPTY_HANDED + (ALL - EMPTY_HANDED) * share, f"it left {share:.0%} of {', '.join(owed)}"
    if facts.well_made(role, given, own.after):
        return WELL_MADE, "it ran, left all its files, and made them well"
    return ALL, "it ran and left all its files"
