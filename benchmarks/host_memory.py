"""What a process holds while it loads its share of a sharded checkpoint: at most that share and one tensor.

    python -m benchmarks.host_memory [--gib=1] [--processes=2] [--devices=2] [--shard_mib=256] [--stacked]

Writes a random float32 checkpoint in safetensors shards, and loads it with `load_pretrained(mesh=...)` in real processes with forced CPU
devices, joined over gloo, parameters split over all devices. On a CPU a device's memory is the process's own, so that its share is counted.
Prints a JSON line per process: the most resident memory above what there was before (Linux counts it, /proc/self/status), the share, the
largest tensor of the files, and `over`, what the peak is above share and largest tensor. Exit code 1 where that is more than --slack_mib.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.processes import ROOT, finish, free_port

MIB = 2**20


def shape_of(gib: float):
    """A Qwen3 shape whose parameters take about so many GiB in float32; its embedding is the largest tensor, a sixteenth of a GiB."""
    from marl_llm.models import ModelConfig

    def layer(n):
        return ModelConfig(
            16_384, width=1024, layers=n, query_heads=16, key_value_heads=8, head_dim=64, feed_forward=4096
        )

    each = layer(2).parameters - layer(1).parameters
    return layer(max(1, round((gib * 2**28 - layer(1).parameters) / each) + 1))


def write(folder: str, gib: float, shard_mib: int) -> None:
    """The checkpoint."""
    import jax

    from marl_llm.models import init_params, save_pretrained

    config = shape_of(gib)
    save_pretrained(folder, config, jax.jit(lambda key: init_params(config, key))(jax.random.key(0)), shard_bytes=shard_mib * MIB)


def resident(field: str) -> int:
    """Bytes: `VmRSS`, what is held now, or `VmHWM`, the most since `forget`."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget() -> None:
    """Lets the most that was held begin anew."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def load(folder: str, warm: str, how: str, devices: int, stacked: bool) -> None:
    """Loads the checkpoint in this process and prints the line. `warm` is a small one, which brings in all code first."""
    import jax

    from marl_llm.models import load_pretrained
    from marl_llm.models.tensor_files import find_tensors
    from marl_llm.training import make_mesh, processes, use_cpu_devices

    count = processes.start(how)
    use_cpu_devices(devices)
    mesh = make_mesh(1, fsdp=len(jax.devices()))
    jax.block_until_ready(load_pretrained(warm, mesh=mesh, stacked=stacked)[1])
    forget()
    before = resident("VmRSS")
    tick, cpu = time.perf_counter(), time.process_time()
    config, params = load_pretrained(folder, mesh=mesh, stacked=stacked)
    jax.block_until_ready(params)
    seconds, cpu = time.perf_counter() - tick, time.process_time() - cpu
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    share = sum(part.data.nbytes for leaf in jax.tree.leaves(params) for part in leaf.addressable_shards)
    largest = max(info.dtype.itemsize * math.prod(info.shape) for info in find_tensors(folder).values())

    def mib(size):
        return round(size / MIB, 1)

    line = {
        "process": jax.process_index(), "processes": count, "devices": len(jax.devices()), "stacked": stacked,
        "checkpoint_mib": mib(4 * config.parameters), "share_mib": mib(share), "largest_tensor_mib": mib(largest), "peak_mib": mib(peak),
        "after_mib": mib(after), "over_mib": mib(peak - share - largest), "seconds": round(seconds, 2), "cpu_s": round(cpu, 2),
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def measure(args) -> int:
    """Writes, loads, prints; the exit code."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")} | {"JAX_PLATFORMS": "cpu"}
    me = [sys.executable, "-m", "benchmarks.host_memory"]
    with tempfile.TemporaryDirectory() as folder:
        for name, gib in (("whole", args.gib), ("warm", 0.0)):
            command = [*me, f"--write={folder}/{name}", f"--gib={gib}", f"--shard_mib={args.shard_mib}"]
            subprocess.run(command, cwd=ROOT, env=env, check=True)
        port, pipe = free_port(), {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}

        def how(rank):
            return f"127.0.0.1:{port},{args.processes},{rank}" if args.processes > 1 else "off"

        flags = [f"--load={folder}", f"--devices={args.devices}", *(["--stacked"] if args.stacked else [])]
        running = [subprocess.Popen([*me, *flags, f"--how={how(rank)}"], cwd=ROOT, env=env, **pipe) for rank in range(args.processes)]
        lines = [json.loads(next(line for line in output.splitlines() if line.startswith('{"process"'))) for output in finish(running)]
    for line in lines:
        print(json.dumps(line))
    return int(any(line["over_mib"] > args.slack_mib for line in lines))


def main() -> None:
    """The command, and the helpers that it starts itself as."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--shard_mib", type=int, default=256, help="largest file")
    parser.add_argument("--stacked", action="store_true", help="one leaf per weight with all layers in front")
    parser.add_argument("--slack_mib", type=float, default=16.0, help="that a process may hold beside share and largest tensor")
    for hidden in ("--write", "--load", "--how"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.write, args.gib, args.shard_mib)
    elif args.load:
        load(f"{args.load}/whole", f"{args.load}/warm", args.how, args.devices, args.stacked)
    else:
        sys.exit(measure(args))


if __name__ == "__main__":
    main()
