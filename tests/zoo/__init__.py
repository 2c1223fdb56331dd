"""Small models as people write them, and what the package makes of each."""

from zoo import generative as generative
from zoo import other as other
from zoo import physics as physics
from zoo import recurrent as recurrent
from zoo import reinforcement as reinforcement
from zoo import transformers as transformers
from zoo import vision as vision
from zoo.specimens import ZOO as ZOO

# What ought to be and is not yet.
BROKEN: dict[str, str] = {}
