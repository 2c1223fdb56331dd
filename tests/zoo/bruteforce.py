"""Compute the statistics of a loss by brute force: all loops are unrolled and all elements of parameters are numbered.

This module shares no code or ideas with the package, and knows nothing about axes, taps or kinds of layers. It runs the
loss's program operation by operation, with scans as Python loops. Each element of each parameter has a serial number.
If an operation only moves elements (reshapes, transposes, slices, concatenations), NumPy moves the serial numbers in
the same way. Where numbered elements meet other arrays, a zero is added:

- to the result of a product, convolution or lookup. The gradient with respect to this zero is `g`, and the other
  operand is `a`.
- to the elements themselves if they are added to something or multiplied by something. The gradient with respect to
  this zero is the gradient for each place that uses an element. An array that does not depend on the batch may be added
  to the elements before, unless the addition repeats them.

In the end, the serial numbers map the rows of `a` and `g` to the rows and columns of a layer's matrix. A meeting is
dead if its gradient is zero in all iterations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

import kfac
from oracle import Geometry, im2col

NONE = -1
_SAME = {"convert_element_type", "copy", "copy_p", "reduce_precision", "optimization_barrier", "sharding_constraint"}


@dataclasses.dataclass
class Numbered:
    """The serial numbers of an array's entries, `NONE` for other entries, and the factor that multiplies them."""

    serial: np.ndarray
    factor: Any = None

    @property
    def is_repeated(self) -> bool:
        return len(np.unique(self.serial)) < self.serial.size


@dataclasses.dataclass
class Meeting:
    """A place where numbered elements meet other arrays."""

    kind: str
    place: tuple[int, ...]
    serial: np.ndarray
    params: dict[str, Any]
    flipped: bool = False  # the parameter is the first operand of a product


