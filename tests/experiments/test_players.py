"""Configs of workflows: every file and variant resolves, the table says what would run, and what has no effect is refused by name."""

import importlib
import json
import pathlib
import sys

import jax
import pytest
from absl import flags
from ml_collections import config_dict, config_flags

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "text"))

from checkpoint_text import template_source, tokenizer_of, write_checkpoint  # noqa: E402

from marl_llm.algorithms import RECIPES, make_recipe  # noqa: E402
from marl_llm.models import ModelConfig, init_params, save_pretrained  # noqa: E402
from marl_llm.runs import checks, command  # noqa: E402
from marl_llm.runs.base import base_config, model_section  # noqa: E402
from marl_llm.runs.command import ConfigError  # noqa: E402
from marl_llm.runs.resolve import resolve as open_plan  # noqa: E402
from marl_llm.tools.retriever import build_bm25  # noqa: E402
from marl_llm.workflows import Inside, Outside, Scripted  # noqa: E402

SMALL = {
    "search_parallel": ("", "smoke"),
    "search_extract": ("", "smoke"),
    "search_iterative": ("", "smoke"),
    "plan_code_reflect": ("", "smoke", "ppo", "at_grpo", "reinforce"),
}
ROLES = {
    "search_parallel": {"decompose": "decompose", "answer": "answer"},
    "search_extract": {"decompose": "decompose", "evidence": "evidence", "answer": "answer"},
    "search_iterative": {"plan": "reason", "search": "search", "summary": "summary", "update": "update", "answer": "reason"},
    "plan_code_reflect": {"planner": "planner", "coder": "coder", "reflector": "reflector"},
}


def config_of(file, variant=""):
    """The config of a file, with as few facts as there can be."""
    config = importlib.import_module(f"experiments.configs.{file}").get_config(variant)
    if "worlds" in config.game:
        config.game.worlds = 1
    return config


def resolve(config):
    with open_plan(config) as plan:
        return plan


def describe(config):
    return resolve(config).table(config)


def read_flags(*argv):
    """The config that a command line makes, through the very parser of the command."""
    argv = ["train", *argv]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, "", flag_values=values, sys_argv=argv)
    command._parse(argv, values)
    return values["config"].value


def write_tiny_checkpoint(folder):
    """A Hugging Face checkpoint of Qwen2.5's form with 1,000 parameters: config, safetensors, tokenizer and chat template."""
    vocabulary = max(512, tokenizer_of("qwen2.5").vocab_size)
    shape = ModelConfig(
        vocab_size=vocabulary, width=16, layers=1, query_heads=2, key_value_heads=1, head_dim=8, feed_forward=16,
        qk_norm=False, attention_bias=True, max_position=32_768,
    )  # fmt: skip
    save_pretrained(folder, shape, init_params(shape, jax.random.key(0)))
    made = json.loads((folder / "config.json").read_text())
    write_checkpoint(folder, "qwen2.5", template_source("qwen2.5"))
    theirs = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(theirs | made | {"eos_token_id": theirs["eos_token_id"]}))
    return folder


def write_files(folder):
    """What the full-size configs need: questions, problems, an index and a checkpoint; flags by config file."""
    import pyarrow
    import pyarrow.parquet

    def table(name, rows):
        return pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")

    def question(i):
        return {"question": f"where is item {i}?", "golden_answers": [f"shelf {i}"], "data_source": "nq"}

    tests = json.dumps({"inputs": [f"{i}\n" for i in range(4)], "outputs": [f"{i}\n" for i in range(4)]})

    def problem(i):
        return {"problem": f"Print what you read, {i} times.", "tests": tests, "starter_code": ""}

    for name, row in (("nq", question), ("code", problem)):
        table(f"{name}_train", [row(i) for i in range(6)])
        table(f"{name}_test", [row(i) for i in range(6, 9)])
    build_bm25([{"id": str(i), "contents": f"item {i} is on shelf {i}"} for i in range(9)], folder / "index")
    (folder / "tiny").mkdir()
    write_tiny_checkpoint(folder / "tiny")

    def of(name):
        return [f"--config.game.{s}={folder}/{name}_{s}.parquet" for s in ("train", "test")]

    search = [*of("nq"), f"--config.game.index={folder}/index", f"--config.model.path={folder}/tiny"]
    return dict.fromkeys(("search_parallel", "search_extract", "search_iterative"), search) | {
        "plan_code_reflect": [*of("code"), f"--config.model.path={folder}/tiny"]
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("files"))


