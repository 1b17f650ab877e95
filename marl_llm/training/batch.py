"""The samples of one step, whoever played them: one table with one meaning per column, and where to take their tokens from.

    instance     the task's number
    env          the prompt state that candidates share: the K candidates of one prompt have one `env`, two plays of a task never do
    agent, turn  who acted, in which turn (agents are numbered in the order in which they speak)
    order        who spoke before whom within a trajectory
    trajectory   which play of which task
    team, local  what was paid for it, for the team's result and for the role's own work
    where        False: padding, aborted, or spoken by a player that does not train; it takes no part in any statistic
    version      of the parameters that it was sampled with: updates of its model since training began

Compiled play (`from_rows`) and hosted play (`from_table`) fill the same columns, and give the same numbers for the same game (law 13).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from marl_llm.algorithms import Samples
from marl_llm.games import Game, speaking_order
from marl_llm.rollout import Table, flatten_rows, pad_to
from marl_llm.training.packing import RowShape, Tokens, TokenSample
from marl_llm.workflows import Rollout
from marl_llm.workflows.samples import SampleTable

Plays = Sequence[tuple[dict, dict]]  # (episode, tokens) in the schema of marl_llm.reporting.episodes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """What one rollout yields.

    Attributes:
      step: of training.
      roles: names of the agents.
      tokens: of S samples. table: their columns `[S]`, NumPy; see the module's text. version: `[S]` int.
      figures: means over the rollout, by name: success, turns, aborted, samples, prompts, sampled_tokens, prompt_tokens, team/<metric>,
        role/<role>/{team,local,reward,well_formed,truncated,unfinished_think,entropy,...}.
      episodes: `(count, when, advantages=None) -> plays`, the first plays as people read them, for `marl_llm.reporting.EpisodeWriter`;
        `advantages` `[S]` are written beside their samples.
      rollout: of hosted play, the whole plays as graphs, for `marl_llm.workflows.storage`; None: compiled play has none.
      left_out: numbers of tasks that were played and are not trained on, see `training.refills`; None: nothing is refilled.
      privileged: what a teacher reads in place of the prompt of each sample that trains, which come first, see `training.span_teachers`;
        None: nobody reads another.
      corrected: what a coach would have had said, behind the prompts at which it was not, and the role of each; None: nobody corrects.
    """

    step: int
    roles: tuple[str, ...]
    tokens: Tokens
    table: Samples
    version: Int[np.ndarray, "S"]
    figures: dict[str, float]
    episodes: Callable[..., Plays]
    corrected: tuple[Tokens, list[str]] | None = None
    rollout: Rollout | None = None
    left_out: tuple[int, ...] | None = None
    privileged: Sequence[tuple[int, ...] | None] | None = None

    def __repr__(self) -> str:
        return f"Batch(step {self.step}: {len(self.tokens)} samples, {int(np.sum(self.table.where))} of them trained)"


class Rows(NamedTuple):
    """Rows of a compiled rollout: G prompts with K responses each, on the devices. Rows with `where` False carry no weight."""

    prompt: Int[Array, "G P"]  # padded on the left
    prompt_where: Bool[Array, "G P"]
    tokens: Int[Array, "G K R"]  # padded on the right
    token_where: Bool[Array, "G K R"]
    log_probs: Float[Array, "G K R"]  # of the distribution that was sampled from
    team: Float[Array, "G K"]
    local: Float[Array, "G K"]
    instance: Int[Array, "G"]
    agent: Int[Array, "G"]
    turn: Int[Array, "G"]
    play: Int[Array, "G"]  # which play of the instance
    where: Bool[Array, "G"]
    kept_ids: Int[Array, "G K R M"] | None = None  # where the recipe truncates: see `marl_llm.sampling.SamplingParams.to_train`
    truncated: Bool[Array, "G K"] | None = None  # responses that their budget ended
    credit: Float[Array, "G"] | None = None  # where the recipe replays: see `marl_llm.rollout.credit`


class Pool(NamedTuple):
    """`Rows` as `Tokens` need them: ids and log-probs stay on the devices, the rest is small and goes to the host."""

    ids: Int[Array, "X"]
    log_probs: Float[Array, "Y"]
    kept_ids: Int[Array, "Y M"] | None
    prompt_size: Int[Array, "G"]
    size: Int[Array, "G K"]
    fingerprint: UInt[Array, "2 G"]
    rows: Rows  # without what stands above


def buffer_sizes(game: Game) -> tuple[int, int]:
    """The longest prompt and the longest response of any role, in tokens."""
    return max(r.prompt_tokens for r in game.roles), max(r.response_tokens for r in game.roles)


def rows_from(game: Game, tables: dict[str, Table], instance: Int[Array, "E"]) -> Rows:
    """Stacks the tables of all roles, padded to common lengths. Agents are numbered in the order of speaking."""
    prompt_tokens, response_tokens = buffer_sizes(game)
    parts = []
    for agent, name in enumerate(speaking_order(game)):  # not the dict's order: JAX sorts a dict's keys
        t, _, b, k, _ = tables[name].responses.tokens.shape
        table = flatten_rows(pad_to(tables[name], prompt_tokens, response_tokens, k, game.tokenizer.pad_id))
        grid = jnp.meshgrid(jnp.arange(t), instance, jnp.arange(b), indexing="ij")
        turn, number, play = (x.reshape(-1).astype(jnp.int32) for x in grid)
        responses, rewards, credit = table.responses, table.rewards, table.credit
        parts.append(
            Rows(
                *table.prompt, responses.tokens, responses.where, responses.sampled_log_probs, rewards.team, rewards.local,
                instance=number, agent=jnp.full_like(number, agent), turn=turn, play=play,
                where=table.where if credit is None else table.where & credit.replayed, kept_ids=responses.kept_ids,
                truncated=responses.truncated, credit=None if credit is None else credit.gained,
            )
        )  # fmt: skip
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def fingerprint(prompt: Int[Array, "G P"], where: Bool[Array, "G P"]) -> UInt[Array, "2 G"]:
    """Two 32-bit hashes of each row's prompt ids, blind to padding: equal prompts have equal ones, and unequal prompts do not (2^-64)."""

    def mix(h, column):
        token, real = column
        new = (h ^ token.astype(jnp.uint32)) * jnp.asarray([[16_777_619], [2_246_822_519]], jnp.uint32)  # FNV-1a's prime and xxHash's
        return jnp.where(real, new ^ (new >> 15), h), None

    start = jnp.broadcast_to(jnp.asarray([[2_166_136_261], [374_761_393]], jnp.uint32), (2, prompt.shape[0]))
    return jax.lax.scan(mix, start, (prompt.T, where.T))[0]


