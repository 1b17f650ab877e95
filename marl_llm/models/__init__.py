"""Ground floor: Qwen- and Llama-style decoders in Flax linen, their layouts, shardings, adapters and files, and the scoring of rows."""

from marl_llm.models.attention import for_platform, self_attention
from marl_llm.models.cache import BranchCache, DecodeMask, to_cache
from marl_llm.models.config import ModelConfig, RopeScaling
from marl_llm.models.huggingface import load_pretrained, read_config, save_pretrained
from marl_llm.models.log_probs import TokenScores, head_weight, log_prob_gap_bound, log_probs, score_hidden, split_adapters
from marl_llm.models.lora import LoraConfig, attach, attach_many, init_adapters, load_adapters, merge, save_adapters
from marl_llm.models.masks import RowMask, outside_vocabulary, packed_mask, prompt_mask, prompt_positions, tree_mask
from marl_llm.models.packed import Scores, score_packed, score_responses
from marl_llm.models.pages import PagedCache, PagedMask, PageList, Pages, PageTable, PrefixMask
from marl_llm.models.presets import PRESETS, make_model_config
from marl_llm.models.serving import compute_copy, is_serving, serving_copy, serving_layout
from marl_llm.models.sharding import REPLICATED, RULES, SAMPLE, TRAIN, constrain, constrain_params, param_shardings, place, use_rules
from marl_llm.models.tensor_files import CheckpointFileError
from marl_llm.models.transformer import Decoder, init_params, is_stacked, stack_layers, unstack_layers

__all__ = [
    "PRESETS",
    "REPLICATED",
    "RULES",
    "SAMPLE",
    "TRAIN",
    "BranchCache",
    "CheckpointFileError",
    "DecodeMask",
    "Decoder",
    "LoraConfig",
    "ModelConfig",
    "PageList",
    "PageTable",
    "PagedCache",
    "PagedMask",
    "Pages",
    "PrefixMask",
    "RopeScaling",
    "RowMask",
    "Scores",
    "TokenScores",
    "attach",
    "attach_many",
    "compute_copy",
    "constrain",
    "constrain_params",
    "for_platform",
    "head_weight",
    "init_adapters",
    "init_params",
    "is_serving",
    "is_stacked",
    "load_adapters",
    "load_pretrained",
    "log_prob_gap_bound",
    "log_probs",
    "make_model_config",
    "merge",
    "outside_vocabulary",
    "packed_mask",
    "param_shardings",
    "place",
    "prompt_mask",
    "prompt_positions",
    "read_config",
    "save_adapters",
    "save_pretrained",
    "score_hidden",
    "score_packed",
    "score_responses",
    "self_attention",
    "serving_copy",
    "serving_layout",
    "split_adapters",
    "stack_layers",
    "to_cache",
    "tree_mask",
    "unstack_layers",
    "use_rules",
]
