"""Files that an exported folder takes along: PyTorch and transformers, nothing of famjax."""
