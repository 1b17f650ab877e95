"""A GRPO step with google-tunix's own parts (`Sampler`, Qwen3 model, `grpo_loss_fn`), a worker of `benchmarks.update`.

Runs under an interpreter that has google-tunix 0.1.7. The loss's forward and backward pass, clipping and AdamW in one `nnx.jit`, as its
trainer does; its learner around them (queues, logging, handing new weights to the sampler) is left out, in tunix's favour.
"""

import argparse
import os
import time

from lines import pin, serve

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="checkpoint directory")
for name, default in (("prompts", 8), ("samples", 4), ("prompt", 64), ("response", 64), ("threads", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
args = parser.parse_args()
pin(args.threads)
os.environ["JAX_PLATFORMS"] = "cpu"


def prepare():
    """Loads the checkpoint and compiles."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import tunix_parts
    from flax import nnx
    from tunix.rl import algo_core
    from tunix.rl.common import TrainExample
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    model, config = tunix_parts.load(args.model)
    settings = GRPOConfig(num_generations=args.samples, beta=0.0)
    if not hasattr(settings, "temperature"):
        settings.temperature = 1.0  # the loss reads it from the learner's config
    optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, example):
        def loss(m):
            return algo_core.grpo_loss_fn(m, example, settings, 0, 2)

        (value, _), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, gradient)
        return value

    rng, rows = np.random.default_rng(0), args.prompts * args.samples
    prompts = np.repeat(rng.integers(3, config.vocab_size, (args.prompts, args.prompt)), args.samples, axis=0)
    responses = rng.integers(3, config.vocab_size, (rows, args.response))

    texts = [" ".join(f"w{i}" for i in row) for row in prompts]
    draw = tunix_parts.sampling(model, config, texts, args.prompt, args.response)

    def sample():
        tick = time.perf_counter()
        draw()
        return time.perf_counter() - tick

    sample()

    def train():
        rewards = (responses % 2).mean(1).astype(np.float32)
        example = TrainExample(
            prompt_ids=jnp.asarray(prompts), prompt_mask=jnp.ones_like(jnp.asarray(prompts)), completion_ids=jnp.asarray(responses),
            completion_mask=jnp.ones(responses.shape), advantages=jnp.asarray(algo_core.compute_advantages(rewards, args.samples)),
            ref_per_token_logps=None, old_per_token_logps=None,
        )  # fmt: skip
        tick = time.perf_counter()
        loss = float(step(model, optimizer, example))
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - tick
        return {"seconds": seconds, "whole": seconds + sample(), "loss": loss}

    train()
    return {"train": train}


serve(prepare)
