"""Figures of a rollout: per role, per tool, per team; and tables of before and after."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

import numpy as np

from marl_llm.tools.results import FailureKind
from marl_llm.workflows.controller import Rollout
from marl_llm.workflows.errors import WorkflowError
from marl_llm.workflows.graph import Workflow
from marl_llm.workflows.samples import SampleTable
from marl_llm.workflows.trajectory import Episode, ToolUse

KINDS = (*(kind.value for kind in FailureKind), "prompt", "scorer", "team")


def rollout_metrics(rollout: Rollout, table: SampleTable) -> dict[str, float]:
    """Figures of a step, by name; zeros are there too, so that a curve has no gaps.

    `episodes`, `aborted_share`, `failed_<kind>` (attempts that failed), `attempts`, `turns`, `seconds`; `team/<name>`: means of the
    workflow's metrics over its trajectories, without those that apply to none; `role/<role>/...`: `calls`, `well_formed`, `truncated`,
    `trimmed_share`, `replaced_share`, `tokens`, `reward`, `team`, `local`, `component/<name>`, and of a chat format that thinks
    `unfinished_think` (the share of responses that ended within a think block, whatever ended them); where chat templates speak
    `template_mismatch_share` (of the prompts that continue a conversation, those that the template would have written otherwise);
    `tool/<node>/calls`, `.../seconds`,
    `.../attempts`, `.../replaced_share`, `.../refused_share` and `.../hung` (calls that were late, those of aborted episodes too);
    `scorer/<name>/calls`,
    `.../value`, `.../failed`; `samples/trained`, `samples/<why not>`. Means over trajectories of one episode are taken first, so that every
    episode has one vote. Aborted episodes have none.
    """
    episodes, played = rollout.episodes, [episode for episode in rollout.episodes if not episode.aborted]
    kinds = collections.Counter(failure.kind for episode in episodes for failure in episode.failures)
    figures = {
        "episodes": float(len(episodes)),
        "aborted_share": 1.0 - len(played) / max(1, len(episodes)),
        "attempts": _mean([episode.attempts for episode in episodes]),
        "turns": _mean([_mean([path.turns for path in episode.trajectories]) for episode in played]),
        "seconds": rollout.seconds,
        **{f"failed_{kind}": float(kinds[kind]) for kind in KINDS},
        **{f"team/{name}": _mean(values) for name, values in team_metrics(rollout).items() if values or not played},
    }
    return figures | _role_figures(rollout, table) | _tool_figures(rollout, played) | _scorer_figures(rollout) | _sample_figures(table)


def team_metrics(rollout: Rollout) -> dict[str, list[float]]:
    """The workflow's metrics of the episodes that are not aborted and that they apply to, see `episode_metrics`."""
    values: dict[str, list[float]] = {name: [] for name in rollout.workflow.metrics}
    for episode in rollout.episodes:
        for name, value in episode_metrics(rollout.workflow, episode).items():
            values[name].append(value)
    return values


def episode_metrics(workflow: Workflow, episode: Episode) -> dict[str, float]:
    """The workflow's metrics of one episode, each the mean over its paths; none of an aborted one. A metric that is None for some path,
    e.g. an error of a task of another kind, does not apply and is left out.

    Raises `WorkflowError` naming a metric that fails or gives no finite number.
    """
    metrics = {}
    for name, metric in workflow.metrics.items() if not episode.aborted else ():
        try:
            values = [metric(path) for path in episode.trajectories]
            value = None if None in values else float(np.mean(values))
        except Exception as error:
            raise WorkflowError(f"metric {name!r} raised {type(error).__name__}: {error}; task {episode.task.number}") from error
        if value is None:
            continue
        if not math.isfinite(value):
            raise WorkflowError(f"metric {name!r} gave {value} on task {episode.task.number}; give a finite number")
        metrics[name] = value
    return metrics


