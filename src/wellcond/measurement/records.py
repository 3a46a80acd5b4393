"""What `measure` is asked for and what of, and what it reports: frozen records, as tables, JSON and frames."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

import torch

from wellcond.arguments import check_choice, check_flag, check_int
from wellcond.attention.kernels import AttentionStatistics
from wellcond.errors import ReportError, WellcondError, needs_extra
from wellcond.files import restore, to_json
from wellcond.jacobian.diagnosis import HeadDiagnosis
from wellcond.jacobian.problem import METHODS, Convention, JacobianSpectrum, union_condition_number
from wellcond.linalg.spectrum import Spectrum, show_kappas

SCHEMA = 1
Kappa = Literal["strict", "pseudo"]
Combine = Literal["mean", "stack"]
Grouped = Literal["joint", "each"]
NUMERICAL = (WellcondError, ArithmeticError, torch.linalg.LinAlgError)
"""What a measurement may raise when numbers are NaN, infinite or too large to be squared."""
ATTENTION_NUMBERS = tuple(f.name for f in dataclasses.fields(AttentionStatistics))
JACOBIAN_NUMBERS = (
    "condition_number",
    "pseudo_condition_number",
    "sigma_max",
    "sigma_rank",
    "rank",
    "nullity",
    "status",
    "norm_q",
    "norm_k",
    "norm_v",
    "papers_bound_log10",
    "bound_log10",
)
"""Names in `HeadReport.numbers` that are None without a Jacobian."""
INTEGERS = ("step", "head", "rank", "nullity", "num_tokens")
"""Columns of a frame that hold integers, which may be missing."""


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of numbers that are not negative; 0 if one is 0, NaN if there are none or one is NaN.

    Example:
        >>> round(geometric_mean([1.0, 100.0]), 6), geometric_mean([2.0, math.inf])
        (10.0, inf)
    """
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    if len(values) == 1 or 0 in values:
        return min(values)
    return statistics.geometric_mean(values)


def make_frame(rows: Sequence[Mapping[str, Any]], attrs: Mapping[str, Any]) -> Any:
    """A `pandas.DataFrame` with one row per mapping; `attrs` say what was measured and how.

    Raises: MissingExtraError if pandas is not installed.
    """
    with needs_extra("pandas", "train"):  # which has it through datasets
        import pandas
    frame = pandas.DataFrame(rows)
    frame = frame.astype({name: "Int64" for name in INTEGERS if name in frame})
    frame.attrs |= attrs
    return frame


@dataclass(frozen=True, kw_only=True)
class MeasureSettings:
    """What `measure` computes of every head; each field is also a keyword of `measure`.

    Attributes:
        convention: ``wide``, the Jacobian, or ``stack``, the papers' matrix.
        kappa: which condition number `samples` and means are about.
        samples: how many samples (or windows) of the batch to measure.
        combine: ``mean`` measures them one by one; ``stack`` as one Jacobian, since they share the weights.
        grouped: query heads that share keys and values: ``joint``, one Jacobian of all of them, or ``each`` by itself,
            which is smaller.
        jacobian: False measures weights and attention maps only, which takes milliseconds.
        method: of `jacobian_spectrum`.
        biases: biases count as parameters.
        output: also measure each layer's output through W_O, with respect to all its Q, K, V together.
        memory_limit: bytes that may be used.

    Raises: UnknownChoiceError, TypeError, ValueError: values that do not exist or exclude each other.

    Example:
        >>> MeasureSettings(samples=4, kappa="pseudo").combine
        'mean'
    """

    convention: Convention = "wide"
    kappa: Kappa = "strict"
    samples: int = 1
    combine: Combine = "mean"
    grouped: Grouped = "joint"
    jacobian: bool = True
    method: str = "auto"
    biases: bool = False
    output: bool = False
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_choice("convention", self.convention, get_args(Convention))
        check_choice("kappa", self.kappa, get_args(Kappa))
        check_choice("combine", self.combine, get_args(Combine))
        check_choice("grouped", self.grouped, get_args(Grouped))
        check_choice("Jacobian method", self.method, ("auto", *METHODS))
        check_int("samples", self.samples, at_least=1)
        for name in ("jacobian", "biases", "output"):
            check_flag(name, getattr(self, name))
        if self.memory_limit is not None:
            check_int("memory_limit", self.memory_limit, at_least=1)
        if self.convention == "stack" and self.biases:
            raise ValueError(
                "biases=True: the stacked convention is defined without biases; leave them out, or use "
                "convention='wide'"
            )
        if self.output and not self.jacobian:
            raise ValueError("output=True is about the Jacobian, and jacobian=False leaves it out")


