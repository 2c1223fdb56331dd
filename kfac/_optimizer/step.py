"""Make a preconditioned step on each device, as a list of stages.

`CommContext` sends the messages between devices. The same code serves a single device.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from kfac._curvature.blocks import Group
from kfac._curvature.preconditioner import Momentum
from kfac._factors import per_block
from kfac._linalg import cosine
from kfac._optimizer.exchange import (
    Gradients,
    Vectors,
    WholeGradients,
    all_finite,
    join,
)
from kfac._optimizer.flat_state import block_of, with_parts
from kfac._optimizer.state import (
    KfacMetrics,
    KfacState,
    PreconditionerState,
    check_momentum,
    check_state,
)
from kfac._optimizer.step_scaling import (
    Kernels,
    MomentumState,
    Stack,
    StepScalars,
    adapted,
    find_kernels,
    normalize_step,
)


def preconditioned_step(
    device: WholeGradients,
    updates: Gradients,
    params: Gradients,
    now: StepScalars,
) -> tuple[Gradients, KfacState]:
    """Precondition the gradients and turn them into updates.

    Args:
      device: the state before the step, and the blocks that this device holds.
      updates: the gradients.
      params: the parameters, or empty if the step lengths do not depend on them.
      now: the scalars of the step.

    Returns:
      The updates in the form of the gradients, and the state after the step.
    """
    check_state(device.settings, device.comm.devices, device.state)
    device.comm.check("updates", updates.tree)
    updates, gradients = device.receive(updates)
    square = device.total_product(gradients, gradients)
    skipped = device.skipped(updates.tree).values()
    usable = all_finite(skipped) & jnp.isfinite(square)
    directions, advanced, angles = precondition(device, now, gradients)
    norms = square, device.product(directions, directions)
    steps, scale = clip(device, now, directions, gradients)
    steps, motions = add_momentum(device, now, steps, gradients, angles)
    if device.options.set_lengths:
        steps = set_lengths(device, now, steps, gradients, params)
    for name, motion in motions.items():
        if motion.rate is not None:
            steps[name] = steps[name] * per_block(motion.rate, steps[name])
    steps = multiply(device, steps)
    usable &= jnp.isfinite(norms[1])
    updates, usable = device.send(updates, steps, usable)
    metrics, usable = measure(device, now, advanced, motions, norms, scale, usable)
    state = commit(device, advanced, motions, usable)
    rates = jnp.stack([now.rate, jnp.maximum(now.rate, state.learning_rates[1])])
    return updates, state._replace(
        learning_rates=jnp.where(usable, rates, state.learning_rates),
        count=jnp.where(usable, optax.safe_increment(state.count), state.count),
        step_rejected=~usable,
        metrics=metrics,
    )


def precondition(
    device: WholeGradients,
    now: StepScalars,
    gradients: Vectors,
) -> tuple[Vectors, dict[str, PreconditionerState], Vectors]:
    """Precondition the gradients of this device's blocks.

    Returns:
      The preconditioned gradients, and two dictionaries with entries for preconditioners that own the momentum
      (`owns_momentum`): the preconditioner's new state, and the cosines `[k]` between the gradients and the previous
      step's directions.
    """
    settings = device.settings
    momentum = Momentum(now.momentum, device.options.nesterov)
    result = {}
    advanced = {}
    angles = {}
    for group in settings.groups:
        name = group.name
        preconditioner = group.preconditioner_of(settings.preconditioner)
        block = block_of(device.state, device.comm, name)
        ready = block.ready
        # Otherwise XLA for GPUs pads and copies bases while the activations still need the memory.
        gradient, held = lax.optimization_barrier(
            (gradients[name], block.preconditioner)
        )
        if preconditioner.owns_momentum:
            advanced[name], result[name], angles[name] = (
                preconditioner.precondition_momentum(
                    held,
                    gradient,
                    damping_of_step(device, group, now.damping),
                    momentum,
                    ready,
                )
            )
            continue
        # Stacks here are `[k, d_in, d_out]`, as most kernels lie in memory. Preconditioners take `[k, d_out, d_in]`.
        applied = preconditioner.apply(held, gradient.mT, now.damping).mT
        # A block that was never refreshed keeps its gradient.
        result[name] = jnp.where(per_block(ready, applied), applied, gradient)
    return result, advanced, angles


def damping_of_step(device: WholeGradients, group: Group, damping: Array) -> Array:
    """Return the damping for a preconditioner that owns the momentum; see `BlockPreconditioner.padding`.

    Zeros in the padding make the mean over a whole padded block too small, so the damping in its units grows.
    """
    if not (group.padded and device.settings.preconditioner.scale_damping):
        return damping
    sizes = device.take(group.name, group.sizes())
    elements = (sizes["A"] * sizes["G"])[:, None, None]
    return damping * (group.d_in * group.d_out / elements)


def clip(
    device: WholeGradients,
    now: StepScalars,
    steps: Vectors,
    gradients: Vectors,
) -> tuple[Vectors, Array]:
    """Apply the KL clip, and with `lr_in_momentum` the negative learning rate.

    Returns:
      The steps, and the scale of the KL clip, `min(1, sqrt(c / (lr^2 <v, g>)))` with `c = limit`.
    """
    scale = jnp.ones((), jnp.float32)
    if now.limit is not None:
        length = now.rate * now.rate * device.total_product(steps, gradients)
        # <v, g> cannot be negative. If <v, g> or the rate is zero, the scale is 1.
        scale = jnp.sqrt(now.limit / jnp.where(length > 0, length, 1))
        scale = jnp.where(length > now.limit, scale, 1.0)
        steps = {name: scale.astype(x.dtype) * x for name, x in steps.items()}
    if device.options.lr_in_momentum:
        steps = {name: -now.rate.astype(x.dtype) * x for name, x in steps.items()}
    return steps, scale


def add_momentum(
    device: WholeGradients,
    now: StepScalars,
    steps: Vectors,
    gradients: Vectors,
    angles: Vectors,
) -> tuple[Vectors, dict[str, MomentumState]]:
    """Return the steps with momentum, and the momenta and adaptive rates after the step."""
    state = device.state
    momentum = Momentum(now.momentum, device.options.nesterov)
    last, highest = state.learning_rates
    # In a warm-up or at the end of a decay, agreement with the last step only says that steps are short.
    full = (now.rate > 0) & (now.rate <= last) & (now.rate >= highest / 2)
    steps = dict(steps)
    motions = {}
    for group in device.settings.groups:
        name = group.name
        motion = block_of(state, device.comm, name).momentum_state
        check_momentum(device.options, group, motion)
        trace, rate = motion
        if rate is not None:
            # A preconditioner that owns the momentum has compared its directions with the gradients itself.
            angle = angles[name] if trace is None else cosine(trace, gradients[name])
            rate = adapted(rate, angle, full)
        if trace is not None:
            trace, steps[name] = momentum.moved(trace, steps[name])
        motions[name] = MomentumState(trace, rate)
    return steps, motions


def set_lengths(
    device: WholeGradients,
    now: StepScalars,
    steps: Vectors,
    gradients: Vectors,
    params: Gradients,
) -> Vectors:
    """Rescale the steps, see `normalize_step`."""
    groups = device.settings.groups
    need_params = [x for x in groups if device.options.needs_params(x)]
    weights = device.receive_params(params, need_params)
    stacks = {}
    for group in groups:
        name = group.name
        stacks[name] = build_stack(
            device,
            group,
            steps[name],
            weights.get(name),
            gradients[name],
        )
    return normalize_step(stacks, now.coefficient)


def multiply(device: WholeGradients, steps: Vectors) -> Vectors:
    """Multiply the steps by their layers' multipliers.

    This is the last stage, because earlier stages would undo a factor: step lengths rescale it away, and the KL clip
    would shorten all other layers in return.
    """
    steps = dict(steps)
    for group in device.settings.groups:
        factors = group.multipliers
        if np.all(factors == 1):
            continue
        name = group.name
        own = device.take(name, jnp.asarray(factors, steps[name].dtype))
        steps[name] = steps[name] * per_block(own, steps[name])
    return steps


def build_stack(
    device: WholeGradients,
    group: Group,
    steps: Array,
    params: Array | None,
    gradients: Array,
) -> Stack:
    """Build the `Stack` of a group. If its kernels are cut into pieces, `Stack.whole` adds up sums over pieces."""
    name = group.name
    kernels = find_kernels(group, device.options.spectral)
    # One row broadcasts over all blocks, which spares the devices a look-up of their own rows.
    if all(np.all(x == x[0]) for x in kernels):
        kernels = Kernels(*(jnp.asarray(x[:1]) for x in kernels))
    else:
        kernels = device.take(name, jax.tree.map(jnp.asarray, kernels))
    stack = Stack(steps, params, gradients, kernels, by_row=not group.kronecker)
    pieces = np.repeat(
        [layer.pieces for layer in group.layers],
        [layer.copies for layer in group.layers],
    )
    if np.all(pieces == 1):
        return stack
    # The pieces of a kernel may have several owners. Each device adds up its own, and a message adds up the devices.
    kernel_of = np.repeat(np.arange(len(pieces)), pieces)
    whose = device.take(name, jnp.asarray(kernel_of))

    def whole(sums):  # `[sums, k]`
        owned = jnp.where(device.owns[name], sums, 0)
        zeros = jnp.zeros((len(sums), len(pieces)), sums.dtype)
        of_kernels = zeros.at[:, whose].add(owned)
        return device.comm.total(of_kernels)[:, whose]

    return stack._replace(whole=whole)


def measure(
    device: WholeGradients,
    now: StepScalars,
    advanced: dict[str, PreconditionerState],
    motions: dict[str, MomentumState],
    norms: tuple[Array, ...],
    scale: Array,
    usable: Array,
) -> tuple[KfacMetrics, Array]:
    """Compute the step's metrics. Devices exchange norms, extremes, and whether the step is usable.

    Args:
      device: the blocks that this device holds.
      now: the scalars of the step.
      advanced: the new states of preconditioners that own the momentum.
      motions: momenta and rates after the step.
      norms: the squared norm of the gradient, and the squared norm of the preconditioned gradient over the blocks that
        this device owns.
      scale: the scale of the KL clip, 1 without a KL clip.
      usable: whether the step is usable on this device.

    Returns:
      The metrics, and whether the step is usable on all devices.
    """
    comm = device.comm
    state = device.state
    metrics = state.metrics
    conditions = []
    ages = []
    rates = []
    reciprocal_rates = []
    for group in device.settings.groups:
        name = group.name
        block = state.blocks[name]
        condition = None
        if name in advanced:
            condition = device.settings.preconditioner.applied_condition(
                advanced[name], damping_of_step(device, group, now.damping)
            )
        if condition is None:
            condition = block.condition
        conditions.append(jnp.where(block.ready, condition, 0))
        ages.append(jnp.where(block.ready, state.count - block.inverted, 0))
        rate = motions[name].rate
        if rate is not None:
            rates.append(jnp.where(device.owns[name], rate, 0))
            # The lowest rate is the inverse of the highest reciprocal, so one maximum over devices finds both ends.
            reciprocal_rates.append(jnp.where(device.owns[name], 1 / rate, 0))
    parts = [conditions, ages]
    if rates:
        parts += [rates, reciprocal_rates]
    extremes = jnp.stack([jnp.max(join(part)).astype(jnp.float32) for part in parts])
    square, owned = norms
    # A single message sends both numbers.
    sent = jnp.stack([(~usable).astype(jnp.float32), owned.astype(jnp.float32)])
    refusals, preconditioned = comm.total(sent)
    extremes = comm.largest(extremes)
    # The same on all devices, because later branches depend on it.
    usable = refusals == 0
    min_layer_rate = max_layer_rate = jnp.ones((), jnp.float32)
    if rates:
        max_layer_rate = extremes[2]
        min_layer_rate = 1 / extremes[3]
    new = metrics._replace(
        damping=now.damping,
        condition=extremes[0],
        kl_clip_scale=scale.astype(jnp.float32),
        min_layer_rate=min_layer_rate,
        max_layer_rate=max_layer_rate,
    )
    # In a rejected step, the new state of a preconditioner may not be finite.
    new = optax.tree.where(usable, new, metrics)
    new = new._replace(
        gradient_norm=jnp.sqrt(square).astype(jnp.float32),
        preconditioned_norm=jnp.sqrt(preconditioned),
        # A rejected step does not count.
        inverse_age=jnp.maximum(extremes[1].astype(jnp.int32) - ~usable, 0),
        skipped_steps=metrics.skipped_steps + ~usable,
    )
    return new, usable


def commit(
    device: WholeGradients,
    preconditioners: dict[str, PreconditionerState],
    motions: dict[str, MomentumState],
    usable: Array,
) -> KfacState:
    """Write momenta, rates and the preconditioners' new states into the state if the step is usable."""
    state = device.state
    comm = device.comm
    for name, motion in motions.items():
        parts: dict[str, Any] = {"momentum_state": motion}
        if name in preconditioners:
            parts["preconditioner"] = preconditioners[name]
        block = block_of(state, comm, name)
        old = {part: getattr(block, part) for part in parts}
        parts = optax.tree.where(usable, parts, old)
        state = with_parts(state, comm, name, **parts)
    return state