# --- the files -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "variant"), [(file, variant) for file, variants in SMALL.items() for variant in variants])
def test_every_small_config_resolves_and_its_table_says_what_would_run(file, variant):
    config = config_of(file, variant)
    said = describe(config)
    recipe = {"ppo": "ppo", "at_grpo": "at_grpo", "reinforce": "mappa"}.get(variant, "grpo")
    assert said.startswith(f"{file}: workflow ")
    assert f"recipe {recipe} (paper), {config.steps} steps, seed 0" in said
    for role, model in ROLES[file].items():
        assert any(line.split()[:4] == [role, "->", "model", model] for line in said.splitlines()), role
    assert f"models (trained: {', '.join(dict.fromkeys(ROLES[file].values()))};" in said
    assert "kind=trained, preset=micro" in said
    assert ("goes on" in said) == (variant == "at_grpo")
    assert "headline figure: " + ("all_passed" if file == "plan_code_reflect" else "f1") in said
    assert "flowchart" in said
    assert (config.quick_compile, config.steps <= 2) == (variant == "smoke", variant == "smoke")


@pytest.mark.parametrize("file", SMALL)
def test_every_full_config_resolves_with_files_and_a_checkpoint(file, files):
    config = read_flags(f"--config={ROOT}/experiments/configs/{file}.py:full", *files[file])
    plan = resolve(config)
    assert plan.recipe.advantage_estimator == "critic"
    assert plan.assignment.roles == ROLES[file]
    assert {one["path"] for one in plan.options.values()} == {config.model.path}
    assert not any("preset" in one for one in plan.options.values())
    assert f"path={config.model.path}" in describe(config)
    with pytest.raises(ValueError, match=f"{file} has no variant 'ful'; it has 'smoke', 'full'"):
        config_of(file, "ful")


def test_a_full_config_without_files_or_checkpoint_is_told(files):
    def of(flags):
        return read_flags(f"--config={ROOT}/experiments/configs/search_parallel.py:full", *flags)

    with pytest.raises(ConfigError, match="index must name a retriever"):
        resolve(of([]))
    given = files["search_parallel"]
    with pytest.raises(ConfigError, match="config.models.decompose: this environment has no vocabulary of its own; set path to a"):
        resolve(of(given[:-1]))
    with pytest.raises(ConfigError, match=r"config\.models\.decompose\.path='/nowhere': .*no such directory. Only local"):
        resolve(of([*given[:-1], "--config.model.path=/nowhere"]))
    with pytest.raises(ConfigError, match=r"nq_train\.parquet\.no"):
        resolve(of([f"{given[0]}.no.jsonl", *given[1:]]))
    with pytest.raises(ConfigError, match="is row 0 of train and row 0 of test"):
        resolve(of([given[0], given[1].replace("_test", "_train"), *given[2:]]))


def test_flags_reach_world_recipe_and_optimizer(capsys):
    one = f"--config={ROOT}/experiments/configs/search_iterative.py:smoke"
    config = read_flags(one, "--config.game.worlds=1", "--config.assignment=shared", "--config.recipe.group_size=3")
    plan = resolve(config)
    assert (plan.recipe.group_size, plan.assignment.trained, set(plan.assignment.roles.values())) == (3, ("shared",), {"shared"})
    for flag, meant in (("game.wrlds=1", "'worlds'?"), ("rollout.task=1", "'tasks'?"), ("modle.preset=x", "'model'?")):
        with pytest.raises(SystemExit):
            read_flags(one, f"--config.{flag}")
        assert meant in capsys.readouterr().err


