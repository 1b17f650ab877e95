"""A config that cannot lie: whatever is mistyped, contradictory or without effect is refused in one clear line."""

import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from experiments import base, command, workdir
from experiments.base import ConfigError, base_config, resolve

ROOT = pathlib.Path(__file__).parent.parent.parent
QUICKSTART = str(ROOT / "experiments" / "configs" / "quickstart.py")


def read_flags(*argv):
    """The config that a command line makes, through the very parser of the commands."""
    argv = ["train", *argv]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
    flags.DEFINE_string("workdir", None, "", flag_values=values)
    command._parse(argv, values)
    return values["config"].value


def refused(capsys, *argv):
    """The one line in which a command line is refused, and that its exit code is 2."""
    with pytest.raises(SystemExit) as end:
        read_flags(*argv)
    assert end.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said
    assert "Traceback" not in said
    return said


def test_micro_batches_follow_the_platform_until_they_are_set():
    config = base_config("x", "plan_path", "at_grpo")
    assert [base.microbatch_tokens(config, p) for p in ("cpu", "gpu", "tpu")] == [base.MICROBATCH, 0, 0]
    for tokens in (0, 256):
        config.optimizer.microbatch_tokens = tokens
        resolve(config)
        assert base.microbatch_tokens(config, "cpu") == base.microbatch_tokens(config, "tpu") == tokens


# --- keys ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--config.stpes=1", "did you mean 'steps'?"),
        ("--config.recpie.alpha=1", "did you mean 'recipe'?"),
        ("--config.recipe.alhpa=1", "did you mean 'alpha'?"),
        ("--config.game.hieght=3", "did you mean 'height'?"),
        ("--config.model.widht=3", "did you mean 'width'?"),
        ("--config.optimizer.lerning_rate=3", "did you mean 'learning_rate'?"),
        ("--config.warm_start.nose=0.1", "did you mean 'noise'?"),
        ("--config.evaluation.evry=1", "did you mean 'every'?"),
        ("--config.checkpoint.kep=1", "did you mean 'keep'?"),
        ("--config.control.permute_reward=true", "did you mean 'permute_rewards'?"),
        ("--noconfig.recipe.skip_tyed", "did you mean 'skip_tied'?"),
        ("--wrokdir=runs/1", "Did you mean: workdir ?"),
    ],
)
def test_a_mistyped_flag_is_refused_with_what_was_meant(capsys, flag, meant):
    said = refused(capsys, f"--config={QUICKSTART}", flag)
    assert meant in said
    assert flag.lstrip("-").removeprefix("no").split("=")[0] in said


def test_a_key_without_neighbours_is_refused_too(capsys):
    assert "--config.recipe.zzzz: unknown key 'zzzz'" in refused(capsys, f"--config={QUICKSTART}", "--config.recipe.zzzz=1")
    assert "zzzz" in refused(capsys, f"--config={QUICKSTART}", "--zzzz=1")


def test_a_value_of_another_type_is_refused(capsys):
    assert "--config.steps=many" in refused(capsys, f"--config={QUICKSTART}", "--config.steps=many")
    assert "--config.recipe.skip_tied=perhaps" in refused(capsys, f"--config={QUICKSTART}", "--config.recipe.skip_tied=perhaps")


def test_a_section_is_not_a_value(capsys):
    said = refused(capsys, f"--config={QUICKSTART}", "--config.recipe=magrpo")
    assert said.endswith("--config.recipe is a section of the config: set one of its keys, e.g. --config.recipe.name=magrpo")


def test_flags_before_the_config_are_refused(capsys):
    assert "before a value for --config" in refused(capsys, "--config.steps=1", f"--config={QUICKSTART}")


def test_what_is_right_is_read():
    config = read_flags(f"--config={QUICKSTART}:smoke", "--config.recipe.alpha=0.5", "--config.game.max_moves=3", "--config.steps=3")
    assert (config.recipe.alpha, config.game.max_moves, config.steps) == (0.5, 3, 3)
    assert (config.evaluation.episodes, config.warm_start.steps) == (16, 10)
    assert resolve(config).recipe.alpha == 0.5
    with pytest.raises(AttributeError, match="alhpa"):
        config.recipe.alhpa = 1


# --- config files --------------------------------------------------------------------------------------------------------------

