"""Tokenize tens of megabytes of local text: the Python sources in the standard library and in some packages.

python examples/language_model/sources.py runs/language_model/tokens.npz    # print the size and the checksum

Byte pair encoding (Sennrich et al. 2016) learns the subwords from the training part. About every fiftieth file is for
validation, chosen by the checksum of its name.
"""

import hashlib
import importlib.metadata
import itertools
import re
import sys
import sysconfig
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

PACKAGES = ("flax", "jax", "matplotlib", "numpy", "optax", "scikit-learn", "scipy")
TESTS = re.compile(r"(^|/)(_?tests?/|test_|[^/]*_test/)|(^|/)site-packages/.*/site-packages/")
WORD = re.compile(rb" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+")
ONE_IN = 50  # 1 / ONE_IN of the files are for validation
LEARNED_FROM = 40_000  # this many most frequent words
Pair = tuple[int, int]


class Text(NamedTuple):
    """Hold the text as uint16 tokens.

    `pieces` has each token's bytes. `checksum` covers the names and contents of all files.
    """

    train: np.ndarray
    held_out: np.ndarray
    pieces: list[bytes]
    files: int
    size: int
    checksum: str


def files() -> dict[str, Path]:
    """Return the source files by package and path, without tests."""
    library = Path(sysconfig.get_path("stdlib"))
    found = {f"python/{path.relative_to(library).as_posix()}": path for path in library.rglob("*.py")}
    found = {name: path for name, path in found.items() if not name.startswith("python/site-packages/")}
    for package in PACKAGES:
        for path in importlib.metadata.files(package) or ():
            if path.suffix == ".py":
                found[f"{package}/{path.as_posix()}"] = Path(str(path.locate()))
    return {name: found[name] for name in sorted(found) if not TESTS.search(name)}


def merged(word: list[int], pair: Pair, new: int) -> list[int]:
    """Replace each occurrence of the pair in the word by `new`."""
    out: list[int] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] = new
        else:
            out.append(piece)
    return out


def learn(words: Counter[bytes], size: int) -> dict[Pair, int]:
    """Return the merged pairs in order, with the number of the token that each pair becomes.

    The vocabulary has `size` tokens, including the 256 bytes.
    """
    spelled = [list(word) for word, _ in words.most_common(LEARNED_FROM)]
    times = [count for _, count in words.most_common(LEARNED_FROM)]
    pairs: Counter[Pair] = Counter()
    where: defaultdict[Pair, set[int]] = defaultdict(set)

    def count(k: int, sign: int) -> None:
        for pair in itertools.pairwise(spelled[k]):
            pairs[pair] += sign * times[k]
            where[pair].add(k)

    for k in range(len(spelled)):
        count(k, 1)
    merges: dict[Pair, int] = {}
    while len(merges) < size - 256 and pairs:
        best = max(pairs, key=lambda pair: pairs[pair])
        merges[best] = 256 + len(merges)
        for k in sorted(where.pop(best)):
            count(k, -1)
            spelled[k] = merged(spelled[k], best, merges[best])
            count(k, 1)
        del pairs[best]
    return merges


def encode(text: Iterable[bytes], merges: dict[Pair, int], word: re.Pattern[bytes] = WORD) -> np.ndarray:
    known: dict[bytes, list[int]] = {}
    tokens: list[np.ndarray] = []
    for part in text:
        found: list[int] = []
        for piece in word.findall(part):
            if piece not in known:
                spelled = list(piece)
                while pairs := [pair for pair in itertools.pairwise(spelled) if pair in merges]:
                    first = min(pairs, key=lambda pair: merges[pair])
                    spelled = merged(spelled, first, merges[first])
                known[piece] = spelled
            found += known[piece]
        tokens.append(np.array(found, np.uint16))
    return np.concatenate(tokens)


def tokens(kept: Path, size: int = 2048) -> Text:
    """Return the text as tokens. The first call stores them in the file `kept`."""
    if not kept.is_file():
        text = {name: path.read_bytes() for name, path in files().items()}
        checksum = hashlib.sha256()
        for name, content in text.items():
            checksum.update(name.encode() + b"\n" + content)
        out = {name for name in text if zlib.crc32(name.encode()) % ONE_IN == 0}
        train = [content for name, content in text.items() if name not in out]
        words: Counter[bytes] = Counter()
        for content in train:
            words.update(WORD.findall(content))
        merges = learn(words, size)
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            kept, train=encode(train, merges), held_out=encode((text[name] for name in sorted(out)), merges),
            merges=np.array(list(merges)), files=len(text), size=sum(map(len, text.values())),
            checksum=checksum.hexdigest(),
        )  # fmt: skip
    with np.load(kept) as found:
        pieces = [bytes([k]) for k in range(256)]
        for first, second in found["merges"]:
            pieces.append(pieces[first] + pieces[second])
        return Text(
            found["train"], found["held_out"], pieces, int(found["files"]), int(found["size"]), str(found["checksum"])
        )


if __name__ == "__main__":
    found = tokens(Path(sys.argv[1]))
    print(f"{found.files} files, {found.size:,} bytes, {len(found.train):,} tokens to train on and "
          f"{len(found.held_out):,} to validate, sha256 {found.checksum}")  # fmt: skip
    print("Python", sys.version.split()[0], *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES))