class _Run:
    def __init__(self, zeros: list[Any] | None):
        self.zeros, self.meetings, self.shapes, self.seen = zeros, [], [], []
        self.of_batch: dict[int, Any] = {}  # values that depend on the batch, by identity

    def meet(self, meeting: Meeting, shape, dtype, seen) -> Any:
        index = len(self.meetings)
        self.meetings.append(meeting)
        self.shapes.append((shape, dtype))
        self.seen.append(seen)
        return jnp.zeros(shape, dtype) if self.zeros is None else self.zeros[index]

    def program(self, jaxpr, consts, arguments, place):
        values = dict(zip(jaxpr.constvars, ((c, None) for c in consts), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom):
            return (atom.val, None) if hasattr(atom, "val") else values[atom]

        for k, eqn in enumerate(jaxpr.eqns):
            inputs = [read(atom) for atom in eqn.invars]
            results = self.equation(eqn, inputs, (*place, k))
            if any(id(value) in self.of_batch for value, _ in inputs):
                self.of_batch |= {id(value): value for value, _ in results}
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, eqn, inputs, place):
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            return self.scan(eqn, inputs, place)
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if key in params and name not in ("while", "cond", "custom_vjp_call", "pallas_call"):
                inner = params[key]
                inner, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
                return self.program(inner, consts, inputs, place)
        values, tags = [v for v, _ in inputs], [t for _, t in inputs]
        numbered = [k for k, tag in enumerate(tags) if tag is not None]
        if numbered:
            found = self.with_numbers(eqn, name, params, values, tags, numbered, place)
            if found is not None:
                return found
        return [(out, None) for out in _bind(eqn, values)]

    def scan(self, eqn, inputs, place):
        params, closed = eqn.params, eqn.params["jaxpr"]
        # If an array has one axis more than the body's argument, the body gets a slice of the array.
        pairs = zip((*eqn.invars, *eqn.outvars), (*closed.jaxpr.invars, *closed.jaxpr.outvars), strict=True)
        sliced = [outer.aval.ndim > inner.aval.ndim for outer, inner in pairs]
        n_carry = sliced[len(eqn.invars) :].count(False)
        n_consts = sliced[: len(eqn.invars)].count(False) - n_carry
        consts, carry = inputs[:n_consts], inputs[n_consts : n_consts + n_carry]
        xs, collected = inputs[n_consts + n_carry :], []
        order = range(params["length"])
        for i in reversed(order) if params["reverse"] else order:
            row = [(v[i], None if t is None else _moved(t, lambda a, i=i: a[i])) for v, t in xs]
            of_batch = [new for (new, _), (v, _) in zip(row, xs, strict=True) if id(v) in self.of_batch]
            self.of_batch |= {id(value): value for value in of_batch}
            outs = self.program(closed.jaxpr, closed.consts, [*consts, *carry, *row], place)
            carry = outs[:n_carry]
            collected.append(outs[n_carry:])
        collected = collected[::-1] if params["reverse"] else collected
        ys = []
        for column in zip(*collected, strict=True):
            tag = None
            if all(t is not None and t.factor is None for _, t in column):
                tag = Numbered(np.stack([t.serial for _, t in column]))
            ys.append((jnp.stack([v for v, _ in column]), tag))
        return [*carry, *ys]

    def with_numbers(self, eqn, name, params, values, tags, numbered, place):
        tag = tags[numbered[0]]
        if name in _SAME:
            return list(zip(_bind(eqn, values), tags, strict=True))
        if name in ("concatenate", "stack"):
            parts = [
                t.serial if t is not None else np.full(np.shape(v), NONE) for v, t in zip(values, tags, strict=True)
            ]
            if all(tags[k].factor is None for k in numbered):
                join = {"concatenate": np.concatenate, "stack": np.stack}[name]
                return [(_bind(eqn, values)[0], Numbered(join(parts, params.get("dimension", params.get("axis")))))]
            return None
        if len(numbered) > 1:
            # A parameter that is repeated for the examples, such as a learned first state, counts as data.
            numbered = [k for k in numbered if not tags[k].is_repeated]
            if len(numbered) != 1:
                return None
            tag = tags[numbered[0]]
        if (move := _mover(name, params)) is not None:
            outs = _bind(eqn, values)
            moved = _moved(tag, move)
            return list(zip(outs, moved if isinstance(moved, list) else [moved], strict=True))
        (k,) = numbered
        alike = tag.serial.shape == eqn.outvars[0].aval.shape and tag.factor is None
        if name in ("add", "add_any") and alike and id(values[1 - k]) not in self.of_batch and not tag.is_repeated:
            return [(values[0] + values[1], tag)]
        if name in ("add", "add_any", "sub", "mul", "div"):
            tag = tags[k] = _moved(tag, lambda a: _spread(a, eqn.outvars[0].aval.shape))
        if name == "neg":
            return [(-values[0], Numbered(tag.serial, -1.0 if tag.factor is None else -tag.factor))]
        if name in ("mul", "div") and not tag.is_repeated and not (name == "div" and k == 1):
            other = values[1 - k]
            other = 1 / other if name == "div" else other
            factor = other if tag.factor is None else tag.factor * other
            return [(_bind(eqn, values)[0], Numbered(tag.serial, factor))]
        if name == "select_n" and k > 0 and tag.factor is None:
            return [(_bind(eqn, values)[0], Numbered(tag.serial, values[0] == (k == 2)))]
        if name in ("add", "add_any", "sub", "mul", "div"):
            shape, dtype = eqn.outvars[0].aval.shape, values[k].dtype
            zero = self.meet(Meeting("vector", place, tag.serial, {}), shape, dtype, ())
            values[k] = values[k] + (zero if tag.factor is None else zero * tag.factor)
            if name == "div":
                return [(values[0] / values[1], None)]
            sign = -1 if name == "sub" else 1
            return [(values[0] * values[1] if name == "mul" else values[0] + sign * values[1], None)]
        if name == "dot_general" and (scaled := self.scaled(eqn, params, values, tag, k, place)) is not None:
            return [(scaled, None)]
        if name in ("dot_general", "ragged_dot_general", "ragged_dot") or (name == "conv_general_dilated" and k == 1):
            (y,) = _bind(eqn, values)
            seen = [values[j] if j != k else None for j in range(len(values))]
            seen = (*seen, 1.0 if tag.factor is None else tag.factor)
            meeting = Meeting(name, place, tag.serial, params, flipped=k == 0)
            return [(y + self.meet(meeting, y.shape, y.dtype, seen), None)]
        if name == "gather" and k == 0 and tag.factor is None:
            (y,) = _bind(eqn, values)
            (rows,) = _bind(eqn, [jnp.asarray(tag.serial + 1, values[0].dtype), values[1]])  # zeros or NaN out of range
            meeting = Meeting(name, place, tag.serial, params)
            return [(y + self.meet(meeting, y.shape, y.dtype, (rows,)), None)]
        return None

    def scaled(self, eqn, params, values, tag, k, place):
        """Evaluate a `dot_general` that multiplies an array elementwise by a parameter. Return None for any other."""
        contracted, batch = params["dimension_numbers"]
        if contracted[0] or len(batch[k]) < values[k].ndim:
            return None
        # The examples are on the first axis of the other array, and stay there until the product.
        other = values[1 - k].transpose(*(j for j in range(values[1 - k].ndim) if j not in batch[1 - k]), *batch[1 - k])
        tag = _moved(tag, lambda a: _spread(a.transpose(batch[k]), other.shape))
        zero = self.meet(Meeting("vector", place, tag.serial, {}), other.shape, other.dtype, ())
        own = values[k].transpose(batch[k]) + (zero if tag.factor is None else zero * tag.factor)
        free = other.ndim - len(batch[k])
        return jnp.moveaxis(own * other, range(free), range(-free, 0))


