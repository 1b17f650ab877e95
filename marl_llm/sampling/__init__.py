"""First floor: drawing tokens, the compiled sampler, and the engine that serves many requests at once.

Names are imported on first use, so that rooms which only speak of requests need no JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Completion": "requests",
    "Generator": "requests",
    "Request": "requests",
    "RequestError": "requests",
    "Settings": "requests",
    "Drawn": "draws",
    "RowSettings": "draws",
    "draw": "draws",
    "identity_key": "draws",
    "inverse_cdf": "draws",
    "kept": "draws",
    "pick_by_identity": "draws",
    "random_pick": "draws",
    "StopRule": "stops",
    "stop_rule": "stops",
    "Responses": "sampler",
    "sample": "sampler",
    "LaneConfig": "tickets",
    "Engine": "engine",
    "EngineError": "engine",
    "Handle": "engine",
    "Samplers": "vllm",
    "VllmSampler": "vllm",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