class MeasureOptions(TypedDict, total=False):
    """The fields of `MeasureSettings` as keywords."""

    convention: Convention
    kappa: Kappa
    samples: int
    combine: Combine
    grouped: Grouped
    jacobian: bool
    method: str
    biases: bool
    output: bool
    memory_limit: int | None


@dataclass(frozen=True, kw_only=True)
class HeadReport:
    """One key/value head with its query heads, or one query head with its key/value head.

    Without a Jacobian, weights and attention map only.
    """

    index: int
    """Of the key/value head; of the query head, where each was measured by itself."""
    query_heads: tuple[int, ...]
    weights: dict[str, Spectrum]
    """Worst query head of ``q``; ``k``; ``v``; of the effective weights."""
    raw_weights: dict[str, Spectrum]
    """The same of the stored weights, without corrections: equal to `weights` in a plain model."""
    how: str
    jacobian: JacobianSpectrum | None = None
    """Of the first sample, or of all samples stacked; None if it was not asked for."""
    samples: tuple[float, ...] = ()
    """The condition number asked for, sample by sample."""
    both_samples: dict[Kappa, tuple[float, ...]] = field(default_factory=lambda: {"strict": (), "pseudo": ()})
    """Both condition numbers, sample by sample."""
    attention: AttentionStatistics | None = None
    """Of the first sample, or of all samples stacked; None of channel attention, and where no softmax was seen. Where
    the head is not plain and there is no Jacobian, it is of the softmax that the model itself computed. Of Nystrom
    attention it is of the softmax that is approximated, on at most 256 tokens."""
    approximation_error: float | None = None
    """Of Nystrom attention: |Phat - P| / |P| in the Frobenius norm, with P that softmax."""
    diagnosis: HeadDiagnosis | None = None
    """What dominates the Jacobian, of the first sample or of all samples stacked; None without a Jacobian, and of forms
    that are not diagnosed."""
    dead: bool = False
    """Attention has collapsed; without a Jacobian, only where the attention map alone proves it."""
    papers_bound_log10: float | None = None
    """The papers' surrogate, which is not a bound; None where it is not defined."""
    bound_log10: float | None = None
    """A bound on the Jacobian's condition number, strict for wide, pseudo for stack; None where none is known."""

    def __repr__(self) -> str:
        if self.jacobian is None:
            return f"HeadReport(head {self.index}, {self.how})"
        kappas = show_kappas(self.mean_kappa(), self.mean_kappa("pseudo"))
        return f"HeadReport(head {self.index}, {kappas}, {self.status}, {self.verdict})"

    def mean_kappa(self, kind: Kappa | None = None) -> float:
        """Geometric mean over samples, of the kind that was asked for if None; infinite if any is, NaN if one is."""
        return geometric_mean(self.samples if kind is None else self.both_samples[kind])

    def spread(self) -> float:
        """Geometric standard deviation over samples; 1 for one sample, NaN if one is not finite or there is none."""
        if not self.samples or not all(math.isfinite(s) for s in self.samples):
            return math.nan
        logs = [math.log(s) for s in self.samples]
        return math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0

    @property
    def why_not_finite(self) -> str:
        """Why the condition number asked for is infinite or not defined; empty where it is finite or not measured."""
        if self.jacobian is None or math.isfinite(self.mean_kappa()):
            return ""
        count = sum(not math.isfinite(kappa) for kappa in self.samples)
        some = f"{count} of {len(self.samples)} samples" if len(self.samples) > 1 else ""
        own = self.jacobian.why_not_finite
        return f"{own} ({some})" if own and some else own or f"not finite in {some}"

    def show_pseudo(self) -> str:
        """The condition number over the non-zero spectrum; where that is not known, its certified lower bound."""
        mean = self.mean_kappa("pseudo")
        if math.isfinite(mean) or self.jacobian is None:
            return "-" if math.isnan(mean) else f"{mean:.4g}"
        sure = self.jacobian.smallest_kappa
        return f">={sure:.3g}" if math.isfinite(sure) else "-"

    @property
    def verdict(self) -> str:
        """What dominates; ``unknown`` of channel, Nystrom and generic forms, and without a Jacobian."""
        return "unknown" if self.diagnosis is None else self.diagnosis.verdict

    @property
    def status(self) -> str:
        """How the Jacobian is known; ``not measured`` without one."""
        return "not measured" if self.jacobian is None else self.jacobian.status

    def numbers(self) -> dict[str, Any]:
        """Every number of the head in one flat mapping, names as in `TrackPoint`; None where it was not measured."""
        found: dict[str, Any] = dict.fromkeys((*JACOBIAN_NUMBERS, *ATTENTION_NUMBERS))
        if self.jacobian is not None:
            for name in ("sigma_max", "sigma_rank", "rank", "nullity", "status"):
                found[name] = getattr(self.jacobian, name)
            found["condition_number"] = self.mean_kappa("strict")
            found["pseudo_condition_number"] = self.mean_kappa("pseudo")
        if self.diagnosis is not None:
            found |= {f"norm_{role}": getattr(self.diagnosis, f"norm_{role}") for role in "qkv"}
        if self.attention is not None:
            found |= dataclasses.asdict(self.attention)
        for prefix, weights in (("", self.weights), ("raw_", self.raw_weights)):
            for role, spectrum in weights.items():
                found[f"{prefix}kappa_{role}"] = spectrum.condition_number
                found[f"{prefix}sigma_max_{role}"] = spectrum.sigma_max
                found[f"{prefix}sigma_min_{role}"] = spectrum.sigma_min
        found["papers_bound_log10"], found["bound_log10"] = self.papers_bound_log10, self.bound_log10
        return found | {"dead": self.dead}


