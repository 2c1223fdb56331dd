"""Evaluate a traced loss again, with the taps of a plan behind its operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kfac._capture import equations, primitives
from kfac._capture.parameters import parameter
from kfac._capture.program import Op, Program, flat
from kfac._capture.taps import Key, KroneckerTap, Plan, Probes, tapped, together


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """An array that all `n` examples share, repeated for each example: `[n, ...]`.

    The repetition makes the gradient of each example known.
    """

    rows: Any


def _is_shared(value: Any) -> bool:
    return isinstance(value, Shared)


def _rows(value: Any) -> Any:
    return value.rows if isinstance(value, Shared) else value


def _alone(value: Any) -> Any:
    return value.rows[0] if isinstance(value, Shared) else value


class Replayed(NamedTuple):
    """An array of the replay.

    If the array is a scaled view of a parameter, `multiplier` holds the factors by which the parameter has been
    multiplied.
    """

    value: Any
    multiplier: Any = None


Results = tuple[
    list[Replayed], dict[Key, Any]
]  # a program's results, and the values that its marks hand out


def replay(
    program: Program, args: Sequence[Any], plan: Plan, probes: Probes
) -> tuple[list[Any], dict[Key, Any]]:
    """Evaluate a program with the taps of `plan`.

    Returns:
      The program's results, and the values that the marks hand out, by key. A scan stacks these values over its
      iterations.
    """
    results, handed = _replay(program, list(map(Replayed, args)), plan, probes)
    return [_alone(result.value) for result in results], handed


def _replay(
    program: Program, arguments: Sequence[Replayed], plan: Plan, probes: Probes
) -> Results:
    probes, handed = dict(probes), dict[Key, Any]()

    def visit(op: Op, inputs: list[Replayed]) -> list[Replayed]:
        if not op.alive:
            inputs = [Replayed(_alone(x.value), x.multiplier) for x in inputs]
        if op in plan.inside:
            results, handed_inside = (_scan if op.scan else _remat)(
                op, inputs, plan, probes
            )
            handed.update(handed_inside)
            return results
        values = [x.value for x in inputs]
        if op in plan.late:
            other = plan.taps[op][0].use.read.other
            if not _is_shared(values[other]):
                values[other] = Shared(
                    jnp.broadcast_to(
                        values[other], (plan.late[op], *values[other].shape)
                    )
                )
        taps = plan.taps.get(op, ())
        kronecker = {
            tap.key: probes[tap.key]
            for tap in taps
            if isinstance(tap, KroneckerTap) and not op.loops
        }
        if kronecker and not any(map(_is_shared, values)):
            values, joined = together((values, kronecker))
            probes.update(joined)
        outs = _evaluate(op, values, plan.merges.get(op))
        for tap in taps:
            residuals = tap.residuals(
                list(map(_rows, values)),
                inputs[tap.use.read.operand].multiplier,
                probes,
            )
            y = tapped(tap, residuals, _rows(outs[0]), probes[tap.key])
            outs = [Shared(y) if op in plan.late else y]
        if op in plan.marks:
            key, at_mark = plan.marks[op]
            outs[0], handed[key] = at_mark(outs[0], probes[key])
        multipliers = (
            _multipliers(op, plan.multipliers[op], inputs)
            if op in plan.multipliers
            else [None] * len(outs)
        )
        return list(map(Replayed, outs, multipliers))

    results = program.run(
        arguments,
        lambda value: Replayed(program.consts.get(value, value.number)),
        visit,
    )
    return results, handed


def _multipliers(op: Op, operand: int, inputs: Sequence[Replayed]) -> list[Any]:
    """Return the multiplier of each result of an op, whose input number `operand` is a view of a parameter."""
    value, so_far = inputs[operand]
    so_far = jnp.ones_like(value) if so_far is None else so_far
    if op.name in equations.SUMS:  # an added array does not change the factor
        return [-so_far if op.name == "sub" and operand == 1 else so_far]
    values = [so_far if k == operand else x.value for k, x in enumerate(inputs)]
    return equations.evaluate_multiplier(op.within, op.eqn, values)


def _evaluate(op: Op, values: Sequence[Any], axis: int | None) -> list[Any]:
    """Evaluate an op, whose inputs may be `Shared`.

    If shared rows meet the examples at this op, `axis` is the result's axis of examples. Otherwise it is None.
    """
    if not any(map(_is_shared, values)):
        return op.compute(values)
    if axis is not None and len(values) > 1:

        def whole(value):
            if _is_shared(value):  # the examples replace an axis of length 1
                value = jnp.moveaxis(jnp.squeeze(value.rows, axis + 1), 0, axis)
            return jnp.broadcast_to(value, op.outputs[0].shape)

        return [primitives.ELEMENTWISE[op.name](*map(whole, values))]
    axes = [0 if _is_shared(value) else None for value in values]
    outs = jax.vmap(lambda *values: op.compute(values), in_axes=axes)(
        *map(_rows, values)
    )
    if axis is None:
        return list(map(Shared, outs))
    return [jnp.moveaxis(jnp.take(outs[0], 0, axis=axis + 1), 0, axis)]


def _remat(op: Op, inputs: Sequence[Replayed], plan: Plan, probes: Probes) -> Results:
    def block(inputs, probes):
        assert op.inner
        return _replay(op.inner, inputs, plan, probes)

    options = {key: parameter(op.eqn, key) for key in ("prevent_cse", "policy")}
    return jax.checkpoint(block, **options)(
        inputs, {key: probes[key] for key in plan.inside[op]}
    )


def _scan(op: Op, inputs: Sequence[Replayed], plan: Plan, probes: Probes) -> Results:
    assert op.inner and op.scan
    first, last = op.scan.consts, op.scan.last
    shared = {
        key: probes[key] for key, iterated in plan.inside[op].items() if not iterated
    }
    sliced = {key: probes[key] for key, iterated in plan.inside[op].items() if iterated}
    multipliers = [x.multiplier for x in inputs]

    def step(inner, values, slices):
        sliced, of_slices = slices
        arguments = list(map(Replayed, values, [*multipliers[:last], *of_slices]))
        results, handed = _replay(inner, arguments, plan, {**shared, **sliced})
        return [result.value for result in results], handed

    outs, handed = _scan_by(
        step, op, [x.value for x in inputs], (sliced, multipliers[last:])
    )
    # A scaled view in the carry keeps its multiplier, because no iteration changes the view.
    carried = [*multipliers[first:last], *[None] * len(outs)]
    return [Replayed(*pair) for pair in zip(outs, carried, strict=False)], handed


def _scan_by(
    step: Callable[..., Any], op: Op, values: Sequence[Any], beside: Any
) -> tuple[list[Any], Any]:
    """Evaluate a scan with another body, and return its results and a stacked pytree.

    The body is `step(program, arguments, slices)`, with slices of `beside`. It returns an iteration's results and a
    pytree, which the scan stacks.
    """
    assert op.scan
    first, last = op.scan.consts, op.scan.last

    def body(carry, slices):
        xs, more = slices
        outs, handed = step(op.inner, [*values[:first], *carry, *xs], more)
        return outs[: last - first], (outs[last - first :], handed)

    options = {key: parameter(op.eqn, key) for key in ("length", "reverse", "unroll")}
    carry, (ys, handed) = lax.scan(
        body, list(values[first:last]), (list(values[last:]), beside), **options
    )
    return [*carry, *ys], handed


# -- other ways to evaluate --------------------------------------------------------------------------------------------


def rewrite(
    fn: Callable[..., Any], rules: Mapping[str, Callable[..., jax.Array]]
) -> Callable[..., Any]:
    """Return `fn` with other implementations of some primitives.

    `rules[name](equation, *operands)` computes the result of the primitive `name`, also inside calls and scans.
    Programs inside other equations stay as they are, for example in a `custom_vjp` or `jax.checkpoint`.
    """

    def evaluated(program: Program, args: Sequence[Any]) -> list[Any]:
        def visit(op, values):
            if op.name in rules:
                return [rules[op.name](op.eqn, *values)]
            if op.scan:
                return _scan_by(
                    lambda inner, arguments, _: (evaluated(inner, arguments), None),
                    op,
                    values,
                    None,
                )[0]
            return op.compute(values)

        return program.run(
            args, lambda value: program.consts.get(value, value.number), visit
        )

    def rewritten(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), evaluated(flat(closed), jax.tree.leaves(args))
        )

    return rewritten
