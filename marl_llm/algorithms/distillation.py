"""On-policy distillation: how far a student is from its teacher on the student's own samples, per token, unreduced.

Distributions are natural log-probs `[*S V]` that are normalised along V, of the student (p) and of the teacher (q) at the same positions.
V is a vocabulary, or the bins of `top_k_bins`. The gradient is that of the student's logits. It is written down, not derived, so that a
student that equals its teacher has loss 0 and gradient 0 exactly. Masked positions may hold anything, NaN included: their result is 0.
"""

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

from marl_llm.algorithms._arrays import as_float, as_mask, check_choice
from marl_llm.algorithms.losses import kl

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd", "sampled")


def _pair(log_probs, teacher_log_probs, where) -> tuple[Array, Array, Array, Array]:
    """(log p, log q without gradient, log p − log q, mask), with 0 in place of what is masked."""
    where = as_mask(where, jnp.shape(log_probs)[:-1])
    student = jnp.where(where[..., None], as_float(log_probs), 0)
    teacher = jax.lax.stop_gradient(jnp.where(where[..., None], as_float(teacher_log_probs), 0))
    gap = jnp.where(student == teacher, 0, student - teacher)  # both give a token probability 0: they agree
    return student, teacher, jax.lax.stop_gradient(gap), where


def _with_slope(value: Array, log_probs: Array, slope: Array, where: Array) -> Array:
    """`value` `[*S]`, 0 where masked, with the gradient `slope` `[*S V]` with respect to `log_probs`."""
    possible = jnp.where(log_probs > -jnp.inf, log_probs, 0)
    line = jnp.sum(jax.lax.stop_gradient(slope) * possible, axis=-1)
    return jnp.where(where, jax.lax.stop_gradient(value) + (line - jax.lax.stop_gradient(line)), 0)


def _times(log_weight: Array, x: Array) -> Array:
    """e^log_weight · x, and 0 where the weight is 0, whatever x."""
    return jnp.where(log_weight > -jnp.inf, jnp.exp(log_weight) * x, 0)


@jax.jit
def reverse_kl(
    log_probs: Float[ArrayLike, "*S V"],
    teacher_log_probs: Float[ArrayLike, "*S V"],
    *,
    where: Shaped[ArrayLike, "*S"] | None = None,
) -> Float[Array, "*S"]:
    """KL of the student to its teacher, exact at each position: the student drops what the teacher would not say.

    ℓ = Σ_v p_v (log p_v − log q_v),    dℓ = Σ_v dp_v (log p_v − log q_v)

    (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, Eq. 2 with the roles exchanged.) Infinite where the teacher gives probability 0 to
    a token that the student may say.

    Args:
      log_probs: log p, normalised along the last axis.
      teacher_log_probs: log q of the same tokens; no gradient flows into them.
      where: positions that count; None: all.
    """
    student, _, gap, where = _pair(log_probs, teacher_log_probs, where)
    terms = _times(student, gap)
    return _with_slope(jnp.sum(terms, axis=-1), student, terms, where)


@jax.jit
def forward_kl(
    log_probs: Float[ArrayLike, "*S V"],
    teacher_log_probs: Float[ArrayLike, "*S V"],
    *,
    where: Shaped[ArrayLike, "*S"] | None = None,
) -> Float[Array, "*S"]:
    """KL of the teacher to the student, exact at each position: the student covers all that the teacher would say.

    ℓ = Σ_v q_v (log q_v − log p_v),    dℓ/dlog p_v = p_v − q_v

    (Hinton et al., arXiv 1503.02531; GKD, arXiv 2306.13649, Eq. 2.) The term p_v in the gradient adds up to nothing and makes it exactly
    0 for equal distributions. Arguments as those of `reverse_kl`.
    """
    student, teacher, gap, where = _pair(log_probs, teacher_log_probs, where)
    slope = jnp.where(gap == 0, 0, jnp.exp(student) - jnp.exp(teacher))
    return _with_slope(jnp.sum(_times(teacher, -gap), axis=-1), student, slope, where)


