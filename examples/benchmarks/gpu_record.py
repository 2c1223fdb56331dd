"""Save a GPU programme's rows as JSON, and show them as a Markdown page."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import os
import pathlib
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


def output_folder(rehearse: bool) -> pathlib.Path:
    """Return the default folder for results. Rehearsals have a separate folder, so they do not replace results."""
    return pathlib.Path("runs/gpu-rehearsal" if rehearse else "runs/gpu")


class Record:
    """The rows that a programme has measured, saved after each measurement.

    If a row fails or the time does not suffice, the row is listed under "to repeat", and the programme continues. At
    the time limit the process ends with code 3.

    Args:
      folder: the folder for `<programme>.json`. An earlier file there becomes `<programme>.before.json`.
      programme: the programme's letter.
      minutes: the time limit, counted from now.
      have: a folder with an earlier call's `<programme>.json`, whose rows are not measured again; or None.
      command: the command line, for the page.
    """

    def __init__(
        self, folder: pathlib.Path, programme: str, minutes: float, have: pathlib.Path | None, command: str
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / f"{programme}.json"
        self.began = time.monotonic()
        self.limit = 60 * minutes
        self.found: dict[str, Any] = {
            "programme": programme,
            "command": command,
            "date": datetime.date.today().isoformat(),
            "about": {},
            "tables": {},
            "to repeat": {},
        }
        earlier = read(have, programme)
        self.found["tables"] = earlier.get("tables", {})
        self.found["about"] = earlier.get("about", {})
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".before.json"))
        self.doing = "the start"
        self.lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Return the seconds until the limit."""
        return self.limit - self.seconds

    def say(self, text: str) -> None:
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)

    def about(self, name: str, value: Any) -> None:
        """Record a fact about the whole programme."""
        self.say(f"{name}: {value}")
        with self.lock:
            self.found["about"][name] = value
            self._save()

    def has(self, table: str, name: str) -> bool:
        return name in self.found["tables"].get(table, {})

    def row(self, table: str, name: str) -> Row:
        """Return a measured row."""
        return self.found["tables"][table][name]

    def add(self, table: str, name: str, row: Row) -> None:
        self.say(f"{table} | {name} | {row}")
        with self.lock:
            self.found["tables"].setdefault(table, {})[name] = row
            self._save()

    def measure(self, table: str, name: str, function: Callable[[], Row], needs: float = 0.0) -> bool:
        """Add the row that `function` returns. Return True if the record has the row afterwards.

        Args:
          table: the row's table.
          name: the row's first column.
          function: measures the row.
          needs: the seconds that must be left. With less time, the row is listed under "to repeat".
        """
        if self.has(table, name):
            return True
        if self.left < needs:
            self.repeat(table, name, f"needed {needs:.0f} s, {self.left:.0f} s were left")
            return False
        self.doing = f"{table}: {name}"
        self.say(f"measuring {self.doing}")
        try:
            self.add(table, name, function())
        except Exception as error:
            traceback.print_exc()
            self.repeat(table, name, f"{type(error).__name__}: {str(error)[:300]}")
            return False
        return True

    def keep(self, name: str, curve: list[Any]) -> None:
        """Save the curve of a run that has not ended, in case the time ends first. An empty curve deletes it."""
        with self.lock:
            unfinished = self.found.setdefault("unfinished", {})
            unfinished.pop(name, None)
            if curve:
                unfinished[name] = curve
            self._save()

    def repeat(self, table: str, name: str, why: str) -> None:
        """List a row under "to repeat"."""
        self.say(f"NOT MEASURED {table} | {name}: {why}")
        with self.lock:
            self.found["to repeat"][f"{table}: {name}"] = why
            self._save()

    def end_at_limit(self) -> None:
        """Start a thread that ends the process at the time limit."""

        def watch() -> None:
            time.sleep(max(0.0, self.left))
            self.repeat(self.doing, "cut off", f"the limit of {self.limit:.0f} s was reached")
            os._exit(3)

        threading.Thread(target=watch, daemon=True).start()

    def _save(self) -> None:
        self.found["seconds"] = round(self.seconds, 1)
        self.path.write_text(json.dumps(self.found, indent=2) + "\n")


def compile_together(record: Record, programs: dict[str, tuple[Any, tuple[Any, ...]]], pretended: float) -> Row:
    """Compile functions for arrays of given shapes in parallel threads.

    Args:
      record: the record, which says when each program is ready.
      programs: pairs of a function from `jax.jit` and its arguments or their shapes.
      pretended: seconds to wait after each, with which a rehearsal imitates a GPU's compile time.

    Returns:
      The compiled programs by name.
    """
    record.doing = "compiling"

    def compiled(name: str) -> Any:
        function, arguments = programs[name]
        began = time.monotonic()
        result = function.lower(*arguments).compile()
        time.sleep(pretended)
        record.say(f"compiled {name} in {time.monotonic() - began:.1f} s")
        return result

    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(programs)) as pool:
        done = dict(zip(programs, pool.map(compiled, programs), strict=True))
    record.about("seconds to compile", round(time.monotonic() - began, 1))
    return done


def read(folder: pathlib.Path | None, programme: str) -> dict[str, Any]:
    """Return what an earlier call has saved of a programme, or nothing."""
    if folder is None or not (path := folder / f"{programme}.json").is_file():
        return {}
    return json.loads(path.read_text())


def page(found: dict[str, Any]) -> str:
    """Return a record as Markdown."""
    lines = [f"# GPU programme {found['programme']}", "", f"`{found['command']}`, {found['date']}", ""]
    lines += [f"- {name}: {value}" for name, value in found["about"].items()]
    lines += [f"- seconds: {found['seconds']}"]
    for title, rows in found["tables"].items():
        lines += ["", f"## {title}", "", table(rows)]
    if found["to repeat"]:
        lines += ["", "## To repeat", ""]
        lines += [f"- {name}: {why}" for name, why in found["to repeat"].items()]
    return "\n".join(lines) + "\n"


def table(rows: dict[str, Row]) -> str:
    """Return rows as a Markdown table whose first column holds their names."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row if not isinstance(row[name], list)))
    lines = ["| | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name, row in rows.items():
        cells = [name] + [_text(row.get(column)) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")
