"""The deliberate bugs of `make test-mutants` still apply to the sources."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_once(mutant: Mutant) -> None:
    source = (ROOT / "famjax" / mutant.path).read_text()
    assert source.count(mutant.good) == 1
    compile(source.replace(mutant.good, mutant.bad), mutant.path, "exec")
    for test in mutant.tests.split():
        if test.startswith("tests/"):
            assert (ROOT / test).exists()
