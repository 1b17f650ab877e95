"""Where the time of a workflow's step goes, beside a device game of the same model size.

    python -m benchmarks.workflow [--config=search_parallel] [--steps=12] [--imitation=50] [--rows=workflow,game,programs]

    workflow   medians over the steps behind the second: seconds of a step's parts, and tokens sampled per second of play
    game       the same of the config quickstart, whose play is one compiled function
    programs   what was compiled in each of the workflow's steps, by name: programs, and seconds of compilation

Parts of a workflow's play that overlap are CPU seconds of their threads: `controller_cpu` the event loop, `tools_cpu` the tools' threads,
`engine_cpu` the engine's host part and whatever XLA computes in its thread; `play_cpu` is the whole process's. `admit`, `decode` and `idle`
are wall seconds of the engine. Compilation is no part of a step's figures (steps 1 and 2 are left out), and there is no cache on disk, so
that `programs` shows all of it. One JSON line per row.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib
import json
import statistics
import subprocess
import sys
import threading
import time


class Programs:
    """Counts what is compiled, by the name of the function."""

    def __init__(self):
        import jax

        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        jax.monitoring.register_event_duration_secs_listener(self._compiled)

    def _compiled(self, event: str, seconds: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds[str(about.get("fun_name", "unknown"))].append(seconds)

    def take(self) -> dict[str, tuple[int, float]]:
        """Name -> (programs, seconds) since the last call."""
        taken, self.seconds = self.seconds, collections.defaultdict(list)
        return {name: (len(each), sum(each)) for name, each in sorted(taken.items(), key=lambda x: -sum(x[1]))}


def cpu_by_thread() -> dict[int, float]:
    """CPU seconds of this process's Python threads so far, by the number of the thread; of threads that ended, nothing."""
    out = {}
    for thread in threading.enumerate():
        if thread.ident is not None:
            try:
                out[thread.ident] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            except (OSError, ProcessLookupError):
                continue  # it ended meanwhile
    return out


def room_of(name: str) -> str:
    """Whose work a thread does."""
    for part, key in (("tools", "tool "), ("engine", "marl_llm engine"), ("learner", "MainThread")):
        if name.startswith(key):
            return part
    return "controller"


class Clock:
    """CPU seconds of threads by part. A thread that ends takes its seconds with it; those of tools stay for a while."""

    def __init__(self):
        self.before = cpu_by_thread()

    def parts(self) -> dict[str, float]:
        """Part -> CPU seconds since this was made."""
        now, names = cpu_by_thread(), {t.ident: t.name for t in threading.enumerate()}
        out: dict[str, float] = collections.defaultdict(float)
        for ident, seconds in now.items():
            out[room_of(names.get(ident, ""))] += seconds - self.before.get(ident, 0.0)
        return out


def team_of(config):
    """(plan, mesh, context of the team) as `experiments.train` makes them, without a cache of programs on disk."""
    from marl_llm.runs.base import check
    from marl_llm.runs.building import build_team, start_jax
    from marl_llm.runs.resolve import resolve

    check(config)
    mesh = start_jax(config, "")
    return mesh, lambda plan: build_team(plan, config, mesh), resolve


def engine_seconds(team) -> dict[str, float]:
    """Seconds of the team's engine so far, over all models."""
    stats = team._current.engine.stats()
    schedulers = list({id(scheduler): stats[name] for name, scheduler in team._current.engine._schedulers.items()}.values())
    out = {name: sum(scheduler.get(f"{name}_s", 0.0) for scheduler in schedulers) for name in ("admit", "decode", "swap", "compile")}
    out |= {name: sum(scheduler.get(name, 0) for scheduler in schedulers) for name in ("admit_programs", "steps", "compilations")}
    return out | {"idle": stats["engine"]["idle_s"]}


