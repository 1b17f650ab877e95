"""One program on many processes: how it is started, what the processes tell each other, and how a dead one is noticed.

Every process runs the same code on one global mesh. The distribution itself is `jax.distributed` and XLA's collectives; here is what a
training loop needs beside them: host copies of arrays that lie on other processes' devices (`fetch`), this process's own copy (`local`),
decisions of process 0 (`from_first`), small values from all (`exchange`), the checksum of a step (`same_everywhere`), and `Watch`.
With one process all of them do nothing. Whatever is exchanged must be exchanged by all processes, from their main threads, in one order.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from marl_llm.errors import UserError

BEAT_S = 1.0  # between two signs of life
HELD_S = 2.0  # more than `BEAT_S` between them: this process itself did not run, and its clock says nothing of the others
START_S = 300.0  # more than `lost_after_s` until the first one: processes begin at different times, importing and compiling
_ENDED, _BEAT = "marl_llm/ended", "marl_llm/beat"
_MET: dict[str, int] = {}  # a barrier's name can be used once

# launcher -> the variables that show it; all of one tuple must be there
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "MARL_LLM variables": ("MARL_LLM_COORDINATOR", "MARL_LLM_PROCESSES", "MARL_LLM_RANK"),
    "JobSet": ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JOB_COMPLETION_INDEX"),
    "Slurm": ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NODELIST"),
    "OpenMPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "TPU metadata": ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
}


class ProcessError(UserError, RuntimeError):
    """The processes cannot start together or go on together; the message says which, why and what to do."""


def parse(how: str, environment: Mapping[str, str] | None = None) -> tuple[str | None, int | None, int | None] | None:
    """What `--distributed` says: None for one process, else (coordinator, processes, rank), all None where JAX finds them itself.

    `how` is 'off', 'auto' or 'host:port,processes,rank'. Raises `ProcessError` naming what is malformed, or all that was looked for.
    """
    env = os.environ if environment is None else environment
    if how == "off":
        return None
    if how != "auto":
        match = re.fullmatch(r"([^,\s]+:\d+),(\d+),(\d+)", how)
        if not match:
            raise ProcessError(f"--distributed={how!r} is not 'auto', 'off' or 'host:port,processes,rank', e.g. 10.0.0.1:8476,4,0")
        return _checked(match[1], int(match[2]), int(match[3]), f"--distributed={how}")
    for launcher, names in LAUNCHERS.items():
        if not all(env.get(name) for name in names):
            continue
        if launcher in ("MARL_LLM variables", "JobSet"):
            place, count, rank = (env[name] for name in names)
            if not (re.fullmatch(r"\S+:\d+", place) and count.isdecimal() and rank.isdecimal()):
                values = ", ".join(f"{name}={env[name]!r}" for name in names)
                raise ProcessError(f"{launcher}: {values} must be host:port, a number and a number")
            return _checked(place, int(count), int(rank), launcher)
        return None, None, None
    if environment is None and _on_tpu_vm():
        return None, None, None

    def lacking(names):
        return ", ".join(name for name in names if not env.get(name))

    looked = "; ".join(f"{launcher} ({lacking(names)} not set)" for launcher, names in LAUNCHERS.items())
    raise ProcessError(f"--distributed=auto found no launcher. Looked for: {looked}. Say --distributed=host:port,processes,rank, or off")


def _on_tpu_vm() -> bool:
    """Whether JAX can ask a TPU VM's metadata server how the processes find each other; such a machine sets no variables."""
    from jax._src.clusters import GceTpuCluster  # no public name tells it without starting

    return GceTpuCluster.is_env_present()


def _checked(place: str, count: int, rank: int, who: str) -> tuple[str, int, int]:
    if count < 1 or rank >= count:
        raise ProcessError(f"{who}: rank {rank} of {count} processes; ranks are 0 to processes - 1")
    return place, count, rank


