"""Hugging Face `generate` with its key-value cache, a worker of `benchmarks.sampling`.

Runs under an interpreter that has PyTorch and transformers. Tasks are
"B,P,R": B random prompts of P tokens, R new tokens each, none of which stops.
"""

import argparse
import os
import time

from lines import pin, serve

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="checkpoint directory")
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--tasks", required=True, help="B,P,R;B,P,R;...")
args = parser.parse_args()
pin(args.threads)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}


def prepare():
    """Loads the checkpoint."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(pad_token_id=0)

    def task(name):
        batch, prompt, new = map(int, name.split(","))
        ids = torch.randint(3, model.config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(batch))

        def run():
            tick = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new,
                    eos_token_id=None, pad_token_id=0, use_cache=True,
                )  # fmt: skip
            assert out.shape == (batch, prompt + new)
            return {"seconds": time.perf_counter() - tick}

        run()
        return run

    return {name: task(name) for name in args.tasks.split(";")}


serve(prepare)