def pooled(rows: Rows) -> Pool:
    """See `Pool`; inside jit."""
    return Pool(
        ids=jnp.concatenate([rows.prompt.reshape(-1), rows.tokens.reshape(-1)]),
        log_probs=rows.log_probs.reshape(-1),
        kept_ids=None if rows.kept_ids is None else rows.kept_ids.reshape(-1, rows.kept_ids.shape[-1]),
        prompt_size=jnp.sum(rows.prompt_where, axis=-1, dtype=jnp.int32),
        size=jnp.sum(rows.token_where, axis=-1, dtype=jnp.int32),
        fingerprint=fingerprint(rows.prompt, rows.prompt_where),
        rows=rows._replace(prompt=None, prompt_where=None, tokens=None, token_where=None, log_probs=None, kept_ids=None),
    )


def from_pool(pool: Pool, minibatch: int) -> tuple[Tokens, Samples]:
    """Tokens and columns of a compiled rollout, S = G K. Ids stay where they are; `minibatch`: prompts that share packed rows."""
    ids, log_probs = pool.ids, pool.log_probs
    small = jax.device_get(pool._replace(ids=None, log_probs=None, kept_ids=None))
    rows = small.rows
    g, k = small.size.shape
    r = log_probs.shape[0] // (g * k)
    p = (ids.shape[0] - log_probs.shape[0]) // g
    plays = k * (int(rows.play.max()) + 1)  # responses that may share a prompt

    def spread(x):
        return np.repeat(x, k)

    _, prompt = np.unique(small.fingerprint[0].astype(np.uint64) << np.uint64(32) | small.fingerprint[1], return_inverse=True)
    tokens = Tokens(
        ids, log_probs,
        prompt_at=spread(np.arange(g) * p + p - small.prompt_size),
        prompt_size=spread(small.prompt_size),
        response_at=np.arange(g * k) * r,
        size=small.size.reshape(-1),
        prompt=spread(prompt.astype(np.int32)),
        rank=np.tile(np.arange(k), g),
        shape=RowShape(min(minibatch, g), p + plays * r, plays * r, plays),
        kept_ids=pool.kept_ids,
    )  # fmt: skip
    table = Samples(
        instance=spread(rows.instance),
        env=spread(_dense(rows.instance, rows.play, rows.turn, rows.agent)),
        agent=spread(rows.agent),
        turn=spread(rows.turn),
        trajectory=spread(_dense(rows.instance, rows.play)),
        team=rows.team.reshape(-1),
        local=rows.local.reshape(-1),
        where=spread(rows.where) & (tokens.size > 0),
        played=spread(rows.where),
        credit=None if rows.credit is None else spread(rows.credit),
        order=spread(rows.turn * (rows.agent.max() + 1) + rows.agent),
        tokens=tokens.size,
        truncated=None if rows.truncated is None else rows.truncated.reshape(-1),
        prompt_ids=tokens.prompt,
    )
    return tokens, table


NO_TEXT = ((0,), (0,), (0.0,))  # prompt, response and log-probs of a sample that is not trained on


