"""Test that `kfac.train_step` matches the four lines, for each framework's way to hold parameters and state."""

from __future__ import annotations

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import kfac
from checking import normal, slow
from problem import observing, plain_kfac

x, labels = normal(0, 24, 5, dtype=np.float32), jnp.arange(24) % 3


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(kfac.mark_output(logits, "categorical"), labels).mean()


def by_hand(loss_fn, params, batch, steps, rate=0.1, has_aux=False, **options):
    layers = kfac.find_layers(loss_fn, params, batch, has_aux=has_aux)
    fraction = options.pop("statistics_fraction", None)
    tx = kfac.kfac(rate, layers, **options)
    measure = kfac.statistics(loss_fn, layers, has_aux=has_aux, fraction=fraction)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        basis = (
            {"basis": kfac.curvature.eigenbasis(state, layers)} if options.get("preconditioner") == kfac.EKFAC() else {}
        )
        value, grads = jax.value_and_grad(loss_fn, has_aux=has_aux)(params, batch)
        state = kfac.observe(state, measure(params, batch, **basis))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    for _ in range(steps):
        params, state, value = step(params, state)
    return params, value


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"statistics_fraction": 1 / 5},
        {"preconditioner": kfac.EKFAC(), "damping": 1e-2, "nesterov": True},
    ],
)
def test_linen(x64, options):
    model = nn.Sequential([nn.Dense(8, param_dtype=jnp.float64), jnp.tanh, nn.Dense(3, param_dtype=jnp.float64)])
    wide = jnp.asarray(x, jnp.float64), labels
    params = model.init(jax.random.key(0), wide[0])

    def loss_fn(params, batch):
        return cross_entropy(model.apply(params, batch[0]), batch[1])

    step = kfac.train_step(loss_fn, 0.1, **options)
    found, state = params, step.init(params, wide)
    for _ in range(3):
        found, state, loss = step(found, state, wide)
    close((found, loss), by_hand(loss_fn, params, wide, 3, **options))
    assert kfac.diagnostics(state)["skipped_steps"] == 0


@pytest.mark.slow
def test_nnx_with_batch_norm_in_parts_of_the_batch():
    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden, self.norm = nnx.Linear(5, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.out = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.out(jnp.tanh(self.norm(self.hidden(x))))

    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, batch):
        model = nnx.merge(graph, params, rest)
        loss = cross_entropy(model(batch[0]), batch[1])
        return loss, nnx.state(model, nnx.BatchStat)

    step = kfac.train_step(loss_fn, 0.1, has_aux=True, num_microbatches=2, batch_argnums=2)
    state, before = step.init(params, rest, (x, labels)), rest
    losses = []
    for _ in range(12):  # the last two without statistics
        params, state, (loss, rest) = step(params, state, rest, (x, labels))
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert not np.array_equal(jax.tree.leaves(rest)[0], jax.tree.leaves(before)[0])


@pytest.mark.slow
def test_equinox_with_sampled_targets():
    model = eqx.nn.MLP(5, 3, 8, depth=1, activation=jnp.tanh, key=jax.random.key(4))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch[0]), batch[1])

    step = kfac.train_step(loss_fn, 0.1, fisher="sampled", rules={"bias": "skip"})
    state, first = step.init(params, (x, labels)), None
    for k in range(5):
        params, state, loss = step(params, state, (x, labels), fisher_key=jax.random.key(k))
        first = first or float(loss)
    assert loss < first
    with pytest.raises(ValueError, match="pass a PRNG key"):
        step(params, state, (x, labels))


def test_unknown_options_are_errors():
    with pytest.raises(TypeError, match=r"^train_step\(\) .* 'dampening'"):
        kfac.train_step(lambda p, b: jnp.mean((b @ p) ** 2), 0.1, dampening=1.0)


def perceptron():
    params = {"w0": jnp.eye(16), "w1": jnp.ones((16, 4))}
    x = jnp.asarray(normal(1, 512, 16, dtype=np.float32))
    return params, x, lambda params, x: jnp.mean((jnp.tanh(x @ params["w0"]) @ params["w1"]) ** 2)


