"""`python -m marl_llm`: the list of commands, how little is imported before one is asked for, and configs outside a checkout."""

import contextlib
import importlib
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
from absl import flags

import experiments
from marl_llm.__main__ import COMMANDS, main, with_config
from marl_llm.cli import export
from marl_llm.models import LoraConfig
from marl_llm.reporting.files import LineError
from marl_llm.runs.command import FAILED, ConfigError, check_local, code_of, config_path, run, with_installed
from marl_llm.training import CheckpointError
from marl_llm.workflows.errors import ReplayError

ROOT = pathlib.Path(experiments.__file__).parents[1]
HEAVY = {"jax", "jaxlib", "numpy", "flax", "matplotlib", "torch", "transformers", "gradio", "openai"}


def imported(statement):
    """Libraries that a statement imports, in a process of its own."""
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint(*sys.modules, file=sys.__stderr__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("name", ["check", "profile", "rescore", "view", "play"])
def test_help_of_a_command_imports_nothing_heavy(name):
    assert not imported(f"from marl_llm.__main__ import main; main([{name!r}, '--help'])") & HEAVY


@pytest.mark.parametrize(
    ("name", "option"),
    [("train", "--resume"), ("serve", "--record"), ("export", "--model"), ("chat", "--run:"), ("chat", "--role:"), ("chat", "--path:")],
)
def test_help_of_a_command_lists_its_own_options(name, option):
    asked = [sys.executable, "-m", "marl_llm", name, "--help"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert option in done.stdout
    assert "python -m" in done.stdout


def test_adapters_that_peft_would_leave_out_are_not_exported(tmp_path, monkeypatch):
    """PEFT names the layers of a model that sees images otherwise."""
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    learner = types.SimpleNamespace(base={}, policy=types.SimpleNamespace(params={}), spec=types.SimpleNamespace(lora=LoraConfig(rank=2)))
    assignment = types.SimpleNamespace(roles={"solver": "m"})
    plan = types.SimpleNamespace(shapes={"m": None}, options={"m": {"path": str(tmp_path)}}, assignment=assignment)
    team = types.SimpleNamespace(learners={"m": learner})
    monkeypatch.setattr(export, "opened", lambda *_: contextlib.nullcontext((None, plan, team, 1)))
    monkeypatch.setattr(export, "run_card", lambda *_: "")
    with pytest.raises(ConfigError, match=r"^--adapters: .* sees images, .*; leave the flag out to merge them$"):
        export.export("a-run", "m", tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


def test_an_export_says_that_its_checkpoint_has_no_tokenizer(tmp_path):
    """As of a compiled game, whose ids need none; a GGUF file's own is copied, see test_gguf_run.py."""
    assert export._write_tokenizer("models/bare", None, tmp_path) == "models/bare has none"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert export._write_tokenizer("models/bare", None, tmp_path) == ""


def test_a_folder_with_an_experiments_of_its_own_does_not_hide_ours(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("raise RuntimeError('theirs')\n")
    asked = [sys.executable, "-m", "marl_llm", "check", "nothing"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "unknown game 'nothing'" in done.stderr) == (2, True)


def test_all_scripts_can_be_imported_into_one_process_and_each_has_its_own_flags():
    folders = ("experiments", "marl_llm/cli")
    scripts = [path for folder in folders for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    modules = [importlib.import_module(f"{path.parent.relative_to(ROOT)}/{path.stem}".replace("/", ".")) for path in scripts]
    defined = {module.__name__: set(module.FLAGS) for module in modules if hasattr(module, "FLAGS")}
    assert {"config", "workdir", "resume"} <= defined["experiments.train"]
    assert {"config", "topology"} <= defined["marl_llm.cli.plan"]
    assert "workdir" not in defined["marl_llm.cli.plan"]


def test_help_of_training_starts_no_jax():
    assert not imported("import experiments.train") & (HEAVY - {"numpy"})


def test_importing_the_package_imports_nothing_but_itself():
    assert not imported("import marl_llm") & (HEAVY | {"marl_llm.viewing"})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["quickstart"], ["--config=experiments/configs/quickstart.py"]),
        (["notes:smoke", "--dry_run"], ["--config=experiments/configs/notes.py:smoke", "--dry_run"]),
        (["my/own.py:x"], ["--config=my/own.py:x"]),
        (["game:my_game.py:Lock"], ["--config=experiments/configs/game.py:my_game.py:Lock"]),
        (["--resume=runs/a", "quickstart"], ["--resume=runs/a", "quickstart"]),
        ([], []),
    ],
)
def test_a_config_may_stand_in_front(given, meant):
    assert with_config("train", given) == meant
    assert with_config("check", given) == given


def test_marl_is_a_command_of_its_own():
    (marl,) = importlib.metadata.entry_points(group="console_scripts", name="marl")
    assert marl.load() is main


def test_a_misspelled_config_in_front_gets_a_suggestion(tmp_path):
    asked = [sys.executable, "-m", "marl_llm", "train", "quickstrat", "--dry_run"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no config file experiments/configs/quickstrat.py" in done.stderr
    assert "quickstart" in done.stderr


def test_the_list_of_commands_names_each_and_an_unknown_one_gets_a_suggestion(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in COMMANDS)
    assert main(["veiw"]) == 2
    assert "did you mean 'view'" in capsys.readouterr().err


def test_a_config_of_the_package_is_found_from_any_directory_and_a_users_own_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = str(ROOT / "experiments" / "configs" / "notes.py")
    assert config_path("experiments/configs/notes.py:smoke") == f"{own}:smoke"
    assert with_installed("--config=notes.py") == f"--config={own}"
    assert config_path("elsewhere/notes.py") == "elsewhere/notes.py"
    assert config_path("nothing.py") == "nothing.py"
    (tmp_path / "notes.py").write_text("")
    assert config_path("notes.py") == "notes.py"
    assert with_installed("--workdir=notes.py") == "--workdir=notes.py"


def test_stray_words_are_named(monkeypatch, capsys):
    def nothing(argv):
        raise AssertionError(argv)

    for words in (["stray"], ["stray", "word"]):
        monkeypatch.setattr(sys, "argv", ["train", *words])
        with pytest.raises(SystemExit) as end:
            run(nothing, flags.FlagValues())
        assert end.value.code
        assert f"unexpected '{' '.join(words)}'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--workdir=gs://b/run"], ["--resume", "s3://b/run"], ["-run=gs://b/run"]])
