"""Ground floor: tokenizers and chats. Text is for people; what is trained is ids."""

from marl_llm.text.chat import Chat, Conversation, extends
from marl_llm.text.huggingface import HuggingFaceTokenizer, load_tokenizer, unknown_words
from marl_llm.text.jinja import CHATML, JinjaTemplate, load_template
from marl_llm.text.loading import ChatTemplateWarning, load_chat, template_options
from marl_llm.text.messages import Message, ToolCall
from marl_llm.text.replies import Reply
from marl_llm.text.streaming import TextStream, stream_text
from marl_llm.text.tokenizer import ByteTokenizer, PieceTokenizer, Tokenizer, pieces_of, train_pieces, train_sentencepiece

__all__ = [
    "ByteTokenizer", "PieceTokenizer", "Tokenizer", "pieces_of", "train_pieces", "train_sentencepiece",
    "HuggingFaceTokenizer", "load_tokenizer", "unknown_words",
    "TextStream", "stream_text",
    "CHATML", "JinjaTemplate", "load_template",
    "Message", "ToolCall", "Reply", "Chat", "Conversation", "extends",
    "ChatTemplateWarning", "load_chat", "template_options",
]  # fmt: skip
