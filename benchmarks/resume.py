"""Kills a training run again and again at random moments, resumes it, and compares what it leaves with an uninterrupted run.

    python -m benchmarks.resume --kills=20 --seed=0

The run is a small one (Plan-Path on 3x3 maps, two models), with everything that a large one has: warm start, checkpoints,
evaluation, transcripts. Each kill is a SIGKILL to a real process at one of six moments: a random time after its start (imports), after
it took its directory (compilation, warm start, restoring), after a checkpoint began to be written, when one above step 0 is whole, after a
training step, or within an evaluation. `began_above_0` counts the resumptions that found a whole checkpoint above step 0. The run is
continued by the same command and by `--resume=DIR` in turn. Compared are every array of every checkpoint (byte for byte), the lines of
metrics.jsonl without their times, episodes.jsonl, episodes_tokens.jsonl, and evaluation.json without its times.

Prints one JSON line; exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = '''
from experiments.base import base_config


def get_config(arg=None):
    c = base_config("tiny", game="plan_path", recipe="at_grpo")
    c.steps = int(arg or 8)
    c.devices = 2
    c.game.height = c.game.width = 3
    c.game.min_distance = 2
    c.game.max_distance = 4
    c.game.max_moves = 2
    c.game.max_turns = 2
    c.model.preset = "nano"
    c.recipe.branches = 4
    c.rollout.tasks = 4
    c.optimizer.minibatch = 4
    c.recipe.entropy_coef = 0.02
    c.warm_start.steps = 60
    c.warm_start.tasks = 8
    c.evaluation.every = 4
    c.evaluation.tasks = 4
    c.evaluation.final_tasks = 4
    c.evaluation.transcripts = 1
    c.checkpoint.every = 2
    return c
'''
EVALUATED = 4  # steps between two evaluations, as in the config
# after the process began, config.json, a checkpoint's folder, a whole checkpoint above step 0, a training step, one that is evaluated
MOMENTS = ("start", "warm", "write", "saved", "step", "evaluation")


def launch(*flags: str) -> subprocess.Popen:
    """Starts `python -m experiments.train` with flags; stderr goes to a pipe that `finish` reads."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.train", *flags]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> str:
    """Waits for a run to end well and returns what it printed. Raises `RuntimeError` otherwise."""
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(process.args)} ended with {process.returncode}:\n{said}")
    return said


def kill(process: subprocess.Popen, workdir: pathlib.Path, moment: str, dice: random.Random, slack_s: float) -> bool:
    """SIGKILLs a run at a random time after `moment`; False when it ended before that."""
    lines = lambda: workdir.joinpath("metrics.jsonl").read_text().count('"train"') if (workdir / "metrics.jsonl").exists() else 0  # noqa: E731
    writes = lambda: any(workdir.joinpath("checkpoints").glob("[0-9]*.partial"))  # noqa: E731
    stale = set(workdir.joinpath("checkpoints").glob("*"))
    whole = lambda: {p for p in workdir.joinpath("checkpoints").glob("[1-9]*") if p.name.isdigit() and (p / "state.json").exists()}  # noqa: E731
    seen, evaluated = None, lines()

    def arrived():
        nonlocal seen
        if moment in ("start", "warm"):
            return moment == "start" or (workdir / "config.json").exists()
        if moment == "write":  # not the leftover of an earlier kill
            return writes() and bool(set(workdir.joinpath("checkpoints").glob("*")) - stale)
        if moment == "saved":
            return bool(whole() - stale)
        now = lines()
        if moment == "evaluation" and (now % EVALUATED or now == evaluated):
            return False
        seen = now if seen is None or now < seen else seen
        return now > seen

    while process.poll() is None and not arrived():
        time.sleep(0.002)
    after = dice.uniform(0, {"start": slack_s, "warm": slack_s, "write": 0.3, "saved": 0.0, "step": 0.5, "evaluation": 0.1}[moment])
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return process.returncode == -signal.SIGKILL


