"""First floor: the jit-compiled sampler. Knows models."""

from marl_llm.sampling.sampler import Responses, draw, sample

__all__ = ["Responses", "draw", "sample"]
