"""Looks at runs: every play word by word, in a browser, in one file to send, in a terminal or in a notebook.

It reads what `marl_llm.reporting` wrote and imports no other room. `python -m marl_llm view RUN` serves the page on this machine alone;
docs/viewer.md describes the page, its keys, and the files that it reads.
"""

from marl_llm.viewing.onefile import Inline, one_file, view
from marl_llm.viewing.runs import StoredRun, ViewError
from marl_llm.viewing.server import ViewServer

__all__ = ["Inline", "StoredRun", "ViewError", "ViewServer", "one_file", "view"]
