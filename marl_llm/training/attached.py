"""Plays of a foreign program, as the samples of one step: the third kind of rollout, beside compiled and hosted.

    async def play(task, client):
        answer = await ask(client.base_url, "first", f"say {task['letter']}")  # with any client of OpenAI's API; the model is the role
        return float(answer == task["letter"])

    batch = play_attached(team.answers(), play, rows, recipe)
    team.learn(batch, 1e-5)

`AttachedTeam` (`training.attached_team`) trains a whole run so.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from marl_llm.algorithms import Recipe
from marl_llm.serving import PolicyAnswers
from marl_llm.serving.completions import read_reward
from marl_llm.serving.episodes import EpisodeServer, ForeignEpisode
from marl_llm.serving.server import EpisodeRefused
from marl_llm.training.batch import Batch
from marl_llm.training.recorded import batch_of
from marl_llm.workflows import RolloutError, WorkflowError
from marl_llm.workflows.play import finish

ABORTS = ("late", "failed", "unpaid", "refused", "silent")
MOST_MESSAGE = 500  # characters of what a play raised


@dataclasses.dataclass(frozen=True)
class Client:
    """Where a play asks: what every SDK of OpenAI's API takes. The model's name is the role."""

    base_url: str  # of this episode alone; it cannot be guessed
    api_key: str = "none"  # any text will do on this machine
    notes: list[str] = dataclasses.field(default_factory=list)  # what is to be said of the play if it is aborted, a line for people
    about: Callable[[], Mapping[str, Any]] = dict  # how many `replies` the episode has, and whether it was `paid`, and so has ended

    @property
    def episode_url(self) -> str:
        """Where the episode's `/task` and `/reward` are."""
        return self.base_url.removesuffix("/v1")


Plays = Sequence[tuple[tuple[int, ...], Any]]  # (what draws follow from, task)
Play = Callable[[Any, Client], Awaitable[Any]]


@dataclasses.dataclass(frozen=True)
class AttachOptions:
    """How foreign plays are run."""

    timeout_s: float | int = 120.0  # seconds for one play; then it is aborted
    concurrency: int = 64  # most plays under way
    seed: int = 0  # of all draws, with the step, the task and the play


def play_attached(
    answers: Mapping[str, PolicyAnswers], play: Play, rows: Sequence[Mapping[str, Any]], recipe: Recipe, step: int = 0,
    options: AttachOptions = AttachOptions(),
) -> Batch:  # fmt: skip
    """Plays each row as often as the recipe samples it, and gives what was paid as the samples of a step; `Team.learn` takes them.

    A group is what `recipe.group_by` says: `instance` is the row's place in `rows`, `agent` the role, `turn` the n-th reply of this role in
    its play, in the order in which they were finished. `play` is awaited with a row and a `Client`; it gives the team's reward, or
    `{"reward": 1.0, "rewards": {"solver": 0.5}}`, or None where it posted the reward itself (docs/attach.md): the first pay counts and
    ends the play. A play that raises, gives something else, asks for nothing or is not paid in time is aborted: it is counted and never
    trained on. A play that blocks its thread between two awaits holds up the others, and its deadline.

    Args:
      answers: role -> who answers, as `HostedTeam.answers` gives them.

    Returns:
      The batch. Its figures hold `aborted`, the share of aborted plays, `aborted/<reason>` counts for each of `ABORTS`, `refused`, the
      requests and pays of no open episode, and `reencoded`, the prompt tokens that were encoded behind a rewritten history.

    Raises:
      WorkflowError: a recipe that samples a tree or a nucleus, or needs replays or truncation, which a program's plays cannot have.
      RolloutError: every play was aborted.
    """
    check_recipe(recipe)
    if recipe.returns == "counterfactual" or recipe.mask_truncated or recipe.overlong_buffer:
        how = "leave out returns='counterfactual', mask_truncated and overlong_buffer"
        raise WorkflowError(f"recipe {recipe.name!r}: of a foreign program's plays neither replays nor truncation are known: {how}")
    which = [(task, number) for task in range(len(rows)) for number in range(recipe.plays)]
    plays = [((options.seed, step, task, number), dict(rows[task])) for task, number in which]
    with EpisodeServer(answers, recipe.temperature, concurrency=options.concurrency) as server:
        episodes = finish(play_all(server, play, plays, options))
        refused = server.episodes.refused
    return _batch_of_plays(episodes, which, tuple(answers), step, refused)


