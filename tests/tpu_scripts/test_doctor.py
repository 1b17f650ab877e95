"""doctor.py finds each planted fault, names it, and says what to do; a good host passes."""

import copy
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tpu_scripts"))

import doctor  # noqa: E402
import hosts  # noqa: E402

from benchmarks.processes import free_port  # noqa: E402

GOOD = {
    "python": (3, 12), "jax": {"jax": "0.10.2", "jaxlib": "0.10.2"},
    "error": "", "platform": "tpu", "kind": "TPU v5 lite", "devices": 8, "wrong": [], "rates": [0.9, 0.85],
    "memory_gib": 100.0, "open_files": 65536, "disk": {"error": "", "free_gib": 500.0, "skew_s": 0.01},
    "sandbox_level": "namespaces", "sandbox_error": "", "programs_per_s": 40.0, "retriever_error": "",
}  # fmt: skip
ASKED = ("--workdir=/runs", "--platform=tpu", "--devices=8", "--sandbox=namespaces", "--retriever=http://host:8000")
FAULTS = [
    ("python", {"python": (3, 10)}, "install Python 3.11 or newer"),
    ("jax", {"jax": {"jax": "0.9.1", "jaxlib": "0.9.1"}}, "pip install 'jax>=0.10,<0.13', the same on every host"),
    ("jax", {"jax": {"jax": "0.13.0", "jaxlib": "0.13.0"}}, "the same on every host"),
    ("jaxlib", {"jax": {"jax": "0.10.2", "jaxlib": "0.11.0"}}, "pip install jaxlib==0.10.2"),
    ("platform", {"platform": "cpu"}, "install the extra of the machine ([tpu] or [cuda])"),
    ("devices", {"devices": 4}, "8 are asked for: another machine type"),
    ("arithmetic", {"wrong": ["TPU_3"]}, "give this machine back"),
    ("rates", {"rates": [0.9, 0.3]}, "50% are asked for: end what else uses the device"),
    ("memory", {"memory_gib": 2.0}, "8 GiB are asked for"),
    ("open files", {"open_files": 256}, "ulimit -n 1024"),
    ("run directory", {"disk": {"error": "Read-only file system", "free_gib": 0.0, "skew_s": 0.0}}, "--workdir=/runs must be a directory"),
    ("space", {"disk": {"error": "", "free_gib": 3.0, "skew_s": 0.0}}, "20 GiB are asked for: delete old runs"),
    ("clock", {"disk": {"error": "", "free_gib": 500.0, "skew_s": -40.0}}, "synchronise the clocks"),
    ("sandbox", {"sandbox_level": "landlock"}, "docs/sandbox.md says what namespaces needs"),
    ("sandbox", {"sandbox_level": "", "sandbox_error": "no probe"}, "docs/sandbox.md"),
    ("sandbox rate", {"programs_per_s": 0.5}, "2 are asked for: more cores"),
    ("retriever", {"retriever_error": "connection refused"}, "python -m marl_llm.tools.retriever serve; is http://host:8000 reachable"),
]


def asked(*args):
    return doctor.parser().parse_args([*args])


def test_a_good_host_passes_every_check():
    checks = doctor.judge(GOOD, asked(*ASKED))
    assert all(check.good for check in checks)
    assert {check.name for check in checks} == {name for name, *_ in FAULTS}


@pytest.mark.parametrize(("name", "fault", "todo"), FAULTS)
def test_a_planted_fault_is_found_by_name_and_says_what_to_do(name, fault, todo, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "look", lambda _: copy.deepcopy(GOOD) | fault)
    assert doctor.main([*ASKED]) == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert line.split("  ")[1].strip() == name
    assert todo in said
    assert said.endswith(f"no: 1 of {said.count('ok  ') + 1} checks failed\n")


def test_jax_without_devices_is_one_failure_with_its_reason():
    gone = {"error": "RuntimeError: no TPU", "platform": "none", "kind": "nothing", "devices": 0}
    bad = {check.name: check.found for check in doctor.judge(GOOD | gone, asked(*ASKED)) if not check.good}
    assert bad == {"platform": "RuntimeError: no TPU", "devices": "0 x nothing"}


def test_what_is_not_asked_for_is_not_looked_at():
    names = {check.name for check in doctor.judge(GOOD | {"sandbox_level": "", "platform": "cpu"}, asked("--workdir=/runs"))}
    assert names.isdisjoint({"sandbox", "sandbox rate", "retriever"})


def test_this_machine_is_looked_at(tmp_path, capsys):
    """With real files, a real sandbox at whatever level there is, and the devices of this process."""
    small = ("--memory_gib=0.1", "--space_gib=0.01", "--programs_per_s=0.01", "--sandbox=rlimits", "--platform=cpu")
    code = doctor.main([f"--workdir={tmp_path / 'new'}", *small, "--json"])
    page = json.loads(capsys.readouterr().out)
    assert (code, [check for check in page["checks"] if not check["good"]]) == (0, [])
    assert page["go"] is True
    assert list((tmp_path / "new").iterdir()) == []


def test_a_run_directory_that_cannot_be_made_is_found(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in doctor.disk(tmp_path / "file" / "runs")["error"]


def test_a_clock_that_differs_from_the_file_servers_is_found(tmp_path, monkeypatch):
    now = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: now() + 100)
    assert -101 < doctor.disk(tmp_path)["skew_s"] < -99


def test_a_device_that_computes_wrongly_is_found(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "device_put", lambda x, device: x + (device == jax.local_devices()[-1]))
    assert doctor.devices()["wrong"] == [str(jax.local_devices()[-1])]


