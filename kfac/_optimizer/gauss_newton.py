"""Gauss-Newton steps: each step minimises a quadratic model of the batch's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from kfac._capture.outputs import marked
from kfac._checks import check, check_count, check_layers, check_number
from kfac._curvature.eigh import Eigh
from kfac._layers import Layers
from kfac._linalg import exact_product
from kfac._mesh import device_axes, replicated
from kfac._optimizer.adaptive_damping import PredictingState, adaptive_damping
from kfac._optimizer.scale_by_kfac import scale_by_kfac
from kfac._optimizer.step_scaling import ScalarOrSchedule, value_at

Product = Callable[[Array], Array]

CORRECTIONS = 4  # of an exact step


def gauss_newton(
    learning_rate: ScalarOrSchedule,
    layers: Layers,
    *,
    iterations: int = 6,
    min_gain: float = 0.0,
    factor_ema_decay: ScalarOrSchedule = 0.0,
    damping: float = 1.0,
    min_damping: float = 0.1,
    num_examples: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer whose steps minimise a quadratic model of the loss.

    It takes the fewest steps of the three optimizers, but a step costs several gradients. Use it for physics, for
    whole data sets, and for batches so large that the number of steps matters more than their cost.

    The step is `learning_rate * s`, where `s` approximately minimises a quadratic model of the batch's loss `h` with
    the *whole* Gauss-Newton matrix `F`, including the curvature between layers:

        h + <grad h, s> + <s, (F + l I) s> / 2

    First, the optimizer finds the best linear combination of K-FAC's direction and the last step, which chooses the
    rate and the momentum (Martens & Grosse 2015, section 7). Then `iterations` steps of conjugate gradients follow,
    preconditioned by K-FAC's inverse (Martens 2010). A product with `F` takes a forward-mode derivative and a backward
    pass.

    The damping `l` is a multiple of the loss's absolute value, and K-FAC's blocks have the same damping. The multiple
    follows the Levenberg-Marquardt rule of `adaptive_damping`. A step after which the batch's loss is larger is
    rejected.

    **Minibatches.** The loss marks its output, see `mark_output`. A batch should hold at least a tenth of the data::

        def loss_fn(params, batch):
            x, labels = batch
            logits = kfac.mark_output(network(params, x), "categorical")
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        rate = optax.linear_schedule(1.0, 0.0, num_steps)
        options = {"factor_ema_decay": 0.9, "damping": 0.1, "min_damping": 0.01}
        step = kfac.train_step(loss_fn, rate, optimizer=kfac.gauss_newton, fisher="sampled", **options)
        opt_state = step.init(params, batch)
        params, opt_state, loss = step(
            params, opt_state, batch, fisher_key=jax.random.key(0)
        )

    Here, products with `F` use the same examples as the statistics, by default a quarter of the batch.

    **The whole data set in every step.** Use a rate of 1, `fisher="expected"` and a loss whose minimum is near zero::

        def loss_fn(params, x):
            return 0.5 * jnp.mean(jnp.sum(kfac.mark_output(network(params, x), "residual") ** 2, -1))

        x = batch[0]
        layers = kfac.find_layers(loss_fn, params, x)
        optimizer = kfac.gauss_newton(1.0, layers)
        opt_state = optimizer.init(params)
        measure = kfac.value_and_grad(loss_fn, layers, fisher="expected")
        loss, grads, factors = measure(params, x, fisher_key=jax.random.key(0))
        opt_state = kfac.observe(opt_state, factors)
        value_fn = lambda params: loss_fn(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params, value_fn=value_fn)

    `update(grads, state, params, *, value_fn, curvature_fn=value_fn, jacobian_fn=None)` needs the batch's loss as a
    function of the parameters alone. `curvature_fn` is the mean loss over a part of the batch. Products with `F` use
    this part, which saves most of their time. To use several devices, place the parameters and the batch on a mesh.

    **Exact steps.** If the loss is a multiple of the squared norm of some residuals, and there are at most a few
    thousand parameters or residuals, factorise the matrix instead of iterating. `jacobian_fn` returns one
    array of residuals and their Jacobian, with the shapes of `jax.jacobian`. A gradient for each point costs little.
    No output has to be marked, and `train_step` cannot take exact steps::

        def residual(params, point):
            return network(params, point)[0] / len(x) ** 0.5

        def jacobian_fn(params):
            return jax.vmap(jax.value_and_grad(residual), (None, 0))(params, x)

        grads = jax.grad(value_fn)(params)
        updates, opt_state = optimizer.update(
            grads, opt_state, params, value_fn=value_fn, jacobian_fn=jacobian_fn
        )

    The factorised matrix has a row for each residual or for each parameter, whichever are fewer. Exact steps need no
    `observe`, and no gradient either: under `jit`, XLA leaves `grads` out. Each step is corrected four times. A
    correction evaluates the residuals after the step, and solves again with the same factors. In a narrow, curved
    valley of the loss, corrected steps get along with a tenth of the damping or less.

    Args:
      learning_rate: the fraction of the minimising step, usually 1. With minibatches, let it fall to zero, because the
        minimum of each batch is a different one. Scalar or schedule.
      layers: the layers that `find_layers` returned.
      iterations: the largest number of conjugate-gradient iterations. Each costs about a gradient of the part of the
        batch that `F` uses. With 0, only the rate and the momentum come from the model.
      min_gain: iterations stop as soon as one improves the model by less than this fraction of its whole improvement.
      factor_ema_decay: see `natural_gradient`. Choose about 0.9 for minibatches.
      damping: the initial multiple of the loss's absolute value, at least `min_damping`.
      min_damping: the smallest multiple.
      num_examples: the number of examples over which the loss is averaged, as for `value_and_grad`. `train_step` has an
        option of the same name, so bind this one first:
        `optimizer=functools.partial(kfac.gauss_newton, num_examples=n)`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. `kfac.diagnostics` reports `damping`, `reduction_ratio` and
      `rejected_steps`, the number of rejected steps.

    Raises:
      ValueError: an argument is out of range, `layers` does not come from `find_layers`, or has multipliers. `update`
        raises the errors of `adaptive_damping`, an error inside `shard_map` or `pmap`, for a `curvature_fn` with
        `num_examples` or a `jacobian_fn`, and for a Jacobian of other shapes.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671; Martens, "Deep learning via Hessian-free optimization", ICML 2010; Abreu et al.,
      "The Potential of Second-Order Optimization for LLMs: A Study with Full Gauss-Newton", 2025,
      https://arxiv.org/abs/2510.09378; Transtrum and Sethna, "Improvements to the Levenberg-Marquardt algorithm for
      nonlinear least-squares minimization", 2012, https://arxiv.org/abs/1201.5885
    """
    check(learning_rate=learning_rate, factor_ema_decay=factor_ema_decay)
    check_count("iterations", iterations, 0)
    check_number("min_gain", min_gain, "[0, 1)")
    check_layers(layers)
    for layer in layers:
        # The step minimises a model of the loss, and a multiple of this step does not.
        if layer.multiplier != 1:
            raise ValueError(
                f"a rule multiplies the steps of layer {layer.name!r} by {layer.multiplier:g}, but the whole step "
                "minimises a model of the loss: leave it out of rules="
            )

    def preconditioner(damping):
        return scale_by_kfac(
            layers,
            damping=damping,
            factor_ema_decay=factor_ema_decay,
            preconditioner=Eigh(),
        )

    def quadratic_step(multiple):
        """Return the optimizer with a damping of `multiple` times the loss's absolute value."""

        def init(params):
            blocks = preconditioner(1.0).init(params)
            return PredictingState(blocks, optax.tree.zeros_like(params))

        def update(
            updates,
            state,
            params,
            *,
            value_fn,
            curvature_fn=None,
            jacobian_fn=None,
            **extra,
        ):
            if device_axes():
                raise ValueError(
                    "gauss_newton measures the loss of the whole batch: use jax.jit on a mesh, not shard_map"
                )
            whole = num_examples is not None or jacobian_fn is not None
            if curvature_fn is not None and whole:
                given = "jacobian_fn" if jacobian_fn else f"num_examples={num_examples}"
                raise ValueError(
                    f"{given} counts the whole batch's examples: leave curvature_fn out (in train_step: "
                    "statistics_fraction=1)"
                )
            blocks, last, _ = state
            rate = value_at(learning_rate, blocks.count)
            _, as_params = _raveled(params)

            def finish(step, blocks, predicted=None):
                step = rate.astype(step.dtype) * step
                # Stay in place if the step is not finite.
                step = as_params(jnp.where(jnp.all(jnp.isfinite(step)), step, 0))
                return step, PredictingState(blocks, step, predicted)

            if jacobian_fn is not None:
                step, damping, predicted = _solved(jacobian_fn, params, multiple, rate)
                # The blocks have no part in the step, so they need no statistics.
                count = blocks.count
                metrics = blocks.metrics
                broken = ~jnp.all(jnp.isfinite(step))
                blocks = blocks._replace(
                    count=optax.safe_increment(count),
                    last_statistics_step=count,
                    metrics=metrics._replace(
                        damping=damping.astype(jnp.float32),
                        skipped_steps=metrics.skipped_steps + broken,
                    ),
                )
                return finish(step, blocks, predicted)
            model = marked(
                curvature_fn or value_fn, params, num_examples, "gauss_newton"
            )
            value, root_of_tree = model.root(params)
            gradient, _ = ravel_pytree(updates)
            damping = _damping(multiple, value)
            tx = preconditioner(damping)
            direction, blocks = tx.update(updates, blocks, params)

            def root(v):
                return ravel_pytree(root_of_tree(as_params(v)))[0]

            def precondition(v):
                return ravel_pytree(tx.update(as_params(v), blocks, params)[0])[0]

            pair = jnp.stack([ravel_pytree(direction)[0], ravel_pytree(last)[0]])
            step = _minimized(
                pair, gradient, damping, root, precondition, iterations, min_gain
            )
            return finish(step, blocks)

        return optax.GradientTransformationExtraArgs(init, update)

    return adaptive_damping(
        quadratic_step,
        damping,
        every=1,
        decay=0.5,
        minimum=min_damping,
        maximum=1e6,
        num_examples=num_examples,
    )


