"""One run on two processes: real ones, joined over gloo on this machine."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.processes import free_port
from marl_llm.training import Checkpoints, processes

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
CACHE = os.environ.get("MARL_LLM_TEST_CACHE", "/tmp/marl_llm_test_cache")

BEATS = """
import sys, time, jax
from marl_llm.training import Checkpoints, processes
processes.start(sys.argv[1], lost_after_s=3.0)
with processes.Watch(3.0, "go on so"):
    print("ready", flush=True)
    time.sleep(120)
"""

MEETS = """
import sys, time
from marl_llm.training import processes
lost_after_s = float(sys.argv[2])
processes.start(sys.argv[1], lost_after_s=lost_after_s)
with processes.Watch(lost_after_s, "go on so"):
    print("ready", flush=True)
    sys.stdin.readline()
    raise OSError("no room")
"""

SEES = """
import pathlib, sys, jax
from marl_llm.training import processes
processes.start(sys.argv[1], lost_after_s=30.0)
for folder in map(pathlib.Path, (sys.argv[2], sys.argv[3 + processes.rank()])):
    folder.mkdir(exist_ok=True)
    processes.from_first(lambda: (folder / "config.json").write_text("{}"))
    try:
        processes.check_shared(folder)
        print("seen by all", flush=True)
    except processes.ProcessError as error:
        print(error, flush=True)
