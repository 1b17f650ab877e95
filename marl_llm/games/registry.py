"""Games by name: those of this library, and a user's own, from a file or a module.

    make_game("plan_path", height=8)               # a game of the library
    make_game("fact_parallel")                     # a workflow of the library, with its tasks and tools: an `Environment`
    make_game("my_game.py:Lock", digits=4)         # the object `Lock` of a file
    make_game("my_package.games:Lock")             # the object `Lock` of a module that Python can import

The object is a class of a `Game`, or a function that returns an `Environment` or a `Game` and whose parameters are the game's options, or
a ready one. No other object is called.
A file may import modules and read data files that lie beside it; `GameSpec.files` names them all, so that a run can keep a copy.

A game of the library is found where it lies: a public function of a folder here whose return type is `Environment`. Its docstring tells
played, on which tasks; `docs/options.md` lists them all.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback
import types
import typing
import weakref
from typing import Any

from marl_llm.errors import UserError
from marl_llm.games.protocol import Game
from marl_llm.games.shapes import check_shapes
from marl_llm.hints import meant
from marl_llm.workflows import Environment

_ENVIRONMENT = re.compile(r"^def ([a-z]\w*)\((?:(?!^def )[\s\S])*?\) -> Environment:", re.MULTILINE)


def _environments_here() -> dict[str, str]:
    """Name -> module of each function of a game's folder that returns an `Environment`. Sources are read: imports take seconds."""
    modules = {}
    for file in sorted(pathlib.Path(__file__).parent.glob("*/*.py")):
        if ") -> Environment:" in (source := file.read_text(encoding="utf-8")):
            modules |= dict.fromkeys(_ENVIRONMENT.findall(source), f"{file.parent.name}.{file.stem}")
    return modules


ENVIRONMENTS = _environments_here()  # workflows with their tasks, and the modules of this folder that make them
GAMES = {
    "plan_path": "marl_llm.games.plan_path:PlanPath",
    "joint_letter": "marl_llm.games.joint_letter:JointLetter",
    "matrix": "marl_llm.games.matrix:MatrixGame",
    "hints": "marl_llm.games.hints:Hints",
    "sokoban": "marl_llm.games.sokoban:Sokoban",
    "sudoku": "marl_llm.games.sudoku:Sudoku",
    **{name: f"marl_llm.games.{module}:{name}" for name, module in ENVIRONMENTS.items()},
}
_KINDS = (Game.__name__, Environment.__name__)
_MADE: dict[int, tuple[str, dict[str, Any]]] = {}  # id of a game that `make_game` made -> its name and options, while it lives
_GIVEN: dict[str, Any] = {}  # name -> a game that was given as an object, for this process (`name_of_game`)
_GIVEN_PREFIX = "object "
_OWN = "an object of your own is named like 'my_game.py:Lock' or 'my_package.games:Lock'"


class GameError(UserError, ValueError):
    """There is no such game, or it cannot be made; the message says what, where and what to do."""


