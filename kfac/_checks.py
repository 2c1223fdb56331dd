"""Check arguments. Each `ValueError` names the argument, the accepted values and the actual value.

`OPTIONS` maps each option's name to its check.
"""

from __future__ import annotations

import functools
import inspect
import math
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from kfac._layers import Layer, Layers, Rules
from kfac._mesh import axis_names
from kfac._packing import Shape


def check_range(
    name: str,
    value: Any,
    interval: str,
    schedules: bool = True,
) -> None:
    """Raise if a value is not a number in an interval such as `"[0, inf)"`.

    Tracers pass. With `schedules`, functions pass too.
    """
    if isinstance(value, jax.core.Tracer) or (schedules and callable(value)):
        return
    low, high = map(float, interval[1:-1].split(","))
    try:
        if value is None or isinstance(value, str | bool) or np.shape(value) != ():
            raise TypeError
        # Round to float32, as the computation will: 1 - 1e-9 becomes 1.
        number = float(np.float32(value))
    except (TypeError, ValueError):
        kind = " or a schedule" if schedules else ""
        given = "a function, " if callable(value) else ""
        raise ValueError(
            f"{name} must be a number{kind}, but is {given}{value!r}"
        ) from None
    # Round the bounds to float32, too.
    least = float(np.float32(low))
    above = number > least if interval[0] == "(" else number >= least
    below = number < high if interval[-1] == ")" else number <= high
    # Comparisons with NaN are false.
    if not (above and below):
        raise ValueError(
            f"{name} must lie in {interval[0]}{low:g}, {high:g}{interval[-1]}, but is {value!r}"
        )


# Like `check_range`, but refuses schedules.
check_number = functools.partial(check_range, schedules=False)


def check_count(
    name: str,
    value: Any,
    low: int,
    hint: str = "",
) -> None:
    """Raise if a value is not an integer, or is below `low`. Scalar arrays and floats with integral values pass."""
    if isinstance(value, jax.core.Tracer):
        return
    is_number = isinstance(value, int | float | np.integer | np.ndarray | Array)
    valid = is_number and not isinstance(value, bool) and np.shape(value) == ()
    if not valid or not math.isfinite(value) or value != int(value) or value < low:
        raise ValueError(
            f"{name} must be an integer, at least {low}, but is {value!r}{hint}"
        )


def check_period(
    name: str,
    value: Any,
) -> None:
    """Raise if a value is neither a positive number of steps nor `math.inf`."""
    is_array = isinstance(value, np.ndarray | Array)
    if isinstance(value, jax.core.Tracer) or (is_array and np.all(np.isposinf(value))):
        return
    if value != math.inf:
        how = "; math.inf leaves all refreshes to kfac.observe(opt_state)"
        check_count(name, value, 1, how)


def check_positive_int(
    name: str,
    value: object,
) -> None:
    """Raise if a static size is not a positive `int`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive int, but is {value!r}")


def check_choice(
    name: str,
    value: object,
    accepted: Sequence[str],
) -> None:
    """Raise if a value is not among the accepted strings."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, accepted))}, but is {value!r}"
        )


def check_switch(
    name: str,
    value: object,
) -> None:
    """Raise if a value is not a `bool`."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, but is {value!r}")


def check_rules(value: object) -> Rules:
    """Return the `rules` of `find_layers` as pairs.

    Raises:
      ValueError: a value is not a mapping of regular expressions to `"skip"`, `"reduce"`, `"gradient"` or a positive
        number.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise ValueError(
            "rules must be a mapping of regular expressions to 'skip', 'reduce', 'gradient' or a positive number, but "
            f"is {value!r}"
        )
    pairs: list[tuple[str, str | float]] = []
    for pattern, treatment in value.items():
        name = f"rules[{pattern!r}]"
        if isinstance(treatment, str):
            check_choice(name, treatment, ("skip", "reduce", "gradient"))
            pairs.append((pattern, treatment))
            continue
        # A multiplier is a part of the hashable layers, so it cannot be traced.
        if isinstance(treatment, jax.core.Tracer):
            raise ValueError(f"{name} must be a number, but is traced")
        check_number(name, treatment, "(0, inf)")
        pairs.append((pattern, float(treatment)))
    return tuple(pairs)