# --- what is refused -----------------------------------------------------------------------------------------------------------------


def refused(config, message):
    with pytest.raises(ConfigError, match=message) as error:
        resolve(config)
    assert "\n" not in str(error.value)


def changed(file="search_parallel", variant="", **values):
    """A config with some values changed, by dotted name."""
    config = config_of(file, variant)
    for path, value in values.items():
        *sections, key = path.split("__")
        section = config
        for name in sections:
            section = section[name]
        section[key] = value
    return config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": -1}, r"config\.steps=-1 must be at least 0"),
        ({"seed": -1}, r"config\.seed=-1 must lie in \[0, 2\^31\)"),
        ({"rollout__tasks": 0}, r"config\.rollout\.tasks=0 must be at least 1"),
        ({"rollout__timeout_s": 0.0}, r"config\.rollout\.timeout_s=0\.0 must be positive"),
        ({"optimizer__learning_rate": float("nan")}, r"config\.optimizer\.learning_rate=nan must be positive"),
        ({"optimizer__learning_rate": float("inf")}, r"config\.optimizer\.learning_rate=inf must be positive and finite"),
        ({"optimizer__b2": 1.0}, r"config\.optimizer\.b2=1\.0 must lie between 0 and 1"),
        ({"optimizer__weight_decay": -0.1}, r"config\.optimizer\.weight_decay=-0\.1 must be 0 or more"),
        ({"hosted": True}, r"config\.hosted=True would have no effect: a workflow is always played hosted"),
        ({"optimizer__row_tokens": 99}, r"optimizer\.row_tokens=99 is less than a role's longest prompt and response, 100"),
        ({"optimizer__critic": "both"}, r"config\.optimizer\.critic='both' is not one of own, head, centralised"),
        ({"optimizer__critic": "head"}, r"config\.optimizer\.critic='head' would have no effect: recipe grpo has no critic"),
        ({"optimizer__critic": "centralised"}, r"config\.optimizer\.critic='centralised' would have no effect: recipe grpo has no critic"),
        ({"optimizer__critic_learning_rate": 1e-3}, r"optimizer\.critic_learning_rate would have no effect: recipe grpo has no critic"),
        ({"recipe__name": "gpro"}, "gpro"),
        ({"recipe__group_size": 0}, "group_size"),
        ({"game__name": "fact_paralel"}, "unknown game 'fact_paralel'; did you mean 'fact_parallel'"),
        ({"game__worlds": 0}, "worlds=0"),
        ({"model__preset": "mcro"}, "unknown model preset 'mcro'"),
        ({"model__preset": None}, r"config\.models\.decompose needs a preset or a path"),
        ({"model__width": -64}, "width"),
        ({"model__kind": "frosen"}, r"kind='frosen' is unknown; the kinds are trained, frozen, outside, scripted"),
        ({"model__kind": "frozen"}, r"no model trains: give one kind='trained'"),
        ({"model__kind": "scripted"}, r"no model trains: give one kind='trained'"),
        ({"model__url": "http://127.0.0.1:1/v1"}, r"config\.models\.decompose\.url would have no effect: the model is trained"),
        ({"model__lora_alpha": 8.0}, r"config\.model\.lora_alpha=8\.0 would have no effect: no model has a lora_rank"),
        ({"model__lora_rank": 0}, r"LoraConfig\.rank=0 must be at least 1"),
        ({"assignment": "decompose=a"}, "assignment='decompose=a' must name each role once; the game's roles are decompose, answer"),
        ({"assignment": "everyone"}, "assignment='everyone' is not 'per_role', 'shared' or a list"),
        ({"schedule": "decompose"}, "schedule='decompose': 'decompose' is not like 'search:10'"),
        ({"schedule": "decompose:0,answer:1"}, "schedule: a phase is"),
        ({"schedule": "decompose:1"}, "schedule: the model 'answer' never trains"),
        ({"schedule": "decompose:1,anser:1"}, "schedule: 'anser' is no trained model of this assignment, did you mean 'answer'"),
    ],
)
def test_what_cannot_be_or_would_have_no_effect_is_refused_by_name(values, message):
    refused(changed(**values), message)


