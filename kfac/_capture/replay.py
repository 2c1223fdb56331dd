"""Evaluates a traced loss again, with taps behind the operations that read parameters.

A tap is an identity on the result of an operation. Its backward pass also returns statistics of the operation's input
and of the gradient that passes through, as the cotangent of a `probe`: differentiating the loss with respect to the
probes yields the statistics in the same backward pass as the gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from kfac._capture.axes import Arrangement
from kfac._capture.trace import CALLS, REMATS, inner_jaxpr
from kfac._factors import Kronecker
from kfac._statistics.dense import (
    Convolution,
    Lookup,
    conv_moment,
    dense_moment,
    for_examples,
    gram,
    lookup_counts,
    patch_sums,
    per_example,
    position_sums,
    squared,
)
from kfac._statistics.per_example import MomentSums

Key = tuple[Any, ...]  # layer name, and which of its parameters (0 for a Kronecker layer); longer for its eigenvectors
Probes = Mapping[Key, Any]


@dataclasses.dataclass(frozen=True)
class KroneckerTap:
    """Sums of `a a^T` and `g g^T` at one use of a kernel, or of their diagonals.

    Of a lookup the diagonal of `a a^T` are counts. With `examples` ("reduce") it is sums of `a` and `g` over the
    positions of each example, `[copies, examples, d]`: their products can be formed when all uses have been summed.
    With `moments` also sums of squares of per-example gradients in a basis, which comes with the residuals.
    """

    key: Key
    operand: int
    arrange_x: Arrangement
    arrange_g: Arrangement
    geometry: Convolution | Lookup | None
    bias: str
    dtype: Any
    diagonal: tuple[str, ...] = ()
    examples: int | None = None
    subsample: int = 1
    moments: MomentSums | None = None

    def residuals(self, values: Sequence[jax.Array], multiplier: jax.Array | None, probes: Probes) -> Any:
        # A kernel is multiplied by the same number everywhere, if at all.
        number = None if multiplier is None else multiplier.reshape(-1)[0]
        return values[1 - self.operand], number, None if self.moments is None else probes[self.moments.basis]

    def statistics(self, residuals: Any, g: jax.Array) -> Kronecker:
        x, number, basis = residuals
        moments = None if self.moments is None else self.moments(x, g, number, basis)
        # Counts of rows, and sums over positions, are cheap: they are those of all examples.
        if self.subsample == 1 or self.examples is not None:
            a, outputs = self._inputs(x), self._outputs(g)
        else:
            share = self.arrange_g.leading / -(-self.arrange_g.leading // self.subsample)
            thinned, g = self._thinned_outputs(g)
            outputs = share * thinned._outputs(g)
            if isinstance(self.geometry, Lookup):
                a = self._inputs(x)
            else:
                thinned, x = self._thinned_inputs(x)
                a = share * thinned._inputs(x)
        return Kronecker(a if number is None else self._multiplied(a, number), outputs, moments)

    def _thinned_outputs(self, g: jax.Array) -> tuple[KroneckerTap, jax.Array]:
        g, arrange = self.arrange_g.every(self.subsample, g)
        return dataclasses.replace(self, arrange_g=arrange), g

    def _thinned_inputs(self, x: jax.Array) -> tuple[KroneckerTap, jax.Array]:
        if isinstance(self.geometry, Convolution):
            axis = self.geometry.spec[0]
            x = x[(slice(None),) * axis + (slice(None, None, self.subsample),)]
            arrange = for_examples(self.arrange_x, x.shape[axis])
        else:
            x, arrange = self.arrange_x.every(self.subsample, x)
        return dataclasses.replace(self, arrange_x=arrange), x

    def _multiplied(self, a: jax.Array, number: jax.Array) -> jax.Array:
        """The sums of a product with `number` times the kernel: inputs are so many times larger, but for the 1."""
        entries = jnp.full(a.shape[-1], number, self.dtype)
        if self.bias != "none":
            entries = entries.at[-1].set(1)
        if self.examples is not None:
            return a * entries
        return a * entries**2 if "A" in self.diagonal else a * entries[:, None] * entries

    def _outputs(self, g: jax.Array) -> jax.Array:
        rows = self.arrange_g(g)
        if self.examples is not None:
            return position_sums(rows, self.examples)
        return position_sums(squared(rows), 1)[:, 0] if "G" in self.diagonal else gram(rows)

    def _inputs(self, x: jax.Array) -> jax.Array:
        if isinstance(self.geometry, Lookup):
            return self.arrange_x(lookup_counts(x, self.geometry, self.dtype))[:, 0]
        if not jnp.issubdtype(x.dtype, jnp.floating):
            x = x.astype(self.dtype)  # counts, or one-hot codes of integers
        if self.examples is not None:
            return self._input_sums(x, lambda rows: rows, self.examples)
        if "A" in self.diagonal:
            return self._input_sums(x, squared, 1)[:, 0]
        if self.geometry is None:
            return dense_moment(x, self.arrange_x, self.bias)
        return conv_moment(x, self.geometry, self.arrange_x, self.bias)

    def _input_sums(self, x: jax.Array, of: Callable[[jax.Array], jax.Array], groups: int) -> jax.Array:
        """Sums of a function of the inputs over each of `groups` runs of rows: `[copies, groups, d_in]`."""
        if isinstance(self.geometry, Convolution):
            rows = self.arrange_x(patch_sums(x, self.geometry, of))  # one for each image
            count = rows.shape[1] * math.prod(self.geometry.out)
        else:
            rows = of(self.arrange_x(x))
            count = rows.shape[1]
        sums = position_sums(rows, groups)
        if self.bias == "none":
            return sums
        ones = count // groups if self.bias == "one" else 0
        return jnp.pad(sums, ((0, 0), (0, 0), (0, 1)), constant_values=ones)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """How an array is computed by elementwise equations from one array of its shape and smaller ones.

    A normalised input is such an array. The backward pass of a network computes it again from the array before, and so
    do the taps: kept for them, it would take as much memory as all outputs of convolutions.
    """

    within: jex.Jaxpr
    equations: tuple[Any, ...]
    inputs: tuple[Any, ...]

    def __call__(self, values: Sequence[jax.Array]) -> jax.Array:
        # Without the barrier, XLA would see that the forward pass has computed the same, and keep that.
        env = dict(zip(self.inputs, lax.optimization_barrier(list(values)), strict=True))
        for eqn in self.equations:
            operands = [var.val if isinstance(var, jex.Literal) else env[var] for var in eqn.invars]
            (env[eqn.outvars[0]],) = evaluate(self.within, eqn, operands)
        return env[self.equations[-1].outvars[0]]


def _source(within: jex.Jaxpr, producers: Mapping[Any, Any], var: Any) -> Source | None:
    """Where an operand comes from, if from elementwise equations of the same jaxpr."""
    equations: list[Any] = []
    inputs: list[Any] = []
    while not isinstance(var, jex.Literal) and var in producers:
        eqn = producers[var]
        large = [v for v in eqn.invars if not isinstance(v, jex.Literal) and v.aval.shape == var.aval.shape]
        if eqn.primitive.name not in ("add", "sub", "mul", "div", "convert_element_type") or len(large) != 1:
            break
        equations.insert(0, eqn)
        inputs += [v for v in eqn.invars if not isinstance(v, jex.Literal) and v not in (large[0], *inputs)]
        var = large[0]
    return Source(within, tuple(equations), (var, *inputs)) if equations else None


@dataclasses.dataclass(frozen=True)
class ElementwiseTap:
    """Per-example gradients at one use of a scale or shift."""

    key: Key
    operand: int
    op: str  # name of the primitive
    split: tuple[int, ...]
    examples: tuple[int, ...]
    units: tuple[int, ...]
    sign: int
    dtype: Any

    source: Source | None = None

    def residuals(self, values: Sequence[jax.Array], multiplier: jax.Array | None, probes: Probes) -> Any:
        del probes
        other = values[1 - self.operand] if self.op in ("mul", "div") else None
        return other, multiplier

    def statistics(self, residuals: Any, g: jax.Array) -> jax.Array:
        other, coefficient = residuals
        if other is not None:
            if self.source is not None:
                other = self.source(other)
            factor = 1 / other if self.op == "div" else other
            coefficient = factor if coefficient is None else factor * coefficient
        return self.sign * per_example(g, coefficient, self.split, self.examples, self.units)


Tap = KroneckerTap | ElementwiseTap
# At a marked output: from its value and the mark's entry among the probes, the value to go on with and one to hand out.
AtMark = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(tap: Tap, residuals: Any, y: jax.Array, probe: Any) -> jax.Array:
    del tap, residuals, probe
    return y


def _tap_forward(tap, residuals, y, probe):
    del tap, probe
    return y, residuals


def _tap_backward(tap, residuals, g):
    return None, g, jax.tree.map(lambda moment: moment.astype(tap.dtype), tap.statistics(residuals, g))


_tap.defvjp(_tap_forward, _tap_backward)


@dataclasses.dataclass
class Plan:
    """Where the taps of one jaxpr are, by equation index.

    Attributes:
      taps: taps behind equations of this jaxpr.
      multipliers: equations whose result is a scaled view of a parameter, and the operand that is the view.
      children: plans of the jaxprs inside equations.
      iterated: for a scan, whether the probe of a key has an entry for each iteration.
      marks: what happens at marked outputs in this jaxpr, with their keys.
    """

    taps: dict[int, Tap] = dataclasses.field(default_factory=dict)
    multipliers: dict[int, int] = dataclasses.field(default_factory=dict)
    children: dict[int, Plan] = dataclasses.field(default_factory=dict)
    iterated: dict[Key, bool] = dataclasses.field(default_factory=dict)
    marks: dict[int, tuple[Key, AtMark]] = dataclasses.field(default_factory=dict)

    def at(self, path: tuple[int, ...]) -> Plan:
        """The plan of the jaxpr that holds equation `path`."""
        plan = self
        for index in path[:-1]:
            plan = plan.children.setdefault(index, Plan())
        return plan


def evaluate(within: jex.Jaxpr, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Results of one equation of `within`; equations are bound only through the public `jaxpr_as_fun`."""
    variables = {var: value for var, value in zip(eqn.invars, values, strict=True) if not isinstance(var, jex.Literal)}
    # A copy of the jaxpr around it, because a new one wants debugging information that no public function makes.
    jaxpr = within.replace(constvars=[], invars=list(variables), outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects)
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*variables.values())


