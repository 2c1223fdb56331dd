"""Store the results of trials as JSON lines, appended as trials finish."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from files import UserError
from training import Trial

Record = dict[str, Any]
FIELDS = ("task", "method", "settings", "batch", "steps", "seed", "eval_every")


def trial_of(record: Record) -> Trial:
    return Trial(**{name: record[name] for name in FIELDS})


class Store:
    """Hold all trials of a file by their keys. A half-written last line from a killed study is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if not path.is_file():
            return
        lines = path.read_text().splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                self.records[trial_of(record).key] = record
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines) and not line.endswith("\n"):
                    path.write_text("".join(lines[:-1]))
                    return
                raise UserError(f"{path}, line {number}, is no trial of this study ({error})") from error

    def __contains__(self, trial: Trial) -> bool:
        return trial.key in self.records

    def __getitem__(self, trial: Trial) -> Record:
        return self.records[trial.key]

    def add(self, record: Record) -> None:
        """Add a record, in memory and in the file."""
        self.records[trial_of(record).key] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")


# A plan yields trials and receives each result, so later trials can depend on earlier results. After a study is
# killed, it replays the plan with stored results and runs no trial twice.
Plan = Generator[Trial, Record, Any]
