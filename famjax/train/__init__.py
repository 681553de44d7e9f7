"""Training: the loop, the compiled step, optimizers, checkpoints and the run folder.

A run folder holds config, tokenizer, metrics and checkpoints. A run that is killed and resumed ends
bit for bit like one that was never killed.
"""
