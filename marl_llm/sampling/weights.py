"""What a scheduler of the engine samples from: one model's parameters, or one frozen base with the adapters of several models.

Models whose parameters carry adapters (`marl_llm.models.lora.attach`) on the very same base are served together: the base lies on the
devices once, rows of all of them decode in one program, and each row chooses its adapters (batched adapters, as in S-LoRA, arXiv
2311.03285, without its kernels). A swap then exchanges one model's adapters and leaves the rest where it is. On a CPU such a base is not
copied, but read where it lies, its layers stacked or one by one.
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

from marl_llm.models import SAMPLE, ModelConfig, compute_copy, is_stacked, use_rules
from marl_llm.models.serving import serving_copy
from marl_llm.models.sharding import path_name
from marl_llm.sampling.sequences import EngineConfig, bucket
from marl_llm.text import Tokenizer


def lies_as_served(config: ModelConfig, params: dict, mesh: Mesh | None) -> bool:
    """Whether the base under adapters is read where it lies: on one CPU device and in the compute dtype, for nobody donates it."""
    if "lora" not in params or mesh is not None or jax.default_backend() != "cpu":
        return False
    read = jax.eval_shape(functools.partial(compute_copy, config), params["base"])
    return all(x.dtype == y.dtype for x, y in zip(jax.tree.leaves(params["base"]), jax.tree.leaves(read), strict=True))


def served_stacked(config: ModelConfig, params: dict, mesh: Mesh | None) -> bool:
    """Whether the engine reads stacked layers: those of a base that is read where it lies. All others are served one by one."""
    return lies_as_served(config, params, mesh) and is_stacked(params["base"])


class Weights:
    """What one scheduler serves, and what is to take its place.

    Args:
      models: name -> parameters in any layout; several only if all carry adapters on the same base.

    Attributes:
      params: what programs read; under adapters the base, with those of all models stacked in the order of `names`.
      versions: name -> how often its parameters were exchanged.
      pending: name -> parameters that are to be served next.
    """

    def __init__(self, config: ModelConfig, models: Mapping[str, dict], mesh: Mesh | None):
        self.config, self.mesh, self.names = config, mesh, tuple(models)
        self.versions, self.pending = dict.fromkeys(models, -1), dict(models)
        first = next(iter(models.values()))
        self._adapted, self._layers_stacked = "lora" in first, served_stacked(config, first, mesh)
        self._shape = jax.eval_shape(serving_copy(config, mesh), first)
        self.params: dict | None = None
        self.swap()

    def check(self, name: str, params: dict) -> None:
        """Raises `ValueError` when parameters, in any layout, are not of this model."""
        same = self._adapted and "lora" in params and self._same_base(params)
        if len(self.names) > 1 and not same:
            raise ValueError(f"model {name!r} is adapters on a base that others share: give its adapters on that very base (`attach`)")
        if self._adapted and not same and served_stacked(self.config, params, self.mesh) != self._layers_stacked:
            raise ValueError(f"model {name!r}: its layers were given {'stacked' if self._layers_stacked else 'apart'}: give them so again")
        candidate, served = ({"lora": params["lora"]}, {"lora": self._shape["lora"]}) if same else (params, self._shape)
        with use_rules(self.mesh, SAMPLE) if self.mesh is not None else contextlib.nullcontext():
            try:
                new = jax.eval_shape(serving_copy(self.config, self.mesh), candidate)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"model {name!r}: these are no parameters of a decoder ({error!r})") from error

        def flat(tree):
            return {path_name(p): (x.shape, x.dtype) for p, x in jax.tree_util.tree_flatten_with_path(tree)[0]}

        new, old = flat(new), flat(served)
        differ = sorted(n for n in new.keys() | old if new.get(n) != old.get(n))
        wrong = [f"{n}: {new.get(n, 'missing')} instead of {old.get(n, 'nothing')}" for n in differ]
        if wrong:
            raise ValueError(f"model {name!r}: {len(wrong)} of the new parameters do not fit: {'; '.join(wrong[:4])}")

    def _same_base(self, params: dict) -> bool:
        leaves = jax.tree.leaves(params.get("base"))
        return len(leaves) == len(self._base) and all(known() is leaf for known, leaf in zip(self._base, leaves))

    def swap(self) -> None:
        """Takes what is pending.

        Whole parameters are copied, because an update may donate what it was given, and the old copy is gone before the new one is made. A
        base is read where it lies (`lies_as_served`) or copied once; new adapters take the place of old ones.
        """
        pending, self.pending = self.pending, {}
        if not self._adapted:
            if self.mesh is None:
                pending = jax.device_put(pending, jax.local_devices()[0])
            self.params = None
            (self.params,) = map(serving_copy(self.config, self.mesh), pending.values())
        elif self.params is None or not self._same_base(next(iter(pending.values()))):
            self._take_base(pending)
        else:
            for name, params in pending.items():
                lora = _exchanged(self.params["lora"], self._copied(params["lora"]), self.names.index(name))
                self.params = self.params | {"lora": lora}
        for name in pending:
            self.versions[name] += 1

    def _take_base(self, models: Mapping[str, dict]) -> None:
        """Serves a base with the adapters of all models on it."""
        self.params = None
        base = next(iter(models.values()))["base"]
        self._base = tuple(weakref.ref(leaf) for leaf in jax.tree.leaves(base))
        tree = {"base": base, "lora": {}}
        if lies_as_served(self.config, tree, self.mesh):
            served = jax.device_put(base, jax.local_devices()[0])
        else:
            served = serving_copy(self.config, self.mesh)(tree)["base"]
        adapters = [self._copied(params["lora"]) for params in models.values()]
        self.params = {"base": served, "lora": jax.jit(_together)(adapters)}

    def _copied(self, adapters: dict) -> dict:
        """One model's adapters, laid out as the base."""
        copy = _stacked_copy(self.config) if self._layers_stacked else serving_copy(self.config, self.mesh)
        return copy({"lora": adapters})["lora"]


