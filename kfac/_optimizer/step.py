"""One step of the preconditioner on one device, as a list of stages."""

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
from kfac._optimizer.moves import Kernels, Motion, Now, Stack, adapted, clip_scale, find_kernels, lengthened
from kfac._optimizer.place import Config, Place, Vectors, join
from kfac._optimizer.segment import part_of, with_parts
from kfac._optimizer.state import KfacMetrics, KfacState, check_state, shards_of


class Gradients(NamedTuple):
    """Gradients, or the updates made of them.

    Attributes:
      tree: in the form of the parameters, without the leaves in `stacks`. Where there are stacks, one number stands for
        each skipped leaf: 0 if the leaf is finite, else NaN.
      stacks: empty, unless each owner got the gradients of its own blocks alone. Then for each group
        `[positions, d_in, d_out]`, cut into kernels and biases. From outside of `shard_map`, those of all devices in a
        row.
    """

    tree: Any
    stacks: dict[str, list[jax.Array]]


def preconditioned_step(
    config: Config, updates: Gradients, params: Gradients, state: KfacState, now: Now
) -> tuple[Gradients, KfacState]:
    """Make one step on one device.

    Args:
      config: the fixed settings.
      updates: the gradients.
      params: the parameters, for the lengths of steps; empty if these do not depend on them.
      state: the state before the step.
      now: the scalars of the step.
    """
    check_state(config, state)
    config.way.check("updates", updates.tree)
    place = Place(config, shards_of(state))
    updates, gradients, square, usable = take_gradients(place, state, updates)
    directions, advanced, angles = precondition(place, now, state, gradients)
    squares = sums_of_shares(place, {name: x * x for name, x in directions.items()})
    steps, motions, scale = move(place, now, state, directions, angles, gradients, params)
    to_all = {name: shard for name, shard in place.shards.items() if name not in updates.stacks}
    steps |= config.way.gather({name: steps[name] for name in to_all}, to_all)
    updates, usable = restore(place, updates, steps, usable & jnp.isfinite(sum(squares)))
    metrics, usable = measure(place, now, state, motions, square, squares, scale, usable)
    state = commit(state, config.way, advanced, motions, usable)
    return updates, count(state, now, metrics, usable)


def take_gradients(
    place: Place, state: KfacState, updates: Gradients
) -> tuple[Gradients, Vectors, jax.Array, jax.Array]:
    """The gradients as matrices `[k, d_in, d_out]` of the blocks that this device preconditions.

    Returns:
      The updates, averaged but for what owners alone need; the matrices; the squared norm of all; whether all are
      finite. All devices agree on that, for it decides whether this is a step at all.
    """
    config, way = place.config, place.config.way
    if config.local:
        rest = {path: x for path, x in leaves_by_path(updates.tree).items() if path not in config.owned_paths}
        averaged = way.mean(rest)  # of what all devices precondition, in one message
        updates = updates._replace(tree=map_by_path(lambda path, leaf: averaged.get(path, leaf), updates.tree))
    leaves, matrices = leaves_by_path(updates.tree), stack_all(state, updates, place.config.groups)
    if updates.stacks:
        local, square = matrices, sum_of_all(place, {name: x * x for name, x in matrices.items()})
    elif config.local:
        local = matrices | way.means({name: matrices[name] for name in place.shards}, place.shards)
        square = sum_of_all(place, {name: x * x for name, x in local.items()})
    else:
        square = _sum(x * x for x in matrices.values())
        local = way.take(matrices, place.shards)
    usable = _all_finite(square, (leaf for path, leaf in leaves.items() if path in config.layers.skipped_paths))
    # The same decision everywhere, whatever one device has seen: what follows holds collectives.
    return updates, local, square, way.agree(usable)


def stack_all(state: KfacState, trees: Gradients, groups: Iterable[Group]) -> Vectors:
    """Gradients, or parameters, of some groups as matrices `[k, d_in, d_out]` of all their blocks."""
    leaves, dtypes = leaves_by_path(trees.tree), {name: block.weight.dtype for name, block in state.blocks.items()}
    matrices = {n: jnp.concatenate(parts, axis=1).astype(dtypes[n]) for n, parts in trees.stacks.items()}
    return matrices | {g.name: g.stack_matrices(leaves, dtypes[g.name]) for g in groups if g.name not in matrices}


def sums_of_shares(place: Place, matrices: Vectors) -> tuple[jax.Array, jax.Array]:
    """The sums of all entries of the matrices that this device alone preconditions, and of those that all do."""
    owned = [place.only_owned(name, x) for name, x in matrices.items() if name in place.shards]
    return _sum(owned), _sum(x for name, x in matrices.items() if name not in place.shards)


