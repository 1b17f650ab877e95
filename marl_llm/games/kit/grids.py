"""What games on grids share: moves, names of offsets, and splits by what a map holds."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from marl_llm.games.protocol import split_index

FAR = 10_000  # moves where there is no way
MOVES = "UDLR"
DELTAS = np.asarray([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)  # row, column of U, D, L, R
STEPS = {letter: (int(row), int(column)) for letter, (row, column) in zip(MOVES, DELTAS)}
BUCKETS = 16  # of a hash: bucket 0 is validation, 1 is test, the rest is train: the order of `protocol.SPLITS`


def offset_name(row: int, column: int) -> str:
    """`(-2, 1)` is `U2R1`; `(0, 0)` is `O`."""
    vertical = f"{'U' if row < 0 else 'D'}{abs(row)}" if row else ""
    horizontal = f"{'L' if column < 0 else 'R'}{abs(column)}" if column else ""
    return vertical + horizontal or "O"


def mixed(x: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """The finaliser of murmur3: every bit of a hash depends on every bit of the sum that it is made of."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def in_split(print_: UInt32[Array, ""], split: str | Int[Array, ""]) -> Bool[Array, ""]:
    """Whether a fingerprint belongs to a split. Every one belongs to exactly one, so the splits share no instance (law 12)."""
    return jnp.minimum(print_ % BUCKETS, 2) == split_index(split)
