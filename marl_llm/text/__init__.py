"""Ground floor: tokenizers and chats. Text is for people; what is trained is ids."""

from marl_llm.text.chat import Chat, Conversation, Reply, extends
from marl_llm.text.formats import (
    DEEPSEEK_R1_DISTILL_QWEN,
    FORMATS,
    QWEN2_5,
    QWEN2_5_BASE,
    QWEN2_5_MATH,
    QWEN3,
    ChatFormat,
    Message,
    ToolCall,
)
from marl_llm.text.huggingface import HuggingFaceTokenizer, load_tokenizer, unknown_words
from marl_llm.text.jinja import ChatTemplateWarning, JinjaTemplate, differences, load_chat, load_template
from marl_llm.text.streaming import TextStream, stream_text
from marl_llm.text.tokenizer import ByteTokenizer, PieceTokenizer, Tokenizer, pieces_of, train_pieces, train_sentencepiece

__all__ = [
    "ByteTokenizer", "PieceTokenizer", "Tokenizer", "pieces_of", "train_pieces", "train_sentencepiece",
    "HuggingFaceTokenizer", "load_tokenizer", "unknown_words",
    "TextStream", "stream_text",
    "DEEPSEEK_R1_DISTILL_QWEN", "FORMATS", "QWEN2_5", "QWEN2_5_BASE", "QWEN2_5_MATH", "QWEN3", "ChatFormat", "Message", "ToolCall",
    "Chat", "Conversation", "Reply", "extends",
    "ChatTemplateWarning", "JinjaTemplate", "differences", "load_chat", "load_template",
]  # fmt: skip
