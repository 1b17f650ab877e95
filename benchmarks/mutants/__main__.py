"""Applies the mutants one at a time to a copy of the tree and runs the tests that should notice. See `benchmarks.mutants`.

    nice -n 10 python -m benchmarks.mutants [--rooms=algorithms,...] [--names=TEXT] [--sample=130 --seed=0] [--limit_s=300] [--list]
                                            [--no_baseline] [--done=LOG]

With `--sample` only so many are tried: of each room its share, drawn by the seed. With `--done` those that an earlier run's output tells
of are left out, so that a run may be stopped and gone on with. Compiled programs come from the suite's own cache, so that only what a
fault changes is compiled anew. Prints a line per mutant and at the end one JSON line: how many, the share that was noticed (goal 0.97),
the survivors by name, and the errors: a mutant whose passage has changed, or tests that fail without any fault. Exit code 1 below the goal
or with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time

from benchmarks.mutants import Mutant, StaleMutant, mutants_of, mutated, rooms

ROOT = pathlib.Path(__file__).parents[2]
GOAL = 0.97
PASSED, FAILED = 0, 1  # pytest's exit codes for "all passed" and "some failed"; all others mean that the tests did not run


def run_tests(tree: pathlib.Path, tests: str, limit_s: float) -> int | None:
    """Runs pytest on a tree in a forked process and returns its exit code, None past the limit.

    Forking saves the seconds that importing JAX and pytest costs. Nothing of the project may be imported here but `benchmarks.mutants`.
    """
    pid = os.fork()
    if not pid:
        os.setsid()
        os.chdir(tree)
        sys.path.insert(0, str(tree))
        for name in [n for n in sys.modules if n.split(".")[0] == "benchmarks"]:
            del sys.modules[name]
        log = os.open(tree / "mutant.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        import pytest

        os._exit(int(pytest.main(["-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests.split()])))
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def verdict(exit_code: int | None) -> str:
    """What an exit code says about a mutant. A crash or a hang is noticed too; tests that did not run prove nothing."""
    if exit_code is None or exit_code < 0 or exit_code == FAILED:
        return "killed"
    return "survived" if exit_code == PASSED else "error"


def measure(mutants: list[Mutant], tree: pathlib.Path, limit_s: float, baseline: bool) -> dict:
    """Tries every mutant in the tree, which is put back after each, and returns the report."""
    outcomes: dict[str, str] = {}
    errors, sound = [], {}
    started, stamp = time.time(), time.time()
    for mutant in mutants:
        path = tree / mutant.file
        try:
            text = mutated(tree, mutant)
            compile(text, mutant.file, "exec")
        except (StaleMutant, SyntaxError) as error:
            outcomes[mutant.name] = "error"
            errors.append(f"{mutant.name}: {error}" if isinstance(error, SyntaxError) else str(error))
            continue
        if baseline and mutant.tests not in sound:
            sound[mutant.tests] = run_tests(tree, mutant.tests, 2 * limit_s) == PASSED
            if not sound[mutant.tests]:
                errors.append(f"without any fault, these tests do not pass within {2 * limit_s:.0f} s: {mutant.tests}")
        original, began = path.read_text(), time.monotonic()
        try:
            for content in (text, original):  # a time of its own for each, or Python might take the bytecode of the text before
                stamp += 2
                path.write_text(content)
                os.utime(path, (stamp, stamp))
                if content is text:
                    outcome = verdict(run_tests(tree, mutant.tests, limit_s)) if sound.get(mutant.tests, True) else "error"
        finally:
            path.write_text(original)
        if outcome == "error" and sound.get(mutant.tests, True):
            errors.append(f"{mutant.name}: its tests did not run: {(tree / 'mutant.log').read_text()[-500:]}")
        outcomes[mutant.name] = outcome
        print(f"{outcome:9}{time.monotonic() - began:6.1f} s  {mutant.name}", flush=True)
    counts = {word: sum(o == word for o in outcomes.values()) for word in ("killed", "survived", "error")}
    return {
        "mutants": len(mutants), **counts, "score": round(counts["killed"] / max(1, counts["killed"] + counts["survived"]), 4),
        "goal": GOAL, "survivors": [name for name, o in outcomes.items() if o == "survived"], "errors": errors,
        "seconds": round(time.time() - started, 1),
    }  # fmt: skip


def copy_tree(root: pathlib.Path, tree: pathlib.Path) -> None:
    """Copies the project without what git, an environment and runs have left at its top, and without bytecode."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__", *((".git", ".venv", "runs") if pathlib.Path(folder) == root else ())} & set(names)

    shutil.copytree(root, tree, ignore=left_out)


def sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """`count` of the mutants, in their order: of each room its share (largest remainders first), drawn by the seed."""
    by_room: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_room.setdefault(mutant.name.partition(":")[0], []).append(mutant)
    count = min(count, len(mutants))
    exact = {room: count * len(in_room) / len(mutants) for room, in_room in by_room.items()}
    shares = {room: int(share) for room, share in exact.items()}
    for room in sorted(exact, key=lambda room: (shares[room] - exact[room], room))[: count - sum(shares.values())]:
        shares[room] += 1
    draw = random.Random(f"mutants {seed}")
    chosen = {mutant.name for room, in_room in sorted(by_room.items()) for mutant in draw.sample(in_room, shares[room])}
    return [mutant for mutant in mutants if mutant.name in chosen]


def told_in(log: str) -> set[str]:
    """The names of the mutants that a run's output tells of as killed or survived. An error is no verdict."""
    return set(re.findall(r"^(?:killed|survived) +[0-9.]+ s  (.+)$", log, re.MULTILINE))


def main(argv: list[str]) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", default=",".join(rooms()), help="which tables, with commas between")
    parser.add_argument("--names", default="", help="only mutants whose name contains this")
    parser.add_argument("--sample", type=int, default=0, help="only so many mutants, each room's share of them; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--limit_s", type=float, default=300, help="time limit of one mutant's tests")
    parser.add_argument("--list", action="store_true", help="check the tables and run nothing")
    parser.add_argument("--done", type=pathlib.Path, help="output of an earlier run: the mutants that it tells of are left out")
    parser.add_argument("--no_baseline", action="store_true", help="do not first run the tests without any fault")
    args = parser.parse_args(argv)
    mutants = [mutant for room in args.rooms.split(",") for mutant in mutants_of(room) if args.names in mutant.name]
    mutants = sample(mutants, args.sample, args.seed) if args.sample else mutants
    done = told_in(args.done.read_text()) if args.done else set()
    mutants = [mutant for mutant in mutants if mutant.name not in done]
    if args.list:
        stale = []
        for mutant in mutants:
            try:
                compile(mutated(ROOT, mutant), mutant.file, "exec")
            except (StaleMutant, SyntaxError) as error:
                stale.append(f"{mutant.name}: {error}" if isinstance(error, SyntaxError) else str(error))
        print(json.dumps({"mutants": len(mutants), "errors": stale}))
        return bool(stale)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import flax.linen  # noqa: F401  imported once, before the forks
    import jax  # noqa: F401
    import jaxtyping  # noqa: F401
    import optax  # noqa: F401
    import pytest  # noqa: F401

    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        tree = pathlib.Path(folder) / "tree"
        copy_tree(ROOT, tree)
        report = measure(mutants, tree, args.limit_s, not args.no_baseline)
    print(json.dumps(report))
    return int(report["score"] < GOAL or bool(report["errors"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
