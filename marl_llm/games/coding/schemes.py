"""How a main function works together with `aux`: the cooperation schemes of MAGRPO's Appendix B, read from the syntax tree.

| scheme | the entry point |
|---|---|
| `unused` | does not call `aux`, or what it returns does not depend on the call |
| `wrapper` | hands its parameters on and returns what comes back |
| `fallback` | calls `aux` within `try` and handles the error, or tests its value and computes the result itself where it will not do |
| `filter` | lets `aux` decide: a call of it stands in a condition and is not part of the result |
| `coordinator` | calls `aux` in a loop or a comprehension, or hands it to `map` and its kin |
| `decorator` | one call, with guards before it or work on its value after it |
| `other` | several calls beside each other, calls of calls |

The first row that fits is the scheme (reading: the paper gives examples and no rule).
"""

from __future__ import annotations

import ast

from marl_llm.games.coding.aux_source import AUX, defined, parsed, read_parts

SCHEMES = ("unused", "wrapper", "fallback", "filter", "coordinator", "decorator", "other")
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_HANDED = ("map", "filter", "sorted", "reduce", "min", "max")


def scheme_of(main: str, entry: str) -> str:
    """One of `SCHEMES`. A main part that cannot be read, or has no entry point, is `other`."""
    tree, _ = parsed(main)
    function = defined(tree, entry) if tree else None
    if function is None:
        return "other"
    seen = read_parts("def aux():\n    return 0", main, entry)
    handed = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _hands_on(node)]
    if seen.redefined or not (seen.calls or handed) or not seen.uses:
        return "unused"
    if seen.wrapper:
        return "wrapper"
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Try) and node.handlers and _mentions(node.body, set()) for node in nodes):
        return "fallback"
    held = {part.id for node in nodes if isinstance(node, ast.Assign) and _mentions([node.value], set())
            for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}  # fmt: skip
    tested = [node for node in nodes if isinstance(node, ast.If | ast.IfExp | ast.While | ast.comprehension)
              and _mentions(_conditions(node), held)]  # fmt: skip
    conditions = {id(part) for node in tested for test in _conditions(node) for part in ast.walk(test)}
    if tested and not _mentions(_results(nodes), held, conditions):
        return "filter"
    if any(_recomputes(node, held) for node in tested):
        return "fallback"
    if handed or any(isinstance(node, _LOOPS) and _mentions([node], set()) for node in nodes):
        return "coordinator"
    return "decorator" if sum(map(_is_call, nodes)) == 1 else "other"


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == AUX


def _mentions(nodes: list, held: set[str], apart: frozenset[int] | set[int] = frozenset()) -> bool:
    """Whether a call of `aux`, or a name that holds its value, stands in these nodes; those `apart` (by id) are left out."""
    parts = (part for node in nodes for part in ast.walk(node) if id(part) not in apart)
    return any(_is_call(part) or isinstance(part, ast.Name) and part.id in held and isinstance(part.ctx, ast.Load) for part in parts)


def _hands_on(node: ast.Call) -> bool:
    """`map(aux, xs)` and its kin."""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    arguments = [*node.args, *(word.value for word in node.keywords)]
    return name in _HANDED and any(isinstance(argument, ast.Name) and argument.id == AUX for argument in arguments)


def _conditions(node: ast.AST) -> list[ast.expr]:
    return node.ifs if isinstance(node, ast.comprehension) else [node.test]


def _results(nodes: list[ast.AST]) -> list[ast.AST]:
    """Expressions that become part of the result: returned, yielded, added to a name, put into a container by a method."""
    results = [node.value for node in nodes if isinstance(node, ast.Return | ast.Yield | ast.AugAssign) and node.value is not None]
    methods = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return results + [argument for node in methods for argument in node.args]


def _recomputes(node: ast.AST, held: set[str]) -> bool:
    """Whether a condition on the value of `aux` has a branch that computes the result without it."""
    if isinstance(node, ast.comprehension | ast.While):
        return False
    branches = [node.body, node.orelse] if isinstance(node, ast.If) else [[node.body], [node.orelse]]
    return any(branch and not _mentions(branch, held) for branch in branches)
