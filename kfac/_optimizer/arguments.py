"""Check the arguments to `init` and `update`, and remove biases that a wrapper hides from the optimizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import optax

from kfac._checks import check_layers
from kfac._factors import Factors
from kfac._layers import Layer, Layers, leaf_alone
from kfac._leaves import leaves_by_path
from kfac._mesh import PyTree
from kfac._optimizer.reshard import on_states
from kfac._optimizer.state import has_masked

HOW_TO_OBSERVE = "opt_state = kfac.observe(opt_state, factors)"


def hide_masked_biases(
    layers: Layers,
    build: Callable[[Layers], optax.GradientTransformationExtraArgs],
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for the layers without the biases that `optax.masked` or `optax.partition` hides.

    `init` and `update` find the hidden biases from their arguments.

    Args:
      layers: the layers that `find_layers` returned.
      build: a function from layers to an optimizer.

    Raises:
      ValueError: `layers` is not a `Layers`; in `update`, the updates are `Factors` instead of gradients.
      TypeError: in `update`, factors are passed by keyword.
    """
    check_layers(layers)
    made = functools.cache(build)
    # Check the options.
    made(layers)

    def init(params):
        visible = _without_hidden(layers, params)
        state = made(visible).init(params)
        if visible is layers:
            return state

        def with_found(node):
            settings = dataclasses.replace(node.settings, found=layers)
            return node._replace(settings=settings)

        return on_states(with_found, state)

    def update(updates, state, params=None, **extra):
        if isinstance(updates, Factors):
            raise ValueError(
                f"updates are statistics, where gradients belong: {HOW_TO_OBSERVE}"
            )
        if "factors" in extra:
            raise TypeError(f"update takes no factors: call {HOW_TO_OBSERVE} before it")
        tx = made(_without_hidden(layers, updates))
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def _without_hidden(layers: Layers, tree: PyTree) -> Layers:
    """Return the layers with hidden biases as skipped layers.

    A bias counts as hidden if `tree` contains its kernel, but not the bias.
    """
    if not has_masked(tree):
        return layers
    leaves = leaves_by_path(tree)

    blocks = []
    for layer in layers:
        visible = [path in leaves for path in layer.params]
        if not layer.has_bias or visible != [True, False]:
            blocks.append(layer)
            continue
        # Remove the homogeneous 1, the last row and column of `A`. If `A` is cut into blocks, keep `d_in`, so that
        # the blocks keep their shape: the last block then has zeros in place of the 1.
        kernel = leaf_alone(layer, 0, layer.d_in - (layer.num_blocks[0] == 1))
        params = layer.params[1:]
        shapes = layer.shapes[1:]
        blocks += [kernel, Layer(params[0], "skipped", params, shapes)]
    if len(blocks) == len(layers):
        return layers
    blocks.sort(key=lambda layer: min(map(layers.paths.index, layer.params)))
    return dataclasses.replace(layers, blocks=tuple(blocks))
