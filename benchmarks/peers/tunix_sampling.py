"""google-tunix's own `Sampler`, a worker of `benchmarks.sampling`.

Runs under an interpreter that has google-tunix 0.1.7. Tasks are
"B,P,R": B random prompts of P tokens, R new tokens each, none of which stops.
"""

import argparse
import json
import os
import random
import time

from lines import pin, serve

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="checkpoint directory")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--tasks", required=True, help="B,P,R;B,P,R;...")
args = parser.parse_args()
pin(args.threads)
os.environ["JAX_PLATFORMS"] = "cpu"


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


def prepare():
    """Loads the checkpoint and compiles every task."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tunix.generate import sampler as tunix_sampler
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as qwen3_params

    with open(f"{args.model}/config.json") as file:
        c = json.load(file)
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    config = qwen3.ModelConfig(
        num_layers=c["num_hidden_layers"], vocab_size=c["vocab_size"], embed_dim=c["hidden_size"], hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"], head_dim=c["head_dim"], num_kv_heads=c["num_key_value_heads"], rope_theta=int(theta),
        norm_eps=c["rms_norm_eps"], use_tied_embedding=c["tie_word_embeddings"], dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    model = qwen3_params.create_model_from_safe_tensors(args.model, config, mesh, dtype=jnp.float32)

    class Sampler(tunix_sampler.Sampler):
        """Without the token that begins a text: prompts are exactly as long as they are for everyone else."""

        def tokenize(self, text):
            return np.array(self.tokenizer.encode(text))

    def task(name):
        batch, prompt, new = map(int, name.split(","))
        sizes = tunix_sampler.CacheConfig(
            cache_size=prompt + new, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        sampler, draw = Sampler(model, Words(), sizes), random.Random(batch)
        texts = [" ".join(f"w{draw.randrange(3, c['vocab_size'])}" for _ in range(prompt)) for _ in range(batch)]

        def run():
            tick = time.perf_counter()
            out = sampler(
                texts, max_generation_steps=new, max_prompt_length=prompt, temperature=1.0, top_p=1.0, top_k=None,
                eos_tokens=[c["vocab_size"] + 7], seed=0,
            )  # fmt: skip
            assert min(len(t) for t in out.tokens) >= new - 1, "a response ended early"
            return {"seconds": time.perf_counter() - tick}

        run()
        return run

    return {name: task(name) for name in args.tasks.split(";")}


serve(prepare)
