"""From facts to findings: one function per rule, in the order in which findings of equal severity are shown.

Rules for untrained models, and every fix that overwrites weights, need certainty that the model is untrained: trained
weights are what training made them. What they advise is the one recommendation (`wellcond.init.recommended`), for the
layers concerned; what our records say about a finding is there, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wellcond.attention.record import HOW_TO_SEE
from wellcond.conditioning.methods import per_projection
from wellcond.doctor.records import MOST_TOKENS, SEVERITIES, THRESHOLDS, Diagnosis, Finding, LayerFacts, Severity, count
from wellcond.init import recommended

NO_RECORD = "None of our records is about this line.", ""
EXPLAINS = {
    "not-finite": "dead-heads logits precision stream positions words value-scale projection-scale",
    "lambda": "dead-heads logits precision stream value-scale shared-values",
    "dead-heads": "logits",
    "words": "stream",
    "value-scale": "shared-values",
}
"""By kind of finding, the kinds that follow from it and are left out beside it."""


@dataclass(frozen=True)
class Case:
    """A model without findings yet, and the lines of code that would fix it."""

    found: Diagnosis
    whole: bool
    """Whether the layers are all attention layers of the model."""

    @property
    def layers(self) -> Sequence[LayerFacts]:
        """The attention layers."""
        return self.found.layers

    @property
    def has_tokens_to_scale(self) -> bool:
        """Whether there are words or learned positions to scale; True unless it is known that there are none."""
        return self.found.tokens.kind != "patches" or bool(self.found.tokens.positions)

    @property
    def evidence(self) -> tuple[str, str]:
        """What our records say about the recommended initialisation, and which record."""
        if self.has_tokens_to_scale:
            return recommended.EVIDENCE, recommended.RECORD
        return recommended.EVIDENCE_WITHOUT_TOKENS, recommended.TABLES

    def initialise(self, layers: Sequence[LayerFacts] = (), *, redraw: bool = False) -> str:
        """The recommended line.

        Args:
            layers: those concerned; empty for the model as a whole.
            redraw: also draw W_V and W_O of these layers, which `calibrated` only scales.
        """
        sites = self._only(layers or self.layers)
        if not self.has_tokens_to_scale:
            return _with(recommended.LINE_WITHOUT_TOKENS, sites)
        first = f'wc.init_(model, "default"{sites}); ' if redraw else ""
        return first + self.calibrate(layers)

    def calibrate(self, layers: Sequence[LayerFacts] = ()) -> str:
        """The line of `calibrated`, with what was not seen left out.

        Args:
            layers: only the towers that hold these layers, and not the tokens; empty for the model as a whole. A tower
                is set as a whole, since what a layer receives depends on the layers before it.
        """
        towers = {_tower(layer.name) for layer in layers}
        chosen = [layer for layer in self.layers if not layers or _tower(layer.name) in towers]
        reached = [layer for layer in chosen if layer.called]
        options = ", logits=None" if any(layer.logits_hidden for layer in reached) else ""
        if self._only(chosen):
            options += ", words=None, positions=None"
        return _with(recommended.LINE, options + self._only(reached))

    def _only(self, layers: Sequence[LayerFacts]) -> str:
        """The option that leaves the other attention layers of the model alone; empty if there are none."""
        if self.whole and len(layers) == len(self.layers):
            return ""
        return f", sites=[site for site in wc.find_attention(model) if site.name in {[layer.name for layer in layers]}]"


def _tower(name: str) -> str:
    """The list of blocks that holds a layer: its path up to the first number.

    Example:
        >>> _tower("visual.blocks.3.attn"), _tower("layers.0.blocks.1.attn"), _tower("self_attn")
        ('visual.blocks', 'layers', 'self_attn')
    """
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else name


def _with(line: str, options: str) -> str:
    return f"{line.removesuffix(')')}{options})"


def judge(diagnosis: Diagnosis, *, whole: bool) -> tuple[Finding, ...]:
    """Findings by severity, without those that follow from another one.

    Args:
        diagnosis: without findings.
        whole: whether its layers are all attention layers of the model.
    """
    case = Case(diagnosis, whole)
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    explained = {kind for finding in found for kind in EXPLAINS.get(finding.kind, "").split()}
    order = list(SEVERITIES)
    kept = (finding for finding in found if finding.kind not in explained)
    return tuple(sorted(kept, key=lambda finding: order.index(finding.severity)))


def _finding(
    case: Case,
    kind: str,
    severity: Severity,
    verdict: str,
    layers: Sequence[LayerFacts],
    value: float,
    remedy: str,
    evidence: tuple[str, str] | None = None,
) -> Finding:
    """A finding with the limit of its rule; by default with what our records say about the recommendation."""
    text, record = evidence or case.evidence
    return Finding(
        kind=kind,
        severity=severity,
        verdict=verdict,
        layers=tuple(layer.name for layer in layers),
        value=value,
        threshold=THRESHOLDS.get(kind, math.inf if kind == "not-finite" else 0.0),
        remedy=remedy,
        evidence=text,
        record=record,
    )


def _title(layer: LayerFacts) -> str:
    return layer.name or "the attention layer"


def _some(layers: Sequence[LayerFacts]) -> str:
    """The first layer by name, the others by number."""
    rest = len(layers) - 1
    return _title(layers[0]) + (f" and {count(rest, 'more attention layer')}" if rest else "")


def _above(
    layers: Sequence[LayerFacts], number: Callable[[LayerFacts], float | None], kind: str
) -> tuple[list[LayerFacts], float]:
    """Layers whose number exceeds a threshold, the worst first, and its number."""
    found = [(value, layer) for layer in layers if (value := number(layer)) is not None and value > THRESHOLDS[kind]]
    found.sort(key=lambda pair: -pair[0])
    return [layer for _, layer in found], found[0][0] if found else math.nan


def _not_finite(case: Case) -> Finding | None:
    found = case.found.not_finite
    if found is None:
        return None
    bad = [layer for layer in case.layers if not layer.finite]
    remedy = "model.load_state_dict(checkpoint)  # an earlier one, at a lower learning rate"
    if found.weights:
        verdict = f"The weights are not finite ({found.weights}): this model has diverged, or its file is damaged."
        verdict += f" The batch is not finite either ({found.batch})." if found.batch else ""
    elif found.batch:
        verdict = (
            f"The batch is not finite ({found.batch}), the weights are: nothing is known about how the model treats "
            "finite numbers."
        )
        remedy = "assert torch.isfinite(tensor).all()  # of every tensor, where the batch is made"
    else:
        verdict = (
            f"Batch and weights are finite, and {found.activations}: numbers overflow their type, or every key of some "
            "token is masked."
        )
        remedy = "model.float()  # shows whether the type is too narrow; and look at the mask"
    verdict += f" They reach or leave {_some(bad)}." if bad else ""
    return _finding(case, "not-finite", "fault", verdict, bad, math.nan, remedy, NO_RECORD)


def _lambda(case: Case) -> Finding | None:
    bad, worst = _above(case.layers, lambda layer: layer.saturation, "lambda")
    if not bad or case.found.conditioning is None:
        return None
    lams = per_projection(case.found.conditioning["lam"])
    gentle = min(1.0, float(f"{math.sqrt(lams['q'] * lams['k'] / worst / 2):.2g}"))
    gap = worst * (math.log(bad[0].num_tokens or 1) + 5)
    verdict = (
        f"The correction lam I raises each token's logit with itself by about {gap:.0f} ({_some(bad)}), so that it "
        "sees little but itself and W_Q, W_K hardly learn."
    )
    remedy = f'wc.condition_(model, "identity", lam={gentle:g})  # on the model built again; or no correction at all'
    return _finding(case, "lambda", "fault", verdict, bad, worst, remedy, recommended.RECORDED["lambda"])


def _dead_heads(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.dead_heads]
    if not bad:
        return None
    heads = sum(len(layer.dead_heads) for layer in bad)
    all_dead = any(len(layer.dead_heads) == layer.num_heads for layer in bad)
    why = "both factors of a product (W_Q and W_K, or W_V and W_O) are zero"
    if any(layer.collapsed_heads for layer in bad):
        why = "every token attends to one key alone"
    verdict = (
        f"{count(heads, 'head')} of {_some(bad)} {'is' if heads == 1 else 'are'} dead: {why}, and W_Q, W_K get no "
        "gradient."
    )
    severity: Severity = "fault" if case.found.fresh or all_dead else "warning"
    remedy, evidence = _redraw(case, bad, "of before they died, with a lower learning rate for W_Q and W_K")
    return _finding(case, "dead-heads", severity, verdict, bad, float(heads), remedy, evidence)


def _redraw(case: Case, bad: Sequence[LayerFacts], which: str) -> tuple[str, tuple[str, str]]:
    """Remedy and evidence for heads that are of no use: they are drawn again only if the model is untrained."""
    if case.found.fresh:
        return case.initialise(bad, redraw=True), case.evidence
    return f"model.load_state_dict(checkpoint)  # one {which}", NO_RECORD


def _positions(case: Case) -> Finding | None:
    ratio = case.found.tokens.position_ratio
    if not case.found.fresh or ratio is None or not ratio < THRESHOLDS["positions"]:
        return None
    remedy = case.initialise()
    if ratio == 0:
        name, std = case.found.tokens.positions[0], case.found.tokens.spread
        remedy = f'torch.nn.init.normal_(model.get_parameter("{name}"), std={std:.2g}); {remedy}'
    verdict = (
        f"Position embeddings have {ratio:.2g} of the size of the {case.found.tokens.kind} they are added to, so that "
        f"tokens hardly know where they are{_about_tokens(case.layers[0])}."
    )
    return _finding(case, "positions", "warning", verdict, [], ratio, remedy)


def _about_tokens(layer: LayerFacts) -> str:
    """How dependent the tokens are, if they are more so than Gaussian ones (edges of the Marchenko-Pastur law)."""
    if layer.kappa_tokens is None or layer.num_tokens is None:
        return ""
    wide, long = math.sqrt(layer.width), math.sqrt(min(layer.num_tokens, MOST_TOKENS))
    usual = (wide + long) / max(abs(wide - long), 1e-9)
    text = f": kappa(X) is {layer.kappa_tokens:.3g} in the first attention layer, {usual:.2g} for Gaussian tokens"
    return text if layer.kappa_tokens > 3 * usual else ""


def _words(case: Case) -> Finding | None:
    length = case.found.tokens.length
    if not case.found.fresh or not length or length >= THRESHOLDS["words"]:
        return None
    verdict = (
        f"Word embeddings are short for this width: length {length:.2g} (0.55 in GPT-2 small), so that what the blocks "
        "add soon outweighs them."
    )
    return _finding(case, "words", "warning", verdict, [], length, case.initialise())


def _value_scale(case: Case) -> Finding | None:
    def value(layer: LayerFacts) -> float | None:
        heard = not layer.scales_itself and _own_share(layer) >= THRESHOLDS["value-share"]
        return layer.scale_v if layer.causal and heard else None

    bad, worst = _above(case.layers, value, "value-scale")
    if not bad or not case.found.fresh:
        return None
    verdict = (
        f"W_V is at scale {worst:.2g} under a causal mask ({_some(bad)}): an average of the past outweighs the token "
        "it is added to."
    )
    text, record = recommended.RECORDED["value-scale"]
    evidence = f"{case.evidence[0]} {text}", record
    return _finding(case, "value-scale", "warning", verdict, bad, worst, case.calibrate(bad), evidence)


def _own_share(layer: LayerFacts) -> float:
    """What a causal attention adds to the first token, relative to the stream, if later ones average those before.

    The average of i tokens is 1/sqrt(i) as large as one, so the mean square over N tokens is (1 + 1/2 + ... + 1/N)/N.
    """
    tokens = layer.num_tokens or 1
    averaged = math.fsum(1 / i for i in range(1, tokens + 1)) / tokens
    return (layer.attention_share or 0.0) / math.sqrt(averaged)


def _stream(case: Case) -> Finding | None:
    def added(layer: LayerFacts) -> float | None:
        parts = [share for share in (layer.attention_share, layer.mlp_share) if share is not None]
        return math.hypot(*parts) if parts and not layer.scales_itself else None

    bad, worst = _above(case.layers, added, "stream")
    if not bad or not case.found.fresh:
        return None
    verdict = (
        f"Attention and MLP add up to {worst:.2g} times what their block receives (at {_some(bad)}): little is left "
        "of the tokens themselves."
    )
    return _finding(case, "stream", "warning", verdict, bad, worst, case.calibrate(bad))


def _logits(case: Case) -> Finding | None:
    def spread(layer: LayerFacts) -> float | None:
        return None if layer.qk_norm else layer.logit_spread  # a norm's own gain decides, not W_Q and W_K

    bad, worst = _above(case.layers, spread, "logits")
    if not bad or not case.found.fresh:
        return None
    verdict = (
        f"Logits have a standard deviation of {worst:.2g} ({_some(bad)}): the softmax is nearly a choice of one key, "
        "and W_Q, W_K get little gradient."
    )
    remedy = case.initialise(bad) + "  # and check the factor 1/sqrt(head_dim)"
    return _finding(case, "logits", "warning", verdict, bad, worst, remedy)


def _precision(case: Case) -> Finding | None:
    bad, worst = _above(case.layers, lambda layer: layer.largest_logit, "precision")
    if not bad:
        return None
    spacing = 2.0 ** (math.floor(math.log2(worst)) - 7)
    overflow = ", and float16 overflows" if worst > 65504 else ""
    verdict = (
        f"Logits reach {worst:.0f} ({_some(bad)}), where numbers of bfloat16 are {spacing:g} apart{overflow}: in 16 "
        "bits the softmax is rounded away."
    )
    remedy = 'with torch.autocast("cuda", enabled=False): ...  # around the attention; and a lower rate for Q and K'
    if case.found.fresh and not any(layer.qk_norm for layer in bad):
        remedy = case.initialise(bad)
    return _finding(case, "precision", "warning", verdict, bad, worst, remedy, recommended.RECORDED["precision"])


def _projection_scale(case: Case) -> Finding | None:
    def smallest(layer: LayerFacts) -> float:
        scales = []
        if not layer.qk_norm and _is_small(case, layer.logit_spread, "small-logits"):
            scales += [layer.scale_q, layer.scale_k]
        if _is_small(case, None if layer.scales_itself else layer.attention_share, "small-share"):
            scales += [layer.scale_v]
        known = [scale for scale in scales if scale]
        return min(known) if known and not layer.causal else math.inf

    if not case.found.fresh or case.found.tokens.kind == "words":
        return None
    bad = [layer for layer in case.layers if smallest(layer) < THRESHOLDS["projection-scale"]]
    if not bad:
        return None
    bad.sort(key=smallest)
    worst = smallest(bad[0])
    verdict = (
        f"W_Q, W_K, W_V are small for this width, and so is what they do: sigma sqrt(fan_in) down to {worst:.2g} in "
        f"{_some(bad)}, 0.55 in a ViT-B."
    )
    return _finding(case, "projection-scale", "warning", verdict, bad, worst, case.initialise(bad))


def _is_small(case: Case, effect: float | None, kind: str) -> bool:
    """Whether what weights do is small as well.

    Where that is not known, `calibrated` has nothing to go by and leaves them; `gaussian` sets them all the same.
    """
    return not case.has_tokens_to_scale if effect is None else effect < THRESHOLDS[kind]


def _duplicate_heads(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.duplicate_heads]
    if not bad:
        return None
    pairs = sum(len(layer.duplicate_heads) for layer in bad)
    first, second = bad[0].duplicate_heads[0]
    verdict = (
        f"{count(pairs, 'pair')} of heads in {_some(bad)} compare and read the same (heads {first} and {second} of "
        f"{_title(bad[0])}): one of each pair is wasted."
    )
    remedy, evidence = _redraw(case, bad, "in which they differ; or prune one of each pair")
    return _finding(case, "duplicate-heads", "warning", verdict, bad, float(pairs), remedy, evidence)


def _shared_values(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.shared_values]
    if not case.found.fresh or not bad:
        return None
    rank = bad[0].head_dim
    verdict = (
        f"W_V of all heads together has rank {rank} of {bad[0].width} in {_some(bad)}: all heads read the same "
        "directions, as conditioned initialises them."
    )
    remedy, evidence = case.initialise(bad, redraw=True), recommended.RECORDED["shared-values"]
    return _finding(case, "shared-values", "note", verdict, bad, float(rank), remedy, evidence)


def _not_seen(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.not_seen]
    if not bad:
        return None
    reasons = dict.fromkeys(reason for layer in bad for reason in layer.not_seen)
    parts = [f"of {_some([layer for layer in bad if reason in layer.not_seen])}, {reason}" for reason in reasons]
    verdict = f"Not seen: {'; '.join(parts)}. Rules that need it were not applied, so nothing is said about it."
    remedy = "wc.diagnose(model, batch)  # with a batch that reaches every attention layer"
    if any(layer.logits_hidden for layer in bad):
        remedy = f"wc.diagnose(model, batch)  # to see it, {HOW_TO_SEE}"
    return _finding(case, "not-seen", "note", verdict, bad, float(len(bad)), remedy, NO_RECORD)


RULES: tuple[Callable[[Case], Finding | None], ...] = (
    _not_finite,
    _lambda,
    _dead_heads,
    _positions,
    _words,
    _value_scale,
    _stream,
    _logits,
    _precision,
    _projection_scale,
    _duplicate_heads,
    _shared_values,
    _not_seen,
)
