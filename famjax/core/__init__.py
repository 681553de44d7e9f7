"""Configuration, parallelism and processes: what all other packages share.

Configs and their checks, meshes, sharding rules, sequence parallelism, multi-process training, and
the dimension letters and types of the project (`types`).
"""
