"""Many small arrays as one: a program then takes one array from the host and gives one back.

Each array that is handed over costs a call of the device's driver, and a turn of the interpreter's lock, for which the engine's thread has
to wait while others make requests and read answers.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

WORD = np.dtype(np.int32)
TYPES = tuple(map(np.dtype, (np.int32, np.float32, np.bool_)))


class Layout(NamedTuple):
    """How arrays lie in a vector, one behind the other. A value that programs can be told apart by."""

    tree: Any  # a PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @property
    def words(self) -> int:
        """Length of the vector."""
        return sum(map(math.prod, self.shapes))


def layout_of(tree: Any) -> Layout:
    """Of arrays, or of what has their shapes and dtypes. Raises `TypeError` on other than int32, float32 and bool."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = tuple(np.dtype(x.dtype) for x in leaves)
    if other := [str(dtype) for dtype in dtypes if dtype not in TYPES]:
        raise TypeError(f"an array of {other[0]} cannot be packed; the types are {', '.join(map(str, TYPES))}")
    return Layout(structure, tuple(tuple(x.shape) for x in leaves), dtypes)


def packed(tree: Any) -> Int[Array, "words"] | Int[np.ndarray, "words"]:
    """The vector of these arrays: floats by their bits, truth values as 0 and 1. NumPy's for NumPy's arrays, otherwise traced."""
    leaves = jax.tree.leaves(tree)
    if all(isinstance(x, np.ndarray | np.generic) for x in leaves):
        words = [np.ascontiguousarray(x).view(WORD) if x.dtype == np.float32 else np.asarray(x, WORD) for x in leaves]
        return np.concatenate([x.reshape(-1) for x in words])
    words = [jax.lax.bitcast_convert_type(x, WORD) if x.dtype == jnp.float32 else x.astype(WORD) for x in leaves]
    return jnp.concatenate([x.reshape(-1) for x in words])


def unpacked(vector: Int[Array, "words"] | Int[np.ndarray, "words"], layout: Layout) -> Any:
    """The arrays of a vector. Raises `ValueError` if it has another length."""
    if vector.shape != (layout.words,):
        raise ValueError(f"a vector of shape {vector.shape} does not hold arrays of {layout.words} words")
    out, at = [], 0
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        part = vector[at : (at := at + math.prod(shape))].reshape(shape)
        if dtype == np.float32:
            part = part.view(dtype) if isinstance(part, np.ndarray) else jax.lax.bitcast_convert_type(part, dtype)
        out.append(part if dtype == WORD or dtype == np.float32 else part != 0)
    return jax.tree.unflatten(layout.tree, out)
