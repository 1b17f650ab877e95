"""Demands of a request that no model can be forced to meet: checked after the reply, reported beside it and counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.serving.json_schema import check_schema, fits
from marl_llm.serving.tool_messages import OfferedTools
from marl_llm.untrusted import read_json

FORMATS = ("text", "json_object", "json_schema")


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is expected of a reply.

    Attributes:
      tools: which tools it may or must call.
      json: whether its text, where it calls no tool, must be a JSON object, or with a `schema` a JSON value that fits it.
    """

    tools: OfferedTools = OfferedTools()
    json: bool = False
    schema: Any = None

    def unmet(self, text: str, calls: Sequence[Mapping[str, Any]]) -> list[str]:
        """The fields of the request that the reply does not meet."""
        use, functions = self.tools, [call["function"] for call in calls]
        called = [function["name"] for function in functions]
        fields = {
            "tool_choice": use.choice == "required" and not called or use.choice == "named" and use.name not in called,
            "parallel_tool_calls": not use.parallel and len(called) > 1,
            "tools": not all(map(self._is_offered, functions)),
            "response_format": self.json and not called and not self._has_format(text),
        }
        return [name for name, broken in fields.items() if broken]

    def _has_format(self, text: str) -> bool:
        parsed = read_json(text)
        return parsed.ok and (isinstance(parsed.value, dict) if self.schema is None else fits(parsed.value, self.schema))

    def _is_offered(self, function: Mapping[str, Any]) -> bool:
        """Whether a call is to a tool that is offered, and of a strict one fits its parameters."""
        if function["name"] not in [tool["function"]["name"] for tool in self.tools.offered]:
            return False
        schema = self.tools.schema_of(function["name"])
        return function["name"] not in self.tools.strict or schema is None or fits(json.loads(function["arguments"]), schema)


def read_format(response_format: Any) -> tuple[bool, Any]:
    """The field `response_format` as `Expected.json` and `Expected.schema`. Raises `ValueError` with the field's place."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in FORMATS:
        raise ValueError(f"response_format.type must be one of {', '.join(FORMATS)}")
    if kind != "json_schema":
        return kind == "json_object", None
    named = response_format.get("json_schema")
    if not isinstance(named, dict) or "schema" not in named:
        raise ValueError("response_format.json_schema must be an object with a schema")
    check_schema(named["schema"], "response_format.json_schema.schema")
    return True, named["schema"]
