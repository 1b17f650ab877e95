"""What a compiled program does, read from its text: FLOPs of its products, bytes that it reads from memory, and what it gathers.

XLA's own cost analysis counts the body of a loop once, however often it runs. Here a loop counts as often as its condition says where that
is a number, and once where it is data; such loops are told apart, so that a caller can say how often they run. A product is a `dot` or a
`convolution`; what a kernel inside a custom call does is not seen, so a caller says it (`kernels`, `known`). Bytes are those that an
instruction reads of arrays that do not lie on the chip (memory space 0), each as often as it is read; of an array that is sliced or
gathered from, only what is taken.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping

import jax

SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
SIZES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(calls|body|condition|to_apply|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all", "partition-id"}
FREE |= {"copy-done", "async-done", "all-reduce-done", "all-gather-done", "collective-permute-done", "iota", "optimization-barrier"}
TAKES = ("dynamic-slice", "gather", "slice")
SAME = ("bitcast", "reshape")
VIEWS = ("get-tuple-element", "bitcast")
SPARSE_CORES = ("xla_tpu_offload_gather_to_sparsecore", "xla_tpu_enable_offloading_scatter_to_sparsecore")  # options of the TPU compiler


@dataclasses.dataclass(frozen=True)
class Array:
    """A result: its type, dimensions, and whether it lies in the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    main: bool

    @property
    def bytes(self) -> float | int:
        """Without what a layout adds."""
        return math.prod(self.dims) * SIZES.get(self.dtype, 0)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: dict[str, tuple[str, ...]]
    line: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop whose number of iterations is data, with what one of them costs; loops in it that are data too count once, and are told."""

    name: str
    flops: float | int
    read: float | int
    depth: int


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather: bytes of its result, and in how many loops it lies."""

    name: str
    bytes: float | int
    depth: int


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout or "")
        found.append(Array(dtype, tuple(int(n) for n in dims.split(",") if n), space is None or space.group(1) == "0"))
    return tuple(found)


def _split_type(text: str) -> tuple[str, str]:
    """(type, rest) of what stands behind ' = '."""
    if not text.startswith("("):
        return text.split(" ", 1)[0], text.split(" ", 1)[1]
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    raise ValueError(f"a line of the program has an open bracket: {text[:80]}")


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*)", line)
    if not found:
        return None
    kind, rest = _split_type(found.group(3))
    opcode, rest = re.match(r"([\w\-]+)\((.*)", rest).groups()
    depths = itertools.accumulate(((letter == "(") - (letter == ")") for letter in rest), initial=1)
    end = next(i for i, depth in enumerate(depths) if depth == 0)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    called = {key: tuple(re.findall(r"%([\w.\-]+)", value)) for key, value in _CALLED.findall(rest[end:].split(", metadata=")[0])}
    return Instruction(found.group(2), opcode, _arrays(kind), operands, called, line, bool(found.group(1)))


def text_of(lowered, compiled) -> str:
    """A compiled program's text. Where XLA cannot write it down (JAX 0.10.2, chips whose sparse cores gather beside other work),
    it is compiled once more without those."""
    try:
        return compiled.as_text()
    except jax.errors.JaxRuntimeError as e:
        if "async-update" not in str(e):
            raise
        return lowered.compile(compiler_options=dict.fromkeys(SPARSE_CORES, False)).as_text()


