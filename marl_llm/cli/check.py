"""Checks games and configs before anyone pays for training: laws, junk, splits, budgets, the scripted player. No model is needed.

    python -m marl_llm check plan_path                                    a game of the library
    python -m marl_llm check my_game.py:Lock --option tries=3             a game of your own, with an option
    python -m marl_llm check experiments/configs/notes.py                 a config: what a step will cost too
    python -m marl_llm check my_team.py:a my_team.py:b --json             several, as one line of JSON each

Exit codes: 0 all checks passed, 1 a check failed (its line names the law of docs/architecture.md), 2 what was named cannot be loaded.
docs/check.md says what each check proves.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

SIZES = {"tasks": 16, "plays": 4, "few": 4, "held_out": 64}


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("marl_llm check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="+", help="a game of the library, FILE.py:OBJECT, MODULE:OBJECT, or a config FILE.py[:variant]")
    p.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the game; may be given many times")
    p.add_argument("--tasks", type=int, default=SIZES["tasks"], help="tasks of the scripted and the random player (%(default)s)")
    p.add_argument("--plays", type=int, default=SIZES["plays"], help="plays of each of them (%(default)s)")
    p.add_argument("--few", type=int, default=SIZES["few"], help="tasks of every other check (%(default)s)")
    p.add_argument("--held_out", type=int, default=SIZES["held_out"], help="tasks of each split that are compared (%(default)s)")
    p.add_argument("--bound", type=float, default=10.0, help="largest absolute reward of one call (%(default)s)")
    p.add_argument("--zero_sum", action="store_true", help="the rewards of all roles in a play must add up to 0")
    p.add_argument("--prompts", action="store_true", help="print the first prompt of each role, also where several are checked")
    p.add_argument("--json", action="store_true", help="one line of JSON per game")
    return p


def main(argv: list[str] | None = None) -> int:
    """Checks everything that was named; returns the exit code."""
    from marl_llm.runs.command import code_of

    asked = parser().parse_args(argv)
    code = 0
    for subject in asked.what:
        try:
            report = examine(subject, asked)
        except Exception as error:
            return code_of(error, subject)
        print(json.dumps(report) if asked.json else _text(report, asked.prompts or len(asked.what) == 1))
        code = max(code, int(any(verdict["status"] == "fail" for verdict in report["verdicts"])))
    return code


def examine(subject: str, asked: argparse.Namespace) -> dict[str, Any]:
    """The report on one game: its verdicts, the first prompts, and what a step costs where a config was named."""
    from marl_llm.checking import check, first_prompts

    sizes = {name: getattr(asked, name) for name in (*SIZES, "bound", "zero_sum")}
    with subject_of(subject, asked.option) as (environment, plan, config):
        verdicts = check(environment, **sizes, **({} if plan is None else {"recipe": plan.recipe}))
        try:
            prompts = first_prompts(environment)
        except Exception as error:  # whatever a game's functions raise; the verdicts say so too
            prompts = {"error": f"{type(error).__name__}: {error}"}
        cost = cost_of(environment, plan, config) if plan is not None else None
    return {"game": subject, "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts], "prompts": prompts, "cost": cost}


@contextlib.contextmanager
def subject_of(subject: str, options: list[str]) -> Iterator[tuple]:
    """`(environment, plan, config)` of what was named; plan and config are None for a game. Raises `GameError` or `ConfigError`."""
    from marl_llm.runs.command import ConfigError, config_path

    path, _, rest = config_path(subject).partition(":")
    if path.endswith(".py") and pathlib.Path(path).is_file() and "def get_config(" in pathlib.Path(path).read_text():
        if options:
            raise ConfigError("--option is for games: a config has its game's options in config.game")
        from marl_llm.runs.resolve import resolve

        config = load_config(path, rest or None)
        with resolve(config) as plan:
            yield as_environment(plan.played, config.seed, plan.script), plan, config
        return
    from marl_llm.games import GameError, find_game
    from marl_llm.workflows import Environment

    spec = find_game(subject)
    given = {}
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise GameError(f"--option {option!r} is not NAME=VALUE")
        given[name] = _typed(value)
    game = spec.make(**given)
    with game if isinstance(game, Environment) else contextlib.nullcontext():
        yield as_environment(game), None, None


def load_config(path: str, arg: str | None):
    """The config of a file. Raises `ConfigError` where it cannot be made."""
    from marl_llm.runs.command import ConfigError, missing_config

    if not pathlib.Path(path).is_file():
        raise ConfigError(missing_config(path))
    sys.path.append(str(pathlib.Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location("checked_config", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return module.get_config(arg)
    except Exception as error:  # whatever a user's file raises
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def named_config(named: str):
    """The config that a command names: FILE.py[:variant], or NAME[:variant] of the library's. Raises `ConfigError` as `load_config`."""
    from marl_llm.runs.command import config_named, config_path

    path, _, variant = config_path(config_named(named)).partition(":")
    return load_config(path, variant or None)


