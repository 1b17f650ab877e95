"""The tables of docs/plans.md: `experiments.plan` over models, prompts and machines.

    python -m benchmarks.plans --results=plans.jsonl [--only=v5e:16x16,h100:8]

Each answer is a line of --results; what is there already is not asked again, so an interrupted run continues. TPU topologies need the extra
`plan` and take some minutes each, nearly all of it in the TPU compiler. Prints the tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys

MODELS, PROMPTS = ("qwen3-1.7b", "qwen3-8b"), (8192, 16384)
TPUS, GPUS = ("v5e:16x16", "v5p:4x4x4", "v6e:16x16"), ("h100:1", "h100:8", "h200:1", "h200:8")
CONFIG = "experiments/configs/plan_path_10x10.py"
GIB = 2.0**30


def ask(model: str, prompt: int, topology: str) -> dict:
    """One plan. Raises `CalledProcessError` when the command fails."""
    command = [sys.executable, "-m", "experiments.plan", f"--config={CONFIG}", f"--config.model.preset={model}"]
    command += [f"--topology={topology}", f"--prompt={prompt}", "--response=4096", "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return {"model": model, **json.loads(done.stdout.splitlines()[-1])}


def row(plan: dict) -> str:
    """A line of the table."""
    gib = lambda name: f"{plan[name] / GIB:.1f}"  # noqa: E731
    work = lambda name, unit, scale: (  # noqa: E731
        f"{plan['work'][name]['flops'] / scale:,.1f} {unit}, {plan['work'][name]['seconds'] * 1e3:,.1f} ms"
    )
    mesh = plan["mesh"]
    cells = [
        f"{plan['models']} x {plan['model']}", plan["topology"], f"{mesh['fsdp']} x {mesh['tensor']}", f"{plan['prompt']:,}",
        str(plan["environments"]), gib("parameters_bytes"), gib("optimizer_bytes"), f"{plan['update']['temporary'] / GIB:.1f}",
        gib("kv_cache"), f"{gib('peak_update')} / {gib('peak_sampler')}", gib("device_memory"), work("decode_step", "G", 1e9),
        work("prefill", "T", 1e12), work("update_step", "T", 1e12), "fits" if plan["fits"] else f"no: {plan['suggestion']}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


HEADER = (
    "| models | on | fsdp x tensor | P | E | parameters | optimizer | activations | KV cache | peak: update / sampler | has | decode step "
    "| prefill | update | verdict |\n" + "|---" * 15 + "|"
)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="topologies, separated by commas; all of them without it")
    args = parser.parse_args()
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    plans = {(p["model"], p["prompt"], p["topology"]): p for p in map(json.loads, lines)}
    wanted = args.only.split(",") if args.only else [*TPUS, *GPUS]
    for prompt in PROMPTS:
        for model in MODELS:
            for topology in wanted:
                if (model, prompt, topology) not in plans:
                    plans[model, prompt, topology] = ask(model, prompt, topology)
                    with args.results.open("a") as file:
                        file.write(json.dumps(plans[model, prompt, topology]) + "\n")
    for title, machines in (("Compiled for TPUs", TPUS), ("Counted for GPUs", GPUS)):
        print(f"## {title}\n\n{HEADER}")
        for prompt in PROMPTS:
            for model in MODELS:
                for topology in machines:
                    if (model, prompt, topology) in plans:
                        print(row(plans[model, prompt, topology]))
        print()


if __name__ == "__main__":
    main()
