"""Teachers in an update: a frozen model per role, scored on the very rows that the update packs, its divergence added to the loss.

A teacher may be larger than its student, stand behind an endpoint (`outside_teachers`) or have another tokenizer (`span_teachers`). Roles
of one model may have different teachers, and roles of several models the same one, which is then held once. Where a micro-batch holds no
response of a teacher's roles, its forward pass is skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from marl_llm.algorithms import Recipe, bins_of, divergence, reduce_parts, sampled_reverse_kl, span_reverse_kl
from marl_llm.models import ModelConfig, TokenScores
from marl_llm.models.comparison import Comparison, compare_hidden, compare_told
from marl_llm.models.log_probs import score_hidden
from marl_llm.models.packed import packed_hidden
from marl_llm.training.outside_teachers import OutsideTeacher
from marl_llm.training.packing import PackedRows
from marl_llm.training.privileged import SelfTeacher
from marl_llm.training.scoring import by_row, by_sample, response_where, sample_where
from marl_llm.training.span_teachers import SpanTeacher
from marl_llm.training.steps import Sums


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A frozen model that a role learns from.

    Attributes:
      config: its shape; the vocabulary is the student's. params: whole parameters.
    """

    config: ModelConfig
    params: Any


@dataclasses.dataclass(frozen=True)
class Teaching:
    """Who teaches whom, as the programs of an update know it.

    Attributes:
      configs: shapes of the distinct teachers that are held here. of: agent number -> place of its teacher in `configs`, -1 for none.
      outside: numbers of the agents whose teachers are behind endpoints.
    """

    configs: tuple[ModelConfig, ...]
    of: tuple[int, ...]
    outside: tuple[int, ...] = ()

    @property
    def agents(self) -> tuple[int, ...]:
        """Numbers of the agents that have a teacher."""
        return tuple(agent for agent, teacher in enumerate(self.of) if teacher >= 0 or agent in self.outside)


class Frozen(NamedTuple):
    """Parameters that an update reads and does not change."""

    reference: Any = None  # of the KL, or None
    teachers: tuple = ()  # in the order of `Teaching.configs`


class Taught(NamedTuple):
    """What the teachers say of packed rows, 0 where a response has no teacher."""

    divergence: Float[Array, "B Q"]
    gap: Float[Array, "B Q"]  # log π − log of the teacher's probability, of the sampled tokens
    agents: Float[Array, "B Q"]  # 1 + number of the agent that each target is of, 0: padding, or its teacher could not read it


def cut_vocabulary(params: dict, size: int) -> dict:
    """Parameters whose embedding and head have the first `size` tokens: published sizes of one family pad one vocabulary differently."""
    cut = {"embedding": params["embedding"][:size]}
    if "output" in params:
        cut["output"] = params["output"][:, :size]
    return params | cut


def teaching_of(
    student: ModelConfig, roles: Sequence[str], teachers: Mapping[str, Teacher | OutsideTeacher | SelfTeacher | SpanTeacher]
) -> tuple[Teaching | None, list[Teacher]]:
    """(who teaches whom, the distinct teachers that are held here) of a model; (None, []) without any. Raises `ValueError` for another
    vocabulary."""
    distinct = list({id(teacher): teacher for teacher in teachers.values() if isinstance(teacher, Teacher)}.values())
    for role, teacher in teachers.items():
        size = teacher.config.vocab_size if isinstance(teacher, Teacher) else teacher.vocab_size
        if size != student.vocab_size:
            raise ValueError(f"the teacher of {role} has {size} tokens and the student {student.vocab_size}: they need one tokenizer")
    if not teachers:
        return None, []
    places = {id(teacher): place for place, teacher in enumerate(distinct)}
    teacher_of = tuple(places.get(id(teachers.get(role)), -1) for role in roles)
    outside = tuple(agent for agent, role in enumerate(roles) if role in teachers and teacher_of[agent] < 0)
    configs = tuple(dataclasses.replace(teacher.config, value_head=False) for teacher in distinct)
    return Teaching(configs, teacher_of, outside), distinct


def agents_beside(teaching: Teaching | None, rows: PackedRows, agent: np.ndarray) -> dict[str, Float[np.ndarray, "B Q"]]:
    """"agents": 1 + number of the agent that each target of packed rows is of, 0 for padding; {} where nobody has a teacher.

    `agent` `[S]`: who gave each sample.
    """
    if teaching is None:
        return {}
    longest = int(max(1, rows.length.max(initial=0)))
    return {"agents": by_row(rows, np.broadcast_to((agent + 1).astype(np.float32)[:, None], (len(agent), longest)))}


