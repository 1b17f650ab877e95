"""A config that cannot lie: whatever is mistyped, contradictory or without effect is refused in one clear line."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
from absl import flags
from ml_collections import config_dict, config_flags

from marl_llm.algorithms import Samples, advantages_for
from marl_llm.runs import building, checks, command, workdir
from marl_llm.runs.base import base_config, model_section
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.sections import MICROBATCH, fill_open_options

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

    def of(platform):
        return building.microbatch_tokens(config, resolve(config), platform)

    assert [of(platform) for platform in ("cpu", "gpu", "tpu")] == [MICROBATCH, 0, 0]
    for tokens in (0, 256):
        config.optimizer.microbatch_tokens = tokens
        assert of("cpu") == of("tpu") == tokens


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
        ("--config.script.nose=0.1", "did you mean 'noise'?"),
        ("--config.recipe.alfa=1", "did you mean 'alpha'?"),
        ("--config.rollout.task=1", "did you mean 'tasks'?"),
        ("--config.evaluation.evry=1", "did you mean 'every'?"),
        ("--config.checkpoint.kep=1", "did you mean 'keep'?"),
        ("--config.control.permute_reward=true", "did you mean 'permute_rewards'?"),
        ("--noconfig.recipe.filter_zero_varianze", "did you mean 'filter_zero_variance'?"),
        ("--wrokdir=runs/1", "Did you mean: workdir ?"),
    ],
)
def test_a_mistyped_flag_is_refused_with_what_was_meant(capsys, flag, meant):
    said = refused(capsys, f"--config={QUICKSTART}", flag)
    assert meant in said
    assert flag.lstrip("-").removeprefix("no").split("=")[0] in said


def test_a_key_without_neighbours_is_refused_too(capsys):
    """c7: with the list of those that there are."""
    said = refused(capsys, f"--config={QUICKSTART}", "--config.recipe.zzzz=1")
    assert "--config.recipe.zzzz: unknown key 'zzzz'; there are advantage_estimator, advantages, alpha, baseline, " in said
    assert "--config.steps.zzzz: config has no such key" in refused(capsys, f"--config={QUICKSTART}", "--config.steps.zzzz=1")
    assert "'zzzz'; --help lists those that there are" in refused(capsys, f"--config={QUICKSTART}", "--zzzz=1")


def test_a_value_of_another_type_is_refused(capsys):
    """c7: what it must be, in plain words."""
    for flag, kind in (
        ("steps=ten", "a whole number"),
        ("steps=1.5", "a whole number"),
        ("optimizer.learning_rate=fast", "a number"),
        ("recipe.alpha=x", "a number"),
        ("game.height=big", "a whole number"),
        ("recipe.filter_zero_variance=perhaps", "true or false"),
    ):
        assert refused(capsys, f"--config={QUICKSTART}", f"--config.{flag}") == f"error: --config.{flag} must be {kind}"


def test_a_section_is_not_a_value(capsys):
    said = refused(capsys, f"--config={QUICKSTART}", "--config.recipe=magrpo")
    assert said.endswith("--config.recipe is a section of the config: set one of its keys, e.g. --config.recipe.name=magrpo")


def test_flags_before_the_config_are_refused(capsys):
    assert "before a value for --config" in refused(capsys, "--config.steps=1", f"--config={QUICKSTART}")


def test_what_is_right_is_read():
    config = read_flags(f"--config={QUICKSTART}:smoke", "--config.recipe.alpha=0.5", "--config.game.max_moves=3", "--config.steps=3")
    assert (config.recipe.alpha, config.game.max_moves, config.steps) == (0.5, 3, 3)
    assert (config.evaluation.tasks, config.sft.steps) == (16, 10)
    assert resolve(config).recipe.alpha == 0.5
    with pytest.raises(AttributeError, match="alhpa"):
        config.recipe.alhpa = 1


# --- config files --------------------------------------------------------------------------------------------------------------

HEAD = "from marl_llm.runs.base import base_config\n\n\ndef get_config(arg=None):\n    c = base_config('x', 'plan_path', 'at_grpo')\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    c.recipe.alhpa = 1\n    return c\n", "x.py line 6: unknown key 'alhpa'; did you mean 'alpha'?"),
        ("    c.steps += c.gmae.height\n    return c\n", "x.py line 6: unknown key 'gmae'; did you mean 'game'?"),
        ("    c['zzzz'] = 1\n    return c\n", "x.py line 6: unknown key 'zzzz'; there are assignment, "),
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
    assert said.endswith("quickstart has no variant 'smok'; it has 'smoke'")
    missing = tmp_path / "missing.py"
    for argv in ([f"--config={missing}"], [f"--config={missing}", "--config.steps=1"], ["--config", str(missing)]):
        assert refused(capsys, *argv).startswith(f"error: there is no config file {missing} (from ")
    assert "there is no config file" in refused(capsys, f"--config={tmp_path}")
    assert "did you mean 'quickstart.py'?" in refused(capsys, "--config=experiments/configs/quikstart.py:smoke")
    (tmp_path / "x.py").write_text(HEAD.replace("'plan_path'", "'plan_pth'") + "    return c\n")
    said = refused(capsys, f"--config={tmp_path / 'x.py'}")
    assert "line 5: unknown game 'plan_pth'; did you mean 'plan_path'?; the games are plan_path, joint_letter, " in said


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
    with pytest.raises(ConfigError, match="start from marl_llm.runs.base.base_config"):
        resolve(config)


# --- values --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("seed", -1, r"config\.seed=-1 must lie in \[0, 2\^31\)"),
        ("steps", -1, r"config\.steps=-1 must be at least 0"),
        ("devices", -1, r"config\.devices=-1 must be at least 0"),
        ("game.name", "plan_pth", "unknown game 'plan_pth'"),
        ("game.height", 99, r"plan_path\.height=99 is not in \[2, 32\]"),
        ("game.view", "none", r"plan_path\.view='none' is not one of full, split"),
        ("game.strict", True, r"plan_path\.strict has no effect unless"),
        ("model.preset", "huge", "unknown model preset 'huge'; the presets are nano"),
        ("model.width", 0, r"ModelConfig\.width is 0"),
        ("model.key_value_heads", 3, r"query_heads=4 is not a multiple of key_value_heads=3"),
        ("recipe.name", "at_grop", r"recipe='at_grop' is unknown\. Did you mean 'at_grpo'\?"),
        ("recipe.preset", "papr", "preset of at_grpo"),
        ("recipe.scale_advantages", "stdd", r"scale_advantages='stdd' is unknown\. Did you mean 'std'\?"),
        ("recipe.group_size", 0, r"group_size=0 must be a number in \[1, inf\]"),
        ("recipe.group_by", "env,agnet", "Did you mean 'agent'"),
        ("rollout.tasks", 0, r"config\.rollout\.tasks=0 must be at least 1"),
        ("optimizer.minibatch", 0, r"config\.optimizer\.minibatch=0 must be at least 1"),
        ("optimizer.epochs", 0, r"config\.optimizer\.epochs=0 must be at least 1"),
        ("optimizer.microbatch_tokens", -1, r"config\.optimizer\.microbatch_tokens=-1 must be at least 0"),
        ("optimizer.microbatch_tokens", 5, r"microbatch_tokens=5 cannot hold one row of 256 tokens, and a row is never cut"),
        ("optimizer.microbatch_tokens", 10**6, r"microbatch_tokens=1000000 would have no effect: a minibatch has at most \d+ tokens"),
        ("optimizer.warmup", -1, r"config\.optimizer\.warmup=-1 must be at least 0"),
        ("optimizer.learning_rate", 0.0, r"config\.optimizer\.learning_rate=0\.0 must be positive"),
        ("optimizer.learning_rate", float("nan"), r"config\.optimizer\.learning_rate=nan must be positive"),
        ("optimizer.learning_rate", float("inf"), r"config\.optimizer\.learning_rate=inf must be positive and finite"),
        ("optimizer.max_grad_norm", 0.0, r"config\.optimizer\.max_grad_norm=0\.0 must be positive"),
        ("optimizer.weight_decay", -0.1, r"config\.optimizer\.weight_decay=-0\.1 must be 0 or more"),
        ("optimizer.b2", 1.0, r"config\.optimizer\.b2=1\.0 must lie between 0 and 1"),
        ("sft.steps", -1, r"config\.sft\.steps=-1 must be at least 0"),
        ("sft.tasks", 0, r"config\.sft\.tasks=0 must be at least 1"),
        ("sft.learning_rate", -1.0, r"config\.sft\.learning_rate=-1\.0 must be positive"),
        ("evaluation.every", 0, r"config\.evaluation\.every=0 must be at least 1"),
        ("evaluation.tasks", 0, r"config\.evaluation\.tasks=0 must be at least 1"),
        ("evaluation.final_tasks", 0, r"config\.evaluation\.final_tasks=0 must be at least 1"),
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
        ("plan_path", "at_grpo", {"recipe.zero_variance_in_denominator": False}, "zero_variance_in_denominator=False would have no effect"),
        ("plan_path", "grpo", {"recipe.pick": "first"}, "pick='first' would have no effect"),
        ("plan_path", "at_grpo", {"script.noise": 0.2}, r"script\.noise would have no effect: sft\.steps is 0"),
        ("plan_path", "at_grpo", {"game.name": "joint_letter", "game.height": 3}, "joint_letter has no option 'height'"),
        ("joint_letter", "at_grpo", {}, "use a recipe with sampling='parallel', e.g. magrpo"),
        ("plan_path", "at_grpo", {"rollout.max_num_seqs": 5},
         r"config\.rollout\.max_num_seqs=5 would have no effect: the game is played compiled"),
        ("fact_parallel", "grpo", {"rollout.max_staleness": 1},
         r"rollout\.max_staleness=1 trains on samples .* set config\.recipe\.rollout_correction=truncate"),
        ("fact_parallel", "grpo", {"rollout.max_staleness": 2}, r"config\.rollout\.max_staleness=2 must be 0 or 1"),
        ("fact_parallel", "grpo", {"rollout.aborted_limit": 1.5}, r"config\.rollout\.aborted_limit=1\.5 must lie in \[0, 1\]"),
        ("plan_path", "at_grpo", {"rollout.max_staleness": 1},
         r"config\.rollout\.max_staleness=1 would have no effect: the game is played compiled"),
        ("plan_path", "at_grpo", {"rollout.oversample": 1}, r"oversample=1 would have no effect: the game is played compiled"),
        ("fact_parallel", "grpo", {"rollout.oversample": 1}, r"rollout\.oversample=1: late .* set recipe\.rollout_correction=truncate"),
        ("fact_parallel", "grpo", {"rollout.oversample": 48}, r"config\.rollout\.oversample=48 must be below config\.rollout\.tasks=48"),
        ("fact_parallel", "grpo", {"rollout.oversample": 1, "checkpoint.every": 1}, "oversample=1 would have no effect: the step before a"),
        ("fact_parallel", "grpo", {"rollout.oversample": -1}, r"config\.rollout\.oversample=-1 must be at least 0"),
        ("plan_path", "ppo", {"rollout.refills": 2}, r"config\.rollout\.refills=2: recipe\.advantage_estimator='critic' makes no groups"),
        ("fact_parallel", "grpo", {"rollout.refills": 2, "rollout.max_staleness": 1, "recipe.rollout_correction": "mask"},
         r"refills=2: max_staleness=1 plays"),
        ("fact_parallel", "grpo", {"rollout.replay": 4}, r"config\.rollout\.replay=4: .* set recipe\.rollout_correction=truncate"),
        ("fact_parallel", "grpo", {"rollout.replay": 4, "rollout.oversample": 1, "recipe.rollout_correction": "mask"},
         r"config\.rollout\.replay=4: oversample trains on samples"),
        ("plan_path", "at_grpo", {"rollout.replay": 4}, r"config\.rollout\.replay=4 would have no effect: the game is played compiled"),
        ("matrix", "grpo", {"league.every": 5}, r"config\.league\.every would have no effect: config\.league\.keep is 0"),
        ("matrix", "grpo", {"league.keep": 2, "rollout.tasks": 6}, r"config\.league\.keep=2: tasks=6 of a step do not divide"),
        ("matrix", "grpo", {"league.keep": 2, "league.priority": "easy"}, r"config\.league\.priority"),
        ("fact_parallel", "grpo", {"rollout.refills": -1}, r"config\.rollout\.refills=-1 must be at least 0"),
        ("fact_parallel", "grpo", {"rollout.draft_tokens": 4, "rollout.batch_invariant": True},
         r"config\.rollout\.draft_tokens=4: batch_invariant promises equal bytes"),
        ("fact_parallel", "grpo", {"rollout.draft_tokens": -1}, r"config\.rollout\.draft_tokens=-1 must be at least 0"),
        ("plan_path", "at_grpo", {"rollout.draft_tokens": 4},
         r"config\.rollout\.draft_tokens=4 would have no effect: the game is played compiled"),
        ("fact_parallel", "grpo", {"rollout.block_pool": "common"}, r"config\.rollout\.block_pool='common' is not one of own, shared"),
        ("fact_parallel", "grpo", {"rollout.weight_update": "soon"},
         r"config\.rollout\.weight_update='soon' is not one of blocking, in_flight"),
        ("fact_parallel", "grpo", {"rollout.weight_update": "in_flight"},
         r"config\.rollout\.weight_update=in_flight: it would .* set max_staleness=1 or"),
        ("fact_parallel", "grpo", {"rollout.weight_update": "in_flight", "rollout.batch_invariant": True},
         r"config\.rollout\.weight_update=in_flight: batch_invariant promises equal bytes"),
        ("plan_path", "at_grpo", {"rollout.weight_update": "in_flight"},
         r"config\.rollout\.weight_update=in_flight would have no effect: the game is played compiled"),
        ("plan_path", "at_grpo", {"rollout.max_tokens": 5}, r"config\.rollout\.max_tokens=5 would have no effect"),
        ("plan_path", "at_grpo", {"model.kind": "scripted"}, r"tool is scripted, and compiled play knows models"),
        ("plan_path", "at_grpo", {"sft.step": 3}, "sft.step=3 would have no effect: sft.run names no run"),
    ],
)
def test_contradictions_and_options_without_effect_are_refused(game, recipe, settings, why):
    config = base_config("x", game, recipe)
    for path, value in settings.items():
        section, key = path.split(".")
        config[section][key] = value
    with pytest.raises(ConfigError, match=why):
        resolve(config)


def test_exact_play_needs_a_power_of_two_slots():
    config = base_config("x", "plan_path", "grpo")
    config.hosted, config.rollout.max_num_seqs, config.rollout.batch_invariant = True, 12, True
    with pytest.raises(ConfigError, match=r"config\.rollout\.max_num_seqs=12 must be a power of two with rollout\.batch_invariant"):
        resolve(config)
    config.rollout.max_num_seqs = 16
    resolve(config)


def test_assignments():
    roles = ["tool", "planner"]
    assert checks.parse_assignment("per_role", roles) == {"tool": "tool", "planner": "planner"}
    assert checks.parse_assignment("shared", roles) == {"tool": "shared", "planner": "shared"}
    assert checks.parse_assignment(" planner = b , tool=a", roles) == {"tool": "a", "planner": "b"}
    config = base_config("x", "plan_path", "at_grpo")
    config.assignment = "planner=z,tool=a"
    assert resolve(config).assignment.trained == ("a", "z")  # in the order of the roles
    assert list(resolve(config).shapes) == ["a", "z"]


def test_devices_divide_what_is_shared_out():
    config = base_config("x", "plan_path", "at_grpo")
    config.rollout.tasks = 12
    config.sft.tasks = 7  # not shared out without a supervised warm-up
    assert [checks.most_devices(config, n) for n in (1, 2, 3, 5, 8, 12)] == [1, 2, 3, 4, 6, 12]
    config.sft.steps = 1
    assert checks.most_devices(config, 8) == 1
    checks.devices(config, 1)
    with pytest.raises(ConfigError, match=r"config\.sft\.tasks=7 does not divide over 2 devices"):
        checks.devices(config, 2)
    config.sft.tasks = 4
    with pytest.raises(ConfigError, match=r"config\.rollout\.tasks=12 does not divide over 8 devices"):
        checks.devices(config, 8)


# --- the run directory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def config():
    return base_config("x", "plan_path", "at_grpo")


def opened(path, config):
    """Opens a run directory and lets go of it again, as the end of a process would."""
    try:
        return workdir.open_workdir(path, config, "x.py", "1 x cpu")
    finally:
        let_go()


def let_go():
    """What the end of a process does."""
    for handle in workdir._HELD.values():
        os.close(handle)
    workdir._HELD.clear()


def test_the_same_config_continues(tmp_path, config):
    assert opened(tmp_path / "a" / "b", config) is False
    text = (tmp_path / "a" / "b" / "config.json").read_text()
    assert opened(tmp_path / "a" / "b", config) is True
    assert (tmp_path / "a" / "b" / "config.json").read_text() == text
    read = workdir.read_config(tmp_path / "a" / "b")
    assert workdir.plain(read) == workdir.plain(config)
    assert workdir.read_record(tmp_path / "a" / "b")["config_file"] == "x.py"
    assert resolve(read) == resolve(config)
    assert type(read.get_type("recipe")) is type(config.get_type("recipe"))
    read.recipe.alpha = 0.5  # keys keep their types, and stay locked
    with pytest.raises(TypeError):
        read.recipe.alpha = "half"


def learned(run):
    """What a run has once it took a step."""
    (run / "checkpoints" / "1").mkdir(parents=True)


def test_a_run_that_left_options_open_or_did_not_know_them_continues_with_their_defaults(tmp_path, config):
    """As one of an earlier version, which wrote None for `rollout.max_num_seqs`; what follows from the models stays open until they are
    known."""
    opened(tmp_path / "run", config)
    learned(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    record["config"]["rollout"].update(max_num_seqs=None, aborted_limit=None, batch_invariant=None)
    record["config"]["coach"]["truth"] = None
    del record["config"]["rollout"]["weight_update"], record["config"]["control"]
    path.write_text(json.dumps(record))
    assert opened(tmp_path / "run", config) is True
    assert workdir.plain(workdir.read_config(tmp_path / "run")) == workdir.plain(config)
    config.rollout.max_num_seqs = 32
    with pytest.raises(ConfigError, match=r"config\.rollout\.max_num_seqs: 64 -> 32"):
        opened(tmp_path / "run", config)
    assert config.optimizer.learning_rate is None


def test_another_config_is_refused_with_every_difference(tmp_path, config):
    opened(tmp_path / "run", config)
    learned(tmp_path / "run")
    text = (tmp_path / "run" / "config.json").read_text()
    with config.unlocked():
        config.steps, config.recipe.alpha, config.optimizer.learning_rate = 107, 0.5, 1e-4
    with pytest.raises(ConfigError) as error:
        opened(tmp_path / "run", config)
    lines = str(error.value).splitlines()
    assert lines[1:-1] == [
        "  config.optimizer.learning_rate: None -> 0.0001",
        "  config.recipe.alpha: None -> 0.5",
        "  config.steps: 100 -> 107",
    ]
    assert f"--resume={tmp_path / 'run'}" in lines[-1]
    assert (tmp_path / "run" / "config.json").read_text() == text
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoints", "config.json"]


def test_a_run_that_never_took_a_step_makes_room_for_another_and_nothing_of_it_is_lost(tmp_path, config, capsys):
    """As one that crashed at its first step, whose fault was mended in the config or the game."""
    run = tmp_path / "run"
    opened(run, config)
    (run / "checkpoints" / "0").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"phase": "sft", "step": 1}\n')
    text = (run / "config.json").read_text()
    config.recipe.alpha = 0.5
    assert opened(run, config) is False
    assert f"it is now in {run}.unlearned_1" in capsys.readouterr().err
    assert (tmp_path / "run.unlearned_1" / "config.json").read_text() == text
    assert workdir.read_record(run)["config"]["recipe"]["alpha"] == 0.5
    assert opened(run, config) is True  # and the new one is held like any other
    config.recipe.alpha = 0.25
    assert opened(run, config) is False
    assert (tmp_path / "run.unlearned_2").is_dir()


@pytest.mark.parametrize("trace", ["evaluation.json", "metrics.jsonl", "checkpoints/3"])
def test_a_run_with_any_trace_of_a_step_stays_where_it_is(tmp_path, config, trace):
    opened(tmp_path / "run", config)
    if trace == "checkpoints/3":
        (tmp_path / "run" / trace).mkdir(parents=True)
    else:
        (tmp_path / "run" / trace).write_text('{"phase": "train", "step": 1}\n')
    config.recipe.alpha = 0.5
    with pytest.raises(ConfigError, match="holds a run of another config; nothing was touched"):
        opened(tmp_path / "run", config)


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
    with pytest.raises(ConfigError, match=r"config\.json cannot be read .* name the directory of an earlier run"):
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


OPEN = ("optimizer.learning_rate", "sft.learning_rate", "evaluation.tasks", "evaluation.final_tasks")


@pytest.mark.parametrize(
    ("trained", "want"),
    [
        ([{"preset": "nano"}], (1.5e-3, 2e-3, 128, 500)),
        ([{"preset": "nano", "lora_rank": 4}], (1.5e-3, 2e-3, 128, 500)),
        ([{"path": "a"}], (1e-6, 1e-5, 32, 64)),
        ([{"path": "a", "lora_rank": 16}], (1e-4, 1e-4, 32, 64)),
        ([{"path": "a", "lora_rank": 16}, {"path": "a"}], (1e-6, 1e-5, 32, 64)),
        ([{"preset": "nano"}, {"path": "a", "lora_rank": 16}], (1e-4, 1e-4, 32, 64)),
    ],
)
def test_open_options_follow_from_what_the_models_begin_with(trained, want):
    config = base_config("some", "plan_path", "grpo")
    fill_open_options(config, trained)
    assert tuple(config[key.split(".")[0]][key.split(".")[1]] for key in OPEN) == want
    config.optimizer.learning_rate, config.evaluation.tasks = 3e-3, 7
    fill_open_options(config, [{"path": "a"}])
    assert tuple(config[key.split(".")[0]][key.split(".")[1]] for key in OPEN) == (3e-3, want[1], 7, want[3])


def test_what_was_open_is_set_in_the_config_that_a_run_keeps_and_in_the_dry_run():
    config = base_config("some", "plan_path", "grpo")
    with resolve(config) as plan:
        table = plan.table(config)
    assert config.optimizer.learning_rate == 1.5e-3
    for section in ("rollout", "optimizer", "sft", "evaluation", "checkpoint"):
        assert f"\n{section}\n" in table
    for key, value in (("learning_rate", 0.0015), ("learning_rate", 0.002), ("final_tasks", 500), ("max_num_seqs", 64), ("fresh", "never")):
        assert f"  {key:<20} {value}\n" in table


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
        "quickstart: game plan_path, recipe at_grpo (paper), 500 steps, seed 0",
        "tool       -> model a          prompt [E=48, P<=",
        "planner    -> model b          prompt [E=48, P<=",
        "responses [E=48, K=4, R<=5]",
        "parameters (V=",
        "at most 1,536 samples (E=48 x K=4 x T=4 x N=2)",
        "  max_moves            4",
        "  filter_zero_variance True",
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


def test_missing_and_contradictory_flags_are_told(tmp_path, monkeypatch):
    from marl_llm.cli import train

    def said(**values):
        for name in ("_CONFIG", "_WORKDIR", "_RESUME", "_DRY_RUN", "_STEP"):
            monkeypatch.setattr(train, name, type("Flag", (), {"value": values.get(name)}))
        monkeypatch.setattr(train.config_flags, "get_config_filename", lambda flag: "x.py")
        monkeypatch.setattr(train, "FLAGS", {"config": None})
        with pytest.raises(ConfigError) as error:
            train.main(["train"])
        return str(error.value)

    assert said() == "--config is missing, e.g. --config=experiments/configs/quickstart.py"
    assert said(_RESUME="runs/1", _WORKDIR="runs/2").startswith("--resume takes the directory alone")
    assert said(_RESUME="runs/1", _CONFIG=3).startswith("--resume takes the directory alone")
    assert said(_CONFIG=3, _STEP=2).endswith("it needs --resume=DIR")
    assert said(_CONFIG=base_config("x", "plan_path", "at_grpo")) == "--workdir is missing, e.g. --workdir=runs/first"


def test_resume_brings_the_config_of_the_directory_and_flags_change_it(tmp_path, config, capsys):
    """c15: and what is no run directory is told in one line."""
    opened(tmp_path / "run", config)
    argv = command.with_resumed(["train", f"--resume={tmp_path / 'run'}", "--config.steps=200"])
    assert argv[1:] == [f"--config={command.RESUMED}:{tmp_path / 'run'}", f"--resume={tmp_path / 'run'}", "--config.steps=200"]
    read = read_flags(argv[1], argv[3])
    assert workdir.plain(read) == workdir.plain(config) | {"steps": 200}
    assert refused(capsys, f"--config={command.RESUMED}:{tmp_path}").endswith("name the directory of an earlier run")
    assert "did you mean 'steps'?" in refused(capsys, argv[1], "--config.stpes=3")
    for argv in (["train", "--config=x.py", "--resume=y"], ["train", "--workdir=y"]):
        assert command.with_resumed(argv) == argv


def test_c15_more_steps_and_other_devices_are_taken_over_and_recorded(tmp_path, config, capsys):
    opened(tmp_path / "run", config)
    learned(tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    with config.unlocked():
        config.steps, config.devices, config.mesh.fsdp = 200, 2, 2
    assert opened(tmp_path / "run", config) is True
    assert (tmp_path / "run" / "config.json").read_bytes() == before  # until the run goes on
    workdir.taken_over(tmp_path / "run", config, "1 x cpu")
    record = workdir.read_record(tmp_path / "run")
    assert (record["config"]["steps"], record["config"]["devices"], record["config"]["mesh"]["fsdp"]) == (200, 2, 2)
    (change,) = record["continued"]
    assert change["changed"] == ["config.devices: 0 -> 2", "config.mesh.fsdp: 1 -> 2", "config.steps: 100 -> 200"]
    assert "goes on with config.devices: 0 -> 2" in capsys.readouterr().err
    config.steps = 199
    with pytest.raises(ConfigError, match=r"config\.steps: 200 -> 199"):
        opened(tmp_path / "run", config)


def test_a_run_of_an_earlier_version_is_not_continued(tmp_path, config):
    opened(tmp_path / "run", config)
    path = tmp_path / "run" / "config.json"
    record = json.loads(path.read_text())
    del record["layout"]
    record["config"]["environment"] = record["config"].pop("game")
    path.write_text(json.dumps(record | {"commit": "abc1234+changes"}))
    for read in (workdir.read_config, lambda where: opened(where, config)):
        with pytest.raises(ConfigError, match="written by an earlier version.*cannot be continued.*git checkout abc1234, or") as error:
            read(tmp_path / "run")
        assert "\n" not in str(error.value)


def test_a_data_file_that_an_option_names_is_known_by_its_digest(tmp_path, config):
    """It is not copied, and a run does not go on with another one, unless it began before digests were kept."""
    data, run = tmp_path / "train.jsonl", tmp_path / "run"
    data.write_text("a\n")
    with config.unlocked():
        config.game.train = str(data)
    opened(run, config)
    learned(run)
    assert opened(run, config) is True
    data.write_text("b\n")
    with pytest.raises(ConfigError, match=r"config\.game\.train: .*train\.jsonl has other bytes than when the run began"):
        opened(run, config)
    record = json.loads((run / "config.json").read_text())
    del record["data"]
    (run / "config.json").write_text(json.dumps(record))
    assert opened(run, config) is True


def test_a_missing_data_file_is_told_with_the_option_that_names_it(tmp_path):
    config = base_config("x", "code_debate", "at_grpo")
    config.game.update(train=f"{tmp_path}/train.jsonl", test=f"{tmp_path}/test.jsonl")
    with pytest.raises(ConfigError, match=rf"config\.game\.train: there is no file {tmp_path}/train\.jsonl \(from /"):
        resolve(config)


# --- a game of one's own ---------------------------------------------------------------------------------------------------------

OWN = ROOT / "tests" / "games" / "own"


def test_a_roles_own_pay_in_an_early_turn_reaches_its_advantage_in_a_game_of_ones_own():
    """Two plays of one task with the same outcome; the keeper was paid in the first turn of one of them."""
    config = read_flags(f"--config={ROOT}/experiments/configs/game.py:{OWN}/lock.py:Lock")
    plan = resolve(config)
    play, turn = np.repeat([0, 1], 2), np.tile([0, 1], 2)
    table = Samples(
        instance=np.zeros(4, int), env=play, agent=np.zeros(4, int), turn=turn, trajectory=play, team=1.0 * (turn == 1),
        local=np.asarray([1.0, 0, 0, 0]), tokens=np.ones(4, int),
    )  # fmt: skip
    advantages = np.asarray(advantages_for(plan.recipe, table)[0])
    assert advantages[0] > max(advantages[1:]) + 0.5
    assert "a role's own (local) pay reaches the response that it is paid to" in plan.table(config)


@pytest.mark.parametrize(("flags", "noted"), [((), True), (("--config.sft.steps=5",), False)])
def test_a_run_without_the_warm_up_that_its_game_could_have_says_so(flags, noted, monkeypatch):
    config = read_flags(f"--config={ROOT}/experiments/configs/game.py:{OWN}/lock.py:Lock", *flags)
    plan = resolve(config)
    assert ("no supervised warm-up" in plan.unguided(config)) == noted
    assert ("no supervised warm-up" in plan.table(config)) == noted
    monkeypatch.setattr(type(plan.game), "script", None)
    assert plan.unguided(config) == ""


BESIDE = "outcome_plus_local"


@pytest.mark.parametrize(("name", "returns"), [("grpo", BESIDE), ("rloo", BESIDE), ("magrpo", "to_go"), ("at_grpo", "immediate")])
def test_own_pay_beside_an_outcome_takes_the_place_of_an_outcome_alone(name, returns):
    config = read_flags(f"--config={ROOT}/experiments/configs/game.py:{OWN}/lock.py:Lock", f"--config.recipe.name={name}")
    assert resolve(config).recipe.returns == returns


def test_c1_a_config_names_a_users_file_and_the_run_directory_keeps_it(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(OWN, source)
    config = read_flags(f"--config={ROOT}/experiments/configs/game.py:{source}/lock.py:Lock", "--config.game.step=3")
    config.sft.steps = 1
    config.script.slip = 0.1  # c2: options of the game's own scripted player
    plan = resolve(config)
    assert (plan.game.step, plan.script) == (3, {"slip": 0.1})
    assert "keeper     -> model keeper" in plan.table(config)
    run = tmp_path / "run"
    try:
        assert workdir.open_workdir(run, config, "x.py", "", plan.own_files) is False
        assert sorted(p.name for p in workdir.game_dir_of(run).iterdir()) == ["digits.py", "lock.py"]
        assert workdir.open_workdir(run, config, "x.py", "", plan.own_files) is True
        learned(run)
        (source / "digits.py").write_text("DIGITS = tuple('987')\n")
        with pytest.raises(ConfigError, match=r"digits\.py: another text than"):
            workdir.open_workdir(run, config, "x.py", "", plan.own_files)
    finally:
        let_go()
    shutil.rmtree(source)
    again = resolve(workdir.read_config(run), workdir.game_dir_of(run))
    assert again.game.step == 3
    assert again.game.tokenizer == plan.game.tokenizer
    with pytest.raises(ConfigError, match=r"there is no file .*lock\.py"):
        resolve(config)


def test_c2_options_of_the_scripted_player_are_the_games_own():
    """Not those of one game, written into the base of all configs."""
    expected = {"plan_path": {"noise", "sighted", "repeat"}, "sokoban": {"noise", "noisy", "repeat"}, f"{OWN}/lock.py:Lock": {"slip"}}
    assert {name: set(base_config("x", game=name, recipe="at_grpo").script) for name in expected} == expected


@pytest.mark.parametrize(
    ("flags_given", "said"),
    [
        ((":",), "name the game behind the file"),
        ((":{own}/lock.py:Lok",), "there is no 'Lok' in it; did you mean 'Lock'?"),
        ((":{own}/lock.py:Lock", "--config.game.stp=1"), "--config.game.stp: unknown key 'stp'; did you mean 'step'?"),
        ((":{own}/lock.py:Lock", "--config.script.slp=1"), "--config.script.slp: unknown key 'slp'; did you mean 'slip'?"),
        ((":nowhere.py:Lock",), "there is no file nowhere.py"),
    ],
)
def test_c1_a_wrong_name_or_option_of_a_users_game_is_told(capsys, flags_given, said):
    first, *rest = (text.format(own=OWN) for text in flags_given)
    assert said in refused(capsys, f"--config={ROOT}/experiments/configs/game.py{first}", *rest)


def test_a_config_file_may_import_what_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_it.py").write_text("STEPS = 7\n")
    (tmp_path / "x.py").write_text("from beside_it import STEPS\n" + HEAD + "    c.steps = STEPS\n    return c\n")
    assert read_flags(f"--config={tmp_path / 'x.py'}").steps == 7


def test_c12_the_environments_compilation_cache_wins_unless_the_flag_is_given(monkeypatch, config):
    import jax

    kept, said = dict(os.environ), {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: said.update({name: value}))
    monkeypatch.setattr(os, "environ", kept)
    kept.pop("JAX_COMPILATION_CACHE_DIR", None)
    for environment, flag, used in (
        ("", None, os.path.expanduser(building.CACHE)), ("/x", None, None), ("/x", "/y", "/y"), ("", "", None), ("/x", "", None),
    ):  # fmt: skip
        said.clear()
        kept["JAX_COMPILATION_CACHE_DIR"] = environment
        building.start_jax(config, flag)
        assert said.get("jax_compilation_cache_dir") == used
        assert ("jax_compilation_cache_dir" in said) == (flag is not None or not environment)


def test_a_team_of_checkpoints_takes_one_cpu_device_unless_told(monkeypatch, config):
    """Every device would hold a copy of the parameters."""
    import jax

    config.hosted = True
    there = jax.device_count()
    assert there > 1
    assert building.start_jax(config, "").size == there
    config.models.unlock()
    config.models.solver = model_section(path="somewhere")
    assert building.start_jax(config, "").size == 1
    config.devices = 2
    assert building.start_jax(config, "").size == 2
    config.devices, config.models.solver.path, config.model.path = 0, None, "somewhere"
    assert building.start_jax(config, "").size == 1


@pytest.mark.parametrize(("name", "is_one"), [("tests/games/own/lock.py:Lock", False), ("tests/games/own/relay.py:relay", True),
                                              ("plan_path", False), ("plan_path_text", True), ("no_such.py:game", False)])  # fmt: skip
def test_a_users_own_workflow_takes_all_devices_as_one_of_the_library_does(name, is_one, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = types.SimpleNamespace(game=config_dict.ConfigDict({"name": name}))
    assert building.is_environment(config, None) == is_one
