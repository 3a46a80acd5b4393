"""The theory as code, one function per statement: tensors in, a frozen record with its hypotheses out.

Outside its hypotheses a statement raises `HypothesisError` rather than return a number; `strict=False` returns the
record with value None. Statements that the papers print and that are false keep a function, named `..._printed` or
labelled a surrogate, so that their counterexamples are tests.
"""

from wellcond.jacobian.head import Head
from wellcond.linalg.spectrum import SoftmaxSpectrum
from wellcond.theory.bounds import (
    exact_case,
    kappa_bound,
    lower_bound,
    norm_upper_bound,
    sigma_min_upper_bound,
    upper_bound,
)
from wellcond.theory.dead_heads import Saturation, saturation
from wellcond.theory.ranks import (
    NullDirection,
    Ranks,
    StructuralRanks,
    deficient_case,
    gauge_direction,
    generic_ranks,
    key_shift_direction,
    parameter_nullity,
    structural_ranks,
)
from wellcond.theory.statement import Bound, Hypothesis, HypothesisError, Reference
from wellcond.theory.surrogate import (
    Surrogate,
    papers_bound,
    papers_second_term,
    proposition32_printed,
    softmax_spectrum,
)
from wellcond.theory.weights import PolarTheorem, theorem35, theorem38, theorem38_applies, theorem38_printed

__all__ = [
    "Bound",
    "Head",
    "Hypothesis",
    "HypothesisError",
    "NullDirection",
    "PolarTheorem",
    "Ranks",
    "Reference",
    "Saturation",
    "SoftmaxSpectrum",
    "StructuralRanks",
    "Surrogate",
    "deficient_case",
    "exact_case",
    "gauge_direction",
    "generic_ranks",
    "kappa_bound",
    "key_shift_direction",
    "lower_bound",
    "norm_upper_bound",
    "papers_bound",
    "papers_second_term",
    "parameter_nullity",
    "proposition32_printed",
    "saturation",
    "sigma_min_upper_bound",
    "softmax_spectrum",
    "structural_ranks",
    "theorem35",
    "theorem38",
    "theorem38_applies",
    "theorem38_printed",
    "upper_bound",
]