def as_argnums(value: Any) -> tuple[int | str, ...]:
    """Return argument positions or names as a tuple. A single position or name becomes a 1-tuple."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return tuple(value)
    return (value,)


def check_argnums(
    name: str,
    value: object,
) -> None:
    """Raise if a value is not an argument's position or name, or a collection of distinct positions and names.

    Negative positions are accepted: they count from the end.
    """
    keys = as_argnums(value)
    valid = all(isinstance(k, int | str) and not isinstance(k, bool) for k in keys)
    if not keys or not valid or len(set(keys)) < len(keys):
        raise ValueError(
            f"{name} must be the position of an argument, its name, or several of them, but is {value!r}"
        )


def _rules(
    check: Callable[..., None],
    names: str,
    *arguments: Any,
) -> dict[str, Callable[[str, Any], None]]:
    return dict.fromkeys(
        names.split(), lambda name, value: check(name, value, *arguments)
    )


def check_fraction(
    name: str,
    value: float,
) -> int:
    """Return `k` for a fraction `1 / k`. Raise if a value is not such a fraction."""
    check_number(name, value, "(0, 1]")
    k = round(1 / value)
    if abs(k * value - 1) > 1e-6:
        raise ValueError(
            f"{name} must be 1 over an integer, such as 1/{k}, but is {value!r}"
        )
    return k


# Keywords of version 0.4, with the present keyword.
RENAMED = {
    "gradient_factors": 'rules={pattern: "gradient"} of find_layers or train_step',
    "kfac_reduce": 'rules={pattern: "reduce"} of find_layers or train_step',
    "layer_multipliers": "rules={pattern: multiplier} of find_layers or train_step",
    "skip": 'rules={pattern: "skip"} of find_layers or train_step',
}

# Keywords of other optimizers, with our keyword.
HINTS = {
    "lr": "learning_rate, the first argument",
    "b1": "momentum=",
    "b2": "preconditioner=kfac.SOAP(decay=...)",
    "decay": "weight_decay= or momentum=",
    "eps": "damping=",
    "mask": "weight_decay_mask=",
    "mesh": "distribution=kfac.Distribution(mesh=...)",
    "axis_name": "distribution=kfac.Distribution(axis_name=...)",
    "owner_axes": "distribution=kfac.Distribution(owner_axes=...)",
    "clip_norm": "no clipping with kfac.kfac, which bounds every step; kl_clip= of kfac.natural_gradient",
}


def with_hints(
    hints: Mapping[str, str],
) -> Callable[[Callable], Callable]:
    """Return a decorator, under which a keyword in `hints` raises a `TypeError` with the present keyword.

    If the function has a parameter `kwargs`, a dictionary with the loss's keyword arguments, any other keyword that the
    function does not have raises a `TypeError` that says `kwargs={...}`. The loss's keywords travel in this dictionary
    because the loss may have any keyword, also one that the function itself has.
    """

    def decorate(function):
        called = function.__qualname__.removesuffix(".__init__")
        known = inspect.signature(function).parameters
        in_kwargs = "kwargs" in known

        @functools.wraps(function)
        def checked(*args, **options):
            for name in options:
                if name in hints:
                    also = ". A keyword argument of loss_fn belongs in kwargs={...}"
                    raise TypeError(
                        f"{called}() has no option {name}=: use {hints[name]}{also * in_kwargs}"
                    )
                if in_kwargs and name not in known:
                    raise TypeError(
                        f"no option is called {name}=. If it is an argument of loss_fn, pass it in a "
                        f"dictionary, kwargs={{{name!r}: ...}}"
                    )
            return function(*args, **options)

        return checked

    return decorate


takes_kwargs = with_hints({})


def former_names(
    module: str,
    names: Mapping[str, str],
) -> Callable[[str], object]:
    """Return a module's `__getattr__`, which raises an `AttributeError` with the present name of a former one."""

    def missing(name: str) -> object:
        if name in names:
            raise AttributeError(f"{module}.{name} is now {names[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


# The checks by option name. `check_range` also accepts schedules.
OPTIONS: dict[str, Callable[[str, Any], None]] = {
    **_rules(
        check_range, "damping unitwise_damping_scale kl_clip trust_ratio", "(0, inf)"
    ),
    **_rules(
        check_number,
        "minimum target reference_rate flops inversion_flops bandwidth memory",
        "(0, inf)",
    ),
    **_rules(check_number, "overhead", "(0, inf]"),
    **_rules(check_number, "peak", "[0, inf)"),
    **_rules(check_range, "learning_rate weight_decay", "[0, inf)"),
    **_rules(check_range, "momentum factor_ema_decay", "[0, 1)"),
    **_rules(check_count, "statistics_period every", 1),
    **_rules(check_period, "inverse_update_period"),
    **_rules(check_count, "interval_warmup_steps", 0),
    **_rules(
        check_positive_int,
        "max_factor_dim num_examples num_microbatches num_steps batch batches devices num_devices",
    ),
    **_rules(
        check_switch,
        "scale_damping nesterov lr_in_momentum has_aux strict verbose donate adaptive_layer_rates",
    ),
    **_rules(check_argnums, "batch_argnums"),
    **_rules(check_choice, "fisher", ("empirical", "sampled", "expected")),
    **_rules(
        check_choice,
        "precision",
        ("float32", "bfloat16_3x", "tensorfloat32", "bfloat16"),
    ),
    **_rules(check_choice, "communication_dtype", ("float32", "bfloat16")),
}


def check(**options: Any) -> None:
    """Raise if an option fails its check in `OPTIONS`."""
    for name, value in options.items():
        OPTIONS[name](name, value)


def check_given(**options: Any) -> None:
    """Call `check` on the options that are not None."""
    check(**{name: value for name, value in options.items() if value is not None})


def check_axis_name(
    value: Any,
    name: str = "axis_name",
) -> None:
    """Raise if a value is not an axis name, a non-empty tuple of distinct axis names, or None."""
    names = axis_names(value)
    valid = value != () and all(isinstance(axis, str) for axis in names)
    if not valid or len(set(names)) < len(names):
        raise ValueError(
            f"{name} must be the name of an axis, a tuple of different names or None, but is {value!r}: a mesh goes by "
            "name, mesh=, and need not be given"
        )


def check_type(
    name: str,
    value: object,
    kind: Any,
    what: str,
) -> None:
    """Raise if a value does not have the type `kind`.

    Args:
      name: the argument's name, for the message.
      value: the argument.
      kind: the accepted type or union.
      what: describes `kind` in the message.

    Raises:
      TypeError: the value is a class, not an instance.
      ValueError: the value has another type.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{name} must be {what}, but is the class {value.__name__}: call it, {value.__name__}()"
        )
    if not isinstance(value, kind):
        raise ValueError(
            f"{name} must be {what}, but is of type {type(value).__name__}: {value!r}"
        )


def check_shapes(
    what: str,
    block: object,
    shapes: Mapping[str, Shape],
) -> None:
    """Raise if a block lacks an array named in `shapes`, or if the array has another shape."""
    for name, shape in shapes.items():
        actual = getattr(getattr(block, name, None), "shape", None)
        if actual != shape:
            raise ValueError(
                f"{what}: {name} must have shape {shape}, but has {actual}"
            )


def check_by_layer(
    what: str,
    blocks: Mapping[str, object],
    layers: Iterable[Layer],
    how: str,
) -> None:
    """Raise if `blocks` and `layers` have different names, or if the factors in `blocks` have other shapes."""
    expected = {layer.name: layer.factor_shapes for layer in layers}
    for name in sorted(expected.keys() ^ set(blocks)):
        preposition = "without" if name in expected else "with"
        raise ValueError(f"{what} {preposition} layer {name!r}: {how}")
    for name, shapes in expected.items():
        check_shapes(f"{what} of layer {name!r}", blocks[name], shapes)


def check_layers(value: object) -> None:
    """Raise if a value is not a `Layers`, the result of `find_layers`."""
    if not isinstance(value, Layers):
        raise ValueError(
            f"layers must be what kfac.find_layers returns, but is {type(value).__name__}: write "
            "layers = kfac.find_layers(loss_fn, params, batch)"
        )


def check_function(value: object) -> None:
    """Raise if a value is not callable, so that it cannot be a loss function."""
    if not callable(value):
        raise ValueError(
            f"loss_fn must be a function, but is {reprlib.repr(value)}: it comes before all other arguments"
        )
