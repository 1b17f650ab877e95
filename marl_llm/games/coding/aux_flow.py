"""Where the value of `aux(...)` goes within a function, read from its syntax tree: does it reach what the function returns?

An abstract interpreter over one function: it follows which names may hold a value that came from `aux`, through assignments, branches,
loops, comprehensions and changed containers, and leaves out what cannot be reached (behind a return, under `if False`). A value reaches
the result if a returned (or yielded) expression holds it, or if it decided which return is taken. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

VISITS = 6_000  # nodes visited; nested loops are read twice each, so that a hostile program could ask for any number


class TooComplex(ValueError):
    """The function is larger than any answer needs to be."""


class Flow(NamedTuple):
    """What was found: whether a call of the name is in code that can be reached, and whether its value reaches the result."""

    called: bool
    returned: bool


class _State(NamedTuple):
    """Names that may hold the value, and whether the place can be reached."""

    names: frozenset[str]
    open: bool = True


def flow_of(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> Flow:
    """How a function uses `name`. Raises `TooComplex`."""
    reader = _Reader(name)
    reader.block(function.body, _State(frozenset()), False)
    return Flow(reader.called, reader.returned)


def constant(test: ast.expr) -> bool | None:
    """The truth of a condition that is one whatever the arguments are; None of any other."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = constant(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = [constant(part) for part in test.values]
        if isinstance(test.op, ast.And):
            return False if False in parts else True if all(parts) else None
        return True if True in parts else None if None in parts else False
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Constant) and len(test.ops) == 1:
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and isinstance(test.ops[0], ast.Eq | ast.NotEq):
            same = type(test.left.value) is type(right.value) and test.left.value == right.value
            return same == isinstance(test.ops[0], ast.Eq)
    return None


