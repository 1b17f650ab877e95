"""First floor: drawing tokens, the compiled sampler, and the engine that serves many requests at once.

Names are imported on first use, so that rooms which only speak of requests need no JAX.
"""

from __future__ import annotations

import importlib
from typing import Any

from marl_llm.old_names import ENGINE_NAMES

_EXPORTS = {
    "Completion": "requests",
    "Generator": "requests",
    "Request": "requests",
    "RequestError": "requests",
    "SamplingParams": "requests",
    "SampledToken": "token_sampling",
    "RowSamplingParams": "token_sampling",
    "sample_token": "token_sampling",
    "identity_key": "token_sampling",
    "inverse_cdf": "token_sampling",
    "kept": "token_sampling",
    "pick_by_identity": "token_sampling",
    "random_pick": "token_sampling",
    "StopRule": "stops",
    "stop_rule": "stops",
    "Responses": "sampler",
    "sample": "sampler",
    "EngineConfig": "sequences",
    "Engine": "engine",
    "EngineError": "engine",
    "Handle": "engine",
    "Samplers": "vllm",
    "VllmSampler": "vllm",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in ENGINE_NAMES:
        raise AttributeError(f"marl_llm.sampling.{name} is called {ENGINE_NAMES[name]} now")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_EXPORTS))}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
