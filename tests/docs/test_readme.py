"""The README's example, run as it stands there."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp

README = (Path(__file__).parents[2] / "README.md").read_text()


def model_and_data():
    """A two-layer network and a batch of a task that it can learn."""
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": {"kernel": 0.3 * jax.random.normal(k1, (5, 8)), "bias": jnp.zeros(8)},
        "output": {"kernel": 0.3 * jax.random.normal(k2, (8, 3)), "bias": jnp.zeros(3)},
    }
    x = jax.random.normal(k3, (32, 5))
    batch = (x, jnp.argmax(x[:, :3], axis=-1))

    def loss_fn(params, batch):
        x, labels = batch
        h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        logits = h @ params["output"]["kernel"] + params["output"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    return params, batch, loss_fn


def examples():
    return re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_example_of_the_readme_trains(capsys):
    params, batch, loss_fn = model_and_data()
    names = {"loss_fn": loss_fn, "params": params, "batch": batch, "batches": [batch] * 30, "num_steps": 30}
    exec(examples()[0], names)  # What a reader would paste.
    assert capsys.readouterr().out.startswith("2 layers, 75 parameters, SOAP, statistics every 16 steps")
    assert float(names["loss"]) < 0.5 * float(loss_fn(params, batch))


def test_the_example_of_the_readme_trains():
    _, code = examples()
    params, batch, loss_fn = model_and_data()
    names = {"loss_fn": loss_fn, "params": params, "batch": batch, "batches": [batch] * 30, "learning_rate": 0.05}
    exec(code, names)  # What a reader would paste.

    table = str(names["layers"])
    for leaf in ("hidden", "output", "kernel", "bias"):
        assert leaf in table
    assert jax.tree.structure(params) == jax.tree.structure(names["params"])
    assert float(names["loss"]) < 0.5 * float(loss_fn(params, batch))
    scalars = names["kfac"].diagnostics(names["opt_state"])
    assert scalars["condition"] > 1 and scalars["skipped_steps"] == scalars["skipped_statistics"] == 0
