"""The documentation's site: pages made from the code are those of today, and the site leaves none out."""

import importlib
import inspect
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import generate  # noqa: E402


def test_the_page_of_options_is_the_one_that_the_code_makes():
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == generate.options(), "run: python docs/generate.py"


def test_the_page_of_results_is_the_one_that_the_table_makes():
    written = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert written == generate.results(), "run: python docs/generate.py"


def test_the_meaning_of_an_option_is_the_comment_beside_or_above_it():
    source = '''
    seed: int = 0  # of the draws
    # who plays
    # which role
    assignment: str = "shared"
    silent: int = 1
    max_num_seqs: int | None = None  # at once
    '''
    assert generate.meanings(source) == {"seed": "of the draws", "assignment": "who plays which role", "max_num_seqs": "at once"}


def test_every_package_has_a_page():
    packages = {found.parent.name for found in (ROOT / "marl_llm").glob("*/__init__.py")}
    assert set(generate.PACKAGES) == packages - {"cli"}, "the modules of `cli` are commands; docs/README.md has those"


@pytest.mark.parametrize("package", generate.PACKAGES)
def test_every_public_name_has_a_docstring_and_a_place_in_the_reference(package):
    page = generate.reference(package)
    module = importlib.import_module(f"marl_llm.{package}")
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            assert inspect.getdoc(thing), f"{package}.{name} has no docstring"
            assert f"::: {thing.__module__}.{thing.__qualname__}\n" in page
        else:
            assert f"`{name}`" in page


def test_the_site_has_every_page():
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("nav:")[1]))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} | {f"reference/{package}.md" for package in generate.PACKAGES}
    assert listed == pages
