"""Parsers for the formats that teams speak most: a JSON object, tags, a code block, a line behind `####`, plain text.

Each is a function that makes a parser for `Role.parse`: response text -> fields, or `FormatError` with a reason. They are strict: what
stands beside the format makes a response illegal, because a reader that forgives teaches a policy to babble.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from marl_llm.untrusted import read_json
from marl_llm.workflows.errors import FormatError

Parser = Callable[[str], dict[str, Any]]


def plain(field: str, max_words: int | None = None) -> Parser:
    """The whole response, stripped, as one field. An empty one, or one of more than `max_words` words, is illegal."""

    def parse(text: str) -> dict[str, Any]:
        text = text.strip()
        if not text:
            raise FormatError("an empty response")
        if max_words is not None and len(text.split()) > max_words:
            raise FormatError(f"{len(text.split())} words, {max_words} are allowed")
        return {field: text}

    return parse


def json_object(**fields: Callable[[Any], Any]) -> Parser:
    """A JSON object, alone or in one fenced block, with exactly these keys.

    Args:
      **fields: key -> function that checks and converts its value, raising ValueError, TypeError or FormatError for one that will not do.
        See `texts` and `short_text`.
    """

    def parse(text: str) -> dict[str, Any]:
        answer = read_json(_unfenced(text))
        if not answer.ok:
            raise FormatError(f"not JSON: {answer.problem}")
        values = answer.value
        if not isinstance(values, dict):
            raise FormatError(f"a JSON {type(values).__name__}, not an object")
        if missing := [key for key in fields if key not in values]:
            raise FormatError(f"the key {missing[0]!r} is missing")
        if extra := [key for key in values if key not in fields]:
            raise FormatError(f"the key {extra[0]!r} belongs to no field")
        result = {}
        for key, convert in fields.items():
            try:
                result[key] = convert(values[key])
            except (ValueError, TypeError) as error:
                raise FormatError(f"{key}: {error}") from error
        return result

    return parse


def _unfenced(text: str) -> str:
    """What stands in the fenced block that a text is; the text itself, if it is none. No pattern: one would take cubic time."""
    body = text.strip()
    if len(body) < 6 or not body.startswith("```") or not body.endswith("```"):
        return text
    body = body[3:-3].removeprefix("json")
    inner = body.strip()
    before, after = body[: len(body) - len(body.lstrip())], body[len(body.rstrip()) :]
    return inner if "\n" in before and "\n" in after else text


def texts(at_most: int, distinct: bool = True, cut: bool = False) -> Callable[[Any], tuple[str, ...]]:
    """A list of one to `at_most` texts that are not empty; `cut` drops the surplus instead of refusing it."""

    def convert(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise FormatError("not a list with at least one text")
        items = tuple(short_text()(item) for item in value)
        if len(items) > at_most and not cut:
            raise FormatError(f"{len(items)} texts, {at_most} are allowed")
        if distinct and len(set(items)) < len(items):
            raise FormatError("a text occurs twice")
        return items[:at_most]

    return convert


def short_text(max_words: int | None = None) -> Callable[[Any], str]:
    """A text that is not empty, of at most `max_words` words."""

    def convert(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise FormatError("not a text, or an empty one")
        if max_words is not None and len(value.split()) > max_words:
            raise FormatError(f"{len(value.split())} words, {max_words} are allowed")
        return value.strip()

    return convert


def tagged(tags: Mapping[str, str] | tuple[str, ...], read: Callable[[dict[str, str]], dict[str, Any]] | None = None) -> Parser:
    """`<tag>...</tag>` blocks, each once, in this order, with nothing but white space between them.

    Args:
      tags: the tags, or {tag: field} where they differ from the fields.
      read: turns {field: text between the tags} into the role's fields; may raise `FormatError`.
    """
    names = dict(tags) if isinstance(tags, Mapping) else {tag: tag for tag in tags}
    blocks = [f"<{re.escape(tag)}>(?P<g{i}>.*?)</{re.escape(tag)}>" for i, tag in enumerate(names)]
    pattern = re.compile(r"\s*" + r"\s*".join(blocks) + r"\s*", re.DOTALL)

    def parse(text: str) -> dict[str, Any]:
        for tag in names:
            if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
                raise FormatError(f"<{tag}> and </{tag}> must each occur once")
        match = pattern.fullmatch(text)
        if match is None:
            raise FormatError(f"expected {' '.join(f'<{t}>...</{t}>' for t in names)} and nothing else")
        values = {field: match.group(f"g{i}").strip() for i, field in enumerate(names.values())}
        return read(values) if read else values

    return parse


def code_block(field: str, language: str = "python") -> Parser:
    """The code of the one fenced block of this language. Words around it are allowed; a second block is not, nor an empty one."""

    def parse(text: str) -> dict[str, Any]:
        blocks = fenced_blocks(text, language)
        if len(blocks) != 1:
            raise FormatError(f"{len(blocks)} fenced {language} blocks; one is expected")
        if not blocks[0].strip():
            raise FormatError("an empty block")
        return {field: blocks[0]}

    return parse


def after_hashes(field: str, read: Callable[[str], Any] | None = None) -> Parser:
    """What stands behind `####` on the last line that begins with exactly four hashes, with or without white space before them.

    The final answer of Stronger-MAS's prompts (Appendix D) and of GSM8K. Nothing behind the hashes is illegal.

    Args:
      read: turns the stripped text into the field's value, raising ValueError, TypeError or FormatError for one that will not do.
    """

    def parse(text: str) -> dict[str, Any]:
        lines = [line.strip() for line in text.split("\n")]
        marked = [line for line in lines if line.startswith("####") and not line.startswith("#####")]
        if not marked:
            raise FormatError("no line begins with ####")
        answer = marked[-1][4:].strip()
        if not answer:
            raise FormatError("nothing stands behind ####")
        if read is None:
            return {field: answer}
        try:
            return {field: read(answer)}
        except (ValueError, TypeError) as error:
            raise FormatError(f"{field}: {error}") from error

    return parse


def fenced_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language: lines between one that is the opening fence and the next one that is the closing fence.

    Lines end at a line feed; a carriage return before it is left out."""
    blocks, lines, start = [], text.replace("\r\n", "\n").split("\n"), None
    for number, line in enumerate(lines):
        fence = line.strip(" \t")
        if start is None and fence == f"```{language}":
            start = number + 1
        elif start is not None and fence == "```":
            blocks.append("".join(f"{inside}\n" for inside in lines[start:number]))
            start = None
    return blocks
