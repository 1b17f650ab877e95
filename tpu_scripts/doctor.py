"""One page before money is spent: can this machine train? Prints one line per check, and what to do about each that failed.

    python tpu_scripts/doctor.py --workdir=runs --platform=tpu --devices=8 --sandbox=namespaces --retriever=http://10.0.0.2:8000
    python tpu_scripts/doctor.py --workdir=/shared/runs --distributed=auto        the same on every host, at the same time

Looks at one host: Python and JAX, the devices, what they compute and how fast, memory, the run directory's file system and its clock, the
sandbox, the retriever. With `--distributed` (as for experiments.train) also at what shows only between hosts (`hosts.py`). Exit codes: 0
go, 1 no, the same on every host. `--json` prints one object.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import pathlib
import resource
import shutil
import sys
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import hosts

PYTHON = (3, 11)
JAX = ((0, 10), (0, 13))  # from, below: as setup.py has it
FILES = 1024  # open files: devices, sandboxes and retrievers hold some each
LEVELS = ("rlimits", "landlock", "namespaces")


class Check(NamedTuple):
    """One line of the page."""

    name: str
    good: bool
    found: str
    todo: str  # what to do if it is not good


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--workdir", required=True, type=pathlib.Path, help="where runs will lie; made if missing")
    p.add_argument("--platform", default="", choices=["", "cpu", "gpu", "tpu"], help="what JAX must find; empty: anything")
    p.add_argument("--devices", type=int, default=1, help="how many devices at least (%(default)s)")
    p.add_argument("--memory_gib", type=float, default=8.0, help="free memory of the host (%(default)s)")
    p.add_argument("--space_gib", type=float, default=20.0, help="free space for runs (%(default)s)")
    p.add_argument("--sandbox", default="", choices=["", *LEVELS], help="weakest level that will do; empty: no sandbox needed")
    p.add_argument("--programs_per_s", type=float, default=2.0, help="slowest sandbox (%(default)s)")
    p.add_argument("--retriever", default="", help="URL of a retriever; empty: none needed")
    p.add_argument("--share", type=float, default=0.5, help="of the data sheet's rates that a device must reach (%(default)s)")
    p.add_argument("--distributed", default="off", help="off, auto, or host:port,processes,rank: look between the hosts too")
    p.add_argument("--link_gbs", type=float, default=0.2, help="slowest all-reduce over the hosts, GB/s (%(default)s)")
    p.add_argument("--json", action="store_true")
    return p


def main(argv: list[str] | None = None) -> int:
    """Looks, prints the page, returns the exit code."""
    asked = parser().parse_args(argv)
    checks = judge(look(asked), asked) if asked.distributed == "off" else together(asked)
    good = all(check.good for check in checks)
    if asked.json:
        print(json.dumps({"go": good, "checks": [check._asdict() for check in checks]}))
    else:
        for check in checks:
            print(f"{'ok  ' if check.good else 'FAIL'}  {check.name:<16} {check.found}")
            if not check.good:
                print(f"      -> {check.todo}")
        print("go" if good else f"no: {sum(not check.good for check in checks)} of {len(checks)} checks failed")
    return int(not good)


def together(asked: argparse.Namespace) -> list[Check]:
    """This host's checks, and those between all."""
    if why := hosts.join(asked.distributed):
        return [Check("processes", False, why, "start this on every host at the same time; is process 0's port open to all of them?")]
    every = hosts.software()
    facts = look(asked)
    checks = judge(facts, asked)
    every = hosts.look(facts, [check.name for check in checks if not check.good], asked.workdir, every)
    return checks + [Check(*one) for one in hosts.judge(every, asked)]


