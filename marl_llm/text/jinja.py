"""A checkpoint's own chat template, in Jinja (extra `hf`): rendered in a process of its own, and compared with ours when it is loaded.

`load_chat(directory)` gives a `Chat` in the format whose rendering is nearest to the checkpoint's template on `PROBES`, a fixed set of
conversations, and warns with the difference where one is left: the conversation the policy is trained on would then not be the one it
knows, or that other tools will feed it.
"""

from __future__ import annotations

import datetime
import difflib
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.text.chat import Chat
from marl_llm.text.formats import FORMATS, ChatFormat, History, Message, ToolCall, spell_text
from marl_llm.text.huggingface import HuggingFaceTokenizer, load_tokenizer, token_spelling
from marl_llm.text.rendering import CPU_S, LARGEST, TemplateError, TemplateLimitError, check_syntax, render
from marl_llm.text.tokenizer_files import files_directory
from marl_llm.untrusted import read_file, read_json_file

NOW = datetime.datetime(2025, 1, 1)  # what a template is told if nobody says otherwise: the same prompts on every day
PROBE_S = 0.1  # of processor time, for one probe; ordinary templates take less than a millisecond


class ChatTemplateWarning(UserWarning):
    """A checkpoint's template renders a probe conversation differently from our format."""


class Probe(NamedTuple):
    """A conversation to compare on. `generate`: with the generation prompt."""

    name: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    generate: bool = True


_SYSTEM, _ASK = Message("system", "You plan paths.\nBe brief."), Message("user", "Where is the goal?")
_AGAIN = Message("user", "And now? ünï 中文 <b>&amp;</b>")
_THOUGHT = Message("assistant", "North.", thinking="The map says\nnorth.")
_TAGGED = Message("assistant", "<think>\nThe map says north.\n</think>\n\nNorth.")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a cell: 'x' & \"y\" – é",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    },
}
_CALL = Message("assistant", "", tool_calls=(ToolCall("look", {"x": 3, "why": "é <"}),))
_CALLS = Message("assistant", "Looking.", tool_calls=(ToolCall("look", {"x": 1}), ToolCall("look", {"x": 2})))
_THOUGHT_CALL = Message("assistant", "Looking.", thinking="I should look.", tool_calls=(ToolCall("look", {"x": 1}),))
_SEEN, _SEEN_TOO = Message("tool", "wall"), Message("tool", '{"free": true}')

PROBES: tuple[Probe, ...] = (
    Probe("a question", (_ASK,)),
    Probe("a system prompt", (_SYSTEM, _ASK)),
    Probe("an answer at the end", (_SYSTEM, _ASK, Message("assistant", "North.")), generate=False),
    Probe("two turns", (_SYSTEM, _ASK, Message("assistant", "North."), _AGAIN)),
    Probe("a thought in the history, in tags", (_SYSTEM, _ASK, _TAGGED, _AGAIN)),
    Probe("a thought in the history, apart", (_SYSTEM, _ASK, _THOUGHT, _AGAIN)),
    Probe("a thought at the end", (_ASK, _TAGGED), generate=False),
    Probe("tools", (_ASK,), (_TOOL,)),
    Probe("tools and a system prompt", (_SYSTEM, _ASK), (_TOOL, _TOOL)),
    Probe("a call and its answer", (_SYSTEM, _ASK, _CALL, _SEEN), (_TOOL,)),
    Probe("two calls, two answers, a new question", (_ASK, _CALLS, _SEEN, _SEEN_TOO, Message("assistant", "A wall."), _AGAIN), (_TOOL,)),
    Probe("a thought before a call", (_ASK, _THOUGHT_CALL, _SEEN), (_TOOL,)),
    Probe("a second system prompt", (_SYSTEM, _ASK, Message("assistant", "North."), Message("system", "Hurry."), _AGAIN)),
)


class Difference(NamedTuple):
    """Where the renderings of a probe part: a unified diff from the checkpoint's to ours."""

    probe: str
    diff: str


