"""Checkpoints: what was saved comes back bit for bit; a kill, a full disk or a damaged file never costs an earlier one."""

import contextlib
import json
import os
import re
import resource
import shutil
import subprocess
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marl_llm.runs.building import restored
from marl_llm.training import CheckpointError, Checkpoints, checkpoints, make_optimizer, make_train_state


def policies(width=4, seed=0, names=("a", "b")):
    """Small policies whose every leaf is random, optimizer included, and no two are alike."""
    dice = np.random.default_rng(seed)
    optimizer = make_optimizer()

    def one():
        params = {"embed": {"table": jnp.zeros((5, width))}, "layers": jnp.zeros((2, width, 3))}
        leaves, tree = jax.tree.flatten(make_train_state(params, optimizer))

        def draw(x):
            return dice.integers(1, 99, x.shape) if jnp.issubdtype(x.dtype, jnp.integer) else dice.normal(size=x.shape)
        # copied on the device: JAX may read a NumPy array where it lies, and such a buffer cannot be donated
        return jax.tree.unflatten(tree, [jnp.asarray(draw(x), x.dtype).copy() for x in leaves])

    return {name: one() for name in names}


def same(one, two):
    """Equal trees, byte for byte."""
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)):
        assert (a.dtype, a.shape, np.asarray(a).tobytes()) == (b.dtype, b.shape, np.asarray(b).tobytes())
    return True


@pytest.fixture
def saved(tmp_path):
    """A directory with checkpoints 0, 2 and 4."""
    store = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (0, 2, 4):
        store.save(step, policies(seed=step), {"step": step, "next_instance": 7 * step, "x": 0.1 + step})
    return store


def test_what_was_saved_comes_back(saved):
    assert saved.steps() == [0, 2, 4]
    for step in (4, 0, 2):
        like = policies(seed=99)
        back = saved.restore(step, like)
        assert same(back, policies(seed=step))
        assert saved.state(step) == {"step": step, "next_instance": 7 * step, "x": 0.1 + step}
        assert same(like, policies(seed=99))
    assert list(saved.restore(2, {"b": policies()["b"]})) == ["b"]  # each policy apart
    assert not same_or_false(saved.restore(2, policies())["a"], saved.restore(2, policies())["b"])


def same_or_false(one, two):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two)))


def test_odd_values_survive(tmp_path):
    """NaN payloads, signed zeros, denormals and the largest counters are bytes like others."""
    odd = np.asarray([np.nan, -0.0, 1e-45, np.inf, -np.inf, 3.4e38, 1 / 3, 0.0], np.float32).reshape(2, 4)
    odd.view(np.uint32)[0, 0] = 0x7FC12345
    policy = policies()["a"]
    policy = policy._replace(params={"x": jnp.asarray(odd), "n": jnp.asarray([2**31 - 1, -(2**31)], jnp.int32)})
    store = Checkpoints(tmp_path)
    store.save(1, {"a": policy}, {})
    assert same(store.restore(1, {"a": jax.tree.map(jnp.zeros_like, policy)})["a"], policy)


def test_the_newest_are_kept_and_step_zero_always(saved):
    for step in (6, 8, 10):
        saved.save(step, policies(seed=step), {"step": step})
        assert saved.steps() == [0, step - 2, step]
    assert sorted(p.name for p in saved.directory.iterdir()) == ["0", "10", "8"]
    assert same(saved.restore(0, policies()), policies(seed=0))
    one = Checkpoints(saved.directory, keep=1)
    one.save(12, policies(seed=12), {})
    assert one.steps() == [0, 12]


