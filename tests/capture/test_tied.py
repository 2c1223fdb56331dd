"""Test kernels that are also read as their transposes: tied embeddings, autoencoders, derivatives in the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import kfac
from checking import normal
from exact import dense, empirical_blocks, error, nearest_kronecker
from oracle import relative_error
from problem import observing, plain_kfac

N, T, V, D = 6, 4, 7, 5


def embedding_loss(p, b, hook=lambda name, x: x):
    h = hook("looked up", p["table"][b["tokens"]])
    h = jnp.tanh(h @ p["w"])
    z = hook("logits", h @ p["table"].T)
    return -jnp.mean(jnp.sum(jax.nn.one_hot(b["targets"], V) * jax.nn.log_softmax(z), axis=(-1, -2)))


def embedding_parameters():
    return {"table": normal(0, V, D), "w": normal(1, D, D)}


def sentences(n=N):
    rng = np.random.default_rng(2)
    return {name: jnp.asarray(rng.integers(0, V, (n, T))) for name in ("tokens", "targets")}


def gradients_at(loss, params, batch, like):
    """Return the gradients with respect to zeros that are added where `loss` calls its hook."""

    def shifted(zeros):
        return loss(params, batch, lambda name, x: x + zeros[name])

    return jax.grad(shifted)({name: jnp.zeros(shape) for name, shape in like.items()})


def combined(a, g, turned_a, turned_g):
    """Combine both uses by the formula of `Tied.combined`, for a diagonal or a full `A`."""

    def trace(x):
        return x.sum() if x.ndim == 1 else np.trace(x)

    scale = np.sqrt(trace(a) * trace(turned_g) / (trace(g) * trace(turned_a)))
    return a + scale * turned_a, g + turned_g / scale


def expected_of_table(params, batch):
    found = gradients_at(embedding_loss, params, batch, {"looked up": (N, T, D), "logits": (N, T, V)})
    g, g_logits = (np.reshape(found[name], (N * T, -1)) for name in ("looked up", "logits"))
    h = np.reshape(jnp.tanh(params["table"][batch["tokens"]] @ params["w"]), (N * T, -1))
    counts = np.bincount(np.reshape(batch["tokens"], -1), minlength=V)
    positions = 2 * T
    return combined(
        counts / N, N / positions * g.T @ g, N * np.sum(g_logits**2, 0), h.T @ h / N / positions
    )  # the vocabulary's side is a diagonal


def statistics(loss, params, *batch, **options):
    layers = kfac.find_layers(loss, params, *batch)
    return layers, jax.jit(kfac.value_and_grad(loss, layers, **options))(params, *batch)[2]


@pytest.mark.slow
def test_a_tied_embedding_is_the_formula(x64):
    params, batch = embedding_parameters(), sentences()
    layers, factors = statistics(embedding_loss, params, batch)
    assert layers["table"].kind == "embedding"
    assert "transpose" in layers["table"].note
    a, g = expected_of_table(params, batch)
    assert relative_error(factors["table"].A, a) < 1e-10
    assert relative_error(factors["table"].G, g) < 1e-10


def test_a_doubled_batch_changes_nothing(x64):
    params, batch = embedding_parameters(), sentences()
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    _, once = statistics(embedding_loss, params, batch)
    _, found = statistics(embedding_loss, params, twice)
    for side in "AG":
        assert relative_error(getattr(found["table"], side), getattr(once["table"], side)) < 1e-10


def autoencoder(p, x):
    return jnp.mean(jnp.sum((jnp.tanh(x @ p["w"]) @ p["w"].T - x) ** 2, -1))


def test_a_tied_autoencoder_trains(x64):
    params, x = {"w": 0.3 * normal(0, D, 3)}, normal(1, N, D)
    layers = kfac.find_layers(autoencoder, params, x)
    tx = plain_kfac(0.05, layers, damping=1e-2)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        loss, grads, factors = kfac.value_and_grad(autoencoder, layers)(params, x)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for _ in range(30):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < 0.7 * losses[0]


def test_the_product_is_nearer_to_the_block_than_either_of_its_terms(x64):
    """Check that the combined product has a smaller angle to the exact block than the product of either use."""

    def loss(p, b):
        h = jnp.tanh(p["table"][b["tokens"]] @ p["w"])
        z = kfac.mark_output(h @ p["table"].T, "categorical")
        return -jnp.mean(jnp.sum(jax.nn.one_hot(b["targets"], V) * jax.nn.log_softmax(z), axis=-1))

    params, batch = embedding_parameters(), sentences(24)
    layers, factors = statistics(loss, params, batch)
    by_token = {name: leaf.reshape(-1, 1) for name, leaf in batch.items()}  # tokens do not interact
    exact = empirical_blocks(loss, layers, params, [by_token])["table"]
    tied = factors["table"]

    def cosine(a, g):
        return float(error(exact, jnp.kron(jnp.diag(a), g)).cosine)

    nearest = dense(nearest_kronecker(exact, layers["table"]))
    uses = (tied, tied.direct, tied.transposed)
    found = [*(cosine(use.A, use.G) for use in uses), float(error(exact, nearest).cosine)]
    # docs/mathematics.md quotes these figures.
    np.testing.assert_allclose(found, [0.802, 0.727, 0.761, 0.921], atol=5e-4)


@pytest.mark.slow
def test_devices_and_micro_batches_are_one(x64):
    """Check that the ratio between the two uses comes from the whole batch."""
    params, batch = embedding_parameters(), sentences()
    layers = kfac.find_layers(embedding_loss, params, batch)
    measure = kfac.value_and_grad(embedding_loss, layers)
    tx = kfac.scale_by_kfac(layers, damping=1e-2)
    _, grads, factors = measure(params, batch)
    expected, _ = jax.jit(observing(tx))(grads, jax.jit(tx.init)(params), factors=factors)
    _, grads, factors = kfac.microbatch(measure, 3)(params, batch)
    found, _ = jax.jit(observing(tx))(grads, jax.jit(tx.init)(params), factors=factors)
    assert relative_error(found["table"], np.asarray(expected["table"])) < 1e-6  # some state is float32

    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    tx = kfac.scale_by_kfac(layers, damping=1e-2, distribution=kfac.Distribution("data"))

    def local(params, batch):
        _, grads, factors = measure(params, batch)
        return tx.update(lax.pmean(grads, "data"), kfac.observe(tx.init(params), factors))[0]

    same, split = PartitionSpec(), PartitionSpec("data")
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(same, split), out_specs=same))(params, batch)
    assert relative_error(found["table"], np.asarray(expected["table"])) < 1e-6


def test_derivatives_inside_the_loss(x64):
    """Check the gradient of a network with respect to its input, which reads every kernel as its transpose."""

    def energy(p, x):
        return jnp.sum(jnp.tanh(x @ p["w"]) @ p["v"])

    def loss(p, x):
        force = jax.vmap(jax.grad(energy, argnums=1), in_axes=(None, 0))(p, x)
        return jnp.mean(jnp.sum(force**2, -1))

    params, x = {"w": normal(0, D, 3), "v": normal(1, 3)}, normal(2, N, D)
    layers, factors = statistics(loss, params, x)
    assert layers["w"].kind == "dense"
    assert np.isfinite(factors["w"].A).all()


def test_statistics_of_a_scaled_loss(x64):
    params, batch = embedding_parameters(), sentences()
    layers, factors = statistics(embedding_loss, params, batch)
    fn = jax.jit(kfac.value_and_grad(lambda p, b: 1024 * embedding_loss(p, b), layers))
    found = fn(params, batch)[2].unscale(1024.0)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(factors), strict=True):
        assert relative_error(a, np.asarray(b)) < 1e-10


def test_the_setting_reduce_is_refused():
    with pytest.raises(ValueError, match=r"'reduce' needs .*'w'.*or as its transpose as well"):
        kfac.find_layers(autoencoder, {"w": jnp.ones((D, 3))}, jnp.ones((N, D)), rules={"w": "reduce"})


def test_a_kernel_read_twice_in_one_way_is_as_before(x64):
    params, x = {"w": normal(0, D, D)}, normal(1, N, D)

    def loss(p, x):
        return jnp.mean(jnp.sum(jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"]) ** 2, -1))

    _, factors = statistics(loss, params, x)
    rows = np.concatenate([x, jnp.tanh(x @ params["w"])])
    assert relative_error(factors["w"].A, rows.T @ rows / N) < 1e-10