# What parameters have been multiplied by on the way to each variable that is a scaled view.
Multipliers = dict[int, jax.Array]  # by position among the arguments or results of an equation


def replay(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], plan: Plan, probes: Probes
) -> tuple[list[Any], dict[Key, Any]]:
    """The outputs of `jaxpr`, with the taps of `plan`; and what its marks hand out, stacked by the scans around."""
    outs, _, handed = _replay(jaxpr, consts, args, {}, plan, probes)
    return outs, handed


def _replay(
    jaxpr: jex.Jaxpr, consts: Sequence[Any], args: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    multipliers: dict[Any, Any] = {jaxpr.invars[k]: multiplier for k, multiplier in scaled.items()}
    handed: dict[Key, Any] = {}
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def read(var):
        return var.val if isinstance(var, jex.Literal) else env[var]

    def known(variables) -> Multipliers:
        found = ((k, None if isinstance(var, jex.Literal) else multipliers.get(var)) for k, var in enumerate(variables))
        return {k: multiplier for k, multiplier in found if multiplier is not None}

    for index, eqn in enumerate(jaxpr.eqns):
        values = [read(var) for var in eqn.invars]
        child = plan.children.get(index)
        if child is None:
            outs = evaluate(jaxpr, eqn, values)
        else:
            outs, leaving, inside = _inside(eqn, values, known(eqn.invars), child, probes)
            multipliers.update((eqn.outvars[k], multiplier) for k, multiplier in leaving.items())
            handed |= inside
        if index in plan.multipliers:
            operand = plan.multipliers[index]
            so_far = multipliers.get(eqn.invars[operand])
            values[operand] = jnp.ones_like(values[operand]) if so_far is None else so_far
            multipliers.update(zip(eqn.outvars, evaluate(jaxpr, eqn, values), strict=True))
        tap = plan.taps.get(index)
        if tap is not None:
            if isinstance(tap, ElementwiseTap):
                source = _source(jaxpr, producers, eqn.invars[1 - tap.operand])
                if source is not None:
                    tap = dataclasses.replace(tap, source=source)
                    values[1 - tap.operand] = [read(var) for var in source.inputs]
            residuals = tap.residuals(values, multipliers.get(eqn.invars[tap.operand]), probes)
            outs = [_tap(tap, residuals, outs[0], probes[tap.key])]
        if index in plan.marks:
            key, at_mark = plan.marks[index]
            outs[0], handed[key] = at_mark(outs[0], probes[key])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars], known(jaxpr.outvars), handed


