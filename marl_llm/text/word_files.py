"""A vocabulary of words (`train_pieces`) as the files that Hugging Face `transformers` reads."""

from __future__ import annotations

import json
import pathlib

from marl_llm.text.tokenizer import SPACE, PieceTokenizer


def save_words(tokenizer: PieceTokenizer, directory: pathlib.Path, stop_ids: tuple[int, ...] = ()) -> str:
    """Writes `tokenizer.json` and `tokenizer_config.json`, whose ids for words between blanks are the tokenizer's own.

    Returns why there are none, or the empty string: a vocabulary that is not of whole words has no such form, and the library
    `tokenizers` (extra `hf`) checks it.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        return "the library `tokenizers` is missing: pip install 'marl_llm[hf]'"
    vocabulary = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")])
    made.decoder = decoders.Metaspace(prepend_scheme="always")
    made.add_special_tokens([tokenizer.piece(tokenizer.pad_id), "<unk>"])
    words = [piece.removeprefix(SPACE) for piece in vocabulary if piece.startswith(SPACE) and len(piece) > 1]
    if not words or "<unk>" not in vocabulary or made.encode(" ".join(words)).ids != tokenizer.encode(" ".join(words)):
        return "this vocabulary is not one of whole words"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "pad_token": tokenizer.piece(tokenizer.pad_id)}
    if stop_ids:
        config["eos_token"] = tokenizer.piece(stop_ids[0])
    (directory / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return ""
