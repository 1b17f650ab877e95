"""Ground floor: Qwen3-style decoders in Flax linen, and the scoring of packed rows."""

from marl_llm.models.config import PRESETS, ModelConfig, make_model_config
from marl_llm.models.packed import Scores, prompt_mask, prompt_positions, score_responses, tree_mask
from marl_llm.models.transformer import BranchCache, Decoder, init_params

__all__ = [
    "PRESETS",
    "BranchCache",
    "Decoder",
    "ModelConfig",
    "Scores",
    "init_params",
    "make_model_config",
    "prompt_mask",
    "prompt_positions",
    "score_responses",
    "tree_mask",
]
