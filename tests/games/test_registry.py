"""Games by name: the library's own, and a user's from a file or a module (fault C1)."""

import pathlib
import shutil
import sys

import pytest

from marl_llm.games import Game, GameError, JointLetter, find_game, make_game
from marl_llm.workflows import Environment

OWN = pathlib.Path(__file__).parent / "own"


def test_c1_a_game_and_a_workflow_of_a_users_file_are_made_with_their_options():
    lock = make_game(f"{OWN}/lock.py:Lock", step=3)
    assert isinstance(lock, Game)
    assert (lock.name, lock.step) == ("lock", 3)
    with make_game(f"{OWN}/relay.py:relay", noise=0.0) as environment:
        assert isinstance(environment, Environment)
    found = find_game(f"{OWN}/lock.py:Lock")
    assert list(found.options) == ["step"]
    assert {name: p.default for name, p in found.script_options.items()} == {"slip": 0.3}
    assert find_game("plan_path").script_options.keys() == {"noise", "sighted", "repeat"}
    assert find_game("fact_parallel").script_options == {}


def test_c1_a_module_that_python_can_import_and_a_ready_game(tmp_path, monkeypatch):
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "games.py").write_text("from marl_llm.games import JointLetter\nfive = JointLetter(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert make_game("my_package.games:five") == JointLetter(5)
    with pytest.raises(GameError, match="five has no option 'letters'. It has none"):
        make_game("my_package.games:five", letters=3)


def test_c1_a_copy_and_what_lies_beside_it_are_enough(tmp_path, monkeypatch):
    """As a run directory keeps them: the same game, from the copy's own neighbours, with the original gone."""
    there = tmp_path / "there"
    shutil.copytree(OWN, there)
    found = find_game(f"{there}/lock.py:Lock")
    assert [str(file) for file in found.files] == ["lock.py", "digits.py"]
    assert "digits" not in sys.modules
    assert str(there) not in sys.path
    kept = tmp_path / "kept"
    kept.mkdir()
    for file in found.files:
        shutil.copy(found.folder / file, kept / file)
    (kept / "digits.py").write_text('DIGITS = tuple("9876543210")\n')
    shutil.rmtree(there)
    again = find_game(f"{there}/lock.py:Lock", game_dir=kept)
    assert again.make().tokenizer != found.make().tokenizer  # its own neighbour, not the one that was loaded before
    assert find_game(f"{there}/lock.py:Lock", game_dir=kept).thing is again.thing  # loaded once, so that two games of it can be equal
    with pytest.raises(GameError, match=r"there is no file .*lock\.py \(from "):
        find_game(f"{there}/lock.py:Lock")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plan_pth", r"unknown game 'plan_pth'; did you mean 'plan_path'\?.* are plan_path, .*problems.*; .*your own .*'my_game\.py:Lock'"),
        ("zzzz", r"unknown game 'zzzz'; the games are plan_path"),
        ("lock.py", r"'lock.py' names a file: name the object in it too, like 'lock.py:Lock'"),
        ("nowhere.py:Lock", r"there is no file nowhere\.py \(from /.*\), which game 'nowhere\.py:Lock' names"),
        ("{own}/lock.py:Lok", r"there is no 'Lok' in it; did you mean 'Lock'\? It defines LockState, Lock"),
        ("no_such_package.games:Lock", r"there is no module 'no_such_package' that Python can import here"),
        ("json:Lock", r"game 'json:Lock': there is no 'Lock' in it"),
        ("{own}/lock.py:LockState", r"LockState is a class, neither an Environment nor a Game: it lacks act, .*tokenizer"),
        ("os:system", r"os:system is a function that does not say that it makes a game: write .*, like `def lock\(\) -> Environment:`"),
        ("subprocess:Popen", r"subprocess:Popen is a class, neither an Environment nor a Game"),
        ("builtins:exec", r"builtins:exec is a function that does not say"),
        ("{own}/lock.py:dataclasses", r"is a module, neither an Environment nor a Game: it lacks act, .*tokenizer"),
        ("{own}/digits.py:DIGITS", r"is a tuple, neither an Environment nor a Game"),
    ],
)
def test_c1_what_is_wrong_is_told_in_one_line(name, said):
    with pytest.raises(GameError, match=said) as error:
        make_game(name.format(own=OWN))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = = 1", r"bad\.py line 1: invalid syntax"),
        ("\nx = y", r"bad\.py line 2: NameError: name 'y' is not defined"),
        ("import nowhere_to_be_found", r"bad\.py line 1: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def f(): return 3", r"f is a function that does not say that it makes a game"),
        ("def f() -> int: return 3", r"f is a function that does not say that it makes a game"),
        ("from marl_llm.workflows import Environment\ndef f() -> Environment: return 3", r"is a int, neither an Environment nor a Game"),
    ],
)
def test_a_fault_in_a_users_file_is_told_with_its_line(tmp_path, text, said):
    (tmp_path / "bad.py").write_text(text + "\n")
    with pytest.raises(GameError, match=said):
        make_game(f"{tmp_path}/bad.py:f")
    assert not [name for name in sys.path if name == str(tmp_path)]


