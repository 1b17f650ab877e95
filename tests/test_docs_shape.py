"""The shape of docs/: pages that a reader can take in, lines that a terminal shows, and no commit in the running text."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = {"options.md", "results.md", "accelerators.md"}
PAGES = {page.name: page.read_text(encoding="utf-8").splitlines() for page in (ROOT / "docs").glob("*.md") if page.name not in GENERATED}
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()


def test_pages_have_at_most_150_lines():
    assert {name: len(lines) for name, lines in PAGES.items() if len(lines) > 150} == {}
    assert len(README) + sum(map(len, PAGES.values())) <= 3500


def test_lines_have_at_most_120_characters():
    wide = [(name, number) for name, lines in PAGES.items() for number, line in enumerate(lines, 1) if len(line) > 120]
    listing = next(n for n, line in enumerate(PAGES["sandbox.md"], 1) if line.startswith("- `rlimits` does not contain"))  # a test's
    assert wide == [("sandbox.md", listing)]


def test_no_commit_stands_in_the_running_text():
    commit = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{7}\b")
    found = [(name, line) for name, lines in PAGES.items() for line in lines if commit.search(line)]
    assert found == []
