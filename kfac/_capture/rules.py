"""Match the `rules` of `find_layers` with parameter leaves and layers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kfac._layers import Layer, Rules


class Rule(NamedTuple):
    """A rule, and the parameter leaves that it concerns.

    Attributes:
      text: the rule as the user wrote it, for messages.
      value: `"skip"`, `"reduce"`, `"gradient"`, or a multiplier.
      leaves: indices of the leaves. For a multiplier, these are all leaves that the pattern matches. Otherwise they are
        the leaves that no earlier string rule matches.
    """

    text: str
    value: str | float
    leaves: frozenset[int]


def match_rules(rules: Rules, names: Sequence[str]) -> list[Rule]:
    """Return the rules with the leaves that they concern, in order.

    Args:
      rules: pairs of a regular expression and a value.
      names: the paths of the parameter leaves.

    Raises:
      ValueError: a pattern is not a regular expression, or matches no leaf, or only leaves of earlier rules.
    """
    taken: set[int] = set()
    matched = []
    for pattern, value in rules:
        text = f"rules={{{pattern!r}: {value!r}}}"
        try:
            leaves = {k for k, name in enumerate(names) if re.search(pattern, name)}
        except (re.error, TypeError) as error:
            raise ValueError(
                f"{text}: the pattern is not a regular expression: {error}"
            ) from None
        if not leaves:
            raise ValueError(
                f"{text} matches no parameter; the parameters are {', '.join(names)}"
            )
        if isinstance(value, str):
            leaves -= taken
            taken |= leaves
            if not leaves:
                raise ValueError(
                    f"{text} has no effect: rules before it match all its parameters"
                )
        matched.append(Rule(text, value, frozenset(leaves)))
    return matched


def leaves_with(
    value: str,
    rules: Sequence[Rule],
    useful: Collection[int],
    what: str,
) -> set[int]:
    """Return the leaves that take a rule with this value.

    Args:
      value: the value.
      rules: the rules.
      useful: the leaves on which such a rule has an effect.
      what: describes the `useful` leaves in the message.

    Raises:
      ValueError: such a rule concerns no `useful` leaf.
    """
    found: set[int] = set()
    for rule in rules:
        if rule.value != value:
            continue
        if rule.leaves.isdisjoint(useful):
            raise ValueError(f"{rule.text} matches no {what}, so it has no effect")
        found |= rule.leaves
    return found


def with_multipliers(
    layers: Sequence[Layer],
    rules: Sequence[Rule],
    names: Sequence[str],
) -> list[Layer]:
    """Return the layers with their multipliers. A layer takes the first multiplier that matches one of its leaves.

    Raises:
      ValueError: without one of the rules, all layers would have the same multipliers.
    """
    index = {name: leaf for leaf, name in enumerate(names)}
    numbers = [rule for rule in rules if not isinstance(rule.value, str)]
    effective = set()
    found = []
    for layer in layers:
        leaves = [index[path] for path in layer.params]
        matching = [rule for rule in numbers if not rule.leaves.isdisjoint(leaves)]
        if matching and layer.kind != "skipped":
            first, *others = matching
            if first.value != (others[0].value if others else 1):
                effective.add(first.text)
            layer = dataclasses.replace(layer, multiplier=float(first.value))
        found.append(layer)
    for rule in numbers:
        if rule.text not in effective:
            raise ValueError(
                f"{rule.text} has no effect: every layer that it matches is skipped, or has the same multiplier "
                "without it"
            )
    return found
