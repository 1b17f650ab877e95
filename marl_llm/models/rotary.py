"""Rotary positions (RoFormer, arXiv 2104.09864, rotate-half form), with YaRN, llama3 and linear scaling."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from marl_llm.models.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair `[d/2]`, float32: theta^(-2i/d), then scaled as `config.rope_scaling` says.

    Plain NumPy in float32, as the checkpoints' own code computes them: in float64 a 1-ulp difference would grow with the position.
    """
    d = config.head_dim
    plain = 1.0 / (np.float32(config.rope_theta) ** (np.arange(0, d, 2, dtype=np.float32) / np.float32(d)))
    s = config.rope_scaling
    if s is None:
        return plain.astype(np.float32)
    if s.kind == "linear":
        return (plain / np.float32(s.factor)).astype(np.float32)
    return (_yarn if s.kind == "yarn" else _llama3)(plain, s, config).astype(np.float32)


def _yarn(plain: np.ndarray, s: RopeScaling, config: ModelConfig) -> np.ndarray:
    d, base = config.head_dim, config.rope_theta

    def dimension_of(rotations: float) -> float:
        """The pair that turns `rotations` times within the original context (YaRN, section 3.2)."""
        return d * math.log(s.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = (np.arange(d // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    stretched = np.clip(ramp, 0, 1)  # 1 where the pair is so slow that it must be interpolated
    return plain / s.factor * stretched + plain * (1 - stretched)


def _llama3(plain: np.ndarray, s: RopeScaling, config: ModelConfig) -> np.ndarray:
    wavelength = 2 * math.pi / plain
    low = s.original_max_position / s.low_frequency_factor
    high = s.original_max_position / s.high_frequency_factor
    smooth = (s.original_max_position / wavelength - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor)
    blended = (1 - smooth) * plain / s.factor + smooth * plain
    return np.where(wavelength > low, plain / s.factor, np.where(wavelength < high, plain, blended))


def rotary_angles(config: ModelConfig, positions: Int[Array, "B L"], rope: str = "global") -> tuple[Array, Array]:
    """Sine and cosine of the angles, each `[B, L, 1, d/2]`, float32; computed once and shared by all layers of this `ModelConfig.rope`."""
    if rope == "none":  # no angle: a rotation that changes no bit
        zeros = jnp.zeros((*positions.shape, 1, config.head_dim // 2))
        return zeros, zeros + 1
    if rope == "local":
        config = dataclasses.replace(config, rope_theta=config.local_rope_theta, rope_scaling=None)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies(config)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    scale = config.attention_scale
    return (sin, cos) if scale == 1.0 else (sin * scale, cos * scale)


def rotate(x: Float[Array, "B L h d"], angles: tuple[Array, Array]) -> Float[Array, "B L h d"]:
    """Turns each pair (i, i + d/2) by its angle; float32 inside, the dtype of `x` outside."""
    sin, cos = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
