"""Conversations as token ids that only grow: what the policy emitted stays, byte for byte, and the next prompt extends it (law 1).

    chat = Chat(tokenizer, QWEN3, thinking="on")
    talk = chat.start([Message("system", "Be brief."), Message("user", "2+2?")])     # talk.ids ends with the generation prompt
    talk = chat.reply(talk, sampled_ids)                                             # kept verbatim, never decoded and re-encoded
    talk = chat.extend(talk, [Message("user", "and 3+3?")])                          # closes the turn, adds messages, asks again

**Thinking in history.** `history="keep"` (default): every prompt extends the last one, so that one row of ids holds the whole conversation
and `emitted` marks all that the policy said in it. `history="strip"`: past thinking leaves the prompt where the family's official template
drops it. A prompt that lost tokens is no extension, so law 1 then means: *a new prompt is a new sample*. `Conversation.sample` counts up,
`emitted` starts afresh (earlier replies were drawn behind other prompts: they are context now, and were trained as samples of
their own), and what stays of earlier replies still is their own ids. `extends` tells the two cases apart, and `Chat.extend` checks.

**Special tokens.** Only the format writes them. In content (a user's, a tool's, another agent's) their spelling is plain text; with
`specials_in_content="as_tokens"` it becomes tokens, as `transformers.apply_chat_template` has it, which lets content end its own turn.
Tags that a vocabulary does not hold as tokens (Qwen2.5's `<tool_response>`) are plain text from either side and cannot be told apart.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsInt

from marl_llm.text.formats import (
    END_THINK,
    THINK,
    ChatFormat,
    History,
    Message,
    Piece,
    ToolCall,
    is_query,
    opening_of,
    spell,
    split_thinking,
)
from marl_llm.text.huggingface import HuggingFaceTokenizer
from marl_llm.text.tokenizer import Tokenizer, checked_ids

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_JSON, _BLANKS = json.JSONDecoder(), re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class Turn:
    """A stretch of the conversation. Everything but `reply` was written by the format; a turn without `asked` holds messages only."""

    head: tuple[int, ...]  # messages, or the assistant's head
    opening: tuple[int, ...] = ()  # the think block, or its start, that the generation prompt adds
    reply: tuple[int, ...] = ()  # the policy's ids
    tail: tuple[int, ...] = ()  # what ends the turn behind the reply
    asked: bool = False  # a turn of the policy
    query: bool = False  # holds a user's query
    fresh: bool = True  # the reply was drawn behind the ids that stand before it now

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids in order."""
        return (*self.head, *self.opening, *self.reply, *self.tail)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A value. `waiting`: the ids end with a generation prompt. `sample`: how often a prompt did not extend the one before."""

    turns: tuple[Turn, ...]
    sample: int = 0
    waiting: bool = True

    @functools.cached_property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the whole conversation, `[L]`."""
        return tuple(itertools.chain.from_iterable(turn.ids for turn in self.turns))

    @functools.cached_property
    def emitted(self) -> tuple[bool, ...]:
        """Which of `ids` the policy emitted in this sample, `[L]`: those that a loss may score."""
        mask = []
        for turn in self.turns:
            mask += [False] * (len(turn.head) + len(turn.opening)) + [turn.fresh] * len(turn.reply) + [False] * len(turn.tail)
        return tuple(mask)


@dataclasses.dataclass(frozen=True)
class Reply:
    """A reply read as text. `broken_calls` are the texts of tool calls that are no JSON object of a name and arguments."""

    content: str
    thinking: str | None
    tool_calls: tuple[ToolCall, ...]
    broken_calls: tuple[str, ...]
    finished: bool  # it ended with a stop token, not at the limit of tokens
    unfinished_think: bool | None = None  # it ended within a think block, its own or the prompt's; None: the format has no such blocks


def extends(before: Conversation, after: Conversation) -> bool:
    """Law 1: whether the ids of `after` begin with all of `before`'s."""
    return after.ids[: len(before.ids)] == before.ids


def _split_calls(text: str) -> tuple[str, list[str]]:
    """A text without its tool calls, and what stands in them. In linear time: a pattern would look for each end anew."""
    rest, bodies, place = [], [], 0
    while (start := text.find(_CALL, place)) >= 0 and (end := _end_of_call(text, start + len(_CALL))) >= 0:
        rest.append(text[place:start])
        bodies.append(text[start + len(_CALL) : end])
        place = end + len(_END_CALL)
    return "".join([*rest, text[place:]]), bodies


def _end_of_call(text: str, start: int) -> int:
    """Where the end tag of a call stands, -1 without one: behind its JSON, whose texts may hold the tag, else the next one."""
    try:
        behind = _JSON.raw_decode(text, _BLANKS.match(text, start).end())[1]
        behind = _BLANKS.match(text, behind).end()
        if text.startswith(_END_CALL, behind):
            return behind
    except (ValueError, RecursionError):
        pass  # what a policy writes may be anything
    return text.find(_END_CALL, start)


