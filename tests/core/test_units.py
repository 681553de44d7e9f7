"""Human-readable sizes."""

import pytest

from famjax.core.units import byte_size


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (671, "671 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (49_999, "50.0 kB"),
        (999_960, "1.0 MB"),
        (12_345_678, "12.3 MB"),
        (1.5e9, "1.5 GB"),
        (25_276_510_208, "25.3 GB"),
        (1234e12, "1.2 PB"),
        (10**21, "1,000.0 EB"),
        (10**30, "10^30 bytes"),
        pytest.param(10**5000, "10^5000 bytes", id="beyond all floats"),
    ],
)
def test_sizes_are_never_shown_as_zero(count: float, said: str) -> None:
    assert byte_size(count) == said