def _raveled(params: optax.Params) -> tuple[Array, Callable]:
    """Return the parameters as a vector, and the function that turns a vector into a tree of the parameters' dtypes."""
    flat, unravel = ravel_pytree(params)
    # Products with data in a wider dtype are wider, too.
    return flat, lambda vector: unravel(vector.astype(flat.dtype))


def _damping(multiple: Array, value: Array) -> Array:
    # A loss of zero gives the damping no scale. Densities make losses negative.
    return multiple * jnp.maximum(jnp.abs(value), jnp.finfo(value.dtype).tiny)


def _solved(
    jacobian_fn: Callable,
    params: optax.Params,
    multiple: Array,
    rate: Array,
) -> tuple[Array, Array, Array]:
    """Return the corrected step to the minimum of the quadratic model, the damping, and the predicted change.

    The prediction is for the step times `rate` before the corrections, in units of the loss.

    For a step `s`, the model replaces the residuals `r(s)` by `r(0) + R s`. A correction replaces them by
    `r(t) - R t + R s`, which is exact at the previous step `t`. The planned step soon leaves a narrow curved valley.
    The corrected step follows the valley, and costs two triangular solves but no new Jacobian. To second order in the
    step, the first correction is the geodesic acceleration of Transtrum & Sethna (2012).

    Raises:
      ValueError: the Jacobian does not have the shapes of `jax.jacobian`.
    """
    flat, as_params = _raveled(params)

    def evaluate(params):
        # Every device solves the whole system.
        made = replicated(jacobian_fn(params))
        if not (isinstance(made, tuple) and len(made) == 2 and _is_real(made[0])):
            raise ValueError(
                "jacobian_fn must return a pair: one array of real residuals, and their Jacobian as of jax.jacobian. "
                "Join several arrays, and real and imaginary parts, with jnp.concatenate"
            )
        return made

    residuals, jacobian = evaluate(params)
    expected = _shapes(params, residuals.shape)
    found = _shapes(jacobian)
    if found != expected:
        raise ValueError(
            f"jacobian_fn must return residuals and their Jacobian, with the shapes {expected}, but they are {found}"
        )
    leaves = [x.reshape(residuals.size, -1) for x in jax.tree.leaves(jacobian)]
    rows = jnp.concatenate(leaves, axis=1)
    # Factorise in float32 at least.
    rows = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))
    residuals = residuals.ravel().astype(rows.dtype)
    loss = jnp.sum(jnp.square(residuals)) / 2
    damping = _damping(multiple, loss)
    product = functools.partial(jnp.matmul, precision="highest")
    # Factorise the smaller of `R R^T` and `R^T R`.
    wide = rows.shape[0] < rows.shape[1]
    short = rows if wide else rows.T
    matrix = exact_product(short, short.T)
    # Keep the matrix positive definite in spite of rounding.
    rounding = 8 * jnp.finfo(matrix.dtype).eps * jnp.trace(matrix)
    shift = (damping + rounding) * jnp.eye(len(matrix), dtype=matrix.dtype)
    factor = jsl.cho_factor(matrix + shift)

    def minimum(residuals):
        if wide:
            return -product(rows.T, jsl.cho_solve(factor, residuals))
        return -jsl.cho_solve(factor, product(rows.T, residuals))

    def corrected(_, step):
        after, _ = evaluate(as_params(flat + step))
        return minimum(after.ravel().astype(rows.dtype) - product(rows, step))

    planned = minimum(residuals)
    step = lax.fori_loop(0, CORRECTIONS, corrected, planned)
    # The damping grows only if a step moves, so replace a step whose corrections diverged.
    step = jnp.where(jnp.all(jnp.isfinite(step)), step, planned)
    after = residuals + rate * product(rows, planned)
    return step, damping, jnp.sum(jnp.square(after)) / 2 / loss - 1


