"""Decide whether a search of learning rates found its best rate, and which rates to try next.

A rate is the best only if rates on both sides, within a factor of 2.2, ran and were no better. Otherwise, the best
score lies at the edge of the grid, and a better rate may lie beyond the edge.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

FACTOR = 2.2
# Muon searches a second rate: the rate of its Adam, relative to its own. Each value is a method of its own.
MUON = {"muon": 0.3, "muon-adam-1": 1.0, "muon-adam-3": 3.0}


def score_of(record: Mapping[str, Any]) -> float:
    """Return a trial's score, which is minus infinity if the loss became non-finite."""
    return -math.inf if record["score"] is None else record["score"]


def mean_scores(records: Iterable[Mapping[str, Any]]) -> dict[float, float]:
    """Return each rate's mean score over its seeds. A rate with a non-finite seed has the score minus infinity."""
    scores: dict[float, list[float]] = defaultdict(list)
    for record in records:
        scores[record["rate"]].append(score_of(record))
    return {rate: sum(found) / len(found) for rate, found in sorted(scores.items())}


class Bracket(NamedTuple):
    """Hold the best rate of a search and its neighbours within the factor, or None for a neighbour that did not run."""

    lower: float | None
    best: float
    upper: float | None

    @property
    def closed(self) -> bool:
        """Whether both neighbours ran."""
        return self.lower is not None and self.upper is not None

    def missing(self) -> list[float]:
        """Return the rates to try next: half and twice the best rate, unless a neighbour ran."""
        half = [] if self.lower is not None else [self.best / 2]
        twice = [] if self.upper is not None else [2 * self.best]
        return [float(f"{rate:.4g}") for rate in half + twice]


def bracket(scores: Mapping[float, float]) -> Bracket:
    """Return the bracket of a search, from the mean score of each rate.

    If no score is finite, the lowest rate counts as the best.
    """
    best = max(sorted(scores), key=lambda rate: scores[rate])
    limit = FACTOR * (1 + 1e-9)
    lower = [rate for rate in scores if best / limit <= rate < best]
    upper = [rate for rate in scores if best < rate <= best * limit]
    return Bracket(max(lower, default=None), best, min(upper, default=None))
