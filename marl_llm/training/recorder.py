"""What is kept of a hosted rollout: a step's figures, and its plays as people read them, with their tokens' texts and their advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from marl_llm.algorithms import Recipe
from marl_llm.evaluation import Outcome
from marl_llm.text import Tokenizer, pieces_of
from marl_llm.workflows import Episode, Rollout, Workflow
from marl_llm.workflows.metrics import episode_metrics, rollout_metrics
from marl_llm.workflows.samples import SampleTable, sample_table
from marl_llm.workflows.storage import report_episodes


def hosted_figures(rollout: Rollout, samples: SampleTable, headline: str, recipe: Recipe) -> dict[str, float]:
    """`Batch.figures`: those of `rollout_metrics`, and what was sampled."""
    figures = rollout_metrics(rollout, samples)
    drawn = [s for s in samples.samples if s.call.log_probs is not None]
    figures |= {"success": figures[f"team/{headline}"], "aborted": figures.pop("aborted_share"), "samples": float(len(drawn))}
    prompts = {(s.instance, s.prompt): len(s.prompt_ids) for s in drawn}
    figures |= {"prompts": float(len(prompts)), "prompt_tokens": float(sum(prompts.values()))}
    for role in rollout.workflow.roles:
        figures[f"role/{role}/reward"] = recipe.reward_of(figures[f"role/{role}/team"], figures[f"role/{role}/local"])
    return figures | {"sampled_tokens": float(sum(s.response_ids.size for s in drawn))}


def episode_outcome(workflow: Workflow, episode: Episode, headline: str) -> Outcome:
    """How an evaluated play ended: its score is the metric `headline`, 0 of an aborted play."""
    metrics, task = episode_metrics(workflow, episode), episode.task
    turns = 0.0 if episode.aborted else sum(path.turns for path in episode.trajectories) / len(episode.trajectories)
    return Outcome(task.number, episode.play, metrics.get(headline, 0.0), turns, episode.aborted, metrics, task.cluster)


def recorder(
    rollout: Rollout, tokenizers: Mapping[str, Tokenizer], headline: str, trained: SampleTable | None = None
) -> Callable[..., list[tuple[dict, dict]]]:
    """`Batch.episodes` of a rollout; the rows of `trained` that count are the batch's first samples, in order. `tokenizers` by model."""

    def episodes(count: int, when: str, advantages: np.ndarray | None = None) -> list[tuple[dict, dict]]:
        few = dataclasses.replace(rollout, episodes=rollout.episodes[:count])
        keys = [] if trained is None or advantages is None else [(s.instance, s.call.id) for s in trained.samples if s.where]
        worth = dict(zip(keys, map(float, advantages[: len(keys)]), strict=True)) if keys else {}
        plays = list(report_episodes(few, sample_table(few, training=()), when, headline=headline, advantages=worth))
        for play, drawn in plays:
            drawn |= _spelled(play, drawn, tokenizers)
        return plays

    return episodes


def _spelled(play: dict, drawn: dict, tokenizers: Mapping[str, Tokenizer]) -> dict[str, Any]:
    """The texts of a play's tokens, by model, for people."""
    texts: dict[str, Any] = {"pieces": {}, "specials": []}
    for step in drawn["steps"]:
        model = play["roles"][step["role"]]
        if model in tokenizers:
            ids = [*step["prompt_ids"], *(i for response in step["responses"] for i in response["ids"])]
            texts["pieces"].setdefault(model, {}).update(pieces_of(tokenizers[model], ids))
            texts["specials"] = sorted({*texts["specials"], *tokenizers[model].special_ids})
    return texts
