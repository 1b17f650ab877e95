"""Ground floor: tokenizers. Text is for people; what is trained is ids."""

from marl_llm.text.tokenizer import ByteTokenizer, PieceTokenizer, Tokenizer, train_pieces

__all__ = ["ByteTokenizer", "PieceTokenizer", "Tokenizer", "train_pieces"]
