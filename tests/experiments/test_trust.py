"""Law 15: what somebody else made is data. Nothing in a run directory runs, pays or sends unless the person at the keyboard said so."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from ml_collections import config_dict

from marl_llm.cli import rescore
from marl_llm.runs import building, trust, workdir
from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve

ROOT = pathlib.Path(__file__).parent.parent.parent
OWN = ROOT / "tests" / "games" / "own"
HOSTILE = "import pathlib\npathlib.Path({mark!r}).touch()\nfrom marl_llm.games import JointLetter as Lock\n"


def let_go():
    """What the end of a process does."""
    for handle in workdir._HELD.values():
        os.close(handle)
    workdir._HELD.clear()


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """A user's state directory of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path / "state"
    let_go()


@pytest.fixture
def own(tmp_path):
    """A run directory of this user, with a game of his own."""
    config = base_config("x", f"{OWN}/lock.py:Lock", "at_grpo")
    with resolve(config) as plan:
        workdir.open_workdir(tmp_path / "run", config, "x.py", "", plan.own_files)
    let_go()
    return tmp_path / "run"


def stranger(folder, keys, game="plan_path"):
    """A run directory that somebody else wrote: this config with other keys."""
    config = workdir.plain(base_config("x", "plan_path", "at_grpo"))
    if game != "plan_path":
        config |= {"game": {"name": game}, "script": {}}
    for key, value in keys.items():
        section = config
        for part in key.split(".")[:-1]:
            section = section.setdefault(part, {})
        section[key.split(".")[-1]] = value
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layout": workdir.LAYOUT, "name": "x", "config": config}))
    return folder


# --- code ------------------------------------------------------------------------------------------------------------------------


def test_a_run_of_ones_own_needs_no_flag(own):
    with resolve(workdir.read_config(own), workdir.game_dir_of(own)) as plan:
        assert plan.game.name == "lock"


def test_a_moved_run_of_ones_own_needs_no_flag(own, tmp_path):
    own.rename(tmp_path / "moved")
    assert workdir.read_config(tmp_path / "moved").game.name.endswith("lock.py:Lock")


@pytest.mark.parametrize("way", ["config", "edited", "new_file", "compiled", "link", "writable", "no_state"])
def test_a_run_that_is_no_longer_as_it_was_written_is_not_run(own, tmp_path, state, way):
    """Each way in which somebody else's code comes into a run directory of one's own."""
    game, mark = own / "game" / "lock.py", tmp_path / "mark"
    if way == "config":
        (own / "config.json").write_text((own / "config.json").read_text().replace("lock.py:Lock", "lock.py:LockState"))
    elif way == "edited":
        game.write_text(HOSTILE.format(mark=str(mark)))
    elif way == "new_file":  # imported in place of a library's
        (own / "game" / "numpy.py").write_text(HOSTILE.format(mark=str(mark)))
    elif way == "compiled":
        (own / "game" / "__pycache__").mkdir()
        (own / "game" / "__pycache__" / "digits.cpython-311.pyc").write_bytes(b"x")
    elif way == "link":
        game.rename(tmp_path / "lock.py")
        game.symlink_to(tmp_path / "lock.py")
    elif way == "writable":
        game.chmod(0o666)
    else:
        shutil.rmtree(state)
    with pytest.raises(ConfigError, match=r"is not as a run of yours .* it would run the code of .*--trust \(docs/trust\.md\)") as error:
        workdir.read_config(own)
    assert "\n" not in str(error.value)
    assert not mark.exists()


def test_a_strangers_module_is_not_even_imported(tmp_path, monkeypatch):
    """Importing has effects of its own."""
    (tmp_path / "effects.py").write_text(HOSTILE.format(mark=str(tmp_path / "mark")))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("effects:Lock", "os:system", "antigravity:x"):
        run = stranger(tmp_path / name.replace(":", "_"), {"game.command": f"touch {tmp_path}/mark"}, game=name)
        with pytest.raises(ConfigError, match=f"run the code of '{name}'.* Nothing of it was run"):
            workdir.read_config(run)
    assert not (tmp_path / "mark").exists()
    assert "antigravity" not in sys.modules


def test_even_a_trusted_directory_calls_nothing_that_is_no_game(tmp_path):
    run = stranger(tmp_path / "run", {"game.command": f"touch {tmp_path}/mark"}, game="os:system")
    with pytest.raises(ConfigError, match="os:system is a function that does not say that it makes a game"):
        workdir.read_config(run, trusted=True)
    assert not (tmp_path / "mark").exists()


