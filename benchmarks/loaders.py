"""The loaders of problems at size: rows per second, memory, and what becomes of rows that cannot be used. One line of JSON.

  python -m benchmarks.loaders                    # 100,000 rows of APPS and of Polaris
  python -m benchmarks.loaders --rows=2000

Rows are in the public schemas of APPS (three tests, one solution, 1.5 KB) and Polaris (an integer; every 50th a fraction in LaTeX). Every
100th is hostile and left out. `ratio_to_json` divides the seconds by those that `json.loads` of the same lines takes, `ratio_to_file` the
memory by the size of the file; `refused_share` is what was left out. Each file is measured in a process of its own.
"""

import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("rows", 100_000, "rows of each file")
flags.DEFINE_string("only", None, "measure this file in this process: PATH of one that is named after its schema")


def apps(number: int) -> dict:
    """A row of APPS."""
    tests = {"inputs": [f"{number} {x}\n" for x in range(3)], "outputs": [f"{number + x}\n" for x in range(3)]}
    hostile = number % 100 == 99
    return {
        "problem_id": number,
        "question": f"Given {number} and a second number, print their sum. " + "All numbers are integers. " * 40,
        "solutions": json.dumps(["a, b = map(int, input().split())\nprint(a + b)"]),
        "input_output": "" if hostile else json.dumps(tests),
        "difficulty": "introductory",
        "url": "",
        "starter_code": "",
    }


def polaris(number: int) -> dict:
    """A row of Polaris-Dataset-53K."""
    answer = "" if number % 100 == 99 else f"\\frac{{{number}}}{{7}}" if number % 50 == 0 else str(number)
    return {"problem": f"Find the number {number} of the series. " + "It begins with one. " * 20, "answer": answer, "difficulty": "5/8"}


SCHEMAS = {"apps": apps, "polaris": polaris}


def lines(make, count: int) -> Iterator[str]:
    return (json.dumps(make(number)) + "\n" for number in range(count))


def measure(path: pathlib.Path) -> dict:
    """Seconds and peak memory of loading one file."""
    start = time.perf_counter()
    with path.open() as file:
        for line in file:
            json.loads(line)
    plain = time.perf_counter() - start
    from marl_llm.games.coding import load_contests
    from marl_llm.games.maths import load_maths, understood_by
    from marl_llm.tools.maths import MathsChecker

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu_start = time.perf_counter(), time.process_time()
    if path.stem == "apps":
        tasks, dropped = load_contests(path, "train", bad_rows="drop")
    else:
        with MathsChecker() as checker:
            tasks, dropped = load_maths(path, "train", understood_by(checker), bad_rows="drop")
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = len(tasks) + sum(dropped.values())
    return {
        "rows": rows,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "ratio_to_json": round(seconds / plain, 2),
        "peak_mb": peak // 1024,
        "peak_over_imports_mb": (peak - before) // 1024,
        "ratio_to_file": round((peak - before) * 1024 / path.stat().st_size, 2),
        "file_mb": path.stat().st_size >> 20,
        "refused_share": round(sum(dropped.values()) / rows, 4),
    }


def main(_) -> None:
    if FLAGS.only:
        print(json.dumps(measure(pathlib.Path(FLAGS.only))))
        return
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, make in SCHEMAS.items():
            path = pathlib.Path(folder) / f"{name}.jsonl"
            with path.open("w") as file:
                file.writelines(lines(make, FLAGS.rows))
            command = [sys.executable, "-m", "benchmarks.loaders", f"--only={path}"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures[name] = json.loads(done.stdout)
            path.unlink()
    print(json.dumps({"benchmark": "loaders", "cpus": os.cpu_count(), "machine": platform.processor() or platform.machine(), **figures}))


if __name__ == "__main__":
    app.run(main)
