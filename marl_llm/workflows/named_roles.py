"""The roles that a function of a trajectory names in its own code: `path.by("solver")`, `call.role == "solver"`.

A misspelt role in a user's reward pays nobody and raises nothing, so the names are read from the function's bytecode when the workflow is
built. Names that are computed are not seen; `Trajectory.by` refuses those when they are asked for.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

CHAT_ROLES = frozenset({"system", "user", "assistant", "tool"})  # of messages, whose `role` is compared in the same way
_COMPARISONS = ("COMPARE_OP", "CONTAINS_OP")


def named_roles(function: Callable[..., Any]) -> list[str]:
    """Names that the function, what it encloses and what is defined within it compare with `.role` or pass to `.by`, each once."""
    names = [name for code in _codes(function, set()) for name in _names_in(code)]
    return [name for name in dict.fromkeys(names) if name not in CHAT_ROLES]


def _codes(function: Any, seen: set[int]) -> Iterator[types.CodeType]:
    """The code of a function, of functions within it, and of those that it holds: a wrapped one, a partial one, closures."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        for inner in (function.func, *function.args, *function.keywords.values()):
            yield from _codes(inner, seen)
    if isinstance(function, types.MethodType):
        yield from _codes(function.__func__, seen)
    if isinstance(function, types.FunctionType):
        yield from nested_codes(function.__code__)
        for cell in function.__closure__ or ():
            yield from _codes(_content(cell), seen)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def nested_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of all that is defined within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_codes(constant)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Constants right behind `.by`, and those on either side of a comparison with `.role`."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE", "NOP", "PUSH_NULL")]
    for place, step in enumerate(steps):
        if step.argval == "by" and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            for argument in steps[place + 1 :]:
                if argument.opname != "LOAD_CONST":
                    break
                yield from _texts(argument.argval)
        if step.argval == "role" and step.opname == "LOAD_ATTR" and place + 1 < len(steps):
            after, before = steps[place + 1], steps[max(0, place - 2)]
            if after.opname == "LOAD_CONST" and place + 2 < len(steps) and steps[place + 2].opname in _COMPARISONS:
                yield from _texts(after.argval)
            if after.opname in _COMPARISONS and before.opname == "LOAD_CONST":
                yield from _texts(before.argval)


def _texts(constant: Any) -> Iterator[str]:
    many = constant if isinstance(constant, tuple | frozenset) else (constant,)
    yield from (value for value in many if isinstance(value, str))
