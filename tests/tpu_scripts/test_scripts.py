"""The launch scripts: dry runs equal to golden files; success, refusal and preemption played by stand-ins for the real commands.

New golden files: GOLDEN=write python -m pytest -n 0 tests/tpu_scripts/test_scripts.py
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS, GOLDEN = ROOT / "tpu_scripts", ROOT / "tests" / "data" / "tpu_scripts"
TPU = ("--project=a-project", "--zone=a-zone", "--name=first")
NEW = ("--type=v5litepod-8", "--runtime=v2-alpha-tpuv5-lite")
TRAIN = ("--", "--config=experiments/configs/quickstart.py")
POD = ("--name=first", "--image=registry/marl_llm:1", "--claim=runs", "--accelerator=tpu-v5-lite-podslice", "--topology=2x4", "--chips=8")
XPK = ("--name=first", "--image=registry/marl_llm:1", "--project=a-project", "--zone=a-zone", "--cluster=a-cluster", "--type=v5litepod-8")
DRY = {
    "tpu_vm_keep": ("tpu_vm.sh", "keep", *TPU, *NEW, "--disk=runs", "--spot", *TRAIN, "--config.schedule=a:1, b:2"),
    "tpu_vm_fetch": ("tpu_vm.sh", "fetch", *TPU),
    "tpu_vm_doctor": ("tpu_vm.sh", "doctor", *TPU),
    "tpu_vm_doctor_hosts": ("tpu_vm.sh", "doctor", *TPU, "--hosts=4", "--shared=/mnt/runs"),
    "tpu_vm_logs": ("tpu_vm.sh", "logs", *TPU),
    "tpu_vm_delete": ("tpu_vm.sh", "delete", *TPU),
    "gke_image": ("gke.sh", "image", "--image=registry/marl_llm:1"),
    "gke_submit": ("gke.sh", "submit", *POD, *TRAIN, '--config.schedule=a:1, "b" & c'),
    "gke_xpk": ("gke.sh", "xpk", *XPK, *TRAIN, "--workdir=/storage/first"),
    "gke_logs": ("gke.sh", "logs", "--name=first"),
    "gke_delete": ("gke.sh", "delete", "--name=first"),
    "gke_submit_hosts": ("gke.sh", "submit", *POD, "--topology=4x4", "--chips=4", "--hosts=4", *TRAIN),
    "tpu_vm_run_hosts": ("tpu_vm.sh", "run", *TPU, "--hosts=4", "--shared=/mnt/runs", *TRAIN),
    "slurm": ("slurm.sbatch", "--workdir=/shared/first", *TRAIN),
    "local": ("local.sh", "2", "--workdir=/runs/two"),
}


def call(script, *args, path=None, **env):
    """The script's end and all that it said. Without `path`, no command but bash's own and the basic ones."""
    known = {"HOME": os.environ.get("HOME", "/"), "PATH": f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin", "TMPDIR": "/tmp"}
    command = ["bash", str(SCRIPTS / script), *args]
    return subprocess.run(command, env=known | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)


def dry(name):
    script, *args = DRY[name]
    at = args.index("--") if "--" in args else len(args)
    return call(script, *args[:at], "--dry_run", *args[at:])


@pytest.mark.parametrize("name", DRY)
def test_a_dry_run_prints_every_command_and_file(name):
    end = dry(name)
    assert end.returncode == 0, end.stdout
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(end.stdout)
    assert end.stdout == file.read_text()


def test_every_golden_file_is_of_a_dry_run():
    assert {file.stem for file in GOLDEN.glob("*.txt")} == set(DRY)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("tpu_vm.sh", "create", "--name=first"), "error: create needs --project= --zone= --type= --runtime= (see --help)"),
        (("tpu_vm.sh", "run", *TPU), "error: run needs the run's config: ... run -- --config=experiments/configs/quickstart.py"),
        (("tpu_vm.sh", "create", "--projct=p"), "error: unknown option --projct; there are: project zone"),
        (("tpu_vm.sh", *TPU), "error: an action is missing: create, wait"),
        (("gke.sh", "submit"), "error: submit needs --name= --image= --claim= --accelerator= --topology= --chips= (see --help)"),
        (("gke.sh", "xpk", *XPK, *TRAIN), "error: xpk needs --workdir= among the run's flags"),
        (("slurm.sbatch",), "error: --workdir= is missing: a directory that every node sees"),
        (("slurm.sbatch", "--workdir=/shared/first", *TRAIN), "error: submit it: sbatch --partition=..."),
        (("local.sh", "2"), "error: local.sh needs --workdir= (see --help)"),
        (("local.sh", "--workdir=/x"), "error: how many processes?"),
        (("local.sh", "2", "--workdir=/x", "--devices=two"), "error: --devices=two must be a whole number"),
        (("tpu_vm.sh", "run", *TPU, "--hosts=4", *TRAIN), "error: --hosts=4 needs --shared=DIR, a directory that all hosts have mounted"),
    ],
)
def test_what_is_missing_is_asked_for_by_name(args, said, tmp_path):
    for name in ("gcloud", "kubectl", "xpk"):
        fake(tmp_path, name, "exit 9")
    end = call(*args, path=tmp_path)
    assert end.returncode == 2
    assert end.stdout.startswith(said)


def test_nothing_of_a_user_is_written_into_a_script():
    for file in SCRIPTS.iterdir():
        if file.is_file() and file.suffix != ".md":
            found = re.findall(r"(?:--(?:project|zone|claim|partition|account)=|gs://)([\w./-]+)", file.read_text())
            assert set(found) <= {"P", "Z", "A", "..."}, (file.name, found)


def test_shellcheck_finds_nothing():
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    program = shutil.which("shellcheck") or str(beside)
    scripts = [str(file) for file in SCRIPTS.iterdir() if file.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 5
    end = subprocess.run([program, "-x", *scripts], cwd=SCRIPTS, capture_output=True, text=True, timeout=120)
    assert end.stdout + end.stderr == ""


# --- commands that stand in for the real ones ------------------------------------------------------------------------------------------


def fake(folder, name, body):
    """A command that notes how it was called in `calls` and does `body`."""
    file = folder / name
    file.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
    file.chmod(0o755)


def calls(folder, word):
    return [line for line in (folder / "calls").read_text().splitlines() if word in line]


# `states` holds what the next looks at the queued resource give, one a line; the last one stays. `exits` the same of the run's exit code.
GCLOUD = """
next() { head -1 "$1"; [[ $(wc -l < "$1") == 1 ]] || sed -i 1d "$1"; }
case "$*" in
  *"queued-resources describe"*) state=$(next HERE/states); [[ $state != GONE ]] || exit 1; echo "$state" ;;
  *"queued-resources create"*)
    [[ ! -e HERE/quota ]] || { echo "ERROR: Quota limit 'TPUV5sPreemptibleLitepod' has been exceeded." >&2; exit 1; }
    ;;
  *".exit 2>/dev/null"*) next HERE/exits ;;
