"""Teams of language models, trained with reinforcement learning in JAX.

The package root imports nothing heavy: `import marl_llm` is instant, and each room is imported by name,
for example `from marl_llm.algorithms import group_relative`. See docs/architecture.md for the rooms.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_ROOMS = ("activity", "algorithms", "checking", "cli", "coaching", "data_files", "errors", "evaluation", "games", "hints", "local_server",
          "models", "planning", "reporting", "rollout", "runs", "sampling", "serving", "text", "tools", "training", "untrusted", "viewing",
          "workflows")  # fmt: skip
__all__ = [*_ROOMS, "view"]


def __getattr__(name: str) -> Any:
    """A room, imported when it is first asked for (PEP 562): `marl_llm.algorithms.group_relative` needs no import of its own."""
    if name in _ROOMS:
        return importlib.import_module(f"marl_llm.{name}")
    raise AttributeError(f"module 'marl_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_ROOMS])


def view(*runs, **options):
    """Runs inline in a notebook, e.g. `marl_llm.view("runs/first")`; see `marl_llm.viewing.view`."""
    from marl_llm.viewing import view as inline

    return inline(*runs, **options)
