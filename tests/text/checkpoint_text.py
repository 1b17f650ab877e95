"""Small checkpoints' text files for tests: byte-level BPE with Qwen's pre-tokenizer, special tokens and the official templates."""

import functools
import json
import pathlib

from tokenizers import Tokenizer

from marl_llm.cli.tiny import SPECIAL, byte_level_bpe
from marl_llm.cli.tiny import TAGS as OWN_TAGS
from marl_llm.text import ByteTokenizer, Chat, HuggingFaceTokenizer, JinjaTemplate

TEMPLATES = pathlib.Path(__file__).parents[1] / "data" / "chat_templates"
TAGS = {"qwen2.5": OWN_TAGS["qwen2"], "qwen3": OWN_TAGS["qwen3"], "deepseek": ("<think>", "</think>")}
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
TEXT = (
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.\n\n# Tools\n\nsystem user assistant think tool_call\n"
    'The quick brown fox {"name": "look", "arguments": {"x": 1}}\n\n  indented = [0, 1]\nüñí 中文 don\'t 1234\n'
)


@functools.cache
def tokenizer_json(family):
    return byte_level_bpe([TEXT] * 3, 420, DEEPSEEK if family == "deepseek" else SPECIAL, TAGS[family]).to_str()


def checkpoint_files(family, template=None):
    """The text files of a checkpoint of the family, by name."""
    made = Tokenizer.from_str(tokenizer_json(family))
    added = {str(i): {"content": t.content, "special": t.special} for i, t in made.get_added_tokens_decoder().items()}
    eos, pad = (DEEPSEEK[0], DEEPSEEK[0]) if family == "deepseek" else (SPECIAL[2], SPECIAL[0])
    config = {"added_tokens_decoder": added, "eos_token": {"content": eos}, "pad_token": pad, "chat_template": template}
    if family == "deepseek":
        config["bos_token"] = {"content": DEEPSEEK[1]}
    stops = sorted({made.token_to_id(eos), made.token_to_id(pad)}, reverse=True)
    return {
        "tokenizer.json": tokenizer_json(family),
        "tokenizer_config.json": json.dumps({k: v for k, v in config.items() if v is not None}),
        "generation_config.json": json.dumps({"eos_token_id": stops, "pad_token_id": made.token_to_id(pad)}),
        "config.json": json.dumps({"vocab_size": 512, "eos_token_id": stops[0]}),
    }


@functools.cache
def tokenizer_of(family):
    return HuggingFaceTokenizer(checkpoint_files(family))


def template_source(name):
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def write_checkpoint(directory, family, template=None, **changed):
    """Writes a checkpoint's text files; `changed` maps a file's stem to its new text, or to None to leave it out."""
    for name, text in checkpoint_files(family, template).items():
        text = changed.get(name.split(".")[0], text)
        if text is not None:
            (directory / name).write_text(text, encoding="utf-8")
    return directory


_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip
_R1 = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>", "</think>")
# Family -> its special tokens, those that end a text, and what its template knows by name.
SPECIALS = {
    "smollm2": (SPECIAL, ("<|im_end|>",), {}),
    "qwen2.5": ((*SPECIAL, "<tool_call>", "</tool_call>"), ("<|im_end|>", "<|endoftext|>"), {}),
    "qwen3": ((*SPECIAL, "<tool_call>", "</tool_call>", "<think>", "</think>"), ("<|im_end|>", "<|endoftext|>"), {}),
    "deepseek_r1_distill_qwen": (_R1, _R1[3:4], {"bos_token": _R1[0]}),
    "llama3.2": (_LLAMA, ("<|eot_id|>", "<|eom_id|>"), {"bos_token": _LLAMA[0]}),
    "mistral_nemo": (_MISTRAL, ("</s>",), {"bos_token": "<s>", "eos_token": "</s>"}),
    "gemma2": (("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<eos>",), {"bos_token": "<bos>"}),
    "phi3.5": (("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|endoftext|>",), {"eos_token": "<|endoftext|>"}),
    "glm4.6": ((*_GLM, "<tool_call>", "</tool_call>"), ("<|endoftext|>", "<|user|>", "<|observation|>"), {}),
    "gpt_oss": (("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"), ("<|return|>", "<|call|>"), {}),
}


def template_of(family):
    """The template that the family's checkpoints ship."""
    return JinjaTemplate(template_source(family), SPECIALS[family][2])


def chat_of(family, tokenizer=None, **options):
    """The family's chat, over bytes if no tokenizer is given."""
    return Chat(tokenizer or ByteTokenizer(*SPECIALS[family][:2]), template_of(family), **options)
