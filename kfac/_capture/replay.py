"""Evaluates a traced loss again, with the taps of a plan behind its operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture import equations, primitives
from kfac._capture.program import Op, Program, Value, flat
from kfac._capture.taps import Key, KroneckerTap, Plan, Probes, tapped, together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """An array that is the same for all `n` examples, once for each of them, `[n, ...]`.

    So the gradient with respect to it is known for each.
    """

    rows: Any


def _is_shared(value: Any) -> bool:
    return isinstance(value, Shared)


def _alone(value: Any) -> Any:
    return value.rows[0] if isinstance(value, Shared) else value


# What parameters have been multiplied by on the way to each array that is a scaled view.
Multipliers = dict[int, jax.Array]  # by position among the arguments or results of an op


def replay(program: Program, args: Sequence[Any], plan: Plan, probes: Probes) -> tuple[list[Any], dict[Key, Any]]:
    """Evaluates a program with the taps of `plan`: its results, and what marks hand out, stacked by scans."""
    outs, _, handed = _replay(program, args, {}, plan, probes)
    return list(map(_alone, outs)), handed


def _replay(
    program: Program, args: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    env: dict[Value, Any] = dict(program.consts)
    env.update(zip(program.inputs, args, strict=True))
    multipliers: dict[Value, Any] = {program.inputs[k]: multiplier for k, multiplier in scaled.items()}
    handed: dict[Key, Any] = {}

    def read(value: Value) -> Any:
        return env[value] if value.number is None else value.number

    def multipliers_of(values: Sequence[Value]) -> Multipliers:
        return {k: multipliers[value] for k, value in enumerate(values) if value in multipliers}

    for index, op in enumerate(program.ops):
        values, child = list(map(read, op.inputs)), plan.children.get(index)
        if not op.alive:
            values = list(map(_alone, values))
        if index in plan.late:
            other = plan.taps[index][0].use.read.other
            if not _is_shared(values[other]):
                values[other] = Shared(jnp.broadcast_to(values[other], (plan.late[index], *values[other].shape)))
        kronecker = [tap.key for tap in plan.taps.get(index, ()) if isinstance(tap, KroneckerTap) and not tap.use.scans]
        if kronecker and not any(map(_is_shared, values)):
            values, joined = together((values, {key: probes[key] for key in kronecker}))
            probes = {**probes, **joined}
        if child is None:
            outs = _evaluate(op, values, plan.merges.get(index))
        else:
            outs, leaving, inside = _inside(op, values, multipliers_of(op.inputs), child, probes)
            multipliers.update((op.outputs[k], multiplier) for k, multiplier in leaving.items())
            handed |= inside
        if index in plan.multipliers:
            operand = plan.multipliers[index]
            so_far = multipliers.get(op.inputs[operand])
            so_far = jnp.ones_like(values[operand]) if so_far is None else so_far
            if op.name in equations.SUMS:  # what is added has no say in it
                multipliers[op.outputs[0]] = -so_far if op.name == "sub" and operand == 1 else so_far
            else:
                values[operand] = so_far
                results = equations.evaluate_multiplier(op.within, op.eqn, values)
                multipliers.update(zip(op.outputs, results, strict=True))
        for tap in plan.taps.get(index, ()):
            rows = [value.rows if _is_shared(value) else value for value in values]
            residuals = tap.residuals(rows, multipliers.get(op.inputs[tap.use.read.operand]), probes)
            if index in plan.late:
                outs = [Shared(tapped(tap, residuals, outs[0].rows, probes[tap.key]))]
            else:
                outs = [tapped(tap, residuals, outs[0], probes[tap.key])]
        if index in plan.marks:
            key, at_mark = plan.marks[index]
            outs[0], handed[key] = at_mark(outs[0], probes[key])
        env.update(zip(op.outputs, outs, strict=True))
    return list(map(read, program.outputs)), multipliers_of(program.outputs), handed


def _evaluate(op: Op, values: Sequence[Any], axis: int | None) -> list[Any]:
    """Evaluates an op. Where arrays that all examples share meet the examples, `axis` is the axis of these."""
    if not any(map(_is_shared, values)):
        return op.compute(values)
    if axis is not None and len(values) > 1:

        def whole(value):
            if _is_shared(value):  # the examples take the place of an axis of length one
                value = jnp.moveaxis(jnp.squeeze(value.rows, axis + 1), 0, axis)
            return jnp.broadcast_to(value, op.outputs[0].shape)

        return [primitives.ELEMENTWISE[op.name](*map(whole, values))]
    rows = [value.rows if _is_shared(value) else value for value in values]
    axes = [0 if _is_shared(value) else None for value in values]
    outs = jax.vmap(lambda *values: op.compute(values), in_axes=axes)(*rows)
    if axis is None:
        return list(map(Shared, outs))
    return [jnp.moveaxis(jnp.take(outs[0], 0, axis=axis + 1), 0, axis)]


def _inside(
    op: Op, values: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    """What `_replay` gives of the program inside an op, called as the op calls it."""
    if op.scan:
        return _scan(op, values, scaled, plan, probes)

    def block(probes, values, scaled):
        assert op.inner
        return _replay(op.inner, values, scaled, plan, probes)

    entries, params = {key: probes[key] for key in plan.keys()}, op.eqn.params
    return jax.checkpoint(block, prevent_cse=params["prevent_cse"], policy=params["policy"])(entries, values, scaled)


def _scan(
    op: Op, values: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    assert op.scan
    first, last = op.scan.consts, op.scan.last
    shared = {key: probes[key] for key, iterated in plan.iterated.items() if not iterated}
    sliced_probes = {key: probes[key] for key, iterated in plan.iterated.items() if iterated}
    # A scaled view that is carried comes out as it went in.
    same = {k: multiplier for k, multiplier in scaled.items() if k < last}
    sliced = {k: multiplier for k, multiplier in scaled.items() if k >= last}

    def step(inner, arguments, beside):
        sliced_probes, sliced = beside
        outs, _, handed = _replay(inner, arguments, {**same, **sliced}, plan, {**shared, **sliced_probes})
        return outs, handed

    outs, handed = _scan_by(step, op, values, (sliced_probes, sliced))
    return outs, {k - first: multiplier for k, multiplier in same.items() if k >= first}, handed


def _scan_by(step: Callable[..., Any], op: Op, values: Sequence[Any], beside: Any) -> tuple[list[Any], Any]:
    """Results of a scan by another body, `step(program, arguments, slices of beside)`, and what else that stacks."""
    assert op.scan
    first, last = op.scan.consts, op.scan.last

    def body(carry, slices):
        xs, more = slices
        outs, handed = step(op.inner, [*values[:first], *carry, *xs], more)
        return outs[: last - first], (outs[last - first :], handed)

    options = {key: op.eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, (ys, handed) = lax.scan(body, list(values[first:last]), (list(values[last:]), beside), **options)
    return [*carry, *ys], handed


# -- other ways to evaluate --------------------------------------------------------------------------------------------


def rewrite(fn: Callable[..., Any], rules: Mapping[str, Callable[..., jax.Array]]) -> Callable[..., Any]:
    """`fn` with other ways to compute some primitives, `rules[name](params, *operands)`, also in calls and scans.

    What is inside a `custom_vjp` or `jax.checkpoint` is left as it is.
    """

    def evaluated(program: Program, args: Sequence[Any]) -> list[Any]:
        def visit(_, op, values):
            if op.name in rules:
                return [rules[op.name](op.eqn.params, *values)]
            if op.scan:
                return _scan_by(lambda inner, arguments, _: (evaluated(inner, arguments), None), op, values, None)[0]
            return op.compute(values)

        return program.run(args, lambda value: program.consts.get(value, value.number), visit)

    def rewritten(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(jax.tree.structure(shapes), evaluated(flat(closed), jax.tree.leaves(args)))

    return rewritten
