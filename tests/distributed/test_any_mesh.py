"""Test that the same four lines work in every program, without device options.

Twenty steps on several devices match one device in float64.
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
from problem import state_of

D, N, STEPS, DEVICES = 8, 16, 20, 4


def initial():
    dense = {name: {"kernel": normal(k, D, D) / 3, "bias": jnp.zeros(D)} for k, name in enumerate(("first", "second"))}
    return dense | {"norm": {"scale": jnp.ones(D), "shift": jnp.zeros(D)}, "out": {"kernel": normal(3, D, 4) / 3}}


def loss_fn(p, batch):
    x, y = batch
    for name in ("first", "second"):
        x = jnp.tanh(x @ p[name]["kernel"] + p[name]["bias"])
    x = x * p["norm"]["scale"] + p["norm"]["shift"]
    return jnp.mean(jnp.sum((x @ p["out"]["kernel"] - y) ** 2, -1))


def batches():
    sizes = np.linspace(0.2, 2, N)[:, None]
    return [(normal(10 + k, N, D) * sizes, normal(20 + k, N, 4)) for k in range(5)]


@functools.cache
def layers():
    return kfac.find_layers(loss_fn, initial(), batches()[0])


def four_lines(preconditioner, average=lambda tree: tree, distribution=None):
    tx = kfac.kfac(0.05, layers(), preconditioner=preconditioner, inverse_update_period=3, distribution=distribution)

    def step(params, opt_state, batch):
        basis = {"basis": kfac.curvature.eigenbasis(opt_state, layers())} if preconditioner.uses_example_moments else {}
        loss, grads, factors = kfac.value_and_grad(loss_fn, layers())(params, batch, **basis)
        loss, grads = average((loss, grads))
        opt_state = kfac.observe(opt_state, factors)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx, step


def trained(step, params, state, place=lambda batch: batch):
    data = batches()
    for k in range(STEPS):
        params, state, _ = jax.block_until_ready(step(params, state, place(data[k % 5])))
    return params


jit = jax.jit


def average(tree):
    return lax.pmean(tree, "data")


def under_pmap(preconditioner):
    tx, step = four_lines(preconditioner, average, kfac.Distribution("data"))
    copies = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (DEVICES, *x.shape)))
    parts = functools.partial(jax.tree.map, lambda x: x.reshape(DEVICES, -1, *x.shape[1:]))
    pmap = functools.partial(jax.pmap, axis_name="data", devices=jax.devices()[:DEVICES])
    params = copies(initial())
    state = pmap(tx.init)(params)
    params = trained(pmap(step), params, state, parts)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x[0], x[-1]), params)  # devices do not drift apart
    return jax.tree.map(lambda x: x[0], params), state


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,), devices=jax.devices()[:DEVICES])


def under_shard_map(preconditioner, *, check=True, averaged=True, inside=True):
    own = average if averaged else lambda pair: (average(pair[0]), pair[1])
    tx, step = four_lines(preconditioner, own, None if check else kfac.Distribution("data"))
    mesh, specs = mesh_of(), kfac.state.state_specs(tx, initial(), "data") if inside else P()
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=check)
    state = jit(over(tx.init, in_specs=P(), out_specs=specs))(initial()) if inside else tx.init(initial())
    step = jit(over(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())))
    return trained(step, initial(), state), state


def over_mesh(preconditioner, *, kind=AxisType.Auto, known=False, split=False, traced=False, lies=True, moved=False):
    mesh, (tx, step) = mesh_of(kind), four_lines(preconditioner)

    def spec(leaf):
        axis = next((k for k, n in enumerate(leaf.shape) if n % DEVICES == 0), None) if split else None
        return NamedSharding(mesh, P(*("data" if k == axis else None for k in range(leaf.ndim))))

    def run():
        params = jax.tree.map(lambda leaf: jax.device_put(leaf, spec(leaf)), initial()) if lies else initial()
        state = (jit(tx.init) if traced else tx.init)(initial() if moved else params)
        params = trained(jit(step), params, state, lambda b: jax.device_put(b, NamedSharding(mesh, P("data"))))
        # With the state of one device, XLA chooses where the new parameters lie.
        if lies and not moved:
            jax.tree.map(lambda x: np.testing.assert_(x.sharding.is_equivalent_to(spec(x), x.ndim)), params)
        return params, state

    if known:
        with jax.set_mesh(mesh):
            return run()
    return run()


explicit = {"kind": AxisType.Explicit}
PROGRAMS = {  # the last value tells whether blocks have owners
    "pmap": (under_pmap, {}, True),
    "shard_map": (under_shard_map, {}, True),
    "shard_map without its check": (under_shard_map, {"check": False}, True),
    "gradients that are not averaged": (under_shard_map, {"averaged": False}, True),
    "automatic axes": (over_mesh, {}, True),
    "automatic axes, set": (over_mesh, {"known": True}, True),
    "explicit axes": (over_mesh, explicit, True),
    "explicit axes, set": (over_mesh, explicit | {"known": True}, True),
    "parameters that are split": (over_mesh, {"split": True}, True),
    "a state made under jit": (over_mesh, {"traced": True}, True),
    "a state made under jit, explicit": (over_mesh, explicit | {"traced": True}, True),
    "shard_map, a state of one device": (under_shard_map, {"inside": False}, False),
    "and gradients that are not averaged": (under_shard_map, {"inside": False, "averaged": False}, False),
    "a state from before the move to a mesh": (over_mesh, {"moved": True}, False),
    "the batch alone on a mesh": (over_mesh, {"lies": False}, False),
    "the batch alone on explicit axes": (over_mesh, explicit | {"lies": False}, False),
}
# test_distributed.py covers pmap. optimizer/test_layer_lengths.py covers gradients that are not averaged.
USUAL = {"SOAP": ("explicit axes", "parameters that are split"), "EKFAC": ("shard_map",), "Cholesky": ()}


# Outside `jax.set_mesh`, JAX 0.10.0 cannot differentiate the product of such a batch and a matrix that is not on the
# mesh.
NEEDS_SET_MESH = pytest.mark.xfail(jax.__version_info__ < (0, 10, 1), reason="jax.grad fails without jax.set_mesh")


def grid():
    for preconditioner, usual in USUAL.items():
        for name in PROGRAMS:
            marks = [] if name in usual else [pytest.mark.slow]
            if name == "the batch alone on explicit axes":
                marks.append(NEEDS_SET_MESH)
            yield pytest.param(preconditioner, name, marks=marks, id=f"{preconditioner}, {name}")


@functools.cache
def alone(preconditioner):
    tx, step = four_lines(preconditioner)
    return trained(jit(step), initial(), jit(tx.init)(initial()))


@pytest.mark.parametrize(("preconditioner", "name"), list(grid()))
def test_the_same_four_lines(preconditioner, name, x64):
    preconditioner = getattr(kfac, preconditioner)()
    run, options, dealt = PROGRAMS[name]
    expected = alone(preconditioner)
    found, state = run(preconditioner, **options)
    assert state_of(state).settings.devices == (DEVICES if dealt else 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_call_over_a_mesh(kind, x64):
    step = kfac.train_step(loss_fn, 0.05, inverse_update_period=3)
    first = batches()[0]
    expected = trained(step, initial(), step.init(initial(), first))
    mesh = mesh_of(kind)
    over = NamedSharding(mesh, P("data")) if kind == AxisType.Auto else NamedSharding(mesh, P())
    params = jax.tree.map(lambda x: jax.device_put(x, over if x.shape[0] % DEVICES == 0 else None), initial())
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    state = step.init(params, place(first))
    node = state_of(state)
    assert node.settings.devices == DEVICES
    assert bool(node.settings.param_specs) == (kind == AxisType.Auto)
    found = trained(step, params, state, place)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9), found, expected)


def test_scatter_state_has_the_structure_of_a_new_state_on_one_device(x64):
    """Check it for a state whose layers were found on several devices, and specs that say the same in other words."""

    def new(devices, *axes):
        mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        params = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*axes[: x.ndim]))), initial())
        return kfac.kfac(0.1, kfac.find_layers(loss_fn, params, batches()[0]), distribution=halves).init(params)

    halves = kfac.Distribution(communication_dtype="bfloat16")
    state = new(DEVICES, "data", None)
    assert jax.tree.structure(state) == jax.tree.structure(new(DEVICES, "data"))
    moved = kfac.state.scatter_state(kfac.state.gather_state(state), 1, distribution=halves)
    assert jax.tree.structure(moved) == jax.tree.structure(new(1, "data"))


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["data", None])
def test_pmap_without_a_word_is_refused(inside, name, x64):
    """Check that pmap requires `distribution=`, whether the state is made inside or outside it.

    Otherwise devices would drift apart without an error.
    """
    tx, step = four_lines(kfac.Cholesky(), lambda tree: tree)
    copies = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (DEVICES, *x.shape)))
    parts = functools.partial(jax.tree.map, lambda x: x.reshape(DEVICES, -1, *x.shape[1:]))
    pmap = functools.partial(jax.pmap, axis_name=name, devices=jax.devices()[:DEVICES])
    words = r"do not tell whether the devices of .*distribution=kfac\.Distribution\("
    with pytest.raises(ValueError, match=words + "'data'" if name else words):
        if inside:
            pmap(tx.init)(copies(initial()))
        pmap(step)(copies(initial()), copies(tx.init(initial())), parts(batches()[0]))
    with pytest.raises(ValueError, match=words):
        over = functools.partial(jax.shard_map, mesh=mesh_of(), in_specs=P(), out_specs=P(), check_vma=False)
        over(lambda p: tx.init(p).count if inside else tx.update(p, tx.init(p), p))(initial())


def test_parameters_that_differ_between_devices_are_refused(x64):
    mesh = mesh_of()
    tx = kfac.kfac(0.05, layers())
    params = jax.tree.map(lambda x: jnp.concatenate(DEVICES * [x]), initial())
    init = jax.shard_map(lambda p: tx.init(p), mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(ValueError, match=r"params differ between the devices of \['data'\].* tensor, pipeline"):
        jax.eval_shape(init, params)


def test_a_mesh_without_its_word():
    with pytest.raises(ValueError, match=r"axis_name must be the name of an axis.*: a mesh goes by name, mesh="):
        kfac.Distribution(mesh_of())


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [kfac.SOAP(), kfac.Cholesky()])
def test_an_owner_may_hold_single_blocks_of_several_shapes(preconditioner, x64):
    """Check that a block's location does not depend on the order of groups in a state, which `jit` sorts."""
    params = {"a": [{"w": normal(k, 8, 8) / 3, "b": jnp.zeros(8)} for k in range(3)]}
    params |= {"wide": normal(3, 8, 25) / 3, "back": normal(4, 25, 8) / 5, "head": normal(5, 8, 40) / 3}

    def loss(p, x):
        for layer in p["a"]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return jnp.mean((jnp.tanh(x @ p["wide"]) @ p["back"] @ p["head"] - 1) ** 2)

    batch = normal(6, N, 8)
    found = kfac.find_layers(loss, params, batch)
    tx = kfac.kfac(0.05, found, preconditioner=preconditioner)

    @jax.jit
    def step(p, state, x):
        _, grads, factors = kfac.value_and_grad(loss, found)(p, x)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    def after_three(p, x):
        state = tx.init(p)
        for _ in range(3):
            p, state = jax.block_until_ready(step(p, state, x))
        return jax.device_get(p)

    mesh = mesh_of()
    [axis] = mesh.axis_names
    on_mesh = after_three(
        jax.device_put(params, NamedSharding(mesh, P())), jax.device_put(batch, NamedSharding(mesh, P(axis)))
    )
    for a, b in zip(jax.tree.leaves(on_mesh), jax.tree.leaves(after_three(params, batch)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_moments_where_a_piece_has_the_shape_of_a_whole_layer(x64):
    params = {"whole": {"w": normal(0, 6, 6) / 3, "b": jnp.zeros(6)}, "cut": normal(1, 21, 6) / 5}

    def loss(p, x):
        return jnp.mean(jnp.tanh(x[0] @ p["whole"]["w"] + p["whole"]["b"] + jnp.tanh(x[1] @ p["cut"])) ** 2)

    batch = normal(2, N, 6), normal(3, N, 21)
    found = kfac.find_layers(loss, params, batch, max_factor_dim=8)
    assert len({tuple(layer.block_shapes.items()) for layer in found}) == 1
    tx = kfac.kfac(0.05, found, preconditioner=kfac.EKFAC())

    @jax.jit
    def step(p, state, x):
        basis = kfac.curvature.eigenbasis(state, found)
        _, grads, factors = kfac.value_and_grad(loss, found)(p, x, basis=basis)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    mesh = mesh_of()
    [axis] = mesh.axis_names
    spread = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((params, P()), (batch, P(axis))))
    after = []
    for p, x in ((params, batch), spread):
        state = tx.init(p)
        for _ in range(3):
            p, state = jax.block_until_ready(step(p, state, x))
        after.append(jax.device_get(p))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-10), *after)


