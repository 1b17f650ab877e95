"""What a compiled program does, read from its text: FLOPs of its products, bytes that it reads from memory, and what it gathers.

XLA's own cost analysis counts the body of a loop once, however often it runs. Here a loop counts as often as it runs where its condition
compares with a number, and once where it compares with data; `ProgramText.loops` lists those, so that a caller can multiply. A product is a
`dot` or a `convolution`; the caller supplies what kernels inside custom calls do (`kernels`, `known`). Bytes are those that an instruction
reads of arrays in main memory (memory space 0), each as often as it is read; of an array that is sliced or gathered from, only the slices.
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
    """A loop whose number of iterations is data, and the cost of one iteration; such loops inside it count once, and are listed too."""

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
    arrays = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = re.search(r"S\((\d+)\)", layout or "")
        arrays.append(Array(dtype, tuple(int(n) for n in dims.split(",") if n), space is None or space.group(1) == "0"))
    return tuple(arrays)


def _split_type(text: str) -> tuple[str, str]:
    """(type, rest) of the text after ' = '."""
    if not text.startswith("("):
        return text.split(" ", 1)[0], text.split(" ", 1)[1]
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[: i + 1], text[i + 2 :]
    raise ValueError(f"a line of the program has an open bracket: {text[:80]}")


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT )?%([\w.\-]+) = (.*)", line)
    if not match:
        return None
    kind, rest = _split_type(match.group(3))
    opcode, rest = re.match(r"([\w\-]+)\((.*)", rest).groups()
    depths = itertools.accumulate(((letter == "(") - (letter == ")") for letter in rest), initial=1)
    end = next(i for i, depth in enumerate(depths) if depth == 0)
    operands = tuple(re.findall(r"%([\w.\-]+)", rest[:end]))
    called = {key: tuple(re.findall(r"%([\w.\-]+)", value)) for key, value in _CALLED.findall(rest[end:].split(", metadata=")[0])}
    return Instruction(match.group(2), opcode, _arrays(kind), operands, called, line, bool(match.group(1)))


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
        computation, self.entry = None, ""
        for line in text.splitlines():
            if opening := re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line):
                computation = self.computations.setdefault(opening.group(2), {})
                self.entry = opening.group(2) if opening.group(1) else self.entry
            elif line.startswith("}"):
                computation = None
            elif computation is not None and (instruction := _instruction(line)):
                computation[instruction.name] = instruction
        if not self.entry:
            raise ValueError("this text has no ENTRY computation: it is not what `compiled.as_text()` gives")

    # ------------------------------------------------------------------------------------------------ loops
    def trips(self, loop: Instruction) -> int | None:
        """How often a loop runs: the compiler's `known_trip_count`, or n divided by the body's step where its condition is `i < n` from 0
        (scans step by 1, products that overlap with the transfer of their weights by 2); None where n is data."""
        if noted := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.line):
            return int(noted.group(1))
        (condition,) = loop.called["condition"]
        lines = self.computations[condition]
        root = next(op for op in lines.values() if op.root)
        if root.opcode == "fusion":
            inner = self.computations[root.called["calls"][0]]
            compare = next((op for op in inner.values() if op.root), root)
            operands = [lines[name] for name in root.operands]
        else:
            compare, operands = root, [lines[name] for name in root.operands if name in lines]
        if compare.opcode != "compare" or "direction=LT" not in compare.line:
            return None
        numbers = _numbers(operands)
        if len(numbers) != 1:
            return None
        place = [_place(op) for op in operands if op.opcode == "get-tuple-element"]
        return math.ceil(numbers[0] / self._step(loop, place[0]) if place else numbers[0])

    def _step(self, loop: Instruction, place: int) -> int:
        """The number that a loop's body adds to the value at `place` of its carry; 1 where it does anything else with it."""
        lines = self.computations[loop.called["body"][0]]
        root = next(op for op in lines.values() if op.root)
        new = lines.get(root.operands[place])
        while new is not None and new.opcode == "copy":
            new = lines.get(new.operands[0])
        if new is None:
            return 1
        inside = self.computations[new.called["calls"][0]].values() if new.opcode == "fusion" else ()
        adds = new.opcode == "add" or any(op.root and op.opcode == "add" for op in inside)
        steps = _numbers([*(lines[name] for name in new.operands if name in lines), *inside])
        return steps[0] if adds and len(steps) == 1 and steps[0] > 0 else 1

    def _inside(self, name: str, cost, fusions: bool):
        """`cost` of each instruction of a computation and of all that it calls, loops as often as they run; `fusions`: within them too."""
        total = 0.0
        for op in self.computations[name].values():
            total += cost(name, op)
            for key, names in op.called.items():
                if key in ("body", "branch_computations") or (key == "to_apply" and op.opcode == "call") or key == "calls":
                    runs = (self.trips(op) or 1) if key == "body" else 1
                    total += runs * sum(self._inside(n, cost, fusions) for n in names if key != "calls" or fusions)
        return total

    # ------------------------------------------------------------------------------------------------ costs
    def flops(self, name: str | None = None) -> float | int:
        """Two per multiply-add of all products of a computation; by default of the whole program."""
        return self._inside(name or self.entry, self._flops_cost, fusions=True)

    def read(self, name: str | None = None) -> float | int:
        """Bytes that a computation reads from main memory."""
        return self._inside(name or self.entry, self._read_cost, fusions=False)

    def _flops_cost(self, computation: str, op: Instruction) -> float | int:
        if op.opcode == "custom-call":
            return self._kernel_flops(op)
        if op.opcode not in ("dot", "convolution"):
            return 0.0
        left, right = (self.computations[computation][n].results[0].dims for n in op.operands[:2])
        return _product_flops(op, left, right)

    def _kernel_flops(self, op: Instruction) -> float | int:
        return sum(flops(op.results[0].dims) for name, flops in self.kernels.items() if name in _source(op))

    def calls(self, kernel: str, name: str) -> int:
        """How many custom calls with `kernel` in their names in the source a computation makes itself."""
        return sum(op.opcode == "custom-call" and kernel in _source(op) for op in self.computations[name].values())

    def _read_cost(self, computation: str, op: Instruction) -> float | int:
        if op.opcode in FREE or (op.opcode == "custom-call" and self.known and self.known in _source(op)):
            return 0.0
        lines, total = self.computations[computation], 0.0
        for number, name in enumerate(op.operands):
            if name in lines and len(lines[name].results) == 1 and lines[name].results[0].main:
                total += self._taken(op, number, lines[name].results[0].bytes)
        return total

    def _taken(self, op: Instruction, operand: int, size: float | int) -> float | int:
        """Bytes that an instruction reads of one operand of so many bytes."""
        if op.opcode in TAKES and operand == 0:
            return min(size, sum(r.bytes for r in op.results))
        if op.opcode in ("slice-start", "dynamic-slice-start") and operand == 0:  # of (what it reads, what it makes, a flag)
            return min(size, op.results[1].bytes)
        if op.opcode in ("dynamic-update-slice", "scatter") and operand == 0:
            return 0.0  # changed where it lies
        if op.opcode != "fusion":
            return size
        return min(size, self._taken_inside(op.called["calls"][0], operand, size))

    def _taken_inside(self, computation: str, parameter: int, size: float | int) -> float | int:
        lines = self.computations[computation]
        (source,) = [op.name for op in lines.values() if op.opcode == "parameter" and f"parameter({parameter})" in op.line]
        total, names = 0.0, [source]
        while names:
            name = names.pop()
            if lines[name].root:  # passed on unchanged
                return size
            for op in lines.values():
                for number, operand in enumerate(op.operands):
                    if operand == name and op.opcode in SAME:
                        names.append(op.name)
                    elif operand == name:
                        total += self._taken(op, number, size)
        return total

    # ------------------------------------------------------------------------------------------------ loops and gathers
    def loops(self, name: str | None = None, depth: int = 0) -> list[Loop]:
        """The loops whose number of iterations is data, outermost first."""
        out = []
        for op in self.computations[name or self.entry].values():
            for key in ("body", "branch_computations", "calls"):
                for called in op.called.get(key, ()) if op.opcode != "fusion" else ():
                    if key == "body" and self.trips(op) is None:
                        out.append(Loop(called, self.flops(called), self.read(called), depth))
                    out += self.loops(called, depth + (key == "body"))
        return out

    def moved_out(self, body: str) -> ProgramText:
        """This program if the chip had no room for a loop's constants: values that each iteration of its body passes on unchanged lie in
        main memory, and count each time that they are read, also in loops inside."""
        out = copy.copy(self)
        out.computations = dict(self.computations)
        out._move(body, self._kept(body))
        return out

    def _kept(self, body: str) -> set[int]:
        """The places of a loop's carry that its body passes on unchanged, directly or through loops inside."""
        lines = self.computations[body]
        root = next(op for op in lines.values() if op.root)
        return {place for place, name in enumerate(root.operands) if self._origin(lines, name) == place}

    def _origin(self, lines: dict[str, Instruction], name: str) -> int | None:
        """Which place of a computation's parameter a value is, unchanged; None where it is not one."""
        op = lines[name]
        if op.opcode == "bitcast":
            return self._origin(lines, op.operands[0])
        if op.opcode != "get-tuple-element":
            return None
        place, source = _place(op), lines[op.operands[0]]
        if source.opcode == "parameter":
            return place
        if source.opcode == "while" and place in self._kept(source.called["body"][0]):
            return self._origin(lines, lines[source.operands[0]].operands[place])
        return None

    def _move(self, computation: str, places: set[int]) -> None:
        """Marks the values at `places` of a computation's parameter as in main memory, also in loops inside that carry them."""
        lines = self.computations[computation]
        moved = {name for name, op in lines.items() if op.opcode in VIEWS and self._origin(lines, name) in places}

        def main(op):
            return dataclasses.replace(op, results=tuple(dataclasses.replace(r, main=True) for r in op.results))

        for op in lines.values():
            if op.opcode == "while":
                carried = lines[op.operands[0]].operands
                self._move(op.called["body"][0], {place for place, name in enumerate(carried) if name in moved})
        self.computations[computation] = {name: main(op) if name in moved else op for name, op in lines.items()}

    def gathers(self, name: str | None = None, depth: int = 0) -> list[Gather]:
        """All all-gathers, also those in loops."""
        out = []
        for op in self.computations[name or self.entry].values():
            if op.opcode in ("all-gather", "all-gather-start"):
                out.append(Gather(op.name, max(r.bytes for r in op.results), depth))
            for key in ("body", "branch_computations", "calls"):
                for called in op.called.get(key, ()) if op.opcode != "fusion" else ():
                    out += self.gathers(called, depth + (key == "body"))
        return out


