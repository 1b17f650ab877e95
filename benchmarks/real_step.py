"""One step of GRPO with the shape of a published model and random weights, on whatever is here: does it fit, and how long does it take?

    python -m benchmarks.real_step [--preset=qwen3-0.6b] [--prompts=2] [--group_size=4] [--prompt=256] [--response=128] [--layers=0]

What a `:full` run does: float32 masters and moments, bfloat16 products and sampling copy, layers stacked and computed again in the backward
pass, one packed row at a time. The engine draws the responses, random rewards make the advantages. Prints one JSON line: seconds with
compilation of every part, and the most memory that the process held by the end of each.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-0.6b", help="of marl_llm.models.PRESETS, with a vocabulary of its own")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the preset's, to try the command; 0: all")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--branches", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--response", type=int, default=128, help="tokens")
    args = parser.parse_args()

    import jax
    import numpy as np

    from marl_llm.algorithms import Samples, make_recipe
    from marl_llm.models import init_params, make_model_config
    from marl_llm.sampling import Engine, EngineConfig, Request
    from marl_llm.training import LearnerOptions, ModelSpec, TokenSample, make_mesh, make_optimizer, use_cpu_devices
    from marl_llm.training.learner import Learner
    from marl_llm.training.packing import Tokens

    use_cpu_devices(1)
    jax.config.update("jax_compilation_cache_dir", None)
    clock, seconds, most = [time.perf_counter()], {}, {}

    def done(phase: str) -> None:
        seconds[phase] = round(time.perf_counter() - clock[0], 1)
        most[phase] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1)
        print(f"{phase} in {seconds[phase]} s, at most {most[phase]} GiB", file=sys.stderr, flush=True)
        clock[0] = time.perf_counter()

    config = make_model_config(args.preset, compute_dtype="bfloat16", remat="full", **({"layers": args.layers} if args.layers else {}))
    row = args.prompt + args.branches * args.response
    options = LearnerOptions(make_recipe("grpo"), make_optimizer(), row_tokens=row, minibatch=args.prompts, microbatch_tokens=row)
    learner = Learner(
        ModelSpec(config, jax.jit(lambda key: init_params(config, key, stacked=True))(jax.random.key(0))), options, make_mesh(1),
        jax.random.key(1),
    )  # fmt: skip
    done("made")
    rng, count = np.random.default_rng(0), args.prompts * args.branches
    sizes = EngineConfig(max_num_seqs=count, prompt_tokens=args.prompt, response_tokens=args.response, admit=args.prompts)
    ids = [tuple(int(t) for t in rng.integers(1, config.vocab_size, args.prompt)) for _ in range(args.prompts)]
    asked = [Request(prompt, (i, k), args.response) for i, prompt in enumerate(ids) for k in range(args.branches)]
    with Engine({"policy": (config, learner.params)}, jax.random.key(2), sizes=sizes) as engine:
        drawn = engine.generate_all(asked)
        done("sampled")
    tokens = Tokens.of([TokenSample(r.prompt, c.tokens, c.log_probs) for r, c in zip(asked, drawn, strict=True)])
    zeros = np.zeros(count, np.int32)
    instance = np.repeat(np.arange(args.prompts, dtype=np.int32), args.branches)
    order = np.arange(count, dtype=np.int32)
    rewards = rng.normal(size=count).astype(np.float32)
    table = Samples(instance=instance, env=instance, agent=zeros, turn=zeros, order=zeros, trajectory=order, team=rewards, local=rewards)
    figures = learner.learn(tokens, table, np.ones(1, bool), 1e-6, None, 0, None, 0.0)
    jax.block_until_ready(learner.policy)
    done("learned")
    print(
        json.dumps(
            {
                "benchmark": "real_step", "preset": args.preset, "parameters": config.parameters, "samples": count,
                "tokens": [args.prompt, args.response], "seconds": seconds, "sampled_tokens": sum(len(c.tokens) for c in drawn),
                "log_prob_gap": round(figures["log_prob_gap"], 4), "bound": figures["log_prob_gap_bound"],
                "peak_gib": most,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
