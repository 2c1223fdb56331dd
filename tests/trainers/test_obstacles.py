"""Test how trainers use an optimizer: the obstacles in examples/trainers/PATCHES.md that no other test covers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax

import kfac
from checking import normal
from problem import batch, initial, layers, loss_fn

RATE = 0.1


def small(seed, *shape):
    return normal(seed, *shape, dtype=np.float32)


def trees_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def trees_close(found, expected, rtol=1e-5):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())

    jax.tree.map(compare, found, expected)


def observe(opt_state, params, batch):
    return kfac.observe(opt_state, kfac.statistics(loss_fn, layers(), fraction=1 / 4)(params, batch))


def step(tx, params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def test_both_programs_can_be_compiled_ahead_of_time():
    """Run six steps with executables that were compiled from shapes alone."""
    tx = kfac.kfac(RATE, layers())
    params = initial()
    opt_state = jax.jit(tx.init)(params)
    shapes = jax.eval_shape(lambda: (params, opt_state, batch(0)))
    own_step = jax.jit(lambda *arguments: step(tx, *arguments)).lower(*shapes).compile()
    own_observe = jax.jit(observe).lower(shapes[1], shapes[0], shapes[2]).compile()
    jitted_step = jax.jit(lambda *arguments: step(tx, *arguments))
    jitted_observe = jax.jit(observe)
    expected = params, opt_state
    found = params, opt_state
    for number in range(6):
        assert kfac.statistics_due(found[1])
        found = found[0], own_observe(found[1], found[0], batch(number))
        expected = expected[0], jitted_observe(expected[1], expected[0], batch(number))
        *found, _ = own_step(*found, batch(number))
        *expected, _ = jitted_step(*expected, batch(number))
    trees_equal(found, list(expected))


@pytest.mark.slow
def test_observe_and_update_can_be_exported_as_functions_of_leaves():
    """Take and return leaves, as docs/faq.md says, because `jax.export` cannot store the types of the state."""
    tx = kfac.kfac(RATE, layers())
    leaves, tree = jax.tree.flatten((initial(), tx.init(initial())))

    @jax.jit
    def own_observe(leaves, batch):
        params, opt_state = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves((params, observe(opt_state, params, batch)))

    @jax.jit
    def own_step(leaves, batch):
        *trained, loss = step(tx, *jax.tree.unflatten(tree, leaves), batch)
        return jax.tree.leaves(trained), loss

    exported = [export.export(program)(leaves, batch(0)) for program in (own_observe, own_step)]
    found = exported[1].call(exported[0].call(leaves, batch(0)), batch(0))
    trees_equal(found, own_step(own_observe(leaves, batch(0)), batch(0)))


def test_statistics_averaged_in_a_scan_over_micro_batches_are_those_of_the_whole_batch():
    params = initial()
    whole = batch(0)
    count = 4
    parts = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), whole)
    found = kfac.find_layers(loss_fn, params, jax.tree.map(lambda x: x[0], parts))
    measure = kfac.statistics(loss_fn, found)

    @jax.jit
    def averaged(params, parts):
        shapes = jax.eval_shape(measure, params, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def add(total, part):
            return jax.tree.map(jnp.add, total, measure(params, part)), None

        total, _ = lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / count, total)

    trees_close(averaged(params, parts), jax.jit(measure)(params, whole))


def first_updates(tx, grads, params, measure, x):
    @jax.jit
    def first(grads, params, x):
        return tx.update(grads, kfac.observe(tx.init(params), measure(params, x)), params)[0]

    return first(grads, params, x)


def test_two_differentiated_arguments_are_one_tuple():
    """Pass `(first, second)` to optimizer and statistics, because gradients of `argnums=(0, 1)` are a tuple, too."""
    first, second = {"w": small(0, 5, 4)}, {"w": small(1, 4, 3)}
    x = small(2, 16, 5)

    def loss(first, second, x):
        return jnp.mean((jnp.tanh(x @ first["w"]) @ second["w"]) ** 2)

    def of_both(both, x):
        return loss(*both, x)

    both = first, second
    found = kfac.find_layers(of_both, both, x, strict=True)
    assert found.paths == ("0/w", "1/w")
    tx = kfac.kfac(RATE, found)
    grads = jax.grad(loss, argnums=(0, 1))(first, second, x)
    updates = first_updates(tx, grads, both, kfac.statistics(of_both, found), x)
    named = {"first": first, "second": second}

    def of_named(params, x):
        return loss(params["first"], params["second"], x)

    found = kfac.find_layers(of_named, named, x, strict=True)
    tx = kfac.kfac(RATE, found)
    grads = dict(zip(named, grads, strict=True))
    expected = first_updates(tx, grads, named, kfac.statistics(of_named, found), x)
    trees_close(updates, (expected["first"], expected["second"]))


def test_statistics_of_one_of_two_differentiated_arguments():
    """Update only the first argument with K-FAC. The second has another optimizer, or no optimizer."""
    first, second = {"w": small(0, 5, 4)}, {"w": small(1, 4, 3)}
    x = small(2, 16, 5)

    def loss(first, second, x):
        return jnp.mean((jnp.tanh(x @ first["w"]) @ second["w"]) ** 2)

    found = kfac.find_layers(loss, first, second, x, batch_argnums=2, strict=True)
    assert found.paths == ("w",)
    factors = jax.jit(kfac.statistics(loss, found))(first, second, x)
    np.testing.assert_allclose(factors["w"].A, x.T @ x / len(x), rtol=1e-5, atol=1e-6)


def test_a_state_in_host_memory_between_the_steps():
    """Compare three steps with the state in host memory in between, bit for bit, with the state on the device."""
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    if not {"pinned_host", "device"} <= kinds:
        pytest.skip(f"this backend has the memory kinds {sorted(kinds)}")
    tx = kfac.kfac(RATE, layers())
    params = initial()
    opt_state = jax.jit(tx.init)(params)
    on_device = jax.tree.map(lambda x: x.sharding.with_memory_kind("device"), opt_state)
    on_host = jax.tree.map(lambda x: x.with_memory_kind("pinned_host"), on_device)

    def with_statistics(params, opt_state, batch):
        params, opt_state, _ = step(tx, params, observe(opt_state, params, batch), batch)
        return params, opt_state

    def on_and_off(params, opt_state, batch):
        params, opt_state = with_statistics(params, jax.device_put(opt_state, on_device), batch)
        return params, jax.device_put(opt_state, on_host)

    expected = params, opt_state
    found = params, jax.device_put(opt_state, on_host)
    for number in range(3):
        expected = jax.jit(with_statistics)(*expected, batch(number))
        found = jax.jit(on_and_off)(*found, batch(number))
        assert {x.sharding.memory_kind for x in jax.tree.leaves(found[1])} == {"pinned_host"}
    trees_equal(found, expected)


# -- several documents in a row --------------------------------------------------------------------------------------

D, VOCABULARY = 4, 7
KERNELS = "table", "values", "head"  # the scale has per-example gradients, and an example is a row


def text_loss(params, rows):
    """Return the mean loss over the tokens that are not padding. Tokens see earlier tokens of their own document."""
    tokens, documents, targets = rows
    x = params["table"][tokens]
    same = documents[:, :, None] == documents[:, None, :]
    past = jnp.tril(jnp.ones(tokens.shape[1:] * 2, bool))
    weights = jnp.where(same & past, 1.0, 0.0)
    seen = weights @ jnp.tanh(x @ params["values"]) / weights.sum(-1, keepdims=True)
    logits = (x + seen) * params["scale"] @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(losses * (documents != 0)) / jnp.sum(documents != 0)


def text_params():
    shapes = {"table": (VOCABULARY, D), "values": (D, D), "scale": (D,), "head": (D, VOCABULARY)}
    return {name: small(k, *shape) for k, (name, shape) in enumerate(shapes.items())}


def text_factors(rows):
    params = text_params()
    return jax.jit(kfac.statistics(text_loss, kfac.find_layers(text_loss, params, rows)))(params, rows)


def text(rows, length):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(1, VOCABULARY, (2, rows, length))
    return jnp.asarray(tokens), jnp.ones((rows, length), int), jnp.asarray(targets)


def test_packed_documents_have_the_statistics_of_separate_rows():
    """Check that the factors are equal up to the numbers of rows and positions, which scale all layers alike."""
    tokens, documents, targets = text(8, 6)
    packed = tokens.reshape(4, 12), jnp.tile(jnp.repeat(jnp.array([1, 2]), 6), (4, 1)), targets.reshape(4, 12)
    separate, together = text_factors((tokens, documents, targets)), text_factors(packed)
    for name in KERNELS:
        trees_close(together[name].A, 2 * separate[name].A)
        trees_close(together[name].G, separate[name].G / 4)


def test_padding_enters_only_the_inputs_factor():
    """Check that padding scales `G` by the share of tokens among positions. `A` counts all positions."""
    tokens, documents, targets = text(8, 6)
    padding = jnp.zeros((8, 2), int)
    padded = [jnp.concatenate([x, padding], axis=1) for x in (tokens, documents, targets)]
    plain, found = text_factors((tokens, documents, targets)), text_factors(tuple(padded))
    empty = text_factors(tuple(jnp.zeros((8, 8), int) for _ in range(3)))
    for name in KERNELS:
        trees_close(found[name].G, plain[name].G * 6 / 8)
        trees_close(found[name].A, plain[name].A + empty[name].A * 2 / 8)