def test_a_run_directory_in_a_bucket_is_refused_with_what_to_do(argv):
    with pytest.raises(ConfigError, match="is not on a disk.*rsync.*mount the bucket"):
        check_local(["train", *argv])
    check_local(["train", "--workdir=runs/first", "--resume", "/mnt/bucket/run", "--config.model.url=http://127.0.0.1:1"])


def test_an_error_that_a_user_can_mend_is_told_in_one_line_with_its_code_and_a_fault_of_the_library_is_raised(capsys):
    for error, subject, code, said in (
        (ConfigError("no such role"), "sums", FAILED, "error: sums: no such role\n"),
        (ValueError("a number is expected"), "", FAILED, "error: a number is expected\n"),
        (CheckpointError("checkpoint 3 cannot be read"), "", 3, "error: checkpoint 3 cannot be read\n"),
        (LineError("line 7 is damaged"), "plays.jsonl", 3, "error: plays.jsonl: line 7 is damaged\n"),
        (ReplayError("other tokens"), "", FAILED, "error: other tokens\n"),
    ):
        assert code_of(error, subject) == code
        assert capsys.readouterr().err == said
    with pytest.raises(KeyError):
        code_of(KeyError("x"))


def test_runs_are_listed_with_their_state_steps_and_result_and_damaged_ones_are_named(tmp_path, capsys):
    def make(name, evaluation=None, metrics='{"phase": "train", "step": 3}\n'):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"name": "team", "config": {"steps": 5}}))
        (tmp_path / name / "metrics.jsonl").write_text(metrics)
        if evaluation is not None:
            (tmp_path / name / "evaluation.json").write_text(evaluation)

    make("a", json.dumps({"headline": "f1", "before": {"success": 0.25}, "after": {"success": 0.5}}))
    make("deep/b", metrics='{"phase": "train", "step": 3}\n[1]\n')
    make("c", "[" * 100_000)
    assert main(["runs", str(tmp_path)]) == 0
    a, c, b = capsys.readouterr().out.splitlines()
    assert a.split("  ")[1:] == ["team", "finished", "step 3 of 5", "f1 25.0\u00a0% → 50.0\u00a0%"]
    assert "evaluation.json: nested deeper than 64 levels" in c
    assert b.split("  ")[1:] == ["team", "not finished", "step 3 of 5", "1 damaged lines"]
    assert main(["runs", str(tmp_path / "gone")]) == 2
    assert "there is no folder" in capsys.readouterr().err
