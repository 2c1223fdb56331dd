"""Test that the troubleshooting page quotes errors that users get, and names scalars that exist."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import kfac
from problem import initial, layers, plain_kfac

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
ERRORS = re.findall(r'\*\*"([^"*]+)"\*\*', " ".join(PAGE.split()))


def standardised_kernel():
    def loss(params, x):
        kernel = params["coder"]["kernel"]
        return jnp.mean(jnp.square(jnp.tanh(x @ (kernel - kernel.mean(0)))))

    kfac.find_layers(loss, {"coder": {"kernel": jnp.ones((3, 4))}}, jnp.ones((8, 3)), strict=True)


def a_batch_size_in_the_loss():
    def loss(params, x):
        h = jnp.tanh(x.reshape(24, 3) @ params["a"])
        return jnp.mean(jnp.square(h @ params["b"]))

    params, x = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}, jnp.ones((4, 6, 3))
    jax.eval_shape(kfac.value_and_grad(loss, kfac.find_layers(loss, params, x)), params, x)


CASES = [standardised_kernel, a_batch_size_in_the_loss]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_page_quotes_the_error(case):
    with pytest.raises((ValueError, TypeError)) as caught:
        case()
    assert any(words in str(caught.value) for words in ERRORS)


def test_the_page_names_scalars_and_options_that_exist():
    tx = plain_kfac(0.1, layers(), kl_clip=1e-3)
    scalars = set(kfac.diagnostics(tx.init(initial())))
    for name in (
        "condition",
        "failed_inversions",
        "inverse_age",
        "skipped_statistics",
        "skipped_steps",
        "statistics_age",
    ):
        assert name in scalars and f"`{name}`" in PAGE
