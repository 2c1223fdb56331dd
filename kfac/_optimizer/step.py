"""Make a preconditioned step on one device, as a list of stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kfac._curvature.blocks import Group
from kfac._curvature.inverse import Momentum, cosine, finite
from kfac._distributed.ways import Way
from kfac._factors import per_block
from kfac._layers import leaves_by_path, map_by_path
from kfac._optimizer.moves import (
    Kernels,
    Motion,
    Now,
    Stack,
    adapted,
    clip_scale,
    find_kernels,
    lengthened,
)
from kfac._optimizer.place import Config, Place, Vectors, join
from kfac._optimizer.segment import part_of, with_parts
from kfac._optimizer.state import KfacMetrics, KfacState, check_state, shards_of


class Gradients(NamedTuple):
    """Gradients, parameters or updates.

    Attributes:
      tree: a tree like the parameters, without the leaves in `stacks`. If there are stacks, a number replaces each
        skipped leaf: 0 if the leaf is finite, otherwise NaN.
      stacks: empty, unless each owner receives only its own blocks. Then, for each group, a list of stacks
        `[positions, rows, d_out]`, kernels and biases apart if possible. Joined along the rows, they are
        `[positions, d_in, d_out]`. Outside `shard_map`, the first axis covers all devices' positions.
    """

    tree: Any
    stacks: dict[str, list[jax.Array]]


def preconditioned_step(
    config: Config, updates: Gradients, params: Gradients, state: KfacState, now: Now
) -> tuple[Gradients, KfacState]:
    """Precondition the gradients and turn them into updates, on a single device.

    Args:
      config: the fixed settings.
      updates: the gradients.
      params: the parameters, or empty if the step lengths do not depend on them.
      state: the state before the step.
      now: the scalars of the step.

    Returns:
      The updates in the form of the gradients, and the state after the step.
    """
    check_state(config, state)
    config.way.check("updates", updates.tree)
    place = Place(config, shards_of(state))
    updates, gradients, square, usable = take_gradients(place, state, updates)
    directions, advanced, angles = precondition(place, now, state, gradients)
    squares = sums_of_shares(place, {name: x * x for name, x in directions.items()})
    steps, motions, scale = move(
        place, now, state, directions, angles, gradients, params
    )
    to_all = {
        name: shard
        for name, shard in place.shards.items()
        if name not in updates.stacks
    }
    steps |= config.way.gather({name: steps[name] for name in to_all}, to_all)
    updates, usable = restore(
        place, updates, steps, usable & jnp.isfinite(sum(squares))
    )
    metrics, usable = measure(
        place, now, state, motions, square, squares, scale, usable
    )
    state = commit(state, config.way, advanced, motions, usable)
    return updates, count(state, now, metrics, usable)


def take_gradients(
    place: Place, state: KfacState, updates: Gradients
) -> tuple[Gradients, Vectors, jax.Array, jax.Array]:
    """Stack the gradients of the blocks that this device preconditions, averaged over devices.

    Returns:
      The updates, in which leaves that only owners precondition may still differ between devices; the gradients as
      matrices `[k, d_in, d_out]` by group; the squared norm of all blocks' gradients; and whether this norm and the
      skipped leaves are finite. This last flag is the same on all devices.
    """
    config, way = place.config, place.config.way
    if config.local:
        rest = {
            path: x
            for path, x in leaves_by_path(updates.tree).items()
            if path not in config.owned_paths
        }
        averaged = way.mean(
            rest
        )  # a single message for the leaves that all devices precondition
        updates = updates._replace(
            tree=map_by_path(lambda path, leaf: averaged.get(path, leaf), updates.tree)
        )
    leaves, matrices = (
        leaves_by_path(updates.tree),
        stack_all(state, updates, place.config.groups),
    )
    if updates.stacks:
        local, square = (
            matrices,
            sum_of_all(place, {name: x * x for name, x in matrices.items()}),
        )
    elif config.local:
        local = matrices | way.means(
            {name: matrices[name] for name in place.shards}, place.shards
        )
        square = sum_of_all(place, {name: x * x for name, x in local.items()})
    else:
        square = _sum(x * x for x in matrices.values())
        local = way.take(matrices, place.shards)
    usable = _all_finite(
        square,
        (leaf for path, leaf in leaves.items() if path in config.layers.skipped_paths),
    )
    # All devices have to agree before the next stages, which contain collectives.
    return updates, local, square, way.agree(usable)


def stack_all(state: KfacState, trees: Gradients, groups: Iterable[Group]) -> Vectors:
    """Return gradients or parameters as matrices `[k, d_in, d_out]` by group.

    Groups in `trees.stacks` have the blocks of this device, and other groups have all blocks.
    """
    leaves, dtypes = (
        leaves_by_path(trees.tree),
        {name: block.weight.dtype for name, block in state.blocks.items()},
    )
    matrices = {
        n: jnp.concatenate(parts, axis=1).astype(dtypes[n])
        for n, parts in trees.stacks.items()
    }
    return matrices | {
        g.name: g.stack_matrices(leaves, dtypes[g.name])
        for g in groups
        if g.name not in matrices
    }


def sums_of_shares(place: Place, matrices: Vectors) -> tuple[jax.Array, jax.Array]:
    """Return the sum of all entries in this device's own blocks, and the sum for the blocks that all devices hold."""
    owned = [
        place.only_owned(name, x)
        for name, x in matrices.items()
        if name in place.shards
    ]
    return _sum(owned), _sum(
        x for name, x in matrices.items() if name not in place.shards
    )