def _source(op: Instruction) -> str:
    """The name of an instruction in the source."""
    match = re.search(r'op_name="([^"]*)"', op.line)
    return match.group(1) if match else ""


def _place(op: Instruction) -> int:
    """The tuple index of a `get-tuple-element`."""
    return int(re.search(r"index=(\d+)", op.line).group(1))


def _numbers(instructions: Iterable[Instruction]) -> list[int]:
    """The integer constants among some instructions."""
    return [int(m.group(1)) for op in instructions if op.opcode == "constant" and (m := re.search(r"constant\((\d+)\)", op.line))]


def _product_flops(op: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float | int:
    out = math.prod(op.results[0].dims)
    if op.opcode == "dot":
        match = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", op.line)
        return 2.0 * out * math.prod(left[int(n)] for n in match.group(1).split(",") if n)
    lhs, rhs, result = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.line).groups()
    spatial = sorted(letter for letter in rhs if letter.isdigit())
    window = dict(re.findall(r"(\w+)=([\w_\-]+)", (re.search(r"window=\{([^}]*)\}", op.line) or [None, ""])[1]))

    def entry(key, i, default):
        return int(window[key].split("x")[i]) if key in window else default

    pairs = 1.0
    for i, letter in enumerate(spatial):
        sizes = left[lhs.index(letter)], right[rhs.index(letter)], op.results[0].dims[result.index(letter)]
        low = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        pairs *= _pairs(*sizes, low, entry("stride", i, 1), entry("lhs_dilate", i, 1), entry("rhs_dilate", i, 1))
    groups = re.search(r"batch_group_count=(\d+)", op.line)
    over = right[rhs.index("i")]
    outputs = op.results[0].dims[result.index("b")] * op.results[0].dims[result.index("f")]
    return 2.0 * pairs * over * outputs * (left[lhs.index("b")] / op.results[0].dims[result.index("b")] / int(groups[1]) if groups else 1)


def _pairs(size: int, kernel: int, out: int, low: int, stride: int, dilate: int, kernel_dilate: int) -> int:
    """(output, kernel) positions of a window that fall on a real element: a batch dimension written as a window counts once."""
    if kernel == 1 and stride == dilate == 1 and low == 0:
        return out
    total, span = 0, (size - 1) * dilate + 1
    for k in range(kernel):
        for o in range(out):
            position = o * stride - low + k * kernel_dilate
            total += 0 <= position < span and position % dilate == 0
    return total
