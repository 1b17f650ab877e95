"""A Hugging Face checkpoint's tokenizer, through the library `tokenizers` (extra `hf`).

`load_tokenizer(directory)` reads what a checkpoint ships: `tokenizer.json` (vocabulary, normaliser, pre-tokenizer), `tokenizer_config.json`
(which tokens pad and end), `generation_config.json` (at which ids sampling stops) and `config.json` (the size of the model's vocabulary,
which is larger: Qwen pads 151,669 tokens to 151,936 rows). Two things differ from `transformers` on purpose. Every added token is special
here, those marked `"special": false` too (Qwen's `<think>`, `<tool_call>`): text never becomes one. Only blanks so marked (GPT-NeoX's and
Phi-2's indents) are text. And truncation or padding that `tokenizer.json` asks for is switched off: nothing is cut silently.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, SupportsInt

from marl_llm.text.rendering import LARGEST
from marl_llm.text.tokenizer import PieceTokenizer, checked_ids, checked_text
from marl_llm.text.tokenizer_files import (
    TOKENIZER_BOUNDS,
    check_tokenizer,
    files_directory,
    plain_tokenizers,
    read_added_tokens,
    read_ids,
    read_size,
    token_spelling,
)
from marl_llm.untrusted import parse_json, read_file

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


def _named(error: BaseException, what: str) -> BaseException:
    """The library's error as a `ValueError`: it raises plain `Exception`, and where Rust panics one that is no `Exception`."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        return error
    return ValueError(f"{what}: {str(error)[:300]}")