HEAD = "from experiments.base import base_config\n\n\ndef get_config(arg=None):\n    c = base_config('x', 'plan_path', 'at_grpo')\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    c.recipe.alhpa = 1\n    return c\n", "x.py line 6: unknown key 'alhpa'; did you mean 'alpha'?"),
        ("    c.steps += c.gmae.height\n    return c\n", "x.py line 6: unknown key 'gmae'; did you mean 'game'?"),
        ("    c['zzzz'] = 1\n    return c\n", "x.py line 6: unknown key 'zzzz'"),
        ("    c.steps = 'many'\n    return c\n", "x.py line 6: TypeError: Could not override field 'steps'. many is of original"),
        ("    c.recipe = 'magrpo'\n    return c\n", "x.py line 6: TypeError: Could not override field 'recipe'"),
        ("    c.steps = = 1\n", "x.py line 6: invalid syntax"),
        ("    return c.steps / 0\n", "x.py line 6: ZeroDivisionError: division by zero"),
        ("    return None.steps\n", "x.py line 6: AttributeError: 'NoneType' object has no attribute 'steps'"),
        ("    import nowhere_to_be_found\n", "x.py line 6: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("    open('/nowhere/to/be/found')\n", "x.py line 6: FileNotFoundError"),
        ("    raise ValueError(f'x has no variant {arg!r}')\n", "x.py line 6: x has no variant None"),
        (
            "    try:\n        {}['a']\n    except KeyError as e:\n        raise ValueError('said on purpose') from e\n",
            "x.py line 9: said on purpose",
        ),
    ],
)
def test_a_fault_in_a_config_file_is_told_with_its_line(capsys, tmp_path, body, said):
    (tmp_path / "x.py").write_text(HEAD + body)
    assert said in refused(capsys, f"--config={tmp_path / 'x.py'}")


def test_unknown_variants_missing_files_and_unknown_games_are_told(capsys, tmp_path):
    said = refused(capsys, f"--config={QUICKSTART}:smok")
    assert "quickstart has no variant 'smok'; it has" in said
    assert "'smoke'" in said
    missing = tmp_path / "missing.py"
    for argv in ([f"--config={missing}"], [f"--config={missing}", "--config.steps=1"], ["--config", str(missing)]):
        assert refused(capsys, *argv).startswith(f"error: there is no config file {missing} (from ")
    assert "there is no config file" in refused(capsys, f"--config={tmp_path}")
    (tmp_path / "x.py").write_text(HEAD.replace("'plan_path'", "'plan_pth'") + "    return c\n")
    assert "line 5: unknown game 'plan_pth'; the games are plan_path, joint_letter, " in refused(capsys, f"--config={tmp_path / 'x.py'}")


def test_a_config_of_other_keys_is_refused():
    config = base_config("x", "plan_path", "at_grpo").copy_and_resolve_references()
    with config.unlocked():
        config.recipe.alhpa = 1.0
    with pytest.raises(ConfigError, match=r"unknown key config\.recipe\.alhpa; did you mean 'alpha'\?"):
        resolve(config)
    config = base_config("x", "plan_path", "at_grpo").copy_and_resolve_references()
    with config.unlocked():
        del config.optimizer.epochs
    with pytest.raises(ConfigError, match=r"config\.optimizer\.epochs is missing"):
        resolve(config)
    config = base_config("x", "plan_path", "at_grpo").copy_and_resolve_references()
    with config.unlocked():
        del config["optimizer"]
        config.optimizer = 3
    with pytest.raises(ConfigError, match=r"config\.optimizer=3 must be a section with .*minibatch"):
        resolve(config)
    with config.unlocked():
        del config["game"]
    with pytest.raises(ConfigError, match="start from experiments.base.base_config"):
        resolve(config)


