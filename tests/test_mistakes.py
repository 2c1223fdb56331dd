"""The mistakes of a first hour, and what each says: the argument, its value, and the line to write."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import kfac
from problem import assert_close, batch, differ, initial, layers, loss_fn, measured

RATE = 0.05
GRADS, STATS = "the gradients", "the statistics"


def optimizer(**options):
    return kfac.kfac(RATE, layers(), **options)


def update(*order, wrap=lambda tx: tx, state=None, tx=None, **named):
    """`update` of an optimizer with arguments in some order; names stand for what was measured."""
    tx = wrap(tx or optimizer())
    given = {GRADS: measured(0)[0], STATS: measured(0)[1], "params": initial()}

    def value(x):
        return given[x] if isinstance(x, str) else x

    state = jax.eval_shape(tx.init, initial()) if state is None else state
    first, *rest = map(value, order)
    return jax.eval_shape(
        lambda first, state: tx.update(first, state, *rest, **{key: value(x) for key, x in named.items()}), first, state
    )


def pair(params, batch):
    return loss_fn(params, batch), batch


def by_examples(params, batch):
    return jnp.ones(3) * loss_fn(params, batch)


def doubled(kernel, x):
    return jnp.mean((x @ jnp.exp(kernel)) ** 2)


MISTAKES = {
    "factors by position": (
        lambda: update(GRADS, "params", STATS),
        r"update takes factors by name: tx\.update\(grads, opt_state, params, factors=factors\)",
    ),
    "gradients and factors swapped": (
        lambda: update(STATS, "params", factors=GRADS),
        r"updates are statistics, where gradients belong: loss, grads, factors = kfac\.value_and_grad",
    ),
    "gradients as factors": (
        lambda: update(GRADS, "params", factors=GRADS),
        r"factors must be what kfac\.value_and_grad returns, but is dict: write loss, grads, factors = kfac\.value_and",
    ),
    "no params": (
        lambda: update(GRADS, factors=STATS),
        r"update needs the parameters: call update\(grads, state, params, factors=factors\)",
    ),
    "state of another optimizer": (
        lambda: update(GRADS, "params", factors=STATS, state=optax.adam(RATE).init(initial())),
        r"opt_state must hold one state of scale_by_kfac, but is of type tuple and holds 0: it is what init",
    ),
    "params where the state belongs": (
        lambda: kfac.due(initial()),
        r"opt_state must hold one state of scale_by_kfac, but is of type dict and holds 0: it is what init",
    ),
    "has_aux and a scalar": (
        lambda: kfac.find_layers(loss_fn, initial(), batch(0), has_aux=True),
        r"with has_aux=True loss_fn must return \(loss, aux\), but .* array of shape \(\): leave has_aux out",
    ),
    "a pair without has_aux": (
        lambda: kfac.find_layers(pair, initial(), batch(0)),
        r"but returned tuple; for a pair \(loss, aux\) pass has_aux=True",
    ),
    "a loss for each example": (
        lambda: kfac.find_layers(by_examples, initial(), batch(0)),
        r"loss_fn must return a real scalar, the mean loss, but returned shape \(3,\)",
    ),
    "params before the loss": (
        lambda: kfac.find_layers(initial(), loss_fn, batch(0)),
        r"loss_fn must be a function, but is \{.*it comes before all other arguments",
    ),
    "the rate before the loss": (
        lambda: kfac.train_step(RATE, loss_fn),
        r"loss_fn must be a function, but is 0\.05: it comes before all other arguments",
    ),
    "layers before the loss": (
        lambda: kfac.value_and_grad(layers(), loss_fn),
        r"layers must be what kfac\.find_layers returns, but is function: write layers = kfac\.find_layers\(loss_fn,",
    ),
    "layers before the rate": (
        lambda: kfac.kfac(layers(), RATE),
        r"layers must be what kfac\.find_layers returns, but is float: write layers = kfac\.find_layers\(loss_fn,",
    ),
    "params in the place of layers": (
        lambda: kfac.kfac(RATE, initial()),
        r"layers must be what kfac\.find_layers returns, but is dict: write layers = kfac\.find_layers\(loss_fn,",
    ),
    "an optimizer in the place of the rate": (
        lambda: kfac.train_step(loss_fn, optimizer()),
        r"learning_rate must be a number or a schedule, but is GradientTransformationExtraArgs",
    ),
    "layers to train_step": (
        lambda: kfac.train_step(loss_fn, RATE, layers=layers()),
        r"train_step finds the layers by itself: leave layers= out, and pass skip= and max_dim= here",
    ),
    "a rate of text": (lambda: kfac.kfac("0.05", layers()), r"learning_rate must be a number or a schedule.*'0\.05'"),
    "a negative rate": (lambda: kfac.kfac(-RATE, layers()), r"learning_rate must lie in \[0, inf\), but is -0\.05"),
    "no damping": (lambda: optimizer(damping=0), r"damping must lie in \(0, inf\), but is 0"),
    "a class of inverses": (
        lambda: optimizer(inverse=kfac.Cholesky),
        r"but is the class Cholesky: call it, Cholesky\(",
    ),
    "an inverse by name": (
        lambda: optimizer(inverse="soap"),
        r"such as kfac\.Cholesky\(\), but is of type str: 'soap'",
    ),
    "no rate": (lambda: kfac.kfac(None, layers()), r"learning_rate must be a number or a schedule, but is None"),
    "no cost": (lambda: optimizer(cost=None), r"cost must be a number, but is None"),
    "a cost that nothing goes by": (
        lambda: optimizer(step_norm=None, cost=0.2),
        r"cost=0\.2 has no effect: with step_norm=None every step has statistics. Leave cost out",
    ),
    "no refreshes in words": (
        lambda: optimizer(inverse_every="never"),
        r"inverse_every must be an integer.*'never'; kfac\.kfac takes 'auto', too, and None for kfac\.state\.refresh",
    ),
    "an option that train_step has not": (
        lambda: kfac.train_step(loss_fn, RATE, foo=1),
        r"^train_step\(\) got an unexpected keyword argument 'foo'",
    ),
    "parts of examples": (
        lambda: kfac.train_step(loss_fn, RATE, num_microbatches=3).init(initial(), batch(0)),
        r"num_microbatches=3 does not divide the 16 examples of the batch",
    ),
    "a loss in the place of the layers": (
        lambda: kfac.presets.deterministic(loss_fn),
        r"layers must be what kfac\.find_layers returns, but is function",
    ),
    "gradient of what skip leaves out": (
        lambda: kfac.find_layers(loss_fn, initial(), batch(0), skip=["^out/"], gradient=["bias", "out/kernel"]),
        r"gradient: 'out/kernel' matches no parameter left by skip=, so it has no effect",
    ),
    "kl_clip beside step_norm": (lambda: optimizer(kl_clip=1e-3), r"kl_clip=0\.001 .*: pass step_norm=None with"),
    "trust_ratio beside step_norm": (
        lambda: optimizer(trust_ratio=1.0),
        r"trust_ratio=1\.0 .*: pass step_norm=None with",
    ),
    "the old name of step_norm": (
        lambda: optimizer(trust_ratio="auto"),
        'has become step_norm="spectral", the default',
    ),
    "skip of one pattern": (
        lambda: kfac.find_layers(loss_fn, initial(), batch(0), skip="bias"),
        r"skip must be a sequence of regular expressions, but is 'bias'",
    ),
    "a cost that is a schedule": (
        lambda: optimizer(cost=lambda step: 0.1),
        r"cost must be a number, but is a function",
    ),
    "a pattern for train_step that matches nothing": (
        lambda: kfac.train_step(loss_fn, RATE, reduce=("nowhere",)).init(initial(), batch(0)),
        r"reduce: 'nowhere' matches no parameter",
    ),
    "a kernel without rows for a strict train_step": (
        lambda: kfac.train_step(doubled, RATE, strict=True).init(jnp.ones((4, 2)), jnp.ones((8, 4))),
        r"1 parameter\(s\) have no exact rows",
    ),
    "fisher by another name": (
        lambda: kfac.value_and_grad(loss_fn, layers(), fisher="true"),
        r"fisher must be one of 'empirical', 'sampled', 'expected', but is 'true'",
    ),
    "sampled targets without a key": (
        lambda: kfac.value_and_grad(loss_fn, layers(), fisher="sampled")(initial(), batch(0)),
        r"fisher='sampled' draws targets: pass a PRNG key at the call, fisher_key=jax\.random\.key\(step\)",
    ),
    "a mesh in the place of a Distribution": (
        lambda: optimizer(distribution=jax.make_mesh((1,), ("devices",))),
        r"distribution must be a kfac\.Distribution or None, but is of type Mesh",
    ),
    "specs of layers": (
        lambda: kfac.state.state_specs(layers(), initial(), "devices"),
        r"tx must be an optimizer, tx = kfac\.kfac\(learning_rate, layers\), but is Layers",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_says_what_to_write(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises((ValueError, TypeError), match=words):
        call()


def find(**options):
    return kfac.find_layers(loss_fn, initial(), batch(0), **options)


def measure(loss_fn=loss_fn, **options):
    return kfac.value_and_grad(loss_fn, options.pop("layers", layers()), **options)


def without(**keywords):
    return kfac.value_and_grad(loss_fn, layers(), statistics=False)(initial(), batch(0), **keywords)


train = functools.partial(kfac.train_step, loss_fn, RATE)


@pytest.mark.parametrize(
    ("call", "wrong", "words"),
    [
        *((find, {option: "no"}, f"{option} must be True or False, but is 'no'") for option in ("has_aux", "strict")),
        *((find, {"batch_argnums": wrong}, "batch_argnums must be the position") for wrong in (True, (), (1, 1), 1.5)),
        (find, {"skip": 3}, "skip must be a sequence of regular expressions, but is 3"),
        (find, {"reduce": ("bias",)}, "reduce: 'bias' matches no kernel of a product with exact rows"),
        (measure, {"has_aux": "no"}, "has_aux must be True or False"),
        (measure, {"loss_fn": 3}, "loss_fn must be a function, but is 3"),
        (measure, {"layers": 3}, "layers must be what kfac.find_layers returns, but is int"),
        (measure, {"num_examples": 0, "statistics": False}, "num_examples must be a positive int, but is 0"),
        (without, {"basis": 3}, "basis is of type int: pass basis=kfac.curvature.eigenbasis"),
        (train, {"verbose": "no"}, "verbose must be True or False"),
        (train, {"fisher": "x"}, "fisher must be one of 'empirical'"),
        (train, {"communication_dtype": "x"}, "communication_dtype must be one of 'float32'"),
        (train, {"strict": 1}, "strict must be True or False"),
        (train, {"max_dim": 0.5}, "max_dim must be a positive int"),
        (train, {"damping": -1}, r"damping must lie in \(0, inf\), but is -1"),
        (train, {"inverse": "soap"}, r"inverse must be a kind of inverse such as kfac\.Cholesky"),
        (train, {"step_norm": None, "cost": 0.2}, r"cost=0\.2 has no effect"),
        *((train, {name: 0}, f"{name} must be a positive int, but is 0") for name in ("num_microbatches", "subsample")),
        *((train, {name: "w"}, f"{name} must be a sequence of regular") for name in ("skip", "reduce", "gradient")),
    ],
)
def test_a_wrong_option_is_not_taken_for_another(call, wrong, words):
    with pytest.raises(ValueError, match=words):
        call(**wrong)


FORGOTTEN = r"update was called without factors.* tx\.update\(grads, opt_state, params, factors=factors\)"


def test_forgotten_factors_are_said_once():
    tx = optimizer()
    with pytest.warns(UserWarning, match=FORGOTTEN + r".*TrainState\.apply_gradients"):
        update(GRADS, "params", tx=tx)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(GRADS, "params", tx=tx)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.inject_hyperparams(lambda r: optax.chain(tx, optax.scale(r)))(r=0.5),
        lambda tx: optax.masked(tx, jax.tree.map(lambda leaf: leaf.ndim == 2, initial())),
    ],
)
def test_forgotten_factors_are_seen_inside_of_wrappers(wrap):
    with pytest.warns(UserWarning, match=FORGOTTEN):
        update(GRADS, "params", wrap=wrap)


def test_steps_that_mean_to_go_without_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update(GRADS, "params", factors=None)
        tx = optimizer()
        update(GRADS, "params", factors=STATS, tx=tx)
        update(GRADS, "params", tx=tx)
        step = kfac.train_step(loss_fn, RATE, verbose=False)
        state = step.init(initial(), batch(0))
        jax.eval_shape(lambda state: step(initial(), state, batch(0)), state)  # both programs


def test_the_age_of_the_statistics_counts_the_steps_without():
    tx, ages = optimizer(), []
    state, advance = tx.init(initial()), jax.jit(tx.update)
    for t in range(6):
        factors = measured(0)[1] if t in (2, 3) else None
        _, state = advance(measured(0)[0], state, initial(), factors=factors)
        ages.append(int(kfac.diagnostics(state)["statistics_age"]))
    assert ages == [1, 2, 0, 0, 1, 2]


def test_multi_steps_of_one_step_that_skips_some():
    wrapped = optax.MultiSteps(optimizer(), 1, should_skip_update_fn=optax.skip_not_finite)
    grads, factors = measured(0)

    @jax.jit
    def once(grads):
        return wrapped.update(grads, wrapped.init(initial()), initial(), factors=factors)[0]

    tx = optimizer()
    expected = jax.jit(tx.update)(grads, tx.init(initial()), initial(), factors=factors)[0]
    assert_close(once(grads), expected, 1e-5)
    assert not any(map(jnp.any, jax.tree.leaves(once(jax.tree.map(lambda g: g * jnp.nan, grads)))))


def test_layers_may_be_an_argument_of_a_jitted_function():
    step = jax.jit(lambda layers, params, batch: kfac.value_and_grad(loss_fn, layers)(params, batch)[1])
    assert_close(step(layers(), initial(), batch(0)), measured(0)[0], 1e-5)
    assert jax.tree.leaves(layers()) == []


def test_schedule_free_without_momentum_is_taken():
    wrap = functools.partial(contrib.schedule_free, learning_rate=RATE)
    update(GRADS, "params", factors=STATS, wrap=wrap, tx=optimizer(momentum=None))


def test_a_bias_that_its_statistics_hold_fast():
    """With moments in the basis of kernel and bias together, the bias cannot leave."""
    tx = optimizer(inverse=kfac.Ekfac())
    basis = kfac.curvature.eigenbasis(tx.init(initial()), layers())
    factors = kfac.value_and_grad(loss_fn, layers())(initial(), batch(0), basis=basis)[2]
    mask = jax.tree.map(lambda leaf: leaf.ndim == 2, initial())
    words = r"bias 'first/bias' is masked and its kernel is not.* skip=\('\^first/bias\$',\)\)"
    with pytest.raises(ValueError, match=words):
        update(GRADS, "params", factors=factors, tx=tx, wrap=lambda tx: optax.masked(tx, mask))
    assert differ(factors, jax.tree.map(jnp.zeros_like, factors))


@pytest.mark.parametrize("option", ["skip", "reduce", "gradient", "batch_argnums"])
def test_an_iterator_is_refused(option):
    """It would have ended when it was checked, and nothing would have been skipped."""
    with pytest.raises(ValueError, match=f"{option} must be .* but is <generator"):
        kfac.train_step(loss_fn, RATE, **{option: (x for x in ["bias"])})
