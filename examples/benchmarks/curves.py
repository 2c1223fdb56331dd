"""Save and resume long runs, and record their curves.

A results file has a JSON line for each evaluation on held-out data.
"""

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
    """Return the arrays and numbers that `keep` saved. The arrays have the structure of `carry`.

    If there is no file, return `carry` and an empty dictionary.
    """
    if not saved.is_file():
        return carry, {}
    leaves, structure = jax.tree.flatten(carry)
    with np.load(saved) as found:
        carry = jax.tree.unflatten(structure, [jnp.asarray(found[str(k)]) for k in range(len(leaves))])
        return carry, {name: float(found[name]) for name in found.files if not name.isdigit()}


def keep(saved: Path, carry: Any, **numbers: float) -> None:
    """Save a run's arrays together with some numbers. If the process is killed meanwhile, the previous file remains."""
    saved.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {str(k): np.asarray(x) for k, x in enumerate(jax.tree.leaves(carry))}
    partial = saved.with_suffix(".partial.npz")
    np.savez(partial, **arrays | numbers)
    os.replace(partial, saved)


def add(results: Path, row: Row) -> None:
    """Print a row and append it to the results file."""
    print(json.dumps(row), flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(results: Path, key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    """Return the rows of each run in order. `key` computes a run's key from a row.

    If a run repeated a step after a stop, only the last row for that step is returned.
    """
    found: dict[Key, dict[int, Row]] = {}
    for row in map(json.loads, results.read_text().splitlines()):
        found.setdefault(key(row), {})[row["step"]] = row
    return {name: [rows[step] for step in sorted(rows)] for name, rows in found.items()}


def reached(curve: list[Row], what: str, level: float, *, falls: bool = False) -> dict[str, float] | None:
    """Return the step and processor seconds at which a curve first reaches a level, or None if it never does.

    The function interpolates linearly between rows.

    Args:
      curve: a run's rows.
      what: the name of the value to look at.
      level: the level that the value must reach from below.
      falls: True if the value must reach the level from above, like a loss.
    """
    sign = -1 if falls else 1
    for before, row in itertools.pairwise(curve):
        if sign * before[what] < sign * level <= sign * row[what]:
            part = (level - before[what]) / (row[what] - before[what])
            return {key: before[key] + part * (row[key] - before[key]) for key in ("step", "processor_seconds")}
    return None
