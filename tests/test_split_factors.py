"""`Distribution(split_from=)`: factors of which each device has some rows."""

import dataclasses
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
from checking import FAST, normal
from kfac._curvature.by_rows import ByRows, Rows, invert_damped_rows
from kfac._curvature.cholesky import invert_damped
from kfac._optimizer.reshard import state_spec
from problem import layers, tied_batch, tied_loss, tied_parameters

STEPS, WORDS = 8, 9


def parameters():
    """Three dense blocks 7 x 6, a table whose inputs are diagonal, and a kernel 6 x 4."""
    return tied_parameters(3, 6, WORDS, 4)


@functools.cache
def found():
    return kfac.find_layers(tied_loss, parameters(), tied_batch(0))


def mesh_of(devices):
    return jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def optimizer(options, distribution=None):
    usual = {"damping": 1e-2, "trust_ratio": None, "inverse_every": 2, "inverse": kfac.Cholesky()}
    distribution = distribution or kfac.Distribution()
    return kfac.kfac(0.05, found(), **usual | options, distribution=distribution)


def stepped(tx, average, spoil=lambda factors, step: factors):
    def step(p, state, data, number, statistics):
        _, grads, factors = kfac.value_and_grad(tied_loss, found())(p, data)
        updates, state = tx.update(average(grads), state, p, factors=spoil(factors, number) if statistics else None)
        return optax.apply_updates(p, updates), state

    return step


def trained(step, state, place=lambda data: data, params=None):
    step = jax.jit(step, static_argnums=4, compiler_options=FAST)
    params = parameters() if params is None else params
    for k in range(STEPS):
        params, state = jax.block_until_ready(
            step(params, state, place(tied_batch(k)), jnp.asarray(k), k not in (3, 5))
        )
    return params, state


@functools.cache
def on_one(relative=False, spoil=lambda factors, step: factors):
    tx = optimizer(RELATIVE if relative else {})
    return trained(stepped(tx, lambda g: g, spoil), jax.jit(tx.init)(parameters()))


RELATIVE = {"trust_ratio": "auto", "damping": 0.1}


def in_shard_map(devices, options, spoil=lambda factors, step: factors, check=True, **fields):
    """A step, and the state before the first; the state lies over the devices."""
    mesh = mesh_of(devices)
    distribution = kfac.Distribution("d", **fields)
    tx = optimizer(options, distribution)
    specs = kfac.state_specs(tx, parameters(), "d")
    step = stepped(tx, lambda g: g if fields.get("gradients") == "local" else lax.pmean(g, "d"), spoil)

    def over(fn, arguments, results):
        return jax.shard_map(fn, mesh=mesh, in_specs=arguments, out_specs=results, check_vma=check)

    def on_mesh(p, state, data, number, statistics):
        own = functools.partial(step, statistics=statistics)
        return over(own, (P(), specs, P("d"), P()), (P(), specs))(p, state, data, number)

    return on_mesh, jax.jit(over(tx.init, P(), specs))(parameters())


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


def arrays(state):
    """Averages, weights and inverses of all blocks of a state of one device, without the shape of the tree."""
    return {name: jax.tree.leaves(block) for name, block in state[0].blocks.items()}


SIDES = {  # of tables, of dense blocks and of the first kernel
    4: [("G",), ("A", "G"), ("A", "G")], 6: [("G",), ("A", "G"), ("G",)], 7: [(), ("A",), ()],
}  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "split_from", "relative", "gradients"),
    [
        pytest.param(4, 6, False, "averaged", marks=pytest.mark.slow),
        (3, 4, True, "local"),
        pytest.param(2, 7, True, "averaged", marks=pytest.mark.slow),
        pytest.param(1, 4, False, "local", marks=pytest.mark.slow),
    ],
)
def test_it_is_one_device(x64, devices, split_from, relative, gradients):
    """Parameters, diagnostics and the state, which any number of devices can take, split or not."""
    step, state = in_shard_map(devices, RELATIVE if relative else {}, split_from=split_from, gradients=gradients)
    params, state = trained(step, state)
    expected, alone = on_one(relative)
    close(params, expected)
    sides = {own.shard.sides for own in state[0].owned.values()}
    assert sides == set(SIDES[split_from]) and kfac.diagnostics(state)["failed_inversions"] == 0
    for name, value in kfac.diagnostics(alone).items():
        np.testing.assert_allclose(kfac.diagnostics(state)[name], value, rtol=1e-4, err_msg=name)
    whole = kfac.gather_state(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), arrays(whole), arrays(alone))
    for number, start in ((1, 4), (2, None), (5, 7)):
        for pmap in (False, True):
            spread = kfac.scatter_state(whole, number, pmap=pmap, split_from=start)
            jax.tree.map(np.testing.assert_array_equal, kfac.gather_state(spread), whole)


