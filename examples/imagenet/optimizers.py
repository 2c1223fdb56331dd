"""The optimizers of the script, all behind one interface.

`gradient_fn` gives a function that returns `((loss, aux), grads, factors)`, `transform` an optax
transform whose `update` takes `factors=`. First-order methods have `factors = None`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import kfac
from config import Optimization

# `augment.keys` folds in the step instead, which is never as large as this.
FISHER_STREAM = 2**32 - 1

INVERSES: dict[str, Callable[..., kfac.Inverse]] = {"cholesky": kfac.Cholesky, "eigh": kfac.Eigh, "ekfac": kfac.Ekfac}


def learning_rate(config: Optimization, steps_per_epoch: float, total_steps: int) -> optax.Schedule:
    """Linear warm-up from zero, then the chosen decay, by optimizer steps."""
    peak = config.learning_rate
    warmup = min(round(config.warmup_epochs * steps_per_epoch), total_steps - 1)
    rest = max(total_steps - warmup, 1)
    # The marks of the polynomial are fractional epochs, and need not be steps.
    begin = warmup if config.decay_begin is None else config.decay_begin * steps_per_epoch
    end = total_steps if config.decay_end is None else config.decay_end * steps_per_epoch
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "polynomial": optax.polynomial_schedule(
            peak, 0.0, config.decay_power, max(end - begin, 1), max(begin - warmup, 0)
        ),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if warmup == 0:
        return decay
    # Starts at peak / warmup, not at zero: no step is for nothing.
    rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def momentum(config: Optimization, rate: optax.Schedule) -> Any:
    """The momentum, or its schedule where it falls with the learning rate."""
    if config.momentum_coupling == "none":
        return config.momentum
    peak = config.learning_rate if config.momentum_coupling == "proportional" else None
    return kfac.schedules.coupled_momentum(config.momentum, rate, reference_rate=peak)


def damping(config: Optimization, steps_per_epoch: float) -> Any:
    """The damping, or its schedule where it begins higher."""
    if config.damping_initial is None:
        return config.damping
    steps = max(1, round(config.damping_warmup_epochs * steps_per_epoch))
    return kfac.schedules.damping_warmup(config.damping_initial, config.damping, steps)


def fisher_key(seed: int, step: jax.Array) -> jax.Array:
    """The key from which the labels of a step are drawn, of a stream that nothing else of the run has."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), FISHER_STREAM), step)


def rescale(params: Any) -> Any:
    """`W <- W sqrt(2 d_out) / (||W|| + 1e-9)` for kernels, where it shrinks them (Osawa et al. 2019).

    Batch norm takes the scale of a kernel out again, but steps on a large one turn it less.
    """

    def shrunk(kernel: jax.Array) -> jax.Array:
        factor = jnp.sqrt(2.0 * kernel.shape[-1]) / (jnp.linalg.norm(kernel.ravel()) + 1e-9)
        return kernel * jnp.minimum(factor, 1).astype(kernel.dtype)

    return jax.tree.map(lambda leaf, yes: shrunk(leaf) if yes else leaf, params, is_kernel(params))


def is_kernel(params: Any) -> Any:
    """True for kernels: what weight decay and trust ratios are meant for."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def transform(
    config: Optimization, rate: optax.Schedule, steps_per_epoch: float, layers: Any, axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """The optimizer as an optax transform; `layers` and `axis_name` are read by K-FAC only."""
    decay = config.weight_decay
    match config.optimizer:
        case "kfac":
            return kfac.kfac(
                rate, layers, damping=damping(config, steps_per_epoch), momentum=momentum(config, rate),
                nesterov=config.nesterov, rate_in_momentum=config.rate_in_momentum,
                unitwise_damping=config.unitwise_damping, weight_decay=decay, weight_decay_mask=is_kernel,
                norm_constraint=config.norm_constraint or None,
                trust_ratio=config.trust_ratio or None, factor_decay=config.factor_decay,
                inverse_every=config.inverse_every, inverse=INVERSES[config.inverse](),
                distribution=kfac.Distribution(axis_name),
            )  # fmt: skip
        case "sgd":
            tx = optax.chain(
                optax.add_decayed_weights(decay, is_kernel),
                optax.sgd(rate, config.momentum, nesterov=config.nesterov),
            )
        case "lars":
            tx = optax.lars(
                rate, decay, is_kernel, trust_ratio_mask=is_kernel, momentum=config.momentum,
                nesterov=config.nesterov,
            )  # fmt: skip
        case "lamb":
            tx = optax.lamb(rate, b1=config.momentum, weight_decay=decay, mask=is_kernel)
        case "adamw":
            tx = optax.adamw(rate, b1=config.momentum, weight_decay=decay, mask=is_kernel, nesterov=config.nesterov)
        case other:
            raise ValueError(f"no optimizer is called {other!r}")
    return optax.with_extra_args_support(tx)


def gradient_fn(
    loss_fn: Callable[..., Any],
    layers: Any,
    micro_batches: int,
    axis_name: str,
    subsample: int = 1,
    fisher: str = "empirical",
    ekfac: bool = False,
) -> Callable[..., Any]:
    """`fn(params, batch_stats, batch, loss_scale, ...) -> ((loss, aux), grads, factors)`, this device's own.

    Without `layers` the factors are None; else they come from every `subsample`-th image. Over micro-batches everything
    is averaged, the batch-norm averages in `aux` too. Where labels are drawn (`fisher="sampled"`), `key` is that of the
    step, the same on all devices: each micro-batch of each device draws with one of its own. With `ekfac`, `basis` is
    what the second moments are expressed in.
    """
    if layers is None:
        plain = jax.value_and_grad(loss_fn, has_aux=True)

        def fn(params: Any, *rest: Any, fisher_key: Any = None, basis: Any = None) -> Any:
            del fisher_key, basis
            # Of parameters that are the same on all devices shard_map would sum the gradients.
            params = jax.lax.pcast(params, axis_name, to="varying")
            value, grads = plain(params, *rest)
            return value, grads, None
    else:
        fn = kfac.value_and_grad(loss_fn, layers, has_aux=True, subsample=subsample, fisher=fisher)
    if micro_batches == 1:
        return fn
    return kfac.microbatch(fn, micro_batches, batch_argnums=2)