@functools.cache
def _empty():
    return jax.make_jaxpr(lambda: 0)().jaxpr


def _bind(eqn, values):
    """Evaluate an equation."""
    inputs, order = [], []
    for var, value in zip(eqn.invars, values, strict=True):
        if not hasattr(var, "val") and var not in order:
            order.append(var)
            inputs.append(value)
    jaxpr = _empty().replace(invars=order, outvars=eqn.outvars, eqns=[eqn], constvars=())
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(jaxpr, ()))(*inputs)


def _spread(a, shape):
    return np.broadcast_to(a, shape) if isinstance(a, np.ndarray) else jnp.broadcast_to(a, shape)


def _moved(tag: Numbered, move: Callable) -> Any:
    serials = move(tag.serial)
    factor = tag.factor
    if factor is None or not np.ndim(factor):
        factors = [factor] * (len(serials) if isinstance(serials, list) else 1)
    else:
        factors = move(factor)
        factors = factors if isinstance(factors, list) else [factors]
    if isinstance(serials, list):
        return [Numbered(s, f) for s, f in zip(serials, factors, strict=True)]
    return Numbered(serials, factors[0])


def _mover(name: str, params: dict[str, Any]) -> Callable | None:
    """Return the function by which a primitive moves NumPy and JAX arrays, or None if the primitive computes."""

    def broadcast(a):
        shape = [1] * len(params["shape"])
        for axis, at in enumerate(params["broadcast_dimensions"]):
            shape[at] = a.shape[axis]
        return _spread(a.reshape(shape), params["shape"])

    def cut(a):
        strides = params["strides"] or (1,) * a.ndim
        triples = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return a[tuple(slice(*triple) for triple in triples)]

    def split(a):
        ends = np.cumsum(params["sizes"])[:-1]
        return list((np if isinstance(a, np.ndarray) else jnp).split(a, ends, params["axis"]))

    return {
        "reshape": lambda a: a.reshape(params["new_sizes"]),
        "squeeze": lambda a: a.reshape([s for k, s in enumerate(a.shape) if k not in params["dimensions"]]),
        "expand_dims": lambda a: np.expand_dims(a, params["dimensions"]),
        "transpose": lambda a: a.transpose(params["permutation"]),
        "rev": lambda a: a[tuple(slice(None, None, -1 if k in params["dimensions"] else 1) for k in range(a.ndim))],
        "broadcast_in_dim": broadcast,
        "tile": lambda a: (np if isinstance(a, np.ndarray) else jnp).tile(a, params["reps"]),
        "slice": cut,
        "split": split,
        "unstack": lambda a: [a[(slice(None),) * params["axis"] + (i,)] for i in range(a.shape[params["axis"]])],
    }.get(name)


