"""Test that the errors on the troubleshooting page are exactly the errors that users get."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kfac
from problem import batch, initial, layers, loss_fn, measured, plain_kfac

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
SHOWN = [" ".join(text.split()) for text in re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)]


def standardised_kernel():
    def loss(params, x):
        kernel = params["coder"]["kernel"]
        return jnp.mean(jnp.square(jnp.tanh(x @ (kernel - kernel.mean(0)))))

    kfac.find_layers(loss, {"coder": {"kernel": jnp.ones((3, 4))}}, jnp.ones((8, 3)), strict=True)


def unknown_pattern():
    kfac.find_layers(loss_fn, initial(), batch(0), rules={"embedding": "skip"})


def a_batch_size_in_the_loss():
    def loss(params, x):
        h = jnp.tanh(x.reshape(24, 3) @ params["a"])
        return jnp.mean(jnp.square(h @ params["b"]))

    params, x = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}, jnp.ones((4, 6, 3))
    jax.eval_shape(kfac.value_and_grad(loss, kfac.find_layers(loss, params, x)), params, x)


def update(tx, state):
    return jax.eval_shape(lambda state: tx.update(measured(0)[0], state, initial()), state)


def axis_that_is_not_bound():
    tx = plain_kfac(0.1, layers(), distribution=kfac.Distribution("devices"))
    update(tx, plain_kfac(0.1, layers()).init(initial()))


def four_devices():
    return jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))


def state_for_other_devices():
    tx = plain_kfac(0.1, layers(), distribution=kfac.Distribution(mesh=four_devices()))
    update(tx, plain_kfac(0.1, layers()).init(initial()))


def devices_of_pmap():
    tx = plain_kfac(0.1, layers())
    init = jax.shard_map(lambda p: tx.init(p).count, mesh=four_devices(), in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(init, initial())


CASES = [
    standardised_kernel,
    unknown_pattern,
    a_batch_size_in_the_loss,
    axis_that_is_not_bound,
    state_for_other_devices,
    devices_of_pmap,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_page_shows_the_error_as_it_is(case):
    with pytest.raises((ValueError, TypeError)) as caught:
        case()
    assert " ".join(str(caught.value).split()) in SHOWN


def test_the_page_shows_no_other_errors():
    assert len(SHOWN) == len(CASES)


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