def as_environment(played, seed: int = 0, script: dict | None = None):
    """A workflow as it is; a value-state game as the environment that hosted play makes of it."""
    from marl_llm.workflows import Environment

    if isinstance(played, Environment):
        return played
    import jax

    from marl_llm.games.hosted import hosted

    return hosted(played, jax.random.key(seed), script=script)


def _typed(value: str) -> Any:
    """true, false and numbers as such; other text as it is."""
    try:
        return json.loads(value)
    except ValueError:
        return value


def cost_of(environment, plan, config) -> dict[str, float]:
    """Tokens, seconds and bytes of one step, estimated: lengths from the scripted player's plays, time at this machine's roofline.

    No program is faster than `seconds_at_best`; `bytes` are parameters, gradients and Adam's moments in float32, and the copy that is
    sampled from, without activations and caches (`python -m marl_llm plan` compiles for those).
    """
    from marl_llm.checking import Subject
    from marl_llm.training import make_mesh, speed

    subject = Subject(environment, tasks=8, plays=2)
    plays = subject.play(subject.draw(8), subject.says, 2)
    calls = [call for play in plays for path in play.trajectories for call in path.calls]
    count, per_step = max(len(plays), 1), config.rollout.tasks * plan.recipe.group_size

    def tokens(call):
        return len(call.prompt_ids) or len(call.prompt) / 3

    figures = {
        "prompts": len(calls) / count * per_step,
        "samples": len(calls) / count * per_step,
        "prompt_tokens": sum(map(tokens, calls)) / count * per_step,
        "sampled_tokens": sum(call.tokens.size or len(call.text) / 3 for call in calls) / count * per_step,
        "turns": sum(path.turns for play in plays for path in play.trajectories) / count,
    }
    trained = [plan.shapes[name] for name in plan.assignment.trained if name in plan.shapes]
    shape = max(trained, key=lambda model: model.parameters)
    limits = speed.machine_limits(make_mesh(1), shape.compute_dtype)
    work = [speed.rollout_work(shape, figures, len(environment.workflow.roles), 1)]
    work.append(speed.update_work(shape, figures, 1.0, config.optimizer.epochs))
    out = {name: round(value, 1) for name, value in figures.items()}
    out["seconds_at_best"] = round(sum(map(limits.seconds, work)), 3)
    out["tools_and_host_seconds_per_play"] = round(sum(play.seconds for play in plays) / count, 4)
    return out | {"bytes": sum(20 * model.parameters for model in trained)}


def _text(report: dict, prompts: bool) -> str:
    from marl_llm.checking import Finding, report_text

    lines = [report["game"], report_text([Finding(**verdict) for verdict in report["verdicts"]])]
    if cost := report["cost"]:
        lines.append(
            f"a step, estimated: {cost['sampled_tokens']:,.0f} tokens sampled behind {cost['prompt_tokens']:,.0f} tokens of prompts in "
            f"{cost['samples']:,.0f} samples; at least {cost['seconds_at_best']:.2f} s on this machine, and "
            f"{cost['bytes'] / 2**20:,.0f} MiB for parameters, gradients and Adam"
        )
    if prompts:
        lines += [f"--- the first prompt of {role} " + "-" * 40 + f"\n{text}" for role, text in report["prompts"].items()]
    return "\n".join(lines)