def arrays(workdir: pathlib.Path) -> dict[str, bytes]:
    """Every array of every checkpoint: parameters and optimizer states, with shape and type."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    out, reader = {}, ocp.PyTreeCheckpointer()
    for folder in sorted((workdir / "checkpoints").glob("*/policies/*")):
        described = reader.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described)  # on any number of devices
        tree = reader.restore(folder, restore_args=as_numpy)
        for where, leaf in jax.tree_util.tree_leaves_with_path(tree):
            leaf = np.asarray(leaf)
            name = f"{folder.parent.parent.name}/{folder.name}{jax.tree_util.keystr(where)}"
            out[name] = f"{leaf.shape} {leaf.dtype} ".encode() + leaf.tobytes()
    return out


def _untimed(value):
    if isinstance(value, dict):
        timed = lambda k: k in ("wall_s", "cpu_s", "train_wall_s", "train_cpu_s") or k.startswith(("time/", "speed/", "programs/"))  # noqa: E731
        return {k: _untimed(v) for k, v in value.items() if not timed(k)}
    return value


def records(workdir: pathlib.Path) -> dict[str, list]:
    """What a run wrote besides arrays, file by file and line by line, without times."""
    out = {}
    for name in ("metrics.jsonl", "episodes.jsonl", "episodes_tokens.jsonl"):
        out[name] = [_untimed(json.loads(line)) for line in (workdir / name).read_text().splitlines()]
    out["evaluation.json"] = [_untimed(json.loads((workdir / "evaluation.json").read_text()))]
    for path in sorted((workdir / "checkpoints").glob("*/state.json")):
        out[f"{path.parent.name}/state.json"] = [_untimed(json.loads(path.read_text()))]
    return out


def differences(one: pathlib.Path, two: pathlib.Path) -> list[str]:
    """Names of the arrays and lines in which two runs differ; empty when they agree in all."""
    out = []
    a, b = arrays(one), arrays(two)
    out += [name for name in sorted(set(a) | set(b)) if a.get(name) != b.get(name)]
    a, b = records(one), records(two)
    for name in sorted(set(a) | set(b)):
        left, right = a.get(name, []), b.get(name, [])
        if len(left) != len(right):
            out.append(f"{name}: {len(left)} lines, {len(right)} lines")
        out += [f"{name} line {i + 1}" for i, (x, y) in enumerate(zip(left, right)) if x != y]
    return out


def interrupted(
    flags: list[str], workdir: pathlib.Path, moments: list[str], dice: random.Random, slack_s: float
) -> tuple[list[str], list[int], str]:
    """Runs to the end with one kill at each of `moments`.

    Returns:
      The moments at which it was really killed, the last whole checkpoint that the process after each kill found (-1: none), and what the
      last process said.
    """
    killed, found, said = [], [], ""
    for number, moment in enumerate([*moments, None]):
        if number:
            found.append(max((int(p.name) for p in workdir.glob("checkpoints/*") if p.name.isdigit()), default=-1))
        known = (workdir / "config.json").exists()
        cache = [f for f in flags if f.startswith("--compilation_cache")]
        process = launch(f"--resume={workdir}", *cache) if known and number % 2 == 0 else launch(*flags, f"--workdir={workdir}")
        if moment is None:
            said = finish(process)
        elif kill(process, workdir, moment, dice, slack_s):
            killed.append(moment)
        elif process.returncode:
            raise RuntimeError(f"the run ended by itself with {process.returncode}:\n{process.communicate()[0]}")
        else:
            break
    return killed, found[: len(killed)], said


def main() -> None:
    """Rounds of kills until there were enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--per_round", type=int, default=10, help="kills of one run before it may end")
    options = parser.parse_args()
    import jax  # the version only; the runs are other processes

    dice = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "tiny.py").write_text(CONFIG)
        flags = [f"--config={folder / 'tiny.py'}:{options.steps}", f"--compilation_cache={folder / 'cache'}"]
        began = time.time()
        finish(launch(*flags, f"--workdir={folder / 'whole'}"))
        again = time.time()
        finish(launch(*flags, f"--workdir={folder / 'again'}"))  # with every program compiled, as those below find them
        whole_s = time.time() - again
        differing = [f"run again: {name}" for name in differences(folder / "whole", folder / "again")]
        killed, found, rounds = [], [], 0
        while len(killed) < options.kills:
            rounds += 1
            count = min(options.per_round, options.kills - len(killed))
            moments = [dice.choice(MOMENTS) for _ in range(count)]
            more, steps, _ = interrupted(flags, folder / f"round{rounds}", moments, dice, slack_s=whole_s / 3)
            killed, found = killed + more, found + steps
            differing += [f"round {rounds}: {name}" for name in differences(folder / "whole", folder / f"round{rounds}")]
            print(f"round {rounds}: {len(killed)} kills, {len(differing)} differences", file=sys.stderr)
        outcome = {
            "kills": len(killed),
            "at": {moment: killed.count(moment) for moment in MOMENTS},
            "resumed": len(killed),
            "began_above_0": sum(step > 0 for step in found),
            "began_at": found,
            "runs_completed": rounds,
            "arrays_compared": rounds * len(arrays(folder / "whole")),
            "byte_equal": not differing,
            "differences": differing[:20],
            "seed": options.seed,
            "steps": options.steps,
            "seconds": round(time.time() - began),
            "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
            "jax": jax.__version__,
        }
    print(json.dumps(outcome))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
