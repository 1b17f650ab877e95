"""The chat of a checkpoint: its tokenizer and its own template, tried on six conversations before anything is trained on it."""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.text.chat import Chat, History, unmarked
from marl_llm.text.huggingface import HuggingFaceTokenizer, load_tokenizer
from marl_llm.text.jinja import CHATML, load_template
from marl_llm.text.messages import Message, ToolCall
from marl_llm.text.rendering import TemplateError
from marl_llm.text.replies import END_THINK, THINK


class ChatTemplateWarning(UserWarning):
    """A checkpoint's template shows a conversation otherwise than it grew."""


class Trial(NamedTuple):
    """A conversation to try: `replies` are the policy's, and `heard` the messages behind each of them."""

    name: str
    start: tuple[Message, ...]
    replies: tuple[Message, ...]
    heard: tuple[tuple[Message, ...], ...]


_ASK = Message("user", "Where is <b>the</b> goal,\n  if any? ünï 中文 & 'x'")
_AGAIN, _ONCE_MORE = Message("user", "And now?"), Message("user", "Are you sure?")
_SYSTEM = Message("system", "You plan paths.\nBe brief.")
_ANSWER, _THOUGHT = Message("assistant", "North."), Message("assistant", "North.", thinking="The map says\nnorth.")
_CALL = Message("assistant", "", tool_calls=(ToolCall("look", {"x": 3}),))
TRIALS: tuple[Trial, ...] = (
    Trial("an answer", (_ASK,), (_ANSWER,), ((_AGAIN,),)),
    Trial("a system prompt", (_SYSTEM, _ASK), (_ANSWER,), ((_AGAIN,),)),
    Trial("two answers", (_ASK,), (_ANSWER, Message("assistant", "South.")), ((_AGAIN,), (_ONCE_MORE,))),
    Trial("a thought", (_ASK,), (_THOUGHT,), ((_AGAIN,),)),
    Trial("a call and its answer", (_ASK,), (_CALL,), ((Message("tool", "wall"),),)),
    Trial("a call and a new question", (_ASK,), (_CALL, _ANSWER), ((Message("tool", "wall"),), (_AGAIN,))),
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a cell.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}


class TrialResult(NamedTuple):
    """`refused`: what the template said instead of rendering it; else whether the ids that grew are the template's own."""

    name: str
    equal: bool
    refused: str = ""


def try_template(chat: Chat) -> list[TrialResult]:
    """Grows each of `TRIALS` by ids, and compares with the template's rendering of the same messages as text.

    Trials of what the template has not, thinking or calls, are left out. Raises `ValueError` where it alters what messages say.
    """
    results = []
    for trial in TRIALS:
        calls = any(reply.tool_calls for reply in trial.replies)
        if (calls and chat.call_reader is None) or (any(reply.thinking for reply in trial.replies) and not chat.thinks):
            continue
        messages = list(trial.start)
        try:
            conversation = chat.start(trial.start, (TOOL,) if calls else ())
            for reply, heard in zip(trial.replies, trial.heard, strict=True):
                conversation = chat.extend(chat.reply(conversation, spoken(chat, reply)), heard)
                messages += [reply, *heard]
            whole = chat.encode_messages(messages, (TOOL,) if calls else ())
        except TemplateError as error:
            results.append(TrialResult(trial.name, False, str(error)))
            continue
        check_contents(unmarked(conversation.text), [message for message in messages if message.role != "assistant"])
        results.append(TrialResult(trial.name, conversation.ids == whole))
    return results


def takes_system(chat: Chat) -> bool:
    """Whether the template renders a system's message before a user's: some refuse it, and some leave it out."""
    try:
        return _SYSTEM.content in unmarked(chat.start([_SYSTEM, _ASK]).text)
    except TemplateError:
        return False


def spoken(chat: Chat, reply: Message) -> tuple[int, ...]:
    """The ids of a reply as a policy would emit it, with its end; calls as the template writes them."""
    if reply.tool_calls:
        prompt = chat.template.render([_ASK], (TOOL,), True, **chat.options)
        rendered = chat.template.render([_ASK, reply, Message("tool", "")], (TOOL,), False, **chat.options)
        text = rendered[len(prompt) :] if rendered.startswith(prompt) else rendered[rendered.index(_ASK.content) :]
        return chat.encode(chat.ends_removed(text)) + chat.stop_ids[:1]
    thought = ""
    if reply.thinking is not None:
        opening = "" if chat.start([_ASK]).turns[-1].opening else f"{THINK}\n"
        thought = f"{opening}{reply.thinking}\n{END_THINK}\n\n"
    return chat.encode(thought + reply.content) + chat.stop_ids[:1]


def check_contents(text: str, messages: Sequence[Message]) -> None:
    """Raises `ValueError` if a rendering does not hold what a message says, but for blanks around it."""
    for message in messages:
        if message.content.strip() not in text:
            raise ValueError(f"the chat template alters what a {message.role} says: {message.content!r} is not in {text[-400:]!r}")


def template_options(thinking: str | None) -> dict[str, Any]:
    """The option of Qwen3's and other templates that says whether a reply opens with thinking: `"on"`, `"off"`; None leaves it open."""
    return {} if thinking is None else {"enable_thinking": thinking == "on"}


def load_chat(
    directory: str | pathlib.Path,
    options: Mapping[str, Any] | None = None,
    history: History = "keep",
    calls: str = "",
    tokenizer: HuggingFaceTokenizer | None = None,
) -> Chat:
    """The chat of a Hugging Face checkpoint, or a `.gguf` file: its tokenizer and its own template; without one, ChatML.

    Where the template refuses a system's message, as Gemma 2's does, or leaves it out, what it says stands at the beginning of the user's.

    Args:
      options: what the template is told, e.g. `{"enable_thinking": False}`.
      history, calls: see `Chat`.

    Warns with `ChatTemplateWarning` in one line where the template rewrites history. Raises `ValueError` when the template fails or alters
    what messages say, and without a template when the tokenizer lacks ChatML's tokens.
    """
    tokenizer = load_tokenizer(directory) if tokenizer is None else tokenizer
    template = load_template(directory)
    if template is None:
        if missing := {"<|im_start|>", "<|im_end|>"} - set(tokenizer.special_ids):
            has = sorted(tokenizer.special_ids)[:12]
            raise ValueError(
                f"{directory} has no chat template, and no ChatML either: its special tokens {has} lack {sorted(missing)}; "
                "put the template of its instruct version beside it, as chat_template.jinja"
            )
        template = CHATML
    options = dict(options or {})
    if options.get("enable_thinking") is False and END_THINK not in template.source:
        del options["enable_thinking"]  # nothing thinks that could be switched off
    try:
        chat = Chat(tokenizer, template, options, history, calls)
        if chat.call_reader is None:  # templates that put arguments together from texts
            other = dataclasses.replace(chat, template=dataclasses.replace(template, text_arguments=True))
            chat = chat if other.call_reader is None else other
        if not takes_system(chat):
            other = dataclasses.replace(chat, template=dataclasses.replace(chat.template, system_in_user=True))
            chat = other if takes_system(other) else chat
        results = try_template(chat)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    if rewritten := [trial.name for trial in results if not trial.equal and not trial.refused]:
        failures = f"{len(rewritten)} of {len(results)} trials ({', '.join(rewritten)})"
        message = f"{directory}: the chat template rewrites history in {failures}; prompts keep what was said (history={history!r})"
        warnings.warn(message, ChatTemplateWarning, stacklevel=2)
    return chat
