"""Benchmarks: time ratios measured within one process, with their floor by FLOPs.

Programs that are compared run interleaved (`famjax.bench.timing`), since clock rates drift.
"""
