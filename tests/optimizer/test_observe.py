"""Test `kfac.observe`, which puts statistics into an optimizer's state, in its own program or in the step's."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kfac
from checking import slow
from problem import (
    assert_close,
    assert_equal,
    batch,
    differ,
    field_of,
    initial,
    layers,
    loss_fn,
    measured,
    state_of,
)

INVERSES = [kfac.SOAP(), kfac.Cholesky(), kfac.EKFAC()]


def basis_of(state, found, preconditioner):
    return {"basis": kfac.curvature.eigenbasis(state, found)} if preconditioner.uses_example_moments else {}


# SOAP has its own momentum and EKFAC takes moments in a basis. By default, Cholesky with neither is left out.
@pytest.mark.parametrize(
    "preconditioner",
    [kfac.SOAP(), slow(kfac.Cholesky(), id="Cholesky"), kfac.EKFAC()],
    ids=lambda preconditioner: type(preconditioner).__name__,
)
def test_two_programs_are_one(preconditioner, x64):
    """Compare twenty steps, some with statistics, and some of these with new inverses."""
    params = initial(jnp.float64)
    found = kfac.find_layers(loss_fn, params, batch(0, dtype=jnp.float64), rules={"temperature": "gradient"})
    tx = kfac.kfac(0.05, found, preconditioner=preconditioner, overhead=0.5, inverse_update_period=3)
    together = kfac.value_and_grad(loss_fn, found)

    @jax.jit
    def in_one(params, state, batch, due):
        _, grads, factors = together(params, batch, **basis_of(state, found, preconditioner))
        state = jax.lax.cond(due, lambda state: kfac.observe(state, factors), lambda state: state, state)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def observe(params, state, batch):
        return kfac.observe(
            state, kfac.statistics(loss_fn, found)(params, batch, **basis_of(state, found, preconditioner))
        )

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    one, two = (params, jax.jit(tx.init)(params)), (params, jax.jit(tx.init)(params))
    taken = 0
    for t in range(20):
        data, due = batch(t, dtype=jnp.float64), kfac.statistics_due(two[1])
        assert due == kfac.statistics_due(one[1])
        taken += int(due)
        one = in_one(*one, data, due)
        two = step(two[0], observe(*two, data) if due else two[1], data)
    assert 10 < taken < 20
    assert_close(two, one, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", INVERSES, ids=lambda preconditioner: type(preconditioner).__name__)
def test_a_step_without_statistics_changes_no_average(preconditioner):
    """Check that a step changes no inverse. It changes the momentum, its own moments and its counters."""
    tx = kfac.scale_by_kfac(layers(), preconditioner=preconditioner)
    factors = measured(0)[1]
    if preconditioner.uses_example_moments:
        basis = kfac.curvature.eigenbasis(tx.init(initial()), layers())
        factors = kfac.statistics(loss_fn, layers())(initial(), batch(0), basis=basis)
    state = jax.jit(kfac.observe)(jax.jit(tx.init)(initial()), factors)
    after = jax.jit(tx.update)(measured(1)[0], state)[1]
    fields = (
        "factors",
        "weight",
        "condition",
        "inverted",
        *(() if preconditioner.owns_momentum else ("preconditioner",)),
    )
    for field in fields:
        assert_equal(field_of(after, field), field_of(state, field))
    assert (
        after.count == 1
        and after.last_statistics_step == state.last_statistics_step == 0
        and after.refreshed == state.refreshed == 0
    )


def others(tree):
    """Return the leaves outside of kfac's states."""
    is_state = lambda node: isinstance(node, kfac.state.KfacState)  # noqa: E731
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_state) if not is_state(leaf)]


@pytest.mark.slow
def test_nothing_else_is_changed():
    """Check a wrapper's state, and trees that are not optax states."""
    tx = kfac.kfac(0.1, layers())
    many, train = optax.MultiSteps(tx, 2), TrainState.create(apply_fn=None, params=initial(), tx=tx)
    accumulated = jax.jit(many.update)(measured(0)[0], many.init(initial()), initial())[1]
    for tree in (accumulated, train, {"deep": [tx.init(initial()), jnp.ones(3)]}):
        after = jax.jit(kfac.observe)(tree, measured(0)[1])
        assert_equal(others(after), others(tree))
        assert jax.tree.structure(after) == jax.tree.structure(tree)
        assert differ(field_of(after, "factors"), field_of(tree, "factors"))
        assert state_of(after).count == state_of(tree).count == 0


