"""Conversations as token ids that only grow: what the policy emitted stays, byte for byte, and the next prompt extends it (law 1).

    chat = load_chat(directory)                                                           # speaks as the checkpoint's own template says
    conversation = chat.start([Message("system", "Be brief."), Message("user", "2+2?")])  # its ids end with the generation prompt
    conversation = chat.reply(conversation, sampled_ids)                                  # kept verbatim, never decoded and re-encoded
    conversation = chat.extend(conversation, [Message("user", "and 3+3?")])               # what the template writes behind the reply

**One rule for every template.** A first prompt is the template's rendering. To extend a conversation all of it is rendered with a *slot*, a
text that nobody writes, in place of each reply; what the template puts behind the last slot, from the end of the assistant's turn on, is
appended to the ids. So nothing is known of model families, and ids grow by construction.

**Templates that rewrite history.** Some show a reply otherwise later on: they drop its thinking, or move the system prompt.
`history="keep"` (default): ids grow all the same, so that one row holds the whole conversation, and `Conversation.rewritten` says that the
template would have written another prompt. `history="template"`: the prompt is what the template says, with the policy's own ids where its
words stand. A prompt that lost tokens is no extension, so law 1 then means: *a new prompt is a new sample*. `Conversation.sample` counts
up, and `emitted` starts afresh: earlier replies were drawn behind other prompts. They are context now, and were trained as samples of their
own. `extends` tells the two cases apart.

**Special tokens.** Only the template writes them. In content (a user's, a tool's, another agent's) their spelling is plain text. Tags that
a vocabulary does not hold as tokens (Qwen2.5's `<tool_response>`) are plain text from either side and cannot be told apart.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsInt

from marl_llm.text.huggingface import HuggingFaceTokenizer
from marl_llm.text.jinja import JinjaTemplate
from marl_llm.text.messages import Message, ToolCall
from marl_llm.text.rendering import TemplateError
from marl_llm.text.replies import END_THINK, THINK, Reply, read_reply
from marl_llm.text.tokenizer import Tokenizer, checked_ids
from marl_llm.text.tool_calls import READERS, CallReader

History = Literal["keep", "template"]
# Private characters: a mark within the spellings of special tokens in contents, and what encloses a slot's number.
MARK, OPEN, CLOSE = "\ue000", "\ue001", "\ue002"
_ESCAPED = re.compile(f"{MARK}(?:-|([0-9a-f]+);)")


@dataclasses.dataclass(frozen=True)
class Turn:
    """A prompt of the policy, and its reply."""

    head: tuple[int, ...]  # messages and the generation prompt
    opening: tuple[int, ...] = ()  # the think block, or its start, with which the generation prompt ends
    reply: tuple[int, ...] = ()  # the policy's ids
    fresh: bool = True  # the reply was drawn behind the ids that stand before it now

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids in order."""
        return (*self.head, *self.opening, *self.reply)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A value.

    Attributes:
      turns: in order.
      sample: how often a prompt did not extend the one before.
      waiting: the ids end with a generation prompt.
      rewritten: the template would have written another prompt than these ids.
      messages: as the template is given them, with slots for the policy's; tools: what it is offered; text: their rendering.
    """

    turns: tuple[Turn, ...]
    sample: int = 0
    waiting: bool = True
    rewritten: bool = False
    messages: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    text: str = ""

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole conversation, `[L]`."""
        return tuple(itertools.chain.from_iterable(turn.ids for turn in self.turns))

    @functools.cached_property
    def emitted(self) -> tuple[bool, ...]:
        """Which of `ids` the policy emitted in this sample, `[L]`: those that a loss may score."""
        mask = []
        for turn in self.turns:
            mask += [False] * (len(turn.head) + len(turn.opening)) + [turn.fresh] * len(turn.reply)
        return tuple(mask)


def extends(before: Conversation, after: Conversation) -> bool:
    """Law 1: whether the ids of `after` begin with all of `before`'s."""
    return after.ids[: len(before.ids)] == before.ids


def slot(number: int | str) -> str:
    """A text that nobody writes, for a reply."""
    return f"{OPEN}{number}{CLOSE}"


