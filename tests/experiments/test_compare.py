"""A comparison checks all its variants before the first of them runs."""

import pathlib
import subprocess
import sys

import pytest

from marl_llm.runs.base import base_config
from marl_llm.runs.command import ConfigError
from marl_llm.runs.variants import check_variants

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def config():
    return base_config("x", "plan_path", "at_grpo")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recipe.alhpa": "0.5"}, r"variant second: config\.recipe\.alhpa: unknown key 'alhpa'.*did you mean 'alpha'"),
        ({"recip.alpha": "0.5"}, r"variant second: config\.recip\.alpha: there is no section 'recip'"),
        ({"steps": "many"}, r"variant second: config\.steps=many must be of the type int"),
        ({"hosted": "perhaps"}, r"variant second: config\.hosted=perhaps must be of the type bool"),
        ({"steps": "-1"}, r"variant second: config\.steps=-1 must be at least 0"),
        ({"recipe.name": "at_grop"}, r"variant second: .*at_grop"),
        ({"assignment": "tool=a"}, r"variant second: .*assignment"),
    ],
)
def test_a_fault_in_the_second_variant_is_told_before_the_first_runs(tmp_path, config, changes, said):
    with pytest.raises(ConfigError, match=said):
        check_variants(config, {"first": {"assignment": "shared"}, "second": changes}, tmp_path)


def test_variants_that_can_run_pass_and_leave_the_config_as_it_is(tmp_path, config):
    before = config.to_json()
    changes = {"recipe.alpha": "0.5", "hosted": "true", "rollout.max_num_seqs": "8", "steps": "3", "rollout.max_prompt": "None"}
    check_variants(config, {"a": changes, "b": {"assignment": "shared"}, "imitation": {}}, tmp_path)
    assert config.to_json() == before


def test_the_command_checks_before_it_launches(tmp_path):
    """With the flags as they are typed."""
    typed = [sys.executable, "-m", "marl_llm", "compare", "--config=experiments/configs/quickstart.py"]
    typed += ["--variant=a:steps=1", "--variant=b:stpes=1"]
    done = subprocess.run([*typed, f"--output={tmp_path / 'out'}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "variant b: config.stpes: unknown key 'stpes'; did you mean 'steps'" in done.stderr
    assert not (tmp_path / "out").exists()
