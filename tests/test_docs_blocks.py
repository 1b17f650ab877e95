"""Every code block of the README and of docs/ is sound: Python is run, or its names and calls are held against the code; commands exist.

Pages whose tests run their blocks are in `RUN_ELSEWHERE`. In all other Python blocks every name is imported, defined on the page before, or
listed in `GIVEN` with what it stands for; every imported name exists, and every call of one fits its signature. In `bash` blocks every
module, config, variant, flag and option exists.
"""

import ast
import builtins
import functools
import importlib
import inspect
import pathlib
import re
import shlex
import typing

import numpy as np
import pytest

import marl_llm as ml
from marl_llm.__main__ import COMMANDS, with_config
from marl_llm.games import find_game
from marl_llm.runs.base import model_section, teacher_section

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
RUN_ELSEWHERE = dict.fromkeys(("your_own_game.md", "your_own_team.md"), "tests/games/test_your_own_game_page.py")
# names that a page's text introduces
GIVEN = {
    "README.md": {"env", "agent", "turn", "team", "local", "log_probs", "old_log_probs", "mask"},
    "library.md": {"env", "agent", "turn", "team", "local", "log_probs", "old_log_probs", "mask", "game", "assignment", "models", "options",
                   "mesh", "tokens", "where", "jax", "prompts", "step"},
    "attach.md": {"ask", "play"},
    "coaches.md": {"Environment", "workflow", "tasks", "renderer", "script"},
    "sandbox.md": {"codes", "step_one", "step_two", "text"},
    "workflows.md": {"generator"},
    "team_rules.md": {"finished", "plain", "repeat", "Role", "run", "stop", "tool", "when"},
}  # fmt: skip


def blocks(language):
    """(page, its blocks of a language)."""
    return [(page, [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]) for page in PAGES]


PYTHON = [(page, found) for page, found in blocks("python") if found and page.name not in RUN_ELSEWHERE]
COMMAND = [(page, found) for page, found in blocks("bash") if found]
SAYS = [pytest.param(page, line, id=f"{page.stem}-{n}") for page, found in COMMAND for n, line in enumerate(
    line for text in found for line in text.replace("\\\n", " ").splitlines() if line.strip())]  # fmt: skip


