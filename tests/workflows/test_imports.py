"""The modules of workflows stand one on the other: no circle, not even one that an import inside of a function hides."""

import ast
import pathlib

import marl_llm.workflows

FOLDER = pathlib.Path(marl_llm.workflows.__file__).parent


def imports(path):
    """Modules of the folder that a module imports, wherever in it, but for what only type checkers read."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("marl_llm.workflows."):
            found.add(node.module.rsplit(".", 1)[1])
        if isinstance(node, ast.ImportFrom) and node.module == "marl_llm.workflows":
            found.add("__init__")
    return found


def test_modules_of_workflows_import_each_other_in_one_direction():
    graph = {path.stem: imports(path) for path in FOLDER.glob("*.py")}
    done = []
    while graph:
        free = [name for name, needs in graph.items() if needs <= set(done)]
        assert free, f"a circle among {sorted(graph)}"
        done += free
        graph = {name: needs for name, needs in graph.items() if name not in free}
    assert done.index("errors") < done.index("checks") < done.index("graph") < done.index("rewards") < done.index("play")
