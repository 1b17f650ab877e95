"""Law 11: no prompt shows what only tools and rewards may read. Nonces are planted in the hidden fields of tasks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from marl_llm.checking.plays import Subject, again, heard_by, plain, silent
from marl_llm.checking.verdict import Finding, note, verdict, warned
from marl_llm.workflows import ScriptTurn, Task, ToolUse, Workflow
from marl_llm.workflows.nodes import REVEALED

NONCE = "zq{number}x{field}vk"
SHARE = 0.5  # prompts leak a hidden value if they show their own task's so much more often than another task's


def secrets(subject: Subject) -> Iterator[Finding]:
    """Whether a planted nonce of a hidden field, or a hidden value itself, reaches a prompt that was not meant to show it."""
    workflow = subject.environment.workflow
    if not workflow.hidden:
        yield note("secrets", 11, "the task has no hidden fields")
        return
    leak, planted, prompts = _nonces(subject)
    leak = leak or _told(subject)
    text = f"{planted} nonces in {', '.join(workflow.hidden)} reached none of {prompts} prompts, and no prompt tells a hidden value"
    copies = _copies(subject)
    if leak is None and copies:
        yield warned("secrets", 11, f"{copies} in every task: whoever copies it is right")
    else:
        yield verdict("secrets", 11, leak is None, text, str(leak))


def _planted(task: Task) -> Task:
    """The task with a nonce behind every text in its hidden fields."""

    def marked(value: Any, field: str) -> Any:
        if isinstance(value, str):
            return f"{value} {NONCE.format(number=task.number, field=field)}"
        if isinstance(value, Mapping):
            return {key: marked(item, field) for key, item in value.items()}
        return type(value)(marked(item, field) for item in value) if type(value) in (list, tuple) else value

    return dataclasses.replace(task, hidden={field: marked(value, field) for field, value in task.hidden.items()})


def _nonces(subject: Subject) -> tuple[str | None, int, int]:
    """(the first leak in words, nonces, prompts). The words are those of an ordinary play, so they hold no nonce."""
    tasks = subject.draw(subject.few)
    words = again(subject.play(tasks, subject.says))
    heard: list[tuple[ScriptTurn, str]] = []
    planted = 0
    for task in map(_planted, tasks):
        planted += plain(task.hidden).count(f"zq{task.number}x")
        try:
            subject.play([task], heard_by(words, heard))
        except Exception:  # a tool that cannot read what was planted; the prompts before it were noted
            continue
    revealing = {field for node in subject.environment.workflow.nodes.values() for field in getattr(node, "reveals", ())} | {REVEALED}
    for turn, prompt in heard:
        for mark in re.findall(r"zq\d+x(\w+)vk", prompt):
            shown = [field for field in revealing if f"x{mark}vk" in plain(turn.fields.get(field))]
            if not shown:
                where = [field for field in turn.role.reads if f"x{mark}vk" in plain(turn.fields.get(field))]
                leak = f"the prompt of {turn.role.name} shows the hidden field {mark!r} (through {where or 'no field'})"
                return leak, planted, len(heard)
    return None, planted, len(heard)


def _told(subject: Subject) -> str | None:
    """Whether prompts of players that say nothing show the hidden value of their own task, and not those of other tasks.

    A hidden value that is an open one of its task too, as the answer of "which is larger, {a} or {b}?" is, may be read.
    """
    tasks = subject.draw(subject.tasks)
    may_be_read = {task.number: set(_open_values(task.fields)) for task in tasks}
    values = {task.number: _values(task, subject.environment.workflow) for task in tasks}
    seen: dict[tuple[str, str], list[tuple[int, str]]] = {}
    try:
        episodes = subject.play(tasks, silent)
    except Exception:  # a parser that cannot read an empty text; the check of junk reports it
        return None
    for episode in episodes:
        if any(path.fields.get(REVEALED) for path in episode.trajectories):
            continue
        path = episode.trajectories[0].events if episode.trajectories else episode.remains
        for event in path:
            if isinstance(event, ToolUse):
                if getattr(subject.environment.workflow.nodes.get(event.node), "reveals", ()):
                    break
                continue
            for field, value in values[episode.task.number].items():
                if value not in may_be_read[episode.task.number]:
                    seen.setdefault((event.role, field), []).append((episode.task.number, event.prompt))
    for (role, field), prompts in seen.items():
        distinct = {value[field] for value in values.values()}
        if len(distinct) < 2:
            continue
        own = sum(_in(values[number][field], text) for number, text in prompts) / len(prompts)
        others = [_in(value, text) for number, text in prompts for value in sorted(distinct - {values[number][field]})]
        if own >= sum(others) / len(others) + SHARE:
            chance = sum(others) / len(others)
            return f"{own:.0%} of the prompts of {role} show the hidden {field!r} of their task ({chance:.0%} show that of another)"
    return None


def _copies(subject: Subject) -> str:
    """The open field that is a hidden one in all tasks, in words; empty if there is none, or the hidden one is the same everywhere."""
    tasks = subject.draw(subject.tasks)
    values = [_values(task, subject.environment.workflow) for task in tasks]
    for field in values[0]:
        hidden = [value.get(field) for value in values]
        for name in tasks[0].fields if len(set(hidden)) > 1 else ():
            if [str(task.fields.get(name)).strip() for task in tasks] == hidden:
                return f"the open field {name!r} is the hidden {field!r}"
    return ""


def _values(task: Task, workflow: Workflow) -> dict[str, str]:
    """Hidden fields that are a word or a number."""
    hidden = {field: task.hidden[field] for field in workflow.hidden}
    return {field: str(x).strip() for field, x in hidden.items() if isinstance(x, str | int | float) and str(x).strip()}


def _open_values(value: Any) -> Iterator[str]:
    """Everything that an open field holds, however deep it lies."""
    if isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _open_values(item)
    else:
        yield str(value).strip()


def _in(value: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None
