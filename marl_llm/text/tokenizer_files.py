"""Checks of the files that describe a checkpoint's tokenizer, before the library `tokenizers` works on them.

The library believes what it reads: a chain of replacements that doubles a text thirty times ends the process, as no memory is left.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from marl_llm.untrusted import Bounds

TOKENIZER_BOUNDS = Bounds(size=64 << 20, values=8_000_000)  # Gemma's tokenizer.json, the largest one known, has 33 MB
MAX_VOCABULARY = 1 << 20  # ids; the largest vocabularies have 262,144
MAX_STEPS = 64  # of a normaliser, a pre-tokenizer or a decoder
MAX_PATTERN = 4096  # characters
MAX_GROWTH = 64  # times that a text may grow in a normaliser, a pre-tokenizer or a decoder; Llama's grows 3 times


def files_directory(path: str | pathlib.Path) -> pathlib.Path:
    """Where a checkpoint's files lie: the directory itself, or that of a `.gguf` file's conversion."""
    path = pathlib.Path(path)
    if path.suffix.lower() != ".gguf":
        return path
    from marl_llm.models.gguf import checkpoint_directory

    return checkpoint_directory(path)


def token_spelling(config: Mapping[str, Any], name: str, where: str) -> str | None:
    """`eos_token` and its kin are a string, an object with `content`, or null. Raises `ValueError` on anything else."""
    token = config.get(name)
    spelling = token.get("content") if isinstance(token, Mapping) else token
    if spelling is not None and not isinstance(spelling, str):
        raise ValueError(f"{where}: {name} must be a text, an object with the text `content`, or null")
    return spelling


def read_ids(config: Mapping[str, Any], name: str, where: str) -> list[int]:
    """A field that is an id, a list of ids, or null: as a list. Raises `ValueError` on anything else."""
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{where}: {name} must be a token id, a list of them, or null")
    return ids


def read_size(config: Mapping[str, Any], where: str) -> int:
    """`vocab_size` of a `config.json`, 0 without one. Where a model sees images, its language model's, whose published files name none."""
    text, usual = config.get("text_config"), 262_208 if config.get("model_type") == "gemma3" else 0
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None) or usual
    if type(size) is not int or not 0 <= size <= MAX_VOCABULARY:
        raise ValueError(f"{where}: vocab_size={str(size)[:40]} must be an integer from 0 to {MAX_VOCABULARY:,}")
    return size


def read_added_tokens(config: Mapping[str, Any], where: str) -> Iterator[tuple[int, str]]:
    """Ids and spellings of `added_tokens_decoder`."""
    table = config.get("added_tokens_decoder") or {}
    if not isinstance(table, dict):
        raise ValueError(f"{where}: added_tokens_decoder must be an object, id to token")
    for i, token in table.items():
        if not (i.isascii() and i.isdigit() and len(i) < 10 and isinstance(token, dict) and isinstance(token.get("content"), str)):
            raise ValueError(f"{where}: added_tokens_decoder has the entry {i[:40]!r}, which is no id with a token's `content`")
        yield int(i), token["content"]


def check_tokenizer(raw: Mapping[str, Any], where: str) -> None:
    """Raises `ValueError`, naming the field, on a `tokenizer.json` whose tokens or steps are beyond what a text can bear."""
    model, added = raw.get("model"), raw.get("added_tokens") or []
    vocabulary = model.get("vocab", ()) if isinstance(model, dict) else ()
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if bad := [i for i in ids if type(i) is not int or not 0 <= i < MAX_VOCABULARY]:
        raise ValueError(f"{where}: the token id {str(bad[0])[:40]} is not from 0 to {MAX_VOCABULARY - 1:,}")
    if len(vocabulary) > MAX_VOCABULARY:
        raise ValueError(f"{where}: model.vocab has {len(vocabulary):,} tokens; at most {MAX_VOCABULARY:,} are read")
    if isinstance(model, dict) and model.get("dropout"):
        raise ValueError(f"{where}: model.dropout={str(model['dropout'])[:40]}: a text would have other ids each time; set it to null")
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        steps, growth = list(_steps(raw.get(name))), 1
        if len(steps) > MAX_STEPS:
            raise ValueError(f"{where}: {name} has {len(steps)} steps; at most {MAX_STEPS} are read")
        for step in steps:
            growth *= _growth(step, f"{where}: {name}")
        if growth > MAX_GROWTH:
            raise ValueError(f"{where}: {name} can make a text {growth:,} times as long; at most {MAX_GROWTH} times is read")


def _steps(part: Any) -> Iterator[dict]:
    """The steps of a part in order; those of a `Sequence` within."""
    if not isinstance(part, dict):
        return
    inner = [value for name in ("normalizers", "pretokenizers", "decoders") for value in part.get(name) or ()]
    for step in inner:
        yield from _steps(step)
    if not inner:
        yield part


def _growth(step: dict, where: str) -> int:
    """How many times as long a step can make a text."""
    pattern = step.get("pattern")
    pattern = pattern if isinstance(pattern, dict) else {}
    text, regex = pattern.get("String"), pattern.get("Regex")
    for spelling in (text, regex):
        if spelling is not None and (not isinstance(spelling, str) or len(spelling) > MAX_PATTERN):
            raise ValueError(f"{where}: a pattern must be a text of at most {MAX_PATTERN:,} characters")
    written = [value for name in ("content", "prepend", "prefix") if isinstance(value := step.get(name), str)]
    if any(len(insertion) > MAX_PATTERN for insertion in written):
        raise ValueError(f"{where}: a text of more than {MAX_PATTERN:,} characters is written")
    if step.get("type") == "Prepend":
        return 1 + len(written[0]) // 8 if written else 1
    if step.get("type") != "Replace" or not written:
        return 1
    if text:
        return max(1, -(-len(written[0]) // len(text)))
    return 1 + len(written[0])  # a pattern can match nothing, between any two characters


def plain_tokenizers(full: Any, raw: Mapping[str, Any], kept: list[Any]) -> tuple[Any, Any, Any]:
    """The library's tokenizer without its added tokens but those `kept`, with ids of its own; all other spellings are text like any other.

    Three of them: for a text at the start of all; for one behind a special token, where a Metaspace of the scheme `first` writes no space;
    and for the rest of a text that was cut, where no step writes a space or a prefix.
    """
    shell = {"model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}
    shell = json.loads(json.dumps(shell | {name: raw.get(name) for name in ("normalizer", "pre_tokenizer")}))
    steps = [*_steps(shell["normalizer"]), *_steps(shell["pre_tokenizer"])]
    start = _with_parts(full, shell, kept)
    for step in steps:
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    behind = _with_parts(full, shell, kept)
    for step in steps:
        match step.get("type"):
            case "Metaspace":
                step.pop("add_prefix_space", None)
                step["prepend_scheme"] = "never"
            case "ByteLevel":
                step["add_prefix_space"] = False
            case "Prepend":
                step["prepend"] = ""
    return start, behind, _with_parts(full, shell, kept)


def _with_parts(full: Any, shell: Mapping[str, Any], kept: list[Any]) -> Any:
    """A tokenizer with the model of `full`, the normaliser and pre-tokenizer of `shell`, and the added tokens `kept`."""
    plain, parts = type(full)(full.model), type(full).from_str(json.dumps(shell))
    for name in ("normalizer", "pre_tokenizer"):
        if getattr(parts, name) is not None:
            setattr(plain, name, getattr(parts, name))
    plain.add_tokens(kept)
    return plain
