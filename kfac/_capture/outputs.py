"""Mark the network's output, find the marks in a traced loss, draw targets from them, and compute their curvature."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from kfac._capture import equations
from kfac._capture.likelihoods import Likelihood, MarkName
from kfac._capture.program import Op, Value
from kfac._capture.replay import replay
from kfac._capture.states import Use
from kfac._capture.taps import AtMark, Key, TapPlan
from kfac._capture.trace import Batch, Trace, trace
from kfac._checks import check, check_number
from kfac._mesh import PyTree, with_auto_axes
from kfac._statistics.rows import accumulator


def mark_output(
    x: Array,
    likelihood: str | Likelihood,
    *,
    weight: float = 1.0,
    variance: ArrayLike | None = None,
) -> Array:
    """Mark the network's output inside `loss_fn`, and name the distribution of targets that it predicts.

    ::

        def marked_loss(params, batch):
            logits = kfac.mark_output(network(params, batch[0]), "categorical")
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    The function is the identity. The loss must be a mean over the output's rows. `value_and_grad` counts them,
    `n = x.size / x.shape[-1]`, unless `num_examples` is given. With `fisher="sampled"` and `fisher="expected"` the
    targets come from the distribution. The call may be inside `jax.jit`, `jax.checkpoint`, `jax.vmap` and `lax.scan`. A
    loss may mark several outputs, which count as independent given the input.

    For each likelihood, the loss is the mean of `-log p(target | x)` over the `n` rows:

    - `"categorical"`: `x` holds logits, with classes on the last axis: `optax.softmax_cross_entropy(x, target)`.
    - `"bernoulli"`: `x` holds the logits of independent features, and the loss sums over these:
      `optax.sigmoid_binary_cross_entropy(x, target).sum(-1)`.
    - `"gaussian"`: `x` is the mean, and the variance is 1: `0.5 * jnp.sum((target - x) ** 2, axis=-1)`. With `variance`
      the squares are divided by it.
    - `"residual"`: `x` holds least-squares residuals without targets, for example the residuals of a differential
      equation: `0.5 * jnp.sum(x**2, axis=-1)`. The Fisher matrix is the Gauss-Newton matrix.
    - `"poisson"`: `x` holds the logarithms of rates: `jnp.sum(jnp.exp(x) - target * x, axis=-1)`.

    Args:
      x: the output, a real array `[..., features]`. A single feature also needs its own axis.
      likelihood: a name from this list, or a `kfac.curvature.Likelihood`.
      weight: a positive number `w`: `n` times the loss contains `w` times the sum of `-log p` over this output's rows.
        It is 1 if the loss is the mean over a single output. A loss with several terms, such as the interior and the
        boundary of a domain, `sum_t c_t (mean over m_t rows)`, has a common `n`, given as `num_examples`. The weight of
        term `t` is then `c_t n / m_t`.
      variance: with `"gaussian"`, the known variance of the targets: a positive number, or an array like `x`.

    Returns:
      `x`. With `variance`, the result equals `x` up to rounding.

    Raises:
      ValueError: `likelihood` is unknown, `weight` is not a positive and finite number, `variance` is given for a
        likelihood other than `"gaussian"`, or `x` has no axis.
      TypeError: `x` is not real, or `weight` is traced.
    """
    check_number("weight", weight, "(0, inf)")
    name = MarkName(likelihood, float(weight))
    if variance is not None:
        if likelihood != "gaussian":
            raise ValueError(
                f"variance is for likelihood='gaussian', but likelihood is {likelihood!r}"
            )
        deviation = jnp.sqrt(variance).astype(jnp.result_type(x))
        return mark_output(x / deviation, likelihood, weight=weight) * deviation
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"the output must be real, but has dtype {x.dtype}")
    if x.ndim < 1:
        raise ValueError(
            "the output must have an axis of features, but is a scalar: pass x[..., None]"
        )
    # `vmap` may put its axis anywhere, but `expand_dims` moves it to the front, so the features stay last.
    return lax.squeeze(checkpoint_name(lax.expand_dims(x, (0,)), name), (0,))


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
    """A marked output that reaches the loss.

    Attributes:
      key: the mark's key among the probes.
      op: the marking operation.
      likelihood: the distribution of the targets.
      weight: the `weight` argument of `mark_output`.
    """

    key: Key
    op: Op
    likelihood: Likelihood
    weight: float

    @property
    def value(self) -> Value:
        """The output, `[..., features]`, including the axis of length 1 that `mark_output` adds."""
        return self.op.outputs[0]

    @property
    def scans(self) -> tuple[int, ...]:
        """Lengths of the enclosing scans."""
        return tuple(loop.length for loop in self.op.loops)

    @property
    def rows(self) -> int:
        """The number of predictions, over all iterations of the enclosing scans."""
        return math.prod(self.scans) * math.prod(self.value.shape[:-1])


MARK_EACH = " Mark the output of each batch, kfac.mark_output(..., weight=), for the loss to have a scale of each"


# The uses of each kernel, by the kernel's path.
Kernels = Mapping[str, Sequence[Use]]


class Marks(tuple[Mark, ...]):
    """All marked outputs of a traced loss, in program order."""

    @property
    def weighted(self) -> bool:
        return any(mark.weight != 1 for mark in self)

    def num_examples(
        self,
        asked: int | None,
        batch: Batch,
        kernels: Kernels,
        unmarked: bool = False,
        joined: str = "",
    ) -> tuple[int | None, str]:
        """Return the number of examples over which the loss is a mean.

        Args:
          asked: the number that the user gave, if any.
          batch: the batch, as the trace found it.
          kernels: the uses of each kernel, by the kernel's path.
          unmarked: whether the loss has terms without a mark.
          joined: an operation that reads rows of the batch concatenated with other rows; empty if there is no such
            operation.

        Returns:
          The number and an empty string, or None and the reason why the number is not clear.

        Raises:
          ValueError: `asked` is not a positive int, is larger than the number of positions at which kernels are read,
            or is given for several batches without marks.
        """
        hidden = batch.num_examples is None
        # Numbers of rows in terms without a mark. If the loss hides its examples, the rows may be a second batch.
        beside: dict[int, str] = {}
        if hidden:
            for name, uses in kernels.items():
                for use in uses:
                    if use.op.product and use.op.unmarked:
                        beside[use.rows] = name
        if asked is not None:
            self._check_asked(asked, batch, kernels, beside)
            return asked, ""
        rows = {mark.rows: mark for mark in self}
        if any(mark.value.grown[-1] for mark in rows.values()):
            return None, (
                "the marked output has one axis, which is that of its features, but it holds the examples: give "
                "the features an axis of their own, kfac.mark_output(x[:, None], ...)"
            )
        # A mark that does not depend on the batch does not tell the number of examples in terms without a mark.
        if hidden or not unmarked or any(mark.value.of_batch for mark in self):
            if len(rows) == 1 and beside.keys() <= rows.keys():
                return next(iter(rows)), ""
        if not hidden and not batch.several and (rows or not joined):
            return batch.num_examples, ""

        why = batch.unknown_batch_reason or "a weight counts in units of one of them"
        how = " Pass num_examples= to value_and_grad"
        if rows:
            counts = []
            for count, mark in rows.items():
                counts.append(f"{count} ({list(mark.value.shape)})")
            others = ""
            if beside:
                others = " other terms of the loss no mark,"
                how += ", and mark the other terms too, kfac.mark_output(..., weight=)"
            why = f"the marked outputs have {' and '.join(counts)} rows,{others} and {why}"
        elif batch.several and not joined:
            how = f"{MARK_EACH}, and pass num_examples= to value_and_grad"
        else:
            if joined:
                why = f"{joined} reads rows of the batch joined with others"
            how += (
                ", or mark the output with kfac.mark_output; or pass the batch as an argument, named by "
                "batch_argnums="
            )
        return None, f"the number of examples is not clear: {why}.{how}"

    def _check_asked(
        self,
        asked: int,
        batch: Batch,
        kernels: Kernels,
        beside: Mapping[int, str],
    ) -> None:
        """Raise if the user's number of examples cannot be right.

        `beside` maps the numbers of rows in terms without a mark to a kernel that reads them. See `num_examples`.
        """
        check(num_examples=asked)
        message = f"num_examples={asked}"
        if batch.several and not self:
            raise ValueError(
                f"{message} says nothing of a second batch, but {batch.unknown_batch_reason}.{MARK_EACH}"
            )
        most = 0
        for name, uses in kernels.items():
            rows = sum(use.rows for use in uses)
            if rows > most:
                most = rows
                kernel = name
        if 0 < most < asked:
            raise ValueError(
                f"{message} is more than the {most} position(s) at which {kernel!r} is read, the most of all kernels"
            )
        few = min(beside, default=asked)
        if few < asked:
            raise ValueError(
                f"{message} is more than the {few} position(s) at which {beside[few]!r} is read, maybe of a second "
                f"batch.{MARK_EACH}"
            )

    def require(self, what: str, traced: Trace, skipped: Collection[str]) -> None:
        """Check that every parameter that reaches the loss also reaches a mark, except the `skipped` paths.

        Raises:
          ValueError: the loss has no mark, or such a parameter reaches no mark. `what` names the caller in the message.
        """
        if not self:
            raise ValueError(
                f"{what} needs the output of the network: mark it inside loss_fn, logits = kfac.mark_output(logits, "
                "'categorical')"
            )
        reached = frozenset[int]().union(*(mark.value.leaves for mark in self))
        missing = []
        for leaf in sorted(traced.program.outputs[0].leaves - reached):
            name = traced.names[leaf]
            if name not in skipped:
                missing.append(repr(name))
        if missing:
            raise ValueError(
                f"{what}: the loss depends on {', '.join(missing[:5])}, but no marked output does: mark "
                "with kfac.mark_output all that the loss compares with targets, or leave these out with "
                "rules={pattern: 'skip'}"
            )

    def place(self, plan: TapPlan, make: Callable[[Mark], AtMark]) -> None:
        """Add `make(mark)` to `plan`, for each mark, as the function to call at the mark."""
        for mark in self:
            plan.marks[mark.op] = mark.key, make(mark)
            plan.slice_probes([mark.key], mark.op.loops)


def find_marks(traced: Trace) -> Marks:
    """Return the marked outputs that reach the loss, in program order.

    Raises:
      ValueError: a mark is inside `lax.while_loop`, `lax.cond` or another construct that cannot be followed.
    """
    marks: list[Mark] = []
    for op in traced.program.walk():
        name = equations.mark(op.eqn)
        if name is not None and op.alive:
            marks.append(Mark(Key("", len(marks)), op, name.likelihood, name.weight))
        if not op.inner and equations.holds_mark(op.eqn):
            raise ValueError(
                f"kfac.mark_output cannot be followed inside {op.name}: mark what comes out of it"
            )
    return Marks(marks)


# -- targets -----------------------------------------------------------------------------------------------------------


def draw(
    mark: Mark, n: int, expected: bool, x: Array, key: Array
) -> tuple[Array, Array]:
    """Hand out zeros at a mark, whose gradients come from the likelihood. `x` stays as it is.

    All gradients are scaled by `sqrt(weight) / n`, with the mark's weight and the number `n` of examples.

    With drawn targets there is a single zero. Its gradient is the gradient of `-log p(target | x)`, summed over rows.

    With `expected` there is a zero for each feature, and zero `c` has the gradient `S^T e_c` in each row. Summed over
    `c`, the second moments of these gradients equal their expectation over all targets. Each row gets a random sign. If
    several rows contribute to a gradient, because examples interact for instance, the signs cancel their cross terms on
    average, as independent targets would.
    """
    likelihood = mark.likelihood
    scale = math.sqrt(mark.weight) / n
    wide = accumulator(x.dtype)

    def of_targets(x, key):
        fixed = lax.stop_gradient(x).astype(wide)
        target = likelihood.sample(key, fixed)
        score = jax.grad(lambda z: jnp.sum(likelihood.log_prob(z, target)))(fixed)
        return -scale * jnp.sum(score * _zeros_of(x))

    def of_roots(x, key):
        signs = jax.random.rademacher(key, (*x.shape[:-1], 1), wide)
        roots = likelihood.times_root(
            lax.stop_gradient(x), _zeros_of(x), "fisher='expected'"
        )
        return scale * jnp.sum(signs * roots, axis=range(x.ndim - 1))

    # Drawn arrays have no definite sharding. With explicit mesh axes, their types would not match the type of `x`.
    return x, with_auto_axes(of_roots if expected else of_targets)(x, key)


def _zeros_of(x: Array) -> Array:
    """Return zeros whose derivative with respect to `x` is the identity, or 0 at the infinities of masked logits."""
    finite = jnp.where(jnp.isfinite(x), x, 0)
    return finite - lax.stop_gradient(finite)


def keys_of(marks: Marks, key: Array) -> dict[Key, Array]:
    """Return a PRNG key for each mark, and for each iteration of the scans around the mark."""
    keys = {}
    for mark in marks:
        own = jax.random.fold_in(key, mark.key.number)
        keys[mark.key] = jax.random.split(own, mark.scans) if mark.scans else own
    return keys


# -- weights -----------------------------------------------------------------------------------------------------------


def at_weight(x: Array, scale: Array) -> tuple[Array, Array]:
    """Return both arguments unchanged at a mark. The derivative of the first with respect to `x` is `scale`."""
    return x + ((scale - 1) * _zeros_of(x)).astype(x.dtype), scale


def weights_to(marks: Marks, power: float) -> dict[Key, Array]:
    """Return each mark's weight, raised to `power`, for each iteration of the scans around the mark."""
    return {mark.key: jnp.full(mark.scans, mark.weight**power) for mark in marks}


