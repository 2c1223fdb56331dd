"""Curvature matrices: linear operators on parameter trees, data-set factors, and exact Fisher matrices.

- `operator`: turn an optimizer state or a `Factors` into a block-diagonal `Operator`, with inverse, roots, determinant
  and samples.
- `gauss_newton`: return a loss function's whole Gauss-Newton matrix as a matrix-free `Matrix`.
- `estimate`: average the factors over a data set at fixed parameters.
- `averaged_factors`: read an optimizer's running averages.
- `eigenbasis`: return the factors' eigenvectors, the basis of EKFAC's moments.
- `Likelihood`: define your own target distribution for `kfac.output`.
- `exact`: compute the exact blocks of small models, to measure approximation errors.
"""

from kfac._capture.likelihoods import Likelihood
from kfac._optimizer.diagnostics import eigenbasis
from kfac.curvature import exact as exact
from kfac.curvature._estimate import estimate
from kfac.curvature._gauss_newton import gauss_newton
from kfac.curvature._matrix import Matrix
from kfac.curvature._operator import Operator, averaged_factors, operator

__all__ = [
    "Likelihood",
    "Matrix",
    "Operator",
    "averaged_factors",
    "eigenbasis",
    "estimate",
    "gauss_newton",
    "operator",
]