def sum_of_all(place: Place, matrices: Vectors) -> jax.Array:
    """Return the sum of all entries in all devices' blocks, from the matrices that each device preconditions."""
    owned, shared = sums_of_shares(place, matrices)
    return shared + place.config.way.total(owned)


def precondition(
    place: Place, now: Now, state: KfacState, gradients: Vectors
) -> tuple[Vectors, dict[str, Any], Vectors]:
    """Precondition the gradients of this device's blocks.

    Returns:
      The preconditioned gradients, and two dictionaries with entries for inverses that take in gradients
      (`takes_gradients`): the new state of the inverse, and the cosines `[k]` between the gradients and the previous
      step's directions.
    """
    config, result, advanced, angles = place.config, {}, {}, {}
    for group in config.groups:
        name, block, inverse = (
            group.name,
            state.blocks[group.name],
            group.inverse_of(config.inverse),
        )
        inverse_state, ready = (
            part_of(state, config.way, name, "inverse"),
            block.condition > 0,
        )
        if inverse.takes_gradients:
            momentum = Momentum(now.momentum, config.moves.nesterov)
            after = inverse.advance(
                inverse_state, gradients[name], now.damping, momentum, ready
            )
            advanced[name], result[name], angles[name] = after
        else:
            applied = inverse.apply(inverse_state, gradients[name].mT, now.damping).mT
            # A block without an inverse keeps its gradient.
            result[name] = jnp.where(
                per_block(ready, applied), applied, gradients[name]
            )
    return result, advanced, angles


def move(
    place: Place,
    now: Now,
    state: KfacState,
    directions: Vectors,
    angles: Vectors,
    gradients: Vectors,
    params: Gradients,
) -> tuple[Vectors, dict[str, Motion], jax.Array]:
    """Apply the KL clip, momentum, step lengths and adaptive rates to the preconditioned gradients.

    The steps contain no weight decay. They contain the learning rate only with `rate_in_momentum`.

    Returns:
      The steps, the momenta and rates of all blocks, and the scale of the KL clip.
    """
    config, moves, scale = place.config, place.config.moves, jnp.ones((), jnp.float32)
    steps, motions = dict(directions), {}
    last, highest = state.learning_rates
    full = (now.rate > 0) & (now.rate <= last) & (now.rate >= highest / 2)
    if now.limit is not None:
        products = {name: x * gradients[name] for name, x in steps.items()}
        scale = clip_scale(now.limit, now.rate, sum_of_all(place, products))
        steps = {name: scale.astype(x.dtype) * x for name, x in steps.items()}
    if moves.rate_in_momentum:
        steps = {name: -now.rate.astype(x.dtype) * x for name, x in steps.items()}
    for name in state.blocks:
        trace, rate = part_of(state, config.way, name, "motion")
        if rate is not None:
            angle = angles[name] if trace is None else cosine(trace, gradients[name])
            rate = adapted(rate, angle, full)
        if trace is not None:
            trace, steps[name] = Momentum(now.momentum, moves.nesterov).moved(
                trace, steps[name]
            )
        motions[name] = Motion(trace, rate)
    if moves.set_lengths:
        weights = stack_all(
            state, params, filter(moves.needs_params, place.config.groups)
        )
        if not params.stacks:
            weights = config.way.take(weights, place.shards)
        groups = config.groups
        stacks = {
            g.name: _stack(
                place, g, steps[g.name], weights.get(g.name), gradients[g.name]
            )
            for g in groups
        }
        # Groups without owners have the same values on all devices. Joined with owned groups, whose values vary over
        # devices, their results would be marked as varying as well.
        alike = (
            []
            if config.way.alone
            else [name for name in stacks if name not in place.shards]
        )
        for names in (stacks.keys() - alike, alike):
            chosen = {name: x for name, x in stacks.items() if name in names}
            steps |= lengthened(chosen, now.coefficient)
    for name, (_, rate) in motions.items():
        steps[name] = (
            steps[name] if rate is None else steps[name] * per_block(rate, steps[name])
        )
    return steps, motions, scale