@pytest.mark.parametrize(
    ("overhead", "every"),
    [(0.1, 6), (10, 1), slow(0.05, 11), slow(0.3, 2)],
)
def test_statistics_are_taken_when_they_are_due(overhead, every):
    """Check that statistics come in ten steps, and then less and less often.

    The first batch determines the final interval, even if later batches are smaller.
    """

    def now(count):
        return 1 if count < 10 else min(every, 2 if count < 20 else 4)

    params, x, loss_fn = perceptron()
    step = kfac.train_step(loss_fn, 0.05, overhead=overhead)
    state, ages = step.init(params, x), []
    for count, size in enumerate([512] * 15 + [8, 8] + [512] * 4):
        assert bool(kfac.statistics_due(state)) == (count % now(count) == 0)
        params, state, _ = step(params, state, x[:size])
        ages.append(int(kfac.diagnostics(state)["inverse_age"]))
    assert ages == [count % now(count) for count in range(21)]


@pytest.mark.parametrize(("options", "words"), [
    ({}, "2 layers, 320 parameters, SOAP\n512 examples in argument 1; statistics from 1/4 of them every 6 steps"),
    ({"overhead": 10, "preconditioner": kfac.Eigh()}, "; statistics from 1/4 of them in every step"),
    ({"statistics_fraction": 1, "overhead": 0.3}, "SOAP\n512 examples in argument 1; statistics every 2 steps"),
    ({"statistics_fraction": 1 / 1024}, "SOAP\n512 examples in argument 1; statistics every"),
    ({"verbose": False}, ""),
])  # fmt: skip
def test_it_says_once_what_it_found_and_looks_once(capsys, options, words):
    params, x, loss_fn = perceptron()
    calls = []

    def counted(params, x):
        calls.append(x.shape)
        return loss_fn(params, x)

    step = kfac.train_step(counted, 0.05, **options)
    state = step.init(params, x)
    found = len(calls)
    for _ in range(2):
        jax.eval_shape(lambda state: step(params, state, x), state)
    assert len(calls) <= 2 * found + 1  # a trace or two for each of the two programs, without finding the layers again
    printed = capsys.readouterr().out
    assert printed.count("\n") == 5 * bool(words) and words in printed


def test_init_prints_the_memory_and_whether_programs_are_kept_and_steps_print_nothing(capsys):
    params, x, loss_fn = perceptron()
    step = kfac.train_step(loss_fn, 0.05)
    folder = jax.config.jax_compilation_cache_dir
    assert folder  # for the tests
    state = step.init(params, x)
    *_, memory, programs = capsys.readouterr().out.splitlines()
    assert programs == "the first step compiles two programs, or loads them"
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        step.init(params, x)
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
    sentence = "the first step compiles two programs; set jax_compilation_cache_dir to keep them\n"
    assert capsys.readouterr().out.endswith(sentence)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    # Adam's state is two arrays of 320 float32 numbers.
    assert memory == f"the state takes {size / 1e3:.1f} kB per device, {size / 2560:.1f} times Adam's"
    step(params, state, x)
    assert capsys.readouterr().out == ""
    # The table of layers leaves out scalars, and the zeros with which blocks of similar shapes are padded.
    [least] = re.findall("the whole state at least ([0-9.]+) kB", repr(kfac.find_layers(loss_fn, params, x)))
    assert size / 2 < 1e3 * float(least) < size


def test_it_says_how_many_parameters_are_left_out(capsys):
    params, x, loss_fn = perceptron()
    params |= {"frozen": jnp.ones((400, 300))}
    kfac.train_step(loss_fn, 0.05).init(params, x)
    assert capsys.readouterr().out.startswith("2 layers, 320 parameters (0.1 M more skipped), SOAP\n")


def test_a_parameter_with_a_weak_type_compiles_nothing_anew():
    params, x, loss_fn = perceptron()
    calls = []

    def tempered(params, x):
        calls.append(x.shape)
        return loss_fn(params["network"], x) * jnp.exp(params["temperature"])

    params = {"network": params, "temperature": jnp.log(0.5)}
    assert jax.typeof(params["temperature"]).weak_type
    step = kfac.train_step(tempered, 0.05, overhead=10, verbose=False)
    state = step.init(params, x)
    params, state, _ = step(params, state, x)
    traced = len(calls)
    step(params, state, x)
    assert len(calls) == traced


