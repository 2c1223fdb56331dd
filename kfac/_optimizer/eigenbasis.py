"""Read the eigenvectors for EKFAC's moments from an optimizer state or from a batch's factors."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from kfac._checks import check_layers
from kfac._curvature.blocks import check_factors, group_layers
from kfac._factors import Basis, Factors
from kfac._layers import Layers
from kfac._mesh import on_mesh
from kfac._optimizer.flat_state import block_of
from kfac._optimizer.state import check_groups, find_state, state_spec


@on_mesh
def eigenbasis(source: Any, layers: Layers) -> dict[str, Basis]:
    """Return the eigenvectors of the factors, for the argument `basis` of `value_and_grad`.

    This function works under `jit`. For an optimizer state it returns the eigenvectors that the optimizer preconditions
    with, the same on all devices. With `jax.pmap` or `jax.shard_map`, call it inside the mapped function.

    Moments for an optimizer must be in the basis of the very state that `observe` updates with them. No error is raised
    if they are in another basis.

    Args:
      source: a tree that holds a single state of an optimizer with `preconditioner=kfac.EKFAC()`, or a `Factors`, whose
        factors are then decomposed.
      layers: the layers that `find_layers` returned.

    Returns:
      A `kfac.types.Basis` of orthogonal matrices for each layer that EKFAC corrects, by layer name. `A` is `Q_A`,
      `[copies?, d_in, d_in]`, and `G` is `Q_G`, `[copies?, d_out, d_out]`, with columns in the order of increasing
      eigenvalues. Before the first refresh they are identities. EKFAC corrects layers that have a single use, known
      examples and two full, uncut factors (`Layer.supports_ekfac`).

    Raises:
      ValueError: `source` holds no such state or several, or does not fit the layers.
    """
    check_layers(layers)
    basis = {}
    if isinstance(source, Factors):
        check_factors(source, layers)
        for layer in layers:
            if layer.supports_ekfac:
                block: Any = source[layer.name]
                basis[layer.name] = Basis(
                    _eigenvectors(block.A), _eigenvectors(block.G)
                )
        return basis
    state = find_state(source, "source")
    groups = group_layers(layers, state.settings.preconditioner)
    check_groups(groups, state)
    if state.count.ndim:
        raise ValueError(
            "source has an axis of devices in front, as pmap returns it: call eigenbasis inside of it"
        )
    settings = state.settings
    comm, mesh = settings.distribution.comm(state, settings.devices)

    def gather(state):
        """Return the eigenvectors of blocks with moments, on all devices."""
        bases = {}
        for group in state.settings.groups:
            preconditioner = group.preconditioner_of(state.settings.preconditioner)
            block = block_of(state, comm, group.name)
            vectors = preconditioner.basis(block.preconditioner)
            if vectors is not None:
                bases[group.name] = vectors
        return comm.gather(bases, state.settings.assignments)

    if mesh is not None:
        specs = state_spec(comm.owner_axes)
        gather = jax.shard_map(
            gather, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec()
        )
    stacks = gather(state)
    for group in groups:
        if not group.supports_ekfac:
            continue
        if group.name not in stacks:
            raise ValueError(
                "source must be a state with preconditioner=kfac.EKFAC(), but is one with "
                f"{state.settings.preconditioner!r}"
            )
        for layer, part in group.split(stacks[group.name]):
            if layer.supports_ekfac:
                basis[layer.name] = group.unstack(layer, part)
    return basis


def _eigenvectors(factor: Array) -> Array:
    def vectors(matrix):
        return lax.linalg.eigh(matrix.mT, symmetrize_input=False)[0]

    matrices = factor.reshape(-1, *factor.shape[-2:])
    # One matrix after another: on CPUs, see `in_portions`; on CUDA, a stack is a loop over its matrices anyway.
    return lax.map(vectors, matrices).reshape(factor.shape)
