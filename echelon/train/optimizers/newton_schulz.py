"""Approximate a matrix's orthogonal factor by Newton-Schulz iterations.

The iterations use only matrix products. With M = U S V^T, the result is U S' V^T, where the
diagonal elements of S' lie between about 0.7 and 1.2. The coefficients of the quintic polynomial
are Keller Jordan's
(https://kellerjordan.github.io/posts/muon, 2024). They are chosen for the steepest slope at 0
rather than for convergence to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7  # lower bound of the norm: a matrix of zeros stays zero


def orthogonalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """Return a matrix with the singular vectors of `matrix` and with singular values near 1.

    Args:
        matrix: a matrix [n, m] of any floating-point dtype. The matrix products are computed in the
            same dtype.
        num_iterations: the number of iterations; 5 is enough for an optimizer.

    Raises:
        ValueError: `matrix` is not a floating-point matrix.

    Example:
        >>> singular = torch.linalg.svdvals(orthogonalize(torch.randn(32, 16)))
        >>> bool(((singular > 0.6) & (singular < 1.3)).all())
        True
    """
    if matrix.dim() != 2 or not matrix.is_floating_point():
        raise ValueError(
            f"expected a floating-point matrix, got {matrix.dtype} {list(matrix.shape)}"
        )
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix  # the smaller product of both: [k, k], k = min(n, m)
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(num_iterations):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.t() if is_tall else x


def num_products(shape: tuple[int, ...]) -> int:
    """Return the number of scalar multiplications per iteration for a matrix of this shape."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)
