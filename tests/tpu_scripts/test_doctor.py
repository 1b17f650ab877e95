"""doctor.py finds each planted fault, names it, and says what to do; a good host passes."""

import copy
import json
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tpu_scripts"))

import doctor  # noqa: E402

GOOD = {
    "python": (3, 12), "jax": {"jax": "0.10.2", "jaxlib": "0.10.2"},
    "error": "", "platform": "tpu", "kind": "TPU v5 lite", "devices": 8, "wrong": [],
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


def test_the_versions_are_those_of_the_installation():
    low, high = re.search(r'"jax>=([\d.]+),<([\d.]+)"', (ROOT / "setup.py").read_text()).groups()
    assert tuple(tuple(map(int, bound.split("."))) for bound in (low, high)) == doctor.JAX
    assert ">={}.{}".format(*doctor.PYTHON) in (ROOT / "setup.py").read_text()
