"""docs/README.md: every page is listed and every option of its table is one that a config has."""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from marl_llm.runs.base import base_config, model_section  # noqa: E402

DOCS = ROOT / "docs"
PAGE = (DOCS / "README.md").read_text(encoding="utf-8")


def test_every_page_is_listed_once_and_every_link_leads_somewhere():
    listed = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|", PAGE, re.MULTILINE)
    assert all(text == link for text, link in listed)
    assert sorted(link for _, link in listed) == sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")
    for page in DOCS.glob("*.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (DOCS / link).exists(), (page.name, link)


def test_every_option_of_the_table_is_a_key_of_a_config():
    rows = re.findall(r"^\| .+? \| (`config.+?) \| (.+) \|$", PAGE, re.MULTILINE)
    named = {key for sections, _ in rows for key in re.findall(r"`config\.(\w+)", sections)}
    config = base_config("all", game="plan_path", recipe="at_grpo")
    config.models.a = model_section(kind="frozen")
    assert named == set(config) - {"name", "seed", "steps", "stacked_layers", "quick_compile"}
    own = {"game.tries", "script.slip"}  # of a game of one's own
    for option in re.findall(r"`((?:\w+\.)?\w+)=\S+`", " ".join(examples for _, examples in rows)):
        section, _, key = option.rpartition(".")
        assert option in own or key in (config[section] if section else config) or section == "" and key == "tool", option
