"""Define a very small network with a block of every kind, and its gradients and statistics on a few batches.

Its two dense layers have blocks of equal shape, so they form a stack. This saves compilation, which takes most of these
tests' time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kfac
from checking import normal

EXAMPLES = 16


def initial(dtype=jnp.float32):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / 2, dtype)

    return {
        "first": {"kernel": normal(3, 4), "bias": normal(4)},
        "norm": {"scale": 1 + normal(4), "shift": normal(4)},
        "offset": normal(4),
        "out": {"kernel": normal(4, 4)},
        "temperature": jnp.asarray(1.0, dtype),
    }


def batch(seed, n=EXAMPLES, dtype=jnp.float32):
    rng = np.random.default_rng(100 + seed)
    x = rng.normal(size=(n, 3))
    return jnp.asarray(x, dtype), jnp.asarray((x[:, 0] * x[:, 1] > 0.1).astype(np.int32))


def loss_fn(params, batch):
    x, labels = batch
    x = x @ params["first"]["kernel"] + params["first"]["bias"]
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
    x = jnp.tanh(x * params["norm"]["scale"] + params["norm"]["shift"])
    x = (x + params["offset"]) @ params["out"]["kernel"]
    logits = x * params["temperature"]
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


@functools.cache
def layers():
    found = kfac.find_layers(loss_fn, initial(), batch(0), rules={"temperature": "skip"})
    assert [layer.kind for layer in found] == ["dense", "unitwise", "diagonal", "dense", "skipped"]
    return found


@functools.cache
def _measure():
    return jax.jit(kfac.value_and_grad(loss_fn, layers()))


@functools.cache
def measured(seed):
    """Return a batch's gradients and statistics at the initial parameters."""
    _, grads, factors = _measure()(initial(), batch(seed))
    return grads, factors


def observing(tx):
    """Return `tx.update` with a further argument `factors`. If given, the factors are observed before the step."""

    def update(grads, state, params=None, factors=None, **extra):
        state = state if factors is None else kfac.observe(state, factors)
        return tx.update(grads, state, params, **extra)

    return update


def stepper(tx, **jit_options):
    @functools.partial(jax.jit, **jit_options)
    def step(grads, state, params, factors=None):
        updates, state = observing(tx)(grads, state, params, factors)
        return optax.apply_updates(params, updates), state, updates

    return step


def history(tx, steps=4, params=None, without=(), measured=measured):
    """Return the parameters, state and updates after each of a few steps on the measured gradients.

    The steps in `without` get no statistics.
    """
    params = initial() if params is None else params
    state = jax.jit(tx.init)(params)
    step = stepper(tx)
    found = []
    for t in range(steps):
        grads, factors = measured(t)
        params, state, updates = step(grads, state, params, None if t in without else factors)
        found.append((params, state, updates))
    return found


def run(tx, steps=4, **options):
    """Return the parameters, state and updates after the last step of `history`."""
    return history(tx, steps, **options)[-1]


def state_of(opt_state):
    """Return the only `KfacState` in an optimizer state."""

    def is_leaf(x):
        return isinstance(x, kfac.state.KfacState)

    (found,) = [x for x in jax.tree.leaves(opt_state, is_leaf=is_leaf) if is_leaf(x)]
    return found


def motions(opt_state):
    """Return all blocks' momenta and rates, by group."""
    return {name: block.momentum_state for name, block in state_of(opt_state).blocks.items()}


def field_of(opt_state, field):
    """Return a field of every block, by group: `factors`, `weight`, `preconditioner`, `condition` or `inverted`."""
    return {name: getattr(block, field) for name, block in state_of(opt_state).blocks.items()}


def ages_of(opt_state):
    """Return the steps since each block's last inversion, `[k]` by group. They are 0 before the first inversion."""
    state = state_of(opt_state)
    return {name: np.where(b.condition > 0, state.count - 1 - b.inverted, 0) for name, b in state.blocks.items()}


def matrices(tree):
    """Return the gradients of the layers that support EKFAC, as NumPy matrices `[d_out, d_in]`."""
    found = layers()
    leaves = dict(zip(found.paths, jax.tree.leaves(tree), strict=True))
    return {
        layer.name: np.asarray(layer.to_matrix([leaves[path] for path in layer.params])[0], np.float64)
        for layer in found
        if layer.supports_ekfac
    }


def assert_equal(found, expected):
    """Check that two trees are equal bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(found, expected, rtol=1e-5):
    """Check that two trees are close. Each leaf's error is relative to its largest entry."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-30))


def differ(a, b):
    return any(
        not np.allclose(x, y, rtol=1e-4, atol=1e-7) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def plain_kfac(learning_rate, layers, **options):
    """Return an optimizer without step normalisation, which accepts all options.

    Normalised steps would hide a wrong step length.
    """
    fixed = {
        "momentum": 0.9,
        "lr_in_momentum": False,
        "damping": 1e-3,
        "factor_ema_decay": 0.95,
        "unitwise_damping_scale": 1.0,
    }
    return kfac.natural_gradient(learning_rate, layers, **(fixed | options))


def tied_parameters(blocks, width, words, inputs):
    """Return float64 parameters with `blocks` dense layers of equal shape.

    There are also a scale, a table that is also the head, and a kernel for the inputs.
    """
    dense = {f"dense{k}": {"w": normal(k, width, width) / 2, "b": normal(10 + k, width)} for k in range(blocks)}
    table, first = normal(21, words, width) / 2, normal(22, inputs, width) / 2
    return dense | {"scale": 1 + normal(20, width) / 5, "table": table, "in": first}


def tied_batch(step, examples=12, inputs=4, words=9):
    """Return inputs, tokens and labels. The examples differ in size, so that each device has different statistics."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(examples, inputs)) * np.linspace(0.3, 2, examples)[:, None]
    return jnp.asarray(x), *(jnp.asarray(rng.integers(words, size=examples)) for _ in "xy")


def tied_loss(p, batch):
    x, tokens, labels = batch
    h = x @ p["in"] + p["table"][tokens]
    for name in sorted(name for name in p if name.startswith("dense")):
        h = h + jnp.tanh(h * p["scale"] @ p[name]["w"] + p[name]["b"])
    return optax.softmax_cross_entropy_with_integer_labels(h @ p["table"].T, labels).mean()
