"""Smeared keys; attention with them is tested as cases of `contracts.harness`."""

import jax
import jax.numpy as jnp
import numpy as np

from famjax.layers.key_smear import KeySmear, previous_keys


def test_heads_start_at_different_shares():
    shares = jax.nn.sigmoid(KeySmear(2).weight[...])
    np.testing.assert_allclose(shares, [0.1192, 0.8808], atol=1e-4)
    single = KeySmear(1)
    np.testing.assert_allclose(jax.nn.sigmoid(single.weight[...]), [0.8808], atol=1e-4)


def test_a_key_is_smeared_with_the_one_before_it():
    smear = KeySmear(2)
    smear.weight[...] = jnp.log(jnp.array([1 / 3, 3.0]))  # shares of 1/4 and 3/4
    k = jnp.arange(12.0).reshape(1, 2, 3, 2, 1)  # two blocks of three tokens
    before = jnp.array([50.0, 60.0, 70.0, 80.0]).reshape(1, 2, 2, 1)
    previous = previous_keys(k, before)
    np.testing.assert_array_equal(previous[:, :, 1:], k[:, :, :-1])
    np.testing.assert_array_equal(previous[:, :, 0], before)
    assert not previous_keys(k)[:, :, 0].any()
    share = jnp.array([0.25, 0.75])[:, None]
    np.testing.assert_allclose(smear(k, previous), (1 - share) * k + share * previous, rtol=1e-6)