def _is_real(x: object) -> bool:
    return hasattr(x, "shape") and not jnp.iscomplexobj(x)


def _shapes(tree: optax.Params, lead: tuple[int, ...] = ()) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path)} {lead + x.shape}" for path, x in leaves]


class Search(NamedTuple):
    """The state of conjugate gradients.

    Attributes:
      step: the step so far.
      rows: `R` times the step.
      along: the last search direction.
      size: the squared norm of the last residual in the preconditioner's metric.
      iterations: the number of iterations.
      gain: by how much the last iteration improved the model.
      total: by how much the step improves the model.
    """

    step: Array
    rows: Array
    along: Array
    size: Array
    iterations: Array
    gain: Array
    total: Array


def _minimized(
    pair: Array,
    gradient: Array,
    damping: Array,
    root: Product,
    precondition: Product,
    iterations: int,
    min_gain: float,
) -> Array:
    """Return the step that minimizes the quadratic model by conjugate gradients.

    Args:
      pair: two vectors, of which the first step is a linear combination.
      gradient: the gradient of the loss.
      damping: `l`.
      root: multiplies a vector by `R`, with `F = R^T R`.
      precondition: multiplies a vector by an approximate inverse of `F + l I`.
      iterations: the largest number of iterations.
      min_gain: the smallest improvement by an iteration, as a fraction of the whole improvement.
    """
    # Begin with the best combination of the pair, whose norms differ by orders of magnitude.
    norms = jnp.linalg.norm(pair, axis=1, keepdims=True)
    pair = pair / jnp.where(norms > 0, norms, 1)
    rows = jnp.stack([root(v) for v in pair])
    # This is no matmul, because explicit mesh axes may shard `rows`.
    products = jnp.sum(rows[:, None] * rows[None], axis=-1)
    model = products + damping * jnp.matmul(pair, pair.T, precision="highest")
    # Keep the system regular: the last step is zero in the first update, and both vectors may be parallel.
    sizes = jnp.diag(model)
    model += jnp.diag(16 * jnp.finfo(model.dtype).eps * sizes + (sizes == 0))
    weights = -jnp.linalg.solve(model, jnp.matmul(pair, gradient, precision="highest"))
    step = weights @ pair
    transposed = jax.linear_transpose(root, step)

    def unfinished(state):
        return (state.iterations < iterations) & (state.gain >= min_gain * state.total)

    def iterate(state):
        step, rows, along, size, count, _, total = state
        residual = -(gradient + transposed(rows)[0] + damping * step)
        preconditioned = precondition(residual)
        new = jnp.vdot(residual, preconditioned)
        along = preconditioned + jnp.where(size > 0, new / size, 0) * along
        moved = root(along)
        curvature = jnp.sum(jnp.square(moved)) + damping * jnp.vdot(along, along)
        # In exact arithmetic, the slope is `new`. After convergence, only the slope never worsens the model.
        slope = jnp.vdot(residual, along)
        rate = jnp.where(curvature > 0, slope / curvature, 0)
        step += rate * along
        rows += rate * moved
        gain = rate * slope / 2
        return Search(step, rows, along, new, count + 1, gain, total + gain)

    # The best combination of the pair improves the model by `-<grad h, s> / 2`.
    total = -jnp.vdot(gradient, step) / 2
    zero = 0 * damping
    initial = Search(
        step, weights @ rows, 0 * step, zero, jnp.zeros((), jnp.int32), total, total
    )
    return lax.while_loop(unfinished, iterate, initial).step