def test_inside_of_a_loop_it_is_the_same():
    params, x, loss_fn = perceptron()
    step = kfac.train_step(loss_fn, 0.05, overhead=0.6)
    found = params, step.init(params, x)
    for _ in range(14):
        found = step(*found, x)[:2]
    again, _ = jax.jit(lambda carry: jax.lax.scan(lambda carry, _: (step(*carry, x)[:2], None), carry, length=14))(
        (params, step.init(params, x))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), again[0], found[0])


@pytest.mark.slow
def test_parts_of_a_batch_have_keys_of_their_own():
    """Check that equal halves of a batch have different masks, and so different losses."""
    params, rate = {"w": jnp.ones((5, 3))}, 0.1

    def loss_fn(params, batch, *, key):
        kept = jax.random.bernoulli(key, 0.5, batch[0].shape)
        return cross_entropy(jnp.where(kept, batch[0], 0) @ params["w"], batch[1])

    batch, key = (jnp.concatenate([x, x]), jnp.concatenate([labels, labels])), jax.random.key(0)
    step = kfac.train_step(loss_fn, rate, num_microbatches=2)
    found, _, loss = step(params, step.init(params, batch, kwargs={"key": key}), batch, kwargs={"key": key})
    layers = kfac.find_layers(loss_fn, params, batch, kwargs={"key": key})
    tx, measure = kfac.kfac(rate, layers), kfac.microbatch(kfac.value_and_grad(loss_fn, layers), 2)
    expected, grads, factors = jax.jit(measure)(params, batch, kwargs={"key": key})
    updates, _ = jax.jit(observing(tx))(grads, tx.init(params), params, factors=factors)
    close((found, loss), (optax.apply_updates(params, updates), expected))
    parts = [loss_fn(params, (x, labels), key=jax.random.fold_in(key, k)) for k in range(2)]
    np.testing.assert_allclose(loss, sum(parts) / 2, rtol=1e-6)


@pytest.mark.slow
def test_a_number_of_examples_that_the_loss_does_not_show():
    def loss_fn(params, batch):  # the loss covers the second half of each sequence
        logits = kfac.mark_output((batch @ params["w"])[:, 2:], "gaussian")
        return 0.5 * jnp.mean(jnp.sum(logits**2, axis=-1))

    params, batch = {"w": jnp.ones((5, 3))}, jnp.asarray(normal(0, 6, 4, 5, dtype=np.float32))
    layers = kfac.find_layers(loss_fn, params, batch)
    updates = jax.jit(kfac.value_and_grad(loss_fn, layers, num_examples=6))(params, batch)
    tx = kfac.kfac(0.1, layers)
    expected, _ = tx.update(updates[1], kfac.observe(tx.init(params), updates[2]), params)
    step = kfac.train_step(loss_fn, 0.1, num_examples=6)
    close(step(params, step.init(params, batch), batch)[0], optax.apply_updates(params, expected))
    with pytest.raises(ValueError, match=r"loss_fn must be a function, but is 0\.1"):
        kfac.train_step(0.1, loss_fn)


def test_the_state_of_another_network_is_refused_with_words():
    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

    batch = jnp.asarray(x)
    step = kfac.train_step(loss_fn, 0.1)
    state = step.init({"w": jnp.ones((5, 3))}, batch)
    with pytest.raises(ValueError, match=r"factors of layer 'w': G must have shape \(3, 3\), but has \(4, 4\)"):
        step({"w": jnp.ones((5, 4))}, state, batch)
    layers = kfac.find_layers(loss_fn, {"w": jnp.ones((5, 3))}, batch)
    with pytest.raises(ValueError, match="updates"):
        kfac.kfac(0.1, layers).update({"w": jnp.ones((4, 3))}, state, {"w": jnp.ones((5, 3))})


@pytest.mark.slow
def test_in_parts_num_examples_is_that_of_the_whole_batch(x64):
    p, b = {"w": normal(0, 5, 3)}, (normal(1, 8, 5), normal(2, 8, 3))

    def loss_fn(p, b):
        return 0.5 * jnp.mean(jnp.sum((b[0] @ p["w"] - b[1]) ** 2, -1))

    def after(**options):
        step = kfac.train_step(loss_fn, 0.1, optimizer=plain_kfac, **options)
        return step(p, step.init(p, b), b)[0]["w"]

    expected = after()
    np.testing.assert_allclose(after(num_examples=8), expected, rtol=1e-12)
    np.testing.assert_allclose(after(num_examples=8, num_microbatches=4), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="num_microbatches=4 does not divide num_examples=6"):
        after(num_examples=6, num_microbatches=4)


