"""`config.models.<name>.sampler`: what is needed, what contradicts, and that a run's server is asked only while it trains."""

import pytest

from marl_llm.runs.base import base_config, model_section
from marl_llm.runs.building import model_specs
from marl_llm.runs.command import ConfigError
from marl_llm.runs.resolve import resolve
from marl_llm.training import make_mesh

VLLM = {"model.sampler": "vllm", "model.url": "http://127.0.0.1:1/v1", "model.folder": "params", "recipe.rollout_correction": "truncate"}


def config_of(hosted=True, **settings):
    config = base_config("x", "plan_path", "grpo")
    config.assignment, config.hosted = "shared", hosted
    for path, value in settings.items():
        section, key = path.split(".")
        config[section][key] = value
    return config


def test_a_model_is_drawn_by_the_server_that_its_section_names_unless_the_run_is_only_measured():
    config = config_of(**VLLM)
    config.model.preset = "nano"
    with resolve(config) as plan:
        server = model_specs(plan, config, make_mesh(1))["shared"].sampler
        assert server.root == "http://127.0.0.1:1"
        assert server.folder.endswith("/params")
        assert server.folder.startswith("/")
        assert model_specs(plan, config, make_mesh(1), served=False)["shared"].sampler is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"recipe.rollout_correction": "none"}, r"sampler='vllm' draws in another program, .* set recipe\.rollout_correction=truncate"),
        ({"recipe.temperature": 0.5}, r"temperature=0\.5, .* draws are at temperature 1"),
        ({"recipe.top_p": 0.9}, r"no sets of kept tokens"),
        ({"model.url": None}, r"sampler='vllm' needs url: the server's address"),
        ({"model.folder": None}, r"sampler='vllm' needs folder: a directory that the server sees under the same path"),
        ({"model.sampler": "vlm"}, r"sampler='vlm' is not one of engine, vllm; did you mean 'vllm'"),
        ({"model.sampler": None}, r"url would have no effect: the model is trained, and its sampler 'engine'"),
        ({"model.served_as": "a"}, r"served_as would have no effect: the model is trained"),
    ],
)
def test_what_a_server_needs_and_cannot_do_is_refused_by_the_config(settings, why):
    with pytest.raises(ConfigError, match=why):
        resolve(config_of(**VLLM | settings))


def test_compiled_play_has_no_server_and_two_models_share_none():
    config = config_of(hosted=False, **VLLM)
    with pytest.raises(ConfigError, match=r"sampler='vllm': compiled play draws in its own program; set config\.hosted"):
        resolve(config)
    config = config_of(**VLLM)
    config.assignment = "per_role"
    with pytest.raises(ConfigError, match=r"is also that of \w+: each model needs its own server"):
        resolve(config)
    first, *others = resolve(config_of()).budgets
    for number, name in enumerate((first, *others)):
        config.models[name] = model_section(url=f"http://127.0.0.1:{number + 1}")
    with resolve(config) as plan:
        assert plan.options[first]["url"] == "http://127.0.0.1:1"
