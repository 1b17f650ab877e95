"""`config.json` of Hugging Face checkpoints, both generations, to and from `ModelConfig`."""

from __future__ import annotations

from marl_llm.models.config import ModelConfig, RopeScaling
from marl_llm.models.tensor_files import CheckpointFileError

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}


def config_from_dict(raw: dict, where: str, **overrides) -> ModelConfig:
    """A `ModelConfig` from a parsed `config.json`; `where` names the file in errors.

    Reads the keys of transformers 5 (`rope_parameters`, `dtype`) and of the checkpoints on the hub (`rope_theta`, `rope_scaling`,
    `torch_dtype`). Raises `CheckpointFileError` on a missing key and on a feature that would change the numbers and is not supported.
    """
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise CheckpointFileError(f"{where}: model_type={kind!r} is not supported; {', '.join(ARCHITECTURES)} are")

    def need(key):
        if raw.get(key) is None:
            raise CheckpointFileError(f"{where}: has no {key!r}")
        return raw[key]

    def refuse(key, fine, why):
        if raw.get(key) not in (None, *fine):
            raise CheckpointFileError(f"{where}: {key}={raw[key]!r} is not supported ({why})")

    refuse("hidden_act", ("silu", "swish"), "only SwiGLU feed-forwards")
    heads = need("num_attention_heads")
    head_dim = raw.get("head_dim") or (128 if kind.startswith("qwen3") else need("hidden_size") // heads)
    types = set(raw.get("layer_types") or [])
    if raw.get("use_sliding_window") and (raw.get("sliding_window") or types - {"full_attention"}):
        raise CheckpointFileError(f"{where}: use_sliding_window is not supported; set it to false if your rows fit the window")
    if types - {"full_attention"}:
        raise CheckpointFileError(f"{where}: layer_types {sorted(types - {'full_attention'})} are not supported; full_attention is")
    bias = bool(raw.get("attention_bias", False))
    theta, scaling = _rope(raw, where)
    fields = dict(
        vocab_size=need("vocab_size"),
        width=need("hidden_size"),
        layers=need("num_hidden_layers"),
        query_heads=heads,
        key_value_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        feed_forward=need("intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=kind.startswith("qwen3"),
        attention_bias=True if kind == "qwen2" else bias,
        output_bias=False if kind == "qwen2" else bias,
        feed_forward_bias=kind == "llama" and bool(raw.get("mlp_bias", False)),
        max_position=int(raw.get("max_position_embeddings", 40_960)),
    )
    if kind == "qwen3_moe":
        step, layers = int(raw.get("decoder_sparse_step", 1)), fields["layers"]
        experts = need("num_experts") if "num_experts" in raw else need("num_local_experts")
        dense = [y for y in range(layers) if y in (raw.get("mlp_only_layers") or []) or experts == 0 or (y + 1) % step]
        fields |= dict(
            experts=experts,
            experts_per_token=need("num_experts_per_tok"),
            expert_feed_forward=need("moe_intermediate_size"),
            normalize_experts=bool(raw.get("norm_topk_prob", False)),
            dense_layers=tuple(dense),
        )
    try:
        return ModelConfig(**(fields | overrides))
    except (TypeError, ValueError) as e:
        raise CheckpointFileError(f"{where}: {e}") from e


def _rope(raw: dict, where: str) -> tuple[float, RopeScaling | None]:
    new = raw.get("rope_parameters") or {}
    if "full_attention" in new:  # one table per kind of layer
        new = new["full_attention"]
    old = raw.get("rope_scaling") or {}
    both = {**old, **new}
    theta = float(both.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = both.get("rope_type") or both.get("type") or "default"
    if float(both.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise CheckpointFileError(f"{where}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "yarn", "llama3"):
        raise CheckpointFileError(f"{where}: rope_type={kind!r} is not supported; default, linear, yarn and llama3 are")
    if "factor" not in both:
        raise CheckpointFileError(f"{where}: rope_type={kind!r} without a factor")
    original = both.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings")
    try:
        return theta, RopeScaling(
            kind,
            float(both["factor"]),
            int(original or raw.get("max_position_embeddings") or 0),
            beta_fast=float(both.get("beta_fast") or 32.0),
            beta_slow=float(both.get("beta_slow") or 1.0),
            truncate=bool(both.get("truncate", True)),
            attention_factor=both.get("attention_factor"),
            mscale=both.get("mscale"),
            mscale_all_dim=both.get("mscale_all_dim"),
            low_frequency_factor=float(both.get("low_freq_factor") or 1.0),
            high_frequency_factor=float(both.get("high_freq_factor") or 4.0),
        )
    except ValueError as e:
        raise CheckpointFileError(f"{where}: {e}") from e


def model_type(config: ModelConfig) -> str:
    """The architecture that has this shape. Raises `ValueError` when none has."""
    c = config
    if c.experts:
        kind, wants = "qwen3_moe", dict(qk_norm=True, output_bias=c.attention_bias, feed_forward_bias=False)
    elif c.qk_norm:
        kind, wants = "qwen3", dict(output_bias=c.attention_bias, feed_forward_bias=False)
    elif c.attention_bias and not c.output_bias and not c.feed_forward_bias and c.head_dim * c.query_heads == c.width:
        kind, wants = "qwen2", {}
    else:
        kind, wants = "llama", dict(output_bias=c.attention_bias)
    wrong = [f"{name}={getattr(c, name)}" for name, value in wants.items() if getattr(c, name) != value]
    if wrong:
        raise ValueError(f"no Hugging Face architecture has this shape: {kind} with {', '.join(wrong)}")
    return kind


def config_to_dict(config: ModelConfig, dtype: str) -> dict:
    """`config.json` with the keys of both generations. Raises `ValueError` when no architecture has this shape."""
    c, kind = config, model_type(config)
    rope = {"rope_type": "default"}
    if c.rope_scaling is not None:
        s = c.rope_scaling
        rope = {"rope_type": s.kind, "factor": s.factor, "original_max_position_embeddings": s.original_max_position}
        if s.kind == "yarn":
            rope |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
            extra = {"attention_factor": s.attention_factor, "mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
            rope |= {k: v for k, v in extra.items() if v is not None}
        if s.kind == "llama3":
            rope |= {"low_freq_factor": s.low_frequency_factor, "high_freq_factor": s.high_frequency_factor}
    out = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.query_heads,
        "num_key_value_heads": c.key_value_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.feed_forward,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.tie_embeddings,
        "max_position_embeddings": c.max_position,
        "attention_dropout": 0.0,
        "use_cache": True,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else rope,
        "rope_parameters": rope | {"rope_theta": c.rope_theta},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if kind != "qwen2":
        out["attention_bias"] = c.attention_bias
    else:
        out |= {"use_sliding_window": False, "sliding_window": None}
    if kind == "llama":
        out["mlp_bias"] = c.feed_forward_bias
    if kind == "qwen3_moe":
        out |= {
            "num_experts": c.experts,
            "num_experts_per_tok": c.experts_per_token,
            "moe_intermediate_size": c.expert_feed_forward,
            "norm_topk_prob": c.normalize_experts,
            "mlp_only_layers": list(c.dense_layers),
            "decoder_sparse_step": 1,
        }
    return out
