"""What a run is: its options, the team that is built from them, its directory, resuming, stopping, and what is measured in it."""

import importlib
from typing import Any

_PLACES = {
    "base_config": "base", "resolve": "resolve", "Plan": "resolve", "opened": "building",
    "ConfigError": "command", "TrainingError": "command",
    "read_config": "workdir", "read_record": "workdir",
}  # fmt: skip
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """A public name, whose module is imported when it is first asked for (PEP 562): reading flags imports no JAX."""
    if name not in _PLACES:
        raise AttributeError(f"module 'marl_llm.runs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"marl_llm.runs.{_PLACES[name]}"), name)
