"""Teams of language models, trained with reinforcement learning in JAX.

`make_game`, `load_model`, `train`, `attach`, `resume`, `evaluate` and `open_team` do from Python what the command `marl`
does (`marl_llm.runs.api`). The package root imports nothing heavy: `import marl_llm` is instant, and each room is imported by name,
for example `from marl_llm.algorithms import group_relative`. See docs/architecture.md for the rooms.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
_ROOMS = ("activity", "algorithms", "checking", "cli", "coaching", "data_files", "errors", "evaluation", "games", "hints", "local_server",
          "old_names",
          "models", "planning", "reporting", "rollout", "runs", "sampling", "serving", "text", "tools", "training", "untrusted", "viewing",
          "workflows")  # fmt: skip
# functions, and the modules that hold them
_FUNCTIONS = {
    "train": "runs.api", "resume": "runs.api", "evaluate": "runs.api", "load_model": "runs.api", "open_team": "runs.api",
    "attach": "runs.attach",
    "make_game": "games",
    "Reward": "workflows",
    "view": "viewing",
}  # fmt: skip
__all__ = [*_ROOMS, *_FUNCTIONS]


def __getattr__(name: str) -> Any:
    """A room or a function, imported when it is first asked for (PEP 562)."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f"marl_llm.{_FUNCTIONS[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"marl_llm.{name}")
    raise AttributeError(f"module 'marl_llm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

