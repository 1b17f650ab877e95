"""`config.coach`: who scores every action of training plays, what that may cost, and when a run without scores stops."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from experiments.checks import given
from experiments.command import ConfigError, TrainingError
from marl_llm.coaching import ChatCoach, Coaching, check_coached, check_missing, coached, of_client, rubric_coach, studies
from marl_llm.coaching.coach import MAX_ANSWER
from marl_llm.coaching.figures import WINDOW, rising_while_falling
from marl_llm.hints import check_word
from marl_llm.workflows import WorkflowError, World
from marl_llm.workflows.rewards import COACH

if TYPE_CHECKING:
    from experiments.base import Plan

_COMMON = ("kind", "when", "truth", "missing", "weight", "study")
_CLIENT = ("concurrency", "deadline_s", "format_attempts", "max_tokens")
_SERVER = (*_CLIENT, "url", "served_as", "cache", "requests_per_minute")
READS = {  # kind -> options that it reads beside the common ones
    "endpoint": (*_SERVER, "key_env", "cap_usd", "prices"),
    "served": _SERVER,
    "rubric": (),
}
_NEEDS = {"endpoint": ("url", "served_as"), "served": ("url", "served_as")}
LOOK_BACK = 10  # steps whose missing scores are counted together
NOTE, STOP = 0.01, 0.2  # shares of missing scores


_OPTIONS = {
    "kind": str,  # who coaches: "endpoint" (a chat server), "served" (`python -m marl_llm serve`), "rubric" (of the world); none: nobody
    "url": str,  # endpoint, served: the address up to /chat/completions
    "served_as": str,  # endpoint, served: the model's name there
    "key_env": str,  # endpoint: the environment variable that holds the key
    "cache": str,  # endpoint, served: a file that keeps replies, so that no request is paid twice
    "prices": str,  # endpoint: USD per million prompt tokens, and of reply tokens, with a comma between
    "cap_usd": float,  # endpoint: what a run may cost; needs prices
    "requests_per_minute": float,  # endpoint, served: most requests in a minute
    "deadline_s": float,  # endpoint, served: seconds for one reply, retries included
    "concurrency": int,  # endpoint, served: requests at a time
    "format_attempts": int,  # endpoint, served: how often a reply that cannot be read is asked for in all
    "max_tokens": int,  # endpoint, served: tokens of a reply
    "when": str,  # an action is scored as soon as it is done ("action") or when the play is over ("end"); none: as the world's guide says
    "truth": str,  # who is scored with the hidden answers at hand: "none", "last", "last_role" or "all"
    "missing": str,  # an action without a score makes its play void ("void") or is left out alone ("mask")
    "weight": float,  # of a score in the pay; none: 0.1
    "study": str,  # changes what the coach says, e.g. "constant:5"; see `marl_llm.coaching.studies`
}


def coach_section() -> config_dict.ConfigDict:
    """What may be said of a coach; without a `kind` nobody coaches."""
    return config_dict.ConfigDict({name: config_dict.placeholder(kind) for name, kind in _OPTIONS.items()})


def check_coach(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Raises `ConfigError` for a coach that cannot be, or an option that its kind does not read; asks nobody."""
    c, options = config.coach, given(config.coach)
    if not c.kind:
        if options:
            raise ConfigError(f"config.coach.{next(iter(options))} would have no effect: config.coach.kind is not set")
        if isinstance(plan.played, World):
            _as_config(lambda: check_coached(plan.played.workflow))
        return
    check_word("config.coach.kind", c.kind, READS, ConfigError)
    if not isinstance(plan.played, World) or not isinstance(plan.game, World):
        raise ConfigError("config.coach would have no effect: a value-state game has rewards of its own; coach a workflow")
    if idle := [name for name in options if name not in (*_COMMON, *READS[c.kind])]:
        raise ConfigError(f"config.coach.{idle[0]} would have no effect: a coach of kind {c.kind!r} does not read it")
    if lacks := [name for name in _NEEDS.get(c.kind, ()) if not options.get(name)]:
        raise ConfigError(f"config.coach.kind={c.kind!r} needs {' and '.join(lacks)}")
    name = plan.played.workflow.name
    if plan.played.guide is None:
        raise ConfigError(f"config.coach.kind={c.kind!r}: world {name!r} has no guide; give World(guide=CoachGuide(...))")
    if c.kind == "rubric" and plan.played.guide.rubric is None:
        raise ConfigError(f"config.coach.kind='rubric': the guide of world {name!r} has no rubric")
    if (c.cap_usd is None) != (c.prices is None):
        raise ConfigError("config.coach.cap_usd and config.coach.prices belong together: a cap needs prices, and prices alone cap nothing")
    for name in ("cap_usd", "requests_per_minute", "deadline_s", "concurrency", "format_attempts", "max_tokens"):
        if options.get(name) is not None and not 0 < options[name] < math.inf:
            raise ConfigError(f"config.coach.{name}={options[name]} must be above 0")
    _prices(c.prices)
    if plan.recipe.rewards == "team":
        raise ConfigError(f"config.coach would have no effect: recipe {plan.recipe.name} reads team rewards only; set recipe.rewards")
    nobody = studies.Failing(None, 1.0)

    def attached() -> None:
        workflow = coached(plan.played.workflow, nobody, plan.played.guide, **_attaching(c))
        check_missing(workflow, plan.recipe.returns, plan.recipe.scope)
        studies.study(rubric_coach(dataclasses.replace(plan.played.guide, rubric=print)), c.study or "")

    _as_config(attached)


