"""Whether a JSON value fits a JSON schema: the keywords that programs use to describe arguments and answers.

A schema is somebody else's data: `check_schema` refuses keywords that are not checked here, and `fits` takes a bounded number of steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_STEPS = 100_000  # of one value: its parts times the schemas that each is held against
_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == math.floor(value),
}
_ANNOTATIONS = (
    "title", "description", "default", "examples", "format", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment",
)  # fmt: skip
_BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "exclusiveMinimum": lambda value, bound: value > bound,
    "exclusiveMaximum": lambda value, bound: value < bound,
}
_SIZES = {"minLength": str, "maxLength": str, "minItems": list, "maxItems": list, "minProperties": dict, "maxProperties": dict}
_LISTS, _NAMED = ("anyOf", "oneOf", "allOf", "prefixItems"), ("properties", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "not")
_OTHERS = ("type", "enum", "const", "required", "$ref", "uniqueItems")


def check_schema(schema: Any, where: str = "schema") -> None:
    """Raises `ValueError` with the place of what is no JSON schema, or of a keyword that is not checked here."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{where} must be a JSON schema, an object")
    for name, value in schema.items():
        place = f"{where}.{name:.40}"
        if name in _LISTS and isinstance(value, list) and value:
            for number, part in enumerate(value):
                check_schema(part, f"{place}[{number}]")
        elif name in _NAMED and isinstance(value, dict):
            for key, part in value.items():
                check_schema(part, f"{place}.{key:.40}")
        elif name in _ONE:
            check_schema(value, place)
        elif not _is_known(name, value):
            raise ValueError(f"{place} is not checked here, or its value is none of JSON schema's; leave it out")


def _is_known(name: str, value: Any) -> bool:
    """Whether a keyword that holds no schemas is checked here and has a value of its kind."""
    if name in _BOUNDS:
        return _TYPES["number"](value)
    if name in _SIZES:
        return _TYPES["integer"](value)
    if name == "type":
        return all(isinstance(type_name, str) and type_name in _TYPES for type_name in (value if isinstance(value, list) else [value]))
    if name == "required":
        return isinstance(value, list) and all(isinstance(key, str) for key in value)
    if name == "$ref":
        return isinstance(value, str) and value.startswith("#")
    return name in _ANNOTATIONS or name in _OTHERS and (name != "enum" or isinstance(value, list))


def fits(value: Any, schema: Any) -> bool:
    """Whether a value fits a schema. False for a schema that refers to nothing, is malformed, or takes more than `MAX_STEPS` steps."""
    try:
        return _Check(schema).fits(value, schema, 0)
    except (_Endless, TypeError, ValueError, KeyError, AttributeError, RecursionError):
        return False  # what a program sends as a schema may be anything


class _Endless(Exception):
    """A schema that takes too many steps."""


class _Check:
    """One value against one schema."""

    def __init__(self, root: Any):
        self._root, self._steps = root, 0

    def fits(self, value: Any, schema: Any, references: int) -> bool:
        """Whether a part fits its schema; `references` were followed for it without going deeper into the value."""
        self._steps += 1
        if self._steps > MAX_STEPS or references > 64:
            raise _Endless
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and not self.fits(value, self._target(schema["$ref"]), references + 1):
            return False
        types = schema.get("type", [])
        types = types if isinstance(types, list) else [types]
        if types and not any(_TYPES[kind](value) for kind in types):
            return False
        if "enum" in schema and not any(_same(value, choice) for choice in schema["enum"]):
            return False
        if "const" in schema and not _same(value, schema["const"]):
            return False
        return self._within_bounds(value, schema) and self._parts_fit(value, schema) and self._combines(value, schema, references)

    def _target(self, reference: str) -> Any:
        part = self._root
        for key in reference.removeprefix("#").split("/")[1:]:
            part = part[key.replace("~1", "/").replace("~0", "~")]
        return part

    def _within_bounds(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if _TYPES["number"](value) and not all(holds(value, schema[name]) for name, holds in _BOUNDS.items() if name in schema):
            return False
        for name, kind in _SIZES.items():
            if name in schema and isinstance(value, kind):
                if (len(value) < schema[name]) if name.startswith("min") else (len(value) > schema[name]):
                    return False
        if schema.get("uniqueItems") is True and isinstance(value, list):
            return len({json.dumps(item, sort_keys=True) for item in value}) == len(value)
        return True

    def _parts_fit(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Of an object or a list: each of its values."""
        if isinstance(value, dict):
            properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
            if not all(name in value for name in schema.get("required", ())):
                return False
            return all(self.fits(part, properties.get(name, more), 0) for name, part in value.items())
        if isinstance(value, list):
            first, rest = schema.get("prefixItems", []), schema.get("items", True)
            return all(self.fits(part, first[place] if place < len(first) else rest, 0) for place, part in enumerate(value))
        return True

    def _combines(self, value: Any, schema: Mapping[str, Any], references: int) -> bool:
        def count(name: str) -> int:
            return sum(self.fits(value, subschema, references + 1) for subschema in schema[name])

        if "allOf" in schema and count("allOf") < len(schema["allOf"]):
            return False
        if "anyOf" in schema and not count("anyOf"):
            return False
        if "oneOf" in schema and count("oneOf") != 1:
            return False
        return "not" not in schema or not self.fits(value, schema["not"], references + 1)


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_same, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_same(value[key], other[key]) for key in value)
    return value == other
