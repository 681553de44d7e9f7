"""Tokenizers: bytes, SentencePiece, Hugging Face's tokenizer.json, or word lists."""
