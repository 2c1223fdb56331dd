"""Test the step lengths of `kfac.kfac`, and its damping in units of each block.

Some tests use internals of `_optimizer.step_scaling` and of damping: numbers that a step shows only as products.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kfac
from kfac._curvature.preconditioner import damping_of_blocks
from kfac._optimizer.step_scaling import Kernels, Stack, normalize_step, spectral_norm
from kfac.types import Kronecker, Unitwise
from problem import assert_close, differ, initial, layers, measured, plain_kfac, run, stepper

INVERSES = [kfac.Cholesky(), kfac.Eigh()]


def one_update(tx, params=None, grads=None, factors=None, seed=0):
    given = measured(seed)
    params = initial() if params is None else params
    grads, factors = given[0] if grads is None else grads, given[1] if factors is None else factors
    return jax.jit(lambda *given: stepper(tx)(given[0], tx.init(params), params, given[1])[2])(grads, factors)


def singular(matrix):
    """Return the largest singular value."""
    return np.linalg.svd(np.asarray(matrix, np.float64), compute_uv=False)[..., 0]


@pytest.mark.slow
def test_the_bias_is_scaled_like_its_kernel():
    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"] + params["bias"]) - 1))

    params = {"kernel": jnp.ones((3, 4)), "bias": jnp.zeros(4)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 3)), jnp.float32)
    found = kfac.find_layers(loss, params, x)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))(params, x)
    update = one_update(kfac.kfac(0.5, found, momentum=0.0, preconditioner=kfac.Cholesky()), params, grads, factors)
    np.testing.assert_allclose(singular(update["kernel"]), 0.5 * (4 / 3) ** 0.5, rtol=1e-3)
    relative = kfac.Cholesky(scale_damping=True)
    curved = plain_kfac(0.5, found, momentum=None, preconditioner=relative, damping=0.1)
    direction = one_update(curved, params, grads, factors)
    ratios = [np.ravel(update[name] / direction[name]) for name in params]
    np.testing.assert_allclose(np.concatenate(ratios), ratios[0][0], rtol=1e-4)


CONVOLUTIONS = {
    "3 x 3": ((6, 6), (3, 3), {}, 9),
    "with stride 2": ((6, 6), (3, 3), {"window_strides": (2, 2)}, 2.25),
    "along one axis": ((6, 6), (1, 4), {"window_strides": (1, 3)}, 4 / 3),
    "dilated": ((6, 6), (3, 3), {"rhs_dilation": (2, 2)}, 9),
    "of channels by themselves": ((6, 6), (3, 3), {"feature_group_count": 4}, 9),
    "transposed": ((3, 3), (4, 4), {"lhs_dilation": (2, 2), "padding": ((2, 2), (2, 2))}, 16),
    "of disjoint patches": ((6, 6), (3, 3), {"window_strides": (3, 3)}, 1),
    "of disjoint patches, transposed": ((3, 3), (2, 2), {"lhs_dilation": (2, 2), "padding": ((1, 1), (1, 1))}, 4),
    "of the whole image": ((6, 6), (6, 6), {"padding": "VALID"}, 1),
    "1 x 1 with stride 2": ((6, 6), (1, 1), {"window_strides": (2, 2)}, 1),
}


def convolved(window_strides=(1, 1), padding="SAME", **options):
    """Return a loss over a single convolution."""

    def loss(params, images):
        dimensions = ("NHWC", "HWIO", "NHWC")
        out = jax.lax.conv_general_dilated(
            images, params["kernel"], window_strides, padding, dimension_numbers=dimensions, **options
        )
        return jnp.mean(jnp.square(jnp.tanh(out) - 1))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_update_moves_a_convolution_further_by_how_many_windows_hold_an_input(name):
    size, window, options, overlap = CONVOLUTIONS[name]
    groups, loss = options.get("feature_group_count", 1), convolved(**options)
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(*window, 4 // groups, 8)), jnp.float32)
    images = jnp.asarray(rng.normal(size=(8, *size, 4)), jnp.float32)
    found = kfac.find_layers(loss, {"kernel": kernel}, images)
    assert found[0].overlap == overlap
    assert kfac.find_layers(loss, {"kernel": kernel}, images, rules={"kernel": "gradient"})[0].overlap == 1
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))({"kernel": kernel}, images)
    update = one_update(kfac.kfac(0.1, found, momentum=0.0), {"kernel": kernel}, grads, factors)["kernel"]
    matrices = jnp.moveaxis(jnp.reshape(update, (-1, groups, 8 // groups)), 1, 0)
    length = 0.1 * np.sqrt(overlap * max(1, 8 / groups / (kernel.size // 8)))
    np.testing.assert_allclose(spectral_norm(matrices), length, rtol=1e-4)
    # The estimate is at most the largest singular value, and far below it only if others are nearly as large.
    assert np.all((singular(matrices) > length * (1 - 1e-5)) & (singular(matrices) < 1.2 * length))


def test_layers_whose_windows_overlap_otherwise_are_others_but_images_of_another_size_are_taken():
    loss = convolved()
    params = {"kernel": jnp.ones((3, 3, 4, 8))}
    large, small = jnp.ones((8, 6, 6, 4)), jnp.ones((8, 2, 2, 4))
    found = kfac.find_layers(loss, params, large)
    # A jitted function of layers must not use another network's step lengths.
    assert found != kfac.find_layers(convolved((2, 2)), params, large)
    assert (found[0].overlap, kfac.find_layers(loss, params, small)[0].overlap) == (9, 4)
    jax.eval_shape(kfac.value_and_grad(loss, found), params, small)


def test_all_else_moves_by_a_root_mean_square():
    update = one_update(kfac.kfac(0.5, layers(), momentum=0.0))
    np.testing.assert_allclose(singular(update["out"]["kernel"]), 0.5, rtol=0.02)
    for leaf in (update["norm"]["scale"], update["norm"]["shift"], update["offset"]):
        np.testing.assert_allclose(np.sqrt(np.mean(np.square(leaf))), 0.5 * 0.1, rtol=1e-5)
    np.testing.assert_allclose(update["temperature"], -0.5 * measured(0)[0]["temperature"], rtol=1e-5)  # skipped


def test_a_vector_moves_less_far_if_it_is_copied_to_several_positions():
    def loss(params, x):
        token = jnp.broadcast_to(params["token"], (len(x), 4, 5))
        hidden = jnp.concatenate([x + params["everywhere"], token], 1) + params["table"]
        return jnp.mean(jnp.sum(jnp.square(jnp.tanh(hidden) - 1), (1, 2)))

    params = {"token": jnp.ones(5), "everywhere": jnp.zeros(5), "table": jnp.zeros((13, 5))}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 9, 5)), jnp.float32)
    found = kfac.find_layers(loss, params, x)
    assert {layer.kind for layer in found} == {"diagonal"}
    assert found["token"].overlap == 1 / 4
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))(params, x)
    update = one_update(kfac.kfac(0.5, found, momentum=0.0), params, grads, factors)
    for name, positions in {"token": 4, "everywhere": 1, "table": 1}.items():
        length = np.sqrt(np.mean(np.square(update[name])))
        np.testing.assert_allclose(length, 0.5 * 0.1 / positions**0.5, rtol=1e-5)


def test_directions_are_those_of_the_curvature():
    auto = one_update(kfac.kfac(0.5, layers(), momentum=0.0, preconditioner=kfac.Cholesky()))
    raw = one_update(kfac.scale_by_kfac(layers(), damping=0.1, preconditioner=kfac.Cholesky(scale_damping=True)))
    flat = [np.ravel(tree["out"]["kernel"]) for tree in (auto, raw)]
    cosine = flat[0] @ flat[1] / np.linalg.norm(flat[0]) / np.linalg.norm(flat[1])
    np.testing.assert_allclose(cosine, -1, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", INVERSES)
def test_nothing_depends_on_the_scale_of_the_loss(preconditioner):
    grads, factors = measured(0)
    scaled = {}
    for name, block in factors.items():  # gradients times 100, their second moments times 10,000
        fields = Kronecker(block.A, 1e4 * block.G) if isinstance(block, Kronecker) else Unitwise(1e4 * block.F)
        scaled[name] = fields
    tx = kfac.kfac(0.1, layers(), preconditioner=preconditioner)
    larger = one_update(tx, grads=jax.tree.map(lambda g: 100 * g, grads), factors=kfac.Factors(scaled))
    skipped = {"temperature": larger["temperature"]}
    assert_close(larger, one_update(tx) | skipped, 1e-4)
    plain = plain_kfac(0.1, layers(), preconditioner=preconditioner)
    assert differ(one_update(plain, grads=grads, factors=kfac.Factors(scaled)), one_update(plain))


def test_each_copy_of_a_stacked_kernel_has_its_own_length():
    def loss(params, x):
        def layer(x, kernel):
            return jnp.tanh(x @ kernel), None

        return jnp.mean(jnp.square(jax.lax.scan(layer, x, params["kernels"])[0] - 1))

    rng = np.random.default_rng(0)
    params = {"kernels": jnp.asarray(rng.normal(size=(3, 5, 5)) * np.array([0.1, 1, 2])[:, None, None], jnp.float32)}
    x = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
    found = kfac.find_layers(loss, params, x)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))(params, x)
    update = one_update(kfac.kfac(0.1, found, momentum=0.0), params, grads, factors)
    np.testing.assert_allclose(singular(update["kernels"]), 0.1, rtol=0.02)


def test_a_kernel_before_a_normalisation_is_turned_only():
    def loss(params, x, y):
        h = x @ params["kernel"]
        h = (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-12)
        return jnp.mean(jnp.square(jnp.tanh(h) @ params["head"] - y))

    rng = np.random.default_rng(0)
    shapes = {"kernel": (6, 4), "head": (4, 2)}
    params = {name: jnp.asarray(3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    x, y = (jnp.asarray(rng.normal(size=(16, d)), jnp.float32) for d in (6, 2))
    found = kfac.find_layers(loss, params, x, y)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))(params, x, y)
    update = one_update(kfac.kfac(0.1, found, momentum=0.0), params, grads, factors)
    kernel, moved = params["kernel"], update["kernel"]
    np.testing.assert_allclose(singular(moved), 0.1, rtol=0.02)
    assert abs(np.vdot(kernel, moved)) < 1e-5 * np.linalg.norm(kernel) * np.linalg.norm(moved)
    np.testing.assert_allclose(singular(update["head"]), 0.1, rtol=0.02)


def test_an_update_along_a_kernel_that_may_only_turn_is_no_long_step():
    """Check that the remainder, which is rounding error, is not scaled to a full step."""
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(1, 40, 30)), jnp.float32)
    gradient = rng.normal(size=(1, 40, 30))
    gradient = jnp.asarray(gradient - np.vdot(gradient, kernel) / np.vdot(kernel, kernel) * kernel)
    for left in (0, 1e-6, 0.1):
        update = kernel + left * gradient
        stack = Stack(update, kernel, gradient, Kernels(jnp.array([1200]), jnp.array([40]), jnp.array([1.0])))
        length = singular(normalize_step({"": stack}, None)[""][0])
        low, high = {0: (0, 1e-3), 1e-6: (0, 1e-2), 0.1: (0.999, 1.1)}[left]
        assert low <= length < high


def test_what_has_no_gradient_any_more_does_not_move():
    """Check that a momentum without a gradient does not move its block.

    Otherwise it would be scaled to a full step, however small it is.
    """
    tx = kfac.kfac(0.1, layers())
    step, params, state = stepper(tx), initial(), tx.init(initial())
    grads, factors = measured(0)
    params, state, update = step(grads, state, params, factors)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(update))
    _, _, update = step({**grads, "out": jax.tree.map(jnp.zeros_like, grads["out"])}, state, params, factors)
    assert not np.any(update["out"]["kernel"]) and np.any(update["first"]["kernel"])


def test_rows_of_a_table_that_no_one_reads_do_not_lengthen_the_step_of_the_others():
    def loss(params, tokens):
        return jnp.mean(jnp.square(jnp.tanh(params["table"][tokens]).sum(-1) - 1))

    lengths = []
    for rows in (10, 1000):
        params = {"table": jnp.asarray(np.random.default_rng(0).normal(size=(rows, 4)), jnp.float32)}
        found = kfac.find_layers(loss, params, jnp.arange(10))
        _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))(params, jnp.arange(10))
        update = one_update(kfac.kfac(0.5, found), params, grads, factors)["table"]
        lengths.append(np.linalg.norm(update[:10]))
        assert not np.any(update[10:])
    np.testing.assert_allclose(lengths, 0.5 * 0.1 * 40**0.5, rtol=1e-5)


@pytest.mark.parametrize("diagonal", [False, True])
def test_relative_damping_against_dense_solves(diagonal):
    rng = np.random.default_rng(0)
    a, g = (rng.normal(size=(3 * d, d)) for d in (4, 3))
    a, g = 50 * a.T @ a, 1e-6 * g.T @ g
    a = np.diag(np.diag(a)) if diagonal else a
    factors = Kronecker(jnp.asarray(np.diag(a) if diagonal else a)[None], jnp.asarray(g)[None])
    mean = np.trace(a) / 4 * np.trace(g) / 3
    v = rng.normal(size=(3, 4))
    preconditioner = kfac.Eigh("float32", scale_damping=True)
    amount = damping_of_blocks(preconditioner, factors, jnp.asarray(0.2))
    np.testing.assert_allclose(amount, [0.2 * mean], rtol=1e-5)
    kept, _ = jax.jit(preconditioner.refresh)(preconditioner.init(factors), factors, amount)
    dense = np.linalg.solve(np.kron(a, g) + 0.2 * mean * np.eye(12), v.ravel("F")).reshape(3, 4, order="F")
    np.testing.assert_allclose(preconditioner.apply(kept, jnp.asarray(v)[None], jnp.asarray(0.2))[0], dense, rtol=2e-3)
    # Cholesky splits the same amount between the factors: sqrt(l) in units of each factor.
    preconditioner = kfac.Cholesky("float32", scale_damping=True)
    kept, _ = jax.jit(preconditioner.refresh)(preconditioner.init(factors), factors, amount)
    damped = [x + np.sqrt(0.2) * np.trace(x) / len(x) * np.eye(len(x)) for x in (g, a)]
    split = np.linalg.solve(damped[0], v) @ np.linalg.inv(damped[1])
    np.testing.assert_allclose(preconditioner.apply(kept, jnp.asarray(v)[None], jnp.asarray(0.2))[0], split, rtol=2e-3)


def test_relative_damping_of_small_blocks():
    f = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 2, 2)), jnp.float32) ** 2
    amount = damping_of_blocks(kfac.Cholesky(scale_damping=True), Unitwise(f), jnp.asarray(0.1))
    np.testing.assert_allclose(amount, 0.1 * np.asarray(f)[:, :, [0, 1], [0, 1]].mean((1, 2)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [kfac.Cholesky(scale_damping=True), kfac.Eigh(scale_damping=True)])
def test_the_operator_has_the_same_damping(preconditioner):
    tx = kfac.scale_by_kfac(layers(), damping=0.1, preconditioner=preconditioner)
    _, state, updates = run(tx, steps=1)
    expected = kfac.curvature.block_operator(layers(), state).inv() @ measured(0)[0]
    expected = {**expected, "temperature": measured(0)[0]["temperature"]}  # skipped
    assert_close(updates, expected, 1e-4)
    if isinstance(preconditioner, kfac.Eigh):  # `Eigh()` without `scale_damping` takes the units of the state
        other = kfac.curvature.block_operator(layers(), state, preconditioner=kfac.Eigh()).inv() @ measured(0)[0]
        assert_close(other["out"], expected["out"], 1e-4)


@pytest.mark.slow
def test_kfac_is_not_natural_gradient_and_its_damping_counts():
    assert differ(run(kfac.kfac(0.1, layers()))[0], run(plain_kfac(0.1, layers(), nesterov=True))[0])
    assert differ(run(kfac.kfac(0.1, layers()))[0], run(kfac.kfac(0.1, layers(), damping=1.0))[0])


def test_kfac_refuses_what_belongs_to_natural_gradient():
    for option in ({"kl_clip": 1e-3}, {"trust_ratio": 1.0}, {"step_norm": None}):
        words = rf"^kfac\(\) has no option {next(iter(option))}=: use kfac\.natural_gradient"
        with pytest.raises(TypeError, match=words):
            kfac.kfac(0.1, layers(), **option)
        with pytest.raises(TypeError, match=r"^train_step.*optimizer=kfac\.natural_gradient"):
            kfac.train_step(lambda params, batch: 0.0, 0.1, **option)
    adaptive = kfac.adaptive_damping(lambda damping: kfac.kfac(1.0, layers(), damping=damping), 1e-2)
    with pytest.raises(ValueError, match=r"use kfac\.natural_gradient instead of kfac\.kfac"):
        adaptive.init(initial())
    relative = kfac.Eigh(scale_damping=True)
    adaptive = kfac.adaptive_damping(
        lambda damping: plain_kfac(1.0, layers(), damping=damping, preconditioner=relative), 1e-2
    )
    with pytest.raises(ValueError, match="one damping for all layers"):
        adaptive.init(initial())
    with pytest.raises(ValueError, match="trust_ratio must be a number"):
        kfac.natural_gradient(0.1, layers(), trust_ratio="auto", lr_in_momentum=False)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx = kfac.kfac(0.1, layers())
        tx.update(measured(0)[0], kfac.observe(tx.init(initial()), measured(0)[1]))


def test_it_is_the_same_in_a_chain_and_under_masks():
    """Hide whole layers with `optax.masked`. Their updates pass through, and the others have their lengths."""
    mask = {**jax.tree.map(lambda _: True, initial()), "out": {"kernel": False}}
    tx = optax.masked(kfac.kfac(0.5, layers(), momentum=0.0), mask)
    update = one_update(tx)
    np.testing.assert_allclose(update["out"]["kernel"], measured(0)[0]["out"]["kernel"])
    np.testing.assert_allclose(np.linalg.norm(update["offset"]), 0.5 * 0.1 * 2, rtol=1e-5)


def words_loss(params, batch):
    """Compute a loss over words, kernels before a normalisation, kernels with biases, and a free parameter.

    The scale of a kernel before a normalisation does not matter.
    """
    ids, labels = batch
    x = params["table"][ids]
    for kernel in params["before"]:
        x = x @ kernel
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        x = jnp.tanh(x * params["scale"] + params["shift"])
    for layer in params["after"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean() + 0.1 * params["free"] ** 2


def words_parameters():
    rng = np.random.default_rng(0)
    kernels = [rng.normal(size=(6, 6)) / 2 for _ in range(6)]
    return {
        "table": rng.normal(size=(50, 6)),
        "before": kernels[:4],
        "after": [{"kernel": kernel, "bias": rng.normal(size=6)} for kernel in kernels[4:]],
        "scale": np.ones(6), "shift": rng.normal(size=6), "free": np.float64(1),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("trust_ratio", "devices"), [(None, 3), (0.05, 4)])
def test_gradients_may_arrive_local(trust_ratio, devices, x64):
    """Check that eighteen steps match a single device, though no device has the whole batch's gradient.

    Rounding errors grow with the steps. The parameters differ by 1e-16 after three steps, by 1e-12 after eighteen, and
    by 1e-9 after thirty.
    """
    rng = np.random.default_rng(1)
    batches = [(rng.integers(0, 50, 12), rng.integers(0, 6, 12)) for _ in range(3)]
    params = jax.tree.map(jnp.asarray, words_parameters())
    found = kfac.find_layers(words_loss, params, batches[0], rules={"free": "skip"})
    assert {layer.kind for layer in found} == {"embedding", "dense", "unitwise", "skipped"}
    options = {
        "inverse_update_period": 3,
        "weight_decay": 0.1,
        "preconditioner": kfac.Cholesky(),
    }
    make = kfac.kfac if trust_ratio is None else functools.partial(plain_kfac, nesterov=True, trust_ratio=trust_ratio)

    def trained(distribution, mapped=lambda step, specs: step):
        tx = make(0.02, found, distribution=distribution, **options)
        specs = kfac.state.state_specs(tx, params, "devices")

        def step(params, state, batch):
            _, grads, factors = kfac.value_and_grad(words_loss, found)(params, batch)
            state = kfac.observe(state, factors)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        own = params
        state = jax.jit(mapped(tx.init, ((P(),), specs)))(own)
        step = jax.jit(mapped(step, ((P(), specs, P("devices")), (P(), specs))))
        for k in range(18):
            own, state = jax.block_until_ready(step(own, state, batches[k % 3]))
        return own, state

    def over_devices(fn, specs):
        mesh = jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        return jax.shard_map(fn, mesh=mesh, in_specs=specs[0], out_specs=specs[1])

    expected, alone = trained(kfac.Distribution())
    several, state = trained(None, over_devices)
    assert differ(expected, params)
    assert_close(several, expected, 1e-10)
    assert jax.tree.structure(jax.eval_shape(kfac.state.gather_state, state)) == jax.tree.structure(alone)


@pytest.mark.slow
def test_spectral_norms_of_steps(x64):
    """Check by SVD that a step's largest singular value is the promised length or somewhat more."""
    rng = np.random.default_rng(0)
    shapes = {"wide": (6, 24), "b": (24,), "tall": (24, 5), "conv": (3, 3, 1, 4)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    images = jnp.asarray(rng.normal(size=(16, 4, 4, 1)))

    def loss_fn(params, images):
        dims = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(images, params["conv"], (1, 1), "SAME", dimension_numbers=dims)
        x = jnp.tanh(y).mean((1, 2)) @ jnp.eye(4, 6)
        return jnp.mean((jnp.tanh(x @ params["wide"] + params["b"]) @ params["tall"] - 1) ** 2)

    promised = {"wide": 2.0, "tall": 1.0, "conv": 3.0}  # sqrt(overlap max(1, d_out / d_in)), with overlap 9
    found = kfac.find_layers(loss_fn, params, images, max_factor_dim=64)
    step = kfac.train_step(loss_fn, 0.1, layers=found, adaptive_layer_rates=False, verbose=False)
    state = step.init(params, images)
    for _ in range(3):
        new, state, _ = step(params, state, images)
        for name, length in promised.items():
            change = np.asarray(new[name] - params[name]).reshape(-1, params[name].shape[-1])
            found = np.linalg.svd(change, compute_uv=False)[0] / 0.1
            assert length * (1 - 1e-9) <= found <= 1.1 * length, (name, found)
        params = new


def test_the_spectral_norm_of_zeros_of_equal_values_and_of_small_numbers(x64):
    orthogonal = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))[0]
    stack = jnp.stack([jnp.zeros((12, 12)), jnp.asarray(orthogonal), jnp.full((12, 12), 1e-30)])
    np.testing.assert_allclose(spectral_norm(stack), [0, 1, 12e-30], rtol=1e-6, atol=1e-40)


