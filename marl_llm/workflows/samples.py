"""The table of samples: one row per response of any role, with its tokens, log-probs, rewards and identity.

The host's form of the table that device games make in fixed shapes: rows of any length, and the same columns for `advantages_for`.

**Identity.** `instance` is the task, `trajectory` one way through one play of it, `agent` the role, `turn` the loop's round. `env` is the
state that was asked: rows share it exactly if they are candidates for the same prompt at the same place of the same play (seats of an
`each` too, if `Workflow.group_seats` says so), so that AT-GRPO's group (env, agent, turn) is fair by construction (law 3). A call that lies
on several paths (before a fork) is one row, paid the mean of what it earned on them, in the trajectory of the first. Where one path was
picked to fork again, it is paid what it earned on the first alone: the later ones begin at candidates that were chosen for their pay.

**What counts.** `where` is False for calls of aborted plays, of players that do not train at this step, and without tokens. Such rows
stay in the table and are counted; they take no part in any statistic of the update. But what rows of whole plays were paid counts in the
returns of the others (`Sample.played`): whether a role trains, or is of this program at all, changes no return of its team mates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.trajectory import Earned, Episode, RoleCall

if TYPE_CHECKING:
    from marl_llm.algorithms import Samples


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sample:
    """One row; see the module's text. Integers of identity are dense where they number things of this rollout."""

    call: RoleCall
    name: str  # unique in the run: step, task and call
    instance: int  # number of the task
    env: int  # dense
    trajectory: int  # dense
    order: int  # place among the role calls of its trajectory
    prompt: int  # dense number of the prompt ids: equal prompts, equal numbers
    team: float
    local: float
    components: Mapping[str, float]
    team_paid: bool  # whether a team reward was paid to it, be it 0
    where: bool
    excluded: str  # why `where` is False: "aborted", "no score", "not trained", "no tokens"; otherwise empty

    def __repr__(self) -> str:
        paid = ", ".join(f"{name} {value:+.3g}" for name, value in self.components.items()) or "nothing"
        return f"Sample({self.name}, {self.call.text[:40]!r}: {paid}{f'; {self.excluded}' * bool(self.excluded)})"

    @property
    def played(self) -> bool:
        """Whether it belongs to a play that came to its end and was paid in full."""
        return self.excluded not in ("aborted", "no score")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Ids that the response was drawn behind."""
        return self.call.prompt_ids

    @property
    def response_ids(self) -> Int[np.ndarray, "R"]:
        """Ids that were drawn."""
        return self.call.tokens

    @property
    def reward(self) -> float:
        """team + local."""
        return self.team + self.local


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SampleTable:
    """All rows of a rollout, in the order of the episodes and of play."""

    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __repr__(self) -> str:
        return f"SampleTable({len(self)} samples, {sum(s.where for s in self.samples)} of them trained)"

    def trained(self, model: str | None = None) -> tuple[Sample, ...]:
        """Rows that an update trains on; of one model, or of all."""
        return tuple(s for s in self.samples if s.where and model in (None, s.call.model))

    def in_batch_order(self) -> list[int]:
        """Numbers of the rows that a batch has: of those that train, then of the other ones of whole plays."""
        trained = [number for number, sample in enumerate(self.samples) if sample.where]
        return trained + [number for number, sample in enumerate(self.samples) if sample.played and not sample.where]

    def demonstrations(self, roles: Iterable[str] | None = None, legal: bool = True) -> list[tuple[tuple[int, ...], Int[np.ndarray, "R"]]]:
        """(prompt ids, response ids) of scripted players' calls, for a supervised warm-up; only those that kept the format if `legal`."""
        keep = None if roles is None else set(roles)
        scripted = [s for s in self.samples if s.call.log_probs is None and s.call.tokens.size and s.excluded != "aborted"]
        scripted = [s for s in scripted if (keep is None or s.call.role in keep) and (s.call.legal or not legal)]
        return [(s.prompt_ids, s.response_ids) for s in scripted]

    def to_samples(self) -> Samples:
        """The columns that `marl_llm.algorithms.advantages_for` reads, one row per sample, `where` included.

        `prompt_ids` is a fingerprint [S]. Advantages of the whole team are computed at once; each model then trains on its own rows.
        """
        import jax.numpy as jnp

        from marl_llm.algorithms import Samples

        def column(values: Sequence[Any], dtype: Any) -> Any:
            return jnp.asarray(np.asarray(values, dtype))

        rows = self.samples
        return Samples(
            instance=column(_dense(s.instance for s in rows), np.int32),
            env=column([s.env for s in rows], np.int32),
            agent=column([s.call.agent for s in rows], np.int32),
            turn=column([s.call.turn for s in rows], np.int32),
            trajectory=column([s.trajectory for s in rows], np.int32),
            team=column([s.team for s in rows], np.float32),
            local=column([s.local for s in rows], np.float32),
            where=column([s.where for s in rows], bool),
            played=column([s.played for s in rows], bool),
            team_where=column([s.team_paid for s in rows], bool) if any(s.team_paid and s.played for s in rows) else None,
            order=column([s.order for s in rows], np.int32),
            tokens=column([s.response_ids.size for s in rows], np.int32),
            prompt_ids=column([s.prompt for s in rows], np.int32),
        )

    def log_probs(self, sample: int, raw: bool = False) -> Float[np.ndarray, "R"]:
        """The sampler's log-probs of one row: of the distribution that was drawn from, or of the `raw` policy (law 2).

        Raises `ValueError` for a row that no policy of this program sampled.
        """
        call = self.samples[sample].call
        if call.log_probs is None:
            raise ValueError(f"sample {self.samples[sample].name} was spoken by {call.model!r}, which has no log-probs")
        return call.log_probs if raw else call.sampled_log_probs


