"""Test that `kfac.train_step` knows on the host when statistics are due, and does not wait for the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kfac
from checking import slow


def quadratic(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["w0"]) @ params["w1"]))


def network(scale=1.0):
    return {"w0": scale * jnp.eye(6), "w1": scale * jnp.ones((6, 4))}


BATCH = jnp.sin(jnp.arange(48.0)).reshape(8, 6)


def long_loss(params, x, rounds):
    """Compute `quadratic` after a loop that takes about 10 ms a round."""
    matrix = jax.lax.stop_gradient(jnp.full((400, 400), params["w1"][0, 0]))
    ended = jax.lax.fori_loop(0, rounds, lambda _, m: jnp.tanh(m @ m), matrix)
    return quadratic(params, x) + 0.0 * ended[0, 0]


@pytest.mark.parametrize("donate", [False, slow(True)])
def test_train_step_returns_before_the_step_has_run(donate):
    """Make two calls, one with statistics and one without, while the first still runs."""
    step = kfac.train_step(long_loss, 0.05, overhead=0.01, donate=donate, verbose=False)
    params = network()
    state = step.init(params, BATCH, 1)
    for _ in range(12):
        params, state, _ = step(params, state, BATCH, 1)
    jax.block_until_ready(params)
    params, state, first = step(params, state, BATCH, 200)
    params, state, second = step(params, state, BATCH, 1)
    assert not first.is_ready()
    assert np.isfinite(second) and kfac.diagnostics(state)["statistics_age"] == 1


def follow(step, params, state, batches):
    """Make steps, and check that each takes statistics exactly if `statistics_due` is true. Return which did."""
    taken = []
    for batch in batches:
        due = bool(kfac.statistics_due(state))
        before = int(state[0].last_statistics_step)
        count = int(state[0].count)
        params, state, _ = step(params, state, batch)
        assert bool(state[0].last_statistics_step == count) == due or before == count
        taken.append(due)
    return params, state, taken


def made(**options):
    step = kfac.train_step(quadratic, 0.01, overhead=0.01, verbose=False, **options)
    params = network()
    return step, params, step.init(params, BATCH)


# With the longest interval, 16, statistics are due at these numbers of calls.
DUE = [*range(10), *range(10, 20, 2), *range(20, 40, 4), 40, 48, 56]


def test_train_step_takes_statistics_when_they_are_due_and_a_rejected_step_counts():
    step, params, state = made()
    broken = BATCH * jnp.nan
    batches = [broken if call in (3, 12, 13, 25) else BATCH for call in range(60)]
    _, state, taken = follow(step, params, state, batches)
    assert [call for call, due in enumerate(taken) if due] == DUE
    assert (state[0].count, kfac.diagnostics(state)["skipped_steps"]) == (56, 4)


@pytest.mark.parametrize("donate", [False, slow(True)])
def test_train_step_reads_another_state_than_it_returned(donate):
    """Change the state behind its back: copied, from a scan, with an edited count, observed, and of another run."""
    step, params, state = made(donate=donate)
    params, state, _ = follow(step, params, state, [BATCH] * 11)

    def copied(tree):
        return jax.tree.map(jnp.copy, tree)

    saved = copied((params, state))
    resumed = copied(saved)
    for params, state in (saved, resumed):
        params, state, taken = follow(step, params, state, [BATCH] * 4)
        assert taken == [False, True, False, True]

    def both(carry, _):
        return step(*carry, BATCH)[:2], None

    params, state = jax.jit(lambda *carry: jax.lax.scan(both, carry, length=3)[0])(params, state)
    params, state, taken = follow(step, params, state, [BATCH] * 2)
    assert state[0].count == 20 and taken == [True, False]
    # The same arrays, except one.
    state = (state[0]._replace(count=jnp.array(10, jnp.int32), due=jnp.array(True)), *state[1:])
    params, state, taken = follow(step, params, state, [BATCH] * 3)
    assert taken == [True, False, True]
    params, state, taken = follow(step, params, state, [BATCH])
    layers = kfac.find_layers(quadratic, params, BATCH)
    assert kfac.statistics_due(state)
    state = jax.jit(lambda *args: kfac.observe(args[1], kfac.statistics(quadratic, layers)(*args[::2])))(
        params, state, BATCH
    )
    params, state, taken = follow(step, params, state, [BATCH] * 3)
    assert taken == [False, False, True]


def test_train_step_serves_two_runs_in_turn():
    step, params, state = made()
    one, two = (params, state), (network(0.5), step.init(network(0.5), BATCH))
    *two, _ = follow(step, *two, [BATCH] * 5)
    for call in range(12):
        *one, first = follow(step, *one, [BATCH])
        *two, second = follow(step, *two, [BATCH])
        assert (first, second) == ([call in DUE], [call + 5 in DUE])


def test_train_step_goes_on_with_its_own_interval_after_another_one():
    step, params, state = made()
    params, state, _ = follow(step, params, state, [BATCH] * 41)
    often = kfac.train_step(quadratic, 0.01, overhead=1e9, verbose=False)
    params, state, taken = follow(often, params, state, [BATCH] * 4)
    assert taken == [False, True, True, True]
    _, _, taken = follow(step, params, state, [BATCH] * 5)
    assert taken == [True, False, False, True, False]


@pytest.mark.parametrize("wrap", [optax.chain, slow(lambda tx: optax.MultiSteps(tx, 2))])
def test_train_step_follows_statistics_due_inside_other_optimizers(wrap):
    """`optax.MultiSteps` calls the optimizer in every second step, so the host must ask the device."""
    step = kfac.train_step(
        quadratic, 0.01, optimizer=lambda *args, **options: wrap(kfac.kfac(*args, **options)), verbose=False
    )
    params = network()
    state = step.init(params, BATCH)
    for _ in range(45):
        due = bool(kfac.statistics_due(state))
        before = optax.tree.get(state, "last_statistics_step")
        count = max(optax.tree.get_all_with_path(state, "count"), key=lambda found: len(found[0]))[1]
        params, state, _ = step(params, state, BATCH)
        taken = optax.tree.get(state, "last_statistics_step")
        assert (int(taken) != int(before)) == due or int(before) == int(count)


def test_a_donating_train_step_takes_the_state_that_observe_returned_outside_of_jit():
    params, batch = {"w": jnp.ones((3, 2))}, jnp.ones((8, 3))
    loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)  # noqa: E731
    step = kfac.train_step(loss_fn, 0.1, donate=True, verbose=False)
    state = step.init(params, batch)
    factors = jax.jit(kfac.statistics(loss_fn, kfac.find_layers(loss_fn, params, batch)))(params, batch)
    state = kfac.observe(state, factors)
    assert jnp.isfinite(step(params, state, batch)[2])