def test_what_contradicts_a_recipe_with_a_critic_is_refused():
    good = resolve(changed("plan_code_reflect", "ppo", optimizer__critic="head", optimizer__critic_learning_rate=1e-3))
    assert good.recipe.advantage_estimator == "critic"
    refused(
        changed("plan_code_reflect", "ppo", optimizer__critic="head", model__lora_rank=4),
        r"config\.optimizer\.critic='head' lies on a policy's own parameters, but planner trains adapters: use 'own'",
    )
    row = max(map(sum, good.budgets.values()))
    central = {"optimizer__critic": "centralised", "optimizer__row_tokens": row}
    message = rf"config\.optimizer\.critic='centralised' would have no effect: a row of {row} .*: set row_tokens, e\.g\. to {3 * row}"
    refused(changed("plan_code_reflect", "ppo", **central), message)
    assert resolve(changed("plan_code_reflect", "ppo", **central | {"optimizer__row_tokens": 3 * row})).recipe == good.recipe


def test_a_flag_may_exchange_the_recipe_of_a_config_with_a_critic():
    """The file's rate belongs to the critic of the file's recipe; one that was itself asked for is refused, not dropped."""
    full = f"--config={ROOT / 'experiments/configs/search_parallel.py'}:full"
    for given, kept in [
        ((), 1e-5), (("--config.recipe.name=grpo",), None), (("--config.recipe.name=ppo",), 1e-5), (("--config.steps=3",), 1e-5),
        (("--config.recipe.name=gpro",), 1e-5), (("--config.recipe.name=grpo", "--config.optimizer.critic_learning_rate=1e-4"), 1e-4),
    ]:  # fmt: skip
        assert read_flags(full, *given).optimizer.critic_learning_rate == kept, given


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("file", ["quickstart", "plan_code_reflect", "matrix", "joint_letter", "helper_functions", "search_parallel"])
def test_a_flag_may_exchange_the_recipe_of_any_config(file, name):
    """What the file set for its own recipe falls away where the other would refuse it; what both take stays."""
    path = f"--config={ROOT / f'experiments/configs/{file}.py'}"
    own, config = read_flags(path), read_flags(path, f"--config.recipe.name={name}")
    recipe = make_recipe(name, config.recipe.preset, **checks.given(config.recipe, ("name", "preset")))
    assert config.recipe.group_size == own.recipe.group_size or recipe.group_size > own.recipe.group_size == 1
    assert (config.optimizer.critic_learning_rate is None) or recipe.advantage_estimator == "critic"
    if name == own.recipe.name:
        assert config == own


def test_what_a_flag_sets_for_the_exchanged_recipe_is_refused():
    path = f"--config={ROOT / 'experiments/configs/quickstart.py'}"
    config = read_flags(path, "--config.recipe.name=ppo", "--config.recipe.scale_advantages=none")
    refused(config, "ppo: scale_advantages='none' would have no effect")
    config = read_flags(path, "--config.recipe.name=ppo", "--config.recipe.returns=outcome")
    refused(config, "returns='gae' and advantage_estimator='critic' belong together")
    assert read_flags(path, "--config.recipe.name=ppo", "--config.recipe.kl_coef=0.3").recipe.kl_coef == 0.3


