"""Kills a training run again and again at random moments, resumes it, and compares what it leaves with an uninterrupted run.

    python -m benchmarks.resume --kills=20 --seed=0
    python -m benchmarks.resume --kills=20 --processes=2 --signal=TERM --game=workflow --config.checkpoint.background=True
    python -m benchmarks.resume --kills=20 --game=workflow --config.rollout.batch_invariant=True
    python -m benchmarks.resume --kills=20 --game=workflow --config.devices=1 --config.rollout.max_staleness=1
    --config.recipe.rollout_correction=truncate

The run is a small one (Plan-Path on 3x3 maps, two models; or workflow A), with everything that a large one has: SFT, checkpoints,
evaluation, transcripts. Each kill is a SIGKILL or SIGTERM to a real process (of several joined ones, to any) at one of six moments: a
random time after its start (imports), after it took its directory (compilation, SFT, restoring), after a checkpoint began to be
written, when one above step 0 is whole, after a training step, or within an evaluation. `began_above_0` counts the resumptions that found
a whole checkpoint above step 0. The run is continued by the same command and by `--resume=DIR` in turn. Compared are every array of every
checkpoint, the lines of metrics.jsonl without their times, episodes.jsonl, episodes_tokens.jsonl, and evaluation.json without its times:
a compiled game's byte for byte, and a workflow's with `rollout.batch_invariant`; without it a workflow's numbers within `CLOSE`, because
in which
company a request is decoded depends on time, and its texts and counts exactly. After SIGTERM within the steps all processes must end with
143 and leave a checkpoint of a step that is not older than the last line of metrics.jsonl; after SIGKILL of one, the
others must end by themselves.

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
import threading
import time

from benchmarks.processes import CONFIGS, finish, launch

# of the runs, whose configs are those of `benchmarks.processes`
SETTINGS = ("devices=2", "evaluation.every=4", "evaluation.ablate_roles=True", "checkpoint.every=2", "checkpoint.keep=2")
WARM = {"game": ("sft.steps=60", "quick_compile=False"), "workflow": ("sft.steps=8",)}
CLOSE = 1e-4  # a workflow's parameters and figures, without
EXACT = "--config.rollout.batch_invariant=True"
TIMES, TIMED = ("wall_s", "cpu_s", "train_wall_s", "train_cpu_s", "seconds"), ("time/", "speed/", "programs/")  # keys of figures
GRACE_S = 120  # for a step, on a machine that has other things to do too: what is looked for here are lost states, not slow ones
STARVED_S = 300  # for the rest of what ends a process
FINISH_S = 3600  # for a run to its end
SLOW_S = 100  # until the last process has ended: what they said is printed then
UNJOINED_S = 60  # for processes one of which was killed while they started: they may still wait for it to join
EVALUATED = 4  # steps between two evaluations, as in the config
# after the process began, config.json, a checkpoint's folder, a whole checkpoint above step 0, a training step, one that is evaluated
MOMENTS = ("start", "warm", "write", "saved", "step", "evaluation")


def wait_for(process: subprocess.Popen, workdir: pathlib.Path, moment: str) -> None:
    """Until `moment` has come, or the process has ended."""
    def lines():
        return workdir.joinpath("metrics.jsonl").read_text().count('"train"') if (workdir / "metrics.jsonl").exists() else 0

    def writes():
        return any(workdir.joinpath("checkpoints").glob("[0-9]*.partial"))

    stale = set(workdir.joinpath("checkpoints").glob("*"))

    def whole():
        return {p for p in workdir.joinpath("checkpoints").glob("[1-9]*") if p.name.isdigit() and (p / "state.json").exists()}

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


def kill(
    running: list[subprocess.Popen], workdir: pathlib.Path, moment: str, dice: random.Random, slack_s: float, number: int
) -> dict | None:
    """Sends a signal to one of a run's processes at a random time after `moment`; None when it ended before that.

    Returns the `signal`, `seconds` from it to the end of the last process, the exit `codes`, and `wrong`, what should not have been.
    """
    wait_for(running[0], workdir, moment)
    after = dice.uniform(0, {"start": slack_s, "warm": slack_s, "write": 0.3, "saved": 0.0, "step": 0.5, "evaluation": 0.1}[moment])
    victim = dice.choice(running)
    try:
        victim.wait(timeout=after)
    except subprocess.TimeoutExpired:
        began, step = time.monotonic(), newest(workdir)
        victim.send_signal(number)
        wrong, early, outputs, ends = "", moment in ("start", "warm"), [""] * len(running), [0.0] * len(running)

        def listen(place: int) -> None:
            outputs[place] = running[place].communicate()[0]
            ends[place] = time.monotonic() - began

        threads = [threading.Thread(target=listen, args=(place,)) for place in range(len(running))]
        for thread in threads:
            thread.start()
        until = began + (UNJOINED_S if early else GRACE_S + STARVED_S)
        for place, thread in enumerate(threads):
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():  # before the processes have joined, it is the launcher who ends the others
                wrong = "" if early else f"after {moment} process {place} went on"
                running[place].kill()
                thread.join()
        codes = [process.returncode for process in running]
        at = ", ".join(f"{code} after {end:.1f} s" for code, end in zip(codes, ends))
        name = signal.Signals(number).name
        whom = f"process {running.index(victim)} of {len(running)}"
        print(f"{moment}, checkpoint {step}: {name} to {whom}: {at}", file=sys.stderr, flush=True)
        stepping = any("stopped after step" in text for text in outputs)
        if number == signal.SIGTERM and stepping and codes != [143] * len(running):
            wrong = f"SIGTERM ended {codes}"
        if number == signal.SIGTERM and stepping and not checkpoint_is_newest(workdir):
            wrong = "no checkpoint of the last step"
        if wrong or max(ends) > SLOW_S:
            print(f"{wrong or 'slow'}:", *(text[-3000:] for text in outputs), sep="\n", file=sys.stderr, flush=True)
        return {"signal": name, "seconds": max(ends), "codes": codes, "stepping": stepping, "wrong": wrong}
    return None


def newest(workdir: pathlib.Path) -> int:
    """The step of the last whole checkpoint; -1: none."""
    there = workdir.glob("checkpoints/*")
    return max((int(path.name) for path in there if path.name.isdigit() and (path / "state.json").exists()), default=-1)


def checkpoint_is_newest(workdir: pathlib.Path) -> bool:
    """Whether no training step was recorded after the last whole checkpoint."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return max((line["step"] for line in lines if line["phase"] == "train"), default=0) <= newest(workdir)