@pytest.mark.slow
def test_under_pmap_it_is_one_device(x64):
    tx = optimizer({}, kfac.Distribution("d", split_from=6))
    step = stepped(tx, lambda g: lax.pmean(g, "d"))
    spread = functools.partial(jax.pmap, axis_name="d", devices=jax.devices()[:4])
    own, copies = spread(step, static_broadcasted_argnums=4), jax.tree.map(lambda x: jnp.stack(4 * [x]), parameters())
    params, state = copies, spread(tx.init)(copies)
    for k in range(STEPS):
        data = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), tied_batch(k))
        params, state = own(params, state, data, jnp.full(4, k), k not in (3, 5))
    params = jax.tree.map(lambda x: x[0], params)
    close(params, on_one()[0])


@pytest.mark.parametrize(
    ("owners", "gradients"), [("gpu", "averaged"), pytest.param(None, "split", marks=pytest.mark.slow)]
)
def test_over_a_mesh_it_is_one_device(x64, owners, gradients):
    """Also where owners are repeated, and a state that lies there is refreshed."""
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=2 * (AxisType.Auto,), devices=jax.devices()[:4])
    distribution = kfac.Distribution(mesh=mesh, owners=owners, split_from=6, gradients=gradients)
    tx = optimizer({}, distribution)
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), NamedSharding(mesh, P()))
        state = jax.jit(tx.init)(params)
        assert {own.shard.sides for own in state[0].owned.values()} == set(SIDES[6])

        def place(data):
            return jax.device_put(data, NamedSharding(mesh, P(("node", "gpu"))))

        params, state = trained(stepped(tx, lambda g: g), state, place, params)
        close(params, on_one()[0])
        state = jax.jit(lambda s: kfac.refresh(s, distribution=distribution))(state)
        whole = jax.jit(kfac.gather_state, out_shardings=NamedSharding(mesh, P()))(state)
    alone = jax.jit(kfac.refresh)(on_one()[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), arrays(whole), arrays(alone))


def spoiled(factors, step):
    """Statistics of which one number of one device is NaN, once, and once those of a block that has no inverse."""
    with_nan = factors["dense1"].A.at[2, 3].set(jnp.where(step == 2, jnp.nan, factors["dense1"].A[2, 3]))
    lost = jnp.where(step == 6, -1e3, 1.0) * factors["dense2"].A
    changed = {"dense1": with_nan, "dense2": lost}
    return kfac.Factors(dict(factors) | {name: dataclasses.replace(factors[name], A=a) for name, a in changed.items()})


def test_what_is_not_finite_or_has_no_inverse_is_left_out_on_all_devices(x64):
    step, state = in_shard_map(4, {}, spoiled, split_from=6)
    params, state = trained(step, state)
    expected, alone = on_one(spoil=spoiled)
    close(params, expected)
    counts = ("skipped_statistics", "failed_inversions", "skipped_steps")
    have, want = ([int(kfac.diagnostics(s)[name]) for name in counts] for s in (state, alone))
    assert have == want and want[0] == 1 and want[1] > 0


def test_without_the_check_and_in_bfloat16(x64):
    options = {"inverse": kfac.Cholesky(precision="bfloat16")}
    step, state = in_shard_map(4, options, check=False, split_from=6, communication_dtype="bfloat16")
    assert state[0].owned["kronecker_6x7"].blocks.inverse.A.dtype == jnp.bfloat16
    params, _ = trained(step, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.02), params, on_one()[0])


@pytest.mark.parametrize(("devices", "size"), [(1, 5), (2, 2), (4, 3), (3, 70), (4, 301)])
def test_elimination_inverts(x64, devices, size):
    """On devices that have a row, many or none; a matrix that is not positive definite is told."""
    mesh = mesh_of(devices)
    root = normal(size, size, 2 * size)
    good = root @ root.T / size
    stack = jnp.stack([good, 4 * good, good - 2 * jnp.eye(size) * jnp.trace(good) / size])

    def inverted(stack):
        own = Rows("d", size)
        # One by one, as refreshes do on a CPU.
        each = [invert_damped_rows(own, own.of(stack[k : k + 1]), jnp.full(1, 0.1)) for k in range(len(stack))]
        inverse, condition = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
        half = own.from_half(lax.psum_scatter(own.halves(stack), "d"), len(stack)) / devices
        return own.all(inverse), own.all(half), own.diagonal(own.of(stack)), condition

    spec = P(), P(), P(), P()
    inverse, same, diagonal, condition = jax.jit(jax.shard_map(inverted, mesh=mesh, in_specs=P(), out_specs=spec))(
        stack
    )
    damped = np.asarray(stack[:2]) + 0.1 * np.eye(size)
    np.testing.assert_allclose(inverse[:2] @ damped, np.broadcast_to(np.eye(size), damped.shape), atol=1e-11)
    np.testing.assert_allclose(condition, [*np.linalg.cond(damped, 1), 0], rtol=1e-9)
    np.testing.assert_allclose(same, stack, rtol=1e-14)
    np.testing.assert_allclose(diagonal, np.diagonal(stack, axis1=1, axis2=2))


