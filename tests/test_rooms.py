"""The drawing of imports: each room imports only rooms that stand before it here, and nothing of the library imports `experiments`."""

import ast
import pathlib

import pytest

import marl_llm

FOLDER = pathlib.Path(marl_llm.__file__).parent
ORDER = (
    "errors", "untrusted", "old_names", "hints", "activity", "data_files", "local_server", "algorithms", "models", "text",
    "tools", "reporting", "viewing", "sampling", "serving", "workflows", "games", "coaching", "checking", "rollout", "evaluation",
    "training", "runs", "planning", "cli",
)  # fmt: skip


def imported(path: pathlib.Path) -> set[str]:
    """Modules that a file imports, wherever in it; `from marl_llm import x` as `marl_llm.x`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def rooms_of(path: pathlib.Path) -> set[str]:
    """Rooms that a file imports."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("marl_llm.")} & set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_down(room):
    place = FOLDER / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    above = set(ORDER[ORDER.index(room) + 1 :])
    assert {str(path.relative_to(FOLDER)): found for path in files if (found := rooms_of(path) & above)} == {}


def test_every_room_has_its_place():
    functions = {"attach", "evaluate", "load_model", "make_game", "open_team", "Reward", "resume", "train", "view"}
    assert set(ORDER) | functions == set(marl_llm.__all__)


def test_nothing_of_the_library_imports_the_experiments():
    files = sorted(FOLDER.rglob("*.py"))
    assert len(files) > 250
    assert [path for path in files if any(name.split(".")[0] == "experiments" for name in imported(path))] == []
