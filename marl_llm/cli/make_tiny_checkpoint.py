"""Writes a small checkpoint with random weights in Hugging Face's form, so that everything that is meant for real ones runs on a laptop.

    python -m marl_llm tiny --out=tiny                                                # Qwen3's shape, 2 layers, width 64
    python -m marl_llm tiny --out=tiny --family=qwen2 --layers=4 --width=128 --feed_forward=384

The directory holds what a real one does: `config.json`, `model.safetensors`, `tokenizer.json` (byte-level BPE that splits as Qwen's,
trained on this library's own sources), `tokenizer_config.json` and `generation_config.json`; no chat template, so that the chat's form
follows from the special tokens. It is random: a chat with it is noise. Needs the extra `hf`. Then, for example:

    python -m experiments.train --config=experiments/configs/search_parallel.py:full --config.model.path=tiny ...
    python -m marl_llm chat --path=tiny
"""

from __future__ import annotations

import pathlib

from absl import flags, logging

from marl_llm.cli.tiny import FAMILIES, make
from marl_llm.runs.command import ConfigError

FLAGS = flags.FlagValues()
_OUT = flags.DEFINE_string("out", None, "Directory to write; must not exist, or be empty.", flag_values=FLAGS)
_FAMILY = flags.DEFINE_enum("family", "qwen3", FAMILIES, "Architecture; qwen3's chat can think.", flag_values=FLAGS)
_LAYERS = flags.DEFINE_integer("layers", 2, "Decoder layers.", lower_bound=1, flag_values=FLAGS)
_WIDTH = flags.DEFINE_integer("width", 64, "Of the residual stream.", lower_bound=2, flag_values=FLAGS)
_HEADS = flags.DEFINE_integer("heads", 4, "Query heads.", lower_bound=1, flag_values=FLAGS)
_KEY_VALUE_HEADS = flags.DEFINE_integer("key_value_heads", 2, "Divides --heads.", lower_bound=1, flag_values=FLAGS)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 16, "Even.", lower_bound=2, flag_values=FLAGS)
_FEED_FORWARD = flags.DEFINE_integer("feed_forward", 160, "Width of the dense layer.", lower_bound=1, flag_values=FLAGS)
_VOCABULARY = flags.DEFINE_integer("vocabulary", 1024, "Tokens, special ones included.", lower_bound=300, flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of the weights.", flag_values=FLAGS)


def main(argv) -> None:
    """Flags to `make`."""
    logging.set_verbosity(logging.WARNING)
    if not _OUT.value:
        raise ConfigError("--out is missing, e.g. --out=tiny")
    sizes = dict(layers=_LAYERS.value, width=_WIDTH.value, query_heads=_HEADS.value, key_value_heads=_KEY_VALUE_HEADS.value)
    sizes |= dict(head_dim=_HEAD_DIM.value, feed_forward=_FEED_FORWARD.value)
    print(make(pathlib.Path(_OUT.value), _FAMILY.value, _VOCABULARY.value, _SEED.value, **sizes))
