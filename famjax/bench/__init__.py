"""Benchmarks: ratios measured in one run, beside the floor that arithmetic sets."""