def test_keep_and_absence(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0 must be at least 1"):
        Checkpoints(tmp_path, keep=0)
    assert Checkpoints(tmp_path / "nowhere").steps() == []
    with pytest.raises(CheckpointError, match="3 cannot be read: .* Start again in an empty --workdir"):
        Checkpoints(tmp_path).state(3)


def test_restoring_follows_the_sharding_asked_for(saved):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    like = jax.device_put(policies(), spread)
    back = saved.restore(2, like)
    assert all(x.sharding == spread for x in jax.tree.leaves(back))
    assert same(jax.device_get(back), jax.device_get(policies(seed=2)))


# --- kills and full disks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["policies", "state", "disk"])
def test_a_kill_while_writing_leaves_the_earlier_ones(saved, monkeypatch, moment):
    """SystemExit stands for the kill: nothing that the writer does on an error may be needed."""

    def die(*_, **__):
        raise SystemExit

    with monkeypatch.context() as m:
        if moment == "policies":
            m.setattr(saved._policies, "save", die)
        elif moment == "state":
            m.setattr(json, "dumps", die)
        else:
            m.setattr(checkpoints, "_to_disk", die)
        with pytest.raises(SystemExit):
            saved.save(6, policies(seed=6), {})
    assert (saved.directory / "6.partial").exists()
    again = Checkpoints(saved.directory, keep=2)
    assert again.steps() == [0, 2, 4]
    again.save(6, policies(seed=6), {"step": 6})
    assert sorted(p.name for p in again.directory.iterdir()) == ["0", "4", "6"]
    assert same(again.restore(6, policies()), policies(seed=6))


def test_a_kill_while_dropping_leaves_no_half_checkpoint(saved, monkeypatch):
    removed = []

    def die(path, *_, **__):
        removed.append(path.name)
        raise SystemExit

    with monkeypatch.context() as m:
        m.setattr(shutil, "rmtree", die)
        with pytest.raises(SystemExit):
            saved.save(6, policies(seed=6), {})
    assert removed == ["2.dropped.partial"]
    again = Checkpoints(saved.directory, keep=2)
    assert again.steps() == [0, 4, 6]
    assert same(again.restore(6, policies()), policies(seed=6))
    again.save(8, policies(seed=8), {})
    assert sorted(p.name for p in again.directory.iterdir()) == ["0", "6", "8"]


def test_a_folder_without_state_is_no_checkpoint_and_is_replaced(saved):
    (saved.directory / "6" / "policies").mkdir(parents=True)
    (saved.directory / "notes").mkdir()
    assert saved.steps() == [0, 2, 4]
    saved.save(6, policies(seed=6), {})
    assert saved.steps() == [0, 4, 6]
    assert same(saved.restore(6, policies()), policies(seed=6))


def test_a_full_disk_is_told_and_costs_nothing(saved):
    """No file may grow beyond 1 MB, which the arrays of a wider policy do: the system's own error, through orbax's C++.

    The limit holds for the file into which pytest puts this process's output too, and orbax logs tens of kB here.
    """
    wide = policies(width=200_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
    try:
        with pytest.raises(CheckpointError) as error:
            saved.save(6, wide, {"step": 6})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = str(error.value)
    assert said.startswith(f"could not write checkpoint {saved.directory / '6'}: ")
    assert "Free space or choose another --workdir" in said
    assert len(said) < 1200
    assert sorted(p.name for p in saved.directory.iterdir()) == ["0", "2", "4"]
    assert same(saved.restore(4, policies()), policies(seed=4))
    saved.save(6, policies(seed=6), {})
    assert saved.steps() == [0, 4, 6]


def test_a_failed_save_whose_threads_still_write_leaves_nothing(saved, monkeypatch):
    """Orbax raises at the first array that fails, while its other threads go on writing and make their folders anew."""

    def late(folder):
        for i in range(40):
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # removed meanwhile: made anew in the next round
                folder.mkdir(parents=True, exist_ok=True)
                for j in range(20):
                    (folder / f"{i}.{j}").write_text("")
            time.sleep(0.01)

    writer = []

    def fails(path, *_):
        writer.append(threading.Thread(target=late, args=(path / "ocdbt",)))
        writer[0].start()
        raise OSError("File too large")

    with monkeypatch.context() as m:
        m.setattr(saved._policies, "save", fails)
        with pytest.raises(CheckpointError, match="File too large"):
            saved.save(6, policies(seed=6), {})
    writer[0].join()
    assert sorted(p.name for p in saved.directory.iterdir()) == ["0", "2", "4"]


def test_a_disk_that_is_too_small_is_told_before_it_is_full(saved, monkeypatch, capfd):
    bytes_needed = int(1.1 * sum(x.nbytes for x in jax.tree.leaves(policies()))) + 2**20
    for free, fits in ((bytes_needed - 1, False), (bytes_needed, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: shutil._ntuple_diskusage(10**9, 0, free))
        if fits:
            saved.save(6, policies(seed=6), {})
            assert saved.steps() == [0, 4, 6]
        else:
            with pytest.raises(CheckpointError, match=r"6: .*it takes 1\.0 MB, and 1\.0 MB are free. Free space or choose another"):
                saved.save(6, policies(seed=6), {})
            assert sorted(p.name for p in saved.directory.iterdir()) == ["0", "2", "4"]
    assert "Traceback" not in capfd.readouterr().err


def test_a_directory_that_is_a_file_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="could not write checkpoint"):
        Checkpoints(tmp_path / "checkpoints").save(0, policies(), {})


# --- damage and other shapes -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax leaves coroutines behind
def test_damage_is_told_with_what_to_do(saved):
    """Every file of a policy in turn is cut to half, then to nothing."""
    folder = saved.directory / "4" / "policies" / "a"
    found = 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1):
        whole = path.read_bytes()
        for size in (len(whole) // 2, 0):
            path.write_bytes(whole[:size])
            try:
                back = saved.restore(4, policies(seed=99))
            except CheckpointError as error:
                found += 1
                said = str(error)
                assert said.startswith(f"checkpoint {saved.directory / '4'} cannot be read: ")
                assert f"--resume={saved.directory.parent} --step=2" in said
            else:  # a file that nothing depends on: then nothing may differ
                assert same(back, policies(seed=4))
            path.write_bytes(whole)
    assert found >= 4
    assert same(saved.restore(4, policies()), policies(seed=4))
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"policies/a/\S+ is missing\. Go on from the checkpoint of step 2"):
        saved.restore(4, policies())
    assert same(saved.restore(2, policies()), policies(seed=2))


def flipped(path, bit):
    """The file with one bit changed."""
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


def test_one_flipped_bit_in_any_file_is_named_and_nothing_is_restored(saved):
    """The arrays, orbax's descriptions, the run's state and the digests themselves."""
    folder = saved.directory / "4"
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert {"state.json", "SHA256SUMS", "_METADATA"} <= {path.name for path in files}
    for number, path in enumerate(files):
        whole = path.read_bytes()
        for bit in range(number, 8 * len(whole), max(1, 8 * len(whole) // 5)):
            flipped(path, bit)
            with pytest.raises(CheckpointError, match=f"{re.escape(str(path))} is damaged"):
                saved.state(4), saved.restore(4, policies())
            path.write_bytes(whole)
    assert same(saved.restore(4, policies()), policies(seed=4))


@pytest.mark.parametrize("name", ["state.json", "SHA256SUMS", "policies/a/_METADATA"])
def test_a_lost_file_is_named_and_its_checkpoint_is_still_listed(saved, name):
    (saved.directory / "4" / name).unlink()
    assert saved.steps() == [0, 2, 4]
    with pytest.raises(CheckpointError, match=f"4/{name} is missing"):
        saved.state(4), saved.restore(4, policies())


@pytest.mark.parametrize("strange", ["file", "link", "pipe"])
def test_what_was_not_written_with_a_checkpoint_is_refused(saved, tmp_path, strange):
    """A further file, a link in the place of one, and a named pipe, which nobody waits for."""
    folder = saved.directory / "4" / "policies" / "a"
    if strange == "file":
        (folder / "more").write_text("")
    else:
        (folder / "_METADATA").rename(tmp_path / "there")
        if strange == "link":
            (folder / "_METADATA").symlink_to(tmp_path / "there")
        else:
            os.mkfifo(folder / "_METADATA")
    with pytest.raises(CheckpointError, match="more does not belong to it" if strange == "file" else "_METADATA is no plain file"):
        saved.restore(4, policies())


def test_the_other_checkpoint_that_is_named_is_one_without_damage(saved):
    for step in ("4", "2"):
        flipped(next((saved.directory / step / "policies").rglob("_METADATA")), 9)
    with pytest.raises(CheckpointError, match="Go on from the checkpoint of step 0"):
        saved.restore(4, policies())


def test_a_checkpoint_of_an_earlier_version_loads_with_a_note(saved, capsys):
    folder = saved.directory / "4"
    (folder / "SHA256SUMS").unlink()
    state = json.loads((folder / "state.json").read_text())
    assert state.pop("digests") == "SHA256SUMS"
    (folder / "state.json").write_text(json.dumps(state))
    assert saved.state(4) == state
    assert same(saved.restore(4, policies()), policies(seed=4))
    assert capsys.readouterr().err.count("no digests") == 1


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="no sha256sum here")
def test_the_digests_are_those_of_sha256sum(saved):
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=saved.directory / "4", capture_output=True, text=True)
    assert (done.returncode, "FAILED" in done.stdout, "state.json: OK" in done.stdout) == (0, False, True)


def test_checkpoints_that_are_set_aside_are_no_longer_listed_and_keep_their_files(saved):
    saved.set_aside(2)
    assert saved.steps() == [0, 2]
    assert (saved.directory / "4.left" / "state.json").is_file()


@pytest.mark.parametrize("text", ["[" * 5000, "[1]", '{"step": 1', '{"step": NaN}', "\xff"])
def test_a_state_that_is_no_bounded_object_is_told(saved, text):
    """Of a checkpoint without digests, where nothing else would tell."""
    (saved.directory / "4" / "SHA256SUMS").unlink()
    (saved.directory / "4" / "state.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"4 cannot be read: .*state\.json"):
        saved.state(4)


def test_a_damaged_state_is_told(saved):
    (saved.directory / "4" / "state.json").write_text('{"step": ')
    with pytest.raises(CheckpointError, match=r"4 cannot be read: .*state\.json is damaged.* Go on from the checkpoint of step 2"):
        saved.state(4)


def test_another_shape_names_the_leaf(saved):
    with pytest.raises(CheckpointError) as error:
        saved.restore(4, policies(width=6))
    said = str(error.value)
    assert "4 cannot be read: a/optimizer/1/mu/embed/table is (5, 4) float32 there, the config makes (5, 6) float32" in said
    # none of it was changed
    assert same(saved.restore(4, policies()), policies(seed=4))


def test_another_type_names_the_leaf(saved):
    like = policies()
    like["b"] = like["b"]._replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), like["b"].params))
    with pytest.raises(CheckpointError) as error:
        saved.restore(4, like)
    assert "b/params/embed/table is (5, 4) float32 there, the config makes (5, 4) bfloat16" in str(error.value)


