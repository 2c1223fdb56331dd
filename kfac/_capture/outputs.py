"""The marked output of a network: where it is, which parameters it depends on, targets drawn from it, and curvature."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kfac._capture import equations
from kfac._capture.likelihoods import Likelihood, name_of, named
from kfac._capture.program import Op, Value
from kfac._capture.replay import replay
from kfac._capture.states import Use
from kfac._capture.taps import AtMark, Key, Plan
from kfac._capture.trace import Batch, Trace, is_key, trace
from kfac._checks import check
from kfac._statistics.rows import accumulator
from kfac._varying import as_varying, varying_axes, whole


def output(
    x: jax.Array, likelihood: str | Likelihood, *, weight: float = 1.0, variance: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """Marks the output of the network inside `loss_fn`, and the distribution of the targets that it predicts.

    An identity. The loss is the mean over its rows, which `value_and_grad` counts, `n = x.size / x.shape[-1]` unless
    `num_examples` is given; `fisher="sampled"` and `"expected"` take the targets from the distribution. It may stand
    inside `jax.jit`, `jax.checkpoint`, `jax.vmap` and `lax.scan`, and a loss may mark several outputs, which count as
    independent given the input.

    The loss that belongs to a mark is the mean over the `n` rows of `-log p(target | x)`:

    - `"categorical"`: `x` are logits, classes on the last axis: `optax.softmax_cross_entropy(x, target)`.
    - `"bernoulli"`: `x` are logits of independent features on the last axis, summed over:
      `optax.sigmoid_binary_cross_entropy(x, target).sum(-1)`.
    - `"gaussian"`: `x` is the mean, the variance is 1: `0.5 * jnp.sum((target - x) ** 2, axis=-1)`; with `variance` the
      squares are divided by it.
    - `"residual"`: `x` are the residuals of least squares, which have no targets, as of a differential equation:
      `0.5 * jnp.sum(x**2, axis=-1)`. Its Fisher matrix is the Gauss-Newton matrix.
    - `"poisson"`: `x` are logarithms of rates: `jnp.sum(jnp.exp(x) - target * x, axis=-1)`.

    Args:
      x: real, `[..., features]`; a single feature has an axis of its own too.
      likelihood: one of these names, or a `kfac.curvature.Likelihood`.
      weight: the factor of `-log p`, summed over these rows, in `n` times the loss; positive. It is 1 where the loss is
        the mean over one output. A loss of several terms, `sum_t c_t (mean over m_t rows)`, as of the interior and the
        boundary of a domain, has one `n` for all, given as `num_examples`: the weight of term `t` is `c_t n / m_t`.
      variance: with `"gaussian"`, the known variance of the targets, positive: a number or an array like `x`.

    Returns:
      `x`; with `variance`, up to rounding.

    Raises:
      ValueError: `likelihood` is another, `weight` is not positive, `variance` is for another likelihood, or `x` has no
        axis.
      TypeError: `x` is not real, or `weight` is no plain number.
    """
    name = name_of(likelihood)
    if not isinstance(weight, int | float):
        raise TypeError(f"weight must be a plain number, but is {weight!r}")
    if not (weight > 0 and math.isfinite(weight)):
        raise ValueError(f"weight must be positive and finite, but is {weight!r}")
    if variance is not None:
        if likelihood != "gaussian":
            raise ValueError(f"variance is for likelihood='gaussian', but likelihood is {likelihood!r}")
        deviation = jnp.sqrt(variance).astype(jnp.result_type(x))
        return output(x / deviation, likelihood, weight=weight) * deviation
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"the output must be real, but has dtype {x.dtype}")
    if x.ndim < 1:
        raise ValueError("the output must have an axis of features, but is a scalar: pass x[..., None]")
    # vmap puts its axis where it likes, but behind expand_dims it comes first, and the features remain last.
    return lax.squeeze(checkpoint_name(lax.expand_dims(x, (0,)), f"{equations.MARK}{name}/{float(weight)!r}"), (0,))


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """A marked output that reaches the loss.

    Attributes:
      key: of its entry among the probes, `("", k)`, which no layer has.
      op: the operation.
      likelihood: the distribution.
      weight: how many times the loss holds its `-log p`.
    """

    key: Key
    op: Op
    likelihood: Likelihood
    weight: float

    @property
    def value(self) -> Value:
        """The output, `[..., features]`, with an axis of 1 among the others that `output` adds."""
        return self.op.outputs[0]

    @property
    def scans(self) -> tuple[int, ...]:
        """Lengths of the enclosing scans."""
        return tuple(loop.length for loop in self.op.loops)

    @property
    def rows(self) -> int:
        """How many predictions it holds, over all iterations of the scans around it."""
        return math.prod(self.scans) * math.prod(self.value.shape[:-1])

    def times_root(self, x: jax.Array, v: jax.Array, n: int, what: str) -> jax.Array:
        """`S v`, with `S^T S` the Hessian of its share in a loss that is the mean over `n`; `what` needs it."""
        return (self.weight / n) ** 0.5 * self.likelihood.times_root(x, v, what)


@dataclasses.dataclass(frozen=True)
class Marks:
    """All marked outputs of a traced loss, in program order."""

    marks: tuple[Mark, ...]

    @property
    def weighted(self) -> bool:
        return any(mark.weight != 1 for mark in self.marks)

    def num_examples(
        self, asked: int | None, batch: Batch, kernels: dict[str, list[Use]], unmarked: bool = False, joined: str = ""
    ) -> tuple[int | None, str]:
        """How many examples the loss is the mean of; None where it is not clear, and why.

        Args:
          asked: the number, if the user said it.
          batch: what is known of the batch.
          kernels: the uses of each kernel.
          unmarked: whether the loss has terms without a mark.
          joined: what reads rows of the batch joined with others; empty if nothing does.

        Raises:
          ValueError: `asked` is no positive int, or larger than the number of positions at which kernels are read.
        """
        rows = {mark.rows: mark for mark in self.marks}
        hidden = batch.num_examples is None
        # The rows of terms without a mark. Of a loss that hides its examples they may be those of a second batch.
        beside = {
            use.rows: name
            for name, uses in kernels.items()
            for use in uses
            if hidden and use.op.product and use.op.unmarked
        }
        apart = " Mark the output of each batch, kfac.output(..., weight=), for the loss to have a scale of each"
        if asked is not None:
            check(num_examples=asked)
            if batch.several and not rows:
                raise ValueError(f"num_examples={asked} says nothing of a second batch, but {batch.hidden}.{apart}")
            read = {name: sum(use.rows for use in uses) for name, uses in kernels.items() if uses}
            most, few = max(read, key=lambda name: read[name], default=""), min(beside, default=asked)
            if read and asked > read[most]:
                places = f"the {read[most]} position(s) at which {most!r} is read, the most of all kernels"
                raise ValueError(f"num_examples={asked} is more than {places}")
            if asked > few:
                places = f"the {few} position(s) at which {beside[few]!r} is read, maybe of a second batch"
                raise ValueError(f"num_examples={asked} is more than {places}.{apart}")
            return asked, ""
        for mark in rows.values():
            if mark.value.grown[-1]:
                return None, (
                    "the marked output has one axis, which is that of its features, but it holds the examples: give "
                    "the features an axis of their own, kfac.output(x[:, None], ...)"
                )
        # A mark on another batch than the arguments' says nothing of terms without one.
        of_batch = hidden or not unmarked or any(mark.value.of_batch for mark in self.marks)
        if len(rows) == 1 and of_batch and beside.keys() <= rows.keys():
            return next(iter(rows)), ""
        if not (hidden or batch.several or (joined and not rows)):
            return batch.num_examples, ""
        why, how = batch.hidden or "a weight counts in units of one of them", " Pass num_examples= to value_and_grad"
        if rows:
            seen = " and ".join(f"{count} ({list(mark.value.shape)})" for count, mark in rows.items())
            why = f"the marked outputs have {seen} rows,{' other terms of the loss no mark,' * bool(beside)} and {why}"
            how += ", and mark the other terms too, kfac.output(..., weight=)" * bool(beside)
        elif batch.several and not joined:
            how = f"{apart}, and pass num_examples= to value_and_grad"
        else:
            why = f"{joined} reads rows of the batch joined with others" if joined else why
            how += ", or mark the output with kfac.output; or pass the batch as an argument, named by batch_argnums="
        return None, f"the number of examples is not clear: {why}.{how}"

    def require(self, what: str, traced: Trace, skipped: Collection[str]) -> None:
        """Raises a `ValueError` unless every parameter of the loss acts on it through a marked output."""
        if not self.marks:
            how = "logits = kfac.output(logits, 'categorical')"
            raise ValueError(f"{what} needs the output of the network: mark it inside loss_fn, {how}")
        reached = frozenset[int]().union(*(mark.value.leaves for mark in self.marks))
        unreached = sorted(traced.program.outputs[0].leaves - reached)
        if missing := [name for name in (traced.names[leaf] for leaf in unreached) if name not in skipped]:
            raise ValueError(
                f"{what}: the loss depends on {', '.join(map(repr, missing[:5]))}, but no marked output does: mark "
                "with kfac.output all that the loss compares with targets, or leave these parameters out with skip="
            )

    def place(self, plan: Plan, make: Callable[[Mark], AtMark]) -> None:
        """Puts `make(mark)` at every mark of `plan`."""
        for mark in self.marks:
            plan.marks[mark.op] = mark.key, make(mark)
            plan.look_inside(mark.op, [mark.key], mark.op.loops)


def find_marks(traced: Trace) -> Marks:
    """The marked outputs of a loss.

    Raises:
      ValueError: one is inside `lax.while_loop`, `lax.cond` or another construct that cannot be followed.
    """
    marks: list[Mark] = []
    for op in traced.program.walk():
        mark = equations.mark(op.eqn)
        if mark and op.alive:
            likelihood, weight = mark.split("/")
            marks.append(Mark(("", len(marks)), op, named(likelihood), float(weight)))
        if not op.inner and equations.holds_mark(op.eqn):
            raise ValueError(f"kfac.output cannot be followed inside {op.name}: mark what comes out of it")
    return Marks(tuple(marks))


# -- targets -----------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pull(transposed: Callable[..., jax.Array], x: jax.Array, entry: jax.Array, zeros: jax.Array) -> jax.Array:
    """`zeros`, as if they depended on `x`: a cotangent `g` of theirs becomes `transposed(x, entry, g)` of it."""
    return zeros


def _pull_backward(transposed, residuals, g):
    x, entry = residuals
    # What is drawn lies in no certain way: with explicit axes the types of the two would not agree.
    pulled = as_varying(whole(transposed, x)(x, entry, g).astype(x.dtype), varying_axes(x))
    return pulled, None, as_varying(jnp.zeros_like(g), varying_axes(g))


_pull.defvjp(lambda transposed, x, entry, zeros: (zeros, (x, entry)), _pull_backward)


@dataclasses.dataclass(frozen=True)
class Draw:
    """Hands out, at a mark, zeros whose gradients are those of the likelihood.

    Of drawn targets one zero, with the gradient of the mean over `n` of `-log p`. With `expected` a zero for each
    feature: zero `c` has the gradient `S^T e_c / n`, and the second moments of these, added up over `c`, are those of
    gradients of the mean expected over all targets. Every row has a random sign, so that rows that share a gradient, as
    where examples interact, do so on average as independent targets would: not at all.
    """

    mark: Mark
    n: int
    expected: bool = False

    def __call__(self, x: jax.Array, entry: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = x.shape[-1:] if self.expected else ()
        # Which lie and vary as `x` does.
        zeros = lax.stop_gradient(jnp.sum(x, axis=tuple(range(x.ndim - len(shape)))) * 0)
        return x, _pull(self._expected if self.expected else self._sampled, x, entry, zeros)

    @property
    def _scale(self) -> float:
        return math.sqrt(self.mark.weight) / self.n

    def _sampled(self, x: jax.Array, key: jax.Array, g: jax.Array) -> jax.Array:
        return g * self._scale * self.mark.likelihood.sampled_gradient(x, key)

    def _expected(self, x: jax.Array, key: jax.Array, g: jax.Array) -> jax.Array:
        signs = jax.random.rademacher(key, (*x.shape[:-1], 1), accumulator(x.dtype))

        def root(v):
            return self.mark.likelihood.times_root(x, v, "fisher='expected'")

        # As varying as the outputs: shard_map would add up what is not over devices.
        _, transposed = jax.vjp(root, as_varying(jnp.zeros(x.shape, signs.dtype), varying_axes(x)))
        return transposed(signs * g.astype(signs.dtype))[0] * self._scale


def keys_of(marks: Marks, key: jax.Array) -> dict[Key, jax.Array]:
    """A PRNG key for each mark, and for each iteration of the scans around it."""
    alone = {mark: jax.random.fold_in(key, mark.key[1]) for mark in marks.marks}
    return {mark.key: jax.random.split(k, mark.scans) if mark.scans else k for mark, k in alone.items()}


# -- weights -----------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def at_weight(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Identity, at a mark, whose cotangents are multiplied by `scale`."""
    return x, scale