class _Reader:
    def __init__(self, name: str):
        self.name, self.called, self.returned, self._left = name, False, False, VISITS
        self._breaks: list[list[frozenset[str]]] = []

    def _live(self, node: ast.AST) -> Iterator[ast.AST]:
        """A node and what is in it, without the branch of a conditional expression that is never taken."""
        waiting = [node]
        while waiting:
            part = waiting.pop()
            self._left -= 1
            if self._left < 0:
                raise TooComplex(f"more than {VISITS} parts to follow")
            yield part
            if isinstance(part, ast.IfExp) and constant(part.test) is not None:
                waiting.append(part.body if constant(part.test) else part.orelse)
            elif isinstance(part, ast.BoolOp) and constant(part.values[0]) is not None:
                ends = constant(part.values[0]) == isinstance(part.op, ast.Or)
                waiting += part.values[:1] if ends else part.values[1:]
            else:
                waiting += ast.iter_child_nodes(part)

    def holds(self, node: ast.AST | None, names: frozenset[str]) -> bool:
        """Whether an expression may hold the value: the name is called or handed on in it, or a name that holds the value is."""
        held = False
        for part in self._live(node) if node is not None else ():
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
                self.called |= part.id == self.name  # called, or handed on as in map(aux, xs)
                held |= part.id in names or part.id == self.name
        return held

    def block(self, body: list[ast.stmt], state: _State, control: bool) -> _State:
        """What a list of statements makes of a state; `control`: whether the value decides that it is run."""
        for statement in body:
            if not state.open:
                break
            state = self.statement(statement, state, control)
        return state

    def statement(self, node: ast.stmt, state: _State, control: bool) -> _State:
        """What one statement makes of a state."""
        names = state.names
        if isinstance(node, ast.Return | ast.Raise):
            held = self.holds(node.value if isinstance(node, ast.Return) else node.exc, names)
            self.returned |= held or control
            return _State(names, False)
        if isinstance(node, ast.Break | ast.Continue):
            if self._breaks:
                self._breaks[-1].append(names)
            return _State(names, False)
        if isinstance(node, ast.If):
            return self._branches(node, state, control)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return self._loop(node, state, control)
        if isinstance(node, ast.Try) or type(node).__name__ == "TryStar":
            return self._try(node, state, control)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                names = self._assign([item.optional_vars] if item.optional_vars else [], self.holds(item.context_expr, names), names)
            return self.block(node.body, _State(names), control)
        if isinstance(node, ast.Match):
            held = self.holds(node.subject, names)
            ends = [self.block(case.body, _State(names | _bound(case.pattern) if held else names), control or held) for case in node.cases]
            return _joined([*ends, state])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            held = self.holds(node, names)  # a function within holds the value if it calls for it
            return _State(names | {node.name} if held else names - {node.name})
        return _State(self._simple(node, names, control))

    def _simple(self, node: ast.stmt, names: frozenset[str], control: bool) -> frozenset[str]:
        if isinstance(node, ast.Assign):
            return self._assign(node.targets, self.holds(node.value, names) or control, names)
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return self._assign([node.target], self.holds(node.value, names) or control, names)
        if isinstance(node, ast.AugAssign):
            held = self.holds(node.value, names) or control
            return names | _roots(node.target) if held else names
        for part in self._live(node):
            if isinstance(part, ast.Yield | ast.YieldFrom) and self.holds(part.value, names):
                self.returned = True
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            arguments = [*node.value.args, *(word.value for word in node.value.keywords)]
            if control or any([self.holds(part, names) for part in arguments]):
                return names | _roots(node.value.func.value)  # found.append(aux(x))
        self.holds(node, names)
        return names

    def _assign(self, targets: list[ast.expr], held: bool, names: frozenset[str]) -> frozenset[str]:
        for target in targets:
            assigned = {part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
            names = names | _roots(target) if held else names - assigned
        return names

    def _branches(self, node: ast.If, state: _State, control: bool) -> _State:
        held, known = self.holds(node.test, state.names), constant(node.test)
        if known is not None:
            return self.block(node.body if known else node.orelse, state, control)
        ends = [self.block(part, state, control or held) for part in (node.body, node.orelse)]
        if held and any(not end.open for end in ends) and any(end.open for end in ends):
            self.returned = True  # a guard: whether it returns here depends on the value
        return _joined(ends)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, state: _State, control: bool) -> _State:
        over = node.test if isinstance(node, ast.While) else node.iter
        endless = isinstance(node, ast.While) and constant(node.test) is True
        if isinstance(node, ast.While) and constant(node.test) is False:
            return self.block(node.orelse, state, control)
        names = state.names
        for _ in range(2):  # once more with what the first round made
            held = self.holds(over, names)
            inside = self._assign([node.target], held, names) if not isinstance(node, ast.While) else names
            self._breaks.append([])
            end = self.block(node.body, _State(inside), control or held)
            left = self._breaks.pop()
            names = names.union(end.names, *left)
        after = _State(names, not endless or bool(left))
        return self.block(node.orelse, after, control) if node.orelse else after

    def _try(self, node: ast.Try, state: _State, control: bool) -> _State:
        end = self.block(node.body, state, control)
        ends = [self.block(node.orelse, end, control) if end.open else end]
        broken = _State(state.names | end.names)
        ends += [self.block(handler.body, broken, control) for handler in node.handlers]
        after = _joined(ends)
        if not node.finalbody:
            return after
        last = self.block(node.finalbody, _State(after.names), control)
        return _State(last.names, after.open and last.open)


def _joined(ends: list[_State]) -> _State:
    """What holds after several ways, of which one was gone."""
    alive = [end for end in ends if end.open]
    return _State(frozenset().union(*(end.names for end in alive or ends)), bool(alive))


def _roots(target: ast.AST) -> frozenset[str]:
    """Names that an assignment to this target changes: `d` of `d[k]`, `a` and `b` of `a, b`."""
    if isinstance(target, ast.Name):
        return frozenset({target.id})
    if isinstance(target, ast.Attribute | ast.Subscript | ast.Starred):
        return _roots(target.value)
    if isinstance(target, ast.Tuple | ast.List):
        return frozenset().union(*map(_roots, target.elts))
    return frozenset()


def _bound(pattern: ast.pattern) -> frozenset[str]:
    return frozenset(part.name for part in ast.walk(pattern) if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name)
