"""How long a newcomer waits: imports, --help, and the first optimisation steps with an empty and with a filled compilation cache.

    python -m benchmarks.start [--config=experiments/configs/quickstart.py] [--repeats=3] [--nosteps]

Prints one JSON line: seconds of wall time, medians over the repeats. `help_s` has every command of `python -m marl_llm`.
`foreign` has those of `FOREIGN` that `pip install marl_llm` without extras would bring along (goal: none). `first_step` is the first
optimisation step of a run from the start of the process (of SFT, which comes first), `first_rl_step` the first reinforcement
step of a run whose supervised warm-up is one step long.
"""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from marl_llm.__main__ import COMMANDS

FOREIGN = ("torch", "transformers", "gradio", "openai")

_CONFIG = flags.DEFINE_string("config", "experiments/configs/quickstart.py", "Config whose start is timed.")
_STEPS = flags.DEFINE_bool("steps", True, "Time the first optimisation steps too; --nosteps: imports and help alone.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Repetitions with the filled cache, and of imports.", lower_bound=1)


def seconds(*arguments: str) -> float:
    """Wall time of a Python process."""
    tick = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - tick


def first_steps(folder: pathlib.Path, cache: pathlib.Path, number: int) -> tuple[float, float]:
    """Seconds from the start of the process to the end of the first supervised step and of the first reinforcement step."""
    workdir = folder / f"run{number}"
    small = ["steps=1", "sft.steps=1", "evaluation.final_tasks=128", "evaluation.transcripts=0"]
    command = ["-m", "experiments.train", f"--config={_CONFIG.value}", f"--workdir={workdir}", f"--compilation_cache={cache}"]
    command = [sys.executable, *command, *(f"--config.{s}" for s in small)]
    tick, at, metrics = time.perf_counter(), {}, workdir / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            lines = metrics.read_text() if metrics.exists() else ""
            for phase in ("sft", "train"):
                if phase not in at and f'"{phase}"' in lines:
                    at[phase] = time.perf_counter() - tick
            time.sleep(0.02)
    if process.returncode or len(at) != 2:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} and wrote {sorted(at)}; run it by hand to see why")
    return at["sft"], at["train"]


def brought_along(package: str = "marl_llm") -> set[str]:
    """Names of all packages that a package needs without extras, by what is installed here."""
    names, waiting = set(), [package]
    while waiting:
        name = waiting.pop()
        if name in names:
            continue
        names.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform or version of Python
            continue
        waiting += [re.match(r"[\w.-]+", need)[0].lower() for need in needs if "extra ==" not in need]
    return names


def main(argv) -> None:
    """Measures and prints."""
    del argv
    n = _REPEATS.value

    def median(values):
        return round(statistics.median(values), 3)

    line = {
        "benchmark": "start",
        "import_marl_llm_s": median(seconds("-c", "import marl_llm") for _ in range(n)),
        "help_s": {
            " ".join(("marl_llm", *name)): median(seconds("-m", "marl_llm", *name, "--help") for _ in range(n))
            for name in ((), *((command,) for command in COMMANDS))
        },
        "foreign": sorted(brought_along() & set(FOREIGN)),
    }
    if _STEPS.value:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            cold = first_steps(folder, folder / "cache", 0)
            warm = [first_steps(folder, folder / "cache", i + 1) for i in range(n)]
        line |= {
            "first_step_cold_s": round(cold[0], 2),
            "first_rl_step_cold_s": round(cold[1], 2),
            "first_step_warm_s": median(w[0] for w in warm),
            "first_rl_step_warm_s": median(w[1] for w in warm),
        }
    print(json.dumps(line))


if __name__ == "__main__":
    app.run(main)