def _inside(
    eqn: Any, values: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    name = eqn.primitive.name
    jaxpr, consts = inner_jaxpr(eqn)
    if name in CALLS:
        return _replay(jaxpr, consts, values, scaled, plan, probes)
    if name in REMATS:

        def block(probes, values, scaled):
            return _replay(jaxpr, consts, values, scaled, plan, probes)

        remat = jax.checkpoint(block, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
        return remat({key: probes[key] for key in _keys(plan)}, values, scaled)
    if name == "scan":
        return _scan(eqn, jaxpr, consts, values, scaled, plan, probes)
    raise AssertionError(f"no plan can lie inside {name}")


def _keys(plan: Plan) -> set[Key]:
    own = {tap.key for tap in plan.taps.values()} | {key for key, _ in plan.marks.values()}
    own |= {tap.moments.basis for tap in plan.taps.values() if isinstance(tap, KroneckerTap) and tap.moments}
    return own.union(*(_keys(child) for child in plan.children.values()))


def _scan(
    eqn: Any, jaxpr: jex.Jaxpr, consts, values: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    first, last = eqn.params["num_consts"], eqn.params["num_consts"] + eqn.params["num_carry"]
    shared = {key: probes[key] for key, iterated in plan.iterated.items() if not iterated}
    own = {key: probes[key] for key, iterated in plan.iterated.items() if iterated}
    # A scaled view that is carried comes out as it went in.
    same = {k: multiplier for k, multiplier in scaled.items() if k < last}
    sliced = {k: multiplier for k, multiplier in scaled.items() if k >= last}

    def body(carry, slices):
        xs, own, sliced = slices
        arguments = [*values[:first], *carry, *xs]
        outs, _, handed = _replay(jaxpr, consts, arguments, {**same, **sliced}, plan, {**shared, **own})
        return outs[: last - first], (outs[last - first :], handed)

    carry, (ys, handed) = lax.scan(
        body,
        list(values[first:last]),
        (list(values[last:]), own, sliced),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys], {k - first: multiplier for k, multiplier in same.items() if k >= first}, handed