def _split_thought(text: str) -> tuple[str | None, str]:
    """(thinking, the rest) of a reply: its thinking ends at the first `</think>` that is no text of a tool call."""
    call = text.find(_CALL)
    if THINK not in text[: max(call, 0)] and 0 <= call < text.find(END_THINK) < _end_of_call(text, call + len(_CALL)):
        return None, text
    before, mark, after = text.partition(END_THINK)
    if mark:
        return before.rstrip("\n").split(THINK)[-1].lstrip("\n"), after.lstrip("\n")
    if text.lstrip().startswith(THINK):
        return text.lstrip().removeprefix(THINK).lstrip("\n"), ""  # cut off while it thought
    return None, text


def _read_call(body: str) -> ToolCall | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):  # what a policy writes may be anything, integers of 5,000 digits too: it is listed as broken
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return None
    return ToolCall(call["name"], call["arguments"])


@dataclasses.dataclass(frozen=True)
class Chat:
    """A tokenizer that speaks a format. `thinking` is one of the format's modes (`None`: its first).

    Raises `ValueError` when the tokenizer lacks one of the format's special tokens, the format lacks the thinking mode, or an option would
    have no effect (`strip` where nothing thinks).
    """

    tokenizer: Tokenizer
    format: ChatFormat
    thinking: str | None = None
    history: History = "keep"
    specials_in_content: Literal["as_text", "as_tokens"] = "as_text"

    def __post_init__(self):
        form = self.format
        if missing := [s for s in form.needs if s not in self.tokenizer.special_ids]:
            has = sorted(self.tokenizer.special_ids)[:12]
            raise ValueError(f"the tokenizer has no special tokens {missing}, which the format {form.name} needs; it has {has}")
        if self.thinking is None:
            object.__setattr__(self, "thinking", next(iter(form.openings)))
        opening_of(form, self.thinking)
        if self.history not in ("keep", "strip") or self.specials_in_content not in ("as_text", "as_tokens"):
            raise ValueError(f"history={self.history!r}, specials_in_content={self.specials_in_content!r}: see the module's text")
        if self.history == "strip" and not form.thinks:
            raise ValueError(f"history='strip' has no effect: the format {form.name} has no thinking to strip")

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Where sampling stops: the format's end of turn, then the tokenizer's own stops."""
        return tuple(dict.fromkeys((self._special(self.format.end), *self.tokenizer.stop_ids)))

    def _special(self, token: str) -> int:
        return self.tokenizer.special_ids[token]

    @functools.cached_property
    def _specials(self) -> re.Pattern:
        tokens = sorted(self.tokenizer.special_ids, key=len, reverse=True)
        return re.compile("|".join(re.escape(token) for token in tokens) or r"(?!)")

    def encode(self, pieces: Iterable[Piece], before: str | None = "") -> tuple[int, ...]:
        """Ids of a rendering. Text between two special tokens is encoded as one, whoever wrote it, as `transformers` does.

        `before` is what stands in front of it: None if this is the start of all, the empty string if other text.
        """
        ids, run = [], ""
        for text, trusted in pieces:
            place = 0
            for mark in self._specials.finditer(text) if trusted or self.specials_in_content == "as_tokens" else ():
                ids += self._encode_run(run + text[place : mark.start()], before, mark.group())
                ids.append(self._special(mark.group()))
                run, place, before = "", mark.end(), mark.group()
            run += text[place:]
        return (*ids, *self._encode_run(run, before, None))

    def _encode_run(self, text: str, before: str | None, after: str | None) -> list[int]:
        if not text:
            return []
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return self.tokenizer.encode_between(text, before, after)
        return self.tokenizer.encode(text)

    def encode_messages(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = True
    ) -> tuple[int, ...]:
        """Ids of messages that are all text (imitation data, comparisons), without a conversation."""
        pieces = [p for one in spell(self.format, messages, tools, self.thinking, self.history) for p in one]
        return self.encode([*pieces, *(self._prompt() if generate else ())], before=None)

    def _prompt(self) -> tuple[Piece, Piece]:
        return Piece(self.format.heads["assistant"], True), Piece(opening_of(self.format, self.thinking), True)

    def _ask(self) -> Turn:
        head, opening = self._prompt()
        both, head = self.encode([head, opening]), self.encode([head])
        if both[: len(head)] != head:
            raise ValueError(f"the tokenizer merges {self.format.heads['assistant']!r} with {opening.text!r}")
        return Turn(head, both[len(head) :], asked=True)

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        """A conversation from messages that the policy is to answer. Raises `ValueError` if there are none.

        Assistants' messages among them are examples, rendered once; `strip` never takes anything from them later.
        """
        if not messages:
            raise ValueError("a conversation starts with at least one message")
        spelled = spell(self.format, messages, tools, self.thinking, self.history)
        head = self.encode((piece for pieces in spelled for piece in pieces), before=None)
        return Conversation((Turn(head, query=any(is_query(m) for m in messages)), self._ask()))

    def reply(self, talk: Conversation, ids: Iterable[SupportsInt]) -> Conversation:
        """Appends what the policy emitted, its stop token included, verbatim. Raises `ValueError` if nobody was asked."""
        if not talk.waiting:
            raise ValueError("the last turn already has its reply; extend the conversation first")
        ids = tuple(checked_ids(ids, self.tokenizer.vocab_size, "tokenizer's"))
        return Conversation((*talk.turns[:-1], dataclasses.replace(talk.turns[-1], reply=ids)), talk.sample, waiting=False)

    def extend(self, talk: Conversation, messages: Sequence[Message]) -> Conversation:
        """Closes the last turn, adds what others say, and asks again.

        A reply that was cut off gets the format's end of turn, as a token that nobody emitted. With `strip`, thinking that the official
        template would drop leaves; `sample` counts up if that changes the ids. Raises `ValueError` on an assistant's message.
        """
        if talk.waiting:
            raise ValueError("the last turn waits for its reply; add that first")
        if not messages or any(m.role == "assistant" for m in messages):
            raise ValueError("extend takes at least one message, of users, tools or the system; an assistant's is added by reply")
        last = talk.turns[-1]
        end = self._special(self.format.end)
        tail = self.encode([Piece(self.format.tails["assistant"], True)])
        closed = dataclasses.replace(last, tail=tail[1:] if last.reply[-1:] == (end,) else tail)
        # A system message first in `messages` is not at the start of the text: a dummy keeps it from being read so.
        spelled = spell(self.format, [Message("user", ""), *messages], (), self.thinking, self.history)[2:]
        added = Turn(self.encode(p for pieces in spelled for p in pieces), query=any(is_query(m) for m in messages))
        turns = (*talk.turns[:-1], closed, added)
        grown = Conversation((*turns, self._ask()), talk.sample)
        if self.history == "strip":
            grown = self._stripped(grown)
            if not extends(talk, grown):
                turns = tuple(dataclasses.replace(t, fresh=False) for t in grown.turns[:-1])
                return Conversation((*turns, grown.turns[-1]), talk.sample + 1)
        if not extends(talk, grown):
            raise RuntimeError("law 1: the new prompt does not extend the last one; please report this with the tokenizer and the format")
        return grown

    def _stripped(self, talk: Conversation) -> Conversation:
        query = max((i for i, turn in enumerate(talk.turns) if turn.query), default=len(talk.turns))
        turns = [
            turn if not turn.asked or i + 1 == len(talk.turns) else self._without_thinking(turn, step=i > query)
            for i, turn in enumerate(talk.turns)
        ]
        return dataclasses.replace(talk, turns=tuple(turns))

    def _without_thinking(self, turn: Turn, step: bool) -> Turn:
        """A past turn without its think block; one since the last query (`step`) loses an empty block only, if the format says so."""
        mark = self._special(END_THINK)
        cut = len(turn.reply) - turn.reply[::-1].index(mark) if mark in turn.reply else 0
        if step and self.format.steps_keep_thinking:
            thought, _ = split_thinking(self.tokenizer.decode(turn.reply[:cut]), newlines=True)
            if thought:
                return turn
        while cut and self.format.strip_newlines and set(self.tokenizer.decode(turn.reply[cut : cut + 1])) == {"\n"}:
            cut += 1
        return dataclasses.replace(turn, opening=(), reply=turn.reply[cut:])

    def read(self, talk: Conversation) -> Reply:
        """The last reply as text: thinking, content, and tool calls. Never fails on what a policy may have said."""
        turn = next(turn for turn in reversed(talk.turns) if turn.asked)
        finished = turn.reply[-1:] != () and turn.reply[-1] in self.stop_ids
        ids = [*turn.opening, *(turn.reply[:-1] if finished else turn.reply)]
        text, thinking = self.tokenizer.decode(ids), None
        unfinished = None
        if self.format.thinks:
            said = _split_calls(text)[0] if self.format.tools else text
            unfinished = said.rfind(THINK) > said.rfind(END_THINK)
            thinking, text = _split_thought(text)
        rest, bodies = _split_calls(text) if self.format.tools else (text, [])
        read = [(body, _read_call(body)) for body in bodies]
        calls, broken = [call for _, call in read if call], [body for body, call in read if not call]
        content = rest.strip() if bodies else text
        return Reply(content, thinking, tuple(calls), tuple(broken), finished, unfinished)