@pytest.mark.slow
def test_what_is_split_is_found_or_said(x64):
    """Check that the arguments with examples are split. Another argument of equal length is passed whole."""
    p, x, y, scale = {"w": normal(0, 4, 3)}, normal(1, 4, 4), normal(2, 4, 3), normal(3, 4)

    def loss_fn(p, x, y):
        return 0.5 * jnp.mean(jnp.sum((x @ p["w"] - y) ** 2, -1))

    def in_one(p, batch, scale):
        return loss_fn(p, scale * batch[0], batch[1])

    def once(*args, batch_argnums=None, parts=4, loss_fn=loss_fn, **kwargs):
        step = kfac.train_step(
            loss_fn,
            0.1,
            optimizer=plain_kfac,
            num_microbatches=parts,
            batch_argnums=batch_argnums,
        )
        params, _, loss = step(p, step.init(p, *args, kwargs=kwargs), *args, kwargs=kwargs)
        return params["w"], loss

    def same(found, expected):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)

    for options in ({}, {"batch_argnums": (1, 2)}):
        same(once(x, y, **options), once(x, y, parts=1))
    same(once((x, y), scale, loss_fn=in_one), once((x, y), scale, loss_fn=in_one, parts=1))
    for args, named in (((x,), {"y": y}), ((), {"x": x, "y": y})):
        with pytest.raises(ValueError, match=r"the batch must be in positional arguments.*'y' of it are keyword"):
            once(*args, **named)
    for wrong, words in (
        ((), "position of an argument"),
        (True, "position"),
        ("12", "after params are 1, 2"),
        (0, "after params are 1, 2"),
    ):
        with pytest.raises(ValueError, match=words):
            once(x, y, batch_argnums=wrong)
    for wrong in (0, True, -2, "2"):
        with pytest.raises(ValueError, match="num_microbatches must be a positive int"):
            once(x, y, parts=wrong)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_donated_arguments_are_parameters_and_state_alone(named):
    def loss_fn(params, batch, scale):
        return scale * jnp.mean((batch @ params["w"] - 1) ** 2)

    start = {"w": jnp.ones((4, 3))}
    batch, scale = jnp.arange(32.0).reshape(8, 4) / 32, jnp.ones(())
    given = ((), {"batch": batch, "scale": scale}) if named else ((batch, scale), {})
    ends = []
    for donate in (False, True):
        step = kfac.train_step(loss_fn, 0.1, donate=donate, verbose=False)
        params = first = jax.tree.map(jnp.copy, start)
        state = step.init(params, *given[0], kwargs=given[1])
        for _ in range(3):
            params, state, _ = step(params, state, *given[0], kwargs=given[1])
        assert first["w"].is_deleted() is donate
        assert not batch.is_deleted() and not scale.is_deleted()
        ends.append(np.asarray(params["w"]))
    np.testing.assert_array_equal(*ends)


@pytest.mark.slow
def test_donation_with_a_loss_of_parameters_alone():
    ends = []
    for donate in (False, True):
        step = kfac.train_step(lambda params: jnp.sum(params["w"] ** 2), 0.1, donate=donate, verbose=False)
        params = {"w": jnp.ones((4, 3))}
        ends.append(np.asarray(step(params, step.init(params))[0]["w"]))
    np.testing.assert_array_equal(*ends)


def test_init_says_what_a_mean_step_costs(capsys):
    def loss_fn(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["wide"]) @ params["head"]))

    params = {"wide": jnp.ones((400, 300)) / 20, "head": jnp.ones((300, 2)) / 20}
    layers = kfac.find_layers(loss_fn, params, jnp.ones((64, 400)), max_factor_dim=8192)
    kfac.train_step(loss_fn, 0.1, layers=layers).init(params, jnp.ones((64, 400)))
    said = capsys.readouterr().out
    price, alone = map(
        float, re.search(r"costs ([\d.]+) times the gradient's FLOPs, ([\d.]+) of them for 'wide': ", said).groups()
    )
    # Per example, forward pass and gradients take 3 x 2 x (400 x 300 + 300 x 2) FLOPs. Refreshes are proportional to
    # d^3.
    gradients = 64 * 6 * (400 * 300 + 300 * 2)
    seldom = 16 * (2 * (400**2 + 300**2) + 4 * 400 * 300) + 3 * 14 / 3 * (400**3 + 300**3)
    applied = 2 * 2 * 400 * 300 * 700
    np.testing.assert_allclose(alone, (seldom / 16 + applied) / gradients, atol=0.01)
    assert price > 1 + alone and "find_layers(..., max_factor_dim=100) cuts" in said


