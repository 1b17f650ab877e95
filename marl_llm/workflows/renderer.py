"""Between fields and ids, for one model: prompts become ids, sampled ids become text. Sampled text never becomes ids (law 1).

`marl_llm.text.Chat` is the renderer of a model that knows a chat format. `PlainText` is that of one that knows none, such as a tiny model
with a vocabulary of its own: the system's and the user's text, one after the other, and the response behind them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, SupportsInt, runtime_checkable

from marl_llm.text import Conversation, Message, Reply, Tokenizer
from marl_llm.text.chat import Turn
from marl_llm.text.rendering import TemplateError, TemplateLimitError
from marl_llm.workflows.errors import PromptTooLong, WorkflowError
from marl_llm.workflows.roles import Role
from marl_llm.workflows.state import RoleHistory


@runtime_checkable
class Renderer(Protocol):
    """What the controller asks of `Chat`, `PlainText`, or another."""

    tokenizer: Tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Conversation:
        """A conversation whose ids are the prompt."""
        ...

    def reply(self, conversation: Conversation, ids: Iterable[SupportsInt]) -> Conversation:
        """The same with the sampled ids, verbatim."""
        ...

    def extend(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The same with what others say, asking again; for roles that continue."""
        ...

    def read(self, conversation: Conversation) -> Reply:
        """The last reply as text."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainText:
    """Text without a chat format.

    Attributes:
      tokenizer: of the model.
      stop_ids: tokens that end a response; they are no part of its text. Raises `ValueError` without one, for then only the budget would.
      between: what stands between the system's text and the user's, and before what extends a conversation.
    """

    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    between: str = "\n"

    def __post_init__(self):
        if not self.stop_ids:
            raise ValueError("PlainText needs at least one stop token: without one every response runs to its budget")

    def start(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> Conversation:
        """The messages' text as ids. Raises `ValueError` for tools, which only a chat format can offer."""
        if tools:
            raise ValueError("a role with tools needs a model that speaks a chat format (marl_llm.text.Chat), not PlainText")
        head = tuple(self.tokenizer.encode(self.between.join(message.content for message in messages)))
        return Conversation((Turn(head),))

    def reply(self, conversation: Conversation, ids: Iterable[SupportsInt]) -> Conversation:
        """Appends the sampled ids."""
        last = dataclasses.replace(conversation.turns[-1], reply=tuple(map(int, ids)))
        return Conversation((*conversation.turns[:-1], last), waiting=False)

    def extend(self, conversation: Conversation, messages: Sequence[Message], foreign: bool = False) -> Conversation:
        """Adds the messages' text behind the last reply, and asks again. A reply that was cut off has no stop token, and gets none."""
        text = "".join(self.between + message.content for message in messages)
        return Conversation((*conversation.turns, Turn(tuple(self.tokenizer.encode(text)))))

    def read(self, conversation: Conversation) -> Reply:
        """The reply's text, its stop token left out."""
        ids = conversation.turns[-1].reply
        finished = bool(ids) and ids[-1] in self.stop_ids
        return Reply(self.tokenizer.decode(ids[:-1] if finished else ids), None, (), (), finished)


CHARACTERS_PER_TOKEN = 128  # a text of more is over budget in any vocabulary, and is not encoded to find that out


@dataclasses.dataclass(frozen=True)
class RolePrompt:
    """A role's prompt."""

    conversation: Conversation | None  # as ids; None for a player without a renderer
    messages: list[Message]  # as text; of a conversation that continues, what extends it
    trimmed: int  # how much of `role.trim`, items or characters, was cut
    replaced: int  # characters that were no valid text


def prompt_of(role: Role, renderer: Renderer | None, fields: dict[str, Any], earlier: RoleHistory | None = None) -> RolePrompt:
    """The prompt of a role, `role.trim` cut so far that it fits `role.max_prompt`. Without a renderer nothing is cut.

    `earlier` is the conversation that the prompt continues. Raises `PromptTooLong`, or `WorkflowError` with what a chat template refuses.
    """
    if role.speaks_ids:
        if renderer is None:
            return RolePrompt(None, [], 0, 0)
        ids = role.prompt_ids(fields)
        if len(ids) > role.max_prompt:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens, {role.max_prompt} are allowed")
        return RolePrompt(Conversation((Turn(ids),)), [Message("user", renderer.tokenizer.decode(ids))], 0, 0)
    schemas = [tool.schema for tool in role.tools]

    def render(trimmed: int) -> tuple[RolePrompt, str]:
        """The prompt, and how long it is if it does not fit."""
        role_fields = fields
        if trimmed:
            role_fields = {**fields, role.trim: value[trimmed:] if role.trim_from == "start" else value[: len(value) - trimmed]}
        messages, replaced = role.render(role_fields, again=earlier is not None)
        size = sum(len(message.content) for message in messages)
        if renderer is not None and size > CHARACTERS_PER_TOKEN * role.max_prompt:
            return RolePrompt(None, messages, trimmed, replaced), f"{size} characters, {role.max_prompt} tokens are allowed"
        try:
            if renderer is None:
                conversation = None
            elif earlier is not None:
                conversation = renderer.extend(earlier.conversation, messages)
            else:
                conversation = renderer.start(messages, schemas) if schemas else renderer.start(messages)
        except TemplateLimitError as error:
            raise PromptTooLong(str(error)) from error
        except TemplateError as error:
            raise WorkflowError(f"role {role.name!r}: {error}") from error
        prompt = RolePrompt(conversation, messages, trimmed, replaced)
        fits = conversation is None or len(conversation.ids) <= role.max_prompt
        return prompt, "" if fits else f"{len(conversation.ids)} tokens, {role.max_prompt} are allowed"

    prompt, excess = render(0)
    if not excess:
        return prompt
    value = fields.get(role.trim) if role.trim in (role.reads if earlier is None else role.observes) else None
    if not isinstance(value, Sequence):
        why = "the role trims no field" if role.trim is None else f"{role.trim!r} ({type(value).__name__}) cannot be trimmed"
        why = why if earlier is None else f"it continues a conversation, of which only a field of its observation can be trimmed ({why})"
        raise PromptTooLong(f"the prompt has {excess}, and {why}")
    if (longest := _longest_that_fits(render, value)) is None:
        raise PromptTooLong(f"the prompt has {excess}, even without {role.trim!r}")
    return longest


def _longest_that_fits(render: Callable[[int], tuple[RolePrompt, str]], value: Sequence) -> RolePrompt | None:
    """The prompt of which least of `value` is trimmed, by bisection; None if none fits."""
    low, high, best = 1, len(value), None
    while low <= high:
        trimmed = (low + high) // 2
        prompt, excess = render(trimmed)
        if excess:
            low = trimmed + 1
        else:
            best, high = prompt, trimmed - 1
    return best


def spoken_ids(renderer: Renderer, text: str) -> tuple[int, ...]:
    """Ids of a text that a script wrote, with the stop token: what a model would have to emit to say it. For imitation only."""
    return (*renderer.tokenizer.encode(text), renderer.stop_ids[0])
