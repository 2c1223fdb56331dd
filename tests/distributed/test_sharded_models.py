"""Test that thirty steps over meshes, with usual parameter shardings, match one device in float64 to 1e-10."""

import functools
import itertools

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
from problem import motions, plain_kfac

# Two and three divide all sizes. Every layer's gradients have full rank, because equal eigenvalues leave their
# eigenvectors undetermined.
N, T, D, HEADS, LAYERS, EXPERTS, CLASSES = 12, 9, 12, 6, 6, 6, 24
STEPS = 30


def parameters():
    def array(seed, *shape):
        return 0.2 * normal(seed, *shape)

    blocks = {
        "norm": {"scale": 1 + array(0, LAYERS, D), "shift": array(1, LAYERS, D)},
        "qkv": array(2, LAYERS, 3, D, HEADS, 2),
        "out": array(3, LAYERS, HEADS, 2, D),
        "up": array(4, LAYERS, D, 2 * D),
        "up_bias": array(5, LAYERS, 2 * D),
        "down": array(6, LAYERS, 2 * D, D),
    }
    experts = {"up": array(7, EXPERTS, D, D), "down": array(8, EXPERTS, D, D)}
    return {"in": array(9, D, D), "blocks": blocks, "experts": experts, "gate": array(10, D, EXPERTS),
            "head": array(11, D, CLASSES)}  # fmt: skip


# The axis of each leaf that is split over the mesh axis "model", by the form of parallelism.
COLUMNS, ROWS = {"qkv": 3, "up": 2, "up_bias": 1, "head": 1}, {"out": 1, "down": 1}
SPLITS = {
    "data": lambda path, leaf: None,
    "tensor": lambda path, leaf: (COLUMNS | ROWS).get(path[-1]) if path[0] in ("blocks", "head") else None,
    "pipeline": lambda path, leaf: 0 if path[0] == "blocks" else None,
    "expert": lambda path, leaf: 0 if path[0] == "experts" else None,
    "fsdp": lambda path, leaf: next(k for k, size in enumerate(leaf.shape) if size % 12 == 0),
}
SPLITS["hsdp"] = SPLITS["fsdp"]


