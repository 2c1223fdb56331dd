"""Distributed K-FAC for JAX: a second-order optimizer that drops into an optax training loop.

Begin with:

- `train_step`: everything in one call.
- `find_layers`, `kfac`: an optax optimizer for a loop of your own.
- `statistics`, `observe`, `statistics_due`: the call that this loop adds every few steps.
- `schedules`: schedules of the learning rate, the damping and the momentum.

Change the loss and the loop:

- `value_and_grad`: gradients and statistics in one backward pass. `Layers`, `Factors`: the types of results.
- `microbatch`: splits a batch into parts. `Distribution`: how several devices are used.
- `output`: marks the network's output, for the true Fisher matrix.
- `diagnostics`: scalars to log. `state`: optimizer states on other devices and in checkpoints.

Build an optimizer:

- `scale_by_kfac`: the preconditioner alone, for `optax.chain`. `presets`: whole optimizers beside `kfac`.
- `Cholesky`, `Eigh`, `Ekfac`, `Soap`: how blocks are inverted. `Inverse`: the base of your own.
- `register_primitive`: what an operation of your own does with a parameter.
- `UnsupportedLayerError`: raised by `find_layers(strict=True)`. `types`: the types of what is returned.

Measure and plan:

- `curvature`: curvature as a linear operator, factors of a data set, exact Fisher matrices of small models.
- `planning`: what a run on many devices would take.
"""

import os as _os

# JAX's LAPACK on CPUs is the OpenBLAS of SciPy, loaded when it is first needed. Its threads and XLA's get in each
# other's way: on two busy cores, inverting twenty matrices of 64 x 64 took 0.4 s instead of 5 ms. XLA's threads are
# enough.
_os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kfac import curvature as curvature
from kfac import planning as planning
from kfac import presets as presets
from kfac import schedules as schedules
from kfac import state as state
from kfac import types as types
from kfac._capture.equations import register_primitive as register_primitive
from kfac._capture.find_layers import find_layers as find_layers
from kfac._capture.microbatch import microbatch as microbatch
from kfac._capture.outputs import output as output
from kfac._capture.value_and_grad import statistics as statistics
from kfac._capture.value_and_grad import value_and_grad as value_and_grad
from kfac._curvature.cholesky import Cholesky as Cholesky
from kfac._curvature.eigh import Eigh as Eigh
from kfac._curvature.ekfac import Ekfac as Ekfac
from kfac._curvature.inverse import Inverse as Inverse
from kfac._curvature.soap import Soap as Soap
from kfac._distributed.distribution import Distribution as Distribution
from kfac._factors import Factors as Factors
from kfac._layers import Layers as Layers
from kfac._layers import UnsupportedLayerError as UnsupportedLayerError
from kfac._optimizer.diagnostics import diagnostics as diagnostics
from kfac._optimizer.diagnostics import statistics_due as statistics_due
from kfac._optimizer.kfac import kfac as kfac
from kfac._optimizer.observe import observe as observe
from kfac._optimizer.scale_by_kfac import scale_by_kfac as scale_by_kfac
from kfac._optimizer.train_step import train_step as train_step

__version__ = "0.3.0"


RENAMED = {"due": "statistics_due"}


def __getattr__(name: str) -> object:
    if name in RENAMED:
        raise AttributeError(f"kfac.{name} is now kfac.{RENAMED[name]}")
    for module in (curvature, planning, presets, state, types):  # whose names stood here in version 0.3.0 and before
        if hasattr(module, name) and not name.startswith("_"):
            raise AttributeError(f"kfac.{name} is now {module.__name__}.{name}")
    raise AttributeError(f"module 'kfac' has no attribute {name!r}")
