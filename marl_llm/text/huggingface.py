"""A Hugging Face checkpoint's tokenizer, through the library `tokenizers` (extra `hf`).

`load_tokenizer(directory)` reads what a checkpoint ships: `tokenizer.json` (vocabulary, normaliser, pre-tokenizer), `tokenizer_config.json`
(which tokens pad and end), `generation_config.json` (at which ids sampling stops) and `config.json` (the size of the model's vocabulary,
which is larger: Qwen pads 151,669 tokens to 151,936 rows). Two things differ from `transformers` on purpose. Every added token is special
here, those marked `"special": false` too (Qwen's `<think>`, `<tool_call>`): text never becomes one. And truncation or padding that
`tokenizer.json` asks for is switched off: nothing is cut silently.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, SupportsInt

from marl_llm.text.tokenizer import checked_ids, checked_text

FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json", "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
REPLACEMENT = "\ufffd"


def _library():
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("reading tokenizer.json needs the library `tokenizers`: pip install 'marl_llm[hf]'") from error
    return tokenizers


def read_json(text: str, where: str) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` that names the file `where`, the line, and how long the text is."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON (line {error.lineno}, {error.msg}; {len(text):,} characters): incomplete or damaged, copy it again"
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}, not an object of settings")
    return value


def _spelling(token: Any) -> str | None:
    """`eos_token` and its kin are a string, an object with `content`, or null."""
    return token.get("content") if isinstance(token, Mapping) else token


class HuggingFaceTokenizer:
    """A `tokenizer.json` behind the protocol `Tokenizer`. Made by `load_tokenizer`; equal when all its files are."""

    def __init__(self, files: Mapping[str, str], where: str = "the tokenizer"):
        """Builds the tokenizer from the texts of a checkpoint's files, by name; only `tokenizer.json` must be there.

        Raises `ValueError` on a damaged file, files that contradict each other, or no token that ends a text; `where` names them all.
        """
        library = _library()
        self.files = dict(files)
        if "tokenizer.json" not in files:
            raise ValueError(f"{where} has no tokenizer.json")
        read_json(files["tokenizer.json"], f"{where}/tokenizer.json")
        try:
            self._full = library.Tokenizer.from_str(files["tokenizer.json"])
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{where}/tokenizer.json is JSON, but no tokenizer: {error}") from error
        self._full.no_truncation()
        self._full.no_padding()
        # The same model without its added tokens: their spellings are text like any other.
        self._plain = library.Tokenizer(self._full.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            if getattr(self._full, part) is not None:
                setattr(self._plain, part, getattr(self._full, part))

        config, generation, model = (
            read_json(files[name], f"{where}/{name}") if name in files else {}
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        self.config = config
        added = {token.content: i for i, token in self._full.get_added_tokens_decoder().items()}
        for i, token in config.get("added_tokens_decoder", {}).items():
            found = self._full.id_to_token(int(i))
            if found != token["content"]:
                raise ValueError(f"{where}: id {i} is {token['content']!r} in tokenizer_config.json and {found!r} in tokenizer.json")
            added[token["content"]] = int(i)
        self._tokens = {i: token for token, i in self._full.get_vocab(with_added_tokens=True).items()}
        self.vocab_size: int = max(max(self._tokens) + 1, int(model.get("vocab_size") or 0))

        eos = _spelling(config.get("eos_token"))
        stops = [] if eos is None else [self._id(eos, f"{where}/tokenizer_config.json: eos_token")]
        for name, values in (("generation_config.json", generation), ("config.json", model)):
            ends = values.get("eos_token_id")
            if ends is not None and (name == "generation_config.json" or not stops):
                stops += checked_ids(ends if isinstance(ends, list) else [ends], self.vocab_size, f"{where}/{name}: eos_token_id,")
        if not stops:
            raise ValueError(f"{where} names no token that ends a text: set eos_token in tokenizer_config.json")
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self.eos_id: int | None = self.stop_ids[0]
        pad = _spelling(config.get("pad_token"))
        pads = [generation.get("pad_token_id"), model.get("pad_token_id"), self.eos_id]
        known = [self._id(pad, f"{where}/tokenizer_config.json: pad_token")] if pad is not None else [p for p in pads if p is not None]
        self.pad_id: int = checked_ids(known[:1], self.vocab_size, f"{where}: pad_token_id,")[0]
        for i in (*self.stop_ids, self.pad_id):
            if i in self._tokens:
                added.setdefault(self._tokens[i], i)
        self.special_ids: Mapping[str, int] = added

    def _id(self, token: str, what: str) -> int:
        found = self._full.token_to_id(token)
        if found is None:
            raise ValueError(f"{what} is {token!r}, which tokenizer.json does not hold")
        return found

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_ids.values())

    def __eq__(self, other) -> bool:
        return isinstance(other, HuggingFaceTokenizer) and self.files == other.files

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.files.items())))

    def encode(self, text: str) -> list[int]:
        """Text to ids with no token added; special spellings are plain text. Raises `ValueError` on a lone surrogate."""
        ids = self._plain.encode(checked_text(text), add_special_tokens=False).ids
        if not self._special.intersection(ids):
            return ids
        # Only where the base vocabulary itself spells a special token (word-level models): cut each such spelling in two.
        for token in sorted(self.special_ids, key=len, reverse=True):
            if len(token) > 1 and token in text:
                first, rest = text.split(token, 1)
                return [*self.encode(first + token[0]), *self.encode(token[1:] + rest)]
        found = [self._tokens[i] for i in ids if i in self._special]
        raise ValueError(f"the tokenizer's normaliser turns this text into the special tokens {found}: {text[:80]!r}")

    def encode_with_specials(self, text: str) -> list[int]:
        """Text to ids as `transformers` does it: special spellings become special tokens. For text that no user, tool or model wrote."""
        return self._full.encode(checked_text(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[SupportsInt]) -> str:
        """Ids to text: padding left out, special tokens spelled, an id that only the model's padded vocabulary has as U+FFFD.

        Raises `ValueError` on an id outside the vocabulary.
        """
        ids = [i for i in checked_ids(ids, self.vocab_size, "Hugging Face") if i != self.pad_id]
        pieces, run = [], []
        for i in ids:
            if i in self._tokens:
                run.append(i)
            else:
                pieces += [self._full.decode(run, skip_special_tokens=False), REPLACEMENT]
                run = []
        return "".join([*pieces, self._full.decode(run, skip_special_tokens=False)])

    def token(self, i: int) -> str | None:
        """The token of an id as tokenizer.json spells it; None for an id that only the model's padded vocabulary has."""
        return self._tokens.get(int(i))

    def save_pretrained(self, directory: str | pathlib.Path) -> None:
        """Writes the tokenizer's files beside a saved model, byte for byte as they were read; never the model's own configs."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            if name not in ("config.json", "generation_config.json"):
                (directory / name).write_text(text, encoding="utf-8", newline="")


def load_tokenizer(directory: str | pathlib.Path) -> HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint's directory. Raises `FileNotFoundError`, or `ValueError` naming the bad file."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; give the directory of a checkpoint, with its tokenizer.json")
    present = [name for name in FILES if (directory / name).is_file()]
    if "tokenizer.json" not in present:
        held = sorted(p.name for p in directory.iterdir())[:12]
        hint = "; it has a sentencepiece model: PieceTokenizer.load" if (directory / "tokenizer.model").is_file() else ""
        raise FileNotFoundError(f"{directory} has no tokenizer.json{hint}; it holds {held}")
    files = {}
    for name in present:
        try:
            files[name] = (directory / name).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{directory / name} is not UTF-8 (byte {error.start}): incomplete or damaged, copy it again") from error
    return HuggingFaceTokenizer(files, str(directory))