def test_missing_and_additional_leaves_are_named(saved):
    like = policies()
    like["a"] = like["a"]._replace(params=like["a"].params | {"head": jnp.zeros((3,))})
    with pytest.raises(CheckpointError, match=r"a/params/head is missing there, the config makes \(3,\) float32"):
        saved.restore(4, like)
    like["a"] = like["a"]._replace(params={"layers": like["a"].params["layers"]})
    with pytest.raises(CheckpointError, match=r"a/params/embed/table is \(5, 4\) float32 there, the config makes none"):
        saved.restore(4, like)
    with pytest.raises(CheckpointError, match="it has no policy 'c', but a, b"):
        saved.restore(4, {"c": policies()["a"]})


class Anything:
    """A team of these policies that takes any state over."""

    policies = models = staticmethod(policies)

    def restore_start(self, params):
        pass

    def restore(self, now, state):
        pass


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"samples": -1}, "samples must be a number"),
        ({"wall_s": -0.5}, "wall_s must be a number"),
        ({"silent": {"a": "x"}}, "silent.a must be a whole number"),
        ({"decay_steps": []}, "decay_steps must be a whole number"),
    ],
)
def test_counts_of_a_run_that_are_none_are_refused_in_one_line_that_names_the_file(tmp_path, changes, why):
    state = {"step": 0, "seed": 0, "samples": 2**40, "sampled_tokens": 0, "wall_s": 0, "cpu_s": 0.5, "silent": {"a": 2}, "team": {}}
    store = Checkpoints(tmp_path)
    store.save(0, policies(), state)
    assert restored(Anything(), store, 0) == state  # an earlier version wrote no decay_steps
    other = Checkpoints(tmp_path / "other")
    other.save(0, policies(), state | {"decay_steps": 10} | changes)
    with pytest.raises(CheckpointError, match=rf"0/state\.json: it cannot be taken over \(ValueError: {why}"):
        restored(Anything(), other, 0)
