"""Plays a game yourself: one role is yours, in the browser or the terminal, and the others are played for you.

    python -m marl_llm play sums --human reasoner                                    the other roles by the game's scripted player
    python -m marl_llm play my_team.py:lock --human opener --terminal --tasks 3
    python -m marl_llm play function_debate --human tester --others outside:http://127.0.0.1:8000/v1#coder

The last line plays with a trained role, which `python -m marl_llm serve --run=runs/a --role=coder` serves. Others may be scripted, random
or outside:URL#NAME. The page is for this machine alone. What you type is read as every player's words are: a response that breaks the
format is counted as such. Exit codes: 0 done, 2 what was named cannot be played.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("marl_llm play", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", help="a game of the library, FILE.py:OBJECT, or MODULE:OBJECT")
    p.add_argument("--human", required=True, metavar="ROLE", help="your role")
    p.add_argument("--others", default="scripted", help="who plays the other roles (%(default)s)")
    p.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the game; may be given many times")
    p.add_argument("--tasks", type=int, default=1, help="how many tasks, one after the other (%(default)s)")
    p.add_argument("--first", type=int, default=0, help="the first of them (%(default)s)")
    p.add_argument("--split", default="validation", choices=("train", "validation", "test"), help="of which split (%(default)s)")
    p.add_argument("--terminal", action="store_true", help="in the terminal, not in the browser")
    p.add_argument("--port", type=int, default=0, help="of the page; 0 takes a free one")
    p.add_argument("--no-browser", action="store_true", help="only print the page's address")
    return p


def main(argv: list[str] | None = None) -> int:
    """Plays; returns the exit code."""
    asked = parser().parse_args(argv)
    from marl_llm.cli.check import subject_of
    from marl_llm.runs.command import code_of, given_options, refuse_idle
    from marl_llm.training.seats import ask_at_the_keyboard, messages_of
    from marl_llm.viewing import HumanSeat

    try:
        if asked.terminal:
            refuse_idle(given_options(parser(), asked, ("port", "no_browser")), "--terminal serves no page")
        with subject_of(asked.what, asked.option) as (environment, _, _), contextlib.ExitStack() as stack:
            others = others_of(environment, asked.others)
            seat = None if asked.terminal else stack.enter_context(HumanSeat(asked.port))
            if seat is not None:
                print(f"your seat is {seat.url}", flush=True)
                if not asked.no_browser:
                    import webbrowser

                    webbrowser.open(seat.url)
            person = ask_at_the_keyboard if seat is None else lambda turn: seat.ask(turn.role.name, messages_of(turn))
            tell = print if seat is None else lambda text: (print(text, flush=True), seat.tell(text))
            for number in range(asked.first, asked.first + asked.tasks):
                tell(play(environment, asked.human, person, others, environment.tasks(asked.split, number, 1)))
    except Exception as error:
        return code_of(error, asked.what)
    return 0


def others_of(environment: Any, text: str) -> Any:
    """Who plays the other roles. Raises `ConfigError` for a model, which has to be served, and `WorkflowError` for a missing player."""
    from marl_llm.runs.command import ConfigError
    from marl_llm.training.seats import external_player, parse_seat

    seat = parse_seat(text)
    if seat.kind not in ("scripted", "random", "outside"):
        raise ConfigError(f"--others={text}: choose scripted, random or outside:URL#NAME, which `python -m marl_llm serve` can be")
    return external_player(environment, "others", seat)


def play(environment: Any, human: str, person: Callable[[Any], str], others: Any, tasks: list) -> str:
    """Plays one task and returns how it ended, for people. Raises `ConfigError` for a role that no person can play."""
    from marl_llm.hints import meant
    from marl_llm.runs.command import ConfigError
    from marl_llm.workflows import Assignment, Controller, Scripted

    roles = {name: role for name, role in environment.workflow.roles.items() if not role.speaks_ids}
    if human not in roles:
        why = "reads numbered tokens and no text" if human in environment.workflow.roles else f"is no role of it{meant(human, roles)}"
        raise ConfigError(f"--human={human}: {human!r} {why}; roles with text: {', '.join(roles) or 'none'}")
    players = {"human": Scripted(person)} | ({"others": others} if len(environment.workflow.roles) > 1 else {})
    assignment = Assignment({name: "human" if name == human else "others" for name in environment.workflow.roles}, players)
    renderer = {} if environment.renderer is None else dict.fromkeys(players, environment.renderer)
    with Controller(environment.workflow, assignment, None, renderer, attempts=1) as controller:
        (episode,) = controller.play(tasks).episodes
    path = episode.trajectories[0]
    lines = [f"{environment.headline}: {environment.workflow.metrics[environment.headline](path):.3g}"]
    for call in path.calls:
        pay = path.earned[call.id]
        lines.append(f"{call.role} was paid {pay.team:.3g} for the team and {pay.local:.3g} alone for {call.text[:60]!r}")
        lines += [f"    its format is broken: {call.illegal}"] if call.illegal else []
    return "\n".join(lines)
