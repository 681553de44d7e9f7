"""Files copied into an exported folder; they need PyTorch and transformers, not famjax."""
