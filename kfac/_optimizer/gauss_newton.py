"""Full-batch K-FAC without a learning rate: each step minimizes a quadratic model of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from kfac._capture.outputs import marked
from kfac._checks import check_layers
from kfac._curvature.eigh import Eigh
from kfac._layers import Layers
from kfac._mesh import device_axes
from kfac._optimizer.adaptive_damping import adaptive_damping
from kfac._optimizer.scale_by_kfac import scale_by_kfac

STEPS = 6  # of conjugate gradients, per update

Product = Callable[[Array], Array]


def gauss_newton(
    layers: Layers, *, num_examples: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return a K-FAC optimizer for full-batch training, such as solving a differential equation.

    There is no learning rate, momentum or damping to choose. The step `s` approximately minimizes a quadratic model of
    the loss `h` with the batch's *whole* Gauss-Newton matrix `F`,

        h + <grad h, s> + <s, (F + l I) s> / 2

    First, the optimizer finds the best linear combination of K-FAC's direction and the last step (Martens & Grosse
    2015, section 7). Six steps of conjugate gradients follow, preconditioned by K-FAC's inverse (Martens 2010). A
    product with `F` takes a forward-mode derivative and a backward pass.

    The damping `l` is a multiple of the loss, and K-FAC's blocks have the same damping. The multiple starts at 1 and
    follows the Levenberg-Marquardt rule of `adaptive_damping`, with a minimum of 0.1. A step after which the loss is
    larger is rejected.

    Use the same batch in every step, a loss whose minimum is near zero, and statistics with `fisher="expected"`::

        def loss_fn(params, x):
            return 0.5 * jnp.mean(jnp.sum(kfac.mark_output(network(params, x), "residual") ** 2, -1))

        x = batch[0]
        layers = kfac.find_layers(loss_fn, params, x)
        optimizer = kfac.gauss_newton(layers)
        opt_state = optimizer.init(params)
        measure = kfac.value_and_grad(loss_fn, layers, fisher="expected")
        loss, grads, factors = measure(params, x, fisher_key=jax.random.key(0))
        opt_state = kfac.observe(opt_state, factors)
        value_fn = lambda params: loss_fn(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params, value_fn=value_fn)

    For minibatches use `kfac.kfac`, because the loss of each minibatch has a different minimum. To use
    several devices, place the parameters and the batch on a mesh.

    Args:
      layers: the layers that `find_layers` returned.
      num_examples: the number of examples over which the loss is averaged, as for `value_and_grad`.

    Returns:
      An `optax.GradientTransformationExtraArgs`. `kfac.diagnostics` reports `damping`, `reduction_ratio` and
      `rejected_steps`, the number of rejected steps.

    Raises:
      ValueError: `layers` does not come from `find_layers`, or has multipliers. `update` raises the errors of
        `adaptive_damping`, and an error inside `shard_map` or `pmap`.

    References:
      Martens and Grosse, "Optimizing Neural Networks with Kronecker-factored Approximate Curvature", 2015,
      https://arxiv.org/abs/1503.05671; Martens, "Deep learning via Hessian-free optimization", ICML 2010
    """
    check_layers(layers)
    for layer in layers:
        # The step minimises a model of the loss, and a multiple of this step does not.
        if layer.multiplier != 1:
            raise ValueError(
                f"a rule multiplies the steps of layer {layer.name!r} by {layer.multiplier:g}, but the whole step "
                "minimises a model of the loss: leave it out of rules="
            )
    step = functools.partial(_quadratic_step, layers, num_examples)
    return adaptive_damping(
        step,
        1.0,
        every=1,
        decay=0.5,
        minimum=0.1,
        maximum=1e6,
        num_examples=num_examples,
    )


def _quadratic_step(
    layers: Layers,
    num_examples: int | None,
    multiple: Array,
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a damping of `multiple` times the loss."""

    def preconditioner(damping):
        return scale_by_kfac(
            layers, damping=damping, factor_ema_decay=0.0, preconditioner=Eigh()
        )

    def init(params):
        return preconditioner(1.0).init(params), optax.tree.zeros_like(params)

    def update(updates, state, params, *, value_fn, **extra):
        if device_axes():
            raise ValueError(
                "gauss_newton measures the loss of the whole batch: use jax.jit on a mesh, not shard_map"
            )
        loss_fn = marked(value_fn, params, num_examples, "gauss_newton")
        value, root_of_tree = loss_fn.root(params)
        _, unravel = ravel_pytree(params)
        gradient, _ = ravel_pytree(updates)
        blocks, last = state
        last, _ = ravel_pytree(last)
        # A loss that is zero, or negative because a constant is missing, gives the damping no scale.
        damping = multiple * jnp.maximum(value, jnp.finfo(value.dtype).tiny)
        tx = preconditioner(damping)
        direction, blocks = tx.update(updates, blocks, params)

        def root(v):
            return ravel_pytree(root_of_tree(unravel(v)))[0]

        def precondition(v):
            return ravel_pytree(tx.update(unravel(v), blocks, params)[0])[0]

        pair = jnp.stack([ravel_pytree(direction)[0], last])
        step = _minimized(pair, gradient, damping, root, precondition)
        # Stay in place if the step is not finite.
        step = unravel(jnp.where(jnp.all(jnp.isfinite(step)), step, 0))
        return step, (blocks, step)

    return optax.GradientTransformationExtraArgs(init, update)


def _minimized(
    pair: Array,
    gradient: Array,
    damping: Array,
    root: Product,
    precondition: Product,
) -> Array:
    """Return the step that minimizes the quadratic model by conjugate gradients.

    Args:
      pair: two vectors, of which the first step is a linear combination.
      gradient: the gradient of the loss.
      damping: `l`.
      root: multiplies a vector by `R`, with `F = R^T R`.
      precondition: multiplies a vector by an approximate inverse of `F + l I`.
    """
    # Begin with the best combination of the pair, whose norms differ by orders of magnitude.
    norms = jnp.linalg.norm(pair, axis=1, keepdims=True)
    pair = pair / jnp.where(norms > 0, norms, 1)
    rows = jnp.stack([root(v) for v in pair])
    # This is no matmul, because explicit mesh axes may shard `rows`.
    products = jnp.sum(rows[:, None] * rows, axis=-1)
    model = products + damping * jnp.matmul(pair, pair.T, precision="highest")
    # Keep the system regular: the last step is zero in the first update, and both vectors may be parallel.
    sizes = jnp.diag(model)
    model += jnp.diag(16 * jnp.finfo(model.dtype).eps * sizes + (sizes == 0))
    weights = -jnp.linalg.solve(model, jnp.matmul(pair, gradient, precision="highest"))
    step = weights @ pair
    transposed = jax.linear_transpose(root, step)

    def iterate(_, state):
        step, rows, along, size = state
        residual = -(gradient + transposed(rows)[0] + damping * step)
        preconditioned = precondition(residual)
        new = jnp.vdot(residual, preconditioned)
        along = preconditioned + jnp.where(size > 0, new / size, 0) * along
        moved = root(along)
        curvature = jnp.sum(jnp.square(moved)) + damping * jnp.vdot(along, along)
        rate = jnp.where(curvature > 0, new / curvature, 0)
        return step + rate * along, rows + rate * moved, along, new

    initial = step, weights @ rows, 0 * step, 0 * damping
    return lax.fori_loop(0, STEPS, iterate, initial)[0]
