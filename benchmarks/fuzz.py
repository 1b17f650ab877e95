"""Law 14 at length: nothing that a program, a policy, a tool or a server says raises, aborts a play at will, or is paid.

    nice -n 10 python -m benchmarks.fuzz [--inputs=100000] [--seed=0]

Random bytes, texts, JSON and token ids, and mutations of what a door expects, go through every door in turn. Prints one JSON line: how many
inputs, exceptions, aborts and rewards there were, and the host's time per input (median, p99.9 and longest, in milliseconds): CPU time of
the process, which a busy machine hardly changes, and wall time.
`tests/laws/test_law_14.py` sends what hypothesis finds through the same doors.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import time
from typing import Any

import numpy as np
from absl import app, flags

from benchmarks.fuzz_games import game_roles, row_doors, team_doors
from benchmarks.fuzz_input import PIECES, SECRET, SEEDS, Door, Heard, Input, inputs, refused
from marl_llm.coaching.answers import Unreadable
from marl_llm.coaching.answers import read_answer as read_score
from marl_llm.games import JointLetter, PlanPath, Sokoban, Sudoku, coding, search
from marl_llm.games.external import openenv
from marl_llm.games.external.openenv_sessions import Fault, Refusal
from marl_llm.games.external.openenv_sessions import read_answer as read_server
from marl_llm.serving.completions import read_request as read_completion
from marl_llm.serving.completions import read_reward
from marl_llm.text import CHATML, ByteTokenizer, Chat, Message
from marl_llm.tools._chat_backends import BackendError, read_reply, retry_after_s
from marl_llm.tools._compare import USUAL, same_output
from marl_llm.tools.chat import checked_reply, kept_reply
from marl_llm.tools.judge import read_calls
from marl_llm.tools.results import success
from marl_llm.tools.retriever.client import read_hits
from marl_llm.tools.retriever.server import read_request
from marl_llm.tools.sandbox import Program
from marl_llm.untrusted import read_json, read_text, read_value
from marl_llm.viewing.seat import Turns
from marl_llm.workflows import Assignment, Controller, FormatError, Role, Scripted, Task, Workflow
from marl_llm.workflows.errors import RolloutError
from marl_llm.workflows.rewards import earned

INPUTS = flags.DEFINE_integer("inputs", 100_000, "inputs, dealt over the doors")
SEED = flags.DEFINE_integer("seed", 0, "of the inputs")
__all__ = ["PIECES", "SEEDS", "Heard", "Input", "doors", "inputs", "role_door"]
BYTES = ByteTokenizer(specials=("<|im_start|>", "<|im_end|>"), stops=("<|im_end|>",))


def roles() -> list[Role]:
    """Every role of the library's workflows."""
    built = (search.decompose_role(), search.evidence_role(), search.answer_role())
    groups = (search.m_ask_roles(), search.mini_roles(), coding.coding_roles(), coding.mini_coding_roles())
    return [*built, *(role for group in groups for role in group.values()), *game_roles()]


def role_door(role: Role) -> Door:
    """A response to one role: every field is safe to store and to send."""

    def hear(message: Input) -> Heard:
        for text in (message.text, BYTES.decode(i % BYTES.vocab_size for i in message.ids)):
            fields, why = role.read(text)
            json.dumps([fields, why], ensure_ascii=False, allow_nan=False).encode()
        return Heard()

    return hear


def play_door(team: Workflow, fields: dict[str, Any], hidden: dict[str, Any]) -> Door:
    """A whole play in which everyone, outside models included, says the input."""

    def hear(message: Input) -> Heard:
        scripts = Assignment(dict.fromkeys(team.roles, "s"), {"s": Scripted(lambda turn: message.text)})
        with Controller(team, scripts, None, {}, attempts=1) as controller:
            try:
                (episode,) = controller.play([Task(0, fields, hidden)]).episodes
            except RolloutError:  # every play was aborted, for there is one
                return Heard(aborted=True)
        pays = [pay for way in episode.trajectories for pay in earned(team, way).values()]
        return Heard(episode.aborted, max([0.0, *(max(pay.team + pay.local, pay.team) for pay in pays)]))

    return hear