def test_they_are_due_until_they_are_taken_and_again_after_the_interval():
    tx = kfac.scale_by_kfac(layers(), statistics_period=3, inverse_update_period=6, interval_warmup_steps=0)
    state, observe, update = tx.init(initial()), jax.jit(kfac.observe), jax.jit(tx.update)
    due, ages = [], []
    for t in range(7):
        due.append(bool(kfac.statistics_due(state)))
        if due[-1]:
            state = observe(state, measured(t)[1])
            assert not kfac.statistics_due(state)
        state = update(measured(t)[0], state)[1]
        ages.append([int(kfac.diagnostics(state)[name]) for name in ("statistics_age", "inverse_age")])
    assert due == [True, False, False, True, False, False, True]
    assert ages == [[0, 0], [1, 1], [2, 2], [0, 3], [1, 4], [2, 5], [0, 0]]


def test_whether_they_are_due_is_known_after_the_state_was_donated():
    state = kfac.scale_by_kfac(layers()).init(initial())
    due = kfac.statistics_due(state)
    jax.jit(kfac.observe, donate_argnums=0)(state, measured(0)[1])
    assert due


def test_two_observations_before_a_step_are_both_averaged():
    """Observe two batches between two steps."""
    tx = kfac.scale_by_kfac(layers(), factor_ema_decay=0.5)
    state, observe = tx.init(initial()), jax.jit(kfac.observe)
    for t in range(2):
        state = observe(state, measured(t)[1])
    found = kfac.curvature.factors_from_state(state, layers())
    expected = jax.tree.map(lambda a, b: (a / 2 + b) / 1.5, *(measured(t)[1] for t in range(2)))
    assert_close(dict(found), dict(expected), 1e-5)


def test_without_factors_all_inverses_are_refreshed():
    """Check a refresh at any interval. The averages and their age stay the same."""
    tx = kfac.scale_by_kfac(layers(), damping=lambda t: 0.1 * (1 + t), inverse_update_period=5, interval_warmup_steps=0)
    state = jax.jit(kfac.observe)(tx.init(initial()), measured(0)[1])
    state = jax.jit(tx.update)(measured(0)[0], state)[1]
    after = jax.jit(kfac.observe)(state)
    fresh = kfac.scale_by_kfac(layers(), damping=0.2)
    expected = jax.jit(kfac.observe)(fresh.init(initial()), measured(0)[1])
    assert_close(field_of(after, "preconditioner"), field_of(expected, "preconditioner"), 1e-5)
    assert differ(field_of(after, "preconditioner"), field_of(state, "preconditioner"))
    assert_equal(field_of(after, "factors"), field_of(state, "factors"))
    assert after.refreshed == 1 and after.last_statistics_step == 0


@pytest.mark.slow
def test_several_states_take_the_factors_of_their_own_layers():
    names = {"first": "one", "norm": "one", "offset": "two", "out": "two", "temperature": "two"}

    def of(label):
        rules = {f"^{name}": "skip" for name, other in names.items() if other != label or name == "temperature"}
        return kfac.find_layers(loss_fn, initial(), batch(0), rules=rules)

    tx = optax.partition({label: kfac.kfac(0.1, of(label)) for label in ("one", "two")}, names)
    grads, factors = measured(0)
    state = jax.jit(kfac.observe)(tx.init(initial()), factors)
    for label, part in state.inner_states.items():
        found = kfac.curvature.factors_from_state(part, of(label))
        assert set(found) == {name for name in factors if names[name] == label}
        assert_close({name: factors[name] for name in found}, dict(found), 1e-6)
    updates, _ = jax.jit(tx.update)(grads, state, initial())
    alone = kfac.kfac(0.1, layers())
    expected, _ = jax.jit(alone.update)(grads, jax.jit(kfac.observe)(alone.init(initial()), factors), initial())
    assert_close(updates, expected, 1e-4)