def test_a_module_that_the_person_named_on_this_command_line_is_taken(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("from marl_llm.games import JointLetter\n\n\ndef five() -> JointLetter:\n    return JointLetter(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    run = stranger(tmp_path / "run", {}, game="mine:five")
    monkeypatch.setattr(sys, "argv", ["train", f"--resume={run}", "--config.game.name=mine:five"])
    assert workdir.read_config(run).game.name == "mine:five"
    monkeypatch.setattr(sys, "argv", ["train", f"--resume={run}", "--config.game.name=mine:six"])
    with pytest.raises(ConfigError, match="--trust"):
        workdir.read_config(run)


@pytest.mark.parametrize("open_it", ["resume", "evaluate", "rescore", "coach"])
def test_every_command_that_opens_a_run_asks(tmp_path, open_it, capsys):
    """`evaluate`, `export`, `serve` and `chat` open runs in one function."""
    run = stranger(tmp_path / "run", {}, game="lock.py:Lock")
    (run / "game").mkdir()
    (run / "game" / "lock.py").write_text(HOSTILE.format(mark=str(tmp_path / "mark")))
    (run / "trajectories.jsonl").write_text("")
    from marl_llm.cli import coach

    ways = {
        "resume": lambda: workdir.get_config(str(run)),
        "evaluate": lambda: building.opened(run).__enter__(),
        "coach": lambda: coach._played_by_run(run, None, "validation", 0, 1, 1),
    }
    if open_it == "rescore":
        assert rescore.main([str(run)]) == 2
        assert "--trust" in capsys.readouterr().err
    else:
        with pytest.raises(ConfigError, match="--trust"):
            ways[open_it]()
    assert not (tmp_path / "mark").exists()


def test_a_dry_run_of_a_strangers_directory_runs_nothing(tmp_path):
    """As it is typed; and the flag is what lets it run."""
    run = stranger(tmp_path / "run", {}, game="lock.py:Lock")
    (run / "game").mkdir()
    (run / "game" / "lock.py").write_text(HOSTILE.format(mark=str(tmp_path / "mark")))
    typed = [sys.executable, "-m", "experiments.train", f"--resume={run}", "--dry_run"]
    done = subprocess.run(typed, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "mark").exists()) == (2, False)
    assert done.stderr.startswith("error: ")
    assert "--trust" in done.stderr
    assert "Traceback" not in done.stderr
    subprocess.run([*typed, "--trust"], cwd=ROOT, capture_output=True)
    assert (tmp_path / "mark").exists()


# --- addresses, keys and places ----------------------------------------------------------------------------------------------------


OUTSIDE = {
    "models.a.url": "http://198.51.100.1/v1",
    "models.a.key_env": "AWS_SECRET_ACCESS_KEY",
    "model.url": "http://198.51.100.1/v1",
    "model.key_env": "SECRET",
    "model.folder": "/tmp/elsewhere",
    "coach.url": "198.51.100.1:80",
    "coach.key_env": "SECRET",
    "coach.members": "rubric; endpoint url=http://198.51.100.1/v1 served_as=x key_env=SECRET",
    "coach.cache": "/home/somebody/.bashrc",
    "game.url": "198.51.100.1:8000",
    "game.index": "http://198.51.100.1:9000",
    "tools.address": "198.51.100.1:6379",
    "tools.backend": "ray",
    "logger": "wandb",
    "sft.run": "gs://bucket/run",
}


@pytest.mark.parametrize("key", OUTSIDE)
def test_nothing_is_sent_or_written_where_a_strangers_config_says(tmp_path, monkeypatch, key):
    run = stranger(tmp_path / "run", {key: OUTSIDE[key]})
    with pytest.raises(ConfigError, match=f"it would .*{key.replace('.', '[.]')}"):
        workdir.read_config(run)
    monkeypatch.setattr(sys, "argv", ["train", f"--config.{key}={OUTSIDE[key]}"])  # what the person says himself holds
    trust.check(run, trust.claims_of(workdir.read_record(run)["config"], run), False)
    monkeypatch.setattr(sys, "argv", ["train", f"--config.{key}={OUTSIDE[key]}2"])
    with pytest.raises(ConfigError, match="--trust"):
        workdir.read_config(run)


def test_an_address_that_was_ones_own_holds_and_another_key_beside_it_does_not(tmp_path):
    keys = {"model.kind": "trained", "coach.url": "http://127.0.0.1:1/v1", "coach.key_env": "COACH_KEY"}
    run = stranger(tmp_path / "run", keys)
    trust.remember(run, trust.claims_of(workdir.read_record(run)["config"], run))
    assert workdir.read_config(run).coach.key_env == "COACH_KEY"
    other = stranger(tmp_path / "other", keys | {"coach.key_env": "AWS_SECRET_ACCESS_KEY"})
    with pytest.raises(ConfigError, match="send the value of the environment variable 'AWS_SECRET_ACCESS_KEY'"):
        workdir.read_config(other)


def test_a_library_game_without_addresses_asks_nothing_and_leaves_no_marker(tmp_path, state):
    run = stranger(tmp_path / "run", {})
    assert workdir.read_config(run).game.name == "plan_path"
    config = base_config("x", "plan_path", "at_grpo")
    assert workdir.open_workdir(tmp_path / "new", config, "x.py", "") is False
    assert not state.exists()


def test_what_is_shown_of_a_strangers_value_moves_no_cursor(tmp_path):
    run = stranger(tmp_path / "run", {"coach.url": "\x1b[2J\nhttp://evil" + "x" * 10_000, "coach.key_env": "\ud800"})
    with pytest.raises(ConfigError) as error:
        workdir.read_config(run)
    said = str(error.value)
    assert not {"\x1b", "\n"} & set(said)
    assert len(said) < 1000
    said.encode()


def test_without_a_place_for_state_a_note_says_that_the_flag_is_needed(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    trust.remember(tmp_path / "run", {"logger": "wandb"})
    assert "has to say --trust" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["--trust"], True), (["-trust"], True), (["--trust=true"], True), (["--notrust"], False), (["--trust=false"], False), ([], False),
     (["--trust", "--notrust"], False), (["--trusted"], False), (["--config.game.name=--trust"], False)],
)  # fmt: skip
def test_the_flag_is_read_as_flags_are(argv, said):
    assert trust.asked(["train", *argv]) is said


