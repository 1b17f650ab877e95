"""First floor: drawing tokens, the compiled sampler, and the engine that serves many requests at once."""

from marl_llm.sampling.draw import Drawn, RowSettings, draw, inverse_cdf, kept
from marl_llm.sampling.engine import Engine, EngineError, Handle
from marl_llm.sampling.lane import LaneConfig
from marl_llm.sampling.requests import Completion, Generator, Request, RequestError, Settings
from marl_llm.sampling.sampler import Responses, sample
from marl_llm.sampling.stops import StopRule, stop_rule

__all__ = [
    "Completion",
    "Drawn",
    "Engine",
    "EngineError",
    "Generator",
    "Handle",
    "LaneConfig",
    "Request",
    "RequestError",
    "Responses",
    "RowSettings",
    "Settings",
    "StopRule",
    "draw",
    "inverse_cdf",
    "kept",
    "sample",
    "stop_rule",
]
