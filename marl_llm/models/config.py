"""The shape of a decoder."""

from __future__ import annotations

import dataclasses
import math

REMAT = ("none", "dots", "full")
ATTENTION = ("auto", "xla", "chunked", "tree", "cudnn", "flash", "splash")
DTYPES = ("float32", "bfloat16")
ACTIVATIONS = ("silu", "gelu_tanh")
NO_WINDOW = 1 << 30  # a window that is wider than every sequence
NUMBERS = ("factor", "beta_fast", "beta_slow", "attention_factor", "low_frequency_factor", "high_frequency_factor")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context that a model was trained on.

    `linear` divides all frequencies by `factor`. `yarn` (arXiv 2309.00071) divides the slow ones, keeps the fast ones and blends between
    `beta_fast` and `beta_slow` rotations per original context; queries and keys are scaled by `attention_factor`
    (None: 0.1 ln(factor) + 1, or the ratio of the two mscale forms that DeepSeek's configs carry). `llama3` blends by wavelength
    between `low_frequency_factor` and `high_frequency_factor`. All act at every length, as in Hugging Face transformers.
    """

    kind: str  # 'linear', 'yarn' or 'llama3'
    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: round the blend's borders to whole dimensions
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0

    def __post_init__(self):
        if self.kind not in ("linear", "yarn", "llama3"):
            raise ValueError(f"RopeScaling.kind={self.kind!r}; the kinds are linear, yarn, llama3")
        if any(value is not None and not 0 <= value <= 1e9 for value in (self.mscale, self.mscale_all_dim)):
            raise ValueError(f"RopeScaling: mscale={self.mscale}, mscale_all_dim={self.mscale_all_dim} must be from 0 to 1e9")
        if not (self.factor > 0 and self.original_max_position > 0):
            raise ValueError(f"RopeScaling: factor={self.factor}, original_max_position={self.original_max_position} must be positive")
        numbers = {field: getattr(self, field) for field in NUMBERS if getattr(self, field) is not None}
        if wrong := [f"{field}={value}" for field, value in numbers.items() if not 1e-9 <= value <= 1e9]:
            raise ValueError(f"RopeScaling: {', '.join(wrong)} must be from 1e-9 to 1e9")
        if self.kind == "llama3" and not self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError("RopeScaling: llama3 needs low_frequency_factor < high_frequency_factor")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of one decoder: all families (docs/library.md) differ only here. Letters: docs/architecture.md.

    Raises `ValueError` naming the field when a value cannot make a model.
    """

    vocab_size: int  # V
    width: int = 64  # D, of the residual stream
    layers: int = 2  # Y, decoder layers
    query_heads: int = 4  # H, query heads per layer
    key_value_heads: int = 2  # J, divides H (grouped-query attention); 1 is multi-query
    head_dim: int = 16  # free, as in Qwen3: H * head_dim need not be D
    feed_forward: int = 160  # F; of a dense layer
    rope_theta: float = 10_000.0  # base of the rotary frequencies
    local_rope_theta: float = 0.0  # the same of layers with a window, which are never stretched (Gemma 3); 0: as in other layers
    norm_epsilon: float = 1e-6  # of every RMSNorm
    tie_embeddings: bool = True  # the output head is the transposed embedding
    qk_norm: bool = True  # RMSNorm per head on queries and keys before the rotation (Qwen3)
    post_norms: bool = False  # a second RMSNorm behind attention and behind the feed-forward, before they are added (Gemma)
    unit_offset: bool = False  # RMSNorms multiply with 1 + weight (Gemma)
    scale_embeddings: bool = False  # by the root of the width (Gemma)
    query_scalar: float = 0.0  # queries are divided by its root instead of head_dim's (Gemma's query_pre_attn_scalar); 0: head_dim
    activation: str = "silu"  # of the feed-forward: silu, or gelu_tanh (Gemma)
    attention_bias: bool = False  # on q, k and v (Qwen2)
    output_bias: bool = False  # on the attention's output projection (Llama's and Qwen3's attention_bias=True)
    feed_forward_bias: bool = False  # Llama's mlp_bias
    rope_scaling: RopeScaling | None = None
    rope_pattern: tuple[int, ...] = ()  # 1: a layer rotates, 0: it knows no positions (NoPE, SmolLM3); repeated; (): all layers 1
    window_pattern: tuple[int, ...] = ()  # tokens that each layer sees, itself among them; 0: all before it; repeated; (): all layers 0
    max_position: int = 40_960  # longest sequence the checkpoint claims; a claim, not a limit of the code
    experts: int = 0  # 0: dense; otherwise a mixture in every layer that is not in `dense_layers` (Qwen3-MoE)
    experts_per_token: int = 8  # how many of them a token goes through
    expert_feed_forward: int = 0  # F of one expert
    normalize_experts: bool = True  # the chosen experts' weights add up to one
    dense_layers: tuple[int, ...] = ()  # layers of a mixture model that are dense after all
    value_head: bool = False  # a scalar per position beside the logits, for critics
    param_dtype: str = "float32"  # of the stored parameters
    compute_dtype: str = "float32"  # of matrix products; norms, rotation, softmax and logits are float32 always
    remat: str = "none"  # what the backward pass computes again: nothing, all but matrix products, or everything
    attention: str = "auto"  # by platform and shape; see models/attention.py

    def __post_init__(self):
        for field in ("vocab_size", "width", "layers", "query_heads", "key_value_heads", "head_dim", "feed_forward"):
            if getattr(self, field) < 1:
                raise ValueError(f"ModelConfig.{field} is {getattr(self, field)}; it must be at least 1")
        if not 1 < self.rope_theta <= 1e20:  # beyond it the frequencies of float32 are no numbers
            raise ValueError(f"ModelConfig.rope_theta={self.rope_theta} must be above 1 and at most 1e20")
        if self.local_rope_theta and not (1 < self.local_rope_theta <= 1e20 and self.windowed):
            raise ValueError(
                f"ModelConfig.local_rope_theta={self.local_rope_theta} must be above 1 and at most 1e20, and needs a window_pattern"
            )
        if not 0 <= self.query_scalar <= 1e9:
            raise ValueError(f"ModelConfig.query_scalar={self.query_scalar} must be from 0 to 1e9")
        if self.experts and self.activation != "silu":
            raise ValueError(f"ModelConfig.activation={self.activation!r}: experts have silu")
        if not 0 <= self.norm_epsilon <= 1:
            raise ValueError(f"ModelConfig.norm_epsilon={self.norm_epsilon} must be from 0 to 1")
        if self.query_heads % self.key_value_heads:
            raise ValueError(
                f"ModelConfig.query_heads={self.query_heads} is not a multiple of key_value_heads={self.key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig.head_dim={self.head_dim} is odd; rotary embeddings rotate pairs")
        choices = dict(remat=REMAT, attention=ATTENTION, activation=ACTIVATIONS, param_dtype=DTYPES, compute_dtype=DTYPES)
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"ModelConfig.{field}={getattr(self, field)!r}; choose one of {', '.join(allowed)}")
        if self.experts and not (1 <= self.experts_per_token <= self.experts and self.expert_feed_forward >= 1):
            raise ValueError(
                f"ModelConfig.experts={self.experts} needs 1 <= experts_per_token <= experts (is {self.experts_per_token}) and "
                f"expert_feed_forward >= 1 (is {self.expert_feed_forward})"
            )
        if any(type(size) is not int or not 0 <= size < NO_WINDOW for size in self.window_pattern):
            raise ValueError(f"ModelConfig.window_pattern={self.window_pattern} must be integers from 0 to {NO_WINDOW - 1:,}")
        if any(turns not in (0, 1) for turns in self.rope_pattern):
            raise ValueError(f"ModelConfig.rope_pattern={self.rope_pattern} must be of 0 and 1")
        if any(not 0 <= y < self.layers for y in self.dense_layers):
            raise ValueError(f"ModelConfig.dense_layers={self.dense_layers} names layers outside 0 ... {self.layers - 1}")

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.experts > 0 and layer not in self.dense_layers

    def window(self, layer: int) -> int:
        """Tokens that a layer's token sees, itself among them; 0: all that come before it."""
        return self.window_pattern[layer % len(self.window_pattern)] if self.window_pattern else 0

    def rope(self, layer: int) -> str:
        """By which frequencies a layer rotates: "global", or "local" ones (`local_rope_theta`), or "none"."""
        if self.rope_pattern and not self.rope_pattern[layer % len(self.rope_pattern)]:
            return "none"
        return "local" if self.local_rope_theta and self.window(layer) else "global"

    @property
    def ropes(self) -> tuple[str, ...]:
        """What `rope` says of the layers, each once."""
        return tuple(sorted({self.rope(y) for y in range(self.layers)}))

    @property
    def windowed(self) -> bool:
        """Whether any layer has a window."""
        return any(map(self.window, range(self.layers)))

    @property
    def uniform(self) -> bool:
        """Whether all layers have one structure, so that they can be stacked."""
        return len({self.is_sparse(y) for y in range(self.layers)}) == 1

    @property
    def parameters(self) -> int:
        """Number of scalars in the parameter pytree."""
        return self._count(self.experts)

    @property
    def active_parameters(self) -> int:
        """Number of scalars that one token meets: of the experts only those it is routed to (and the whole router)."""
        return self._count(self.experts_per_token)

    def _count(self, experts: int) -> int:
        heads = self.query_heads + 2 * self.key_value_heads
        attention = self.width * self.head_dim * (heads + self.query_heads)
        attention += 2 * self.head_dim * self.qk_norm + heads * self.head_dim * self.attention_bias + self.width * self.output_bias
        dense = 3 * self.width * self.feed_forward + (2 * self.feed_forward + self.width) * self.feed_forward_bias
        sparse = self.width * self.experts + 3 * experts * self.width * self.expert_feed_forward
        body = sum(sparse if self.is_sparse(y) else dense for y in range(self.layers))
        ends = self.vocab_size * self.width * (1 if self.tie_embeddings else 2) + self.width + (self.width + 1) * self.value_head
        return ends + self.layers * (attention + (4 if self.post_norms else 2) * self.width) + body

    @property
    def attention_scale(self) -> float:
        """The factor on rotated queries and keys each: YaRN's attention factor, else 1."""
        s = self.rope_scaling
        if s is None or s.kind != "yarn":
            return 1.0
        if s.attention_factor is not None:
            return s.attention_factor

        def mscale(m):
            return 1.0 if s.factor <= 1 else 0.1 * m * math.log(s.factor) + 1.0

        if s.mscale and s.mscale_all_dim:
            return mscale(s.mscale) / mscale(s.mscale_all_dim)
        return mscale(1.0)