def _stack(
    place: Place,
    group: Group,
    steps: jax.Array,
    params: jax.Array | None,
    gradients: jax.Array,
) -> Stack:
    """Build the `Stack` of a group. If its kernels are cut into pieces, `Stack.whole` adds up sums over pieces."""
    table, name, way = (
        find_kernels(group, place.config.moves),
        group.name,
        place.config.way,
    )
    if all(np.all(x == x[0]) for x in table):
        kernels = Kernels(*(jnp.asarray(x[:1]) for x in table))
    else:
        kernels = way.take({name: Kernels(*map(jnp.asarray, table))}, place.shards)[
            name
        ]
    pieces = np.concatenate(
        [np.full(layer.copies, layer.pieces) for layer in group.layers]
    )
    if np.all(pieces == 1):
        return Stack(steps, params, gradients, kernels, by_row=not group.block.kernel)
    whose = way.take(
        {name: jnp.asarray(np.repeat(np.arange(len(pieces)), pieces))}, place.shards
    )[name]

    def whole(sums):  # `[sums, k]`
        owned = jnp.where(place.owns[name], sums, 0)
        of_kernels = (
            jnp.zeros((len(sums), len(pieces)), sums.dtype).at[:, whose].add(owned)
        )
        return (way.total(of_kernels) if name in place.shards else of_kernels)[:, whose]

    return Stack(steps, params, gradients, kernels, whole=whole)


def restore(
    place: Place, updates: Gradients, steps: Vectors, usable: jax.Array
) -> tuple[Gradients, jax.Array]:
    """Return the steps in the form of `updates`, and whether the step is usable in the gradients' dtypes."""
    new: dict[str, jax.Array] = {}
    whole = {name: x for name, x in steps.items() if name not in updates.stacks}
    starts = {
        start: jnp.int32(start)
        for group in place.config.groups
        for start in group.starts
    }
    if place.config.way.alone and place.config.moves.set_lengths:
        arguments = usable, whole, starts
        usable, whole, starts = lax.platform_dependent(
            *arguments, cpu=_if_usable, default=lambda *same: same
        )
    for group in place.config.groups:
        if group.name in whole:
            new.update(group.split_matrices(whole[group.name], starts))
    tree = map_by_path(
        lambda path, leaf: new[path].astype(leaf.dtype) if path in new else leaf,
        updates.tree,
    )
    # A finite step may be too large for the gradients' dtype if this is narrower.
    leaves = leaves_by_path(tree)
    narrowed = [
        leaf
        for path, leaf in leaves.items()
        if path in new and leaf.dtype != new[path].dtype
    ]
    stacks = {}
    for name, slices in updates.stacks.items():
        parts = jnp.split(
            steps[name], np.cumsum([x.shape[1] for x in slices])[:-1], axis=1
        )
        stacks[name] = [
            x.astype(old.dtype) for x, old in zip(parts, slices, strict=True)
        ]
        narrowed += [
            place.only_owned(name, x)
            for x in stacks[name]
            if x.dtype != steps[name].dtype
        ]
    return Gradients(tree, stacks), usable & _all_finite(jnp.zeros(()), narrowed)


def _if_usable(
    usable: jax.Array, stacks: Vectors, starts: dict[int, jax.Array]
) -> tuple[Any, ...]:
    """Return the arguments if the step is usable, otherwise zeros.

    Without this `cond`, XLA for CPUs would compile the step length computation again for each leaf that is cut from a
    stack. If it knew the values of `starts`, it would also compile each cut separately.
    """
    return lax.cond(
        usable,
        lambda x: x,
        lambda x: jax.tree.map(jnp.zeros_like, x),
        (usable, stacks, starts),
    )