# -- the loss as a function of its marked outputs -------------------------------------------------------------------


class Marked(NamedTuple):
    """A loss as a function of its marked outputs, with `F = (1/n) sum_r J_r^T H_r J_r` over their rows `r`.

    `H_r` is the curvature of `-log p` in a row, times the mark's weight.

    Attributes:
      evaluate: computes the loss and the marked outputs from the parameters.
      marks: the marks of these outputs.
      n: the number of examples.
      what: the caller's name for error messages.
    """

    evaluate: Callable[[PyTree], tuple[Array, list[Array]]]
    marks: tuple[Mark, ...]
    n: int
    what: str

    def times_root(self, outputs: list[Array], vectors: list[Array]) -> list[Array]:
        """Return `S v` for each mark, where `S^T S` is the curvature of the mark's term in the loss.

        Raises:
          ValueError: a likelihood has no `root`.
        """
        roots = []
        for mark, x, v in zip(self.marks, outputs, vectors, strict=True):
            root = mark.likelihood.times_root(x, v, self.what)
            roots.append((mark.weight / self.n) ** 0.5 * root)
        return roots

    def root(self, params: PyTree) -> tuple[Array, Callable[[PyTree], list[Array]]]:
        """Return the loss at `params`, and a linear function that maps a tree `v` like `params` to `R v`.

        `F = R^T R`, and `R v` is a list with an array for each mark.
        """
        (loss, outputs), push = jax.linearize(self.evaluate, params)
        return loss, lambda tree: self.times_root(outputs, push(tree)[1])


def marked(
    value_fn: Callable,
    params: PyTree,
    num_examples: int | None,
    what: str,
) -> Marked:
    """Return a loss of the parameters alone as a function of its marked outputs.

    Raises:
      ValueError: the loss has no mark or depends on a parameter that reaches no mark, or the number of examples is not
        clear.
    """
    traced = trace(value_fn, False, params, (), {})
    marks = find_marks(traced)
    marks.require(what, traced, ())
    n, unclear = marks.num_examples(num_examples, traced.batch, {})
    if n is None:
        raise ValueError(unclear.replace("to value_and_grad", f"to {what}"))
    plan = TapPlan({}, {})
    marks.place(plan, lambda mark: lambda x, entry: (x, x))
    entries = {mark.key: jnp.zeros(mark.scans) for mark in marks}

    def evaluate(params):
        outs, outputs = replay(traced.program, jax.tree.leaves(params), plan, entries)
        return outs[0], [outputs[key] for key in entries]

    return Marked(evaluate, marks, n, what)
