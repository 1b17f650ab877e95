"""What an update changes of a model: its parameters and its optimizer's state, one pytree per model, on one mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Real

from marl_llm.algorithms._arrays import check_choice
from marl_llm.models import ModelConfig, init_params
from marl_llm.models.sharding import path_name


class TrainState(NamedTuple):
    """One model in training."""

    params: dict
    opt_state: optax.OptState


def decayed(params: dict) -> dict:
    """Which leaves weight decay falls on, a pytree of booleans: the matrices of layers, heads and adapters. Also a mask for optax's own.

    Norm scales, biases and embeddings are left out, as in big_vision and Hugging Face's trainer: decay would pull a scale from 1 and the
    vectors of rare tokens, and a head that shares them, to 0. An adapter's matrices are decayed, as by PEFT with AdamW: that pulls
    towards the frozen base.
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: not any(_undecayed(str(getattr(key, "key", key))) for key in path), params)


def _undecayed(name: str) -> bool:
    return name.endswith(("norm", "bias", "embedding"))


def _add_decay(weight_decay: float, updates: dict, params: dict) -> dict:
    """Updates with the decayed weights. Without a state, so that checkpoints of before there was a mask are read as they are."""
    return jax.tree.map(lambda u, p, decays: u + weight_decay * p if decays else u, updates, params, decayed(params))


@functools.lru_cache(64)
def make_optimizer(max_grad_norm: float = 1.0, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0, name: str = "adamw"):
    """An optimizer after clipping by global norm, at the learning rate 1: a loop that has a schedule passes the rate to `apply_gradient`.

    `weight_decay` falls on the matrices that `decayed` names. `name` is "adamw", "muon" or "adafactor".
    Equal arguments give the same object, so that models which are updated alike share compiled programs. Raises `ValueError` for an
    unknown name.
    """
    makers = {"adamw": _adam, "muon": _muon, "adafactor": _adafactor}
    check_choice("name", name, makers)
    return optax.chain(
        optax.stateless(functools.partial(_clip, max_grad_norm)),
        makers[name](b1, b2),
        optax.stateless(functools.partial(_add_decay, weight_decay)),
        optax.scale(-1.0),
    )


def state_bytes(optimizer: optax.GradientTransformation, params: dict) -> int:
    """Bytes of an optimizer's arrays beside parameters, which may be arrays or `jax.ShapeDtypeStruct`s, and are float32 in training."""
    state = jax.eval_shape(functools.partial(make_train_state, optimizer=optimizer), params).opt_state
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.ndim)


def _clip(most: float, gradient: dict, _: dict | None) -> dict:
    """A gradient whose global norm is at most `most`: as `optax.clip_by_global_norm`, in a form that XLA reads along and never stores."""
    scale = jnp.minimum(1.0, most / optax.tree.norm(gradient))
    return jax.tree.map(lambda g: g * scale, gradient)


def _adam(b1: float, b2: float, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015, algorithm 1), whose step is made from the moments that are kept.

    Made from new ones that are then kept or not, XLA on CPUs has copies of the old moments meanwhile: 4 bytes per parameter and more.
    """

    def step(state: optax.ScaleByAdamState) -> dict:
        mean = optax.tree.bias_correction(state.mu, b1, state.count)
        square = optax.tree.bias_correction(state.nu, b2, state.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square)

    return _kept_if_finite(optax.scale_by_adam(b1=b1, b2=b2), step)


def _muon(b1: float, b2: float) -> optax.GradientTransformation:
    """Muon for the matrices of layers and adapters, Adam for all else (Jordan 2024; Liu et al., arXiv 2502.16982, Algorithm 1).

    m ← .95 m + .05 g; the step is the Nesterov momentum, orthogonalised by five Newton-Schulz iterations, times .2 √max(in, out), so that
    it is as long as one of Adam's and both go with one learning rate. Heads of an attention are one matrix; experts are one each. State:
    one float32 moment of these matrices.
    """
    muon = optax.contrib.muon(1.0, adam_b1=b1, adam_b2=b2, consistent_rms=0.2, muon_weight_dimension_numbers=_muon_axes)
    return _kept_if_finite(optax.chain(muon, optax.scale(-1.0)))


def _muon_axes(params: dict) -> dict:
    """Per leaf the input and output axes of its matrix, counted from the end, or None where Adam steps."""

    def axes(path, leaf) -> optax.contrib.MuonDimensionNumbers | None:
        names = path_name(path).split("/")
        if leaf.ndim < 2 or names[-1] == "output" or any(map(_undecayed, names)):
            return None
        if names[-1] == "kernel" and names[-2] in ("query", "key", "value"):
            return optax.contrib.MuonDimensionNumbers(-3, (-2, -1))
        if names[-2:] == ["output", "kernel"]:
            return optax.contrib.MuonDimensionNumbers((-3, -2), -1)
        return optax.contrib.MuonDimensionNumbers(-2, -1)

    return jax.tree_util.tree_map_with_path(axes, params)


def _adafactor(b1: float, b2: float) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern, arXiv 1804.04235, Algorithm 4) without momentum and at an absolute learning rate; reads no b1 and b2.

    The second moments of a matrix are the means of its rows and of its columns, so a model's take 1 % of its parameters' bytes; the decay
    is 1 − t^−0.8, and a leaf's step has root mean square 1 at most. Leaves without two axes of 32 or more keep whole moments.
    """
    del b1, b2
    return _kept_if_finite(optax.chain(optax.scale_by_factored_rms(min_dim_size_to_factor=32), optax.clip_by_block_rms(1.0)))