def judge(facts: dict, asked: argparse.Namespace) -> list[Check]:
    """What the facts of `look` mean for a run."""
    versions, disk = facts["jax"], facts["disk"]
    low, high = (".".join(map(str, bound)) for bound in JAX)
    numbers = [tuple(map(int, versions[name].split(".")[:2])) if versions[name] else (0, 0) for name in ("jax", "jaxlib")]
    out = [
        Check("python", facts["python"] >= PYTHON, ".".join(map(str, facts["python"])), f"install Python {PYTHON[0]}.{PYTHON[1]} or newer"),
        Check("jax", JAX[0] <= numbers[0] < JAX[1], versions["jax"] or "none", f"pip install 'jax>={low},<{high}', the same on every host"),
        Check("jaxlib", numbers[0] == numbers[1], versions["jaxlib"] or "none", f"pip install jaxlib=={versions['jax'] or low} beside jax"),
        Check("platform", not facts["error"] and asked.platform in ("", facts["platform"]), facts["error"] or facts["platform"],
              "install the extra of the machine ([tpu] or [cuda]) and unset JAX_PLATFORMS; or another process holds the devices"),
        Check("devices", facts["devices"] >= asked.devices, f"{facts['devices']} x {facts['kind']}",
              f"{asked.devices} are asked for: another machine type, or fewer by --config.devices"),
        Check("arithmetic", facts["wrong"] == [], "right on every device" if not facts["wrong"] else f"wrong on {facts['wrong']}",
              "give this machine back: a device that computes wrongly cannot be mended by software"),
        *rates(facts, asked),
        Check("memory", facts["memory_gib"] >= asked.memory_gib, f"{facts['memory_gib']:.1f} GiB free",
              f"{asked.memory_gib:g} GiB are asked for: end other processes, or a machine with more"),
        Check("open files", facts["open_files"] >= FILES, str(facts["open_files"]), f"ulimit -n {FILES} before the run"),
        Check("run directory", not disk["error"], disk["error"] or "can be written, renamed in and locked",
              f"--workdir={asked.workdir} must be a directory of this user on a file system with rename and locks"),
    ]  # fmt: skip
    if not disk["error"]:
        out += [
            Check("space", disk["free_gib"] >= asked.space_gib, f"{disk['free_gib']:.1f} GiB free",
                  f"{asked.space_gib:g} GiB are asked for: delete old runs, or a larger disk; a run keeps checkpoint.keep + 1 checkpoints"),
            Check("clock", abs(disk["skew_s"]) <= hosts.SKEW_S, f"{disk['skew_s']:+.1f} s from the file server",
                  "synchronise the clocks (chronyc makestep, timedatectl set-ntp true) on this host and on the file server"),
        ]  # fmt: skip
    return out + tools(facts, asked)


def rates(facts: dict, asked: argparse.Namespace) -> list[Check]:
    """What a device was measured to do, where its data sheet is known."""
    if not facts["rates"]:
        return []
    product, read = facts["rates"]
    found = f"{product:.0%} of the data sheet's bfloat16 products, {read:.0%} of its bandwidth"
    todo = f"{asked.share:.0%} are asked for: end what else uses the device, look for throttling, or give the machine back"
    return [Check("rates", min(product, read) >= asked.share, found, todo)]


def tools(facts: dict, asked: argparse.Namespace) -> list[Check]:
    """What the facts mean for tools, where a run needs them."""
    out, level = [], facts["sandbox_level"]
    if asked.sandbox:
        strong = level in LEVELS and LEVELS.index(level) >= LEVELS.index(asked.sandbox)
        needs = f"docs/sandbox.md says what {asked.sandbox} needs of the kernel; in a container: user namespaces"
        out.append(Check("sandbox", strong, facts["sandbox_error"] or level, needs))
        if strong:
            rate, slow = facts["programs_per_s"], f"{asked.programs_per_s:g} are asked for: more cores, or fewer other processes"
            out.append(Check("sandbox rate", rate >= asked.programs_per_s, f"{rate:.1f} programs per s", slow))
    if asked.retriever:
        start = f"start it: python -m marl_llm.tools.retriever serve; is {asked.retriever} reachable from here?"
        out.append(Check("retriever", not facts["retriever_error"], facts["retriever_error"] or "answers", start))
    return out


