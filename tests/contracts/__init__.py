"""Contracts of all mixers and stacks, one suite over all cases (see `harness.CASES`)."""
