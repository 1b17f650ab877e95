"""Trains a small coach to say what an environment's rubric says, and measures it on teams that it never saw.

    python -m marl_llm coach experiments/configs/chain_maths.py --out runs/coach --unseen runs/chain:0 --unseen runs/chain
    python -m experiments.train --config=experiments/configs/chain_maths.py --config.coach.kind=small --config.coach.path=runs/coach ...

A team is `script`, the environment's scripted player; `script:NAME=VALUE,...` with other options of the game, such as its habits; or
a run's directory, with `:STEP` for another checkpoint than the last. `noise=0.3` beside them changes a word of 30 % of a script's
responses into another of the role's, `stray=0.1` one of 10 % into a word of any role, which breaks many formats. The coach learns from
plays of `--team`s on tasks of the training split. `--unseen` teams play tasks of the validation split, and only measure it; among them
should be the team that it is to train, as it begins. `OUT/coach.json` keeps the agreement, and a run refuses a coach with a mean absolute
error above 0.7 or a kappa below 0.8 on any of them.

    python -m marl_llm coach experiments/configs/chain_maths.py --measure models/smollm2 --held_out 16

`--measure` trains and writes nothing: the model of a checkpoint is asked as `config.coach.kind=model` would ask it, about plays of the
`--unseen` teams, and the table says how well it agrees with the rubric and whether that is enough.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import pathlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from marl_llm.runs.command import ConfigError, given_options, refuse_idle

TEAMS = ("script", "script:noise=0.3")
SEEN = "teams that it learned from, on other tasks"
LISTENED = 64  # tasks whose scripted plays tell which words the roles say
ASKED = 64  # views that are asked at a time
TRAINS = ("team", "tasks", "plays", "preset", "epochs", "batch", "learning_rate")  # options that --measure does not read
MEASURES = ("max_prompt", "max_tokens")  # options that it alone reads
PATIENCE_S = 3600.0  # for a score of a model that is measured, its compilation included: no play waits for it


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("marl_llm coach", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("config", help="a config, FILE.py[:variant] or its name, of an environment whose guide has a rubric and a brief")
    work = p.add_mutually_exclusive_group(required=True)
    work.add_argument("--out", type=pathlib.Path, help="directory to write; must not exist, or be empty")
    work.add_argument("--measure", metavar="DIR", help="a checkpoint that is measured as it stands, in place of training a coach")
    p.add_argument("--team", action="append", help=f"a team to learn from, as often as there are some ({', '.join(TEAMS)})")
    p.add_argument("--unseen", action="append", default=[], help="a team to be measured on, as often as there are some")
    p.add_argument("--tasks", type=int, default=400, help="training tasks per team (%(default)s)")
    p.add_argument("--plays", type=int, default=4, help="plays of each task (%(default)s)")
    p.add_argument("--held_out", type=int, default=100, help="validation tasks per team (%(default)s)")
    p.add_argument("--max_tokens", type=int, default=256, help="with --measure: tokens of a reply (%(default)s)")
    p.add_argument("--max_prompt", type=int, default=2048, help="with --measure: tokens of a prompt (%(default)s)")
    p.add_argument("--preset", default="micro", help="the model's size (%(default)s)")
    p.add_argument("--epochs", type=int, default=8, help="passes over the views (%(default)s)")
    p.add_argument("--batch", type=int, default=128, help="views per optimizer step (%(default)s)")
    p.add_argument("--learning_rate", type=float, default=2e-3, help="its peak (%(default)s)")
    p.add_argument("--trust", action="store_true", help="run the code and use the addresses that the runs name (docs/trust.md)")
    p.add_argument("--seed", type=int, default=0, help="of the parameters, the noise and the order (%(default)s)")
    return p


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a small coach reads of an action, and what the rubric says."""

    brief: str  # empty where the environment writes none
    score: float
    role: str
    view: Any


