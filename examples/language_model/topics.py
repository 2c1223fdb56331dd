"""Read the documentation that comes with Python, `pydoc_data.topics`, as lines of printable ASCII."""

import platform
import re
import unicodedata

import numpy as np

from comparison import UserError

# The newline and all characters from the space to the tilde.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
# Quotation marks, dashes and the ellipsis.
MARKS = "\u2018\u2019\u201c\u201d\u2013\u2014\u2026"
PLAIN = str.maketrans(dict(zip(MARKS, ["'", "'", '"', '"', "-", "-", "..."], strict=True)))
# CPython 3.11 has 373,000 characters, and 3.13 has 414,000.
SMALLEST = 300_000


def text() -> str:
    """Return the text with every paragraph once, sorted by topic. Some topics contain whole other topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError(f"this Python ({platform.python_version()}) comes without pydoc_data.topics; the text is "
                        "CPython's documentation, so use CPython") from error  # fmt: skip
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    paragraphs.pop("", None)
    joined = "\n\n".join(paragraphs.values()).translate(PLAIN)
    whole = unicodedata.normalize("NFKD", joined).encode("ascii", "ignore").decode()
    whole = "".join(character for character in whole if character in ALPHABET)
    if len(whole) < SMALLEST:
        raise UserError(f"the documentation topics of Python {platform.python_version()} have {len(whole):,} "
                        f"characters, and at least {SMALLEST:,} are expected: use another CPython")  # fmt: skip
    return whole


def tokens(block: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """Return the training and validation text as character numbers. Every tenth block is for validation."""
    code = {character: number for number, character in enumerate(ALPHABET)}
    numbers = np.array([code[character] for character in text()], np.int32)
    blocks = np.split(numbers, range(block, len(numbers), block))
    validation = [k % 10 == 9 for k in range(len(blocks))]
    train = [b for b, held_out in zip(blocks, validation, strict=True) if not held_out]
    return np.concatenate(train), np.concatenate([b for b, out in zip(blocks, validation, strict=True) if out])
