"""What `diagnose` reports: frozen records of layers, tokens, findings, and the whole."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from wellcond.errors import DiagnosisError
from wellcond.files import restore, to_json
from wellcond.measurement.records import make_frame

SCHEMA = 1
Severity = Literal["fault", "warning", "note"]
SEVERITIES: dict[Severity, str] = {
    "fault": "part of the model does not learn",
    "warning": "our records show that it costs quality",
    "note": "worth knowing; no harm is shown",
}

THRESHOLDS = {
    "lambda": 1.0,
    "dead-heads": 0.9999,
    "positions": 0.15,
    "words": 0.3,
    "value-scale": 0.8,
    "value-share": 2.0,
    "stream": 4.0,
    "logits": 3.0,
    "precision": 128.0,
    "projection-scale": 0.3,
    "small-logits": 0.3,
    "small-share": 0.1,
    "duplicate-heads": 0.99,
    "shared-values": 0.01,
}
"""From where on a number is a finding, by its kind; docs/doctor.md says of what each limit is, and why it is there."""
MOST_TOKENS = 256
"""Of a sample, of which the condition number of the tokens is computed."""


def count(number: int, what: str) -> str:
    """A number of things.

    Example:
        >>> count(1, "head"), count(2, "head")
        ('1 head', '2 heads')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def defined(number: float) -> float | None:
    """A number, or None for one that is not finite."""
    return number if math.isfinite(number) else None


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """One attention layer on one batch; None where a number is not defined or was not seen."""

    name: str
    kind: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    width: int
    called: bool = True
    """Whether the batch reaches this layer."""
    not_seen: tuple[str, ...] = ()
    """What the forward pass did not show, and why: rules that need it were not applied."""
    logits_hidden: bool = False
    """Whether the layer was called and its logits could not be seen."""
    num_tokens: int | None = None
    """Tokens of one sample or window; None if that was not seen."""
    causal: bool | None = None
    """Whether no token saw a later one on this batch."""
    finite: bool = True
    kappa_tokens: float | None = None
    """Condition number of the tokens that the attention reads, over distinct tokens and non-zero singular values;
    geometric mean over some samples."""
    scale_q: float | None = None
    """Root mean square of W_Q times the square root of its fan-in, as for `scale_k`, `scale_v` and `scale_o`: the
    size of what it puts out for tokens of size 1."""
    scale_k: float | None = None
    scale_v: float | None = None
    scale_o: float | None = None
    logit_spread: float | None = None
    """Standard deviation of the logits over the keys that a token may see; mean over heads."""
    largest_logit: float | None = None
    """Largest magnitude among the largest logits of all rows."""
    entropy: float | None = None
    """Of the attention map, divided by the logarithm of the number of visible keys: 1 is uniform, 0 is one-hot."""
    diagonal_mass: float | None = None
    """Mean probability of a token for itself."""
    attention_share: float | None = None
    """Root mean square of what the attention adds, relative to the residual stream that enters its block."""
    mlp_share: float | None = None
    """The same of the MLP."""
    scales_itself: bool = False
    """Whether learned scales stand between the block and its stream (LayerScale), so that shares say little."""
    collapsed_heads: tuple[int, ...] = ()
    """Heads whose tokens each attend to one key alone."""
    zero_heads: tuple[int, ...] = ()
    """Heads whose W_Q and W_K, or W_V and W_O, are both zero: neither ever gets a gradient."""
    duplicate_heads: tuple[tuple[int, int], ...] = ()
    """Pairs of heads that compare and read the same."""
    shared_values: bool = False
    """Whether W_V of all heads together has the rank of one head: all read the same directions."""
    qk_norm: bool = False
    saturation: float | None = None
    """Of a correction lam I on Q and K: how far it raises a token's own logit, over the limit ln N + 5."""
    kappa_weights: float | None = None
    """Worst condition number of W_Q, W_K, W_V, W_O of a head; only without a batch, as the three that follow."""
    effective_rank: float | None = None
    """Smallest effective rank of these, exp of the entropy of sigma / sum(sigma)."""
    sec_qk: float | None = None
    """Largest SEC index of W_Q^T W_K: the share of its largest d/16 squared singular values."""
    sec_ov: float | None = None
    """The same of W_O W_V."""
    kappa_jacobian: float | None = None
    """Worst condition number of a head's parameter Jacobian, over its non-zero spectrum; only if asked for."""

    @property
    def dead_heads(self) -> tuple[int, ...]:
        """Heads whose W_Q and W_K get no gradient."""
        return tuple(sorted({*self.collapsed_heads, *self.zero_heads}))


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """How the model makes its tokens."""

    kind: Literal["words", "patches", "unknown"] = "unknown"
    embeddings: tuple[str, ...] = ()
    """Modules that embed words or patches."""
    spread: float | None = None
    """Root mean square of their outputs around the mean over tokens."""
    length: float | None = None
    """Of a word's embedding: `spread` times the square root of its width."""
    positions: tuple[str, ...] = ()
    """Tables of learned positions that are added to the embeddings."""
    position_ratio: float | None = None
    """Root mean square of the positions, relative to `spread`."""