def test_options_of_a_users_game_are_checked_like_ours():
    with pytest.raises(GameError, match=r"Lock has no option 'stp'; did you mean 'step'\? Its options are step"):
        make_game(f"{OWN}/lock.py:Lock", stp=1)
    with pytest.raises(ValueError, match=r"lock\.step=11 is not in \[0, 9\]"):
        make_game(f"{OWN}/lock.py:Lock", step=11)


def test_nothing_is_called_that_does_not_say_that_it_makes_a_game(tmp_path):
    """Functions, classes, methods and objects with `__call__`, each of which would leave a file."""
    (tmp_path / "hostile.py").write_text(
        "import functools, pathlib\n"
        "def touch(file: str = 'x') -> None: pathlib.Path(file).touch()\n"
        "class Made:\n"
        "    def __init__(self, file: str = 'x'): touch(file)\n"
        "    def __call__(self, file: str = 'x'): touch(file)\n"
        "    @classmethod\n"
        "    def environment(cls, file: str = 'x'): touch(file)\n"
        "again, method = functools.partial(touch), Made.environment\n"
        "called = object.__new__(Made)\n"
        "named = lambda file='x': touch(file)\n"
    )
    for name in ("touch", "Made", "again", "method", "called", "named"):
        with pytest.raises(GameError, match="does not say that it makes a game|neither an Environment nor a Game"):
            make_game(f"{tmp_path}/hostile.py:{name}", file=str(tmp_path / "called"))
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    "text",
    [
        "from __future__ import annotations\nfrom marl_llm.games import Game, JointLetter\ndef f() -> Game: return JointLetter(5)",
        "from marl_llm.games import JointLetter\ndef f(n: int = 5) -> JointLetter: return JointLetter(n)",
        "from marl_llm import games\ndef f(n: int = 5) -> 'games.Game | games.JointLetter': return games.JointLetter(n)",
        "import functools\nfrom marl_llm.games import JointLetter\nf = functools.partial(JointLetter, 5)",
        "import functools\nfrom marl_llm.games import JointLetter\n@functools.cache\ndef f() -> JointLetter: return JointLetter(5)",
        "from marl_llm.games import JointLetter\nclass f(JointLetter): pass",
    ],
)
def test_a_return_type_a_class_and_what_wraps_them_say_that_they_make_a_game(tmp_path, text):
    (tmp_path / "mine.py").write_text(text + "\n")
    assert isinstance(make_game(f"{tmp_path}/mine.py:f"), Game)


def test_a_runs_copy_is_loaded_without_compiled_files(tmp_path, monkeypatch):
    """What Python compiles beside it would run in place of the text whose digest was checked."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)  # whatever this Python was told
    monkeypatch.setattr(sys, "pycache_prefix", None)
    shutil.copytree(OWN, tmp_path / "game", ignore=shutil.ignore_patterns("__pycache__"))
    find_game("lock.py:Lock", game_dir=tmp_path / "game")
    assert not list((tmp_path / "game").rglob("*.pyc"))


def test_data_files_beside_a_game_that_its_text_names_belong_to_it(tmp_path):
    """Those of modules beside it too; not what only looks like a name, nor what lies elsewhere."""
    (tmp_path / "data").mkdir()
    for name in ("words.txt", "data/more.json", "unnamed.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "near.py").write_text('MORE = open(__file__.replace("near.py", "data/more.json")).read()\n')
    (tmp_path / "mine.py").write_text(
        "import pathlib\nimport near\nfrom marl_llm.games import JointLetter\n"
        'words = (pathlib.Path(__file__).parent / "words.txt").read_text()\n'
        'others = ["../etc", "/etc/passwd", "data", "a\\0b", "nothing.txt"]\n'
        "five = JointLetter(5)\n"
    )
    found = find_game(f"{tmp_path}/mine.py:five")
    assert [str(file) for file in found.files] == ["mine.py", "near.py", "data/more.json", "words.txt"]