def main(argv: list[str] | None = None) -> int:
    """Prints the agreement. 2: the coach cannot be trained."""
    from marl_llm.runs.command import code_of

    asked = parser().parse_args(argv)
    try:
        if asked.out and asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
            raise ConfigError(f"--out={asked.out} exists; choose a new directory")
        for name in ("tasks", "plays", "held_out", "epochs", "batch", "max_prompt", "max_tokens"):
            if getattr(asked, name) < 1:
                raise ConfigError(f"--{name}={getattr(asked, name)} must be at least 1")
        _check_idle(asked)
        work = measure_model if asked.measure else train_coach
        work(lambda: _config(asked.config), asked)
    except Exception as error:
        return code_of(error)
    return 0


def _check_idle(asked: argparse.Namespace) -> None:
    """Raises `ConfigError` for an option that would have no effect."""
    idle, why = (TRAINS, "--measure trains nobody") if asked.measure else (MEASURES, "--measure alone reads it")
    refuse_idle(given_options(parser(), asked, idle), why)


def train_coach(make: Callable[[], Any], asked: argparse.Namespace, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Plays, trains, measures and writes; returns the record. `make` makes the config anew.

    Raises `ConfigError` for a team or an environment that will not do.
    """
    from marl_llm.coaching import small
    from marl_llm.runs.building import start_jax
    from marl_llm.runs.resolve import resolve

    config = make()
    mesh = start_jax(config, None)
    with resolve(config) as plan:
        guide = getattr(plan.played, "guide", None)
        if guide is None or guide.rubric is None or guide.brief is None:
            raise ConfigError(f"{config.game.name}: a small coach needs a workflow whose guide has a rubric and a brief")
        asked.out.mkdir(parents=True, exist_ok=True)  # what forbids it is told before the work
        teams = asked.team or list(TEAMS)
        start, lessons, seen, unseen = time.process_time(), [], [], {}
        for number, team in enumerate(teams):
            lessons += _lessons(make, team, "train", number * asked.tasks, asked.tasks, asked.plays, asked.seed, asked.trust)
            seen += _lessons(make, team, "validation", 0, asked.held_out, 1, asked.seed, asked.trust)
        for team in asked.unseen:
            unseen[team] = _lessons(make, team, "validation", 0, asked.held_out, 1, asked.seed + 1, asked.trust)
        played_s = time.process_time() - start
        say(f"{len(lessons)} views of {len(teams)} teams, {len({one.brief for one in lessons})} different ({played_s:.0f} CPU s)")
        start = time.process_time()
        shape, params, renderer, longest = learned(lessons, asked, mesh, say)
        record = {"guide": guide.version, "environment": plan.played.workflow.name, "max_prompt": 2 * longest, "teams": teams}
        spent = played_s + time.process_time() - start  # without the sandbox's processes
        record |= {"views": len(lessons), "epochs": asked.epochs, "seed": asked.seed, "cpu_s": round(spent)}
        _write(asked.out, shape, params, renderer)
        record["seen"] = measured(asked.out, record, guide, seen)
        record["unseen"] = {team: measured(asked.out, record, guide, rows) for team, rows in unseen.items()}
        (asked.out / small.RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    from marl_llm.coaching.agreement import agreement_text

    for name, figures in ((SEEN, record["seen"]), *record["unseen"].items()):
        say(f"{name}:\n{agreement_text(figures)}")
    try:
        small.read_record(asked.out, guide)
        say(f"it may train a team: --config.coach.kind=small --config.coach.path={asked.out}")
    except small.WorkflowError as error:
        say(f"it may train nobody: {error}")
    return record


def measure_model(make: Callable[[], Any], asked: argparse.Namespace, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Asks a checkpoint about plays of each unseen team and says how well it agrees with the rubric; returns the figures by team.

    Raises `ConfigError` for a team, an environment or a checkpoint that will not do.
    """
    from marl_llm.coaching import small
    from marl_llm.coaching.agreement import agreement, agreement_text
    from marl_llm.runs.building import start_jax
    from marl_llm.runs.coaching import check_coach, make_coaching
    from marl_llm.runs.resolve import resolve

    config = make()
    sizes = dict(max_prompt=asked.max_prompt, max_tokens=asked.max_tokens)
    config.coach.update(kind="model", path=asked.measure, deadline_s=PATIENCE_S, **sizes)
    start_jax(config, None)
    with resolve(config) as plan:
        check_coach(config, plan)
        if plan.played.guide.rubric is None:
            raise ConfigError(f"{config.game.name}: its guide has no rubric to measure a coach by; give CoachGuide(rubric=...)")
        coaching, figures = make_coaching(config, plan), {}
        try:
            for team in asked.unseen or TEAMS:
                lessons = _lessons(make, team, "validation", 0, asked.held_out, 1, asked.seed, asked.trust)
                results = score_all(coaching.coach, [lesson.view for lesson in lessons])
                scores = list(map(score_value, results))
                figures[team] = agreement(scores, [lesson.score for lesson in lessons], [lesson.role for lesson in lessons])
                say(f"{team}:\n{agreement_text(figures[team])}")
                failures = [result.failure for result in results if result.failure is not None]
                for kind, count in collections.Counter(failure.kind for failure in failures).items():
                    example = next(failure.message for failure in failures if failure.kind == kind)
                    say(f"  no score, {count} times {kind.value}, such as: {example}")
        finally:
            coaching.close()
    faults = list(filter(None, (small.disagreement(team, team_figures["all"]) for team, team_figures in figures.items())))
    say("\n".join(f"{asked.measure} should train nobody: it agrees too little with its rubric {fault}" for fault in faults)
        or f"it agrees with its rubric: --config.coach.kind=model --config.coach.path={asked.measure}")  # fmt: skip
    return figures


def learned(lessons: Sequence[Lesson], asked: argparse.Namespace, mesh: Any, say: Callable[[str], None]) -> tuple:
    """(shape, parameters, renderer, longest prompt in tokens) of a model that imitates the rubric's answers."""
    import jax
    import numpy as np

    from marl_llm.algorithms import make_recipe
    from marl_llm.coaching import small
    from marl_llm.models import make_model_config
    from marl_llm.runs.sections import MICROBATCH, ROW_TOKENS
    from marl_llm.training import LearnerOptions, linear_decay, make_optimizer
    from marl_llm.training.packing import Tokens, TokenSample
    from marl_llm.training.sft import make_sft
    from marl_llm.training.train_state import fresh_train_state
    from marl_llm.workflows.renderer import spoken_ids

    renderer = small.renderer_for(lesson.brief for lesson in lessons)
    shape = make_model_config(asked.preset, vocab_size=renderer.tokenizer.vocab_size)
    samples = []
    for lesson in lessons:
        reply = spoken_ids(renderer, small.answer_of(lesson.score))
        samples.append(TokenSample(renderer.tokenizer.encode(lesson.brief), reply, np.zeros(len(reply), np.float32)))
    tokens, longest = Tokens.of(samples), max(sample.prompt.size for sample in samples)
    optimizer = make_optimizer()
    rows = max(ROW_TOKENS, longest + small.MAX_REPLY)
    options = LearnerOptions(make_recipe("mappa"), optimizer, rows, asked.batch, 1, max(MICROBATCH, rows))
    sft_step = make_sft(options, shape, mesh)
    policy, rng = fresh_train_state(shape, jax.random.key(asked.seed), optimizer), np.random.default_rng(asked.seed)
    count = max(1, len(samples) // asked.batch)
    steps = asked.epochs * count
    for step in range(steps):
        if step % count == 0:
            order = rng.permutation(len(samples))
        chosen = order[step % count * asked.batch :][: asked.batch]
        rate = float(linear_decay(step, steps, asked.learning_rate, warmup=20, floor=0.05))
        policy, figures = sft_step(policy, tokens, chosen, rate)
        if (step + 1) % max(1, steps // 20) == 0 or step + 1 == steps:
            say(f"step {step + 1}/{steps}  loss {float(figures['loss']):.3f}")
    return shape, policy.params, renderer, longest


def measured(folder: pathlib.Path, record: dict[str, Any], guide: Any, lessons: Sequence[Lesson]) -> dict[str, Any]:
    """The agreement of the coach in a directory with the rubric, asked as a run asks it."""
    from marl_llm.coaching.agreement import agreement

    scores = scores_of(folder, record["max_prompt"], guide, [lesson.view for lesson in lessons])
    return agreement(scores, [lesson.score for lesson in lessons], [lesson.role for lesson in lessons])


def scores_of(folder: pathlib.Path, max_prompt: int, guide: Any, views: Sequence[Any]) -> list[float | None]:
    """What the coach in a directory says of each view, asked as a run asks it; None where its reply could not be read."""
    from marl_llm.runs.coaching import small_coach

    clients: list[Any] = []
    models: list[Any] = []
    coach = small_coach(folder, max_prompt, guide, models, clients)
    try:
        return [score_value(result) for result in score_all(coach, views)]
    finally:
        for opened in (*clients, *models):
            opened.close()


def score_all(coach: Any, views: Sequence[Any]) -> list[Any]:
    """What a coach says of each view, a `ToolResult` each."""

    async def ask() -> list[Any]:
        gate = asyncio.Semaphore(ASKED)

        async def score(view: Any) -> Any:
            async with gate:
                return await coach.score(view)

        return list(await asyncio.gather(*map(score, views)))

    return asyncio.run(ask())


def score_value(result: Any) -> float | None:
    """The number of a score; None where there is none."""
    return None if result.failure is not None else float(result.outcome().value)


def _write(folder: pathlib.Path, shape: Any, params: dict, renderer: Any) -> None:
    from marl_llm.coaching import small
    from marl_llm.models import save_pretrained

    save_pretrained(folder, shape, params)
    renderer.tokenizer.save(folder / small.TOKENIZER)


def _config(named: str) -> Any:
    from marl_llm.cli.check import named_config
    from marl_llm.runs.sections import CoachSection

    config = named_config(named)
    config.coach = CoachSection.config()  # it is being made: nothing of the section has an effect
    return config


# ---- teams


def _lessons(
    make: Callable[[], Any], team: str, split: str, first: int, count: int, plays: int, seed: int, trusted: bool = False
) -> list[Lesson]:
    """What the rubric says of the plays of a team, see the module's text."""
    from marl_llm.coaching import small
    from marl_llm.runs.resolve import resolve

    name, _, options = team.partition(":")
    if name != "script":
        step = int(options) if options.isdecimal() else None
        if options and step is None:
            raise ConfigError(f"team {team!r}: {options!r} is no step of a checkpoint")
        return _scored(small, *_played_by_run(pathlib.Path(name), step, split, first, count, plays, trusted))
    config, shares = make(), {"noise": 0.0, "stray": 0.0}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if not equals or (key not in shares and key not in config.game):
            forms = "NAME=VALUE, noise=SHARE or stray=SHARE"
            raise ConfigError(f"team {team!r}: {part!r} is no option of the game {config.game.name}; write {forms}")
        if key in shares:
            shares[key] = float(value)
        else:
            kind = config.game.get_type(key)
            config.game[key] = value in ("true", "True", "1") if kind is bool else kind(value)
    with resolve(config) as plan:
        script = plan.played.script
        if script is None:
            raise ConfigError(f"team {team!r}: {config.game.name} has no scripted player")
        tasks = plan.played.tasks(split, first, count)
        if any(shares.values()):
            words = words_of(scripted(plan.played, script, plan.played.tasks("train", 0, LISTENED), 1))
            every = dict.fromkeys(words, sorted({word for some in words.values() for word in some}))
            script = garbled(garbled(script, shares["noise"], words, seed), shares["stray"], every, seed + 1)
        return _scored(small, scripted(plan.played, script, tasks, plays), plan.played.guide)


def _played_by_run(
    run: pathlib.Path, step: int | None, split: str, first: int, count: int, plays: int, trusted: bool = False
) -> tuple[Any, Any]:
    """(rollout at temperature 1, guide) of the models of a run's checkpoint."""
    from marl_llm.runs.building import build_team, params_of, start_jax
    from marl_llm.runs.resolve import resolve
    from marl_llm.runs.workdir import game_dir_of, read_config
    from marl_llm.training import Checkpoints

    config = read_config(run, trusted)
    there = Checkpoints(run / "checkpoints").steps()
    config.sft.update(run=str(run), step=(there[-1] if there else 0) if step is None else step)
    mesh = start_jax(config, None)
    with resolve(config, game_dir_of(run)) as plan, build_team(plan, config, mesh, coached=False) as team:
        team.start_from(params_of(config.sft, team.models()))
        return team.evaluate({}, split, count, plays=plays, temperature=1.0, first=first).rollout, plan.played.guide


def scripted(environment: Any, script: Callable, tasks: list, plays: int) -> Any:
    """The plays of an environment's workflow by one script in all roles, without a coach."""
    from marl_llm.workflows import Assignment, Controller, Scripted

    assignment = Assignment(dict.fromkeys(environment.workflow.roles, "script"), {"script": Scripted(script)})
    with Controller(environment.workflow, assignment, None, environment.renderer or {}) as controller:
        return controller.play(tasks, plays=plays)


def _scored(small: Any, rollout: Any, guide: Any) -> list[Lesson]:
    views = small.views_of(rollout, guide.when)
    briefs = [small.brief_of(view, guide) if guide.brief is not None else "" for view in views]
    return [Lesson(brief, small.rubric_value(view, guide), view.call.role, view) for brief, view in zip(briefs, views, strict=True)]


def injection_rates(config: Any, run: str | None, tasks: int, trusted: bool = False) -> str:
    """The table of `marl_llm injections`: the coach of a config on plays of the scripted player, or of a run's newest models.

    Raises `ConfigError` for a config without a coach, and for an environment without a scripted player where no run is named.
    """
    from marl_llm.coaching.injections import attacked, attacked_text, read_injections
    from marl_llm.coaching.small import views_of
    from marl_llm.runs.coaching import make_coaching
    from marl_llm.runs.resolve import resolve

    with resolve(config) as plan:
        coaching = make_coaching(config, plan)
        if coaching is None:
            raise ConfigError("config.coach.kind is not set: nobody coaches")
        try:
            environment, when = plan.played, config.coach.when or plan.played.guide.when
            if run is not None:
                rollout, _ = _played_by_run(pathlib.Path(run), None, "validation", 0, tasks, 1, trusted)
            elif environment.script is None:
                raise ConfigError(f"{config.game.name} has no scripted player: name a run whose models play, --run=DIR")
            else:
                rollout = scripted(environment, environment.script, environment.tasks("validation", 0, tasks), 1)
            views = views_of(rollout, when)
            rates = asyncio.run(attacked(coaching.coach, views, read_injections()))
        finally:
            coaching.close()
    return f"{len(views)} actions, coach {config.coach.kind}\n{attacked_text(rates)}"


def words_of(rollout: Any) -> dict[str, list[str]]:
    """Role -> the different words that it said."""
    vocabulary: dict[str, set[str]] = {}
    for path in rollout.trajectories:
        for call in path.calls:
            vocabulary.setdefault(call.role, set()).update(call.text.split())
    return {role: sorted(words) for role, words in vocabulary.items()}


def garbled(script: Callable, share: float, words: dict[str, list[str]], seed: int = 0) -> Callable:
    """A player who, in a share of its responses, says another word of its role in place of one (another number in place of a number),
    leaves one out, or says one twice."""

    def play(turn: Any) -> str:
        reply, rng = script(turn), random.Random(repr(("garbled", seed, turn.seed)))
        if not isinstance(reply, str) or rng.random() >= share or not reply.split():
            return reply
        parts = reply.split()
        for _ in range(rng.choice((1, 1, 2))):
            at, how = rng.randrange(len(parts)), rng.random()
            alike = [word for word in words[turn.role.name] if word.isdecimal() == parts[at].isdecimal()] or parts
            parts[at : at + 1] = [] if how < 0.1 and len(parts) > 1 else [parts[at]] * 2 if how < 0.2 else [rng.choice(alike)]
        return " ".join(parts)

    return play
