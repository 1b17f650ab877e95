"""Memory and time of a config on a machine that is not there (`programs`), or on this one (`this_machine`)."""

from marl_llm.planning.plans import plan
from marl_llm.planning.programs import PlanSizes

__all__ = ["PlanSizes", "plan"]
