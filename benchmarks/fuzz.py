"""Law 14 at length: nothing that a program, a policy, a tool or a server says raises, voids a play at will, or is paid.

    nice -n 10 python -m benchmarks.fuzz [--inputs=100000] [--seed=0]

Random bytes, texts, JSON and token ids, and mutations of what a door expects, go through every door in turn. Prints one JSON line: how many
inputs, exceptions, voids and rewards there were, and the host's time per input (median, p99.9 and longest, in milliseconds): CPU time of
the process, which a busy machine hardly changes, and wall time.
`tests/laws/test_law_14.py` sends what hypothesis finds through the same doors.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import random
import string
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from absl import app, flags

from marl_llm.games import JointLetter, PlanPath, coding, search
from marl_llm.text import QWEN2_5, ByteTokenizer, Chat, Message
from marl_llm.tools._chat_backends import BackendError, read_reply, retry_after_s
from marl_llm.tools._compare import USUAL, same_output
from marl_llm.tools.chat import checked_reply, kept_reply
from marl_llm.tools.judge import read_calls
from marl_llm.tools.results import success
from marl_llm.tools.retriever.client import read_hits
from marl_llm.tools.retriever.server import read_request
from marl_llm.tools.said import read_json, read_text, read_value
from marl_llm.tools.sandbox import Program
from marl_llm.workflows import Assignment, Controller, Role, Scripted, Task, Workflow
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.rewards import earned

INPUTS = flags.DEFINE_integer("inputs", 100_000, "inputs, dealt over the doors")
SEED = flags.DEFINE_integer("seed", 0, "of the inputs")
BYTES = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))
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
    """What became of an input: whether it voided a play, and what it was paid."""

    void: bool = False
    paid: float = 0.0


Door = Callable[[Input], Heard]


def refused(kinds: type[Exception] | tuple[type[Exception], ...], read: Callable[[Any], Any], said: Any) -> Any:
    """What `read` makes of it; None where it is refused by the exception that says so to its caller."""
    try:
        return read(said)
    except kinds:
        return None


def roles() -> list[Role]:
    """Every role of the library's workflows."""
    built = (search.decompose_role(), search.evidence_role(), search.answer_role())
    groups = (search.m_ask_roles(), search.mini_roles(), coding.coding_roles(), coding.mini_coding_roles())
    return [*built, *(role for group in groups for role in group.values())]


def role_door(role: Role) -> Door:
    """A response to one role: every field is safe to store and to send."""

    def hear(said: Input) -> Heard:
        for text in (said.text, BYTES.decode(i % BYTES.vocab_size for i in said.ids)):
            fields, why = role.read(text)
            json.dumps([fields, why], ensure_ascii=False, allow_nan=False).encode()
        return Heard()

    return hear


def play_door(team: Workflow, fields: dict[str, Any], hidden: dict[str, Any]) -> Door:
    """A whole play in which everyone, outside models included, says the input."""

    def hear(said: Input) -> Heard:
        scripts = Assignment(dict.fromkeys(team.roles, "s"), {"s": Scripted(lambda turn: said.text)})
        with Controller(team, scripts, None, {}, attempts=1) as controller:
            try:
                (episode,) = controller.play([Task(0, fields, hidden)]).episodes
            except RolloutError:  # every play was void, for there is one
                return Heard(void=True)
        pays = [one for way in episode.trajectories for one in earned(team, way).values()]
        return Heard(episode.void, max([0.0, *(max(one.team + one.local, one.team) for one in pays)]))

    return hear


def tool_doors() -> dict[str, Door]:
    """What tools, servers and programs say."""
    chat = Chat(BYTES, QWEN2_5)
    asked = chat.start([Message("user", "q")])

    def values(said: Input) -> Heard:
        value = read_value([said.text, {said.text: (said.text, 1.5)}, *frozenset({said.text})])
        json.dumps(value.value, ensure_ascii=False, allow_nan=False).encode()
        json.dumps(read_json(said.raw).value, ensure_ascii=False, allow_nan=False).encode()
        read_text(said.raw).value.encode()
        return Heard(void=not value.ok)

    def conversation(said: Input) -> Heard:
        for ids in ([i % BYTES.vocab_size for i in said.ids], BYTES.encode(read_text(said.text).value)):
            reply = chat.read(chat.reply(asked, ids))
            read_value([dict(call.arguments) for call in reply.tool_calls])
        return Heard()

    def chat_server(said: Input) -> Heard:
        reply = refused(ValueError, read_reply, said.raw)
        reply = reply and refused(BackendError, lambda one: checked_reply(one, 10, 10), reply)
        if reply is not None:
            reply.text.encode()
            assert reply.completion_tokens is None or 0 <= reply.completion_tokens <= 10
        kept_reply(said.text)
        assert (retry_after_s(said.text) or 0.0) >= 0.0
        return Heard()

    def retriever_server(said: Input) -> Heard:
        for hits in refused(ValueError, lambda raw: read_hits(raw, 1, 3), said.raw) or ():
            json.dumps([dataclasses.asdict(hit) for hit in hits], allow_nan=False, ensure_ascii=False).encode()
        return Heard()

    def retriever_client(said: Input) -> Heard:
        refused((ValueError, TypeError), lambda raw: read_request(raw, 3), said.raw)
        return Heard()

    def program(said: Input) -> Heard:
        wanted = [SECRET, [1, {"a": 2.5}]]
        verdict = read_calls(Program(said.raw, b"", 0, channel=said.raw), wanted, USUAL, True)
        repr(verdict.cases).encode()
        return Heard(paid=verdict.pass_rate + same_output(read_text(said.raw).value, SECRET))

    found = (values, conversation, chat_server, retriever_server, retriever_client, program)
    return {door.__name__: door for door in found}