class ProgramText:
    """A compiled program. `text`: of `compiled.as_text()`. `kernels`: the FLOPs of a custom call by a part of its name in the source, given
    the dimensions of its first result; of others they are 0. `known`: such a part of custom calls whose reads the caller adds himself; of
    others each operand counts whole."""

    def __init__(self, text: str, kernels: Mapping[str, Callable[[tuple[int, ...]], float | int]] | None = None, known: str | None = None):
        self.kernels, self.known = kernels or {}, known
        self.computations: dict[str, dict[str, Instruction]] = {}
        here, self.entry = None, ""
        for line in text.splitlines():
            if opening := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                here = self.computations.setdefault(opening.group(2), {})
                self.entry = opening.group(2) if opening.group(1) else self.entry
            elif line.startswith("}"):
                here = None
            elif here is not None and (one := _instruction(line)):
                here[one.name] = one
        if not self.entry:
            raise ValueError("this text has no ENTRY computation: it is not what `compiled.as_text()` gives")

    # ------------------------------------------------------------------------------------------------ loops
    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: as the compiler noted it, or its condition's `i < n` with a number n, begun at 0 and in the steps that its
        body adds to i, by ones as in scans or by twos as in products whose weights travel meanwhile; None where n is data."""
        if noted := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.line):
            return int(noted.group(1))
        (condition,) = loop.called["condition"]
        lines = self.computations[condition]
        root = next(one for one in lines.values() if one.root)
        if root.opcode == "fusion":
            inner = self.computations[root.called["calls"][0]]
            compare = next((one for one in inner.values() if one.root), root)
            given = [lines[name] for name in root.operands]
        else:
            compare, given = root, [lines[name] for name in root.operands if name in lines]
        if compare.opcode != "compare" or "direction=LT" not in compare.line:
            return None
        numbers = _numbers(given)
        if len(numbers) != 1:
            return None
        place = [_place(one) for one in given if one.opcode == "get-tuple-element"]
        return math.ceil(numbers[0] / self._step(loop, place[0]) if place else numbers[0])

    def _step(self, loop: Instruction, place: int) -> int:
        """What a loop's body adds to the value at a place of what it carries; 1 where that is not the sum of it and a number."""
        lines = self.computations[loop.called["body"][0]]
        root = next(one for one in lines.values() if one.root)
        new = lines.get(root.operands[place])
        while new is not None and new.opcode == "copy":
            new = lines.get(new.operands[0])
        if new is None:
            return 1
        inside = self.computations[new.called["calls"][0]].values() if new.opcode == "fusion" else ()
        adds = new.opcode == "add" or any(one.root and one.opcode == "add" for one in inside)
        steps = _numbers([*(lines[name] for name in new.operands if name in lines), *inside])
        return steps[0] if adds and len(steps) == 1 and steps[0] > 0 else 1

    def _inside(self, name: str, cost, fusions: bool):
        """`cost` of each instruction of a computation and of all that it calls, loops as often as they run; `fusions`: within them too."""
        total = 0.0
        for one in self.computations[name].values():
            total += cost(name, one)
            for key, names in one.called.items():
                if key in ("body", "branch_computations") or (key == "to_apply" and one.opcode == "call") or key == "calls":
                    often = (self.trips(one) or 1) if key == "body" else 1
                    total += often * sum(self._inside(n, cost, fusions) for n in names if key != "calls" or fusions)
        return total

    # ------------------------------------------------------------------------------------------------ costs
    def flops(self, name: str | None = None) -> float | int:
        """Two per multiply-add of all products of a computation; by default of the whole program."""
        return self._inside(name or self.entry, self._flops_cost, fusions=True)

    def read(self, name: str | None = None) -> float | int:
        """Bytes that a computation reads from main memory."""
        return self._inside(name or self.entry, self._read_cost, fusions=False)

    def _flops_cost(self, computation: str, one: Instruction) -> float | int:
        if one.opcode == "custom-call":
            return self._kernel_flops(one)
        if one.opcode not in ("dot", "convolution"):
            return 0.0
        left, right = (self.computations[computation][n].results[0].dims for n in one.operands[:2])
        return _product_flops(one, left, right)

    def _kernel_flops(self, one: Instruction) -> float | int:
        return sum(flops(one.results[0].dims) for name, flops in self.kernels.items() if name in _source(one))

    def calls(self, kernel: str, name: str) -> int:
        """How many custom calls with `kernel` in their names in the source a computation makes itself."""
        return sum(one.opcode == "custom-call" and kernel in _source(one) for one in self.computations[name].values())

    def _read_cost(self, computation: str, one: Instruction) -> float | int:
        if one.opcode in FREE or (one.opcode == "custom-call" and self.known and self.known in _source(one)):
            return 0.0
        lines, total = self.computations[computation], 0.0
        for number, name in enumerate(one.operands):
            if name in lines and len(lines[name].results) == 1 and lines[name].results[0].main:
                total += self._taken(one, number, lines[name].results[0].bytes)
        return total

    def _taken(self, one: Instruction, operand: int, whole: float | int) -> float | int:
        """Bytes that an instruction reads of one operand of so many bytes."""
        if one.opcode in TAKES and operand == 0:
            return min(whole, sum(r.bytes for r in one.results))
        if one.opcode in ("slice-start", "dynamic-slice-start") and operand == 0:  # of (what it reads, what it makes, a flag)
            return min(whole, one.results[1].bytes)
        if one.opcode in ("dynamic-update-slice", "scatter") and operand == 0:
            return 0.0  # changed where it lies
        if one.opcode != "fusion":
            return whole
        return min(whole, self._taken_inside(one.called["calls"][0], operand, whole))

    def _taken_inside(self, computation: str, parameter: int, whole: float | int) -> float | int:
        lines = self.computations[computation]
        (source,) = [one.name for one in lines.values() if one.opcode == "parameter" and f"parameter({parameter})" in one.line]
        total, names = 0.0, [source]
        while names:
            name = names.pop()
            if lines[name].root:  # handed on as it is
                return whole
            for one in lines.values():
                for number, operand in enumerate(one.operands):
                    if operand == name and one.opcode in SAME:
                        names.append(one.name)
                    elif operand == name:
                        total += self._taken(one, number, whole)
        return total

    # ------------------------------------------------------------------------------------------------ what is where
    def loops(self, name: str | None = None, depth: int = 0) -> list[Loop]:
        """The loops whose number of iterations is data, outermost first."""
        out = []
        for one in self.computations[name or self.entry].values():
            for key in ("body", "branch_computations", "calls"):
                for called in one.called.get(key, ()) if one.opcode != "fusion" else ():
                    if key == "body" and self.trips(one) is None:
                        out.append(Loop(called, self.flops(called), self.read(called), depth))
                    out += self.loops(called, depth + (key == "body"))
        return out

    def moved_out(self, body: str) -> ProgramText:
        """This program, were there no room on the chip for what a loop keeps there: what each iteration of its body hands on as it got it
        lies in main memory, and counts each time that it is read, also in loops inside."""
        out = copy.copy(self)
        out.computations = dict(self.computations)
        out._move(body, self._kept(body))
        return out

    def _kept(self, body: str) -> set[int]:
        """The places of what a loop carries that its body hands on as it got them, by itself or through loops inside."""
        lines = self.computations[body]
        root = next(one for one in lines.values() if one.root)
        return {place for place, name in enumerate(root.operands) if self._origin(lines, name) == place}

    def _origin(self, lines: dict[str, Instruction], name: str) -> int | None:
        """Which place of a computation's parameter a value is, unchanged; None where it is not one."""
        one = lines[name]
        if one.opcode == "bitcast":
            return self._origin(lines, one.operands[0])
        if one.opcode != "get-tuple-element":
            return None
        place, whole = _place(one), lines[one.operands[0]]
        if whole.opcode == "parameter":
            return place
        if whole.opcode == "while" and place in self._kept(whole.called["body"][0]):
            return self._origin(lines, lines[whole.operands[0]].operands[place])
        return None

    def _move(self, computation: str, places: set[int]) -> None:
        """Sets what comes in at some places of a computation's parameter, and in loops inside that get it, into main memory."""
        lines = self.computations[computation]
        moved = {name for name, one in lines.items() if one.opcode in VIEWS and self._origin(lines, name) in places}

        def main(one):
            return dataclasses.replace(one, results=tuple(dataclasses.replace(r, main=True) for r in one.results))

        for one in lines.values():
            if one.opcode == "while":
                given = lines[one.operands[0]].operands
                self._move(one.called["body"][0], {place for place, name in enumerate(given) if name in moved})
        self.computations[computation] = {name: main(one) if name in moved else one for name, one in lines.items()}

    def gathers(self, name: str | None = None, depth: int = 0) -> list[Gather]:
        """All all-gathers, wherever they lie."""
        out = []
        for one in self.computations[name or self.entry].values():
            if one.opcode in ("all-gather", "all-gather-start"):
                out.append(Gather(one.name, max(r.bytes for r in one.results), depth))
            for key in ("body", "branch_computations", "calls"):
                for called in one.called.get(key, ()) if one.opcode != "fusion" else ():
                    out += self.gathers(called, depth + (key == "body"))
        return out