def arrays(workdir: pathlib.Path) -> dict:
    """Every array of every checkpoint: parameters and optimizer states."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    out, reader = {}, ocp.PyTreeCheckpointer()
    for folder in sorted((workdir / "checkpoints").glob("*/policies/*")):
        described = reader.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described)  # on any number of devices
        tree = reader.restore(folder, restore_args=as_numpy)
        for where, leaf in jax.tree_util.tree_leaves_with_path(tree):
            out[f"{folder.parent.parent.name}/{folder.name}{jax.tree_util.keystr(where)}"] = np.asarray(leaf)
    return out


def equal(first, second, bound: float) -> bool:
    """Arrays or JSON values: the same to the last bit, or with a bound their numbers within it."""
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key], bound) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(equal, first, second, [bound] * len(first)))
    if hasattr(first, "dtype") and hasattr(second, "dtype"):
        if first.shape != second.shape or first.dtype != second.dtype:
            return False
        return first.tobytes() == second.tobytes() if not bound else bool((abs(first - second) <= bound * (1 + abs(second))).all())
    if bound and isinstance(first, float) and isinstance(second, float):
        return first == second or abs(first - second) <= bound * (1 + abs(second))
    return first == second


def _untimed(value):
    if isinstance(value, list):
        return [_untimed(x) for x in value]
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if k not in TIMES and not k.startswith(TIMED) and not k.endswith("/seconds")}
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


def differences(first: pathlib.Path, second: pathlib.Path, bound: float = 0.0) -> list[str]:
    """Names of the arrays and lines in which two runs differ; empty when they agree in all."""
    out = []
    a, b = arrays(first), arrays(second)
    out += [name for name in sorted(set(a) | set(b)) if name not in a or name not in b or not equal(a[name], b[name], bound)]
    a, b = records(first), records(second)
    for name in sorted(set(a) | set(b)):
        left, right = a.get(name, []), b.get(name, [])
        if len(left) != len(right):
            out.append(f"{name}: {len(left)} lines, {len(right)} lines")
        out += [f"{name} line {i + 1}" for i, (x, y) in enumerate(zip(left, right)) if not equal(x, y, bound)]
    return out


def interrupted(
    flags: list[str], workdir: pathlib.Path, moments: list[str], dice: random.Random, slack_s: float,
    processes: int = 1, numbers=(), ends: list | None = None,
) -> tuple[list[str], list[int], str]:  # fmt: skip
    """Runs to the end with one kill at each of `moments`, each by the signal of the same place in `numbers` (none: SIGKILL).

    Returns:
      The moments at which it was really killed, the last whole checkpoint that the process after each kill found (-1: none), what the
      last process said. What `kill` saw goes to `ends`.
    """
    killed, steps, output, ends = [], [], "", [] if ends is None else ends
    for number, moment in enumerate([*moments, None]):
        if number:
            steps.append(newest(workdir))
        known = (workdir / "config.json").exists()
        kept = [f for f in flags if f.startswith(("--compilation_cache", "--lost_after_s", "--grace_s"))]
        resumes = known and number % 2 == 0
        running = launch(processes, *([f"--resume={workdir}", *kept] if resumes else [*flags, f"--workdir={workdir}"]))
        if moment is None:
            output = finish(running, FINISH_S)[0]
        elif end := kill(running, workdir, moment, dice, slack_s, numbers[number] if numbers else signal.SIGKILL):
            killed.append(moment)
            ends.append(end)
        else:
            finish(running, FINISH_S)
            break
    return killed, steps[: len(killed)], output


def counts(killed: list[str], steps: list[int], ends: list[dict]) -> dict:
    """How many signals were sent, when, what the next processes found, and the longest time until all had ended, by signal."""
    seconds = {name: [end["seconds"] for end in ends if end["signal"] == name] for name in sorted({end["signal"] for end in ends})}
    return {
        "kills": len(killed),
        "signals": {name: len(each) for name, each in seconds.items()},
        "at": {moment: killed.count(moment) for moment in MOMENTS},
        "resumed": len(killed),
        "began_above_0": sum(step > 0 for step in steps),
        "began_at": steps,
        "stopped_within_steps": sum(end["stepping"] for end in ends),
        "longest_end_s": {name: round(max(each), 1) for name, each in seconds.items()},
    }


def main() -> None:
    """Rounds of kills until there were enough."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--per_round", type=int, default=10, help="kills of one run before it may end")
    parser.add_argument("--processes", type=int, default=1, help="joined ones")
    parser.add_argument("--lost_after_s", type=float, default=30, help="until the others miss a killed process")
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM", "both"])
    parser.add_argument("--game", default="game", choices=list(WARM))
    options, given = parser.parse_known_args()
    if unknown := [flag for flag in given if not flag.startswith("--config.")]:
        parser.error(f"{unknown[0]} is unknown; flags of the run begin with --config.")
    import jax  # the version only; the runs are other processes

    dice, bound = random.Random(options.seed), CLOSE if options.game == "workflow" and EXACT not in given else 0.0
    kinds = {"KILL": [signal.SIGKILL], "TERM": [signal.SIGTERM], "both": [signal.SIGKILL, signal.SIGTERM]}[options.signal]
    unsent = (kinds * options.kills)[: options.kills]  # as many of each
    dice.shuffle(unsent)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "tiny.py").write_text(CONFIGS[options.game])
        flags = [f"--config={folder / 'tiny.py'}", f"--compilation_cache={folder / 'cache'}"]
        flags += [f"--lost_after_s={options.lost_after_s:g}", f"--grace_s={GRACE_S}"]
        flags += [f"--config.{setting}" for setting in (*SETTINGS, *WARM[options.game], f"steps={options.steps}")] + given
        began = time.time()
        finish(launch(options.processes, *flags, f"--workdir={folder / 'whole'}"), FINISH_S)
        again = time.time()
        finish(launch(options.processes, *flags, f"--workdir={folder / 'again'}"), FINISH_S)  # every program is compiled, as below
        whole_s = time.time() - again
        differing = [f"run again: {name}" for name in differences(folder / "whole", folder / "again", bound)]
        killed, figures, ends, rounds = [], [], [], 0
        while len(killed) < options.kills:
            rounds += 1
            count = min(options.per_round, options.kills - len(killed))
            moments = [dice.choice(MOMENTS) for _ in range(count)]
            place = folder / f"round{rounds}"
            seen: list[dict] = []
            more, steps, _ = interrupted(flags, place, moments, dice, whole_s / 3, options.processes, unsent, seen)
            unsent = unsent[len(more) :]
            killed, figures, ends = killed + more, figures + steps, ends + seen
            differing += [f"round {rounds}: {name}" for name in differences(folder / "whole", place, bound)]
            differing += [f"round {rounds}: {end['wrong']}" for end in seen if end["wrong"]]
            outcome = {
                **counts(killed, figures, ends),
                "runs_completed": rounds,
                "given": given,
                "arrays_compared": rounds * len(arrays(folder / "whole")),
                **{name: getattr(options, name) for name in ("signal", "processes", "game", "seed", "steps")},
                "equal": not differing,
                "bound": bound,
                "differences": differing[:20],
                "seconds": round(time.time() - began),
                "hardware": f"{os.cpu_count()} CPU cores ({platform.machine()})",
                "jax": jax.__version__,
            }
            print(f"round {rounds}: {json.dumps(outcome)}", file=sys.stderr, flush=True)
    print(json.dumps(outcome))
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
