"""What `update` is given: factors that were forgotten or are in another's place, biases that a wrapper has hidden."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import optax

from kfac._checks import check_layers
from kfac._factors import Factors, Tied
from kfac._layers import Layer, Layers, leaf_alone, leaves_by_path
from kfac._optimizer.state import has_masked, how_to_hide

FORGOTTEN = (
    "update was called without factors, so training goes by momentum alone: write tx.update(grads, opt_state, params, "
    "factors=factors), with those of kfac.value_and_grad, or factors=None for a step that is to go without. "
    "TrainState.apply_gradients of flax drops them, as do some wrappers of optax: docs/interop.md has a line for each"
)


def fitted(
    layers: Layers, build: Callable[[Layers], optax.GradientTransformationExtraArgs]
) -> optax.GradientTransformationExtraArgs:
    """What `build` makes of the layers, without the biases that `optax.masked` and `optax.partition` hide from it."""
    check_layers(layers)
    made, told = functools.cache(build), [False]
    made(layers)  # which checks the options

    def init(params):
        return made(_without_hidden(layers, params)).init(params)

    def update(updates, state, params=None, *others, **extra):
        factors = extra.get("factors")
        if others:
            raise TypeError("update takes factors by name: tx.update(grads, opt_state, params, factors=factors)")
        if isinstance(updates, Factors):
            how = "loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)"
            raise ValueError(f"updates are statistics, where gradients belong: {how}")
        visible = _without_hidden(layers, updates)
        if visible is not layers and isinstance(factors, Factors):
            extra["factors"] = _without_rows(factors, layers, visible)
        result = made(visible).update(updates, state, params, **extra)
        if not told[0] and "factors" not in extra:
            warnings.warn(FORGOTTEN, stacklevel=2)
        told[0] = True
        return result

    return optax.GradientTransformationExtraArgs(init, update)


def _without_hidden(layers: Layers, tree: Any) -> Layers:
    """The layers, with each bias that is hidden in `tree` as if it had been skipped, where its kernel is not hidden."""
    if not has_masked(tree):
        return layers
    leaves = leaves_by_path(tree)

    def parts(layer: Layer) -> list[Layer]:  # its homogeneous 1 is the last column of the kernel's matrix
        if not layer.has_bias or [path in leaves for path in layer.params] != [True, False]:
            return [layer]
        # Blocks stay where they are: the last one of `A` has zeros in the place of the 1.
        kernel = leaf_alone(layer, 0, layer.d_in - (layer.cut[0] == 1))
        return [kernel, Layer(layer.params[1], "skipped", layer.params[1:], layer.shapes[1:])]

    blocks = [part for layer in layers for part in parts(layer)]
    if len(blocks) == len(layers):
        return layers
    blocks.sort(key=lambda layer: min(map(layers.paths.index, layer.params)))
    return dataclasses.replace(layers, blocks=tuple(blocks))


def _without_rows(factors: Factors, layers: Layers, visible: Layers) -> Any:
    """Removes the homogeneous 1, the last row and column of `A`, from the factors of layers whose bias is hidden."""
    blocks = dict(factors)
    for layer in layers:
        d_in = visible[layer.name].d_in
        if visible[layer.name].params == layer.params or layer.name not in blocks:
            continue
        block: Any = blocks[layer.name]
        block = block.combined() if block.wire is not None else block
        if isinstance(block, Tied) or block.moments is not None:
            what = f"bias {layer.params[1]!r} is masked and its kernel is not, which its statistics do not allow"
            raise ValueError(f"{what}: {how_to_hide(layer.params[1:])}")
        if "A" in layer.diagonal:
            A = block.A.at[..., -1].set(0)[..., :d_in]
        elif layer.cut[0] > 1:
            last = layer.d_in - 1 - (layer.cut[0] - 1) * block.A.shape[-1]  # where the 1 is in the last block
            A = block.A.at[..., -1, last, :].set(0).at[..., -1, :, last].set(0)
        else:
            A = block.A[..., :d_in, :d_in]
        blocks[layer.name] = dataclasses.replace(block, A=A)
    return Factors(blocks)
