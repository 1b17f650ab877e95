"""Problems of HumanEval and CoopHumanEval for a helper and a main agent, with their tests turned into cases.

A row has `task_id`, `prompt`, `entry_point` and `test`, whose function `check(candidate)` asserts. Each assertion that says what a call of
the candidate returns becomes a pair (arguments, expected value): `== value`, the call alone or `not` before it, `is value`,
`abs(call - value) < bound`, and one of these with the call inside `tuple(...)` or `list(...)`. So expected values never stand in the
candidate's process. `check` is rewritten to collect the pairs; where they are not all literals it runs once, in the sandbox, loops and
random draws (from a fixed seed) included. A problem that asserts anything else of a call, as one with several right answers does, is left
out by name.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from marl_llm.data_files import DataError, read_rows
from marl_llm.games.coding.aux_source import defined, parameters_of, parsed
from marl_llm.tools.judge import judge_calls
from marl_llm.workflows import Task
from marl_llm.workflows.rows import Loaded

FIELDS = ("task_id", "prompt", "entry_point", "test")
MOST_CASES = 256
MOST_LEFT_OUT = 0.05
SEVERAL = "several right answers"
HIDDEN = ("tests", "visible_tests", "loose")
# Rows of the two data sets, counted from 0, that are for training and for the test. The release leaves out HumanEval's 32 and 163; the
# percentages that the paper prints are multiples of 1/31 and 1/16 (reading: the first ones).
ROWS = {
    "release": {"humaneval": (range(33, 163), range(0, 32)), "coop": (range(16, 82), range(0, 16))},
    "paper": {"humaneval": (range(33, 163), range(0, 31)), "coop": (range(16, 82), range(0, 16))},
}
_COLLECT = """
def _case(number, _known=[]):
    if not _known:
        import random
        random.seed(0)
        _known.append(_collect())
    return _known[0][number] if number < len(_known[0]) else None
"""


def load_function_problems(path: str | pathlib.Path, split: str, visible: int = 0, rows: range | None = None) -> Loaded:
    """Tasks of a `.jsonl`, `.jsonl.gz`, `.json` or `.parquet` file, numbered by row.

    Args:
      visible: how many cases, the first, are for feedback and are not hidden; at least one stays hidden.
      rows: which rows; None: all.

    Returns:
      Tasks with the fields `problem`, `entry`, `parameters`, `preamble` and the hidden `HIDDEN`; and how many problems were left out, under
      a reason that names them.

    Raises:
      DataError: naming the task: no such field, a prompt without its entry point, no case, a value that cannot cross the fence, tests that
        cannot be read; or more than 5 % of the problems left out.
    """
    tasks, names, count = [], [], 0
    for number, row in enumerate(read_rows(path)):
        if rows is not None and number not in rows:
            continue
        where = f"{path}, {row.get('task_id', f'row {number}')}"
        if lacking := [name for name in FIELDS if not isinstance(row.get(name), str) or not row[name].strip()]:
            raise DataError(f"{where}: no text in {lacking[0]!r}; the row has {', '.join(map(str, row))}")
        count += 1
        task = read_problem(number, row, split, visible, where)
        if task is None:
            names.append(row["task_id"])
        else:
            tasks.append(task)
    if len(names) > MOST_LEFT_OUT * count:
        raise DataError(f"{path}: {len(names)} of {count} problems have no tests that can be turned into cases: {', '.join(names)}")
    return Loaded(tasks, {f"{SEVERAL} ({', '.join(names)})": len(names)} if names else {})


def read_problem(number: int, row: Mapping[str, Any], split: str, visible: int, where: str) -> Task | None:
    """The task of a row; None if it has several right answers. Raises `DataError`."""
    prompt, entry = row["prompt"], row["entry_point"]
    tree, why = parsed(prompt)
    function = defined(tree, entry) if tree is not None else None
    if function is None:
        raise DataError(f"{where}: the prompt does not define its entry point {entry!r}{f': {why}' if why else ''}")
    preamble = "\n".join(ast.unparse(node) for node in tree.body if node is not function)
    solution = row.get("canonical_solution")
    known = prompt + solution if isinstance(solution, str) else preamble  # some tests call the right solution by its name
    check = read_check(row["test"], known, where)
    if check is None:
        return None
    cases, loose = check
    if not cases:
        raise DataError(f"{where}: its tests hold no case")
    shown = min(visible, len(cases) - 1)
    fields = {"problem": prompt.strip(), "entry": entry, "parameters": ", ".join(parameters_of(function)), "preamble": preamble}
    hidden = {"tests": tuple(cases[shown:]), "visible_tests": tuple(cases[:shown]), "loose": loose}
    return Task(number, fields, hidden, split)


def read_check(test: str, known: str, where: str) -> tuple[list[tuple[tuple, Any]], bool] | None:
    """(cases, whether tuples count as lists) of a `check(candidate)`; None if it asserts of a call what no one value settles.

    `known`: source of what the tests may call. Raises `DataError`.
    """
    tree, why = parsed(test)
    check = defined(tree, "check") if tree is not None else None
    if check is None or not parameters_of(check):
        raise DataError(f"{where}: its tests have no check(candidate){f': {why}' if why else ''}")
    rewriter = _Rewriter(parameters_of(check)[0])
    body = [rewriter.visit(node) for node in check.body]
    if any(isinstance(part, ast.Name) and part.id == rewriter.candidate for node in body for part in ast.walk(node)):
        return None
    straight = all(isinstance(node, ast.Assert | ast.Expr) for node in check.body)
    cases = _literals(rewriter.pairs) if straight else None
    if cases is None:
        cases = _collected(tree, body, known, where)
    return cases, rewriter.loose


def _literals(pairs: Iterable[tuple[Sequence[ast.expr], ast.expr]]) -> list[tuple[tuple, Any]] | None:
    """The cases' values if all are literals; None if some are expressions, which only the sandbox may work out."""
    try:
        return [(tuple(ast.literal_eval(argument) for argument in call), ast.literal_eval(wanted)) for call, wanted in pairs]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _collected(tree: ast.Module, body: Sequence[ast.stmt], known: str, where: str) -> list[tuple[tuple, Any]]:
    others = [ast.unparse(node) for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == "check")]
    inside = "\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in body)
    head = ["def _collect():", "    import copy as _copy", "    _found = []"]
    lines = [*head, *("    " + line for line in inside.split("\n")), "    return _found"]
    code = "\n".join([known, *others, "\n".join(lines), _COLLECT])
    judged = judge_calls(code, "_case", [((number,), None) for number in range(MOST_CASES + 1)], 60.0).outcome()
    cases = []
    for case in judged.cases:
        if case.state == "passed":  # None: no further case
            return cases
        if case.state != "wrong":
            raise DataError(f"{where}: its tests cannot be worked out: {case.state} {case.error}")
        pair = case.value
        if type(pair) is not list or len(pair) != 2 or not _crosses(pair):
            raise DataError(f"{where}: case {len(cases)} holds a value that cannot leave the sandbox: {pair!r:.120}")
        cases.append((tuple(pair[0]), pair[1]))
    raise DataError(f"{where}: more than {MOST_CASES} cases")


