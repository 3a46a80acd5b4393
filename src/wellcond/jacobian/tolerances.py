"""Every number at which a method of `wellcond.jacobian.spectrum` is taken, believed or left, with its reason."""

from __future__ import annotations

from typing import Final

# --- sizes: which method is taken ------------------------------------------------------------------------------------

GRAM_LIMIT: Final = 6200
"""Side of the smaller Gram matrix up to which all its eigenvalues are computed: beyond, they take minutes."""
CHOLESKY_LIMIT: Final = 20_000
"""Outputs up to which J J^T is factorised: 3.2 GB, and about half a minute."""
SPECTRUM_LIMIT: Final = 768
"""Outputs up to which `auto` computes all singular values even where both ends are known in closed form."""
LARGEST_FULL_SVD: Final = 2500
"""Side beyond which an SVD takes longer than everything else, and `auto` gives both ends only."""
LARGEST_SVD: Final = 2e13
"""Rows x columns x smaller side up to which J itself is decomposed: about an hour."""
SMALLEST_FLOAT32: Final = 1024
"""Outputs below which a factorisation in float64 takes no longer than the steps that a float32 one steers."""
EXHAUSTIVE_LIMIT: Final = 1500
"""Outputs up to which products alone go through the whole space, and so are exact."""
LANCZOS_STEPS: Final = 300
"""Vectors that Lanczos keeps otherwise; both ends of a head converge within a tenth of that, or not at all."""
POWER_STEPS: Final = 4
"""Of G and of its inverse, to tell whether squaring loses: a bound from below, which one step already gives."""
LOWEST: Final = 40
"""How many of the smallest singular values are computed where a rank must be counted from a triangular form."""

# --- accuracy: what is believed --------------------------------------------------------------------------------------

LARGEST_SQUARED_KAPPA: Final = 1e5
"""Squaring keeps about 1e-16 kappa^2 of relative accuracy: 1e-6 at kappa = 1e5."""
LARGEST_SHIFTED_KAPPA: Final = 1e4
"""Likewise for lambda_max I - J J^T, where the shift rounds once more."""
CLOSED: Final = 1e-8
"""Relative width at which the interval of the closed form for sigma_min counts as a number."""
CLOSED_ROUNDING: Final = 1e-6
"""Rounding of sigma_min, relative to it, beyond which the closed form is left to a method that does not square."""
SURE: Final = 10
"""A smallest singular value counts as exact at this many times its error: the error is an estimate."""
AGREEMENT_OF_OUTPUT: Final = 1e-9
"""Relative difference up to which a structured form has the output of the module's own float64 copy."""
AGREEMENT_OF_PRODUCT: Final = 1e-6
"""The same of J J^T u: iterations inside a module (Nystrom) amplify rounding, in automatic differentiation most."""