def measure(
    place: Place,
    now: Now,
    state: KfacState,
    motions: dict[str, Motion],
    square: jax.Array,
    squares: tuple[jax.Array, jax.Array],
    scale: jax.Array,
    usable: jax.Array,
) -> tuple[KfacMetrics, jax.Array]:
    """Compute the step's metrics. Devices exchange norms, extremes, and whether the step is usable.

    Args:
      place: the blocks that this device holds.
      now: the scalars of the step.
      state: the state before the step.
      motions: momenta and rates after the step.
      square: the squared norm of the gradient.
      squares: two squared norms of the preconditioned gradient: over the blocks that this device owns, and over the
        blocks that all devices hold.
      scale: the scale of the KL clip, 1 without a KL clip.
      usable: whether the step is usable on this device.

    Returns:
      The metrics, and whether the step is usable on all devices.
    """
    way, metrics = place.config.way, state.metrics
    blocks = state.blocks.values()
    ages = [
        jnp.where(block.condition > 0, state.count - block.inverted, 0)
        for block in blocks
    ]
    adapted_rates = {
        name: motion.rate for name, motion in motions.items() if motion.rate is not None
    }
    rates = [
        [jnp.where(place.owns[name], x, 0) for x in (rate, 1 / rate)]
        for name, rate in adapted_rates.items()
    ]
    parts = [[block.condition for block in blocks], ages, *zip(*rates, strict=True)]
    extremes = jnp.stack([jnp.max(join(part)).astype(jnp.float32) for part in parts])
    owned, shared = (x.astype(jnp.float32) for x in squares)
    # A single message sends both numbers.
    refusals, owned = way.total(jnp.stack([(~usable).astype(jnp.float32), owned]))
    extremes = way.largest(extremes)
    usable = (
        refusals == 0
    )  # the same on all devices, because later branches depend on it
    new = metrics._replace(
        damping=jnp.where(usable, now.damping, metrics.damping),
        gradient_norm=jnp.sqrt(square).astype(jnp.float32),
        preconditioned_norm=jnp.sqrt(owned + shared),
        condition=extremes[0],
        inverse_age=jnp.maximum(
            extremes[1].astype(jnp.int32) - ~usable, 0
        ),  # a rejected step does not count
        skipped_steps=metrics.skipped_steps + ~usable,
        kl_clip_scale=jnp.where(
            usable, scale.astype(jnp.float32), metrics.kl_clip_scale
        ),
        slowest=jnp.where(usable, 1 / extremes[3], metrics.slowest)
        if rates
        else jnp.ones((), jnp.float32),
        fastest=jnp.where(usable, extremes[2], metrics.fastest)
        if rates
        else jnp.ones((), jnp.float32),
    )
    return new, usable


def commit(
    state: KfacState,
    way: Way,
    advanced: dict[str, Any],
    motions: dict[str, Motion],
    usable: jax.Array,
) -> KfacState:
    """Write momenta, rates and the inverses' new states into the state if the step is usable."""
    for name, motion in motions.items():
        new = {"motion": motion} | (
            {"inverse": advanced[name]} if name in advanced else {}
        )
        old = {part: part_of(state, way, name, part) for part in new}
        state = with_parts(
            state,
            way,
            name,
            **jax.tree.map(lambda new, old: jnp.where(usable, new, old), new, old),
        )
    return state


def count(
    state: KfacState, now: Now, metrics: KfacMetrics, usable: jax.Array
) -> KfacState:
    """Return the state with the step counted if it is usable, and with the new metrics."""
    rates = jnp.stack([now.rate, jnp.maximum(now.rate, state.learning_rates[1])])
    return state._replace(
        learning_rates=jnp.where(usable, rates, state.learning_rates),
        count=jnp.where(usable, optax.safe_increment(state.count), state.count),
        refused=~usable,
        metrics=metrics,
    )


def _all_finite(square: jax.Array, leaves: Iterable[jax.Array]) -> jax.Array:
    """Return whether a sum of squares and all given leaves are finite."""
    return jnp.all(
        jnp.isfinite(square)
        & jnp.stack([jnp.array(True), *(finite(leaf, 0) for leaf in leaves)])
    )


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    """Return the sum of all entries of all arrays."""
    return sum((jnp.sum(x) for x in arrays), jnp.zeros((), jnp.float32))