# --- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("seed", -1, r"config\.seed=-1 must lie in \[0, 2\^32\)"),
        ("steps", -1, r"config\.steps=-1 must be at least 0"),
        ("devices", -1, r"config\.devices=-1 must be at least 0"),
        ("game.name", "plan_pth", "unknown game 'plan_pth'"),
        ("game.height", 99, r"plan_path\.height=99 is not in \[2, 10\]"),
        ("game.view", "none", r"plan_path\.view='none' is not one of full, split"),
        ("game.strict", True, r"plan_path\.strict has no effect unless"),
        ("model.preset", "huge", "unknown model preset 'huge'; the presets are nano"),
        ("model.width", 0, r"ModelConfig\.width is 0"),
        ("model.key_value_heads", 3, r"query_heads=4 is not a multiple of key_value_heads=3"),
        ("recipe.name", "at_grop", r"recipe='at_grop' is unknown\. Did you mean 'at_grpo'\?"),
        ("recipe.preset", "papr", "preset of at_grpo"),
        ("recipe.scale", "stdd", r"scale='stdd' is unknown\. Did you mean 'std'\?"),
        ("recipe.branches", 0, r"branches=0 must be a number in \[1, inf\]"),
        ("recipe.group_by", "env,agnet", "Did you mean 'agent'"),
        ("rollout.environments", 0, r"config\.rollout\.environments=0 must be at least 1"),
        ("optimizer.minibatch", 0, r"config\.optimizer\.minibatch=0 must be at least 1"),
        ("optimizer.epochs", 0, r"config\.optimizer\.epochs=0 must be at least 1"),
        ("optimizer.microbatch_tokens", -1, r"config\.optimizer\.microbatch_tokens=-1 must be at least 0"),
        ("optimizer.microbatch_tokens", 5, r"microbatch_tokens=5 cannot hold one group of \d+ tokens, and a group is never cut"),
        ("optimizer.microbatch_tokens", 10**6, r"microbatch_tokens=1000000 would have no effect: a minibatch has 32 x \d+ tokens"),
        ("optimizer.warmup", -1, r"config\.optimizer\.warmup=-1 must be at least 0"),
        ("optimizer.learning_rate", 0.0, r"config\.optimizer\.learning_rate=0\.0 must be positive"),
        ("optimizer.learning_rate", float("nan"), r"config\.optimizer\.learning_rate=nan must be positive"),
        ("optimizer.learning_rate", float("inf"), r"config\.optimizer\.learning_rate=inf must be positive and finite"),
        ("optimizer.max_grad_norm", 0.0, r"config\.optimizer\.max_grad_norm=0\.0 must be positive"),
        ("optimizer.weight_decay", -0.1, r"config\.optimizer\.weight_decay=-0\.1 must be 0 or more"),
        ("optimizer.b2", 1.0, r"config\.optimizer\.b2=1\.0 must lie between 0 and 1"),
        ("warm_start.steps", -1, r"config\.warm_start\.steps=-1 must be at least 0"),
        ("warm_start.environments", 0, r"config\.warm_start\.environments=0 must be at least 1"),
        ("warm_start.branches", 0, r"config\.warm_start\.branches=0 must be at least 1"),
        ("warm_start.learning_rate", -1.0, r"config\.warm_start\.learning_rate=-1\.0 must be positive"),
        ("evaluation.every", 0, r"config\.evaluation\.every=0 must be at least 1"),
        ("evaluation.episodes", 0, r"config\.evaluation\.episodes=0 must be at least 1"),
        ("evaluation.final_episodes", 0, r"config\.evaluation\.final_episodes=0 must be at least 1"),
        ("evaluation.transcripts", -1, r"config\.evaluation\.transcripts=-1 must be at least 0"),
        ("evaluation.seed", -1, r"config\.evaluation\.seed=-1 must lie in"),
        ("checkpoint.every", 0, r"config\.checkpoint\.every=0 must be at least 1"),
        ("checkpoint.keep", 0, r"config\.checkpoint\.keep=0 must be at least 1"),
        ("assignment", "tool=a", r"must name each role once; the game's roles are tool, planner"),
        ("assignment", "tool=a,planner=b,judge=c", "must name each role once"),
        ("assignment", "tool=a,tool=b", "must name each role once"),
        ("assignment", "tool=a,planner=b,tool=b", "must name each role once"),
        ("assignment", "tool=,planner=b", "is not 'per_role', 'shared' or a list like 'tool=a"),
        ("assignment", "per_rle", "is not 'per_role', 'shared' or a list like 'tool=a"),
        ("assignment", "", "is not 'per_role', 'shared' or a list like 'tool=a"),
        ("assignment", "tool=../x,planner=b", "'../x' names a model and its folder"),
    ],
)
def test_a_bad_value_is_refused_with_its_name(path, value, why):
    config = base_config("x", "plan_path", "at_grpo")
    resolve(config)  # good before
    section, _, key = path.rpartition(".")
    (config[section] if section else config)[key] = value
    with pytest.raises(ConfigError, match=why):
        resolve(config)