@pytest.mark.slow
def test_eigenbasis_fits_the_moments_that_come_in_bfloat16(x64):
    """Compare a step of EKFAC on a 2 x 2 mesh with per-example gradients in the very basis that the state has.

    Factors in bfloat16 turn the eigenvectors of close eigenvalues, so the steps of one device are no reference here.
    """
    distribution = kfac.Distribution(communication_dtype="bfloat16")
    tx = kfac.scale_by_kfac(
        layers(),
        damping=1e-3,
        factor_ema_decay=0.0,
        inverse_update_period=100,
        interval_warmup_steps=0,
        preconditioner=kfac.EKFAC(precision="float32"),
        distribution=distribution,
    )
    measure = kfac.value_and_grad(loss_fn, layers(), distribution=distribution)
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=2 * (AxisType.Auto,))
    params = jax.device_put(initial(), NamedSharding(mesh, P()))

    @jax.jit
    def step(params, state, batch):
        basis = kfac.curvature.eigenbasis(state, layers())
        _, grads, factors = measure(params, batch, basis=basis)
        state = kfac.observe(state, factors)
        updates, new = tx.update(grads, state, params)
        return grads, updates, new, basis

    def sharded(batch):
        return jax.device_put(batch, NamedSharding(mesh, P(("node", "gpu"))))

    *_, state, _ = step(params, tx.init(params), sharded(batches()[0]))  # decomposes the factors
    grads, updates, _, basis = step(params, state, sharded(batches()[1]))  # brings moments

    @jax.vmap
    def of_example(x, y):
        return jax.grad(loss_fn)(initial(), (x[None], y[None]))

    examples = of_example(*batches()[1])

    for name in ("first", "second", "out"):
        [(q_a, q_g)] = [value for key, value in basis.items() if key.startswith(name)]

        def kernel(tree, name=name):
            rows = [tree[name]["kernel"]]
            if "bias" in tree[name]:
                rows.append(tree[name]["bias"][..., None, :])
            return np.concatenate(rows, axis=-2)

        moments = np.mean((q_a.T @ kernel(examples) @ q_g) ** 2, axis=0)
        expected = q_a @ ((q_a.T @ kernel(grads) @ q_g) / (moments + 1e-3)) @ q_g.T
        error = np.linalg.norm(kernel(updates) - expected) / np.linalg.norm(expected)
        assert error < 2**-8, name
