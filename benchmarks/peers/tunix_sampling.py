"""google-tunix's own `Sampler`, a worker of `benchmarks.sampling`.

Runs under an interpreter that has google-tunix 0.1.7. Tasks are
"B,P,R": B random prompts of P tokens, R new tokens each, none of which stops.
"""

import argparse
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


def prepare():
    """Loads the checkpoint and compiles every task."""
    import tunix_parts

    model, config = tunix_parts.load(args.model)

    def task(name):
        batch, prompt, new = map(int, name.split(","))
        draw = random.Random(batch)
        texts = [" ".join(f"w{draw.randrange(3, config.vocab_size)}" for _ in range(prompt)) for _ in range(batch)]
        sample = tunix_parts.sampling(model, config, texts, prompt, new)

        def run():
            tick = time.perf_counter()
            sample()
            return {"seconds": time.perf_counter() - tick}

        run()
        return run

    return {name: task(name) for name in args.tasks.split(";")}


serve(prepare)