def test_a_preset_that_the_other_recipe_lacks_falls_away():
    path = f"--config={ROOT / 'experiments/configs/chain_maths.py'}"
    assert read_flags(path).recipe.preset == "released"
    assert read_flags(path, "--config.recipe.name=grpo").recipe.preset == "paper"


def test_budgets_of_roles_are_cut_to_what_the_config_allows():
    roles = resolve(changed(rollout__max_prompt=20, rollout__max_tokens=6)).game.workflow.roles
    before = resolve(config_of("search_parallel")).game.workflow.roles
    assert [(role.max_prompt, role.max_tokens) for role in before.values()] == [(16, 10), (96, 4)]
    assert [(role.max_prompt, role.max_tokens) for role in roles.values()] == [(16, 6), (20, 4)]
    refused(changed(rollout__max_prompt=0), r"config\.rollout\.max_prompt=0 must be at least 1")


def test_a_tree_where_roles_speak_beside_each_other_is_refused():
    refused(
        changed("search_extract", recipe__name="at_grpo", recipe__group_size=4, recipe__returns=None, recipe__rewards=None),
        "recipe at_grpo samples a tree; branching: node 'evidence' runs beside others.*with sampling='parallel', e.g. magrpo or grpo",
    )


def test_what_a_team_starts_from_is_checked():
    refused(changed(sft__step=3), r"config\.sft\.step=3 would have no effect: sft\.run names no run")
    refused(changed(sft__models="answer=a"), r"config\.sft\.models='answer=a' would have no effect: sft\.run")
    start = dict(sft__run="runs/x")
    resolve(changed(**start, sft__models="answer=a, decompose=a"))
    refused(changed(**start, sft__models="anwser=a"), "no model 'anwser' trains; did you mean 'answer'")
    for text in ("answer", "answer=", "=a", "answer=a=b", "answer=a,answer=b"):
        refused(changed(**start, sft__models=text), rf"config\.sft\.models='{text}' is not like 'shared=reason'")


def test_unknown_and_missing_keys_and_sections_are_refused():
    def resumed(change):
        """As a run directory of another version, or one that was edited, would give it."""
        config = config_dict.ConfigDict(json.loads(config_of("search_parallel").to_json()))
        change(config)
        return config

    def edited(**values):
        return config_dict.ConfigDict(json.loads(config_of("search_parallel").to_json()) | values)

    resolve(resumed(lambda c: None))
    refused(resumed(lambda c: c.rollout.update(task=1)), r"unknown key config\.rollout\.task; did you mean 'tasks'\?")
    refused(resumed(lambda c: c.update(zzzz=1)), r"unknown key config\.zzzz; config has assignment, ")
    refused(resumed(lambda c: c.optimizer.__delattr__("epochs")), r"config\.optimizer\.epochs is missing; start the config from")
    refused(resumed(lambda c: c.__delattr__("game")), "the config lacks a name, a game or a recipe")
    refused(edited(mesh=1), r"config\.mesh=1 must be a section with fsdp, tensor")
    refused(edited(models={"answer": "frozen"}), r"config\.models\.answer='frozen' must be made by ")
    refused(resumed(lambda c: c.models.update(answer={"kind": "frozen"})), r"config\.models\.answer\.\w+ is missing")
    with pytest.raises(ValueError, match="unknown game 'facts'"):
        base_config("x", "facts", "grpo")


# --- models of their own -------------------------------------------------------------------------------------------------------------


def with_models(file="search_extract", variant="", values=(), **sections):
    config = changed(file, variant, **dict(values))
    for name, section in sections.items():
        config.models[name] = model_section(**section)
    return config