def axes_of(form, devices):
    """Return the axes of the mesh, the axes that split the batch, and the axis that splits parameters."""
    if form in ("data", "fsdp"):
        return {"data": devices}, ("data",), "data"
    first = 2 if devices == 4 else 1
    if form == "hsdp":
        return {"replica": first, "data": devices // first}, ("replica", "data"), "data"
    return {"data": first, "model": devices // first}, ("data",), "model"


def specs_of(form, params, axis):
    def spec(path, leaf):
        split = SPLITS[form]([key.key for key in path], leaf)
        return P(*(axis if k == split else None for k in range(leaf.ndim)))

    return jax.tree_util.tree_map_with_path(spec, params)


def loss_of(form, batch_axes, explicit):
    """Return the loss. On explicit axes it gives the sharding of products that sum over a split axis."""
    model = "model" if form == "tensor" else None
    own = P(batch_axes)

    def whole(tree):
        return jax.tree.map(lambda x: jax.reshard(x, P(*[None] * x.ndim)), tree) if explicit else tree

    def einsum(spec, *operands, lies=own):
        return jnp.einsum(spec, *operands, **({"out_sharding": lies} if explicit else {}))

    def block(h, q):
        x = (h - h.mean(-1, keepdims=True)) * q["norm"]["scale"] + q["norm"]["shift"]
        query, key, value = einsum("ntd,pdhk->pnthk", x, q["qkv"], lies=P(None, batch_axes, None, model))
        weight = jax.nn.softmax(jnp.einsum("nthk,nshk->nhts", query, key))
        mixed = jnp.einsum("nhts,nshk->nthk", weight, value)
        if explicit:
            mixed = jax.reshard(mixed, P(batch_axes, None, model))
        h = h + einsum("nthk,hkd->ntd", mixed, q["out"])
        up = jnp.tanh(einsum("ntd,de->nte", h, q["up"], lies=P(batch_axes, None, model)) + q["up_bias"])
        return h + einsum("nte,ed->ntd", up, q["down"]), None

    def loss(p, b):
        p = p if form in ("tensor", "expert") else whole(p)
        h, _ = lax.scan(jax.checkpoint(block), einsum("ntd,de->nte", b["x"], p["in"]), p["blocks"])
        split = P("model", batch_axes) if form == "expert" else P(None, batch_axes)
        x = einsum("ntd,xde->xnte", h, p["experts"]["up"], lies=split)
        x = einsum("xntd,xde->xnte", jnp.tanh(x), p["experts"]["down"], lies=split)
        gate = jax.nn.softmax(einsum("ntd,dx->ntx", h, p["gate"]))
        h = h + einsum("ntx,xntd->ntd", gate, x)
        z = einsum("ntd,dc->ntc", h, p["head"], lies=P(batch_axes, None, model))
        z = jax.reshard(z, own) if explicit else z
        return -jnp.mean(jnp.sum(b["y"] * jax.nn.log_softmax(z), axis=-1))

    return loss


def batches():
    rng = np.random.default_rng(0)
    labels = [jax.nn.one_hot(rng.integers(0, CLASSES, (N, T)), CLASSES, dtype=np.float64) for _ in range(3)]
    return [{"x": normal(20 + k, N, T, D), "y": y} for k, y in enumerate(labels)]


def trained(loss, layers, preconditioner, blind=False, place=lambda params, batch: (params, batch)):
    """Return parameters and momenta after thirty steps.

    Two of three steps have statistics. Every third step inverts.
    """
    params = parameters()
    tx = plain_kfac(
        0.002, layers, damping=1.0, inverse_update_period=3, interval_warmup_steps=2, preconditioner=preconditioner
    )
    data = batches()
    params, _ = place(params, data[0])
    shardings = jax.tree.map(lambda x: x.sharding, params)
    state = jax.jit(tx.init)(params) if blind else tx.init(params)

    @functools.partial(jax.jit, static_argnums=3)
    def step(params, state, batch, statistics):
        basis = (
            {"basis": kfac.curvature.eigenbasis(state, layers)}
            if isinstance(preconditioner, kfac.EKFAC) and statistics
            else {}
        )
        measure = kfac.value_and_grad(loss, layers, num_examples=N)
        if statistics:
            _, grads, factors = measure(params, batch, **basis)
        else:
            grads, factors = jax.grad(loss)(params, batch), None
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for k in range(STEPS):
        _, batch = place(params, data[k % 3])
        params, state = jax.block_until_ready(step(params, state, batch, k % 3 != 1))
    kept = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), params, shardings)
    return jax.device_get((params, motions(jax.jit(kfac.state.gather_state)(state)))), kept, state


@functools.cache
def alone(preconditioner, max_factor_dim):
    loss = loss_of("data", (), explicit=False)
    layers = kfac.find_layers(loss, parameters(), batches()[0], max_factor_dim=max_factor_dim)
    return layers, trained(loss, layers, preconditioner)[0]


def grid():
    """Yield all combinations, of which a single combination runs by default.

    docs/distributed.md, which a test runs, and test_meshes.py cover others.
    """
    usual = {("tensor", AxisType.Auto, "Cholesky", 4, "seen", 20)}
    for form in SPLITS:
        for kind in (AxisType.Auto, AxisType.Explicit):
            for preconditioner, max_factor_dim in (("Cholesky", 8192), ("EKFAC", 8192), ("Cholesky", 20)):
                for devices, init in itertools.product((4, 3), ("seen", "blind")):
                    case = form, kind, preconditioner, devices, init, max_factor_dim
                    marks = () if case in usual else pytest.mark.slow
                    name = f"{preconditioner}{' in blocks' if max_factor_dim < 100 else ''}"
                    yield pytest.param(*case, id=f"{form}-{kind.name}-{name}-{devices}-{init}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "kind", "preconditioner", "devices", "init", "max_factor_dim"), list(grid()))
def test_a_mesh_is_one_device(form, kind, preconditioner, devices, init, max_factor_dim, x64):
    preconditioner = getattr(kfac, preconditioner)()
    layers, expected = alone(preconditioner, max_factor_dim)
    sizes, batch_axes, axis = axes_of(form, devices)
    types = (kind,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:devices])
    specs = specs_of(form, parameters(), axis)

    def place(params, batch):
        params = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
        return params, jax.device_put(batch, NamedSharding(mesh, P(batch_axes)))

    explicit = kind == AxisType.Explicit
    loss = loss_of(form, batch_axes, explicit)
    with jax.set_mesh(mesh):
        found, kept, _ = trained(loss, layers, preconditioner, init == "blind", place)
    assert all(jax.tree.leaves(kept)), kept

    def close(found, expected):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * max(1, np.abs(expected).max()))

    jax.tree.map(close, found, expected)