# --- links and pipes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["report.html", "config.partial", "checkpoints", "plots", "logs/process_1.log", "tensorboard"])
def test_a_run_is_not_continued_through_a_link(tmp_path, name):
    config = base_config("x", "plan_path", "at_grpo")
    run = tmp_path / "run"
    workdir.open_workdir(run, config, "x.py", "")
    let_go()
    (tmp_path / "precious").write_text("mine")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match=f"write through the link {name} to .*precious.*--trust"):
        workdir.open_workdir(run, config, "x.py", "")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "report.html", "plots/a.png"])
def test_a_pipe_in_a_run_directory_is_named_and_nobody_waits_for_it(tmp_path, name):
    config = base_config("x", "plan_path", "at_grpo")
    workdir.open_workdir(tmp_path / "run", config, "x.py", "")
    let_go()
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(ConfigError, match="is neither a file nor a folder"):
        workdir.open_workdir(tmp_path / "run", config, "x.py", "")


def test_json_is_never_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "config.partial").symlink_to(tmp_path / "precious")
    workdir.write_json(tmp_path / "config.json", {"a": 1})
    assert (tmp_path / "precious").read_text() == "mine"
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


# --- config.json as a stranger may write it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"layout": 2, "config": ' + '{"a": ' * 70 + "1" + "}" * 71,
        '{"layout": 2, "config": []}',
        '{"layout": 2, "config": {"game": 3}}',
        '{"layout": 2, "config": {"game": {"name": ["a"]}}}',
        '{"layout": 2, "config": {"name": "x", "game": {"name": "plan_path"}, "recipe": {"name": []}, "models": 3}}',
        '{"layout": 2, "config": {"name": "x", "game": {"name": "plan_path"}, "recipe": {"name": "grpo"}, "models": 3}}',
        '{"layout": 2, "config": {"name": "x", "game": {"name": "plan_path"}, "recipe": {"name": "grpo"}, "models": {}, "steps": "x"}}',
        '{"layout": 2, "config": {"name": "x", "game": {"name": "plan_path"}, "recipe": {"name": "grpo"}, "models": {"a": {"path": 1}}}}',
        '{"layout": 2, "config": {"name": NaN}}',
        '{"layout": 2, "config": {"name": 1' + "0" * 400 + "}}",
        "\xff\xfe",
    ],
)
def test_a_config_that_is_no_bounded_object_is_told_in_one_line(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        workdir.read_config(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_pipe_in_the_place_of_a_config_is_told(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: not a regular file"):
        workdir.read_config(tmp_path)


def test_an_infinite_bound_on_the_gradient_comes_back(tmp_path):
    """JSON has no infinity; Python writes one."""
    config = base_config("x", "plan_path", "at_grpo")
    config.optimizer.max_grad_norm = float("inf")
    workdir.open_workdir(tmp_path / "run", config, "x.py", "")
    assert isinstance(config, config_dict.ConfigDict)
    assert workdir.read_config(tmp_path / "run").optimizer.max_grad_norm == float("inf")