def make_coaching(config: config_dict.ConfigDict, plan: Plan) -> Coaching | None:
    """The coach of a config, ready to be asked; None where there is none. Raises `ConfigError`."""
    c = config.coach
    if not c.kind:
        return None
    from marl_llm.tools.chat import ChatClient, OpenAICompatible

    guide, clients = plan.played.guide, ()
    if c.kind == "rubric":
        coach = rubric_coach(guide)
    else:
        names = ("concurrency", "deadline_s", "requests_per_minute", "cache", "cap_usd")
        options = {name: value for name, value in given(c).items() if name in names}
        try:
            backend = OpenAICompatible(c.url, c.served_as, c.key_env)
            clients = (ChatClient(backend, prices=_prices(c.prices), **options),)
        except ValueError as error:
            raise ConfigError(f"config.coach: {error}") from error
        said = {} if c.max_tokens is None else {"max_tokens": c.max_tokens}
        coach = ChatCoach(of_client(clients[0], **said), guide, c.format_attempts or 2)
    return Coaching(studies.study(coach, c.study or ""), guide, _attaching(c), clients)


def cost_line(config: config_dict.ConfigDict, plan: Plan) -> str:
    """What a run may ask of its coach at most: calls, and, of a model, tokens and USD. Empty where nobody studies."""
    c = config.coach
    if not c.kind:
        return ""
    workflow, guide, recipe = plan.played.workflow, plan.played.guide, plan.recipe
    per_play = workflow.body.request_count
    calls = per_play * recipe.plays * config.rollout.tasks * config.steps
    line = (
        f"coach ({c.kind}): at most {per_play} actions a play x {recipe.plays} plays x {config.rollout.tasks} tasks x {config.steps} steps "
        f"= {calls:,} calls"
    )
    if c.kind == "rubric":
        return line
    attempts = c.format_attempts or 2
    texts = sum(map(len, (guide.workflow_text, guide.success, guide.scale, *guide.role_texts.values())))
    role = max(workflow.roles.values(), key=lambda role: role.max_prompt + role.max_tokens)
    read = role.max_prompt + role.max_tokens + (texts + 4000 + 2000) // 3  # a reading: three characters a token, of tools and the guide
    written = c.max_tokens or MAX_ANSWER
    line += f" of about {read:,} tokens read and at most {written:,} written each, {attempts} times if replies cannot be read"
    if c.prices:
        usd = calls * sum(price * tokens for price, tokens in zip(_prices(c.prices), (read, written))) / 1e6
        line += f": {usd:,.2f} USD without a second attempt; the cap is {c.cap_usd:,.2f} USD"
    return line


class CoachWatch:
    """Looks at a step's figures: notes and alarms, and the reason why a run has to stop.

    Args:
      say: where a line goes.
    """

    def __init__(self, say):
        self._say, self._noted, self._alarmed = say, False, False
        self._asked: collections.deque = collections.deque(maxlen=LOOK_BACK)
        self._scores: collections.deque = collections.deque(maxlen=WINDOW)
        self._successes: collections.deque = collections.deque(maxlen=WINDOW)

    def look(self, step: int, figures: dict[str, float], why: Callable[[], str] = str) -> None:
        """Looks at a step's figures; `why` says in words why the first score is missing.

        Raises `TrainingError` where the budget is used up, or more than a fifth of the last ten steps' scores are missing.
        """
        if "coach/asked" not in figures:
            return
        if figures.get("coach/failed_budget"):
            raise TrainingError(
                f"step {step}: the coach's budget is used up ({why() or 'config.coach.cap_usd'}). The steps before it are in the last "
                "checkpoint; --resume with a larger --config.coach.cap_usd goes on from there"
            )
        self._asked.append((figures["coach/missing"], figures["coach/asked"]))
        missing, asked = (sum(column) for column in zip(*self._asked))
        share = missing / max(asked, 1.0)
        if share > STOP:
            raise TrainingError(
                f"step {step}: {share:.0%} of the coach's scores of the last {len(self._asked)} steps are missing; the first: {why()}"
            )
        if share > NOTE and not self._noted:
            self._say(f"note step {step}: {share:.1%} of the coach's scores are missing; {why()}")
        self._noted = share > NOTE
        if "coach/score" in figures:
            self._scores.append(figures["coach/score"])
            self._successes.append(figures["success"])
        hacked = rising_while_falling(self._scores, self._successes)
        if hacked and not self._alarmed:
            self._say(f"ALARM step {step}: over {WINDOW} steps the coach's scores rose while success fell: look at what it pays for")
        self._alarmed = hacked


def first_failure(rollout: Any) -> str:
    """The first failure of the coach in a rollout, in words; empty if there is none."""
    node = f"scorer {COACH}"
    for episode in rollout.episodes:
        for failure in episode.failures:
            if failure.node == node:
                return f"{failure.kind}: {failure.message}"
        for path in episode.trajectories:
            for said in path.scores.values():
                if COACH in said and said[COACH].missing:
                    return said[COACH].missing
    return ""


def _attaching(c: config_dict.ConfigDict) -> dict[str, Any]:
    options = {name: getattr(c, name) for name in ("when", "truth", "missing", "weight", "deadline_s")}
    options = {name: value for name, value in options.items() if value is not None}
    if "deadline_s" in options:  # of a call; a score may need one for every attempt at its form
        options["deadline_s"] *= 1 + (c.format_attempts or 2)
    return options


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        prompt, reply = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"config.coach.prices={text!r} is not 'PROMPT,REPLY', USD per million tokens") from error
    if not (0 <= prompt < math.inf and 0 <= reply < math.inf):
        raise ConfigError(f"config.coach.prices={text!r} must be 0 or more, and finite")
    return prompt, reply


def _as_config(make) -> None:
    try:
        make()
    except WorkflowError as error:
        raise ConfigError(f"config.coach: {error}") from error
