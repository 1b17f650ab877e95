"""What an update changes of a model: its parameters and its optimizer's state, one pytree per model, on one mesh."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Real

from marl_llm.models import ModelConfig, init_params


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
def make_optimizer(max_grad_norm: float = 1.0, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0):
    """Adam after clipping by global norm, at the learning rate 1: a loop that has a schedule passes the rate to `apply_gradient`.

    `weight_decay` falls on the matrices that `decayed` names.
    Equal arguments give the same object, so that models which are updated alike share compiled programs.
    """
    return optax.chain(
        optax.stateless(functools.partial(_clip, max_grad_norm)),
        _adam(b1, b2),
        optax.stateless(functools.partial(_add_decay, weight_decay)),
        optax.scale(-1.0),
    )


def _clip(most: float, gradient: dict, _: dict | None) -> dict:
    """A gradient whose global norm is at most `most`: as `optax.clip_by_global_norm`, in a form that XLA reads along and never stores."""
    scale = jnp.minimum(1.0, most / optax.tree.norm(gradient))
    return jax.tree.map(lambda g: g * scale, gradient)


def _adam(b1: float, b2: float, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015, algorithm 1) whose moments a gradient that is not finite leaves as they were.

    The step is made from the moments that are kept. Made from new ones that are then kept or not, as around `optax.scale_by_adam`, XLA on
    CPUs has copies of the old moments meanwhile: 4 bytes per parameter and more.
    """

    def update(gradient: dict, old: optax.ScaleByAdamState, params: dict | None = None, *, finite: Bool[Array, ""] | bool = True, **_):
        del params
        mean = optax.tree.update_moment(gradient, old.mu, b1, 1)
        square = optax.tree.update_moment_per_elem_norm(gradient, old.nu, b2, 2)
        new = optax.ScaleByAdamState(optax.safe_increment(old.count), mean, square)
        state = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        mean = optax.tree.bias_correction(state.mu, b1, state.count)
        square = optax.tree.bias_correction(state.nu, b2, state.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mean, square), state

    return optax.GradientTransformationExtraArgs(optax.scale_by_adam(b1=b1, b2=b2).init, update)


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


def linear_decay(
    step: Real[Array, ""] | int | float, total: int, peak: float, warmup: int = 0, floor: float = 0.0
) -> Float[Array, ""]:
    """Learning rate: linear warm-up over `warmup` steps, then linear decay to `floor * peak` at `total`."""
    step = jnp.asarray(step, jnp.float32)
    up = jnp.minimum(1.0, (step + 1) / max(warmup, 1))
    down = 1.0 - (1.0 - floor) * jnp.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
    return peak * up * down
