"""Evaluates a traced loss again, with the taps of a plan behind its operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from kfac._capture import primitives
from kfac._capture.taps import ElementwiseTap, Key, KroneckerTap, Plan, Probes, tapped, together
from kfac._capture.trace import Op, Program


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


# What parameters have been multiplied by on the way to each variable that is a scaled view.
Multipliers = dict[int, jax.Array]  # by position among the arguments or results of an op


def replay(program: Program, args: Sequence[Any], plan: Plan, probes: Probes) -> tuple[list[Any], dict[Key, Any]]:
    """The results of a program, with the taps of `plan`; and what its marks hand out, stacked by the scans around."""
    outs, _, handed = _replay(program, args, {}, plan, probes)
    return list(map(_alone, outs)), handed


def compute(within: Program, op: Op, values: Sequence[Any]) -> list[Any]:
    """Results of one op of a program."""
    return primitives.evaluate(within.jaxpr, op.eqn, values)


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """How an array is computed by elementwise equations from one array of its shape and smaller ones.

    A normalised input is such an array. The backward pass of a network computes it again from the array before, and so
    do the taps: kept for them, it would take as much memory as all outputs of convolutions.
    """

    within: Any
    equations: tuple[Any, ...]
    inputs: tuple[Any, ...]

    def __call__(self, values: Sequence[jax.Array]) -> jax.Array:
        # Without the barrier, XLA would see that the forward pass has computed the same, and keep that.
        env = dict(zip(self.inputs, lax.optimization_barrier(list(values)), strict=True))
        for eqn in self.equations:
            operands = [var.val if isinstance(var, jex.Literal) else env[var] for var in eqn.invars]
            (env[eqn.outvars[0]],) = primitives.evaluate(self.within, eqn, operands)
        return env[self.equations[-1].outvars[0]]


def _source(within: Any, producers: Mapping[Any, Any], var: Any) -> Source | None:
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


def _replay(
    program: Program, args: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    jaxpr = program.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    multipliers: dict[Any, Any] = {jaxpr.invars[k]: multiplier for k, multiplier in scaled.items()}
    handed: dict[Key, Any] = {}
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def read(var):
        return var.val if isinstance(var, jex.Literal) else env[var]

    def known(variables) -> Multipliers:
        found = ((k, None if isinstance(var, jex.Literal) else multipliers.get(var)) for k, var in enumerate(variables))
        return {k: multiplier for k, multiplier in found if multiplier is not None}

    for index, op in enumerate(program.ops):
        eqn, values = op.eqn, [read(var) for var in op.inputs]
        child = plan.children.get(index)
        if not op.alive:
            values = list(map(_alone, values))
        if index in plan.late:
            other = plan.taps[index][0].use.read.other
            if not _is_shared(values[other]):
                values[other] = Shared(jnp.broadcast_to(values[other], (plan.late[index], *values[other].shape)))
        kronecker = [tap.key for tap in plan.taps.get(index, ()) if isinstance(tap, KroneckerTap) and not tap.use.scans]
        if kronecker and not any(map(_is_shared, values)):
            values, own = together((values, {key: probes[key] for key in kronecker}))
            probes = {**probes, **own}
        if child is None:
            outs = _evaluate_shared(jaxpr, op, values[: op.num_values], plan.merges.get(index))
        else:
            outs, leaving, inside = _inside(op, values, known(op.inputs), child, probes)
            multipliers.update((op.outputs[k], multiplier) for k, multiplier in leaving.items())
            handed |= inside
        if index in plan.multipliers:
            operand = plan.multipliers[index]
            so_far = multipliers.get(op.inputs[operand])
            values[operand] = jnp.ones_like(values[operand]) if so_far is None else so_far
            multipliers.update(zip(op.outputs, primitives.evaluate(jaxpr, eqn, values), strict=True))
        for tap in plan.taps.get(index, ()):
            if isinstance(tap, ElementwiseTap) and tap.other is not None:
                source = _source(jaxpr, producers, op.inputs[tap.other])
                if source is not None:
                    values[tap.other] = [read(var) for var in source.inputs]
                    tap = dataclasses.replace(tap, source=source)
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
    return [read(var) for var in jaxpr.outvars], known(jaxpr.outvars), handed


def _evaluate_shared(jaxpr: Any, op: Op, values: Sequence[Any], axis: int | None) -> list[Any]:
    """Results of an op; where arrays that all examples share meet the examples, which have the axis `axis`."""
    if not any(map(_is_shared, values)):
        return primitives.evaluate(jaxpr, op.eqn, values)

    def one(*values):
        return primitives.evaluate(jaxpr, op.eqn, values)

    if axis is not None and len(values) > 1:

        def whole(value):
            if _is_shared(value):  # the examples take the place of an axis of length one
                value = jnp.moveaxis(jnp.squeeze(value.rows, axis + 1), 0, axis)
            return jnp.broadcast_to(value, op.results[0])

        return [primitives.ELEMENTWISE[op.name](*map(whole, values))]
    own = [value.rows if _is_shared(value) else value for value in values]
    outs = jax.vmap(one, in_axes=[0 if _is_shared(value) else None for value in values])(*own)
    if axis is None:
        return list(map(Shared, outs))
    return [jnp.moveaxis(jnp.take(outs[0], 0, axis=axis + 1), 0, axis)]


def _inside(
    op: Any, values: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    """What `_replay` gives of the program inside an op, called as the op calls it."""

    def block(probes, values, scaled):
        return _replay(op.inner, values, scaled, plan, probes)

    own = {key: probes[key] for key in plan.keys()}
    if op.call.kind == "scan":
        return _scan(op, values, scaled, plan, probes)
    if op.call.kind == "remat":
        params = op.eqn.params
        return jax.checkpoint(block, prevent_cse=params["prevent_cse"], policy=params["policy"])(own, values, scaled)
    if op.call.kind == "rule":
        primals = list(map(lax.stop_gradient, values[: op.num_values]))
        tangents = [_instead(jnp.zeros_like(value), value) for value in values[op.num_values :]]
        outs, _, handed = block(own, [*primals, *tangents], scaled)
        results = primitives.evaluate(op.inner.jaxpr, op.eqn, primals)
        return list(map(_instead, results, outs)), {}, handed
    if "out_shardings" not in op.eqn.params:
        return block(own, values, scaled)
    # What stands in the call for shardings that are not given is no public type.
    values = list(map(_constrained, values, op.eqn.params["in_shardings"]))
    outs, leaving, handed = block(own, values, scaled)
    return list(map(_constrained, outs, op.eqn.params["out_shardings"])), leaving, handed


@jax.custom_vjp
def _instead(value: jax.Array, x: jax.Array) -> jax.Array:
    """A value with the gradient of `x`."""
    del x
    return value


_instead.defvjp(lambda value, x: (value, None), lambda _, g: (None, g))


def _constrained(value: Any, sharding: Any) -> Any:
    known = isinstance(sharding, jax.sharding.Sharding) and not _is_shared(value)
    return lax.with_sharding_constraint(value, sharding) if known else value


def _scan(
    op: Any, values: Sequence[Any], scaled: Multipliers, plan: Plan, probes: Probes
) -> tuple[list[Any], Multipliers, dict[Key, Any]]:
    scan = op.call.scan
    first, last = scan.consts, scan.consts + scan.carried
    shared = {key: probes[key] for key, iterated in plan.iterated.items() if not iterated}
    own = {key: probes[key] for key, iterated in plan.iterated.items() if iterated}
    # A scaled view that is carried comes out as it went in.
    same = {k: multiplier for k, multiplier in scaled.items() if k < last}
    sliced = {k: multiplier for k, multiplier in scaled.items() if k >= last}

    def body(carry, slices):
        xs, own, sliced = slices
        arguments = [*values[:first], *carry, *xs]
        outs, _, handed = _replay(op.inner, arguments, {**same, **sliced}, plan, {**shared, **own})
        return outs[: last - first], (outs[last - first :], handed)

    options = {key: op.eqn.params[key] for key in ("length", "reverse", "unroll")}
    carry, (ys, handed) = lax.scan(body, list(values[first:last]), (list(values[last:]), own, sliced), **options)
    return [*carry, *ys], {k - first: multiplier for k, multiplier in same.items() if k >= first}, handed


# -- other ways to evaluate --------------------------------------------------------------------------------------------


def rewrite(fn: Callable[..., Any], rules: Mapping[str, Callable[..., jax.Array]]) -> Callable[..., Any]:
    """`fn` with other ways to compute some primitives, `rules[name](params, *operands)`, also in calls and scans.

    What is inside a `custom_vjp` or `jax.checkpoint` is left as it is.
    """

    def evaluated(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(var):
            return var.val if isinstance(var, jex.Literal) else env[var]

        for eqn in jaxpr.eqns:
            values, call = [read(var) for var in eqn.invars], primitives.call(eqn)
            if eqn.primitive.name in rules:
                outs = [rules[eqn.primitive.name](eqn.params, *values)]
            elif call and call.kind == "call":
                outs = evaluated(call.jaxpr, call.consts, values)
            elif call and call.scan:
                outs = scanned(eqn, call, values)
            else:
                outs = primitives.evaluate(jaxpr, eqn, values)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def scanned(eqn: Any, call: primitives.Call, values: Sequence[Any]) -> list[Any]:
        assert call.scan
        first, last = call.scan.consts, call.scan.consts + call.scan.carried

        def body(carry, xs):
            outs = evaluated(call.jaxpr, call.consts, [*values[:first], *carry, *xs])
            return outs[: last - first], outs[last - first :]

        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, list(values[first:last]), list(values[last:]), **options)
        return [*carry, *ys]

    def rewritten(*args):
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        outs = evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return rewritten
