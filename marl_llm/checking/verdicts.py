"""The checks: each plays an environment and returns verdicts with evidence. `CHECKS` lists them in the order of the report."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable, Iterator

import numpy as np

from marl_llm.checking import honesty
from marl_llm.checking.junk import battery
from marl_llm.checking.plays import CHARACTERS_PER_TOKEN, Subject, again, disturbed, first_difference, happened, mean, pays, plain, silent
from marl_llm.checking.prolonging import prolonging
from marl_llm.checking.verdict import Finding, failed, note, passed, verdict
from marl_llm.games.protocol import SPLITS
from marl_llm.reporting.files import to_json
from marl_llm.text import unknown_words
from marl_llm.workflows import Environment, Episode, RoleCall, WorkflowError

__all__ = ["CHECKS", "Finding", "check"]


def same_seed(subject: Subject) -> Iterator[Finding]:
    """Law 6: a play follows from its seed; not from the global random state, from earlier plays, or from the order of drawing."""
    tasks = subject.draw(subject.few)

    def played(state: int) -> tuple[list[str], list[list[str]]]:
        with disturbed(state):
            drawn = subject.draw(subject.few)
            return [plain([t.number, t.fields, t.hidden]) for t in drawn], list(map(happened, subject.play(drawn, subject.says, 2)))

    drawn, plays = played(1)
    drawn_again, other = played(2)
    difference = _difference(drawn, drawn_again) or _difference(plays, other)
    if difference is None:
        yield passed("same seed", 6, f"{len(plays)} plays came again with the global random state disturbed")
    else:
        _, same = played(1)
        cause = "the global random state" if _difference(plays, same) is None else "a state that outlives a play, or an unseeded draw"
        yield failed("same seed", 6, f"the same tasks and seeds gave another play; the cause is {cause}: {difference}")
        return
    backwards, redrawn = {}, []
    for number in reversed(range(subject.few)):
        task = subject.environment.tasks("train", number, 1)[0]
        redrawn.append(plain([task.number, task.fields, task.hidden]))
        backwards[number] = list(map(happened, subject.play([task], subject.says, 2)))
    alone = [play for number in range(len(tasks)) for play in backwards[number]]
    difference = _difference(drawn, redrawn[::-1]) or _difference(plays, alone)
    text = f"{len(alone)} plays came again one by one, in the reverse order"
    yield verdict("order", 6, difference is None, text, f"drawn one by one and in the reverse order, a play is another: {difference}")


def _difference(first: list, second: list) -> str | None:
    for number, (a, b) in enumerate(zip(first, second)):
        difference = first_difference(*(x if isinstance(x, list) else [f"task {x}"] for x in (a, b)))
        if difference:
            return f"number {number}, {difference}"
    return None


def forks(subject: Subject) -> Iterator[Finding]:
    """Law 4: paths with the same words have the same events, whether they fork within a play or are plays of one task."""
    tasks = subject.draw(subject.few)
    original = subject.play(tasks, subject.says)
    says, before = again(original), list(map(happened, original))
    three = list(map(happened, subject.play(tasks, says, 3)))
    differences = [_difference([before[n]] * 3, three[3 * n : 3 * n + 3]) for n in range(len(tasks))]
    count, forked = 3 * len(tasks), []
    for role in subject.environment.workflow.roles:
        try:
            episodes = subject.play(tasks, says, branching={role: 2}, pick="first", score="at_end")
        except WorkflowError as error:
            if not str(error).startswith("branching"):  # a role beside others cannot fork to the end
                raise
            continue
        forked.append(role)
        for number, episode in enumerate(episodes):
            paths = [happened(dataclasses.replace(episode, trajectories=(path,))) for path in episode.trajectories]
            count += len(paths)
            differences.append(_difference([before[number]] * len(paths), paths))
    difference = next(filter(None, differences), None)
    where = f"forks of {', '.join(forked)}" if forked else "no role can fork to the end"
    text = f"{count} paths that say the same are the same; {where}"
    yield verdict("forks", 4, difference is None, text, f"a path that says the same is another (state is shared or changed): {difference}")


def groups(subject: Subject) -> Iterator[Finding]:
    """Law 3: tasks have their own numbers, candidates saw one prompt, and all plays of a task begin with one prompt per role."""
    wanted = range(3, 3 + subject.few)
    numbers = [task.number for task in subject.environment.tasks("train", wanted.start, len(wanted))]
    if numbers != list(wanted):
        yield failed("groups", 3, f"tasks {wanted.start} to {wanted[-1]} have the numbers {numbers}: groups of different tasks would mix")
        return
    plays = subject.play(subject.draw(subject.few), subject.says, subject.plays)
    rows = subject.table(plays, subject.plays).samples
    by_env: dict[int, set[int]] = {}
    first: dict[tuple[int, str], set[str]] = {}
    for row in rows:
        by_env.setdefault(row.env, set()).add(row.prompt)
        if row.order == 0:
            first.setdefault((row.instance, row.call.role), set()).add(row.call.prompt)
    mixed = [env for env, prompts in by_env.items() if len(prompts) > 1]
    unequal = [key for key, prompts in first.items() if len(prompts) > 1]
    text = f"{len(rows)} samples in {len(by_env)} groups of one prompt; the {subject.plays} plays of a task begin with one prompt"
    why = f"groups {mixed[:3]} hold several prompts" if mixed else f"plays of one task begin with several prompts: {unequal[:3]}"
    yield verdict("groups", 3, not mixed and not unequal, text, why)


def splits(subject: Subject) -> Iterator[Finding]:
    """Law 12: no task of one split occurs in another."""
    content = {s: {plain(task.fields): task.number for task in subject.environment.tasks(s, 0, subject.held_out)} for s in SPLITS}
    if len(set().union(*content.values())) == 1:
        text = "all tasks look the same: there is one task and nothing is held out, or they differ in hidden fields alone (a deal, a seed)"
        yield note("splits", 12, text)
        return
    for split, other in (("train", "test"), ("train", "validation"), ("validation", "test")):
        common = sorted(content[split].keys() & content[other].keys())
        if common:
            text = f"{len(common)} of {subject.held_out} tasks of {other} are tasks of {split} too, e.g. {common[0][:120]}"
            yield failed("splits", 12, text)
            return
    yield passed("splits", 12, f"{', '.join(f'{len(tasks)} tasks of {split}' for split, tasks in content.items())}: none in two splits")


def junk(subject: Subject) -> Iterator[Finding]:
    """Laws 14 and 11: whatever a role says, nothing raises, no play is aborted, and junk earns less than half of honest play.

    In a team all roles say junk. Of rivals somebody always wins, so there one role at a time says junk, against the scripted player.
    """
    tasks, broken, aborted, paid = subject.draw(subject.few), [], [], []
    honest, chance = subject.honest, subject.random
    plays = [*(honest or ()), *(chance or ())]
    # the check of budgets reports prompts that are too long
    too_long = {(e.task.number, failure.node) for e in plays for failure in e.failures if failure.kind == "prompt"}
    for name, says in battery(subject.environment.renderer).items():
        try:
            episodes = subject.play(tasks, says)
        except Exception as error:  # whatever a game's functions raise is the finding
            broken.append(f"{name}: {type(error).__name__}: {error}")
            continue
        failures = [(e, failure) for e in episodes for failure in e.failures if (e.task.number, failure.node) not in too_long]
        aborted += [f"{name}: {failure.node}: {failure.message}" for _, failure in failures]
        overpaid = _beaten(subject, tasks, says) if subject.environment.rivals else _overpaid(subject, episodes, honest, chance)
        paid += [f"{name}: {why}" for why in overpaid]
    count = len(battery(subject.environment.renderer))
    text = f"{count} kinds of junk raised nothing and aborted no play"
    yield verdict("junk", 14, not broken and not aborted, text, "; ".join((broken + aborted)[:3]))
    if honest is None:
        yield note("junk pay", 11, "there is no scripted player to compare with")
        return
    text = f"{count} kinds of junk earned less than half of the scripted player's score and rewards"
    if subject.environment.rivals:
        text = f"{count} kinds of junk, in each seat against the scripted player, won less than half of what that player wins there"
    yield verdict("junk pay", 11, not paid, text, "; ".join(paid[:3]))


def _overpaid(subject: Subject, episodes, honest, chance) -> Iterator[str]:
    """Why junk earned half of honest play or more; no complaint where the random player earns that much too."""
    if honest is None:
        return

    def scores(plays):
        return [subject.score(path) for play in plays for path in play.trajectories]

    kinds = {"the score": (scores(episodes), scores(honest), scores(chance or ()))}
    ours, theirs, random = pays(episodes), pays(honest), pays(chance or ())
    kinds |= {f"the rewards of {role}": (ours.get(role, []), theirs[role], random.get(role, [])) for role in theirs}
    for name, (of_junk, of_script, of_random) in kinds.items():
        half = mean(of_script) / 2
        if half > 0 and mean(of_junk) >= half and not (of_random and mean(of_random) >= half):
            yield f"{name} is {mean(of_junk):.2f}, and {mean(of_script):.2f} for the scripted player"


def _beaten(subject: Subject, tasks, says) -> Iterator[str]:
    """Why junk in one seat won half of what the scripted player wins there or more; the other seats are the scripted player's."""
    if subject.honest is None:
        return
    for seat in subject.environment.rivals:
        def speak(turn, seat=seat):
            return says(turn) if turn.role.name == seat else subject.says(turn)

        got, full = _wins(subject.play(tasks, speak, subject.plays), seat), _wins(subject.honest, seat)
        if full > 0 and got >= full / 2:
            yield f"{seat} wins {got:.2f} of its games, and {full:.2f} where the scripted player has the seat"