def test_a_retriever_that_is_not_there_is_found():
    assert "http://127.0.0.1:9" in doctor.retriever("http://127.0.0.1:9")


def test_rates_are_shares_of_the_data_sheet(monkeypatch):
    from marl_llm.training import roofline, speed

    monkeypatch.setattr(roofline, "chip_of", lambda kind: roofline.CHIPS["v5e"] if kind == "cpu" else None)
    monkeypatch.setattr(speed, "machine_limits", lambda mesh, dtype: speed.MachineLimits(98.5e12, 819e9))
    assert doctor.devices()["rates"] == [0.5, 1.0]


# ------------------------------------------------------------------------------------------------ between hosts
HOST = {
    "host": "a", "python": "3.12.1", "jax": "0.10.2", "jaxlib": "0.10.2", "code": "f00d", "platform": "tpu", "kind": "TPU v5 lite",
    "devices": 4, "failed": [], "seen": [0, 1, 2], "clock": 1000.0, "rate": 8.0, "sum": True,
}  # fmt: skip
BETWEEN = [
    ("same software", {"jax": "0.10.1"}, "process 2 on c has jax 0.10.1, process 0 0.10.2", "the same commit on every host"),
    ("same software", {"code": "beef"}, "process 2 on c has code beef, process 0 f00d", "the same commit on every host"),
    ("same devices", {"devices": 3}, "process 2 on c has devices 3, process 0 4", "as many of the same devices"),
    ("every host", {"failed": ["space", "sandbox"]}, "process 2 on c: space, sandbox", "that host's page says what to do"),
    ("shared directory", {"seen": [2]}, "process 2 on c: does not see the file of process 0 on a, does not see the file of process 1 on b",
     "put --workdir=/runs on a file system that all hosts mount"),
    ("clocks", {"clock": 960.0}, "process 2 on c: -40.0 s from process 0", "synchronise the clocks"),
    ("link", {"rate": 0.05}, "all-reduce at 0.05 GB/s: 1 GB of gradients takes 26.7 s", "0.2 GB/s are asked for: hosts of one slice"),
    ("link", {"sum": False}, "an all-reduce gave a wrong sum", "0.2 GB/s are asked for"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fault", "found", "todo"), BETWEEN)
def test_a_fault_between_hosts_is_found_and_names_the_host(name, fault, found, todo):
    three = [HOST | {"host": host} for host in "abc"]
    good = hosts.judge(three, asked("--workdir=/runs"))
    assert [check for check in good if not check[1]] == []
    assert {check[0] for check in good} == {one[0] for one in BETWEEN}
    three[2] |= fault
    (bad,) = [check for check in hosts.judge(three, asked("--workdir=/runs")) if not check[1]]
    assert bad[0] == name
    assert bad[2] == found
    assert todo in bad[3]


PLANTED = """
import importlib.metadata, sys, time
sys.path.insert(0, "tpu_scripts")
import doctor
if sys.argv[-1] == "planted":
    version, now = importlib.metadata.version, time.time
    importlib.metadata.version = lambda name: "0.9.9" if name == "jax" else version(name)
    time.time = lambda: now() + 30
    sys.argv[1] += "_of_its_own"
sys.argv.pop()
sys.exit(doctor.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("planted", ["", "planted"])
def test_two_real_processes_look_at_each_other(tmp_path, planted):
    port, env = free_port(), {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    small = [f"--workdir={tmp_path / 'runs'}", "--memory_gib=0.1", "--space_gib=0.01", "--link_gbs=0.001", "--json"]

    def line(rank):
        return [sys.executable, "-c", PLANTED, *small, f"--distributed=127.0.0.1:{port},2,{rank}", planted if rank else ""]

    pipe = subprocess.PIPE
    running = [subprocess.Popen(line(rank), cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True) for rank in range(2)]
    try:
        said = [one.communicate(timeout=300) for one in running]
    finally:
        for one in running:
            one.kill()
    pages = [json.loads(out.splitlines()[-1]) for out, _ in said]
    bad = [{check["name"]: check["found"] for check in page["checks"] if not check["good"]} for page in pages]
    assert [one.returncode for one in running] == [int(bool(planted))] * 2, said
    if planted:  # versions differ, so that no all-reduce is tried; the second process also fails checks of its own
        assert {"same software", "shared directory", "clocks", "every host"} == bad[0].keys()
        assert bad[0]["every host"].startswith("process 1 on ")
        assert {"jax", "clock"} <= bad[1].keys()
        assert "has jax 0.9.9, process 0 " in bad[0]["same software"]
        assert "+30.0 s from process 0" in bad[0]["clocks"]
    else:
        assert bad == [{}, {}]
        assert "GB/s" in next(check["found"] for check in pages[0]["checks"] if check["name"] == "link")
    assert list((tmp_path / "runs").iterdir()) == []


def test_processes_that_do_not_come_together_are_one_failure(capsys):
    assert doctor.main(["--workdir=/nowhere", "--distributed=here"]) == 1
    said = capsys.readouterr().out
    assert "--distributed='here' is not 'auto', 'off' or 'host:port,processes,rank'" in said
    assert "no: 1 of 1 checks failed" in said


def test_the_versions_are_those_of_the_installation():
    low, high = re.search(r'"jax>=([\d.]+),<([\d.]+)"', (ROOT / "setup.py").read_text()).groups()
    assert tuple(tuple(map(int, bound.split("."))) for bound in (low, high)) == doctor.JAX
    assert ">={}.{}".format(*doctor.PYTHON) in (ROOT / "setup.py").read_text()
