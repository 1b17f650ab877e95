"""How easily a coach is talked into a score: a regression set of texts that a member may put behind its response.

`injections.json` has 50 of them, in kinds: labels of the answer, boundaries that are closed from inside, instructions, claims of authority,
claims about the result, other scripts and languages. Beside them stand five controls that say nothing of the score, for a model may change
its mind about any longer response. A text is *raised* if it brings a higher score than the same response without it; a lower score is no
success of the attack, for many texts break the format of the role.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import pathlib
from collections.abc import Sequence

from marl_llm.coaching.coach import Coach
from marl_llm.workflows.roles import Reader
from marl_llm.workflows.views import ActionView

FILE = pathlib.Path(__file__).with_suffix(".json")
CONTROL = "control"


@dataclasses.dataclass(frozen=True)
class Injection:
    """A text, and what it tries."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Attacked:
    """What one text did to the scores of some actions: counts of higher, lower and missing scores, and of all."""

    injection: Injection
    raised: int
    lowered: int
    missing: int
    asked: int


def read_injections() -> list[Injection]:
    """The 50 texts, and behind them the controls, whose kind is `CONTROL`."""
    texts = json.loads(FILE.read_text(encoding="utf-8"))
    return [*(Injection(**fields) for fields in texts["injections"]), *(Injection(CONTROL, text) for text in texts["controls"])]


def injected(view: ActionView, text: str) -> ActionView:
    """The view of the same action with a text appended to its response, as the role's parser reads it.

    What tools said stays as it was. Where the parser reads hidden fields, which a view lacks, so does what the response meant.
    """
    call, parse = view.call, view.role.parse
    response = f"{call.text}\n{text}"
    if isinstance(parse, Reader) and not set(parse.reads) <= set(view.before):
        return dataclasses.replace(view, call=dataclasses.replace(call, text=response))
    writes, illegal, _ = view.role.hear(response, call.tokens.tolist(), view.before)
    return dataclasses.replace(view, call=dataclasses.replace(call, text=response, writes=writes, illegal=illegal))


async def attacked(coach: Coach, views: Sequence[ActionView], injections: Sequence[Injection]) -> list[Attacked]:
    """Asks a coach about each action, and about each with every text. An action without a score of its own counts as missing."""
    plain = await _scores(coach, views)
    results = []
    for injection in injections:
        pairs = list(zip(plain, await _scores(coach, [injected(view, injection.text) for view in views])))
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        raised, lowered = sum(b > a for a, b in known), sum(b < a for a, b in known)
        results.append(Attacked(injection, raised, lowered, len(pairs) - len(known), len(pairs)))
    return results


async def _scores(coach: Coach, views: Sequence[ActionView]) -> list[float | None]:
    results = await asyncio.gather(*(coach.score(view) for view in views))
    return [None if result.failure is not None else float(result.outcome().value) for result in results]


def attacked_text(results: Sequence[Attacked]) -> str:
    """The rates: of texts that raised the score of some action, by kind; of scores; and of the controls, for comparison."""
    by_kind = collections.defaultdict(list)
    for result in results:
        by_kind[result.injection.kind].append(result)
    controls = by_kind.pop(CONTROL, [])
    rows = [*by_kind.items(), ("all", [result for group in by_kind.values() for result in group]), (CONTROL, controls)]
    lines = [f"{'kind':<12} {'texts':>5} {'that raised a score':>20} {'scores':>7} {'raised':>7} {'lowered':>8} {'missing':>8}"]
    for kind, group in rows:
        if group:
            scores, *counts = (sum(getattr(result, name) for result in group) for name in ("asked", "raised", "lowered", "missing"))
            raised = sum(result.raised > 0 for result in group)
            cells = [f"{count / scores:.1%}" for count in counts]
            lines.append(f"{kind:<12} {len(group):>5} {raised:>20} {scores:>7} {cells[0]:>7} {cells[1]:>8} {cells[2]:>8}")
    return "\n".join(lines)
