"""Benchmarks: ratios of times measured within one process, and their lower bounds by FLOPs.

Programs that are compared run interleaved (`famjax.bench.timing`), since clock rates drift.
"""
