"""Two agents who write two texts on one post, paid one joint reward: MAGRPO's writing team and its baselines behind one switch.

`single`: one agent writes both, with a marker between. `parallel`: both at once. `sequential`: the second reads the first's text.
`discussion`: both at once, and in a second turn each reads both texts.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.games.writing.graded import Graded
from marl_llm.games.writing.reward import COMPONENTS, Constants
from marl_llm.hints import check_word
from marl_llm.workflows import FormatError, Role, Task, Workflow, compute, plain, repeat, sequence, together
from marl_llm.workflows.efficiency import EFFICIENCY
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.rewards import per_turn
from marl_llm.workflows.rows import Loaded, RowRefused, read_tasks
from marl_llm.workflows.trajectory import Trajectory

STYLES = ("single", "parallel", "sequential", "discussion")
MARKER = "|||"
FIELDS = {"tldr": "prompt", "arxiv": "abstract_text"}  # of files
TASKS = (*FIELDS, "descriptions")
_WORDS = {
    "tldr": (
        "Summarise a post for a reader in a hurry.", "Post",
        ("Write two or three sentences with the core of the post.", "Another writer gives the details; leave them out."),
        ("Write a detailed summary of the post.", "Write more, and with more different words, than a summary of two sentences has.",
         "Connect your sentences with transition words such as however, therefore or for example."),
    ),
    "arxiv": (
        "Write a part of an introduction to a paper from its abstract.", "Abstract",
        ("Write the background and the motivation.", "Another writer presents the method and its implications; leave them out."),
        ("Write about the method and its implications.", "Another writer gives background and motivation; leave them out."),
    ),
    "descriptions": (
        "Explain a part of Python's library in your own words.", "Description",
        ("Write one short sentence of 6 to 18 words that says what it is for.", "Write the sentence alone, without a title."),
        ("Write two sentences that say what it does in detail.", "Write the sentences alone, without a title."),
    ),
}  # fmt: skip
BOTH = f"Write both parts, first the one and then the other, with a line {MARKER} between them."


def writing_roles(task: str, style: str, max_tokens: int = 256, max_prompt: int = 2048) -> dict[str, Role]:
    """The agents of a task, in the paper's structure and own words; 256 new tokens are the release's."""
    opening, label, *parts = _WORDS[task]
    head = f"{opening}\n\n{label}:\n{{post}}\n\nInstructions:\n"

    def listed(lines):
        return "\n".join(f"- {line}" for line in lines)

    sizes = dict(max_prompt=max_prompt, trim="post")
    if style == "single":
        prompt = head + listed((*parts[0], *parts[1], BOTH))
        return {"writer": Role("writer", prompt, two_parts(MARKER), {"first": "", "second": ""}, max_tokens=2 * max_tokens, **sizes)}
    return {
        name: Role(name, f"{head}{listed(lines)}{{seen_{name}}}", plain(name), {name: ""}, max_tokens=max_tokens, **sizes)
        for name, lines in zip(("first", "second"), parts)
    }


def two_parts(marker: str) -> Callable[[str], dict[str, Any]]:
    """A response in two parts. Raises `FormatError` unless the marker stands once, with words on both sides."""

    def parse(text: str) -> dict[str, Any]:
        parts = [part.strip() for part in text.split(marker)]
        if len(parts) != 2 or not all(parts):
            raise FormatError(f"two parts with {marker} between them are expected")
        return dict(zip(("first", "second"), parts))

    return parse


def _seen(title: str, text: str) -> str:
    return f"\n\n{title}:\n{text or '(nothing)'}" if title else f"{text or 'none'}"


@dataclasses.dataclass(frozen=True)
class Shown:
    """How a text of this agent and of the other one is shown in a prompt."""

    own: Callable[[str], str] = lambda text: _seen("Your last text", text)
    other: Callable[[str], str] = lambda text: _seen("The other writer's text", text)


def writing_team(constants: Constants | Graded, roles: Mapping[str, Role], style: str = "parallel", shown: Shown = Shown()) -> Workflow:
    """The workflow.

    Args:
      constants: of the reward.
      roles: "first" and "second", or "writer" alone for `single`.
      style: one of `STYLES`.

    Raises `WorkflowError` for an unknown style.
    """
    check_word("style", style, STYLES, WorkflowError)

    def score(post: str, first: str, second: str) -> dict[str, Any]:
        result = constants.score(first, second, post)
        return dict(result.components) | {"level": result.level, "grounding": result.grounding}

    components = tuple(constants.most)
    judged = compute(score, (*components, "level", "grounding"), name="score")
    if style == "single":
        body = sequence(roles["writer"], judged)
    elif style == "parallel":
        body = sequence(together(roles["first"], roles["second"]), judged)
    elif style == "sequential":
        tell = compute(lambda first: shown.other(first), "seen_second", name="show")
        body = sequence(roles["first"], tell, roles["second"], judged)
    else:

        def exchange(first: str, second: str) -> dict[str, str]:
            return {"seen_first": shown.own(first) + shown.other(second), "seen_second": shown.own(second) + shown.other(first)}

        seen = ("seen_first", "seen_second")
        body = repeat(together(roles["first"], roles["second"]), judged, compute(exchange, seen), at_most=2, name="turns")
    start = {"first": "", "second": "", "seen_first": "", "seen_second": ""}
    rewards = (per_turn(components),)
    return Workflow(f"writing_{style}", body, ("post",), start=start, rewards=rewards, metrics=writing_metrics(constants))


def writing_metrics(constants: Constants | Graded) -> dict[str, Callable[[Trajectory], float]]:
    """Figures of a play's last texts, in [0, 1]: `return`, the headline, and tokens. Of MAGRPO's reward (Table 1) structure (levels 1 to
    3), `complete` (level 4 was reached), consistency and coherence (0 unless it was), and grounding; of the graded one its components."""
    most = constants.most

    def points(path, names):
        return sum(path.fields[name] for name in names) / sum(most[name] for name in names)

    if isinstance(constants, Graded):
        each = {f"{name}_share": lambda path, name=name: points(path, (name,)) for name in most}
        return {"return": lambda path: points(path, tuple(most))} | each | EFFICIENCY
    metrics: dict[str, Callable[[Trajectory], float]] = {
        "return": lambda path: points(path, COMPONENTS),
        "structure": lambda path: points(path, COMPONENTS[:3]),
        "complete": lambda path: float(path.fields["level"] == 4),
        "consistency": lambda path: points(path, ("consistency",)),
        "coherence": lambda path: points(path, ("coherence",)),
        "grounding": lambda path: path.fields["grounding"],
    }
    return metrics | EFFICIENCY


def load_texts(path: str | pathlib.Path, split: str, field: str, limit: int | None = None) -> Loaded:
    """Tasks of a parquet, jsonl or json file, one per row. Raises `DataError` naming the row that has no text in `field`."""

    def read(number: int, row: Mapping[str, Any]) -> Task:
        text = row.get(field)
        if not isinstance(text, str) or not text.strip():
            raise RowRefused("no text", f"a text is expected in {field!r}; the row has {', '.join(map(str, row)) or 'nothing'}")
        return Task(number, {"post": text.strip()}, {}, split)

    return read_tasks(path, read, limit=limit)