@pytest.mark.parametrize("damping", [1e-2, 1e-4])
def test_in_float32_it_is_as_accurate_as_a_factorisation(damping):
    """Of a factor of fewer examples than its dimension, which is all damping but for them."""
    size, devices = 400, 4
    rows = np.random.default_rng(0).normal(size=(40, size)) / size**0.5
    factor = (rows.T @ rows).astype(np.float32)[None]
    mesh = mesh_of(devices)

    def inverted(stack):
        own = Rows("d", size)
        return own.all(invert_damped_rows(own, own.of(stack), jnp.full(1, damping))[0])

    found = jax.jit(jax.shard_map(inverted, mesh=mesh, in_specs=P(), out_specs=P()))(factor)
    whole, _ = invert_damped(jnp.asarray(factor), jnp.full(1, damping), jnp.float32)
    exact = np.linalg.inv(factor.astype(np.float64) + damping * np.eye(size))
    errors = [np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (found, whole)]
    assert errors[0] < 3 * errors[1] < 1e-2, errors
    np.testing.assert_allclose(found, found.mT, rtol=1e-5, atol=1e-6 / damping)


def test_devices_agree_on_what_is_valid(x64):
    """Where the sum of the rows of one device overflows, all keep what they had."""
    mesh = mesh_of(4)
    kind = ByRows(inverse=kfac.Cholesky(), sides=("A",), axis="d")
    huge = jnp.diag(jnp.asarray([1e-38, 1e-38] + 6 * [1.0], jnp.float32))[None]  # inverses whose sum overflows
    block = kfac.Kronecker(huge, jnp.eye(3, dtype=jnp.float32)[None])

    def conditions(block):
        own = kind.part(block)
        return kind.refresh(kind.init(own), own, jnp.full(1, 1e-45, jnp.float32))[1][None]

    found = jax.jit(jax.shard_map(conditions, mesh=mesh, in_specs=P(), out_specs=P("d"), check_vma=False))(block)
    assert len(set(np.ravel(found).tolist())) == 1


def test_what_does_not_go_with_it_is_refused():
    split = kfac.Distribution("d", split_from=2)
    with pytest.raises(ValueError, match=r"split_from=2 is for inverse=kfac.Cholesky\(\), but inverse=Ekfac"):
        kfac.kfac(0.1, layers(), inverse=kfac.Ekfac(), distribution=split)
    with pytest.raises(ValueError, match="split_from=2 is for inverse"):
        kfac.Assignment(layers(), devices=2, inverse=kfac.Soap(), distribution=split)
    for options in ({}, {"axis_name": "d", "precondition": "replicated"}):
        with pytest.raises(ValueError, match="needs axis_name= or mesh=, and precondition='sharded'"):
            kfac.Distribution(split_from=2, **options)
    with pytest.raises(ValueError, match="split_from must be a positive int, but is 0"):
        kfac.Distribution("d", split_from=0)


def test_a_state_that_is_split_otherwise_is_refused(x64):
    _, state = in_shard_map(2, {}, split_from=6)
    other, _ = in_shard_map(2, {}, split_from=7)
    with pytest.raises(ValueError, match="split_from=7 splits the factors none of blocks kronecker_6x4 by rows, but "):
        jax.eval_shape(functools.partial(other, statistics=True), parameters(), state, tied_batch(0), jnp.asarray(0))
    again = kfac.scatter_state(kfac.gather_state(state), 2, split_from=7)
    jax.eval_shape(functools.partial(other, statistics=True), parameters(), again, tied_batch(0), jnp.asarray(0))
    mesh = mesh_of(2)
    inside = jax.shard_map(
        lambda state: kfac.averaged_factors(state, found()), mesh=mesh, in_specs=(state_spec("d"),), out_specs=P()
    )
    with pytest.raises(ValueError, match="1 parts of blocks kronecker_6x4 where"):
        jax.eval_shape(inside, state[0])
