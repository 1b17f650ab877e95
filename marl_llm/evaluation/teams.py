"""How good a team is on instances it never saw: alone, with roles swapped, and with one trained member at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from marl_llm.evaluation.intervals import wilson
from marl_llm.games import Game, split_index
from marl_llm.models import ModelConfig
from marl_llm.rollout import model_player, scripted_player
from marl_llm.training import Batch, make_evaluation


def figures(batches: list[Batch], episodes: int) -> dict:
    """Success with its 95 % interval, turns, and per role the share of well-formed outputs, over the first `episodes` episodes."""
    join = lambda *x: np.concatenate(x, axis=x[0].ndim and 0)  # noqa: E731
    ended = jax.tree.map(lambda *x: join(*x)[:episodes, 0], *[jax.device_get(b.rollout.episodes) for b in batches])
    played = ~ended.void
    n, wins = int(played.sum()), int(((ended.outcome >= 1.0) & played).sum())
    roles = {}
    for role in batches[0].rollout.tables:
        parts = [jax.device_get((b.rollout.tables[role].where, b.rollout.tables[role].rewards.well_formed)) for b in batches]
        where = np.concatenate([w for w, _ in parts], axis=1)[:, :episodes]
        formed = np.concatenate([f[..., 0] for _, f in parts], axis=1)[:, :episodes]
        roles[role] = {"well_formed": float((formed & where).sum() / max(where.sum(), 1))}
    return {
        "success": wins / max(n, 1),
        "interval": list(wilson(wins, n)) if n else [0.0, 1.0],
        "episodes": n,
        "turns": float(ended.turns[played].mean()) if n else 0.0,
        "roles": roles,
    }


class TeamEvaluation:
    """Plays fixed sets of held-out instances with any parameters; compiled once, in chunks of `chunk` episodes.

    The instances of a split depend on `seed` alone, so every team is measured on the same ones. Split 'validation' is for choosing
    settings, 'test' for what is reported.
    """

    def __init__(
        self,
        game: Game,
        assignment: dict[str, str],
        configs: dict[str, ModelConfig],
        mesh: Mesh,
        *,
        chunk: int,
        seed: int = 0,
        temperature: float = 0.0,
    ):
        self.game, self.mesh, self.chunk = game, mesh, chunk
        self.key = jax.random.key(seed)
        self.compiled = make_evaluation(
            game, mesh, lambda params: model_player(game, assignment, configs, params, temperature), environments=chunk
        )

    def batches(self, params: dict[str, dict], split: str, episodes: int, run=None) -> list[Batch]:
        """Chunks that hold at least `episodes` episodes."""
        run = run or self.compiled
        starts = range(0, episodes, self.chunk)
        return [run(params, jnp.int32(s), self.key, jnp.int32(split_index(split))) for s in starts]

    def team(self, params: dict[str, dict], split: str, episodes: int) -> dict:
        """Figures of the team on the first `episodes` instances of a split."""
        return figures(self.batches(params, split, episodes), episodes) | {"split": split}

    def floor(self, split: str, episodes: int) -> dict:
        """Figures of a uniformly random player of well-formed responses."""
        player = scripted_player(self.game, **self.game.floor)
        run = make_evaluation(self.game, self.mesh, lambda params: player, environments=self.chunk)
        return figures(self.batches({}, split, episodes, run), episodes) | {"split": split}

    def everything(self, before: dict[str, dict], after: dict[str, dict], episodes: int, split: str = "test") -> dict:
        """The page of figures of a run: before, after, the floor, roles swapped, and one trained model beside untrained ones.

        Swapped hands every model on to the next model's roles; with one model there is nothing to swap and the entry is missing.
        """
        play = lambda params: self.team(params, split, episodes)  # noqa: E731
        out = {"before": play(before), "after": play(after), "random": self.floor(split, episodes), "split": split}
        models = sorted(after)
        if len(models) > 1:
            rotated = {m: after[models[(i + 1) % len(models)]] for i, m in enumerate(models)}
            out["swapped"] = play(rotated)
            out["pairs"] = {}
            for trained in models:
                name = ", ".join(f"{m}={'trained' if m == trained else 'untrained'}" for m in models)
                out["pairs"][name] = play({m: after[m] if m == trained else before[m] for m in models})
        return out
