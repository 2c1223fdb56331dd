"""Blocks of shapes that fewer blocks than devices have, as a state keeps them: end to end on their owners.

Every device runs one program, so a step has a stack of each group on every device, with room for a block that most do
not have. Between steps each device keeps what it owns of such groups in one vector for each part of a state, as long as
the longest: averages as triangles, inverses, momenta. A step opens the state, and closes what it has changed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._curvature.symmetric import flatten, unflatten
from kfac._distributed.collectives import here, laid_out, owns_last
from kfac._distributed.owners import Shard
from kfac._distributed.segments import lay_end_to_end
from kfac._factors import Kronecker, Packed
from kfac._optimizer.state import Form, KfacState, Owned, Segment
from kfac._varying import as_varying, varying_axes


class Places(NamedTuple):
    """Where the blocks of some groups are in one part of the segments.

    Attributes:
      forms: by group.
      starts: by group, and by owner in the order of its blocks.
      sizes: elements of a block of each group.
      room: elements of the longest segment.
    """

    forms: dict[str, Form]
    starts: dict[str, dict[int, int]]
    sizes: dict[str, int]
    room: int


@functools.cache
def size_of(part: str, form: Form) -> int:
    """Elements of one block in a part of a segment."""
    return jax.eval_shape(functools.partial(_flat, part), form.shapes(part)).shape[1]


def find_places(owned: Mapping[str, Owned]) -> dict[str, Places]:
    """By part, of those that some group has something in."""
    found = {}
    for part in Segment._fields:
        forms = {name: own.form for name, own in owned.items() if own.form and jax.tree.leaves(own.form.shapes(part))}
        if forms:
            sizes = {name: size_of(part, form) for name, form in forms.items()}
            starts, lengths = lay_end_to_end({name: own.shard for name, own in owned.items()}, sizes)
            found[part] = Places(forms, starts, sizes, max(lengths.values()))
    return found


def opened(state: KfacState, axis: Any) -> KfacState:
    """A state in which all blocks stand in stacks; zeros where this device has none of a group."""
    new: dict[str, dict[str, Any]] = {name: {} for name in state.owned}
    for part, places in find_places(state.owned).items():
        for name, starts in places.starts.items():
            own, begin = state.owned[name], here(starts, places.room, axis)
            flat = lax.dynamic_slice_in_dim(getattr(state.segment, part), begin, places.sizes[name])
            flat = jnp.where(owns_last(own.shard, axis), flat, 0)
            new[name][part] = _formed(part, flat[None], places.forms[name])
    return _with(state, new)


def closed(state: KfacState, axis: Any, before: KfacState | None = None) -> KfacState:
    """The inverse of `opened`, which has made `before`: what is as it was there is not written."""
    new: dict[str, dict[str, Any]] = {name: {} for name in state.owned}
    parts = _zeros(state.owned, 1) if before is None else state.segment._asdict()
    for part, places in find_places(state.owned).items():
        for name, starts in places.starts.items():
            stack, new[name][part] = getattr(state.owned[name].blocks, part), None
            old = () if before is None else jax.tree.leaves(getattr(before.owned[name].blocks, part))
            if before is not None and all(a is b for a, b in zip(jax.tree.leaves(stack), old, strict=True)):
                continue
            begin = here(starts, places.room, axis)
            kept = lax.dynamic_slice_in_dim(parts[part], begin, places.sizes[name])
            flat = _flat(part, stack)[0].astype(kept.dtype)
            flat = jnp.where(owns_last(state.owned[name].shard, axis), flat, kept)
            parts[part] = lax.dynamic_update_slice_in_dim(as_varying(parts[part], varying_axes(flat)), flat, begin, 0)
    return _with(state, new)._replace(segment=Segment(**parts))


def gathered(state: KfacState, whole: Callable[[jax.Array], jax.Array]) -> dict[str, dict[str, Any]]:
    """From outside, what the segments of all devices hold, by group and part, with blocks in their order.

    `whole` makes an array one that is whole.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in state.owned}
    for part, places in find_places(state.owned).items():
        everywhere = whole(getattr(state.segment, part))
        for name, starts in places.starts.items():
            begins = [device * places.room + start for device, start in starts.items()]
            rows = [lax.slice_in_dim(everywhere, begin, begin + places.sizes[name]) for begin in begins]
            found[name][part] = _formed(part, jnp.stack(rows), places.forms[name])
    return found


def scattered(state: KfacState, shards: Mapping[str, Shard]) -> KfacState:
    """A state of one device with the segments that devices have by `shards`; all else is still to be dealt out."""
    owned = {
        name: dataclasses.replace(own, shard=shards[name], form=None if shards[name].full else Form.of(own.blocks))
        for name, own in state.owned.items()
    }
    devices = max((shard.devices for shard in shards.values()), default=1)
    new: dict[str, dict[str, Any]] = {name: {} for name in owned}
    parts = _zeros(owned, devices)
    for part, places in find_places(owned).items():
        vectors: dict[int, jax.Array] = {}
        for name, starts in places.starts.items():
            flat, new[name][part] = _flat(part, getattr(owned[name].blocks, part)), None
            vectors |= {device * places.room + s: x for (device, s), x in zip(starts.items(), flat, strict=True)}
        parts[part] = laid_out(dict(sorted(vectors.items())), devices * places.room).astype(parts[part].dtype)
    return _with(state._replace(owned=owned), new)._replace(segment=Segment(**parts))


def _zeros(owned: Mapping[str, Owned], devices: int) -> dict[str, jax.Array]:
    """Empty segments of so many devices in a row."""
    found = {}
    for part, places in find_places(owned).items():
        dtypes = [x.dtype for form in places.forms.values() for x in jax.tree.leaves(form.shapes(part))]
        found[part] = jnp.zeros(devices * places.room, jnp.result_type(*dtypes))
    return found


def _with(state: KfacState, parts: Mapping[str, Mapping[str, Any]]) -> KfacState:
    owned = {n: dataclasses.replace(own, blocks=own.blocks._replace(**parts[n])) for n, own in state.owned.items()}
    return state._replace(owned=owned)


def _flat(part: str, tree: Any) -> jax.Array:
    return flatten(_packed(tree) if part == "factors" else tree)


def _formed(part: str, flat: jax.Array, form: Form) -> Any:
    like = form.shapes(part)
    return unflatten(flat, jax.eval_shape(_packed, like)).unpacked() if part == "factors" else unflatten(flat, like)


def _packed(factors: Kronecker) -> Packed:
    return Packed.of(factors, (factors.A.shape[1:], factors.G.shape[1:]))
