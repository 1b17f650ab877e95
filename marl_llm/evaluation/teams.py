"""How good a team is on instances it never saw: alone, with roles swapped, and with one trained member at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from marl_llm.evaluation.intervals import wilson
from marl_llm.games import Game
from marl_llm.models import ModelConfig
from marl_llm.rollout import model_player, scripted_player
from marl_llm.training import Batch, make_evaluation


def figures(batch: Batch) -> dict:
    """Success with its 95 % interval, turns, and per role the share of well-formed outputs, as plain numbers."""
    episodes = jax.device_get(batch.rollout.episodes)
    played = ~episodes.void
    n = int(played.sum())
    wins = int(((episodes.outcome >= 1.0) & played).sum())
    summary = jax.device_get(batch.summary)
    roles = {
        role: {"well_formed": float(summary[f"role/{role}/well_formed"]), "entropy": float(summary[f"role/{role}/entropy"])}
        for role in batch.rollout.tables
    }
    return {
        "success": wins / max(n, 1),
        "interval": list(wilson(wins, n)) if n else [0.0, 1.0],
        "episodes": n,
        "turns": float(summary["turns"]),
        "roles": roles,
    }


class TeamEvaluation:
    """Plays a fixed set of held-out instances with any parameters; compiled once.

    `split` is 'validation' (for choosing settings) or 'test' (for what is reported). The instances depend on `seed` alone, so every team is
    measured on the same ones.
    """

    def __init__(
        self,
        game: Game,
        assignment: dict[str, str],
        configs: dict[str, ModelConfig],
        mesh: Mesh,
        *,
        episodes: int,
        split: str,
        seed: int = 0,
        temperature: float = 0.0,
    ):
        self.game, self.assignment, self.mesh = game, assignment, mesh
        self.episodes, self.split = episodes, split
        self.key = jax.random.key(seed)
        self._run = make_evaluation(
            game,
            mesh,
            lambda params: model_player(game, assignment, configs, params, temperature),
            environments=episodes,
            split=split,
        )

    def batch(self, params: dict[str, dict]) -> Batch:
        """One episode per instance with these models."""
        return self._run(params, jnp.int32(0), self.key)

    def team(self, params: dict[str, dict]) -> dict:
        """Figures of the team."""
        return figures(self.batch(params))

    def floor(self) -> dict:
        """Figures of a uniformly random player of well-formed responses."""
        run = make_evaluation(
            self.game,
            self.mesh,
            lambda params: scripted_player(self.game, **self.game.floor),
            environments=self.episodes,
            split=self.split,
        )
        return figures(run({}, jnp.int32(0), self.key))

    def everything(self, before: dict[str, dict], after: dict[str, dict]) -> dict:
        """The page of figures of a run: before, after, the floor, roles swapped, and one trained model beside untrained ones.

        Swapped hands every model on to the next model's roles; with one model there is nothing to swap and the entry is missing.
        """
        out = {"before": self.team(before), "after": self.team(after), "random": self.floor(), "split": self.split}
        models = sorted(after)
        if len(models) > 1:
            rotated = {m: after[models[(i + 1) % len(models)]] for i, m in enumerate(models)}
            out["swapped"] = self.team(rotated)
            out["pairs"] = {}
            for trained in models:
                name = ", ".join(f"{m}={'trained' if m == trained else 'untrained'}" for m in models)
                out["pairs"][name] = self.team({m: after[m] if m == trained else before[m] for m in models})
        return out