@dataclass(frozen=True)
class FailedHead:
    """A head that was asked for and could not be measured."""

    index: int
    """As of a `HeadReport`."""
    problem: str


@dataclass(frozen=True)
class LayerReport:
    """One attention layer."""

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    heads: tuple[HeadReport, ...]
    problem: str = ""
    """Why no head could be measured; empty otherwise."""
    with_output: JacobianSpectrum | None = None
    """Of the layer's output through W_O, if asked for (`output=True`) and every head is plain; of the first sample, or
    of all samples stacked."""
    output_samples: dict[Kappa, tuple[float, ...]] = field(default_factory=lambda: {"strict": (), "pseudo": ()})
    """Both condition numbers of `with_output`, sample by sample."""
    output_problem: str = ""
    """Why `with_output` could not be measured; empty otherwise."""
    failed: tuple[FailedHead, ...] = ()
    """The heads that could not be measured, each with the reason; the others are in `heads`."""

    def why_not_measured(self, head: int) -> str:
        """Why a head is not among `heads`; empty if it is, or was not asked for."""
        return next((failed.problem for failed in self.failed if failed.index == head), self.problem)

    def __repr__(self) -> str:
        grouped = f" ({self.num_kv_heads} of keys and values)" if self.num_kv_heads != self.num_heads else ""
        sizes = f"{self.num_heads} heads{grouped} x {self.head_dim}, {self.num_tokens} tokens"
        found = f"not measured: {self.problem}" if self.problem else _range_of(self.heads)
        found += f", {len(self.failed)} not measured" if self.failed and self.heads else ""
        return f"LayerReport({self.name!r}, {sizes}, {found})"

    def kappa(self, kind: Kappa = "strict") -> float:
        """Condition number of the whole layer without W_O: heads have parameters of their own, so spectra unite.

        NaN unless the Jacobian of every key/value head was measured; infinite as soon as that of one is. Query heads
        that share keys share parameters: their spectra, measured one by one, do not determine it.
        """
        group = self.num_heads // self.num_kv_heads
        whole = [head for head in self.heads if len(head.query_heads) == group]
        known = {head.index: head.jacobian for head in whole if head.jacobian is not None}
        kappa = union_condition_number(list(known.values()), kind) if known else math.nan
        return kappa if len(known) == self.num_kv_heads or kappa == math.inf else math.nan


