"""What a user meets who has no type checker and gives a text for a tuple, a list for a function: an error that says so, at once.

In a process of its own, because in this one annotations are checked first.
"""

import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CASES = {
    "Workflow('w', role, inputs='question')": r"inputs='question' must be a tuple of names, e\.g\. inputs=\('question',\)",
    "Workflow('w', role, inputs=('question',), hidden='gold')": "hidden='gold' must be a tuple",
    "compute(len, 'x', reads=('a',), reveals='x')": "computation 'len': reveals='x' must be a tuple",
    "Workflow('w', role, inputs=('question',), rewards=broadcast(len))": r"rewards must be a tuple of rewards, e\.g\. rewards=\(broadcast",
    "Workflow('w', role, inputs=('question',), rewards=(0.5,))": r"reward 0 \(float\) of workflow 'w' is no function of a trajectory",
    "delta('score', roles='code')": r"delta 'delta': roles='code' must be a tuple of names, e\.g\. roles=\('code',\)",
    "Role('r', '{question}', plain('plan'), writes='plan')": "role 'r': writes='plan' must map each field to its value",
    "Environment(team, [], 'score')": r"environment 'w': tasks is a list; it must be a function of \(split, first, count\)",
    "play([{'question': ''}])": r"tasks hold a dict; make Task\(number, fields, hidden\) of each",
}
SCRIPT = """
import json, sys
from marl_llm.workflows import *
from marl_llm.workflows.rewards import broadcast, delta
role = Role("a", "{question}", plain("a"), {"a": ""})
team = Workflow("w", role, ("question",), metrics={"score": lambda way: 1.0})
def play(tasks):
    with Controller(team, Assignment({"a": "s"}, {"s": Scripted(lambda turn: "x")}), None, {}) as controller:
        controller.play(tasks)
said = {}
for case in json.load(sys.stdin):
    try:
        eval(case)
    except WorkflowError as error:
        said[case] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=json.dumps(list(CASES)), capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_what_is_wanted(said, case):
    assert re.search(CASES[case], said[case])