@functools.partial(jax.jit, static_argnames="beta")
def generalized_jsd(
    log_probs: Float[ArrayLike, "*S V"],
    teacher_log_probs: Float[ArrayLike, "*S V"],
    *,
    beta: float = 0.5,
    where: Shaped[ArrayLike, "*S"] | None = None,
) -> Float[Array, "*S"]:
    """Generalised Jensen-Shannon divergence between teacher and student (GKD, arXiv 2306.13649, Eq. 1), bounded even for distant ones.

    ℓ = β KL(q ‖ m) + (1 − β) KL(p ‖ m) with m = β q + (1 − β) p,    dℓ = (1 − β) Σ_v dp_v (log p_v − log m_v)

    ℓ / β tends to the forward KL as β → 0, and ℓ / (1 − β) to the reverse KL as β → 1; at both ends ℓ itself is 0.

    Args:
      log_probs, teacher_log_probs, where: see `reverse_kl`.
      beta: β, the teacher's share of the mixture.

    Raises:
      ValueError: β does not lie strictly between 0 and 1.
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta={beta} must lie strictly between 0 and 1: at the ends the divergence is 0. Use forward_kl or reverse_kl.")
    student, teacher, gap, where = _pair(log_probs, teacher_log_probs, where)
    of_student = jnp.where(gap > 0, _log_mixture(-gap, beta), -gap + _log_mixture(gap, 1 - beta))  # log m − log p
    of_teacher = jnp.where(gap > 0, gap + _log_mixture(-gap, beta), _log_mixture(gap, 1 - beta))  # log m − log q
    slope = (1 - beta) * _times(student, -of_student)
    value = jnp.sum(slope + beta * _times(teacher, -of_teacher), axis=-1)
    return _with_slope(value, student, slope, where)


def _log_mixture(x: Array, share: float) -> Array:
    """log(1 − share + share e^x) for x ≤ 0, exactly 0 at x = 0. Above 0 it is not meant, and finite."""
    return jnp.log1p(share * jnp.expm1(jnp.minimum(x, 0)))


def top_k_bins(
    log_probs: Float[ArrayLike, "*S V"], teacher_log_probs: Float[ArrayLike, "*S V"], *, k: int
) -> tuple[Float[Array, "*S C"], Float[Array, "*S C"]]:
    """Both distributions over the teacher's k likeliest tokens, and all others in one bin: (student, teacher), C = k + 1, normalised.

    A divergence of the bins is at most that of the vocabularies, for joining events never adds to one (data processing inequality); and
    it is 0 only if the k tokens and the mass of the tail agree.

    Args:
      log_probs: log p. teacher_log_probs: log q of the same tokens.
      k: how many tokens keep a bin of their own, fewer than there are.

    Raises:
      ValueError: k is not between 1 and V − 1.
    """
    vocabulary = jnp.shape(log_probs)[-1]
    if not 1 <= k < vocabulary:
        raise ValueError(f"k={k} must lie between 1 and {vocabulary - 1}: with all {vocabulary} tokens nothing is left for the tail.")
    student, teacher = as_float(log_probs), jax.lax.stop_gradient(as_float(teacher_log_probs))
    _, ids = jax.lax.top_k(teacher, k)
    return bins_of(student, ids), bins_of(teacher, ids)


def bins_of(log_probs: Float[ArrayLike, "*S V"], ids: Int[ArrayLike, "*S K"]) -> Float[Array, "*S C"]:
    """A distribution over K tokens, in their order, and all others in one bin: C = K + 1, normalised. `ids` are distinct."""
    log_probs, ids = as_float(log_probs), jnp.asarray(ids)
    is_kept = jnp.put_along_axis(jnp.zeros(log_probs.shape, bool), ids, True, axis=-1, inplace=False)
    tail = jax.nn.logsumexp(jnp.where(is_kept, -jnp.inf, log_probs), axis=-1, keepdims=True)
    return jnp.concatenate([jnp.take_along_axis(log_probs, ids, axis=-1), tail], axis=-1)


def sampled_reverse_kl(
    log_probs: Float[ArrayLike, "*S"],
    teacher_log_probs: Float[ArrayLike, "*S"],
    *,
    where: Shaped[ArrayLike, "*S"] | None = None,
) -> Float[Array, "*S"]:
    """One-token estimate of `reverse_kl` from the tokens that the student sampled: all that a teacher behind an address must tell.

    ℓ = log p_y − log q_y,    dℓ = (log p_y − log q_y) dlog p_y

    The value is unbiased, and so is the gradient: it is that of `losses.kl` with kind "k1+". For tokens that another policy sampled it is
    biased.

    Args:
      log_probs: log p of the sampled tokens.
      teacher_log_probs: log q of the same tokens; no gradient flows into them.
      where: tokens that count; None: all.
    """
    return kl(log_probs, jax.lax.stop_gradient(as_float(teacher_log_probs)), kind="k1+", where=where)


@jax.jit
def span_reverse_kl(
    log_probs: Float[ArrayLike, "*S R"], teacher_log_probs: Float[ArrayLike, "*S R"], spans: Int[ArrayLike, "*S R"]
) -> Float[Array, "*S R"]:
    """Estimate of `reverse_kl` between models of two tokenizers, from the spans of text at whose ends both have a token boundary.

    ℓ_s = Σ_{t ∈ s} log p_t − log q_s,    dℓ_s = ℓ_s Σ_{t ∈ s} dlog p_t

    Each of a span's n tokens gets ℓ_s / n, so that a response's tokens add up to its spans. A span is one draw: all its tokens have the
    whole ℓ_s in their gradient, whose mean is that of the KL of spans. With one token in each span this is `sampled_reverse_kl`. (Chunks
    whose likelihoods are compared: arXiv 2503.20083; on the student's samples: arXiv 2606.09456.) The teacher's boundary at a span's end
    tells it that no longer token follows, which the student need not know: a bias that the papers describe and this does not remove.

    Args:
      log_probs: log p of the sampled tokens.
      teacher_log_probs: log q_s, spread over a span's tokens in any way that adds up to it; no gradient flows into them.
      spans: number of each token's span, 1 to R; 0: of none, where the result is 0.
    """
    spans = jnp.asarray(spans)
    where, total_of = spans > 0, functools.partial(jax.ops.segment_sum, num_segments=spans.shape[-1] + 1)
    total = jnp.vectorize(total_of, signature="(r),(r)->(c)")
    student, teacher, count = (total(jnp.where(where, as_float(x), 0), spans) for x in (log_probs, teacher_log_probs, where))
    gap = sampled_reverse_kl(student, teacher) / jnp.maximum(count, 1)
    return jnp.where(where, jnp.take_along_axis(gap, spans, axis=-1), 0)


def divergence(
    log_probs: Float[ArrayLike, "*S V"],
    teacher_log_probs: Float[ArrayLike, "*S V"],
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    top_k: int | None = None,
    where: Shaped[ArrayLike, "*S"] | None = None,
) -> Float[Array, "*S"]:
    """The divergence of whole distributions that a recipe names, over the teacher's `top_k` and a tail if that is set.

    Args:
      log_probs, teacher_log_probs, where: see `reverse_kl`.
      kind: one of `DIVERGENCES` but "sampled", which needs no distributions. beta: see `generalized_jsd`.
      top_k: see `top_k_bins`; None, or as many as there are: the whole vocabulary.

    Raises:
      ValueError: unknown kind.
    """
    check_choice("kind", kind, DIVERGENCES[:-1])
    if top_k is not None and top_k < jnp.shape(log_probs)[-1]:
        where = as_mask(where, jnp.shape(log_probs)[:-1])
        real = where[..., None]
        log_probs, teacher_log_probs = top_k_bins(jnp.where(real, log_probs, 0), jnp.where(real, teacher_log_probs, 0), k=top_k)
    if kind == "jsd":
        return generalized_jsd(log_probs, teacher_log_probs, beta=beta, where=where)
    return {"reverse_kl": reverse_kl, "forward_kl": forward_kl}[kind](log_probs, teacher_log_probs, where=where)
