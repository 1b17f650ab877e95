"""Two models at the same positions: a divergence of their whole distributions, with both heads inside, a chunk of positions at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marl_llm.models.log_probs import in_chunks, pairs_of_a_chunk
from marl_llm.models.sharding import constrain


class Comparison(NamedTuple):
    """Per token, in nats."""

    divergence: Float[Array, "*shape"]
    teacher_log_probs: Float[Array, "*shape"]  # of the targets, under the second model


def compare_told(
    divergence: Callable,
    student: tuple[Float[Array, "D V"], Float[Array, "*shape D"]],
    told: tuple[Array, ...],
    where: Bool[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """As `compare_hidden`, with a teacher of whom arrays `[*shape, ...]` are told: the divergence where `where` is True, 0 elsewhere.

    `divergence` is `(log_probs, *told) -> number per position`; the student's log-probs are over the vocabulary, at temperature 1.
    """
    weight, hidden = student

    def score(of_student, *of_teacher) -> Array:
        logits = jnp.matmul(of_student, weight.astype(of_student.dtype), preferred_element_type=jnp.float32)
        return divergence(jax.nn.log_softmax(constrain(logits, "batch", *(None,) * (logits.ndim - 2), "vocab")), *of_teacher)

    inputs, chunk = (hidden, *told), pairs_of_a_chunk(weight.shape[1])
    with jax.named_scope("head"):
        divergences = score(*inputs) if chunk >= where.size else in_chunks(score, inputs, where, chunk)
    return jnp.where(where, divergences, 0)


def compare_hidden(
    divergence: Callable,
    student: tuple[Float[Array, "D V"], Float[Array, "*shape D"]],
    teacher: tuple[Float[Array, "E V"], Float[Array, "*shape E"]],
    targets: Int[Array, "*shape"],
    where: Bool[Array, "*shape"],
    temperature: float = 1.0,
) -> Comparison:
    """Compares what two models predict at each position; logits of both exist for a chunk of positions only (see `score_hidden`).

    Args:
      divergence: `(log_probs, teacher_log_probs) -> number per position`, of log-probs over the vocabulary.
      student, teacher: (head, hidden states), of one vocabulary. No gradient flows into the teacher.
      targets: ids whose log-probs under the teacher are asked for.
      where: positions that count; 0 or anything elsewhere.
      temperature: of both distributions.
    """
    weights = student[0], jax.lax.stop_gradient(teacher[0])

    def log_softmax(weight, hidden):
        logits = jnp.matmul(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32) / temperature
        return jax.nn.log_softmax(constrain(logits, "batch", *(None,) * (logits.ndim - 2), "vocab"))

    def score(of_student, of_teacher, target) -> Comparison:
        new, goal = log_softmax(weights[0], of_student), log_softmax(weights[1], of_teacher)
        chosen = jnp.sum(jnp.where(jnp.arange(goal.shape[-1]) == target[..., None], goal, 0), axis=-1)
        return Comparison(divergence(new, goal), chosen)

    inputs, chunk = (student[1], jax.lax.stop_gradient(teacher[1]), targets), pairs_of_a_chunk(weights[0].shape[1])
    with jax.named_scope("head"):
        comparison = score(*inputs) if chunk >= targets.size else in_chunks(score, inputs, where, chunk)
    return Comparison(*(jnp.where(where, x, 0) for x in comparison))
