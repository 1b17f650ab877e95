"""Writes the generated pages: `docs/options.md`, `docs/results.md`, and with `--reference` one page per package for the site.

    python docs/generate.py                 docs/options.md from the code, docs/results.md from docs/results.csv
    python docs/generate.py --reference     docs/reference/*.md too, which mkdocs fills in from the docstrings

The options of a run are fields of `marl_llm.runs.sections`, with their meanings. Those of recipes, models and games have theirs in the
comment beside the definition, or above it; an option without one is an error.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import inspect
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from ml_collections import config_dict  # noqa: E402

from marl_llm.runs.options import join, kind_of  # noqa: E402
from marl_llm.runs.sections import SECTIONS, ModelSection, TeacherSection  # noqa: E402

PACKAGES = (
    "algorithms", "models", "text", "tools", "sampling", "workflows", "coaching", "games", "checking", "rollout", "evaluation", "training",
    "serving", "reporting", "viewing", "runs", "planning",
)  # fmt: skip
DEFINED = re.compile(r"^\s*(?P<field>[a-z_]\w*): [^=(]+?(?: = |$)")
HEAD = """# Options

Every option of a config, written by `python docs/generate.py` from the code, as `marl train --help` prints them too. Each is set as
`--config.<option>=<value>`; "–" is "not set here": what it says, or the recipe, the game, the preset or the checkpoint decides, and
`--dry_run` shows what it came to. The options of the games stand at the end. `config.script` has the keyword parameters of a game's
scripted player (`script`).
"""
GAMES_HEAD = """## `config.game`

`game.name` chooses the game; its other options are the parameters of the game's class or function, e.g. `--config.game.max_turns=6`. The
command `python -m marl_llm check GAME --option NAME=VALUE` takes them too.
"""
RESULTS_HEAD = """# Results

Every measured figure of this library, written by `python docs/generate.py` from [results.csv](results.csv). The last column of a row names
its source: the command, the commit and the hardware stand in the list under the table.

- Success is greedy and on the test split, unless a row says otherwise. "a → b" is before and after training.
- The column *spread* has 95 % intervals, clustered by task, unless a row says otherwise. Round brackets hold single seeds.
- Machines were shared where nothing else is said, so wall times are upper bounds. No row was measured on an accelerator.
- Commits that a row does not have were not recorded when it was measured.

