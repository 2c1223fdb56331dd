"""Small models as people write them, and what the package makes of each."""

from zoo import other as other
from zoo import transformers as transformers
from zoo.specimens import ZOO as ZOO

# What ought to be and is not yet.
BROKEN: dict[str, str] = {}