at_weight.defvjp(
    lambda x, scale: ((x, scale), scale), lambda scale, g: ((g[0] * scale).astype(g[0].dtype), jnp.zeros_like(scale))
)


def weights_to(marks: Marks, power: float) -> dict[Key, jax.Array]:
    """The weight of each mark to a power, for each iteration of the scans around it."""
    return {mark.key: jnp.full(mark.scans, mark.weight**power) for mark in marks.marks}


# -- the loss as a function of its marked outputs -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Marked:
    """What a loss is made of: `F = (1/n) sum_r J_r^T H_r J_r` over the rows of its marked outputs.

    Attributes:
      evaluate: from parameters to the loss and its outputs.
      marks: the marks of these.
      n: the number of examples.
      what: who asks, for messages.
    """

    evaluate: Callable[[Any], tuple[jax.Array, list[jax.Array]]]
    marks: tuple[Mark, ...]
    n: int
    what: str

    def times_root(self, outputs: list[jax.Array], vectors: list[jax.Array]) -> list[jax.Array]:
        """`S v` for each mark, with `S^T S` the Hessian of its share in the loss."""
        triples = zip(self.marks, outputs, vectors, strict=True)
        return [mark.times_root(x, v, self.n, self.what) for mark, x, v in triples]

    def root(self, params: Any) -> tuple[jax.Array, Callable[[Any], list[jax.Array]]]:
        """The loss, and `R v` of a tree `v` like the parameters, for each mark, with `F = R^T R`."""
        (loss, outputs), push = jax.linearize(self.evaluate, params)
        return loss, lambda tree: self.times_root(outputs, push(tree)[1])


