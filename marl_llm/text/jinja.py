"""A checkpoint's own chat template, in Jinja (extra `hf`): rendered in a sandbox, and compared with ours when it is loaded.

`load_chat(directory)` gives a `Chat` in the format whose rendering is nearest to the checkpoint's template on `PROBES`, a fixed set of
conversations, and warns with the difference where one is left: the conversation the policy is trained on would then not be the one it
knows, or that other tools will feed it.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import json
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from marl_llm.text.chat import Chat
from marl_llm.text.formats import FORMATS, ChatFormat, History, Message, ToolCall, spell_text
from marl_llm.text.huggingface import HuggingFaceTokenizer, load_tokenizer, read_json


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


@functools.lru_cache(maxsize=1)
def _environment():
    """The environment of `transformers.apply_chat_template`: immutable sandbox, trimmed blocks, its filters and functions."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError as error:
        raise ImportError("a checkpoint's chat template needs the library `jinja2`: pip install 'marl_llm[hf]'") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`, which marks an assistant's words for masks; we know them without it, so that it renders its body."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


class JinjaTemplate:
    """A chat template's source, compiled in a sandbox. Raises `ValueError` when it is no Jinja template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        self.source, self.special_tokens = source, dict(special_tokens or {})
        environment = _environment()
        import jinja2

        self._errors = (jinja2.exceptions.TemplateError, TypeError, AttributeError, KeyError, IndexError, ValueError)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is no Jinja: line {error.lineno}, {error.message}") from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = True, **options: Any
    ) -> str:
        """Messages as text; `options` reach the template (`enable_thinking=False`). Raises `ValueError` with what the template said."""
        values = {"messages": [as_dict(m) for m in messages], "tools": list(tools) or None, "add_generation_prompt": generate}
        try:
            return self._template.render(**self.special_tokens, **values, **options)
        except self._errors as error:
            raise ValueError(f"the chat template refuses: {type(error).__name__}: {error}") from error


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
    options = {"enable_thinking": mode == "on"} if form.thinks else {}
    found = []
    for probe in PROBES:
        if not form.thinks and any(m.thinking is not None for m in probe.messages):
            continue
        try:
            ours = spell_text(form, probe.messages, probe.tools, mode, history, probe.generate)
        except ValueError:  # the format says so to its user as well: nothing to compare
            continue
        try:
            theirs = template.render(probe.messages, probe.tools, probe.generate, **options)
        except ValueError as error:
            theirs = f"{error}\n"
        if ours != theirs:
            lines = [[repr(line)[1:-1] for line in text.splitlines(keepends=True)] for text in (theirs, ours)]
            diff = difflib.unified_diff(*lines, "checkpoint", "ours", lineterm="", n=1)
            found.append(Difference(probe.name, "\n".join(diff)))
    return found


def load_template(directory: str | pathlib.Path) -> JinjaTemplate | None:
    """The chat template of a checkpoint's directory: `chat_template.jinja`, else the one in `tokenizer_config.json`; `None` without either.

    Of several named templates it is `default`. Raises `ValueError` on a damaged file or a list without a default.
    """
    directory = pathlib.Path(directory)
    path, config = directory / "tokenizer_config.json", {}
    if path.is_file():
        config = read_json(path.read_text(encoding="utf-8"), str(path))
    source = config.get("chat_template")
    if (directory / "chat_template.jinja").is_file():
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        if "default" not in named:
            raise ValueError(f"{path} has chat templates {sorted(named)}, none of them named default")
        source = named["default"]
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    spelled = {name: token["content"] if isinstance(token, Mapping) else token for name, token in tokens.items() if token is not None}
    return None if source is None else JinjaTemplate(source, spelled)


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
    found = {f.name: differences(template, f, modes[f.name]) for f in forms}
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
