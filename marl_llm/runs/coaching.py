"""`config.coach`: who scores every action of training plays, what that may cost, and when a run without scores stops."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ml_collections import config_dict

from marl_llm.coaching import ChatCoach, Coaching, check_coached, check_missing, coached, of_client, rubric_coach, small, studies
from marl_llm.coaching.backward import Backward, counterfactual_coach
from marl_llm.coaching.figures import WINDOW, rising_while_falling
from marl_llm.coaching.history import History
from marl_llm.hints import check_word
from marl_llm.runs.checks import given
from marl_llm.runs.command import ConfigError, TrainingError
from marl_llm.runs.measuring import RecentShare
from marl_llm.runs.options import kind_of
from marl_llm.runs.sections import CoachSection
from marl_llm.workflows import Environment, WorkflowError
from marl_llm.workflows.rewards import COACH

if TYPE_CHECKING:
    from marl_llm.runs.resolve import Plan

_COMMON = ("kind", "when", "truth", "missing", "weight", "study", "history", "backward", "corrections")
_CLIENT = ("concurrency", "deadline_s", "format_attempts", "max_tokens")
_SERVER = (*_CLIENT, "url", "served_as", "cache", "requests_per_minute")
READS = {  # kind -> options that it reads beside the common ones
    "endpoint": (*_SERVER, "key_env", "cap_usd", "prices"),
    "served": _SERVER,
    "model": (*_CLIENT, "path", "thinking", "max_prompt", "cache"),
    "rubric": (),
    "small": ("path", "concurrency", "deadline_s", "learn"),
    "ensemble": ("members", "agreement", "quorum"),
}
_NEEDS = {"endpoint": ("url", "served_as"), "served": ("url", "served_as"), "model": ("path",), "small": ("path",)}
_NEEDS |= {"ensemble": ("members",)}
_RUN = ("when", "truth", "missing", "weight")  # options of the coach as a whole, which no member has
DEADLINE_S = 300.0  # of one score where no deadline is given
WHOLE_DEADLINE = math.inf  # seconds of an attempt, of a model in this process: asking it again would only add to its work
SMALL_SLOTS = 64  # actions that a small coach reads at a time
LOOK_BACK = 10  # steps whose missing scores are counted together
NOTE, STOP = 0.01, 0.2  # shares of missing scores


def check_coach(config: config_dict.ConfigDict, plan: Plan) -> None:
    """Raises `ConfigError` for a coach that cannot be, or an option that its kind does not read; asks nobody."""
    c, options = config.coach, CoachSection.changed(config.coach)
    if not c.kind:
        if options:
            raise ConfigError(f"config.coach.{next(iter(options))} would have no effect: config.coach.kind is not set")
        if isinstance(plan.played, Environment):
            _as_config(lambda: check_coached(plan.played.workflow))
        return
    check_word("config.coach.kind", c.kind, READS, ConfigError)
    if not isinstance(plan.played, Environment) or not isinstance(plan.game, Environment):
        raise ConfigError("config.coach would have no effect: a value-state game has rewards of its own; coach a workflow")
    if plan.played.guide is None:
        name = plan.played.workflow.name
        raise ConfigError(f"config.coach.kind={c.kind!r}: environment {name!r} has no guide; give Environment(guide=CoachGuide(...))")
    _check_one(c, plan.played)
    if plan.recipe.rewards == "team":
        raise ConfigError(f"config.coach would have no effect: recipe {plan.recipe.name} reads team rewards only; set recipe.rewards")
    if plan.played.guide.strategic and not c.history:
        unset = "config.coach.history is not set, and the rubric of this environment reads it"
        raise ConfigError(f"{unset}: set how many steps it looks back on")
    _check_backward(c, plan)
    _check_corrections(c, plan)
    for name, why in (("max_staleness", "would change while it scores"), ("batch_invariant", "does not repeat byte for byte")):
        if c.learn and config.rollout[name]:
            raise ConfigError(f"config.rollout.{name}: a coach that trains (config.coach.learn) {why}; leave one of them out")
    nobody = studies.Failing(None, 1.0)

    def attached() -> None:
        workflow = coached(plan.played.workflow, nobody, plan.played.guide, **_attaching(c))
        check_missing(workflow, plan.recipe.returns, plan.recipe.scope)

    _as_config(attached)


def _check_backward(c: config_dict.ConfigDict, plan: Plan) -> None:
    """Raises `ConfigError` where the outcome of a play cannot be traced back."""
    if not c.backward:
        return
    guide, name = plan.played.guide, plan.played.workflow.name
    if c.kind not in ("rubric", "endpoint", "served", "model"):
        raise ConfigError(f"config.coach.backward: a coach of kind {c.kind!r} cannot go backwards")
    if c.kind == "rubric" and guide.contribution is None:
        raise ConfigError(f"config.coach.backward: the guide of environment {name!r} has no contribution, which a rubric needs")
    if (c.when or guide.when) != "end":
        raise ConfigError("config.coach.backward needs the end of the play: set config.coach.when=end")
    if plan.recipe.sampling == "tree" or c.study:
        raise ConfigError("config.coach.backward traces whole plays: it takes neither a tree of samples nor config.coach.study")
    _as_config(lambda: Backward(studies.Failing(None, 1.0), studies.Failing(None, 1.0), *_pair("backward", c.backward)))


def _check_corrections(c: config_dict.ConfigDict, plan: Plan) -> None:
    """Raises `ConfigError` where nobody can say what an action should have been."""
    if c.corrections is None:
        return
    if c.kind not in ("rubric", "endpoint", "served", "model"):
        raise ConfigError(f"config.coach.corrections: a coach of kind {c.kind!r} says scores alone")
    if c.kind == "rubric" and plan.played.guide.better is None:
        name = plan.played.workflow.name
        raise ConfigError(f"config.coach.corrections: the guide of environment {name!r} has no better, which a rubric needs")
    if c.backward:
        raise ConfigError("config.coach.corrections and config.coach.backward exclude each other: what goes backwards corrects nothing")
    if c.study == "permuted":
        raise ConfigError("config.coach.corrections: a permuted coach would correct an action with what another should have said")


def _check_one(c: config_dict.ConfigDict, environment: Environment) -> None:
    """Raises `ConfigError` for a coach, or a member of an ensemble, that cannot be."""
    CoachSection.check(c)
    options, name = CoachSection.changed(c), environment.workflow.name
    if idle := [option for option in options if option not in (*_COMMON, *READS[c.kind])]:
        raise ConfigError(f"config.coach.{idle[0]} would have no effect: a coach of kind {c.kind!r} does not read it")
    if lacks := [option for option in _NEEDS.get(c.kind, ()) if not options.get(option)]:
        raise ConfigError(f"config.coach.kind={c.kind!r} needs {' and '.join(lacks)}")
    if c.kind == "rubric" and environment.guide.rubric is None:
        raise ConfigError(f"config.coach.kind='rubric': the guide of environment {name!r} has no rubric")
    if c.kind == "model" and not (pathlib.Path(c.path) / "config.json").is_file():
        raise ConfigError(f"config.coach.path={c.path!r} is no checkpoint: there is no config.json in it")
    if c.kind == "small":
        _as_config(lambda: small.read_record(c.path, environment.guide))
        if environment.guide.brief is None:
            raise ConfigError(f"config.coach.kind='small': the guide of environment {name!r} has no brief, which it reads")
    if (c.cap_usd is None) != (c.prices is None):
        raise ConfigError("config.coach.cap_usd and config.coach.prices belong together: a cap needs prices, and prices alone cap nothing")
    if c.learn is not None and environment.guide.rubric is None:
        raise ConfigError(f"config.coach.learn: the guide of environment {name!r} has no rubric to check a coach by that trains")
    _prices(c.prices)
    nobody = rubric_coach(dataclasses.replace(environment.guide, rubric=print))
    if c.kind == "ensemble":
        members = members_of(c)
        for number, member in enumerate(members, 1):
            try:
                _check_one(member, environment)
            except ConfigError as error:
                raise ConfigError(f"config.coach.members, member {number}: {error}") from error
        _as_config(lambda: studies.Ensemble([nobody] * len(members), c.agreement, c.quorum))
    if not (c.kind == "ensemble" and "babbling" in (c.study or "")):
        _as_config(lambda: studies.study(nobody, c.study or ""))
    else:
        raise ConfigError("config.coach.study: babbling changes replies, which an ensemble has none of; give it to a member")


def members_of(c: config_dict.ConfigDict) -> list[config_dict.ConfigDict]:
    """The members of an ensemble, each with the options of a coach. Raises `ConfigError` for a text that names none."""
    configs = []
    for text in c.members.split(";"):
        member, words = CoachSection.config(), shlex.split(text)
        if not words:
            raise ConfigError(f"config.coach.members={c.members!r} has an empty member; it is like 'rubric; model path=DIR'")
        check_word("a member's kind in config.coach.members", words[0], [kind for kind in READS if kind != "ensemble"], ConfigError)
        member.kind = words[0]
        kinds = {field.name: kind_of(field.type) for field in dataclasses.fields(CoachSection)}
        for word in words[1:]:
            name, equals, value = word.partition("=")
            if not equals or name in ("kind", "history", "backward", "corrections", "learn", *_RUN) or name not in kinds:
                raise ConfigError(f"config.coach.members: {word!r} is no option of a member; write NAME=VALUE")
            try:
                member[name] = kinds[name](value)
            except ValueError as error:
                raise ConfigError(f"config.coach.members: {word!r}: {error}") from error
        configs.append(member)
    return configs


def make_coaching(config: config_dict.ConfigDict, plan: Plan) -> Coaching | None:
    """The coach of a config, ready to be asked; None where there is none. Raises `ConfigError`."""
    c = config.coach
    if not c.kind:
        return None
    clients: list[Any] = []
    models: list[Any] = []
    try:
        guide = dataclasses.replace(plan.played.guide, corrects=c.corrections is not None)
        coach = _make(c, guide, clients, models)
    except BaseException:
        for opened in (*clients, *models):
            opened.close()
        raise
    trained = _trained(config, guide, models[-1]) if c.learn else None
    history, options = History(c.history) if c.history else None, _attaching(c)
    if c.backward:
        workflow = plan.played.workflow
        behind = counterfactual_coach(plan.played.guide) if c.kind == "rubric" else coach
        coach = Backward(coach, behind, *_pair("backward", c.backward))
        rounds = workflow.body.request_count + 1  # one after the other
        options |= {"result": workflow.metrics[plan.played.headline], "deadline_s": rounds * options.get("deadline_s", DEADLINE_S)}
    return Coaching(coach, plan.played.guide, options, tuple(clients), tuple(models), history, c.corrections or 0.0, trained)


def _trained(config: config_dict.ConfigDict, guide: Any, model: Any) -> Any:
    """Who trains the small coach that `model` serves."""
    from marl_llm.training.trained_coach import TrainedCoach

    c = config.coach
    return TrainedCoach(c.path, model, guide, c.when or guide.when, learning_rate=c.learn, seed=config.seed)


def _make(c: config_dict.ConfigDict, guide: Any, clients: list[Any], models: list[Any]) -> Any:
    """One coach; what has to be closed is added to `clients` and `models`."""
    from marl_llm.tools.chat import ChatClient, OpenAICompatible

    if c.kind == "rubric":
        return studies.study(rubric_coach(guide), c.study or "")
    if c.kind == "ensemble":
        members = [_make(member, guide, clients, models) for member in members_of(c)]
        return studies.study(studies.Ensemble(members, c.agreement, c.quorum), c.study or "")
    if c.kind == "small":
        longest = small.read_record(c.path, guide)["max_prompt"]
        options = {name: value for name, value in given(c).items() if name in ("concurrency", "deadline_s")}
        return studies.study(small_coach(c.path, longest, guide, models, clients, **options), c.study or "")
    names = ("concurrency", "deadline_s", "requests_per_minute", "cache", "cap_usd")
    options = {name: value for name, value in given(c).items() if name in names}
    try:
        if c.kind == "model":
            from marl_llm.serving.local import SLOTS, LocalModel

            options.setdefault("concurrency", SLOTS)
            options["attempt_s"] = WHOLE_DEADLINE
            sizes = {"max_prompt": c.max_prompt, "max_tokens": c.max_tokens}
            models.append(LocalModel(c.path, max_num_seqs=options["concurrency"], thinking=c.thinking, **sizes))
            backend = models[-1].backend(content=c.cache is not None)
        else:
            backend = OpenAICompatible(c.url, c.served_as, c.key_env)
        clients.append(ChatClient(backend, prices=_prices(c.prices), **options))
    except ValueError as error:
        raise ConfigError(f"config.coach: {error}") from error
    return studies.study(ChatCoach(of_client(clients[-1], max_tokens=c.max_tokens), guide, c.format_attempts), c.study or "")


def small_coach(path: Any, max_prompt: int, guide: Any, models: list[Any], clients: list[Any], **options: Any) -> ChatCoach:
    """The small coach in a directory. What has to be closed is added to `clients` and `models`; `options` are the client's."""
    from marl_llm.serving.local import LocalModel
    from marl_llm.text import PieceTokenizer
    from marl_llm.tools.chat import ChatClient

    try:
        renderer = small.renderer_of(PieceTokenizer.load(pathlib.Path(path) / small.TOKENIZER))
        sizes = dict(max_prompt=max_prompt, max_tokens=small.MAX_REPLY, max_num_seqs=SMALL_SLOTS)
        models.append(LocalModel(str(path), renderer=renderer, **sizes))
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"config.coach.path={str(path)!r} is no small coach: {error}") from error
    clients.append(ChatClient(models[-1].backend(content=True), **{"concurrency": SMALL_SLOTS, "attempt_s": WHOLE_DEADLINE, **options}))
    return ChatCoach(of_client(clients[-1], max_tokens=small.MAX_REPLY), guide, 1, small.brief_messages)


