"""The contracts that every mixer keeps, one suite over all of them (see `harness.CASES`)."""
