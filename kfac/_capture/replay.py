"""Evaluate a traced loss again, with the taps of a plan behind its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kfac._capture.axes import length
from kfac._capture.parameters import chosen, elementwise
from kfac._capture.program import Op, Program
from kfac._capture.taps import Key, KroneckerTap, Probes, TapPlan, tapped, together
from kfac._factors import static


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Replayed:
    """An array of the replay.

    Attributes:
      value: the array.
      multiplier: if the array is a scaled view of a parameter, the derivatives of its entries with respect to the
        parameter's.
      common: whether all `n` examples share the array. `value` then repeats it for each example, `[n, ...]`, which
        makes the gradient of each example known.
    """

    value: Array
    multiplier: Array | None = None
    common: bool = static(False)

    @property
    def alone(self) -> Array:
        """The array without repetitions."""
        return self.value[0] if self.common else self.value


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
    return [result.alone for result in results], handed


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
            return list(map(Replayed, op.compute([x.alone for x in inputs])))
        if op.inner:
            return self._scan(op, inputs) if op.scan else self._remat(op, inputs)
        outs = self._tapped(op, inputs)
        if op in plan.marks:
            key, at_mark = plan.marks[op]
            out, self.handed[key] = at_mark(outs[0].value, self.probes[key])
            return [Replayed(out)]
        if op not in plan.multipliers:
            return outs
        # The result is a scaled view of a parameter.
        operand = plan.multipliers[op]
        values = [x.value for x in inputs]
        multipliers = op.derivatives(values, operand, inputs[operand].multiplier)
        return list(map(Replayed, [out.value for out in outs], multipliers))

    def _remat(self, op: Op, inputs: list[Replayed]) -> list[Replayed]:
        def block(inputs):
            assert op.inner
            return _replay(op.inner, inputs, self.plan, self.probes)

        options = chosen(op.eqn, ("prevent_cse", "policy"))
        results, handed = jax.checkpoint(block, **options)(inputs)
        self.handed |= handed
        return results

    def _scan(self, op: Op, inputs: list[Replayed]) -> list[Replayed]:
        scan = op.scan
        program = op.inner
        assert scan and program
        first = scan.consts
        last = scan.last
        sliced = {key: self.probes[key] for key in self.plan.sliced[op]}
        values = [x.value for x in inputs]
        multipliers = [x.multiplier for x in inputs]

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
        slices = values[last:], sliced, multipliers[last:]
        carry, (ys, handed) = lax.scan(body, values[first:last], slices, **options)
        self.handed |= handed
        # A scaled view in the carry keeps its multiplier, because no iteration changes the view.
        return [*map(Replayed, carry, multipliers[first:last]), *map(Replayed, ys)]

    def _tapped(self, op: Op, inputs: Sequence[Replayed]) -> list[Replayed]:
        """Evaluate an op with the tap behind it, if any."""
        plan = self.plan
        probes = self.probes
        tap = plan.taps.get(op)
        values = [x.value for x in inputs]
        common = [x.common for x in inputs]
        if tap and tap.use.late:
            other = tap.use.read.other
            if not common[other]:
                n = length(tap.use.read.x_axes[0])
                values[other] = jnp.broadcast_to(
                    values[other], (n, *values[other].shape)
                )
                common[other] = True
        if isinstance(tap, KroneckerTap) and not (op.loops or any(common)):
            values, probes[tap.key] = together((values, probes[tap.key]))
        axis = plan.merges.get(op)
        outs = _evaluate(op, values, common, axis)
        if tap:
            multiplier = inputs[tap.use.read.operand].multiplier
            residuals = tap.residuals(values, multiplier, probes)
            outs = [tapped(tap, residuals, outs[0], probes[tap.key])]
        stays = any(common) and axis is None
        return [Replayed(out, common=stays) for out in outs]


def _evaluate(
    op: Op, values: Sequence[Array], common: Sequence[bool], axis: int | None
) -> list[Array]:
    """Evaluate an op, some of whose inputs may be `common`, as in `Replayed`.

    If common rows meet the examples at this op, `axis` is the result's axis of examples. Otherwise it is None.
    """
    if not any(common):
        return op.compute(values)
    if axis is not None and len(values) > 1:
        whole = []
        for value, repeated in zip(values, common, strict=True):
            if repeated:
                # The examples take the place of an axis of length 1.
                value = jnp.moveaxis(jnp.squeeze(value, axis + 1), 0, axis)
            whole.append(jnp.broadcast_to(value, op.outputs[0].shape))
        return [elementwise(op.eqn, whole)]
    axes = [0 if repeated else None for repeated in common]
    outs = jax.vmap(op.compute, in_axes=(axes,))(values)
    if axis is None:
        return outs
    return [jnp.moveaxis(jnp.take(outs[0], 0, axis=axis + 1), 0, axis)]
