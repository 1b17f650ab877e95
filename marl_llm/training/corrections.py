"""What a coach would have had said in the place of actions, as data to imitate (MAPPA, 4.4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from marl_llm.training.packing import Tokens, TokenSample
from marl_llm.workflows import Renderer, Role, Rollout
from marl_llm.workflows.renderer import spoken_ids
from marl_llm.workflows.roles import Reader
from marl_llm.workflows.samples import SampleTable


def corrected(rollout: Rollout, table: SampleTable, renderer: Mapping[str, Renderer]) -> tuple[Tokens, list[str]]:
    """Tokens of the coach's texts behind the prompts of the actions that they correct, and the role of each.

    Only actions that train are corrected, each once. `renderer`: of the models. A text that is longer than its role may write, or that the
    role's parser refuses, is left out: nobody should learn it.
    """
    trained = {(sample.instance, sample.call.id): sample for sample in table.samples if sample.where}
    samples, speakers = {}, []
    for episode in rollout.episodes:
        for path in (*episode.trajectories, *episode.candidates):
            for call, scores in path.scores.items():
                better = next((score.better for score in scores.values() if score.better), "")
                sample = trained.get((episode.task.number, call))
                if not better or sample is None or sample.name in samples:
                    continue
                role = rollout.workflow.roles[sample.call.role]
                ids = spoken_ids(renderer[rollout.assignment.roles[role.name]], better)
                if len(ids) <= role.max_tokens and legal(role, better, ids):
                    silent = np.zeros(len(ids), np.float32)
                    samples[sample.name] = TokenSample(sample.prompt_ids, np.asarray(ids, np.int32), silent, sample.name)
                    speakers.append(role.name)
    return Tokens.of(list(samples.values())), speakers


def legal(role: Role, text: str, ids: tuple[int, ...]) -> bool:
    """Whether a role's parser takes a text. One that also reads fields of the play is not asked."""
    return (isinstance(role.parse, Reader) and bool(role.parse.reads)) or role.hear(text, ids)[1] is None
