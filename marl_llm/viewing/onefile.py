"""The viewer in one file to send, and inline in a notebook: the same page, with the runs' data inside it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from marl_llm.reporting import files
from marl_llm.viewing.charts import save_picture
from marl_llm.viewing.runs import StoredRun, ViewError, compared
from marl_llm.viewing.server import PAGE, answer
from marl_llm.viewing.summary import summary

MOST = 2000  # plays of a run in one file
MOST_IN_REPORT = 200


def write_report(workdir: files.Path, pictures: bool = True) -> pathlib.Path:
    """Writes `report.html`, the page of one run that begins with its summary, and the charts as PNGs under `plots/`, if asked for.

    Raises:
      ViewError: when there is no such run directory.
      files.WriteError: when the page or a PNG cannot be written.
    """
    run = StoredRun(workdir)
    data = _data([run], MOST_IN_REPORT)
    for _, drawn in data["of"][0]["summary"]["charts"] if pictures else ():
        for chart in drawn:
            if chart["lines"]:
                save_picture(chart, run.path / "plots")
    files.replace_file(run.path / "report.html", _page(data | {"view": "summary"}).encode())
    return run.path / "report.html"


def one_file(runs: Sequence[StoredRun], most: int = MOST) -> str:
    """The page with its script, its style and the data of these runs. Of a run with more plays, the last `most`.

    Raises `ViewError` for a `most` below 1.
    """
    if most < 1:
        raise ViewError(f"most={most}: the last plays of each run are kept, so put a number from 1 on")
    return _page(_data(runs, most))


def _page(value: dict[str, Any]) -> str:
    script, style = (PAGE / "view.js").read_text(), (PAGE / "view.css").read_text()

    def seal(text):
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    policy = f"default-src 'none'; script-src 'sha256-{seal(script)}'; style-src 'sha256-{seal(style)}'; img-src data:"
    page = (PAGE / "index.html").read_text()
    page = page.replace('<link rel="stylesheet" href="view.css">', f"<style>{style}</style>")
    page = page.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{policy}">', 1)
    data = f'<script type="application/json" id="data">{inert(value)}</script>'
    return page.replace('<script src="view.js"></script>', f"{data}<script>{script}</script>")


def inert(value: Any) -> str:
    """JSON that ends no script element, whatever its texts hold. Raises `ValueError` for NaN and infinity, which no browser reads."""
    text = json.dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(runs: Sequence[StoredRun], most: int) -> dict[str, Any]:
    data: dict[str, Any] = {"runs": answer(runs, "/api/runs", {}), "of": [], "compare": {}}
    for run in runs:
        rows = run.rows()[-most:]
        plays = {row["id"]: run.play(row["id"]) for row in rows}
        calls = {name: run.calls(name) for name in plays}
        data["of"].append({"plays": rows, "play": plays, "call": calls, "summary": summary(run, rows)})
    for a in range(len(runs)):
        for b in range(len(runs)):
            try:
                data["compare"][f"{a} {b}"] = compared(runs[a], runs[b])
            except ViewError as error:
                data["compare"][f"{a} {b}"] = {"error": str(error)}
    return data


class Inline:
    """The viewer as a notebook shows it: a frame that runs the page's script and reaches nothing around it."""

    def __init__(self, runs: Sequence[StoredRun], height: int = 640, most: int = 200):
        self._page, self._height = one_file(runs, most), height

    def _repr_html_(self) -> str:
        page = html.escape(self._page, quote=True)
        return f'<iframe sandbox="allow-scripts" style="width:100%;height:{self._height}px;border:0" srcdoc="{page}"></iframe>'

    def __repr__(self) -> str:
        return f"Inline({len(self._page):,} characters): show it in a notebook, or use `python -m marl_llm view`"


def view(*runs: files.Path, height: int = 640, most: int = 200) -> Inline:
    """Runs inline in a notebook: the last `most` plays of each. Raises `ViewError` for a directory that is no run and a `most` below 1."""
    if not runs:
        raise ViewError("view needs a run directory, e.g. marl_llm.view('runs/first')")
    return Inline([StoredRun(run) for run in runs], height, most)
