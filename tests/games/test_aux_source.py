"""Helper and main part by their syntax trees: what cooperation is, what only looks like it, schemes, and hostile sources."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marl_llm.games.coding.aux_reward import COOPERATION, MOST, STRUCTURE, SYNTAX, TESTS, judged_levels, static_levels
from marl_llm.games.coding.aux_source import LONGEST, read_parts
from marl_llm.games.coding.schemes import SCHEMES, scheme_of

AUX = "def aux(x):\n    return x\n"


def body(*lines, head="def f(x):"):
    return "\n".join([head, *(f"    {line}" for line in lines)])


def earned(main, helper=AUX, share=1.0, wrapper="flow"):
    levels = judged_levels(read_parts(helper, main, "f", wrapper), share)
    return levels.structure, levels.syntax, levels.tests, levels.cooperation


FULL = (1.0, 0.5, 1.0, 1.5)
NO_BONUS = (1.0, 0.5, 1.0, 0.0)
WRAPPED = (1.0, 0.5, 1.0, 0.5)
STRUCTURE_ONLY = (1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "main",
    [
        body("y = aux(x)", "return y + 1"),
        body("return aux(x)[::-1]"),
        body("out = []", "for c in x:", "    out.append(aux(c))", "return out"),
        body("total = 0", "for c in x:", "    total += aux(c)", "return total"),
        body("if aux(x):", "    return 1", "return 2"),
        body("try:", "    return aux(x)", "except ValueError:", "    return 0"),
        body("d = {}", "d['k'] = aux(x)", "return d"),
        body("def inner(y):", "    return aux(y) + 1", "return inner(x)"),
        body("return list(map(aux, x))"),
        body("while aux(x) > 0:", "    x = x - 1", "    if x == 3: break", "else:", "    x = 7", "y = aux(x)", "return -y"),
    ],
)
def test_a_main_part_whose_result_depends_on_aux_earns_everything(main):
    assert earned(main) == FULL


@pytest.mark.parametrize(
    "main",
    [
        body("return aux(x)"),
        body('"""Says much."""', "pass", "return aux(x)"),
        body("y = aux(x + 0)", "y = y * 1", "return 0 + y"),
        body("a = x", "b = a", "c = b", "result = aux(c)", "out = result", "return out"),
        body("return (lambda y: aux(y))(x)"),
        body("g = lambda y: y", "return g(aux(x))"),
        body("if True:", "    return aux(x)", "return x"),
        body("try:", "    return aux(x)", "except Exception:", "    raise"),
        body("return [aux(x)][0]"),
        body("return aux(x) if 1 == 1 else x"),
        body("return aux(*x)"),
        body("y: int = +aux(x)", "y += 0", "return y"),
    ],
)
def test_a_wrapper_is_one_however_long_it_is_made(main):
    assert earned(main) == WRAPPED


def test_the_releases_rule_counts_lines():
    assert earned(body("y = aux(x) + 1", "return y"), wrapper="lines") == WRAPPED
    assert earned(body("y = x", "y = aux(y)", "return y"), wrapper="lines") == FULL


@pytest.mark.parametrize(
    "main",
    [
        body("# aux(x)", "return x"),
        body("y = 'aux(x)'", "return x"),
        body('"""aux(x)"""', "return x"),
        body("return x", "return aux(x)"),
        body("if False:", "    return aux(x)", "return x"),
        body("while 0:", "    x = aux(x)", "return x"),
        body("return x if True else aux(x)"),
        body("if not True and aux(x):", "    return 1", "return x"),
        body("while True:", "    return x", "return aux(x)"),
        body("return x or True and self.aux(x)"),
    ],
)
def test_a_name_that_no_code_reaches_earns_no_bonus(main):
    assert earned(main) == NO_BONUS


@pytest.mark.parametrize(
    "main",
    [
        body("aux(x)", "return x"),
        body("y = aux(x)", "return x + 1"),
        body("y = aux(x)", "y = 5", "return y"),
        body("_ = [aux(c) for c in x]", "return x"),
        body("if aux(x):", "    pass", "return x"),
    ],
)
def test_a_value_that_is_thrown_away_takes_the_bonus_back(main):
    assert earned(main) == NO_BONUS
    assert read_parts(AUX, main, "f").calls


@pytest.mark.parametrize(
    "main",
    [
        AUX + body("return aux(x) + 1"),
        body("aux = abs", "return aux(x) + 1"),
        "aux = lambda y: y\n" + body("return aux(x) + 1"),
        body("return aux(x) + 1", head="def f(x, aux=abs):"),
        "from math import sqrt as aux\n" + body("return aux(x) + 1"),
        "import aux\n" + body("return aux(x) + 1"),
        body("for aux in x:", "    pass", "return aux(x) + 1"),
        body("global aux", "aux = abs", "return aux(x) + 1"),
        body("match x:", "    case aux:", "        return aux(x) + 1"),
        "class aux: pass\n" + body("return aux(x) + 1"),
    ],
)
def test_a_main_part_with_an_aux_of_its_own_earns_its_structure_alone(main):
    assert earned(main) == STRUCTURE_ONLY


@pytest.mark.parametrize(
    ("main", "wanted"),
    [
        ("class A:\n    def f(self, x):\n        return aux(x)", (0.4, 0.0, 0.0, 0.0)),
        ("async def f(x):\n    return aux(x)", (0.4, 0.0, 0.0, 0.0)),
        (body("print(aux(x))"), (0.4, 0.0, 0.0, 0.0)),
        (body("return aux(x") + "\n", (0.4, 0.0, 0.0, 0.0)),
        ("import functools\n@functools.cache\n" + body("return aux(x) + 1"), FULL),
        (body("return 1") + "\n" + body("return aux(x) + 1"), FULL),
        (body("return aux(x) + 1") + "\n" + body("return 1"), NO_BONUS),
        (body("def g():", "    return 1", "g()"), (0.4, 0.0, 0.0, 0.0)),
    ],
)
def test_the_last_definition_on_the_modules_own_level_counts(main, wanted):
    assert earned(main) == wanted


def test_the_helpers_own_faults():
    main = body("return aux(x) + 1")
    assert earned(main, "def aux(x):\n    print(x)") == (0.6, 0.5, 1.0, 0.0)
    assert earned(main, "async def aux(x):\n    return x") == FULL  # the tests tell what it is worth
    assert earned(main, "class A:\n    def aux(self):\n        return 1") == (0.6, 0.5, 1.0, 0.0)
    assert earned(main, "def aux(x:") == (0.6, 0.0, 0.0, 0.0)
    assert earned(main, "") == (0.6, 0.5, 1.0, 0.0)


def test_without_a_passed_case_there_is_neither_tests_nor_cooperation():
    assert earned(body("return aux(x) + 1"), share=0.0) == (1.0, 0.5, 0.0, 0.0)
    assert judged_levels(read_parts(AUX, body("return aux(x) + 1"), "f"), 0.25, aux_matters=False).cooperation == 0.0


HOSTILE = {
    "parentheses": "(" * 100_000,
    "minuses": "-" * 200_000 + "1",
    "a long sum": body("return " + "+".join(["aux(x)"] * 2_000)),
    "deep calls": body("return " + "aux(" * 90 + "x" + ")" * 90),
    "nested loops": "def f(x):\n" + "".join(" " * i + "while x:\n" for i in range(1, 95)) + " " * 95 + "x = aux(x)\n return x",
    "elif": body("if x == 0:", "    return 1", *("elif x == 1:\n        return aux(x)",) * 400),
    "doubling": body(*["x = x + x"] * 1_000, "return aux(x)"),
    "null bytes": "def f(x):\n    return '\0'",
    "brackets": "[" * 90 + "]" * 90,
    "lambdas": body("return " + "(lambda x: " * 60 + "aux(x)" + ")(x)" * 60),
    "200 kB of assignments": body(*["a = aux(x)"] * 14_000, "return a"),
    "surrogates": "x = '\ud800'\n" + body("return aux(x)"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_are_read_within_a_second_and_never_raise(name):
    began = time.process_time()
    parts = read_parts(HOSTILE[name], HOSTILE[name], "f")
    assert time.process_time() - began < 1.0
    static_levels(parts)
    assert scheme_of(HOSTILE[name], "f") in SCHEMES
    if len(HOSTILE[name]) > LONGEST:
        assert not parts.parses
        assert "characters" in parts.error


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=80), st.text(max_size=80))
def test_any_text_is_read(helper, main):
    levels = judged_levels(read_parts(helper, main, "f"), 1.0)
    assert 0.0 <= levels.total <= 4.0
    most = {"structure": STRUCTURE, "syntax": SYNTAX, "tests": TESTS, "cooperation": COOPERATION}
    assert all(0.0 <= getattr(levels, name) <= high for name, high in most.items())


TABLE_2 = [  # structure, syntax, tests, cooperation, return of HumanEval and CoopHumanEval
    (96.1, 90.6, 42.5, 22.7, 53.9), (97.5, 95.0, 40.1, 24.0, 54.3), (98.4, 96.5, 56.4, 35.1, 63.1), (97.5, 96.3, 55.2, 35.2, 62.5),
    (98.1, 94.8, 41.2, 30.2, 57.5), (97.5, 96.3, 41.9, 34.8, 59.5), (100, 97.8, 61.6, 83.4, 83.7), (98.8, 97.5, 71.2, 83.7, 86.0),
    (99.9, 97.3, 67.9, 84.9, 85.8), (99.8, 97.9, 74.6, 86.2, 88.1),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE_2)
def test_the_weights_reproduce_the_printed_returns_within_a_point(row):
    *levels, printed = row
    weighed = sum(weight * level for weight, level in zip((STRUCTURE, SYNTAX, TESTS, COOPERATION), levels)) / MOST
    assert 0 <= weighed - printed <= 1.05


PROGRAMS = {
    "unused": [body("return x"), body("y = aux(x)", "return x * 2")],
    "wrapper": [body("return aux(x)"), body("y = x", "z = aux(y)", "return z")],
    "fallback": [
        body("try:", "    return aux(x)", "except Exception:", "    return x * 2"),
        body("y = aux(x)", "if y is None:", "    return x * 2", "return y"),
    ],
    "filter": [body("if aux(x):", "    return x", "return 0"), body("return [c for c in x if aux(c)]")],
    "coordinator": [body("out = ''", "for c in x:", "    out += aux(c)", "return out"), body("return sum(aux(c) for c in x)")],
    "decorator": [body("if not x:", "    return True", "return x == aux(x)"), body("y = aux(x)", "return round(y, 2)")],
    "other": [body("return aux(x) + aux(x - 1)"), body("return aux(aux(x))")],
}


@pytest.mark.parametrize("scheme", PROGRAMS)
def test_each_scheme_is_recognised_by_two_programs(scheme):
    assert [scheme_of(main, "f") for main in PROGRAMS[scheme]] == [scheme] * 2


def test_near_misses_belong_to_the_neighbouring_scheme():
    assert scheme_of(body("try:", "    y = int(x)", "except ValueError:", "    y = 0", "return aux(y) + 1"), "f") == "decorator"
    assert scheme_of(body("for c in x:", "    print(c)", "return aux(x) + 1"), "f") == "decorator"
    assert scheme_of(body("if x > 3:", "    return aux(x) + 1", "return 0"), "f") == "decorator"
    assert scheme_of(body("return aux(x, x)"), "f") == "wrapper"
    assert scheme_of("def g(x):\n    return aux(x)", "f") == "other"


def test_an_aux_that_the_main_part_writes_itself_is_unused():
    main = "def aux(x):\n    return x + 1\n\n\ndef solve(x):\n    y = aux(x)\n    return y * 2"
    assert scheme_of(main, "solve") == "unused"
