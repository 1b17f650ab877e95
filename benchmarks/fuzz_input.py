"""What `benchmarks.fuzz` says at the doors, and what comes of it."""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable, Iterator
from typing import Any

MAX_TEXT = 200_000  # characters of an input: more than any budget of tokens gives; servers' larger answers are refused by their length
SECRET = "Zyzzyva 4711 quokka"  # the gold answer, which no input holds
# What the doors are made for, so that mutations come close to it.
SEEDS = (
    '{"queries": ["a \\ud83d", "b"]}', '{"queries": ["a", "b"]}', '{"evidence": "a"}', '```json\n{"answer": "a"}\n```', "<end>",
    "<sub_questions>a\nb</sub_questions>",
    "<knowledge>a</knowledge><final_answer>b</final_answer>", "<evidence>a</evidence>", "```python\nprint(1)\n```",
    "q a1 b2 year ; q a3 b4 job",
    "add 3 | less 2", "at 1 try less", "def f ( x ) : return x",
    '<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>',
    '{"choices": [{"message": {"content": "a"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}',
    '{"result": [[{"document": {"contents": "a"}, "score": 1.5}]]}', '{"queries": ["a"], "topk": 3, "return_scores": true}',
    '{"case": 0, "state": "returned", "seconds": 0.1, "error": null, "mutated": false, "value": {"l": [1, 2]}}',
    "U R 2 down, left", "1 2.5 nan",
    "f ( 4 ) = 7 = 5", "x = x + 3 ; x = x - 2", "1 2 + 7 = 1 9 #### 1 9", "x = 1 2 ; x = x + 7 ; print ( x )",
    "**Test Input:**\n1 2\n**Test Output:**\n3", "so it is\n#### [U, R]", "so it is\n#### 1,234", "#### [[1, 2, 3], [2, 1, 4]]",
    "read agent_first from_0 walk", "[U,R,D,L]", "[[1,2,3],[2,1,4]]", "12/5", "\\frac{1}{2}", "agent: 1 2\nboxes: 3 4",
    '{"question": "a", "input_output": "{\\"inputs\\": [\\"1\\"], \\"outputs\\": [\\"2\\"]}", "solutions": "[\\"a\\"]"}',
    '{"problem": "a", "tests": [{"input": "1\\n[2]", "output": "[3]", "testtype": "functional", "fn_name": "f"}], "answer": "7"}',
    '{"description": "a", "private_tests": {"input": ["1"], "output": ["2"]}, "solutions": {"language": [3], "solution": ["b"]}}',
    '{"question_content": "a", "public_test_cases": "[{\\"input\\": \\"1\\", \\"output\\": \\"2\\"}]", '
    '"private_test_cases": "eJxrYJmqxQAABYsBrg==", "metadata": "{\\"func_name\\": \\"f\\"}"}',
    '{"type": "observation", "data": {"observation": {"a": "b", "metadata": {}}, "reward": 1.5, "done": false}}',
    '{"type": "observation", "data": {"observation": {"a": "b"}, "reward": 1e308}}',
    '{"type": "error", "data": {"code": "a", "message": "b"}}', '<action>1</action>',
    '{"number": 1, "text": "a"}', '{"number": 2, "text": "b"}',
    "because\nCORRECT: yes\nSCORE: 7.5", "SCORE: 7/10",
    '{"question": "a", "test_input": ["1"], "test_output": ["2"], "golden_answers": ["b"], "reward_model": {"ground_truth": "c"}}',
)  # fmt: skip
PIECES = (
    "\ud800", "\udc00", "\\ud83d", "\x00", "NaN", "Infinity", "1e400", "9" * 400, "9" * 5000, "[" * 200, "{" * 200, '{"a":' * 100, "]}",
    '"', "\\", "```", "\n", "<", ">", "<end>", "²", "٣", "\u2028", "é", "😀", ",", "-", "null", "true",
    " " * 500, "\n" * 500, "<tool_call>",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Input:
    """What is said: a text, which may be no valid one, and token ids, to be taken modulo a vocabulary."""

    text: str
    ids: tuple[int, ...] = ()

    @property
    def raw(self) -> bytes:
        """The text as bytes."""
        return self.text.encode("utf-8", "surrogatepass")


@dataclasses.dataclass(frozen=True)
class Heard:
    """What became of an input: whether it aborted a play, and what it was paid."""

    aborted: bool = False
    paid: float = 0.0


Door = Callable[[Input], Heard]


def refused(kinds: type[Exception] | tuple[type[Exception], ...], read: Callable[[Any], Any], value: Any) -> Any:
    """What `read` makes of the value; None where that is refused by the exception that says so to its caller."""
    try:
        return read(value)
    except kinds:
        return None


def inputs(seed: int) -> Iterator[Input]:
    """Endless inputs: plain noise, and what a door expects with pieces put in, cut out, doubled and moved."""
    rng = random.Random(seed)
    while True:
        ids = tuple(rng.randrange(1 << 17) for _ in range(rng.choice((0, 3, 40))))
        kind = rng.random()
        if kind < 0.15:
            text = rng.randbytes(rng.choice((0, 5, 200))).decode("utf-8", "surrogateescape")
        elif kind < 0.3:
            text = "".join(map(chr, (rng.randrange(0x11000) for _ in range(rng.choice((1, 30, 300))))))
        elif kind < 0.4:
            text = "".join(rng.choices(string.printable + '[]{}",:', k=rng.choice((5, 100, 1000))))
        elif kind < 0.42:
            text = rng.choice(PIECES) * rng.choice((10, 1000, 4000))
        else:
            text = rng.choice(SEEDS)
            for _ in range(rng.randint(0, 6)):
                a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
                text = text[:MAX_TEXT]
                a, b = min(a, len(text)), min(b, len(text))
                changed = (text[:a] + rng.choice(PIECES) + text[b:], text[:a] + text[b:], text[:b] + text[a:], text + rng.choice(SEEDS))
                text = rng.choice(changed)
        yield Input(text[:MAX_TEXT], ids)
