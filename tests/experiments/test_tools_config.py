"""`config.tools`: where programs are run while a run trains, what contradicts, and that it may change when a run continues."""

import pytest

from marl_llm.runs import building
from marl_llm.runs.base import base_config, check
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.runs.workdir import open_workdir
from marl_llm.tools import Executor, SandboxError
from marl_llm.tools.sandbox import default_sandbox, on_ray


def config_of(**settings):
    config = base_config("x", "plan_path", "grpo")
    config.tools.update(settings)
    return config


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"backend": "rey"}, r"tools\.backend='rey' is not one of local, ray; did you mean 'ray'"),
        ({"address": "10.0.0.1:6379"}, r"tools\.address='10\.0\.0\.1:6379' would have no effect: config\.tools\.backend is 'local'"),
        ({"workers": 0}, r"config\.tools\.workers=0 must be at least 1"),
    ],
)
def test_what_names_no_place_for_tools_is_refused_before_a_game_is_made(settings, why):
    with pytest.raises(ConfigError, match=why):
        check(config_of(**settings))


def test_a_compiled_game_has_no_tools_to_place():
    for settings in ({"backend": "ray"}, {"workers": 2}):
        with pytest.raises(ConfigError, match=r"config\.tools would have no effect: the game is played compiled"):
            resolve(config_of(**settings))


def test_the_sandbox_of_the_process_is_the_configs_as_long_as_it_is_open():
    before = default_sandbox()
    with building.tools_of(config_of()):
        assert default_sandbox() is before
    with building.tools_of(config_of(workers=3)):
        chosen = default_sandbox()
        assert isinstance(chosen, Executor)
        assert chosen.workers == 3
    assert chosen.closed
    assert default_sandbox() is before


def test_a_run_does_not_begin_where_there_is_no_cluster(monkeypatch):
    asked = []

    def nobody(*given):
        asked.append(given)
        raise SandboxError("there is no Ray cluster at 'h:1'")

    monkeypatch.setattr(on_ray, "RayCluster", nobody)
    with pytest.raises(SandboxError, match="no Ray cluster"), building.tools_of(config_of(backend="ray", address="h:1", workers=2), 4):
        raise AssertionError("it began")
    assert asked == [("h:1", 2, 4)]


def test_a_run_may_continue_with_its_tools_elsewhere(tmp_path):
    assert open_workdir(tmp_path / "run", config_of(), "file", "hardware") is False
    assert open_workdir(tmp_path / "run", config_of(backend="ray", address="h:1"), "file", "hardware") is True