@dataclasses.dataclass
class Truth:
    """The expected statistics of a batch.

    Attributes:
      value: the loss.
      grads: its gradients.
      found: the meetings that have a gradient, each with its other operands and its gradients.
      n: the number of examples.
    """

    value: Any
    grads: Any
    found: list[tuple[Meeting, Any, np.ndarray]]
    n: int

    def kronecker(
        self, layers: kfac.Layers, layer: kfac.types.Layer
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Return `A`, `G`, the sum of `g a^T` and the number of positions, each with a leading axis of copies."""
        where = _places(layers, layer)
        own = np.asarray(layer.layouts[0].to_rows(where[0]).mT)
        kernel = layer.layouts[0]
        copies, columns = layer.copies, kernel.size("in")
        a_sum = np.zeros((copies, layer.d_in, layer.d_in))
        g_sum = np.zeros((copies, layer.d_out, layer.d_out))
        matrix = np.zeros((copies, layer.d_out, layer.d_in))
        rows = np.zeros(copies)
        biases = self._additions(layers, layer)
        for meeting, seen, g in self.found:
            if meeting.kind == "vector" or not np.isin(meeting.serial, where[0]).any():
                continue
            one, mask = float(_taken(g, biases)), np.ones(where[1].size)
            if meeting.kind != "gather" and np.ndim(seen[-1]):
                mask[meeting.serial] = seen[-1]
                seen = (*seen[:-1], 1.0)
                assert np.isin(mask, (0, 1)).all(), "a kernel is multiplied by an array that is no mask"
            for serial, a, grads in _uses(_products(meeting, seen, g), where[0]):
                copy, out, into = (part[serial] for part in where[1:])
                if a is None:  # a lookup, with the serial numbers of each row that was read
                    a = np.zeros((len(grads), columns))
                    for k, (row, i) in enumerate(zip(serial, into, strict=True)):
                        if (row != NONE).all():
                            a[k, i[0]] = 1
                    copy, out = np.unique(copy[serial != NONE]), out[(serial != NONE).all(1)][0]
                else:
                    copy = np.unique(copy)
                    assert (into == into[:, :1]).all() and (out == out[:1]).all(), "rows and columns of a product mixed"
                    whole = np.zeros((len(a), columns))
                    whole[:, into[:, 0]] = a
                    a, out = whole, out[0]
                assert len(copy) == 1
                whole = np.zeros((len(grads), layer.d_out))
                whole[:, out] = grads
                if layer.has_bias:
                    a = np.concatenate([a, np.full((len(a), 1), one)], 1)
                a_sum[copy[0]] += a.T @ a
                g_sum[copy[0]] += whole.T @ whole
                used = np.pad(mask[own[copy[0]]], [(0, 0), (0, layer.has_bias)], constant_values=1)
                matrix[copy[0]] += whole.T @ a * used
                rows[copy[0]] += len(a)
        return a_sum / self.n, g_sum * self.n**2 / np.maximum(rows, 1)[:, None, None], matrix, rows / self.n

    def _additions(self, layers: kfac.Layers, layer: kfac.types.Layer) -> list[np.ndarray]:
        """Return the gradients at each place that adds the layer's bias."""
        if not layer.has_bias:
            return []
        start = _starts(layers)[layers.paths.index(layer.params[1])]
        own = np.arange(start, start + math.prod(layer.shapes[1]))
        return [g for meeting, _, g in self.found if meeting.kind == "vector" and np.isin(meeting.serial, own).all()]

    def vectors(self, layers: kfac.Layers, layer: kfac.types.Layer) -> np.ndarray:
        """Return per-example gradients `[n, d_out, columns]` of an elementwise block's leaves."""
        starts = _starts(layers)
        total = np.zeros((self.n, sum(_sizes(layers))))
        own = [np.arange(starts[k], starts[k + 1]) for k in map(layers.paths.index, layer.params)]
        for meeting, seen, g in self.found:
            if meeting.kind in ("vector", "gather") and np.isin(meeting.serial, np.concatenate(own)).any():
                serial = meeting.serial if meeting.kind == "vector" else np.nan_to_num(seen[0]).astype(int) - 1
                rows, serial = g.reshape(self.n, -1), serial.reshape(self.n, -1)
                for i in range(self.n):
                    np.add.at(total[i], serial[i], rows[i])
        columns = []
        for path, shape, layout in zip(layer.params, layer.shapes, layer.layouts, strict=True):
            start = starts[layers.paths.index(path)]
            own = total[:, start : start + math.prod(shape)].reshape(self.n, *shape)
            columns.append(np.stack([np.asarray(layout.to_rows(row).mT)[0] for row in own]))
        return np.concatenate(columns, -1)


def _sizes(layers: kfac.Layers) -> list[int]:
    shapes = {path: shape for layer in layers for path, shape in zip(layer.params, layer.shapes, strict=True)}
    return [math.prod(shapes[path]) for path in layers.paths]


def _starts(layers: kfac.Layers) -> list[int]:
    return [0, *np.cumsum(_sizes(layers))]


def _places(layers: kfac.Layers, layer: kfac.types.Layer):
    """Return a kernel's serial numbers, and three tables with the copy, row and column of each serial number."""
    start, shape = _starts(layers)[layers.paths.index(layer.params[0])], layer.shapes[0]
    own = np.arange(start, start + math.prod(shape)).reshape(shape)
    serial = np.asarray(layer.layouts[0].to_rows(own).mT)
    tables = [np.full(sum(_sizes(layers)) + 1, NONE) for _ in range(3)]  # the last entry is for NONE
    for table, at in zip(tables, np.indices(serial.shape), strict=True):
        table[serial.reshape(-1)] = at.reshape(-1)
    return (own, *tables)


def _taken(g: np.ndarray, biases: list[np.ndarray]) -> bool:
    """Return whether a bias is added to a product, and remove the bias from the list.

    The gradients of both are then the same numbers.
    """
    for k, other in enumerate(biases):
        if other.size == g.size and np.allclose(np.sort(other, None), np.sort(g, None), rtol=1e-9, atol=0):
            del biases[k]
            return True
    return False


def _uses(products, own):
    """Yield the products of a kernel without arrays that are joined to it. A repeated column is another use."""
    for serial, a, grads in products:
        mine = np.isin(serial, own)
        if a is None or not mine.any():
            if a is None:
                yield serial, a, grads
            continue
        into, out = mine.any(1), mine.any(0)
        serial, a, grads = serial[into][:, out], a[:, into], grads[:, out]
        assert np.isin(serial, own).all(), "the numbers of a kernel are no box"
        seen = np.array([np.sum(serial[0, :k] == column) for k, column in enumerate(serial[0])])
        for k in range(seen.max() + 1):
            yield serial[:, seen == k], a, grads[:, seen == k]


def _products(meeting: Meeting, seen, g):
    """Yield serial numbers `[d_in, d_out]`, inputs `[rows, d_in]` and gradients `[rows, d_out]` for each product."""
    params, kind = meeting.params, meeting.kind
    if kind == "gather":
        features = params["dimension_numbers"].offset_dims
        order = [k for k in range(g.ndim) if k not in features] + list(features)
        width = math.prod(g.shape[k] for k in features)
        serial = np.nan_to_num(seen[0]).astype(int) - 1
        yield serial.transpose(order).reshape(-1, width), None, g.transpose(order).reshape(-1, width)
        return
    *operands, factor = seen
    x = next(operand for operand in operands if operand is not None) * factor
    if kind == "conv_general_dilated":
        yield from _convolution(meeting, x, g)
        return
    if kind in ("ragged_dot", "ragged_dot_general"):
        start = 0
        for serial, size in zip(meeting.serial, operands[2].astype(int), strict=True):
            yield serial, x[start : start + size], g[start : start + size]
            start += size
        return
    (lhs_in, rhs_in), (lhs_batch, rhs_batch) = params["dimension_numbers"]
    x_in, w_in, x_batch, w_batch = (
        (rhs_in, lhs_in, rhs_batch, lhs_batch) if meeting.flipped else (lhs_in, rhs_in, lhs_batch, rhs_batch)
    )
    x_free = [k for k in range(x.ndim) if k not in (*x_in, *x_batch)]
    w_free = [k for k in range(meeting.serial.ndim) if k not in (*w_in, *w_batch)]
    batch, depth = math.prod(x.shape[k] for k in x_batch), math.prod(x.shape[k] for k in x_in)
    width = math.prod(meeting.serial.shape[k] for k in w_free)
    x = x.transpose(*x_batch, *x_free, *x_in).reshape(batch, -1, depth)
    serial = meeting.serial.transpose(*w_batch, *w_in, *w_free).reshape(batch, depth, width)
    rows = x.shape[1]
    g = g.reshape(batch, width, rows).transpose(0, 2, 1) if meeting.flipped else g.reshape(batch, rows, width)
    yield from zip(serial, x, g, strict=True)


def _convolution(meeting: Meeting, x, g):
    params = meeting.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    x = x.transpose(lhs[0], *lhs[2:], lhs[1])
    serial = meeting.serial.transpose(*rhs[2:], rhs[1], rhs[0])
    g = g.transpose(out[0], *out[2:], out[1])
    geometry = Geometry(
        serial.shape[:-2], params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"]
    )
    serial = serial.reshape(-1, serial.shape[-1])
    for image, kernel, grads in zip(
        np.split(x, groups, -1), np.split(serial, groups, -1), np.split(g, groups, -1), strict=True
    ):
        rows = im2col(image, geometry)
        yield kernel, rows.reshape(-1, rows.shape[-1]), grads.reshape(-1, grads.shape[-1])


def truth(loss: Callable, params: Any, batch: Any, n: int) -> Truth:
    """Return the statistics of `loss(params, batch)`, a mean over `n` examples."""
    return truths(loss, params, [batch], n)[0]


def truths(loss: Callable, params: Any, batches: list[Any], n: int) -> list[Truth]:
    """Return the statistics of several equally shaped batches, which share a compiled program."""
    flat, treedef = jax.tree.flatten(params)
    closed = jax.make_jaxpr(loss)(params, batches[0])
    shapes = jax.tree.leaves(batches[0])
    starts = np.cumsum([0, *(leaf.size for leaf in flat)])
    tags = [
        Numbered(np.arange(start, start + leaf.size).reshape(leaf.shape))
        for start, leaf in zip(starts, flat, strict=False)
    ]

    def run(zeros, flat, arrays):
        state = _Run(zeros)
        inputs = [*zip(flat, tags, strict=True), *((x, None) for x in arrays)]
        state.of_batch = {id(x): x for x in arrays}
        ((value, _),) = state.program(closed.jaxpr, closed.consts, inputs, ())
        return value, state

    counted: list[_Run] = []
    jax.eval_shape(lambda flat, arrays: counted.append(run(None, flat, arrays)[1]), flat, shapes)
    meetings = counted[0].meetings

    def measure(flat, arrays):
        def value_of(zeros, flat):
            value, state = run(zeros, flat, arrays)
            return value, state.seen

        zeros = [jnp.zeros(*shape) for shape in counted[0].shapes]
        (value, seen), (gs, grads) = jax.value_and_grad(value_of, (0, 1), has_aux=True)(zeros, flat)
        return value, grads, seen, gs

    program, results = jax.jit(measure), []
    for batch in batches:
        value, grads, seen, gs = jax.tree.map(np.asarray, program(flat, jax.tree.leaves(batch)))
        alive = defaultdict(bool)
        for meeting, g in zip(meetings, gs, strict=True):
            alive[meeting.place] |= bool(np.any(g))
        found = [entry for entry in zip(meetings, seen, gs, strict=True) if alive[entry[0].place]]
        results.append(Truth(value, jax.tree.unflatten(treedef, grads), found, n))
    return results
