"""Slow, literal float64 NumPy transcriptions of the papers' equations: the truth in tests."""
