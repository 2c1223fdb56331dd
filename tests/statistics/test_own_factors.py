"""Test gradient factors: `A = E[V^T V] / sqrt(t)`, `G = E[V V^T] / sqrt(t)`, `t = E||V||^2`. Vectors have `E[v^2]`.

They are running averages over the averaged gradient `V` in steps with statistics. They do not depend on the number of
devices or micro-batches.

The tests use internals of `_optimizer.state` to find averages by layer, and a threshold of `_capture.find_layers`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
from checking import normal
from kfac._optimizer.state import blocks_of
from oracle import relative_error
from problem import observing

pytestmark = pytest.mark.usefixtures("x64")
N, D, H = 12, 5, 4
STATISTICS = [True, True, False, True, False, True]  # whether each step has statistics
SHAPES = {
    "b": (H,),
    "cube": (2, 3, H),  # as a matrix [6, 4], the shape nearest to a square
    "in": (D, H),
    "left": (H, 2),
    "number": (),
    "right": (H, 1),
    "stack": (2, H, H),
    "temperature": (3,),
    "unused": (2, 2),
}
MATRICES = {  # [copies, d_out, d_in]
    "cube": lambda v: v.reshape(1, 6, H).swapaxes(1, 2),
    "left": lambda v: v[None].swapaxes(1, 2),
    "stack": lambda v: v.swapaxes(1, 2),
}


VECTORS = ("number", "right", "temperature")  # a matrix with a single column is a vector


def parameters():
    return {name: normal(k, *shape) for k, (name, shape) in enumerate(SHAPES.items())}


def loss_fn(p, x):
    h = jnp.tanh(x @ p["in"] + p["b"]) * jnp.logaddexp(p["number"], 0) + jnp.sum(jnp.sin(p["cube"]), (0, 1))
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ jnp.tril(w)), None), h, p["stack"])
    y = h @ jnp.concatenate([p["left"], p["right"]], 1)
    return jnp.mean(jnp.sum(y**2 * jax.nn.softplus(p["temperature"]), -1))


def batches():
    return [normal(20 + k, N, D) for k in range(len(STATISTICS))]


def found_layers(**options):
    layers = kfac.find_layers(loss_fn, parameters(), batches()[0], **options)
    own = {layer.name for layer in layers if layer.kind == "gradient-factors"}
    assert own == {*MATRICES, *VECTORS} and layers["unused"].kind == "skipped"
    assert (layers["stack"].copies, layers["stack"].stacked) == (2, True)
    return layers


def truth(decay, layers):
    """Return the expected averages `[copies, ...]`, computed in NumPy."""
    gradient = jax.jit(jax.grad(loss_fn))
    weight, sums, kept, last = 0.0, {}, decay, None

    def add(key, value):
        sums[key] = kept * sums.get(key, 0.0) + (1 - kept) * value

    for step, (x, statistics) in enumerate(zip(batches(), STATISTICS, strict=True)):
        if not statistics:
            continue
        kept, last = decay ** (1 if last is None else step - last), step
        weight = kept * weight + (1 - kept)
        for name, v in jax.tree.map(np.asarray, gradient(parameters(), x)).items():
            if name in MATRICES:
                for k, matrix in enumerate(np.asarray(layers[name].to_pieces(np.stack(MATRICES[name](v))))):
                    add((name, k, "A"), matrix.T @ matrix)
                    add((name, k, "G"), matrix @ matrix.T)
                    add((name, k, "t"), np.sum(matrix**2))
            elif name in VECTORS:
                add((name, "F"), np.square(v).reshape(-1, 1, 1))
    result = {name: {"F": sums[name, "F"] / weight} for name in VECTORS}
    for name in MATRICES:
        copies = range(layers[name].pieces * layers[name].copies)
        roots = [np.sqrt(sums[name, k, "t"] / weight) or 1.0 for k in copies]
        result[name] = {side: np.stack([sums[name, k, side] / weight / roots[k] for k in copies]) for side in "AG"}
    return result


def averages(state, layers):
    """Return the running averages by layer."""
    found = {}
    for group, block in blocks_of(state, layers, "state"):
        for name in group.shapes:
            for layer, own in group.split(getattr(block.factors, name)):
                found.setdefault(layer.name, {})[name] = np.asarray(own if group.kronecker else own[0])
    return found


def check(state, layers, decay=0.75):
    found = averages(state, layers)
    for name, sides in truth(decay, layers).items():
        for side, expected in sides.items():
            if side in layers[name].diagonal:
                expected = np.diagonal(expected, axis1=1, axis2=2)
            assert found[name][side].dtype == np.float64
            error = relative_error(found[name][side], expected)
            assert error < 1e-12, f"{side} of {name}: {error}"


def step_of(layers, tx, spread=lambda fn: fn, average=lambda grads: grads):
    measure = spread(kfac.value_and_grad(loss_fn, layers))

    def step(params, state, x, statistics):
        _, grads, factors = measure(params, x)
        assert factors is not None
        return observing(tx)(average(grads), state, params, factors=factors if statistics else None)[1]

    return step


def run(step, state, place=lambda x: x):
    step = jax.jit(step, static_argnums=3)
    for x, statistics in zip(batches(), STATISTICS, strict=True):
        state = jax.block_until_ready(step(parameters(), state, place(x), statistics))
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "decay"),
    [(4, 0.75), (1, 0.0), (1, 0.75), (4, 0.0)],
)
def test_they_are_averages_of_the_gradient(decay, parts):
    layers = found_layers()
    tx = kfac.scale_by_kfac(layers, factor_ema_decay=decay)
    spread = functools.partial(kfac.microbatch, num_microbatches=parts)
    check(run(step_of(layers, tx, spread), jax.jit(tx.init)(parameters())), layers, decay)


def mesh_of(devices):
    return jax.make_mesh((devices,), ("data",), (AxisType.Auto,), devices=jax.devices()[:devices])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradients": "local"},
    ],
    ids=str,
)
def test_on_devices_of_a_shard_map(options):
    layers, mesh = found_layers(), mesh_of(3)
    tx = kfac.scale_by_kfac(layers, factor_ema_decay=0.75, preconditioner=kfac.Cholesky())
    specs = kfac.state.state_specs(tx, parameters(), "data")
    average = (lambda g: g) if options.get("gradients") == "local" else lambda g: lax.pmean(g, "data")
    local = step_of(layers, tx, average=average)

    def step(params, state, x, statistics):
        own = functools.partial(local, statistics=statistics)
        return jax.shard_map(own, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=specs)(params, state, x)

    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs))
    check(jax.jit(kfac.state.gather_state)(run(step, init(parameters()))), layers)


@pytest.mark.slow  # shard_map averages in the same places
def test_on_devices_of_a_pmap():
    layers, devices = found_layers(), jax.devices()[:3]
    tx = kfac.scale_by_kfac(layers, factor_ema_decay=0.75, distribution=kfac.Distribution("data"))
    local = step_of(layers, tx, average=lambda grads: lax.pmean(grads, "data"))
    steps = {
        statistics: jax.pmap(
            functools.partial(local, statistics=statistics), axis_name="data", in_axes=(None, 0, 0), devices=devices
        )
        for statistics in (True, False)
    }
    state = jax.pmap(lambda p, _: tx.init(p), axis_name="data", in_axes=(None, 0), devices=devices)(
        parameters(), np.arange(3)
    )
    for x, statistics in zip(batches(), STATISTICS, strict=True):
        state = steps[statistics](parameters(), state, x.reshape(3, -1, D))
    check(jax.jit(kfac.state.gather_state)(state), layers)


@pytest.mark.slow
def test_under_jit_over_a_mesh():
    layers, mesh = found_layers(), mesh_of(3)
    tx = kfac.scale_by_kfac(layers, factor_ema_decay=0.75, distribution=kfac.Distribution(mesh=mesh))
    step = step_of(layers, tx)
    state = run(step, jax.jit(tx.init)(parameters()), lambda x: jax.device_put(x, NamedSharding(mesh, P("data"))))
    check(jax.jit(kfac.state.gather_state)(state), layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "max_factor_dim"),
    [(100, 5), (3, 2), (100, 2), (3, 5)],
)
def test_a_large_side_is_cut_or_diagonal(max_factor_dim, words, monkeypatch):
    """Check that each piece has its own factors, whereas a diagonal factor covers the whole side."""
    monkeypatch.setattr("kfac._capture.make_layers.VOCABULARY", words)
    layers = found_layers(max_factor_dim=max_factor_dim)
    tx = kfac.scale_by_kfac(layers, factor_ema_decay=0.75)
    diagonal, cut = (("A",) if max_factor_dim == 5 else ("A", "G")), ((2, 1) if max_factor_dim == 5 else (3, 2))
    assert (layers["cube"].diagonal, layers["cube"].num_blocks) == ((diagonal, (1, 1)) if words == 3 else ((), cut))
    assert f"A has more than max_factor_dim={max_factor_dim} rows" in layers["cube"].note
    check(run(step_of(layers, tx), jax.jit(tx.init)(parameters())), layers)


def test_tables_are_diagonal_unless_it_is_said_otherwise():
    def loss(p, x):
        return jnp.mean(jnp.sum((x @ jnp.tanh(p["w"])) ** 2, -1))

    p, x = {"w": jax.ShapeDtypeStruct((30_000, 3), jnp.float32)}, jax.ShapeDtypeStruct((2, 30_000), jnp.float32)
    (layer,) = kfac.find_layers(loss, p, x)
    assert (layer.kind, layer.diagonal, layer.num_blocks) == ("gradient-factors", ("A",), (8, 1))
    assert "A has more than max_factor_dim=8192 rows" in layer.note
    (layer,) = kfac.find_layers(loss, p, x, max_factor_dim=30_000)
    assert (layer.diagonal, layer.num_blocks) == ((), (1, 1))


def test_they_precondition_as_any_block_does():
    layers, damping = found_layers(), 2.0**-6
    tx = kfac.scale_by_kfac(layers, damping=damping, unitwise_damping_scale=0.5)
    x = batches()[0]
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_fn, layers))(parameters(), x)
    updates, _ = jax.jit(observing(tx))(grads, jax.jit(tx.init)(parameters()), parameters(), factors=factors)
    for name, form in MATRICES.items():
        for v, update in zip(form(np.asarray(grads[name])), form(np.asarray(updates[name])), strict=True):
            root = np.linalg.norm(v) or 1.0
            a, g = v.T @ v / root, v @ v.T / root
            pi = np.sqrt(np.trace(a) / len(a) / (np.trace(g) / len(g))) if np.trace(a) else 1.0
            a, g = a + pi * damping**0.5 * np.eye(len(a)), g + damping**0.5 / pi * np.eye(len(g))
            np.testing.assert_allclose(update, np.linalg.solve(g, v) @ np.linalg.inv(a), rtol=1e-8, atol=1e-12)
    v = np.asarray(grads["temperature"])
    np.testing.assert_allclose(updates["temperature"], v / (v**2 + 0.5 * damping), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preconditioner", [kfac.SOAP(), kfac.Cholesky(), kfac.Eigh(), kfac.EKFAC()], ids=lambda i: type(i).__name__
)
def test_every_inverse_trains_with_nothing_else(preconditioner):
    """Train without captured inputs or gradients, so the loss may hide its examples."""
    target = normal(50, D, 3)

    def loss(p):
        x = batches()[0]
        h = jnp.tanh(x @ p["in"] + p["b"])
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])
        return jnp.mean(jnp.sum((h @ p["left"] - jnp.sin(x @ target)[:, :2]) ** 2, -1))

    params = {name: leaf for name, leaf in parameters().items() if name in ("in", "b", "stack", "left")}
    layers = kfac.find_layers(loss, params, rules={".*": "gradient"})
    assert {(layer.kind, layer.note) for layer in layers} == {("gradient-factors", "chosen by the user")}
    tx = kfac.kfac(0.02, layers, preconditioner=preconditioner)

    @jax.jit
    def step(params, state):
        basis = {"basis": kfac.curvature.eigenbasis(state, layers)} if preconditioner == kfac.EKFAC() else {}
        value, grads, factors = kfac.value_and_grad(loss, layers)(params, **basis)
        assert not factors
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, values = jax.jit(tx.init)(params), []
    for _ in range(100):
        params, state, value = step(params, state)
        values.append(float(value))
    assert values[-1] < 0.2 * values[0]
    assert kfac.diagnostics(state)["failed_inversions"] == 0
