"""What a request asks of its reply that no model can be made to do: checked after the reply, told beside it and counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.serving.json_schema import fits
from marl_llm.serving.tool_messages import OfferedTools


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is expected of a reply.

    Attributes:
      tools: which tools it may or must call.
    """

    tools: OfferedTools = OfferedTools()

    def unmet(self, text: str, calls: Sequence[Mapping[str, Any]]) -> list[str]:
        """The fields of the request that the reply does not keep to."""
        use, functions = self.tools, [call["function"] for call in calls]
        called = [function["name"] for function in functions]
        fields = {
            "tool_choice": use.choice == "required" and not called or use.choice == "named" and use.name not in called,
            "parallel_tool_calls": not use.parallel and len(called) > 1,
            "tools": not all(map(self._is_offered, functions)),
        }
        return [name for name, broken in fields.items() if broken]

    def _is_offered(self, function: Mapping[str, Any]) -> bool:
        """Whether a call is to a tool that is offered, and of a strict one fits its parameters."""
        if function["name"] not in [tool["function"]["name"] for tool in self.tools.offered]:
            return False
        schema = self.tools.schema_of(function["name"])
        return function["name"] not in self.tools.strict or schema is None or fits(json.loads(function["arguments"]), schema)
