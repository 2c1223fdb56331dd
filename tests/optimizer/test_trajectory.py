"""Test thirty steps of a small network against the NumPy reference: the whole state, not only the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from problem import ages_of, plain_kfac, state_of
from reference import BLOCKS, SKIPPED, Reference, batch, initial_parameters, network

STEPS = 30
# Steps without statistics. Steps 8 and 20 are multiples of `inverse_update_period`, so a refresh is due, and steps 7
# and 19 have no refresh. Step 2 is in the first phase. At step 12, nothing has changed since step 8 unless the damping
# has.
WITHOUT = (2, 5, 8, 9, 10, 11, 12, 17, 20, 23, 24, 25, 26, 27, 28)


def loss_fn(params, images, labels):
    x = jax.lax.conv_general_dilated(
        images, params["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
    x = jnp.tanh(x * params["norm"]["scale"] + params["norm"]["shift"])
    x = (x + params["table"]).mean((1, 2))
    x = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    x = x @ params["second"]["kernel"] + params["second"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(x * params["temperature"], labels).mean()


def nested(leaves, dtype):
    tree = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jnp.asarray(leaf, dtype)
    return tree


def flat(tree):
    return {"/".join(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def table(*values):
    """Return the same schedule for both sides: `values[step]`, then the last value. All are exact in float32."""
    assert all(float(np.float32(v)) == v for v in values)
    return (
        lambda count: jnp.asarray(values)[jnp.minimum(count, len(values) - 1)],
        lambda count: values[min(count, len(values) - 1)],
    )


def constant(value):
    assert float(np.float32(value)) == value
    return value, lambda count: value


FALLING = table(*(2.0**-k for k in range(3, 8) for _ in range(5)))  # 1/8 to 1/128, five steps each
RISING = table(0.0, 0.5, 0.75, 0.875, 0.9375)

CONFIGURATIONS = {
    "everything": {
        "learning_rate": FALLING,
        "damping": table(*[0.5] * 6, *[0.25] * 7, *[0.125] * 8, 0.0625),
        "factor_ema_decay": RISING,
        "momentum": table(0.0, 0.5, 0.875),
        "nesterov": True,
        "weight_decay": table(0.0625, 0.03125),
        "kl_clip": table(*[2.0**-9] * 10, 2.0**-11),
        "trust_ratio": table(1.0, 0.5),
        "unitwise_damping_scale": table(1.0, 2.0),
        "inverse_update_period": 4,
        "interval_warmup_steps": 3,
    },
    "constants": {
        "learning_rate": constant(0.03125),
        "damping": constant(0.25),
        "factor_ema_decay": constant(0.875),
        "momentum": constant(0.875),
        "weight_decay": constant(0.015625),
        "kl_clip": constant(2.0**-12),
        "trust_ratio": constant(0.25),
        "unitwise_damping_scale": constant(4.0),
        "inverse_update_period": 4,
        "interval_warmup_steps": 3,
    },
    "current batch alone": {
        "learning_rate": FALLING,
        "damping": table(0.5, 0.25, 0.125),
        "factor_ema_decay": constant(0.0),
        "interval_warmup_steps": 0,
    },
    # The first statistics come at step 1. They refresh, although step 1 is no multiple of the interval.
    "late statistics": {
        "learning_rate": constant(0.03125),
        "damping": constant(0.125),
        "factor_ema_decay": constant(0.9375),
        "momentum": constant(0.5),
        "unitwise_damping_scale": table(*[1.0] * 10, 2.0),
        "inverse_update_period": 4,
        "interval_warmup_steps": 0,
    },
}
# The dense layers' blocks are padded with zeros to the convolution's shape.
KRONECKER = {name: ("kronecker_3x8", k) for k, name in enumerate(("conv", "first", "second"))}
UNITWISE = {"norm": ("unitwise_3x2", 0), "table": ("unitwise_27x1", 0)}


def compare(state, reference, params, expected, tolerance, where):
    def close(found, expected, what):
        scale = max(np.abs(expected).max(), 1e-30)
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=f"{what} after {where}")

    for path, leaf in flat(params).items():
        close(leaf, expected[path], path)
    assert {**KRONECKER, **UNITWISE}.keys() == BLOCKS.keys()
    inner = state_of(state)
    assert int(inner.count) == reference.count
    assert float(kfac.diagnostics(state)["damping"]) == reference.dampings[0]
    assert int(inner.metrics.inverse_age) == max(reference.ages.values())
    for name, (group, k) in {**KRONECKER, **UNITWISE}.items():
        block = inner.blocks[group]
        close(block.weight[k], reference.weight[name], f"weight of {name}")
        assert int(ages_of(state)[group][k]) == reference.ages[name]
        assert bool(block.condition[k] > 0) == (name in reference.inverses)
        for what, found, truth in (
            ("factors", block.factors, reference.factors.get(name)),
            ("preconditioner", block.preconditioner, reference.inverses.get(name)),
        ):
            if truth is None:
                continue
            parts = zip(("A", "G"), truth, strict=True) if name in KRONECKER else [("F", truth)]
            for part, value in parts:
                # The preconditioner of a unit-wise block is an array.
                stack = found if isinstance(found, jax.Array) else getattr(found, part)
                inside = tuple(map(slice, value.shape))
                close(stack[k][inside], value, f"{what} of {name}: {part}")
                if what == "factors":
                    assert jnp.count_nonzero(stack[k]) == jnp.count_nonzero(stack[k][inside])
    if reference.trace is not None:
        for path, leaf in flat(optax.tree.get(state, "trace")).items():
            close(leaf, reference.trace[path], f"momentum of {path}")
    if reference.kl_clip is not None:
        # This diagnostic is in float32.
        np.testing.assert_allclose(kfac.diagnostics(state)["kl_clip_scale"], reference.scale, rtol=1e-4)


def run(configuration, dtype, tolerance):
    options = CONFIGURATIONS[configuration]
    sides = [{k: v[side] if isinstance(v, tuple) else v for k, v in options.items()} for side in range(2)]
    reference = Reference(**sides[1])
    expected = initial_parameters()
    params = nested(expected, dtype)
    images, labels = batch(0)
    layers = kfac.find_layers(loss_fn, params, jnp.asarray(images, dtype), labels, rules={SKIPPED: "skip"})
    tx = plain_kfac(layers=layers, **{"momentum": None, **sides[0]})
    state = jax.jit(tx.init)(params)

    @jax.jit
    def full_step(params, state, images, labels):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, images, labels)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def cheap_step(params, state, images, labels):
        updates, state = tx.update(jax.grad(loss_fn)(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    losses, scales, ages = [], [], []
    without = (0, *WITHOUT) if configuration == "late statistics" else WITHOUT
    for t in range(STEPS):
        images, labels = batch(t)
        loss, grads, statistics = network(expected, images, labels)
        losses.append(loss)
        expected = reference.step(expected, grads, None if t in without else statistics)
        step = cheap_step if t in without else full_step
        params, state = step(params, state, jnp.asarray(images, dtype), labels)
        compare(state, reference, params, expected, tolerance, f"step {t}")
        scales.append(getattr(reference, "scale", 1.0))
        ages.append(max(reference.ages.values()))
    # The run is a useful comparison: the network learns, the norm constraint binds in some steps only, and some useless
    # refreshes were skipped.
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    if reference.kl_clip is not None:
        assert min(scales) < 0.9 and max(scales) == 1
    if options.get("inverse_update_period"):
        assert max(ages) >= 4
    for leaf in jax.tree.leaves((params, state)):
        assert not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.dtype in (dtype, jnp.float32)


# tests/optimizer/test_transform.py covers constant schedules, which equal numbers.
@pytest.mark.parametrize(
    "configuration", [pytest.param(c, marks=pytest.mark.slow if c == "constants" else ()) for c in CONFIGURATIONS]
)
def test_trajectory_in_float64(x64, configuration):
    run(configuration, jnp.float64, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["everything", "late statistics"])
def test_trajectory_in_float32(configuration):
    run(configuration, jnp.float32, 2e-4)
