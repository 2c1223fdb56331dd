"""Test each optax transformation that takes another transformation: around `kfac` it works as docs/own_loop.md says.

The gradients of these tests do not depend on the parameters, so the updates of `kfac` do not either. A wrapper around
`kfac` must therefore match a wrapper around a transformation that replays these updates.
"""

import functools
import inspect
import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from optax import contrib
from optax.experimental import aggregating

import kfac
from problem import (
    assert_close,
    assert_equal,
    batch,
    differ,
    history,
    initial,
    layers,
    loss_fn,
    measured,
    plain_kfac,
    run,
    stepper,
)

RATE, STEPS = 0.1, 4
PAGE = (Path(__file__).parents[2] / "docs" / "own_loop.md").read_text()
WORDS = "\n".join(re.findall(r"^\|([^|]*)\|", PAGE, re.MULTILINE))  # the first column of the table


def optimizer(**options):
    return plain_kfac(RATE, layers(), nesterov=True, **options)


def mean_of_two(t):
    """Return the gradients that `MultiSteps` accumulates."""
    return jax.tree.map(lambda a, b: (a + b) / 2, measured(t - 1)[0], measured(t)[0])


@functools.cache
def replay(called, gradients=lambda t: measured(t)[0], statistics=True, **options):
    """Replay the updates of `kfac` in the steps in which a wrapper calls it. Every step observes statistics."""
    tx, given = optimizer(**options), []
    state, update, observe = jax.jit(tx.init)(initial()), jax.jit(tx.update), jax.jit(kfac.observe)
    for t in range(STEPS):
        state = observe(state, measured(t)[1]) if statistics else state
        if t in called:
            updates, state = update(gradients(t), state, initial())
            given.append(updates)
    updates = jax.tree.map(lambda *xs: jnp.stack(xs), *given)
    return optax.GradientTransformationExtraArgs(
        lambda params: jnp.zeros((), jnp.int32),
        lambda grads, count, params=None, **extra: (jax.tree.map(lambda x: x[count], updates), count + 1),
    )


ALL = tuple(range(STEPS))
EVEN, MASK = (lambda step, **_: step % 2 == 0), {name: name == "out" for name in initial()}
KFAC_LABELS = {name: "kfac" if name in ("first", "out") else "sgd" for name in initial()}
TWO_EXAMPLES = optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.stack([g, g]), grads))
ADVERSARY = optax.chain(contrib.normalize(), optax.sgd(0.05))


def with_half(make, tx):
    """Make the rate a hyperparameter."""
    return make(lambda r: optax.chain(tx, optax.scale(r)))(r=0.5)


def processed(tx):
    return aggregating.process(*map(optax.with_extra_args_support, (optax.identity(), optax.identity(), tx)))


# Each wrapper, with the steps in which it calls the inner transformation.
WRAPPERS = {
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 2), ALL),
    "chain": (lambda tx: optax.chain(tx, optax.scale(0.5)), ALL),
    "named_chain": (lambda tx: optax.named_chain(("kfac", tx), ("half", optax.scale(0.5))), ALL),
    "conditionally_mask": (lambda tx: optax.conditionally_mask(tx, EVEN), (0, 2)),
    "conditionally_transform": (lambda tx: optax.conditionally_transform(tx, EVEN), (0, 2)),
    "inject_hyperparams": (functools.partial(with_half, optax.inject_hyperparams), ALL),
    "inject_stateful_hyperparams": (functools.partial(with_half, optax.inject_stateful_hyperparams), ALL),
    "masked": (lambda tx: optax.masked(tx, jax.tree.map(lambda _: True, MASK)), ALL),
    "with_extra_args_support": (optax.with_extra_args_support, ALL),
    "MultiSteps": (lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), (1, 3)),
    "lookahead": (lambda tx: optax.lookahead(tx, 2, 0.5), ALL),
    "mechanize": (lambda tx: contrib.mechanize(tx, s_init=0.1), ALL),
    "sam": (lambda tx: contrib.sam(tx, ADVERSARY), (1, 3)),
    "schedule_free": (lambda tx: contrib.schedule_free(tx, RATE), ALL),
    "split_real_and_imaginary": (contrib.split_real_and_imaginary, ALL),
    "add_mean_variance_to_opt": (lambda tx: optax.chain(TWO_EXAMPLES, aggregating.add_mean_variance_to_opt(tx)), ALL),
    "process": (processed, ALL),
    # These take no inner transformation, or an inner transformation without layers, so they follow kfac in a chain.
    "apply_every": (lambda tx: optax.chain(tx, optax.apply_every(2)), ALL),
    "flatten": (lambda tx: optax.chain(tx, optax.flatten(optax.scale(0.5))), ALL),
    "galore": (lambda tx: optax.chain(tx, contrib.galore(0.1, rank=2)), ALL),
    "prodigy": (lambda tx: optax.chain(tx, contrib.prodigy(1.0, estim_lr0=0.1)), ALL),
    "reduce_on_plateau": (lambda tx: optax.chain(tx, contrib.reduce_on_plateau(patience=1)), ALL),
    "scale_by_backtracking_linesearch": (lambda tx: optax.chain(tx, optax.scale_by_backtracking_linesearch(9)), ALL),
    "scale_by_zoom_linesearch": (lambda tx: optax.chain(tx, optax.scale_by_zoom_linesearch(9)), ALL),
}
# Wrappers that act like another wrapper, which runs by default: the transformations behind `kfac` like `chain` and the
# line search, the others like `inject_hyperparams`, `conditionally_transform`, `process` and `schedule_free`.
ALIKE = {
    "named_chain", "inject_stateful_hyperparams", "with_extra_args_support", "scale_by_zoom_linesearch",
    "conditionally_mask", "mechanize", "add_mean_variance_to_opt",
    "apply_every", "flatten", "galore", "prodigy", "reduce_on_plateau",
}  # fmt: skip
OPTIONS = {"schedule_free": {"momentum": None}, "MultiSteps": {}}