@dataclasses.dataclass(frozen=True)
class Chat:
    """A tokenizer that speaks as a chat template says.

    Attributes:
      tokenizer: of the model.
      template: of the checkpoint.
      options: what the template is told beside messages and tools, e.g. `{"enable_thinking": False}`.
      history: see the module's text.
      calls: how the model writes tool calls, a name of `tool_calls.READERS`; "" finds the one that reads the template's own calls.

    Raises `ValueError` when the template fails, writes no reply, or names no token that ends one; for an unknown name of `calls` or
    `history`; and for `history="template"` where nothing would be rewritten because nothing thinks.
    """

    tokenizer: Tokenizer
    template: JinjaTemplate
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    history: History = "keep"
    calls: str = ""

    def __post_init__(self):
        if self.history not in ("keep", "template"):
            raise ValueError(f"history={self.history!r} is neither 'keep' nor 'template'")
        if self.calls and self.calls not in READERS:
            raise ValueError(f"calls={self.calls!r}: tool calls are read by one of {', '.join(READERS)}")
        if not self.stop_ids:
            has = sorted(self.tokenizer.special_ids)[:12]
            raise ValueError(f"no token ends a reply: neither the chat template nor the tokenizer names one; its special tokens are {has}")
        if unread := [name for name in self.options if name not in self.template.source]:
            raise ValueError(f"the option {unread[0]}={self.options[unread[0]]!r} has no effect: the chat template does not read it")
        if self.history == "template" and not self.thinks:
            raise ValueError("history='template' has no effect: the chat template has no thinking that it could drop")

    @property
    def thinks(self) -> bool:
        """Whether the template knows think blocks."""
        return END_THINK in self.template.source

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Where sampling stops: what the template ends a reply with, then the tokenizer's own stops."""
        return tuple(dict.fromkeys((*self._ends[:1], *self.tokenizer.stop_ids)))

    @functools.cached_property
    def _ends(self) -> tuple[int, ...]:
        """The special tokens that end a reply: the one that the template writes behind the last message, then behind an earlier one."""
        ask, answer = Message("user", "?"), Message("assistant", slot(0))
        texts = [self._render([ask, answer], (), False)]
        try:
            texts.append(self._render([ask, answer, ask], (), False))
        except TemplateError:
            pass  # it refuses a question behind an answer, as `extend` will report
        ends = []
        for text in texts:
            if slot(0) not in text:
                raise ValueError(f"the chat template does not write what an assistant says as it is: {text[:200]!r}")
            if mark := self._special.search(text, text.index(slot(0))):
                ends.append(self.tokenizer.special_ids[mark.group()])
        return tuple(dict.fromkeys(ends))

    @functools.cached_property
    def call_reader(self) -> CallReader | None:
        """How the model's tool calls are read; None: no reader understands the calls that the template itself writes."""
        if self.calls:
            return READERS[self.calls]
        call = ToolCall("look", {"at": "a door"})
        try:
            text = self._render([Message("user", "?"), Message("assistant", slot(0), None, (call,)), Message("tool", "!")], (), False)
        except TemplateError:
            return None
        for reader in READERS.values():
            begins = [text.find(mark, text.find(slot(0)) + 1) for mark in reader.marks]
            begin = min((place for place in begins if place >= 0), default=-1)
            calls_text = self.ends_removed(text[begin:]) if begin >= 0 else ""
            if reader.read(calls_text).calls == (call,):
                return reader
        return None

    def ends_removed(self, text: str) -> str:
        """A text up to the first token that ends a reply."""
        for mark in self._special.finditer(text):
            if self.tokenizer.special_ids[mark.group()] in self.all_ends:
                return text[: mark.start()]
        return text

    @functools.cached_property
    def all_ends(self) -> frozenset[int]:
        return frozenset((*self.stop_ids, *self._ends))

    @functools.cached_property
    def _special(self) -> re.Pattern:
        return _any_of(self.tokenizer.special_ids)

    @functools.cached_property
    def _steering(self) -> re.Pattern:
        """Special tokens that are no think tags."""
        return _any_of(set(self.tokenizer.special_ids) - {THINK, END_THINK})

    @functools.cached_property
    def _forged(self) -> re.Pattern:
        """Texts that no content may write: special tokens, think tags, and this module's private characters."""
        return _beginning({*self.tokenizer.special_ids, THINK, END_THINK})

    @functools.cached_property
    def _forged_by_assistant(self) -> re.Pattern:
        """The same for an assistant, in whose messages templates look for think tags."""
        return _beginning(set(self.tokenizer.special_ids) - {THINK, END_THINK})

    def _guarded(self, message: Message) -> Message:
        """A message with marks inside the texts that no content may write."""
        pattern = self._forged_by_assistant if message.role == "assistant" else self._forged
        thinking = None if message.thinking is None else _guard(message.thinking, self._forged)
        calls = tuple(ToolCall(_guard(call.name, self._forged), _guard(dict(call.arguments), self._forged)) for call in message.tool_calls)
        return Message(message.role, _guard(message.content, pattern), thinking, calls)

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        return self.template.render(messages, tools, generate, **self.options)

    def encode(self, text: str, before: str | None = "") -> tuple[int, ...]:
        """Ids of a rendering. Text between two special tokens is encoded as one, whoever wrote it, as `transformers` does.

        `before` is what stands in front of it: None if this is the start of all, the empty string if other text.
        """
        ids, place = [], 0
        for mark in self._special.finditer(text):
            ids += self._encode_run(text[place : mark.start()], before, mark.group())
            ids.append(self.tokenizer.special_ids[mark.group()])
            place, before = mark.end(), mark.group()
        return (*ids, *self._encode_run(text[place:], before, None))

    def _encode_run(self, text: str, before: str | None, after: str | None) -> list[int]:
        text = unmarked(text)
        if not text:
            return []
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return self.tokenizer.encode_between(text, before, after)
        return self.tokenizer.encode(text)

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = True
    ) -> tuple[int, ...]:
        """Ids of messages that are all text (imitation data, comparisons), without a conversation: the template's own rendering."""
        return self.encode(self._render(list(map(self._guarded, messages)), self._offered(tools), generate), before=None)

    def _offered(self, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        if tools and not ("tools" in self.template.source and self.call_reader is not None):
            raise ValueError("the chat template has no way to announce tools; describe them in the system prompt")
        return tuple(_guard(dict(tool), self._forged) for tool in tools)

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A conversation from messages that the policy is to answer.

        Raises `ValueError` without messages, for tools where the template offers none, and for what the template refuses.
        """
        if not messages:
            raise ValueError("a conversation starts with at least one message")
        guarded, offered = tuple(map(self._guarded, messages)), self._offered(tools)
        text = self._render(guarded, offered, True)
        return Conversation((self._ask(text, None),), messages=guarded, tools=offered, text=text)

    def _ask(self, text: str, before: str | None) -> Turn:
        """A turn that waits for its reply, from a rendering that ends with a generation prompt."""
        ids, cut = self.encode(text, before), self._start_of_thought(text, len(text))
        head = ids if cut == len(text) else self.encode(text[:cut], before)
        return Turn(head, ids[len(head) :]) if ids[: len(head)] == head else Turn(ids)

    def _start_of_thought(self, text: str, end: int) -> int:
        """Where the think block begins that stands before `end` and behind the last token that steers; `end` if there is none."""
        place = max((mark.end() for mark in self._steering.finditer(text, 0, end)), default=0)
        start = text.find(THINK, place, end)
        return end if start < 0 else start

    def reply(self, conversation: Conversation, ids: Iterable[SupportsInt]) -> Conversation:
        """Appends what the policy emitted, its stop token included, verbatim. Raises `ValueError` if nobody was asked."""
        if not conversation.waiting:
            raise ValueError("the last turn already has its reply; extend the conversation first")
        ids = tuple(checked_ids(ids, self.tokenizer.vocab_size, "tokenizer's"))
        turns = (*conversation.turns[:-1], dataclasses.replace(conversation.turns[-1], reply=ids))
        return dataclasses.replace(conversation, turns=turns, waiting=False)

    def extend(self, conversation: Conversation, messages: Sequence[Message], foreign: bool = False) -> Conversation:
        """Closes the last turn, adds what others say, and asks again.

        A reply that was cut off gets the template's end of a turn, as a token that nobody emitted. Raises `ValueError` on an assistant's
        message, which `foreign` takes as text that the policy did not emit, and for what the template refuses.
        """
        if conversation.waiting:
            raise ValueError("the last turn waits for its reply; add that first")
        if not messages or not foreign and any(m.role == "assistant" for m in messages):
            raise ValueError("extend takes at least one message, of users, tools or the system; an assistant's is added by reply")
        number, last = len(conversation.turns) - 1, conversation.turns[-1]
        hears_tools = any(m.role == "tool" for m in messages)
        reply = self.read(conversation, hears_tools)
        answered = reply.tool_calls if hears_tools else ()
        all_messages = (*conversation.messages, self._slotted(reply, answered, number), *map(self._guarded, messages))
        try:
            text = self._render(all_messages, conversation.tools, True)
        except TemplateError:
            if len(answered) < 2:
                raise
            all_messages = (*conversation.messages, self._slotted(reply, answered[-1:], number), *map(self._guarded, messages))
            text = self._render(all_messages, conversation.tools, True)  # some templates take one call in a message
        end = _end_of_slots(text, number)
        turns = (*conversation.turns, self._ask(*self._behind(text[end:], last.reply)))
        as_it_grew = self._shows_as_said(conversation, reply, text[:end]) and self._ends_alike(text[end:], last.reply)
        rewritten = conversation.rewritten or not as_it_grew
        grown = dataclasses.replace(conversation, turns=turns, waiting=True, rewritten=rewritten, messages=all_messages, text=text)
        if self.history == "template" and rewritten:
            turns = self._turns_of(conversation, text)
            grown = dataclasses.replace(grown, turns=turns)
            if not extends(conversation, grown):
                past = tuple(dataclasses.replace(turn, fresh=False) for turn in turns[:-1])
                return dataclasses.replace(grown, turns=(*past, turns[-1]), sample=conversation.sample + 1)
        if not extends(conversation, grown):
            raise RuntimeError("law 1: the new prompt does not extend the last one; please report this with the tokenizer and the template")
        return grown

    def _slotted(self, reply: Reply, answered: Sequence[ToolCall], number: int) -> Message:
        """The policy's message for the template: slots for its words, and the calls that tools have answered, by name."""
        calls = [ToolCall(_guard(call.name, self._forged), {}) for call in answered]
        if calls:
            calls[-1] = ToolCall(calls[-1].name, {"slot": slot(f"c{number}")})
        return Message("assistant", slot(number), slot(f"t{number}") if reply.thinking else None, tuple(calls))

    def _behind(self, text: str, reply: tuple[int, ...]) -> tuple[str, str]:
        """What stands behind a reply, from the end of its turn on, and the end that stands in front of it if the policy wrote that."""
        for mark in self._special.finditer(text):
            if (end := self.tokenizer.special_ids[mark.group()]) in self.all_ends:
                wrote = reply[-1:] and reply[-1] in (end, *self._ends)
                return (text[mark.end() :], mark.group()) if wrote else (text[mark.start() :], "")
        return text, ""

    def _ends_alike(self, text: str, reply: tuple[int, ...]) -> bool:
        """Whether a finished reply ended as the template ends it."""
        ends = (self.tokenizer.special_ids[mark.group()] for mark in self._special.finditer(text))
        end = next((i for i in ends if i in self.all_ends), None)
        return not reply or reply[-1] not in self.stop_ids or reply[-1] == end

    def _text_of(self, turn: Turn) -> str:
        """A turn's opening and reply, its stop token left out."""
        finished = turn.reply[-1:] != () and turn.reply[-1] in self.stop_ids
        return self.tokenizer.decode([*turn.opening, *(turn.reply[:-1] if finished else turn.reply)])

    def _shows_as_said(self, conversation: Conversation, reply: Reply, shown: str) -> bool:
        """Whether the template shows all up to the last reply's end as it was said. Of a reply with tool calls only what precedes it."""
        if reply.tool_calls:
            return shown.startswith(conversation.text)
        number, last = len(conversation.turns) - 1, conversation.turns[-1]
        before = conversation.text
        before = before[: self._start_of_thought(before, len(before))] if last.opening else before
        if not shown.startswith(before):
            return False
        words = {slot(f"t{number}"): reply.thinking or "", slot(number): reply.content}
        return _fill(shown[len(before) :], words) == self._text_of(last)

    def _turns_of(self, conversation: Conversation, text: str) -> tuple[Turn, ...]:
        """The turns of a whole rendering: the template's words encoded anew, and the policy's own ids where its words stand.

        A reply whose thinking the template drops stands without it.
        """
        turns, place = [], 0
        for number, turn in enumerate(conversation.turns):
            at = text.find(slot(number))
            if at < 0:
                raise TemplateError("history='template': the chat template shows a reply's tool calls alone; use history='keep'")
            start, thought = self._start_of_thought(text, at), slot(f"t{number}")
            opening = self.tokenizer.decode(turn.opening)
            if thought in text or (text[start:at] == opening and END_THINK not in self.tokenizer.decode(turn.reply)):
                kept = turn
            else:
                start, kept = at, dataclasses.replace(turn, opening=(), reply=self._without_thinking(turn.reply))
            head, before = (text[:start], None) if number == 0 else self._behind(text[place:start], turns[-1].reply)
            turns.append(dataclasses.replace(kept, head=self.encode(head, before)))
            place = _end_of_slots(text, number)
        return (*turns, self._ask(*self._behind(text[place:], turns[-1].reply)))

    def _without_thinking(self, reply: tuple[int, ...]) -> tuple[int, ...]:
        """A reply's ids behind its think block, and behind the newlines that the template drops there."""
        if END_THINK not in self.tokenizer.decode(reply):
            return reply
        cut = bisect.bisect_left(range(len(reply)), True, key=lambda n: END_THINK in self.tokenizer.decode(reply[: n + 1])) + 1
        while self._drops_newlines and cut < len(reply) and set(self.tokenizer.decode(reply[cut : cut + 1])) == {"\n"}:
            cut += 1
        return reply[cut:]

    @functools.cached_property
    def _drops_newlines(self) -> bool:
        """Whether the newlines behind a think block that the template drops go with it."""
        message = Message("assistant", f"{THINK}\nx\n{END_THINK}\n\n{slot(0)}")
        text = self._render([Message("user", "?"), message, Message("user", "?")], (), False)
        return not text[: max(0, text.find(slot(0)))].endswith("\n\n")

    def read(self, conversation: Conversation, reads_calls: bool = False) -> Reply:
        """The last reply as text: thinking, content, and calls if tools were offered, or `reads_calls`. Never fails on what it says."""
        turn = conversation.turns[-2] if conversation.waiting and len(conversation.turns) > 1 else conversation.turns[-1]
        finished = turn.reply[-1:] != () and turn.reply[-1] in self.stop_ids
        return read_reply(self._text_of(turn), finished, self.thinks, self.call_reader if reads_calls or conversation.tools else None)


def _any_of(texts: Iterable[str]) -> re.Pattern:
    """Finds any of the texts, the longest first; none of none."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _beginning(texts: Iterable[str]) -> re.Pattern:
    """Finds each sign with which one of the texts begins, within another one too, and every private sign."""
    alone = {MARK, OPEN, CLOSE, *(text for text in texts if len(text) == 1)}
    longer = _any_of(text for text in texts if len(text) > 1).pattern
    return re.compile(f"(?P<alone>{_any_of(alone).pattern})|(?=(?:{longer})).", re.DOTALL)


def _guard(value: Any, forged: re.Pattern) -> Any:
    """A value in whose texts a mark breaks what they may not spell. `Chat.encode` takes the marks out again."""
    if isinstance(value, str):
        return forged.sub(_mark, value)
    if isinstance(value, Mapping):
        return {_guard(key, forged): _guard(item, forged) for key, item in value.items()}
    return [_guard(item, forged) for item in value] if isinstance(value, list | tuple) else value


def unmarked(text: str) -> str:
    """A rendering as its contents were before they were guarded."""
    return _ESCAPED.sub(lambda match: chr(int(match.group(1), 16)) if match.group(1) else "", text)


def _mark(match: re.Match) -> str:
    """A mark behind the sign, or in place of one that is a special token alone."""
    sign = match.group()
    return f"{MARK}{ord(sign):x};" if match["alone"] else f"{sign}{MARK}-"


def _fill(text: str, words: Mapping[str, str]) -> str:
    """A text with words in place of its slots."""
    for place, word in words.items():
        text = text.replace(place, word)
    return text


def _end_of_slots(text: str, number: int) -> int:
    """Where a reply ends in a rendering: behind its content, or its last call. Raises `TemplateError` if the template shows neither."""
    ends = [place + len(marker) for marker in (slot(number), slot(f"c{number}")) if (place := text.find(marker)) >= 0]
    if not ends:
        raise TemplateError(f"the chat template does not write what an assistant says as it is: {text[-200:]!r}")
    return max(ends)
