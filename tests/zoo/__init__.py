"""Small models as people write them, with the layers that the package finds in each."""

from zoo import generative as generative
from zoo import other as other
from zoo import physics as physics
from zoo import recurrent as recurrent
from zoo import reinforcement as reinforcement
from zoo import transformers as transformers
from zoo import vision as vision
from zoo.specimens import ZOO as ZOO

# Known faults by model. The tests of these models must fail.
BROKEN: dict[str, str] = {}
