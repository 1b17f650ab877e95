"""What a lane of the engine samples from: one model's parameters, or one frozen base with the adapters of several models.

Models whose parameters carry adapters (`marl_llm.models.lora.attach`) on the very same base are served together: the base lies on the
devices once, rows of all of them decode in one program, and each row chooses its adapters (batched adapters, as in S-LoRA, arXiv
2311.03285, without its kernels). A swap then exchanges one model's adapters and leaves the rest where it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from marl_llm.models import SAMPLE, ModelConfig, use_rules
from marl_llm.models.serving import serving_copy
from marl_llm.models.sharding import path_name
from marl_llm.sampling.tickets import LaneConfig, bucket
from marl_llm.text import Tokenizer


class Weights:
    """The serving copy of one lane, and what is to take its place.

    Args:
      models: name -> parameters in any layout; several only if all carry adapters on the same base.

    Attributes:
      params: what programs read; of several models, the base with all adapters stacked in the order of `names`.
      versions: name -> how often its parameters were exchanged.
      pending: name -> parameters that are to be served next.
    """

    def __init__(self, config: ModelConfig, models: Mapping[str, dict], mesh: Mesh | None):
        self.config, self.mesh, self.names = config, mesh, tuple(models)
        self.versions, self.pending = dict.fromkeys(models, -1), dict(models)
        self.params: dict | None = None
        self.swap()

    @property
    def together(self) -> bool:
        """Whether several models' adapters lie on one base."""
        return len(self.names) > 1

    def check(self, name: str, params: dict) -> None:
        """Raises `ValueError` when parameters, in any layout, are not of this model."""
        if self.together and ("lora" not in params or not self._same_base(params)):
            raise ValueError(f"model {name!r} is adapters on a base that others share: give its adapters on that very base (`attach`)")
        given = {"lora": params["lora"]} if self.together else params
        with use_rules(self.mesh, SAMPLE) if self.mesh is not None else contextlib.nullcontext():
            try:
                new = jax.eval_shape(serving_copy(self.config, self.mesh), given)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"model {name!r}: these are no parameters of a decoder ({error!r})") from error
        flat = lambda tree: {path_name(p): (x.shape, x.dtype) for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}  # noqa: E731
        new, old = flat(new), flat(self._shape)
        differ = sorted(n for n in new.keys() | old if new.get(n) != old.get(n))
        wrong = [f"{n}: {new.get(n, 'missing')} instead of {old.get(n, 'nothing')}" for n in differ]
        if wrong:
            raise ValueError(f"model {name!r}: {len(wrong)} of the new parameters do not fit: {'; '.join(wrong[:4])}")

    def _same_base(self, params: dict) -> bool:
        leaves = jax.tree.leaves(params.get("base"))
        return len(leaves) == len(self._base) and all(known() is leaf for known, leaf in zip(self._base, leaves))

    def swap(self) -> None:
        """Takes what is pending.

        What is served is a copy in the compute dtype, because an update may donate what it was given; the old copy of a whole model is gone
        before the new one is made.
        """
        pending, self.pending = self.pending, {}
        if self.mesh is None:
            pending = jax.device_put(pending, jax.local_devices()[0]) if not self.together else pending
        copy = serving_copy(self.config, self.mesh)
        if not self.together:
            self.params = None
            (self.params,) = map(copy, pending.values())
            self._shape = jax.eval_shape(lambda x: x, self.params)
        elif self.params is None:
            first, *others = pending.values()
            self._base = tuple(weakref.ref(leaf) for leaf in jax.tree.leaves(first["base"]))
            served = copy({"base": first["base"], "lora": first["lora"]})
            adapters = [served["lora"], *(copy({"lora": params["lora"]})["lora"] for params in others)]
            self._shape = jax.eval_shape(lambda x: {"lora": x}, served["lora"])
            self.params = served | {"lora": jax.jit(_stacked)(adapters)}
        else:
            for name, params in pending.items():
                lora = _exchanged(self.params["lora"], copy({"lora": params["lora"]})["lora"], self.names.index(name))
                self.params = self.params | {"lora": lora}
        for name in pending:
            self.versions[name] += 1


def _stacked(adapters: list[dict]) -> dict:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *adapters)


@functools.partial(jax.jit, donate_argnums=0)
def _exchanged(stacked: dict, new: dict, index) -> dict:
    return jax.tree.map(lambda all_, one: all_.at[index].set(one[0]), stacked, new)


def grouped(
    models: Mapping[str, tuple[ModelConfig, dict]],
    sizes: Callable[[str], LaneConfig],
    tokenizers: Mapping[str, Tokenizer],
) -> list[tuple[dict[str, dict], ModelConfig, LaneConfig, Tokenizer | None]]:
    """Which models share a lane: those of one shape and size that carry one pair of adapters each on the same `base` object.

    A common lane has the slots and the bytes of its models together.
    """
    found: dict[tuple, list[str]] = {}
    for name, (config, params) in models.items():
        alone = "lora" not in params or len({x.shape[-3] for x in jax.tree.leaves(params["lora"])} - {1}) > 0
        key = (name,) if alone else (id(params["base"]), config, sizes(name), id(tokenizers.get(name)), _shape(params["lora"]))
        found.setdefault(key, []).append(name)
    out = []
    for names in found.values():
        config, size, count = models[names[0]][0], sizes(names[0]), len(names)
        if count > 1:
            slots = bucket(size.slots * count) if size.exact else size.slots * count
            size = dataclasses.replace(size, slots=slots, cache_bytes=size.cache_bytes * count)
        out.append(({name: models[name][1] for name in names}, config, size, tokenizers.get(names[0])))
    return out


def _shape(tree: dict) -> tuple:
    return tuple((path_name(path), x.shape) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0])
