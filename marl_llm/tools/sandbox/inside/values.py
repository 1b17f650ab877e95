"""Python values as JSON with their exact types: what arguments and returned values cross the fence as.

Only built-in types, matched by identity of the type: a subclass of int with its own `__eq__` leaves as an opaque name and equals nothing.
The dictionaries of `collections` leave as dictionaries, and scalars of NumPy as the numbers that they are.
"""

import collections
import math
import re
import sys

MAX_DEPTH = 60
_SMALL = 1 << 53
_DICTIONARIES = (dict, collections.defaultdict, collections.OrderedDict, collections.Counter)
_SURROGATE = re.compile("[\ud800-\udfff]")  # texts with one are no UTF-8; the host replaces them in all but compared values


class Opaque:
    """A returned value of a type that is not compared: a subclass, an array, a user's class."""

    def __init__(self, kind: str, text: str):
        self.kind, self.text = kind, text

    def __repr__(self):
        return f"<{self.kind}: {self.text}>"


def _opaque(value) -> dict:
    kind = type(value)
    try:
        text = repr(value)[:200]
    except Exception as error:  # a candidate's own __repr__
        text = f"repr failed: {type(error).__name__}"
    return {"o": [f"{kind.__module__}.{kind.__qualname__}"[:200], text]}


def encode(value, depth: int = 0):
    """A JSON tree for `value`: lists stay lists; other types are one-key objects."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        return value if _SURROGATE.search(value) is None else {"u": value.encode("utf-16-le", "surrogatepass").hex()}
    if kind is int:
        return value if -_SMALL < value < _SMALL else {"i": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"f": repr(value)}
    if depth >= MAX_DEPTH:
        return {"o": [kind.__name__, "nested too deeply"]}
    if kind is list:
        return [encode(item, depth + 1) for item in value]
    if kind is tuple:
        return {"t": [encode(item, depth + 1) for item in value]}
    if kind in _DICTIONARIES:
        return {"d": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]}
    if kind is set or kind is frozenset:
        return {"s" if kind is set else "z": [encode(item, depth + 1) for item in value]}
    if kind is bytes:
        return {"b": value.hex()}
    if kind is complex:
        return {"c": [encode(value.real), encode(value.imag)]}
    scalar = getattr(sys.modules.get("numpy"), "generic", None)
    if isinstance(scalar, type) and isinstance(value, scalar) and type(number := value.item()) is not kind:
        return encode(number, depth + 1)
    return _opaque(value)


def decode(tree):
    """The value of a tree that the host's `encode` made: arguments on their way in. What comes out is read by `tools._compare`."""
    if tree is None or type(tree) in (bool, str, int, float):
        return tree
    if type(tree) is list:
        return [decode(item) for item in tree]
    if type(tree) is not dict or len(tree) != 1:
        raise ValueError("not an encoded value")
    ((tag, body),) = tree.items()
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float(body)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "u":
        return bytes.fromhex(body).decode("utf-16-le", "surrogatepass")
    if tag == "o":
        return Opaque(str(body[0]), str(body[1]))
    if tag == "c":
        return complex(decode(body[0]), decode(body[1]))
    if tag == "d":
        return {decode(key): decode(item) for key, item in body}
    makers = {"t": tuple, "s": set, "z": frozenset}
    if tag not in makers:
        raise ValueError(f"unknown tag {tag!r}")
    return makers[tag](decode(item) for item in body)
