"""Check that the optimization barriers for XLA change no number and add no gradient.

The tests use the private module `_capture.taps`.
"""

import jax
import jax.numpy as jnp
import numpy as np

import kfac
from kfac._capture.taps import together


def barriers(jaxpr):
    """Return each optimization barrier's number of operands."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            found.append(len(eqn.invars))
    return found


def test_cotangents_come_together():
    a, b, rows = jnp.arange(3.0), jnp.arange(3.0) + 1, jnp.arange(3)

    def loss(a, b, rows):
        a, b, rows = together((a, b, rows))
        return jnp.sum(jnp.sin(a) * b * rows)

    found = jax.grad(loss, (0, 1))(a, b, rows)
    np.testing.assert_array_equal(found[0], jnp.cos(a) * b * rows)
    np.testing.assert_array_equal(found[1], jnp.sin(a) * rows)
    assert barriers(jax.make_jaxpr(jax.grad(loss, (0, 1)))(a, b, rows).jaxpr) == [2]
    assert barriers(jax.make_jaxpr(jax.grad(loss))(a, b, rows).jaxpr) == [1]


def test_images_that_are_data_get_no_gradient():
    """Check that there is a single backward convolution, for the kernel: the images get no gradient."""
    images, params = jnp.ones((4, 6, 6, 3)), {"kernel": jnp.ones((2, 2, 3, 5))}

    def loss(params, images):
        y = jax.lax.conv_general_dilated(
            images, params["kernel"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jnp.sum(y**2, (1, 2, 3)))

    layers = kfac.find_layers(loss, params, images)
    text = str(jax.make_jaxpr(kfac.value_and_grad(loss, layers))(params, images))
    assert text.count("conv_general_dilated[") == 2
