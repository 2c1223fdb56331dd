"""Small models as people write them, and what the package makes of each."""

from zoo import generative as generative
from zoo import other as other
from zoo import physics as physics
from zoo import recurrent as recurrent
from zoo import reinforcement as reinforcement
from zoo import transformers as transformers
from zoo import vision as vision
from zoo.specimens import ZOO as ZOO

CONSTANT = "with w1 skipped, w2.T of a constant cotangent counts as a layer of one example: quietly wrong"
FRACTION = "num_examples must divide the positions"
TANGENT = "constant tangents hold no examples"
NOTHING_LEFT = "with all parameters skipped, as advised, the number of examples is asked for"

# What ought to be and is not yet.
BROKEN: dict[str, str] = {}

# Where the number of examples is guessed, and is none that an argument has.
GUESSED: dict[str, str] = dict.fromkeys(
    ("SimCLR on concatenated views", "reward model on concatenated pairs", "experts by ragged products",
     "sums of cells by lax.map", "time first"),
    "the inferred number is the leading length of no array argument",
)  # fmt: skip
