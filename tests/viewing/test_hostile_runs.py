"""A run directory that somebody else made: whatever its files hold, the viewer and the report name it and show the rest."""

import contextlib
import copy
import html.parser
import json
import os
import random

import pytest
import stored

from marl_llm.viewing import StoredRun, ViewError, one_file, write_report
from marl_llm.viewing.runs import compared
from marl_llm.viewing.server import answer
from marl_llm.viewing.terminal import list_text, play_text

FILES = ("episodes.jsonl", "episodes_tokens.jsonl", "metrics.jsonl", "outcomes.jsonl")
PART = {"success": 0.5, "interval": [0.4, 0.6], "episodes": 8, "aborted": 0, "turns": 1.5, "roles": {"guide": {"well_formed": 1.0}}}
EVALUATION = {"headline": "found", "steps": 2, "gain": {"difference": 0.1, "interval": [0.0, 0.2]}, "pairs": {"guide untrained": PART}}
EVALUATION |= {"before": PART, "after": PART, "swapped": PART, "random": PART}


@pytest.fixture
def folder(tmp_path):
    plays = [stored.play(f"train-1/{task}/0", task) for task in range(3)]
    run = stored.make_run(tmp_path / "run", [*plays, stored.play("after-0/0", 0, "after", None, score=1.0)], [(0, 1.0), (1, 0.0)])
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    return run


def look_at(folder):
    """Everything that the viewer and the report show of a run."""
    run = StoredRun(folder)
    rows = answer([run], "/api/plays", {})
    for row in rows:
        play = answer([run], "/api/play", {"id": row["id"]})
        for number in range(len(play["steps"])):
            answer([run], "/api/call", {"id": row["id"], "call": str(number)})
            answer([run], "/api/group", {"id": row["id"], "call": str(number)})
        play_text(run, row["id"])
    for path in ("/api/runs", "/api/versions", "/api/summary"):
        json.dumps(answer([run], path, {}), allow_nan=False)
    answer([run], "/api/search", {"text": "left"})
    list_text(run)
    page = one_file([run])
    report = write_report(folder, pictures=False).read_text()
    return {row["id"] for row in rows}, run.faults(), page, report


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("[" * 100_000, "nested deeper than 64 levels"),
        ('{"episode": ' + '{"a":' * 100_000, "nested deeper than 64 levels"),
        ("3", "an object is expected"),
        ('{"episode": NaN}', "a number that is not finite"),
        ('{"episode": "' + "9" * 50, "not JSON"),
        ("\udcff\udcfe".encode("utf-8", "surrogateescape"), "not UTF-8"),
    ],
)
def test_one_bad_line_is_named_and_takes_no_other_away(folder, name, bad, reason):
    path = folder / name
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + (bad if isinstance(bad, bytes) else bad.encode()) + b"\n" + b"".join(rest))
    names, faults, page, report = look_at(folder)
    assert names == {"train-1/0/0", "train-1/1/0", "train-1/2/0", "after-0/0"}
    assert [fault for fault in faults if f"{name}, line 2: {reason}" in fault] == faults
    assert len(faults) == 1
    if name in ("episodes.jsonl", "metrics.jsonl"):
        assert f"{name}, line 2: {reason}" in report


@pytest.mark.parametrize("name", [*FILES, "config.json", "evaluation.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "zero"])
def test_what_is_no_file_is_named_and_nothing_waits_for_it(folder, name, kind):
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    faults = look_at(folder)[1]
    assert len(faults) == 1
    assert name in faults[0]


def test_a_play_against_the_schema_is_named_by_line_and_field(folder):
    with open(folder / "episodes.jsonl", "a") as file:
        file.write(json.dumps(json.loads((folder / "episodes.jsonl").read_text().split("\n")[0]) | {"steps": 3, "episode": "bad"}) + "\n")
    names, faults, *_ = look_at(folder)
    assert "bad" not in names
    assert ["episodes.jsonl, line 5: steps: found int; put a list" in fault for fault in faults] == [True]


def test_tokens_that_do_not_fit_their_play_are_left_out_by_name(folder):
    lines = (folder / "episodes_tokens.jsonl").read_text().split("\n")
    broken = json.loads(lines[0])
    broken["steps"][0]["responses"][0]["ids"] = "abc"
    (folder / "episodes_tokens.jsonl").write_text("\n".join([json.dumps(broken), *lines[1:]]))
    run = StoredRun(folder)
    run.refresh()
    assert "responses" not in run.call("train-1/0/0", 0)
    assert "responses" in run.call("train-1/1/0", 0)
    assert "play train-1/0/0: tokens.steps[0].responses[0].ids: found str" in run.faults()[0]


ODD = [None, True, -1, 10**299, 1e308, "x", "<script>", [], {}, [[]], {"a": [1]}, "\u2028", "__proto__", ["a", 1], [1, None]]


def places(value, path=()):
    """Every place within a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def spoiled(value, draw):
    """The value with something odd in one place, or with a field gone."""
    value = copy.deepcopy(value)
    path = draw.choice([path for path in places(value) if path])
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if isinstance(inner, dict) and draw.random() < 0.2:
        del inner[path[-1]]
    else:
        inner[path[-1]] = draw.choice(ODD)
    return value


@pytest.mark.parametrize("seed", range(4))
def test_values_of_other_types_crash_neither_the_viewer_nor_the_report(folder, seed):
    draw = random.Random(seed)
    for name in (*FILES, "config.json", "evaluation.json"):
        text = (folder / name).read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        for _ in range(3):
            (folder / name).write_text("".join(json.dumps(spoiled(line, draw)) + "\n" for line in lines))
            look_at(folder)
            with contextlib.suppress(ViewError):  # no outcomes of these seats are left
                compared(StoredRun(folder), StoredRun(folder))
        (folder / name).write_text(text)


class Elements(html.parser.HTMLParser):
    """The names of a page's elements, and its attributes that run code."""

    def __init__(self, text):
        super().__init__()
        self.found, self.handlers = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.handlers += [name for name, value in attrs if name.startswith("on") or (value or "").startswith("javascript:")]


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)></pre>]]>--><svg onload=alert(1)>\"'`javascript:\u2028"


