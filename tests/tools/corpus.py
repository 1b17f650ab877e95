"""Runs the attacks and the benign programs of tests/data/sandbox against one level and prints what became of each, as JSON.

    python tests/tools/lab.py {root,user} tests/tools/corpus.py LEVEL TIMEOUT [PROFILES [ATTACKS]]

The first two lines of an attack say what is expected and how it is checked: `default` (no BREACH in what it prints), `timeout` (and it is
ended at its limit), `nonzero` (and it does not end with 0), `same` (two runs print the same), `judge` (its wrong answers are not accepted,
and reading them costs the host under 2 s of CPU), `workspace` (whatever becomes of its files is its own outcome, and the files can be
started from; the word behind it says what becomes of them behind namespaces).
"""

import json
import os
import pathlib
import socket
import sys
import threading
import time

from marl_llm.tools.judge import judge_calls
from marl_llm.tools.sandbox import Level, Limits, Sandbox, Submission, Workspace

DATA = pathlib.Path(__file__).resolve().parents[1] / "data" / "sandbox"
CANARY = pathlib.Path("/tmp/sbx_canary")
FILES = {"secret.txt": "s3cret", "expected_output.json": "[1]", "other_worker/answer.txt": "42"}
CASES = [((n,), n * 1234577) for n in (3, 5, 8)]
CLASSES = {
    "d": "the same program prints the same",
    "f": "files, accounts and secrets of the host",
    "j": "faked passes",
    "m": "memory and disk",
    "n": "network",
    "o": "output",
    "p": "other processes and the kernel",
    "r": "the channel of results",
    "t": "hangs",
    "w": "the workspace",
}


LATE = "late"
# Below NAMESPACES only a look every 20 ms holds these: it may come too late, so they do not count as contained.
RACED = ("m04_disk_fill", "m06_many_inodes")


def table(found: dict[str, dict[str, str]]) -> str:
    """The table of docs/sandbox.md.

    Args:
      found: for each level, strongest first, attack -> empty string if contained.
    """
    levels = list(found)
    lines = [f"| class of attack | {' | '.join(levels)} |", "|---" * (len(levels) + 1) + "|"]
    gaps = {
        level: [name for name, why in names.items() if why or (level != "namespaces" and name in RACED)] for level, names in found.items()
    }
    total = {level: 0 for level in levels}
    for letter, title in CLASSES.items():
        names = [name for name in found[levels[0]] if name[0] == letter]
        cells = []
        for level in levels:
            held = sum(name not in gaps[level] for name in names)
            total[level] += held
            cells.append(f"{held} of {len(names)}")
        lines.append(f"| {letter}: {title} | {' | '.join(cells)} |")
    lines.append(f"| all | {' | '.join(f'{total[level]} of {len(found[level])}' for level in levels)} |")
    missing = [
        f"- `{level}` does not contain: {', '.join(f'`{n}`' for n in gaps[level]) or 'nothing of this corpus escapes'}" for level in levels
    ]
    return "\n".join([*lines, "", *missing])


def put_canaries() -> None:
    """Files that no program may see or harm."""
    for name, text in FILES.items():
        (CANARY / name).parent.mkdir(parents=True, exist_ok=True)
        (CANARY / name).write_text(text)


def serve(family: int, address) -> None:
    """A server of the host that no program may reach."""
    server = socket.socket(family)
    server.bind(address)
    server.listen()

    def accept():
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"HTTP/1.0 403 Forbidden\r\n\r\n")

    threading.Thread(target=accept, daemon=True).start()


def survivors() -> list[int]:
    """Processes that an attack named `sbxatk` and that still run."""
    found = []
    for comm in pathlib.Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == "sbxatk" and ") Z " not in (comm.parent / "stat").read_text():
                found.append(int(comm.parent.name))
        except OSError:  # it ended while we looked
            continue
    return found


def judged(sandbox: Sandbox, source: str, cases: list, timeout: float) -> str:
    """The empty string if no case of a function that knows no answer is passed, and its results are read soon."""
    tick = time.process_time()
    judgement = judge_calls(source, "solve", cases, timeout, sandbox=sandbox)
    if judgement or judgement.outcome().pass_rate > 0:
        return "fake pass accepted"
    json.dumps([case.error for case in judgement.outcome().cases], ensure_ascii=False).encode()
    return "the host was busy" if time.process_time() - tick > 2 else ""