@functools.lru_cache(32)
def _stacked_copy(config: ModelConfig) -> Callable[[dict], dict]:
    """`serving_copy` of stacked layers, which stay so."""
    return jax.jit(functools.partial(compute_copy, config))


def _together(adapters: list[dict]) -> dict:
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=-3), *adapters)


@functools.partial(jax.jit, donate_argnums=0)
def _exchanged(stacked: dict, new: dict, index) -> dict:
    return jax.tree.map(lambda all_, leaf: all_.at[..., index, :, :].set(leaf[..., 0, :, :]), stacked, new)


def grouped(
    models: Mapping[str, tuple[ModelConfig, dict]],
    sizes: Callable[[str], EngineConfig],
    tokenizers: Mapping[str, Tokenizer],
) -> list[tuple[dict[str, dict], ModelConfig, EngineConfig, Tokenizer | None]]:
    """Which models share a scheduler: those of one shape and size that carry one pair of adapters each on the same `base` object.

    A common scheduler has the slots and the bytes of its models together.
    """
    groups: dict[tuple, list[str]] = {}
    for name, (config, params) in models.items():
        alone = "lora" not in params or len({x.shape[-3] for x in jax.tree.leaves(params["lora"])} - {1}) > 0
        key = (name,) if alone else (id(params["base"]), config, sizes(name), id(tokenizers.get(name)), _shape(params["lora"]))
        groups.setdefault(key, []).append(name)
    out = []
    for names in groups.values():
        config, size, count = models[names[0]][0], sizes(names[0]), len(names)
        if count > 1:
            max_num_seqs = bucket(size.max_num_seqs * count) if size.batch_invariant else size.max_num_seqs * count
            size = dataclasses.replace(size, max_num_seqs=max_num_seqs, cache_bytes=size.cache_bytes * count)
        out.append(({name: models[name][1] for name in names}, config, size, tokenizers.get(names[0])))
    return out


def _shape(tree: dict) -> tuple:
    return tuple((path_name(path), x.shape) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0])
