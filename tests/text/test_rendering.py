"""A stranger's chat template is rendered in a process of its own: whatever it does is a named error, and costs little."""

import datetime
import os
import pathlib
import subprocess
import sys
import time

import pytest
from checkpoint_text import template_source, write_checkpoint

from marl_llm.text import JinjaTemplate, Message, load_chat, load_template, rendering
from marl_llm.text.rendering import TemplateError, TemplateLimitError, render

NOW = datetime.datetime(2024, 2, 3)
FOUR_LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"


def pid():
    return rendering._CHILD_OF_THIS_PROCESS._process.pid


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / (messages | length - 1) }}",
        "{{ range(10000000) | list }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ undefined_name.field }}",
        "{% include 'other' %}",
        "{% extends '/etc/passwd' %}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{{ messages.append(1) }}",
        "{{ 'a'.encode('nonsense') }}",
        "{{ 2.0 ** 5000 }}",
        "{{ '%d' % 'x' }}",
        "{{ raise_exception('only users and assistants') }}",
        "{{ strftime_now(3) }}",
        "{{ messages | nonsense }}",
    ],
)
def test_a_template_that_fails_is_a_named_error(source):
    with pytest.raises(TemplateError, match=r"^the chat template (refuses|is no Jinja): .+$") as caught:
        render(source, {"messages": [{"role": "user", "content": "hi"}]}, NOW)
    assert not isinstance(caught.value, TemplateLimitError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        FOUR_LOOPS,
        "{{ 'a' * 10**10 }}",
        "{{ x * 10**10 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ (x * 10**6) | replace('a', 'a' * 10**6) }}",
        "{% set ns = namespace(t='a') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}{{ ns.t }}",
        "{% for i in range(99999) %}{{ x * 1000 }}{% endfor %}",
        "{{ '%099999999d' % 3 }}",
        "{{ [x] * 10**9 }}",
        "{{ x | center(10**9) }}",
    ],
)
def test_a_template_that_takes_too_much_is_ended_and_the_next_one_is_rendered(source):
    with pytest.raises(TemplateLimitError, match="^the chat template refuses: .+"):
        render(source, {"x": "a"}, NOW)
    assert render("{{ x }}", {"x": "a"}, NOW) == "a"


UNCOMPILED = ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ 1" + " + 1" * 30000 + " }}", "{% if %}", "{% for", "\x00{{"]


@pytest.mark.parametrize("source", UNCOMPILED, ids=["parentheses", "sums", "no condition", "no end", "null"])
def test_a_source_that_cannot_be_compiled_is_refused(source):
    with pytest.raises(TemplateError):
        JinjaTemplate(source).render([])
    with pytest.raises(TemplateError):
        rendering.check_syntax(source)
    assert render("{{ x }}", {"x": "a"}, NOW) == "a"


def test_memory_of_a_hostile_template_is_bounded():
    render("", {}, NOW)
    child = pid()
    limits = pathlib.Path(f"/proc/{child}/limits").read_text()
    size = int(next(line for line in limits.splitlines() if line.startswith("Max address space")).split()[3])
    used = int(pathlib.Path(f"/proc/{child}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    assert size <= used + rendering.MEMORY + (4 << 20)


def test_values_pass_as_they_are_and_keys_keep_their_order():
    values = {"m": [{"b": 1, "a": None, "c": [True, 2.5, "é中\n\u2028 </s>"]}]}
    assert render("{{ m | tojson }}", values, NOW) == '[{"b": 1, "a": null, "c": [true, 2.5, "é中\\n\u2028 </s>"]}]'
    for wrong in ({"x": object()}, {"x": {(1,): 2}}, {"x": b"bytes"}):
        with pytest.raises(TemplateError, match="no JSON"):
            render("{{ x }}", wrong, NOW)
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError):
        render("{{ x }}", {"x": deep}, NOW)
    assert "\ud800" not in render("{{ '\\ud800' }}", {}, NOW)


def test_the_time_is_the_one_that_was_given_whatever_the_clock_says():
    source = "{{ strftime_now('%d %b %Y') }}"
    assert render(source, {}, NOW) == "03 Feb 2024"
    assert JinjaTemplate(source).render([Message("user", "hi")]) == JinjaTemplate(source).render([Message("user", "hi")]) == "01 Jan 2025"
    assert JinjaTemplate(source, now=NOW).render([Message("user", "hi")]) == "03 Feb 2024"
    assert render("{{ range(1000) | random }}", {}, NOW) == render("{{ range(1000) | random }}", {}, NOW)


def test_one_child_renders_many_times_and_is_replaced_when_somebody_ends_it():
    render("", {}, NOW)
    first = pid()
    for i in range(200):
        assert render("{{ i }}", {"i": i}, NOW) == str(i)
    assert pid() == first
    os.kill(first, 9)
    rendering._CHILD_OF_THIS_PROCESS._process.wait()
    assert render("x", {}, NOW) == "x"
    assert pid() != first


def test_a_fork_has_a_child_of_its_own():
    render("", {}, NOW)
    parent_child, (read, write) = pid(), os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            said = render("{{ 1 + 1 }}", {}, NOW)
            os.write(write, f"{said} {pid() != parent_child}".encode())
            rendering._CHILD_OF_THIS_PROCESS.close()
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"2 True"
    os.close(read)
    os.waitpid(fork, 0)
    assert render("{{ 1 + 2 }}", {}, NOW) == "3"
    assert pid() == parent_child


@pytest.mark.parametrize("end", ["", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "import os; os._exit(0)"])
def test_the_child_ends_with_its_parent_however_that_ends(end):
    code = (
        "from marl_llm.text import rendering; import datetime\n"
        "rendering.render('', {}, datetime.datetime.min); print(rendering._CHILD_OF_THIS_PROCESS._process.pid, flush=True)\n" + end
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=pathlib.Path(__file__).parents[2], timeout=120)
    child = int(said.stdout)
    for _ in range(600):
        status = pathlib.Path(f"/proc/{child}/stat")
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child outlives its parent")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (7, "must be a text or a list"),
        ({"default": "x"}, "must be a text or a list"),
        ([{"name": "default"}], "a name and a template"),
        (["default"], "a name and a template"),
        ([{"name": "default", "template": 3}], "must be a text or a list"),
        ([{"name": "rag", "template": "x"}], "none of them named default"),
        ("{% if %}", "no Jinja: line 1"),
    ],
)
def test_a_template_of_another_kind_is_refused_with_its_file(tmp_path, template, message):
    write_checkpoint(tmp_path, "qwen3", template)
    with pytest.raises(ValueError, match=rf"tokenizer_config.json.*{message}"):
        load_template(tmp_path)


def test_a_checkpoint_whose_template_takes_too_long_is_refused_at_the_first_probe(tmp_path):
    write_checkpoint(tmp_path, "qwen3", FOUR_LOOPS + template_source("qwen3"))
    started = time.process_time()
    with pytest.raises(ValueError, match="the chat template refuses: it takes more than"):
        load_chat(tmp_path)
    assert time.process_time() - started < 20