def _source(one: Instruction) -> str:
    """What an instruction is called in the source."""
    found = re.search(r'op_name="([^"]*)"', one.line)
    return found.group(1) if found else ""


def _place(one: Instruction) -> int:
    """Of which place of a tuple a `get-tuple-element` is."""
    return int(re.search(r"index=(\d+)", one.line).group(1))


def _numbers(given: Iterable[Instruction]) -> list[int]:
    """The constants among some instructions, of whole numbers."""
    return [int(m.group(1)) for one in given if one.opcode == "constant" and (m := re.search(r"constant\((\d+)\)", one.line))]


def _product_flops(one: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float | int:
    out = math.prod(one.results[0].dims)
    if one.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", one.line)
        return 2.0 * out * math.prod(left[int(n)] for n in found.group(1).split(",") if n)
    lhs, rhs, result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.line).groups()
    spatial = sorted(letter for letter in rhs if letter.isdigit())
    window = dict(re.findall(r"(\w+)=([\w_\-]+)", (re.search(r"window=\{([^}]*)\}", one.line) or [None, ""])[1]))

    def entry(key, i, default):
        return int(window[key].split("x")[i]) if key in window else default

    pairs = 1.0
    for i, letter in enumerate(spatial):
        sizes = left[lhs.index(letter)], right[rhs.index(letter)], one.results[0].dims[result.index(letter)]
        low = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        pairs *= _pairs(*sizes, low, entry("stride", i, 1), entry("lhs_dilate", i, 1), entry("rhs_dilate", i, 1))
    groups = re.search(r"batch_group_count=(\d+)", one.line)
    over = right[rhs.index("i")]
    outputs = one.results[0].dims[result.index("b")] * one.results[0].dims[result.index("f")]
    return 2.0 * pairs * over * outputs * (left[lhs.index("b")] / one.results[0].dims[result.index("b")] / int(groups[1]) if groups else 1)


def _pairs(size: int, kernel: int, out: int, low: int, stride: int, dilate: int, kernel_dilate: int) -> int:
    """(output, kernel) positions of a window that fall on a real element: a batch dimension written as a window counts once."""
    if kernel == 1 and stride == dilate == 1 and low == 0:
        return out
    total, span = 0, (size - 1) * dilate + 1
    for k in range(kernel):
        for o in range(out):
            at = o * stride - low + k * kernel_dilate
            total += 0 <= at < span and at % dilate == 0
    return total
