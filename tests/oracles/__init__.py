"""Literal float64 NumPy transcriptions of the papers' equations: slow reference implementations."""
