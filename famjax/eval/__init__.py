"""Evaluation and inference: streaming, task metrics, generation, and analysis of attention.

`famjax.eval.streaming.Streamer` runs a model over documents of any length in constant memory; the
other modules are built on it.
"""
