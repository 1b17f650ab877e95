"""Looks at runs: every play word by word, in a browser, in one file to send, in a terminal or in a notebook.

It reads what `marl_llm.reporting` wrote and imports no other room. `python -m marl_llm view RUN` serves the page on this machine alone;
docs/viewer.md describes the page, its keys, and the files that it reads. Names are imported on first use, so that `--help` is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marl_llm.viewing.onefile import Inline, one_file, view, write_report
    from marl_llm.viewing.runs import StoredRun, ViewError
    from marl_llm.viewing.seat import HumanSeat
    from marl_llm.viewing.server import ViewServer

_MODULE_OF = {
    "HumanSeat": "seat", "Inline": "onefile", "StoredRun": "runs", "ViewError": "runs", "ViewServer": "server", "one_file": "onefile",
    "view": "onefile", "write_report": "onefile",
}  # fmt: skip

__all__ = ["HumanSeat", "Inline", "StoredRun", "ViewError", "ViewServer", "one_file", "view", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
