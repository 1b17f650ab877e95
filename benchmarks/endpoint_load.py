"""Episodes of many client processes against the recording endpoint, with kills of clients and of the server: nothing lost or doubled.

    python -m benchmarks.endpoint_load [--episodes=2000] [--clients=200] [--faults=0.5] [--server_kills=2] [--kind=record|attach]

Kind `record` starts `marl serve --record` with a tiny random checkpoint, kills it and starts it again on the same file. Kind `attach` plays
the same episodes as `marl attach --stays` does, in the process that would train. Each client is a process (`benchmarks.endpoint_client`)
that asks several times an episode, in chats that grow, every other request streaming. A share of the episodes has a fault: the client is
killed at a random moment or within a request, drops a connection and asks again, leaves, pays twice, pays NaN, or asks after its pay.

Prints one JSON line. `lost` counts replies and pays that a client was told of and the record lacks; `doubled` further lines of one request,
pay or number; `stray` lines that nobody asked for, and what should have been refused; `unheard` replies in paid episodes that their client
never read. Exit code 1 if one of the first three is not 0.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.endpoint_audit import Lines, Notes, audit, read_ledger, read_lines
from benchmarks.processes import ROOT, free_port

CLIENT = pathlib.Path(__file__).with_name("endpoint_client.py")
FAULTS = {"kill": 5, "half": 1, "leave": 1, "drop": 4, "twice": 1, "nan": 1, "late": 1}  # with their weights
ROLE, START_S, EPISODE_S = "solver", 600.0, 1800.0


@dataclasses.dataclass(frozen=True)
class Load:
    """How much is played.

    Attributes:
      episodes, clients: in all, and at once.
      faults: share of episodes with a fault.
      server_kills: of kind `record`.
      max_tokens: of a reply.
      seed: of the episodes and their faults.
    """

    episodes: int = 2000
    clients: int = 200
    faults: float = 0.5
    server_kills: int = 2
    max_tokens: int = 12
    seed: int = 0


def make_tasks(load: Load) -> list[dict[str, Any]]:
    """What each episode's client is to do."""
    draw, tasks = random.Random(load.seed), []
    for number in range(load.episodes):
        fault = draw.choices(list(FAULTS), list(FAULTS.values()))[0] if draw.random() < load.faults else "none"
        streams = [draw.random() < 0.5 for _ in range(draw.randint(2, 5))]
        task = {"number": number, "role": ROLE, "max_tokens": load.max_tokens, "streams": streams, "fault": fault}
        task |= {"at": draw.randrange(len(streams)), "delay_s": math.exp(draw.uniform(math.log(0.005), math.log(3.0)))}
        tasks.append(task | {"reward": float(number)})
    return tasks


def client_command(ledger: pathlib.Path) -> list[str]:
    """A client process; `ledger` is the folder of its notes."""
    return [sys.executable, "-S", "-E", str(CLIENT), str(ledger)]


