"""`config.json` of Hugging Face checkpoints, both generations, to and from `ModelConfig`."""

from __future__ import annotations

from marl_llm.models.config import ModelConfig, RopeScaling
from marl_llm.models.tensor_files import CheckpointFileError

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


class Fields:
    """A parsed object of a JSON file, read field by field: each is of its kind, or is named in the error. null counts as missing."""

    def __init__(self, raw: object, where: str):
        if not isinstance(raw, dict):
            raise CheckpointFileError(f"{where}: must be an object with named fields, not {_shown(raw)}")
        self.raw, self.where = raw, where

    def get(self, key: str, kind: str, default=None):
        """The field as a `kind` of `_KINDS`; `default` when it is missing."""
        value = self.raw.get(key)
        if value is None:
            return default
        if kind == COUNT:
            most = LARGEST.get(key, 1 << 40)
            if type(value) is not int or not 0 <= value <= most:
                raise CheckpointFileError(f"{self.where}: {key}={_shown(value)} must be an integer from 0 to {most:,}")
        elif not _KINDS[kind](value):
            raise CheckpointFileError(f"{self.where}: {key}={_shown(value)} must be {kind}")
        return value

    def need(self, key: str, kind: str):
        """The same, where nothing can stand in."""
        if self.raw.get(key) is None:
            raise CheckpointFileError(f"{self.where}: has no {key!r}")
        return self.get(key, kind)

    def number(self, key: str, default: float | None) -> float | None:
        """A finite number as a float."""
        value = self.get(key, "a number", default)
        return None if value is None else float(value)

    def inner(self, key: str) -> Fields:
        """An object within; empty when it is missing."""
        return Fields({} if self.raw.get(key) is None else self.raw[key], f"{self.where}: {key}")

    def refuse(self, key: str, fine: tuple, why: str) -> None:
        """Raises unless the field is missing or one of `fine`."""
        if self.raw.get(key) is not None and self.raw[key] not in fine:
            raise CheckpointFileError(f"{self.where}: {key}={_shown(self.raw[key])} is not supported ({why})")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_KINDS = {
    "a number": lambda x: type(x) in (int, float) and abs(x) < 1e30,  # of which float32 holds every one, and its inverse
    "true or false": lambda x: type(x) is bool,
    "a string": lambda x: type(x) is str,
    "a list of strings": lambda x: type(x) is list and all(type(y) is str for y in x),
    "a list of integers": lambda x: type(x) is list and all(type(y) is int for y in x),
}
COUNT, _FLAG = "an integer of at least 0", "true or false"
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types
QK_NORM = ("qwen3", "qwen3_moe", "gemma3_text")  # families that norm their queries and keys
# what transformers takes for fields that a file lacks; the published sizes of Gemma 3 lack most of them
MISSING: dict[str, dict] = {
    "qwen2": dict(sliding_window=4096),
    "qwen3": dict(sliding_window=4096, head_dim=128),
    "qwen3_moe": dict(sliding_window=4096, head_dim=128),
    "mistral": dict(sliding_window=4096),
    "smollm3": dict(rope_theta=2e6, tie_word_embeddings=True),
    "gemma3_text": dict(
        vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131_072,
        query_pre_attn_scalar=256, sliding_window=4096, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4,
        tie_word_embeddings=True,
    ),
}  # fmt: skip
GEMMA = dict(post_norms=True, unit_offset=True, scale_embeddings=True, activation="gelu_tanh")
# Beyond every model that is known, and so small that looking at a shape costs nothing.
LARGEST = {
    "num_hidden_layers": 1024, "hidden_size": 1 << 17, "num_attention_heads": 1024, "num_key_value_heads": 1024, "head_dim": 1 << 14,
    "intermediate_size": 1 << 20, "moe_intermediate_size": 1 << 20, "vocab_size": 1 << 20, "num_experts": 4096, "num_local_experts": 4096,
    "num_experts_per_tok": 4096, "decoder_sparse_step": 1024, "r": 1 << 14,
}  # fmt: skip


