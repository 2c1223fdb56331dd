"""Turn this machine's Python sources into tokens for programme B of `gpu.py`.

    python examples/benchmarks/gpu_text.py learn runs/gpu/vocabulary.npz     # beforehand, on any machine: minutes
    python examples/benchmarks/gpu_text.py encode runs/gpu/vocabulary.npz runs/gpu/tokens.npz

Both actions read the library and the packages of the Python that runs the script. `learn` learns byte pairs (Sennrich
et al. 2016). `encode` runs on all cores. A fiftieth of the files, chosen by their names' checksums, is for validation.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import multiprocessing
import os
import pathlib
import re
import sys
import sysconfig
import zlib
from collections import Counter
from typing import Any

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "language_model"))

import sources

VOCABULARY = 16_384
# `sources.WORD` with at most 32 letters. The time to encode a word grows with its squared length, and some sources
# embed a whole file as a string of letters.
WORD = re.compile(rb" ?[A-Za-z]{1,32}| ?[0-9]{1,16}| ?[^\sA-Za-z0-9]{1,16}|\s{1,64}")
LEAST, MOST = 200, 400_000  # bytes per file: shorter files are almost empty, and longer files are tables


def files(folders: list[pathlib.Path]) -> dict[str, pathlib.Path]:
    """Return the source files in some folders by name, without duplicates."""
    found: dict[str, pathlib.Path] = {}
    seen: set[bytes] = set()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            if not path.is_file() or not LEAST <= path.stat().st_size <= MOST:
                continue
            digest = hashlib.sha256(path.read_bytes()).digest()
            if digest not in seen:
                seen.add(digest)
                found[f"{folder.name}/{path.relative_to(folder).as_posix()}"] = path
    return found


def here() -> list[pathlib.Path]:
    """Return the folders of this Python's library and packages."""
    return [pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]


def is_held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % sources.ONE_IN == 0


def learn(path: pathlib.Path, size: int) -> None:
    words: Counter[bytes] = Counter()
    for name, source in files(here()).items():
        if not is_held_out(name):
            words.update(WORD.findall(source.read_bytes()))
    merges = sources.learn(words, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, merges=np.array(list(merges), np.uint16))
    print(f"{len(merges) + 256} tokens of {sum(words.values()):,} words")


def _encode(vocabulary: pathlib.Path, paths: list[pathlib.Path]) -> np.ndarray:
    with np.load(vocabulary) as found:
        pairs = [(int(a), int(b)) for a, b in found["merges"]]
    merges = {pair: 256 + k for k, pair in enumerate(pairs)}
    return sources.encode((path.read_bytes() for path in paths), merges, WORD)


def encode(vocabulary: pathlib.Path, output: pathlib.Path) -> None:
    found = files(here())
    workers = os.cpu_count() or 1
    parts: dict[str, list[list[pathlib.Path]]] = {}
    for kind, wanted in (("train", False), ("held_out", True)):
        paths = [path for name, path in found.items() if is_held_out(name) is wanted]
        parts[kind] = [paths[k :: 4 * workers] for k in range(4 * workers)]
    context = multiprocessing.get_context("spawn")
    tokens: dict[str, Any] = {}
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for kind, shares in parts.items():
            encoded = pool.map(functools.partial(_encode, vocabulary), filter(None, shares))
            tokens[kind] = np.concatenate(list(encoded))
    unfinished = output.with_suffix(f".{os.getpid()}.npz")
    np.savez(unfinished, **tokens)
    os.replace(unfinished, output)
    sizes = ", ".join(f"{len(array):,} tokens {kind}" for kind, array in tokens.items())
    print(f"{len(found):,} files, {sizes}, sha256 of the tokens {hashlib.sha256(tokens['train']).hexdigest()[:16]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("learn", "encode"))
    parser.add_argument("vocabulary", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path, nargs="?")
    parser.add_argument("--size", type=int, default=VOCABULARY, help="size of the vocabulary that `learn` makes")
    options = parser.parse_args()
    if options.action == "learn":
        learn(options.vocabulary, options.size)
    elif options.output is None:
        parser.error("encode needs an output file for the tokens")
    else:
        encode(options.vocabulary, options.output)


if __name__ == "__main__":
    main()