def tool_doors() -> dict[str, Door]:
    """What tools, servers and programs say."""
    chat = Chat(BYTES, CHATML)
    asked = chat.start([Message("user", "q")])

    def values(message: Input) -> Heard:
        value = read_value([message.text, {message.text: (message.text, 1.5)}, *frozenset({message.text})])
        json.dumps(value.value, ensure_ascii=False, allow_nan=False).encode()
        json.dumps(read_json(message.raw).value, ensure_ascii=False, allow_nan=False).encode()
        read_text(message.raw).value.encode()
        return Heard(aborted=not value.ok)

    def conversation(message: Input) -> Heard:
        for ids in ([i % BYTES.vocab_size for i in message.ids], BYTES.encode(read_text(message.text).value)):
            reply = chat.read(chat.reply(asked, ids), True)
            read_value([dict(call.arguments) for call in reply.tool_calls])
        return Heard()

    def chat_server(message: Input) -> Heard:
        reply = refused(ValueError, read_reply, message.raw)
        reply = reply and refused(BackendError, lambda parsed: checked_reply(parsed, 10, 10), reply)
        if reply is not None:
            reply.text.encode()
            assert reply.completion_tokens is None or 0 <= reply.completion_tokens <= 10
        kept_reply(message.text)
        assert (retry_after_s(message.text) or 0.0) >= 0.0
        return Heard()

    def retriever_server(message: Input) -> Heard:
        for hits in refused(ValueError, lambda raw: read_hits(raw, 1, 3), message.raw) or ():
            json.dumps([dataclasses.asdict(hit) for hit in hits], allow_nan=False, ensure_ascii=False).encode()
        return Heard()

    def retriever_client(message: Input) -> Heard:
        refused((ValueError, TypeError), lambda raw: read_request(raw, 3), message.raw)
        return Heard()

    def endpoint_client(message: Input) -> Heard:
        models = {"m": lambda *_: None}
        body = b'{"model": "m", "messages": [{"role": "user", "content": %s}]}' % message.raw
        for raw in (message.raw, body):
            for kind in ("chat/completions", "completions"):
                refused(ValueError, lambda raw, kind=kind: read_completion(raw, models, kind), raw)
            refused(ValueError, lambda raw: read_reward(raw, models), raw)
        return Heard()

    def program(message: Input) -> Heard:
        wanted = [SECRET, [1, {"a": 2.5}]]
        verdict = read_calls(Program(message.raw, b"", 0, channel=message.raw), wanted, USUAL, True)
        repr(verdict.cases).encode()
        return Heard(paid=verdict.pass_rate + same_output(read_text(message.raw).value, SECRET))

    doors = (values, conversation, chat_server, retriever_server, retriever_client, endpoint_client, program)
    return {door.__name__: door for door in doors}


def people_doors() -> dict[str, Door]:
    """What an OpenEnv server, a person at a seat's page and a coach say. Their numbers are theirs to choose, within bounds."""
    templates = ({"a": "{json}"}, {"a": "{int}"}, {"a": ["{text}"]})
    parsers = [openenv.action_parser(template, form) for template in templates for form in ("plain", "tags")]

    def openenv_server(message: Input) -> Heard:
        answer = refused((Fault, Refusal), read_server, message.raw)
        if answer is not None:
            assert math.isfinite(1e6 * answer.reward)  # a metric sums a play's rewards
            seen = [refused(Fault, lambda path: openenv.observed(answer.observation, path), path) for path in ("", "a", "a.b")]
            "".join(filter(None, seen)).encode()
        for parse in parsers:
            json.dumps(refused(FormatError, parse, read_text(message.raw).value), allow_nan=False, ensure_ascii=False).encode()
        return Heard()

    def person(message: Input) -> Heard:
        turns = Turns()  # its first turn is the one that the seeds answer
        turns.show("r", [("user", "q")])
        status, told = turns.answer(message.raw)
        told.encode()
        assert status in (200, 400, 409)
        return Heard()

    def coach(message: Input) -> Heard:
        score = refused(Unreadable, read_score, message.text)
        assert score is None or 0.0 <= score.value <= 10.0
        return Heard()

    return {door.__name__: door for door in (openenv_server, person, coach)}


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

        def hear(message: Input) -> Heard:
            for role, act in acts.items():
                ids = np.resize(np.asarray([*message.ids, 0], np.int64) % game.tokenizer.vocab_size, role.response_tokens).astype(np.int32)
                after = act(ids, np.arange(role.response_tokens) < max(1, len(message.ids)))
                assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after) if np.issubdtype(leaf.dtype, np.floating))
                if hasattr(game, "read"):
                    game.read(state, role.name, message.text)
            return Heard()

        return hear

    return {f"act {game.name}": door(game) for game in (PlanPath(), JointLetter(), Sokoban(), Sudoku())}


def doors(state_games: bool = True) -> dict[str, Door]:
    """All doors by name."""
    by_role = {f"role {number} {role.name}": role_door(role) for number, role in enumerate(roles())}
    host = by_role | tool_doors() | people_doors() | play_doors() | team_doors() | row_doors()
    return host | (state_game_doors() if state_games else {})


def main(argv: list[str]) -> None:
    """Sends and prints."""
    del argv
    every, counts, times, worst = list(doors().items()), collections.Counter(), [], {}
    for _, door in every:
        door(Input(""))  # compiled, imported, warm
    messages = inputs(SEED.value)
    for number in range(INPUTS.value):
        name, door = every[number % len(every)]
        message = next(messages)
        tick, cpu = time.perf_counter(), time.process_time()
        try:
            heard = door(message)
        except Exception as error:
            counts["exceptions"] += 1
            worst.setdefault(f"{name}: {type(error).__name__}: {error}"[:200], message.text[:200])
            continue
        times.append((time.process_time() - cpu, time.perf_counter() - tick, f"{name}, {len(message.text)} characters"))
        counts["aborts"] += heard.aborted
        counts["rewards"] += heard.paid > 0
    cpu_ms, wall_ms = (np.asarray(column) * 1e3 for column in list(zip(*times))[:2])
    print(json.dumps({
        "inputs": INPUTS.value, "doors": len(every), "exceptions": counts["exceptions"], "aborts": counts["aborts"],
        "rewards": counts["rewards"], "raised": worst, "slowest": max(times)[2], "load": round(os.getloadavg()[0], 1),
        **{f"{name}_{unit}_ms": round(float(np.quantile(column, share)), 3)
           for unit, column in (("cpu", cpu_ms), ("wall", wall_ms)) for name, share in (("p50", 0.5), ("p99.9", 0.999), ("max", 1))},
    }))  # fmt: skip


if __name__ == "__main__":
    app.run(main)
