"""Long runs: they go on where they were stopped, and leave curves, a JSON line for each look at held-out data."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Row = dict[str, Any]
Key = TypeVar("Key")


def restore(saved: Path, carry: Any) -> tuple[Any, dict[str, float]]:
    """What `keep` has left, in the form of `carry`, and the numbers beside it; `carry` and none if there is no file."""
    if not saved.is_file():
        return carry, {}
    leaves, structure = jax.tree.flatten(carry)
    with np.load(saved) as found:
        carry = jax.tree.unflatten(structure, [jnp.asarray(found[str(k)]) for k in range(len(leaves))])
        return carry, {name: float(found[name]) for name in found.files if not name.isdigit()}


def keep(saved: Path, carry: Any, **numbers: float) -> None:
    """Writes the arrays of a run, and numbers beside them; a kill in the middle leaves the file of before."""
    saved.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {str(k): np.asarray(x) for k, x in enumerate(jax.tree.leaves(carry))}
    partial = saved.with_suffix(".partial.npz")
    np.savez(partial, **arrays | numbers)
    os.replace(partial, saved)


def add(results: Path, row: Row) -> None:
    """Prints a row, and appends it to the file of results."""
    print(json.dumps(row), flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(results: Path, key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """The rows of each run, in order, by the `key` of a run; of steps that were repeated after a stop the last."""
    found: dict[Key, dict[int, Row]] = {}
    for row in map(json.loads, results.read_text().splitlines()):
        found.setdefault(key(row), {})[row["step"]] = row
    return {name: [rows[step] for step in sorted(rows)] for name, rows in found.items()}


def reached(curve: list[Row], what: str, level: float, *, falls: bool = False) -> dict[str, float] | None:
    """Step and processor seconds at which a line through the points of a curve first is at a level; None if never.

    Args:
      curve: the rows of a run.
      what: the name of what is looked at.
      level: its value, which it is to reach from below.
      falls: from above instead, as a loss does.
    """
    sign = -1 if falls else 1
    for before, row in itertools.pairwise(curve):
        if sign * before[what] < sign * level <= sign * row[what]:
            part = (level - before[what]) / (row[what] - before[what])
            return {key: before[key] + part * (row[key] - before[key]) for key in ("step", "processor_seconds")}
    return None