@dataclass(frozen=True)
class MeasurementReport:
    """What `measure` found. Effective weights throughout: corrections of `condition_` are included."""

    layers: tuple[LayerReport, ...]
    convention: Convention
    kappa: Kappa
    combine: Combine
    conditioning: dict[str, Any] | None
    schema: int = SCHEMA
    run: dict[str, str] = field(default_factory=dict)
    """What was measured, in words: ``model``, ``input`` and the ``version`` of wellcond."""

    def __repr__(self) -> str:
        heads = [head for layer in self.layers for head in layer.heads]
        failed = sum(len(layer.failed) for layer in self.layers)
        counts = f"{len(heads)} heads of {len(self.layers)} attention layer{'' if len(self.layers) == 1 else 's'}"
        counts += f", {failed} heads not measured" if failed else ""
        of = f"{self.run['model']}; " if "model" in self.run else ""
        return f"MeasurementReport({of}{counts}, {self.convention} Jacobian, {self.kappa}, {_range_of(heads)})"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, both condition numbers of every head included."""
        data = dataclasses.asdict(self)
        for layer, plain in zip(self.layers, data["layers"], strict=True):
            plain["with_output"] = None if layer.with_output is None else layer.with_output.to_dict()
            for head, row in zip(layer.heads, plain["heads"], strict=True):
                row["jacobian"] = None if head.jacobian is None else head.jacobian.to_dict()
                row["weights"] = {role: s.to_dict() for role, s in head.weights.items()}
                row["raw_weights"] = {role: s.to_dict() for role, s in head.raw_weights.items()}
                row["mean_kappa"], row["spread"] = head.mean_kappa(), head.spread()
                row["mean_pseudo_kappa"], row["why_not_finite"] = head.mean_kappa("pseudo"), head.why_not_finite
                row["verdict"] = head.verdict
        return data

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as JSON; infinities and NaN as text, since JSON has none."""
        return to_json(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> MeasurementReport:
        """The report that `to_json` wrote.

        Raises: ReportError for anything else.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise ValueError(f"expected a report of schema {SCHEMA}")
            return restore(cls, data)
        except (ValueError, TypeError, RecursionError) as error:
            raise ReportError(f"not a report of wellcond.measure: {error}; measure again") from error

    def to_table(self) -> str:
        """One line per head, in plain text; where some condition number is infinite, why, and the pseudo one beside."""
        heads = [head for layer in self.layers for head in layer.heads]
        explained = any(head.why_not_finite for head in heads)
        width = max(12, *(len(head.status) for head in heads)) if heads else 12
        pseudo = f" {'pseudo':>10}" if explained else ""
        why = f"{'verdict':10} why not finite" if explained else "verdict"
        norms, mass = f"{'|J_Q|':>9} {'|J_K|':>9} {'|J_V|':>9}", f"{'entropy':>8} {'diagonal':>8}"
        lines = [f"{'layer':28} head {'kappa(J)':>10}{pseudo} {'status':>{width}} {norms} {mass}  {why}"]
        for layer in self.layers:
            if layer.problem:
                lines.append(f"{layer.name:28} not measured: {layer.problem}")
            if layer.output_problem:
                lines.append(f"{layer.name:28} not measured through W_O: {layer.output_problem}")
            for head in layer.heads:
                row = _columns(head)
                norms = " ".join(f"{row[f'norm_{role}']:9.3g}" for role in "qkv")
                mass = f"{row['entropy']:8.4f} {row['diagonal_mass']:8.4f}"
                pseudo = f" {head.show_pseudo():>10}" if explained else ""
                why = f"{head.verdict:10} {head.why_not_finite}" if explained else head.verdict
                lines.append(
                    f"{layer.name:28} {head.index:4} {head.mean_kappa():10.4g}{pseudo} {head.status:>{width}} {norms} "
                    f"{mass}  {why}".rstrip()
                )
            own = [failed for failed in layer.failed if failed.problem != layer.problem]
            lines += [f"{layer.name:28} {one.index:4} not measured: {one.problem}" for one in own]
        return "\n".join(lines)

    def to_html(self) -> str:
        """One self-contained page, without scripts: heads, weights, spectra, and what to be careful about.

        Raises: ValueError without Jacobians; MissingExtraError if jinja2 is not installed.
        """
        from wellcond.pages.measurement import render_measurement

        return render_measurement(self.to_dict())

    def to_frame(self) -> Any:
        """One row per head as a `pandas.DataFrame`, names as in `TrackPoint`; `attrs` say what was measured and how.

        A number that was not measured or is not defined is NaN. A layer or a head that was not measured has a row
        with the reason.

        Raises: MissingExtraError if pandas is not installed.
        """
        rows = [
            {"layer": layer.name, "kind": layer.kind, "num_tokens": layer.num_tokens} | found
            for layer in self.layers
            for found in [*map(_columns, layer.heads), *_problem_rows(layer)]
        ]
        how = {"convention": self.convention, "kappa": self.kappa, "combine": self.combine}
        return make_frame(rows, how | self.run)

    def plot(self, ax: Any = None) -> Any:
        """Condition number of every head, layer by layer; returns the matplotlib `Axes`.

        Where the strict one is infinite, the one over the non-zero spectrum is drawn, as a ring.

        Args:
            ax: where to draw; a new figure by default.

        Raises: MissingExtraError if matplotlib is not installed.
        """
        from wellcond.measurement.plot import plot_report

        return plot_report(self, ax)


def _range_of(heads: Sequence[HeadReport]) -> str:
    """Condition numbers of some heads, from the smallest to the largest."""
    kappas = [head.mean_kappa() for head in heads if head.jacobian is not None]
    finite = [kappa for kappa in kappas if math.isfinite(kappa)]
    rest = f", {len(kappas) - len(finite)} not finite" if len(finite) < len(kappas) else ""
    if not finite:
        return f"kappa of {len(kappas)} heads not finite" if kappas else "no kappa measured"
    ends = f"{min(finite):.4g} to {max(finite):.4g}" if len(finite) > 1 else f"{finite[0]:.4g}"
    return f"kappa {ends}{rest}"


def _problem_rows(layer: LayerReport) -> list[dict[str, Any]]:
    """Rows of a frame about what was not measured: of each failed head, or of a layer as a whole."""
    if layer.problem and not layer.failed:
        return [{"problem": layer.problem}]
    return [{"head": failed.index, "problem": failed.problem} for failed in layer.failed]


def _columns(head: HeadReport) -> dict[str, Any]:
    numbers = head.numbers() | {name: getattr(head.jacobian, name, None) for name in ("sigma_min", "method")}
    row = {"head": head.index, "kappa": head.mean_kappa()}
    row |= {name: math.nan if value is None else value for name, value in numbers.items()}
    for name in ("status", "verdict", "why_not_finite", "how"):
        row[name] = getattr(head, name)
    return row | {"problem": ""}
