"""Live parity with Hugging Face transformers and PEFT, in both directions. Needs the extra `parity`; the test suite proper does not.

    pip install -e '.[test,parity]' && python -m pytest tests/live/parity_with_transformers.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from marl_llm.models import (
    Decoder,
    LoraConfig,
    attach,
    init_adapters,
    load_adapters,
    load_pretrained,
    log_probs,
    prompt_mask,
    prompt_positions,
    save_adapters,
    save_pretrained,
)
from marl_llm.models.checkpoint_names import weight_of
from marl_llm.models.sharding import path_name

COMMON = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, initializer_range=0.15, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ROPE = {"rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_theta": 5e5}  # fmt: skip
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=16)
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=7, layer_types=[SLIDING, FULL, SLIDING], rope_parameters=GEMMA_ROPE)
CASES = {
    "qwen2": ("Qwen2", dict(rope_parameters=ROPE)),
    "qwen2_tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen2_yarn": ("Qwen2", dict(rope_parameters=YARN)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3_bias": ("Qwen3", dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    "qwen3_mqa": ("Qwen3", dict(head_dim=16, num_key_value_heads=1)),
    "qwen3_yarn": ("Qwen3", dict(head_dim=16, rope_parameters=YARN)),
    "qwen3_yarn_odd": ("Qwen3", dict(head_dim=16, rope_parameters=YARN | {"beta_fast": 8, "beta_slow": 2, "attention_factor": 0.9})),
    "llama": ("Llama", dict(tie_word_embeddings=False, rms_norm_eps=1e-5)),
    "llama3": ("Llama", dict(rope_parameters=LLAMA3, mlp_bias=True, attention_bias=True)),
    "llama_linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, head_dim=16)),
    "mistral": ("Mistral", dict(head_dim=16, sliding_window=7)),
    "qwen2_windows": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)),
    "qwen3_windows": ("Qwen3", dict(head_dim=16, use_sliding_window=True, sliding_window=7, layer_types=[SLIDING, FULL, SLIDING])),
    "gemma3": ("Gemma3", GEMMA),
    "gemma3_untied": ("Gemma3", GEMMA | dict(tie_word_embeddings=False, rope_parameters=None, layer_types=[FULL] * 3, attention_bias=True)),
    "smollm3": ("SmolLM3", dict(no_rope_layer_interval=2)),
    "smollm3_windows": ("SmolLM3", dict(no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=7, mlp_bias=True)),
    "moe": ("Qwen3Moe", MOE | dict(norm_topk_prob=True)),
    "moe_windows": ("Qwen3Moe", MOE | dict(norm_topk_prob=True, use_sliding_window=True, sliding_window=7)),
    "moe_plain_weights": ("Qwen3Moe", MOE | dict(norm_topk_prob=False)),
    "moe_every_second": ("Qwen3Moe", MOE | dict(decoder_sparse_step=2, mlp_only_layers=[0])),
}


@functools.cache
def theirs(name):
    kind, options = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")(**(COMMON | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # nothing left at one or zero
        for parameter_name, p in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                p.add_(0.2 * torch.randn_like(p))
    return model


def batch(length=40):
    rng = np.random.default_rng(0)
    where = np.arange(length)[None] >= np.asarray([0, length // 3, length - 1])[:, None]
    return rng.integers(3, 96, (3, length)), where


def their_logits(model, ids, where):
    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(where.astype(int)),
                    position_ids=torch.tensor(np.maximum(np.cumsum(where, 1) - 1, 0)))  # fmt: skip
    return out.logits.double().numpy()


def our_logits(config, params, ids, where):
    ids, where = jnp.asarray(ids, jnp.int32), jnp.asarray(where)
    variables = {"params": params["base"], "lora": params["lora"]} if "lora" in params else {"params": params}
    hidden, _ = Decoder(config).apply(variables, ids, prompt_positions(where), prompt_mask(where))
    base = params.get("base", params)
    return np.asarray(Decoder(config).apply({"params": base}, hidden, method="head"))


@pytest.mark.parametrize("cut", ["one file", "shards"])
@pytest.mark.parametrize("name", CASES)
def test_their_checkpoint_gives_our_model_their_logits_and_gradients(name, cut, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path, max_shard_size="5GB" if cut == "one file" else "20KB")
    config, params = load_pretrained(tmp_path)
    ids, where = batch()
    np.testing.assert_allclose(our_logits(config, params, ids, where)[where], their_logits(model, ids, where)[where], atol=2e-5)
    if cut == "shards":
        return
    model.zero_grad()
    out = model(input_ids=torch.tensor(ids[:1]))
    picked = torch.log_softmax(out.logits[:, :-1], -1).gather(-1, torch.tensor(ids[:1, 1:])[..., None])
    (-picked.mean()).backward()

    def loss(p):
        return -jnp.sum(log_probs(config, p, jnp.asarray(ids[:1], jnp.int32)).log_probs) / (ids.shape[1] - 1)

    gradient = jax.tree_util.tree_flatten_with_path(jax.grad(loss)(params))[0]
    named = {n: float(p.grad.norm()) for n, p in model.named_parameters()}
    for path, leaf in gradient:
        names = weight_of(path_name(path), leaf.shape, config).names
        if len(names) == 1 and names[0] in named:
            np.testing.assert_allclose(np.linalg.norm(leaf), named[names[0]], rtol=1e-4, atol=1e-7, err_msg=names[0])


@pytest.mark.parametrize("name", CASES)
def test_our_checkpoint_gives_their_model_our_logits(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_pretrained(tmp_path / "theirs")
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype), params)
    save_pretrained(tmp_path / "ours", config, params, shard_bytes=30_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
    assert type(again) is type(model)
    ids, where = batch()
    ours = our_logits(config, params, ids, where)
    np.testing.assert_allclose(ours[where], their_logits(again, ids, where)[where], atol=2e-5)
    assert np.abs(ours - their_logits(model, ids, where))[where].max() > 1e-2


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_their_model_that_sees_images_we_read_the_language_model(prefix, tmp_path):
    text = transformers.Gemma3TextConfig(**(COMMON | GEMMA))
    vision = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                  image_size=28, patch_size=14)  # fmt: skip
    torch.manual_seed(0)
    sees = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    model = transformers.Gemma3ForConditionalGeneration(sees).eval()
    model.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("language_model.model.", prefix): x for name, x in tensors.items()}
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids, where = batch()
    ours = our_logits(*load_pretrained(tmp_path), ids, where)
    np.testing.assert_allclose(ours[where], their_logits(model, ids, where)[where], atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "smollm3_windows"])
def test_adapters_travel_both_ways_through_peft(name, tmp_path):
    model = theirs(name)
    model.save_pretrained(tmp_path / "base")
    config, base = load_pretrained(tmp_path / "base")
    lora = LoraConfig(rank=4, alpha=12.0, targets=("query", "value", "output", "gate", "down"))
    adapters = init_adapters(config, jax.random.key(0), lora)
    rng = np.random.default_rng(2)
    adapters = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.2, x.shape), x.dtype), adapters)
    save_adapters(tmp_path / "ours", adapters, lora, base_name=str(tmp_path / "base"))
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(fresh, tmp_path / "ours").eval()
    ids, where = batch()
    ours = our_logits(config, attach(base, adapters, lora), ids, where)
    np.testing.assert_allclose(ours[where], their_logits(wrapped, ids, where)[where], atol=5e-5)
    wrapped.save_pretrained(tmp_path / "peft")
    again, read = load_adapters(tmp_path / "peft", config)
    assert (read.rank, read.alpha, set(read.targets)) == (4, 12.0, set(lora.targets))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), again, adapters)
