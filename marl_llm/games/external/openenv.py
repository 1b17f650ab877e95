"""Environments of OpenEnv servers (github.com/meta-pytorch/OpenEnv), played by one role over WebSocket.

    reset ─▶ [ player ─▶ step ] until the server says done, or `turns` responses

A server's state is no value, but a position is: the seed, the actions, and what they were answered. A play goes on in the session
that stands at its position. Where none does, after a fork, a new one is reset to the seed and given the actions again, and must give the
same answers (law 4). That rests on seeds, which servers may ignore, so `seeds_of` plays the server before anything else does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from marl_llm.games.external.guards import SPLITS, seed_in
from marl_llm.games.external.openenv_sessions import (
    CLOSE_S,
    INVALID,
    RAISED,
    Answer,
    Fault,
    Refusal,
    Session,
    Sessions,
    websocket_url,
    websockets_client,
)
from marl_llm.games.kit.miniature import byte_renderer
from marl_llm.games.registry import GameError
from marl_llm.hints import check_word
from marl_llm.tools.results import FailureKind, ToolResult, failed
from marl_llm.untrusted import Bounds, read_json
from marl_llm.workflows import Environment, FormatError, Role, ScriptTurn, Task, Trajectory, Workflow, repeat, sequence, tool
from marl_llm.workflows.parsers import Parser
from marl_llm.workflows.rewards import Award, broadcast, format_penalty
from marl_llm.workflows.splits import drawn_tasks

log = logging.getLogger(__name__)
SEEDS = (12, 25, 38, 47)  # those of the training split that a server is tried with
WORDS = ("0", "1", "hello", "[0]")  # said to a server that is tried, as far as they are actions
ACTION = Bounds(size=100_000, depth=16, values=10_000)  # of what a response may hold
FIELDS = ("history", "seen", "note", "rewards", "over", "refused", "raised")
History = tuple[tuple[str, str], ...]  # action as JSON ("" for the reset) and digest of the answer
_SLOT = re.compile(r"\{(text|int|number|json)\}")
_TAGGED = re.compile(r"<action>((?:(?!<action>).)*?)</action>\s*\Z", re.DOTALL)


# ---- what is said to a server, and what is seen of its answers


def read_object(text: str, option: str) -> dict[str, Any]:
    """An option that is a JSON object; empty: none. Raises `GameError`."""
    read = read_json(text or "{}", ACTION)
    if not read.ok or not isinstance(read.value, dict):
        raise GameError(f'config.game.{option}={text!r} is no JSON object, like {{"message": "{{text}}"}}')
    return read.value


def filled(template: Any, text: str) -> Any:
    """A template with a response in its slots: `{text}` within a text; a text that is `{int}`, `{number}` or `{json}` becomes that value.

    Raises `FormatError` for a response that is no such value.
    """
    if isinstance(template, dict):
        return {key: filled(value, text) for key, value in template.items()}
    if isinstance(template, list):
        return [filled(value, text) for value in template]
    if not isinstance(template, str):
        return template
    if template not in ("{int}", "{number}", "{json}"):
        return template.replace("{text}", text)
    read = read_json(text, ACTION)
    kinds = {"{int}": int, "{number}": int | float}.get(template)
    if not read.ok or kinds and (isinstance(read.value, bool) or not isinstance(read.value, kinds)):
        raise FormatError(f"no {template[1:-1]}: {text[:40]!r}")
    return read.value


def action_parser(template: Any, form: str) -> Parser:
    """What of a response is the action: all of it ("plain"), or what stands within <action> at its end ("tags"), put into the template."""

    def parse(text: str) -> dict[str, Any]:
        if form == "tags":
            match = _TAGGED.search(text[-ACTION.size :])
            if match is None:
                raise FormatError("no <action>...</action> at the end")
            text = match[1]
        text = text.strip()
        if not text or len(text) > ACTION.size:
            raise FormatError(f"an action of {len(text)} characters; 1 to {ACTION.size} are allowed")
        action = filled(template, text)
        if not isinstance(action, dict):
            raise FormatError("the action is no JSON object")
        return {"action": action}

    return parse


def observed(observation: Mapping[str, Any], path: str) -> str:
    """The part of an observation at a dotted path as text; without a path all of it but `metadata`, as JSON.

    Raises `Fault` where the observation has no such part.
    """
    part: Any = observation if path else {key: value for key, value in observation.items() if key != "metadata"}
    for key in filter(None, path.split(".")):
        if not isinstance(part, Mapping) or key not in part:
            known = ", ".join(map(str, part))[:200] if isinstance(part, Mapping) else "no parts"
            raise Fault(FailureKind.BAD_REPLY, f"config.game.observation={path!r}: the observation has no {key!r}; it has {known}")
        part = part[key]
    return part if isinstance(part, str) else _json(part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


# ---- the game


@dataclasses.dataclass(frozen=True)
class OpenEnv:
    """One server. A position is (seed, split, history)."""

    sessions: Sessions  # its sessions
    reset: Mapping[str, Any]  # further data of a reset; a text "{split}" in it becomes the task's split
    observation: str  # see `observed`
    turns: int  # responses in a play
    raises: str  # "abort": a step at which the server raises aborts the play; "refuse": it is a refused action

    def begin(self, seed: int, split: str) -> dict[str, Any] | ToolResult:
        """The fields at the start of a play."""
        return self._timed(lambda: self._begin(seed, split))

    def step(
        self, seed: int, split: str, action: dict[str, Any] | None, history: History, seen: str, note: str, rewards: tuple[float, ...],
        over: bool, refused: int, raised: int,
    ) -> dict[str, Any] | ToolResult:  # fmt: skip
        """The fields after a response; `action` is None for one that could not be read, of which the server hears nothing."""
        position = (seed, split, tuple(map(tuple, history)))
        fields = dict(zip(FIELDS, (position[2], seen, "", (*rewards, 0.0), over, refused, raised)))
        if action is not None:
            return self._timed(lambda: self._step(fields, position, action))
        if len(fields["rewards"]) == self.turns and (session := self.sessions.take(position)) is not None:
            self.sessions.end(session)
        return fields | {"note": "\nYour response could not be read as an action."}

    def _begin(self, seed: int, split: str) -> dict[str, Any]:
        session = self.sessions.begin()
        with self._ended_on_error(session):
            seen, over = self.reset_to(session, seed, split)
            if over:
                raise Fault(FailureKind.BAD_REPLY, "the server says done before the first action")
        fields = dict(zip(FIELDS, (session.position[2], seen, "", (), False, 0, 0)))
        self.sessions.rest(session)
        return fields

    def _step(self, fields: dict[str, Any], position: tuple, action: dict[str, Any]) -> dict[str, Any]:
        session = self.sessions.take(position)
        if session is None:
            session = self.sessions.begin()
            with self._ended_on_error(session):
                self._replay(session, position)
        with self._ended_on_error(session):
            seen, reward, over, refusal = self.act(session, action)
        if refusal is not None:
            seen = fields["seen"]
            fields = fields | {"refused": fields["refused"] + 1, "raised": fields["raised"] + (refusal.code == RAISED)}
            fields["note"] = f"\nThe environment refused your action: {refusal}"
        rewards = (*fields["rewards"][:-1], reward)
        fields = fields | dict(history=session.position[2], seen=seen, rewards=rewards, over=over)
        if over or len(rewards) == self.turns:
            self.sessions.end(session)
        else:
            self.sessions.rest(session)
        return fields

    def reset_to(self, session: Session, seed: int, split: str) -> tuple[str, bool]:
        """What is seen first, and whether it is over already. Raises `Fault`."""
        data = {key: split if value == "{split}" else value for key, value in self.reset.items()}
        session.position = (seed, split, ())
        try:
            answer = session.reset(**data, seed=seed)
        except Refusal as refusal:
            raise refusal.fault() from refusal
        seen, _, over, _ = self._heard(session, "", answer)
        return seen, over

    def act(self, session: Session, action: dict[str, Any]) -> tuple[str, float, bool, Refusal | None]:
        """What is seen, the reward, whether it is over, and the refusal if it was one. Raises `Fault`."""
        try:
            answer: Answer | Refusal = session.step(action)
        except Refusal as refusal:
            if refusal.code != INVALID and not (refusal.code == RAISED and self.raises == "refuse"):
                hint = "; where it raises at actions that it does not accept, set config.game.raises=refuse" * (refusal.code == RAISED)
                fault = refusal.fault()
                raise Fault(fault.kind, f"{fault}{hint}") from refusal
            answer = refusal
        return self._heard(session, _json(action), answer)

    def _heard(self, session: Session, action: str, answer: Answer | Refusal) -> tuple[str, float, bool, Refusal | None]:
        """Adds an action and its answer to the session's position. A refusal counts as what was refused, not by its words."""
        refusal = answer if isinstance(answer, Refusal) else None
        outcome = ("", 0.0, False) if refusal else (observed(answer.observation, self.observation), answer.reward, answer.done)
        content = f"refused: {refusal.code}" if refusal else _json(outcome)
        seed, split, history = session.position
        session.position = (seed, split, (*history, (action, hashlib.sha256(content.encode()).hexdigest()[:16])))
        return (*outcome, refusal)

    def _replay(self, session: Session, position: tuple[int, str, History]) -> None:
        """Brings a new session to a position. Raises `Fault` where the server answers otherwise than before."""
        seed, split, history = position
        self.reset_to(session, seed, split)
        for action, _ in history[1:]:
            if session.position[2] != history[: len(session.position[2])]:
                break
            self.act(session, json.loads(action))
        if session.position != position:
            number = len(session.position[2]) - 1
            at = f"action {number}" if number else "the reset"
            raise Fault(FailureKind.BAD_REPLY, f"seed {seed} again: at {at} the server answers otherwise than before")

    @contextlib.contextmanager
    def _ended_on_error(self, session: Session) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.sessions.end(session)
            raise

    def _timed(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any] | ToolResult:
        """What the work gives, or the failure that aborts the play (law 9)."""
        start = time.perf_counter()
        try:
            return work()
        except Fault as fault:
            return failed(fault.kind, str(fault), time.perf_counter() - start)


