"""Evaluate a traced loss again, with the taps of a plan behind its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._capture import primitives
from kfac._capture.parameters import chosen
from kfac._capture.program import Op, Program
from kfac._capture.taps import Key, KroneckerTap, Probes, TapPlan, tapped, together


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CommonRows:
    """An array that all `n` examples share, repeated for each example: `[n, ...]`.

    The repetition makes the gradient of each example known.
    """

    rows: Array


MaybeCommon = Array | CommonRows


def _any_common(values: Sequence[MaybeCommon]) -> bool:
    return any(isinstance(value, CommonRows) for value in values)


def _rows(value: MaybeCommon) -> Array:
    if isinstance(value, CommonRows):
        return value.rows
    return value


def _alone(value: MaybeCommon) -> Array:
    if isinstance(value, CommonRows):
        return value.rows[0]
    return value


class Replayed(NamedTuple):
    """An array of the replay.

    If the array is a scaled view of a parameter, `multiplier` holds the derivatives of its entries with respect to the
    parameter's.
    """

    value: MaybeCommon
    multiplier: Array | None = None


# The values that a program's marks hand out, by key.
Handed = dict[Key, Any]


def replay(
    program: Program, args: Sequence[Array], plan: TapPlan, probes: Probes
) -> tuple[list[Array], Handed]:
    """Evaluate a program with the taps of `plan`.

    Returns:
      The program's results, and the values that the marks hand out, by key. A scan stacks these values over its
      iterations.
    """
    results, handed = _replay(program, list(map(Replayed, args)), plan, probes)
    return [_alone(result.value) for result in results], handed


def _replay(
    program: Program, arguments: Sequence[Replayed], plan: TapPlan, probes: Probes
) -> tuple[list[Replayed], Handed]:
    replaying = _Replay(plan, dict(probes))
    results = program.run(
        arguments,
        lambda value: Replayed(program.consts.get(value, value.number)),
        replaying.visit,
    )
    return results, replaying.handed


@dataclass
class _Replay:
    """The evaluation of a program, apart from the programs inside its scans and remats."""

    plan: TapPlan
    probes: dict[Key, Any]
    handed: Handed = field(default_factory=dict)

    def visit(self, op: Op, inputs: list[Replayed]) -> list[Replayed]:
        """Return an op's results."""
        plan = self.plan
        if not op.alive:
            inputs = [x._replace(value=_alone(x.value)) for x in inputs]
        if op in plan.inside:
            return self._scan(op, inputs) if op.scan else self._remat(op, inputs)
        outs = self._tapped(op, inputs)
        if op in plan.marks:
            key, at_mark = plan.marks[op]
            outs[0], self.handed[key] = at_mark(outs[0], self.probes[key])
        if op not in plan.multipliers:
            return list(map(Replayed, outs))
        # The result is a scaled view of a parameter.
        operand = plan.multipliers[op]
        values = [_rows(x.value) for x in inputs]
        multipliers = op.derivatives(values, operand, inputs[operand].multiplier)
        return list(map(Replayed, outs, multipliers))

    def _remat(self, op: Op, inputs: list[Replayed]) -> list[Replayed]:
        def block(inputs, probes):
            assert op.inner
            return _replay(op.inner, inputs, self.plan, probes)

        options = chosen(op.eqn, ("prevent_cse", "policy"))
        probes = {key: self.probes[key] for key in self.plan.inside[op]}
        results, handed = jax.checkpoint(block, **options)(inputs, probes)
        self.handed |= handed
        return results

    def _scan(self, op: Op, inputs: list[Replayed]) -> list[Replayed]:
        scan = op.scan
        program = op.inner
        assert scan and program
        first = scan.consts
        last = scan.last
        sliced = {}
        for key, iterated in self.plan.inside[op].items():
            if iterated:
                sliced[key] = self.probes[key]
        values, multipliers = zip(*inputs, strict=True)

        def body(carry, slices):
            xs, probes, of_xs = slices
            arguments = map(
                Replayed, [*values[:first], *carry, *xs], [*multipliers[:last], *of_xs]
            )
            results, handed = _replay(
                program, list(arguments), self.plan, {**self.probes, **probes}
            )
            outs = [result.value for result in results]
            return outs[: scan.carried], (outs[scan.carried :], handed)

        options = chosen(op.eqn, ("length", "reverse", "unroll"))
        slices = list(values[last:]), sliced, list(multipliers[last:])
        carry, (ys, handed) = lax.scan(
            body, list(values[first:last]), slices, **options
        )
        self.handed |= handed
        # A scaled view in the carry keeps its multiplier, because no iteration changes the view.
        return [*map(Replayed, carry, multipliers[first:last]), *map(Replayed, ys)]

    def _tapped(self, op: Op, inputs: Sequence[Replayed]) -> list[Any]:
        """Evaluate an op with the taps behind it."""
        plan = self.plan
        probes = self.probes
        taps = plan.taps.get(op, [])
        values = [x.value for x in inputs]
        if op in plan.late:
            other = taps[0].use.read.other
            rows = values[other]
            if not isinstance(rows, CommonRows):
                shape = (plan.late[op], *rows.shape)
                values[other] = CommonRows(jnp.broadcast_to(rows, shape))
        kronecker = {}
        for tap in taps:
            if isinstance(tap, KroneckerTap) and not op.loops:
                kronecker[tap.key] = probes[tap.key]
        if kronecker and not _any_common(values):
            values, joined = together((values, kronecker))
            probes.update(joined)
        outs = _evaluate(op, values, plan.merges.get(op))
        for tap in taps:
            multiplier = inputs[tap.use.read.operand].multiplier
            residuals = tap.residuals(list(map(_rows, values)), multiplier, probes)
            y = tapped(tap, residuals, _rows(outs[0]), probes[tap.key])
            outs = [CommonRows(y) if op in plan.late else y]
        return outs


def _evaluate(op: Op, values: Sequence[MaybeCommon], axis: int | None) -> list[Any]:
    """Evaluate an op, whose inputs may be `CommonRows`.

    If common rows meet the examples at this op, `axis` is the result's axis of examples. Otherwise it is None.
    """
    arrays = list(map(_rows, values))
    if not _any_common(values):
        return op.compute(arrays)
    if axis is not None and len(values) > 1:
        shape = op.outputs[0].shape
        whole = [jnp.broadcast_to(_at_axis(value, axis), shape) for value in values]
        return [primitives.ELEMENTWISE[op.name](*whole)]
    axes = [0 if isinstance(value, CommonRows) else None for value in values]
    outs = jax.vmap(op.compute, in_axes=(axes,))(arrays)
    if axis is None:
        return list(map(CommonRows, outs))
    return [jnp.moveaxis(jnp.take(outs[0], 0, axis=axis + 1), 0, axis)]


def _at_axis(value: MaybeCommon, axis: int) -> Array:
    """Return common rows with the examples at `axis`, where the rows have length 1."""
    if isinstance(value, CommonRows):
        return jnp.moveaxis(jnp.squeeze(value.rows, axis + 1), 0, axis)
    return value