def _crosses(value: Any) -> bool:
    """Whether a value is of built-in types all through."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_crosses, value))
    if isinstance(value, dict):
        return all(_crosses(part) for pair in value.items() for part in pair)
    return value is None or type(value) in (bool, int, float, str, bytes, complex)


class _Rewriter(ast.NodeTransformer):
    """Turns assertions on the candidate into `_found.append([arguments, expected])`, wherever they stand."""

    def __init__(self, candidate: str):
        self.candidate, self.loose, self.pairs = candidate, False, []
        self._wrapped = False  # whether this assertion's call stands inside `tuple(...)` or `list(...)`

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """One assertion; one that has no call of the candidate is taken away."""
        if not any(isinstance(part, ast.Name) and part.id == self.candidate for part in ast.walk(node.test)):
            return ast.Pass()
        self._wrapped = False
        case = self._settled(node.test)
        if case is None:
            return node
        call, wanted = case
        if self._wrapped and not isinstance(wanted, ast.Constant):
            wanted = ast.Call(ast.Name("list", ast.Load()), [wanted], [])  # the judge then takes a list or a tuple
        self.pairs.append((call.args, wanted))
        pair = ast.List([ast.List(call.args, ast.Load()), wanted], ast.Load())
        copied = ast.Call(ast.Attribute(ast.Name("_copy", ast.Load()), "deepcopy", ast.Load()), [pair], [])
        return ast.Expr(ast.Call(ast.Attribute(ast.Name("_found", ast.Load()), "append", ast.Load()), [copied], []))

    def _call(self, node: ast.expr) -> ast.Call | None:
        """The candidate's call, which may stand inside `tuple(...)` or `list(...)`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("tuple", "list") and len(node.args) == 1:
            inner = self._call(node.args[0])
            self._wrapped = inner is not None
            self.loose |= self._wrapped
            return inner
        good = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == self.candidate and not node.keywords
        return node if good and not any(isinstance(argument, ast.Starred) for argument in node.args) else None

    def _settled(self, test: ast.expr) -> tuple[ast.Call, ast.expr] | None:
        if (call := self._call(test)) is not None:
            return call, ast.Constant(True)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) and (call := self._call(test.operand)) is not None:
            return call, ast.Constant(False)
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return None
        left, right, sign = test.left, test.comparators[0], test.ops[0]
        if isinstance(sign, ast.Eq | ast.Is):
            for side, other in ((left, right), (right, left)):
                if (call := self._call(side)) is not None:
                    return call, other
        near = isinstance(left, ast.Call) and re.fullmatch(r"(math\.f)?abs", ast.unparse(left.func)) and len(left.args) == 1
        if isinstance(sign, ast.Lt | ast.LtE) and near and isinstance(left.args[0], ast.BinOp) and isinstance(left.args[0].op, ast.Sub):
            for side, other in ((left.args[0].left, left.args[0].right), (left.args[0].right, left.args[0].left)):
                if (call := self._call(side)) is not None:
                    return call, other
        return None