[findings.md](findings.md) says what the figures support and what they do not. To add a figure, add a row to the CSV.
"""
# what the same parameter means in every game whose own docstring does not say more
COMMON = {
    "agents": "'team', or 'single': one role does it alone",
    "height": "rows of the map, a border included where the game has one",
    "width": "columns of the map",
    "boxes": "boxes in the room",
    "wall_density": "share of cells that are walls",
    "min_distance": "fewest moves of a shortest path",
    "max_distance": "most moves of a shortest path",
    "letters": "letters to choose from",
    "train": "file of the training tasks",
    "test": "file of the test tasks; empty: a part of `train` is held out",
    "index": "folder or URL of the search index",
    "top_k": "passages that a search returns",
    "worlds": "generated worlds of the training split",
    "rounds": "most rounds of a play",
    "turns": "most turns of a play",
    "random_relation": "whether the scripted player may ask for a relation at random",
    "noise": "how often the scripted player errs",
    "slip": "how often the scripted player errs",
    "misreading": "how often the scripted player's reader misreads",
    "least": "fewest steps of a problem",
    "most": "most steps of a problem",
    "rare": "share of rare problems",
    "reasoners": "roles that reason in words",
    "users": "roles that write Python",
    "rewards_form": "'safe', or as printed in the paper",
    "difficulty": "only rows of this difficulty; empty: all",
    "bad_rows": "'refuse' rows that cannot be used, or 'drop' and count them",
    "timeout_s": "seconds for one answer to be judged",
    "group_seats": "whether seats of one kind are compared with each other",
    "release": "'unitymas' or 'm_ask': whose prompts and rewards",
    "max_prompt": "most tokens of a role's prompt",
    "max_tokens": "most tokens of a role's response",
}


def meanings(source: str) -> dict[str, str]:
    """Field of a dataclass -> the comment beside its definition, else the comment lines right above."""
    found, above = {}, []
    for line in source.splitlines():
        text, _, comment = line.partition("  # ")
        if line.strip().startswith("# "):
            above.append(line.strip()[2:])
            continue
        match, said = DEFINED.match(text), comment.strip() or " ".join(above)
        above = []
        if match and said:
            found.setdefault(match["field"], said)
    return found


def cell(text: str) -> str:
    """A text as it stands in a table."""
    return text.replace("|", "\\|")


def rows(section: str, values, said: dict[str, str]) -> list[str]:
    """Table rows of the options whose meanings are comments."""
    lines = []
    for name, value in values.items():
        if name not in said:
            raise SystemExit(f"{section}{name} has no comment where it is defined; say there what it means")
        default = "–" if value is None else f"`{value!r}`"
        lines.append(f"| `{section}{name}` | {values.get_type(name).__name__} | {default} | {cell(said[name])} |")
    return lines


def section_rows(section) -> list[str]:
    """Table rows of the options of a section of `marl_llm.runs.sections`."""
    lines = []
    for field in dataclasses.fields(section):
        meaning, unset = field.metadata["meaning"], str(field.metadata["unset"])
        default = "–" if field.default in (None, dataclasses.MISSING) else f"`{field.default!r}`"
        kind = kind_of(field.type).__name__
        lines.append(f"| `{join(section.key, field.name)}` | {kind} | {f'– ({cell(unset)})' if unset else default} | {cell(meaning)} |")
    return lines


def described(doc: str) -> dict[str, str]:
    """Parameter -> its meaning in the Args or Attributes of a docstring; names with one text share it."""
    found: dict[str, str] = {}
    names, inside = [], False
    for line in doc.splitlines():
        if line in ("Args:", "Attributes:"):
            inside = True
        elif line and not line.startswith(" "):
            inside = False
        elif inside:
            begun = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
            names = begun[1].split(", ") if begun else names
            for name in names if line.strip() else ():
                found[name] = begun[2] if begun else f"{found[name]} {line.strip()}"
    return found


def game_options() -> list[str]:
    """A table per game: what its docstring says of an option, else the comment beside a field, else what it means in every game."""
    from marl_llm.games import GAMES, find_game

    lines = [GAMES_HEAD]
    for name in GAMES:
        found = find_game(name)
        if not found.options:
            continue
        said = COMMON | meanings(inspect.getsource(found.thing)) | described(inspect.getdoc(found.thing) or "")
        lines += [f"### {name}", "", "| option | type | default | meaning |", "|---|---|---|---|"]
        for option, parameter in found.options.items():
            meaning = said.get(option, "seed of the tasks" if option.endswith("_seed") else "").removesuffix(".").replace("<", "&lt;")
            if not meaning:
                raise SystemExit(f"game {name}: its option {option!r} has no meaning; say it in the docstring's Args")
            kind = getattr(parameter.annotation, "__name__", str(parameter.annotation)).replace("|", "or")
            default = "–" if parameter.default is parameter.empty or parameter.default is None else f"`{parameter.default!r}`"
            lines.append(f"| `game.{option}` | {kind} | {default.replace('|', chr(92) + '|')} | {meaning.replace('|', chr(92) + '|')} |")
        lines.append("")
    return lines


def options() -> str:
    """The text of `docs/options.md`."""
    from marl_llm.algorithms import Recipe
    from marl_llm.models import ModelConfig
    from marl_llm.runs.base import base_config, model_section

    config = base_config("name", game="plan_path", recipe="at_grpo")
    sections = (*SECTIONS, TeacherSection)
    tables = {section.key: section_rows(section) for section in sections}
    own = {field.name for field in dataclasses.fields(ModelSection)}
    shape = config_dict.ConfigDict({name: config.model.get_ref(name) for name in config.model if name not in own})
    tables["model"] += rows("model.", shape, meanings(inspect.getsource(ModelConfig)))
    tables["recipe"] = rows("recipe.", config.recipe, meanings(inspect.getsource(Recipe)))
    table = "| option | type | default | meaning |\n|---|---|---|---|"
    keys = [f"`{section}.{key}`" for section in ("optimizer", "recipe") for key in model_section()[section]]
    own_text = f"Of its own one model, `config.models.<name>`, may have {', '.join(keys)}."
    texts = {section.key: inspect.getdoc(section) for section in sections} | {"model": own_text, "recipe": "Which method trains the team."}
    heads = {"": "## The run", "model": "## `config.model`, and `config.models.<name>` for one model"}
    parts = [[heads.get(key, f"## `config.{key}`"), "", texts[key], "", table, *lines, ""] for key, lines in tables.items()]
    return "\n".join([HEAD, *("\n".join(part) for part in parts), *game_options()])


def read_results() -> list[dict[str, str]]:
    """The rows of `docs/results.csv`."""
    with open(DOCS / "results.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def source_of(row: dict[str, str]) -> str:
    """Where a figure comes from: command, commit, hardware."""
    command = row["command"] if "`" in row["command"] or not row["command"] else f"`{row['command']}`"
    commit = f"commit {row['commit']}" if row["commit"] else ""
    return "; ".join(part for part in (command, commit, row["hardware"]) if part)


def results() -> str:
    """The text of `docs/results.md`: a table and its list of sources for each section of the CSV."""
    sections: dict[str, list[dict[str, str]]] = {}
    for row in read_results():
        sections.setdefault(row["section"], []).append(row)
    lines = [RESULTS_HEAD]
    for section, found in sections.items():
        lines += [f"## {section}", "", "| what | figure | spread | seeds | note | source |", "|---|---|---|---|---|---|"]
        sources: dict[str, int] = {}
        for row in found:
            number = sources.setdefault(source_of(row), len(sources) + 1)
            cells = [row[name].replace("|", "/") for name in ("what", "figure", "spread", "seeds", "note")]
            lines.append("| " + " | ".join([*cells, str(number)]) + " |")
        lines += ["", *(f"{number}. {source}" for source, number in sources.items()), ""]
    return "\n".join(lines)


def reference(package: str) -> str:
    """The text of a package's page: its public names, each with its docstring; names of plain values stand in one line."""
    module = importlib.import_module(f"marl_llm.{package}")
    things = {name: getattr(module, name) for name in module.__all__}
    defined = {n: f"{one.__module__}.{one.__qualname__}" for n, one in things.items() if inspect.isclass(one) or inspect.isroutine(one)}
    values = sorted(set(things) - set(defined))
    lines = [f"# marl_llm.{package}", "", (module.__doc__ or "").strip(), ""]
    lines += [f"Values: {', '.join(f'`{name}`' for name in values)}.", ""] if values else []
    return "\n".join([*lines, *(f"::: {path}" for path in defined.values()), ""])


def main() -> None:
    """Writes the pages."""
    (DOCS / "options.md").write_text(options(), encoding="utf-8")
    (DOCS / "results.md").write_text(results(), encoding="utf-8")
    if "--reference" in sys.argv[1:]:
        (DOCS / "reference").mkdir(exist_ok=True)
        for package in PACKAGES:
            (DOCS / "reference" / f"{package}.md").write_text(reference(package), encoding="utf-8")


if __name__ == "__main__":
    main()
