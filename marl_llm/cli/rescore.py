"""Computes the rewards of a run's stored plays again, without models and tools, with the rewards as the code has them now.

    python -m marl_llm rescore runs/first                 what each role was paid, and what it would be paid
    python -m marl_llm rescore runs/first --json          one line of JSON per play

A workflow's rewards are functions of a whole play (`workflows.rewards`), and `trajectories.jsonl` keeps whole plays, so nothing is asked
again; scores of a coach or another scorer are those that were stored. A run's own game is read from the copy in the run directory: edit
it there, or name another with --game FILE.py:OBJECT. Compiled play keeps no graphs (set config.hosted), and candidates of a tree were
paid when they were made, on a state that is not kept: such plays are counted and left out. Nothing in the run directory is changed.
A copy that you edited, or that somebody else made, runs with --trust (docs/trust.md); with --game the run's own game is not loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("marl_llm rescore", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("run", help="a run directory")
    p.add_argument("--game", help="score with this game's rewards, e.g. my_team.py:lock; default: the run's own")
    p.add_argument("--trust", action="store_true", help="run the code that the run directory names (docs/trust.md)")
    p.add_argument("--json", action="store_true", help="one line of JSON per play")
    return p


def main(argv: list[str] | None = None) -> int:
    """Prints the table or the lines. 2: the run has nothing that can be scored again."""
    from marl_llm.runs.command import code_of

    asked = parser().parse_args(argv)
    try:
        plays, left_out = rescored(pathlib.Path(asked.run), asked.game, asked.trust)
    except Exception as error:
        return code_of(error)
    if asked.json:
        print("\n".join(map(json.dumps, plays)))
        return 0
    print(table(plays, left_out))
    return 0


def rescored(run: pathlib.Path, game: str | None = None, trusted: bool = False) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """`(plays, left_out)`: per play its `episode` and `calls` with `role`, `stored` and `now` (team + local); and why others were left out.

    Raises `ConfigError` for a run without graphs, and `WorkflowError` where a reward fails.
    """
    from marl_llm.runs.command import ConfigError
    from marl_llm.runs.workdir import read_record
    from marl_llm.workflows.storage import FILE_NAME, from_json, read_trajectories

    read_record(run)
    if not (run / FILE_NAME).is_file():
        raise ConfigError(f"{run} has no {FILE_NAME}: compiled play is not kept as a graph. Train with --config.hosted=True to rescore it")
    plays, left_out = [], {"aborted": 0, "tree": 0}
    with _game_of(run, trusted) if game is None else _other(game) as environment:
        for line in read_trajectories(run):
            episode = from_json(line, run)
            why = "aborted" if episode.aborted else "tree" if episode.candidates else None
            if why:
                left_out[why] += 1
                continue
            plays.append({"episode": line["episode"], "calls": [row for path in episode.trajectories for row in _calls(environment, path)]})
    return plays, left_out


@contextlib.contextmanager
def _game_of(run: pathlib.Path, trusted: bool) -> Iterator[Any]:
    """The environment that a run played. Raises `ConfigError` where the run is not to be trusted."""
    from marl_llm.runs.resolve import resolve
    from marl_llm.runs.workdir import game_dir_of, read_config

    config = read_config(run, trusted)
    with resolve(config, game_dir_of(run)) as plan:
        yield plan.played


@contextlib.contextmanager
def _other(game: str) -> Iterator[Any]:
    """The environment that was named in place of the run's own. Raises `ConfigError` for a game that is none."""
    from marl_llm.games import make_game
    from marl_llm.runs.command import ConfigError
    from marl_llm.workflows import Environment

    environment = make_game(game)
    if not isinstance(environment, Environment):
        raise ConfigError(f"{game} is no workflow, whose rewards could be computed of a whole play")
    with environment:
        yield environment


def _calls(environment, path) -> list[dict[str, Any]]:
    """A path's calls with what was stored and what they earn now."""
    from marl_llm.workflows.rewards import earned

    now = earned(environment.workflow, path)

    def pay(reward):
        return reward.team + reward.local

    return [{"call": c.id, "role": c.role, "stored": pay(path.earned[c.id]), "now": pay(now[c.id])} for c in path.calls]


def table(plays: list[dict[str, Any]], left_out: dict[str, int]) -> str:
    """Means by role, and the calls whose pay changed."""
    roles: dict[str, list[tuple[float, float]]] = {}
    for play in plays:
        for call in play["calls"]:
            roles.setdefault(call["role"], []).append((call["stored"], call["now"]))
    lines = [f"{'role':<16} {'calls':>6} {'stored':>9} {'now':>9} {'changed':>8}"]
    for role, pairs in roles.items():
        stored, now = (sum(column) / len(pairs) for column in zip(*pairs))
        changed = sum(abs(a - b) > 1e-6 for a, b in pairs)
        lines.append(f"{role:<16} {len(pairs):>6} {stored:>+9.4f} {now:>+9.4f} {changed:>8}")
    rest = ", ".join(f"{count} {why}" for why, count in left_out.items() if count)
    return "\n".join([*lines, f"{len(plays)} plays" + (f"; left out: {rest}" if rest else "")])