@dataclasses.dataclass(frozen=True)
class GameSpec:
    """What a name stands for.

    Attributes:
      name: as it was asked for.
      thing: a class or function that makes the game, or the game itself.
      folder, files: of a user's file, its folder and, relative to it, the file, the modules beside it that it imports at its top, and the
        data files that a text in these names, such as `"words.txt"` in `pathlib.Path(__file__).parent / "words.txt"`.
    """

    name: str
    thing: Any
    folder: pathlib.Path | None = None
    files: tuple[pathlib.Path, ...] = ()

    @property
    def options(self) -> dict[str, inspect.Parameter]:
        """The game's options, with their types and defaults."""
        return {} if self._ready or not callable(self.thing) else {
            n: p for n, p in inspect.signature(self.thing).parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        }

    @property
    def _ready(self) -> bool:
        return isinstance(self.thing, Game | Environment) and not inspect.isclass(self.thing)

    @property
    def sources(self) -> dict[pathlib.Path, pathlib.Path]:
        """Of a user's file: each of its files relative to its folder -> where it is."""
        return {} if self.folder is None else {file: self.folder / file for file in self.files}

    @property
    def script_options(self) -> dict[str, inspect.Parameter]:
        """Options of a value-state game's scripted player: the keyword-only parameters of its method `script`."""
        script = getattr(self.thing, "script", None)
        if script is None or isinstance(self.thing, Environment):
            return {}
        return {name: p for name, p in inspect.signature(script).parameters.items() if p.kind is p.KEYWORD_ONLY}

    def make(self, **options: Any) -> Game | Environment:
        """The game with its options. Raises `GameError` listing the game's options, or saying what it lacks."""
        known = list(self.options)
        for option in options:
            if option not in known:
                raise GameError(f"{self.name} has no option {option!r}{meant(option, known) or '.'} {_listed('Its options are', known)}")
        thing = self.thing
        if callable(thing) and not self._ready:
            if lacking := [name for name, p in self.options.items() if p.default is p.empty and name not in options]:
                raise GameError(f"{self.name} needs its option {lacking[0]!r}, e.g. --config.game.{lacking[0]}=...")
            try:
                thing = thing(**options)
            except ModuleNotFoundError as error:
                raise GameError(f"{self.name} needs the library {error.name!r}: pip install 'marl_llm[tools]'") from error
        if not isinstance(thing, Game | Environment):
            raise GameError(_no_game(self.name, thing))
        if isinstance(thing, Game) and self.name not in GAMES and thing.device:
            try:
                check_shapes(thing)
            except ValueError as error:
                raise GameError(f"{self.name}: {error}") from error
        return thing


def find_game(name: str, game_dir: str | pathlib.Path | None = None) -> GameSpec:
    """What a name stands for; `game_dir` is the folder in which a run kept its copy of a user's file, and nothing is written there.

    Loading a file or a module runs it: ask `marl_llm.runs.trust` first where somebody else may have named it. Of what is in it nothing is
    called that does not say that it makes a game. Raises `GameError`: an unknown name, a file or module that is not there or cannot be
    run, or an object that is not in it or makes no game.
    """
    if name in GAMES:
        module, _, thing = GAMES[name].partition(":")
        return GameSpec(name, getattr(importlib.import_module(module), thing))
    if name in _GIVEN:
        return GameSpec(name, _GIVEN[name])
    if name.startswith(_GIVEN_PREFIX):
        raise GameError(f"game {name!r} was an object of another Python process: pass it to marl_llm.train again; {_OWN}")
    where, _, thing = name.rpartition(":")
    if not where or not thing:
        if name.endswith(".py"):
            raise GameError(f"{name!r} names a file: name the object in it too, like '{name}:Lock'")
        raise GameError(f"unknown game {name!r}{meant(name, list(GAMES))}; the games are {', '.join(GAMES)}; {_OWN}")
    if not where.endswith(".py"):
        return GameSpec(name, _object(_module(where, name), thing, name))
    module, folder, files = _read_file(where, game_dir, f"game {name!r}")
    return GameSpec(name, _object(module, thing, name), folder, files)


def find_function(name: str, game_dir: str | pathlib.Path | None = None) -> GameSpec:
    """A user's function, named like a game: `my_loss.py:loss` or `my_package.losses:loss`; `game_dir` as for `find_game`.

    Raises `GameError` where there is no such file, module or function.
    """
    if name in _GIVEN:
        return GameSpec(name, _GIVEN[name])
    if name.startswith(_GIVEN_PREFIX):
        raise GameError(f"{name!r} was a function of another Python process: pass it to marl_llm.train again, or name its file")
    where, _, thing = name.rpartition(":")
    if not where or not thing:
        raise GameError(f"{name!r} names no function: write it like 'my_loss.py:loss' or 'my_package.losses:loss'")
    module, folder, files = _read_file(where, game_dir, repr(name)) if where.endswith(".py") else (_module(where, name), None, ())
    if not callable(function := getattr(module, thing, None)):
        public = {n: x for n, x in vars(module).items() if callable(x) and not n.startswith("_")}
        made = [n for n, x in public.items() if getattr(x, "__module__", "") == module.__name__]
        raise GameError(f"{name!r}: there is no function {thing!r} in it{meant(thing, made) or '.'} {_listed('It defines', made)}")
    return GameSpec(name, function, folder, files)


