"""Imports a package with every annotation checked: shapes by jaxtyping, all other types by beartype.

jaxtyping's own import hook does both to every function. That costs a call some 25 microseconds, and builds the checks of a closure anew
with each call that makes one. For code on the host, without arrays, it was four fifths of a test's time. So a function whose annotations
name a shape is checked by jaxtyping, and any other by beartype alone, below a microsecond, unless it is a closure.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.machinery
import marshal
import os
import pathlib
import sys
from collections.abc import Iterable

SHAPES = "@jaxtyping.jaxtyped(typechecker=beartype.beartype)"
TYPES = "@beartype.beartype"
FIELDS = "@type_checks.checked_fields"
_WRITTEN_BY = repr((sys.version, sys.flags.optimize)).encode() + pathlib.Path(__file__).read_bytes()  # who else would write other code


def install(packages: Iterable[str], folder: pathlib.Path) -> None:
    """Checks the annotations of all modules of `packages` that are imported from now on.

    Args:
      packages: Names of packages.
      folder: Where the bytecode of the checked modules is kept, each under a digest of its source, this module's and Python's version.

    Raises:
      RuntimeError: One of them was imported already, so that it would stay unchecked.
    """
    packages = tuple(packages)
    if early := sorted(name for name in packages if name in sys.modules):
        raise RuntimeError(f"{', '.join(early)}: imported before its checks; import type_checks first")
    folder.mkdir(parents=True, exist_ok=True)
    sys.meta_path.insert(0, _Finder(packages, folder))


def checked_fields(cls: type) -> type:
    """A dataclass whose generated `__init__` checks the types of its arguments."""
    import beartype

    cls.__init__ = beartype.beartype(cls.__init__)
    return cls


class _Finder(importlib.machinery.PathFinder):
    def __init__(self, packages: tuple[str, ...], folder: pathlib.Path):
        self.packages, self.folder = packages, folder

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.packages:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.folder)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, folder: pathlib.Path):
        super().__init__(fullname, path)
        self.folder = folder

    def source_to_code(self, data, path, *, _optimize=-1):
        return compile(add_checks(ast.parse(data, path)), path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname):
        """The checked module's code, kept also where Python itself may write no bytecode, as PYTHONDONTWRITEBYTECODE asks."""
        source = self.get_data(self.path)
        kept = self.folder / hashlib.sha256(b"\0".join([_WRITTEN_BY, self.path.encode(), source])).hexdigest()
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        code = self.source_to_code(source, self.path)
        new = kept.with_suffix(f".{os.getpid()}")  # another process may write the same
        new.write_bytes(marshal.dumps(code))
        new.replace(kept)
        return code


def add_checks(module: ast.Module) -> ast.Module:
    """The module with a decorator at each function and dataclass whose annotations can be checked."""
    _Checks(module).visit(module)
    first = (isinstance(line, ast.ImportFrom) and line.module == "__future__" for line in module.body)
    start = max((i + 1 for i, future in enumerate(first) if future), default=int(ast.get_docstring(module) is not None))
    module.body.insert(start, ast.Import([ast.alias(name) for name in ("beartype", "jaxtyping", "type_checks")], lineno=1, col_offset=0))
    return ast.fix_missing_locations(module)


class _Checks(ast.NodeTransformer):
    def __init__(self, module: ast.Module):
        self.depth = 0  # of functions around
        self.shapes: set[str] = set()  # what this module calls jaxtyping's types
        self.unknown: set[str] = set()  # names that only a type checker imports: nothing can be checked against them
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping":
                self.shapes |= {name.asname or name.name for name in node.names} - {"Array"}
            if isinstance(node, ast.If) and _names(node.test) & {"TYPE_CHECKING"}:
                for line in node.body:
                    self.unknown |= {name.asname or name.name for name in line.names}

    def visit_FunctionDef(self, node):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        hints = [a.annotation for a in arguments if a is not None and a.annotation is not None]
        if node.returns is not None:
            hints.append(node.returns)
        names = set().union(*map(_names, hints)) if hints else set()
        if names & self.shapes:
            node.decorator_list.append(_decorator(SHAPES, node))
        elif names and not names & self.unknown and not self.depth:
            node.decorator_list.append(_decorator(TYPES, node))
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        fields = set().union(*(_names(line.annotation) for line in node.body if isinstance(line, ast.AnnAssign)), set())
        if any("dataclass" in _names(d) or "dataclass" in ast.unparse(d) for d in node.decorator_list) and fields:
            if fields & self.shapes:
                node.decorator_list.insert(0, _decorator(SHAPES, node))
            elif not fields & self.unknown and not self.depth:
                node.decorator_list.insert(0, _decorator(FIELDS, node))
        self.generic_visit(node)
        return node


def _decorator(text: str, node: ast.AST) -> ast.expr:
    found = ast.parse(f"{text}\ndef _(): ...").body[0].decorator_list[0]
    for part in ast.walk(found):
        ast.copy_location(part, node)
    return found


def _names(node: ast.AST) -> set[str]:
    """Every name that an annotation mentions, also within a string."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            found.add(part.value)
    return found
