"""A small coach that is trained beside the team that it scores (MAPPA leaves this as future work, section 4.4).

The team is paid by what the coach says at temperature 0. Behind each step of the team the coach takes one of its own: about some actions it
is asked `DRAWS` times at temperature 1, every reply is paid the share of its pairs that it puts in their order (`coaching.pairs`; it is
compared with the replies about the other action), and the replies about one action are a group (GRPO, not divided by the deviation).
No rubric is in that reward, and of the truth only how plays ended. A frozen rubric *checks* the coach, on `CHECKED` of the actions:
`coach/drift` is how far the scores are from it.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from marl_llm.algorithms import Samples, make_recipe
from marl_llm.coaching import small
from marl_llm.coaching.answers import Unreadable, read_answer
from marl_llm.coaching.pairs import Judged, judged, rivals, share_right
from marl_llm.coaching.studies import dice
from marl_llm.models import load_pretrained
from marl_llm.sampling.requests import Request
from marl_llm.serving.local import LocalModel
from marl_llm.text import Message
from marl_llm.training.learner import Learner, ModelSpec
from marl_llm.training.mesh import make_mesh
from marl_llm.training.minibatches import seed_of_step
from marl_llm.training.packing import Tokens, TokenSample
from marl_llm.training.train_state import TrainState, make_optimizer
from marl_llm.training.update import LearnerOptions, compute_advantages
from marl_llm.untrusted import check_count
from marl_llm.workflows import CoachGuide, Rollout

ACTIONS, DRAWS = 64, 8  # actions that the coach learns from in a step, and how often it is asked about each
CHECKED = 0.05  # share of the actions on which it is compared with the rubric
ROW_TOKENS, MICROBATCH = 256, 768
RECIPE = make_recipe("grpo", rewards="local", returns="immediate", group_by="env", scale_advantages="none", group_size=DRAWS)


class TrainedCoach:
    """The learner of a small coach. The coach itself is the `ChatCoach` that asks `model`; this one gives it new parameters.

    Args:
      folder: of the small coach as it begins, see `coaching.small`.
      model: who answers, a `LocalModel` of the same folder.
      guide: of the environment; its rubric only checks.
      when: when actions are scored: "action" or "end".
      learning_rate: of Adam, constant.
      seed: which actions it learns from, and its draws.

    Raises:
      ValueError: the folder holds no checkpoint.
    """

    def __init__(self, folder: str | pathlib.Path, model: LocalModel, guide: CoachGuide, when: str, *, learning_rate: float, seed: int = 0):
        shape, params = load_pretrained(str(folder))
        self._model, self._guide, self._when, self._rate, self._seed = model, guide, when, learning_rate, seed
        rows = max(ROW_TOKENS, model.answers.max_prompt + DRAWS * small.MAX_REPLY)
        options = LearnerOptions(RECIPE, make_optimizer(), rows, ACTIONS, microbatch_tokens=max(MICROBATCH, rows))
        mesh = make_mesh(1, devices=jax.local_devices()[:1])
        self._learner = Learner(ModelSpec(shape, params, model.answers.renderer), options, mesh, jax.random.key(seed))

    @property
    def policy(self) -> TrainState:
        """Parameters with their optimizer."""
        return self._learner.policy

    def state(self) -> dict[str, Any]:
        """What `restore` needs beside the policy, as JSON."""
        return {"version": self._learner.version}

    def restore(self, now: TrainState, state: Mapping[str, Any]) -> None:
        """Goes on from what `policy` and `state` gave. Raises `LookupError` or `ValueError` without the number of a version."""
        self._learner.restore(now, None, check_count(state["version"], "trained.coach.version"))
        self._renew()

    def learn(self, rollout: Rollout, headline: str) -> dict[str, float]:
        """One step on a rollout that this coach has scored; returns its figures, by name.

        `coach/pairwise`: the share of pairs that the paid scores put in their order, mean over the actions that have pairs, of which there
        are `coach/paired`. `coach/drift` and `coach/drift_bias`: mean absolute and mean difference to the rubric on the `coach/checked`
        actions. `coach/reward`: of the replies that it learned from. A rollout without pairs changes nothing.
        """
        actions = judged(rollout, headline, self._guide, self._when)
        figures = self._drift(actions)
        scores = [action.score for action in actions]
        shares = [
            share_right(action.score, [scores[i] for i in better], [scores[i] for i in worse])
            for action, (better, worse) in zip(actions, rivals(actions))
            if better or worse
        ]
        figures |= {"coach/paired": float(len(shares)), "coach/version": float(self._learner.version)}
        if not shares:
            return figures
        figures["coach/pairwise"] = float(np.mean(shares))
        tokens, rewards = self._draws(self._chosen(actions, rollout.step), rollout.step)
        number = np.arange(len(rewards), dtype=np.int32)
        group, zeros = number // DRAWS, np.zeros(len(rewards), np.int32)
        table = Samples(
            instance=group, env=group, agent=zeros, turn=zeros, trajectory=number, team=np.zeros(len(rewards), np.float32),
            local=rewards, where=np.ones(len(rewards), bool), tokens=tokens.size, prompt_ids=tokens.prompt,
        )  # fmt: skip
        advantages = compute_advantages(RECIPE, tokens, table)
        seed = seed_of_step(self._seed, rollout.step)
        metrics = self._learner.learn(tokens, table, np.ones(1, bool), self._rate, None, seed, advantages, RECIPE.kl_coef)
        self._renew()
        names = ("grad_norm", "entropy", "log_prob_gap")
        return figures | {"coach/reward": float(np.mean(rewards))} | {f"coach/{name}": metrics[name] for name in names if name in metrics}

    def _renew(self) -> None:
        self._model.renew(self._learner.params, self._learner.version)

    def _drift(self, actions: Sequence[Judged]) -> dict[str, float]:
        checked = [action for action in actions if dice(action.view, self._seed, "checked").random() < CHECKED]
        gaps = [action.score - small.rubric_value(action.view, self._guide) for action in checked]
        figures = {"coach/checked": float(len(gaps))}
        if gaps:
            figures |= {"coach/drift": float(np.mean(np.abs(gaps))), "coach/drift_bias": float(np.mean(gaps))}
        return figures

    def _chosen(self, actions: Sequence[Judged], step: int) -> list[Judged]:
        """Actions with pairs, those of one task, role, brief and outcome once: of whole tasks and roles, in random order, while there is
        room for `ACTIONS`, of one at least."""
        cells_of = collections.defaultdict(dict)
        for action in actions:
            cells_of[action.task, action.view.call.role][action.brief, action.outcome] = action
        groups = [list(cells.values()) for cells in cells_of.values()]
        groups = [[action for action, (better, worse) in zip(group, rivals(group)) if better or worse] for group in groups]
        groups, chosen = [group for group in groups if group], []
        for i in np.random.default_rng((self._seed, step)).permutation(len(groups)):
            if not chosen or len(chosen) + len(groups[i]) <= ACTIONS:
                chosen += groups[i]
        return chosen

    def _draws(self, chosen: Sequence[Judged], step: int) -> tuple[Tokens, np.ndarray]:
        """(tokens, reward of each) of `DRAWS` replies about each action, which are compared with the replies about its rivals."""
        answers = self._model.answers
        renderer, requests, samples, scores = answers.renderer, [], [], []
        for number, action in enumerate(chosen):
            prompt = tuple(renderer.start([Message("user", action.brief)]).ids)
            seeds = [(self._seed, step, number, draw) for draw in range(DRAWS)]
            requests += [Request(prompt, seed, small.MAX_REPLY, answers.model, stop_ids=tuple(renderer.stop_ids)) for seed in seeds]
        for place, (request, done) in enumerate(zip(requests, answers.engine.generate_all(requests))):
            name = chosen[place // DRAWS].view.call.id
            samples.append(TokenSample(np.asarray(request.prompt, np.int32), done.tokens, done.sampled_log_probs, name))
            scores.append(_score_of(renderer, done.tokens.tolist()))
        drawn = [scores[start : start + DRAWS] for start in range(0, len(scores), DRAWS)]
        rewards = []
        for of_action, sides in zip(drawn, rivals(chosen)):
            better, worse = ([score for i in side for score in drawn[i] if score is not None] for side in sides)
            rewards += [share_right(score, better, worse) for score in of_action]
        return Tokens.of(samples), np.asarray(rewards, np.float32)


def _score_of(renderer: Any, ids: list[int]) -> float | None:
    """The score of a reply, None if it cannot be read."""
    text = renderer.tokenizer.decode(ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids)
    try:
        return float(read_answer(text).value)
    except Unreadable:
        return None