def with_numbers(value, numbers):
    """The value with these numbers in place of all that stand under their names."""
    if isinstance(value, dict):
        return {key: numbers.get(key, x) if not isinstance(x, dict | list) else with_numbers(x, numbers) for key, x in value.items()}
    if isinstance(value, list):
        return [with_numbers(item, numbers) for item in value]
    return value


HUGE = 1.7e308


@pytest.mark.parametrize(
    ("numbers", "place"),
    [
        ({"score": HUGE}, "score"),
        ({"team": -HUGE}, "'team'"),
        ({"local": HUGE}, "'local'"),
        ({"goal": HUGE}, "'goal'"),
        ({"success": HUGE, "seconds": HUGE}, ""),
        ({"success_low": -HUGE, "success_high": HUGE, "difference": -HUGE}, ""),
        ({"role/guide/reward": -HUGE, "wall_s": HUGE}, ""),
    ],
)
def test_numbers_that_no_sum_holds_leave_the_rest_of_the_page(folder, numbers, place):
    curve = [{"phase": "eval", "step": step, "success": 0.5, "success_low": 0.4, "success_high": 0.6, "wall_s": 1.0} for step in range(3)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in curve)
    plays = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    longer = [play | {"episode": f"long{i}", "turns": 2} for i, play in enumerate(plays[:2])]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(play) + "\n" for play in (*plays, *longer)))
    for name in (*FILES, "evaluation.json"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        lines += lines if name == "outcomes.jsonl" else []
        (folder / name).write_text("".join(json.dumps(with_numbers(line, numbers)) + "\n" for line in lines))
    write_report(folder, pictures=not place)
    shown, faults, *pages = look_at(folder)
    assert len(shown) == (0 if place else 6)
    assert [fault for fault in faults if "episodes.jsonl, line " not in fault or place not in fault] == []
    assert len(faults) == 6 - len(shown)
    assert not any("Infinity" in page.split('id="data">')[1].split("</script>")[0] for page in pages)
    with contextlib.suppress(ViewError):
        json.dumps(compared(StoredRun(folder), StoredRun(folder)), allow_nan=False)


def with_texts(value, added):
    """The value with a text added to each of its texts and names, but for those of the schema."""
    if isinstance(value, dict):
        own = ("guide", "walker", "goal", "format", "where", "seen", "a", "b")
        return {key + added if key in own else key: with_texts(item, added) for key, item in value.items()}
    if isinstance(value, list):
        return [with_texts(item, added) for item in value]
    return value + added if isinstance(value, str) and value not in ("train", "after", "eval", "success", "failed") else value


def test_no_text_of_a_run_reaches_a_terminal_as_a_command(folder):
    for name in FILES:
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        (folder / name).write_text("".join(json.dumps(with_texts(line, "\x1b]52;c;eA==\x07\x9b2J\u202e")) + "\n" for line in lines))
    run = StoredRun(folder)
    said = "\n".join([list_text(run), *(play_text(run, row["id"]) for row in run.rows())])
    assert said.count("␛") >= 100
    assert not set(said) & set("\x1b\x07\x9b\u202e")


def test_no_text_of_a_run_becomes_an_element_wherever_it_stands(folder):
    def hostile(value):
        if isinstance(value, dict):
            return {key + HOSTILE if key in ("guide", "goal", "a", "b") else key: hostile(item) for key, item in value.items()}
        if isinstance(value, list):
            return [hostile(item) for item in value]
        known = ("train", "after", "eval", "success", "failed") if isinstance(value, str) else ()
        rows = isinstance(value, str) and len(value) == 2
        return value + HOSTILE if isinstance(value, str) and value not in known and not rows else value

    for name in (*FILES, "config.json", "evaluation.json"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        text = "".join(json.dumps(hostile(line)) + "\n" for line in lines)
        (folder / name).write_text(text.replace('"walker', '"walker' + json.dumps(HOSTILE)[1:-1]).replace('"role/guide', '"role/guide<b>'))
    (folder / "graph.svg").write_text(f"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'>{HOSTILE}</svg>")
    _, _, page, report = look_at(folder)
    assert Elements(page).found.count("script") == 2
    assert not {"img", "svg", "b"} & set(Elements(page).found)
    assert Elements(report).found == Elements(page).found
    assert Elements(page).handlers == Elements(report).handlers == []
