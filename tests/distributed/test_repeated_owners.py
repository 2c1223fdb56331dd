"""Test `Distribution(owner_axes=)`, with owners on each node and only sums between nodes."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
import messages
from problem import observing, plain_kfac, tied_batch, tied_loss, tied_parameters

AXES, OWNERS = ("node", "gpu"), "gpu"
STEPS = 8


def parameters():
    return tied_parameters(3, 6, 9, 4)  # three blocks, so that one owner has more than the other


def stepped(tx, found, options, average):
    """Return a step as a function of parameters, state, batch, and whether the step has statistics."""

    def step(p, state, data, statistics):
        basis = (
            {"basis": kfac.curvature.eigenbasis(state, found)} if options.get("preconditioner") == kfac.EKFAC() else {}
        )
        _, grads, factors = kfac.value_and_grad(tied_loss, found, **wire_of(options))(p, data, **basis)
        updates, state = observing(tx)(average(grads), state, p, factors=factors if statistics else None)
        return optax.apply_updates(p, updates), state

    return step


def optimizer(found, options, **where):
    options = {"damping": 1e-2, "inverse_update_period": 2} | options
    make = kfac.kfac if options.pop("spectral", False) else functools.partial(plain_kfac, nesterov=True)
    options.pop("gradients", None)  # an option of the step
    if where:
        options["distribution"] = dataclasses.replace(options.get("distribution", kfac.Distribution()), **where)
    return make(0.05, found, **options)


def wire_of(options):
    return {name: options[name] for name in ("distribution",) if name in options}


def trained(step, params, state, shardings=None):
    step = jax.jit(step, static_argnums=3)
    for k in range(STEPS):
        data = tied_batch(k) if shardings is None else jax.device_put(tied_batch(k), shardings)
        params, state = jax.block_until_ready(step(params, state, data, k not in (3, 5)))
    return params, state


@functools.cache
def alone(*options):
    options = dict(options)
    found = kfac.find_layers(tied_loss, parameters(), tied_batch(0))
    tx = optimizer(found, options)
    return trained(stepped(tx, found, options, lambda g: g), parameters(), jax.jit(tx.init)(parameters()))


def on_one(options):
    return alone(*options.items())


def in_shard_map(options, **check):
    mesh = jax.make_mesh((2, 2), AXES, axis_types=2 * (AxisType.Auto,))
    found = kfac.find_layers(tied_loss, parameters(), tied_batch(0))
    tx = optimizer(found, options, owner_axes=OWNERS, **({} if check.get("check_vma", True) else {"axis_name": AXES}))
    specs = kfac.state.state_specs(tx, parameters(), OWNERS)
    local = options.get("gradients") == "local"
    step = stepped(tx, found, options, lambda g: g if local else lax.pmean(g, AXES))

    def on_mesh(p, state, data, statistics):
        return jax.shard_map(
            lambda p, s, d: step(p, s, d, statistics),
            mesh=mesh, in_specs=(P(), specs, P(AXES)), out_specs=(P(), specs),
            **check,
        )(p, state, data)  # fmt: skip

    init = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs, **check))
    return on_mesh, init(parameters())


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)


def blocks(state):
    [found] = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    return found.blocks


def is_state(x):
    return isinstance(x, kfac.state.KfacState)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradients": "local", "spectral": True, "damping": 0.1, "preconditioner": kfac.Cholesky()},
        {"preconditioner": kfac.EKFAC()},
        {"preconditioner": kfac.SOAP(), "spectral": True, "damping": 1e-2},
        {"gradients": "local", "kl_clip": 1e-3},
    ],
)
def test_in_shard_map_it_is_one_device(x64, options):
    step, state = in_shard_map(options)
    params, state = trained(step, parameters(), state)
    expected, alone = on_one(options)
    close(params, expected)
    for name, value in kfac.diagnostics(alone).items():
        np.testing.assert_allclose(kfac.diagnostics(state)[name], value, rtol=1e-4, err_msg=name)
    # Each group of owners holds all blocks.
    held, whole = blocks(jax.jit(kfac.state.gather_state)(state)), blocks(alone)
    for name, block in whole.items():
        close([held[name].factors, held[name].weight], [block.factors, block.weight])


@pytest.mark.slow
def test_over_a_mesh_it_is_one_device(x64):
    mesh = jax.make_mesh((2, 2), AXES, axis_types=2 * (AxisType.Auto,))
    found = kfac.find_layers(tied_loss, parameters(), tied_batch(0))
    tx = optimizer(found, {}, owner_axes=OWNERS)
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), NamedSharding(mesh, P()))
        state = jax.jit(tx.init)(params)
        params, state = trained(stepped(tx, found, {}, lambda g: g), params, state, NamedSharding(mesh, P(AXES)))
        state = jax.jit(kfac.observe)(state)
    close(params, on_one({})[0])
    assert state[0].settings.devices == 2


@pytest.mark.slow
def test_without_the_check_and_in_bfloat16(x64):
    step, state = in_shard_map({"distribution": kfac.Distribution(communication_dtype="bfloat16")}, check_vma=False)
    params, _ = trained(step, parameters(), state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.02), params, on_one({})[0])


@pytest.mark.slow
def test_between_nodes_there_are_sums_only(x64):
    step, state = in_shard_map({"gradients": "local"})
    compiled = jax.jit(step, static_argnums=3).lower(parameters(), state, tied_batch(0), True).compile()
    groups = messages.device_groups(compiled.as_text())
    inside = frozenset({(0, 1), (2, 3)})  # the devices of each node
    assert groups["all-reduce"] - {inside}  # sums between nodes
    others = {kind: found for kind, found in groups.items() if kind != "all-reduce"}
    assert {"all-gather", "reduce-scatter"} <= others.keys()
    assert all(found == {inside} for found in others.values()), others


def test_owners_that_are_no_axes_are_refused():
    with pytest.raises(ValueError, match=r"owner_axes must be among the axes of devices, \('gpu',\), but is 'node'"):
        kfac.Distribution("gpu", owner_axes="node")
    with pytest.raises(ValueError, match="owner_axes must be the name of an axis"):
        kfac.Distribution("gpu", owner_axes=2)
