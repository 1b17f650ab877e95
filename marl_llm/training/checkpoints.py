"""Checkpoints with orbax: each policy apart, with its optimizer; and where the run stands.

A checkpoint is a folder `checkpoints/<step>` that appears under its name only when it is complete (orbax writes beside it and
renames), so a kill at any moment leaves whole checkpoints only. Step 0 is the supervised warm-up and is kept for good; of the later ones
the newest few are kept.

The write may go on in the background, from copies of the arrays, while the run trains on: with one process in a thread here, with several
in orbax's own threads, which wait for each other through the coordination service and not by collectives.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import errno
import functools
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from marl_llm.errors import DamagedError
from marl_llm.training import digests
from marl_llm.training.processes import from_first, leads, meet
from marl_llm.training.train_state import TrainState
from marl_llm.untrusted import Bounds, read_json_file

STATE = "state.json"
STATE_BOUNDS = Bounds(size=64 << 20, infinite=True)
SMALL = 2**16  # bytes: no smaller pieces of an array
TOGETHER_S = 1200  # for all processes to write their parts of a checkpoint; one that has died is missed sooner, by `processes.Watch`


class CheckpointError(DamagedError, RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why and what to do."""


class Checkpoints:
    """The checkpoints of one run.

    `state` is a JSON object: where the run stands (step, data position, key), checked by the caller on resume.

    With `background`, `save` returns as soon as it holds a copy of all arrays in host memory, and one thread writes that copy: the arrays
    may be donated at once. The copy takes as much memory as the checkpoint, and there is never more than one. `save`, `restore`, `state`,
    `steps`, `wait` and the end of the context wait for the write that is under way, and raise the `CheckpointError` that it ended with,
    once. Use it as a context, `with Checkpoints(...) as checkpoints`, or call `wait` at the end. With several processes each writes its own
    parts; a checkpoint gets its name when all have, and all wait for that. All must call `save` and `wait` in the same order.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 2, background: bool = False):
        """`keep` is the number of checkpoints kept besides step 0. Raises `ValueError` when it is below 1."""
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep} must be at least 1")
        self.directory = pathlib.Path(directory).absolute()
        self.keep, self.background = keep, background
        self._policies = ocp.PyTreeCheckpointer()
        # the host copies belong to the thread, so orbax need not copy them once more
        handlers = ocp.type_handlers
        of_copies, of_others = handlers.NumpyHandler(deepcopy_host_arrays=False), handlers.get_type_handler(jax.Array)
        registry = handlers.create_type_handler_registry((np.ndarray, of_copies), (jax.Array, of_others))
        self._copies = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))
        self._shared: dict[str, ocp.AsyncCheckpointer] = {}  # of each policy, with several processes
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._write: concurrent.futures.Future | None = None  # that is under way, or whose end nobody has looked at

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Waits. Raises `CheckpointError`; beside another error, which goes on, it is printed."""
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            print(f"error: {failed}", file=sys.stderr)

    def wait(self, only_if_done: bool = False) -> None:
        """Until nothing is being written; with `only_if_done` it returns at once. Raises the `CheckpointError` of a write that failed."""
        write = self._write
        if write is None or (only_if_done and not write.done()):
            return
        concurrent.futures.wait([write])  # Ctrl-C may end this, and the write is still known
        self._write = None
        write.result()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. Waits, and raises as `wait`."""
        self.wait()
        return self._there()

    def _there(self) -> list[int]:
        if not self.directory.is_dir():
            return []
        marks = (STATE, digests.FILE)  # one of them may have been lost, which whoever reads the checkpoint is told
        return sorted(int(d.name) for d in self.directory.iterdir() if d.name.isdecimal() and any((d / mark).exists() for mark in marks))

    def save(self, step: int, policies: dict[str, TrainState], state: dict) -> None:
        """Writes a checkpoint and drops old ones. Raises `CheckpointError` (e.g. disk full); earlier checkpoints stay whole.

        In the background, what fails later is raised by the next call that waits, and until the checkpoint is whole the run would
        continue from the one before. An error of the write before this one is raised here, before anything is done.
        """
        self.wait()
        final, partial = self.directory / str(step), self.directory / f"{step}.partial"
        with _told(final, partial):
            from_first(lambda: self._prepare(partial, policies))
            if not self.background:
                for name, policy in policies.items():  # every process writes its own parts
                    self._policies.save(partial / "policies" / name, _on_disk(policy))
                from_first(lambda: self._publish(partial, final, state))
                return
            state = copy.deepcopy(state)  # the caller counts on in it
            if jax.process_count() > 1:
                for name, policy in policies.items():  # returns with host copies, or views of which JAX gives no update the buffer
                    self._of_all(name).save(partial / "policies" / name, _on_disk(policy))
                write = functools.partial(self._publish_together, partial, final, list(policies), state)
            else:
                copies = {name: _host_copy(_on_disk(policy)) for name, policy in policies.items()}
                write = functools.partial(self._write_copies, partial, final, copies, state)
        self._write = self._thread.submit(write)

    def _of_all(self, name: str) -> ocp.AsyncCheckpointer:
        """Writes a policy from all processes; its barriers carry the policy's name, for several are under way at a time."""
        if name not in self._shared:
            options = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
            in_order = ocp.options.AsyncOptions(timeout_secs=TOGETHER_S, create_directories_asynchronously=False)
            handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
            self._shared[name] = ocp.AsyncCheckpointer(handler, async_options=in_order, multiprocessing_options=options)
        return self._shared[name]

    def _publish_together(self, partial: pathlib.Path, final: pathlib.Path, names: list[str], state: dict) -> None:
        """In the thread of each process: the name, when all parts are written; then everybody goes on. Raises `CheckpointError`."""
        with _told(final, partial):
            for name in names:
                self._shared[name].wait_until_finished()
            if leads():
                self._publish(partial, final, state)
            meet(f"marl_llm/checkpoint/{final.name}", TOGETHER_S)

    def _write_copies(self, partial: pathlib.Path, final: pathlib.Path, copies: dict[str, tuple[dict, dict]], state: dict) -> None:
        """In the thread. Raises `CheckpointError`."""
        with _told(final, partial):
            for name in list(copies):
                tree, arguments = copies.pop(name)  # freed when it is written
                self._copies.save(partial / "policies" / name, tree, save_args=arguments)
            self._publish(partial, final, state)

    def _prepare(self, partial: pathlib.Path, policies: dict[str, TrainState]) -> None:
        """Room for a checkpoint. Raises `OSError` when there is too little."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for leftover in self.directory.glob("*.partial"):
            shutil.rmtree(leftover)
        # asked here with room for indices, because orbax writes pages of its own when a disk fills up under it
        needed = int(1.1 * sum(x.nbytes for x in jax.tree.leaves(policies))) + 2**20
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"it takes {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")
        partial.mkdir()

    def _publish(self, partial: pathlib.Path, final: pathlib.Path, state: dict) -> None:
        """Gives a complete checkpoint its name, and drops old ones."""
        (partial / STATE).write_text(json.dumps(state | {"digests": digests.FILE}))
        digests.write(partial)
        _to_disk(partial)
        if final.exists():  # a folder without state.json, which is no checkpoint
            self._drop(final)
        partial.rename(final)
        for old in [s for s in self._there() if s > 0][: -self.keep]:
            self._drop(self.directory / str(old))

    def _drop(self, folder: pathlib.Path) -> None:
        """Takes the name away first, so that a kill half-way leaves no folder that looks like a checkpoint."""
        gone = folder.with_name(f"{folder.name}.dropped.partial")
        if gone.exists():
            shutil.rmtree(gone)
        folder.rename(gone)
        shutil.rmtree(gone)

    def state(self, step: int) -> dict:
        """The run's state at a checkpoint. Raises `CheckpointError` when it is missing or damaged. Waits."""
        self.wait()
        folder = self.directory / str(step)
        try:
            if self._has_digests(folder):
                digests.check(folder, lambda name: name == STATE)
            else:
                print(f"note: {folder} has no digests, for an earlier version wrote it: damage would not be noticed", file=sys.stderr)
            state = read_json_file(folder / STATE, bounds=STATE_BOUNDS)
            state.pop("digests", None)
            return state
        except (OSError, ValueError) as error:
            raise CheckpointError(self._advice(step, error)) from error

    def restore(self, step: int, like: dict[str, TrainState]) -> dict[str, TrainState]:
        """The policies of a checkpoint, in the shapes and shardings of `like`, after their files' digests were checked, on process 0.

        Raises `CheckpointError` naming what is missing, misshapen or damaged. Waits.
        """
        trees = self._read(step, {name: _on_disk(policy) for name, policy in like.items()})
        return {name: TrainState(tree["params"], tree["optimizer"]) for name, tree in trees.items()}

    def restore_params(self, step: int, like: dict[str, TrainState]) -> dict[str, dict]:
        """The same, of parameters (or adapters) alone: optimizer states stay on the disk."""
        trees = self._read(step, {name: {"params": policy.params} for name, policy in like.items()})
        return {name: tree["params"] for name, tree in trees.items()}

    def check(self, step: int, names: Iterable[str]) -> None:
        """Raises `CheckpointError` naming a file of these policies that is not as it was written. Waits."""
        self.wait()
        from_first(lambda: self._check(step, names))

    def _read(self, step: int, like: dict[str, dict]) -> dict[str, dict]:
        """Trees of policies, or parts of them."""
        self.check(step, like)
        trees = {}
        for name, target in like.items():
            path = self.directory / str(step) / "policies" / name
            try:
                if not path.is_dir():
                    has = ", ".join(sorted(other.name for other in path.parent.glob("*"))) or "none"
                    raise FileNotFoundError(f"it has no policy {name!r}, but {has}")
                metadata = self._policies.metadata(path).item_metadata
                if metadata is None:
                    raise FileNotFoundError(f"{path / '_METADATA'}, which describes the arrays of {name}, is missing or damaged")
                parts = {part: tree for part, tree in metadata.tree.items() if part in target}
                self._compare(name, _shapes(parts), _shapes(target))
                args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape), target)
                arguments = ocp.args.PyTreeRestore(target, args, partial_restore=True)
                trees[name] = self._policies.restore(path, args=arguments)
            except Exception as error:  # orbax and tensorstore raise many kinds; all mean the same to the user
                raise CheckpointError(self._advice(step, error)) from error
        return trees

    def set_aside(self, step: int) -> None:
        """Takes the checkpoints behind a step, from which nobody will go on, out of the way: `STEP.left`, which may be deleted."""
        for old in [s for s in self.steps() if s > step]:
            left = self.directory / f"{old}.left"
            shutil.rmtree(left, ignore_errors=True)
            (self.directory / str(old)).rename(left)
            print(f"note: checkpoint {old} is now {left}", file=sys.stderr)

    def _check(self, step: int, names: Iterable[str]) -> None:
        """Raises `CheckpointError` naming a file of these policies that is not as it was written."""
        folder, wanted = self.directory / str(step), tuple(f"policies/{name}/" for name in names)
        if self._has_digests(folder):
            try:
                digests.check(folder, lambda name: name.startswith(wanted))
            except (OSError, ValueError) as error:
                raise CheckpointError(self._advice(step, error)) from error

    @staticmethod
    def _has_digests(folder: pathlib.Path) -> bool:
        """Whether a checkpoint was written with digests; without, an earlier version wrote it."""
        if (folder / digests.FILE).exists():
            return True
        try:
            return "digests" in read_json_file(folder / STATE, bounds=STATE_BOUNDS)
        except (OSError, ValueError):
            return False  # whoever asks for the state is told

    @staticmethod
    def _compare(name: str, there: dict[str, str], wanted: dict[str, str]) -> None:
        """Raises `ValueError` naming the leaf; orbax itself would convert another type without a word."""
        for leaf in sorted(set(there) | set(wanted)):
            if there.get(leaf) != wanted.get(leaf):
                raise ValueError(f"{name}{leaf} is {there.get(leaf, 'missing')} there, the config makes {wanted.get(leaf, 'none')}")

    def _advice(self, step: int, why) -> str:
        """What cannot be read, why, and the newest other checkpoint whose files are as they were written."""
        others = [s for s in reversed(self._there()) if s != step and self._is_whole(s)]
        return f"checkpoint {self.directory / str(step)} cannot be read: {str(why)[:600]}. " + (
            f"Go on from the checkpoint of step {others[0]}: python -m experiments.train --resume={self.directory.parent} "
            f"--step={others[0]} (evaluate, export and serve take --step={others[0]} too)"
            if others
            else "Start again in an empty --workdir."
        )

    def _is_whole(self, step: int) -> bool:
        folder = self.directory / str(step)
        try:
            if self._has_digests(folder):
                digests.check(folder, lambda name: True)
            return (folder / STATE).is_file()
        except (OSError, ValueError):
            return False


