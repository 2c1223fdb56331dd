"""Where the bytes of an image are: in a file of its own or inside a tar shard.

Both are handed to every worker process, hence arrays and not a million Python objects.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Records(Protocol):
    """Encoded images with labels int32 [n]."""

    labels: np.ndarray

    def read(self, index: int) -> bytes:
        """The bytes of one image."""
        ...

    def name(self, index: int) -> str:
        """How to tell the user which one it is."""
        ...

    def identity(self) -> bytes:
        """What is the same as long as the images are."""
        ...


class Files:
    """Files below `root`, one image each."""

    def __init__(self, root: Path, names: Sequence[str], labels: Sequence[int]) -> None:
        self.root = os.fsencode(root)
        self.names = np.array([os.fsencode(name) for name in names])
        self.labels = np.array(labels, np.int32)

    def _path(self, index: int) -> bytes:
        return os.path.join(self.root, self.names[index])

    def read(self, index: int) -> bytes:
        with open(self._path(index), "rb") as file:
            return file.read()

    def name(self, index: int) -> str:
        return os.fsdecode(self._path(index))

    def identity(self) -> bytes:
        return b"\n".join([*self.names.tolist(), self.labels.tobytes()])


class Members:
    """Members of uncompressed tar files in `root`: `shard` int32 [n] numbers `shards`, the rest is by member."""

    def __init__(
        self, root: Path, shards: Sequence[str], shard: np.ndarray, offset: np.ndarray, size: np.ndarray,
        names: np.ndarray, labels: np.ndarray,
    ) -> None:  # fmt: skip
        self.root, self.shards = os.fsencode(root), [os.fsencode(name) for name in shards]
        self.shard, self.offset, self.size, self.names = shard, offset, size, names
        self.labels = labels.astype(np.int32)

    def read(self, index: int) -> bytes:
        with open(os.path.join(self.root, self.shards[self.shard[index]]), "rb") as file:
            file.seek(int(self.offset[index]))
            return file.read(int(self.size[index]))

    def name(self, index: int) -> str:
        path = os.path.join(self.root, self.shards[self.shard[index]])
        return f"{os.fsdecode(path)}:{os.fsdecode(self.names[index])}"

    def identity(self) -> bytes:
        return b"\n".join([*self.names.tolist(), self.labels.tobytes()])
