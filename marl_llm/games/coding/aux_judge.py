"""What a helper's and a main agent's programs earn, as a tool: static levels from the syntax trees, cases in the sandbox.

The program is preamble, helper's part and main part, one after the other; the judge sends arguments and compares what comes back, so that
no expected value is in its process. Verdicts are kept by content. A failed sandbox is no reward but an aborted play.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marl_llm.games.coding.aux_reward import LEVELS, Levels, judged_levels, single_levels, static_levels
from marl_llm.games.coding.aux_source import WRAPPERS, Parts, read_parts
from marl_llm.games.coding.schemes import scheme_of
from marl_llm.hints import check_word
from marl_llm.tools.judge import ajudge_calls
from marl_llm.tools.results import ToolResult, success
from marl_llm.tools.verdicts import Verdicts, content_key
from marl_llm.workflows.errors import WorkflowError

EFFECTS = ("off", "measure", "require")
TIMEOUTS = 3  # cases that may run out of time; the next one is not reached
WRITES = (*(f"level_{name}" for name in LEVELS), "passed", "aux_matters", "scheme")
_RAISES = "def aux(*given, **words):\n    raise RuntimeError('aux is not there')\n"


class AuxJudge:
    """Judges programs of two parts, or of one.

    Args:
      timeout_s: of one case; `TIMEOUTS` of them end the program.
      wrapper: as `aux_source.read_parts` has it.
      effect: "off"; "measure" runs each passed program once more with an `aux` that raises, and says whether a case then fails; "require"
        pays the bonus for cooperation to those alone.

    Raises `WorkflowError` for an unknown word.
    """

    def __init__(self, timeout_s: float | int = 10.0, wrapper: str = "flow", effect: str = "off"):
        check_word("wrapper", wrapper, WRAPPERS, WorkflowError)
        check_word("effect", effect, EFFECTS, WorkflowError)
        self._timeout_s, self._wrapper, self.effect = timeout_s, wrapper, effect
        self._verdicts = Verdicts()

    def parts(self, aux_code: str, main_code: str, entry: str) -> Parts:
        """What the syntax trees show."""
        return read_parts(aux_code, main_code, entry, self._wrapper)

    async def states(self, code: str, entry: str, cases: Sequence[Any], loose: bool) -> ToolResult:
        """The judgement's cases, a tuple of `marl_llm.tools.judge.Case`."""

        async def judge() -> ToolResult:
            limits = dict(timeout_s=TIMEOUTS * self._timeout_s, case_timeout_s=self._timeout_s)
            judged = await ajudge_calls(code, entry, cases, tuples_as_lists=loose, **limits)
            return judged.map(lambda judgement: judgement.cases)

        return await self._verdicts.of(content_key(code, entry, tuple(cases), loose), judge)

    async def pair(self, aux_code: str, main_code: str, entry: str, preamble: str, cases: Sequence[Any], loose: bool) -> ToolResult:
        """`WRITES` of a helper's and a main part."""
        parts = self.parts(aux_code, main_code, entry)
        if static_levels(parts).reached < 2:
            return success(_written(static_levels(parts)), 0.0)
        ran = await self.states("\n".join((preamble, aux_code, main_code)), entry, cases, loose)
        if not ran.ok:
            return ran
        rate = _share(ran.value)
        matters = True
        if self.effect != "off" and rate == 1.0 and parts.calls:
            without = await self.states("\n".join((preamble, _RAISES, main_code)), entry, cases, loose)
            if not without.ok:
                return without
            matters = _share(without.value) < 1.0
        levels = judged_levels(parts, rate, matters or self.effect != "require")
        written = _written(levels, rate == 1.0, matters and parts.calls, scheme_of(main_code, entry))
        return ran.map(lambda _: written)

    async def single(self, main_code: str, entry: str, preamble: str, cases: Sequence[Any], loose: bool) -> ToolResult:
        """`WRITES` of an entry point alone."""
        parts = read_parts("", main_code, entry)
        if not parts.main or not parts.parses:
            return success(_written(single_levels(parts.main, parts.parses, 0.0)), 0.0)

        def written(cases: Sequence[Any]) -> dict[str, Any]:
            rate = _share(cases)
            return _written(single_levels(True, True, rate), rate == 1.0)

        return (await self.states("\n".join((preamble, main_code)), entry, cases, loose)).map(written)


def _share(cases: Sequence[Any]) -> float:
    return sum(case.state == "passed" for case in cases) / max(1, len(cases))


def _written(levels: Levels, passed: bool = False, matters: bool = False, scheme: str = "") -> dict[str, Any]:
    fields = {f"level_{name}": float(getattr(levels, name)) for name in LEVELS}
    return fields | {"passed": passed, "aux_matters": bool(matters), "scheme": scheme}