esac
"""


@pytest.fixture
def google(tmp_path):
    """`google(states, exits)`: the end of `tpu_vm.sh keep` and the folder with the calls."""

    def play(states, exits=("",), quota=False):
        (tmp_path / "states").write_text("\n".join(states) + "\n")
        (tmp_path / "exits").write_text("\n".join(exits) + "\n")
        (tmp_path / "quota").touch() if quota else None
        fake(tmp_path, "gcloud", GCLOUD.replace("HERE", str(tmp_path)))
        fake(tmp_path, "git", "true")
        return call("tpu_vm.sh", "keep", *TPU, *NEW, "--spot", *TRAIN, path=tmp_path, POLL_S="0"), tmp_path

    return play


def test_a_tpu_run_from_the_request_to_its_end(google):
    end, folder = google(["GONE", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], ["", "", "0"])
    assert end.returncode == 0, end.stdout
    order = [re.search(r"create|describe|scp|pip install|experiments.train|\.exit 2|delete|archive", line)[0] for line in calls(folder, "")]
    assert [one for one in order if one not in ("describe", ".exit 2")] == ["create", "archive", "scp", "pip install", "experiments.train"]
    assert order.count(".exit 2") == 3
    assert "first: WAITING_FOR_RESOURCES" in end.stdout


def test_a_refused_quota_is_said_and_nothing_else_is_tried(google):
    end, folder = google(["GONE"], quota=True)
    assert end.returncode == 1
    assert "Quota limit 'TPUV5sPreemptibleLitepod' has been exceeded" in end.stdout
    assert "error: Google refused v5litepod-8 in a-zone. A quota is raised at" in end.stdout
    assert len(calls(folder, "")) == 2


def test_a_request_that_fails_later_is_said_with_the_command_that_explains(google):
    end, _ = google(["GONE", "WAITING_FOR_RESOURCES", "FAILED"])
    assert end.returncode == 1
    assert "error: the request for first is FAILED; gcloud compute tpus queued-resources describe first --project=a-project" in end.stdout


def test_a_preempted_tpu_is_replaced_and_the_same_run_goes_on(google):
    end, folder = google(["GONE", "ACTIVE", "ACTIVE", "SUSPENDED", "GONE", "ACTIVE"], ["", "0"])
    assert end.returncode == 0, end.stdout
    assert "first was preempted (SUSPENDED); the run goes on on a new one" in end.stdout
    assert len(calls(folder, "queued-resources create")) == 2
    assert len(calls(folder, "queued-resources delete")) == 1
    runs = calls(folder, "experiments.train")
    assert len(runs) == 2
    assert runs[0] == runs[1]


def test_a_run_that_fails_by_itself_is_not_repeated(google):
    end, folder = google(["GONE", "ACTIVE"], ["", "2"])
    assert end.returncode == 2
    assert "error: the run ended with 2; tpu_vm.sh logs shows why" in end.stdout
    assert len(calls(folder, "experiments.train")) == 1


@pytest.mark.parametrize(("code", "requeued", "ends"), [(0, 0, 0), (143, 1, 143), (2, 0, 2)])
def test_slurm_requeues_a_run_that_was_told_to_stop_and_no_other(tmp_path, code, requeued, ends):
    fake(tmp_path, "srun", f"exit {code}")
    fake(tmp_path, "scontrol", "true")
    end = call("slurm.sbatch", "--workdir=/shared/first", *TRAIN, path=tmp_path, SLURM_JOB_ID="17")
    assert end.returncode == ends
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 17"] * requeued
    assert calls(tmp_path, "srun")[0].endswith("--workdir=/shared/first --grace_s=100 --config=experiments/configs/quickstart.py")


def test_slurm_starts_as_many_processes_as_the_job_has_tasks(tmp_path):
    fake(tmp_path, "srun", "true")
    assert call("slurm.sbatch", "--workdir=/shared/first", *TRAIN, path=tmp_path, SLURM_JOB_ID="17", SLURM_NTASKS="4").returncode == 0
    (said,) = calls(tmp_path, "srun")
    assert said.startswith("srun --ntasks=4 ")
    assert said.endswith(" --distributed=auto")


# notes its command; rank 1 waits for a signal, rank 0 ends with the code that CODE names, after a signal if WAIT is set
TRAINS = """
case "$*" in *"import socket"*) echo 4242; exit ;; esac
trap 'echo "TERM $*" >> HERE/calls; exit 143' TERM
case "$*" in *",2,0"*) echo up > HERE/zero; [[ -n ${WAIT:-} ]] || { touch HERE/over; exit ${CODE:-0}; } ;; *) echo up > HERE/one ;; esac
while [[ ! -e HERE/over ]]; do sleep 0.05; done
"""


def trains(tmp_path):
    fake(tmp_path, "python", TRAINS.replace("HERE", str(tmp_path)))
    return ("local.sh", "2", "--workdir=/runs/two", "--devices=3", "--", "--config=x.py")


@pytest.mark.parametrize("code", [0, 2])
def test_local_starts_joined_processes_and_ends_with_the_first_ones_code(tmp_path, code):
    end = call(*trains(tmp_path), path=tmp_path, CODE=str(code))
    assert end.returncode == code, end.stdout
    said = sorted(calls(tmp_path, "experiments.train"))
    wanted = "python -m experiments.train --workdir=/runs/two --config=x.py --config.devices=6 --distributed=127.0.0.1:4242,2,"
    assert said == [f"{wanted}0", f"{wanted}1"]


def test_a_signal_to_local_reaches_every_process_and_is_waited_for(tmp_path):
    script, *args = trains(tmp_path)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WAIT": "1"}
    running = subprocess.Popen(["bash", str(SCRIPTS / script), *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while not ((tmp_path / "zero").exists() and (tmp_path / "one").exists()):
            assert running.poll() is None, running.stdout.read()
            time.sleep(0.02)
        running.terminate()
        said = running.communicate(timeout=60)[0]
    finally:
        running.kill()
        (tmp_path / "over").touch()
    assert running.returncode == 143, said
    assert len(calls(tmp_path, "TERM")) == 2


def test_a_job_that_slurm_does_not_requeue_says_how_to_go_on(tmp_path):
    fake(tmp_path, "srun", "exit 143")
    fake(tmp_path, "scontrol", "exit 1")
    end = call("slurm.sbatch", "--workdir=/shared/first", *TRAIN, path=tmp_path, SLURM_JOB_ID="17")
    assert end.returncode == 2
    assert "the same sbatch command continues the run" in end.stdout


def test_the_jobset_reaches_kubectl_whole_and_a_refusal_is_said(tmp_path):
    fake(tmp_path, "kubectl", f"cat > {tmp_path}/applied")
    flags = ("--", "--config=x.py", '--config.schedule=a "b" & \\c')
    assert call("gke.sh", "submit", *POD, *flags, path=tmp_path).returncode == 0
    text = (tmp_path / "applied").read_text()
    assert "@" not in text.split("\n", 1)[1]
    job = yaml.safe_load(text)
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"] == ["--workdir=/runs/first", "--grace_s=25", *flags[1:]]
    env = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
    assert env == {"JAX_COORDINATOR_ADDRESS": "first-train-0-0.first:8476", "JAX_NUM_PROCESSES": "1"}
    assert (job["kind"], job["metadata"]["name"], pod["terminationGracePeriodSeconds"]) == ("JobSet", "first", 30)
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "runs"
    fake(tmp_path, "kubectl", "cat > /dev/null; echo 'exceeded quota' >&2; exit 1")
    end = call("gke.sh", "submit", *POD, *flags, path=tmp_path)
    assert end.returncode == 1
    assert "exceeded quota\nerror: kubectl refused the job" in end.stdout


def test_a_refusal_of_xpk_is_said(tmp_path):
    fake(tmp_path, "xpk", "echo 'no capacity' >&2; exit 1")
    end = call("gke.sh", "xpk", *XPK, *TRAIN, "--workdir=/storage/first", path=tmp_path)
    assert end.returncode == 1
    assert "no capacity\nerror: xpk refused the job" in end.stdout


def test_the_skypilot_file_asks_for_what_is_the_users_and_names_the_run_directory():
    task = yaml.safe_load((SCRIPTS / "skypilot.yaml").read_text())
    assert [name for name, value in task["envs"].items() if value is None] == ["NAME", "BUCKET", "CONFIG"]
    assert task["file_mounts"]["/runs"]["source"] == "${STORE}://${BUCKET}"
    assert '--workdir="/runs/$NAME"' in task["run"]
    used = set(re.findall(r"\$\{?([A-Z_]+)", (SCRIPTS / "skypilot.yaml").read_text()))
    assert used - set(task["envs"]) == {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"}  # set by SkyPilot on each node
