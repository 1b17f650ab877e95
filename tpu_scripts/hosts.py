"""What shows only between the hosts of one run, for `doctor.py --distributed`: other software on one, a directory that is not shared,
clocks that differ, a slow or wrong all-reduce.

All but the all-reduce goes through JAX's coordination service, so it also works where the hosts' devices would not work together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import shutil
import socket
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENCE_S = 300.0  # for the slowest host to come so far
SEEN_S = 10.0  # until a file that one host wrote must be there on another: network file systems remember what was not there
SKEW_S = 2.0
SOFTWARE, DEVICES = ("python", "jax", "jaxlib", "code"), ("platform", "kind", "devices")


def code() -> str:
    """A fingerprint of this library's own files."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "marl_llm").rglob("*.py")) + sorted((ROOT / "experiments").rglob("*.py")):
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def join(how: str) -> str:
    """Meets the other hosts; why that failed, or an empty text."""
    from marl_llm.training import processes

    try:
        processes.start(how)
    except processes.ProcessError as error:
        return str(error)
    return ""


def software() -> list[dict]:
    """Versions on every host, by rank; no device is touched."""
    import platform
    from importlib.metadata import version

    from marl_llm.training import processes

    mine = {"host": socket.gethostname(), "python": platform.python_version(), "code": code()}
    mine |= {name: version(name) for name in ("jax", "jaxlib")}
    return [json.loads(said) for said in processes.posted("software", json.dumps(mine), PATIENCE_S)]


def look(facts: dict, failed: list[str], workdir: pathlib.Path, every: list[dict], mib: int = 64) -> list[dict]:
    """`every` of `software` with what else the hosts found, by rank; `facts` and names of `failed` checks are this host's."""
    from marl_llm.training import processes

    mine = {name: facts[name] for name in DEVICES} | {"failed": failed, "seen": shared(workdir, len(every))}
    processes.posted("clocks", "", PATIENCE_S)  # all have come; then they read their clocks at once
    mine["clock"] = time.time()
    works = all(one[name] == every[0][name] for one in every for name in ("jax", "jaxlib")) and not facts["error"]
    works = all(said == "True" for said in processes.posted("works", str(works), PATIENCE_S))
    mine |= all_reduce(mib) if works else {"rate": None, "sum": None}
    found = [json.loads(said) for said in processes.posted("facts", json.dumps(mine), PATIENCE_S)]
    return [one | more for one, more in zip(every, found, strict=True)]


def shared(workdir: pathlib.Path, count: int) -> list[int]:
    """Ranks whose files are seen here: each host writes one, under a name that process 0 gives."""
    from marl_llm.training import processes

    name = processes.posted("folder", f"doctor.{socket.gethostname()}.{time.time_ns()}", PATIENCE_S)[0]
    folder, me = workdir / name, processes.number()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(me)).write_text(str(me))
    except OSError:  # the host's own check of the run directory says why
        pass
    processes.posted("written", "", PATIENCE_S)
    end = time.monotonic() + SEEN_S
    while len(seen := [rank for rank in range(count) if (folder / str(rank)).exists()]) < count and time.monotonic() < end:
        time.sleep(0.2)
    processes.posted("seen", "", PATIENCE_S)
    shutil.rmtree(folder, ignore_errors=True)
    return seen


def all_reduce(mib: int, repeats: int = 5) -> dict:
    """GB/s of an all-reduce of `mib` MiB over one device of each host, as each host sends and receives, best of `repeats`; and whether the
    sum is right."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    count, size = jax.process_count(), mib * 2**18
    first = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.asarray([first[rank] for rank in range(count)]), ("host",))

    def value(index):
        return np.full((1, size), index[0].start + 1, np.float32)

    x = jax.make_array_from_callback((count, size), NamedSharding(mesh, PartitionSpec("host")), value)
    add = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, PartitionSpec()))
    right, times = bool(np.all(np.asarray(add(x).addressable_data(0)) == count * (count + 1) / 2)), []
    for _ in range(repeats):
        start = time.monotonic()
        add(x).block_until_ready()
        times.append(time.monotonic() - start)
    return {"rate": 2 * (count - 1) / count * 4 * size / min(times) / 1e9, "sum": right}


def judge(every: list[dict], asked: argparse.Namespace) -> list[tuple[str, bool, str, str]]:
    """(name, good, found, what to do) of each check between hosts; `every` is by rank."""
    def name(rank):
        return f"process {rank} on {every[rank]['host']}"

    def same(title: str, keys: tuple[str, ...], todo: str):
        wrong = [
            f"{name(rank)} has {key} {one[key]}, process 0 {every[0][key]}"
            for rank, one in enumerate(every)
            for key in keys
            if one[key] != every[0][key]
        ]
        return title, not wrong, "; ".join(wrong) or ", ".join(f"{key} {every[0][key]}" for key in keys), todo

    def each(title: str, wrong: Callable[[dict], str], good: str, todo: str):
        found = [f"{name(rank)}: {why}" for rank, one in enumerate(every) if (why := wrong(one))]
        return title, not found, "; ".join(found) or good, todo

    def unseen(one):
        return ", ".join(f"does not see the file of {name(r)}" for r in range(len(every)) if r not in one["seen"])

    def skew(one):
        return one["clock"] - every[0]["clock"]

    def ahead(one):
        return f"{skew(one):+.1f} s from process 0" if abs(skew(one)) > SKEW_S else ""

    out = [
        same("same software", SOFTWARE, "install the same wheels and the same commit on every host; code is a fingerprint of the sources"),
        same("same devices", DEVICES, "every process needs as many of the same devices: its own page says more; or take another host"),
        each("every host", lambda one: ", ".join(one["failed"]), "passes its own checks", "that host's page says what to do"),
        each("shared directory", unseen, f"all {len(every)} see each other's files",
             f"put --workdir={asked.workdir} on a file system that all hosts mount at the same path"),
        each("clocks", ahead, f"within {max(abs(skew(one)) for one in every):.2f} s",
             "synchronise the clocks (chronyc makestep, timedatectl set-ntp true)"),
    ]  # fmt: skip
    if all(one["rate"] is not None for one in every):
        rate = min(one["rate"] for one in every)
        right = all(one["sum"] for one in every)
        said = f"all-reduce at {rate:.2f} GB/s: 1 GB of gradients takes {2 * (len(every) - 1) / len(every) / rate:.1f} s"
        todo = f"{asked.link_gbs:g} GB/s are asked for: hosts of one slice or placement group, and their fast interface"
        out.append(("link", right and rate >= asked.link_gbs, said if right else "an all-reduce gave a wrong sum", todo))
    return out