def run(config, steps: int, imitation: int) -> tuple[list[dict], list[dict]]:
    """(each step's seconds, each step's programs) of a config: imitation, then `steps` of play and update."""
    programs = Programs()
    mesh, make, resolve = team_of(config)
    rows, compiled = [], []
    with resolve(config, None) as plan, make(plan) as team:
        for step in range(imitation):
            team.sft_step(step, config.sft.tasks, config.sft.learning_rate)
        team.start_rl()
        compiled.append({"step": "start"} | programs.take())
        tasks, rate = config.rollout.tasks, config.optimizer.learning_rate
        for step in range(steps):
            if step == 1:  # as a run does: what lives as long as it is no work for the collector
                gc.collect()
                gc.freeze()
            hosted = hasattr(team, "_current")
            before = engine_seconds(team) if hosted and team._current.engine is not None else {}
            clock, tick, began = Clock(), time.perf_counter(), time.process_time()
            batch = team.play(step, step * tasks, tasks)
            tock = time.perf_counter()
            row = {"play": tock - tick, "play_cpu": time.process_time() - began}
            if hosted:
                cpu = clock.parts()
                row |= {name: x - before.get(name, 0.0) for name, x in engine_seconds(team).items()}
                cpu["controller"] += cpu.pop("learner", 0.0)  # whoever calls `play` waits, or runs the loop
                row |= {f"{part}_cpu": cpu[part] for part in ("controller", "tools", "engine")}
            tock = time.perf_counter()
            team.learn(batch, rate, rate)
            row["update"] = time.perf_counter() - tock
            row["tokens"], row["samples"] = float(batch.figures["sampled_tokens"]), float(batch.figures["samples"])
            built = programs.take()
            row["compile"] = sum(seconds for _, seconds in built.values())
            rows.append(row)
            compiled.append({"step": step + 1} | built)
        final = team.evaluate({}, "test", config.evaluation.final_tasks)
        compiled.append({"step": "test split", "tasks": len(final.outcomes)} | programs.take())
    return rows, compiled


def medians(rows: list[dict]) -> dict[str, float]:
    """Medians of the steps behind the second, and tokens per second of play."""
    later = rows[2:]
    out = {name: round(statistics.median(row[name] for row in later), 4) for name in later[0]}
    rates = [row["tokens"] / row["play"] for row in later]
    out["tokens_per_cpu_s"] = round(statistics.median(row["tokens"] / row["play_cpu"] for row in later))
    return out | {"tokens_per_s": round(statistics.median(rates)), "spread": [round(min(rates)), round(max(rates))]}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="search_parallel", help="of the workflow, a file under experiments/configs/")
    parser.add_argument("--steps", type=int, default=12, help="of play and update, at least 3")
    parser.add_argument("--imitation", type=int, default=50, help="steps of imitation before")
    parser.add_argument("--devices", type=int, default=1, help="of the game's run; the workflow's config has one")
    parser.add_argument("--rows", default="workflow,game,programs", help="some of workflow, game, programs")
    args = parser.parse_args()
    if args.steps < 3 or set(args.rows.split(",")) - {"workflow", "game", "programs"}:
        parser.error(f"--steps={args.steps} --rows={args.rows}: at least 3 steps, and the rows are workflow, game, programs")

    def named(name):
        return importlib.import_module(f"experiments.configs.{name}").get_config()

    def line(row, **values):
        return print(json.dumps({"benchmark": "workflow", "row": row} | values), flush=True)

    if {"workflow", "programs"} & set(args.rows.split(",")):
        rows, compiled = run(named(args.config), args.steps, args.imitation)
        if "workflow" in args.rows:
            line("workflow", **medians(rows))
        if "programs" in args.rows:
            for built in compiled:
                each = {name: (k, round(x, 2)) for name, (k, x) in ((n, v) for n, v in built.items() if isinstance(v, tuple)) if x >= 0.1}
                all_ = [v for v in built.values() if isinstance(v, tuple)]
                line("programs", step=built["step"], count=sum(k for k, _ in all_), seconds=round(sum(x for _, x in all_), 2), by_name=each)
        if "game" in args.rows:  # which takes another number of devices
            again = [f"--steps={args.steps}", "--imitation=2", "--rows=game", f"--devices={args.devices}"]
            subprocess.run([sys.executable, "-m", "benchmarks.workflow", *again], check=True)
    else:
        config = named("quickstart")
        config.devices = args.devices
        line("game", config="quickstart", devices=args.devices, **medians(run(config, args.steps, args.imitation)[0]))


if __name__ == "__main__":
    main()