def cost_line(config: config_dict.ConfigDict, plan: Plan) -> str:
    """What a run may ask of its coach at most: calls, and, of a model, tokens and USD. Empty where nobody studies."""
    c = config.coach
    if not c.kind:
        return ""
    workflow, recipe = plan.played.workflow, plan.recipe
    per_play = workflow.body.request_count
    calls = (2 if c.backward else 1) * per_play * recipe.plays * config.rollout.tasks * config.steps
    line = (
        f"coach ({c.kind}): at most {per_play} actions a play x {recipe.plays} plays x {config.rollout.tasks} tasks x {config.steps} steps "
        f"{'x 2, there and back, ' if c.backward else ''}= {calls:,} calls"
    )
    members = members_of(c) if c.kind == "ensemble" else []
    costs = line + _cost_of(c, plan, calls).removeprefix(c.kind)
    if members:
        costs = "; ".join([line, *(_cost_of(member, plan, calls) for member in members)])
    paths = {pathlib.Path(member.path).resolve() for member in members or [c] if member.kind == "model"}
    alike = [name for name, o in plan.options.items() if o.get("path") and pathlib.Path(o["path"]).resolve() in paths]
    warned = f"; note: {', '.join(alike)} began as the coach's own model, which may favour its own texts: see coach/<role>/own_slope"
    return costs + warned * bool(alike)


