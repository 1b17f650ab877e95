"""Random input for every door through which a program's results enter: no exception, no reward.

    python -m benchmarks.doors [--inputs=100000] [--seed=0]

`DOORS` is the list: each is a pure function of bytes that reads them as the host would and says whether they earned a pass. None starts a
process, so that many inputs are tried in a minute; a few per thousand are long.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from marl_llm.tools.judge import Tolerance, read_calls, read_stdio, same_output
from marl_llm.tools.sandbox import Execution, Program, Workspace
from marl_llm.tools.sandbox.limits import program_of, read_record
from marl_llm.untrusted import read_json, read_text

# Long and odd enough that no random input is one of them.
EXPECTED = (7919 * 104729, ["x7919", {"k": (1.5, {"q7919", 104729})}, b"\x00\xff"], "x104729 y7919")


def result_channel(data: bytes) -> bool:
    """The lines of a judged call."""
    judgement = read_calls(Program(b"", b"", 0, channel=data), list(EXPECTED), Tolerance(), True)
    for case in judgement.cases:
        f"{case.error}{case.value!r}".encode()
    json.dumps(judgement.counts(), allow_nan=False)
    return judgement.pass_rate > 0


def returned_value(data: bytes) -> bool:
    """A whole line of the harness, with `data` in the place of the value."""
    return result_channel(b'{"case": 0, "state": "returned", "value": %s, "mutated": false, "seconds": 0.1}\n' % data)


def printed(data: bytes) -> bool:
    """Standard output and standard error."""
    executions = [Execution(Program(data, data, code), None, 0.0) for code in (0, 1)]
    judgement = read_stdio(executions, ["829348951.5\nx104729 y7919"] * 2, Tolerance()).outcome()
    "".join(case.error for case in judgement.cases).encode()
    return judgement.pass_rate > 0 or same_output("829348951.5", read_text(data).value)


def supervisor_record(data: bytes) -> bool:
    """The record of an execution. It has no reward, but every outcome must be whole."""
    record, problem = read_record(data)
    if not problem:
        program_of(record, [(b"", False)] * 3, None)
    problem.encode()
    return False


def workspace(data: bytes) -> bool:
    """A snapshot; damaged ones raise ValueError, as documented."""
    try:
        "".join(Workspace(data).files()).encode()
    except ValueError:
        return False
    return False


def text_and_json(data: bytes) -> bool:
    """The door under all others."""
    read_text(data).value.encode()
    json.dumps(read_json(data).value, allow_nan=False, ensure_ascii=False).encode()
    return False


DOORS: tuple[Callable[[bytes], bool], ...] = (result_channel, returned_value, printed, supervisor_record, workspace, text_and_json)
_PIECES = (
    b'{"case": 0, "state": "returned", "value": ', b', "mutated": false, "seconds": 0.1}', b'{"case":', b'"state":', b'"returned"',
    b'"raised"',
    b'"error":', b'"value":', b'"seconds":', b'"mutated":', b"true", b"null", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"0", b"-1",
    b"1.5",
    b"[",
    b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\ud800", b"\n", b"\xff", b"\xed\xa0\x80", b"\0", b'{"i":', b'{"f":', b'{"b":', b'{"u":',
    b'{"c":', b'{"d":', b'{"t":', b'{"s":', b'{"z":', b'{"o":', b'"0x', b'"00d8"', b'"status":', b'"cpu":', b'"peak":', b'"failure":', b"e",
    b"1e99999999999999999999", b"d\xa4\x01\x03\x00\x00\x00\x00\x00\x00\x00\x00\x00abc",
)  # fmt: skip


def random_input(draw: random.Random) -> bytes:
    """Bytes that begin to look like what a harness, a supervisor or a program says; one in 500 repeats itself a thousand times."""
    pieces = [draw.choice(_PIECES) if draw.random() < 0.9 else draw.randbytes(draw.randrange(8)) for _ in range(draw.randrange(24))]
    return b"".join(pieces) * (1000 if draw.random() < 0.002 else 1)


def main() -> None:
    """Prints a line per door, and ends with the first exception or reward."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doors", description=main.__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs per door")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    args = parser.parse_args()
    for door in DOORS:
        draw, tick, slowest = random.Random(f"{args.seed} {door.__name__}"), time.perf_counter(), 0.0
        for _ in range(args.inputs):
            data, start = random_input(draw), time.perf_counter()
            if door(data):
                raise RuntimeError(f"{door.__name__} paid for {data[:2000]!r}")
            slowest = max(slowest, time.perf_counter() - start)
        seconds = round(time.perf_counter() - tick, 1)
        row = {"row": door.__name__, "inputs": args.inputs, "seconds": seconds, "slowest_ms": round(slowest * 1e3, 1)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
