"""Small helpers on arrays and masks that every module of this room shares. Private."""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Real

# A hyper-parameter: a Python number, or a scalar array when it is swept under vmap or traced.
Scalar = Real[ArrayLike, ""]


def as_float(x) -> Array:
    """Return `x` as a floating array of 32 bits or more: in bfloat16 a sum of ones ends at 256, and e^20 is no float16."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.result_type(float))
    return x if x.dtype.itemsize >= 4 else x.astype(jnp.float32)


def as_mask(where, shape: tuple[int, ...]) -> Array:
    """Return `where` (None means everything) as booleans broadcast to `shape`, over axes of size 1 only.

    Raises `ValueError` for another rank: with as many samples as tokens, a mask of samples would pass for one of tokens.
    """
    if where is None:
        return jnp.ones(shape, bool)
    where = jnp.asarray(where)
    if where.ndim != len(shape):
        raise ValueError(
            f"where has shape {where.shape}, and it needs one axis for each of {tuple(shape)}: pass where[:, None] for a mask of samples."
        )
    return jnp.broadcast_to(where.astype(bool), shape)


def as_integers(x, name: str) -> Array:
    """Return `x` as int32, or int64 where JAX has 64 bits switched on, with the same values.

    Raises:
      TypeError: `x` holds no integers, or it is traced and its type has values that do not fit.
      ValueError: a value does not fit. JAX alone would drop its upper bits, and different groups would become one.
    """
    x = x if isinstance(x, jax.Array | np.ndarray) else np.asarray(x)
    if not np.issubdtype(x.dtype, np.integer):
        raise TypeError(f"{name} must hold integers, and this is {x.dtype}.")
    widest = jnp.result_type(int)
    if not np.can_cast(x.dtype, widest):
        if is_traced(x):
            raise TypeError(f"{name} is {x.dtype}, which may not fit {widest}: cast it before jit.")
        low, high = (int(x.min()), int(x.max())) if x.size else (0, 0)
        if low < np.iinfo(widest).min or high > np.iinfo(widest).max:
            raise ValueError(
                f"{name} holds {low if low < np.iinfo(widest).min else high}, which does not fit {widest}: number its values first, for "
                "example by numpy.unique(x, return_inverse=True)[1], or switch on jax_enable_x64."
            )
    return jnp.asarray(x).astype(widest)


def integer_arguments(*names: str) -> Callable:
    """Decorate a jitted function: the named arguments pass `as_integers` first, since jit cuts 64 bits to 32 without a word."""

    def decorate(function):
        places = {name: place for place, name in enumerate(inspect.signature(function).parameters) if name in names}

        @functools.wraps(function)
        def checked(*args, **kwargs):
            args = list(args)
            for name, place in places.items():
                if kwargs.get(name) is not None:
                    kwargs[name] = as_integers(kwargs[name], name)
                elif place < len(args) and args[place] is not None:
                    args[place] = as_integers(args[place], name)
            return function(*args, **kwargs)

        return checked

    return decorate


def is_traced(*arrays) -> bool:
    """Say whether any of `arrays` is a tracer, that is, whether we are inside jit, vmap, grad or shard_map."""
    return any(isinstance(x, jax.core.Tracer) for x in arrays)


def masked_ids(ids: Array, where: Array) -> Array:
    """Send masked rows and rows without a group (negative id) to S, one past the last slot, where scatters drop them.

    For ids that `group_ids` made; ids from a caller pass `groups.slots_of`.
    """
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


def differ(low: Array, high: Array, spread: Array) -> Array:
    """Say whether values with these extremes and this standard deviation (ddof 0) differ by more than rounding.

    Values are equal where they lie within 4 units in the last place of the largest magnitude, or of 1 where that is more, or spread
    by no more than that. Rewards are of the order of 1, plays with the same rewards may have summed them in different orders, and a
    KL of zero is zero only up to the rounding of its log-probs: a scale below this floor would make advantages of rounding. NaN and
    infinities differ, so that they come out as NaN instead of passing for a tie; no rows at all (low inf, high -inf) do not differ.
    """
    tolerance = rounding_of(jnp.maximum(jnp.abs(low), jnp.abs(high)))
    equal = ((high - low <= tolerance) | (spread <= tolerance)) & jnp.isfinite(tolerance)
    return ~(equal | ((low == jnp.inf) & (high == -jnp.inf)))


def rounding_of(magnitude: Array) -> Array:
    """4 units in the last place of a magnitude, or of 1 where that is more: rewards that differ by less are equal."""
    return 4 * jnp.finfo(magnitude.dtype).eps * jnp.maximum(magnitude, 1)


def gather(per_group: Array, slots: Array, fill: float = 0) -> Array:
    """Read the value of each row's group; rows without one read `fill`."""
    return per_group.at[slots].get(mode="fill", fill_value=fill)


def positive(x: Array) -> Array:
    """Replace what is not positive by 1, so that an undefined variance divides by one."""
    return jnp.where(x > 0, x, 1)


def nan_if_infinite(mean: Array) -> Array:
    """Mean of a group, NaN where a member is infinite, so that the whole group is and not only that member."""
    return jnp.where(jnp.isfinite(mean), mean, jnp.nan)


def psum(x: Array, axis_name) -> Array:
    """Sum over a mesh axis (or several), or nothing at all when `axis_name` is None."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def check_choice(field: str, value, choices) -> None:
    """Raise a ValueError that lists the valid choices unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not one of {', '.join(repr(c) for c in choices)}.")
