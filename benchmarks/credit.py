"""Whom exact credit blames: one fault in each play of Plan-Path's scripted walkers, whose place is known.

    python -m benchmarks.credit [--plays=256] [--noise=0] [--sighted=1]

In each play one response, drawn by identity, is a random one in place of the walker's. Prints one JSON line: by exchange, and for the
team's reward and AT-GRPO's immediate pay (Eq. 3) of the same plays, the share of faults whose response alone has the lowest value
("right"; goal 0.95 for the credit), over all faults and over those that lowered the team's last reward; and the signal-to-noise ratio of
the value as a detector of these: |mean of faults - mean of others| / standard deviation of the others. A fault that changed nothing has
no effect to measure, and walkers with errors of their own (`--sighted` below 1, `--noise`) have other responses to blame.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

EXCHANGES = ("candidate", "silence")


def verdicts(value: Any, faulty: Any, alive: Any) -> Any:
    """Whether the faulty response alone has the lowest value of its play `[X]`, of columns `[C, X]`."""
    import numpy as np

    others = np.where(alive & ~faulty, value, np.inf).min(0)
    return np.where(faulty, value, np.inf).min(0) < others


def snr(value: Any, faulty: Any, alive: Any) -> float:
    """See the module's text."""
    import numpy as np

    own, others = value[faulty & alive], value[alive & ~faulty]
    return round(float(abs(own.mean() - others.mean()) / max(float(np.std(others)), 1e-9)), 3)


def measure(plays: int, noise: float, sighted: float) -> dict[str, Any]:
    """The shares and ratios by value; see the module's text."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from marl_llm.games import PlanPath, speaking_order
    from marl_llm.rollout import counterfactual_credit, play, row_keys, scripted_player
    from marl_llm.rollout.credit import by_call, last_team_reward

    game, env, key = PlanPath(), jnp.arange(plays), jax.random.key(3)
    walker, clumsy = scripted_player(game, noise=noise, sighted=sighted, repeat=0.0), scripted_player(game, **game.random_player)
    instances = jax.vmap(lambda i: game.instance(jax.random.fold_in(jax.random.key(0), i), "train"))(env)
    agents = len(speaking_order(game))
    whole = jax.jit(lambda: play(game, walker, instances, env, key))()
    made = np.asarray(by_call(game, {role: table.where for role, table in whole.tables.items()}))[..., 0].sum(0)
    fault = jnp.asarray(np.random.default_rng(0).integers(0, np.maximum(made, 1)), jnp.int32)
    broken = row_keys(key, env, fault % agents, fault, 1)

    def faulty(role, states, prompt, keys):
        this = jnp.all(jax.random.key_data(keys) == jax.random.key_data(broken), axis=-1)
        return jax.tree.map(
            lambda a, b: jnp.where(this.reshape(this.shape + (1,) * (a.ndim - 2)), a, b),
            clumsy(role, states, prompt, keys), walker(role, states, prompt, keys),
        )  # fmt: skip

    def column(columns):
        return np.asarray(by_call(game, columns))[..., 0]

    episodes = jax.jit(lambda: play(game, faulty, instances, env, key))()
    alive = column({role: table.where for role, table in episodes.tables.items()})
    mine = np.arange(len(alive))[:, None] == np.asarray(fault)
    team = column({role: table.rewards.team[..., 0] for role, table in episodes.tables.items()})
    local = column({role: table.rewards.local[..., 0] for role, table in episodes.tables.items()})
    values = {"team": team, "at_grpo": team + local, "outcome": np.broadcast_to(last_team_reward(game, episodes)[:, 0], team.shape)}
    for exchange in EXCHANGES:
        credits = jax.jit(lambda how=exchange: counterfactual_credit(game, faulty, instances, env, key, episodes, exchange=how))()
        values[f"credit_{exchange}"] = column({role: credit.gained for role, credit in credits.items()})
    counts = alive.any(0)
    lost = np.asarray(last_team_reward(game, whole) > last_team_reward(game, episodes))[:, 0] & counts
    report: dict[str, Any] = {"plays": int(counts.sum()), "lowered_the_reward": int(lost.sum())}
    for name, value in values.items():
        right = verdicts(value, mine & alive, alive)
        shares = {"right": right[counts].mean(), "right_where_lowered": right[lost].mean()}
        noise_ratio = snr(value[:, lost], mine[:, lost], alive[:, lost])
        report[name] = {share: round(float(x), 4) for share, x in shares.items()} | {"snr": noise_ratio}
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.credit", description=__doc__.splitlines()[0])
    parser.add_argument("--plays", type=int, default=256, help="plays, one fault each (%(default)s)")
    parser.add_argument("--noise", type=float, default=0.0, help="share of the walkers' own random moves (%(default)s)")
    parser.add_argument("--sighted", type=float, default=1.0, help="share of the walkers' moves that see the walls (%(default)s)")
    asked = parser.parse_args(argv)
    print(json.dumps(measure(asked.plays, asked.noise, asked.sighted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
