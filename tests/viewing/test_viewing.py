"""The viewer without a browser: what it reads, what its server answers, and that no text becomes HTML. In a browser: tests/live."""

import gzip
import html.parser
import json
import re
import urllib.error
import urllib.request

import pytest
import stored

import marl_llm
from marl_llm.reporting import EpisodeWriter
from marl_llm.viewing import StoredRun, ViewError, ViewServer, one_file
from marl_llm.viewing.command import main
from marl_llm.viewing.runs import SHOWN
from marl_llm.viewing.server import PAGE, answer
from marl_llm.viewing.terminal import play_text


@pytest.fixture
def folder(tmp_path):
    plays = [stored.play("train-1/0/0", 0), stored.play("train-1/0/1", 0, text="up", score=1.0)]
    plays += [stored.play("train-1/1/0", 1, text=stored.HOSTILE), stored.play("after-0/0", 0, "after", None, score=1.0)]
    return stored.make_run(tmp_path / "one", plays, [(0, 1.0), (1, 0.0), (2, 0.5)])


@pytest.fixture
def server(folder):
    with ViewServer([StoredRun(folder)]) as found:
        yield found


def get(server, path, **headers):
    with urllib.request.urlopen(urllib.request.Request(server.url + path, headers=headers), timeout=10) as reply:
        return reply.read(), reply.headers


def test_a_row_says_who_when_how_it_ended_and_what_each_role_was_paid(folder):
    first, *_, last = StoredRun(folder).rows()
    assert [first[key] for key in ("id", "when", "step", "status", "calls", "tools")] == ["train-1/0/0", "train", 1, "failed", 2, 1]
    assert first["paid"] == {"guide": 0.5, "walker": 0.5}
    assert (last["when"], last["step"], last["score"]) == ("after", None, 1.0)


def test_a_play_comes_without_prompts_and_a_call_brings_prompt_tokens_and_special_tokens(folder, tmp_path):
    run = StoredRun(stored.make_run(tmp_path / "long", [stored.play("p", 0, text="x" * (SHOWN + 9))]))
    run.refresh()
    step = run.play("p")["steps"][0]
    assert "prompt" not in step
    assert (len(step["responses"][0]["text"]), step["responses"][0]["characters"]) == (SHOWN, SHOWN + 11)
    assert (step["responses"][1]["advantage"], step["prompt_tokens"]) == (-1.0, 3)
    call = run.call("p", 0)
    assert call["prompt"].startswith("guide reads task 0")
    assert call["texts"][0] == "x" * (SHOWN + 9) + " 0"
    assert call["prompt_pieces"] == ["read", "<|im_start|>", "go"]
    assert call["specials"] == ["<|im_start|>"]
    assert call["responses"][0]["entropy"] == [0.1, 0.9]


def test_the_group_of_a_sample_is_its_candidates_and_the_other_plays_of_its_task(folder):
    run = StoredRun(folder)
    run.refresh()
    found = run.group("train-1/0/0", 0)
    assert [(one["play"], one["same"], one["text"], one["advantage"]) for one in found] == [
        ("train-1/0/0", True, "left 0", 1.0), ("train-1/0/0", True, "right", -1.0),
        ("train-1/0/1", False, "up 0", 1.0), ("train-1/0/1", False, "right", -1.0),
    ]  # fmt: skip


def test_search_finds_texts_of_prompts_responses_and_tools_whatever_their_case(folder):
    run = StoredRun(folder)
    assert run.search("READS TASK 1") == ["train-1/1/0"]
    assert run.search('"taken"') == []
    assert run.search("\u202e") == ["train-1/1/0"]


def test_search_looks_at_texts_alone_case_folded_and_normalised(tmp_path):
    texts = {"a": "Über allem", "b": "STRASSE \uff21\uff22\uff23", "c": "cafe\u0301 \ufb01x", "d": 'say "hi"\n<b>', "e": "ΟΔΟΣ 北京"}
    run = StoredRun(stored.make_run(tmp_path / "run", [stored.play(name, 0, text=text) for name, text in texts.items()]))
    for needle, wanted in (
        ("über", "a"), ("ÜBER ALLEM", "a"), ("u\u0308ber", "a"), ("straße", "b"), ("abc", "b"), ("CAFÉ", "c"), ("fix", "c"),
        ('"HI"\n<B>', "d"), ("οδοσ", "e"), ("οδος", "e"), ("京", "e"), ("find it", "abcde"), ("reads task 0", "abcde"),
        ("prompt", ""), ("well_formed", ""), ("question", ""), ("\\u", ""), ("true", ""),
    ):  # fmt: skip
        assert "".join(run.search(needle)) == wanted, needle


def test_a_run_that_is_writing_is_followed_and_a_rewritten_file_is_read_again(folder):
    run = StoredRun(folder)
    before = run.refresh()
    with EpisodeWriter(folder) as writer:
        writer.write(*stored.play("train-2/0/0", 0, step=2))
    with (folder / "episodes.jsonl").open("a") as file:
        file.write('{"episode": "torn')
    assert run.refresh() > before
    assert [row["id"] for row in run.rows()][-1] == "train-2/0/0"
    with EpisodeWriter(folder, resume_step=0):  # an interrupted run goes on: what came later is played again
        pass
    assert [row["id"] for row in run.rows()] == ["after-0/0"]


