"""The viewer in a real headless Chromium: how fast it opens, how much it transfers, whether texts stay text, and pictures of it.

    python -m benchmarks.viewer                                   100 plays of 30 calls, and 10,000 plays; prints a table
    python -m benchmarks.viewer --pictures docs/pictures RUN RUN   pictures of the list, a play, its group and two runs compared
    python -m benchmarks.viewer --before_after docs/pictures RUN   the first test task, played before training and after it

Needs `pip install playwright` and a Chromium (`apt-get install chromium`, or `--chromium PATH`); the checks are in
`tests/live/viewer_in_chromium.py`. Bars: 100 plays of 30 calls open in 2 s and 3 MB, 10,000 plays are listed and searched in 1 s.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

from marl_llm.viewing import StoredRun, ViewServer

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "viewing"))
import stored  # noqa: E402 (what the tests store too)

WORDS = ("river", "delta", "source", "bank", "bridge", "stone", "north", "water", "field", "light")


def large_run(folder: pathlib.Path, plays: int, calls: int, words: int) -> pathlib.Path:
    """A run with many plays, each call with so many words."""
    dice = random.Random(0)

    def text():
        return " ".join(dice.choices(WORDS, k=words))

    made = [stored.play(f"train-1/{n}/0", n, calls=calls, text=text(), score=float(n % 2)) for n in range(plays)]
    return stored.make_run(folder, made)


@contextlib.contextmanager
def browser(chromium: str | None) -> Iterator:
    """A headless Chromium. It runs as root in containers, hence without its own sandbox."""
    from playwright.sync_api import sync_playwright

    path = chromium or shutil.which("chromium")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(page, url: str, ready: str) -> tuple[float, int]:
    """(seconds, bytes transferred) until an element is there."""
    seen: list[int] = []
    page.on("response", lambda reply: seen.append(int(reply.headers.get("content-length", 0))))
    start = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(ready)
    return time.perf_counter() - start, sum(seen)


def measure(chromium: str | None) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder, browser(chromium) as chrome:
        run = StoredRun(large_run(pathlib.Path(folder) / "hundred", 100, 30, 40))
        with ViewServer([run]) as server:
            page = chrome.new_page()
            seconds, size = opened(page, server.url, "#list tbody tr")
            print(f"100 plays of 30 calls: list in {seconds:.2f} s, {size / 1e6:.2f} MB")
            seconds, size = opened(page, server.url + "#play=train-1/50/0", "#call-29")
            print(f"one play of 30 calls: {seconds:.2f} s, {size / 1e6:.2f} MB")
        run = StoredRun(large_run(pathlib.Path(folder) / "many", 10_000, 2, 20))
        start = time.perf_counter()
        run.refresh()
        print(f"10,000 plays: read once in {time.perf_counter() - start:.2f} s by the server")
        with ViewServer([run]) as server:
            page = chrome.new_page()
            seconds, size = opened(page, server.url, "#list tbody tr")
            print(f"10,000 plays: listed in {seconds:.2f} s, {size / 1e6:.2f} MB")
            page.fill("#search", "task 9999 ")
            start = time.perf_counter()
            page.press("#search", "Enter")
            page.wait_for_selector("#count:text('1 of')")
            print(f"10,000 plays: searched in {time.perf_counter() - start:.2f} s")


def shown(run: StoredRun) -> tuple[str, int]:
    """(play, call) for the pictures: of the last training play in which a group's rewards differ, the call whose rewards differ most."""
    plays = [row["id"] for row in run.rows() if row["when"] == "train"] or [row["id"] for row in run.rows()]
    for play in reversed(plays):
        spread = {}
        for number in range(len(run.play(play)["steps"])):
            paid = [sample["team"] + sample["local"] for sample in run.group(play, number)]
            spread[number] = max(paid, default=0.0) - min(paid, default=0.0)
        if max(spread.values(), default=0.0) > 0.0:
            return play, max(spread, key=spread.get)
    return plays[-1], 0


def pictures(chromium: str | None, folder: pathlib.Path, runs: list[str]) -> None:
    """PNGs of the views at two widths, light; and of a play in dark. The play is one of the end of the first run's training."""
    folder.mkdir(parents=True, exist_ok=True)
    ready = {"play": "#call-0", "group": "#call-0", "list": "#list tbody tr", "compare": "#compared tbody tr", "curves": "circle.point"}
    with ViewServer([StoredRun(run) for run in runs]) as server, browser(chromium) as chrome:
        play, call = shown(StoredRun(runs[0]))
        for width, height in ((1600, 1000), (400, 860)):
            for theme in ("light", "dark"):
                page = chrome.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
                views = {"play": f"#play={play}"}
                if theme == "light":
                    views |= {"list": "#", "group": f"#play={play}&call={call}", "compare": "#view=compare", "curves": "#view=summary"}
                for name, where in views.items():
                    page.goto("about:blank")
                    page.goto(server.url + where)
                    page.wait_for_selector(ready[name])
                    if name == "group":
                        page.keyboard.press("g")
                        page.wait_for_selector(f"#call-{call} .candidate")
                        page.eval_on_selector(f"#call-{call} details[data-kind=group]", "node => node.scrollIntoView({block: 'center'})")
                    if name == "compare":
                        page.click("#compared tbody tr")
                    page.wait_for_timeout(700)  # what is drawn last, and fonts
                    mark = "" if theme == "light" else "_dark"
                    page.screenshot(path=str(folder / f"viewer_{name}{mark}_{width}.png"))
                page.close()


def before_after(chromium: str | None, folder: pathlib.Path, run: str) -> None:
    """Two PNGs: how a run's team played its first test task before training and after it."""
    with ViewServer([StoredRun(run)]) as server, browser(chromium) as chrome:
        for when in ("before", "after"):
            page = chrome.new_page(viewport={"width": 600, "height": 860})
            page.goto(f"{server.url}#play={when}-0/0")
            page.wait_for_selector("#call-0")
            page.wait_for_timeout(700)  # fonts
            page.screenshot(path=str(folder / f"play_{when}.png"), full_page=True)
            page.close()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser("benchmarks.viewer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", help="path of the browser; default: the one on the PATH")
    parser.add_argument("--pictures", type=pathlib.Path, help="folder for PNGs, in place of the table")
    parser.add_argument("--before_after", type=pathlib.Path, help="folder for play_before.png and play_after.png, in place of the table")
    parser.add_argument("runs", nargs="*", help="run directories for the pictures")
    asked = parser.parse_args()
    if asked.pictures:
        pictures(asked.chromium, asked.pictures, asked.runs)
    elif asked.before_after:
        before_after(asked.chromium, asked.before_after, *asked.runs)
    else:
        measure(asked.chromium)


if __name__ == "__main__":
    main()
