"""Arrays that wait on the host: off the devices, in another dtype if that is smaller, and back where they lay."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np


class Parked(NamedTuple):
    """One array. A process holds what lay on its own devices, each part once."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding | None  # None: it was bound to no device
    parts: dict[tuple, np.ndarray]  # by where they begin and end


def _place(index: tuple) -> tuple:
    return tuple((part.start, part.stop) for part in index)


def to_host(tree: Any, like: Any) -> Any:
    """A copy of a pytree of arrays on the host, in the dtypes of `like`. Nothing of it is shared with the arrays."""

    def one(x: jax.Array, dtype: np.dtype) -> Parked:
        parts: dict[tuple, np.ndarray] = {}
        for shard in x.addressable_shards:
            if (place := _place(shard.index)) not in parts:
                parts[place] = np.array(shard.data, dtype=dtype)
        return Parked(x.shape, x.sharding if x.committed else None, parts)

    return jax.tree.map(lambda x, y: one(jax.numpy.asarray(x), y.dtype), tree, like)


def to_device(tree: Any) -> Any:
    """The arrays, where they lay."""

    def back(x: Parked) -> jax.Array:
        if x.sharding is None:
            return jax.numpy.asarray(*x.parts.values())
        return jax.make_array_from_callback(x.shape, x.sharding, lambda index: x.parts[_place(index)])

    return jax.tree.map(back, tree, is_leaf=lambda x: isinstance(x, Parked))