def test_models_of_their_own_are_what_their_section_says(files, monkeypatch):
    tiny = files["search_parallel"][-1].partition("=")[2]
    monkeypatch.setenv("SOME_KEY", "k")
    config = with_models(
        values={"model__width": 32, "model__lora_rank": 2},
        decompose=dict(preset="mini", layers=1, lora_alpha=4.0),
        evidence=dict(kind="scripted"),
        answer=dict(kind="frozen", path=tiny),
    )
    plan = resolve(config)
    assert plan.options == {  # the others' width is not inherited by a shape of its own
        "decompose": {"kind": "trained", "preset": "mini", "layers": 1, "lora_rank": 2, "lora_alpha": 4.0},
        "evidence": {"kind": "scripted"},
        "answer": {"kind": "frozen", "path": tiny},
    }
    assert isinstance(plan.assignment.model("evidence"), Scripted)
    assert plan.assignment.model("answer") == Inside(trained=False)
    assert plan.assignment.trained == ("decompose",)
    assert "evidence   kind=scripted" in plan.table(config)
    for key_env in (None, "SOME_KEY"):
        outside = dict(kind="outside", url="http://127.0.0.1:1/v1", served_as="big", key_env=key_env)
        plan = resolve(with_models(values={"model__width": 32}, answer=outside))
        assert isinstance(plan.assignment.model("answer"), Outside)
        assert (plan.assignment.trained, plan.options["decompose"]["width"]) == (("decompose", "evidence"), 32)
    # all but one are scripted; a schedule in turns; sections are kept in a run's config.json
    plan = resolve(with_models(values={"model__kind": "scripted"}, answer=dict(kind="trained")))
    assert plan.assignment.trained == ("answer",)
    turns = resolve(changed("search_extract", schedule="decompose:2, evidence+answer:1")).assignment
    assert [turns.training(step) for step in range(4)] == [("decompose",), ("decompose",), ("evidence", "answer"), ("decompose",)]
    again = config_dict.ConfigDict(json.loads(config.to_json()))
    assert resolve(again).options == resolve(config).options


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("answr", dict(kind="frozen"), r"config\.models\.answr plays no role; did you mean 'answer'\?"),
        ("zzzz", dict(kind="frozen"), r"config\.models\.zzzz plays no role; the models are decompose, evidence, answer"),
        ("answer", dict(kind="frosen"), r"config\.models\.answer\.kind='frosen' is unknown"),
        ("answer", dict(preset="mcro"), "unknown model preset 'mcro'"),
        ("answer", dict(preset="mini", path="x"), r"config\.models\.answer\.preset would have no effect: its path names a checkpoint"),
        ("answer", dict(url="http://127.0.0.1:1/v1"), r"config\.models\.answer\.url would have no effect: the model is trained"),
        ("answer", dict(kind="frozen", served_as="x"), r"config\.models\.answer\.served_as would have no effect: the model is frozen"),
        ("answer", dict(kind="frozen", lora_rank=2), r"config\.models\.answer\.lora_rank would have no effect: the model is frozen"),
        ("answer", dict(lora_alpha=2.0), r"config\.models\.answer\.lora_alpha would have no effect: lora_rank is not set"),
        ("answer", dict(kind="scripted", preset="mini"), r"config\.models\.answer\.preset would have no effect: the model is scripted"),
        ("answer", dict(kind="scripted", width=8), r"config\.models\.answer\.width would have no effect: the model is scripted"),
        ("answer", dict(kind="outside", url="http://127.0.0.1:1/v1"), r"config\.models\.answer is outside: it needs url and served_as"),
        (
            "answer",
            dict(kind="outside", url="http://127.0.0.1:1/v1", served_as="x", lora_rank=2),
            r"config\.models\.answer\.lora_rank would have no effect: the model is outside",
        ),
        ("answer", dict(kind="outside", url="nonsense", served_as="x"), "nonsense"),
        ("answer", dict(path="/nowhere"), r"config\.models\.answer\.path='/nowhere': .*no such directory"),
    ],
)
def test_sections_that_would_have_no_effect_are_refused(name, section, message):
    refused(with_models(**{name: section}), message)