def _kept_if_finite(
    optimizer: optax.GradientTransformation, step: Callable[[optax.OptState], dict] | None = None
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose state a gradient that is not finite leaves as it was; `step` makes the updates of the state that is kept."""

    def update(gradient: dict, old: optax.OptState, params: dict | None = None, *, finite: Bool[Array, ""] | bool = True, **_):
        updates, new = optimizer.update(gradient, old, params)
        state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        return step(state) if step else updates, state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


@functools.lru_cache(1)
def make_plain_optimizer():
    """A step against the gradient, without memory, as long as one of Adam's at the same learning rate where all of its terms agree: √n for
    n parameters. For steps now and then beside those of another optimizer, whose moments it must not change."""

    def update(gradient, state, params=None):
        size = sum(x.size for x in jax.tree.leaves(gradient))
        scale = jnp.sqrt(size) / jnp.maximum(optax.tree.norm(gradient), 1e-30)
        return jax.tree.map(lambda x: x * -scale, gradient), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_train_state(params: dict, optimizer: optax.GradientTransformation) -> TrainState:
    """A model at the start of its training: a copy of the parameters and a fresh optimizer state, both float32 whatever the parameters'
    dtype and the model's `compute_dtype`.

    A step of 1e-6 is lost in bfloat16, whose neighbours of 1 lie 1/128 apart; the model rounds to its compute dtype where it multiplies.
    """
    def wide(x):
        return jnp.array(x, jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else None, copy=True)

    params = jax.tree.map(wide, params)
    return TrainState(params, optimizer.init(params))


def fresh_train_state(config: ModelConfig, key: jax.Array, optimizer: optax.GradientTransformation) -> TrainState:
    """A model with random parameters at the start of its training. `key` is consumed."""
    return make_train_state(init_params(config, key), optimizer)


def apply_gradient(
    state: TrainState, gradient: dict, learning_rate: Float[Array, ""] | float, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Float[Array, ""]]:
    """One optimizer step; returns the new state and the gradient's global norm before clipping.

    The optimizer is any of optax's: its updates, times `learning_rate`, are added to the parameters. One that has a rate of its own, such
    as `optax.adamw(1e-6)`, goes with `learning_rate=1`.

    A gradient that is not finite leaves the parameters as they were: the norm comes back non-finite and the loop stops with an error
    (law 10). Moments are left by `make_optimizer`'s too; another optimizer does that with `optax.apply_if_finite`.
    """
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(norm)
    updates, opt_state = optax.with_extra_args_support(optimizer).update(gradient, state.opt_state, state.params, finite=finite)
    stepped = optax.apply_updates(state.params, jax.tree.map(lambda u: learning_rate * u, updates))
    return TrainState(jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, state.params), opt_state), norm


def decay_share(schedule: str, done: Real[Array, ""] | float, cooldown: float = 0.2) -> Real[Array, ""] | float:
    """Share of the way from peak to floor that a learning rate has fallen, when a share `done` of the steps since the warm-up is done.

    "cosine": Loshchilov & Hutter, arXiv 1608.03983, Eq. 5. "wsd" (warmup-stable-decay: Hu et al., arXiv 2404.06395; Hägele et al., arXiv
    2405.18392) falls linearly over the last share `cooldown` of the steps. Raises `ValueError` for an unknown schedule.

    >>> float(decay_share("wsd", 0.75, cooldown=0.5))
    0.5
    """
    check_choice("schedule", schedule, ("constant", "linear", "cosine", "wsd"))
    if schedule == "linear":
        return done
    if schedule == "cosine":
        return (1 - jnp.cos(jnp.pi * done)) / 2
    return jnp.maximum(0.0, 1 - (1 - done) / cooldown) if schedule == "wsd" else 0 * done


def scheduled_rate(
    decay: Callable[[Array], Array], step: Real[Array, ""] | int | float, total: int, peak: float, warmup: int = 0, floor: float = 0.0
) -> Float[Array, ""]:
    """Learning rate at a step: linear warm-up over `warmup` steps to `peak`, then by `decay`, a `decay_share`, to `floor * peak`."""
    step = jnp.asarray(step, jnp.float32)
    up = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
    down = 1.0 - (1.0 - floor) * decay(jnp.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0))
    return peak * up * down


def linear_decay(
    step: Real[Array, ""] | int | float, total: int, peak: float, warmup: int = 0, floor: float = 0.0
) -> Float[Array, ""]:
    """Learning rate: linear warm-up over `warmup` steps, then linear decay to `floor * peak` at `total`."""
    return scheduled_rate(functools.partial(decay_share, "linear"), step, total, peak, warmup, floor)
