"""One run on many processes: the same samples and parameters however the devices are divided, and a continued run on another division.

    python -m benchmarks.processes                              1x4, 2x2 and 4x1 processes x devices, of each kind
    python -m benchmarks.processes --kinds=game,ppo,workflow    a compiled game, PPO with a critic and adapters on it, workflow A
    python -m benchmarks.processes --splits=1x2,2x1 --steps=3
    python -m benchmarks.processes --mesh=2x2                   parameters split: 2 along fsdp, 2 along tensor

Every process is a real one with forced CPU devices, joined over gloo on this machine. Compared with the first split are the figures of each
training step and every array of the last checkpoint. Prints one JSON line; exit code 1 when a split differs by more than the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
GAME = '''
from marl_llm.runs.base import base_config


def get_config(arg=None):
    c = base_config("tiny", game="plan_path", recipe="at_grpo")
    c.game.height = c.game.width = 3
    c.game.min_distance = 2
    c.game.max_distance = 4
    c.game.max_moves = 2
    c.game.max_turns = 2
    c.model.preset = "nano"
    c.recipe.group_size = 4
    c.recipe.entropy_coef = 0.02
    c.sft.tasks = 8
    return rest(c)
'''
PPO = GAME.replace('recipe="at_grpo"', 'recipe="ppo"').replace("    c.recipe.group_size = 4\n", "    c.model.lora_rank = 4\n")
WORKFLOW = '''
from experiments.configs.search_parallel import get_config as small


def get_config(arg=None):
    c = small("smoke")
    c.model.preset = "nano"
    return rest(c)
'''
REST = '''

def rest(c):
    c.quick_compile = True
    c.devices = 4
    c.steps = 3
    c.rollout.tasks = 4
    c.optimizer.minibatch = 4
    c.sft.steps = 2
    c.evaluation.every = 100
    c.evaluation.ablate_roles = False
    c.evaluation.tasks = c.evaluation.final_tasks = 4
    c.evaluation.transcripts = 1
    c.checkpoint.every = 1
    c.checkpoint.keep = 5
    return c
'''
CONFIGS = {"game": GAME + REST, "ppo": PPO + REST, "workflow": WORKFLOW + REST}
FIGURES = ("samples", "success", "turns", "sampled_tokens")


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launch(count: int, *flags: str) -> list[subprocess.Popen]:
    """`count` processes of `experiments.train`, joined where there are several; stderr and stdout of each go to its own pipe."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")} | {"JAX_PLATFORMS": "cpu"}
    port = free_port()

    def together(rank):
        return [f"--distributed=127.0.0.1:{port},{count},{rank}"] if count > 1 else []

    return [
        subprocess.Popen(
            [sys.executable, "-m", "experiments.train", *flags, *together(rank)],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen], timeout_s: float = 600) -> list[str]:
    """What each printed, all having ended well. Raises `RuntimeError` otherwise; none is left behind."""
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{' '.join(process.args)} ended with {process.returncode}:\n{text}")
    return outputs


def arrays(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its name."""
    import jax
    import orbax.checkpoint as ocp

    by_name = {}
    for folder in sorted((workdir / "checkpoints" / str(step) / "policies").iterdir()):
        reader = ocp.PyTreeCheckpointer()
        shapes = reader.metadata(folder).item_metadata.tree
        args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), shapes)
        leaves = jax.tree_util.tree_leaves_with_path(reader.restore(folder, restore_args=args))
        by_name |= {f"{folder.name}{jax.tree_util.keystr(path)}": np.asarray(leaf) for path, leaf in leaves}
    return by_name


def figures(workdir: pathlib.Path) -> list[dict]:
    """What each training step counted."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: line[name] for name in (*FIGURES, "step")} for line in lines if line["phase"] == "train"]


def distance(a: pathlib.Path, b: pathlib.Path, step: int) -> float:
    """Largest difference between the parameters of two runs after a step; optimizer moments are no parameters."""
    first, second = arrays(a, step), arrays(b, step)
    if first.keys() != second.keys():
        return float("inf")
    return max(float(np.max(np.abs(x - second[name]), initial=0.0)) for name, x in first.items() if "params" in name)


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--splits", default="1x4,2x2,4x1")
    parser.add_argument("--kinds", default=",".join(CONFIGS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--mesh", default="1x1", help="fsdp x tensor, of the devices of all processes together")
    parser.add_argument("--bound", type=float, default=1e-6)
    options = parser.parse_args()
    splits = [tuple(map(int, split.split("x"))) for split in options.splits.split(",")]
    fsdp, tensor = map(int, options.mesh.split("x"))
    inner = [f"--config.mesh.fsdp={fsdp}", f"--config.mesh.tensor={tensor}"]
    rows, began = [], time.time()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for kind in options.kinds.split(","):
            (folder / f"{kind}.py").write_text(CONFIGS[kind])
            flags = [f"--config={folder / f'{kind}.py'}", f"--compilation_cache={folder / 'cache'}"]

            def along(count, each):
                return [*inner, f"--config.devices={count * each // (fsdp * tensor)}"]

            def run(count, each, *more):
                finish(launch(count, *more, *along(count, each)))

            places = {split: folder / f"{kind}_{split[0]}x{split[1]}" for split in splits}
            for split, place in places.items():
                run(*split, *flags, f"--workdir={place}", f"--config.steps={options.steps}")
                first = places[splits[0]]
                rows.append({"kind": kind, "split": "x".join(map(str, split)), "same_figures": figures(first) == figures(place)})
                rows[-1]["parameters"] = distance(first, place, options.steps)
                print(rows[-1], file=sys.stderr, flush=True)
    good = all(row["same_figures"] and row["parameters"] <= options.bound for row in rows)
    hardware = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    page = {"mesh": options.mesh, "splits": rows, "bound": options.bound, "equal": good, "hardware": hardware}
    print(json.dumps(page | {"seconds": round(time.time() - began)}))
    sys.exit(not good)


if __name__ == "__main__":
    main()
