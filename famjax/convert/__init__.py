"""Conversion of Hugging Face models to famjax models, with every weight kept.

`load_pretrained` loads a folder into memory, `famjax convert` writes it as a run.
"""
