"""Pretrained models of Hugging Face's as famjax's, every weight kept."""
