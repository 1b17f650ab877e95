"""What the two google-tunix workers share: its Qwen3 from a checkpoint, and its `Sampler` on ids written as words."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params


class Words:
    """Ids as words, 'w17' for 17."""

    def encode(self, text, **_):
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(f"w{int(i)}" for i in ids)

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


class _Sampler(tunix_sampler.Sampler):
    """Without the token that begins a text: prompts are exactly as long as they are for everyone else."""

    def tokenize(self, text):
        return np.array(self.tokenizer.encode(text))


def load(directory: str):
    """`(model, its config)` in float32 on one device."""
    with open(f"{directory}/config.json") as file:
        c = json.load(file)
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    config = qwen3.ModelConfig(
        num_layers=c["num_hidden_layers"], vocab_size=c["vocab_size"], embed_dim=c["hidden_size"], hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"], head_dim=c["head_dim"], num_kv_heads=c["num_key_value_heads"], rope_theta=int(theta),
        norm_eps=c["rms_norm_eps"], use_tied_embedding=c["tie_word_embeddings"], dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    return qwen3_params.create_model_from_safe_tensors(directory, config, mesh, dtype=jnp.float32), config


def sampling(model, config, texts: list[str], prompt: int, new: int):
    """A function that draws `new` tokens, none of which stops, for every text of `prompt` words."""
    sizes = tunix_sampler.CacheConfig(
        cache_size=prompt + new, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    )
    sampler = _Sampler(model, Words(), sizes)

    def run():
        out = sampler(
            texts, max_generation_steps=new, max_prompt_length=prompt, temperature=1.0, top_p=1.0, top_k=None,
            eos_tokens=[config.vocab_size + 7], seed=0,
        )  # fmt: skip
        assert min(len(t) for t in out.tokens) >= new - 1, "a response ended early"

    return run
