"""Distributed K-FAC for JAX: second-order optimizers that drop into an optax training loop.

The default optimizer is Adam in the eigenbasis of K-FAC's factors: SOAP with exact per-example statistics and spectral
step lengths.

Begin with:

- `train_step`: everything in one call.
- `find_layers`, `kfac`: an optax optimizer for your own training loop.
- `statistics`, `observe`, `statistics_due`: the extra call that your loop makes every few steps.
- `schedules`: schedules for the learning rate, the damping and the momentum.

Change the loss and the loop:

- `value_and_grad`: gradients and statistics in one backward pass.
- `Layers`: the result of `find_layers`. `Factors`: a batch's statistics.
- `microbatch`: splits a batch into parts. `Distribution`: settings for several devices.
- `mark_output`: marks the network's output, for the true Fisher matrix.
- `diagnostics`: scalars to log. `state`: moves optimizer states between devices and checkpoints.

Build an optimizer:

- `natural_gradient`: K-FAC as in the papers; the curvature sets the step length. `gauss_newton`: the fewest steps.
- `scale_by_kfac`: the preconditioner alone, for `optax.chain`.
- `adaptive_damping`: adapts an optimizer's damping to the loss.
- `Cholesky`, `Eigh`, `EKFAC`, `SOAP`: ways to precondition a block. `BlockPreconditioner`: the base class for your own.
- `UnsupportedLayerError`: raised by `find_layers(strict=True)`. `types`: types for annotations.

Measure and plan:

- `curvature`: curvature as a linear operator, a data set's factors, exact Fisher matrices of small models.
- `planning`: predicts a run's cost, memory and messages on many devices.
"""

import os as _os

# On CPUs, JAX takes LAPACK from SciPy's OpenBLAS, which it loads on first use. OpenBLAS threads compete with XLA's: on
# two busy cores, inverting twenty 64 x 64 matrices took 0.4 s instead of 5 ms. XLA's own threads suffice.
_os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kfac import curvature, planning, schedules, state, types
from kfac._capture.find_layers import find_layers
from kfac._capture.outputs import mark_output
from kfac._capture.value_and_grad import statistics, value_and_grad
from kfac._checks import former_names as _former_names
from kfac._curvature.cholesky import Cholesky
from kfac._curvature.eigh import Eigh
from kfac._curvature.ekfac import EKFAC
from kfac._curvature.preconditioner import BlockPreconditioner
from kfac._curvature.soap import SOAP
from kfac._distributed.distribution import Distribution
from kfac._factors import Factors
from kfac._layers import Layers, UnsupportedLayerError
from kfac._microbatch import microbatch
from kfac._optimizer.adaptive_damping import adaptive_damping
from kfac._optimizer.diagnostics import diagnostics, statistics_due
from kfac._optimizer.gauss_newton import gauss_newton
from kfac._optimizer.kfac import kfac
from kfac._optimizer.natural_gradient import natural_gradient
from kfac._optimizer.observe import observe
from kfac._optimizer.scale_by_kfac import scale_by_kfac
from kfac._optimizer.train_step import train_step

__version__ = "0.4.0"

__all__ = [
    "EKFAC",
    "SOAP",
    "BlockPreconditioner",
    "Cholesky",
    "Distribution",
    "Eigh",
    "Factors",
    "Layers",
    "UnsupportedLayerError",
    "adaptive_damping",
    "curvature",
    "diagnostics",
    "find_layers",
    "gauss_newton",
    "kfac",
    "mark_output",
    "microbatch",
    "natural_gradient",
    "observe",
    "planning",
    "scale_by_kfac",
    "schedules",
    "state",
    "statistics",
    "statistics_due",
    "train_step",
    "types",
    "value_and_grad",
]


__getattr__ = _former_names(
    "kfac",
    {
        "presets": "kfac.natural_gradient for osawa2019 and kfac.gauss_newton(1.0, layers) for full_batch",
    },
)
