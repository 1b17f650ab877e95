"""Small helpers on arrays and masks that every module of this room shares. Private."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Real

# A hyper-parameter: a Python number, or a scalar array when it is swept under vmap or traced.
Scalar = Real[ArrayLike, ""]


def as_float(x) -> Array:
    """Return `x` as a floating array: floats keep their precision, integers and booleans get the default float type."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))


def as_mask(where, shape: tuple[int, ...]) -> Array:
    """Return `where` (None means everything) as booleans broadcast to `shape`."""
    if where is None:
        return jnp.ones(shape, bool)
    return jnp.broadcast_to(jnp.asarray(where).astype(bool), shape)


def is_traced(*arrays) -> bool:
    """Say whether any of `arrays` is a tracer, that is, whether we are inside jit, vmap, grad or shard_map."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def masked_ids(ids: Array, where: Array) -> Array:
    """Send masked rows and rows without a group (negative id) to S, one past the last slot, where scatters drop them."""
    capacity = ids.shape[0]
    return jnp.where(where & (ids >= 0), ids, capacity)


def _filled(x: Array, slots: Array, value) -> Array:
    """S slots that all hold `value`. No slot is negative, but XLA does not know: it fills them when the slots are there, not
    before, and the memory of earlier steps is free again (at 10^6 samples this halves the peak)."""
    return jnp.where(slots < 0, x, value)


def per_group_sum(x: Array, slots: Array) -> Array:
    """Sum `x` into S slots; rows whose slot is S or more are dropped."""
    return _filled(x, slots, 0).at[slots].add(x, mode="drop")


def per_group_max(x: Array, slots: Array, empty) -> Array:
    """Maximum of `x` in each of S slots, `empty` where a slot has no row."""
    return _filled(x, slots, empty).at[slots].max(x, mode="drop")


def per_group_min(x: Array, slots: Array, empty) -> Array:
    """Minimum of `x` in each of S slots, `empty` where a slot has no row."""
    return _filled(x, slots, empty).at[slots].min(x, mode="drop")


def per_group_mean(x: Array, slots: Array, count: Array) -> Array:
    """Mean of `x` in each of S slots with `count` rows, exactly the value itself where all rows agree; 0 in empty slots."""
    low, high = per_group_min(x, slots, jnp.inf), per_group_max(x, slots, -jnp.inf)
    return jnp.where(low == high, low, per_group_sum(x, slots) / jnp.maximum(count, 1))


def differ(low: Array, high: Array) -> Array:
    """Say whether the extremes of a group differ by more than rounding: by more than 4 units in the last place.

    Two plays with the same rewards may have been summed in different orders. NaN and infinities differ, so that they come out
    as NaN instead of passing for a tie; no rows at all (low inf, high -inf) do not differ.
    """
    tolerance = 4 * jnp.finfo(low.dtype).eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    return ~(high - low <= tolerance)


def psum(x: Array, axis_name) -> Array:
    """Sum over a mesh axis (or several), or nothing at all when `axis_name` is None."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def check_choice(field: str, value, choices) -> None:
    """Raise a ValueError that lists the valid choices unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(repr(c) for c in choices)}.")