def sum_of_all(place: Place, matrices: Vectors) -> jax.Array:
    """Sums all entries of the matrices of all devices, each of which has those that it preconditions."""
    owned, shared = sums_of_shares(place, matrices)
    return shared + place.config.way.total(owned)


def precondition(
    place: Place, now: Now, state: KfacState, gradients: Vectors
) -> tuple[Vectors, dict[str, Any], Vectors]:
    """Preconditions the gradients of the blocks that this device has.

    Returns:
      The preconditioned gradients. Of an inverse that takes in gradients, also what it keeps from now on, and the
      cosines between gradients and the directions of the step before.
    """
    config, result, advanced, angles = place.config, {}, {}, {}
    for group in config.groups:
        name, block, inverse = group.name, state.blocks[group.name], group.inverse_of(config.inverse)
        inverse_state, ready = part_of(state, config.way, name, "inverse"), block.condition > 0
        if inverse.takes_gradients:
            momentum = Momentum(now.momentum, config.moves.nesterov)
            after = inverse.advance(inverse_state, gradients[name], now.damping, momentum, ready)
            advanced[name], result[name], angles[name] = after
        else:
            applied = inverse.apply(inverse_state, gradients[name].mT, now.damping).mT
            # Not before there is an inverse.
            result[name] = jnp.where(per_block(ready, applied), applied, gradients[name])
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
    """The steps that follow from the preconditioned gradients, but for weight decay and learning rate.

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
            trace, steps[name] = Momentum(now.momentum, moves.nesterov).moved(trace, steps[name])
        motions[name] = Motion(trace, rate)
    if moves.set_lengths:
        weights = stack_all(state, params, filter(moves.needs_params, place.config.groups))
        if not params.stacks:
            weights = config.way.take(weights, place.shards)
        groups = config.groups
        stacks = {g.name: _stack(place, g, steps[g.name], weights.get(g.name), gradients[g.name]) for g in groups}
        # Groups without owners are the same on all devices. To stay so they share no array with those that differ.
        alike = [] if config.way.alone else [name for name in stacks if name not in place.shards]
        for names in (stacks.keys() - alike, alike):
            chosen = {name: x for name, x in stacks.items() if name in names}
            steps |= lengthened(chosen, now.coefficient)
    for name, (_, rate) in motions.items():
        steps[name] = steps[name] if rate is None else steps[name] * per_block(rate, steps[name])
    return steps, motions, scale


def _stack(place: Place, group: Group, steps: jax.Array, params: jax.Array | None, gradients: jax.Array) -> Stack:
    """A group for `lengthened`, which adds up the sums over the pieces of a kernel that is cut."""
    table, name, way = find_kernels(group, place.config.moves), group.name, place.config.way
    if all(np.all(x == x[0]) for x in table):
        kernels = Kernels(*(jnp.asarray(x[:1]) for x in table))
    else:
        kernels = way.take({name: Kernels(*map(jnp.asarray, table))}, place.shards)[name]
    pieces = np.concatenate([np.full(layer.copies, layer.pieces) for layer in group.layers])
    if np.all(pieces == 1):
        return Stack(steps, params, gradients, kernels, by_row=not group.block.kernel)
    whose = way.take({name: jnp.asarray(np.repeat(np.arange(len(pieces)), pieces))}, place.shards)[name]

    def whole(sums):  # `[sums, k]`
        owned = jnp.where(place.owns[name], sums, 0)
        of_kernels = jnp.zeros((len(sums), len(pieces)), sums.dtype).at[:, whose].add(owned)
        return (way.total(of_kernels) if name in place.shards else of_kernels)[:, whose]

    return Stack(steps, params, gradients, kernels, whole=whole)


def restore(place: Place, updates: Gradients, steps: Vectors, usable: jax.Array) -> tuple[Gradients, jax.Array]:
    """The steps in the form of `updates`, and whether all are finite."""
    new: dict[str, jax.Array] = {}
    whole = {name: x for name, x in steps.items() if name not in updates.stacks}
    starts = {start: jnp.int32(start) for group in place.config.groups for start in group.starts}
    if place.config.way.alone and place.config.moves.set_lengths:
        arguments = usable, whole, starts
        usable, whole, starts = lax.platform_dependent(*arguments, cpu=_if_usable, default=lambda *same: same)
    for group in place.config.groups:
        if group.name in whole:
            new.update(group.split_matrices(whole[group.name], starts))
    tree = map_by_path(lambda path, leaf: new[path].astype(leaf.dtype) if path in new else leaf, updates.tree)
    # What is finite as it was computed may be too large for a narrower dtype of the gradients.
    leaves = leaves_by_path(tree)
    narrowed = [leaf for path, leaf in leaves.items() if path in new and leaf.dtype != new[path].dtype]
    stacks = {}
    for name, slices in updates.stacks.items():
        parts = jnp.split(steps[name], np.cumsum([x.shape[1] for x in slices])[:-1], axis=1)
        stacks[name] = [x.astype(old.dtype) for x, old in zip(parts, slices, strict=True)]
        narrowed += [place.only_owned(name, x) for x in stacks[name] if x.dtype != steps[name].dtype]
    return Gradients(tree, stacks), usable & _all_finite(jnp.zeros(()), narrowed)


def _if_usable(usable: jax.Array, stacks: Vectors, starts: dict[int, jax.Array]) -> tuple[Any, ...]:
    """Whether the step is usable, the stacks, and where their layers start; or zeros for both.

    On CPUs XLA would else compile what makes the lengths of steps anew for each leaf that is cut from a stack; and
    each cut, if it knew where.
    """
    return lax.cond(usable, lambda x: x, lambda x: jax.tree.map(jnp.zeros_like, x), (usable, stacks, starts))


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
    """Makes the metrics of the step. Devices exchange counts, norms and extremes, and whether the step is usable.

    Args:
      place: the blocks that this device holds.
      now: the scalars of the step.
      state: the state before the step.
      motions: those after the step.
      square: the squared norm of the gradient.
      squares: those of the preconditioned gradient: of the blocks of this device alone, and of those that all have.
      scale: that of the KL clip, or None without one.
      usable: whether this device finds it so.
    """
    way, metrics = place.config.way, state.metrics
    blocks = state.blocks.values()
    ages = [jnp.where(block.condition > 0, state.count - block.inverted, 0) for block in blocks]
    adapted_rates = {name: motion.rate for name, motion in motions.items() if motion.rate is not None}
    rates = [[jnp.where(place.owns[name], x, 0) for x in (rate, 1 / rate)] for name, rate in adapted_rates.items()]
    parts = [[block.condition for block in blocks], ages, *zip(*rates, strict=True)]
    extremes = jnp.stack([jnp.max(join(part)).astype(jnp.float32) for part in parts])
    owned, shared = (x.astype(jnp.float32) for x in squares)
    # One message for both numbers.
    refusals, owned = way.total(jnp.stack([(~usable).astype(jnp.float32), owned]))
    extremes = way.largest(extremes)
    usable = refusals == 0  # agreed once more: the next step's decisions follow from it
    new = metrics._replace(
        damping=jnp.where(usable, now.damping, metrics.damping),
        gradient_norm=jnp.sqrt(square).astype(jnp.float32),
        preconditioned_norm=jnp.sqrt(owned + shared),
        condition=extremes[0],
        inverse_age=jnp.maximum(extremes[1].astype(jnp.int32) - ~usable, 0),  # a step that is refused is none
        skipped_steps=metrics.skipped_steps + ~usable,
        kl_clip_scale=jnp.where(usable, scale.astype(jnp.float32), metrics.kl_clip_scale),
        slowest=jnp.where(usable, 1 / extremes[3], metrics.slowest) if rates else jnp.ones((), jnp.float32),
        fastest=jnp.where(usable, extremes[2], metrics.fastest) if rates else jnp.ones((), jnp.float32),
    )
    return new, usable


def commit(
    state: KfacState, way: Way, advanced: dict[str, Any], motions: dict[str, Motion], usable: jax.Array
) -> KfacState:
    """Writes moments, momenta and rates into the state, if the step is `usable`."""
    for name, motion in motions.items():
        new = {"motion": motion} | ({"inverse": advanced[name]} if name in advanced else {})
        old = {part: part_of(state, way, name, part) for part in new}
        state = with_parts(state, way, name, **jax.tree.map(lambda new, old: jnp.where(usable, new, old), new, old))
    return state


def count(state: KfacState, now: Now, metrics: KfacMetrics, usable: jax.Array) -> KfacState:
    """The state after the step."""
    rates = jnp.stack([now.rate, jnp.maximum(now.rate, state.learning_rates[1])])
    return state._replace(
        learning_rates=jnp.where(usable, rates, state.learning_rates),
        count=jnp.where(usable, optax.safe_increment(state.count), state.count),
        refused=~usable,
        metrics=metrics,
    )


def _all_finite(square: jax.Array, leaves: Iterable[jax.Array]) -> jax.Array:
    """Whether a sum of squares and some leaves are finite."""
    return jnp.all(jnp.isfinite(square) & jnp.stack([jnp.array(True), *(finite(leaf, 0) for leaf in leaves)]))


def _sum(arrays: Iterable[jax.Array]) -> jax.Array:
    """The sum of all entries of all arrays."""
    return sum((jnp.sum(x) for x in arrays), jnp.zeros((), jnp.float32))
