"""Vocabularies are compared by what each id stands for."""

import json
import re

import pytest
from checkpoint_text import checkpoint_files, tokenizer_of
from tokenizers import Tokenizer, models

from marl_llm.text import HuggingFaceTokenizer, train_pieces
from marl_llm.text.vocabularies import vocabulary_difference


def test_sizes_that_are_rounded_up_differently_are_one_vocabulary():
    files = checkpoint_files("qwen3")
    padded = HuggingFaceTokenizer(files | {"config.json": json.dumps(json.loads(files["config.json"]) | {"vocab_size": 640})})
    own = tokenizer_of("qwen3")
    assert padded.vocab_size == own.vocab_size + 128
    assert vocabulary_difference(padded, own) == vocabulary_difference(own, padded) == ""


def words(*names, size):
    """A vocabulary of whole words, whose tokens have no bytes of their own."""
    library = Tokenizer(models.WordLevel({name: i for i, name in enumerate(("<pad>", "<eos>", *names))}, unk_token="<eos>"))
    library.add_special_tokens(["<pad>", "<eos>"])
    config = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return HuggingFaceTokenizer(
        {"tokenizer.json": library.to_str(), "tokenizer_config.json": json.dumps(config), "config.json": json.dumps({"vocab_size": size})}
    )


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (tokenizer_of("qwen3"), tokenizer_of("deepseek"), r"token \d+ is '.*' and '.*'"),
        (train_pieces(("wall", "goal")), train_pieces(("goal", "wall")), "token 2 is ' wall' and ' goal'"),
        (words("a", "b", size=8), words("a", "c", size=8), "token 3 is 'b' and 'c'"),
        (words("a", size=8), words("a", "c", size=4), "token 3 is '' and 'c'"),
    ],
    ids=["merges", "pieces", "words", "one-more"],
)
def test_the_first_token_that_differs_is_named(one, other, said):
    assert re.fullmatch(said, vocabulary_difference(one, other))
    assert vocabulary_difference(one, one) == ""


def test_words_with_another_padded_size_are_one_vocabulary():
    assert vocabulary_difference(words("a", "b", size=8), words("a", "b", size=16)) == ""
