"""Describe a training run of the GPU programmes by a short text, such as `kfac:0.1,tables=0.3,kernels=0.5`.

The text is a method with its rate, and settings that differ from the defaults. The module does not import JAX, so a
mistyped text is refused before anything starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

KERNELS = ("queries_keys_values", "attention", "up", "down")
TABLES = ("tokens", "positions")
KINDS = (*KERNELS, *TABLES, "vectors")
# A setting that multiplies the steps of several kinds.
TOGETHER = {"kernels": KERNELS, "tables": TABLES}
MUON = {"adam": 1.0}
KFAC = {
    **dict.fromkeys((*KINDS, *TOGETHER), 1.0),
    "momentum": 0.9,
    "squares": 0.95,
    "factors": 0.95,
    # 0: the interval that `kfac.kfac` chooses.
    "interval": 0.0,
    "statistics": 1.0,
    "split": 0.0,
    "orthogonal": 0.0,
}
DECAYS = ("momentum", "squares", "factors")
# `kfac.kfac` and `kfac.train_step` have no such options, so programme B cannot run them.
ONLY_TRACED = ("factors", "interval", "split", "orthogonal")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method, its rate, and its settings.

    Attributes:
      text: the text that describes the variant.
      method: `"kfac"` or `"muon"`.
      rate: the peak of the learning rate's schedule.
      settings: all settings of the method by name. Muon has `adam`, Adam's rate for tables and vectors relative to
        Muon's. K-FAC has factors of the steps of each kind of parameter, the decays of the momentum, the squares and
        the factors, the interval between statistics in steps (0 for the optimizer's own), the fraction of the batch
        in the statistics (1 or 0.25), whether queries, keys and values have a step length each (`split`, 1 or 0), and
        whether the singular values of a kernel's step become equal (`orthogonal`, 1 or 0).
    """

    text: str
    method: str
    rate: float
    settings: dict[str, float] = dataclasses.field(compare=False)

    def multiplier(self, kind: str) -> float:
        """Return the factor on the steps of a kind of parameter."""
        groups = [name for name, kinds in TOGETHER.items() if kind in kinds]
        return math.prod(self.settings[name] for name in (kind, *groups))

    @property
    def public(self) -> bool:
        """Whether `kfac.train_step` has options for all settings."""
        return all(self.settings.get(name) == KFAC[name] for name in ONLY_TRACED) or self.method == "muon"


def variant(text: str) -> Variant:
    """Parse a `Variant`. The function serves as an `argparse` type."""
    first, *rest = text.split(",")
    method, _, rate = first.partition(":")
    known = {"kfac": KFAC, "muon": MUON}.get(method)
    if known is None or not 0 < (peak := _number(rate)) < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r}: it must begin with kfac or muon and a positive rate, as in kfac:0.1"
        )
    settings = dict(known)
    for part in rest:
        name, _, value = part.partition("=")
        number = _number(value)
        if name not in known:
            raise argparse.ArgumentTypeError(f"{text!r}: {method} has no setting {name!r}, but {', '.join(known)}")
        if not _is_valid(name, number):
            raise argparse.ArgumentTypeError(f"{text!r}: {name}={value} is out of range")
        settings[name] = number
    if settings.get("split") and settings.get("orthogonal"):
        raise argparse.ArgumentTypeError(f"{text!r}: orthogonal=1 would undo split=1")
    return Variant(text, method, peak, settings)


def _is_valid(name: str, number: float) -> bool:
    if name in DECAYS:
        return 0 <= number < 1
    if name == "interval":
        return number >= 1 and number == int(number)
    if name == "statistics":
        return number in (1, 0.25)
    if name in ("split", "orthogonal"):
        return number in (0, 1)
    return 0 <= number < math.inf


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


# The rule that 75 of 300 steps at width 768 on a CPU suggest: a tied table's step falls with the width, `min(1, 128 /
# width)`, and kernels move half as far. Whole schedules at widths up to 384 do not confirm it, so a GPU must decide.
# Factors come on top of the lengths in `kfac.kfac`: once it has a part of this rule, that part must leave these texts.
RULE = f"kfac:0.1,tables={128 / 768:.4f},kernels=0.5"
# Programme E, in this order. The rows that decide most come first, because the time may end before the last row.
SEARCHED = [
    "muon:0.015,adam=0.3",
    "muon:0.015,adam=1",
    "kfac:0.1",
    "kfac:0.1,split=1",
    "kfac:0.1,orthogonal=1,kernels=0.3",
    RULE,
    "kfac:0.1,tables=0.3",
    "kfac:0.1,tables=0.1",
    "kfac:0.1,tables=0.3,kernels=0.5",
    "kfac:0.1,tables=0.1,kernels=0.5",
    f"{RULE},momentum=0.95",
    f"{RULE},squares=0.99",
    f"{RULE},interval=4",
    f"{RULE},statistics=0.25",
    f"{RULE},factors=0.99",
]


def best(rows: dict[str, dict[str, Any]]) -> list[Variant]:
    """Return the K-FAC and the Muon variant with the lowest validation loss among programme E's rows.

    Programme B can run them. A method without a row gets the rule, or Muon at 0.015.
    """
    chosen = {"kfac": variant(RULE), "muon": variant("muon:0.015,adam=1")}
    found = [(row["validation"], variant(text)) for text, row in rows.items()]
    for loss, one in sorted(found, key=lambda item: -item[0]):
        if one.public and math.isfinite(loss):
            chosen[one.method] = one
    return list(chosen.values())