def loss(params):
    return loss_fn(params, batch(0))


KEYWORDS = {"reduce_on_plateau": {"value": 1.0}}
for search in ("scale_by_backtracking_linesearch", "scale_by_zoom_linesearch"):
    KEYWORDS[search] = {"value": 1.0, "value_fn": loss}


def trained(name, tx, statistics=True):
    """Return the parameters after some steps with a wrapper."""
    wrapped = optax.with_extra_args_support(WRAPPERS[name][0](tx))
    keywords = KEYWORDS.get(name, {})

    @jax.jit
    def step(params, state, grads, factors):
        state = kfac.observe(state, factors) if statistics else state
        extra = keywords | ({"grad": grads, "value": loss(initial())} if "value_fn" in keywords else {})
        updates, state = wrapped.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params = optax.LookaheadParams.init_synced(initial()) if name == "lookahead" else initial()
    state = jax.jit(wrapped.init)(params)
    for t in range(STEPS):
        params, state = step(params, state, *measured(t))
    return params


@pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams is deprecated")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in WRAPPERS]
)
def test_a_wrapper_does_what_it_does_around_the_updates_of_kfac(name):
    options = {"momentum": None if name == "schedule_free" else 0.9}
    options |= {"gradients": mean_of_two} if name == "MultiSteps" else {}
    steps = WRAPPERS[name][1]
    expected = trained(name, replay(steps, **options), statistics=False)
    assert_close(trained(name, optimizer(momentum=options["momentum"])), expected, 1e-4)
    # The result without statistics differs, so the statistics did arrive.
    assert differ(trained(name, replay(steps, statistics=False, **options), statistics=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["partition", "selective_transform", "multi_transform"])
def test_a_wrapper_that_gives_out_whole_layers(name):
    plain = run(optimizer(), STEPS)[0]
    if name == "selective_transform":
        labels = {key: jax.tree.map(lambda _, key=key: KFAC_LABELS[key], leaves) for key, leaves in initial().items()}
        tx = optax.selective_transform(optimizer(), freeze_mask=jax.tree.map(lambda label: label != "kfac", labels))
        others = optax.set_to_zero()
    else:
        others = optax.sgd(RATE)
        tx = getattr(optax, name)({"kfac": optimizer(), "sgd": others}, KFAC_LABELS)
    found, other = run(tx, STEPS)[0], initial()
    for t in range(STEPS):
        other = optax.apply_updates(other, others.update(measured(t)[0], others.init(other))[0])
    for key, label in KFAC_LABELS.items():
        assert_close(found[key], (plain if label == "kfac" else other)[key], 1e-5)


@pytest.mark.slow
def test_a_monitor_measures_what_kfac_would_do():
    tx = optax.monitor({"kfac": kfac.scale_by_kfac(layers())})
    found = history(tx, STEPS)
    for t, (_, _, expected) in enumerate(history(kfac.scale_by_kfac(layers()), STEPS)):
        _, state, updates = found[t]
        assert_close(state.measurements["kfac"], expected, 1e-6)
        assert_close(updates, measured(t)[0], 0)  # the monitor changes nothing


@pytest.mark.slow
def test_sam_in_opaque_mode_differentiates_at_the_point_of_the_adversary():
    tx = optimizer()
    opaque = contrib.sam(tx, ADVERSARY, opaque_mode=True)
    grads, factors = measured(0)
    measure = jax.grad(loss)

    @jax.jit
    def step(state):
        state = kfac.observe(state, factors)
        return opaque.update(grads, state, initial(), grad_fn=lambda p, i: measure(p))

    @jax.jit
    def by_hand(params):
        moved = ADVERSARY.update(grads, ADVERSARY.init(params))[0]
        there = measure(jax.tree.map(lambda p, u: p - u, params, moved))
        return tx.update(there, kfac.observe(tx.init(params), factors), params)[0]

    updates, _ = step(jax.jit(opaque.init)(initial()))
    assert_close(updates, by_hand(initial()), 1e-4)


def test_update_freezes_leaves_with_set_to_zero_and_masked_alone_lets_them_ascend():
    """Check what docs/own_loop.md says of frozen parameters."""
    labels = {name: "kfac" if name in ("first", "out") else "frozen" for name in initial()}
    given = {"frozen": optax.set_to_zero(), "kfac": optimizer()}
    masked = optax.masked(optimizer(), {name: label == "kfac" for name, label in labels.items()})
    grads, factors = measured(0)
    frozen, ascending = (
        stepper(tx)(grads, tx.init(initial()), initial(), factors)[2] for tx in (optax.partition(given, labels), masked)
    )
    for name, label in labels.items():
        if label == "kfac":
            assert_close(frozen[name], ascending[name], 1e-6)
        else:
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(frozen[name]))
            assert_equal(ascending[name], grads[name])


