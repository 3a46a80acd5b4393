"""Well-conditioned attention for PyTorch: find it, initialise it, condition it, fold it, measure it."""

from wellcond.attention.builders import fused_site, query_and_kv_site, separate_site
from wellcond.attention.find import find_attention
from wellcond.attention.registry import register_adapter
from wellcond.attention.site import AttentionSite, Slot
from wellcond.conditioning.apply import condition_, conditioning_of, fold_, folded, recondition_
from wellcond.errors import (
    AttentionNotFoundError,
    CheckpointMismatchError,
    CheckpointWarning,
    ConditioningError,
    MissingExtraError,
    NumericalWarning,
    UnknownChoiceError,
    UnsupportedLayoutError,
    WeightError,
    WellcondError,
)
from wellcond.init.apply import init_
from wellcond.jacobian.records import JacobianSpectrum
from wellcond.jacobian.spectrum import jacobian_spectrum
from wellcond.linalg.spectrum import spectrum
from wellcond.measurement import HeadReport, LayerReport, MeasurementReport, measure
from wellcond.records import Spectrum
from wellcond.tracking import ConditionTracker, TrackPoint

__version__ = "0.1.0"

__all__ = [
    "AttentionNotFoundError",
    "AttentionSite",
    "CheckpointMismatchError",
    "CheckpointWarning",
    "ConditionTracker",
    "ConditioningError",
    "HeadReport",
    "JacobianSpectrum",
    "LayerReport",
    "MeasurementReport",
    "MissingExtraError",
    "NumericalWarning",
    "Slot",
    "Spectrum",
    "TrackPoint",
    "UnknownChoiceError",
    "UnsupportedLayoutError",
    "WeightError",
    "WellcondError",
    "condition_",
    "conditioning_of",
    "find_attention",
    "fold_",
    "folded",
    "fused_site",
    "init_",
    "jacobian_spectrum",
    "measure",
    "query_and_kv_site",
    "recondition_",
    "register_adapter",
    "separate_site",
    "spectrum",
]