def _wins(plays, seat: str) -> float:
    """Mean result of a seat: won 1, drawn 0.5, lost or unreadable 0, from its calls' mean reward in [-1, 1] per play."""
    results = [pays([play]).get(seat, ()) for play in plays]
    return mean([max(0.0, (mean(result) + 1.0) / 2.0) for result in results if result])


def people(subject: Subject) -> Iterator[Finding]:
    """Law 10: what a transcript shows to people can be written: tasks are JSON, and pictures are lines of text."""
    plays = subject.honest or subject.play(subject.draw(subject.few), subject.says)
    problems, lines = [], 0
    for task in (play.task for play in plays):
        try:
            json.dumps(task.fields, default=to_json, allow_nan=False)
        except (TypeError, ValueError) as error:
            problems.append(f"task {task.number} is no JSON: {error}")
    if subject.environment.picture is not None:
        for path in (path for play in plays for path in play.trajectories):
            lines = max(lines, len(subject.environment.picture(path.fields) or ()))
    text = f"{len(plays)} tasks are JSON{f', pictures have up to {lines} lines' * bool(lines)}"
    yield verdict("people", 10, not problems, text, "; ".join(problems[:1]))


def bounds(subject: Subject) -> Iterator[Finding]:
    """Law 10: rewards are finite and bounded, the headline is in [0, 1], and a zero-sum game sums to zero."""
    kinds = {"scripted": subject.honest, "random": subject.random}
    kinds |= {name: _tolerant(subject, says) for name, says in battery(subject.environment.renderer).items()}
    largest, worst, outside, sums = 0.0, "", [], []
    for name, episodes in kinds.items():
        for path in (path for episode in episodes or () for path in episode.trajectories):
            for call, pay in path.earned.items():
                for value in (pay.team, pay.local, *pay.components.values()):
                    if not np.isfinite(value) or abs(value) > largest:
                        largest, worst = abs(value) if np.isfinite(value) else np.inf, f"{call} of the {name} player"
            if not 0.0 <= subject.score(path) <= 1.0:
                outside.append(f"{subject.environment.headline} is {subject.score(path)} in a play of the {name} player")
            sums.append(abs(sum(pay.team + pay.local for pay in path.earned.values())))
    problems = [f"|reward| reaches {largest:g} at {worst}; the bound is {subject.bound:g}"] if largest > subject.bound else []
    problems += outside[:1] + ([f"declared zero-sum, a play sums to {max(sums):g}"] if subject.zero_sum and max(sums) > 1e-5 else [])
    text = f"largest |reward| of a call {largest:.3g}, the score is in [0, 1]{', every play sums to 0' * subject.zero_sum}"
    yield verdict("bounds", 10, not problems, text, "; ".join(problems))