def marked(value_fn: Callable[[Any], Any], params: Any, num_examples: int | None, what: str) -> Marked:
    """The marked outputs of a loss of the parameters alone.

    Raises:
      ValueError: there is none, the loss depends on a parameter but no mark does, or `n` is not clear.
    """
    traced = trace(value_fn, False, params, (), {})
    marks = find_marks(traced)
    marks.require(what, traced, ())
    n, unclear = marks.num_examples(num_examples, traced.batch, {})
    if n is None:
        raise ValueError(unclear.replace("to value_and_grad", f"to {what}"))
    plan = Plan()
    marks.place(plan, lambda mark: lambda x, entry: (x, x))
    entries = {mark.key: jnp.zeros(mark.scans) for mark in marks.marks}

    def evaluate(params):
        outs, outputs = replay(traced.program, jax.tree.leaves(params), plan, entries)
        return outs[0], [outputs[key] for key in entries]

    return Marked(evaluate, marks.marks, n, what)


# -- PRNG keys ---------------------------------------------------------------------------------------------------------


def with_own_key(kwargs: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """`kwargs`, PRNG keys among them folded with the number of a part: typed ones, or `key` and `fisher_key`."""

    def folded(name, leaf):
        typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(leaf, part) if is_key(leaf) and (typed or name in ("key", "fisher_key")) else leaf

    return {name: jax.tree.map(functools.partial(folded, name), x) for name, x in kwargs.items()}
