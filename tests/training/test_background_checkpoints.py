"""Checkpoints written in a background thread: the copy is true, errors come out, readers wait, and a kill leaves whole ones only."""

import errno
import json
import pathlib
import resource
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_checkpoints import policies, same

from marl_llm.training import CheckpointError, Checkpoints, checkpoints

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path):
    """Checkpoints 0, 2 and 4, written in the background; what is still under way at the end of a test is let go."""
    with Checkpoints(tmp_path / "checkpoints", keep=2, background=True) as found:
        for step in (0, 2, 4):
            found.save(step, policies(seed=step), {"step": step})
        found.wait()
        yield found


@pytest.fixture
def gate(store, monkeypatch):
    """Holds the thread before it reads the arrays, until `set`; `began` tells that it got there."""
    open_, write = threading.Event(), store._copies.save
    open_.began = threading.Event()
    monkeypatch.setattr(store._copies, "save", lambda *a, **k: open_.began.set() or open_.wait(60) and write(*a, **k))
    yield open_
    open_.set()


def test_what_happens_after_save_does_not_reach_the_file(store, gate):
    """The update reuses the very buffers, the state is counted on, and an array is deleted."""
    policy, state = policies(seed=6), {"step": 6, "silent": {"a": 1}}
    store.save(6, policy, state)
    assert gate.began.wait(60)
    assert Checkpoints(store.directory).steps() == [0, 2, 4]
    state["silent"]["a"] = 99
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(policy["a"])]
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    moved = jax.block_until_ready(update(policy["a"]))
    assert sorted(places) == sorted(x.unsafe_buffer_pointer() for x in jax.tree.leaves(moved)), "no buffer was reused: nothing is proved"
    for leaf in jax.tree.leaves(policy["b"]):
        leaf.delete()
    gate.set()
    assert same(store.restore(6, policies()), policies(seed=6))
    assert store.state(6) == {"step": 6, "silent": {"a": 1}}
    assert sorted(p.name for p in store.directory.iterdir()) == ["0", "4", "6"]


@pytest.mark.parametrize("parts", [1, 4])
def test_both_ways_of_writing_restore_the_same(tmp_path, parts):
    """Odd bytes and scalars too; arrays of several devices, of which some are split and some are whole on each."""
    mesh = jax.make_mesh((parts,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    odd = np.random.default_rng(0).integers(0, 2**32, (512, 768), np.uint32).view(np.float32)
    policy = policies(width=8, names=("a",))["a"]
    policy = policy._replace(params={"odd": odd, "half": jnp.asarray(odd, jnp.bfloat16), "n": jnp.asarray(3)})
    policy = jax.tree.map(lambda x: jax.device_put(x, split if x.ndim and x.shape[0] == 512 else whole), policy)
    for background in (True, False):
        with Checkpoints(tmp_path / str(background), background=background) as found:
            found.save(1, {"a": policy}, {})
            back = found.restore(1, {"a": jax.tree.map(lambda x: jax.device_put(jnp.zeros_like(x), x.sharding), policy)})["a"]
        assert same(jax.device_get(back), jax.device_get(policy))
        described = found._policies.metadata(found.directory / "1/policies/a").item_metadata.tree["params"]["odd"]
        rows, columns = described.storage.chunk_shape
        assert (512 // parts) % rows == 0, "a device would read more than its part"
        assert rows * columns >= 512 * 768 // 16
        assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(policy)))


@pytest.mark.parametrize("read", ["steps", "state", "restore", "save", "wait"])
def test_readers_and_the_next_write_wait(store, gate, read):
    store.save(6, policies(seed=6), {"step": 6})
    calls = {
        "steps": lambda: store.steps() == [0, 4, 6],
        "state": lambda: store.state(6) == {"step": 6},
        "restore": lambda: same(store.restore(6, policies()), policies(seed=6)),
        "save": lambda: store.save(8, policies(seed=8), {}) or (store.directory / "6").exists(),
        "wait": lambda: store.wait() or (store.directory / "6").exists(),
    }
    found = []
    reader = threading.Thread(target=lambda: found.append(calls[read]()))
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    store.wait(only_if_done=True)  # looks, and does not wait
    assert not (store.directory / "6").exists()
    gate.set()
    reader.join(60)
    assert found == [True]


def fails(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


SAID = r"could not write checkpoint .*/6: .*No space left on device.* Free space or choose another --workdir, then run the same command"


@pytest.mark.parametrize("read", ["steps", "save", "wait", "end"])
def test_an_error_of_the_thread_is_raised_once_at_the_next_call(store, monkeypatch, read):
    with monkeypatch.context() as m:
        m.setattr(store._copies, "save", fails)
        store.save(6, policies(seed=6), {})
        calls = {
            "steps": store.steps,
            "save": lambda: store.save(8, policies(), {}),
            "wait": store.wait,
            "end": lambda: store.__exit__(None, None, None),
        }
        with pytest.raises(CheckpointError, match=SAID):
            calls[read]()
    assert sorted(p.name for p in store.directory.iterdir()) == ["0", "2", "4"]
    assert same(store.restore(4, policies()), policies(seed=4))
    store.save(8, policies(seed=8), {})
    assert store.steps() == [0, 4, 8]


def test_an_error_of_the_thread_beside_another_error_is_printed(store, monkeypatch, capsys):
    monkeypatch.setattr(store._copies, "save", fails)
    store.save(6, policies(), {})
    with pytest.raises(ZeroDivisionError), store:
        raise ZeroDivisionError
    said = capsys.readouterr().err
    assert said.startswith("error: could not write checkpoint")
    assert "Free space" in said


def test_a_full_disk_under_the_thread(store):
    """The system's own error, through orbax's C++: no file may grow beyond 1 MB."""
    wide = policies(width=200_000, names=("a",))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, hard))
    try:
        store.save(6, wide, {})
        with pytest.raises(CheckpointError, match="Free space or choose another --workdir"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in store.directory.iterdir()) == ["0", "2", "4"]
    assert same(store.restore(4, policies()), policies(seed=4))


