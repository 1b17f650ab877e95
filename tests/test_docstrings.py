"""The examples in the docstrings of the public modules are run, and say what they say."""

import doctest
import importlib
import pkgutil

import pytest

import marl_llm

ROOMS = ("algorithms", "evaluation", "text", "untrusted", "hints")


def modules():
    for room in ROOMS:
        module = importlib.import_module(f"marl_llm.{room}")
        yield module.__name__
        yield from (found.name for found in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."))


@pytest.mark.parametrize("name", list(modules()))
def test_the_examples_of_docstrings_are_true(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.failed == 0


def test_there_are_examples_to_run():
    assert doctest.testmod(importlib.import_module("marl_llm.algorithms.losses")).attempted >= 3


def test_every_room_is_listed_and_imported_when_it_is_asked_for():
    rooms = {found.name for found in pkgutil.iter_modules(marl_llm.__path__) if not found.name.startswith("_")}
    functions = {"attach", "evaluate", "load_model", "make_game", "open_team", "Reward", "resume", "train", "view"}
    assert rooms | functions == set(marl_llm.__all__)
    assert rooms < set(dir(marl_llm))
    assert marl_llm.algorithms.sum_blocks is importlib.import_module("marl_llm.algorithms").sum_blocks
    with pytest.raises(AttributeError, match="has no attribute 'algorythms'"):
        _ = marl_llm.algorythms
