"""What stands between a foreign package and the process that it runs in: its random draws, and texts that it would execute.

Foreign games draw from the process-wide `random` and `numpy.random`, and some of their scorers call `eval` or SymPy's parser on a response.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import random
import re
import threading
from collections.abc import Iterator
from types import ModuleType

import numpy as np

from marl_llm.games.registry import GameError

SPLITS = {"validation": (0,), "test": (1,), "train": range(2, 10)}  # of a seed modulo 10
_LOCK = threading.RLock()  # one for the process, for what it guards belongs to the process
# Functions that an answer may call, and the constants and variables that SymPy knows by more than one letter.
CALLS = frozenset(
    "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs Rational Integer Pow Add Mul".split()
)
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.BitXor, ast.USub, ast.UAdd,
)  # fmt: skip
DEEPEST = 100  # levels of a formula
_NOT_A_NUMBER = re.compile(r"nan|inf|e\s*[-+]?\s*[\d_]{4,}", re.IGNORECASE)


def foreign_package(module: str, distribution: str, version: str, extra: str) -> ModuleType:
    """The module of an extra. Raises `GameError` where it is not installed, or not in the version whose code was read."""
    install = f"pip install 'marl_llm[{extra}]'"
    try:
        installed = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise GameError(f"this game needs the package {distribution} {version}: {install}") from error
    if installed != version:
        raise GameError(f"{distribution} {installed} is installed, and version {version} is what was read and may run: {install}")
    with seeded(0):  # TextArena draws while it is imported
        return importlib.import_module(module)


def seed_of(*names: object) -> int:
    """A seed of 31 bits by identity (law 6)."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, names)).encode()).digest()[:4], "big") >> 1


def seed_in(split: str, number: int, *names: object) -> int:
    """The seed of task `number` of a split: `seed_of` the names with another last digit, which says the split. Raises `KeyError`."""
    return 10 * (seed_of(*names, number) // 10) + SPLITS[split][number % len(SPLITS[split])]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The process-wide generators of `random` and NumPy start from this seed within, and are put back behind it.

    One thread at a time: another thread's draws within it are not its own, which is why nothing of this library draws from them.
    """
    with _LOCK:
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the state that foreign code draws from)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def is_formula(text: str) -> bool:
    """Whether a text is a formula: numbers of at most 30 digits, names, arithmetic and the functions of `CALLS`.

    A name alone does nothing, whatever it stands for; attributes, texts, indices and other calls are no formula, nor is what is nested
    deeper than `DEEPEST`: who computes it might run out of stack.
    """
    try:
        level: list[ast.AST] = [ast.parse(text.strip(), mode="eval")]
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    nodes: list[ast.AST] = []
    for _ in range(DEEPEST):
        nodes += level
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        return False
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if not isinstance(node, _NODES):
            return False
        if isinstance(node, ast.Call) and (node.keywords or not isinstance(node.func, ast.Name) or node.func.id not in CALLS):
            return False
        if isinstance(node, ast.Name) and id(node) not in called and ("__" in node.id or len(node.id) > 16):
            return False
        if isinstance(node, ast.Constant) and (type(node.value) not in (int, float) or len(repr(node.value)) > 30):
            return False
    return True


def is_moderate(text: str) -> bool:
    """Whether no number in a text is infinite, no number at all, or has an exponent of more than three digits."""
    return _NOT_A_NUMBER.search(text) is None