def test_the_server_answers_with_the_page_and_compressed_data_and_refuses_other_hosts(server):
    page, headers = get(server, "")
    assert b"<main" in page
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    body, headers = get(server, "api/plays?run=0", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert len(json.loads(gzip.decompress(body))) == 4
    for path, head, code in (("api/plays", {"Host": "evil.example:80"}, 403), ("api/play?id=none", {}, 404), ("../setup.py", {}, 404)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(server, path, **head)
        assert caught.value.code == code
        caught.value.close()


def test_two_runs_are_compared_on_their_common_tasks_the_largest_difference_first(folder, tmp_path):
    other = stored.make_run(tmp_path / "two", [], [(1, 1.0), (2, 0.5), (9, 1.0)])
    runs = [StoredRun(folder), StoredRun(other), StoredRun(stored.make_run(tmp_path / "three", []))]
    found = answer(runs, "/api/compare", {"first": "0", "second": "1"})
    assert [(row["task"], row["difference"]) for row in found["rows"]] == [(1, 1.0), (2, 0.0)]
    assert (found["first"], found["second"], found["ties"]) == (0, 1, 1)
    with pytest.raises(ViewError, match=r"three has no outcomes of 'after'"):
        answer(runs, "/api/compare", {"first": "0", "second": "2"})


class Elements(html.parser.HTMLParser):
    """The elements of a page, with what stands in those of scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.data = [], {}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.data[len(self.tags)] = self.data.get(len(self.tags), "") + data


def test_one_file_holds_hostile_texts_as_data_and_nothing_of_them_as_elements(folder):
    page = one_file([StoredRun(folder)])
    elements = Elements()
    elements.feed(page)
    assert [tag for tag, _ in elements.tags if tag in ("script", "img", "iframe")] == ["script", "script"]
    data = json.loads(next(text for text in elements.data.values() if text.startswith("{")))
    assert data["of"][0]["play"]["train-1/1/0"]["steps"][0]["responses"][0]["text"] == stored.HOSTILE + " 0"
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")


def test_the_pages_script_makes_no_html_of_texts():
    script = (PAGE / "view.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|DOMParser|srcdoc", script)


def test_a_notebook_shows_the_page_in_a_frame_that_reaches_nothing_around_it(folder):
    shown = marl_llm.view(folder)._repr_html_()
    elements = Elements()
    elements.feed(shown)
    assert [(tag, attributes["sandbox"]) for tag, attributes in elements.tags] == [("iframe", "allow-scripts")]


def test_a_play_in_a_terminal_has_its_tools_and_marks_where_they_belong(tmp_path):
    head, tokens = stored.play("p", 0)
    use = head["tools"][0]
    head["tools"] = [use | {"node": f"tool{after}", "after": after} for after in (2, 0, 1)]
    for step, marks in zip(head["steps"], ((True, False), (False, True))):
        step["responses"] = [one | {"well_formed": mark} for one, mark in zip(step["responses"], marks)]
    said = play_text(StoredRun(stored.make_run(tmp_path / "run", [(head, tokens)])), "p")
    places = [said.index(words) for words in ("tool tool0", "guide read", "tool tool1", "walker read", "tool tool2")]
    assert places == sorted(places)
    pays = re.findall(r"(said|could have said) \(team \+0.00, local ([+-]0.50)(, malformed)?; ", said)
    assert pays == [("said", "+0.50", ""), ("could have said", "-0.50", ", malformed"),
                    ("said", "+0.50", ", malformed"), ("could have said", "-0.50", "")]  # fmt: skip
    assert "read where: left" in said
    assert "wrote seen: left" in said


def test_one_file_holds_the_last_plays_whole_and_the_command_says_how_many(folder, tmp_path):
    page = tmp_path / "page.html"
    for most, kept in ((1, ["after-0/0"]), (2, ["train-1/1/0", "after-0/0"]), (9, None)):
        assert main([str(folder), "--html", str(page), "--most", str(most)]) == 0
        (of,) = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])["of"]
        names = [row["id"] for row in of["plays"]]
        assert names == (kept or ["train-1/0/0", "train-1/0/1", "train-1/1/0", "after-0/0"])
        assert {name: len(calls) for name, calls in of["call"].items()} == dict.fromkeys(names, 2)
        assert list(of["play"]) == names


@pytest.mark.parametrize("most", [0, -2])
def test_fewer_plays_than_one_are_refused_before_a_file_is_written(folder, tmp_path, capsys, most):
    page = tmp_path / "page.html"
    assert main([str(folder), f"--html={page}", f"--most={most}"]) == 2
    assert capsys.readouterr().err == f"error: most={most}: the last plays of each run are kept, so put a number from 1 on\n"
    assert not page.exists()
    with pytest.raises(ViewError, match="from 1 on"):
        marl_llm.view(folder, most=most)


def test_the_command_prints_plays_in_a_terminal_with_control_characters_made_visible(folder, capsys, tmp_path):
    assert main([str(folder), "--text", "--search", "task 1"]) == 0
    assert "one: 1 plays" in capsys.readouterr().out
    assert main([str(folder), "--text", "--play", "train-1/1/0"]) == 0
    said = capsys.readouterr().out
    assert "guide read" in said
    assert "goal=+0.00 format=+0.50" in said
    assert "\x07" not in said
    assert "\u202e" not in said
    assert main([str(folder), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert main([str(tmp_path / "none")]) == 2
    assert "no run directory" in capsys.readouterr().err
    assert main([str(folder), "--text", "--play", "nobody"]) == 2
