"""`python -m marl_llm check` on every game of the library whose tasks are generated: one line per game, with CPU seconds.

    python -m benchmarks.checks            all of them; exits with 1 if one fails
    python -m benchmarks.checks notes sums
"""

from __future__ import annotations

import resource
import subprocess
import sys

from marl_llm.games import GAMES

# those whose tasks are read from files that are not part of the library, or made by a package that is an extra or by a server
FROM_FILES = (
    "question_parallel", "question_extract", "question_iterative", "problems", "code_debate", "maths_debate", "maths_ensemble",
    "function_problems", "writing", "data_pipeline", "math_chat", "reasoning_gym", "textarena", "openenv",
)  # fmt: skip


def main(names: list[str]) -> int:
    """Checks each game in a process of its own."""
    failed = 0
    for name in names or [name for name in GAMES if name not in FROM_FILES]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run([sys.executable, "-m", "marl_llm", "check", name], capture_output=True, text=True, timeout=900)
        seconds = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        lines = [line for line in done.stdout.splitlines() if line.startswith("FAIL") or "checks passed" in line or "checks failed" in line]
        print(f"{name:<20} {seconds:6.1f} CPU s  {'; '.join(lines) or done.stderr.strip().splitlines()[-1:]}", flush=True)
        failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
