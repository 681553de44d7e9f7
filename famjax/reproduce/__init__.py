"""Reproduction of the papers' tables and figures, which `famjax reproduce` runs."""
