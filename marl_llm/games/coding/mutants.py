"""Mutants: programs that differ from a reference in one place, so that a good test fails on them. Parsed here, run in the sandbox only."""

from __future__ import annotations

import ast
import copy
import functools
from collections.abc import Callable

MAX_SOURCE = 20_000  # characters; a longer reference gets no mutants
_COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}


@functools.lru_cache(4096)
def mutants_of(source: str, count: int) -> tuple[str, ...]:
    """At most `count` mutants, spread over the program: an operator, a comparison or a number is another.

    None of a program that cannot be parsed (Python 2, too deep, too long).
    """
    if len(source) > MAX_SOURCE:
        return ()
    try:
        tree = ast.parse(source)
        places = [place for place, node in enumerate(ast.walk(tree)) if _change(node) is not None]
        step = max(1, len(places) // max(1, count))
        mutants = [_mutated(tree, place) for place in places[::step][:count]]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    return tuple(dict.fromkeys(code for code in mutants if code != source))


def _mutated(tree: ast.Module, place: int) -> str:
    other = copy.deepcopy(tree)
    node = next(node for at, node in enumerate(ast.walk(other)) if at == place)  # the same order as in the original
    change = _change(node)
    change()
    return ast.unparse(other)


def _change(node: ast.AST) -> Callable[[], None] | None:
    """What makes a mutant of this node, in place; None where nothing does."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return lambda: setattr(node, "op", _OPERATORS[type(node.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
        return lambda: node.ops.__setitem__(0, _COMPARISONS[type(node.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return lambda: setattr(node, "value", node.value + 1)
    return None