def name_of_function(function: Any) -> str:
    """The name by which `find_function` finds a function object again, in this process alone."""
    name = f"{_GIVEN_PREFIX}{getattr(function, '__qualname__', type(function).__name__)}"
    _GIVEN[name] = function
    return name


def _read_file(
    where: str, game_dir: str | pathlib.Path | None, who: str
) -> tuple[types.ModuleType, pathlib.Path, tuple[pathlib.Path, ...]]:
    """A user's file as a module, its folder, and the files relative to it that a run keeps: see `GameSpec`."""
    path = pathlib.Path(where).expanduser() if game_dir is None else pathlib.Path(game_dir) / pathlib.Path(where).name
    if not path.is_file():
        raise GameError(f"there is no file {path} (from {pathlib.Path.cwd()}), which {who} names")
    path = path.resolve()
    module, beside = _load(path, compiled=game_dir is None)
    files = (pathlib.Path(path.name), *beside)
    return module, path.parent, (*files, *_data_files(path.parent, files))


def make_game(name: str, **options: Any) -> Game | Environment:
    """The game of that name with its options. Raises `GameError` listing the games, or the game's options."""
    game = find_game(name).make(**options)
    try:
        weakref.finalize(game, _MADE.pop, id(game), None)
    except TypeError:  # a class with __slots__: it goes without a name, as an object that was given
        return game
    _MADE[id(game)] = name, options
    return game


def name_of_game(game: Any) -> tuple[str, dict[str, Any]]:
    """The name and the options by which `find_game` finds a game again.

    What `make_game` made has the name that it was made by. Any other object gets one, "object ...", which holds in this process alone; a
    environment's tools stay open, for its owner to close. Raises `GameError` for what is no game.
    """
    if id(game) in _MADE:
        return _MADE[id(game)]
    if isinstance(game, Environment):
        name = f"{_GIVEN_PREFIX}{game.workflow.name}"
        _GIVEN[name] = dataclasses.replace(game, close=_leave_open)
    elif not inspect.isclass(game) and isinstance(game, Game):
        name = f"{_GIVEN_PREFIX}{game.name}"
        _GIVEN[name] = game
    else:
        raise GameError(_no_game(repr(game)[:80], game))
    return name, {}


def _leave_open() -> None:
    """Closes nothing."""


def picture_lines(game: Game, state: Any) -> list[str] | None:
    """What `game.picture` draws, as lines of equal length; a text is split into its lines. Raises `GameError` for anything else."""
    drawn = game.picture(state)
    lines = drawn.splitlines() if isinstance(drawn, str) else drawn
    if lines is None:
        return None
    if not isinstance(lines, list | tuple) or not all(isinstance(line, str) for line in lines):
        raise GameError(f"{game.name}: picture returned {drawn!r:.60}; it must return a list of lines of text, or None")
    width = max(map(len, lines), default=0)
    return [line.ljust(width) for line in lines]


def _members() -> set[str]:
    own = {name for name in vars(Game) if not name.startswith("_")}
    return own | set(Game.__annotations__)


def _methods() -> list[str]:
    return [name for name, member in vars(Game).items() if inspect.isfunction(member) and not name.startswith("_")]


def _listed(heading: str, names: list[str]) -> str:
    return f"{heading} {', '.join(names)}" if names else "It has none"


def _object(module: types.ModuleType, thing: str, name: str) -> Any:
    if not hasattr(module, thing):
        made = [n for n, x in vars(module).items() if not n.startswith("_") and getattr(x, "__module__", None) == module.__name__]
        raise GameError(f"game {name!r}: there is no {thing!r} in it{meant(thing, made) or '.'} {_listed('It defines', made)}")
    value = getattr(module, thing)
    if not isinstance(value, Game | Environment) and not _makes_game(value):
        raise GameError(_no_game(name, value))
    return value