def config_from_dict(raw: dict, where: str, **overrides) -> ModelConfig:
    """A `ModelConfig` from a parsed `config.json`; `where` names the file in errors.

    Reads the keys of transformers 5 (`rope_parameters`, `dtype`) and of the checkpoints on the hub (`rope_theta`, `rope_scaling`,
    `torch_dtype`). Raises `CheckpointFileError`, naming the field, on one that is missing or malformed and on a feature that would change
    the numbers and is not supported.
    """
    file = _supported(Fields(raw, where))
    kind, heads, width = file.raw["model_type"], file.need("num_attention_heads", COUNT), file.need("hidden_size", COUNT)
    if file.get("head_dim", COUNT) is None and width % max(heads, 1):
        raise CheckpointFileError(f"{where}: hidden_size={width} is no multiple of num_attention_heads={heads}, and there is no head_dim")
    bias = file.get("attention_bias", _FLAG, False)
    theta, scaling = _rope(file)
    # transformers gives a Llama without the field one key head per query head, and other families a number of their own
    key_heads = file.get("num_key_value_heads", COUNT) or (heads if kind == "llama" else file.need("num_key_value_heads", COUNT))
    fields = dict(
        vocab_size=file.need("vocab_size", COUNT),
        width=width,
        layers=file.need("num_hidden_layers", COUNT),
        query_heads=heads,
        key_value_heads=key_heads,
        head_dim=file.get("head_dim", COUNT) or width // max(heads, 1),
        feed_forward=file.need("intermediate_size", COUNT),
        rope_theta=theta,
        rope_scaling=scaling,
        window_pattern=shortest_pattern(_windows(file, kind), 0),
        rope_pattern=shortest_pattern(_rotating(file), 1) if kind == "smollm3" else (),
        norm_epsilon=file.number("rms_norm_eps", 1e-6),
        tie_embeddings=file.get("tie_word_embeddings", _FLAG, False),
        qk_norm=kind in QK_NORM,
        attention_bias=kind == "qwen2" or (kind != "mistral" and bias),
        output_bias=kind not in ("qwen2", "mistral") and bias,
        feed_forward_bias=kind in ("llama", "smollm3") and file.get("mlp_bias", _FLAG, False),
        max_position=file.get("max_position_embeddings", COUNT, 40_960),
    )
    if kind == "gemma3_text":
        local = _local_theta(file) if fields["window_pattern"] else 0.0
        fields |= GEMMA | dict(query_scalar=file.number("query_pre_attn_scalar", 0.0), local_rope_theta=local)
    if kind == "qwen3_moe":
        fields |= _mixture(file)
    try:
        return ModelConfig(**(fields | overrides))
    except (TypeError, ValueError) as e:
        raise CheckpointFileError(f"{where}: {e}") from e


def _supported(file: Fields) -> Fields:
    """The config of a language model, with what its file lacks. Raises on a model_type that is not known, and on features that would change
    the numbers. null is missing, but for a sliding_window."""
    file.refuse("quantization_config", (), "quantised weights are not read")
    kind = file.get("model_type", "a string")
    if kind == "gemma3":  # which sees images: its language model is read
        file, kind = file.inner("text_config"), "gemma3_text"
    if kind not in ARCHITECTURES:
        raise CheckpointFileError(f"{file.where}: model_type={kind!r} is not supported; {', '.join(ARCHITECTURES)} are")
    given = {key: value for key, value in file.raw.items() if value is not None or key == "sliding_window"}
    file = Fields(MISSING.get(kind, {}) | given | {"model_type": kind}, file.where)
    if kind == "gemma3_text":
        file.refuse("hidden_activation", ("gelu_pytorch_tanh",), "gemma3_text has gelu_pytorch_tanh")
        file.refuse("attn_logit_softcapping", (), "scores are not capped")
        file.refuse("final_logit_softcapping", (), "logits are not capped")
        file.refuse("use_bidirectional_attention", (False,), "only causal attention")
    else:
        file.refuse("hidden_act", ("silu", "swish"), "only SwiGLU feed-forwards")
    return file


def _mixture(file: Fields) -> dict:
    """Fields of a mixture of experts."""
    step, layers = file.get("decoder_sparse_step", COUNT, 1), file.need("num_hidden_layers", COUNT)
    experts = file.need("num_experts" if "num_experts" in file.raw else "num_local_experts", COUNT)
    alone = set(file.get("mlp_only_layers", "a list of integers", []))
    dense = [y for y in range(layers) if y in alone or experts == 0 or (y + 1) % max(step, 1)]
    return dict(
        experts=experts,
        experts_per_token=file.need("num_experts_per_tok", COUNT),
        expert_feed_forward=file.need("moe_intermediate_size", COUNT),
        normalize_experts=file.get("norm_topk_prob", _FLAG, False),
        dense_layers=tuple(dense),
    )