def test_several_states_take_the_gradients_of_their_own_layers():
    everything = kfac.find_layers(loss_fn, initial(), batch(0), rules={"offset": "gradient", "temperature": "gradient"})
    factors = jax.jit(kfac.statistics(loss_fn, everything))(initial(), batch(0))
    assert set(factors.gradients) == {"offset", "temperature"}
    own = kfac.find_layers(loss_fn, initial(), batch(0), rules={"offset": "gradient", "temperature": "skip"})
    optimizers = [kfac.kfac(0.1, found) for found in (everything, own)]

    @jax.jit
    def observed(factors):
        states = [tx.init(initial()) for tx in optimizers]
        return kfac.observe(states, factors), kfac.observe(states[0], factors)

    together, alone = observed(factors)
    assert_equal(field_of(together[0], "factors"), field_of(alone, "factors"))
    assert all(state_of(state).last_statistics_step == 0 for state in together)


def raising(call, words, kind=ValueError):
    with pytest.raises(kind, match=words):
        call()


def test_mistakes_are_said():
    tx = kfac.kfac(0.1, layers())
    (grads, factors), state = measured(0), tx.init(initial())
    adam = optax.adam(0.1).init(initial())
    raising(lambda: kfac.observe(adam, factors), r"opt_state holds no state of kfac\.kfac, but is of type tuple")
    raising(lambda: kfac.statistics_due(adam), r"opt_state holds no state of kfac\.kfac")
    raising(lambda: kfac.observe(state, grads), r"factors must be what kfac\.statistics returns, but is dict")
    raising(
        lambda: kfac.observe(state, (grads, factors)), r"factors must be what kfac\.statistics returns, but is tuple"
    )

    fewer = kfac.Factors({name: block for name, block in factors.items() if name != "norm"})
    raising(lambda: kfac.observe(state, fewer), "without layer 'norm'")
    more = kfac.Factors({**factors, "more": factors["norm"]})
    raising(lambda: kfac.observe(state, more), "with layer 'more'")
    raising(lambda: kfac.observe((state, state), more), "factors hold a layer 'more', which none of the 2 states has")
    wider = jax.tree.map(lambda x: jnp.pad(x, [(0, 1)] * x.ndim), factors["first"])
    other = kfac.Factors({**factors, "first": wider})
    raising(lambda: kfac.observe(state, other), r"layer 'first': A must have shape \(4, 4\), but has \(5, 5\)")

    words = r"update takes no factors: call opt_state = kfac\.observe\(opt_state, factors\) before it"
    raising(lambda: tx.update(grads, state, initial(), factors=factors), words, TypeError)
    words = r"updates are statistics, where gradients belong: opt_state = kfac\.observe\(opt_state, factors\)"
    raising(lambda: tx.update(factors, state, initial()), words)


@pytest.mark.parametrize("compiled_update", [False, True])
def test_update_or_diagnostics_warn_once_of_forgotten_statistics(compiled_update):
    """Forget `observe`. A compiled `update` cannot tell, so `diagnostics` does."""
    every = 2 + compiled_update  # another optimizer, because each is warned of once
    tx, grads = kfac.scale_by_kfac(layers(), statistics_period=every), measured(0)[0]
    update = jax.jit(tx.update) if compiled_update else tx.update
    state = tx.init(initial())
    for _ in range(3 * every):
        state = jax.block_until_ready(update(grads, state)[1])
        kfac.diagnostics(state)
    with pytest.warns(UserWarning, match=r"no new statistics for more than three intervals.*kfac\.observe") as warned:
        for _ in range(4):
            kfac.diagnostics(state)
            state = jax.block_until_ready(update(grads, state)[1])
    assert len(warned) == 1


def test_statistics_due_warns_of_a_loop_that_drops_what_observe_returns():
    tx, (grads, factors) = kfac.scale_by_kfac(layers(), statistics_period=4), measured(0)
    state, observe, update = tx.init(initial()), jax.jit(kfac.observe), jax.jit(tx.update)
    with pytest.warns(UserWarning, match=r"call opt_state = kfac\.observe.* and keep its result"):
        for _ in range(15):
            if kfac.statistics_due(state):
                observe(state, factors)
            state = jax.block_until_ready(update(grads, state)[1])


