"""Distributed K-FAC for JAX: a second-order optimizer that drops into an optax training loop."""

import os as _os

# JAX's LAPACK on CPUs is the OpenBLAS of SciPy, loaded when it is first needed. Its threads and XLA's get in each
# other's way: on two busy cores, inverting twenty matrices of 64 x 64 took 0.4 s instead of 5 ms. XLA's threads are
# enough.
_os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kfac import exact as exact
from kfac import presets as presets
from kfac import schedules as schedules
from kfac._capture.data_parallel import data_parallel as data_parallel
from kfac._capture.find_layers import find_layers as find_layers
from kfac._capture.likelihoods import Likelihood as Likelihood
from kfac._capture.microbatch import microbatch as microbatch
from kfac._capture.outputs import output as output
from kfac._capture.primitives import register_primitive as register_primitive
from kfac._capture.value_and_grad import value_and_grad as value_and_grad
from kfac._curvature.cholesky import Cholesky as Cholesky
from kfac._curvature.eigh import Eigh as Eigh
from kfac._curvature.ekfac import Ekfac as Ekfac
from kfac._curvature.inverse import Inverse as Inverse
from kfac._curvature.soap import Soap as Soap
from kfac._distributed.assignment import Assignment as Assignment
from kfac._distributed.distribution import Distribution as Distribution
from kfac._distributed.planning import Hardware as Hardware
from kfac._distributed.planning import Plan as Plan
from kfac._distributed.planning import plan as plan
from kfac._factors import Factors as Factors
from kfac._factors import Kronecker as Kronecker
from kfac._factors import Unitwise as Unitwise
from kfac._layers import Layer as Layer
from kfac._layers import Layers as Layers
from kfac._layers import UnsupportedLayerError as UnsupportedLayerError
from kfac._operator.estimate import estimate as estimate
from kfac._operator.gauss_newton import gauss_newton as gauss_newton
from kfac._operator.matrix import Matrix as Matrix
from kfac._operator.operator import Operator as Operator
from kfac._operator.operator import operator as operator
from kfac._optimizer.adaptive_damping import adaptive_damping as adaptive_damping
from kfac._optimizer.diagnostics import averaged_factors as averaged_factors
from kfac._optimizer.diagnostics import diagnostics as diagnostics
from kfac._optimizer.diagnostics import due as due
from kfac._optimizer.diagnostics import eigenbasis as eigenbasis
from kfac._optimizer.kfac import kfac as kfac
from kfac._optimizer.reshard import gather_state as gather_state
from kfac._optimizer.reshard import scatter_state as scatter_state
from kfac._optimizer.reshard import state_specs as state_specs
from kfac._optimizer.scale_by_kfac import refresh as refresh
from kfac._optimizer.scale_by_kfac import scale_by_kfac as scale_by_kfac
from kfac._optimizer.state import KfacState as KfacState
from kfac._optimizer.train_step import TrainStep as TrainStep
from kfac._optimizer.train_step import train_step as train_step

__version__ = "0.3.0"