def _windows(file: Fields, kind: str) -> list[int]:
    """The window of each layer, 0 for none, as transformers reads a config of this kind."""
    layers = file.need("num_hidden_layers", COUNT)
    size = _window_size(file, kind)
    types = file.get("layer_types", "a list of strings") if kind != "qwen3_moe" else None
    if types is None and kind == "gemma3_text":
        every = file.need("sliding_window_pattern", COUNT) or 1
        types = [SLIDING if (y + 1) % every else FULL for y in range(layers)]
    if types is None and kind == "smollm3":  # with windows, its layers without positions have them
        types = [FULL if turns or not size else SLIDING for turns in _rotating(file)]
    if types is None and kind in ("qwen2", "qwen3"):
        first = file.get("max_window_layers", COUNT, 28)
        types = [SLIDING if size and y >= first else FULL for y in range(layers)]
    elif types is None:
        types = [SLIDING if size else FULL] * layers
    if unknown := sorted(set(types) - {FULL, SLIDING}):
        raise CheckpointFileError(f"{file.where}: layer_types {_shown(unknown)} are not supported; {FULL} and {SLIDING} are")
    if len(types) != layers:
        raise CheckpointFileError(f"{file.where}: layer_types has {len(types)} entries, for num_hidden_layers={layers}")
    if SLIDING in types and not size:
        raise CheckpointFileError(f"{file.where}: layer_types has {SLIDING} layers, but the config gives {kind} no sliding window")
    if kind == "mistral" and size and FULL in types:
        raise CheckpointFileError(f"{file.where}: layer_types has {FULL} layers, but mistral has its sliding_window in all of them")
    return [size if x == SLIDING else 0 for x in types]


def _window_size(file: Fields, kind: str) -> int:
    """Tokens of the sliding window, 0 for none."""
    size = file.get("sliding_window", COUNT, 0)
    if kind in ("mistral", "gemma3_text"):
        return size
    switched_on = file.get("use_sliding_window", _FLAG, False)
    if kind == "llama" and switched_on and size:
        raise CheckpointFileError(f"{file.where}: use_sliding_window is not supported for llama, which has no windows")
    return size if switched_on and kind != "llama" else 0


def shortest_pattern(values: list[int], ordinary: int) -> tuple[int, ...]:
    """The shortest tuple that gives the values when it is repeated; () where all are the `ordinary` one.

    >>> shortest_pattern([8, 8, 0, 8, 8], 0), shortest_pattern([0, 0], 0)
    ((8, 8, 0), ())
    """
    if set(values) == {ordinary}:
        return ()
    size = next(n for n in range(1, len(values) + 1) if all(x == values[y % n] for y, x in enumerate(values)))
    return tuple(values[:size])


def _rotating(file: Fields) -> list[int]:
    """Which layers of SmolLM3 rotate: 1 in `no_rope_layers`, of which the first ones count; 0 in every fourth without it."""
    layers, every = file.need("num_hidden_layers", COUNT), file.get("no_rope_layer_interval", COUNT, 4) or 4
    turns = file.get("no_rope_layers", "a list of integers", [int((y + 1) % every > 0) for y in range(layers)])
    if len(turns) < layers:
        raise CheckpointFileError(f"{file.where}: no_rope_layers has {len(turns)} entries, for num_hidden_layers={layers}")
    return turns[:layers]


def _local_theta(file: Fields) -> float:
    """The base of Gemma's layers with a window."""
    local = file.inner("rope_parameters").inner(SLIDING)
    local.refuse("rope_type", ("default",), "only full_attention layers can be stretched")
    return local.number("rope_theta", None) or file.number("rope_local_base_freq", None)


