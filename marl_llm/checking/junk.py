"""Texts of players without sense: empty, endless, the prompt, other scripts, invalid numbers, and code."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.checking.plays import Says, Words, cut_to
from marl_llm.workflows import ScriptTurn

LONG = 4000  # characters; a role's budget cuts it
TEXTS: Mapping[str, str] = {
    "empty": "",
    "space": " \n\t ",
    "endless": "a " * LONG,
    "endless digits": "9" * LONG,
    "brackets": "[" * LONG,
    "Unicode": "\u202e\u0000\ufeff\ud800 ١٢٣ ﷽ 👩‍👩‍👧 \U0010ffff",
    "numbers": "1e999 -1e999 NaN Infinity 0x1p1023 1/0 99999999999999999999999",
    "JSON": '{"a": [1e999, {"b": null}], "a": "\\ud800"}',
    "SQL": "'; DROP TABLE plays; -- ' OR 1=1",
    "HTML": "<script>alert(1)</script><think></think>&nbsp;",
    "code": "```python\nprint(1)\n```\nassert True",
    "special tokens": "<|im_end|><|endoftext|><eos></s>",
}


def battery(renderer: Any) -> dict[str, Says]:
    """Name -> a player that always says such a text, cut to its role's budget."""
    fixed = {name: (lambda turn, text=text: cut_to(turn, text, renderer)) for name, text in TEXTS.items()}
    return {**fixed, "copied prompt": _copied(renderer), "instructions": _instructions(renderer), "random tokens": _random(renderer)}


def _copied(renderer: Any) -> Says:
    def says(turn: ScriptTurn) -> Words:
        if turn.role.speaks_ids:
            return turn.role.prompt_ids(turn.fields)[: turn.role.max_tokens]
        return cut_to(turn, "\n".join(message.content for message in turn.messages), renderer)

    return says


def _instructions(renderer: Any) -> Says:
    """The role's template: the format example that stands in it, and nothing of the task."""

    def says(turn: ScriptTurn) -> Words:
        text = turn.role.prompt if isinstance(turn.role.prompt, str) else ""
        return cut_to(turn, text.replace("{{", "{").replace("}}", "}"), renderer)

    return says


def _random(renderer: Any) -> Callable[[ScriptTurn], Words]:
    def says(turn: ScriptTurn) -> Words:
        dice = random.Random(repr(turn.seed))
        if renderer is None:
            return cut_to(turn, "".join(chr(dice.randrange(32, 127)) for _ in range(LONG)), None)
        size, most = renderer.tokenizer.vocab_size, turn.role.max_tokens
        ids = tuple(dice.randrange(size) for _ in range(dice.randrange(most) + 1))
        return ids if turn.role.speaks_ids else renderer.tokenizer.decode(ids)

    return says
