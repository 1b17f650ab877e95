"""The workflow controller alone: what it adds to a call, and whether one slow tool slows others.

    python -m benchmarks.controller [--rows=overhead,slow_tool] [--instances=1000] [--repeats=3]

Prints one JSON line per row. The model answers at once and so do the tools, so that all the time is the controller's: prompts rendered and
encoded, requests made, responses decoded and parsed, events kept. `ms_per_call` counts role calls only, so the tools' share is in it;
`cpu_ms_per_call` is the process's CPU time, which a busy machine does not change.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import numpy as np
from absl import app, flags

from marl_llm.sampling.requests import Completion, Request
from marl_llm.text import ByteTokenizer
from marl_llm.workflows import Controller, PlainText, Role, Task, Workflow, plain, repeat, shared, tool

ROWS = flags.DEFINE_list("rows", ["overhead", "slow_tool"], "rows to run")
INSTANCES = flags.DEFINE_integer("instances", 1000, "instances under way at once, for the overhead")
REPEATS = flags.DEFINE_integer("repeats", 3, "runs of each figure; the median is printed, and the best")

TOKENIZER = ByteTokenizer(specials=("<eos>",), stops=("<eos>",))
TOKENS = np.asarray([*TOKENIZER.encode("a plan of four words"), TOKENIZER.eos_id], np.int32)
ZEROS = np.zeros(TOKENS.size)


class Instant:
    """A model that answers after `seconds`, always the same."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(self.seconds)
        return Completion(TOKENS, ZEROS, ZEROS, ZEROS, "stop", 0)


async def verify(plan: str) -> str:
    """An asynchronous tool that is done at once."""
    return f"{len(plan)} letters"


def threaded(plan: str) -> str:
    """The same as a plain function, which the controller runs in a thread."""
    return f"{len(plan)} letters"


def team(check, **options) -> Workflow:
    """A planner and a checker's report, four rounds."""
    planner = Role("planner", "{question}\nLast report: {report}\nPlan:", parse=plain("plan"), writes={"plan": ""})
    body = repeat(planner, tool(check, "report", name="check", **options), at_most=4)
    return Workflow("bench", body, inputs=("question",), start={"report": "none"})


def overhead() -> list[dict]:
    """Milliseconds per role call, with tools in the loop and in threads."""
    rows = []
    for name, check in (("async", verify), ("thread", threaded)):
        seconds, cpu = [], []
        for _ in range(REPEATS.value):
            workflow = team(check)
            with Controller(workflow, shared(workflow), Instant(), PlainText(TOKENIZER, TOKENIZER.stop_ids)) as controller:
                tasks = [Task(i, {"question": f"Question {i}: what is there to do?"}) for i in range(INSTANCES.value)]
                start, cpu_start = time.perf_counter(), time.process_time()
                rollout = controller.play(tasks)
                seconds.append(time.perf_counter() - start)
                cpu.append(time.process_time() - cpu_start)
            calls = sum(len(way.calls) for way in rollout.trajectories)
        rows.append(
            {
                "row": f"overhead, {name} tools",
                "instances": INSTANCES.value,
                "calls": calls,
                "ms_per_call": 1e3 * statistics.median(seconds) / calls,
                "best_ms_per_call": 1e3 * min(seconds) / calls,
                "cpu_ms_per_call": 1e3 * statistics.median(cpu) / calls,
            }
        )
    return rows


def slow_tool() -> list[dict]:
    """Seconds that 100 instances of a model of 0.25 s per answer take, alone and beside one whose tool sleeps 5 s."""

    def run(sleeps: bool) -> tuple[float, float]:
        ends: dict[str, float] = {}

        def check(question: str, plan: str) -> str:
            if sleeps and question == "sleep" and question not in ends:
                time.sleep(5)
            ends[question] = time.perf_counter()
            return f"{len(plan)} letters"

        workflow = team(check)
        names = [*(f"question {i}" for i in range(100)), "sleep"]
        with Controller(workflow, shared(workflow), Instant(0.25), PlainText(TOKENIZER, TOKENIZER.stop_ids)) as controller:
            start = time.perf_counter()
            controller.play([Task(i, {"question": name}) for i, name in enumerate(names)])
        return max(end for name, end in ends.items() if name != "sleep") - start, ends["sleep"] - start

    pairs = [(run(False), run(True)) for _ in range(REPEATS.value)]
    alone, beside = (statistics.median(pair[k][0] for pair in pairs) for k in (0, 1))
    return [
        {
            "row": "one tool sleeps 5 s",
            "others_alone_s": alone,
            "others_beside_s": beside,
            "slowdown": statistics.median(b[0] / a[0] for a, b in pairs) - 1,
            "sleeper_s": statistics.median(pair[1][1] for pair in pairs),
        }
    ]


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    rows = {"overhead": overhead, "slow_tool": slow_tool}
    for name in ROWS.value:
        if name not in rows:
            raise app.UsageError(f"unknown row {name!r}; the rows are {', '.join(rows)}")
        for row in rows[name]():
            print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}), flush=True)


if __name__ == "__main__":
    app.run(main)
