"""The contracts that every mixer and stack keeps, one suite over all (see `harness.CASES`)."""