def test_thinking_is_of_checkpoints_and_reaches_their_chat(files, monkeypatch):
    tiny = files["search_parallel"][-1].partition("=")[2]
    plan = resolve(with_models(values={"model__path": tiny, "model__preset": None, "model__thinking": "off"}, answer=dict(thinking="on")))
    assert {name: one["thinking"] for name, one in plan.options.items()} == {"decompose": "off", "evidence": "off", "answer": "on"}
    asked = []
    monkeypatch.setattr("marl_llm.text.load_chat", lambda path, options: asked.append((path, options)))
    config = with_models(values={"devices": 1})
    from marl_llm.runs.building import model_specs
    from marl_llm.training import make_mesh

    specs = model_specs(plan, config, make_mesh(1))
    assert sorted(asked, key=str) == [(tiny, {"enable_thinking": False}), (tiny, {"enable_thinking": True})]
    assert specs["decompose"].params is specs["evidence"].params
    asked.clear()
    told = '{"date_string": "26 Jul 2026", "enable_thinking": true}'
    plan = resolve(with_models(values={"model__path": tiny, "model__preset": None, "model__template": told}))
    model_specs(plan, config, make_mesh(1))
    assert asked == [(tiny, {"date_string": "26 Jul 2026", "enable_thinking": True})]
    refused(with_models(answer=dict(path=tiny, template="[1]")), r"answer\.template='\[1\]' is no JSON object; write e\.g\. '\{\"enable")
    refused(with_models(answer=dict(path=tiny, template=told, thinking="on")), "say the same: set one of them")
    refused(with_models(answer=dict(template=told)), r"answer\.template would have no effect: only a checkpoint")
    refused(with_models(answer=dict(thinking="on")), r"config\.models\.answer\.thinking would have no effect: only a checkpoint")
    refused(changed("search_extract", model__thinking="off"), r"config\.model\.thinking='off' would have no effect: no model is a")
    refused(with_models(answer=dict(path=tiny, thinking="loud")), r"config\.models\.answer\.thinking='loud' is not one of on, off")


def test_the_constants_of_stronger_mas_are_those_of_its_appendix(files):
    from experiments.configs.sizes import at_grpo_full

    config = at_grpo_full(base_config("x", game="functions", recipe="at_grpo"))
    config.model.preset, config.model.thinking = "micro", None
    recipe = resolve(config).recipe
    assert (recipe.group_size, recipe.alpha, recipe.pick, recipe.temperature, recipe.top_p) == (4, 1.0, "greedy", 1.0, 1.0)
    assert (recipe.entropy_coef, recipe.kl_coef, recipe.clip_low, recipe.gamma) == (0.0, 0.0, 0.2, 1.0)
    o = config.optimizer
    assert (config.steps, config.rollout.tasks * recipe.group_size, o.minibatch, o.epochs) == (150, 128, 64, 1)
    assert (o.learning_rate, o.weight_decay, o.max_grad_norm) == (1e-6, 0.01, 1.0)
    assert at_grpo_full(base_config("x", game="functions", recipe="at_grpo")).model.thinking == "off"


def test_a_key_that_no_section_has_is_refused():
    with pytest.raises((AttributeError, KeyError), match="prset"):
        model_section(prset="mini")
    config = with_models()
    with config.models.unlocked():
        config.models.answer = config_dict.ConfigDict({**model_section(), "prset": 1})
    refused(config, r"unknown key config\.models\.answer\.prset; did you mean 'preset'\?")


def test_a_world_without_a_script_has_nobody_to_imitate(files):
    given = files["search_extract"]

    def full(*flags):
        return read_flags(f"--config={ROOT}/experiments/configs/search_extract.py:full", *given, *flags)

    refused(full("--config.sft.steps=3"), r"sft\.steps=3: question_extract has no scripted player to imitate")
    config = full()
    config.models.evidence = model_section(kind="scripted")
    refused(config, r"config\.models\.evidence: the environment has no scripted player")