def _makes_game(thing: Any) -> bool:
    """Whether an object says that calling it makes a game: a class with a game's methods, or a function whose return type is a game."""
    thing = inspect.unwrap(thing.func if isinstance(thing, functools.partial) else thing)
    if inspect.isclass(thing):
        return issubclass(thing, Environment) or all(callable(getattr(thing, name, None)) for name in _methods())
    annotation = getattr(thing, "__annotations__", {}).get("return") if inspect.isfunction(thing) else None
    if isinstance(annotation, str):  # names are looked up, and nothing is evaluated
        names = [name.strip() for name in annotation.split("|")]
        return all(name.rpartition(".")[2] in _KINDS or _makes_game(_named(thing.__globals__, name)) for name in names)
    kinds = typing.get_args(annotation) or (annotation,)
    return all(inspect.isclass(kind) and (kind is Game or _makes_game(kind)) for kind in kinds)


def _named(names: dict[str, Any], dotted: str) -> Any:
    """What `games.Lock` stands for among the names of a module; None if nothing."""
    head, *rest = dotted.split(".")
    value = names.get(head)
    for part in rest:
        value = getattr(value, part, None)
    return value


def _no_game(name: str, thing: Any) -> str:
    """Why an object is refused."""
    if inspect.isroutine(thing):
        return f"{name} is a function that does not say that it makes a game: write its return type, like `def lock() -> Environment:`"
    lacking = ", ".join(sorted(member for member in _members() if not hasattr(thing, member)))
    kind = "class" if inspect.isclass(thing) else type(thing).__name__
    return f"{name} is a {kind}, neither an Environment nor a Game: it lacks {lacking} (marl_llm.games.protocol)"


def _module(where: str, name: str) -> types.ModuleType:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(f"{error.name}.")):
            raise GameError(f"game {name!r}: {where} needs the module {error.name!r}, which cannot be imported") from error
        raise GameError(f"unknown game {name!r}: there is no module {error.name!r} that Python can import here; {_OWN}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise GameError(f"game {name!r}: {where} cannot be imported: {type(error).__name__}: {error}") from error


def _data_files(folder: pathlib.Path, modules: tuple[pathlib.Path, ...]) -> list[pathlib.Path]:
    """Files of a folder, relative to it, that a text in one of these modules names."""
    trees = [ast.parse((folder / module).read_bytes()) for module in modules if module.suffix == ".py"]
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = {pathlib.Path(text) for text in texts if 0 < len(text) < 256 and text.isprintable()}
    inside = [name for name in names if not name.is_absolute() and ".." not in name.parts and name not in modules]
    return sorted(name for name in inside if (folder / name).is_file())


_LOADED: dict[tuple[pathlib.Path, str], tuple[types.ModuleType, tuple[pathlib.Path, ...]]] = {}


def _load(path: pathlib.Path, compiled: bool) -> tuple[types.ModuleType, tuple[pathlib.Path, ...]]:
    """A file as a module of its own, and the modules beside it that it imported, relative to its folder. Each has its own neighbours.

    Without `compiled` Python writes no compiled files beside it: a run's copy stays as its digest knows it.
    """
    key = (path, hashlib.sha256(path.read_bytes()).hexdigest())
    if key in _LOADED:
        return _LOADED[key]
    folder, before = path.parent, set(sys.modules)
    name = f"game_{path.stem}_{hashlib.sha256(repr(key).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, sys.dont_write_bytecode or not compiled
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise GameError(f"{error.filename} line {error.lineno}: {error.msg}") from error
    except Exception as error:  # whatever the user's file raises while it is read
        here = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        raise GameError(f"{path} line {here[-1] if here else '?'}: {type(error).__name__}: {error}") from error
    finally:
        sys.dont_write_bytecode = writes
        sys.path.remove(str(folder))
        heads = {head.partition(".")[0] for head in before}
        beside = []
        for other in [n for n in sys.modules if n not in before and n != name and n.partition(".")[0] not in heads]:
            file = getattr(sys.modules[other], "__file__", None)
            if file and pathlib.Path(file).resolve().is_relative_to(folder):
                beside.append(pathlib.Path(file).resolve().relative_to(folder))
                del sys.modules[other]  # another file's neighbour of the same name is another module
    _LOADED[key] = (module, tuple(beside))
    return _LOADED[key]