# ---- seeds


def seeds_of(game: OpenEnv, actions: Sequence[dict[str, Any]], together: int) -> tuple[str, str]:
    """What a server makes of seeds: "kept", "one" or "broken", and a sentence for people.

    Every seed of `SEEDS` is played twice: first alone, then in the reverse order and `together` of them beside each other, step by step. A
    play is its first observation and the answers to `actions`. "kept": equal seeds gave equal plays and some two seeds different ones;
    "one": all plays were equal; "broken": equal seeds gave different plays.

    Raises `Fault`.
    """
    first = {seed: _probe(game, (seed,), actions)[0] for seed in SEEDS}
    second: dict[int, tuple[str, ...]] = {}
    turned = tuple(reversed(SEEDS))
    for start in range(0, len(turned), together):
        group = turned[start : start + together]
        second |= dict(zip(group, _probe(game, group, actions)))
    for seed in SEEDS:
        if (at := _differ(first[seed], second[seed])) is not None:
            where = "the first observation differs" if at == 0 else f"the answer to action {at} of {len(actions)} differs"
            return "broken", f"seed {seed} was played twice, and {where}: the server ignores seeds, or draws from elsewhere too"
    if len(set(first.values())) == 1:
        return "one", f"the seeds {', '.join(map(str, SEEDS))} give the same play: it is one task in all splits, so nothing is held out"
    return "kept", f"{len(SEEDS)} seeds were played twice with {len(actions)} actions: equal seeds gave equal plays"