def test_a_batch_with_arrays_that_examples_share_is_not_thinned(capsys):
    def loss_fn(params, graph):
        messages = jax.ops.segment_sum(graph["nodes"][graph["from"]] @ params, graph["to"], 20)
        return jnp.mean(jnp.square(messages[graph["to"]]))

    edges = jnp.arange(128) % 20
    graph = {"nodes": jnp.ones((20, 3)), "from": edges, "to": edges}
    kfac.train_step(loss_fn, 0.1).init(jnp.ones((3, 2)), graph)
    assert "argument 1; statistics every 15 steps" in capsys.readouterr().out


def test_another_init_of_one_step_is_of_its_own_arguments():
    step = kfac.train_step(lambda w, x: jnp.mean(jnp.square(x @ w)), 0.1, verbose=False)
    states = [step.init(jnp.ones((3, 2)), jnp.ones((count, 3))) for count in (8, 256)]
    assert [state[0].settings.layers.num_examples for state in states] == [8, 256]


def test_parts_of_a_quarter_are_no_single_examples():
    step = kfac.train_step(lambda w, x: jnp.mean(jnp.square(x @ w)), 0.1, num_microbatches=5, verbose=False)
    params, batch = jnp.ones((3, 2)), jnp.ones((630, 3))
    state = step.init(params, batch)
    params, state, loss = step(params, state, batch)  # a quarter of 630 is 157, a prime
    assert np.isfinite(loss) and state[0].last_statistics_step == 0


@pytest.mark.parametrize(("overhead", "every"), [(0.1, 16), (1e3, 16), (float("inf"), 1)])
def test_train_step_takes_the_longest_interval_if_the_gradients_cost_is_unknown(overhead, every, capsys):
    x = jnp.sin(jnp.arange(48.0)).reshape(16, 3)

    def hides_its_batch(params):
        return jnp.mean(jnp.square(x @ params))

    def experts(params, x):
        sizes = jnp.array([4, 12])
        return jnp.mean(jnp.square(jax.lax.ragged_dot(x, params, sizes)))

    step = kfac.train_step(hides_its_batch, 0.1, num_examples=16, overhead=overhead)
    assert step.init(jnp.ones((3, 2)))[0].settings.interval.every == every
    step = kfac.train_step(experts, 0.1, overhead=overhead)
    assert step.init(jnp.ones((2, 3, 2)), x)[0].settings.interval.every == every
    assert capsys.readouterr().out.count("the gradient's FLOPs are unknown") == 2


@pytest.mark.parametrize("given", [False, True])
def test_train_step_passes_an_array_that_all_examples_share_whole_to_each_microbatch(x64, given):
    """Check layers that `train_step` finds and layers that it is given. The scales have the length of no batch."""

    def loss_fn(params, batch):
        x, y, scale = batch
        return 0.5 * jnp.mean(jnp.sum((x * scale @ params["w"] - y) ** 2, -1))

    params = {"w": normal(0, 3, 2)}
    batch = normal(1, 8, 3), normal(2, 8, 2), normal(3, 3)
    layers = kfac.find_layers(loss_fn, params, batch)
    ends = []
    for parts in (1, 4):
        found = {"layers": layers} if given else {}
        step = kfac.train_step(loss_fn, 0.1, num_microbatches=parts, verbose=False, **found)
        ends.append(step(params, step.init(params, batch), batch)[::2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *ends)


def test_train_step_takes_layers():
    """Check that the layers' own options count, and that nothing is traced in search of layers."""

    def loss_fn(params, x):
        return jnp.mean(jnp.sum(jnp.tanh(x @ params["w"]) ** 2, -1))

    params, x = {"w": jnp.ones((12, 3)) / 10}, normal(0, 8, 12, dtype=np.float32)
    layers = kfac.find_layers(loss_fn, params, x, max_factor_dim=4)
    step = kfac.train_step(loss_fn, 0.1, layers=layers, verbose=False)
    state = step.init(params, x)
    step(params, state, x)
    assert kfac.curvature.factors_from_state(state, layers)["w"].A.shape == (3, 4, 4)
    assert not step.layers


def test_train_step_takes_a_weight_decay_mask_like_the_parameters():
    params, x = {"w": normal(1, 5, 3, dtype=np.float32), "b": jnp.ones(3)}, normal(0, 8, 5, dtype=np.float32)
    mask = {"w": True, "b": False}

    def loss_fn(params, x):
        return jnp.mean(jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2, -1))

    def result(**options):
        step = kfac.train_step(loss_fn, 0.1, verbose=False, **options)
        return step(params, step.init(params, x), x)[0]

    plain = result()
    for given in (mask, lambda params: mask):
        decayed = result(weight_decay=0.5, weight_decay_mask=given)
        np.testing.assert_array_equal(decayed["b"], plain["b"])
        assert jnp.any(decayed["w"] != plain["w"])
    with pytest.raises(ValueError):
        result(weight_decay=0.5, weight_decay_mask={"w": True})