@pytest.mark.parametrize(
    ("game", "recipe", "settings", "why"),
    [
        ("plan_path", "at_grpo", {"recipe.gamma": 0.9}, "gamma=0.9 would have no effect"),
        ("plan_path", "at_grpo", {"recipe.kl_kind": "k1"}, "kl_kind='k1' would have no effect: kl_coef=0"),
        ("plan_path", "at_grpo", {"recipe.tied_in_denominator": False}, "tied_in_denominator=False would have no effect"),
        ("plan_path", "grpo", {"recipe.pick": "first"}, "pick='first' would have no effect"),
        ("plan_path", "at_grpo", {"warm_start.noise": 0.2}, r"warm_start\.noise would have no effect: warm_start\.steps is 0"),
        ("plan_path", "at_grpo", {"warm_start.steps": 1, "warm_start.noise": 1.5}, r"warm_start\.noise=1\.5 must lie in \[0, 1\]"),
        ("joint_letter", "magrpo", {"warm_start.steps": 1, "warm_start.noise": 0.2}, "joint_letter's scripted player has no options"),
        ("plan_path", "at_grpo", {"game.name": "joint_letter", "game.height": 3}, "joint_letter has no option 'height'"),
        ("joint_letter", "at_grpo", {}, "use a recipe with sampling='parallel', e.g. magrpo"),
        ("plan_path", "ppo", {}, "needs a critic"),
        ("plan_path", "mappa", {}, "kl_in='reward' needs per-sample KL"),
        ("plan_path", "at_grpo", {"recipe.preset": "released"}, "this sampler draws from the whole"),
        ("plan_path", "at_grpo", {"recipe.top_k": 5}, "this sampler draws from the whole"),
    ],
)
def test_contradictions_and_options_without_effect_are_refused(game, recipe, settings, why):
    config = base_config("x", game, recipe)
    for path, value in settings.items():
        section, key = path.split(".")
        config[section][key] = value
    with pytest.raises(ConfigError, match=why):
        resolve(config)


def test_assignments():
    roles = ["tool", "planner"]
    assert base.parse_assignment("per_role", roles) == {"tool": "tool", "planner": "planner"}
    assert base.parse_assignment("shared", roles) == {"tool": "shared", "planner": "shared"}
    assert base.parse_assignment(" planner = b , tool=a", roles) == {"tool": "a", "planner": "b"}
    config = base_config("x", "plan_path", "at_grpo")
    config.assignment = "planner=z,tool=a"
    assert resolve(config).models == ["a", "z"]  # in the order of the roles
    assert list(resolve(config).configs) == ["a", "z"]


def test_devices_divide_what_is_shared_out():
    config = base_config("x", "plan_path", "at_grpo")
    config.rollout.environments, config.optimizer.minibatch, config.evaluation.episodes = 12, 24, 36
    config.warm_start.environments = 7  # not shared out without a warm start
    assert [base.most_devices(config, n) for n in (1, 2, 3, 5, 8, 12)] == [1, 2, 3, 4, 6, 12]
    config.warm_start.steps = 1
    assert base.most_devices(config, 8) == 1
    base.check_devices(config, 1)
    with pytest.raises(ConfigError, match=r"config\.warm_start\.environments=7 does not divide over 2 devices"):
        base.check_devices(config, 2)
    config.warm_start.environments = 4
    with pytest.raises(ConfigError, match=r"config\.rollout\.environments=12 does not divide over 8 devices"):
        base.check_devices(config, 8)


# --- the run directory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config():
    return base_config("x", "plan_path", "at_grpo")


def opened(path, config):
    """Opens a run directory and lets go of it again, as the end of a process would."""
    try:
        return workdir.open_workdir(path, config, "x.py", "1 x cpu")
    finally:
        for handle in workdir._HELD.values():
            os.close(handle)
        workdir._HELD.clear()


def test_the_same_config_continues(tmp_path, config):
    assert opened(tmp_path / "a" / "b", config) is False
    text = (tmp_path / "a" / "b" / "config.json").read_text()
    assert opened(tmp_path / "a" / "b", config) is True
    assert (tmp_path / "a" / "b" / "config.json").read_text() == text
    read, file = workdir.read_config(tmp_path / "a" / "b")
    assert workdir.plain(read) == workdir.plain(config)
    assert file == "x.py"
    assert resolve(read) == resolve(config)


def test_another_config_is_refused_with_every_difference(tmp_path, config):
    opened(tmp_path / "run", config)
    text = (tmp_path / "run" / "config.json").read_text()
    with config.unlocked():
        config.steps, config.recipe.alpha, config.optimizer.learning_rate = 7, 0.5, 1e-4
    with pytest.raises(ConfigError) as error:
        opened(tmp_path / "run", config)
    lines = str(error.value).splitlines()
    assert lines[1:-1] == [
        "  config.optimizer.learning_rate: 0.0015 -> 0.0001",
        "  config.recipe.alpha: None -> 0.5",
        "  config.steps: 100 -> 7",
    ]
    assert f"--resume={tmp_path / 'run'}" in lines[-1]
    assert (tmp_path / "run" / "config.json").read_text() == text
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.json"]