def test_diagnostics_do_not_warn_of_a_loop_with_an_interval_of_its_own():
    tx, (grads, factors) = kfac.scale_by_kfac(layers(), statistics_period=5), measured(0)
    step, observe = jax.jit(tx.update), jax.jit(kfac.observe)
    state = tx.init(initial())
    for t in range(60):
        if t % 30 == 0:
            state = observe(state, factors)
        state = jax.block_until_ready(step(grads, state)[1])
        kfac.diagnostics(state)
    # Only `observe` without factors refreshes here, at steps that the optimizer does not know.
    tx = kfac.scale_by_kfac(layers(), statistics_period=1, inverse_update_period=math.inf)
    state = tx.init(initial())
    update = jax.jit(tx.update)
    for _ in range(6):
        state = update(grads, state)[1]
        kfac.diagnostics(jax.block_until_ready(state))


@pytest.mark.parametrize("observes", [False, slow(True)])
def test_a_program_that_compiled_update_and_never_called_observe_says_so_at_its_end(observes):
    program = """
import jax, jax.numpy as jnp, kfac
w, x = jnp.ones((3, 2)), jnp.ones((8, 3))
loss_fn = lambda w, x: jnp.mean(jnp.square(x @ w))
layers = kfac.find_layers(loss_fn, w, x)
tx = kfac.kfac(0.1, layers)
state = jax.eval_shape(tx.init, w)
if {observes}:
    state = jax.eval_shape(kfac.observe, state, jax.eval_shape(kfac.statistics(loss_fn, layers), w, x))
jax.eval_shape(tx.update, w, state, w)
"""
    command = [sys.executable, "-c", program.replace("{observes}", str(observes))]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert ("update was compiled, but kfac.observe was never called" in said) != observes


def test_a_train_step_that_resumes_between_two_statistics_is_not_told_to_observe():
    program = """
import jax, jax.numpy as jnp, kfac, optax
w, x = jnp.ones((3, 2)), jnp.ones((8, 3))
step = kfac.train_step(lambda w, x: jnp.mean(jnp.square(x @ w)), 0.1)
state = optax.tree.set(step.init(w, x), due=jnp.array(False))
step(w, state, x)
"""
    assert (
        "kfac" not in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
    )


def test_factors_without_the_gradient_that_a_layer_needs_are_refused():
    found = kfac.find_layers(loss_fn, initial(), batch(0), rules={"temperature": "gradient"})
    factors = jax.jit(kfac.statistics(loss_fn, found))(initial(), batch(0))
    state = kfac.kfac(0.1, found).init(initial())
    with pytest.raises(ValueError, match=r"factors.gradients must hold the gradient of 'temperature'"):
        kfac.observe(state, kfac.Factors(dict(factors)))
    after = jax.jit(kfac.observe)(state, factors)
    own = factors.gradients["temperature"] ** 2
    (found_average,) = [
        block.factors.F for name, block in state_of(after).blocks.items() if name.startswith("gradient")
    ]
    np.testing.assert_allclose(found_average.ravel(), own, rtol=1e-5)


@pytest.mark.slow
def test_a_state_is_its_own_argument_in_a_loop():
    """Check that structure and types stay the same, as `scan` and `cond` require."""
    tx = kfac.kfac(0.05, layers(), overhead=0.5)
    grads, factors = measured(0)

    def step(carry, _):
        params, state = carry
        due = kfac.statistics_due(state)
        state = jax.lax.cond(due, lambda state: kfac.observe(state, factors), lambda state: state, state)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), due

    (params, state), due = jax.jit(lambda carry: jax.lax.scan(step, carry, length=14))((initial(), tx.init(initial())))
    assert due.sum() == 12 and state_of(state).count == 14
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("own", ["bfloat16", "float32"])
def test_observe_refuses_statistics_in_another_communication_dtype(own):
    """Check that `statistics` without the optimizer's distribution, or with another distribution, is an error."""
    other = {"bfloat16": "float32", "float32": "bfloat16"}[own]
    tx = kfac.scale_by_kfac(layers(), distribution=kfac.Distribution(communication_dtype=own))

    def observed(dtype):
        def local(params, batch):
            measure = kfac.statistics(loss_fn, layers(), distribution=kfac.Distribution(communication_dtype=dtype))
            return kfac.observe(tx.init(params), measure(params, batch))[0]

        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        split = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return jax.eval_shape(split, initial(), batch(0))

    with pytest.raises(ValueError, match=rf"in {other}, .* communication_dtype='{own}': pass the same distribution="):
        observed(other)
    assert observed(own).shape == ()
