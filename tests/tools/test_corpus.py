"""The corpus at each level, as root and as an ordinary user; the table of docs/sandbox.md is what comes out.

To write the table anew: python tests/tools/test_corpus.py
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MARKS = ("<!-- table from tests/tools/test_corpus.py -->", "<!-- end of table -->")
RUNS = (("root", "namespaces"), ("user", "namespaces"), ("user", "landlock"), ("user", "rlimits"))


def load_corpus():
    """The module that the lab runs, for its list of classes and its table."""
    spec = importlib.util.spec_from_file_location("sandbox_corpus", HERE / "corpus.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_all() -> dict[tuple[str, str], dict]:
    """(user, level) -> what the lab found. All at once: most of the time is spent waiting for programs that hang."""
    full = "bare,numpy,ds" if importlib.util.find_spec("sklearn") and importlib.util.find_spec("pandas") else "bare,numpy"
    running = {}
    for user, level in RUNS:
        profiles = full if (user, level) == ("user", "namespaces") else "bare,numpy"
        command = [sys.executable, str(HERE / "lab.py"), user, str(HERE / "corpus.py"), level, "0.6", profiles]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        running[user, level] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    found = {}
    for key, process in running.items():
        output, errors = process.communicate(timeout=600)
        if process.returncode:
            raise RuntimeError(f"the lab for {key} ended with {process.returncode}: {errors[-2000:]}")
        found[key] = json.loads(output)
    return found


def levels_of(found) -> dict[str, dict[str, str]]:
    """What the table shows: an attack counts as contained behind namespaces only if it is as root and as an ordinary user."""
    both = {name: why or found["user", "namespaces"]["attacks"][name] for name, why in found["root", "namespaces"]["attacks"].items()}
    return {"namespaces": both, "landlock": found["user", "landlock"]["attacks"], "rlimits": found["user", "rlimits"]["attacks"]}


@pytest.fixture(scope="module")
def found():
    return run_all()


@pytest.mark.parametrize("user", ["root", "user"])
def test_namespaces_contain_all_attacks(found, user):
    escaped = {name: why for name, why in found[user, "namespaces"]["attacks"].items() if why}
    assert not escaped
    assert len(found[user, "namespaces"]["attacks"]) >= 88


@pytest.mark.parametrize("key", RUNS)
def test_no_fake_pass_at_any_level(found, key):
    fakes = {name: why for name, why in found[key]["attacks"].items() if name.startswith("j")}
    assert len(fakes) >= 15
    assert not any(fakes.values())


@pytest.mark.parametrize("key", RUNS)
def test_benign_programs_are_not_disturbed(found, key):
    disturbed = {name for name, why in found[key]["benign"].items() if why}
    # POSIX semaphores live in /dev/shm, which a Landlock rule cannot give to one program alone
    assert disturbed <= ({"b09_process_pool", "b23_sklearn"} if key[1] == "landlock" else set())
    assert len(found[key]["benign"]) >= 21


@pytest.mark.parametrize("key", RUNS)
def test_infrastructure_survives_the_corpus(found, key):
    metrics = found[key]["metrics"]
    assert metrics["sandbox/failed"] == 0
    assert metrics["sandbox/zygotes_lost"] == 0


@pytest.mark.parametrize("user", ["root", "user"])
def test_how_a_box_is_made_and_ended_lets_nothing_through(user):
    command = [sys.executable, str(HERE / "lab.py"), user, str(HERE / "variants.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == []


def test_the_document_shows_this_table(found):
    text = (REPOSITORY / "docs" / "sandbox.md").read_text()
    shown = text.partition(MARKS[0])[2].partition(MARKS[1])[0].strip()
    assert shown == load_corpus().table(levels_of(found))


if __name__ == "__main__":
    print(load_corpus().table(levels_of(run_all())))