def test_too_little_room_is_told_at_once(store, monkeypatch):
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: checkpoints.shutil._ntuple_diskusage(10**9, 0, 10))
    with pytest.raises(CheckpointError, match="0.0 MB are free. Free space"):
        store.save(6, policies(), {})
    assert store.steps() == [0, 2, 4]


def test_with_several_processes_the_name_comes_when_all_parts_are_written_and_all_wait_for_it(store, monkeypatch):
    """What is between the processes is set apart here; tests/pods has two real ones."""
    gate, events, final = threading.Event(), [], store.directory / "6"

    class Parts:
        def save(self, path, tree):
            path.mkdir(parents=True)
            events.append(path.name)

        def wait_until_finished(self):
            assert gate.wait(60)
            events.append("written")

    store.wait()
    monkeypatch.setattr(checkpoints.jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoints, "from_first", lambda decide: decide())
    monkeypatch.setattr(checkpoints, "meet", lambda where, timeout_s: events.append((where, final.exists())))
    monkeypatch.setattr(store, "_of_all", lambda name: store._shared.setdefault(name, Parts()))
    names = list(policies())
    store.save(6, policies(), {"step": 6})
    assert events == names
    assert not final.exists()
    gate.set()
    store.wait()
    assert events[len(names) :] == ["written"] * len(names) + [("marl_llm/checkpoint/6", True)]
    assert store.state(6) == {"step": 6}


RUN = """
import pathlib, sys, time, jax, jax.numpy as jnp
from marl_llm.training import Checkpoints, TrainState, checkpoints
folder, held = sys.argv[1], int(sys.argv[2])
to_disk = checkpoints._to_disk
def slow(partial):
    if partial.name == f"{held}.partial":
        print("writing", flush=True)
        time.sleep(600)
    to_disk(partial)
checkpoints._to_disk = slow
update = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.5 + 1, tree), donate_argnums=0)
with Checkpoints(folder, keep=3, background=True) as store:
    policy, there = TrainState({"w": jnp.arange(8.0)}, {"m": jnp.ones(3)}), store.steps()
    if there:
        policy = store.restore(there[-1], {"a": policy})["a"]
    for step in range(there[-1] + 1 if there else 0, 6):
        policy = update(policy)
        store.save(step, {"a": policy}, {"step": step})
print("began at", there, flush=True)
"""


def test_a_kill_during_the_write_leaves_whole_checkpoints_and_the_run_goes_on(tmp_path):
    """A real SIGKILL while checkpoint 3 is complete but for its name; the end has the bytes of a run that nobody killed."""
    def start(folder, held):
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path / folder), str(held)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )

    killed = start("killed", 3)
    assert killed.stdout.readline() == "writing\n"
    assert (tmp_path / "killed" / "3.partial" / "state.json").exists()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert Checkpoints(tmp_path / "killed").steps() == [0, 1, 2]
    for folder, began in (("killed", "began at [0, 1, 2]\n"), ("whole", "began at []\n")):
        process = start(folder, -1)
        assert process.communicate(timeout=120)[0] == began
        assert process.returncode == 0
    like = {"a": checkpoints.TrainState({"w": jnp.zeros(8)}, {"m": jnp.zeros(3)})}
    one, two = (Checkpoints(tmp_path / folder) for folder in ("killed", "whole"))
    assert one.steps() == two.steps() == [0, 3, 4, 5]
    for step in one.steps():
        assert same(one.restore(step, like), two.restore(step, like))
        assert json.dumps(one.state(step)) == json.dumps(two.state(step))