class JinjaTemplate:
    """A chat template, rendered in a process of its own (`rendering`). Raises `ValueError` when it is no Jinja template.

    `now` is the time that `strftime_now` tells it: two renderings of one conversation are the same text, whenever they are made.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, now: datetime.datetime = NOW):
        self.source, self.special_tokens, self.now = source, dict(special_tokens or {}), now
        self._probed: dict[bool | None, list[str]] = {}
        check_syntax(source)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = True, **options: Any
    ) -> str:
        """Messages as text; `options` reach the template (`enable_thinking=False`). Raises `ValueError` with what the template said."""
        return self._render(messages, tools, generate, options, CPU_S)

    def _render(self, messages, tools, generate: bool, options: Mapping[str, Any], seconds: float) -> str:
        values = {"messages": [as_dict(m) for m in messages], "tools": list(tools) or None, "add_generation_prompt": generate}
        return render(self.source, self.special_tokens | values | options, self.now, seconds)

    def probe_texts(self, thinking: bool | None) -> list[str]:
        """The texts of `PROBES`, or what the template said instead. `thinking` is its option `enable_thinking`; None: not given.

        Raises `ValueError` where a probe takes too much: a whole conversation would too.
        """
        if thinking not in self._probed:
            options, texts = {} if thinking is None else {"enable_thinking": thinking}, []
            for probe in PROBES:
                try:
                    texts.append(self._render(probe.messages, probe.tools, probe.generate, options, PROBE_S))
                except TemplateLimitError:
                    raise
                except TemplateError as error:
                    texts.append(f"{error}\n")
            self._probed[thinking] = texts
        return self._probed[thinking]


def as_dict(message: Message) -> dict[str, Any]:
    """A message as `transformers` and OpenAI's interface write it."""
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thinking is not None:
        written["reasoning_content"] = message.thinking
    if message.tool_calls:
        calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
        written["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    return written


def differences(template: JinjaTemplate, form: ChatFormat, thinking: str | None = None, history: History = "strip") -> list[Difference]:
    """The probes that `template` and `form` render differently. Probes that the format cannot say do not count."""
    mode = next(iter(form.openings)) if thinking is None else thinking
    found = []
    for probe, theirs in zip(PROBES, template.probe_texts(mode == "on" if form.thinks else None), strict=True):
        if not form.thinks and any(m.thinking is not None for m in probe.messages):
            continue
        try:
            ours = spell_text(form, probe.messages, probe.tools, mode, history, probe.generate)
        except ValueError:  # the format says so to its user as well: nothing to compare
            continue
        if ours != theirs:
            lines = [[repr(line)[1:-1] for line in text.splitlines(keepends=True)] for text in (theirs, ours)]
            diff = difflib.unified_diff(*lines, "checkpoint", "ours", lineterm="", n=1)
            found.append(Difference(probe.name, "\n".join(diff)))
    return found


def load_template(directory: str | pathlib.Path) -> JinjaTemplate | None:
    """The chat template of a checkpoint's directory: `chat_template.jinja`, else the one in `tokenizer_config.json`; `None` without either.

    Of several named templates it is `default`. Raises `ValueError` on a damaged file or a list without a default.
    """
    directory = files_directory(directory)
    config_path, path = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    config = read_json_file(config_path) if config_path.exists() else {}
    source = config.get("chat_template")
    if path.exists():
        try:
            source = read_file(path, LARGEST).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 (byte {error.start}): incomplete or damaged, copy it again") from error
    else:
        path = config_path
    if isinstance(source, list):
        source = _default_of(source, path)
    if source is not None and not isinstance(source, str):
        raise ValueError(f"{path}: chat_template must be a text or a list of named ones, not {type(source).__name__}")
    tokens = {name: token_spelling(config, name, str(config_path)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    spelled = {name: token for name, token in tokens.items() if token is not None}
    try:
        return None if source is None else JinjaTemplate(source, spelled)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _default_of(named: list, path: pathlib.Path) -> Any:
    """Of named templates, `[{"name": ..., "template": ...}]`, the one called default."""
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry for entry in named):
        raise ValueError(f"{path}: chat_template: every entry of the list must have a name and a template")
    templates = {entry["name"]: entry["template"] for entry in named}
    if "default" not in templates:
        raise ValueError(f"{path} has chat templates {sorted(templates)[:8]}, none of them named default")
    return templates["default"]


def load_chat(
    directory: str | pathlib.Path,
    thinking: str | None = None,
    history: History = "keep",
    form: ChatFormat | None = None,
    tokenizer: HuggingFaceTokenizer | None = None,
) -> Chat:
    """The chat of a Hugging Face checkpoint: its tokenizer, and the format nearest to its template (or `form`).

    Warns with `ChatTemplateWarning` and a diff if the checkpoint's template renders a probe differently. Without a template the format
    follows from the special tokens alone. Raises `ValueError` when no format fits the tokenizer.
    """
    tokenizer = load_tokenizer(directory) if tokenizer is None else tokenizer
    forms = [f for f in FORMATS if set(f.needs) <= set(tokenizer.special_ids)] if form is None else [form]
    if not forms:
        needs, has = {f.name: f.needs for f in FORMATS}, sorted(tokenizer.special_ids)[:12]
        raise ValueError(f"no chat format fits the special tokens of {directory}: it has {has}; the formats need {needs}")
    template = load_template(directory)
    if template is None:
        return Chat(tokenizer, forms[0], thinking, history)
    modes = {f.name: thinking if thinking in f.openings else None for f in forms}
    try:
        found = {f.name: differences(template, f, modes[f.name]) for f in forms}
    except TemplateLimitError as error:
        raise ValueError(f"{directory}: {error}; choose a checkpoint whose template you trust") from error
    chosen = min(forms, key=lambda f: len(found[f.name]))
    if found[chosen.name]:
        named = ", ".join(d.probe for d in found[chosen.name])
        first = found[chosen.name][0]
        message = (
            f"{directory}: the checkpoint's chat template differs from the format {chosen.name} on {len(found[chosen.name])} of "
            f"{len(PROBES)} probes ({named}); '{first.probe}', from the checkpoint's to ours:\n{first.diff}"
        )
        warnings.warn(message, ChatTemplateWarning, stacklevel=2)
    return Chat(tokenizer, chosen, thinking, history)
