"""Test the transforms with the rest of optax and JAX: wrappers, dtypes, compilation, donation, checkpoints, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kfac
from checking import normal, slow
from problem import (
    assert_close,
    assert_equal,
    batch,
    differ,
    field_of,
    history,
    initial,
    layers,
    loss_fn,
    measured,
    observing,
    plain_kfac,
    run,
    state_of,
    stepper,
)

RATE = 0.1


@functools.cache
def plain(steps=3):
    """Return parameters and state after some steps of `kfac` without a wrapper."""
    return run(plain_kfac(RATE, layers()), steps=steps)[:2]


# -- chains and wrappers -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chain_of_parts_is_the_alias():
    chain = optax.chain(
        kfac.scale_by_kfac(layers()),
        optax.trace(0.9),
        optax.scale_by_learning_rate(RATE),
    )
    params, state, _ = run(chain, steps=3)
    assert_close(params, plain()[0], 1e-6)
    assert_equal(field_of(state, "factors"), field_of(plain()[1], "factors"))


@pytest.mark.slow
def test_unknown_keywords_are_ignored():
    grads, factors = measured(0)
    for tx in (plain_kfac(RATE, layers()), kfac.scale_by_kfac(layers()), plain_kfac(RATE, layers(), kl_clip=1e9)):
        assert isinstance(tx, optax.GradientTransformationExtraArgs)
        state = tx.init(initial())
        others = {"value": jnp.ones(()), "grad": None, "of_another_transform": "x"}
        update = jax.jit(functools.partial(observing(tx), **others))
        update(grads, state, initial(), factors=factors)


def only(*names):
    def mask(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in names, params)

    return mask


@pytest.mark.slow
@pytest.mark.parametrize("trust_ratio", [None, 1.0])
def test_whole_layers_can_be_masked_out(trust_ratio):
    tx = plain_kfac(RATE, layers(), trust_ratio=trust_ratio, kl_clip=1e9, weight_decay=0.1)
    masked = optax.masked(tx, only("first", "norm", "temperature"))
    params, state, updates = run(masked, steps=3)
    assert_equal(updates["out"], measured(2)[0]["out"])
    assert_equal(updates["offset"], measured(2)[0]["offset"])
    # The other parameters move as they do under the whole optimizer.
    whole = run(tx, steps=3)
    assert_close([params[k] for k in ("first", "norm")], [whole[0][k] for k in ("first", "norm")], 1e-5)
    assert "inverse_age" in kfac.diagnostics(state)


@pytest.mark.parametrize(
    ("hidden", "kept"), [("norm/shift", "norm/scale"), ("first/kernel", "first/bias"), ("first/bias", "first/kernel")]
)
def test_half_of_a_layer_masked_out_is_an_error(hidden, kept):
    def mask(params):
        return jax.tree.map_with_path(lambda path, _: "/".join(key.key for key in path) != hidden, params)

    words = f"'{hidden}' of layer .* is masked, but '{kept}' is not: .* rules=\\{{'\\^{hidden}\\$': 'skip'\\}}"
    with pytest.raises(ValueError, match=words):
        optax.masked(plain_kfac(RATE, layers()), mask).init(initial())


@pytest.mark.slow
@pytest.mark.parametrize("make", [kfac.scale_by_kfac, functools.partial(kfac.natural_gradient, RATE)])
def test_kernels_to_kfac_and_the_rest_to_adamw(make):
    """Use the rule, as the error says. Kernels take K-FAC's steps without a bias, and vectors take AdamW's steps."""
    without_bias = kfac.find_layers(loss_fn, initial(), batch(0), rules={"temperature": "skip", "^first/bias$": "skip"})
    measure = jax.jit(kfac.value_and_grad(loss_fn, without_bias))

    def train(tx):
        return run(tx, steps=2, measured=lambda t: measure(initial(), batch(t))[1:])[0]

    labels = jax.tree.map(lambda leaf: "kfac" if leaf.ndim == 2 else "adamw", initial())
    with pytest.raises(ValueError, match=r"'first/bias' of layer .* is masked, but 'first/kernel' is not"):
        optax.partition({"kfac": make(layers()), "adamw": optax.adamw(1e-3)}, labels).init(initial())
    found = train(optax.partition({"kfac": make(without_bias), "adamw": optax.adamw(1e-3)}, labels))
    whole = train(make(without_bias))
    assert_close([found[k]["kernel"] for k in ("first", "out")], [whole[k]["kernel"] for k in ("first", "out")], 1e-5)
    alone = run(optax.adamw(1e-3), steps=2, without=range(2))[0]
    vectors = [[leaf for leaf in jax.tree.leaves(tree) if leaf.ndim < 2] for tree in (found, alone)]
    assert_close(*vectors, 1e-6)


def test_partition_leaves_some_parameters_to_adamw():
    labels = {"first": "kfac", "norm": "adamw", "offset": "adamw", "out": "kfac", "temperature": "adamw"}
    tx = optax.partition({"kfac": plain_kfac(RATE, layers()), "adamw": optax.adamw(1e-3)}, labels)
    params, state, _ = run(tx, steps=3)
    assert_close([params[k] for k in ("first", "out")], [plain()[0][k] for k in ("first", "out")], 1e-5)
    alone = run(optax.adamw(1e-3), steps=3, without=range(3))[0]
    assert_close(params["norm"], alone["norm"], 1e-6)
    assert kfac.diagnostics(state)["inverse_age"] == 0


def test_inject_hyperparams_with_all_defaults():
    tx = optax.inject_hyperparams(kfac.kfac)(learning_rate=RATE, layers=layers())
    params, state, _ = run(tx, steps=3)
    assert_close(params, run(kfac.kfac(RATE, layers()), steps=3)[0], 1e-5)
    assert state.hyperparams.keys() == {"learning_rate", "momentum", "overhead"}
    assert kfac.diagnostics(state)["inverse_age"] == 0


@pytest.mark.slow
def test_an_injected_damping_takes_effect_at_the_next_refresh():
    tx = optax.inject_hyperparams(kfac.scale_by_kfac)(layers=layers(), inverse_update_period=2, interval_warmup_steps=0)
    step = stepper(tx)
    state = tx.init(initial())
    _, state, _ = step(measured(0)[0], state, initial(), measured(0)[1])
    before = field_of(state, "preconditioner")
    state.hyperparams["damping"] = jnp.asarray(0.5)
    _, state, _ = step(measured(1)[0], state, initial(), measured(1)[1])
    assert_equal(field_of(state, "preconditioner"), before)
    _, state, _ = step(measured(2)[0], state, initial(), measured(2)[1])
    assert kfac.diagnostics(state)["damping"] == 0.5
    fresh = kfac.scale_by_kfac(
        layers(), inverse_update_period=2, interval_warmup_steps=0, distribution=kfac.Distribution(), damping=0.5
    )
    assert_close(field_of(state, "preconditioner"), field_of(run(fresh, steps=3)[1], "preconditioner"), 1e-5)


@pytest.mark.slow
def test_injected_schedules():
    rate, damping = (lambda t: 0.1 / (1 + t)), (lambda t: 0.01 * (1 + t))
    options = {"layers": layers(), "preconditioner": kfac.Cholesky()}
    injected = optax.inject_hyperparams(kfac.kfac)(learning_rate=rate, damping=damping, **options)
    # `observe` uses the previous step's damping, because the state contains no other.
    direct = kfac.kfac(rate, damping=lambda t: damping(jnp.maximum(t - 1, 0)), **options)
    assert_close(run(injected, steps=3)[0], run(direct, steps=3)[0], 1e-5)


@pytest.mark.parametrize("momentum", [0.9, slow(None)])
def test_apply_if_finite_around_it(momentum):
    tx = optax.apply_if_finite(plain_kfac(RATE, layers(), momentum=momentum), max_consecutive_errors=3)
    step = stepper(tx)
    params, state = initial(), tx.init(initial())
    grads, factors = measured(0)
    params, state, _ = step(grads, state, params, factors)
    after, rejected, _ = step(jax.tree.map(lambda g: g * jnp.nan, grads), state, params)
    assert_equal(after, params)
    assert_equal(rejected.inner_state, state.inner_state)


@pytest.mark.slow
def test_multi_steps_average_gradients_and_all_statistics():
    tx, direct = optax.MultiSteps(plain_kfac(RATE, layers()), every_k_schedule=2), plain_kfac(RATE, layers())
    state, update = jax.jit(tx.init)(initial()), jax.jit(observing(tx))
    for t in range(2):
        updates, state = update(measured(t)[0], state, initial(), factors=measured(t)[1])
    mean = jax.tree.map(lambda a, b: (a + b) / 2, measured(0)[0], measured(1)[0])
    state = jax.jit(kfac.observe)(direct.init(initial()), measured(0)[1])
    expected = jax.jit(observing(direct))(mean, state, initial(), factors=measured(1)[1])[0]
    assert_close(updates, expected, 1e-5)


@pytest.mark.slow
def test_a_mask_that_is_taken_for_a_schedule_is_an_error():
    def kernels(params):
        return jax.tree.map(lambda p: p.ndim > 1, params)

    options = {"learning_rate": 0.1, "layers": layers(), "weight_decay": 1e-2, "weight_decay_mask": kernels}
    injected = optax.inject_hyperparams(kfac.kfac)(**options)
    with pytest.raises(ValueError, match=r'Name it there, static_args="weight_decay_mask"'):
        injected.init(initial())
    injected = optax.inject_hyperparams(kfac.kfac, static_args="weight_decay_mask")(**options)
    assert_close(run(injected, steps=2)[0], run(kfac.kfac(**options), steps=2)[0], 1e-5)


def test_optax_tree_utilities_reach_into_the_state():
    _, state = plain()
    assert optax.tree.get(state, "damping") == np.float32(1e-3)
    changed = optax.tree.set(state, inverse_age=jnp.asarray(7))
    assert kfac.diagnostics(changed)["inverse_age"] == 7
    # This tree contains the momentum of skipped leaves. Stacks contain the momentum of blocks.
    ((path, _),) = jax.tree_util.tree_leaves_with_path(optax.tree.get(state, "trace"))
    assert jax.tree_util.keystr(path, simple=True) == "temperature"
    same = optax.tree.map_params(plain_kfac(RATE, layers()), lambda x: 2 * x, state)
    assert_equal(state_of(same), state_of(state))


def test_diagnostics_found_inside_any_nesting():
    inner = plain_kfac(RATE, layers(), kl_clip=1e-3)
    for wrap in (
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.masked(optax.chain(tx), lambda p: jax.tree.map(lambda _: True, p)),
        lambda tx: optax.MultiSteps(tx, 2),
        lambda tx: optax.chain(optax.apply_if_finite(optax.masked(tx, only("first", "norm", "out", "offset")), 3)),
        lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=1.0),
    ):
        init = wrap(inner).init
        found = jax.eval_shape(lambda params, init=init: kfac.diagnostics(init(params)), initial())
        assert {"damping", "condition", "skipped_steps", "kl_clip_scale"} <= found.keys()


# -- dtypes and shapes -------------------------------------------------------------------------------------------------


def abstract(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


OPTIONS = {
    "defaults": {},
    "everything": {
        "nesterov": True,
        "kl_clip": 1e-3,
        "trust_ratio": 1.0,
        "weight_decay": 0.1,
        "preconditioner": kfac.Cholesky("bfloat16"),
        "inverse_update_period": 2,
    },
    "schedules": {
        "learning_rate": lambda t: 0.1 / (1 + t),
        "momentum": lambda t: 0.9,
        "kl_clip": lambda t: 1e-3,
        "trust_ratio": lambda t: 1.0,
        "weight_decay": lambda t: 0.1,
        "damping": lambda t: 1e-2,
    },
    "arrays": {
        "learning_rate": np.float32(0.1),
        "momentum": jnp.asarray(0.9),
        "kl_clip": np.float64(1e-3),
        "trust_ratio": jnp.asarray(1.0),
        "weight_decay": jnp.asarray(0.1),
        "damping": np.asarray(1e-2),
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_parameters_keep_their_dtype_and_the_state_its_own(options, dtype):
    tx = plain_kfac(**{"learning_rate": RATE, "layers": layers(), **OPTIONS[options]})
    params = initial(jnp.dtype(dtype))
    state = jax.eval_shape(tx.init, params)
    shape_of = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    for statistics in (None, measured(0)[1]):
        updates, after = jax.eval_shape(
            lambda g, s, p, f=statistics: observing(tx)(g, s, p, f), shape_of(params), state, shape_of(params)
        )
        assert abstract(after) == abstract(state)
        assert all(x.dtype == dtype for x in jax.tree.leaves(updates))
    kept = {x.dtype for x in jax.tree.leaves((field_of(state, "factors"), optax.tree.get(state, "trace")))}
    assert kept == {jnp.dtype(jnp.float32)}


@pytest.mark.slow
def test_bfloat16_parameters_train():
    params = initial(jnp.bfloat16)

    def low(t):
        return jax.tree.map(lambda g: g.astype(jnp.bfloat16), measured(t)[0]), measured(t)[1]

    tx = plain_kfac(0.01, layers(), damping=0.1)
    after, _, _ = run(tx, steps=3, params=params, measured=low)
    reference, _, _ = run(tx, steps=3)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(after))
    assert_close(after, reference, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_float64_stays_float64(x64, precision):
    params = initial(jnp.float64)
    found = kfac.find_layers(loss_fn, params, batch(0, dtype=jnp.float64), rules={"temperature": "skip"})
    tx = plain_kfac(RATE, found, preconditioner=kfac.Cholesky(precision))
    _, grads, factors = jax.jit(kfac.value_and_grad(loss_fn, found))(params, batch(0, dtype=jnp.float64))
    state = jax.jit(tx.init)(params)
    after, new, updates = stepper(tx)(grads, state, params, factors)
    assert all(x.dtype == jnp.float64 for x in jax.tree.leaves((after, updates, field_of(new, "factors"))))
    kept = jnp.float64 if precision == "float32" else jnp.bfloat16
    assert all(x.dtype == kept for x in jax.tree.leaves(field_of(new, "preconditioner")))
    assert abstract(new) == abstract(state)


def test_float32_models_are_unaffected_by_x64(x64):
    to_float32 = functools.partial(jax.tree.map, lambda x: jnp.asarray(np.asarray(x), np.asarray(x).dtype))
    after, state, _ = run(plain_kfac(RATE, layers()), steps=3, measured=lambda t: to_float32(measured(t)))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(after))
    assert abstract(state) == abstract(plain()[1])
    assert_close(after, plain()[0], 1e-4)


# -- compilation, donation, abstract evaluation ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", ["defaults", "schedules"])
def test_two_compilations_with_and_without_statistics_and_no_third(options):
    tx = plain_kfac(**{"learning_rate": RATE, "layers": layers(), **OPTIONS[options]})
    traces = []

    @jax.jit
    def step(grads, state, params, factors=None):
        traces.append(factors is None)
        updates, state = observing(tx)(grads, state, params, factors)
        return optax.apply_updates(params, updates), state

    # Without jit, too, `init` must return the same types as `update`.
    params, state = initial(), tx.init(initial())
    for t, given in enumerate([True, True, False, False, True, False]):
        grads, factors = measured(t % 3)
        params, state = step(grads, state, params, factors if given else None)
    assert traces == [False, True]
    assert step._cache_size() == 2


@pytest.mark.slow
def test_parameters_and_state_can_be_donated():
    tx = plain_kfac(RATE, layers(), kl_clip=1e9)
    step = stepper(tx, donate_argnames=("state", "params"))
    # Copy the parameters, because other tests use them.
    for init in (tx.init, jax.jit(tx.init)):
        params = jax.tree.map(jnp.copy, initial())
        state = init(params)
        for t in range(3):
            given = (params, state)
            params, state, _ = step(*measured(t)[:1], state, params, measured(t)[1] if t != 1 else None)
            # Scalars that a step does not read need not be donated.
            assert all(x.is_deleted() for x in jax.tree.leaves(given) if x.ndim)
        assert not any(x.is_deleted() for x in jax.tree.leaves((params, state)))
    assert_close(params, run(plain_kfac(RATE, layers()), steps=3, without=(1,))[0], 1e-5)


def test_init_is_abstract():
    tx = plain_kfac(RATE, layers(), kl_clip=1e-3, trust_ratio=1.0, weight_decay=0.1)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), initial())
    assert abstract(jax.eval_shape(tx.init, shapes)) == abstract(tx.init(initial()))


def test_init_shares_no_buffers_with_the_parameters():
    params = jax.tree.map(jnp.copy, initial())
    state = plain_kfac(RATE, layers()).init(params)
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    jax.block_until_ready(jax.tree.map(lambda x: x + 0 if x.dtype != bool else x, state))


def test_a_step_inside_scan():
    tx = plain_kfac(RATE, layers())
    grads = jax.tree.map(lambda *xs: jnp.stack(xs), *(measured(t)[0] for t in range(3)))
    factors = jax.tree.map(lambda *xs: jnp.stack(xs), *(measured(t)[1] for t in range(3)))

    @jax.jit
    def train(params):
        def step(carry, measurement):
            params, state = carry
            state = kfac.observe(state, measurement[1])
            updates, state = tx.update(measurement[0], state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), (grads, factors))[0]

    params, state = train(initial())
    assert_close(params, plain()[0], 1e-5)
    assert_close(field_of(state, "factors"), field_of(plain()[1], "factors"), 1e-5)


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_orbax_checkpoint_continues_bit_for_bit(tmp_path):
    checkpointing = pytest.importorskip("orbax.checkpoint")
    tx = plain_kfac(RATE, layers(), kl_clip=1e-3, inverse_update_period=3, interval_warmup_steps=1)
    found = history(tx, steps=6)
    params, state, _ = found[2]
    with checkpointing.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": params, "state": state})
        checkpointer.wait_until_finished()
        template = jax.eval_shape(lambda p: {"params": p, "state": tx.init(p)}, initial())
        restored = checkpointer.restore(tmp_path / "step", template)
    assert_equal(restored, {"params": params, "state": state})
    params, state = restored["params"], restored["state"]
    step = stepper(tx)
    for t in range(3, 6):
        params, state, _ = step(measured(t)[0], state, params, measured(t)[1])
    assert_equal((params, state), found[5][:2])


def test_state_survives_flattening_by_path():
    """Check flattening by path, on which other serialisers rely."""
    _, state = plain()
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(path) for path, _ in flat]
    assert len(set(names)) == len(names)
    assert_equal(jax.tree.unflatten(treedef, [np.asarray(leaf) for _, leaf in flat]), state)


# -- devices -----------------------------------------------------------------------------------------------------------

DEVICES = 4


def sharded_batch(step):
    """Return a batch as a whole, and split into different data for each device."""
    whole = batch(step, 4 * DEVICES)
    return whole, jax.tree.map(lambda x: x.reshape(DEVICES, 4, *x.shape[1:]), whole)


def train_step(tx, axis_name=None):
    def step(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers())(params, batch)
        grads = jax.lax.pmean(grads, axis_name) if axis_name else grads
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@functools.cache
def one_device(steps=4):
    tx = plain_kfac(RATE, layers(), damping=1e-2, kl_clip=1e-2, inverse_update_period=2, interval_warmup_steps=1)
    step = jax.jit(train_step(tx))
    params, state = initial(), jax.jit(tx.init)(initial())
    for t in range(steps):
        params, state = step(params, state, sharded_batch(t)[0])
    return params, state


MESH = jax.make_mesh((DEVICES,), ("devices",))


def place(tree, specs):
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs))


def sharded(step, tx):
    """Return `step` under `shard_map` with its default check, and placed parameters and state."""
    specs = kfac.state.state_specs(tx, initial(), "devices")
    mapped = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=(P(), specs, P("devices")), out_specs=(P(), specs)))
    init = jax.jit(jax.shard_map(tx.init, mesh=MESH, in_specs=(P(),), out_specs=specs))
    params = place(initial(), P())
    return (lambda params, state, batch: mapped(params, state, place(batch, P("devices")))), params, init(params)


def check_devices(params, state):
    expected_params, expected = one_device()
    assert_close(params, expected_params, 1e-4)
    state = jax.jit(kfac.state.gather_state)(state)
    for field, tolerance in (("factors", 1e-4), ("weight", 1e-6), ("preconditioner", 1e-3), ("inverted", 0)):
        assert_close(field_of(state, field), field_of(expected, field), tolerance)
    assert state_of(state).count == state_of(expected).count
    assert_close(state_of(state).metrics, state_of(expected).metrics, 1e-3)


def options(axis_name):
    return {
        "damping": 1e-2,
        "kl_clip": 1e-2,
        "inverse_update_period": 2,
        "interval_warmup_steps": 1,
        "distribution": kfac.Distribution(axis_name),  # None on a single device
    }


@pytest.mark.slow  # tests/distributed/test_distributed.py is similar
def test_pmap_equals_one_device_on_the_whole_batch():
    tx = plain_kfac(RATE, layers(), **options("devices"))
    step = jax.pmap(train_step(tx, "devices"), axis_name="devices")
    params = jax.tree.map(lambda x: jnp.stack([x] * DEVICES), initial())
    state = jax.pmap(tx.init, axis_name="devices")(params)
    for t in range(4):
        params, state = step(params, state, sharded_batch(t)[1])
    for k in range(1, DEVICES):
        assert_equal(*(jax.tree.map(lambda x, k=k: np.asarray(x)[k], params) for k in (0, k)))
    check_devices(jax.tree.map(lambda x: np.asarray(x)[0], params), state)


@pytest.mark.slow
def test_shard_map_equals_one_device_on_the_whole_batch():
    tx = plain_kfac(RATE, layers(), **options("devices"))
    step, params, state = sharded(train_step(tx, "devices"), tx)
    for t in range(4):
        params, state = step(params, state, sharded_batch(t)[0])
    check_devices(params, state)


@pytest.mark.slow
def test_shard_map_without_statistics():
    tx = plain_kfac(RATE, layers(), **options("devices"))

    def cheap(params, state, batch):
        own = jax.tree.map(lambda p: jax.lax.pcast(p, "devices", to="varying"), params)
        grads = jax.lax.pmean(jax.grad(loss_fn)(own, batch), "devices")
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step, params, _ = sharded(cheap, tx)
    state = place(
        jax.jit(lambda s: kfac.state.scatter_state(s, DEVICES))(one_device()[1]),
        kfac.state.state_specs(tx, initial(), "devices"),
    )
    params, _ = step(params, state, sharded_batch(0)[0])
    grads = jax.jit(jax.grad(loss_fn))(initial(), sharded_batch(0)[0])
    alone = plain_kfac(RATE, layers(), **options(None))
    expected, _, _ = stepper(alone)(grads, one_device()[1], initial())
    assert_close(params, expected, 1e-4)


@pytest.mark.slow
def test_two_named_axes():
    tx = kfac.scale_by_kfac(layers(), distribution=kfac.Distribution(("rows", "columns")))
    factors = jax.tree.map(lambda *xs: jnp.stack(xs).reshape(2, 2, *xs[0].shape), *(measured(t)[1] for t in range(4)))

    def accumulate(factors):
        return tx.update(measured(0)[0], kfac.observe(tx.init(initial()), factors))[1]

    def own(factors):
        return accumulate(jax.tree.map(lambda x: x[0, 0], factors))

    mesh, split = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4]), P("rows", "columns")
    factors = jax.device_put(factors, NamedSharding(mesh, split))
    specs = kfac.state.state_specs(tx, initial(), ("rows", "columns"))
    state = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(split,), out_specs=specs))(factors)
    mean = jax.tree.map(lambda x: np.asarray(x).mean((0, 1)), factors)
    _, expected, _ = run(kfac.scale_by_kfac(layers()), steps=1, measured=lambda _: (measured(0)[0], mean))
    assert_close(field_of(jax.jit(kfac.state.gather_state)(state), "factors"), field_of(expected, "factors"), 1e-5)


@pytest.mark.slow
def test_bad_statistics_on_one_device_leave_the_layer_out_on_all():
    tx = kfac.scale_by_kfac(layers(), distribution=kfac.Distribution("devices"))
    factors = jax.tree.map(lambda x: jnp.stack([x] * 4), measured(0)[1])
    spoilt = jax.tree_util.tree_map_with_path(
        lambda path, x: x.at[2].set(jnp.nan) if (path[0].key, path[1].name) == ("out", "G") else x, factors
    )

    def step(factors):
        return tx.update(measured(0)[0], kfac.observe(tx.init(initial()), factors))

    updates, state = jax.jit(jax.vmap(step, axis_name="devices"))(spoilt)
    np.testing.assert_array_equal(state.metrics.skipped_statistics, 1)
    np.testing.assert_array_equal(
        field_of(jax.jit(kfac.state.gather_state)(state), "weight")["kronecker_4x4"] > 0, [True, False]
    )
    for k in range(4):
        assert_equal(updates["out"]["kernel"][k], measured(0)[0]["out"]["kernel"])
        assert differ(updates["first"]["kernel"][k], measured(0)[0]["first"]["kernel"])


# -- other loops -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_lists_and_named_tuples_of_parameters():
    """Check paths in another pytree."""
    x, labels = batch(0)
    params = [{"w": initial()["first"]["kernel"]}, (initial()["out"]["kernel"], initial()["offset"])]

    def other(params, batch):
        h = jnp.tanh(batch[0] @ params[0]["w"]) @ params[1][0] + params[1][1]
        return optax.softmax_cross_entropy_with_integer_labels(h, batch[1]).mean()

    found = kfac.find_layers(other, params, (x, labels))
    tx = plain_kfac(RATE, found)
    _, grads, factors = jax.jit(kfac.value_and_grad(other, found))(params, (x, labels))
    updates, _ = jax.jit(observing(tx))(grads, tx.init(params), params, factors=factors)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert differ(updates, jax.tree.map(lambda g: -RATE * g, grads))


def test_optimizers_run_under_the_users_jax_numpy_rank_promotion():
    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"][None]) * params["scale"][None]
        return 0.5 * jnp.mean(jnp.sum(jnp.square(kfac.mark_output(hidden @ params["v"], "residual")), axis=-1))

    kernels = {"w": normal(0, 5, 4, dtype=np.float32), "v": normal(1, 4, 3, dtype=np.float32)}
    params, x = {**kernels, "b": jnp.zeros(4), "scale": jnp.ones(4)}, normal(2, 6, 5, dtype=np.float32)
    for optimizer in (kfac.kfac, kfac.natural_gradient, kfac.gauss_newton):
        with jax.numpy_rank_promotion("raise"):
            step = kfac.train_step(loss, 0.1, optimizer=optimizer, verbose=False)
            moved, _, _ = step(params, step.init(params, x), x)
        assert not jnp.array_equal(moved["w"], params["w"])
