"""The viewer in a real headless Chromium; run by hand: `python -m pytest -n 0 tests/live/viewer_in_chromium.py`.

Needs `pip install playwright` and a Chromium on the PATH (`apt-get install chromium`).
"""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "viewing"))
import stored

from benchmarks.viewer import browser
from marl_llm.reporting import EpisodeWriter
from marl_llm.viewing import StoredRun, ViewServer, one_file


@pytest.fixture(scope="module")
def chrome():
    with browser(None) as found:
        yield found


@pytest.fixture
def folder(tmp_path):
    plays = [stored.play("train-1/0/0", 0, calls=4), stored.play("train-1/0/1", 0, calls=4, text="up", score=1.0)]
    plays += [stored.play("train-1/1/0", 1, text=stored.HOSTILE)]
    return stored.make_run(tmp_path / "one", plays, [(0, 1.0), (1, 0.0)])


@pytest.fixture
def page(chrome):
    page = chrome.new_page(viewport={"width": 1600, "height": 1000})
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    yield page
    assert page.problems == []
    page.close()


def until(page, condition):
    """Waits for a condition in the page: its policy allows no script but its own, so that Playwright's way of waiting is refused."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(condition)


def test_hostile_texts_stay_text_in_the_page_and_in_the_file(page, folder, tmp_path):
    with ViewServer([StoredRun(folder)]) as server:
        page.goto(server.url + "#play=train-1/1/0&call=0")
        page.wait_for_selector("#call-1")
        assert "<script>document.title='taken'</script>" in page.inner_text("#call-0 .said")
        page.keyboard.press("r")
        page.wait_for_selector("#call-0 details[data-kind=read] pre")
        assert page.title() == "train-1/1/0 · marl_llm"
        assert page.query_selector("main img, main script") is None
    file = tmp_path / "page.html"
    file.write_text(one_file([StoredRun(folder)]))
    page.goto(f"file://{file}#play=train-1/1/0")
    page.wait_for_selector("#call-1")
    assert "<script>" in page.inner_text("#call-0 .said")
    assert page.title() == "train-1/1/0 · marl_llm"
    page.fill("#search", "READS TASK 1")
    page.press("#search", "Enter")
    until(page, "document.getElementById('count').textContent === '1 of 3 plays'")


def test_the_keyboard_reaches_plays_calls_prompts_groups_and_the_list(page, folder):
    with ViewServer([StoredRun(folder)]) as server:
        page.goto(server.url)
        page.wait_for_selector("#list tbody tr")
        page.keyboard.press("j")
        page.wait_for_selector("#call-3")
        page.keyboard.press("n")
        page.keyboard.press("n")
        until(page, "location.hash.includes('call=1')")
        page.keyboard.press("r")
        page.wait_for_selector("#call-1 details[data-kind=read] .token.special", state="attached")
        page.keyboard.press("g")
        page.wait_for_selector("#call-1 .candidate")
        assert page.locator("#call-1 .candidate").count() == 4
        assert "advantage -1.000" in page.inner_text("#call-1 .candidate >> nth=1")
        page.keyboard.press("Escape")
        until(page, "!location.hash.includes('play=')")


def test_plays_are_filtered_sorted_and_searched(page, folder):
    with ViewServer([StoredRun(folder)]) as server:
        page.goto(server.url)
        page.wait_for_selector("#list tbody tr")
        page.click("#list thead button:has-text('found')")
        page.click("#list thead button:has-text('found')")
        assert page.get_attribute("#list tbody tr >> nth=0", "data-play") == "train-1/0/1"
        page.select_option("select[aria-label='any status']", "success")
        until(page, "document.getElementById('count').textContent === '1 of 3 plays'")


def test_tokens_are_coloured_and_a_click_on_a_step_of_a_curve_leads_to_its_plays(page, folder):
    with ViewServer([StoredRun(folder)]) as server:
        page.goto(server.url + "#play=train-1/0/0")
        page.wait_for_selector("#color")
        for name in ("advantage", "log-prob", "entropy"):
            page.select_option("#color", name)
            page.wait_for_selector(f".token[title^='{name}']")
        page.goto(server.url + "#view=summary")
        page.click("circle.point >> nth=0")
        until(page, "location.hash.includes('step=1')")


def test_the_page_follows_a_run_that_is_writing(page, folder):
    with ViewServer([StoredRun(folder)]) as server:
        page.goto(server.url)
        page.wait_for_selector("#list tbody tr")
        page.wait_for_timeout(2500)
        with EpisodeWriter(folder) as writer:
            writer.write(*stored.play("train-2/0/0", 0, step=2))
        page.wait_for_selector("tr[data-play='train-2/0/0']", timeout=6000)


def test_two_runs_are_compared_side_by_side_and_400_pixels_are_enough(page, folder, tmp_path):
    after = [stored.play(f"after-{task}/0", task, "after", None) for task in (0, 1)]
    runs = [stored.make_run(tmp_path / name, after, [(0, 1.0), (1, score)]) for name, score in (("old", 0.0), ("new", 1.0))]
    page.set_viewport_size({"width": 400, "height": 800})
    with ViewServer(list(map(StoredRun, runs))) as server:
        page.goto(server.url + "#view=compare")
        page.wait_for_selector("#compared tbody tr")
        assert "new on 1" in page.inner_text("main")
        page.click("#compared tbody tr >> nth=0")
        page.wait_for_selector("text=new · after-1/0")
        for where in ("#view=compare", "#", "#play=after-0/0", "#view=summary"):
            page.goto(server.url + where)
            page.wait_for_timeout(300)
            assert page.evaluate("document.documentElement.scrollWidth") <= 400, where