def look(asked: argparse.Namespace) -> dict:
    """The facts of this host; what cannot be had is an error text, never an exception."""
    facts = {"python": sys.version_info[:2], "jax": {name: _version(name) for name in ("jax", "jaxlib")}}
    facts |= devices() | {"memory_gib": free_memory_gib(), "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0]}
    facts["disk"] = disk(asked.workdir)
    facts |= sandbox() if asked.sandbox else {"sandbox_level": "", "sandbox_error": "", "programs_per_s": 0.0}
    return facts | {"retriever_error": retriever(asked.retriever) if asked.retriever else ""}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def devices() -> dict:
    """JAX's devices, those on which a product of whole numbers, exact in every dtype in use, comes out wrong, and `shares` of the first."""
    try:
        import jax
        import numpy as np

        there = jax.local_devices()
        a = np.arange(64 * 64).reshape(64, 64) % 3
        right, wrong = a @ a, []
        for device in there:
            x = jax.device_put(a.astype(np.float32), device)
            if not np.array_equal(np.asarray(x @ x), right):
                wrong.append(str(device))
        rates = shares(there[0])
    except Exception as error:  # a plugin that does not start raises whatever it likes
        return {"error": f"{type(error).__name__}: {error}", "platform": "none", "kind": "nothing", "devices": 0, "wrong": [], "rates": []}
    kind = {"platform": there[0].platform, "kind": there[0].device_kind, "devices": len(there)}
    return {"error": "", "wrong": wrong, "rates": rates} | kind


def shares(device) -> list[float]:
    """Of the data sheet's rates (products in bfloat16, reading memory), what a device does; empty where there is no sheet."""
    import jax
    import numpy as np

    from marl_llm.training.roofline import chip_of
    from marl_llm.training.speed import machine_limits

    if (sheet := chip_of(device.device_kind)) is None:
        return []
    found = machine_limits(jax.sharding.Mesh(np.asarray([device]), ("data",)), "bfloat16")
    return [found.flops / sheet.flops, found.bandwidth / sheet.bandwidth]


def free_memory_gib(meminfo: str = "/proc/meminfo") -> float:
    """Memory that this host can give, GiB."""
    lines = dict(line.split(":") for line in pathlib.Path(meminfo).read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) / 2**20


def disk(workdir: pathlib.Path) -> dict:
    """Does the file system do what checkpoints need (write, sync, rename a folder, lock)? Its free space, and its clock against ours."""
    probe = workdir / f"doctor.{os.getpid()}"
    try:
        (probe / "one").mkdir(parents=True)
        before = time.time()
        file = probe / "one" / "file"
        file.write_bytes(b"x" * 4096)
        skew_s = file.stat().st_mtime - before
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (probe / "one").rename(probe / "two")
        if (probe / "two" / "file").read_bytes() != b"x" * 4096:
            raise OSError(f"{probe} gives back other bytes than were written")
        free_gib = shutil.disk_usage(probe).free / 2**30
    except OSError as error:
        return {"error": str(error), "free_gib": 0.0, "skew_s": 0.0}
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    return {"error": "", "free_gib": free_gib, "skew_s": skew_s}


def sandbox(programs: int = 8) -> dict:
    """The strongest level of this machine, and how many small programs it runs per second once it is warm."""
    from marl_llm.tools.sandbox import Level, Sandbox, SandboxError, Submission

    try:
        with Sandbox(minimum=Level.RLIMITS) as box:
            box.warm()
            start = time.monotonic()
            done = box.run_batch([Submission(f"print({n} * {n})", environment=n) for n in range(programs)])
            rate = programs / (time.monotonic() - start)
            lost = [one.failure for one in done if one.failure is not None]
    except SandboxError as error:
        return {"sandbox_level": "", "sandbox_error": str(error), "programs_per_s": 0.0}
    return {"sandbox_level": box.level.name.lower(), "sandbox_error": "", "programs_per_s": 0.0 if lost else rate}


def retriever(url: str) -> str:
    """Why a retriever does not answer; empty if it does."""
    from marl_llm.tools.retriever import open_server

    client = open_server(url, attempts=1)
    try:
        failure = client.search(["Is anybody there?"], topk=1, deadline_s=10.0).failure
    finally:
        client.close()
    return "" if failure is None else str(failure.message)


if __name__ == "__main__":
    sys.exit(main())
