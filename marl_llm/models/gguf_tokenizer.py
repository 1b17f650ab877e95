"""The tokenizer of a GGUF file as the files that `tokenizers` and `transformers` read.

A GGUF file holds tokens, merges or scores, and the *name* of how texts are cut before merges apply. What each name means is code in
llama.cpp (`src/llama-vocab.cpp`); the names of `CUTS` are known here, others are refused.
"""

from __future__ import annotations

from typing import Any

from marl_llm.models.gguf_file import GgufFile
from marl_llm.models.tensor_files import MOST_NAME, CheckpointFileError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # the types of tokens
_QWEN_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_CUT = _QWEN_CUT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}
SPACE = "\u2581"  # of sentencepiece


def _split(pattern: str) -> list[dict]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        _BYTES | {"use_regex": False},
    ]


# how a text is cut before merges apply, by the file's name for it
CUTS = {
    "default": [_BYTES],
    "gpt-2": [_BYTES],
    "smollm": [_DIGITS, _BYTES],
    "qwen2": _split(_QWEN_CUT),
    "deepseek-r1-qwen": _split(_QWEN_CUT),
    "llama-bpe": _split(_LLAMA3_CUT),
    "llama3": _split(_LLAMA3_CUT),
    "llama-v3": _split(_LLAMA3_CUT),
}
COMPOSED = ("qwen2",)  # cuts before which a text is brought into Unicode's form NFC
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # cuts after which a piece that is a token is not merged from its parts


def tokenizer_files(gguf: GgufFile) -> dict[str, dict]:
    """The contents of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` by name.

    Raises `CheckpointFileError` on fields that are missing or contradict each other, and on a kind of tokenizer that is not read.
    """
    kind, tokens = gguf.need("tokenizer.ggml.model", str), gguf.need("tokenizer.ggml.tokens", list)
    types = gguf.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if any(type(token) is str and len(token) > MOST_NAME for token in tokens):
        raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.tokens holds one of more than {MOST_NAME} characters; it is damaged")
    if len(set(map(str, tokens))) != len(tokens) or len(types) != len(tokens) or not all(type(token) is str for token in tokens):
        raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.tokens must hold texts, each once, and token_type one type for each")
    if kind not in ("gpt2", "llama"):
        raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.model={kind[:40]!r} is not read; gpt2 and llama are. {_ELSE}")
    model = _byte_level(gguf, tokens) if kind == "gpt2" else _pieces(gguf, tokens)
    begin = _special(gguf, "bos", tokens)
    add_begin = gguf.get("tokenizer.ggml.add_bos_token", bool, kind == "llama") and begin is not None
    literal = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **literal, "special": token_type != USER_DEFINED}
        for i, (token, token_type) in enumerate(zip(tokens, types, strict=True))
        if token_type in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **model}
    tokenizer["post_processor"] = _begins_with(begin, tokens) if add_begin else None
    ends = [tokens.index(end) for name in ("eos", "eot") if (end := _special(gguf, name, tokens)) is not None]
    generation = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": _config(gguf, tokens, add_begin), "generation_config.json": generation}


_ELSE = "Give the directory of a tokenizer that belongs to the model (`tokenizer=`, `--tokenizer`)"


def _byte_level(gguf: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Merges over bytes, as GPT-2 began them."""
    cut = gguf.get("tokenizer.ggml.pre", str, "default")
    if cut not in CUTS:
        raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.pre={cut[:40]!r} is not read; {', '.join(CUTS)} are. {_ELSE}")
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [merge.split(" ") if type(merge) is str else [] for merge in gguf.need("tokenizer.ggml.merges", list)]
    for place, pair in enumerate(merges):
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.merges[{place}] does not join two tokens to a third")
    return {
        "normalizer": {"type": "NFC"} if cut in COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": CUTS[cut]},
        "decoder": _BYTES,
        "model": _bpe(ids, merges) | {"ignore_merges": cut in WHOLE_WORDS},
    }


def _pieces(gguf: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """Sentencepiece's merges: two neighbours become the piece of the highest score; what no piece spells becomes bytes."""
    scores = gguf.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(type(score) is float for score in scores):
        raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.scores must hold one number for each token")
    ids = {token: i for i, token in enumerate(tokens)}
    unknown = gguf.get("tokenizer.ggml.unknown_token_id", int, 0)
    before = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = [{"type": "Prepend", "prepend": SPACE}] if before else []
    back = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    last = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if before else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*first, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*back, *last]},
        "model": _bpe(ids, _merges_of_pieces(ids, scores))
        | {"unk_token": tokens[unknown] if unknown < len(tokens) else None, "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(ids: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    affixes = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", "dropout": None, "unk_token": None, **affixes, **flags, "vocab": ids, "merges": merges}


def _merges_of_pieces(ids: dict[str, int], scores: list[float]) -> list[list[str]]:
    """The pairs of pieces that are a piece together, in the order in which they are merged: the highest score of the joined piece first."""
    pairs = []
    for piece, i in ids.items():
        halves = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece)) if piece[:cut] in ids and piece[cut:] in ids]
        pairs += [(-scores[i], i, ids[left], ids[right], left, right) for left, right in halves]
    return [[left, right] for *_, left, right in sorted(pairs)]


def _special(gguf: GgufFile, name: str, tokens: list[str]) -> str | None:
    """The spelling of a special token; None if the file names none."""
    field = {"unk": "unknown", "pad": "padding"}.get(name, name)
    i = gguf.get(f"tokenizer.ggml.{field}_token_id", int)
    if i is not None and not 0 <= i < len(tokens):
        raise CheckpointFileError(f"{gguf.path}: tokenizer.ggml.{field}_token_id={i} is no token; there are {len(tokens):,}")
    return None if i is None else tokens[i]


def _begins_with(begin: str, tokens: list[str]) -> dict[str, Any]:
    """The step that puts the first token before a text."""
    special = {"SpecialToken": {"id": begin, "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": place}} for place, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, special, second],
        "special_tokens": {begin: {"id": begin, "ids": [tokens.index(begin)], "tokens": [begin]}},
    }


def _config(gguf: GgufFile, tokens: list[str], add_begin: bool) -> dict[str, Any]:
    named = {f"{name}_token": _special(gguf, name, tokens) for name in ("bos", "eos", "pad", "unk")}
    template = gguf.get("tokenizer.chat_template", str)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_begin,
        "clean_up_tokenization_spaces": False,
        **{name: token for name, token in named.items() if token is not None},
        **({"chat_template": template} if template else {}),
    }
