"""Test the mistakes of a first hour: each error names the argument, its value, and the line to write."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib

import kfac
from problem import assert_close, batch, initial, layers, loss_fn, measured, observing

RATE = 0.05
GRADS, STATS = "the gradients", "the statistics"


def optimizer(**options):
    return kfac.kfac(RATE, layers(), **options)


def update(*order, wrap=lambda tx: tx, state=None, tx=None, factors=None, **named):
    """Update an optimizer with arguments in this order, after observing `factors`. Names stand for measurements."""
    tx = wrap(tx or optimizer())
    given = {GRADS: measured(0)[0], STATS: measured(0)[1], "params": initial()}

    def value(x):
        return given[x] if isinstance(x, str) else x

    state = jax.eval_shape(tx.init, initial()) if state is None else state
    first, *rest = map(value, order)

    def step(first, state):
        state = state if factors is None else kfac.observe(state, value(factors))
        return tx.update(first, state, *rest, **{key: value(x) for key, x in named.items()})

    return jax.eval_shape(step, first, state)


def observe(state, *given):
    return jax.eval_shape(kfac.observe, state, *given)


def pair(params, batch):
    return loss_fn(params, batch), batch


def by_examples(params, batch):
    return jnp.ones(3) * loss_fn(params, batch)


def doubled(kernel, x):
    return jnp.mean((x @ jnp.exp(kernel)) ** 2)


MISTAKES = {
    "factors by position": (
        lambda: update(GRADS, "params", STATS),
        r"takes from 2 to 3 positional arguments but 4 were given",
    ),
    "factors by name": (
        lambda: optimizer().update(measured(0)[0], optimizer().init(initial()), initial(), factors=measured(0)[1]),
        r"update takes no factors: call opt_state = kfac\.observe\(opt_state, factors\) before it",
    ),
    "gradients and factors swapped": (
        lambda: update(STATS, "params"),
        r"updates are statistics, where gradients belong: opt_state = kfac\.observe\(opt_state, factors\)",
    ),
    "gradients as factors": (
        lambda: update(GRADS, "params", factors=GRADS),
        r"factors must be what kfac\.statistics returns, but is dict: write factors = kfac\.statistics\(loss_fn, lay",
    ),
    "no params": (
        lambda: update(GRADS, factors=STATS),
        r"update needs the parameters: call tx\.update\(grads, opt_state, params\)",
    ),
    "state of another optimizer": (
        lambda: update(GRADS, "params", state=optax.adam(RATE).init(initial())),
        r"opt_state holds no state of kfac\.kfac, but is of type tuple: pass what tx\.init returned",
    ),
    "statistics for another optimizer": (
        lambda: observe(optax.adam(RATE).init(initial()), measured(0)[1]),
        r"opt_state holds no state of kfac\.kfac, but is of type tuple: pass what tx\.init returned",
    ),
    "factors before the state": (
        lambda: observe(measured(0)[1], optimizer().init(initial())),
        r"opt_state holds no state of kfac\.kfac, but is of type Factors: pass what tx\.init returned",
    ),
    "params where the state belongs": (
        lambda: kfac.statistics_due(initial()),
        r"opt_state holds no state of kfac\.kfac, but is of type dict",
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
    "rules beside layers": (
        lambda: kfac.train_step(loss_fn, RATE, layers=layers(), rules={"bias": "skip"}),
        r"rules=\{'bias': 'skip'\} has no effect with layers=: pass it to kfac\.find_layers",
    ),
    "a batch beside layers": (
        lambda: kfac.train_step(loss_fn, RATE, layers=layers(), batch_argnums=1),
        r"batch_argnums=1 has no effect with layers=: pass it to kfac\.find_layers",
    ),
    "params as the layers of train_step": (
        lambda: kfac.train_step(loss_fn, RATE, layers=initial()),
        r"layers must be what kfac\.find_layers returns, but is dict",
    ),
    "strict to train_step": (
        lambda: kfac.train_step(loss_fn, RATE, strict=True),
        r"no option strict=: use layers=kfac\.find_layers\(loss_fn, params, batch, strict=\.\.\.\)",
    ),
    "a dtype to train_step": (
        lambda: kfac.train_step(loss_fn, RATE, communication_dtype="bfloat16"),
        r"no option communication_dtype=: use distribution=kfac\.Distribution\(communication_dtype=",
    ),
    "a distribution of text": (
        lambda: kfac.statistics(loss_fn, layers(), distribution="data"),
        r"distribution must be a kfac\.Distribution or None, but is 'data'",
    ),
    "a fraction for kfac": (
        lambda: kfac.kfac(RATE, layers(), statistics_fraction=1 / 4),
        r"no option statistics_fraction=: use fraction= of kfac\.statistics",
    ),
    "a rate of text": (lambda: kfac.kfac("0.05", layers()), r"learning_rate must be a number or a schedule.*'0\.05'"),
    "a negative rate": (lambda: kfac.kfac(-RATE, layers()), r"learning_rate must lie in \[0, inf\), but is -0\.05"),
    "no damping": (lambda: optimizer(damping=0), r"damping must lie in \(0, inf\), but is 0"),
    "a class of inverses": (
        lambda: optimizer(preconditioner=kfac.Cholesky),
        r"but is the class Cholesky: call it, Cholesky\(",
    ),
    "a preconditioner by name": (
        lambda: optimizer(preconditioner="soap"),
        r"such as kfac\.SOAP\(\), but is of type str: 'soap'",
    ),
    "no rate": (lambda: kfac.kfac(None, layers()), r"learning_rate must be a number or a schedule, but is None"),
    "no overhead": (lambda: optimizer(overhead=None), r"overhead must be a number, but is None"),
    "an overhead of natural_gradient": (
        lambda: kfac.train_step(loss_fn, RATE, optimizer=kfac.natural_gradient, overhead=0.2),
        r"^train_step\(\) calls .*: natural_gradient\(\) has no option overhead=",
    ),
    "an optimizer without a preconditioner": (
        lambda: kfac.train_step(loss_fn, RATE, optimizer=lambda rate, layers: optax.sgd(rate)),
        r"optimizer must return an optimizer that contains kfac\.scale_by_kfac",
    ),
    "an optimizer that is made already": (
        lambda: kfac.train_step(loss_fn, RATE, optimizer=optax.adamw(1e-3)),
        r"^train_step\(\) calls optimizer\(learning_rate, layers, \*\*options\): .* object is not callable",
    ),
    "an optimizer that takes no learning rate": (
        lambda: kfac.train_step(loss_fn, RATE, optimizer=kfac.scale_by_kfac),
        r"^train_step\(\) calls optimizer.*: scale_by_kfac\(\) takes 1 positional argument",
    ),
    "no refreshes in words": (
        lambda: optimizer(inverse_update_period="never"),
        r"inverse_update_period must be an integer.*'never'; math\.inf leaves all refreshes to kfac\.observe",
    ),
    "an option that train_step has not": (
        lambda: kfac.train_step(loss_fn, RATE, foo=1),
        r"^train_step\(\) calls optimizer.*: kfac\(\) got an unexpected keyword argument 'foo'",
    ),
    "parts of examples": (
        lambda: kfac.train_step(loss_fn, RATE, num_microbatches=3).init(initial(), batch(0)),
        r"num_microbatches=3 does not divide the 16 examples of the batch",
    ),
    "a loss in the place of the layers": (
        lambda: kfac.gauss_newton(1.0, loss_fn),
        r"layers must be what kfac\.find_layers returns, but is function",
    ),
    "gradient of what skip leaves out": (
        lambda: kfac.find_layers(loss_fn, initial(), batch(0), rules={"^out/": "skip", "out/kernel": "gradient"}),
        r"rules=\{'out/kernel': 'gradient'\} has no effect: rules before it match all its parameters",
    ),
    "kl_clip of natural_gradient": (lambda: optimizer(kl_clip=1e-3), r"kl_clip=: use kfac\.natural_gradient"),
    "trust_ratio of natural_gradient": (
        lambda: optimizer(trust_ratio="auto"),
        r'trust_ratio=: use kfac\.natural_gradient.*; "auto" is the default, leave it out',
    ),
    "step_norm of version 0.4": (
        lambda: optimizer(step_norm="spectral"),
        r'step_norm=: use kfac\.natural_gradient.*; "spectral" is the default, leave it out',
    ),
    "skip of one pattern": (
        lambda: kfac.find_layers(loss_fn, initial(), batch(0), rules="bias"),
        r"rules must be a mapping of regular expressions to .* but is 'bias'",
    ),
    "an overhead that is a schedule": (
        lambda: optimizer(overhead=lambda step: 0.1),
        r"overhead must be a number, but is a function",
    ),
    "a pattern for train_step that matches nothing": (
        lambda: kfac.train_step(loss_fn, RATE, rules={"nowhere": "reduce"}).init(initial(), batch(0)),
        r"rules=\{'nowhere': 'reduce'\} matches no parameter",
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


def small_model(module):
    def loss(module, x):
        return jnp.mean(module(x) ** 2)

    return kfac.train_step(loss, RATE).init(module, jnp.ones((8, 3)))


def first_init(loss, *arguments):
    return kfac.train_step(loss, RATE).init(initial(), *arguments)


MISTAKES |= {
    f"{name}= of another optimizer": (
        lambda name=name: optimizer(**{name: 0.9}),
        rf"kfac\(\) has no option {name}=: use",
    )
    for name in ("b1", "b2", "eps", "mask", "clip_norm", "mesh", "axis_name", "owner_axes")
}
MISTAKES |= {
    "mask= of train_step": (lambda: kfac.train_step(loss_fn, RATE, mask=True), r"train_step\(\).*weight_decay_mask="),
    "a batch on another axis": (
        lambda: first_init(lambda params, x: loss_fn(params, (x.T, jnp.zeros(16, int))), batch(0)[0].T),
        r"the number of examples is not clear.*num_examples= to train_step",
    ),
    "a size written into a reshape": (
        lambda: first_init(lambda params, x: loss_fn(params, (x.reshape(16, 3), jnp.zeros(16, int))), batch(0)[0]),
        r"cannot reshape.*num_examples= to train_step",
    ),
    "the batch before the parameters": (
        lambda: kfac.train_step(lambda batch, params: loss_fn(params, batch), RATE).init(batch(0), initial()),
        r"must be a real float. Parameters are the first argument",
    ),
    "the state of scale_by_kfac": (
        lambda: update(GRADS, "params", state=kfac.scale_by_kfac(layers()).init(initial())),
        r"opt_state is of scale_by_kfac alone: pass what init of this optimizer returned",
    ),
    "a model as parameters": (
        lambda: small_model(jax.tree_util.Partial(jnp.dot, jnp.tanh)),
        r"must be an array, but is of type.*eqx.partition",
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


def statistics(**options):
    keywords = {name: options.pop(name) for name in ("basis", "fisher_key") if name in options}
    return kfac.statistics(loss_fn, layers(), **options)(initial(), batch(0), **keywords)


train = functools.partial(kfac.train_step, loss_fn, RATE)


@pytest.mark.parametrize(
    ("call", "wrong", "words"),
    [
        *((find, {option: "no"}, f"{option} must be True or False, but is 'no'") for option in ("has_aux", "strict")),
        *((find, {"batch_argnums": wrong}, "batch_argnums must be the position") for wrong in (True, (), (1, 1), 1.5)),
        (find, {"rules": 3}, "rules must be a mapping of regular expressions to .* but is 3"),
        (
            find,
            {"rules": {"bias": "reduce"}},
            r"rules=\{'bias': 'reduce'\} matches no kernel of a product with exact rows",
        ),
        (measure, {"has_aux": "no"}, "has_aux must be True or False"),
        (measure, {"loss_fn": 3}, "loss_fn must be a function, but is 3"),
        (measure, {"layers": 3}, "layers must be what kfac.find_layers returns, but is int"),
        (measure, {"num_examples": 0}, "num_examples must be a positive int, but is 0"),
        (statistics, {"num_examples": 0}, "num_examples must be a positive int, but is 0"),
        (statistics, {"fraction": 4}, r"fraction must lie in \(0, 1\], but is 4"),
        (statistics, {"basis": 3}, "basis is of type int: pass basis=kfac.curvature.eigenbasis"),
        (train, {"verbose": "no"}, "verbose must be True or False"),
        (train, {"fisher": "x"}, "fisher must be one of 'empirical'"),
        (kfac.Distribution, {"communication_dtype": "x"}, "communication_dtype must be one of 'float32'"),
        (find, {"max_factor_dim": 0.5}, "max_factor_dim must be a positive int"),
        (train, {"damping": -1}, r"damping must lie in \(0, inf\), but is -1"),
        (train, {"preconditioner": "soap"}, r"preconditioner must be a BlockPreconditioner such as kfac\.SOAP"),
        (train, {"num_microbatches": 0}, "num_microbatches must be a positive int, but is 0"),
        (train, {"statistics_fraction": 0.3}, "statistics_fraction must be 1 over an integer, such as 1/3, but is 0.3"),
        (train, {"rules": "w"}, "rules must be a mapping of regular"),
    ],
)
def test_a_wrong_option_is_not_taken_for_another(call, wrong, words):
    with pytest.raises(ValueError, match=words):
        call(**wrong)


@pytest.mark.slow
def test_the_age_of_the_statistics_counts_the_steps_without():
    tx, ages = optimizer(), []
    state, advance = tx.init(initial()), jax.jit(observing(tx))
    for t in range(6):
        factors = measured(0)[1] if t in (2, 3) else None
        _, state = advance(measured(0)[0], state, initial(), factors=factors)
        ages.append(int(kfac.diagnostics(state)["statistics_age"]))
    assert ages == [1, 2, 0, 0, 1, 2]


@pytest.mark.slow
def test_multi_steps_of_one_step_that_skips_some():
    wrapped = optax.MultiSteps(optimizer(), 1, should_skip_update_fn=optax.skip_not_finite)
    grads, factors = measured(0)

    @jax.jit
    def once(grads):
        return wrapped.update(grads, kfac.observe(wrapped.init(initial()), factors), initial())[0]

    tx = optimizer()
    expected = jax.jit(observing(tx))(grads, tx.init(initial()), initial(), factors=factors)[0]
    assert_close(once(grads), expected, 1e-5)
    assert not any(map(jnp.any, jax.tree.leaves(once(jax.tree.map(lambda g: g * jnp.nan, grads)))))


def test_layers_may_be_an_argument_of_a_jitted_function():
    step = jax.jit(lambda layers, params, batch: kfac.value_and_grad(loss_fn, layers)(params, batch)[1])
    assert_close(step(layers(), initial(), batch(0)), measured(0)[0], 1e-5)
    assert jax.tree.leaves(layers()) == []


def test_schedule_free_without_momentum_is_taken():
    wrap = functools.partial(contrib.schedule_free, learning_rate=RATE)
    update(GRADS, "params", factors=STATS, wrap=wrap, tx=optimizer(momentum=0.0, adaptive_layer_rates=False))


@pytest.mark.parametrize("option", ["rules", "batch_argnums"])
def test_an_iterator_is_refused(option):
    """Check iterators, which the check itself would exhaust, so that nothing would be skipped."""
    with pytest.raises(ValueError, match=f"{option} must be .* but is <generator"):
        kfac.train_step(loss_fn, RATE, **{option: (x for x in ["bias"])})


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (1.1e-3, r"learning_rate=0\.0011 is of AdamW's size.*Start with 0\.1"),
        (
            kfac.schedules.warmup_linear_decay(2e-3, 700),
            r"peak of the learning rate's schedule, 0\.0019, is of Adam",
        ),
        (lambda step: 0.1 * (step // 10**8), "schedule is zero in all steps that were looked at"),
    ],
)
def test_kfac_warns_once_of_a_rate_of_adamws_size_or_of_zero(rate, words):
    loss_fn = lambda w, x: jnp.mean(jnp.square(x @ w))  # noqa: E731
    w, x = jnp.ones((3, 2)), jnp.ones((8, 3))
    with pytest.warns(UserWarning, match=words) as warned:
        step = kfac.train_step(loss_fn, rate, verbose=False)
        jax.eval_shape(step, w, step.init(w, x), x)
    assert len(warned) == 1


@pytest.mark.parametrize(
    "rate",
    [
        0.0,
        0.003,
        jnp.float32(0.1),
        jnp.array(1e-4),  # one step of a schedule, as optax.inject_hyperparams passes it
        optax.warmup_cosine_decay_schedule(0.0, 0.05, 1000, 10_000),
        optax.warmup_cosine_decay_schedule(0.0, 0.05, 3, 5),
        lambda step: 0.1 if step < 3 else 0.2,
        optax.piecewise_constant_schedule(1e-4, {10_000: 100.0}),
    ],
    ids=["zero", "bound", "array", "array of a step", "warm-up", "short warm-up", "steps", "late rise"],
)
def test_kfac_does_not_warn_of_other_rates(rate):
    kfac.kfac(rate, kfac.Layers((), ()))
    jax.jit(lambda rate: kfac.kfac(lambda step: rate * step, kfac.Layers((), ())) and rate)(1e-5)
