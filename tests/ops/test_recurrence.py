"""`recur` is `jax.lax.scan`, forwards and backwards."""

import jax
import jax.numpy as jnp
import numpy as np

from famjax.ops.recurrence import recur

N, B, D = 5, 2, 3
RNG = np.random.default_rng(0)


def body(params, carry, x, flag):
    new = jnp.tanh(carry["h"] @ params["w"] + x * params["b"])
    kept = jnp.where(flag[:, None], new, carry["h"])
    return {"h": kept}, (kept * x, kept.sum(-1))


def arguments():
    params = {"w": RNG.normal(size=(D, D)), "b": RNG.normal(size=D)}
    flags = np.array(RNG.integers(0, 2, (N, B)), bool)
    return params, {"h": RNG.normal(size=(B, D))}, RNG.normal(size=(N, B, D)), flags


def scanned(params, carry, xs, flags):
    return jax.lax.scan(lambda c, given: body(params, c, *given), carry, (xs, flags))


def test_values_and_gradients_are_those_of_a_scan():
    with jax.enable_x64(True):
        *args, flags = jax.tree.map(jnp.asarray, arguments())
        probes = jax.tree.map(
            lambda a: RNG.normal(size=a.shape), jax.eval_shape(scanned, *args, flags)
        )

        def loss(run):
            def f(*args):
                out = run(*args, flags)
                return sum(jax.tree.leaves(jax.tree.map(lambda a, p: (a * p).sum(), out, probes)))

            return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))

        expected = loss(scanned)(*args)
        found = loss(lambda *args: recur(body, *args))(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
        assert not flags.all()
        assert flags.any()


def test_no_loop_carries_a_gradient_of_the_parameters():
    params, carry, xs, flags = jax.tree.map(jnp.asarray, arguments())

    def loss(run):
        return lambda params: jax.tree.leaves(run(params, carry, xs, flags))[0].sum()

    def carried(run):
        """Return the shapes that the scans of the gradient carry from step to step."""
        shapes = []
        for equation in jax.make_jaxpr(jax.grad(loss(run)))(params).eqns:
            if equation.primitive.name == "scan":
                first = equation.params["num_consts"]
                last = first + equation.params["num_carry"]
                shapes += [v.aval.shape for v in equation.invars[first:last]]
        return shapes

    assert (D, D) in carried(scanned)
    assert (D, D) not in carried(lambda *args: recur(body, *args))
    assert (B, D) in carried(lambda *args: recur(body, *args))
