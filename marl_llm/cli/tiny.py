"""A small checkpoint with random weights in Hugging Face's form; `marl_llm tiny` writes one."""

from __future__ import annotations

import json
import pathlib

from marl_llm.runs.command import ConfigError

FAMILIES = ("qwen3", "qwen2")
# as Qwen2, 2.5 and 3 split a text: GPT-4's way, but each digit alone
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = {
    "qwen2": ("<tool_call>", "</tool_call>"),
    "qwen3": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
}
# What Qwen3's template adds to the generation prompt where thinking is off.
OPENING = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


def byte_level_bpe(texts: list[str], size: int, special: tuple[str, ...], tags: tuple[str, ...]):
    """A `tokenizers.Tokenizer` that splits as Qwen's: `size` tokens learned from texts, then the special ones, then the tags.

    Raises `ConfigError` without the extra `hf`.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise ConfigError("a checkpoint's tokenizer needs the extra hf: pip install 'marl_llm[hf]'") from error

    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated", invert=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder, made.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    made.add_tokens([AddedToken(text, normalized=False, special=False) for text in tags])
    return made


def tokenizer_of(family: str, vocabulary: int):
    """The checkpoint's tokenizer, the same for the same library."""
    import marl_llm

    texts = [path.read_text(encoding="utf-8") for path in sorted((pathlib.Path(marl_llm.__file__).parent / "games").glob("*.py"))]
    return byte_level_bpe(texts, vocabulary - len(SPECIAL) - len(TAGS[family]), SPECIAL, TAGS[family])


def make(out: pathlib.Path, family: str = "qwen3", vocabulary: int = 1024, seed: int = 0, **sizes: int) -> pathlib.Path:
    """Writes the directory and returns it. `sizes` are fields of `marl_llm.models.ModelConfig`.

    Raises `ConfigError` for a directory that is in use, and for sizes that the architecture cannot have.
    """
    import jax

    from marl_llm.models import ModelConfig, init_params, save_pretrained
    from marl_llm.text import CHATML

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out={out} exists; choose a new directory")
    own = {"qk_norm": True} if family == "qwen3" else {"qk_norm": False, "attention_bias": True}
    try:
        shape = ModelConfig(vocab_size=vocabulary, rope_theta=1e6, **own, **sizes)
        save_pretrained(out, shape, init_params(shape, jax.random.key(seed)))
    except ValueError as error:
        raise ConfigError(f"no checkpoint of these sizes: {error}") from error
    tokens = tokenizer_of(family, vocabulary)
    stop, pad = tokens.token_to_id(SPECIAL[2]), tokens.token_to_id(SPECIAL[0])
    added = {str(i): {"content": token.content, "special": token.special} for i, token in tokens.get_added_tokens_decoder().items()}
    form = {"added_tokens_decoder": added, "eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "tokenizer_class": "Qwen2Tokenizer"}
    form["chat_template"] = CHATML.source.removesuffix("{% endif %}") + (OPENING if family == "qwen3" else "") + "{% endif %}"
    config = json.loads((out / "config.json").read_text()) | {"eos_token_id": stop, "pad_token_id": pad}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    (out / "tokenizer.json").write_text(tokens.to_str(), encoding="utf-8")
    (out / "tokenizer_config.json").write_text(json.dumps(form, indent=2))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop, pad], "pad_token_id": pad}))
    return out