def test_train_step_leaves_kernels_whole_for_the_moments_of_ekfac():
    """Check it for an optimizer that hides its preconditioner until it has the parameters."""

    def loss_fn(params, x):
        return jnp.mean(jnp.square(x @ params["w"]))

    params, x = {"w": jnp.ones((512, 8)) / 20}, normal(0, 8, 512, dtype=np.float32)
    masked = {"preconditioner": kfac.EKFAC(), "weight_decay": 0.1, "weight_decay_mask": {"w": True}}
    for tx in (functools.partial(kfac.kfac, **masked), lambda rate, layers: kfac.kfac(rate, layers, **masked)):
        step = kfac.train_step(loss_fn, 0.1, optimizer=tx, verbose=False)
        step(params, step.init(params, x), x)
        [layers] = step.layers.values()
        assert layers["w"].num_blocks == (1, 1)


@pytest.mark.slow
def test_train_step_with_gauss_newton_is_ahead_of_the_other_optimizers_after_ten_steps():
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": 0.3 * jax.random.normal(keys[0], (5, 8)),
        "bias": jnp.zeros(8),
        "output": 0.3 * jax.random.normal(keys[1], (8, 3)),
    }
    x = jax.random.normal(keys[2], (32, 5))
    batch = x, jnp.argmax(x[:, :3], axis=-1)

    def marked_loss(params, batch):
        logits = jnp.tanh(batch[0] @ params["hidden"] + params["bias"]) @ params["output"]
        logits = kfac.mark_output(logits, "categorical")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    rate, fall = kfac.schedules.warmup_linear_decay(0.1, 10), optax.linear_schedule(1.0, 0.0, 10)
    minibatches = {"factor_ema_decay": 0.9, "damping": 0.1, "min_damping": 1e-3}
    losses = []
    for step in (
        kfac.train_step(marked_loss, rate),
        kfac.train_step(marked_loss, 0.02, optimizer=kfac.natural_gradient, damping=1e-3),
        kfac.train_step(marked_loss, fall, optimizer=kfac.gauss_newton, fisher="sampled", **minibatches),
    ):
        new, opt_state = params, step.init(params, batch)
        for k in range(10):
            key = jax.random.key(k) if step.fisher == "sampled" else None
            new, opt_state, loss = step(new, opt_state, batch, fisher_key=key)
        losses.append(float(loss))
    default, natural, newton = losses
    assert newton < min(default, natural)


@pytest.mark.parametrize("has_aux", [False, True])
def test_train_step_gives_line_searches_and_schedules_by_loss_what_they_need(has_aux):
    def loss(params, x):
        value = jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"]) - 0.5))
        return (value, value) if has_aux else value

    def optimizer(rate, layers):
        search = optax.scale_by_backtracking_linesearch(10)
        return optax.chain(kfac.kfac(rate, layers), search, optax.contrib.reduce_on_plateau(patience=1, rtol=1.0))

    params = {"kernel": normal(1, 5, 3, dtype=np.float32)}
    step = kfac.train_step(loss, 10.0, optimizer=optimizer, has_aux=has_aux, verbose=False)
    state = step.init(params, x)
    losses = []
    for _ in range(3):
        params, state, result = step(params, state, x)
        losses.append(float(result[0] if has_aux else result))
    assert losses[0] > losses[1] > losses[2]  # at a rate 200 times too high
    assert float(optax.tree.get(state, "scale")) < 1
