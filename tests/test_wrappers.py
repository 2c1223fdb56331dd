"""Every transformation of optax that takes another one: around `kfac` it does what docs/interop.md says.

The gradients of these tests do not depend on the parameters, so the updates of `kfac` do not either: a wrapper around
it must do what it does around a transformation that replays them.
"""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from optax.experimental import aggregating

import kfac
from problem import QUICKLY, assert_close, batch, differ, history, initial, layers, loss_fn, measured, run

RATE, STEPS = 0.1, 4
PAGE = (Path(__file__).parents[1] / "docs" / "interop.md").read_text()
WORDS = re.search(r"^\| wrapper .*(?:\n\|.*)*", PAGE, re.MULTILINE)[0]


def optimizer(**options):
    return kfac.kfac(RATE, layers(), step_norm=None, **options)


@functools.cache
def replay(*steps, statistics=True, **options):
    """What `kfac` gives on the measured gradients of these steps, one after the other, whatever it is passed."""
    without = () if statistics else range(len(steps))
    found = history(optimizer(**options), len(steps), measured=lambda t: measured(steps[t]), without=without)
    updates = jax.tree.map(lambda *xs: jnp.stack(xs), *(updates for _, _, updates in found))
    return optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32),
        lambda grads, count, params=None: (jax.tree.map(lambda x: x[count], updates), count + 1),
    )


def with_factors(tx, factors):
    """The function of the page."""
    return optax.GradientTransformation(tx.init, functools.partial(tx.update, factors=factors))


def ready(tx):
    return optax.with_extra_args_support(tx)


ALL = tuple(range(STEPS))
EVEN, MASK = (lambda step, **_: step % 2 == 0), {name: name == "out" for name in initial()}
KFAC_LABELS = {name: "kfac" if name in ("first", "out") else "sgd" for name in initial()}

# Those that pass `factors` on: the wrapper, and the steps on which it calls the inner transformation.
PASSING = {
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 2), ALL),
    "chain": (lambda tx: optax.chain(tx, optax.scale(0.5)), ALL),
    "named_chain": (lambda tx: optax.named_chain(("kfac", tx), ("half", optax.scale(0.5))), ALL),
    "conditionally_mask": (lambda tx: optax.conditionally_mask(tx, EVEN), (0, 2)),
    "conditionally_transform": (lambda tx: optax.conditionally_transform(tx, EVEN, forward_extra_args=True), (0, 2)),
    "inject_hyperparams": (lambda tx: optax.inject_hyperparams(lambda r: optax.chain(tx, optax.scale(r)))(r=0.5), ALL),
    "inject_stateful_hyperparams": (
        lambda tx: optax.inject_stateful_hyperparams(lambda r: optax.chain(tx, optax.scale(r)))(r=0.5),
        ALL,
    ),
    "masked": (lambda tx: optax.masked(tx, jax.tree.map(lambda _: True, MASK)), ALL),
    "with_extra_args_support": (optax.with_extra_args_support, ALL),
    "mechanize": (lambda tx: contrib.mechanize(tx, s_init=0.1), ALL),
    "schedule_free": (lambda tx: contrib.schedule_free(tx, RATE), ALL),
    "process": (
        lambda tx: aggregating.process(
            optax.with_extra_args_support(optax.identity()),
            optax.with_extra_args_support(optax.identity()),
            optax.with_extra_args_support(tx),
        ),
        ALL,
    ),
    # These take no inner transformation: they stand behind kfac in a chain.
    "apply_every": (lambda tx: optax.chain(tx, optax.apply_every(2)), ALL),
    "prodigy": (lambda tx: optax.chain(tx, contrib.prodigy(1.0, estim_lr0=0.1)), ALL),
}


# What does as another one does, which is run by default.
ALIKE = "named_chain", "inject_stateful_hyperparams", "with_extra_args_support", "scale_by_zoom_linesearch"


def cases(names):
    return [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in names]


@pytest.mark.filterwarnings("ignore:inject_stateful_hyperparams is deprecated")
@pytest.mark.parametrize("name", cases(PASSING))
def test_a_wrapper_that_passes_factors_on(name):
    wrap, steps = PASSING[name]
    momentum = None if name == "schedule_free" else 0.9
    expected = run(ready(wrap(replay(*steps, momentum=momentum))), STEPS)[0]
    assert_close(run(wrap(optimizer(momentum=momentum)), STEPS)[0], expected, 1e-4)
    # Without factors it is something else: they did arrive.
    assert differ(run(ready(wrap(replay(*steps, statistics=False, momentum=momentum))), STEPS)[0], expected)