def unpaid(subject: Subject) -> Iterator[Finding]:
    """Law 10: which roles no reward ever pays, not even 0: the scripted, the random and the junk player earn nothing in them."""
    players = [subject.honest, subject.random, *(_tolerant(subject, says) for says in battery(subject.environment.renderer).values())]
    paid: set[str] = set()
    for path in (path for episodes in players for episode in episodes or () for path in episode.trajectories):
        for call in path.calls:
            pay = path.earned[call.id]
            if pay.components or pay.team or pay.local or pay.team_paid:
                paid.add(call.role)
    roles = list(subject.environment.workflow.roles)
    never = [role for role in roles if role not in paid]
    if not never:
        yield passed("pay", 10, f"every role is paid: {', '.join(roles)}")
        return
    who = f"no reward ever pays {', '.join(never)}"
    if len(never) == len(roles):
        yield failed("pay", 10, f"{who}: nothing could be learned")
    else:
        shared = "such a role learns only if the recipe shares the team's outcome (returns='outcome' or 'to_go')"
        yield note("pay", 10, f"{who}: {shared}")


def _tolerant(subject: Subject, says) -> tuple[Episode, ...]:
    try:
        return subject.play(subject.draw(subject.few), says)
    except Exception:  # the check of junk reports it
        return ()


