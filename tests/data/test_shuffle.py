"""The shuffled order of documents."""

import pytest

from famjax.data.shuffle import permuted_index


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_the_order_is_a_permutation_that_depends_on_the_seed(count):
    orders = [[permuted_index(i, count, seed) for i in range(count)] for seed in (1, 2)]
    assert [sorted(order) for order in orders] == [list(range(count))] * 2
    assert (orders[0] != orders[1]) == (count > 1)


def test_orders_equal_those_of_earlier_versions():
    """Resumed runs read the same documents."""
    assert [permuted_index(i, 7, 5) for i in range(7)] == [4, 0, 5, 3, 1, 6, 2]


def test_an_element_is_computed_once():
    permuted_index.cache_clear()
    for _ in range(2):
        permuted_index(1, 3, 9)
    assert permuted_index.cache_info()[:2] == (1, 1)
