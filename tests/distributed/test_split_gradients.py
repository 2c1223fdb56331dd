"""Test parameters that are split over a mesh, whose gradients no device gathers whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
import messages
from checking import normal, slow
from problem import observing, tied_loss, tied_parameters

D, N = 8, 12


def parameters(dtype=np.float64):
    """Return five blocks, a number that the devices do not divide, and `in`, which is skipped."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tied_parameters(5, D, 16, D))


def batch(step):
    rng = np.random.default_rng(step)
    return normal(30 + step, N, D), jnp.asarray(rng.integers(16, size=N)), jnp.asarray(rng.integers(16, size=N))


def found(dtype=np.float64):
    return kfac.find_layers(tied_loss, parameters(dtype), batch(0), rules={"^in$": "skip"})


def meshes(kind):
    """Return four devices and a leaf's shardings, as in FSDP and, on two axes, as in HSDP."""
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    return mesh, {"fsdp": P(("node", "gpu")), "columns": P(None, "gpu"), "rows": P("gpu")}


def lying(mesh, spec, params):
    def own(x):
        return NamedSharding(mesh, P(*[axis for _, axis in zip(x.shape, spec, strict=False)]) if x.ndim > 1 else P())

    return jax.tree.map(lambda x: jax.device_put(x, own(x)), params)


def updates_of(tx, grads, factors, steps=3):
    """Return the updates of a few steps with the same gradients, and the state. The last step has no statistics."""
    state, found = tx.init(grads), []
    update = jax.jit(observing(tx))
    for step in range(steps):
        new, state = update(grads, state, grads, factors=factors if step < steps - 1 else None)
        found.append(new)
    return found, state


def optimizers(layers, distribution):
    return {
        "chain": kfac.kfac(0.1, layers, damping=1e-2, inverse_update_period=2, distribution=distribution),
        "eigh": kfac.scale_by_kfac(layers, damping=1e-2, preconditioner=kfac.Eigh(), distribution=distribution),
    }


@functools.cache
def measured():
    return jax.jit(kfac.value_and_grad(tied_loss, found()))(parameters(), batch(0))[1:]


@pytest.mark.parametrize(
    ("form", "owners", "name", "kind"),
    [
        # `test_the_same_four_lines[SOAP, parameters that are split]` in test_any_mesh.py splits over all devices.
        slow("fsdp", None, "chain", AxisType.Auto),
        ("columns", "gpu", "eigh", AxisType.Explicit),
        slow("fsdp", None, "chain", AxisType.Explicit),
        slow("columns", "gpu", "eigh", AxisType.Auto),
        *(
            slow(form, None, name, kind)
            for form, name in (("rows", "eigh"), ("columns", "chain"))
            for kind in (AxisType.Auto, AxisType.Explicit)
        ),
    ],
)
def test_updates_are_those_of_one_device_and_lie_as_the_gradients(kind, form, owners, name, x64):
    grads, factors = measured()
    expected, _ = updates_of(optimizers(found(), kfac.Distribution())[name], grads, factors)
    mesh, specs = meshes(kind)
    distribution = kfac.Distribution(owner_axes=owners)
    with jax.set_mesh(mesh):
        split = lying(mesh, specs[form], grads)
        everywhere = jax.device_put(factors, NamedSharding(mesh, P()))
        got, _ = updates_of(optimizers(found(), distribution)[name], split, everywhere)
    for new, old in zip(got, expected, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-11), new, old)
        jax.tree.map(lambda x, g: np.testing.assert_(x.sharding.is_equivalent_to(g.sharding, x.ndim)), new, split)


@pytest.mark.slow
def test_a_step_with_a_number_that_is_not_finite_changes_nothing(x64):
    """Check gradients that only owners get, gradients that all devices get, and skipped gradients."""
    grads, factors = measured()
    mesh, specs = meshes(AxisType.Auto)
    tx = kfac.scale_by_kfac(found())
    with jax.set_mesh(mesh):
        for path in (("dense3", "w"), ("scale",), ("table",), ("in",)):
            split = lying(mesh, specs["fsdp"], grads)
            node = functools.reduce(lambda node, key: node[key], path[:-1], split)
            node[path[-1]] = node[path[-1]].at[3].set(jnp.nan)
            _, state = jax.jit(observing(tx))(split, tx.init(split), factors=factors)
            assert (state.count, state.metrics.skipped_steps) == (0, 1), path


