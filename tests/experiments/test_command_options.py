"""Options of the commands: however they are written, files that cannot be written, and options that would have no effect."""

import pathlib
import subprocess
import sys

import pytest
from absl import flags

import experiments
from marl_llm.cli import chat, coach, evaluate, league, plan, play, profiling, serve
from marl_llm.runs import command
from marl_llm.runs.command import ConfigError
from marl_llm.viewing import command as view

ROOT = pathlib.Path(experiments.__file__).parents[1]


def parsed(module, *given):
    """The module's flags as they were given on the command line; see `unparsed`."""
    module.FLAGS.unparse_flags()
    module.FLAGS(["command", *given])


@pytest.fixture(autouse=True)
def unparsed():
    """Leaves the flags of the commands as they were."""
    yield
    for module in (evaluate, league, plan, serve):
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


CONFIG = "--config=experiments/configs/quickstart.py"
CPU = f"{CONFIG} --topology=cpu"


@pytest.mark.parametrize(
    ("module", "given", "idle", "why"),
    [
        *[(plan, CPU, idle, "reads the config alone") for idle in ("--mesh=1,1", "--prompt=8", "--response=8", "--groups=2", "--json")],
        *[(plan, CPU, idle, "reads the config alone") for idle in ("--whole", "--compile=False")],
        (plan, f"{CONFIG} --compile=False", "--whole", "compiles nothing"),
        *[(serve, "--run=a", idle, "keep their own") for idle in ("--name=x", "--max_prompt=8", "--max_tokens=8", "--thinking=on")],
        *[(chat, "--run=a", idle, "keep their own") for idle in ("--max_prompt=8", "--max_tokens=8", "--thinking=on")],
        *[(way, "--path=a", idle, "a checkpoint") for way in (serve, chat) for idle in ("--role=x", "--step=3")],
        *[(chat, "--path=a", idle, "nobody is served") for idle in ("--port=8000", "--record=x", "--key_env=K", "--over_budget=cap")],
        (chat, "--path=a", "--name=x", "nobody is served"),
        (chat, "--run=a", "--max_num_seqs=2", "config says its own"),
        (league, "--runs=a,b", "--most=3", "single run"),
        (league, "--runs=a@3", "--most=3", "single run"),
    ],
)  # fmt: skip
def test_a_flag_that_would_have_no_effect_is_refused(module, given, idle, why):
    """Though it says what is the default."""
    parsed(module, *given.split(), idle)
    with pytest.raises(ConfigError, match=f"^{idle.split('=')[0]} would have no effect: .*{why}"):
        module.main([])


@pytest.mark.parametrize(
    ("module", "given", "idle", "why"),
    [
        (profiling, "quickstart:smoke", "--step=3", "it is a checkpoint of --run"),
        (play, "plan_path --human=tool --terminal", "--port=3", "--terminal serves no page"),
        (play, "plan_path --human=tool --terminal", "--no-browser", "--terminal serves no page"),
        (view, "a", "--search=x", "it goes with --text"),
        (view, "a --html=x", "--play=x", "it goes with --text"),
        (view, "a --text", "--most=3", "it goes with --html"),
        (view, "a --report", "--no_browser", "--report serves no page"),
        (view, "a --report", "--html=x", "--report alone is carried out"),
        (view, "a --text --play=x", "--search=y", "--play names the play"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(module, given, idle, why, capsys):
    assert module.main([*given.split(), idle]) == 2
    name = idle.split("=")[0].replace("no-", "no_")
    assert f"error: {'plan_path: ' if module is play else ''}{name} would have no effect: {why}\n" == capsys.readouterr().err
