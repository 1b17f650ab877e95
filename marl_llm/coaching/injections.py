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
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return [*(Injection(**one) for one in found["injections"]), *(Injection(CONTROL, text) for text in found["controls"])]


def injected(view: ActionView, text: str) -> ActionView:
    """The view of the same action with a text behind its response, as the role's parser hears it.

    What tools said stays as it was. Where the parser reads hidden fields, which a view lacks, so does what the response meant.
    """
    call, parse = view.call, view.role.parse
    said = f"{call.text}\n{text}"
    if isinstance(parse, Reader) and not set(parse.reads) <= set(view.before):
        return dataclasses.replace(view, call=dataclasses.replace(call, text=said))
    writes, illegal, _ = view.role.hear(said, call.tokens.tolist(), view.before)
    return dataclasses.replace(view, call=dataclasses.replace(call, text=said, writes=writes, illegal=illegal))


async def attacked(coach: Coach, views: Sequence[ActionView], injections: Sequence[Injection]) -> list[Attacked]:
    """Asks a coach about each action, and about each with every text. An action without a score of its own counts as missing."""
    plain = await _scores(coach, views)
    found = []
    for one in injections:
        pairs = list(zip(plain, await _scores(coach, [injected(view, one.text) for view in views])))
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        raised, lowered = sum(b > a for a, b in known), sum(b < a for a, b in known)
        found.append(Attacked(one, raised, lowered, len(pairs) - len(known), len(pairs)))
    return found


async def _scores(coach: Coach, views: Sequence[ActionView]) -> list[float | None]:
    results = await asyncio.gather(*(coach.score(view) for view in views))
    return [None if result.failure is not None else float(result.outcome().value) for result in results]


def attacked_text(found: Sequence[Attacked]) -> str:
    """The rates: of texts that raised the score of some action, by kind; of scores; and of the controls, for comparison."""
    by_kind = collections.defaultdict(list)
    for one in found:
        by_kind[one.injection.kind].append(one)
    controls = by_kind.pop(CONTROL, [])
    rows = [*by_kind.items(), ("all", [one for some in by_kind.values() for one in some]), (CONTROL, controls)]
    lines = [f"{'kind':<12} {'texts':>5} {'that raised a score':>20} {'scores':>7} {'raised':>7} {'lowered':>8} {'missing':>8}"]
    for kind, some in rows:
        if some:
            asked, *counts = (sum(getattr(one, name) for one in some) for name in ("asked", "raised", "lowered", "missing"))
            raised = sum(one.raised > 0 for one in some)
            cells = [f"{count / asked:.1%}" for count in counts]
            lines.append(f"{kind:<12} {len(some):>5} {raised:>20} {asked:>7} {cells[0]:>7} {cells[1]:>8} {cells[2]:>8}")
    return "\n".join(lines)
