"""Teachers of another tokenizer: a frozen model reads the text that a student's ids stand for, and is compared with it span by span.

The teacher scores its own tokens before an update, as a teacher behind an endpoint does; `SpanReader` says which of them stand for which
tokens of the student. A token that no span holds adds nothing to the divergence, and its gradient is that of the mean gap of the tokens
that were read, so that it becomes neither likelier nor less likely. Metrics `span_tokens` and `unread_tokens` report the shares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from marl_llm.models import ModelConfig
from marl_llm.text import Chat, Message
from marl_llm.text.spans import SpanReader
from marl_llm.tools.teacher_endpoint import StudentSample, TaughtSample
from marl_llm.training.outside_teachers import OutsideTeacher, TaughtTokens
from marl_llm.training.packing import Tokens
from marl_llm.training.privileged import Prompts, SelfTeacher, privileged_prompts
from marl_llm.workflows import Renderer, RoleCall, Rollout
from marl_llm.workflows.samples import SampleTable


@dataclasses.dataclass(frozen=True, eq=False)
class SpanTeacher:
    """A frozen model of another tokenizer than its student's.

    Attributes:
      config: its shape, of its own vocabulary. params: whole parameters. renderer: how it reads prompts. vocab_size: of the student.
    """

    config: ModelConfig
    params: Any
    renderer: Renderer
    vocab_size: int


@dataclasses.dataclass(frozen=True, eq=False)
class SpanScores:
    """Scores a student's responses by a model of another tokenizer, behind prompts of that one; an `OutsideTeacher`."""

    reader: SpanReader
    scores: OutsideTeacher  # in ids of the teacher
    vocab_size: int

    def score(self, samples: Sequence[StudentSample], top_k: int = 0) -> list[TaughtSample]:
        """The log-prob of each span, in equal parts on its tokens. Raises `ValueError` for a `top_k`: the vocabularies are not compared."""
        if top_k:
            raise ValueError("a teacher of another tokenizer tells log-probs of spans of text alone: set distill_divergence='sampled'")
        readings = [self.reader.read(sample.response.tolist()) for sample in samples]
        asked = [number for number, reading in enumerate(readings) if len(reading.ids)]
        questions = [StudentSample(samples[number].prompt, readings[number].ids) for number in asked]
        answers = self.scores.score(questions) if asked else []
        log_probs = dict(zip(asked, (answer.log_probs for answer in answers), strict=True))
        taught = []
        for number, reading in enumerate(readings):
            size = len(reading.spans)
            sums = np.bincount(reading.id_spans, log_probs.get(number, []), minlength=size + 1)
            shares = sums / np.maximum(np.bincount(reading.spans, minlength=size + 1), 1)
            log_probs_of_tokens = np.where(reading.spans > 0, shares[reading.spans], 0).astype(np.float32)
            taught.append(TaughtSample(log_probs_of_tokens, np.zeros((size, 0), np.int32), np.zeros((size, 0), np.float32), reading.spans))
        return taught


def teacher_prompts(
    rollout: Rollout, table: SampleTable, renderers: Mapping[str, Renderer], teachers: Mapping[str, Any]
) -> Prompts | None:
    """What the teacher of each sample that trains reads in place of the student's prompt, in the table's order; None: nobody reads another.

    `teachers`: role -> its teacher. Raises `WorkflowError` as `privileged_prompts`.
    """
    contexts = {role: teacher.context for role, teacher in teachers.items() if isinstance(teacher, SelfTeacher)}
    foreign = {role: teacher.renderer for role, teacher in teachers.items() if isinstance(teacher, SpanTeacher)}
    if not (contexts or foreign):
        return None
    written: dict[tuple, tuple[int, ...]] = {}  # samples of one prompt share it

    def foreign_prompt(call: RoleCall) -> tuple[int, ...]:
        if (key := (call.role, call.prompt_ids)) not in written:
            tools = [tool.schema for tool in rollout.workflow.roles[call.role].tools]
            written[key] = translated_prompt(foreign[call.role], renderers[call.model], call.messages, call.prompt_ids, tools)
        return written[key]

    prompts = privileged_prompts(rollout, table, renderers, contexts)
    return [foreign_prompt(sample.call) if sample.call.role in foreign else prompt for prompt, sample in zip(prompts, table.trained())]


def translated_prompt(
    teacher: Renderer, student: Renderer, messages: Sequence[Message], prompt_ids: Sequence[int], tools: Sequence[Any] = ()
) -> tuple[int, ...]:
    """A student's prompt in a teacher's ids: the messages by the teacher's own template where both have one; otherwise the same text.

    Conversations in which tools have answered are the same text, for templates differ in how they write calls; so are messages that the
    teacher's template refuses. Empty where the teacher's
    tokenizer cannot read it: nothing is said of that response.
    """
    is_chat = isinstance(teacher, Chat) and isinstance(student, Chat)
    if is_chat and messages and not any(message.role == "tool" for message in messages):
        try:
            return teacher.encode_messages(messages, tools)
        except ValueError:  # a template without tools, or one that refuses these messages
            pass
    try:
        return tuple(teacher.tokenizer.encode(student.tokenizer.decode(prompt_ids)))
    except ValueError:  # its normaliser makes special tokens of the text
        return ()


def alignment_figures(taught: TaughtTokens, tokens: Tokens, agents: Mapping[int, np.ndarray]) -> dict[str, float]:
    """How finely tokens were compared, by agent number: span_tokens, the share of those in spans of several, and unread_tokens, of those in
    none. `agents`: number -> its samples that count."""
    figures = {}
    for agent, samples in agents.items():
        spans = [taught.spans[first : first + size] for first, size in zip(tokens.response_at[samples], tokens.size[samples])]
        count = max(1, sum(map(len, spans)))
        long = sum(int(np.sum(np.bincount(numbers)[numbers[numbers > 0]] > 1)) for numbers in spans)
        unread = sum(int(np.sum(numbers == 0)) for numbers in spans)
        figures |= {f"span_tokens/{agent}": long / count, f"unread_tokens/{agent}": unread / count}
    return figures