def check_recipe(recipe: Recipe) -> None:
    """Raises `WorkflowError` for a recipe that samples a tree or a nucleus."""
    if recipe.sampling == "tree" or recipe.joint != "aligned" or recipe.top_k is not None or recipe.top_p != 1:
        how = "use sampling='parallel' (grpo, dr_mas, magrpo, ...), joint='aligned', top_p=1 and no top_k"
        raise WorkflowError(f"recipe {recipe.name!r}: a foreign program plays whole episodes and cannot be forked: {how}")


async def play_all(server: EpisodeServer, play: Play, plays: Plays, options: AttachOptions) -> list[ForeignEpisode]:
    """Every play's episode, in the order of `plays`. What a play raises, gives or leaves undone is data: it is aborted, and says why."""
    room = asyncio.Semaphore(options.concurrency)

    async def play_within(identity: tuple[int, ...], task: Any) -> ForeignEpisode:
        async with room:
            name = server.episodes.open(identity, task)
            client = Client(server.address(name), about=functools.partial(server.episodes.about, name))
            reason, message = await _play_and_pay(server, play, task, client, options.timeout_s)
            return server.episodes.take(name, reason, "; ".join(filter(None, [message, *client.notes])))

    return list(await asyncio.gather(*(play_within(*which) for which in plays)))


async def _play_and_pay(server: EpisodeServer, play: Play, task: Any, client: Client, timeout_s: float | int) -> tuple[str, str]:
    """Awaits a play and pays what it gave: why it is aborted if nothing was paid, and a message for people."""
    name = client.episode_url.rpartition("/")[2]
    try:
        pay = await asyncio.wait_for(play(task, client), timeout_s)
        if pay is not None:
            server.episodes.pay(name, _pay_of(pay, server))
    except TimeoutError:
        return "late", f"not paid within {timeout_s:g} s"
    except EpisodeRefused:
        return "silent", "it was paid without having asked for a reply"
    except _NoPay as error:
        return "refused", f"what it gave is no reward: {error}"
    except (Exception, asyncio.CancelledError) as error:  # of the program: data, counted
        return "failed", " ".join(f"{type(error).__name__}: {error}".split())[:MOST_MESSAGE]
    return "unpaid", "it ended without a reward"


class _NoPay(ValueError):
    """What a play gave is no reward."""


def _pay_of(given: Any, server: EpisodeServer) -> dict[str, Any]:
    """What a play gave, as the endpoint reads pays. Raises `_NoPay`."""
    try:
        return read_reward(json.dumps(given if isinstance(given, dict) else {"reward": given}).encode(), server.models)
    except (TypeError, ValueError, RecursionError) as error:
        raise _NoPay(str(error)) from None


def _batch_of_plays(
    episodes: list[ForeignEpisode], plays: Sequence[tuple[int, int]], roles: tuple[str, ...], step: int, refused: int
) -> Batch:
    """The paid ones of `episodes` as samples, and the figures of all."""
    paid = {place: episode for place, episode in enumerate(episodes) if episode.pay is not None}
    aborts = collections.Counter(episode.aborted for episode in episodes if episode.pay is None)
    if not paid:
        reasons = ", ".join(f"{count} {why}" for why, count in sorted(aborts.items()))
        raise RolloutError(f"step {step}: every play of the program was aborted ({reasons})")
    lines = {str(place): dict(enumerate(episode.replies)) for place, episode in paid.items()}
    pays = {str(place): episode.pay | {"task": str(plays[place][0])} for place, episode in paid.items()}
    batch = batch_of(lines, pays, roles, step)
    figures = batch.figures | {f"aborted/{why}": float(aborts[why]) for why in ABORTS}
    figures |= {"aborted": 1 - len(paid) / len(episodes), "refused": float(refused)}
    figures["reencoded"] = float(sum(line.get("reencoded", 0) for episode in episodes for line in episode.replies))
    return dataclasses.replace(batch, figures=figures)
