"""What the tests' own import hook checks: shapes, types, fields of dataclasses, closures with shapes."""

import ast
import sys
import types

import beartype.roar
import jaxtyping
import numpy as np
import pytest
import type_checks

from marl_llm.algorithms import group_relative
from marl_llm.workflows.roles import RoleTool, parameters

MODULE = '''
"""A module with one of each."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from nowhere import Unknown


def double(x: int) -> int:
    return x if x == 7 else 2 * x  # 7: to be replaced


def add(a: Float[np.ndarray, "S"], b: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
    return a if a[0] == 7 else a + b


def outer():
    def inner(a: Float[np.ndarray, "S R"]):
        return a

    def plain(x: int):
        return x

    return inner, plain


def seen_by_no_one(x: Unknown) -> int:
    return x


def later(x: Later) -> Later:
    return x


async def waits(x: int) -> int:
    return x


class Thing:
    def method(self, x: str) -> Thing:
        return self

    @staticmethod
    def alone(x: str):
        return x


@dataclasses.dataclass(frozen=True)
class Later:
    name: str
    parts: tuple[int, ...] = ()


@dataclasses.dataclass
class Rows:
    ids: Float[np.ndarray, "S R"]
    mask: Float[np.ndarray, "S R"]
'''


def run(source: str, name: str) -> dict:
    sys.modules[name] = types.ModuleType(name)  # where names within strings are looked up
    exec(compile(type_checks.add_checks(ast.parse(source)), f"{name}.py", "exec"), sys.modules[name].__dict__)
    return sys.modules[name].__dict__


@pytest.fixture(scope="module")
def module():
    yield run(MODULE, "checked_module")
    for name in ("checked_module", "wrong_module"):
        sys.modules.pop(name, None)


WRONG = (beartype.roar.BeartypeCallHintViolation, jaxtyping.TypeCheckError)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m["double"]("2"),
        lambda m: m["add"](np.ones(2), np.ones(3)),  # one letter, two sizes
        lambda m: m["add"](np.ones((2, 1)), np.ones((2, 1))),
        lambda m: m["outer"]()[0](np.ones(2)),  # a closure
        lambda m: m["later"]("a text"),  # a class that is defined below
        lambda m: m["Thing"]().method(3),
        lambda m: m["Thing"].alone(3),
        lambda m: m["Later"](3),
        lambda m: m["Later"]("a", ("b",)),
        lambda m: m["Rows"](np.ones((2, 3)), np.ones((2, 4))),
        lambda m: m["waits"]("a").send(None),
    ],
)
def test_a_wrong_argument_is_refused(module, call):
    with pytest.raises(WRONG):
        call(module)


def test_a_wrong_result_is_refused(module):
    source = MODULE.replace("return x if x == 7", 'return "7" if x == 7').replace("return a if a[0] == 7", "return a[:1] if a[0] == 7")
    wrong = run(source, "wrong_module")
    for found, refused in ((module, False), (wrong, True)):
        for call in (lambda m=found: m["double"](7), lambda m=found: m["add"](np.full(2, 7.0), np.ones(2))):
            if refused:
                with pytest.raises(WRONG):
                    call()
            else:
                call()


def test_right_arguments_pass(module):
    assert module["double"](2) == 4
    assert module["outer"]()[1]("a plain closure is not checked") == "a plain closure is not checked"
    assert module["seen_by_no_one"]("a type that only type checkers import is not checked") is not None
    later = module["later"](module["Later"]("a", (1, 2)))
    assert later.parts == (1, 2)
    with pytest.raises(StopIteration) as result:
        module["waits"](3).send(None)
    assert result.value.value == 3
    assert module["__doc__"] == "A module with one of each."


def test_the_library_is_checked():
    with pytest.raises(WRONG):
        group_relative(np.ones((2, 2, 2)), np.zeros(3, int))
    with pytest.raises(WRONG):
        parameters("no function", "a tool")
    with pytest.raises(WRONG):
        RoleTool(3, print, "prints", {})


def test_a_package_that_was_imported_already_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="marl_llm: imported before its checks"):
        type_checks.install(["marl_llm"], tmp_path)


def test_bytecode_is_kept_and_read_until_the_source_changes(tmp_path, monkeypatch):
    path, folder, built = tmp_path / "kept.py", tmp_path / "folder", []
    folder.mkdir()
    monkeypatch.setattr(type_checks, "add_checks", lambda tree: built.append(tree) or tree)

    def value(text):
        path.write_text(text)
        names = {}
        exec(type_checks._Loader("kept", str(path), folder).get_code("kept"), names)
        return names["x"]

    assert [value("x = 1"), value("x = 1"), value("x = 2"), value("x = 1")] == [1, 1, 2, 1]  # sources of one size, written at one moment
    assert len(built) == len(list(folder.iterdir())) == 2
