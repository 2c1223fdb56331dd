"""Distributed K-FAC for JAX: a second-order optimizer that drops into an optax training loop."""

import os as _os

# JAX's LAPACK on CPUs is the OpenBLAS of SciPy, loaded when it is first needed. Its threads and XLA's get in each
# other's way: on two busy cores, inverting twenty matrices of 64 x 64 took 0.4 s instead of 5 ms. XLA's threads are
# enough.
_os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kfac import exact as exact
from kfac import schedules as schedules
from kfac.adaptive import adaptive_damping as adaptive_damping
from kfac.alias import diagnostics as diagnostics
from kfac.alias import kfac as kfac
from kfac.assignment import Assignment as Assignment
from kfac.eigenbasis import eigenbasis as eigenbasis
from kfac.finding import find_layers as find_layers
from kfac.fisher import microbatch as microbatch
from kfac.fisher import value_and_grad as value_and_grad
from kfac.interval import AdaptiveInterval as AdaptiveInterval
from kfac.layers import Factors as Factors
from kfac.layers import Layer as Layer
from kfac.layers import Layers as Layers
from kfac.layers import UnsupportedLayerError as UnsupportedLayerError
from kfac.likelihood import output as output
from kfac.state import KfacState as KfacState
from kfac.state import gather_state as gather_state
from kfac.state import scatter_state as scatter_state
from kfac.state import state_specs as state_specs
from kfac.transform import scale_by_kfac as scale_by_kfac

__version__ = "0.1.0"
