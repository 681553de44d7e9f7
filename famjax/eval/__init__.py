"""Evaluation and inference: streaming, text, passkey and toy task metrics, generation, attention.

`famjax.eval.streaming.Streamer` runs a model over documents of any length in constant memory; the
other modules are built on it.
"""
