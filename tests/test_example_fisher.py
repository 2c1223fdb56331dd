"""`--fisher sampled` and `--inverse ekfac` of the ImageNet example: what is drawn, where, and again after a stop."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kfac
from runs import IMAGENET, records, state, train

pytestmark = pytest.mark.examples


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(IMAGENET))


def test_every_device_micro_batch_and_step_draws_its_own(example):
    """All examples are alike, so that draws alone can make statistics differ."""
    import devices
    import optimizers

    mesh = Mesh(np.array(jax.devices()[:2]), (devices.AXIS,))
    x, params = jnp.ones((8, 3)), {"w": jnp.zeros((3, 5))}

    def loss_fn(params, _, x):
        logits = kfac.output(x @ params["w"], "categorical")
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0]), ()

    layers = kfac.find_layers(loss_fn, params, None, x, has_aux=True)

    def drawn(parts, seed=0, step=0, fisher="sampled"):
        fn = optimizers.gradient_fn(loss_fn, layers, parts, devices.AXIS, fisher=fisher)
        keys = {"key": optimizers.fisher_key(seed, step)} if fisher == "sampled" else {}

        def local(params, x):
            return fn(params, None, x, **keys)[2]["w"].G[None]

        specs = {"in_specs": (devices.SAME, devices.SPLIT), "out_specs": devices.SPLIT}
        return np.asarray(jax.jit(jax.shard_map(local, mesh=mesh, **specs))(params, x))

    whole, parts = drawn(1), drawn(2)
    np.testing.assert_array_equal(whole, drawn(1))
    assert not np.allclose(whole[0], whole[1])
    assert not np.allclose(parts[0], parts[1])
    assert not np.allclose(whole, drawn(1, step=1)) and not np.allclose(whole, drawn(1, seed=1))
    rows = np.eye(5) - 0.2
    # The labels of the data are all alike, and so are their statistics.
    empirical = drawn(1, fisher="empirical")
    np.testing.assert_allclose(empirical[0], empirical[1])
    np.testing.assert_allclose(empirical[0], np.outer(rows[0], rows[0]), atol=1e-6)


def test_the_stream_is_that_of_nothing_else(example):
    import augment
    import optimizers

    drawn = {tuple(jax.random.key_data(optimizers.fisher_key(0, step)).tolist()) for step in range(4)}
    others = {
        tuple(row.tolist())
        for step in range(4)
        for row in jax.random.key_data(augment.keys(0, jnp.int32(step), jnp.arange(16)))
    }
    assert len(drawn) == 4 and not drawn & others


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["--fisher", "sampled"], ["--inverse", "ekfac", "--factor-every", 2]], ids=str)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path, chosen):
    """On two devices, with micro-batches."""
    options = [*chosen, "--width", 8, "--steps", 8, "--batch-size", 48, "--local-batch", 12]
    train(*options, "--output", tmp_path / "whole", devices=2)
    train(*options, "--output", tmp_path / "parts", "--stop-after", 5, devices=2)
    train("--resume", "--output", tmp_path / "parts", devices=2)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    whole, parts = (jax.tree.leaves(state(tmp_path / name, 8)) for name in ("whole", "parts"))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_float16_is_refused(example):
    sys.modules.pop("train", None)
    import train as script

    with pytest.raises(script.UserError, match=r"--fisher sampled.*--dtype float16"):
        script.main(["--fisher", "sampled", "--dtype", "float16"])