def _on_disk(state: TrainState) -> dict[str, Any]:
    """A state under the names that checkpoints have had since the first version."""
    return {"params": state.params, "optimizer": state.opt_state}


def abstract(policies: dict[str, TrainState]) -> dict[str, TrainState]:
    """Shapes, types and places of policies, without their arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), policies)


@contextlib.contextmanager
def _told(final: pathlib.Path, partial: pathlib.Path) -> Iterator[None]:
    """What fails while a checkpoint is written, as a `CheckpointError` that says what to do; nothing of it stays."""
    try:
        yield
    except Exception as error:  # orbax and tensorstore raise many kinds when a disk is full
        if leads():
            _clear(partial)
        raise CheckpointError(
            f"could not write checkpoint {final}: {error}. Free space or choose another --workdir, then run the same command "
            "again; it continues from the last whole checkpoint."
        ) from error


def _host_copy(tree: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """NumPy arrays with memory of their own, and how orbax is to store them.

    Of an array on one CPU device, NumPy sees a view of the buffer, which the next update would be given: it is copied. In other cases
    there is a copy already. (`jax.device_get` would leave a hold on the buffer with JAX 0.11, so that the next update could not reuse it.)
    An array of n different shards is stored in pieces of 1/n of a shard, which orbax makes as square as it can: so a device that restores
    its part reads little else, unless the array is long and narrow.
    """

    def one(x: jax.Array) -> np.ndarray:
        array = np.asarray(x)
        return array if array.flags.owndata else array.copy()

    def stored(x: jax.Array) -> ocp.SaveArgs:
        part = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        return ocp.SaveArgs(chunk_byte_size=max(part * part // x.nbytes, min(part, SMALL)) if 0 < part < x.nbytes else None)

    return jax.tree.map(one, tree), jax.tree.map(stored, tree)


def _clear(folder: pathlib.Path, seconds: float = 5.0, quiet: float = 0.5) -> None:
    """Removes what a failed save left, which orbax's threads may still be writing: until nothing came for `quiet` seconds.

    Gives up silently after `seconds` in all, because the reason that the caller is about to tell matters more; the next save
    removes what is left.
    """
    end, calm = time.monotonic() + seconds, 0.0
    while time.monotonic() < end and calm < quiet:
        calm = 0.0 if folder.exists() else calm + 0.02
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


def _to_disk(folder: pathlib.Path) -> None:
    """Waits until every file of a folder is on the disk, so that its new name outlives a power cut too."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _shapes(tree) -> dict[str, str]:
    """Shape and type of every array by its path, written alike for the trees that are saved and those that orbax describes."""
    def part(key):
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/" + "/".join(map(part, where)): f"{tuple(leaf.shape)} {leaf.dtype}" for where, leaf in leaves}
