"""Options of the commands, however they are written: with a space, with a config's name, with a file that cannot be written."""

import pathlib
import subprocess
import sys

import pytest
from absl import flags

import experiments
from marl_llm.cli import coach, evaluate, league, profiling
from marl_llm.runs import command
from marl_llm.runs.command import ConfigError

ROOT = pathlib.Path(experiments.__file__).parents[1]


def parsed(module, *given):
    """The module's flags as they were given on the command line; see `unparsed`."""
    module.FLAGS.unparse_flags()
    module.FLAGS(["command", *given])


@pytest.fixture(autouse=True)
def unparsed():
    """Leaves the flags of the commands as they were."""
    yield
    for module in (evaluate, league):
        for name in module.FLAGS:
            module.FLAGS[name].unparse()


@pytest.mark.parametrize("given", [["--resume=runs/a"], ["--resume", "runs/a"], ["-resume", "runs/a"]])
def test_a_run_is_resumed_with_a_space_too(monkeypatch, given):
    values, seen = flags.FlagValues(), []
    flags.DEFINE_string("config", None, "", flag_values=values)
    flags.DEFINE_string("resume", None, "", flag_values=values)
    monkeypatch.setattr(sys, "argv", ["train", *given])
    with pytest.raises(SystemExit):
        command.run(lambda argv: seen.append((values.config, values.resume)), values)
    assert seen == [(f"{command.RESUMED}:runs/a", "runs/a")]


def test_a_value_behind_a_space_is_the_options_before_it_and_no_word_is_lost():
    assert command.with_values(["marl", "--config", "a.py:x", "--config.seed", "-1", "--noconfig.hosted", "word", "--run", "b"]) == [
        "marl", "--config=a.py:x", "--config.seed=-1", "--noconfig.hosted", "word", "--run", "b",
    ]  # fmt: skip
    for argv in (["marl", "--config.hosted", "--dry_run"], ["marl", "--config"], ["marl", "word"], ["marl", "--config=a.py", "word"]):
        assert command.with_values(argv) == argv


def test_a_comparison_hands_every_form_of_its_config_on(tmp_path):
    script = (
        "import sys; from marl_llm.cli import compare; from marl_llm.__main__ import main\n"
        "compare.launch = lambda arguments: sys.exit(print(*arguments))\n"
        "main(['compare', '--config', 'experiments/configs/quickstart.py:smoke', '--config.steps', '3', '--config.seed=2', '--seeds=0',"
        f" '--output={tmp_path}', '--variant=team'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    given = done.stdout.split()
    assert given[0].startswith("--config=")
    assert given[0].endswith("quickstart.py:smoke")
    assert given[1:3] == ["--config.steps=3", "--config.seed=2"]


def test_profile_and_coach_take_a_configs_name_and_say_what_may_have_been_meant(monkeypatch, capsys, tmp_path):
    seen = []
    monkeypatch.setattr(profiling, "profile", lambda config, tasks: seen.append((config.game.name, config.steps)) or [])
    monkeypatch.setattr(profiling, "table", lambda rows: "none")
    monkeypatch.setattr(coach, "train_coach", lambda make, asked: seen.append(make().game.name))
    out = f"--out={tmp_path / 'new'}"
    assert profiling.main(["quickstart:smoke"]) == coach.main(["chain_maths", out]) == 0
    assert profiling.main(["experiments/configs/quickstart.py:smoke"]) == 0
    assert seen == [seen[0], "chain_maths", seen[0]]
    for main, words in ((profiling.main, ["quickstrat"]), (coach.main, ["chain_math", out]), (profiling.main, ["my_config.py"])):
        assert main(words) == 2
        assert f"there is no config file {command.config_named(words[0])} " in (said := capsys.readouterr().err)
        assert words[0] == "my_config.py" or "did you mean" in said


def test_whatever_a_config_file_raises_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("def get_config(arg=None):\n    return {}['x']\n")
    assert profiling.main([str(tmp_path / "mine.py")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/mine.py: KeyError: 'x'\n"


def test_a_file_that_cannot_be_written_is_told_before_the_work(monkeypatch, tmp_path, capsys):
    def never(*given):
        raise AssertionError(given)

    monkeypatch.setattr(profiling, "profile", never)
    assert profiling.main(["quickstart:smoke", f"--output={tmp_path / 'no' / 't.json'}"]) == 2
    assert f"no/t.json: there is no directory {tmp_path / 'no'}; make it" in capsys.readouterr().err
    monkeypatch.setattr(evaluate, "evaluate_run", never)
    monkeypatch.setattr(league, "players_of", never)
    for module, given in ((evaluate, "--run=a --output"), (evaluate, "--run=a --outcomes"), (league, "--runs=a,b --output")):
        for path, why in ((tmp_path, "is a directory"), (tmp_path / "no" / "x", "there is no directory")):
            parsed(module, *f"{given}={path}".split())
            with pytest.raises(ConfigError, match=f"^{given.split()[-1]}={path}.*{why}"):
                module.main([])
    command.check_writable("output", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