def test_pages_whose_blocks_run_elsewhere_are_read_there():
    for page, test in RUN_ELSEWHERE.items():
        assert page.removesuffix(".md") in (ROOT / test).read_text()
    languages = {kind for page in PAGES for kind, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert languages <= {"python", "bash", ""}


# --- Python ---------------------------------------------------------------------------------------------------------------------------


def resolved(module, name):
    """What `from module import name` gives."""
    found = importlib.import_module(module)
    return getattr(found, name) if hasattr(found, name) else importlib.import_module(f"{module}.{name}")


def returned(thing):
    """The class of what a call of `thing` gives; None where its annotation names none."""
    if inspect.isclass(thing):
        return thing
    try:
        kind = typing.get_type_hints(thing).get("return")
    except (NameError, TypeError):
        return None
    return kind if inspect.isclass(kind) and kind.__module__.startswith("marl_llm") else None


def fits(thing, call):
    """Why the arguments of a call do not fit a signature; None if they do, or where they are not written out."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(word.arg is None for word in call.keywords):
        return None
    try:
        inspect.signature(thing).bind(*call.args, **{word.arg: word.value for word in call.keywords})
    except (TypeError, ValueError) as error:
        return f"line {call.lineno}: {ast.unparse(call.func)}: {error}"
    return None


def problems(source, known, kinds):
    """What is wrong with a block. `known`: names from before, `kinds`: name -> thing that it was imported as, or class of its value."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                try:
                    kinds[one.asname or one.name] = resolved(node.module, one.name)
                except ImportError as error:
                    found.append(str(error))
        elif isinstance(node, ast.Import):
            for one in node.names:
                importlib.import_module(one.name)
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                known |= {one.asname or one.name for one in node.names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.ExceptHandler(name=str(name)):
                known.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                known.add(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and isinstance(node.context_expr, ast.Call) and isinstance(node.optional_vars, ast.Name):
            kinds[f"{node.optional_vars.id}."] = returned(kinds.get(ast.unparse(node.context_expr.func)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in known and not hasattr(builtins, node.id):
            found.append(f"line {node.lineno}: {node.id} is defined nowhere")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            kind = kinds.get(f"{node.value.id}.")
            if kind is not None and not hasattr(kind, node.attr) and f"self.{node.attr} = " not in inspect.getsource(kind):
                found.append(f"line {node.lineno}: {kind.__name__} has no {node.attr}")
        if isinstance(node, ast.Call) and callable(thing := kinds.get(ast.unparse(node.func))) and (why := fits(thing, node)):
            found.append(why)
    return found


@pytest.mark.parametrize(("page", "texts"), PYTHON, ids=lambda x: x.stem if isinstance(x, pathlib.Path) else "")
def test_names_of_python_blocks_exist_and_calls_fit_their_signatures(page, texts):
    known, kinds = set(GIVEN.get(page.name, ())), {}
    found = [why for text in texts for why in problems(text, known, kinds)]
    assert not found, found


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from marl_llm.algorithms import no_such_loss", "no_such_loss"),
        ("from marl_llm.algorithms import reduce\nreduce(1, how='mean', wher=2)", "unexpected keyword argument 'wher'"),
        ("print(nowhere)", "nowhere is defined nowhere"),
        ("from marl_llm.training import make_team\nwith make_team(1, 2, 3, 4, 5) as team:\n    team.plaay(0)", "no plaay"),
    ],
)
def test_a_block_with_a_fault_is_found(source, words):
    assert words in " ".join(problems(source, set(), {}))


def test_the_readmes_block_trains_and_evaluates(tmp_path, monkeypatch, capsys):
    (text,) = dict((page.name, found) for page, found in PYTHON)["README.md"]
    text = text.replace("steps=200", "steps=1").replace('{"steps": 250}', '{"steps": 1, "tasks": 2}')
    few = {"tasks": 2, "final_tasks": 2, "ablate_roles": False}
    train = functools.partial(ml.train, rollout={"tasks": 2}, evaluation=few, quick_compile=True, devices=1)
    monkeypatch.setattr(ml, "train", train)
    monkeypatch.setattr(ml, "evaluate", functools.partial(ml.evaluate, tasks=2))
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("success") == 4  # random, before, after; the Tool as it was before
    assert (tmp_path / "runs" / "x" / "report.html").is_file()


def test_the_block_about_losses_runs():
    blocks = dict((page.name, found) for page, found in PYTHON)["library.md"]
    (text,) = [block for block in blocks if "clipped_ratio" in block]
    dice = np.random.default_rng(0)
    names = dict(env=np.repeat(np.arange(2), 4), agent=np.zeros(8, int), turn=np.zeros(8, int), team=dice.random(8), local=dice.random(8))
    names |= dict(log_probs=-dice.random((8, 3)), old_log_probs=-dice.random((8, 3)), mask=np.ones((8, 3), bool))
    exec(compile(text, "library.md", "exec"), names)
    assert np.isfinite(float(names["loss"]))
    np.testing.assert_allclose(np.asarray(names["advantages"]).reshape(2, 4).mean(1), 0.0, atol=1e-6)


# --- commands -------------------------------------------------------------------------------------------------------------------------


def commands(line):
    """The commands of one line of a shell, each as (module, arguments); others are left out."""
    words, found = shlex.split(line, comments=True), [[]]
    for word in words:
        if word == "&&":
            found.append([])
        else:
            found[-1].append(word)
    for one in found:
        while one and re.fullmatch(r"[A-Z_0-9]+=\S*", one[0]):
            one.pop(0)
        if len(one) > 2 and one[0].endswith("python") and one[1] == "-m":
            yield one[2], one[3:]
        elif len(one) > 1 and one[0] == "marl":
            yield "marl_llm", [one[1], *with_config(one[1], one[2:])]
        elif one and one[0] == "...":
            yield "experiments.train", one


def wrong_option(config, path):
    """Why a config has no option of that name; None if it has."""
    section, *rest = path.split(".")
    if section == "game" and rest and rest != ["name"]:
        return None if rest[0] in find_game(config.game.name).options else f"game {config.game.name} has no option {rest[0]}"
    if section == "script":
        return None
    if section == "models":
        section, config, rest = "model", {"model": model_section()}, rest[1:]
    if section == "teachers":
        section, config, rest = "teacher", {"teacher": teacher_section()}, rest[1:]
    if section not in config:
        return f"no option {section}"
    return None if not rest or rest[0] in config[section] else f"config.{section} has no {rest[0]}"


def wrong_flags(module, given):
    """Flags that a command does not define; its source is read, because two commands in one process would define a flag twice."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    if command := re.search(r"from (marl_llm\.cli\.\w+) import FLAGS", text):  # experiments.train has the flags of marl_llm.cli.train
        text += (ROOT / f"{command[1].replace('.', '/')}.py").read_text()
    if re.search(r"from marl_llm.cli import .*\bserve\b", text):  # chat has the flags of serve
        text += (ROOT / "marl_llm" / "cli" / "serve.py").read_text()
    own = set(re.findall(r"(?:DEFINE_\w+|add_argument)\(\s*\"(?:--)?(\w+)\"", text))
    return [name for name in given if name not in own]


@pytest.mark.parametrize(("page", "line"), SAYS)
def test_commands_name_modules_configs_variants_flags_and_options_that_exist(page, line):
    for name, arguments in commands(line):
        if name in ("venv", "pytest") or name.startswith("vllm"):
            continue
        if name == "marl_llm":
            assert arguments[0] in COMMANDS, line
            name = COMMANDS[arguments[0]][0]
            end = arguments.index("--") if "--" in arguments else None  # behind it stands another program
            arguments = arguments[1:end]
        given = [one.removeprefix("--").partition("=") for one in arguments if one.startswith("--")]
        assert not wrong_flags(name, [flag for flag, *_ in given if flag != "config" and not flag.startswith("config.")]), line
        where = next((value for flag, _, value in given if flag == "config"), None)
        if where is None or where == "FILE":
            continue
        path, _, variant = where.partition(":")
        assert (ROOT / path).is_file(), line
        if path.endswith(("/game.py", "/smol_game.py", "/distill.py")):
            continue  # a file, or a run directory, of the reader's own
        config = importlib.import_module(path.removesuffix(".py").replace("/", ".")).get_config(variant or None)
        if game := next((value for flag, _, value in given if flag == "config.game.name"), None):
            config.game.name = game
        faults = [why for flag, *_ in given if flag.startswith("config.") and (why := wrong_option(config, flag.removeprefix("config.")))]
        assert not faults, (line, faults)


def test_a_command_with_a_fault_is_found():
    config = importlib.import_module("experiments.configs.quickstart").get_config(None)
    assert wrong_option(config, "game.max_turns") is None
    assert wrong_option(config, "recipe.alpha") is None
    assert "no option tasks" in wrong_option(config, "game.tasks")
    assert "no alfa" in wrong_option(config, "recipe.alfa")
    assert wrong_option(config, "teachers.tool.run") is None
    assert "no rnu" in wrong_option(config, "teachers.tool.rnu")
    assert wrong_flags("marl_llm.cli.check", ["option", "optoin"]) == ["optoin"]
    assert wrong_flags("experiments.train", ["dry_run", "dryrun"]) == ["dryrun"]
    assert list(commands("A=1 python -m a --b=c && python -m d   # e")) == [("a", ["--b=c"]), ("d", [])]