def _cost_of(c: config_dict.ConfigDict, plan: Plan, calls: int) -> str:
    """What a coach reads and writes at most for so many calls, behind its kind."""
    if c.kind in ("rubric", "small"):
        return c.kind
    workflow, guide = plan.played.workflow, plan.played.guide
    attempts = c.format_attempts
    texts = sum(map(len, (guide.workflow_text, guide.success, guide.scale, *guide.role_texts.values())))
    role = max(workflow.roles.values(), key=lambda role: role.max_prompt + role.max_tokens)
    read = role.max_prompt + role.max_tokens + (texts + 4000 + 2000) // 3  # a reading: three characters a token, of tools and the guide
    written = c.max_tokens
    line = f"{c.kind} of about {read:,} tokens read and at most {written:,} written each, {attempts} times if replies cannot be read"
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
        self._missing = RecentShare(LOOK_BACK)
        self._drift, self._drifted = RecentShare(LOOK_BACK), False
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
        share = self._missing.add(figures["coach/missing"], figures["coach/asked"])
        if share > STOP:
            steps = len(self._missing.counted)
            raise TrainingError(f"step {step}: {share:.0%} of the coach's scores of the last {steps} steps are missing; the first: {why()}")
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

    def look_at_drift(self, step: int, figures: dict[str, float]) -> dict[str, float]:
        """Looks at how far a coach that trains is from the rubric that it is checked by, and notes when a small coach might not begin so.
        Returns the figures."""
        if not figures.get("coach/checked"):
            return figures
        error = self._drift.add(figures["coach/drift"] * figures["coach/checked"], figures["coach/checked"])
        if error > small.MOST_ERROR and not self._drifted:
            self._say(
                f"note step {step}: over {len(self._drift.counted)} steps the coach was {error:.2f} points from the rubric; "
                f"a small coach may begin with {small.MOST_ERROR}"
            )
        self._drifted = error > small.MOST_ERROR
        return figures


def first_failure(rollout: Any) -> str:
    """The first failure of the coach in a rollout, in words; empty if there is none, as in compiled play, whose `rollout` is None."""
    node = f"scorer {COACH}"
    for episode in rollout.episodes if rollout else ():
        for failure in episode.failures:
            if failure.node == node:
                return f"{failure.kind}: {failure.message}"
        for path in (*episode.trajectories, *episode.candidates):
            for scores in path.scores.values():
                if COACH in scores and scores[COACH].missing:
                    return scores[COACH].missing
    return ""


def _attaching(c: config_dict.ConfigDict) -> dict[str, Any]:
    options: dict[str, Any] = {name: value for name, value in CoachSection.changed(c).items() if name in _RUN}
    asked = members_of(c) if c.kind == "ensemble" else [c]
    # The deadline is of a call; a score may need one for every attempt at its form.
    waits = [(1 + member.format_attempts) * member.deadline_s for member in asked if member.deadline_s is not None]
    if waits:
        options["deadline_s"] = max(waits) if len(waits) == len(asked) else max(DEADLINE_S, *waits)
    return options


def _pair(name: str, text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"config.coach.{name}={text!r} is not two numbers with a comma between") from error
    return first, second


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
