"""Whether prolonging pays: what the recipe's return gives to longer plays that score no better than shorter ones of the same task.

A return that sums pay over turns (`to_go`, `trajectory`) gives two paid rounds more than one, so that a team which puts off its success
learns to put it off again. Plays are made longer on purpose: a role holds back in the first turn in which it speaks, and follows the
scripted player from then on. What counts is the return of the response that held back, which sees all that it prolongs; where everybody
held back, or nobody did on purpose, that of the play's first response.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from marl_llm.algorithms import Recipe, returns_for
from marl_llm.checking.plays import Says, Subject, Words, silent
from marl_llm.checking.verdict import Finding, passed, warned
from marl_llm.workflows import Episode, RoleCall, ScriptTurn
from marl_llm.workflows.nodes import Choose, Each, FunctionNode, Repeat, walk
from marl_llm.workflows.samples import SampleTable

Kind = tuple[str, str]  # how plays were made longer, and whose return counts
Kinds = Mapping[Kind, Sequence[Episode]]
Pairs = Mapping[Kind, Sequence[tuple["ComparedPlay", "ComparedPlay"]]]
LATE = " at first"
PLAYS = 2  # of each task, by each late player
FEWEST = 3  # pairs of plays that a warning rests on
GROWTH = 0.02  # share of the shorter play's return by which the longer one's must be higher, on average
SUMMED = ("to_go", "trajectory")  # returns that pay every round of a play
FIRST = "the first response"
SCRIPTED = ("the scripted player", FIRST)
INSTEAD = ("outcome", "to_go_mean")  # returns that do not grow with the number of paid rounds


@dataclasses.dataclass(frozen=True)
class ComparedPlay:
    """One play as it is compared. `place`: its number among all plays that are compared."""

    place: int
    task: int
    number: int
    turns: int
    responses: int
    score: float


@dataclasses.dataclass(frozen=True)
class Growth:
    """By how much longer plays return more. `how`: by whom they were made longer; `short`, `long`: means of (return, turns, responses)."""

    how: str
    whose: str  # a role, or `FIRST`
    pairs: int
    short: tuple[float, float, float]
    long: tuple[float, float, float]

    @property
    def gain(self) -> float:
        """What a longer play returns more."""
        return self.long[0] - self.short[0]

    def __str__(self) -> str:
        (less, *_), (more, *_) = self.short, self.long
        short_counts, long_counts = (f"{turns:.3g} turns and {responses:.3g} responses" for _, turns, responses in (self.short, self.long))
        longer = f"{more:.2f} for {self.whose} in plays of {long_counts}"
        shorter = f"{less:.2f} in plays of {short_counts} that score no less"
        return f"{longer}, {shorter} ({self.how}; {self.pairs} pairs)"


def prolonging(subject: Subject) -> Iterator[Finding]:
    """Law 11: the return that the recipe trains on does not grow with the number of turns at the same score."""
    recipe, workflow = subject.recipe, subject.environment.workflow
    if not any(isinstance(node, Choose | Each | FunctionNode | Repeat) for node in walk(workflow.body)):
        yield passed("turns", 11, "every play has the same turns: the workflow has no loop and no choice")
        return
    kinds = {
        kind: [episode for episode in episodes if episode.trajectories and episode.trajectories[0].calls]
        for kind, episodes in _kinds(subject).items()
    }
    pairs, count = _pairs(subject, kinds), sum(map(len, kinds.values()))
    if not pairs:
        yield passed("turns", 11, f"of {count} plays none was longer than another of its task without scoring more, or none scored")
        return
    growth = _growth(subject, kinds, pairs, recipe)
    if growth is not None:
        cure = next((name for name in INSTEAD if _cures(subject, kinds, pairs, recipe, name)), None)
        change = f"Set recipe.returns={cure}, or pay" if cure else "Pay"
        problem = f"prolonging pays: with returns={recipe.returns!r} the return is {growth}"
        yield warned("turns", 11, f"{problem}. {change} the result once per play, or what a turn improved (`delta`), or charge every turn")
        return
    evidence = f"{count} plays: the return (returns={recipe.returns!r}) does not grow with the number of turns"
    summed = None if recipe.returns in SUMMED else _with(recipe, "to_go")
    if summed is not None and (growth := _growth(subject, kinds, pairs, summed)) is not None:
        evidence += f"; with returns='to_go' it would: {growth}"
    yield passed("turns", 11, evidence)


def _kinds(subject: Subject) -> Kinds:
    """(how plays were made longer, whose return counts) -> plays. Those of `SCRIPTED` are what the late ones are compared with."""
    tasks, kinds = subject.draw(subject.few), {("random play", FIRST): subject.random or ()}
    if subject.honest is None:
        return kinds
    kinds |= {("scripted play", FIRST): subject.honest, SCRIPTED: subject.play(tasks, subject.says, PLAYS)}
    roles = tuple(subject.environment.workflow.roles)
    late = {role: (role,) for role in roles} | ({"everybody": roles} if len(roles) > 1 else {})
    for (how, words), (who, holding) in itertools.product(_held_back(subject, kinds[SCRIPTED]).items(), late.items()):
        kind = f"{who} {how}{LATE}", who if len(holding) == 1 else FIRST
        try:
            kinds[kind] = subject.play(tasks, _late(subject.says, words, holding), PLAYS)
        except Exception:  # a scripted player that cannot read what such words left; the check of junk reports what a game cannot read
            continue
    return kinds


def _held_back(subject: Subject, scripted: Sequence[Episode]) -> dict[str, Says]:
    """Description -> a player that holds back in this way."""
    calls = [(episode.task.number, call) for episode in scripted for call in episode.events() if isinstance(call, RoleCall)]

    def of_another(turn: ScriptTurn) -> Words:
        others = [call for task, call in calls if call.node == turn.node and task != turn.seed[1]]
        if not others:
            return ""
        return tuple(others[0].tokens.tolist()) if turn.role.speaks_ids else others[0].text

    def half(turn: ScriptTurn) -> Words:
        words = subject.says(turn)
        return words[: len(words) // 2]

    players = {"says nothing": silent, "says what suits another task": of_another, "says half of it": half}
    return players | ({"says random words": subject.environment.random_player} if subject.environment.random_player else {})


def _late(says: Says, words: Says, roles: Sequence[str]) -> Says:
    """A player of which these roles say `words` in the first turn in which they speak, and what `says` says from then on."""
    first: dict[tuple, int] = {}

    def spoken(turn: ScriptTurn) -> Words:
        play = turn.seed[1], turn.seed[4], turn.role.name
        holds_back = turn.role.name in roles and turn.turn == first.setdefault(play, turn.turn)
        return words(turn) if holds_back else says(turn)

    return spoken


# --- comparing -------------------------------------------------------------------------------------------------------------------------


def _pairs(subject: Subject, kinds: Kinds) -> Pairs:
    """Kind -> pairs of a shorter play and a longer one of its task that scores, and no more; those of equal scores, where there are any."""
    places, plays = itertools.count(), {}
    for kind, episodes in kinds.items():
        paths = [(episode, episode.trajectories[0]) for episode in episodes]
        plays[kind] = [
            ComparedPlay(next(places), episode.task.number, episode.play, path.turns, len(path.calls), subject.score(path))
            for episode, path in paths
        ]
    scripted = {(play.task, play.number): play for play in plays.get(SCRIPTED, ())}
    by_kind = {}
    for (how, whose), longer in plays.items():
        if how.endswith(LATE):
            pairs = [(scripted[play.task, play.number], play) for play in longer if (play.task, play.number) in scripted]
        else:
            pairs = [(a, b) for a, b in itertools.permutations(longer, 2) if a.task == b.task]
        pairs = [(a, b) for a, b in pairs if b.responses > a.responses and 0 < b.score <= a.score + 1e-6]
        pairs = [(a, b) for a, b in pairs if b.score >= a.score - 1e-6] or pairs
        if len(pairs) >= FEWEST:
            by_kind[how, whose] = pairs
    return by_kind


def _growth(subject: Subject, kinds: Kinds, pairs: Pairs, recipe: Recipe) -> Growth | None:
    """The largest growth over all ways of prolonging; None if no return grows."""
    returns = _returns(subject, kinds, recipe)
    growths = [_compared(how, whose, plays, returns) for (how, whose), plays in pairs.items()]
    return max(filter(None, growths), key=lambda growth: growth.gain, default=None)


def _compared(
    how: str, whose: str, pairs: Sequence[tuple[ComparedPlay, ComparedPlay]], returns: Sequence[Mapping[str, float]]
) -> Growth | None:
    """The growth of a return in pairs of a shorter and a longer play; None where they are few, or it does not grow."""
    pairs = [(a, b) for a, b in pairs if whose in returns[a.place] and whose in returns[b.place]]
    gains = np.asarray([returns[b.place][whose] - returns[a.place][whose] for a, b in pairs])
    if len(gains) < FEWEST or np.mean(gains > 1e-6) <= 0.5:
        return None
    figures = [[(returns[play.place][whose], play.turns, play.responses) for play in side] for side in zip(*pairs)]
    short, long = (tuple(np.mean(side, axis=0).tolist()) for side in figures)
    grows = long[0] - short[0] > max(1e-3, GROWTH * abs(short[0]))
    return Growth(how, whose, len(pairs), short, long) if grows else None


def _returns(subject: Subject, kinds: Kinds, recipe: Recipe) -> list[dict[str, float]]:
    """Of each play: the return of its first response (`FIRST`), and of the first one of each role."""
    rows, count = [], 0
    for episodes in kinds.values():
        table = subject.table(episodes, PLAYS)  # numbers the plays 0, 1, ... in this order
        rows += [dataclasses.replace(row, where=True, trajectory=row.trajectory + count) for row in table.samples]
        count += len(episodes)
    first_returns: list[dict[str, float]] = [{} for _ in range(count)]
    returns = np.asarray(returns_for(recipe, SampleTable(tuple(rows)).to_samples()))
    for row, value in zip(rows, returns, strict=True):  # in the order of play
        for whose in (FIRST, row.call.role):
            first_returns[row.trajectory].setdefault(whose, float(value))
    return first_returns


def _with(recipe: Recipe, returns: str) -> Recipe | None:
    """The recipe with other returns; None where it cannot have them."""
    try:
        return dataclasses.replace(recipe, returns=returns)
    except ValueError:
        return None


def _cures(subject: Subject, kinds: Kinds, pairs: Pairs, recipe: Recipe, returns: str) -> bool:
    """Whether the recipe can have these returns, and does not grow with them."""
    other = None if returns == recipe.returns else _with(recipe, returns)
    return other is not None and _growth(subject, kinds, pairs, other) is None
