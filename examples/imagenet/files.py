"""Bytes, from a path or a URL (gs://, s3://): tried again where the system fails, which says nothing about an image."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any

# A stale or busy file system gets so many seconds before the run stops.
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


def bucket(url: str) -> tuple[Any, str]:
    """The file system that `url` names, by fsspec, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url} cannot be opened: {error}") from error


def _asked(call: Callable[..., Any], *args: Any, **rest: Any) -> Any:
    """What a bucket answers; its libraries raise errors of their own where it does not."""
    try:
        return call(*args, **rest)
    except OSError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {str(error)[:200]}") from error


def opened(path: str) -> Any:
    if "://" not in path:
        return open(path, "rb")
    files, inner = bucket(path)
    return files.open(inner, "rb")


def fetch(path: str, offset: int = 0, size: int = -1) -> bytes:
    """A file, or `size` bytes of it; of what lies in a bucket nothing else is transferred."""

    def read() -> bytes:
        if "://" in path:
            files, inner = bucket(path)
            data = _asked(files.cat_file, inner, start=offset, end=None if size < 0 else offset + size)
        else:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
        if len(data) < size:
            raise OSError(errno.EIO, f"the shard ends after {len(data)} of its {size} bytes")
        return data

    return patiently(read, path)


def entries(folder: str) -> tuple[list[str], list[str]]:
    """The names of the folders and of the files in `folder`, but for hidden ones."""

    def listed() -> list[tuple[str, bool]]:
        if "://" not in folder:
            with os.scandir(folder) as found:
                return [(entry.name, entry.is_dir()) for entry in found]
        files, inner = bucket(folder)
        rows = _asked(files.ls, inner, detail=True)
        return [(row["name"].rstrip("/").rpartition("/")[2], row["type"] == "directory") for row in rows]

    found = sorted((name, is_folder) for name, is_folder in patiently(listed, folder) if name[:1] not in ("", "."))
    return [name for name, is_folder in found if is_folder], [name for name, is_folder in found if not is_folder]