def sample_table(rollout: Rollout, training: Iterable[str] | None = None) -> SampleTable:
    """The table of a rollout, paid by its workflow's rewards.

    Args:
      training: the models that train on it; by default those that the assignment's schedule names for the rollout's step.

    Raises:
      KeyError: a trajectory that no play ended, whose calls were paid nothing.
    """
    trains = set(rollout.assignment.training(rollout.step) if training is None else training)
    rows: list[dict[str, Any]] = []
    for episode in rollout.episodes:
        rows += _rows(rollout, episode, trains)
    envs, prompts = _dense(row.pop("env") for row in rows), _dense(row["call"].prompt_ids for row in rows)
    trajectories = _dense(row.pop("trajectory") for row in rows)
    return SampleTable(tuple(Sample(**r, env=e, prompt=p, trajectory=t) for r, e, p, t in zip(rows, envs, prompts, trajectories)))


def _rows(rollout: Rollout, episode: Episode, trains: set[str]) -> list[dict[str, Any]]:
    """Rows of one episode, with keys where the table will have dense numbers."""
    number = episode.task.number
    paid: dict[str, list[Earned]] = {}
    first: dict[str, tuple[RoleCall, Hashable, int]] = {}
    for trajectory in episode.trajectories:
        for order, call in enumerate(trajectory.calls):
            first.setdefault(call.id, (call, trajectory.branch, order))
            paid.setdefault(call.id, []).append(trajectory.earned[call.id])
    for candidate in episode.candidates:  # each a trajectory of its own, of which only the candidate is a row
        call = candidate.calls[-1]
        first[call.id] = (call, call.id, len(candidate.calls) - 1)
        paid[call.id] = [candidate.earned[call.id]]
    if episode.aborted:
        calls = [event for event in episode.remains if isinstance(event, RoleCall)]
        first = {call.id: (call, episode.play, order) for order, call in enumerate(calls)}
    paths = (*episode.trajectories, *episode.candidates)
    unscored = {name for path in paths for name, scores in path.scores.items() if any(score.value is None for score in scores.values())}
    rows = []
    for call, branch, order in first.values():
        excluded = ""
        if episode.aborted:
            excluded = "aborted"
        elif call.id in unscored:
            excluded = "no score"
        elif call.model not in trains:
            excluded = "not trained"
        elif not call.tokens.size or call.log_probs is None or not call.prompt_ids:
            excluded = "no tokens"
        pays = paid.get(call.id, [Earned()])
        mean = _mean(pays[:1] if rollout.pick else pays)
        rows.append(
            dict(
                call=call,
                name=f"{rollout.step}/{number}/{call.id}",
                instance=number,
                env=(number, _group(call, episode, rollout.workflow.group_seats)),
                trajectory=(number, branch),
                order=order,
                team=mean.team,
                local=mean.local,
                components=mean.components,
                team_paid=mean.team_paid,
                where=not excluded,
                excluded=excluded,
            )
        )
    return rows


def _group(call: RoleCall, episode: Episode, seats: bool) -> Hashable:
    """The state that was asked. With `seats`, items of an `each` share it where node, round, prompt and what came before are the same."""
    if not (seats and call.items):
        return call.group
    return episode.play, call.node, call.turn, call.items[:-1], call.parents, call.prompt_ids


def _mean(all_earned: list[Earned]) -> Earned:
    """The mean over the ways that a call lies on."""
    if len(all_earned) == 1:
        return all_earned[0]
    names = dict.fromkeys(name for pay in all_earned for name in pay.components)
    components = {name: float(np.mean([pay.components.get(name, 0.0) for pay in all_earned])) for name in names}
    team, local = (float(np.mean([getattr(pay, kind) for pay in all_earned])) for kind in ("team", "local"))
    return Earned(team, local, components, any(pay.team_paid for pay in all_earned))


def _dense(keys: Iterable[Hashable]) -> list[int]:
    """Equal keys, equal numbers, from 0 in the order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
