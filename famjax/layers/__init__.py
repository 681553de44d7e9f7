"""Modules that mixers and stacks are built from: projections, norms, feed-forward, embeddings."""