def score_taught(
    recipe: Recipe, teaching: Teaching, student: tuple[ModelConfig, dict], teachers: tuple, rows: PackedRows, columns: Mapping[str, Array]
) -> tuple[TokenScores, Taught]:
    """The student's scores of packed rows, and what its teachers say of them; one forward pass of each.

    Args:
      student: its shape and parameters. teachers: parameters, in the order of `teaching.configs`.
      columns: see `agents_beside`, and `TaughtTokens.beside` where teachers are behind endpoints.
    """
    agents = columns["agents"]
    weight, hidden = packed_hidden(*student, *rows.inputs[:5])
    scored = score_hidden(weight, hidden, rows.targets, recipe.temperature, where=response_where(rows))
    total, gap = jnp.zeros(rows.targets.shape), jnp.zeros(rows.targets.shape)
    for place, config in enumerate(teaching.configs):
        taught = [agents == agent + 1 for agent in teaching.agents if teaching.of[agent] == place]
        where = functools.reduce(jnp.logical_or, taught)
        comparison = _compare(recipe, (weight, hidden), (config, teachers[place]), rows, scored, where)
        total += comparison.divergence
        gap += jnp.where(where, scored.log_probs - comparison.teacher_log_probs, 0)
    if teaching.outside:
        outside = functools.reduce(jnp.logical_or, [agents == agent + 1 for agent in teaching.outside])
        where = outside & (columns["taught_spans"] > 0)
        unread = outside & ~where  # adds 0, with the gradient of a mean gap: `_fill_unread`
        level = sampled_reverse_kl(scored.log_probs, columns["taught_log_probs"], where=unread)
        agents = jnp.where(unread, 0, agents)
        total += _compare_told(recipe, (weight, hidden), scored, columns, where) + level - jax.lax.stop_gradient(level)
        gap += jnp.where(where, scored.log_probs - columns["taught_log_probs"], 0)
    return scored, Taught(total, jax.lax.stop_gradient(gap), agents)


def _compare(recipe: Recipe, student: tuple, teacher: tuple, rows: PackedRows, scored: TokenScores, where: Array) -> Comparison:
    """One teacher against the student where `where` is True, 0 elsewhere."""
    config, params = teacher

    def forward(_):
        return packed_hidden(config, params, *rows.inputs[:5])[1]

    shape = jax.eval_shape(forward, 0)
    hidden = jax.lax.cond(jnp.any(where), forward, lambda _: jnp.zeros(shape.shape, shape.dtype), 0)
    goal = (params["embedding"].T if config.tie_embeddings else params["output"]), jax.lax.stop_gradient(hidden)
    if recipe.distill_divergence == "sampled":
        log_probs = score_hidden(*goal, rows.targets, recipe.temperature, where=where).log_probs
        return Comparison(sampled_reverse_kl(scored.log_probs, log_probs, where=where), log_probs)
    measure = functools.partial(
        divergence, kind=recipe.distill_divergence, beta=recipe.distill_beta, top_k=recipe.distill_top_k
    )  # fmt: skip
    return compare_hidden(measure, student, goal, rows.targets, where, recipe.temperature)


def _compare_told(recipe: Recipe, student: tuple, scored: TokenScores, columns: Mapping[str, Array], where: Array) -> Array:
    """The divergence from teachers behind endpoints where `where` is True, 0 elsewhere."""
    if recipe.distill_divergence == "sampled":
        return span_reverse_kl(scored.log_probs, columns["taught_log_probs"], jnp.where(where, columns["taught_spans"], 0))

    def measure(log_probs, ids, bins):
        return divergence(bins_of(log_probs, ids), bins, kind=recipe.distill_divergence, beta=recipe.distill_beta)

    return compare_told(measure, student, (columns["taught_ids"], columns["taught_bins"]), where)


def add_distillation(recipe: Recipe, teaching: Teaching, loss: tuple[Array, Sums], rows: PackedRows, taught: Taught) -> tuple[Array, Sums]:
    """The loss of packed rows with `distill_coef` times the divergence, reduced as the policy term is.

    Metrics, per agent that has a teacher and over its tokens: distill_kl/<number>, the divergence, and teacher_gap/<number>, the mean of
    log π − log of the teacher's probability.
    """
    total, sums = loss
    penalty, _ = reduce_parts(
        by_sample(rows, taught.divergence), where=sample_where(rows), how=recipe.loss_aggregation, max_length=recipe.max_length
    )
    total = total + recipe.distill_coef * penalty
    parts = dict(sums.parts)
    for agent in teaching.agents:
        where = taught.agents == agent + 1
        count = jnp.sum(where, dtype=jnp.float32)
        parts[f"distill_kl/{agent}"] = jnp.sum(jnp.where(where, taught.divergence, 0)), count
        parts[f"teacher_gap/{agent}"] = jnp.sum(jnp.where(where, taught.gap, 0)), count
    return total, jax.lax.stop_gradient(sums._replace(total=total, parts=parts))
