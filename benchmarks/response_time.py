"""Response time and speed of trained teams: one task at a time on an idle engine (MAGRPO, Tables 1 and 2).

    python -m benchmarks.response_time --run=runs/parallel --run=runs/sequential [--step=0] [--tasks=30] [--temperature=1]

Prints one JSON line per run. `response_s` is the wall time of a play, tools included, and `tokens_per_s` the tokens of all agents
over it, both with quartiles over tasks; `cpu_s` this process's CPU seconds per play. `critical_path_tokens`, the tokens that had to
be drawn one after another, does not depend on the machine. All tasks are played twice, with the same draws, and the second pass is
timed, in which nothing is compiled. `--step=0` is the supervised warm-up, before any reinforcement.
"""

from __future__ import annotations

import json
import statistics
import time

from absl import app, flags, logging

RUNS = flags.DEFINE_multi_string("run", [], "run directory; may be given many times")
STEP = flags.DEFINE_integer("step", None, "checkpoint's step; default: the newest")
TASKS = flags.DEFINE_integer("tasks", 30, "test tasks", lower_bound=1)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0 is greedy", lower_bound=0.0)


def timed(run: str) -> dict:
    """Figures of one run. Raises `ConfigError` for a run that cannot be opened."""
    from marl_llm.runs.building import opened

    seconds, cpu, speed, tokens, critical, scores = [], [], [], [], [], []
    with opened(run, STEP.value) as (_, _, team, step):
        for task in [*range(TASKS.value)] * 2:
            start, start_cpu = time.perf_counter(), time.process_time()
            record = team.evaluate({}, "test", 1, first=task, temperature=TEMPERATURE.value)
            took, took_cpu = time.perf_counter() - start, time.process_time() - start_cpu
            figures = record.outcomes[0].team
            seconds.append(took)
            cpu.append(took_cpu)
            tokens.append(figures["sampled_tokens"])
            speed.append(figures["sampled_tokens"] / took)
            critical.append(figures["critical_path_tokens"])
            scores.append(record.outcomes[0].score)
    second = slice(TASKS.value, None)
    return {
        "run": run,
        "step": step,
        "workflow": team.environment.workflow.name,
        "response_s": quartiles(seconds[second]),
        "tokens_per_s": quartiles(speed[second]),
        "cpu_s": round(statistics.fmean(cpu[second]), 4),
        "sampled_tokens": statistics.fmean(tokens[second]),
        "critical_path_tokens": statistics.fmean(critical[second]),
        record.headline: statistics.fmean(scores[second]),
    }


def quartiles(values: list[float]) -> list[float]:
    """Lower quartile, median and upper quartile, to three places."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return [round(low, 3), round(middle, 3), round(high, 3)]


def main(argv) -> None:
    """Prints the lines."""
    logging.set_verbosity(logging.WARNING)
    for run in RUNS.value:
        print(json.dumps(timed(run)), flush=True)


if __name__ == "__main__":
    app.run(main)
