"""Hidden values: what the author of a team may compare, and may not put into a prompt.

A hidden field of a task reaches an `async` team as a `Hidden`. It compares like its value, and what is made of it (an item, a method, a
sum) is hidden too. Text is where it ends: `str`, `format`, f-strings, `join` and `json` refuse it, and so does a role.

This is a guard against mistakes, not against an author who wants to cheat: letters can be compared one by one. `marl check` plants marks
in hidden fields and looks for them in the prompts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from marl_llm.workflows.errors import WorkflowError


class HiddenValueError(WorkflowError):
    """A hidden value was about to become text or a plain number; the message names the field and says what to do."""


class Hidden:
    """See the module's text.

    Args:
      value: any value.
      name: the task's field that it is, or was made of.
    """

    __slots__ = ("_name", "_value")

    def __init__(self, value: Any, name: str):
        self._value, self._name = value, name

    def _refuse(self, *_: Any) -> NoReturn:
        raise HiddenValueError(
            f"the hidden field {self._name!r} would become text that a role may read: compare it, or pass it to t.compute or t.tool"
        )

    __str__ = __repr__ = __format__ = __bytes__ = __float__ = __int__ = __index__ = __complex__ = _refuse
    __reduce_ex__ = __reduce__ = _refuse

    def __getattr__(self, name: str) -> Hidden:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hidden(getattr(self._value, name), self._name)

    def __call__(self, *arguments: Any, **named: Any) -> Hidden:
        opened = {key: open_value(value) for key, value in named.items()}
        return Hidden(self._value(*map(open_value, arguments), **opened), self._name)

    def __getitem__(self, key: Any) -> Hidden:
        return Hidden(self._value[open_value(key)], self._name)

    def __iter__(self) -> Iterator[Hidden]:
        return (Hidden(item, self._name) for item in self._value)

    def __len__(self) -> int:
        return len(self._value)

    def __bool__(self) -> bool:
        return bool(self._value)

    def __contains__(self, item: Any) -> bool:
        return open_value(item) in self._value

    def __hash__(self) -> int:
        return hash(self._value)


def _compares(compare: Callable[[Any, Any], Any]) -> Callable[[Hidden, Any], bool]:
    return lambda self, other: bool(compare(self._value, open_value(other)))


def _computes(compute: Callable[[Any, Any], Any]) -> Callable[[Hidden, Any], Hidden]:
    return lambda self, other: Hidden(compute(self._value, open_value(other)), self._name)


def _computes_from_right(compute: Callable[[Any, Any], Any]) -> Callable[[Hidden, Any], Hidden]:
    return lambda self, other: Hidden(compute(open_value(other), self._value), self._name)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Hidden, f"__{_name}__", _compares(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Hidden, f"__{_name}__", _computes(getattr(operator, _name)))
    setattr(Hidden, f"__r{_name}__", _computes_from_right(getattr(operator, _name)))


def open_value(value: Any) -> Any:
    """The value with everything hidden in it opened, within lists, tuples and dictionaries too."""
    if isinstance(value, Hidden):
        return value._value
    if isinstance(value, dict):
        return {open_value(key): open_value(item) for key, item in value.items()}
    return type(value)(map(open_value, value)) if type(value) in (list, tuple, set) else value


def hidden_name(value: Any) -> str | None:
    """The hidden field that a value holds something of; None: it holds nothing hidden."""
    if isinstance(value, Hidden):
        return value._name
    inside = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    names = map(hidden_name, inside) if isinstance(value, dict | list | tuple | set) else ()
    return next((name for name in names if name is not None), None)