def vandalised(sandbox: Sandbox, source: str, timeout: float) -> str:
    """The empty string if what a program does to its workspace is an outcome, and what is kept of it can be started from."""
    lost_before = sandbox.metrics()["sandbox/zygotes_lost"]
    files = Workspace.from_files({"kept": "mine"})
    result = sandbox.run(Submission(source, workspace=files, limits=Limits(timeout_s=timeout)))
    if "BREACH" in result.stdout:
        return result.stdout[result.stdout.index("BREACH") :].splitlines()[0][:80]
    program, again = result.outcome(), None
    if program.workspace is not None:
        "".join(program.workspace.files()).encode()
        again = sandbox.run(Submission("print(1)", workspace=program.workspace, limits=Limits(timeout_s=timeout)))
        if again.stdout != "1\n":
            return f"nothing starts from it: {again.outcome().outcome}"
    if result.attempts > 1 or (again and again.attempts > 1) or sandbox.metrics()["sandbox/zygotes_lost"] > lost_before:
        return "it broke its supervisor"
    return ""


def attack(sandbox: Sandbox, source: str, timeout: float) -> str:
    """The empty string if the attack is contained, else what got through."""
    check = source.splitlines()[1].partition(":")[2].strip()
    if check.startswith("judge"):
        return judged(sandbox, source, [((1,), 1)] if "one" in check else CASES, timeout) or harmed(source)
    if check.startswith("workspace"):
        return vandalised(sandbox, source, 10 * timeout) or harmed(source)
    parts = [source, source] if check == "same" else source.split("# ---- phase 2\n")
    timeout = timeout if check == "timeout" else 5 * timeout
    limits, outputs = Limits(timeout_s=timeout), []
    for part in parts:
        tick = time.monotonic()
        result = sandbox.run(Submission(part, "", limits=limits))
        outputs.append(result.stdout)
        if "BREACH" in result.stdout:
            return result.stdout[result.stdout.index("BREACH") :].splitlines()[0][:80]
        if len(result.stdout) + len(result.stderr) > 2.5 * 2**20:
            return "output not capped"
        if check == "timeout" and not result.timed_out:
            return f"not ended at the limit ({result.outcome().outcome})"
        if check == "nonzero" and result.exit_code == 0:
            return "exit code 0"
        if time.monotonic() - tick > timeout + 2:
            return LATE
    if check == "same" and outputs[0] != outputs[1]:
        return "two runs differ"
    return harmed(source)


def harmed(source: str) -> str:
    """The empty string if the host's files are there and nothing that an attack started goes on."""
    if any(not (CANARY / name).exists() for name in FILES):
        put_canaries()
        return "files of the host destroyed"
    if "sbxatk" in source and (left := survivors()):
        for pid in left:
            os.kill(pid, 9)
        return f"{len(left)} processes survive"
    return ""


def benign(sandbox: Sandbox, source: str) -> str:
    """The empty string if a harmless program prints what it should."""
    expected, stdin, profile = (line.partition(":")[2].strip() for line in source.splitlines()[:3])
    stdin, profile = json.loads(stdin), {"ds": "data_science"}.get(profile, profile)
    text = " ".join(map(str, range(200000))) if stdin.startswith("@") else stdin
    result = sandbox.run(Submission(source, text, profile, Limits(timeout_s=30)))
    good = result.exit_code == 0 and result.stdout.strip() == json.loads(expected)
    return "" if good else f"{result.outcome().outcome}: {result.stdout[-200:]} {result.stderr[-300:]}"


def main() -> None:
    """Prints one JSON object: attack or benign name -> empty string or what went wrong."""
    level, timeout = Level[sys.argv[1].upper()], float(sys.argv[2])
    profiles = sys.argv[3].split(",") if len(sys.argv) > 3 else ["bare", "numpy", "ds"]
    wanted = set(sys.argv[4].split(",")) if len(sys.argv) > 4 else None
    os.environ["MARL_SECRET_TOKEN"] = "tok-93187"
    put_canaries()
    serve(socket.AF_UNIX, "\0sbx_canary_sock")
    serve(socket.AF_UNIX, str(CANARY / "h.sock"))
    serve(socket.AF_INET, ("127.0.0.1", 45454))
    found = {"attacks": {}, "benign": {}}
    with Sandbox(workers=2, level=level, minimum=level) as sandbox:
        for path in sorted((DATA / "attacks").glob("*.txt")):
            if wanted is not None and path.stem not in wanted:
                continue
            found["attacks"][path.stem] = attack(sandbox, path.read_text(), timeout)
        for path in sorted((DATA / "benign").glob("*.txt")):
            source = path.read_text()
            if source.splitlines()[2].partition(":")[2].strip() in profiles:
                found["benign"][path.stem] = benign(sandbox, source)
        found["metrics"] = sandbox.metrics()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
