"""A checkpoint's own chat template, in Jinja (extra `hf`), rendered in a process of its own."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from marl_llm.text.huggingface import token_spelling
from marl_llm.text.messages import Message, as_dicts
from marl_llm.text.rendering import LARGEST, check_syntax, render
from marl_llm.text.tokenizer_files import files_directory
from marl_llm.untrusted import read_file, read_json_file

NOW = datetime.datetime(2025, 1, 1)  # what a template is told if nobody says otherwise: the same prompts on every day


@dataclasses.dataclass(frozen=True)
class JinjaTemplate:
    """A chat template, rendered in a process of its own (`rendering`).

    Attributes:
      source: in Jinja.
      special_tokens: texts that it knows by name, such as `bos_token`.
      now: the time that `strftime_now` tells it: two renderings of one conversation are the same text, whenever they are made.
      text_arguments: whether the arguments of calls are given to it as JSON text, in place of a mapping.
      system_in_user: whether the system's message is given to it at the beginning of the user's behind it, as Gemma 3's own template writes
        it; for templates that refuse a system's message or leave it out.
    """

    source: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    now: datetime.datetime = NOW
    text_arguments: bool = False
    system_in_user: bool = False

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), generate: bool = True, **options: Any) -> str:
        """Messages as text; `options` reach the template (`enable_thinking=False`). Raises `TemplateError` with what the template said."""
        if self.system_in_user and [message.role for message in messages[:2]] == ["system", "user"]:
            messages = [Message("user", f"{messages[0].content}\n\n{messages[1].content}"), *messages[2:]]
        written = as_dicts(messages, self.text_arguments)
        values = {"messages": written, "tools": list(tools) or None, "add_generation_prompt": generate}
        return render(self.source, {**self.special_tokens, **values, **options}, self.now)


CHATML = JinjaTemplate(
    """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>

A call is a JSON object with the function's name and its arguments within <tool_call></tool_call> tags:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
)  # of checkpoints and vocabularies that hold its tokens and bring no template


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
        if source is not None:
            check_syntax(source)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return None if source is None else JinjaTemplate(source, spelled)


def _default_of(named: list, path: pathlib.Path) -> Any:
    """Of named templates, `[{"name": ..., "template": ...}]`, the one called default."""
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) and "template" in entry for entry in named):
        raise ValueError(f"{path}: chat_template: every entry of the list must have a name and a template")
    templates = {entry["name"]: entry["template"] for entry in named}
    if "default" not in templates:
        raise ValueError(f"{path} has chat templates {sorted(templates)[:8]}, none of them named default")
    return templates["default"]
