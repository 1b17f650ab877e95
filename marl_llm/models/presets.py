"""Model shapes by name: small ones that learn on a laptop, and the checkpoints of the papers.

Sources are the checkpoints' own `config.json` files. Names are lower case; Qwen2.5-Coder and Qwen2.5-Math have Qwen2.5's shapes (Math with
rope_theta 10,000), DeepSeek-R1-Distill-Qwen those of the models it was distilled into.
"""

from __future__ import annotations

import dataclasses

from marl_llm.models.config import ModelConfig, RopeScaling

_QWEN25 = dict(qk_norm=False, attention_bias=True, rope_theta=1e6, head_dim=128, max_position=32_768, vocab_size=151_936)
_QWEN3 = dict(head_dim=128, rope_theta=1e6, max_position=40_960, vocab_size=151_936, key_value_heads=8)
_LLAMA3 = dict(qk_norm=False, rope_theta=5e5, norm_epsilon=1e-5, key_value_heads=8, vocab_size=128_256, max_position=131_072)
_MISTRAL = dict(
    qk_norm=False, norm_epsilon=1e-5, width=4096, layers=32, query_heads=32, key_value_heads=8, head_dim=128, feed_forward=14_336,
    tie_embeddings=False, max_position=32_768,
)  # fmt: skip
_GEMMA3 = dict(
    post_norms=True, unit_offset=True, scale_embeddings=True, activation="gelu_tanh", head_dim=256, query_scalar=256.0, rope_theta=1e6,
    local_rope_theta=1e4,
)  # fmt: skip
_SMOLLM2 = dict(qk_norm=False, rope_theta=1e5, norm_epsilon=1e-5, head_dim=64, vocab_size=49_152, max_position=8192)


def _gemma3(width, layers, heads, kv, ff, **other):
    """The sizes that see images have longer windows and stretched positions; it is their language model that is meant."""
    stretched = RopeScaling("linear", 8.0, 131_072)
    large = dict(vocab_size=262_208, window_pattern=(1024,) * 5 + (0,), rope_scaling=stretched, max_position=131_072)
    small = dict(vocab_size=262_144, window_pattern=(512,) * 5 + (0,), max_position=32_768)
    shape = dict(width=width, layers=layers, query_heads=heads, key_value_heads=kv, feed_forward=ff)
    return _GEMMA3 | (small if width < 2048 else large) | shape | other


def _llama3_rope(factor: float) -> RopeScaling:
    return RopeScaling("llama3", factor, 8192, low_frequency_factor=1.0, high_frequency_factor=4.0)


def _qwen25(width, layers, heads, kv, ff, **other):
    return _QWEN25 | dict(width=width, layers=layers, query_heads=heads, key_value_heads=kv, feed_forward=ff) | other


def _qwen3(width, layers, heads, ff, **other):
    return _QWEN3 | dict(width=width, layers=layers, query_heads=heads, feed_forward=ff) | other