def _role_figures(rollout: Rollout, table: SampleTable) -> dict[str, float]:
    figures = {}
    components = dict.fromkeys(name for sample in table.samples for name in sample.components)
    for role in rollout.workflow.roles:
        rows = [s for s in table.samples if s.call.role == role and s.excluded != "aborted"]
        values = {
            "well_formed": [s.call.legal for s in rows],
            "truncated": [s.call.truncated for s in rows],
            "trimmed_share": [s.call.trimmed > 0 for s in rows],
            "replaced_share": [s.call.replaced > 0 for s in rows],
            "tokens": [s.response_ids.size for s in rows],
            "entropy": [x for s in rows if s.call.entropy is not None for x in s.call.entropy.tolist()],
            "reward": [s.reward for s in rows],
            "team": [s.team for s in rows],
            "local": [s.local for s in rows],
            **{f"component/{name}": [s.components[name] for s in rows if name in s.components] for name in components},
        }
        figures[f"role/{role}/calls"] = float(len(rows))
        figures |= {f"role/{role}/{name}": _mean(column) for name, column in values.items()}
        if thinks := [s.call.unfinished_think for s in rows if s.call.unfinished_think is not None]:
            figures[f"role/{role}/unfinished_think"] = _mean(thinks)
        if continued := [s.call.rewritten for s in rows if s.call.rewritten is not None]:
            figures[f"role/{role}/template_mismatch_share"] = _mean(continued)
    return figures


def _tool_figures(rollout: Rollout, played: Sequence[Episode]) -> dict[str, float]:
    figures = {}
    uses: dict[str, list[ToolUse]] = {}
    for episode in played:
        for event in episode.events():
            if isinstance(event, ToolUse):
                uses.setdefault(event.node, []).append(event)
    for node, events in sorted(uses.items()):
        figures[f"tool/{node}/calls"] = float(len(events))
        figures[f"tool/{node}/seconds"] = _mean([event.seconds for event in events])
        figures[f"tool/{node}/attempts"] = _mean([event.attempts for event in events])
        figures[f"tool/{node}/replaced_share"] = _mean([event.replaced > 0 for event in events])
        figures[f"tool/{node}/refused_share"] = _mean([event.refused is not None for event in events])
        figures[f"tool/{node}/hung"] = 0.0
    return figures | {f"tool/{node}/hung": float(count) for node, count in rollout.hung.items()}


def _scorer_figures(rollout: Rollout) -> dict[str, float]:
    figures = {}
    for scorer in rollout.workflow.scorers:
        values: dict[tuple[str, str], float] = {}
        for episode in rollout.episodes:
            for path in (*episode.trajectories, *episode.candidates):
                for call, by_scorer in path.scores.items():
                    if scorer.name in by_scorer and by_scorer[scorer.name].value is not None:
                        values[episode.name, call] = by_scorer[scorer.name].value
        failed = [failure for episode in rollout.episodes for failure in episode.failures if failure.node == f"scorer {scorer.name}"]
        figures[f"scorer/{scorer.name}/calls"] = float(len(values))
        figures[f"scorer/{scorer.name}/value"] = _mean(list(values.values()))
        figures[f"scorer/{scorer.name}/failed"] = float(len(failed))
    return figures


def _sample_figures(table: SampleTable) -> dict[str, float]:
    why = collections.Counter(sample.excluded or "trained" for sample in table.samples)
    names = ("trained", "aborted", "no score", "not trained", "no tokens")
    return {f"samples/{name.replace(' ', '_')}": float(why[name]) for name in names}


def _mean(values: Sequence[float | int | bool]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def before_after(before: Mapping[str, float], after: Mapping[str, float], names: Sequence[str] | None = None) -> str:
    """A Markdown table of figures before and after training: absolute and relative gain, as in UnityMAS-O's Tables 4 and 6.

    Args:
      names: which figures, in this order; by default all that both have and that are a team's or a role's share.

    Raises:
      KeyError: a named figure that one side lacks.
    """
    if names is None:
        names = [n for n in before if n in after and (n.startswith("team/") or n.endswith("well_formed") or n == "turns")]
    lines = ["| figure | before | after | abs. gain | rel. gain |", "|---|---|---|---|---|"]
    for name in names:
        a, b = before[name], after[name]
        relative = f"{(b - a) / a:+.0%}" if a > 0 else "–"
        lines.append(f"| {name} | {a:.3f} | {b:.3f} | {b - a:+.3f} | {relative} |")
    return "\n".join(lines) + "\n"