# -- objects of flax ---------------------------------------------------------------------------------------------------


def test_a_train_state_of_flax():
    state = TrainState.create(apply_fn=None, params=initial(), tx=optimizer())

    @jax.jit
    def step(state, grads, factors):
        return kfac.observe(state, factors).apply_gradients(grads=grads)

    for t in range(STEPS):
        assert kfac.statistics_due(state)
        state = step(state, *measured(t))
    expected, opt_state, _ = run(optimizer(), STEPS)
    assert_close(state.params, expected, 1e-5)
    assert_close(state.opt_state, opt_state, 1e-4)
    assert state.step == STEPS


def test_the_optimizer_of_nnx():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.out = nnx.Linear(5, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.hidden(x)))

    model = Network(nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 5)), jnp.float32)

    def loss(params, x):
        return jnp.mean(jnp.sum((nnx.merge(graph, params)(x) - 1) ** 2, axis=-1))

    found = kfac.find_layers(loss, params, x)
    tx = kfac.kfac(RATE, found)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        factors = kfac.statistics(loss, found)(nnx.state(model, nnx.Param), x)
        optimizer.opt_state = kfac.observe(optimizer.opt_state, factors)
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(jnp.sum((model(x) - 1) ** 2, axis=-1)))(model))

    @jax.jit
    def plain(params, state):
        state = kfac.observe(state, kfac.statistics(loss, found)(params, x))
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    params, state = nnx.as_pure(params), tx.init(nnx.as_pure(params))
    for _ in range(3):
        assert kfac.statistics_due(optimizer.opt_state)
        step(model, optimizer, x)
        params, state = plain(params, state)
    assert_close(jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Param))), jax.tree.leaves(params), 1e-4)
    assert kfac.diagnostics(nnx.as_pure(optimizer.opt_state))["condition"] > 1


@pytest.mark.slow
def test_linen_parameters_with_partitioning_metadata_are_those_without():
    """Check boxed leaves, as from `nn.with_partitioning`. Each box is an additional tree node."""
    dense = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, None)))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)), jnp.float32)
    boxed = dense.init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(jnp.sum((dense.apply(params, x) - 1) ** 2, axis=-1))

    def updated(params):
        found = kfac.find_layers(loss, params, x)
        tx = kfac.kfac(RATE, found)
        state = kfac.observe(tx.init(params), kfac.statistics(loss, found)(params, x))
        return tx.update(jax.grad(loss)(params, x), state, params)[0]

    assert_equal(nn.unbox(updated(boxed)), updated(nn.unbox(boxed)))


# -- wrappers that are refused -----------------------------------------------------------------------------------------


def test_flattened_parameters_have_no_layers():
    with pytest.raises(ValueError, match=r"are one array.* optax.flatten, around the other parts of the chain"):
        optax.flatten(optimizer()).init(initial())


@pytest.mark.parametrize("galore", [contrib.scale_by_galore, functools.partial(contrib.galore, 0.1)])
def test_projected_gradients_are_of_other_shapes(galore):
    with pytest.raises(ValueError, match=r"'first/kernel' of layer 'first' must have shape \(3, 4\), but has \(3, 2\)"):
        galore(rank=2, base_optimizer=optimizer()).init(initial())


def test_every_wrapper_of_optax_is_in_the_table_or_tried():
    """Check every function that takes a transformation, or a function that makes a transformation."""
    found = set()
    for module in (optax, contrib, aggregating):
        for name, value in vars(module).items():
            if not inspect.isfunction(value) and name != "MultiSteps":
                continue
            annotations = [str(p.annotation) for p in inspect.signature(value).parameters.values()]
            if any("GradientTransformation" in text for text in annotations):
                found.add(name)
    assert {"MultiSteps", "chain", "masked", "lookahead", "sam"} < found
    found -= {"lbfgs", "sophia"}  # they take a part of an optimizer, such as a line search
    listed = set(re.findall(r"`(?:optax\.|contrib\.|experimental\.aggregating\.)?(\w+)`", WORDS))
    tried = WRAPPERS.keys() | {"monitor"}  # `test_a_monitor_measures_what_kfac_would_do`
    assert found <= listed | tried, found - listed - tried
