"""Read files, and retry if the file system fails. Such a failure does not mean that an image is broken."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any

# Pauses in seconds before the retries, for a stale or busy file system. The code is too short to need a package.
RETRY_AFTER = (0.2, 1.0, 5.0)


class UserError(Exception):
    """Report an error that the user can correct, in one sentence and without a traceback."""


def patiently(read: Callable[[], Any], what: str) -> Any:
    """Return `read()`, and retry if the file system fails."""
    for pause in (*RETRY_AFTER, None):
        try:
            return read()
        except OSError as error:
            if pause is None:
                tries = f"{error.strerror or error} ({len(RETRY_AFTER) + 1} tries)"
                raise UserError(f"{what} cannot be read: {tries}; the file system is at fault, not the "
                                "image: repair it, and the same command resumes the run") from error  # fmt: skip
            time.sleep(pause)


def fetch(path: str, offset: int = 0, size: int = -1) -> bytes:
    """Return the whole file, or `size` bytes from `offset`."""

    def read() -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) < size:
            raise OSError(errno.EIO, f"the shard ends after {len(data)} of its {size} bytes")
        return data

    return patiently(read, path)


def entries(folder: str) -> tuple[list[str], list[str]]:
    """Return the names of all folders and all files in `folder`, without hidden entries."""
    found = patiently(lambda: sorted((entry.name, entry.is_dir()) for entry in os.scandir(folder)), folder)
    shown = [(name, is_folder) for name, is_folder in found if name[0] != "."]
    return [name for name, is_folder in shown if is_folder], [name for name, is_folder in shown if not is_folder]