def test_spectral_norms_of_large_matrices_stay_in_range():
    """Check that vectors do not overflow in float32, as they are not normalised between iterations."""
    d = 2048
    stack = jnp.stack([jnp.eye(d), jnp.ones((d, d)), 1e-3 * jnp.eye(d)])
    np.testing.assert_allclose(spectral_norm(stack), [1, d, 1e-3], rtol=1e-5)


def test_a_bound_on_the_error_of_spectral_norms(x64):
    """Check that norms are at most a tenth too small, for random, low-rank, orthogonal and nearly orthogonal steps."""
    rng = np.random.default_rng(0)
    gaussian = rng.normal(size=(4, 96, 64))
    low_rank = rng.normal(size=(4, 96, 3)) @ rng.normal(size=(4, 3, 64))
    u, _, vt = np.linalg.svd(gaussian, full_matrices=False)
    spiked = (u * np.r_[4 * np.ones(2), np.ones(62)]) @ vt
    for stack in (gaussian, low_rank, spiked, u @ vt):
        ratio = jax.jit(spectral_norm)(jnp.asarray(stack)) / singular(stack)
        assert np.all((ratio > 0.9) & (ratio <= 1 + 1e-9)), ratio


@pytest.mark.slow
def test_pieces_of_a_kernel_are_scaled_alike_and_no_further_than_the_kernel(x64):
    """Cut the kernel in four by `max_factor_dim`. The bound is the root of the number of pieces."""

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["kernel"]) - 1))

    rng = np.random.default_rng(0)
    params = {"kernel": jnp.asarray(rng.normal(size=(48, 12)))}
    x = jnp.asarray(rng.normal(size=(8, 48)))
    found = kfac.find_layers(loss, params, x, max_factor_dim=12)
    assert found[0].num_blocks == (4, 1)
    _, grads, factors = jax.jit(kfac.value_and_grad(loss, found))(params, x)
    length = singular(one_update(kfac.kfac(0.1, found, momentum=0.0), params, grads, factors)["kernel"])
    assert 0.1 / 2 < length < 0.1 * 1.1
    preconditioner = kfac.Cholesky(scale_damping=True)
    curved = plain_kfac(0.1, found, momentum=None, preconditioner=preconditioner, damping=0.1)
    txs = (kfac.kfac(0.1, found, momentum=0.0, preconditioner=preconditioner), curved)
    step, direction = (one_update(tx, params, grads, factors)["kernel"] for tx in txs)
    np.testing.assert_allclose(step, direction * (step[0, 0] / direction[0, 0]), rtol=1e-9)
