"""Curvature as an object: linear operators on trees of parameters, factors of whole data sets, exact Fisher matrices.

- `operator`: the blocks of an optimizer or of a `Factors` as an `Operator`, with inverse, roots, determinant, samples.
- `gauss_newton`: the whole matrix of a loss, by products; a `Matrix`.
- `estimate`: the factors of a data set at fixed parameters. `averaged_factors`: those that an optimizer has averaged.
- `eigenbasis`: the eigenvectors of factors, in which EKFAC takes moments.
- `Likelihood`: a distribution of targets of your own, for `kfac.output`.
- `exact`: the exact blocks of small models, to measure approximations by.
"""

from kfac._capture.likelihoods import Likelihood
from kfac._optimizer.diagnostics import eigenbasis
from kfac.curvature import exact as exact
from kfac.curvature._estimate import estimate
from kfac.curvature._gauss_newton import gauss_newton
from kfac.curvature._matrix import Matrix
from kfac.curvature._operator import Operator, averaged_factors, operator

__all__ = ["Likelihood", "Matrix", "Operator", "averaged_factors", "eigenbasis", "estimate", "gauss_newton", "operator"]
