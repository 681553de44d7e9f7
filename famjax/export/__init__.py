"""Runs in formats of others: Hugging Face's, Orbax's, StableHLO."""
