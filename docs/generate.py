"""Writes the pages that are made from the code: `docs/options.md`, and with `--reference` one page per package for the site.

    python docs/generate.py                 docs/options.md: every option with its type, default and meaning
    python docs/generate.py --reference     docs/reference/*.md too, which mkdocs fills in from the docstrings

An option's meaning is the comment beside it, or above it, where it is defined; an option without one is an error.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import sys

DOCS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))
PACKAGES = (
    "algorithms", "models", "text", "tools", "sampling", "workflows", "coaching", "games", "checking", "rollout", "evaluation", "training",
    "reporting", "viewing",
)  # fmt: skip
DEFINED = re.compile(r'^\s*(?:c\.(?P<dotted>[a-z_.]+) = |(?P<field>[a-z_]\w*): [^=(]+?(?: = |$)|"(?P<key>[a-z_0-9]+)"(?:: |,))')
HEAD = """# Options

Every option of a config, written by `python docs/generate.py` from the comments beside their definitions. Each is set as
`--config.<option>=<value>`; "–" is "not set here": the recipe, the game, the preset or the checkpoint decides, and `--dry_run` shows what
it came to. The options of a game and of its scripted player (`config.game`, `config.script`) are the parameters of its class or function:
their meanings are in its docstring.
"""


def meanings(source: str) -> dict[str, str]:
    """Option -> the comment beside its definition, else the comment lines right above. Keys of a section's dict stand behind its name."""
    found, above, section = {}, [], ""
    for line in source.splitlines():
        text, _, comment = line.partition("  # ")
        if line.strip().startswith("# "):
            above.append(line.strip()[2:])
            continue
        match, said = DEFINED.match(text), comment.strip() or " ".join(above)
        above = []
        if not match:
            continue
        if match["dotted"] and "ConfigDict(" in text:
            section = f"{match['dotted']}."
        names = [match["dotted"] or match["field"]] if not match["key"] else []
        names += [f"{section}{key}" for key in re.findall(r'"([a-z_0-9]+)"(?:: |,$)', text)]
        found.update({name: said for name in names if said and name not in found})
    return found


def rows(section: str, values, said: dict[str, str], prefix: str | None = None) -> list[str]:
    """Table rows of the options of a section."""
    lines = []
    for name, value in values.items():
        key = name if prefix is None else f"{prefix}{name}"
        if key not in said:
            raise SystemExit(f"{section}{name} has no comment where it is defined; say there what it means")
        kind = values.get_type(name)
        default = "–" if value is None else f"`{value!r}`" if value != "" else '`""`'
        lines.append(f"| `{section}{name}` | {kind.__name__} | {default} | {said[key].replace('|', chr(92) + '|')} |")
    return lines


def options() -> str:
    """The text of `docs/options.md`."""
    from experiments import base, coaching
    from marl_llm.algorithms import Recipe
    from marl_llm.models import ModelConfig
    from marl_llm.training import PlayOptions

    source = lambda thing: meanings(inspect.getsource(thing))  # noqa: E731
    config, own = base.base_config("name", game="plan_path", recipe="at_grpo"), source(base)
    own.update({f"rollout.{name}": text for name, text in source(PlayOptions).items() if name in config.rollout})
    own.update({f"coach.{name}": text for name, text in source(coaching).items()})
    parts = {
        "": [],
        "recipe.": rows("recipe.", config.recipe, source(Recipe)),
        "model.": rows("model.", config.model, source(ModelConfig) | own),
    }
    for name, value in config.items():
        if not hasattr(value, "items"):
            parts[""] += rows("", type(config)({name: value}), own)
        elif name not in ("game", "script", "recipe", "model", "models"):
            parts[f"{name}."] = rows(f"{name}.", value, own, f"{name}.")
    table = "| option | type | default | meaning |\n|---|---|---|---|"
    heads = {"": "## The run", "model.": "## `config.model`, and `config.models.<name>` for one model"}
    titles = {key: heads.get(key, f"## `config.{key[:-1]}`") for key in parts}
    return "\n".join([HEAD, *("\n".join([titles[key], "", table, *lines, ""]) for key, lines in parts.items())])


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
    if "--reference" in sys.argv[1:]:
        (DOCS / "reference").mkdir(exist_ok=True)
        for package in PACKAGES:
            (DOCS / "reference" / f"{package}.md").write_text(reference(package), encoding="utf-8")


if __name__ == "__main__":
    main()