@pytest.mark.parametrize(
    "name", ["partition", "selective_transform", pytest.param("multi_transform", marks=pytest.mark.slow)]
)
def test_a_wrapper_that_gives_out_whole_layers(name):
    plain = run(optimizer(), STEPS)[0]
    if name == "selective_transform":
        labels = {key: jax.tree.map(lambda _, key=key: KFAC_LABELS[key], leaves) for key, leaves in initial().items()}
        tx = optax.selective_transform(optimizer(), freeze_mask=jax.tree.map(lambda label: label != "kfac", labels))
        others = optax.set_to_zero()
    else:
        others = optax.sgd(RATE)
        tx = getattr(optax, name)({"kfac": optimizer(), "sgd": others}, KFAC_LABELS)
    found, other = run(tx, STEPS)[0], run(ready(others), STEPS)[0]
    for key, label in KFAC_LABELS.items():
        assert_close(found[key], (plain if label == "kfac" else other)[key], 1e-5)


def test_a_monitor_measures_what_kfac_would_do():
    tx = optax.monitor({"kfac": kfac.scale_by_kfac(layers())})
    found = history(tx, STEPS)
    for t, (_, _, expected) in enumerate(history(kfac.scale_by_kfac(layers()), STEPS)):
        _, state, updates = found[t]
        assert_close(state.measurements["kfac"], expected, 1e-6)
        assert_close(updates, measured(t)[0], 0)  # and changes nothing


# Those that drop keywords, or hand them to others: the inner transformation has its factors already.


def own_loop(wrap, params, tx, statistics=True, **keywords):
    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(grads, state, params, factors):
        inner = with_factors(tx, factors) if statistics else tx
        updates, state = ready(wrap(inner)).update(grads, state, params, **keywords)
        return optax.apply_updates(params, updates), state

    state = jax.jit(wrap(tx).init)(params)
    for t in range(STEPS):
        params, state = step(measured(t)[0], state, params, measured(t)[1])
    return params


TWO_EXAMPLES = optax.stateless(lambda grads, _: jax.tree.map(lambda g: jnp.stack([g, g]), grads))
ADVERSARY = optax.chain(contrib.normalize(), optax.sgd(0.05))
DROPPING = {
    "lookahead": (lambda tx: optax.lookahead(tx, 2, 0.5), ALL),
    "sam": (lambda tx: contrib.sam(tx, ADVERSARY), (1, 3)),
    "split_real_and_imaginary": (contrib.split_real_and_imaginary, ALL),
    "add_mean_variance_to_opt": (lambda tx: optax.chain(TWO_EXAMPLES, aggregating.add_mean_variance_to_opt(tx)), ALL),
    "flatten": (lambda tx: optax.chain(tx, optax.flatten(optax.scale(0.5))), ALL),
    "galore": (lambda tx: optax.chain(tx, contrib.galore(0.1, rank=2)), ALL),
    "reduce_on_plateau": (lambda tx: optax.chain(tx, contrib.reduce_on_plateau(patience=1)), ALL),
    "scale_by_backtracking_linesearch": (lambda tx: optax.chain(tx, optax.scale_by_backtracking_linesearch(9)), ALL),
    "scale_by_zoom_linesearch": (lambda tx: optax.chain(tx, optax.scale_by_zoom_linesearch(9)), ALL),
}


def loss(params):
    return loss_fn(params, batch(0))


@pytest.mark.parametrize("name", cases(DROPPING))
def test_a_wrapper_that_drops_factors_has_them_before(name):
    wrap, steps = DROPPING[name]
    keywords = {}
    if name == "reduce_on_plateau":
        keywords = {"value": 1.0}
    elif name.endswith("linesearch"):
        keywords = {"value": loss(initial()), "grad": measured(0)[0], "value_fn": loss}
    params = optax.LookaheadParams.init_synced(initial()) if name == "lookahead" else initial()
    found = own_loop(wrap, params, optimizer(), **keywords)
    expected = own_loop(wrap, params, replay(*steps, momentum=0.9), statistics=False, **keywords)
    assert_close(found, expected, 1e-4)
    # Without factors it is something else: they did arrive.
    ignored = replay(*steps, statistics=False, momentum=0.9)
    assert differ(own_loop(wrap, params, ignored, statistics=False, **keywords), expected)