class HuggingFaceTokenizer:
    """A `tokenizer.json` behind the protocol `Tokenizer`. Made by `load_tokenizer`; equal when all its files are."""

    def __init__(self, files: Mapping[str, str], where: str = "the tokenizer"):
        """Builds the tokenizer from the texts of a checkpoint's files, by name; only `tokenizer.json` must be there.

        Raises `ValueError` on a damaged file, files that contradict each other, or no token that ends a text; `where` names them all.
        """
        self.files = dict(files)
        if "tokenizer.json" not in files:
            raise ValueError(f"{where} has no tokenizer.json")
        raw = parse_json(files["tokenizer.json"].encode(), f"{where}/tokenizer.json", bounds=TOKENIZER_BOUNDS)
        check_tokenizer(raw, f"{where}/tokenizer.json")
        try:
            self._full = _library().Tokenizer.from_str(files["tokenizer.json"])
        except BaseException as error:
            raise _named(error, f"{where}/tokenizer.json is JSON, but no tokenizer") from error
        self._full.no_truncation()
        self._full.no_padding()
        added_tokens = self._full.get_added_tokens_decoder()
        self._blanks = {i: token for i, token in added_tokens.items() if token.content.isspace() and not token.special}
        self._plain, self._behind, self._within = plain_tokenizers(self._full, raw, list(self._blanks.values()))
        self._renumbered = {self._plain.token_to_id(token.content): i for i, token in self._blanks.items()}

        config, generation, model = (
            parse_json(files[name].encode(), f"{where}/{name}", bounds=TOKENIZER_BOUNDS) if name in files else {}
            for name in ("tokenizer_config.json", "generation_config.json", "config.json")
        )
        self.config = config
        self._base: Mapping[str, int] = self._full.get_vocab(with_added_tokens=False)
        self._tokens = {i: token for token, i in self._full.get_vocab(with_added_tokens=True).items()}
        self.vocab_size: int = max(max(self._tokens, default=0) + 1, read_size(model, f"{where}/config.json"))
        added = self._added_tokens(f"{where}/tokenizer_config.json")
        stops = self._stops(config, generation, model, where)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self.eos_id: int | None = self.stop_ids[0]
        self.special_ids: Mapping[str, int] = added | {self._tokens[i]: i for i in self.stop_ids if i in self._tokens}
        for i in self.stop_ids:
            if self._is_ordinary(i):
                raise ValueError(f"{where}: the token that ends a text is {self._tokens[i]!r}, which ordinary text contains")
        self.special_ids = {token: i for token, i in self.special_ids.items() if not self._is_ordinary(i)}
        self._set_padding(config, [generation, model], where)

    def _added_tokens(self, where: str) -> dict[str, int]:
        """Special tokens: all added ones but blanks, and those of the base vocabulary, that are marked as no special ones."""
        base, added = self._base, {}
        for i, token in self._full.get_added_tokens_decoder().items():
            if token.special or token.content not in base and i not in self._blanks:
                added[token.content] = i
        for i, content in read_added_tokens(self.config, where):
            stored = self._full.id_to_token(i) if i < self.vocab_size else None
            if stored != content:
                raise ValueError(f"{where}: id {i} is {content!r} here and {stored!r} in tokenizer.json")
            if content not in base and i not in self._blanks:
                added[content] = i
        return added

    def _stops(self, config: Mapping[str, Any], generation: Mapping[str, Any], model: Mapping[str, Any], where: str) -> list[int]:
        eos = token_spelling(config, "eos_token", f"{where}/tokenizer_config.json")
        stops = [] if eos is None else [self._id(eos, f"{where}/tokenizer_config.json: eos_token")]
        for name, values in (("generation_config.json", generation), ("config.json", model)):
            ends = read_ids(values, "eos_token_id", f"{where}/{name}")
            if name == "generation_config.json" or not stops:
                stops += checked_ids(ends, self.vocab_size, f"{where}/{name}: eos_token_id,")
        if not stops:
            raise ValueError(f"{where} names no token that ends a text: set eos_token in tokenizer_config.json")
        return stops

    def _set_padding(self, config: Mapping[str, Any], others: list[Mapping[str, Any]], where: str) -> None:
        """The token that pads; the end of text where none is named, or where it is ordinary text ("!" is id 0 of many vocabularies)."""
        pad = token_spelling(config, "pad_token", f"{where}/tokenizer_config.json")
        if pad is not None:
            pads = [self._id(pad, f"{where}/tokenizer_config.json: pad_token")]
        else:  # -1 says that there is none
            pads = [i for values in others for i in read_ids(values, "pad_token_id", where) if i >= 0]
        self.pad_id: int = checked_ids([*pads, self.eos_id][:1], self.vocab_size, f"{where}: pad_token_id,")[0]
        if self._is_ordinary(self.pad_id):
            self.pad_id = self.eos_id
        elif self.pad_id in self._tokens:
            self.special_ids = {**self.special_ids, self._tokens[self.pad_id]: self.pad_id}

    def _is_ordinary(self, i: int) -> bool:
        """Whether text becomes this token, so that it can be no special one: the base vocabulary has it, and `encode` cannot avoid it."""
        token = self._tokens.get(i)
        if i in self._blanks:
            return True
        if token is None or token not in self._base or token == getattr(self._full.model, "unk_token", None):
            return False
        return i in self._avoiding(self._full.decode([i], skip_special_tokens=False), {token: i})

    def _id(self, token: str, what: str) -> int:
        token_id = self._full.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{what} is {token!r}, which tokenizer.json does not hold")
        return token_id

    def __eq__(self, other) -> bool:
        return isinstance(other, HuggingFaceTokenizer) and self.files == other.files

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.files.items())))

    def encode(self, text: str) -> list[int]:
        """Text to ids with no token added; special spellings are plain text. Raises `ValueError` on a lone surrogate."""
        return self._encode_plain(text, self._plain)

    def encode_between(self, text: str, before: str | None, after: str | None) -> list[int]:
        """Ids of a text between two special tokens (None: the start, the end of all): as in the ids of the whole.

        A Metaspace of the scheme `first` writes its space at the start of all only; special tokens that strip take blanks away.
        """
        text = text.lstrip() if before in self._strips[1] else text
        text = text.rstrip() if after in self._strips[0] else text
        return self._encode_plain(text, self._plain if before is None else self._behind) if text else []

    @functools.cached_property
    def _strips(self) -> tuple[frozenset[str], frozenset[str]]:
        """Special tokens that take the blanks before them away, and those that take the blanks behind them."""
        added = self._full.get_added_tokens_decoder().values()
        return frozenset(t.content for t in added if t.lstrip), frozenset(t.content for t in added if t.rstrip)

    def _encode_plain(self, text: str, library: Any) -> list[int]:
        ids = self._avoiding(text, self.special_ids, library)
        special = frozenset(self.special_ids.values())
        if special_tokens := [self._tokens[i] for i in ids if i in special]:
            raise ValueError(f"the tokenizer's normaliser turns this text into the special tokens {special_tokens}: {text[:80]!r}")
        return ids

    def _avoiding(self, text: str, special_ids: Mapping[str, int], library: Any = None) -> list[int]:
        """Ids of a text. Where the base vocabulary itself spells a special token (word-level models), each such spelling is cut in two."""
        library = library or self._plain
        ids = self._plain_ids(text, library)
        if frozenset(special_ids.values()).isdisjoint(ids):
            return ids
        spellings = "|".join(re.escape(token) for token in special_ids if len(token) > 1) or "(?!)"
        cuts = [match.start() + 1 for match in re.finditer(f"(?={spellings})", text)]
        first, *rest = (text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)]))
        return [*self._plain_ids(first, library), *(i for part in rest for i in self._plain_ids(part, self._within))]

    def _plain_ids(self, text: str, library: Any) -> list[int]:
        return [self._renumbered.get(i, i) for i in self._run(library, text)]

    @staticmethod
    def _run(library: Any, text: str) -> list[int]:
        try:
            return library.encode(checked_text(text), add_special_tokens=False).ids
        except ValueError:
            raise
        except BaseException as error:
            raise _named(error, f"the tokenizer cannot encode this text, {text[:80]!r}") from error

    @property
    def unk_id(self) -> int | None:
        """Id of what this vocabulary cannot spell; None: it spells everything."""
        token = getattr(self._full.model, "unk_token", None)
        return None if token is None else self._full.token_to_id(token)

    def encode_with_specials(self, text: str) -> list[int]:
        """Text to ids as `transformers` does it: special spellings become special tokens. For text that no user, tool or model wrote."""
        return self._run(self._full, text)

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


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """The words of a text, between blanks, that a vocabulary cannot spell, each once; none where it spells everything, or cannot say."""
    unknown = tokenizer.unk_id if isinstance(tokenizer, HuggingFaceTokenizer | PieceTokenizer) else None
    if unknown is None or unknown not in tokenizer.encode(text):
        return []
    return [word for word in dict.fromkeys(text.split()) if unknown in tokenizer.encode(word)]


def load_tokenizer(directory: str | pathlib.Path) -> HuggingFaceTokenizer:
    """The tokenizer of a Hugging Face checkpoint's directory, or of a `.gguf` file.

    Raises `FileNotFoundError`, or `ValueError` naming the bad file.
    """
    directory = files_directory(directory)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory} is no directory; give the directory of a checkpoint, with its tokenizer.json")
    present = [name for name in FILES if (directory / name).is_file()]
    if "tokenizer.json" not in present:
        held = sorted(p.name for p in directory.iterdir())[:12]
        hint = "; it has a sentencepiece model: PieceTokenizer.load" if (directory / "tokenizer.model").is_file() else ""
        raise FileNotFoundError(f"{directory} has no tokenizer.json{hint}; it holds {held}")
    files = {}
    for name in present:
        most = LARGEST if name == "chat_template.jinja" else TOKENIZER_BOUNDS.size
        try:
            files[name] = read_file(directory / name, most).removeprefix(b"\xef\xbb\xbf").decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{directory / name} is not UTF-8 (byte {error.start}): incomplete or damaged, copy it again") from error
    return HuggingFaceTokenizer(files, str(directory))