def budgets(subject: Subject) -> Iterator[Finding]:
    """Law 10: the longest prompt that was met fits, and so does what the scripted player says; estimated where models bring their own
    vocabulary."""
    plays = [*(subject.honest or ()), *(subject.random or ())] or list(subject.play(subject.draw(subject.few), subject.says))
    roles, problems, notes = subject.environment.workflow.roles, [], []
    for episode in plays:
        problems += [f"{failure.node}: {failure.message}" for failure in episode.failures if failure.kind == "prompt"]
    calls = [event for episode in plays for event in episode.events() or episode.remains if isinstance(event, RoleCall)]
    for name, role in roles.items():
        calls_of_role = [call for call in calls if call.role == name]
        known = subject.environment.renderer is not None
        prompt = max((len(call.prompt_ids) if known else len(call.prompt) // 3 for call in calls_of_role), default=0)
        response = max((call.tokens.size or -(-len(call.text) // CHARACTERS_PER_TOKEN) for call in calls_of_role), default=0)
        about = "" if known else "about "
        spoke = "" if subject.says is silent else f" and said {about}{response} of {role.max_tokens}"
        notes.append(f"{name} read {about}{prompt} of {role.max_prompt}{spoke} tokens")
        if response > role.max_tokens:
            problems.append(f"{name}: the scripted player says {about}{response} tokens, {role.max_tokens} are allowed")
        if prompt > role.max_prompt:
            problems.append(f"{name}: a prompt has {about}{prompt} tokens, {role.max_prompt} are allowed")
        if unread := _unread(subject, calls_of_role):
            shown = ", ".join(map(repr, unread[:4]))
            notes.append(f"{name}'s prompts hold {len(unread)} words that the vocabulary lacks ({shown}): its model cannot tell them apart")
        if cut := sum(call.trimmed > 0 for call in calls_of_role):
            notes.append(f"{cut} of its {len(calls_of_role)} prompts were trimmed")
    yield verdict("budgets", 10, not problems, "; ".join(notes), "; ".join(dict.fromkeys(problems[:3])))


def _unread(subject: Subject, calls: list[RoleCall]) -> list[str]:
    """The words of these calls' prompts that the environment's vocabulary cannot spell, each once."""
    if subject.environment.renderer is None:  # each checkpoint has its own
        return []
    words = (unknown_words(subject.environment.renderer.tokenizer, call.prompt) for call in calls)
    return list(dict.fromkeys(word for some in words for word in some))


def teacher(subject: Subject) -> Iterator[Finding]:
    """Law 8: the scripted player scores; how much the random one does, and how many groups would teach nothing."""
    if subject.honest is None:
        yield note("teacher", 8, "there is no scripted player: a supervised warm-up is not possible")
        return
    lines = []
    for name, episodes in (("scripted", subject.honest), ("random", subject.random)):
        if episodes is None:
            lines.append("no random player")
            continue
        scores = [subject.score(path) for episode in episodes for path in episode.trajectories]
        aborted = sum(episode.aborted for episode in episodes)
        tied, count = _tied(subject, episodes)
        shown = f"{name} player: {subject.environment.headline} {mean(scores):.2f} in {len(scores)} plays"
        lines.append(f"{shown}{f', {aborted} aborted' * bool(aborted)}, {tied} of {count} groups of {subject.plays} have equal rewards")
    scores = [subject.score(path) for episode in subject.honest for path in episode.trajectories]
    paid = [value for values in pays(subject.honest).values() for value in values]
    good = mean(scores) > 0 or mean(paid) > 0
    why = "the scripted player scores 0 and earns nothing: a supervised warm-up would teach nothing. " + "; ".join(lines)
    yield verdict("teacher", 8, good, "; ".join(lines), why)


def _tied(subject: Subject, episodes: tuple[Episode, ...]) -> tuple[int, int]:
    """(groups whose returns are all equal, groups): one per task and role, over the plays of the task."""
    returns: dict[tuple[int, str], list[float]] = {}
    for episode in episodes:
        for role, values in pays([episode]).items():
            returns.setdefault((episode.task.number, role), []).append(sum(values))
    return sum(max(values) - min(values) < 1e-9 for values in returns.values()), len(returns)


CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "same_seed": same_seed, "forks": forks, "secrets": honesty.secrets, "junk": junk, "groups": groups, "bounds": bounds, "pay": unpaid,
    "turns": prolonging, "budgets": budgets, "splits": splits, "teacher": teacher, "people": people,
}  # fmt: skip
LAWS = {
    "same_seed": 6, "forks": 4, "secrets": 11, "junk": 14, "groups": 3, "bounds": 10, "pay": 10, "turns": 11, "budgets": 10, "splits": 12,
    "teacher": 8, "people": 10,
}  # fmt: skip


def check(environment: Environment, names: tuple[str, ...] = tuple(CHECKS), **sizes) -> list[Finding]:
    """Every verdict on an environment, in the order of `CHECKS`.

    Args:
      names: which checks. sizes: of `Subject`.

    A check that cannot be carried out, because a function of the game raises in it, has failed; its evidence is the error. Where one place
    raises in several checks, the evidence of all is the error of the first, and the report says it once.
    Raises `CheckError` for an environment that no script can play, and for sizes out of range.
    """
    subject, findings, errors = Subject(environment, **sizes), [], {}
    for name in names:
        try:
            findings += list(CHECKS[name](subject))
        except Exception as error:  # whatever the functions of a game raise
            evidence = errors.setdefault(_place(error), f"{type(error).__name__}: {error}")
            findings.append(failed(name.replace("_", " "), LAWS[name], evidence))
    return findings


def _place(error: BaseException) -> tuple:
    """Identity of a fault: the kind of the first error of the chain, and where it was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    return type(error), *((frames[-1].filename, frames[-1].lineno) if frames else (str(error),))