def start(how: str, lost_after_s: float = 120.0, initialization_timeout_s: int = 300) -> int:
    """Joins the other processes, before anything touches a device; returns how many there are. Raises `ProcessError`."""
    address = parse(how)
    if address is None:
        return 1
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from `marl_llm.runs.stopping`
    place, count, rank = address
    patience = int(2 * lost_after_s) + 30  # `Watch` speaks first, and names the process
    try:
        jax.distributed.initialize(
            place, count, rank, initialization_timeout=initialization_timeout_s, heartbeat_timeout_seconds=patience,
            shutdown_timeout_seconds=30,
        )  # fmt: skip
    except Exception as error:  # JAX raises many kinds: a port in use, an unknown host, processes that never came
        raise ProcessError(f"--distributed={how}: the processes did not come together: {str(error).splitlines()[0]}") from error
    return _state().num_processes


def _state():
    from jax._src import distributed  # the client of the coordination service has no public name

    return distributed.global_state


def _abandon() -> None:
    """Lets this process end without JAX's shutdown, which waits 30 s for the others and aborts, because they end without it.

    JAX's client and its service are kept for ever: their destructors would wait in the same way.
    """
    state = _state()
    for part in (state.client, state.service):
        if part is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.client = state.service = None


def leads() -> bool:
    """Whether this is process 0, which owns the run directory."""
    return jax.process_index() == 0


def rank() -> int:
    """Of this process, from 0."""
    return jax.process_index()


def number() -> int:
    """The same, without a look at the devices."""
    return _state().process_id


def count() -> int:
    """Of this run's processes, without a look at the devices."""
    return _state().num_processes


def spans(mesh: Mesh) -> bool:
    """Whether a mesh has devices of several processes."""
    return len({device.process_index for device in mesh.devices.flat}) > 1


# ------------------------------------------------------------------------------------------------ arrays of other processes
def replicated(tree, mesh: Mesh):
    """The same arrays whole on every device of a mesh that spans processes; inside jit or outside. Nothing on other meshes."""
    if not spans(mesh):
        return tree
    place = NamedSharding(mesh, P())
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, place), tree)
    if all(x.sharding.is_fully_replicated and not x.is_fully_addressable for x in jax.tree.leaves(tree)):
        return tree
    return jax.jit(lambda t: t, out_shardings=place)(tree)


def put(tree, shardings):
    """`jax.device_put`, also onto devices of other processes, where every process holds the same whole values or they lie there already.

    Not `jax.device_put` itself there: arrays that it makes on many processes cannot be read shard by shard (JAX 0.10.2), and so not saved.
    """

    def one(x, place):
        if place.is_fully_addressable:
            return jax.device_put(x, place)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return x if x.sharding.is_equivalent_to(place, x.ndim) else jax.jit(lambda y: y, out_shardings=place)(x)
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, place, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def fetch(tree, mesh: Mesh):
    """Host copies (NumPy) of arrays on a mesh, those of other processes' devices included: all processes call it."""
    return jax.device_get(replicated(tree, mesh))


def local(tree, mesh: Mesh, own: Mesh):
    """This process's own whole copies, on each device of its part `own` of the mesh, not through the host. On one process the tree."""
    if not spans(mesh):
        return tree
    whole_copies = NamedSharding(own, P())

    def shards(x):
        return [shard.data for shard in x.addressable_shards]

    return jax.tree.map(lambda x: jax.make_array_from_single_device_arrays(x.shape, whole_copies, shards(x)), replicated(tree, mesh))