@dataclass(frozen=True, kw_only=True)
class NotFinite:
    """Where NaN or infinity was found first; empty text where there was none."""

    batch: str = ""
    """In what the model was called with."""
    weights: str = ""
    """In its parameters and buffers."""
    activations: str = ""
    """In what a module computed, or was given by another."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know, the line that fixes it, and what our records say about that line."""

    kind: str
    severity: Severity
    verdict: str
    layers: tuple[str, ...] = ()
    """Attention layers that it is about; empty for the model as a whole."""
    value: float
    """The worst number found; of heads, how many."""
    threshold: float
    """The limit of the rule, from `THRESHOLDS`."""
    remedy: str
    """One line of code."""
    evidence: str
    """What our records say about the remedy."""
    record: str = ""
    """Path of that record in the repository; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What `diagnose` found: findings in order of weight, and the numbers of every layer.

    `findings` is empty where there is nothing to fix, and nothing that was not seen.
    """

    findings: tuple[Finding, ...]
    layers: tuple[LayerFacts, ...]
    tokens: TokenFacts
    fresh: bool | None
    """Whether the model is untrained, so that rules for untrained models apply; None if that cannot be known."""
    conditioning: dict[str, Any] | None = None
    not_understood: tuple[str, ...] = ()
    """Modules that look like attention and could not be read."""
    not_finite: NotFinite | None = None
    """Where NaN or infinity was found; None where there was none."""
    run: dict[str, str] = field(default_factory=dict)
    """What was examined, in words: ``model``, ``input`` and the ``version`` of wellcond."""
    schema: int = SCHEMA

    def __repr__(self) -> str:
        kinds = ", ".join(f"{finding.kind} ({finding.severity})" for finding in self.findings)
        return f"Diagnosis({count(len(self.layers), 'attention layer')}, {kinds or 'nothing to fix'})"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, width: int = 100) -> str:
        """Findings and a table of layers as plain text of at most `width` columns."""
        from wellcond.doctor.text import show_diagnosis

        return show_diagnosis(self, width)

    def to_html(self) -> str:
        """One self-contained page, without scripts.

        Raises: MissingExtraError if jinja2 is not installed.
        """
        from wellcond.doctor.text import render_diagnosis

        return render_diagnosis(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dataclasses.asdict(self)

    def to_frame(self) -> Any:
        """One row per layer as a `pandas.DataFrame`, with the kinds of findings that are about it.

        Raises: MissingExtraError if pandas is not installed.
        """
        rows = [
            dataclasses.asdict(layer)
            | {"findings": ", ".join(finding.kind for finding in self.findings if layer.name in finding.layers)}
            for layer in self.layers
        ]
        return make_frame(rows, self.run)

    def to_json(self, *, indent: int | None = 2) -> str:
        """`to_dict` as JSON; infinities and NaN as text, since JSON has none."""
        return to_json(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Diagnosis:
        """The diagnosis that `to_json` wrote.

        Raises: DiagnosisError for anything else.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise ValueError(f"expected a diagnosis of schema {SCHEMA}")
            return restore(cls, data)
        except (ValueError, RecursionError) as error:
            raise DiagnosisError(f"not a diagnosis of wellcond: {error}; diagnose again") from error