def _rope(file: Fields) -> tuple[float, RopeScaling | None]:
    new, old = file.inner("rope_parameters"), file.inner("rope_scaling")
    if FULL in new.raw:  # one table per kind of layer
        new = new.inner(FULL)
    rope = old if old.raw else new  # in transformers too the old field counts where both are there
    theta = rope.number("rope_theta", None) or new.number("rope_theta", None) or file.number("rope_theta", 10_000.0)
    kind = rope.get("rope_type", "a string") or rope.get("type", "a string") or "default"
    if (rope.number("partial_rotary_factor", None) or file.number("partial_rotary_factor", None) or 1.0) != 1.0:
        raise CheckpointFileError(f"{file.where}: partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "yarn", "llama3"):
        raise CheckpointFileError(f"{file.where}: rope_type={kind!r} is not supported; default, linear, yarn and llama3 are")
    factor = rope.number("factor", None)
    if factor is None:
        raise CheckpointFileError(f"{file.where}: rope_type={kind!r} without a factor")
    original = "original_max_position_embeddings"
    try:
        return theta, RopeScaling(
            kind,
            factor,
            file.get(original, COUNT) or rope.get(original, COUNT) or file.get("max_position_embeddings", COUNT) or 0,
            beta_fast=rope.number("beta_fast", None) or 32.0,
            beta_slow=rope.number("beta_slow", None) or 1.0,
            truncate=rope.get("truncate", _FLAG, True),
            attention_factor=rope.number("attention_factor", None),
            mscale=rope.number("mscale", None),
            mscale_all_dim=rope.number("mscale_all_dim", None),
            low_frequency_factor=rope.number("low_freq_factor", None) or 1.0,
            high_frequency_factor=rope.number("high_freq_factor", None) or 4.0,
        )
    except ValueError as e:
        raise CheckpointFileError(f"{file.where}: {e}") from e


def model_type(config: ModelConfig) -> str:
    """The architecture that has this shape. Raises `ValueError` when none has."""
    c = config
    if c.post_norms:
        kind, wants = "gemma3_text", GEMMA | dict(qk_norm=True, output_bias=c.attention_bias, feed_forward_bias=False, experts=0)
        wants |= dict(query_scalar=c.query_scalar or 256.0, local_rope_theta=(c.local_rope_theta or 10_000.0) * c.windowed)
    elif c.experts:
        kind, wants = "qwen3_moe", dict(qk_norm=True, output_bias=c.attention_bias, feed_forward_bias=False)
    elif "none" in c.ropes:
        kind, wants = "smollm3", dict(qk_norm=False, output_bias=c.attention_bias, rope_pattern=c.rope_pattern)
    elif c.qk_norm:
        kind, wants = "qwen3", dict(output_bias=c.attention_bias, feed_forward_bias=False)
    elif c.attention_bias and not c.output_bias and not c.feed_forward_bias and c.head_dim * c.query_heads == c.width:
        kind, wants = "qwen2", {}
    elif c.windowed:
        kind, wants = "mistral", dict(attention_bias=False, output_bias=False, feed_forward_bias=False)
    else:
        kind, wants = "llama", dict(output_bias=c.attention_bias)
    if len(windows := {c.window(y) for y in range(c.layers)}) > 1 and (kind in ("qwen3_moe", "mistral") or len(windows - {0}) > 1):
        wants |= {"window_pattern": (max(windows),)}  # which the shape has not
    if kind != "smollm3":
        wants |= dict(rope_pattern=())
    if kind != "gemma3_text":
        wants |= dict(unit_offset=False, scale_embeddings=False, query_scalar=0.0, activation="silu", local_rope_theta=0.0)
    wrong = [f"{name}={getattr(c, name)}" for name, value in wants.items() if getattr(c, name) != value]
    if wrong:
        raise ValueError(f"no Hugging Face architecture has this shape: {kind} with {', '.join(wrong)}")
    return kind


def _rope_to_dict(scaling: RopeScaling | None) -> dict:
    if scaling is None:
        return {"rope_type": "default"}
    s = scaling
    rope = {"rope_type": s.kind, "factor": s.factor, "original_max_position_embeddings": s.original_max_position}
    if s.kind == "yarn":
        rope |= {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
        extra = {"attention_factor": s.attention_factor, "mscale": s.mscale, "mscale_all_dim": s.mscale_all_dim}
        rope |= {k: v for k, v in extra.items() if v is not None}
    if s.kind == "llama3":
        rope |= {"low_freq_factor": s.low_frequency_factor, "high_freq_factor": s.high_frequency_factor}
    return rope


def _gemma_to_dict(config: ModelConfig, rope: dict) -> dict:
    """What Gemma's file has in place of others' fields; `rope` is that of its layers without a window."""
    local = {"rope_type": "default", "rope_theta": config.local_rope_theta or 10_000.0}
    scalar = config.query_scalar
    return {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "rope_local_base_freq": local["rope_theta"],
        "rope_parameters": {FULL: rope, SLIDING: local},
    }


def _windows_to_dict(config: ModelConfig, kind: str) -> dict:
    windows = [config.window(y) for y in range(config.layers)]
    out = {"sliding_window": max(windows) or None}
    if kind == "mistral":
        return out
    if kind == "gemma3_text":
        return {"sliding_window": max(windows) or 4096, "layer_types": [SLIDING if size else FULL for size in windows]}
    out["use_sliding_window"] = config.windowed
    if config.windowed and kind != "qwen3_moe":
        out |= {"layer_types": [SLIDING if size else FULL for size in windows], "max_window_layers": windows.index(max(windows))}
    return out


def config_to_dict(config: ModelConfig, dtype: str) -> dict:
    """`config.json` with the keys of both generations. Raises `ValueError` when no architecture has this shape."""
    c, kind = config, model_type(config)
    rope = _rope_to_dict(c.rope_scaling)
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
    if kind not in ("qwen2", "mistral"):
        out["attention_bias"] = c.attention_bias
    if kind != "llama":
        out |= _windows_to_dict(c, kind)
    if kind in ("llama", "smollm3"):
        out["mlp_bias"] = c.feed_forward_bias
    if kind == "smollm3":
        out["no_rope_layers"] = [int(c.rope(y) != "none") for y in range(c.layers)]
        out["pad_token_id"] = None  # which transformers would take to be 128,004, whatever the vocabulary
    if kind == "gemma3_text":
        out |= _gemma_to_dict(c, out["rope_parameters"])
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
