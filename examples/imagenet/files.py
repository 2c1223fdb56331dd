"""Bytes of files, read again where the system fails, which says nothing about an image."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any

# A stale or busy file system gets so many seconds before the run stops. Ten lines, so no package for them.
RETRY_AFTER = (0.2, 1.0, 5.0)


class UserError(Exception):
    """Something the user can put right; reported as one sentence, without a traceback."""


def patiently(read: Callable[[], Any], what: str) -> Any:
    """`read()`, tried again where the system fails."""
    for pause in (*RETRY_AFTER, None):
        try:
            return read()
        except OSError as error:
            if pause is None:
                tries = f"{error.strerror or error} ({len(RETRY_AFTER) + 1} tries)"
                raise UserError(f"{what} cannot be read: {tries}; this is the file system's fault and not a broken "
                                "image: mend it and start again, the run goes on where it was") from error  # fmt: skip
            time.sleep(pause)


def fetch(path: str, offset: int = 0, size: int = -1) -> bytes:
    """A file, or `size` bytes of it."""

    def read() -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) < size:
            raise OSError(errno.EIO, f"the shard ends after {len(data)} of its {size} bytes")
        return data

    return patiently(read, path)


def entries(folder: str) -> tuple[list[str], list[str]]:
    """The names of the folders and of the files in `folder`, but for hidden ones."""
    found = patiently(lambda: sorted((entry.name, entry.is_dir()) for entry in os.scandir(folder)), folder)
    shown = [(name, is_folder) for name, is_folder in found if name[0] != "."]
    return [name for name, is_folder in shown if is_folder], [name for name, is_folder in shown if not is_folder]