def play_doors() -> dict[str, Door]:
    """The library's teams, with tools that say the same page or the verdict that nothing passes."""

    async def retrieve(query: str) -> Any:
        return success(("a page",), 0.0)

    async def verify(code: str, function: str, tests: Any, visible_tests: Any) -> Any:
        return success({"pass_rate": 0.0, "report": code[:100]}, 0.0)

    question, gold = {"question": "who?"}, {"answers": (SECRET,)}
    teams = (search.parallel_retrieval, search.retrieve_extract_answer, search.iterative_search)
    doors = {f"play {build.__name__}": play_door(build(retrieve), question, gold) for build in teams}
    problem, tests = {"problem": "p", "visible": "", "interface": ""}, {"function": "f", "tests": (), "visible_tests": ()}
    return doors | {"play plan_code_verify_reflect": play_door(coding.plan_code_verify_reflect(verify), problem, tests)}


def state_game_doors() -> dict[str, Door]:
    """The parsers of the value-state games: ids to the compiled `act`, texts to `read`. Random moves may well be good ones: no pay."""
    import jax

    def door(game: Any) -> Door:
        state = game.reset(game.instance(jax.random.key(0), "train"))
        acts = {role: jax.jit(lambda ids, where, name=role.name: game.act(state, name, ids, where)) for role in game.roles}

        def hear(said: Input) -> Heard:
            for role, act in acts.items():
                ids = np.resize(np.asarray([*said.ids, 0], np.int64) % game.tokenizer.vocab_size, role.response_tokens).astype(np.int32)
                after = act(ids, np.arange(role.response_tokens) < max(1, len(said.ids)))
                assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after) if np.issubdtype(leaf.dtype, np.floating))
                if hasattr(game, "read"):
                    game.read(state, role.name, said.text)
            return Heard()

        return hear

    return {"act plan_path": door(PlanPath()), "act joint_letter": door(JointLetter())}


def doors(state_games: bool = True) -> dict[str, Door]:
    """All doors by name."""
    by_role = {f"role {number} {role.name}": role_door(role) for number, role in enumerate(roles())}
    return by_role | tool_doors() | play_doors() | (state_game_doors() if state_games else {})


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


def main(argv: list[str]) -> None:
    """Sends and prints."""
    del argv
    every, counts, times, worst = list(doors().items()), collections.Counter(), [], {}
    for _, door in every:
        door(Input(""))  # compiled, imported, warm
    said = inputs(SEED.value)
    for number in range(INPUTS.value):
        name, door = every[number % len(every)]
        one = next(said)
        tick, cpu = time.perf_counter(), time.process_time()
        try:
            heard = door(one)
        except Exception as error:
            counts["exceptions"] += 1
            worst.setdefault(f"{name}: {type(error).__name__}: {error}"[:200], one.text[:200])
            continue
        times.append((time.process_time() - cpu, time.perf_counter() - tick, f"{name}, {len(one.text)} characters"))
        counts["voids"] += heard.void
        counts["rewards"] += heard.paid > 0
    cpu_ms, wall_ms = (np.asarray(column) * 1e3 for column in list(zip(*times))[:2])
    print(json.dumps({
        "inputs": INPUTS.value, "doors": len(every), "exceptions": counts["exceptions"], "voids": counts["voids"],
        "rewards": counts["rewards"], "raised": worst, "slowest": max(times)[2], "load": round(os.getloadavg()[0], 1),
        **{f"{name}_{unit}_ms": round(float(np.quantile(column, share)), 3)
           for unit, column in (("cpu", cpu_ms), ("wall", wall_ms)) for name, share in (("p50", 0.5), ("p99.9", 0.999), ("max", 1))},
    }))  # fmt: skip


if __name__ == "__main__":
    app.run(main)
