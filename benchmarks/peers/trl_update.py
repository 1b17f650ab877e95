"""A GRPO step of TRL's `GRPOTrainer`, a worker of `benchmarks.update` and `benchmarks.adapters`: the whole trainer, a step per repetition.

Runs under an interpreter that has TRL, PyTorch and datasets, and PEFT for `--rank`. The trainer's own loop waits between steps for the
next repetition; `seconds` are those of the step without its generation and scoring (forward, backward, clipping, AdamW), `whole` are all.
"""

import argparse
import os
import queue
import random
import resource
import tempfile
import threading
import time

from lines import pin, serve

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True, help="checkpoint directory")
for name, default in (("prompts", 8), ("samples", 4), ("prompt", 64), ("response", 64), ("threads", 1), ("rank", 0)):
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--platform", default="cpu", choices=("cpu", "gpu"), help="a GPU computes in bfloat16")
args = parser.parse_args()
pin(args.threads)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ |= {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
STEPS = 10_000  # more than anyone asks for


def word_tokenizer(size: int):
    """Ids as words, 'w17' for 17: no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def adapters(rank: int):
    """PEFT's config of adapters on all matrices."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")


def prepare():
    """Starts the trainer in a thread of its own and lets it do one step."""
    import torch
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    on_gpu = args.platform == "gpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa")
    size, rng = model.config.vocab_size, random.Random(0)
    texts = [" ".join(f"w{rng.randrange(3, size)}" for _ in range(args.prompt)) for _ in range(64 * args.prompts)]
    asked, done, spent = queue.Queue(), queue.Queue(), {"sample": 0.0}

    class Pace(TrainerCallback):
        def on_step_begin(self, *_, **__):
            asked.get()
            spent["sample"], self.tick = 0.0, time.perf_counter()

        def on_step_end(self, *_, **__):
            if on_gpu:
                torch.cuda.synchronize()
            whole = time.perf_counter() - self.tick
            held = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            done.put({"seconds": whole - spent["sample"], "sample": spent["sample"], "whole": whole, "gib": held})

    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=args.prompts * args.samples, num_generations=args.samples,
        max_completion_length=args.response, max_steps=STEPS, learning_rate=1e-6, beta=0.0, bf16=on_gpu, fp16=False, use_cpu=not on_gpu,
        gradient_checkpointing=False, report_to=[], save_strategy="no", disable_tqdm=True, temperature=1.0, top_k=0, top_p=1.0,
        generation_kwargs={"min_new_tokens": args.response}, shuffle_dataset=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completion_ids, **_: [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=word_tokenizer(size),
        callbacks=[Pace()],
        peft_config=adapters(args.rank) if args.rank else None,
    )
    generate = trainer._generate_and_score_completions

    def timed(*inputs):
        tick = time.perf_counter()
        out = generate(*inputs)
        if on_gpu:
            torch.cuda.synchronize()
        spent["sample"] += time.perf_counter() - tick
        return out

    trainer._generate_and_score_completions = timed

    def loop():
        try:
            trainer.train()
        except BaseException as error:
            done.put({"error": repr(error)})
            raise

    threading.Thread(target=loop, daemon=True).start()

    def step():
        asked.put(None)
        figures = done.get()
        if "error" in figures:
            raise RuntimeError(figures["error"])
        return figures

    step()
    return {"train": step}


serve(prepare)
os._exit(0)  # the trainer's thread waits for a step that nobody asks for