def test_a_state_made_under_jit_with_its_shardings_is_that_made_outside():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    split = NamedSharding(mesh, P("data"))
    params = {"w": jnp.ones((8, 12)), "v": jnp.ones((12, 4))}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), params)
    batch = jnp.ones((16, 8))
    layers = kfac.find_layers(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"]), shapes, batch)
    tx = kfac.kfac(0.1, layers)
    params = jax.device_put(params, split)
    outside = tx.init(params)
    shardings = kfac.state.shardings(tx, shapes)
    with jax.set_mesh(mesh):
        inside = jax.jit(tx.init, out_shardings=shardings)(params)
    assert jax.tree.structure(inside) == jax.tree.structure(outside) == jax.tree.structure(shardings)
    for a, b, sharding in zip(*map(jax.tree.leaves, (inside, outside, shardings)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.sharding.is_equivalent_to(sharding, a.ndim)
    with pytest.raises(ValueError, match="params must be on a mesh"):
        kfac.state.shardings(tx, {"w": jnp.ones((8, 12)), "v": jnp.ones((12, 4))})


def test_shardings_of_a_state_whose_blocks_lie_along_one_axis_of_the_mesh():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    params = jax.device_put({"w": jnp.ones((8, 12)), "v": jnp.ones((12, 4))}, NamedSharding(mesh, P()))
    layers = kfac.find_layers(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"]), params, jnp.ones((16, 8)))
    tx = kfac.kfac(0.1, layers, distribution=kfac.Distribution(axis_name="data", mesh=mesh))
    shardings = kfac.state.shardings(tx, params)
    with jax.set_mesh(mesh):
        inside = jax.jit(tx.init, out_shardings=shardings)(params)
    outside = tx.init(params)
    for a, b, sharding in zip(*map(jax.tree.leaves, (inside, outside, shardings)), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.sharding.is_equivalent_to(sharding, a.ndim)


def test_scatter_state_gives_split_parameters_the_form_of_a_new_state():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    params, x = (jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P("data"))) for _ in range(2))
    layers = kfac.find_layers(lambda w, x: jnp.mean(jnp.square(x @ w)), params, x)
    state = kfac.kfac(0.1, layers).init(params)
    moved = jax.eval_shape(lambda state: kfac.state.scatter_state(kfac.state.gather_state(state), 2), state)
    assert jax.tree.structure(moved) == jax.tree.structure(state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_gather_state_works_outside_jit(kind):
    """Check explicit axes, where no mesh is set and JAX reshards an array by itself only."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    params = {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 3))}
    layers = kfac.find_layers(lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"]), params, jnp.ones((8, 4)))
    tx = kfac.kfac(0.1, layers)
    found = kfac.state.gather_state(tx.init(jax.device_put(params, NamedSharding(mesh, P()))))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(tx.init(params)))


@pytest.mark.slow
def test_scatter_state_moves_a_run_with_split_parameters(x64):
    """Move a run with FSDP from four devices to two, as the guide to several devices does."""

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w0"]) @ params["w1"] - 1))

    values = {"w0": normal(0, 8, 12), "w1": normal(1, 12, 4)}
    batch = normal(2, 16, 8)
    ends = []
    for moved in (False, True):
        params, portable = values, None
        for devices in (4, 2 if moved else 4):
            mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
            params = jax.device_put(params, NamedSharding(mesh, P("data")))
            x = jax.device_put(batch, NamedSharding(mesh, P("data")))
            step = kfac.train_step(loss, 0.1, verbose=False)
            state = step.init(params, x)
            if portable is not None:
                shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
                scatter = jax.jit(functools.partial(kfac.state.scatter_state, num_devices=devices),
                                  out_shardings=shardings)  # fmt: skip
                # A checkpoint holds the leaves only.
                restored = jax.tree.unflatten(jax.tree.structure(kfac.state.gather_state(state)), portable)
                state = scatter(restored)
            for _ in range(3):
                params, state, _ = step(params, state, x)
                jax.block_until_ready(params)
            portable = [np.asarray(leaf) for leaf in jax.tree.leaves(kfac.state.gather_state(state))]
            params = jax.device_get(params)
        ends.append(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *ends)
