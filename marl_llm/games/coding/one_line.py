"""Generated problems whose programs have one line, in plain English, for a small real model as coder and tester.

    Read an integer and print the larger of it and 12.        print(max(int(input()), 12))
"""

from __future__ import annotations

import functools
import random

from marl_llm.games.coding import debate
from marl_llm.games.kit.debate import show_instructions
from marl_llm.games.kit.miniature import kinds_of_split
from marl_llm.workflows import Role, Task, code_block

NUMBERS = range(2, 21)
GOLDEN_TESTS = 5
INTERFACE = "The program reads its input with input() and prints its answer with print()."
PROGRAMS = {  # problem -> its program; `{n}` is a number
    "Read an integer and print it plus {n}.": "print(int(input()) + {n})",
    "Read an integer and print it minus {n}.": "print(int(input()) - {n})",
    "Read an integer and print it times {n}.": "print(int(input()) * {n})",
    "Read an integer and print what is left when it is divided by {n}.": "print(int(input()) % {n})",
    "Read an integer and print the larger of it and {n}.": "print(max(int(input()), {n}))",
    "Read an integer and print the smaller of it and {n}.": "print(min(int(input()), {n}))",
    "Read an integer and print how far it is from {n}.": "print(abs(int(input()) - {n}))",
    "Read two integers, one per line, and print their sum plus {n}.": "print(int(input()) + int(input()) + {n})",
    "Read two integers, one per line, and print their product minus {n}.": "print(int(input()) * int(input()) - {n})",
    "Read two integers, one per line, and print {n} if they are equal, else 0.": "print({n} if int(input()) == int(input()) else 0)",
}

EXAMPLE = "Problem: Read an integer and print twice that number.\n"  # a model of 135M follows an example, and no list of rules
CODER = EXAMPLE + "```python\nprint(int(input()) * 2)\n```\n\nProblem: {problem}\n{history}"
TESTER = EXAMPLE + "**Test Input:**\n4\n**Test Output:**\n8\n\nProblem: {problem}\n{history}"
ASKS_CODER = "Answer in the same way, with a program of one line in a block that begins with ```python."
ASKS_TESTER = "Answer in the same way, with one test."


def one_line_roles(max_tokens: int, max_prompt: int, agents: str = "team") -> dict[str, Role]:
    """Coder and tester, or the coder alone, who read a solved problem before their own."""
    budget = dict(max_tokens=max_tokens, max_prompt=max_prompt, trim="history", trim_from="start")
    if agents == "single":
        later, told = debate.SINGLE_LATER, debate.last_program
    else:
        later, told = debate.CODER["later"], debate.history_text
    shown = show_instructions({"first": ASKS_CODER, "later": later}, told)
    coder = Role("coder", CODER, code_block("code"), {"code": ""}, show=shown, **budget)
    if agents == "single":
        return {"coder": coder}
    shown = show_instructions({"first": ASKS_TESTER, "later": debate.TESTER["later"]}, debate.history_text)
    return {"coder": coder, "tester": Role("tester", TESTER, debate.read_test, {"test": debate.NO_TEST}, show=shown, **budget)}


def one_line_task(split: str, seed: int, number: int) -> Task:
    """A problem with the tests of its program, which is the reference too. Splits share no problem.

    Raises `ValueError` for an unknown split.
    """
    rng = random.Random(f"one line {split} {seed} {number}")
    problem, constant = rng.choice(_problems(split))
    inputs = [(rng.randint(0, 30), rng.randint(0, 30)) for _ in range(GOLDEN_TESTS - 1)]
    equal = rng.randint(0, 30)
    two = "two integers" in problem
    tests = tuple(
        (f"{first}\n{second}\n" if two else f"{first}\n", f"{answer(problem, constant, first, second)}\n")
        for first, second in (*inputs, (equal, equal))
    )
    fields = {"problem": problem.format(n=constant), "interface": INTERFACE}
    program = PROGRAMS[problem].format(n=constant)
    hidden = {"function": "", "tests": tests, "references": (program,), "mutants": (), "shown": ()}
    return Task(number, fields, hidden, split)


def answer(problem: str, constant: int, first: int, second: int) -> int:
    """What the program of a problem prints for these integers."""
    answers = (
        first + constant, first - constant, first * constant, first % constant, max(first, constant), min(first, constant),
        abs(first - constant), first + second + constant, first * second - constant, constant if first == second else 0,
    )  # fmt: skip
    return dict(zip(PROGRAMS, answers, strict=True))[problem]


@functools.cache
def _problems(split: str) -> tuple[tuple[str, int], ...]:
    """The problems of a split, each with its number."""
    every = [(problem, constant) for problem in PROGRAMS for constant in NUMBERS]
    return kinds_of_split(split, every, lambda pair: pair[0].format(n=pair[1]))