jax.distributed.shutdown()
"""


def launch(count, *words, program=None):
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",)} | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    first = ["-c", program] if program else [str(HERE / "together.py")]
    port = free_port()

    def how(rank):
        return f"127.0.0.1:{port},{count},{rank}" if count > 1 else "off"

    def line(rank):
        return [sys.executable, *first, how(rank), *map(str, words)]

    pipe = subprocess.PIPE
    return [subprocess.Popen(line(rank), cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True) for rank in range(count)]


def outcome(running):
    try:
        said = [one.communicate(timeout=300) for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0] * len(running), said
    return json.loads(said[0][0].splitlines()[-1])


def test_two_processes_play_and_learn_what_one_does_and_another_split_goes_on_from_their_checkpoint(tmp_path):
    """To the last byte of every parameter: the order in which devices are added up does not depend on who has them."""
    one = outcome(launch(1, 4, tmp_path / "one", 0, 2, CACHE))
    two = outcome(launch(2, 4, tmp_path / "two", 0, 1, CACHE, "background"))
    assert Checkpoints(tmp_path / "two").steps() == [1, 2]  # the second is of parameters that nobody goes on from
    assert two["processes"] == 2
    assert one["processes"] == 1
    assert one["devices"] == two["devices"] == 4
    further = outcome(launch(1, 4, tmp_path / "two", 1, 2, CACHE))
    assert two["samples"] + further["samples"] == one["samples"]
    assert further["parameters"] == one["parameters"]
    assert further["gradient"] == one["gradient"] > 0


def test_a_directory_that_a_process_cannot_see_is_refused_by_all(tmp_path):
    """Of two directories the first is seen by both processes; in place of the second each has its own."""
    running = launch(2, tmp_path / "shared", tmp_path / "zero", tmp_path / "one", program=SEES)
    for text in [one.communicate(timeout=120)[0] for one in running]:
        assert text.count("seen by all\n") == 1, text
        text = text.partition("seen by all\n")[2]
        assert f"{tmp_path}/shared" not in text
        assert " is not shared: process 1 on " in text
        assert "cannot see" in text
        assert "Put --workdir on a file system that all hosts mount" in text


@pytest.fixture(scope="module")
def three():
    """Three joined processes, each of which has given a sign of life."""
    running = launch(3, program=BEATS)
    try:
        for one in running:
            while one.stdout.readline() != "ready\n":
                assert one.poll() is None, one.stderr.read()
        time.sleep(3)
        yield running
    finally:
        for one in running:
            one.kill()


def test_processes_that_were_all_stopped_for_a_while_do_not_take_each_other_for_lost(three):
    """As by a job scheduler that suspends them, or a virtual machine that is moved."""
    for order in (three, three[::-1]):  # the one that spoke last before is not missed by the others
        for one in three:
            one.send_signal(signal.SIGSTOP)
        time.sleep(5)
        for one in order:
            one.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        time.sleep(2.5)
        assert [one.poll() for one in three] == [None, None, None]


def test_a_killed_process_is_named_and_the_others_end(three):
    three[2].send_signal(signal.SIGKILL)
    began = time.monotonic()
    said = [one.communicate(timeout=60)[1] for one in three[:2]]
    assert time.monotonic() - began < 30
    assert all("process 2" in text and "go on so" in text for text in said), said
    assert [one.returncode for one in three[:2]] == [2, 2]


@pytest.mark.parametrize("killed", [True, False])
def test_an_error_behind_which_a_killed_process_may_stand_names_it_and_any_other_ends_soon(killed):
    running = launch(2, 5 if killed else 100, program=MEETS)
    try:
        for one in running:
            while one.stdout.readline() != "ready\n":
                assert one.poll() is None, one.stderr.read()
        time.sleep(2.5)  # so that each has given a sign of life
        if killed:
            running[1].send_signal(signal.SIGKILL)
        said = running[0].communicate("on\n", timeout=60)[1]
        assert ("process 1" in said and "go on so" in said) == killed, said
        assert ("OSError: no room" in said) != killed
        if killed:
            assert running[0].returncode == 2
        else:
            assert running[0].returncode == 1  # as Python ends by an error, and not when JAX has waited for the other and aborts
            assert "process 0 ended with OSError: no room" in running[1].communicate(timeout=60)[1]
    finally:
        for one in running:
            one.kill()


@pytest.mark.parametrize(
    ("how", "variables", "found"),
    [
        ("off", {}, None),
        ("10.0.0.1:8476,4,3", {}, ("10.0.0.1:8476", 4, 3)),
        ("auto", {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "1"}, ("a:1", 2, 1)),
        ("auto", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}, (None, None, None)),
        ("auto", {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, (None, None, None)),
        ("auto", {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}, (None, None, None)),
    ],
)
def test_how_the_processes_find_each_other(how, variables, found):
    assert processes.parse(how, variables) == found


@pytest.mark.parametrize("how", ["on", "host,2,0", "h:1,2,2", "h:1,0,0", "h:1,2"])
def test_a_malformed_start_says_what_it_must_look_like(how):
    with pytest.raises(processes.ProcessError, match="host:port|ranks are"):
        processes.parse(how, {})


def test_a_launchers_numbers_are_decimals():
    with pytest.raises(processes.ProcessError, match="JobSet: .* must be host:port, a number and a number"):
        processes.parse("auto", {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "②", "JOB_COMPLETION_INDEX": "1"})


def test_auto_without_a_launcher_names_all_that_was_looked_for():
    with pytest.raises(processes.ProcessError) as error:
        processes.parse("auto", {"SLURM_JOB_ID": "1"})
    assert all(name in str(error.value) for names in processes.LAUNCHERS.values() for name in names if name != "SLURM_JOB_ID")
    assert "(SLURM_JOB_ID" not in str(error.value)


def test_a_process_that_computed_something_else_is_named():
    processes.compare("step 3", [{"norm": 1.0, "samples": 4}, {"norm": 1.0, "samples": 4}])
    processes.compare("step 3", [{"norm": float("nan")}, {"norm": float("nan")}])
    with pytest.raises(processes.ProcessError, match="step 3.*process 1 has norm=1.5, process 0 has 1.0"):
        processes.compare("step 3", [{"norm": 1.0}, {"norm": 1.5}])


def test_an_error_travels_with_its_class_and_message():
    assert repr(processes._plain(OSError("no room"))) == repr(OSError("no room"))

    class Own(Exception):
        def __init__(self, a, b):
            super().__init__(a)

    assert "Own: x" in str(processes._plain(Own("x", 2)))


def test_on_one_process_nothing_is_exchanged():
    assert processes.exchange("x") == ["x"]
    assert processes.from_first(lambda: 3) == 3
    assert processes.agreed_stop(1, True, norm=1.0)
    with pytest.raises(OSError, match="here"):
        processes.from_first(lambda: (_ for _ in ()).throw(OSError("here")))
