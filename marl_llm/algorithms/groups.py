"""Groups: which samples are compared with each other.

A group-relative method replaces the critic by the other members of a group, so the group is the algorithm. Here a group is
an integer: `group_keys` stacks the axes that name it (AT-GRPO's hash(env, agent, turn), over any axes, but injective),
`group_ids` turns keys into dense ids `[S]` in [0, G), and everything downstream is a segment operation on those ids.

All functions take flat arrays over S samples and work inside jit: ids and per-group arrays have the static capacity S (there are
never more groups than samples). A masked sample has the id `NO_GROUP`, and a sample with that id is masked everywhere.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Integer, Real, Shaped

from marl_llm.algorithms._arrays import (
    Scalar,
    as_float,
    as_integers,
    as_mask,
    differ,
    gather,
    integer_arguments,
    is_traced,
    masked_ids,
    nan_if_infinite,
    per_group_max,
    per_group_min,
    per_group_sum,
    positive,
)

NO_GROUP = -1

# Cells per sample of the counting method, and how many consecutive cells share a word of bits.
CELLS = 2
WORD = 32


def group_keys(**axes: Integer[ArrayLike, "S"]) -> Int[Array, "S C"]:
    """Stack the axes that name a group into one key per sample: the papers' hash(e, i, t), without its collisions.

    AT-GRPO (Stronger-MAS, Alg. 1 line 11) writes g = hash(e, i, t). Two different groups must never share a key, so the key
    is the tuple itself: injective by construction, for any number of groups and any integer values, negative ones included. A
    value that does not fit int32 is refused unless JAX has 64 bits switched on.

    Args:
      **axes: integer arrays `[S]`, for example `env=..., agent=..., turn=...`. At least one.

    Returns:
      Keys `[S, C]`, one column per axis, columns in alphabetical order of their names, so that neither the order of the
      arguments nor jit changes the result.

    Raises:
      ValueError: no axis was given, or a value does not fit.
      TypeError: an axis does not hold integers, or is traced and of a type whose values may not fit (uint32).
    """
    if not axes:
        raise ValueError("group_keys needs at least one axis, for example group_keys(env=env, agent=agent, turn=turn).")
    return _stacked([as_integers(axes[name], name) for name in sorted(axes)])


@jax.jit
def _stacked(columns: list[Array]) -> Int[Array, "S C"]:
    """Columns side by side."""
    return jnp.stack(columns, axis=1)


def _ids_by_counting(columns: list[Array], where: Array, lowest: list[Array], span: list[Array], capacity: int) -> Array:
    """Dense ids when all keys fit a box of at most `capacity` cells: mark the cells in use and count. O(S)."""
    code = jnp.zeros(where.shape[0], jnp.int32)
    for column, low, width in zip(columns, lowest, span):
        code = code * width.astype(jnp.int32) + (column - low).astype(jnp.int32)
    code = jnp.where(where, code, capacity)
    used = jnp.zeros(capacity, bool).at[code].set(True, mode="drop")
    # The number of a cell is how many cells in use lie below it: all those in the words before its own, plus the bits below its
    # own bit. Running the sum over words of 32 cells instead of cells is what makes this fast on a CPU.
    bits = jnp.arange(WORD, dtype=jnp.uint32)
    words = jnp.sum(used.reshape(-1, WORD).astype(jnp.uint32) << bits, axis=1, dtype=jnp.uint32)
    counts = jax.lax.population_count(words).astype(jnp.int32)
    before = jnp.cumsum(counts) - counts
    word = jnp.minimum(code // WORD, words.shape[0] - 1)
    below = words[word] & ((jnp.uint32(1) << (code % WORD).astype(jnp.uint32)) - 1)
    return jnp.where(where, before[word] + jax.lax.population_count(below).astype(jnp.int32), NO_GROUP)


def _ids_by_sorting(columns: list[Array], where: Array) -> Array:
    """Dense ids for any keys: sort rows lexicographically, masked rows last, and start a group at every change. O(S log S)."""
    size = where.shape[0]
    order = jnp.lexsort([*reversed(columns), ~where])
    ranked = [column[order] for column in columns]
    starts = functools.reduce(jnp.logical_or, [column[1:] != column[:-1] for column in ranked]).astype(jnp.int32)
    ids = jnp.concatenate([jnp.zeros(min(1, size), jnp.int32), jnp.cumsum(starts)])
    ids = jnp.zeros(size, jnp.int32).at[order].set(ids.astype(jnp.int32))
    return jnp.where(where, ids, NO_GROUP)


@integer_arguments("keys")
@jax.jit
def group_ids(keys: Int[ArrayLike, "S C"], *, where: Shaped[ArrayLike, "S"] | None = None) -> Int[Array, "S"]:
    """Number the distinct keys: dense ids in [0, G), in lexicographic order of the keys.

    The same numbers as `numpy.unique(keys[where], axis=0, return_inverse=True)`. When the keys span a box of at most 2 S cells
    (envs x agents x turns usually do) no sort is needed and the cost is linear; otherwise the rows are sorted.

    Args:
      keys: `[S, C]`, from `group_keys`.
      where: `[S]`, optional. Samples that are False get `NO_GROUP` (-1) and take no number.

    Returns:
      int32 ids `[S]`. Their number G is `max(ids) + 1`; it is at most S and unknown to the compiler.
    """
    keys = jnp.asarray(keys)
    size, width = keys.shape
    where = as_mask(where, (size,))
    if size == 0:
        return jnp.zeros(0, jnp.int32)
    limits = jnp.iinfo(keys.dtype)
    # Column by column: XLA then reads the arrays that `group_keys` stacked, and never writes the stack.
    columns = [jax.lax.index_in_dim(keys, c, axis=1, keepdims=False) for c in range(width)]
    lowest = [jnp.min(column, where=where, initial=limits.max) for column in columns]
    highest = [jnp.max(column, where=where, initial=limits.min) for column in columns]
    # Spans are compared as floats because highest - lowest may overflow the integer type; the 0.1 % covers float rounding.
    spans = [jnp.maximum(high.astype(jnp.float32) - low.astype(jnp.float32) + 1, 1) for low, high in zip(lowest, highest)]
    capacity = -(-CELLS * size // WORD) * WORD
    fits = functools.reduce(jnp.multiply, spans) <= 0.999 * capacity
    cells = [high - low + 1 for low, high in zip(lowest, highest)]

    def counting():
        return _ids_by_counting(columns, where, lowest, cells, capacity)

    return jax.lax.cond(fits, counting, lambda: _ids_by_sorting(columns, where))


def slots_of(ids: Array, where: Array) -> Array:
    """The slot of each row in arrays of capacity S, S for rows that are masked or have no group (`NO_GROUP`).

    Dense ids in [0, S) are their own slots. Any others, raw prompt ids for example, are numbered first, in ascending order.
    """
    dense = jnp.all((ids >= NO_GROUP) & (ids < ids.shape[0]))
    ids = jax.lax.cond(dense, lambda i: i, lambda i: group_ids(i[:, None], where=i != NO_GROUP).astype(i.dtype), ids)
    return masked_ids(ids, where)


@typing.no_type_check  # as a pytree it may hold tracers, shapes or None
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupStats:
    """What each group looks like. Arrays are indexed by dense group id, have capacity S, and are zero past the last group."""

    size: Array  # [S] int32, members of group g (unmasked samples); 0 for ids that are not in use
    mean: Array  # [S] float, mean value
    variance: Array  # [S] float, variance with the stated ddof; 0 for a group of one
    minimum: Array  # [S] float, smallest value
    maximum: Array  # [S] float, largest value
    is_tied: Array  # [S] bool, in use and all values equal up to rounding; a group of one is tied
    count: Array  # [] int32, number of groups in use
    singletons: Array  # [] int32, number of groups of one
    tied: Array  # [] int32, number of tied groups (the groups of one among them)
    zero_variance_share: Array  # [] float, tied / count; 0 when there is no group

    @property
    def std(self) -> Float[Array, "S"]:
        """Standard deviation of each group, zero (not a rounding error) where it is tied."""
        return jnp.where(self.is_tied, 0.0, jnp.sqrt(jnp.where(self.is_tied, 1.0, self.variance)))


@integer_arguments("ids")
@jax.jit
def group_stats(
    values: Real[ArrayLike, "S"], ids: Int[ArrayLike, "S"], *, where: Shaped[ArrayLike, "S"] | None = None, ddof: Scalar = 0
) -> GroupStats:
    """Describe every group: size, mean, variance, extremes, ties, and how many groups teach nothing.

    Args:
      values: rewards or returns `[S]`.
      ids: group ids `[S]` from `group_ids`. Other integers are numbered in ascending order: index the result by those numbers.
      where: `[S]`, optional; False samples count nowhere.
      ddof: the variance divides by max(n - ddof, 1).

    Returns:
      A `GroupStats` pytree. An empty table gives zero groups and finite zeros everywhere.
    """
    values = as_float(values)
    return stats_of(values, slots_of(ids, as_mask(where, ids.shape)), None, ddof)


def stats_of(values: Array, slots: Array, weights: Array | None, ddof: Scalar) -> GroupStats:
    """`group_stats` of float values whose rows stand in `slots`, with one vote each or `weights` `[S]`, 0 where masked."""
    used = slots < slots.shape[0]
    values = jnp.where(used, values, 0)
    # Without weights nothing is multiplied: at 10^6 samples each array that is not written saves a millisecond.
    weigh = (lambda x: x) if weights is None else (lambda x: weights * x)
    size = per_group_sum(used.astype(jnp.int32), slots)
    votes = size.astype(values.dtype) if weights is None else per_group_sum(weights, slots)
    present = size > 0
    mean = nan_if_infinite(per_group_sum(weigh(values), slots) / positive(votes))
    deviation = jnp.where(used, values - gather(mean, slots), 0)
    low = per_group_min(values, slots, jnp.inf)
    high = per_group_max(values, slots, -jnp.inf)
    squares = per_group_sum(weigh(deviation**2), slots)
    spread = jnp.where(votes > 0, jnp.sqrt(squares / positive(votes)), jnp.inf)
    is_tied = present & ~differ(low, high, spread)
    variance = jnp.where(is_tied, 0, squares / positive(votes - ddof))
    count, tied = jnp.sum(present), jnp.sum(is_tied)
    return GroupStats(
        size=size,
        mean=mean,
        variance=variance,
        minimum=jnp.where(present, low, 0),
        maximum=jnp.where(present, high, 0),
        is_tied=is_tied,
        count=count,
        singletons=jnp.sum(size == 1),
        tied=tied,
        zero_variance_share=tied / jnp.maximum(count, 1).astype(values.dtype),
    )


def _words(prompt_ids) -> Array:
    """Prompts as rows of words `[S, C]` that are equal where the prompts are: 64-bit numbers become two words if JAX has 32 bits."""
    if not isinstance(prompt_ids, jax.Array):
        prompt_ids = np.asarray(prompt_ids)
        if prompt_ids.dtype.itemsize > jnp.asarray(prompt_ids[:0]).dtype.itemsize:
            prompt_ids = np.ascontiguousarray(prompt_ids).reshape(*prompt_ids.shape, 1).view(np.int32)
    return jnp.asarray(prompt_ids).reshape(prompt_ids.shape[0], math.prod(prompt_ids.shape[1:]))


@jax.jit
def _mixed_groups(prompts, ids, where) -> tuple[Array, Array, Array]:
    """Return (slots [S], group is mixed [S], group in use [S]) for `check_same_prompt` and `mixed_share`."""
    slots = slots_of(ids, as_mask(where, ids.shape))
    rows = jnp.arange(ids.shape[0])
    first = per_group_min(rows, slots, ids.shape[0])
    reference = prompts.at[first.at[slots].get(mode="fill", fill_value=0)].get(mode="fill", fill_value=0)
    differs = jnp.any(prompts != reference, axis=1).astype(jnp.int32)
    in_use = first < ids.shape[0]
    return slots, per_group_max(differs, slots, 0) > 0, in_use


@integer_arguments("ids")
def mixed_share(
    prompt_ids: Shaped[ArrayLike, "S *P"], ids: Int[ArrayLike, "S"], *, where: Shaped[ArrayLike, "S"] | None = None
) -> Float[Array, ""]:
    """Share of groups whose members did not all see the very same prompt; 0 when there is no group.

    GRPO on a team, MAGRPO's later turns and MAPPA compare different prompts by design; this is the metric that says so.

    Args:
      prompt_ids: prompt token ids `[S, P]`, padded alike, or one fingerprint per prompt `[S]`.
      ids: dense group ids `[S]`.
      where: `[S]`, optional.
    """
    _, mixed, in_use = _mixed_groups(_words(prompt_ids), ids, where)
    return jnp.sum(mixed) / jnp.maximum(jnp.sum(in_use), 1).astype(jnp.result_type(float))


@integer_arguments("ids")
def check_same_prompt(
    prompt_ids: Shaped[ArrayLike, "S *P"], ids: Int[ArrayLike, "S"], *, where: Shaped[ArrayLike, "S"] | None = None
) -> None:
    """Raise unless all members of every group saw the very same prompt ids (AT-GRPO's condition for a fair comparison).

    Args:
      prompt_ids: prompt token ids `[S, P]`, padded alike, or one fingerprint per prompt `[S]`.
      ids: dense group ids `[S]`.
      where: `[S]`, optional.

    Raises:
      ValueError: a group mixes prompts; the message names the first such group and two of its rows.
      TypeError: called inside jit, where nothing can be raised; use `mixed_share` there.
    """
    if is_traced(prompt_ids, ids, where):
        raise TypeError("check_same_prompt raises, so it needs concrete arrays: inside jit, report mixed_share(...) instead.")
    prompts = _words(prompt_ids)
    slots, mixed, _ = _mixed_groups(prompts, ids, where)
    if not bool(jnp.any(mixed)):
        return
    group = int(jnp.argmax(mixed))
    rows = [int(row) for row in jnp.flatnonzero(slots == group)]
    other = next(row for row in rows if bool(jnp.any(prompts[row] != prompts[rows[0]])))
    raise ValueError(
        f"{int(jnp.sum(mixed))} group(s) mix prompts. Group {group} has {len(rows)} samples; rows {rows[0]} and {other} saw "
        "different prompt ids. Group by more axes, or use a recipe that compares different prompts on purpose."
    )
