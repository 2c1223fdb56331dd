"""What is read off an optimizer state: scalars for a run to log, and the eigenvectors by layer for EKFAC."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kfac._checks import check_layers
from kfac._curvature.blocks import check_factors, group_layers
from kfac._curvature.refresh import one_by_one
from kfac._factors import Factors, Kronecker
from kfac._layers import Layers
from kfac._optimizer.reshard import some_states
from kfac._optimizer.state import AdaptiveDampingState, KfacState, check_groups, find_nodes, find_state, pure


def diagnostics(opt_state: Any) -> dict[str, jax.Array]:
    """Scalars worth logging, from the state of any chain that holds `scale_by_kfac`.

    Args:
      opt_state: an optimizer state; the preconditioner's part is looked for in it.

    Returns:
      `damping` of the last step, `gradient_norm` and `preconditioned_norm` (2-norms over the parameters with a
      curvature block), `condition` (largest condition number of what is inverted, each as of its last inversion: of the
      damped factors in the 1-norm, with `Eigh`, `Ekfac`, `Soap` of the damped blocks in the 2-norm), `inverse_age`
      (steps since the oldest inverse in use was computed), `statistics_age` (steps since the last that brought
      statistics, or since the start: it only grows if the loop does not call `observe`), `skipped_statistics` and
      `failed_inversions` (blocks, since the start), `skipped_steps` (updates that were not finite, an
      `optax.apply_if_finite` around it included), `kl_clip_scale` (1 without a KL clip), `slowest` and `fastest` of the
      layers' rates, with `adaptive_damping` the last `reduction_ratio` (NaN before the first) and the steps
      `taken_back`.

    Raises:
      ValueError: there is no K-FAC state, or more than one, in `opt_state`.
    """
    state = find_state(opt_state, "opt_state")
    scalars = state.metrics._asdict()
    scalars["statistics_age"] = jnp.maximum(state.count - 1 - state.measured, 0)
    for adaptive in find_nodes(opt_state, AdaptiveDampingState):
        scalars["reduction_ratio"] = adaptive.reduction_ratio
        scalars["taken_back"] = adaptive.taken_back
    for guard in find_nodes(opt_state, optax.ApplyIfFiniteState):
        if find_nodes(guard, KfacState):
            # What it rejects does not reach the preconditioner.
            scalars["skipped_steps"] += guard.total_notfinite
    return scalars


def statistics_due(opt_state: Any) -> jax.Array:
    """Tell whether `observe` should be called before the next step.

    `cost=` of `kfac.kfac` or `statistics_every=` says how often that is the case::

        if kfac.statistics_due(opt_state):
            opt_state = observe(opt_state, params, batch)
        params, opt_state = step(params, opt_state, batch)

    Reading the answer on the host waits for the step before. A loop that must not wait can count by itself.

    Args:
      opt_state: any tree that holds the state of `kfac.kfac` or `kfac.scale_by_kfac`.

    Returns:
      A bool, an array without axes. True if any of several states is due. A state of `jax.pmap` tells that of the first
      device.

    Raises:
      ValueError: `opt_state` holds no such state.
    """
    flags = [jnp.ravel(pure(state.due))[0].astype(bool) for state in some_states(opt_state, "opt_state")]
    return functools.reduce(jnp.logical_or, flags)


def eigenbasis(source: Any, layers: Layers) -> dict[str, Kronecker]:
    """The eigenvectors of the factors: what `value_and_grad` takes as `basis`.

    Jit-compatible. Of the state of an optimizer these are the eigenvectors that it preconditions with, and the same on
    all devices; inside `jax.pmap` and `jax.shard_map` take them from the state there. Moments for an optimizer must be
    in the basis of its own state, that which its step begins with: no error is possible where they are in another.

    Args:
      source: the one state of an optimizer with `inverse=kfac.Ekfac()` in a tree, or a `Factors`,
        whose factors are then decomposed.
      layers: what `find_layers` returned.

    Returns:
      For each layer that EKFAC corrects, those with two whole factors and one use (`Layer.correctable`), a
      `Kronecker(A, G)` of orthogonal matrices, `Q_A` `[copies?, d_in, d_in]` and `Q_G` `[copies?, d_out, d_out]`,
      columns in the order of growing eigenvalues. Before the first inversion they are identities.

    Raises:
      ValueError: `source` is neither, or is not one for these layers.
    """
    check_layers(layers)
    if isinstance(source, Factors):
        check_factors(source, layers)
        blocks: dict[str, Any] = {layer.name: source[layer.name] for layer in layers if layer.correctable}
        return {name: Kronecker(_eigenvectors(block.A), _eigenvectors(block.G)) for name, block in blocks.items()}
    state = find_state(source, "source")
    groups = group_layers(layers)
    check_groups(groups, state)
    basis: dict[str, Kronecker] = {}
    for group in [group for group in groups if group.correctable]:
        owned, vectors = state.owned[group.name], state.bases.get(group.name)
        if vectors is None and owned.blocks.inverse is not None:
            vectors = state.settings.inverse.basis(owned.blocks.inverse)
        if vectors is None:
            actual = state.settings.inverse
            raise ValueError(f"source must be a state with inverse=kfac.Ekfac(), but is one with {actual!r}")
        if vectors.A.shape[0] != group.size:
            raise ValueError("source has an axis of devices in front, as pmap returns it: call eigenbasis inside of it")
        parts = [(layer, part) for layer, part in group.split(vectors) if layer.correctable]
        basis |= {layer.name: group.block.unstack(layer, part) for layer, part in parts}
    return basis


def _eigenvectors(factor: jax.Array) -> jax.Array:
    matrices = factor.reshape(-1, *factor.shape[-2:])
    return one_by_one(lambda x: lax.linalg.eigh(x.mT, symmetrize_input=False)[0], matrices).reshape(factor.shape)
