"""The tables of plans in docs/results.csv: `marl_llm.cli.plan` over models, prompts and machines.

    python -m benchmarks.plans --results=plans.jsonl [--only=v5e:16x16,h100:8]
    python -m benchmarks.plans --results=hosts.jsonl --hosts [--only=v5e:1x1]      what a person's one host is to hold, compiled

Each answer is a line of --results; what is there already is not asked again, so an interrupted run continues. TPU topologies need the extra
`plan` and take some minutes each, nearly all of it in the TPU compiler; GPUs need the extra `cuda`, without which they are counted, and
take about one. Prints the tables in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys

from marl_llm.planning.plan_table import table

MODELS, PROMPTS = ("qwen3-1.7b", "qwen3-8b"), (8192, 16384)
TPUS, GPUS = ("v5e:16x16", "v5p:4x4x4", "v6e:16x16"), ("h100:1", "h100:8", "h200:1", "h200:8")
CONFIG = "experiments/configs/plan_path_10x10.py"
TEXT, THREE = "experiments/configs/plan_path_text.py", "experiments/configs/plan_code_reflect.py:ppo"
RANK = "model.lora_rank=32"


def flags(prompt: int, response: int, *more: str) -> tuple[str, ...]:
    """Flags that `marl_llm.cli.plan` and `experiments.train` both take."""
    return tuple(f"--config.{setting}" for setting in (f"rollout.max_prompt={prompt}", f"rollout.max_tokens={response}", *more))


PPO = ("--prompt=8192", "--response=4096", "--mesh=2,2", "--config.recipe.group_size=1")
HOSTS = (  # config, model, topology, flags
    (TEXT, "qwen3-0.6b", "v5e:1x1", flags(2048, 512, RANK)),
    (TEXT, "qwen3-1.7b", "v5e:2x4", flags(8192, 4096, "mesh.tensor=2", "rollout.cache_gib=1.5")),
    (TEXT, "qwen3-8b", "v5e:2x4", flags(4096, 1024, RANK, "mesh.tensor=4", "rollout.cache_gib=2")),
    (TEXT, "qwen3-1.7b", "v6e:2x2", flags(8192, 4096)),
    (TEXT, "qwen3-8b", "v6e:4x4", flags(8192, 4096, "mesh.tensor=8", "rollout.cache_gib=4.5")),
    (TEXT, "qwen3-8b", "v5p:2x2x1", flags(8192, 4096, "rollout.tensor=4", "rollout.cache_gib=15")),
    (THREE, "qwen2.5-3b", "v5p:2x2x1", PPO),
    (THREE, "qwen2.5-3b", "v5p:2x2x1", (*PPO, "--config.assignment=shared")),
    (TEXT, "qwen3-0.6b", "rtx4090:1", flags(2048, 512, RANK)),
    (TEXT, "qwen3-8b", "h100:2", flags(8192, 4096, RANK)),
    (TEXT, "qwen3-1.7b", "h100:8", flags(8192, 4096)),
    (TEXT, "qwen3-8b", "h100:8", flags(8192, 4096, "rollout.tensor=4")),
    (TEXT, "qwen3-8b", "h200:8", flags(8192, 4096)),
    (THREE, "qwen2.5-3b", "h100:4", PPO),
)
GIB = 2.0**30


def command_of(model: str, topology: str, flags: tuple[str, ...], config: str = CONFIG) -> list[str]:
    """The command of one plan."""
    start = [sys.executable, "-m", "marl_llm", "plan", f"--config={config}"]
    return [*start, f"--config.model.preset={model}", f"--topology={topology}", *flags]


def ask(model: str, topology: str, flags: tuple[str, ...], config: str = CONFIG) -> dict:
    """One plan. Raises `CalledProcessError` when the command fails."""
    command = [*command_of(model, topology, flags, config), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    return {"model": model, "flags": list(flags), **json.loads(done.stdout.splitlines()[-1])}


def host_row(plan: dict) -> str:
    """A line of the table of hosts."""
    engine, flops = plan.get("engine"), plan.get("update_flops")
    moments = {"decode": plan["peak_sampler"]} | plan["moments"]

    def gib(name):
        return f"{moments[name] / GIB:.1f}" if name in moments else "-"

    computed = ["-"] * 2
    if flops is not None:
        computed = [f"{flops['compiled'] / 1e12:,.1f} of {flops['needed'] / 1e12:,.1f} + {flops['again'] / 1e12:,.1f}"]
        computed.append(f"{(flops['compiled'] - flops['again']) / flops['needed']:.2f}")
    read = ["-"] * 3
    if engine is not None:
        read[2] = f"{engine['gathered'] / 1e9:.1f}"
        if "read" in engine:
            read[:2] = f"{engine['read'] / 1e9:.2f} of {engine['needed'] / 1e9:.2f}", f"{engine['read'] / engine['needed']:.2f}"
    cells = [
        f"{plan['models']} x {plan['model']}" + (", rank 32 on one base" if f"--config.{RANK}" in plan["flags"] else ""), plan["topology"],
        f"{plan['mesh']['fsdp']} x {plan['mesh']['tensor']}", str(plan["served"]),
        f"{plan['prompt']:,} + {plan['response']:,}", *map(gib, ("update", "critic", "decode", "admit", "swap")),
        f"{plan['device_memory'] / GIB:.1f}", *read, *computed, "fits" if plan["fits"] else f"no: {plan['suggestion']}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def row(plan: dict) -> str:
    """A line of the table."""
    def gib(name):
        return f"{plan[name] / GIB:.1f}"

    def work(name, unit, scale):
        return (
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


HOST_HEADER = (
    "| models | on | fsdp x tensor | engine's tensor | P + R | update | critic | decode | admit | swap | has | decode step reads, GB "
    "| ratio | gathered | TFLOP of an update | ratio | verdict |\n" + "|---" * 17 + "|"
)


def hosts(results: pathlib.Path, only: list[str]) -> None:
    """The table of hosts, then each plan as `marl_llm.cli.plan` prints it; what is in the file already is not asked again."""
    plans = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    printed = []
    print(HOST_HEADER)
    for config, model, topology, flags in HOSTS:
        here = [p for p in plans if (p["model"], p["topology"], p["flags"]) == (model, topology, list(flags))]
        if not here and (not only or topology in only):
            here = [ask(model, topology, flags, config)]
            with results.open("a") as file:
                file.write(json.dumps(here[0]) + "\n")
        for plan in here[:1]:
            print(host_row(plan), flush=True)
            printed.append(f"\npython {' '.join(command_of(model, topology, flags, config)[1:])}\n{table(plan)}")
    print(*printed, sep="\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="topologies, separated by commas; all of them without it")
    parser.add_argument("--hosts", action="store_true", help="the table of single hosts instead")
    args = parser.parse_args()
    if args.hosts:
        return hosts(args.results, args.only.split(",") if args.only else [])
    lines = args.results.read_text().splitlines() if args.results.exists() else []
    plans = {(p["model"], p["prompt"], p["topology"]): p for p in map(json.loads, lines)}
    wanted = args.only.split(",") if args.only else [*TPUS, *GPUS]
    for prompt in PROMPTS:
        for model in MODELS:
            for topology in wanted:
                if (model, prompt, topology) not in plans:
                    plans[model, prompt, topology] = ask(model, topology, (f"--prompt={prompt}", "--response=4096"))
                    with args.results.open("a") as file:
                        file.write(json.dumps(plans[model, prompt, topology]) + "\n")
    for title, machines in (("TPUs", TPUS), ("GPUs", GPUS)):
        print(f"## Compiled for {title}\n\n{HEADER}")
        for prompt in PROMPTS:
            for model in MODELS:
                for topology in machines:
                    if (model, prompt, topology) in plans:
                        print(row(plans[model, prompt, topology]))
        print()


if __name__ == "__main__":
    main()
