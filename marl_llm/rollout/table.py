"""The table of samples: every macro-action of a rollout with its tokens, log-probs, rewards and identity.

One `Table` per role. Leading axes are `[T, E, B, K]`: turn, environment, trajectory of that environment, branch of one prompt.
Tree sampling plays one trajectory and branches K times at every prompt (`B = 1`); parallel sampling plays K trajectories with one
response each (`B = K` of the recipe, one branch). A row is a (turn, env, trajectory) with its prompt; a sample is a row's branch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.games import Prompt, Rewards
from marl_llm.sampling import Responses


class Credit(NamedTuple):
    """What each response of one role changed, see `marl_llm.rollout.credit`; 0 where it was not replayed."""

    gained: Float[Array, "T E B"]  # the team's last reward, less what it would have been
    without: Float[Array, "T E B"]  # what it would have been
    replayed: Bool[Array, "T E B"]
    tokens: Int[Array, "T E B"]  # drawn in the replay


class Table(NamedTuple):
    """All macro-actions of one role in one rollout."""

    prompt: Prompt  # ids and where, [T, E, B, P]
    responses: Responses  # [T, E, B, K, R]
    rewards: Rewards  # [T, E, B, K]
    chosen: Int[Array, "T E B"]  # index of the branch that was played
    where: Bool[Array, "T E B"]  # False where the episode was already over
    credit: Credit | None = None  # where the recipe compares with replays


class Episodes(NamedTuple):
    """How each played trajectory ended."""

    outcome: Float[Array, "E B"]  # the game's outcome in the last state
    turns: Int[Array, "E B"]  # turns begun
    done: Bool[Array, "E B"]  # over before the horizon
    aborted: Bool[Array, "E B"]  # could not be played; counts for nothing
    results: dict[str, Float[Array, "E B"]] | None = None  # role -> what its seat won, in a game that is `Competitive`


class CompiledRollout(NamedTuple):
    """A table per role, the episodes, and the states after each stage for transcripts."""

    tables: dict[str, Table]
    episodes: Episodes
    states: object  # pytree of states with leading [T, E, B], after each turn


def flatten_rows(table: Table) -> Table:
    """Merges `[T, E, B]` into one axis of rows."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[3:])), table)


def pad_to(table: Table, prompt_tokens: int, response_tokens: int, branches: int, pad_id: int) -> Table:
    """Widens prompts (on the left), responses (on the right) so that tables of several roles stack.

    Raises `ValueError` when the table is wider than asked, or has another number of branches.
    """
    ids, r = table.prompt.ids, table.responses.tokens
    left, right = prompt_tokens - ids.shape[-1], response_tokens - r.shape[-1]
    if left < 0 or right < 0 or r.shape[-2] != branches:
        raise ValueError(f"cannot pad prompts {ids.shape} and responses {r.shape} to {prompt_tokens}, {branches}x{response_tokens}")

    def pad(x, amount, side, value, axis=-1):
        width = [(0, 0)] * x.ndim
        width[axis] = (amount, 0) if side == "left" else (0, amount)
        return jnp.pad(x, width, constant_values=value)

    prompt = Prompt(pad(ids, left, "left", pad_id), pad(table.prompt.where, left, "left", False))
    responses = table.responses._replace(
        tokens=pad(r, right, "right", pad_id),
        where=pad(table.responses.where, right, "right", False),
        **{f: pad(getattr(table.responses, f), right, "right", 0.0) for f in ("log_probs", "sampled_log_probs", "entropy")},
        kept_ids=None if table.responses.kept_ids is None else pad(table.responses.kept_ids, right, "right", -1, axis=-2),
    )
    return table._replace(prompt=prompt, responses=responses)