def test_foreign_files_are_left_alone(tmp_path, config):
    (tmp_path / "thesis.tex").write_text("all of it")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(ConfigError, match="exists and is not a run directory"):
            opened(path, config)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_kill_while_the_directory_was_made_is_no_foreign_file(tmp_path, config):
    """Killed between the directory and its config.json, the same command must go on."""
    (tmp_path / "empty").mkdir()
    assert opened(tmp_path / "empty", config) is False
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.partial").write_text('{"name": "x')
    assert opened(tmp_path / "half", config) is False
    assert [p.name for p in (tmp_path / "half").iterdir()] == ["config.json"]


def test_two_processes_do_not_share_a_directory(tmp_path, config):
    opened(tmp_path / "run", config)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, os, sys\nfcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_SH)\nprint(1, flush=True)\ninput()",
         tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline()
    with pytest.raises(ConfigError, match="another process trains in"):
        opened(tmp_path / "run", config)
    holder.kill()  # no clean end, and yet the directory is free
    holder.communicate()
    assert opened(tmp_path / "run", config) is True


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"config": 3}'])
def test_a_damaged_config_json_is_refused(tmp_path, config, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        opened(tmp_path, config)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read .* --resume needs the directory of an earlier run"):
        workdir.read_config(tmp_path)
    assert (tmp_path / "config.json").read_text() == text


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, config, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*Not a directory.*choose another --workdir"):
        opened(tmp_path / "file" / "run", config)
    if os.geteuid():
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="cannot write .*Permission denied"):
            opened(tmp_path / "locked" / "run", config)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(pathlib.Path, "write_text", lambda *a, **k: (_ for _ in ()).throw(full))
    with pytest.raises(ConfigError, match="cannot write .*No space left on device. Free space or choose"):
        opened(tmp_path / "run", config)


# --- as a user runs it -----------------------------------------------------------------------------------------------------------


def run(*argv, cwd=ROOT):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "experiments.train", *argv], cwd=cwd, env=env, capture_output=True, text=True)


def test_a_typo_ends_the_command_with_two(tmp_path):
    done = run(f"--config={QUICKSTART}", f"--workdir={tmp_path / 'run'}", "--config.recipe.alhpa=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --config.recipe.alhpa: unknown key 'alhpa'; did you mean 'alpha'?\n"
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_table_and_touches_nothing(tmp_path):
    done = run(f"--config={QUICKSTART}", "--workdir=run", "--dry_run", "--config.assignment=tool=a,planner=b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    for part in (
        "quickstart: plan_path, recipe at_grpo (paper), 500 steps, seed 0",
        "tool       -> model a          prompt [E=48, P=",
        "planner    -> model b          prompt [E=48, P=",
        "responses [E=48, K=4, R=5]",
        "parameters (V=",
        "samples per step: at most 1,536 (E=48 x K=4 x T=4 x N=2)",
        "  max_moves            4",
        "  skip_tied            True",
    ):
        assert part in done.stdout


def test_help_is_quick_and_light():
    """Neither the flags nor the package root load JAX."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "experiments.train", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    modules = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ml_collections.config_dict" in modules or "ml_collections" in modules
    assert not {"jax", "numpy", "orbax", "matplotlib"} & modules
    light = "import sys, marl_llm, marl_llm.reporting\nassert not {'jax', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", light], cwd=ROOT).returncode == 0
    assert "--workdir" in done.stdout
    assert "--resume" in done.stdout


def test_missing_and_contradictory_flags_are_told(tmp_path, monkeypatch, capsys):
    from experiments import train

    def said(*argv, **values):
        for name in ("_CONFIG", "_WORKDIR", "_RESUME", "_DRY_RUN"):
            monkeypatch.setattr(train, name, type("Flag", (), {"value": values.get(name)}))
        with pytest.raises(SystemExit) as end:
            train.main(["train", *argv])
        return end.value.code, capsys.readouterr().err

    assert said() == (2, "error: --config is missing, e.g. --config=experiments/configs/quickstart.py\n")
    code, text = said(_RESUME=str(tmp_path))
    assert code == 2
    assert "--resume needs the directory of an earlier run" in text
    assert said(_RESUME="runs/1", _WORKDIR="runs/2")[1].startswith("error: --resume takes the directory alone")
