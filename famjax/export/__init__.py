"""Exports of runs: Hugging Face's transformers and peft, Orbax, StableHLO.

Every export is read back and its logits compared with the run's before it is kept.
"""
