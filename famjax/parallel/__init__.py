"""Parallelism: the mesh, the sharding of every array over it, and communication between tokens."""