def _dense(*columns: np.ndarray) -> np.ndarray:
    """Numbers 0, 1, ... of the distinct rows, in their order."""
    return np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int32)


def from_table(table: SampleTable, budgets: Int[np.ndarray, "N"] | None = None) -> tuple[Tokens, Samples]:
    """Tokens and columns of the rows of a hosted rollout that are trained on, and behind them of the other rows of whole plays, whose
    rewards count in returns; of these the tokens are left out. `budgets`: the most tokens that each agent may say."""
    order = table.in_batch_order()
    chosen = [table[number] for number in order]
    samples = [
        TokenSample(s.prompt_ids, s.response_ids, table.log_probs(n), s.name, s.call.kept_ids) if s.where else TokenSample(*NO_TEXT, s.name)
        for n, s in zip(order, chosen)
    ]
    tokens = Tokens.of(samples)
    all_columns = table.to_samples()
    columns = {f.name: getattr(all_columns, f.name) for f in dataclasses.fields(Samples)}
    columns = {name: np.asarray(x)[order] for name, x in columns.items() if x is not None}
    truncated = np.asarray([s.call.truncated for s in chosen], bool)
    columns |= {"instance": np.asarray([s.instance for s in chosen], np.int32), "truncated": truncated}
    return tokens, Samples(**columns | ({} if budgets is None else {"budget": budgets[columns["agent"]]}))


def columns_of(tokens: Tokens, table: Samples) -> Samples:
    """The table's columns as NumPy, with `where`, `tokens` and `prompt_ids` filled in. Raises `ValueError` if lengths differ."""
    columns = {f.name: getattr(table, f.name) for f in dataclasses.fields(Samples)}
    columns = {name: np.asarray(x) for name, x in columns.items() if x is not None}
    for name, x in columns.items():
        if x.shape[:1] != (len(tokens),):
            raise ValueError(f"{len(tokens)} token samples, but the table's column {name!r} has shape {x.shape}")
    columns.setdefault("where", np.ones(len(tokens), bool))
    return Samples(**columns | {"tokens": tokens.size, "prompt_ids": tokens.prompt})


def check_ids(tokens: Tokens, table: Samples, vocabularies: Sequence[int]) -> None:
    """Raises `ValueError` for a token of a file that its model does not have: XLA would read another one's logit without a word.

    `vocabularies`: number of tokens of each agent's model. Ids on the devices were drawn there and are not looked at.
    """
    if not isinstance(tokens.ids, np.ndarray) or not np.any(table.where):
        return
    trained = np.flatnonzero(table.where)
    sizes = np.asarray(vocabularies)[table.agent[trained]]
    arrays = [x for x in (tokens.ids, tokens.kept_ids) if x is not None]
    if max(x.max() for x in arrays) < sizes.min():
        return
    for size, sample in zip(sizes.tolist(), tokens.samples(trained)):
        arrays = [x for x in (sample.prompt, sample.response, sample.kept_ids) if x is not None]
        if (largest := max(x.max() for x in arrays)) >= size:
            who = repr(sample.name) if sample.name else "a sample"
            raise ValueError(f"{who} has the token {largest}, outside its model's vocabulary of {size}: was it drawn by another model?")


def staleness(batch: Batch, plays: Bool[np.ndarray, "N"], version: int) -> float:
    """How many updates ago, on average, the samples of the agents `plays` were drawn: 0 on policy."""
    trained = batch.table.where & plays[batch.table.agent]
    return float(np.mean(version - batch.version[trained])) if np.any(trained) else 0.0


def by_identity(tokens: Tokens, table: Samples) -> np.ndarray:
    """Numbers of the samples in an order that does not depend on who computed or delivered them first."""
    return np.lexsort((tokens.rank, table.trajectory, table.env, table.turn, table.agent))


def rows_of(table: Samples, index: np.ndarray, size: int) -> Samples:
    """The rows at `index`, with padding up to `size` rows that do not count."""
    return jax.tree.map(lambda x: np.pad(x[index], [(0, size - len(index))] + [(0, 0)] * (x.ndim - 1)), table)


def demonstrations(table: SampleTable) -> tuple[Tokens, list[str]]:
    """Tokens of scripted players' calls that kept the format, and the role that spoke each: data for a supervised warm-up."""
    spoken = [s for s in table.samples if s.call.log_probs is None and s.call.tokens.size and s.excluded != "aborted" and s.call.legal]
    silent = [TokenSample(s.prompt_ids, s.response_ids, np.zeros(s.response_ids.size, np.float32), s.name) for s in spoken]
    return Tokens.of(silent), [s.call.role for s in spoken]


__all__ = [
    "Batch", "Plays", "Pool", "Rows", "buffer_sizes", "by_identity", "check_ids", "columns_of", "fingerprint", "from_pool",
    "demonstrations", "from_table", "pooled", "rows_from", "rows_of", "staleness",
]  # fmt: skip