@pytest.mark.slow
def test_narrow_gradients_and_layers_that_are_masked(x64):
    params = parameters(jnp.bfloat16)
    layers = found(jnp.bfloat16)
    _, grads, factors = jax.jit(kfac.value_and_grad(tied_loss, layers))(params, batch(0))
    masked = dict(grads, dense1=jax.tree.map(lambda _: optax.MaskedNode(), grads["dense1"]))
    expected, _ = updates_of(kfac.scale_by_kfac(layers), masked, factors)
    mesh, specs = meshes(AxisType.Auto)
    tx = kfac.scale_by_kfac(layers)
    with jax.set_mesh(mesh):
        new, _ = updates_of(tx, lying(mesh, specs["fsdp"], masked), factors)
    for got, wanted in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_allclose(np.float32(got), np.float32(wanted), rtol=0.01, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_no_device_gets_all_of_a_gradient(kind):
    """Check that stacked kernels, split by rows, and their biases are not gathered. The norms' gradients are."""
    devices, copies, d = 4, 6, 64
    shapes = {"w": (copies, d, d), "b": (copies, d), "scale": (d,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def loss(p, x):
        h, _ = jax.lax.scan(lambda h, q: (jnp.tanh(h @ q["w"] + q["b"]), None), x * p["scale"], {n: p[n] for n in "wb"})
        return jnp.mean(jnp.sum(h**2, -1))

    layers = kfac.find_layers(loss, params, jax.ShapeDtypeStruct((8, d), jnp.float32))
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    sizes = {}
    for seen in (False, True) if kind == AxisType.Auto else (True,):
        tx = kfac.scale_by_kfac(layers, distribution=kfac.Distribution(mesh=mesh))
        specs = {"w": P(None, "data"), "b": P(None, "data"), "scale": P("data")}
        with jax.set_mesh(mesh):
            lies = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
            split = {n: messages.abstract(params[n], lies[n]) for n in params}
            states = jax.tree.map(lambda s: NamedSharding(mesh, s), kfac.state.state_specs(tx, params, "data"))
            state = messages.abstract(jax.eval_shape(tx.init, params), states)
            if seen:  # `init` sees arrays with this sharding
                zeros = {n: jnp.zeros(split[n].shape, device=lies[n]) for n in split}
                state = state._replace(settings=tx.init(zeros).settings)
            program = jax.jit(tx.update, out_shardings=(lies, states)).lower(split, state).compile()
        sent = messages.by_kind(messages.messages(program.as_text(), devices))
        sizes[seen] = sent.get("all-gather", 0), program.memory_analysis().temp_size_in_bytes
    assert sizes[True][0] <= 16 * d
    if kind == AxisType.Auto:
        assert sizes[False][0] >= 8 * copies * d * d and sizes[True][1] < 0.6 * sizes[False][1], sizes


@pytest.mark.slow
def test_what_overflows_a_narrow_dtype_is_no_step():
    """Check a float16 kernel with a float32 bias. The preconditioned gradient overflows, but the gradient does not."""
    params = {"w": jnp.ones((4, 4), jnp.float16), "b": jnp.ones(4, jnp.float32)}

    def loss(p, x):
        return jnp.mean(jnp.sum((x @ p["w"].astype(jnp.float32) + p["b"]) ** 2, -1))

    x = normal(0, 8, 4, dtype=jnp.float32)
    layers = kfac.find_layers(loss, params, x)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, x)
    factors = jax.tree.map(lambda f: 1e-6 * f, factors)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = kfac.scale_by_kfac(layers, damping=1e-9)
    for spec in (P(), P("data")):
        lies = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            split, state = jax.device_put(grads, lies), tx.init(jax.device_put(params, lies))
            state = jax.jit(observing(tx))(split, state, factors=factors)[1]
        assert (state.count, state.metrics.skipped_steps) == (0, 1), spec
