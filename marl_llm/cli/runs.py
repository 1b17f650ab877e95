"""Lists runs: the run directories below a folder, each with its config, its state, its steps and what it reached.

    python -m marl_llm runs                 below ./runs
    python -m marl_llm runs FOLDER ...      below other folders

A run directory is a folder with a config.json and a metrics.jsonl. What of it cannot be read is said in its line.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping

DEPTH = 4  # folders below the one that was named
MARKS = ("config.json", "metrics.jsonl")


def main(argv: list[str] | None = None) -> int:
    """Prints the list; 2 where a folder is none."""
    parser = argparse.ArgumentParser("marl_llm runs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="*", default=["runs"], help="where to look (runs)")
    folders = parser.parse_args(argv).folder
    for folder in folders:
        if not pathlib.Path(folder).is_dir():
            print(f"error: there is no folder {folder} (from {os.getcwd()}); name the one that holds runs", file=sys.stderr)
            return 2
    runs = [run for folder in folders for run in runs_below(pathlib.Path(folder))]
    print("\n".join(map(line_of, runs)) or f"no run below {', '.join(folders)}")
    return 0


def runs_below(folder: pathlib.Path, depth: int = DEPTH) -> Iterator[pathlib.Path]:
    """Run directories within a folder, itself included, by name; links are not followed."""
    if all((folder / name).is_file() for name in MARKS):
        yield folder
        return
    for inner in sorted(folder.iterdir()) if depth and os.access(folder, os.R_OK | os.X_OK) else ():
        if inner.is_dir() and not inner.is_symlink():
            yield from runs_below(inner, depth - 1)


def line_of(run: pathlib.Path) -> str:
    """What is known of a run, in one line."""
    from marl_llm.reporting import files, formats
    from marl_llm.untrusted import read_json_file

    try:
        config = read_json_file(run / "config.json")
        records, faults = files.read_lines(run / "metrics.jsonl")
        evaluation = read_json_file(run / "evaluation.json") if (run / "evaluation.json").exists() else {}
    except (OSError, ValueError) as error:
        return formats.visible(f"{run}  {error}")
    steps = [line["step"] for line in records if line.get("phase") == "train" and formats.is_number(line.get("step"))]
    settings = config.get("config")
    wanted = settings.get("steps") if isinstance(settings, Mapping) else None
    state = "finished" if evaluation else "not finished"
    reached = [part.get("success") for name in ("before", "after") if isinstance(part := evaluation.get(name), Mapping)]
    result = f"{evaluation.get('headline', 'success')} {' → '.join(map(formats.percent, reached))}" if reached else ""
    progress = f"step {max(steps, default=0)}" + (f" of {wanted}" if formats.is_number(wanted) else "")
    parts = [str(run), str(config.get("name", "")), state, progress, result]
    parts += [f"{len(faults)} damaged lines"] if faults else []
    return formats.visible("  ".join(filter(None, parts))).replace("\n", " ")
