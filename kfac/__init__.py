"""Distributed K-FAC for JAX: a second-order optimizer that drops into an optax training loop."""

from kfac.finding import find_layers as find_layers
from kfac.fisher import microbatch as microbatch
from kfac.fisher import value_and_grad as value_and_grad
from kfac.layers import Factors as Factors
from kfac.layers import Layer as Layer
from kfac.layers import Layers as Layers
from kfac.layers import UnsupportedLayerError as UnsupportedLayerError

__version__ = "0.1.0"
