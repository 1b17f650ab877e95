"""Tools on a real Ray cluster: two nodes on this machine. Needs the extra `ray` (docs/remote.md); the suite does not.

    python -m venv V && V/bin/pip install -e '.[test,ray]'
    RAY_USAGE_STATS_ENABLED=0 V/bin/python -m pytest -n 0 -s tests/live/ray_tools.py

What is seen: the corpus of attacks gets the verdicts that it gets here; a node that is killed under load loses none of 64 jobs and doubles
none; with no node left nothing is an outcome; no process of a sandbox stays; how long a program takes, here and there.
"""

import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest
import ray
from ray.cluster_utils import Cluster

from marl_llm.tools import ClusterSandbox, FailureKind, Limits, Sandbox, Submission
from marl_llm.tools.sandbox.on_ray import RayCluster

TOOLS = pathlib.Path(__file__).resolve().parents[1] / "tools"
TIMEOUT_S = float(os.environ.get("CORPUS_TIMEOUT_S", "1.5"))
LIMIT_S = 300.0


def corpus():
    """The module with the attacks' checks."""
    spec = importlib.util.spec_from_file_location("sandbox_corpus", TOOLS / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def two_nodes():
    """A head without CPUs, on which the driver is, and two nodes with two each; the address is given to nobody."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def zygotes() -> set[int]:
    """Processes of sandboxes on this machine."""
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"from inside import" in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:  # it ended while we looked
            continue
    return found


def until(condition, what: str) -> None:
    """Waits for a condition."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_the_corpus_gets_the_verdicts_that_it_gets_here(two_nodes):
    module, found = corpus(), {}
    os.environ["MARL_SECRET_TOKEN"] = "tok-93187"
    module.put_canaries()
    module.serve(socket.AF_UNIX, "\0sbx_canary_sock")
    module.serve(socket.AF_INET, ("127.0.0.1", 45454))
    sources = {kind: sorted((module.DATA / kind).glob("*.txt")) for kind in ("attacks", "benign")}
    for where in ("here", "ray"):
        started = time.monotonic()
        sandbox = Sandbox(2) if where == "here" else ClusterSandbox(RayCluster(two_nodes[0].address))
        if where == "ray":  # `vandalised` looks whether a program broke its supervisor; `attempts` says so too
            figures = sandbox.metrics
            sandbox.metrics = lambda figures=figures: {"sandbox/zygotes_lost": 0.0} | figures()
        with sandbox:
            attacks = {path.stem: module.attack(sandbox, path.read_text(), TIMEOUT_S) for path in sources["attacks"]}
            benign = {path.stem: module.benign(sandbox, path.read_text()) for path in sources["benign"]}
        found[where] = attacks | benign
        held, well = (sum(not why for why in verdicts.values()) for verdicts in (attacks, benign))
        seconds = time.monotonic() - started
        print(f"\n{where}: {held} of {len(attacks)} attacks contained, {well} of {len(benign)} benign undisturbed, {seconds:.0f} s")
    assert found["ray"] == found["here"]
    assert not {name: why for name, why in found["ray"].items() if why}


@pytest.mark.parametrize("how", ["node", "actor"])
def test_a_node_that_is_killed_under_load_loses_none_of_64_jobs_and_doubles_none(two_nodes, how):
    cluster, nodes = two_nodes
    notes: list[str] = []
    answered: list[int] = []
    others = zygotes()
    with ClusterSandbox(RayCluster(cluster.address), note=notes.append) as sandbox:
        slow = "import time; time.sleep(0.3); print({})"
        futures = [sandbox.submit(Submission(slow.format(n), environment=n % 4, limits=Limits(timeout_s=20))) for n in range(64)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: answered.append(number))
        until(lambda: len(answered) >= 10, "the first ten")
        if how == "node":
            cluster.remove_node(nodes[1], allow_graceful=False)
        else:
            pids = [int(p) for p in subprocess.run(["pgrep", "-f", "ray::NodeSandbox"], capture_output=True, text=True).stdout.split()]
            os.kill(pids[-1], signal.SIGKILL)
        found = [future.result(LIMIT_S) for future in futures]
        figures = sandbox.metrics()
    print(f"\nkilled: {how}\n" + "\n".join(notes) + "\n" + json.dumps(figures))
    assert [one.stdout for one in found] == [f"{n}\n" for n in range(64)]
    assert sorted(answered) == list(range(64))
    assert figures["sandbox/done"] == 64
    assert figures["sandbox/retried"] >= 1
    assert figures["sandbox/nodes_lost"] == 1
    until(lambda: not zygotes() - others, "no process of a sandbox stays")


def test_with_no_node_left_nothing_is_an_outcome_and_a_new_node_is_used(two_nodes):
    cluster, nodes = two_nodes
    with ClusterSandbox(RayCluster(cluster.address)) as sandbox:
        futures = [sandbox.submit(Submission("import time; time.sleep(1); print(1)")) for _ in range(12)]
        until(lambda: sandbox.metrics()["sandbox/running"] == 4, "both nodes are busy")
        tick = time.monotonic()
        for node in nodes:
            cluster.remove_node(node, allow_graceful=False)
        found = [future.result(LIMIT_S) for future in futures]
        print(f"\nall said after {time.monotonic() - tick:.1f} s: {found[-1].failure.message}")
        aborted = [one for one in found if not one.ok]
        assert len(aborted) >= 8
        assert {one.failure.kind for one in aborted} == {FailureKind.UNAVAILABLE}
        cluster.add_node(num_cpus=2)
        until(lambda: sandbox.run(Submission("print(2)")).ok, "the new node runs programs")


def test_how_long_a_program_takes(two_nodes):
    with Sandbox(4) as here, ClusterSandbox(RayCluster(two_nodes[0].address)) as there:
        for name, sandbox in (("here", here), ("ray", there)):
            sandbox.run_batch([Submission("print(1)")] * 16)  # warm
            one = []
            for _ in range(50):
                tick = time.perf_counter()
                sandbox.run(Submission("print(1)"))
                one.append(time.perf_counter() - tick)
            tick = time.perf_counter()
            sandbox.run_batch([Submission("print(1)")] * 400)
            rate = 400 / (time.perf_counter() - tick)
            print(f"\n{name}: median {sorted(one)[25] * 1000:.1f} ms one by one, {rate:.0f} programs/s of 400 at once")


def test_ray_leaves_the_handler_of_sigterm_alone(two_nodes):
    code = (
        "import signal, sys; mine = lambda *_: None; signal.signal(signal.SIGTERM, mine)\n"
        "from marl_llm.tools.sandbox.on_ray import RayCluster; cluster = RayCluster(sys.argv[1])\n"
        "assert signal.getsignal(signal.SIGTERM) is mine; cluster.close()"
    )
    done = subprocess.run([sys.executable, "-c", code, two_nodes[0].address], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:]
