"""Self-distillation: the teacher is the student's own model, whose prompt holds what the student may not see, e.g. the task's answer.

Before an update the student's model, as it is then, scores the student's responses behind prompts that end with a context; its log-probs
lie beside the packed rows, as a teacher's behind an endpoint do (OPSD, arXiv 2601.18734; with feedback on the play SDPO, arXiv
2601.20802). Nothing of the context reaches the student's prompts, and no gradient goes through the teacher.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from marl_llm.models import TRAIN, LoraConfig, ModelConfig
from marl_llm.models.log_probs import in_chunks, pairs_of_a_chunk
from marl_llm.models.packed import packed_hidden
from marl_llm.sampling.sequences import bucket
from marl_llm.text import Message
from marl_llm.tools.teacher_endpoint import StudentSample, TaughtSample
from marl_llm.training.mesh import data_axis, gathered, over_data
from marl_llm.training.packing import PackedRows, Tokens, TokenSample
from marl_llm.training.processes import fetch
from marl_llm.training.scoring import response_where
from marl_llm.training.steps import whole
from marl_llm.workflows import Renderer, Rollout, WorkflowError
from marl_llm.workflows.samples import SampleTable

Prompts = Sequence[tuple[int, ...] | None]  # of each sample that trains; None: its role has no context


@dataclasses.dataclass(frozen=True)
class SelfTeacher:
    """The model of a role as its own teacher.

    Attributes:
      context: template of what the teacher reads behind the role's prompt; `{field}` stands for a field of the play at its end, of hidden
        ones too. vocab_size: of the model.
    """

    context: str
    vocab_size: int


def with_context(renderer: Renderer, prompt: Sequence[int], context: str) -> tuple[int, ...]:
    """A prompt's ids with a context at the end of its last message; the ids of the prompt itself stay as they are.

    The context is rendered as any message's text is, so nothing in it can close the message. Raises `WorkflowError` where the prompt does
    not end as the renderer ends a user's message.

    >>> from marl_llm.text import ByteTokenizer
    >>> from marl_llm.workflows import PlainText
    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.decode(with_context(PlainText(tokenizer, (0,)), tokenizer.encode("3 + 4?"), "It is 7."))
    '3 + 4?\\nIt is 7.'
    """
    first, second = (tuple(renderer.start([Message("user", text)]).ids) for text in ("a", "b"))
    head, tail = _common(first, second), _common(first[::-1], second[::-1])  # how many ids open and close every message
    message = tuple(renderer.start([Message("user", context)]).ids)
    body, close = message[head : len(message) - tail], message[len(message) - tail :]
    end = len(prompt) - tail
    if tuple(prompt[end:]) != close or message[:head] != first[:head]:
        raise WorkflowError("a teacher's context goes into a user's message, and the prompt does not end as the renderer ends one")
    return (*prompt[:end], *renderer.tokenizer.encode("\n"), *body, *prompt[end:])


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((n for n, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))


def privileged_prompts(rollout: Rollout, table: SampleTable, renderers: Mapping[str, Renderer], contexts: Mapping[str, str]) -> Prompts:
    """The teacher's prompt of each sample that trains, in the table's order; None where the role has no context.

    `contexts`: role -> template. A call that several paths share reads the fields of the first. Raises `WorkflowError` for a field that
    the play does not have.
    """
    fields_of: dict[tuple[int, str], Mapping[str, Any]] = {}
    for episode in rollout.episodes:
        for path in (*episode.trajectories, *episode.candidates):
            for call in path.calls:
                fields_of.setdefault((episode.task.number, call.id), path.fields)

    def prompt_of(sample) -> tuple[int, ...] | None:
        call, fields = sample.call, fields_of[sample.instance, sample.call.id]
        if call.role not in contexts:
            return None
        try:
            context = contexts[call.role].format_map(fields)
        except (KeyError, AttributeError, IndexError, ValueError) as error:
            why = f"{error}; the play has {', '.join(sorted(fields))}"
            raise WorkflowError(f"the context of role {call.role!r} cannot be written: {why}") from error
        return with_context(renderers[call.model], call.prompt_ids, context)

    return [prompt_of(sample) for sample in table.trained()]


@functools.lru_cache(16)
def _scorer(config: ModelConfig, lora: LoraConfig | None, mesh: Mesh, top_k: int) -> Callable:
    """`((params, base), rows) -> (log-probs [B, Q], ids [B, Q, K], their log-probs [B, Q, K])` of the rows' targets and of the K likeliest
    tokens in their places, at temperature 1."""
    axis = data_axis(mesh)

    def log_probs_of_chunk(head, hidden, targets):
        log_probs = jax.nn.log_softmax(jnp.matmul(hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32))
        chosen = jnp.sum(jnp.where(jnp.arange(log_probs.shape[-1]) == targets[..., None], log_probs, 0), axis=-1)
        top, ids = jax.lax.top_k(log_probs, top_k)
        return chosen, *([x[..., k] for k in range(top_k)] for x in (ids, top))  # a chunk has one number per target

    def score(weights, rows: PackedRows):
        head, hidden = packed_hidden(config, whole(*weights, lora), *rows.inputs[:5])
        inputs, chunk = (hidden, rows.targets), pairs_of_a_chunk(head.shape[1])
        chosen, ids, top = in_chunks(functools.partial(log_probs_of_chunk, head), inputs, response_where(rows), chunk)
        return gathered((chosen, *(jnp.stack(x, axis=-1) if x else jnp.zeros((*rows.targets.shape, 0)) for x in (ids, top))), axis)

    return jax.jit(over_data(score, mesh, TRAIN, in_specs=(P(), P("data")), out_specs=P()))


@dataclasses.dataclass(frozen=True, eq=False)
class ModelScorer:
    """Scores samples by a model in this process, as an `OutsideTeacher` does.

    Attributes:
      config, lora, mesh: of the model. weights: its parameters and None, or its adapters and their base.
      microbatch_tokens: of packed rows per device at a time; 0: `minibatch` prompts.
    """

    config: ModelConfig
    lora: LoraConfig | None
    mesh: Mesh
    weights: tuple[Any, Any]
    minibatch: int
    microbatch_tokens: int

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.config.vocab_size

    def score(self, samples: Sequence[StudentSample], top_k: int = 0) -> list[TaughtSample]:
        """The model's log-probs of each sample, in their order."""
        tokens = Tokens.of([TokenSample(sample.prompt, sample.response, np.zeros(len(sample.response))) for sample in samples])
        row, devices = bucket(int((tokens.prompt_size + tokens.size).max(initial=0)), 64), self.mesh.shape["data"]
        prompts = max(1, self.microbatch_tokens // row) * devices if self.microbatch_tokens else self.minibatch
        scorer, families = _scorer(self.config, self.lora, self.mesh, top_k), tokens.families(range(len(tokens)))
        taught: dict[int, TaughtSample] = {}
        for start in range(0, len(families), prompts):
            chosen = [number for family in families[start : start + prompts] for number in family]
            rows = tokens.pack(chosen, row, devices)
            columns = fetch(scorer(self.weights, rows), self.mesh)
            for b, n in np.argwhere(rows.sample >= 0):
                place = b, slice(rows.first[b, n], rows.first[b, n] + rows.length[b, n])
                log_probs, ids, top = (column[place] for column in columns)
                taught[int(rows.sample[b, n])] = TaughtSample(log_probs, ids.astype(np.int32), top)
        return [taught[number] for number in range(len(samples))]
