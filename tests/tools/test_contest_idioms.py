"""What a solution of a contest may do with an ordinary interpreter works in the sandbox, and ends as it ends there."""

import concurrent.futures
import subprocess
import sys

import pytest
from contest_idioms import CALLS, ENDINGS, IDIOMS

from marl_llm.tools import judge_calls, judge_stdio
from marl_llm.tools.sandbox import Limits, Sandbox, Submission

INPUT = "6 7\n"
PROGRAMS = IDIOMS | {f"ending: {name}": program for name, (program, _, _) in ENDINGS.items()}


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, limits=Limits(timeout_s=20)) as made:
        yield made


@pytest.fixture(scope="module")
def ends(sandbox, tmp_path_factory):
    """Name -> (what it printed, status) in the sandbox, and in an ordinary interpreter."""
    folder = tmp_path_factory.mktemp("programs")

    def ordinary(name):
        path = folder / f"{list(PROGRAMS).index(name)}.py"
        path.write_bytes(PROGRAMS[name].encode())
        command = [sys._base_executable, "-I", "-B", "-X", "utf8", "-X", "int_max_str_digits=0", path]
        done = subprocess.run(command, input=INPUT.encode(), capture_output=True, env={})
        return done.stdout.decode(), done.returncode

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ordinarily = list(pool.map(ordinary, PROGRAMS))
    requests = [Submission(code, INPUT, limits=Limits(timeout_s=20)) for code in PROGRAMS.values()]
    done = [one.outcome() for one in sandbox.run_batch(requests)]
    boxed = [(program.stdout, program.exit_code, program.stderr) for program in done]
    return dict(zip(PROGRAMS, zip(boxed, ordinarily)))


@pytest.mark.parametrize("name", IDIOMS)
def test_what_works_in_an_ordinary_interpreter_works_in_the_sandbox(ends, name):
    (printed, status, complaint), ordinary = ends[name]
    assert ordinary == (ordinary[0], 0)
    assert ordinary[0].strip() == "13"
    assert (printed, status) == ordinary, complaint


@pytest.mark.parametrize("name", ENDINGS)
def test_programs_end_as_in_an_ordinary_interpreter(ends, name):
    (printed, status, complaint), ordinary = ends[f"ending: {name}"]
    assert ordinary == ENDINGS[name][1:]
    assert (printed, status) == ordinary, complaint


@pytest.mark.parametrize("name", CALLS)
def test_a_called_solution_may_do_what_contests_let_it(sandbox, name):
    program, cases, states = CALLS[name]
    judged = judge_calls(program, "f", cases, 20, sandbox=sandbox).outcome()
    assert [case.state for case in judged.cases] == states, judged.programs[0].stderr


def test_scalars_of_numpy_are_the_numbers_that_they_are():
    kinds = ["np.int64(1)", "np.uint8(1)", "np.bool_(True)", "np.float32(1)", "np.str_('a')", "[np.int64(1)]"]
    kinds += ["np.array(1)[()]", "{np.int64(1): 1}"]
    kinds += ["np.array([1])", "np.bool_(True)", "np.float64(1)", "np.longdouble(1)", "np.datetime64('2020')"]
    wanted = [1, 1, True, 1.0, "a", [1], 1, {1: 1}, [1], 1, 1, 1.0, 1]
    cases = [((place,), value) for place, value in enumerate(wanted)]
    program = f"import numpy as np\ndef f(a):\n    return [{', '.join(f'lambda: {kind}' for kind in kinds)}][a]()\n"
    judged = judge_calls(program, "f", cases, 20, profile="numpy").outcome()
    assert [case.state for case in judged.cases] == ["passed"] * 8 + ["wrong"] * 5


def test_as_much_is_kept_of_what_is_printed_as_is_expected(sandbox):
    size = 3 << 20
    program = "n = int(input())\nprint('x ' * n)\n"
    cases = [(f"{size // 2}\n", "x " * (size // 2)), (f"{size // 2}\n", "x"), (f"{4 * size}\n", "x " * (size // 2))]
    judged = judge_stdio(program, cases, 20, sandbox=sandbox).outcome()
    assert [case.state for case in judged.cases] == ["passed", "output_limit", "output_limit"]


@pytest.mark.parametrize("sign", ["\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\r", "\xa0", "\u3000"])
def test_lines_end_at_a_line_feed_alone_and_words_at_blanks(sandbox, sign):
    wanted = "1 2" if sign in "\xa0\u3000" else "1\n2"
    program = f"print({f'1{sign}2'!r})\n"
    assert [case.state for case in judge_stdio(program, [("", wanted)], 20, sandbox=sandbox).outcome().cases] == ["wrong"]
    text = f"1{sign}2\r\n3 \t\n" if sign != "\r" else "1\r\n2"
    program = f"import sys\nsys.stdout.buffer.write({text.encode()!r})\n"
    assert judge_stdio(program, [("", text.replace("\r\n", "\n"))], 20, sandbox=sandbox)
