"""The shape of a decoder, and the presets by name."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape of one Qwen3-style decoder. Letters are those of docs/architecture.md.

    Raises `ValueError` naming the field when a value cannot make a model.
    """

    vocab_size: int  # V
    width: int = 64  # D
    layers: int = 2  # Y
    query_heads: int = 4  # H
    key_value_heads: int = 2  # J, divides H (grouped-query attention)
    head_dim: int = 16  # free, as in Qwen3: H * head_dim need not be D
    feed_forward: int = 160  # F
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = True  # the output head is the transposed embedding

    def __post_init__(self):
        for field in ("vocab_size", "width", "layers", "query_heads", "key_value_heads", "head_dim", "feed_forward"):
            if getattr(self, field) < 1:
                raise ValueError(f"ModelConfig.{field} is {getattr(self, field)}; it must be at least 1")
        if self.query_heads % self.key_value_heads:
            raise ValueError(
                f"ModelConfig.query_heads={self.query_heads} is not a multiple of key_value_heads={self.key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")

    @property
    def parameters(self) -> int:
        """Number of scalars in the parameter pytree."""
        attention = self.width * self.head_dim * (2 * self.query_heads + 2 * self.key_value_heads) + 2 * self.head_dim
        layer = attention + 3 * self.width * self.feed_forward + 2 * self.width
        head = 0 if self.tie_embeddings else self.vocab_size * self.width
        return self.vocab_size * self.width + head + self.layers * layer + self.width


# Sizes that learn on a laptop. The vocabulary comes from the game's tokenizer.
PRESETS: dict[str, dict[str, int | float | bool]] = {
    "nano": dict(width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=96),
    "micro": dict(width=64, layers=2, query_heads=4, key_value_heads=2, head_dim=16, feed_forward=160),
    "mini": dict(width=96, layers=3, query_heads=6, key_value_heads=2, head_dim=16, feed_forward=256),
    "small": dict(width=128, layers=4, query_heads=8, key_value_heads=4, head_dim=16, feed_forward=384),
    "qwen3-0.6b": dict(
        width=1024, layers=28, query_heads=16, key_value_heads=8, head_dim=128, feed_forward=3072, rope_theta=1e6
    ),
    "qwen3-1.7b": dict(
        width=2048, layers=28, query_heads=16, key_value_heads=8, head_dim=128, feed_forward=6144, rope_theta=1e6
    ),
}


def make_model_config(preset: str, vocab_size: int, **overrides) -> ModelConfig:
    """The preset's shape for a vocabulary, with single fields replaced. Raises `ValueError` on unknown names."""
    if preset not in PRESETS:
        raise ValueError(f"unknown model preset {preset!r}; the presets are {', '.join(PRESETS)}")
    known = {f.name for f in dataclasses.fields(ModelConfig)} - {"vocab_size"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"unknown model fields {unknown}; the fields are {', '.join(sorted(known))}")
    return ModelConfig(vocab_size=vocab_size, **(PRESETS[preset] | overrides))