# The small ones have no vocabulary of their own: it comes from the game's tokenizer.
PRESETS: dict[str, dict] = {
    "nano": dict(width=32, layers=2, query_heads=2, key_value_heads=1, head_dim=16, feed_forward=96),
    "micro": dict(width=64, layers=2, query_heads=4, key_value_heads=2, head_dim=16, feed_forward=160),
    "mini": dict(width=96, layers=3, query_heads=6, key_value_heads=2, head_dim=16, feed_forward=256),
    "small": dict(width=128, layers=4, query_heads=8, key_value_heads=4, head_dim=16, feed_forward=384),
    "qwen2.5-0.5b": _qwen25(896, 24, 14, 2, 4864, head_dim=64),
    "qwen2.5-1.5b": _qwen25(1536, 28, 12, 2, 8960),
    "qwen2.5-3b": _qwen25(2048, 36, 16, 2, 11_008),
    "qwen2.5-7b": _qwen25(3584, 28, 28, 4, 18_944, tie_embeddings=False, vocab_size=152_064),
    "qwen2.5-14b": _qwen25(5120, 48, 40, 8, 13_824, tie_embeddings=False, vocab_size=152_064),
    "qwen2.5-32b": _qwen25(5120, 64, 40, 8, 27_648, tie_embeddings=False, vocab_size=152_064),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, tie_embeddings=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408, tie_embeddings=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, tie_embeddings=False),
    "qwen3-30b-a3b": _qwen3(
        2048, 48, 32, 6144, key_value_heads=4, tie_embeddings=False, experts=128, experts_per_token=8, expert_feed_forward=768
    ),
    "deepseek-r1-distill-qwen-1.5b": _qwen25(1536, 28, 12, 2, 8960, rope_theta=1e4, tie_embeddings=False, max_position=131_072),
    "deepseek-r1-distill-qwen-7b": _qwen25(
        3584, 28, 28, 4, 18_944, rope_theta=1e4, tie_embeddings=False, vocab_size=152_064, max_position=131_072
    ),
    "deepseek-r1-distill-qwen-14b": _qwen25(
        5120, 48, 40, 8, 13_824, tie_embeddings=False, vocab_size=152_064, norm_epsilon=1e-5, max_position=131_072
    ),
    "smollm2-135m": _SMOLLM2 | dict(width=576, layers=30, query_heads=9, key_value_heads=3, feed_forward=1536),
    "smollm2-360m": _SMOLLM2 | dict(width=960, layers=32, query_heads=15, key_value_heads=5, feed_forward=2560),
    "smollm2-1.7b": _SMOLLM2
    | dict(width=2048, layers=24, query_heads=32, key_value_heads=32, feed_forward=8192, rope_theta=1.3e5),
    "llama-3.2-1b": _LLAMA3
    | dict(width=2048, layers=16, query_heads=32, head_dim=64, feed_forward=8192, rope_scaling=_llama3_rope(32.0)),
    "llama-3.2-3b": _LLAMA3
    | dict(width=3072, layers=28, query_heads=24, head_dim=128, feed_forward=8192, rope_scaling=_llama3_rope(32.0)),
    "llama-3.1-8b": _LLAMA3
    | dict(
        width=4096, layers=32, query_heads=32, head_dim=128, feed_forward=14_336, tie_embeddings=False, rope_scaling=_llama3_rope(8.0)
    ),
    "gemma-3-270m": _gemma3(640, 18, 4, 1, 2048),
    "gemma-3-1b": _gemma3(1152, 26, 4, 1, 6912),
    "gemma-3-4b": _gemma3(2560, 34, 8, 4, 10_240),
    "gemma-3-12b": _gemma3(3840, 48, 16, 8, 15_360),
    "gemma-3-27b": _gemma3(5376, 62, 32, 16, 21_504, head_dim=128, query_scalar=168.0),
    "smollm3-3b": dict(
        qk_norm=False, rope_theta=5e6, rope_pattern=(1, 1, 1, 0), width=2048, layers=36, query_heads=16, key_value_heads=4, head_dim=128,
        feed_forward=11_008, vocab_size=128_256, max_position=65_536,
    ),
    "mistral-7b-v0.1": _MISTRAL | dict(vocab_size=32_000, rope_theta=1e4, window_pattern=(4096,)),
    "mistral-7b-v0.3": _MISTRAL | dict(vocab_size=32_768, rope_theta=1e6),
}
for _size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b"):
    PRESETS[f"qwen2.5-coder-{_size}"] = PRESETS[f"qwen2.5-{_size}"]


def make_model_config(preset: str, vocab_size: int | None = None, **overrides) -> ModelConfig:
    """The preset's shape, with single fields replaced; `vocab_size` replaces the checkpoint's, and small presets need it.

    Raises `ValueError` on unknown names and on a small preset without a vocabulary.
    """
    if preset not in PRESETS:
        raise ValueError(f"unknown model preset {preset!r}; the presets are {', '.join(PRESETS)}")
    known = {f.name for f in dataclasses.fields(ModelConfig)} - {"vocab_size"}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ValueError(f"unknown model fields {unknown}; the fields are {', '.join(sorted(known))}")
    shape = PRESETS[preset] | overrides
    if vocab_size is not None:
        shape = shape | {"vocab_size": vocab_size}
    if "vocab_size" not in shape:
        raise ValueError(f"model preset {preset!r} has no vocabulary of its own; give vocab_size")
    return ModelConfig(**shape)