def test_sam_in_opaque_mode_differentiates_at_the_point_of_the_adversary():
    opaque = functools.partial(contrib.sam, adv_optimizer=ADVERSARY, opaque_mode=True)
    grads, factors = measured(0)
    measure = jax.grad(loss)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(tx_state):
        return opaque(with_factors(optimizer(), factors)).update(
            grads, tx_state, initial(), grad_fn=lambda p, i: measure(p)
        )

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def by_hand(params):
        moved = ADVERSARY.update(grads, ADVERSARY.init(params))[0]
        there = measure(jax.tree.map(lambda p, u: p - u, params, moved))
        tx = optimizer()
        return tx.update(there, tx.init(params), factors=factors)[0]

    updates, _ = step(jax.jit(opaque(optimizer()).init)(initial()))
    assert_close(updates, by_hand(initial()), 1e-4)


@pytest.mark.parametrize(
    "search",
    [optax.scale_by_backtracking_linesearch, pytest.param(optax.scale_by_zoom_linesearch, marks=pytest.mark.slow)],
)
def test_a_line_search_takes_factors_if_its_function_does(search):
    tx = optax.chain(kfac.scale_by_kfac(layers()), optax.scale(-1), search(9))
    grads, factors = measured(0)
    given = {"value": loss(initial()), "grad": grads, "factors": factors}

    def update(tx, value_fn, given):
        def once(params, given):
            return tx.update(grads, tx.init(params), params, value_fn=value_fn, **given)[0]

        return jax.jit(once, compiler_options=QUICKLY)(initial(), given)

    with pytest.raises(TypeError, match=r"not consumed by `value_fn`: \['factors'\]"):
        update(tx, loss, given)
    updates = update(tx, lambda params, factors=None: loss(params), given)
    bound = optax.chain(with_factors(kfac.scale_by_kfac(layers()), factors), optax.scale(-1), search(9))
    del given["factors"]
    expected = update(bound, loss, given)
    assert_close(updates, expected, 1e-5)
    assert loss(optax.apply_updates(initial(), updates)) < loss(initial())


# Those that are refused.


def test_flattened_parameters_have_no_layers():
    with pytest.raises(ValueError, match=r"are one array.* optax.flatten, around the other parts of the chain"):
        optax.flatten(optimizer()).init(initial())


@pytest.mark.parametrize("galore", [contrib.scale_by_galore, functools.partial(contrib.galore, 0.1)])
def test_projected_gradients_are_of_other_shapes(galore):
    with pytest.raises(ValueError, match=r"'first/kernel' of layer 'first' must have shape \(3, 4\), but has \(3, 2\)"):
        galore(rank=2, base_optimizer=optimizer()).init(initial())


@pytest.mark.parametrize("wrap", [DROPPING[name][0] for name in ("lookahead", "sam", "split_real_and_imaginary")])
def test_a_keyword_that_a_wrapper_does_not_take_is_an_error(wrap):
    tx = wrap(optimizer())
    params = initial()
    with pytest.raises(TypeError, match="unexpected keyword argument 'factors'"):
        tx.update(measured(0)[0], tx.init(params), params, factors=measured(0)[1])


def test_every_wrapper_of_optax_is_in_the_table():
    """Whatever takes a transformation, or a function that makes one, among its arguments."""
    found = set()
    for module in (optax, contrib, aggregating):
        for name, value in vars(module).items():
            if not inspect.isfunction(value) and name != "MultiSteps":
                continue
            annotations = [str(p.annotation) for p in inspect.signature(value).parameters.values()]
            if any("GradientTransformation" in text for text in annotations):
                found.add(name)
    assert {"MultiSteps", "chain", "masked", "lookahead", "sam"} < found
    listed = set(re.findall(r"`(?:optax\.|contrib\.|experimental\.aggregating\.)?(\w+)`", WORDS))
    assert found <= listed, found - listed
    assert (PASSING.keys() | DROPPING.keys()) <= listed