def _probe(game: OpenEnv, seeds: Sequence[int], actions: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """For each seed the digests of the answers, in sessions beside each other."""
    with contextlib.ExitStack() as held:
        sessions = []
        for _ in seeds:
            sessions.append(game.sessions.begin())
            held.callback(game.sessions.end, sessions[-1])
        over = [game.reset_to(session, seed, "train")[1] for session, seed in zip(sessions, seeds)]
        for action in actions:
            for place, session in enumerate(sessions):
                if not over[place]:
                    over[place] = game.act(session, action)[2]
        return [tuple(digest for _, digest in session.position[2]) for session in sessions]


def _differ(first: tuple[str, ...], second: tuple[str, ...]) -> int | None:
    """Where two plays differ first; None if they do not."""
    if first == second:
        return None
    return next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


# ---- the environment


def workflow_of(
    game: OpenEnv, parse: Parser, reads: str, instructions: str, pay: str, least: float, most: float, limit_s: float,
    max_prompt: int, max_tokens: int,
) -> Workflow:  # fmt: skip
    """The environment as a graph: one role, and the server as two tools. A position's fields are `FIELDS`."""
    continues = reads == "conversation" and game.turns > 1
    escaped = instructions.replace("{", "{{").replace("}", "}}")
    player = Role(
        "player", f"{escaped}\n\n{{seen}}{{note}}" if escaped else "{seen}{note}", parse, {"action": None}, max_prompt=max_prompt,
        max_tokens=max_tokens, trim="seen", continues=continues, observation="{seen}{note}" if continues else "",
    )  # fmt: skip
    body = sequence(
        tool(game.begin, FIELDS, name="reset", reads=("seed", "split"), timeout_s=limit_s),
        repeat(
            player,
            tool(game.step, FIELDS, name="step", reads=("seed", "split", "action", *FIELDS), timeout_s=limit_s),
            at_most=game.turns, until=lambda over: over, reads=("over",), name="steps",
        ),
    )  # fmt: skip

    def total(path):
        return float(sum(path.fields["rewards"]))

    def score(path):
        return (min(most, max(least, total(path))) - least) / (most - least)

    def own(path: Trajectory) -> list[Award]:
        pairs = zip(path.by("player"), path.fields["rewards"], strict=True)
        return [Award(call, min(1.0, max(-1.0, reward / (most - least))), "step") for call, reward in pairs]

    metrics: dict[str, Callable[[Trajectory], float | None]] = {
        "score": score,
        "return": total,
        "clipped": lambda path: float(not least <= total(path) <= most),
        "unfinished": lambda path: float(not path.fields["over"]),
    }
    for name in ("refused", "raised"):
        metrics[name] = lambda path, name=name: float(path.fields[name])
    paid = broadcast(score, ("player",), "score") if pay == "total" else own
    rewards = (paid, format_penalty(0.5))
    return Workflow("openenv", body, ("seed", "split"), rewards=rewards, metrics=metrics, score="at_end")


def openenv(
    url: str = "", action: str = '{"message": "{text}"}', observation: str = "", reset: str = "", instructions: str = "", turns: int = 8,
    form: str = "plain", reads: str = "last", pay: str = "total", least: float = 0.0, most: float = 1.0, raises: str = "abort",
    seeds: str = "refuse", sayings: str = "", sessions: int = 8, timeout_s: float = 60.0, max_prompt: int = 4096, max_tokens: int = 256,
    seeds_seed: int = 0,
) -> Environment:  # fmt: skip
    """The environment of an OpenEnv server (extra `openenv`), played by the role `player`.

    Args:
      url: of the server, like http://127.0.0.1:8000.
      action: a JSON object; the response stands in for "{text}", or as a value for "{int}", "{number}" or "{json}"; "{json}" alone: the
        response is the action.
      observation: the part of the observation that the role reads, a path like `board.text`; empty: all of it but `metadata`, as JSON.
      reset: a JSON object with further data of a reset; "{split}" in it becomes train, validation or test.
      instructions: what the role is told before the first observation.
      turns: most responses of a play.
      form: "plain", the whole response is the action; or "tags", what stands within <action> at its end.
      reads: "last", the present observation; or "conversation", all of them and its own responses.
      pay: "total", the sum of all rewards, from `least` to `most` put to 0 to 1, is the team reward of each response; or "steps", a
        response's own reward over `most` - `least`, within -1 and 1, is its local reward.
      least, most: of the sum of rewards in a play.
      raises: what a step is at which the server raises: "abort", a failure of the server; or "refuse", an action that was not accepted.
      seeds: a server whose equal seeds give different plays is refused ("refuse"), or warned of ("report").
      sayings: texts with | between; the server is tried with them, and the scripted player says them at random.
      sessions: most sessions at a time.
      timeout_s: of one answer of the server.
      max_prompt, max_tokens: of the role. Of an observation that is too long the end is cut, which is counted.
      seeds_seed: of the tasks' seeds. A seed's split is its number modulo 10.

    Raises `GameError`: an option that cannot be, no server at `url`, answers that are not of the protocol, or seeds as `seeds` says.
    """
    for option, value, words in (
        ("form", form, ("plain", "tags")), ("reads", reads, ("last", "conversation")), ("pay", pay, ("total", "steps")),
        ("raises", raises, ("abort", "refuse")), ("seeds", seeds, ("refuse", "report")),
    ):  # fmt: skip
        check_word(f"config.game.{option}", value, words, GameError)
    if min(turns, sessions) < 1 or not timeout_s > 0 or not (math.isfinite(most - least) and least < most):
        raise GameError("config.game: turns and sessions must be at least 1, timeout_s above 0, and least below most")
    if not url:
        raise GameError("openenv needs its option 'url', e.g. --config.game.url=http://127.0.0.1:8000")
    websockets_client()
    template = "{json}" if action == "{json}" else read_object(action, "action")
    if not _SLOT.search(action):
        raise GameError(f"config.game.action={action!r} has no place for the response: one of {{text}}, {{int}}, {{number}}, {{json}}")
    parse, pool = action_parser(template, form), Sessions(websocket_url(url), sessions, timeout_s)
    game = OpenEnv(pool, read_object(reset, "reset"), observation, turns, raises)
    words = tuple(filter(None, sayings.split("|"))) or WORDS
    _try(game, words, template, seeds, min(sessions, len(SEEDS)))

    def draw(split: str, number: int) -> Task:
        return Task(number, {"seed": seed_in(split, number, "openenv", seeds_seed), "split": split}, split=split)

    def say(turn: ScriptTurn) -> str:
        word = turn.random.choice(words)
        return f"<action>{word}</action>" if form == "tags" else word

    limit_s = timeout_s * (turns + 2) + 3 * CLOSE_S  # a position may be played again within one call
    team = workflow_of(game, parse, reads, instructions, pay, least, most, limit_s, max_prompt, max_tokens)
    tasks = drawn_tasks(draw, SPLITS)
    return Environment(team, tasks, "score", byte_renderer(), say if sayings else None, say, close=pool.close)


def _try(game: OpenEnv, words: Sequence[str], template: Any, seeds: str, together: int) -> None:
    """Plays a server for its seeds. Raises `GameError`; where it returns the server may be used."""
    actions = []
    for word in words:
        try:
            actions.append(action_parser(template, "plain")(word)["action"])
        except FormatError:  # a fixed word need not be an action of every server
            continue
    try:
        kind, verdict = seeds_of(game, actions, together)
    except Fault as fault:
        game.sessions.close()
        raise GameError(f"the OpenEnv server cannot be played: {fault}") from fault
    if kind == "broken" and seeds == "refuse":
        game.sessions.close()
        raise GameError(f"the OpenEnv server does not keep seeds: {verdict}. config.game.seeds=report plays it all the same")
    if kind == "kept":
        log.info("OpenEnv server: %s", verdict)
    else:
        log.warning("OpenEnv server: %s", verdict)
