"""The corpus at each level, as root and as an ordinary user; the table of docs/sandbox.md is what comes out.

To write the table anew: python tests/tools/test_corpus.py
"""

import importlib.util
import json
import os
import pathlib
import re
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


def start(user: str, level: str, timeout: float, profiles: str, names: str | None = None) -> subprocess.Popen:
    """The lab at work on the corpus, or on some attacks of it."""
    command = [sys.executable, str(HERE / "lab.py"), user, str(HERE / "corpus.py"), level, str(timeout), profiles]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        command + [names] * (names is not None), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def finish(key: tuple[str, str], process: subprocess.Popen) -> dict:
    """What the lab found."""
    output, errors = process.communicate(timeout=600)
    if process.returncode:
        raise RuntimeError(f"the lab for {key} ended with {process.returncode}: {errors[-2000:]}")
    return json.loads(output)


def run_all() -> dict[tuple[str, str], dict]:
    """(user, level) -> what the lab found. All at once: most of the time is spent waiting for programs that hang."""
    full = "bare,numpy,ds" if importlib.util.find_spec("sklearn") and importlib.util.find_spec("pandas") else "bare,numpy"
    running = {key: start(*key, 0.6, full if key == ("user", "namespaces") else "bare,numpy") for key in RUNS}
    return {key: finish(key, process) for key, process in running.items()}


def play_again(user: str, level: str, names: set[str]) -> dict[str, str]:
    """Some attacks once more, with nothing beside them and four times the time."""
    return finish((user, level), start(user, level, 2.4, "none", ",".join(sorted(names))))["attacks"]


def document() -> str:
    """The table as docs/sandbox.md shows it."""
    text = (REPOSITORY / "docs" / "sandbox.md").read_text()
    return text.partition(MARKS[0])[2].partition(MARKS[1])[0].strip()


def doubtful(key: tuple[str, str], attacks: dict[str, str], shown: str) -> set[str]:
    """Findings that a slow machine can make: behind namespaces only lateness, at the weak levels whatever the document does not say.

    A breach behind namespaces is believed at once: no second run excuses it.
    """
    corpus, level = load_corpus(), key[1]
    if level == "namespaces":
        return {name for name, why in attacks.items() if why == corpus.LATE}
    line = next((line for line in shown.splitlines() if line.startswith(f"- `{level}`")), "")
    listed = set(re.findall(r"`([a-z]\d\w+)`", line))
    return {name for name, why in attacks.items() if bool(why) != (name in listed) and name not in corpus.RACED}


def settled(found: dict, shown: str, again=play_again) -> dict:
    """`found`, with what was doubtful replaced by a second run of it alone. A difference that is real shows in both."""
    for key, lab in found.items():
        if names := doubtful(key, lab["attacks"], shown):
            lab["attacks"] |= again(*key, names)
    return found


def levels_of(found) -> dict[str, dict[str, str]]:
    """What the table shows: an attack counts as contained behind namespaces only if it is as root and as an ordinary user."""
    both = {name: why or found["user", "namespaces"]["attacks"][name] for name, why in found["root", "namespaces"]["attacks"].items()}
    return {"namespaces": both, "landlock": found["user", "landlock"]["attacks"], "rlimits": found["user", "rlimits"]["attacks"]}


@pytest.fixture(scope="module")
def found():
    return settled(run_all(), document())


@pytest.mark.parametrize("user", ["root", "user"])
def test_namespaces_contain_all_attacks(found, user):
    escaped = {name: why for name, why in found[user, "namespaces"]["attacks"].items() if why}
    assert not escaped
    assert len(found[user, "namespaces"]["attacks"]) >= 124


@pytest.mark.parametrize("key", RUNS)
def test_no_fake_pass_at_any_level(found, key):
    fakes = {name: why for name, why in found[key]["attacks"].items() if name.startswith("j")}
    assert len(fakes) >= 15
    assert not any(fakes.values())


@pytest.mark.parametrize("key", RUNS)
def test_workspaces_and_results_are_contained_at_every_level(found, key):
    attacks = {name: why for name, why in found[key]["attacks"].items() if name[0] in "rw"}
    assert len(attacks) >= 36
    assert not {name: why for name, why in attacks.items() if why}


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
    assert document() == load_corpus().table(levels_of(found))


def labs(**weak: str) -> dict:
    """Made-up findings: two attacks, one of which `rlimits` does not contain; `weak` changes what it finds."""
    plain = {"n01_connect": "", "t01_spin": ""}
    attacks = {key: dict(plain) for key in RUNS}
    attacks["user", "rlimits"] |= {"n01_connect": "BREACH", **weak}
    return {key: {"attacks": value} for key, value in attacks.items()}


def test_a_slow_machine_does_not_change_the_table_and_a_wrong_document_is_noticed():
    table = load_corpus().table
    shown = table(levels_of(labs()))
    truth = labs()["user", "rlimits"]["attacks"]
    asked = []

    def again(user, level, names):
        asked.append((user, level, names))
        return {name: truth[name] for name in names}

    assert table(levels_of(settled(labs(), shown, again))) == shown
    assert not asked
    slow = settled(labs(t01_spin="late", n01_connect=""), shown, again)
    assert table(levels_of(slow)) == shown
    assert asked == [("user", "rlimits", {"t01_spin", "n01_connect"})]
    for wrong in (labs(n01_connect=""), labs(t01_spin="late")):  # a document that says less, and one that says more
        claimed = table(levels_of(wrong))
        assert table(levels_of(settled(labs(), claimed, again))) != claimed
    breach = labs()
    breach["root", "namespaces"]["attacks"]["n01_connect"] = "BREACH connected"
    asked.clear()
    assert settled(breach, shown, again)["root", "namespaces"]["attacks"]["n01_connect"]
    assert not asked


if __name__ == "__main__":
    print(load_corpus().table(levels_of(settled(run_all(), document()))))
