"""One class name, one meaning; functions and modules that can be read at a sitting."""

import ast
import collections
import pathlib

import experiments
import marl_llm

ROOMS = [pathlib.Path(room.__file__).parent for room in (marl_llm, experiments)]
TREES = {path: ast.parse(path.read_text()) for room in ROOMS for path in sorted(room.rglob("*.py"))}


def test_no_public_class_name_exists_twice():
    places = collections.defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_functions_have_fewer_than_80_lines_and_modules_at_most_450():
    functions = [
        (f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    modules = [(str(path), len(path.read_text().splitlines())) for path in TREES]
    assert [one for one in functions if one[1] >= 80] + [one for one in modules if one[1] > 450] == []
