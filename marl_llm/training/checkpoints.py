"""Checkpoints with orbax: each policy apart, with its optimizer; and where the run stands.

A checkpoint is a folder `checkpoints/<step>` that appears under its name only when it is complete (orbax writes beside it and
renames), so a kill at any moment leaves whole checkpoints only. Step 0 is the warm start and is kept for good; of the later ones
the newest few are kept.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import shutil
import time

import jax
import orbax.checkpoint as ocp

from marl_llm.training.policy import Policy
from marl_llm.training.processes import from_first, leads


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which, why and what to do."""


class Checkpoints:
    """The checkpoints of one run.

    `state` is a JSON object: where the run stands (step, data position, key), checked by the caller on resume.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        """`keep` is the number of checkpoints kept besides step 0. Raises `ValueError` when it is below 1."""
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep} must be at least 1")
        self.directory = pathlib.Path(directory).absolute()
        self.keep = keep
        self._policies = ocp.PyTreeCheckpointer()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.directory.is_dir():
            return []
        return sorted(int(d.name) for d in self.directory.iterdir() if d.name.isdigit() and (d / "state.json").is_file())

    def save(self, step: int, policies: dict[str, Policy], state: dict) -> None:
        """Writes a checkpoint and drops old ones. Raises `CheckpointError` (e.g. disk full); earlier checkpoints stay whole."""
        final, partial = self.directory / str(step), self.directory / f"{step}.partial"
        try:
            from_first(lambda: self._prepare(partial, policies))
            for name, policy in policies.items():  # every process writes its own parts
                self._policies.save(partial / "policies" / name, policy._asdict())
            from_first(lambda: self._publish(partial, final, state))
        except Exception as error:  # orbax and tensorstore raise many kinds when a disk is full
            if leads():
                _clear(partial)
            raise CheckpointError(
                f"could not write checkpoint {final}: {error}. Free space or choose another --workdir, then run the same command "
                "again; it continues from the last whole checkpoint."
            ) from error

    def _prepare(self, partial: pathlib.Path, policies: dict[str, Policy]) -> None:
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
        (partial / "state.json").write_text(json.dumps(state))
        _to_disk(partial)
        if final.exists():  # a folder without state.json, which is no checkpoint
            self._drop(final)
        partial.rename(final)
        for old in [s for s in self.steps() if s > 0][: -self.keep]:
            self._drop(self.directory / str(old))

    def _drop(self, folder: pathlib.Path) -> None:
        """Takes the name away first, so that a kill half-way leaves no folder that looks like a checkpoint."""
        gone = folder.with_name(f"{folder.name}.dropped.partial")
        if gone.exists():
            shutil.rmtree(gone)
        folder.rename(gone)
        shutil.rmtree(gone)

    def state(self, step: int) -> dict:
        """The run's state at a checkpoint. Raises `CheckpointError` when it is missing or damaged."""
        path = self.directory / str(step) / "state.json"
        try:
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(self._advice(step, error)) from error

    def restore(self, step: int, like: dict[str, Policy]) -> dict[str, Policy]:
        """The policies of a checkpoint, in the shapes and shardings of `like`.

        Raises `CheckpointError` naming what is missing, misshapen or damaged.
        """
        out = {}
        for name, policy in like.items():
            path = self.directory / str(step) / "policies" / name
            target = policy._asdict()
            try:
                there = self._policies.metadata(path).item_metadata
                if there is None:
                    raise FileNotFoundError(f"{path} holds no policy")
                self._compare(name, _shapes(there.tree), _shapes(target))
                args = jax.tree.map(lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape), target)
                tree = self._policies.restore(path, item=target, restore_args=args)
            except Exception as error:  # orbax and tensorstore raise many kinds; all mean the same to the user
                raise CheckpointError(self._advice(step, error)) from error
            out[name] = Policy(**tree)
        return out

    @staticmethod
    def _compare(name: str, there: dict[str, str], wanted: dict[str, str]) -> None:
        """Raises `ValueError` naming the leaf; orbax itself would convert another type without a word."""
        for leaf in sorted(set(there) | set(wanted)):
            if there.get(leaf) != wanted.get(leaf):
                raise ValueError(f"{name}{leaf} is {there.get(leaf, 'missing')} there, the config makes {wanted.get(leaf, 'none')}")

    def _advice(self, step: int, why) -> str:
        others = [s for s in self.steps() if s != step]
        return (
            f"checkpoint {self.directory / str(step)} cannot be read: {str(why)[:600]}. "
            + (f"Delete that folder to go on from step {others[-1]}." if others else "Start again in an empty --workdir.")
        )


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
    part = lambda key: str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/" + "/".join(map(part, where)): f"{tuple(leaf.shape)} {leaf.dtype}" for where, leaf in leaves}
