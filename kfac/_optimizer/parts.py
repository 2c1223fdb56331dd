"""What comes after the preconditioner: the KL clip, momentum, and the length of each layer's step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

from kfac._curvature.blocks import group_layers
from kfac._layers import Layer, Layers, leaves_by_path, map_by_path
from kfac._optimizer.scale_by_kfac import ScalarOrSchedule, value_at
from kfac._optimizer.state import KfacState, find_state
from kfac._optimizer.step import sums_of_members
from kfac._varying import alone, varying_axes, whole


class KlClipState(NamedTuple):
    """State of the KL clip: the preconditioner's state and the factor last applied."""

    inner: KfacState
    scale: jax.Array


class MomentumState(NamedTuple):
    """State of scheduled momentum: the step, and the state of `optax.trace`."""

    count: jax.Array  # type: ignore[assignment]
    inner: optax.TraceState  # not `trace`: `optax.tree.get(opt_state, "trace")` finds one value only


def clip_kl(
    inner: optax.GradientTransformationExtraArgs,
    layers: Layers,
    constraint: ScalarOrSchedule,
    learning_rate: ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """Scales what `inner` returns so that the predicted change of the loss' KL divergence stays below `constraint`."""
    chosen = {path for layer in layers.with_blocks for path in layer.params}

    def init(params):
        return KlClipState(inner.init(params), jnp.ones((), jnp.float32))

    def update(updates, state, params=None, **extra):
        preconditioned, inner_state = inner.update(updates, state.inner, params, **extra)
        trees = (leaves_by_path(tree).items() for tree in (updates, preconditioned))
        chosen_leaves = ({path: _wide(leaf) for path, leaf in tree if path in chosen} for tree in trees)
        product = whole(optax.tree.vdot)(*chosen_leaves)
        axes = tuple(sorted(varying_axes(product)))  # over which gradients are still to be averaged
        product = lax.pmean(product, axes) if axes else product
        # The step is the preconditioner's: one that is not finite moves no schedule.
        rate = value_at(learning_rate, state.inner.count)
        limit = value_at(constraint, state.inner.count)
        length = rate * rate * product
        # <v, g> cannot be negative; where it or the rate is zero there is nothing to constrain.
        scale = jnp.where(length > limit, jnp.sqrt(limit / jnp.where(length > 0, length, 1)), 1.0)

        def shorten(path, leaf):
            return (leaf * scale).astype(leaf.dtype) if path in chosen else leaf

        return map_by_path(shorten, preconditioned), KlClipState(inner_state, scale.astype(jnp.float32))

    return optax.GradientTransformationExtraArgs(init, update)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def keep_dtype(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Updates in the dtype they came in, whatever the scalars and parameters that `inner` multiplies by."""

    def update(updates, state, params=None, **extra):
        new, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def scheduled_momentum(decay: ScalarOrSchedule, nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """`optax.trace` in float32 or better, with a decay that may be a schedule; kept in steps not `taken`."""

    def init(params):
        return MomentumState(jnp.zeros((), jnp.int32), optax.trace(decay).init(jax.tree.map(_wide, params)))

    def update(updates, state, params=None, *, taken, **extra):
        del params, extra
        wide = jax.tree.map(_wide, updates)

        def moved(updates, inner):
            return optax.trace(value_at(decay, state.count)).update(updates, inner)[1]

        def branch(taken, wide, inner):
            # On CPUs XLA would compute what is selected twice, for the momentum and for the parameters, and copy the
            # momentum first. On a GPU one kernel does both, and a branch would make the host wait.
            return lax.cond(taken, moved, lambda updates, inner: inner, wide, inner)

        def select(taken, wide, inner):
            return jax.tree.map(lambda new, old: jnp.where(taken, new, old), moved(wide, inner), inner)

        inner = lax.platform_dependent(taken, wide, state.inner, cpu=branch, default=select)
        ahead = moved(wide, inner) if nesterov else inner
        return ahead.trace, MomentumState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def precondition_momentum(
    inner: optax.GradientTransformationExtraArgs, momentum: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """`inner` of the momentum of the gradients, which it gets too; kept in steps that `inner` refuses."""

    def init(params):
        return inner.init(params), momentum.init(params)

    def update(updates, state, params=None, **extra):
        averaged, new = momentum.update(updates, state[1], params, taken=jnp.array(True))
        preconditioned, kept = inner.update(updates, state[0], params, averaged=averaged, **extra)
        refused = find_state(kept, "state").refused
        return preconditioned, (kept, jax.tree.map(lambda new, old: jnp.where(refused, old, new), new, state[1]))

    return optax.GradientTransformationExtraArgs(init, update)


# Of kernels whose scale matters, so few gradients are at such an angle by chance (Heo et al. 2021, arXiv:2006.08217).
RIGHT_ANGLE = 0.1


class LayerLengthState(NamedTuple):
    """State of `scale_layers`: nothing. It tells that the length of a step is not that of the curvature."""


# The root mean square of a step of what is no kernel, relative to the learning rate.
BESIDE_KERNELS = 0.1


def scale_layers(layers: Layers, coefficient: ScalarOrSchedule | None = None) -> optax.GradientTransformationExtraArgs:
    """Steps of which each layer's has a length of its own, whatever its curvature and its gradient are.

    The norm `sqrt(d_out)` for the kernel and bias of a dense or convolutional layer together; a root mean square of 0.1
    for every other leaf with a block, over its elements that move at all. The norm `sqrt(d_out)` is that of an
    orthogonal matrix with at least as many columns as rows: outputs change by as much in networks of any width. What
    has no gradient in a step does not move in it: its momentum would be made as long as ever.

    With a `coefficient`, so many times its own norm for each kernel, as with `optax.scale_by_trust_ratio`, and nothing
    else. In either case each copy of a stacked kernel goes by itself, and what does not turn a kernel is left out.
    Of gradients that differ between devices, which owners have averaged, `kernel_squares` are those of the average.
    """
    auto = coefficient is None
    kernels = {x.params[0]: x for x in layers if x.kronecker and not (auto and x.kind == "embedding")}
    blocks = layers.with_blocks if auto else kernels.values()
    layouts = {
        path: layout for x in blocks for path, layout in zip(x.params[: None if auto else 1], x.layouts, strict=False)
    }

    def init(params):
        del params
        return LayerLengthState() if auto else optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def lengthened(updates, params, unpreconditioned, kernel_squares, count):
        axis = tuple(sorted(varying_axes(unpreconditioned))) or None
        matrices, sums = _sums(layers, layouts, kernels, updates, params, unpreconditioned, axis)
        if axis is not None:
            for group in [group for group in group_layers(layers) if group.kronecker]:
                for layer, square in group.split(kernel_squares[group.name]):
                    if layer.params[0] in kernels and layer.params[0] in sums:
                        sums[layer.params[0]].append(square.reshape(layer.copies, -1).sum(1)[:, None, None])
        scaled: dict[str, jax.Array] = {}
        for path in [path for path in matrices if path in kernels]:
            layer, (u, w, _), (_, _, ww, _, gradient) = kernels[path], matrices[path], sums[path]
            radial, square = _turned(layer, *sums[path])
            beside = [other for other in layer.params[1:] if other in matrices]
            for other in beside:
                square, gradient = square + sums[other][0], gradient + sums[other][2]
            if coefficient is None:
                ratio = _ratio(jnp.where(gradient > 0, layer.d_out**0.5, 0), square)
            else:
                length = value_at(coefficient, count) * jnp.sqrt(ww)
                ratio = jnp.where((ww > 0) & (square > 0), _ratio(length, square), 1)
            scaled[path] = ratio * (u - radial * w)
            scaled |= {other: ratio * matrices[other][0] for other in beside}
        for path in [path for path in matrices if path not in scaled]:
            square, moving, gradient = map(jnp.sum, sums[path])
            length = jnp.where(gradient > 0, BESIDE_KERNELS * jnp.sqrt(moving), 0)
            scaled[path] = _ratio(length, square) * matrices[path][0]

        def scale(path, leaf):
            return layouts[path].from_matrix(scaled[path], leaf.shape) if path in scaled else leaf

        return map_by_path(scale, updates)

    def update(updates, state, params=None, *, unpreconditioned, kernel_squares=None, **extra):
        del extra
        if params is None:
            raise ValueError("trust_ratio needs the parameters: call update(grads, state, params)")
        count = None if auto else state.count
        new = whole(lengthened, updates)(updates, params, unpreconditioned, kernel_squares, count)
        return new, state if auto else optax.ScaleByScheduleState(optax.safe_increment(count))

    return optax.GradientTransformationExtraArgs(init, update)


def _sums(layers, layouts, kernels, updates, params, gradients, axis):
    """The matrices in all trees of each leaf with a layout, but for masked ones; and sums `[copies, 1, 1]` over them.

    Of a kernel, the sums that `_turned` takes; of others, of squares, and how many updates and gradients are not zero.
    Where gradients are local, sums that are linear in them are averaged over the devices of the `axis`, and the last of
    a kernel's, of the square of its gradient, is left to the caller.
    """
    # On a GPU, one kernel then gives momentum and update of all leaves of a stack; else there is one for each leaf.
    trees = [leaves_by_path(tree) for tree in (lax.optimization_barrier(updates), params, gradients)]
    present = {path: layout for path, layout in layouts.items() if path in trees[0]}
    matrices = {path: [layout.to_matrix(_wide(tree[path])) for tree in trees] for path, layout in present.items()}
    wide = jnp.result_type(jnp.float32, *trees[2].values())
    for group in group_layers(layers) if alone() else ():
        # The stacks that the preconditioner has made, outputs last: a gradient with another layout than the kernel has
        # would have all of the products written out. Without the barrier XLA takes what stacks are made of.
        for layer, own in group.split(lax.optimization_barrier(group.stack_matrices(trees[2], wide))):
            if layer.params[0] in kernels and layer.params[0] in matrices:
                matrices[layer.params[0]][2] = layer.from_pieces(own)[..., : layer.layouts[0].size("in")]

    def moved(path, u, w, _):
        return [u * u, u * w, w * w] if path in kernels else [u * u, (u != 0).astype(u.dtype)]

    def measured(path, _, w, g):
        if path not in kernels:
            return [(g != 0).astype(g.dtype)]
        return [g * w, g * g] if axis is None else [g * w]

    if axis is None:
        sums = sums_of_members([moved(path, *own) + measured(path, *own) for path, own in matrices.items()])
    else:
        local = sums_of_members([measured(path, *own) for path, own in matrices.items()])
        flat, unravel = ravel_pytree(local)
        averaged = unravel(lax.pmean(flat, axis))
        alike = sums_of_members([moved(path, *own) for path, own in matrices.items()])
        sums = [own + mean for own, mean in zip(alike, averaged, strict=True)]
    return matrices, {path: [x[:, None, None] for x in own] for path, own in zip(matrices, sums, strict=True)}


# The square of what is left of an update without its part along the kernel is a difference of sums, which must not be
# rounding alone. Below so much of the whole, a step is shorter than it should be.
LEFT = 1e-4


def _turned(layer: Layer, uu: Any, uw: Any, ww: Any, gw: Any, gg: Any) -> tuple[jax.Array, jax.Array]:
    """How often a layer's update has the kernel in it to no use, and the square of the update without that.

    It is of no use where the scale of a kernel does not matter to the loss: there its gradient is at a right angle.
    """
    # Root by root, as the product of the squares may leave the range of float32.
    bound = RIGHT_ANGLE * jnp.sqrt(ww) * jnp.sqrt(gg) / (math.prod(layer.shapes[0]) // layer.copies) ** 0.5
    radial = jnp.where((jnp.abs(gw) < bound) & (ww > 0), uw / jnp.where(ww > 0, ww, 1), 0)
    return radial, jnp.maximum(uu - radial * uw, LEFT * uu)


def _ratio(length: jax.typing.ArrayLike, square: jax.Array) -> jax.Array:
    """What makes the norm that `length`, where its square is known; 0 of what is zero."""
    return jnp.where(square > 0, length / jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