# ------------------------------------------------------------------------------------------------ values of other processes
def exchange(value: Any) -> list[Any]:
    """What every process has to say, by rank. Values are pickled: they come from this very program on other hosts."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental.multihost_utils import process_allgather

    try:
        message = np.frombuffer(pickle.dumps(value), np.uint8)
    except Exception as error:  # a value of a user's own class may refuse in its own way
        raise ProcessError(f"this value cannot go to the other processes ({error}); use plain values: numbers, texts, arrays") from error
    sizes = process_allgather(np.asarray([message.size], np.int32)).reshape(-1)
    room = 1 << int(sizes.max() - 1).bit_length()  # few shapes, few compilations
    rows = process_allgather(np.pad(message, (0, room - message.size)))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows.reshape(len(sizes), room), sizes, strict=True)]


def meet(where: str, timeout_s: float) -> None:
    """Waits until every process has come to `where`, each once or equally often; not by a collective, so any thread may. Raises what JAX's
    coordination service raises when one does not come."""
    if jax.process_count() > 1:
        _MET[where] = _MET.get(where, 0) + 1
        _state().client.wait_at_barrier(f"{where}/{_MET[where]}", int(1000 * timeout_s))


def posted(topic: str, text: str, timeout_s: float) -> list[str]:
    """What every process posts under a topic, by rank, by JAX's coordination service: no device takes part. Each topic can be used once.

    Raises what that service raises when one does not post.
    """
    client, count = _state().client, _state().num_processes
    client.key_value_set(f"marl_llm/posted/{topic}/{number()}", text)
    return [client.blocking_key_value_get(f"marl_llm/posted/{topic}/{rank}", int(1000 * timeout_s)) for rank in range(count)]


def gathered_from_all(play: Callable[[], Any], part: Callable[[Any], Any]) -> tuple[Any, list[Any]]:
    """(what `play` returned here, `part` of what it returned on every process, by rank). What it raises on one, is raised on all."""
    rollout, failure = None, None
    try:
        rollout = play()
    except Exception as error:  # told to all, so that nobody waits for it
        failure = error
    shares = exchange((None if failure else part(rollout), failure and _plain(failure)))
    for rank, (_, problem) in enumerate(shares):
        if problem is not None:
            raise failure if failure is not None else type(problem)(f"process {rank}: {problem}")
    return rollout, [share for share, _ in shares]


def from_first(decide: Callable[[], Any]) -> Any:
    """What `decide` returns on process 0, everywhere; and what it raises there, everywhere."""
    value, failure = None, None
    if leads():
        try:
            value = decide()
        except Exception as error:  # told to all, so that nobody waits for a process that has gone
            failure = error
    value, failure = exchange((value, failure and _plain(failure)))[0] if jax.process_count() > 1 else (value, failure)
    if failure is not None:
        raise failure
    return value


def _plain(error: Exception) -> Exception:
    """An error that can travel: of the same class with its message, if that class takes one."""
    try:
        plain = type(error)(str(error))
        pickle.loads(pickle.dumps(plain))
        return plain
    except Exception:  # a class with a constructor of its own
        return ProcessError(f"{type(error).__name__}: {error}")


def agreed_stop(step: int, asked: bool, **figures: float | int) -> bool:
    """The checksum of a step: whether any process was asked to stop after it.

    Figures (samples, the parameters' norm) must be the same on every process to the last bit. Raises `ProcessError` naming the processes
    and the figures that differ from process 0's.
    """
    if jax.process_count() == 1:
        return asked
    of_processes = exchange({"asked": asked, "step": step} | figures)
    compare(f"step {step}", [{name: x for name, x in figures_of.items() if name != "asked"} for figures_of in of_processes])
    return any(figures_of["asked"] for figures_of in of_processes)


def compare(what: str, every: list[dict[str, float | int]]) -> None:
    """Raises `ProcessError` unless all processes have the figures of process 0; `every` is by rank. NaN equals NaN."""
    wrong = [
        f"process {rank} has {name}={values[name]!r}, process 0 has {every[0][name]!r}"
        for rank, values in enumerate(every)
        for name in values
        if values[name] != every[0][name] and not (values[name] != values[name] and every[0][name] != every[0][name])
    ]
    if wrong:
        raise ProcessError(f"{what}: the processes do not agree: {'; '.join(wrong[:6])}. Nothing of that step was saved")


def check_shared(folder: Any) -> None:
    """Raises `ProcessError` unless every process sees the file config.json that process 0 wrote in this directory."""
    path = os.path.join(os.fspath(folder), "config.json")
    seen = exchange((os.path.isfile(path), socket.gethostname()))
    if blind := [f"process {rank} on {host}" for rank, (there, host) in enumerate(seen) if not there]:
        raise ProcessError(
            f"{folder} is not shared: {', '.join(blind)} cannot see {path}, which process 0 on {seen[0][1]} wrote. "
            "Put --workdir on a file system that all hosts mount"
        )


class Watch:
    """Signs of life between processes, in a thread: when one dies, the others say which and end within `lost_after_s` seconds.

    Args:
      lost_after_s: without a sign of life before a process counts as lost.
      last_words: printed when one is lost, e.g. what continues the run.
      code: of the exit.

    A context manager; on the way out by an error, the others are told which process met which error. Nothing with one process.
    """

    def __init__(self, lost_after_s: float, last_words: str = "", code: int = 2):
        self.lost_after_s, self.last_words, self.code = lost_after_s, last_words, code
        self._done, self._thread = threading.Event(), None
        self._heard: dict[int, int] = {}  # rank -> how many signs of life came

    def __enter__(self) -> Watch:
        if jax.process_count() > 1:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="watch of processes")
            self._thread.start()
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._thread is None:
            return
        if error is None or isinstance(error, SystemExit):
            self._done.set()
            jax.distributed.shutdown()  # waits for the others, whose board process 0 holds
            return
        if isinstance(error, Exception):
            self._find_the_lost(collective=type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"))
            try:
                message = f"{type(error).__name__}: {error}"[:500]
                _state().client.key_value_set(f"{_ENDED}/{jax.process_index()}", message, allow_overwrite=True)
            except Exception as gone:  # the coordinator itself may be gone
                print(f"the other processes could not be told: {gone}", file=sys.stderr)
            time.sleep(3 * BEAT_S if leads() else 0)  # process 0 holds the others' board
            _abandon()
        self._done.set()

    def _find_the_lost(self, collective: bool) -> None:
        """Waits until all others have given a sign of life since now, or are lost: the thread says so and ends this process.

        Whatever was raised here, the cause may be another process that died: what it broke comes as an error of JAX (`collective`), or of a
        library that waited for it.
        """
        until, before = time.monotonic() + self.lost_after_s + 2 * BEAT_S + HELD_S, dict(self._heard)
        while time.monotonic() < until:
            ranks = [rank for rank in range(jax.process_count()) if rank != jax.process_index()]
            more = min(self._heard.get(rank, 0) - before.get(rank, 0) for rank in ranks)
            if (not collective and more >= 3) or self._done.wait(BEAT_S / 4):  # the first two may have been sent before
                return

    def _watch(self) -> None:
        """Says that this process lives, again and again, and ends it when another one has ended, or has given no sign for too long."""
        client, me, count = _state().client, jax.process_index(), jax.process_count()
        beats: dict[int, tuple[str, float]] = {rank: ("", time.monotonic()) for rank in range(count) if rank != me}
        names = dict.fromkeys(beats, "")
        number, answered, slept = 0, time.monotonic(), time.monotonic()
        while not self._done.wait(BEAT_S):
            number += 1
            if (held := time.monotonic() - slept - BEAT_S) > HELD_S:  # stopped, or the whole machine was: it knows nothing of the others
                beats = {rank: (seen, at + held) for rank, (seen, at) in beats.items()}
                answered += held
            try:
                client.key_value_set(f"{_BEAT}/{me}", f"{number} {socket.gethostname()}", allow_overwrite=True)
                signs = {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(_BEAT)}
                ended = {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(_ENDED)}
                answered = time.monotonic()
            except Exception as error:  # process 0 holds the board: whatever is raised, it did not answer
                if time.monotonic() - answered > self.lost_after_s:
                    self._end(f"process 0 (the coordinator) is lost: {str(error).splitlines()[0]}")
                slept = time.monotonic()
                continue
            for rank in beats:
                if rank in ended:
                    if self._done.wait(2 * BEAT_S):  # it may have met the same error
                        return
                    self._end(f"process {rank} ended with {ended[rank]}")
                if signs.get(rank, "") != beats[rank][0]:
                    beats[rank], names[rank] = (signs[rank], time.monotonic()), signs[rank].partition(" ")[2]
                    self._heard[rank] = self._heard.get(rank, 0) + 1
                elif time.monotonic() - beats[rank][1] > self.lost_after_s + (0 if names[rank] else START_S):
                    self._end(f"process {rank} ({names[rank] or 'never seen'}) gave no sign of life for {self.lost_after_s:g} s")
            slept = time.monotonic()

    def _end(self, why: str) -> None:
        """Ends this process from the thread: the main thread may wait in a collective for ever."""
        if self._done.is_set():
            return
        print(f"error: {why}; this process ends too. The last checkpoint is whole. {self.last_words}", file=sys.__stderr__, flush=True)
        time.sleep(3 * BEAT_S if leads() else 0)  # the others read its board: without it they would be ended before they can say it
        os._exit(self.code)
