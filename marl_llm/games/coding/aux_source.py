"""Programs in two parts, `aux` by a helper and an entry point by a main agent, as their syntax trees show them (MAGRPO, Appendix D).

Nothing is executed and nothing is matched as text: a name in a comment or a string is no call. A source that is too large or nested too
deeply to be an answer is read as one with a syntax error.
"""

from __future__ import annotations

import ast
import dataclasses
import warnings

from marl_llm.games.coding.aux_flow import TooComplex, constant, flow_of

AUX = "aux"
LONGEST = 20_000  # characters of one part
DEEPEST = 150  # levels of a syntax tree
LARGEST = 60  # nodes of an expression that a wrapper may be written as
WRAPPERS = ("flow", "lines")
_DEFS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the trees of helper and main show."""

    aux: bool = False  # the helper's part defines `aux` and returns a value
    main: bool = False  # the main part defines the entry point, and it returns a value (an async one does not count)
    parses: bool = False  # both parts can be parsed
    redefined: bool = False  # the main part binds the name `aux` itself: its calls are not of the helper's function
    calls: bool = False  # the entry point calls `aux` in code that can be reached
    uses: bool = False  # what it returns depends on such a call
    wrapper: bool = False  # it does nothing but hand its own parameters on to `aux`
    error: str = ""  # why a part cannot be read, with its line; "" if both can


def parsed(code: str) -> tuple[ast.Module | None, str]:
    """The tree of a source, or None and why not."""
    if len(code) > LONGEST:
        return None, f"{len(code)} characters; at most {LONGEST} are read"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's invalid escapes are its own affair
            tree = ast.parse(code)
    except SyntaxError as error:
        return None, f"line {error.lineno}: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; deep nesting
        return None, f"{type(error).__name__}: {error}"[:200]
    level, deep = [tree], 0
    while level:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        deep += 1
        if deep > DEEPEST:
            return None, f"nested more than {DEEPEST} levels deep"
    return tree, ""


def defined(tree: ast.Module, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The last function of this name on the module's own level: the one that Python would call."""
    definitions = [node for node in tree.body if isinstance(node, _DEFS) and node.name == name]
    return definitions[-1] if definitions else None


def returns_value(function: ast.AST) -> bool:
    """Whether a function's own code has `return` with a value, or yields one."""
    waiting = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return) and node.value is not None or isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return False


def binds(tree: ast.AST, name: str) -> bool:
    """Whether a name is given another meaning anywhere: defined, assigned, deleted, imported, a parameter, a pattern, a handler's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load):
            return True
        if isinstance(node, ast.arg) and node.arg == name:
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name == name:
            return True
        if isinstance(node, ast.MatchAs | ast.MatchStar) and node.name == name or isinstance(node, ast.MatchMapping) and node.rest == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name.partition(".")[0]) in (name, "*"):
            if (node.asname or node.name) != "*":
                return True
    return False


def read_parts(helper: str, main: str, entry: str, wrapper: str = "flow") -> Parts:
    """What two sources show.

    Args:
      helper, main: the two parts.
      entry: name of the function that is tested.
      wrapper: "flow" looks at what the entry point computes, "lines" (the release) at whether its body has one or two lines.
    """
    helper_tree, helper_error = parsed(helper)
    main_tree, main_error = parsed(main)
    aux = defined(helper_tree, AUX) if helper_tree else None
    function = defined(main_tree, entry) if main_tree else None
    error = f"aux, {helper_error}" if helper_error else f"{entry}, {main_error}" if main_error else ""
    parts = Parts(
        aux=isinstance(aux, _DEFS) and returns_value(aux),
        main=isinstance(function, ast.FunctionDef) and returns_value(function),
        parses=helper_tree is not None and main_tree is not None,
        error=error,
    )
    if not parts.main:
        return parts
    try:
        flow = flow_of(function, AUX)
    except TooComplex as reason:
        return dataclasses.replace(parts, parses=False, error=f"{entry}, {reason}")
    thin = is_short(function) if wrapper == "lines" else is_wrapper(function)
    return dataclasses.replace(parts, redefined=binds(main_tree, AUX), calls=flow.called, uses=flow.returned, wrapper=flow.called and thin)


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Names of a function's parameters, in order."""
    a = function.args
    stars = [star for star in (a.vararg, a.kwarg) if star is not None]
    return tuple(arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs, *stars))