class Crowd:
    """Client processes that play tasks until there are none left.

    Attributes:
      done: episodes that are over, however they ended.
      open: cleared while no episode should begin.
    """

    def __init__(self, tasks: Sequence[dict[str, Any]], ledger: pathlib.Path, url: str):
        self.done, self.open = 0, threading.Event()
        self._tasks, self._ledger, self._url = queue.SimpleQueue(), ledger, url
        self._lock = threading.Lock()
        self.open.set()
        for task in tasks:
            self._tasks.put(task)

    def run(self, clients: int, watch: Callable[[], None] = lambda: None) -> None:
        """Plays everything; `watch` is called again and again meanwhile."""
        threads = [threading.Thread(target=self._play) for _ in range(clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            watch()
            time.sleep(0.05)

    def _play(self) -> None:
        process = None
        with contextlib.suppress(queue.Empty):
            while True:
                self.open.wait()
                task = self._tasks.get_nowait()
                if process is None:
                    process = subprocess.Popen(client_command(self._ledger), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                address = f"{self._url}/episodes/e{task['number']}"
                line = {"task": task, "base_url": f"{address}/v1", "episode_url": address}
                process.stdin.write(json.dumps(line).encode() + b"\n")
                process.stdin.flush()
                if not process.stdout.readline():  # it was killed, or left
                    process = _end(process)
                with self._lock:
                    self.done += 1
        _end(process)


def _end(process: subprocess.Popen | None) -> None:
    if process is not None:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class ServedRecord:
    """`marl serve --record` with the checkpoint `tiny` of a folder; a context manager.

    Args:
      folder: has `tiny`, and gets the record, `server.log` and compiled programs.
      flags: of the command.

    Attributes:
      url, record: where it listens, and what it writes.
    """

    def __init__(self, folder: pathlib.Path, *flags: str):
        self.port, self._folder, self._flags = free_port(), folder, flags
        self.url, self.record = f"http://127.0.0.1:{self.port}", folder / "plays.jsonl"
        self._process = self._start()

    def restart(self) -> None:
        """Kills it, and starts it again on the same port and record."""
        self.kill()
        self._process = self._start()

    def kill(self) -> None:
        """Kills it."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> ServedRecord:
        return self

    def __exit__(self, *_: Any) -> None:
        self.kill()

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "marl_llm", "serve", f"--path={self._folder / 'tiny'}", *self._flags]
        command += [f"--port={self.port}", f"--record={self.record}"]
        env = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(self._folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        with open(self._folder / "server.log", "ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return process
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{(self._folder / 'server.log').read_text()}")


class Killer:
    """Kills a server after equal shares of the episodes.

    Attributes:
      down_s: seconds for which there was none.
      kills: so far.
    """

    def __init__(self, server: ServedRecord, crowd: Crowd, load: Load):
        self._server, self._crowd, self._load = server, crowd, load
        self.down_s, self.kills = 0.0, 0

    def watch(self) -> None:
        """Kills the server if its time has come; no episode begins until the next one is there."""
        due = self._crowd.done * (self._load.server_kills + 1) >= self._load.episodes * (self.kills + 1)
        if due and self.kills < self._load.server_kills:
            start = time.perf_counter()
            self._server.kill()
            self._crowd.open.clear()
            self.kills += 1
            self._server.restart()
            self._crowd.open.set()
            self.down_s += time.perf_counter() - start


def measure_record(load: Load, folder: pathlib.Path) -> dict[str, Any]:
    """Plays against `marl serve --record`, and reads the record as training does."""
    from marl_llm.cli.tiny import make
    from marl_llm.training import read_recorded

    ledger = folder / "ledger"
    ledger.mkdir()
    make(folder / "tiny", "qwen3", 1024, 0)
    with ServedRecord(folder, f"--name={ROLE}", "--max_prompt=512", f"--max_tokens={load.max_tokens}") as server:
        crowd, start = Crowd(make_tasks(load), ledger, server.url), time.perf_counter()
        killer = Killer(server, crowd, load)
        crowd.run(load.clients, killer.watch)
        seconds = time.perf_counter() - start - killer.down_s
    audited = figures(read_ledger(ledger), read_lines(server.record), seconds)
    batch = read_recorded(server.record, (ROLE,))
    trained = len(set(batch.table.trajectory.tolist()))
    return audited | {"trained": trained, "server_kills": killer.kills, "down_s": round(killer.down_s, 1)}


def measure_attach(load: Load, folder: pathlib.Path) -> dict[str, Any]:
    """Plays as `marl attach --stays` does, with a model of this process."""
    from marl_llm.cli.tiny import make
    from marl_llm.serving.local import LocalModel

    make(folder / "tiny", "qwen3", 1024, 0)
    with LocalModel(str(folder / "tiny"), max_prompt=512, max_tokens=load.max_tokens, max_num_seqs=16) as model:
        return play_attached_clients(load, folder, model.answers)


def play_attached_clients(load: Load, folder: pathlib.Path, answers: Any) -> dict[str, Any]:
    """The figures of episodes that workers play; `answers` is who answers them."""
    from marl_llm.serving.episodes import EpisodeServer
    from marl_llm.tools.workers import WorkerProgram
    from marl_llm.training.attached import AttachOptions, play_all
    from marl_llm.workflows.play import finish

    ledger, tasks = folder / "ledger", make_tasks(load)
    ledger.mkdir()
    options, plays = AttachOptions(EPISODE_S, load.clients), [((0, task["number"]), task) for task in tasks]
    with contextlib.closing(WorkerProgram(client_command(ledger), str(folder))) as program:
        with EpisodeServer({ROLE: answers}, concurrency=32) as server:
            start = time.perf_counter()
            played = finish(play_all(server, program, plays, options))
            seconds = time.perf_counter() - start
    recorded = {number: [*episode.replies, *([episode.pay] if episode.pay is not None else ())] for number, episode in enumerate(played)}
    aborts = collections.Counter(episode.aborted for episode in played if episode.aborted)
    return figures(read_ledger(ledger), recorded, seconds) | {"aborts": aborts}


def figures(notes: Mapping[int, Notes], recorded: Mapping[int, Lines], seconds: float) -> dict[str, Any]:
    """The audit's counts with speed and latency."""
    latencies = sorted(latency for note in notes.values() for latency in note.seconds)
    quantiles = {f"latency_p{q}_s": round(latencies[int(q / 100 * (len(latencies) - 1))], 3) for q in (50, 99)} if latencies else {}
    counts = audit(notes, recorded)
    return counts | quantiles | {"wall_s": round(seconds, 1), "replies_per_s": round(counts["replies"] / seconds, 1)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["record", "attach"], default="record", help="which endpoint")
    for field in dataclasses.fields(Load):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    arguments = vars(parser.parse_args())
    kind, load = arguments.pop("kind"), Load(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        measured = (measure_record if kind == "record" else measure_attach)(load, pathlib.Path(folder))
    print(json.dumps({"benchmark": "endpoint_load", "kind": kind, **dataclasses.asdict(load), **measured}))
    sys.exit(bool(measured["lost"] + measured["doubled"] + measured["stray"]))


if __name__ == "__main__":
    main()
