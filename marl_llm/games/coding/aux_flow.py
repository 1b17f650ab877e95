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
            one = waiting.pop()
            self._left -= 1
            if self._left < 0:
                raise TooComplex(f"more than {VISITS} parts to follow")
            yield one
            if isinstance(one, ast.IfExp) and constant(one.test) is not None:
                waiting.append(one.body if constant(one.test) else one.orelse)
            elif isinstance(one, ast.BoolOp) and constant(one.values[0]) is not None:
                ends = constant(one.values[0]) == isinstance(one.op, ast.Or)
                waiting += one.values[:1] if ends else one.values[1:]
            else:
                waiting += ast.iter_child_nodes(one)

    def holds(self, node: ast.AST | None, names: frozenset[str]) -> bool:
        """Whether an expression may hold the value: the name is called or handed on in it, or a name that holds the value is."""
        found = False
        for one in self._live(node) if node is not None else ():
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
                self.called |= one.id == self.name  # called, or handed on as in map(aux, xs)
                found |= one.id in names or one.id == self.name
        return found

    def block(self, body: list[ast.stmt], state: _State, control: bool) -> _State:
        """What a list of statements makes of a state; `control`: whether the value decides that it is run."""
        for statement in body:
            if not state.open:
                break
            state = self.statement(statement, state, control)
        return state

    def statement(self, one: ast.stmt, state: _State, control: bool) -> _State:
        """What one statement makes of a state."""
        names = state.names
        if isinstance(one, ast.Return | ast.Raise):
            held = self.holds(one.value if isinstance(one, ast.Return) else one.exc, names)
            self.returned |= held or control
            return _State(names, False)
        if isinstance(one, ast.Break | ast.Continue):
            if self._breaks:
                self._breaks[-1].append(names)
            return _State(names, False)
        if isinstance(one, ast.If):
            return self._branches(one, state, control)
        if isinstance(one, ast.For | ast.AsyncFor | ast.While):
            return self._loop(one, state, control)
        if isinstance(one, ast.Try) or type(one).__name__ == "TryStar":
            return self._try(one, state, control)
        if isinstance(one, ast.With | ast.AsyncWith):
            for item in one.items:
                names = self._assign([item.optional_vars] if item.optional_vars else [], self.holds(item.context_expr, names), names)
            return self.block(one.body, _State(names), control)
        if isinstance(one, ast.Match):
            held = self.holds(one.subject, names)
            ends = [self.block(case.body, _State(names | _bound(case.pattern) if held else names), control or held) for case in one.cases]
            return _joined([*ends, state])
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            held = self.holds(one, names)  # a function within holds the value if it calls for it
            return _State(names | {one.name} if held else names - {one.name})
        return _State(self._simple(one, names, control))

    def _simple(self, one: ast.stmt, names: frozenset[str], control: bool) -> frozenset[str]:
        if isinstance(one, ast.Assign):
            return self._assign(one.targets, self.holds(one.value, names) or control, names)
        if isinstance(one, ast.AnnAssign) and one.value is not None:
            return self._assign([one.target], self.holds(one.value, names) or control, names)
        if isinstance(one, ast.AugAssign):
            held = self.holds(one.value, names) or control
            return names | _roots(one.target) if held else names
        for part in self._live(one):
            if isinstance(part, ast.Yield | ast.YieldFrom) and self.holds(part.value, names):
                self.returned = True
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and isinstance(one.value.func, ast.Attribute):
            given = [*one.value.args, *(word.value for word in one.value.keywords)]
            if control or any([self.holds(part, names) for part in given]):
                return names | _roots(one.value.func.value)  # found.append(aux(x))
        self.holds(one, names)
        return names

    def _assign(self, targets: list[ast.expr], held: bool, names: frozenset[str]) -> frozenset[str]:
        for target in targets:
            whole = {part.id for part in ast.walk(target) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
            names = names | _roots(target) if held else names - whole
        return names

    def _branches(self, one: ast.If, state: _State, control: bool) -> _State:
        held, known = self.holds(one.test, state.names), constant(one.test)
        if known is not None:
            return self.block(one.body if known else one.orelse, state, control)
        ends = [self.block(part, state, control or held) for part in (one.body, one.orelse)]
        if held and any(not end.open for end in ends) and any(end.open for end in ends):
            self.returned = True  # a guard: whether it returns here depends on the value
        return _joined(ends)

    def _loop(self, one: ast.For | ast.AsyncFor | ast.While, state: _State, control: bool) -> _State:
        over = one.test if isinstance(one, ast.While) else one.iter
        endless = isinstance(one, ast.While) and constant(one.test) is True
        if isinstance(one, ast.While) and constant(one.test) is False:
            return self.block(one.orelse, state, control)
        names = state.names
        for _ in range(2):  # once more with what the first round made
            held = self.holds(over, names)
            inside = self._assign([one.target], held, names) if not isinstance(one, ast.While) else names
            self._breaks.append([])
            end = self.block(one.body, _State(inside), control or held)
            left = self._breaks.pop()
            names = names.union(end.names, *left)
        after = _State(names, not endless or bool(left))
        return self.block(one.orelse, after, control) if one.orelse else after

    def _try(self, one: ast.Try, state: _State, control: bool) -> _State:
        end = self.block(one.body, state, control)
        ends = [self.block(one.orelse, end, control) if end.open else end]
        broken = _State(state.names | end.names)
        ends += [self.block(handler.body, broken, control) for handler in one.handlers]
        after = _joined(ends)
        if not one.finalbody:
            return after
        last = self.block(one.finalbody, _State(after.names), control)
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