def is_short(function: ast.FunctionDef) -> bool:
    """The release's rule: the body, without its docstring, has one or two lines."""
    body = _without_docstring(function.body)
    lines = {line for node in body for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines) <= 2


def is_wrapper(function: ast.FunctionDef) -> bool:
    """Whether a function only hands its own parameters on to `aux` and returns what comes back.

    Names are replaced by what they were assigned, and what changes nothing is taken away: docstring, `pass`, dead code, adding 0,
    multiplying by 1, a lambda that is called at once, a branch whose condition is constant.
    """
    value = _result(_without_docstring(function.body), {})
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == AUX):
        return False
    own = set(parameters_of(function))
    arguments = [*value.args, *(word.value for word in value.keywords)]
    arguments = [argument.value if isinstance(argument, ast.Starred) else argument for argument in arguments]
    return all(isinstance(argument, ast.Name) and argument.id in own for argument in arguments)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    has = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str)
    return body[1:] if has else body


def _result(body: list[ast.stmt], names: dict[str, ast.expr]) -> ast.expr | None:
    """What straight-line code returns, as an expression of its parameters; None where it is more than that."""
    for statement in body:
        if isinstance(statement, ast.Pass) or isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement, ast.Return):
            return None if statement.value is None else _plain(statement.value, names)
        if isinstance(statement, ast.If) and constant(statement.test) is not None:
            taken = statement.body if constant(statement.test) else statement.orelse
            result = _result(taken, names)
            if result is not None or any(isinstance(part, ast.Return) for part in taken):
                return result
            continue
        if isinstance(statement, ast.Try) and not statement.finalbody and all(_raises_again(handler) for handler in statement.handlers):
            return _result([*statement.body, *statement.orelse], names)
        target, value = None, None
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
            target, value = statement.target, ast.BinOp(ast.Name(statement.target.id, ast.Load()), statement.op, statement.value)
        if not isinstance(target, ast.Name):
            return None
        expression = _plain(value, names)
        if expression is None:
            return None
        names[target.id] = expression
    return None


def _raises_again(handler: ast.ExceptHandler) -> bool:
    return len(handler.body) == 1 and isinstance(handler.body[0], ast.Raise) and handler.body[0].exc is None


def _plain(value: ast.expr, names: dict[str, ast.expr]) -> ast.expr | None:
    """An expression without what changes nothing, with names replaced; None if it grows too large."""
    if isinstance(value, ast.Name):
        return names.get(value.id, value)
    if isinstance(value, ast.NamedExpr):
        return _plain(value.value, names)
    if isinstance(value, ast.IfExp) and constant(value.test) is not None:
        return _plain(value.body if constant(value.test) else value.orelse, names)
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.UAdd):
        return _plain(value.operand, names)
    if isinstance(value, ast.BinOp):
        left, right = _plain(value.left, names), _plain(value.right, names)
        neutral = {ast.Add: 0, ast.Sub: 0, ast.Mult: 1, ast.Pow: 1}.get(type(value.op))
        if neutral is not None and _is(right, neutral):
            return left
        if isinstance(value.op, ast.Add | ast.Mult) and _is(left, neutral):
            return right
        return None if left is None or right is None else _sized(ast.BinOp(left, value.op, right))
    if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Tuple | ast.List) and isinstance(value.slice, ast.Constant):
        items, place = value.value.elts, value.slice.value
        if type(place) is int and -len(items) <= place < len(items):
            return _plain(items[place], names)
    if isinstance(value, ast.Call):
        return _plain_call(value, names)
    return value


def _plain_call(value: ast.Call, names: dict[str, ast.expr]) -> ast.expr | None:
    function = _plain(value.func, names)
    arguments = [_plain(part.value if isinstance(part, ast.Starred) else part, names) for part in value.args]
    words = [(word.arg, _plain(word.value, names)) for word in value.keywords]
    if function is None or any(part is None for part in (*arguments, *(part for _, part in words))):
        return None
    if isinstance(function, ast.Lambda) and not words:
        inside = dict(zip((arg.arg for arg in function.args.args), arguments))
        return _plain(function.body, names | inside)
    return _sized(ast.Call(function, arguments, [ast.keyword(name, part) for name, part in words]))


def _is(node: ast.expr | None, number: int) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == number


def _sized(node: ast.expr) -> ast.expr | None:
    for count, _ in enumerate(ast.walk(node)):
        if count > LARGEST:
            return None
    return node
