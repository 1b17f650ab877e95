"""One figure, one place: what a config's docstring promises stands in docs/results.csv or on a page, beside that config's name.

A measured figure that stands in two places is sooner or later two figures. docs/results.csv is where figures live; a config's docstring
may repeat the headline, and this test holds it to the table.
"""

import ast
import csv
import pathlib
import re

import pytest

from marl_llm.__main__ import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
with open(ROOT / "docs" / "results.csv", newline="", encoding="utf-8") as file:
    TABLE = list(csv.DictReader(file))
NOT_RECORDED = 63
REPORTED = "Reported by the papers"  # the section of figures that are not this library's
CONFIGS = sorted(path for path in (ROOT / "experiments" / "configs").glob("*.py") if path.stem != "__init__")
# 92.9 %, 0.2-2.6 %, "94.4, 92.4 and 93.2 %" (each of them), F1 0.884, 133 CPU seconds, 6 s, 21 minutes
NUMBER = r"\d[\d,]*(?:\.\d+)?"
LIST = rf"{NUMBER}(?:(?:\s*[–-]\s*|, | and ){NUMBER})*"
FIGURES = re.compile(rf"({LIST})\s*(?:%|CPU seconds|CPU s\b|seconds|minutes|min\b|s\b)|F1 ({NUMBER})")


def figures(text: str) -> set[str]:
    """The measured numbers of a text: percentages, F1 scores and times."""
    found = {number for match in FIGURES.finditer(text) for number in re.findall(NUMBER, match[1] or match[2])}
    return {number.rstrip(",") for number in found}


def passages(config: str, text: str) -> str:
    """The rows and paragraphs of a Markdown text that name a config, or the command that runs it."""
    command = re.search(r"<!-- command one -->(.*?)<!-- end -->", text, re.DOTALL)
    names = [f"{config}.py"] + (["command one"] if command and f"{config}.py" in command[1] else [])
    text = re.sub(r"<!--.*?-->", "\n", text)
    blocks = [block for block in re.split(r"\n\s*\n|\n(?=\|)|(?<=\|)\n", text) if any(name in block for name in names)]
    return "\n".join(blocks)


def unsupported(config: str, docstring: str, pages: list[str]) -> set[str]:
    """Figures of a docstring that no passage about the config has."""
    there = set(re.findall(NUMBER, "\n".join(passages(config, page) for page in pages)))
    return figures(docstring) - there


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_c10_a_configs_figures_are_those_of_the_readme_and_docs(path):
    pages = [page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    pages.append("\n\n".join(" ".join(row.values()) for row in TABLE))
    wrong = unsupported(path.stem, ast.get_docstring(ast.parse(path.read_text())) or "", pages)
    assert not wrong, f"{path.name}: {sorted(wrong)} stand in no row or paragraph of README.md or docs/ that names {path.name}"


def test_an_older_figure_is_found():
    page = "| 6x6 | command one | 35.7 % → **92.9 %** (92.6, 93.8) |\n"
    page += "| other | `b.py` | 94.4 % |\n<!-- command one -->\nrun a.py\n<!-- end -->\n"
    assert unsupported("a", "From 35.7 % to 92.9 % (seeds: 92.6 and 93.8 %).", [page]) == set()
    older = "From 36 % to 93 % (seeds: 94.4, 93.8 %), in 133-179 CPU seconds."
    assert unsupported("a", older, [page]) == {"36", "93", "94.4", "133", "179"}
    assert figures("500 held-out maps of 10x10, 2 models, F1 0.884") == {"0.884"}


def rows(text: str, columns: int) -> list[list[str]]:
    """The rows of a Markdown text's tables with so many columns, without heads."""
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| (?!-)", line)]
    return [row for row in found if len(row) == columns and row[-1] not in ("commit", "figure")]


def faults(row: dict[str, str]) -> list[str]:
    """What a row of results lacks: a command that is there, or commits."""
    command, commit = row["command"], row["commit"]
    names = re.findall(r"experiments/configs/\w+\.py|(?:experiments|benchmarks)\.\w+|tests/\S+\.py|\.ci/\w+", command)
    names += [COMMANDS[name][0] for name in re.findall(r"marl_llm (\w+)", command) if name in COMMANDS]
    files = [name if "/" in name else name.replace(".", "/") + ".py" for name in names if "/CONFIG.py" not in name]
    lacks = [f"{name} is not there" for name in files if not ((ROOT / name).exists() or (ROOT / name).with_suffix("").is_dir())]
    if not names and not re.search(r"command (one|two)", command):
        lacks.append("no command")
    if not re.fullmatch(r"[0-9a-f]{7}(, [0-9a-f]{7})*", commit) and commit != "not recorded":
        lacks.append(f"{commit!r} is no commit")
    return lacks + ([] if re.search(r"\d|all bytes", row["figure"]) else [f"no figure for {row['what']!r}"])


def test_every_row_of_the_results_names_a_command_that_is_there_and_its_commit():
    assert len(TABLE) >= 500
    assert [(row["what"], lacks) for row in TABLE if row["section"] != REPORTED and (lacks := faults(row))] == []
    gone = dict(what="a", command="`python -m benchmarks.nothing`", figure="3 %", commit="f48a3d3")
    assert faults(gone) == ["benchmarks/nothing.py is not there"]
    by_hand = dict(what="a", command="by hand", figure="good", commit="today")
    assert faults(by_hand) == ["no command", "'today' is no commit", "no figure for 'a'"]


def test_no_new_row_lacks_its_commit():
    """These rows are older than the table. A figure that is added has a commit."""
    assert sum(row["commit"] == "not recorded" for row in TABLE) <= NOT_RECORDED


def test_a_figure_of_a_paper_names_its_table():
    reported = [row for row in TABLE if row["section"] == REPORTED]
    assert reported
    assert all("Table" in row["command"] and not row["commit"] for row in reported)


def test_c11_the_readme_is_short_and_its_figures_are_those_of_the_results():
    assert len(README.splitlines()) <= 120
    section = README.split("## Results")[1].split("\n## ")[0]
    table = rows(section, 2)
    assert 1 <= len(table) <= 12
    known = set(re.findall(NUMBER, RESULTS))
    for what, figure in table:
        told = set(re.findall(NUMBER, figure))
        percent = {f"{float(number) * 100:.1f}" for number in told if number.startswith("0.")}
        assert told <= known | percent, (what, sorted(told - known))
