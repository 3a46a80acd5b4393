"""See what every attention head of a transformer does, act on it, and know whether it helped."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wellcond.errors import (
    AttentionNotFoundError,
    CheckpointMismatchError,
    CheckpointWarning,
    ConditioningError,
    DiagnosisError,
    EvidenceWarning,
    FairnessWarning,
    LayoutWarning,
    MissingExtraError,
    MissingFileError,
    MonitorError,
    NumericalWarning,
    OptionError,
    SiteNotFoundError,
    UnknownChoiceError,
    UnsupportedLayoutError,
    WeightError,
    WellcondError,
)
from wellcond.version import __version__ as __version__

if TYPE_CHECKING:
    from wellcond.attention.find import find_attention, register_adapter
    from wellcond.attention.layout import build_site
    from wellcond.attention.site import AttentionSite
    from wellcond.attention.slot import Slot, conditioning_of
    from wellcond.conditioning.apply import condition_, fold_, folded, recondition_
    from wellcond.conditioning.methods import Correction, register_condition
    from wellcond.conditioning.tokens import condition_tokens_, fold_tokens_
    from wellcond.doctor.diagnose import diagnose
    from wellcond.doctor.records import Diagnosis, Finding, LayerFacts, TokenFacts
    from wellcond.doctor.weights import compare_weights
    from wellcond.init.apply import init_, register_init
    from wellcond.jacobian.problem import JacobianSpectrum
    from wellcond.jacobian.spectrum import jacobian_spectrum
    from wellcond.linalg.spectrum import Spectrum, spectrum
    from wellcond.measurement.measure import measure
    from wellcond.measurement.records import HeadReport, LayerReport, MeasurementReport, MeasureSettings
    from wellcond.measurement.tracker import ConditionTracker, TrackPoint
    from wellcond.training.alarms import Alarm, Alarms
    from wellcond.training.cap import SpectralCap
    from wellcond.training.clip import QKClip
    from wellcond.training.groups import QKRate, parameter_groups
    from wellcond.training.monitor import AttentionMonitor
    from wellcond.training.muon import HeadMuon, muon_groups

__all__ = [
    "Alarm",
    "Alarms",
    "AttentionMonitor",
    "AttentionNotFoundError",
    "AttentionSite",
    "CheckpointMismatchError",
    "CheckpointWarning",
    "ConditionTracker",
    "ConditioningError",
    "Correction",
    "Diagnosis",
    "DiagnosisError",
    "EvidenceWarning",
    "FairnessWarning",
    "Finding",
    "HeadMuon",
    "HeadReport",
    "JacobianSpectrum",
    "LayerFacts",
    "LayerReport",
    "LayoutWarning",
    "MeasureSettings",
    "MeasurementReport",
    "MissingExtraError",
    "MissingFileError",
    "MonitorError",
    "NumericalWarning",
    "OptionError",
    "QKClip",
    "QKRate",
    "SiteNotFoundError",
    "Slot",
    "SpectralCap",
    "Spectrum",
    "TokenFacts",
    "TrackPoint",
    "UnknownChoiceError",
    "UnsupportedLayoutError",
    "WeightError",
    "WellcondError",
    "build_site",
    "compare_weights",
    "condition_",
    "condition_tokens_",
    "conditioning_of",
    "diagnose",
    "find_attention",
    "fold_",
    "fold_tokens_",
    "folded",
    "init_",
    "jacobian_spectrum",
    "measure",
    "muon_groups",
    "parameter_groups",
    "recondition_",
    "register_adapter",
    "register_condition",
    "register_init",
    "spectrum",
]

# Imported when first used, since torch takes seconds: `wellcond --help` and mistyped commands do not need it.
_LAZY = {
    "attention.layout": ("build_site",),
    "attention.find": ("find_attention", "register_adapter"),
    "attention.site": ("AttentionSite",),
    "attention.slot": ("Slot", "conditioning_of"),
    "conditioning.apply": ("condition_", "fold_", "folded", "recondition_"),
    "conditioning.methods": ("Correction", "register_condition"),
    "conditioning.tokens": ("condition_tokens_", "fold_tokens_"),
    "doctor.diagnose": ("diagnose",),
    "doctor.weights": ("compare_weights",),
    "doctor.records": ("Diagnosis", "Finding", "LayerFacts", "TokenFacts"),
    "init.apply": ("init_", "register_init"),
    "jacobian.spectrum": ("jacobian_spectrum",),
    "linalg.spectrum": ("Spectrum", "spectrum"),
    "measurement.measure": ("measure",),
    "measurement.records": ("HeadReport", "LayerReport", "MeasurementReport", "MeasureSettings"),
    "jacobian.problem": ("JacobianSpectrum",),
    "measurement.tracker": ("ConditionTracker", "TrackPoint"),
    "training.alarms": ("Alarm", "Alarms"),
    "training.cap": ("SpectralCap",),
    "training.clip": ("QKClip",),
    "training.groups": ("QKRate", "parameter_groups"),
    "training.muon": ("HeadMuon", "muon_groups"),
    "training.monitor": ("AttentionMonitor",),
}
_HOME = {name: module for module, names in _LAZY.items() for name in names}
_MODULES = {*(module.partition(".")[0] for module in _LAZY), "theory"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"wellcond.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"wellcond.{name}")
    else:
        raise AttributeError(f"module 'wellcond' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
