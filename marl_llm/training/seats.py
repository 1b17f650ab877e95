"""Who sits where when a team is measured: a table from role to seat, for compiled and hosted play alike.

    trained              the role's model as it is now           trained:MODEL      another model of the team
    start                the role's model before reinforcement   start:MODEL        another one
    run:DIR              the last checkpoint of another run      run:DIR@STEP#MODEL that checkpoint, that model
    scripted, random     the game's scripted player, and its random one: uniformly random well-formed responses
    outside:URL#NAME     a chat model behind an address          human              a person at the keyboard

Roles that the table leaves out are "trained". So are expressed: a swap, a mixed pair, a half-trained team, an untrained role put back,
a fixed opponent.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from marl_llm.workflows import Environment, Outside, Scripted, ScriptTurn
from marl_llm.workflows.errors import WorkflowError

KINDS = ("trained", "start", "run", "scripted", "random", "outside", "human")
MODELS = ("trained", "start", "run")  # kinds whose player is a model of this program


@dataclasses.dataclass(frozen=True)
class Seat:
    """One entry of the table; see the module's text."""

    kind: str = "trained"
    model: str = ""  # of the team, or of the other run; "": the one that plays the role; of an outside model, the name it is served as
    place: str = ""  # run: directory; outside: address
    step: int | None = None  # run: checkpoint; None: the last

    def __str__(self) -> str:
        if self.kind in ("trained", "start"):
            return self.kind + (f":{self.model}" if self.model else "")
        if self.kind not in ("run", "outside"):
            return self.kind
        return f"{self.kind}:{self.place}" + ("" if self.step is None else f"@{self.step}") + (f"#{self.model}" if self.model else "")


def parse_seat(text: str | Seat) -> Seat:
    """A seat from its text. Raises `ValueError` listing the kinds."""
    if isinstance(text, Seat):
        return text
    kind, _, rest = text.partition(":")
    if kind not in KINDS or (rest and kind in ("scripted", "random", "human")) or (not rest and kind in ("run", "outside")):
        forms = "trained[:MODEL], start[:MODEL], run:DIR[@STEP][#MODEL], scripted, random, outside:URL#NAME or human"
        raise ValueError(f"seat {text!r} is unknown; use {forms}")
    if kind in ("trained", "start"):
        return Seat(kind, rest)
    if kind == "outside":
        place, _, model = rest.rpartition("#")
        if not place or not model:
            raise ValueError(f"seat {text!r}: an outside model needs its address and the name it is served as, outside:URL#NAME")
        return Seat(kind, model, place)
    if kind == "run":
        match = re.fullmatch(r"([^#]*?)(?:@(\d+))?(?:#(.+))?", rest)
        if match is None or not match[1]:
            raise ValueError(f"seat {text!r} is not like run:DIR, run:DIR@STEP or run:DIR@STEP#MODEL")
        return Seat(kind, match[3] or "", match[1], None if match[2] is None else int(match[2]))
    return Seat(kind)


def seat_table(seats: Mapping[str, str | Seat], roles: Iterable[str], models: Iterable[str]) -> dict[str, Seat]:
    """A seat for every role. Raises `ValueError` for an unknown role or an unknown model of the team."""
    roles, models = list(roles), list(models)
    for role in seats:
        if role not in roles:
            raise ValueError(f"seats: there is no role {role!r}; the roles are {', '.join(roles)}")
    table = {role: parse_seat(seats.get(role, "trained")) for role in roles}
    for role, seat in table.items():
        if seat.kind in ("trained", "start") and seat.model and seat.model not in models:
            raise ValueError(f"seats: {role}={seat}: there is no model {seat.model!r}; the models are {', '.join(models)}")
    return table


def parse_seats(text: str) -> dict[str, Seat]:
    """`role=seat,role=seat`. Raises `ValueError`."""
    pairs = [part.partition("=") for part in filter(None, text.split(","))]
    if any(not role.strip() or not seat.strip() for role, _, seat in pairs):
        raise ValueError(f"seats={text!r} is not like 'tool=start,planner=trained:tool'")
    return {role.strip(): parse_seat(seat.strip()) for role, _, seat in pairs}


def external_player(environment: Environment, role: str, seat: Seat) -> Scripted | Outside:
    """Who plays a role that no model of this program plays. Raises `WorkflowError` naming the seat where there is no such player."""
    if seat.kind == "human":
        return Scripted(ask_at_the_keyboard)
    if seat.kind == "outside":
        from marl_llm.tools.chat import ChatClient, OpenAICompatible

        return Outside(ChatClient(OpenAICompatible(seat.place, seat.model)))
    script = {"scripted": environment.script, "random": environment.random_player}.get(seat.kind)
    if script is None:
        raise WorkflowError(f"seats: {role}={seat}: environment {environment.workflow.name!r} has no {seat.kind} player")
    return Scripted(script)


def messages_of(turn: ScriptTurn) -> list[tuple[str, str]]:
    """What a role reads, as pairs of who says it and the text."""
    return [(message.role, message.content) for message in turn.messages]


def ask_at_the_keyboard(turn: ScriptTurn) -> str:
    """A person at the terminal: the messages are printed, and one line is read."""
    print("\n".join(f"[{who}] {text}" for who, text in messages_of(turn)))
    return input(f"{turn.role.name}> ")
