"""Which tensors of a Hugging Face checkpoint make up which leaf of our pytree, and how they lie in it.

A leaf `[lead..., body...]` is made of one tensor per point of its lead axes (layers, experts). A torch matrix is `[out, in]`; ours are
`[in, out]` with heads as axes of their own.
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

import numpy as np

from marl_llm.models.config import ModelConfig
from marl_llm.models.tensor_files import Entry, TensorInfo, read_into

# the end of our path -> (name in a layer, what becomes of the tensor)
LAYER = {
    "attention_norm/weight": ("input_layernorm.weight", "same"),
    "feed_forward_norm/weight": ("post_attention_layernorm.weight", "same"),
    "attention/query_norm/weight": ("self_attn.q_norm.weight", "same"),
    "attention/key_norm/weight": ("self_attn.k_norm.weight", "same"),
    **{
        f"attention/{ours}/{leaf}": (f"self_attn.{theirs}_proj.{'weight' if leaf == 'kernel' else 'bias'}", how)
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"))
        for leaf, how in (("kernel", "heads_out"), ("bias", "heads_bias"))
    },
    "attention/output/kernel": ("self_attn.o_proj.weight", "heads_in"),
    "attention/output/bias": ("self_attn.o_proj.bias", "same"),
    **{f"{x}/kernel": (f"mlp.{x}_proj.weight", "transposed") for x in ("gate", "up", "down")},
    **{f"{x}/bias": (f"mlp.{x}_proj.bias", "same") for x in ("gate", "up", "down")},
    "experts/router": ("mlp.gate.weight", "transposed"),
    **{f"experts/{x}": ("mlp.experts.{x}." + f"{x}_proj.weight", "transposed") for x in ("gate", "up", "down")},
}
# of a layer with `post_norms`: Gemma calls the norm behind attention as others call the one before the feed-forward
FOUR_NORMS = {
    "attention_post_norm/weight": ("post_attention_layernorm.weight", "same"),
    "feed_forward_norm/weight": ("pre_feedforward_layernorm.weight", "same"),
    "feed_forward_post_norm/weight": ("post_feedforward_layernorm.weight", "same"),
}
_TOP = {
    "embedding": ("model.embed_tokens.weight", "same"),
    "final_norm/weight": ("model.norm.weight", "same"),
    "output": ("lm_head.weight", "transposed"),
    "value_head/kernel": ("value_head.kernel", "same"),
    "value_head/bias": ("value_head.bias", "scalar"),
}


def ignored(name: str) -> bool:
    """Buffers that old exporters wrote and that hold nothing learned, and what Gemma 3 sees images with."""
    return name.endswith("rotary_emb.inv_freq") or re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", name) is not None


def without_images(name: str) -> str:
    """A tensor's name where a model sees no images; those that do call their language model in two ways.

    >>> without_images("language_model.model.norm.weight"), without_images("model.language_model.norm.weight")
    ('model.norm.weight', 'model.norm.weight')
    """
    return re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name).removeprefix("language_model.")


class Weight(NamedTuple):
    """A leaf and the tensors that it is made of, in the order of its lead axes."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of the leaf
    lead: int  # number of lead axes
    how: str
    optional: bool

    @property
    def body(self) -> tuple[int, ...]:
        """Shape of one tensor in our layout."""
        return self.shape[self.lead :]

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one tensor in the file."""
        b = self.body
        return {
            "same": b,
            "scalar": (1,),
            "transposed": b[::-1],
            "heads_out": (b[1] * b[2], b[0]) if len(b) == 3 else (),
            "heads_in": (b[2], b[0] * b[1]) if len(b) == 3 else (),
            "heads_bias": (b[0] * b[1],) if len(b) == 2 else (),
        }[self.how]

    def fill(self, host: np.ndarray, bounds: tuple[tuple[int, int], ...], tensors: dict[str, TensorInfo]) -> None:
        """Reads the part `bounds` (start, stop per axis) of the leaf into `host`."""
        lead, body = bounds[: self.lead], bounds[self.lead :]
        sizes = self.shape[: self.lead]
        for at in itertools.product(*(range(*b) for b in lead)):
            name = self.names[int(np.ravel_multi_index(at, sizes)) if sizes else 0]
            self._fill_one(host[(*(i - b[0] for i, b in zip(at, lead, strict=True)), ...)], body, tensors[name])

    def _fill_one(self, out: np.ndarray, bounds, info: TensorInfo) -> None:
        cut = [slice(*b) for b in bounds]
        if self.how == "scalar":
            value = np.empty((1,), out.dtype)
            read_into(value, info, slice(0, 1), slice(None))
            out[...] = value[0]
        elif self.how == "same":
            read_into(out, info, cut[0], cut[1] if len(cut) > 1 else slice(None))
        elif self.how == "transposed":
            read_into(out, info, cut[1], cut[0], transpose=True)
        else:
            heads, within = (1, 2) if self.how == "heads_out" else (0, 1)
            size = self.body[within]
            if bounds[within] != (0, size):
                raise ValueError("a head's own dimension is never split; the rule table must leave it whole")
            flat = slice(bounds[heads][0] * size, bounds[heads][1] * size)
            if self.how == "heads_bias":
                read_into(out.reshape(-1), info, flat, slice(None))
            elif self.how == "heads_out":  # [H d, D] -> [D, H, d]
                read_into(out.reshape(out.shape[0], -1), info, flat, cut[0], transpose=True)
            else:  # [D, H d] -> [H, d, D]
                read_into(out.reshape(-1, out.shape[2]), info, cut[2], flat, transpose=True)

    def entries(self, leaf) -> dict[str, Entry]:
        """What to write for a leaf: one entry per tensor, each fetched from the devices when its turn comes."""
        sizes = self.shape[: self.lead]
        out = {}
        for at, name in zip(np.ndindex(*sizes), self.names, strict=True):
            out[name] = Entry(self.file_shape, lambda at=at: self._to_file(np.asarray(leaf[at] if at else leaf)))
        return out

    def _to_file(self, x: np.ndarray) -> np.ndarray:
        if self.how == "transposed":
            return x.T
        if self.how == "heads_out":
            return x.reshape(x.shape[0], -1).T
        if self.how == "heads_in":
            return x.reshape(-1, x.shape[2]).T
        return x.reshape(self.file_shape)


def weight_of(path: str, shape: tuple[int, ...], config: ModelConfig) -> Weight:
    """The tensors of the leaf at `path`, of either layout. Raises `ValueError` for a leaf that no checkpoint has."""
    if path in _TOP:
        name, how = _TOP[path]
        return Weight((name,), shape, 0, how, optional=path.startswith("value_head"))
    in_layer, in_stack = re.fullmatch(r"block_(\d+)/(.+)", path), re.fullmatch(r"blocks/block/(.+)", path)
    end = in_layer.group(2) if in_layer else in_stack.group(1) if in_stack else None
    names_of = LAYER | FOUR_NORMS if config.post_norms else LAYER
    if end not in names_of:
        raise ValueError(f"parameter {path!r} has no place in a Hugging Face checkpoint")
    name, how = names_of[end]
    layers = [int(in_layer.group(1))] if in_layer else range(config.layers)
    experts = range(config.experts) if "{x}" in name else [None]
    names = tuple(f"model.layers.{y}." + name.replace("{x}", str(x)) for y in layers for x in experts)
    return Weight(names, shape, (0 if in_layer else 1) + (1 if "{x}" in name else 0), how, optional=False)
