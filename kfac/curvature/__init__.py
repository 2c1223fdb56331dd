"""Curvature matrices: linear operators on parameter trees and data-set factors.

- `block_operator`: turn an optimizer state or a `Factors` into a block-diagonal `BlockOperator`, with inverse, roots,
  determinant and samples.
- `gauss_newton`: return a loss function's whole Gauss-Newton matrix as a matrix-free `GaussNewton`.
- `estimate_factors`: average the factors over a data set at fixed parameters.
- `factors_from_state`: read an optimizer's running averages.
- `eigenbasis`: return the factors' eigenvectors, the basis of EKFAC's moments.
- `Likelihood`: define your own target distribution for `kfac.mark_output`.
"""

from kfac._capture.likelihoods import Likelihood
from kfac._checks import former_names as _former_names
from kfac._optimizer.eigenbasis import eigenbasis
from kfac.curvature._estimate import estimate_factors
from kfac.curvature._gauss_newton import GaussNewton, gauss_newton
from kfac.curvature._operator import BlockOperator, block_operator, factors_from_state

__all__ = [
    "BlockOperator",
    "GaussNewton",
    "Likelihood",
    "block_operator",
    "eigenbasis",
    "estimate_factors",
    "factors_from_state",
    "gauss_newton",
]

__getattr__ = _former_names("kfac.curvature", {"operator": "block_operator"})
