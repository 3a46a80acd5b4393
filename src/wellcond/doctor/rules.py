"""From facts to findings: one function per rule, in the order in which findings of equal severity are shown.

Rules for untrained models, and every fix that overwrites weights, need certainty that the model is untrained: trained
weights are what training made them. What they advise is the one recommendation (`wellcond.init.recommended`), for the
layers concerned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from wellcond.attention.record import HOW_TO_SEE
from wellcond.doctor.case import Case
from wellcond.doctor.examine import MOST_TOKENS
from wellcond.doctor.phrases import count, names_of, some_of, title_of, two_digits
from wellcond.doctor.records import SEVERITIES, Finding, LayerFacts, Severity
from wellcond.doctor.thresholds import THRESHOLDS, above
from wellcond.init.recommended import TABLES

CAUSAL = "results/evidence/causal/report/report.md"
NO_RECORD = "None of our records is about this line."
EXPLAINS = {
    "not-finite": {
        "dead-heads",
        "logits",
        "precision",
        "stream",
        "positions",
        "words",
        "value-scale",
        "projection-scale",
    },
    "lambda": {"dead-heads", "logits", "precision", "stream", "value-scale", "shared-values"},
    "dead-heads": {"logits"},
    "words": {"stream"},
    "value-scale": {"shared-values"},
}
"""Findings that follow from another are left out beside it."""
Rule = Callable[[Case], Finding | None]


def judge(case: Case) -> tuple[Finding, ...]:
    """Findings by severity, without those that follow from another one."""
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    explained = set().union(*(EXPLAINS.get(finding.kind, set()) for finding in found))
    order = list(SEVERITIES)
    kept = (finding for finding in found if finding.kind not in explained)
    return tuple(sorted(kept, key=lambda finding: order.index(finding.severity)))


def _not_finite(case: Case) -> Finding | None:
    found = case.not_finite
    if found is None:
        return None
    bad = [layer for layer in case.layers if not layer.finite]
    reached = f" They reach or leave {some_of(bad)}." if bad else ""
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
    return Finding(
        kind="not-finite",
        severity="fault",
        verdict=verdict + reached,
        layers=names_of(bad),
        value=math.nan,
        threshold=math.inf,
        remedy=remedy,
        evidence=NO_RECORD,
    )


def _lambda(case: Case) -> Finding | None:
    bad = above(case.layers, lambda layer: layer.saturation, "lambda")
    if not bad:
        return None
    worst, tokens = bad[0].saturation, bad[0].num_tokens
    assert worst is not None and tokens is not None
    gap = worst * (math.log(tokens) + 5)
    product = math.prod(case.lam) if case.lam is not None else 1.0
    gentle = min(1.0, two_digits(math.sqrt(product / worst / 2)))
    return _finding(
        "lambda",
        "fault",
        f"The correction lam I raises each token's logit with itself by about {gap:.0f} ({some_of(bad)}), so that it "
        "sees little but itself and W_Q, W_K hardly learn.",
        bad,
        worst,
        f'wc.condition_(model, "identity", lam={gentle:g})  # on the model built again; or no correction at all',
        "lam = 10 has 21.1 % on digits and 18.1 on CIFAR-10, where the default without a correction has 91.2 and 31.2, "
        "lam = 1 91.2 and 31.2. In GPT-2 it beats a weak default and loses to larger embeddings (53.0 and 41.7).",
        TABLES,
    )


def _dead_heads(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.dead_heads]
    if not bad:
        return None
    heads = sum(len(layer.dead_heads) for layer in bad)
    whole = [layer for layer in bad if len(layer.dead_heads) == layer.num_heads]
    why = "both factors of a product (W_Q and W_K, or W_V and W_O) are zero"
    if any(layer.collapsed_heads for layer in bad):
        why = "every token attends to one key alone"
    remedy, evidence, record = _redraw(case, bad, "of before they died, with a lower learning rate for W_Q and W_K")
    return _finding(
        "dead-heads",
        "fault" if case.fresh or whole else "warning",
        f"{count(heads, 'head')} of {some_of(bad)} {'is' if heads == 1 else 'are'} dead: {why}, and W_Q, W_K get no "
        "gradient.",
        bad,
        float(heads),
        remedy,
        evidence,
        record,
    )


def _redraw(case: Case, bad: Sequence[LayerFacts], which: str) -> tuple[str, str, str]:
    """Remedy, evidence and record for heads that are of no use: drawn again only if the model is untrained."""
    if case.fresh:
        return case.initialise(bad, redraw=True), *case.evidence
    return f"model.load_state_dict(checkpoint)  # one {which}", NO_RECORD, ""


def _positions(case: Case) -> Finding | None:
    ratio = case.tokens.position_ratio
    if not case.fresh or ratio is None or not ratio < THRESHOLDS["positions"].value:
        return None
    remedy = case.initialise()
    if ratio == 0:
        name, std = case.tokens.positions[0], case.tokens.spread
        remedy = f'torch.nn.init.normal_(model.get_parameter("{name}"), std={std:.2g}); {remedy}'
    return _finding(
        "positions",
        "warning",
        f"Position embeddings have {ratio:.2g} of the size of the {case.tokens.kind} they are added to, so that tokens "
        f"hardly know where they are{_about_tokens(case.layers[0])}.",
        [],
        ratio,
        remedy,
        *case.evidence,
    )


def _about_tokens(layer: LayerFacts) -> str:
    """How dependent the tokens are, if they are more so than Gaussian ones (edges of the Marchenko-Pastur law)."""
    if layer.kappa_tokens is None or layer.num_tokens is None:
        return ""
    wide, long = math.sqrt(layer.width), math.sqrt(min(layer.num_tokens, MOST_TOKENS))
    usual = (wide + long) / max(abs(wide - long), 1e-9)
    text = f": kappa(X) is {layer.kappa_tokens:.3g} in the first attention layer, {usual:.2g} for Gaussian tokens"
    return text if layer.kappa_tokens > 3 * usual else ""


def _words(case: Case) -> Finding | None:
    length = case.tokens.length
    if not case.fresh or not length or length >= THRESHOLDS["words"].value:
        return None
    return _finding(
        "words",
        "warning",
        f"Word embeddings are short for this width: length {length:.2g} (0.55 in GPT-2 small), so that what the blocks "
        "add soon outweighs them.",
        [],
        length,
        case.initialise(),
        *case.evidence,
    )


def _value_scale(case: Case) -> Finding | None:
    def value(layer: LayerFacts) -> float | None:
        heard = not layer.scales_itself and _own_share(layer) >= THRESHOLDS["value-share"].value
        return layer.scale_v if layer.causal and heard else None

    bad = above(case.layers, value, "value-scale") if case.fresh else []
    if not bad:
        return None
    assert bad[0].scale_v is not None
    return _finding(
        "value-scale",
        "warning",
        f"W_V is at scale {bad[0].scale_v:.2g} under a causal mask ({some_of(bad)}): an average of the past "
        "outweighs the token it is added to.",
        bad,
        bad[0].scale_v,
        case.calibrate(bad),
        f"{case.evidence[0]} W_V itself: GPT-2 on TinyStories, five seeds, has perplexity 56.6 with conditioned, 44.6 "
        "with conditioned Q and K alone and 45.7 by default.",
        CAUSAL,
    )


def _own_share(layer: LayerFacts) -> float:
    """What a causal attention adds to the first token, relative to the stream, if later ones average those before.

    The average of i tokens is 1/sqrt(i) as large as one, so the mean square over N tokens is (1 + 1/2 + ... + 1/N)/N.
    """
    count = layer.num_tokens or 1
    averaged = math.fsum(1 / i for i in range(1, count + 1)) / count
    return (layer.attention_share or 0.0) / math.sqrt(averaged)


def _stream(case: Case) -> Finding | None:
    def added(layer: LayerFacts) -> float | None:
        parts = [share for share in (layer.attention_share, layer.mlp_share) if share is not None]
        return math.hypot(*parts) if parts and not layer.scales_itself else None

    bad = above(case.layers, added, "stream") if case.fresh else []
    if not bad:
        return None
    worst = added(bad[0])
    assert worst is not None
    return _finding(
        "stream",
        "warning",
        f"Attention and MLP add up to {worst:.2g} times what their block receives (at {some_of(bad)}): little is left "
        "of the tokens themselves.",
        bad,
        worst,
        case.calibrate(bad),
        *case.evidence,
    )


def _logits(case: Case) -> Finding | None:
    def spread(layer: LayerFacts) -> float | None:
        return None if layer.qk_norm else layer.logit_spread  # a norm's own gain decides, not W_Q and W_K

    bad = above(case.layers, spread, "logits") if case.fresh else []
    if not bad:
        return None
    assert bad[0].logit_spread is not None
    return _finding(
        "logits",
        "warning",
        f"Logits have a standard deviation of {bad[0].logit_spread:.2g} ({some_of(bad)}): the softmax is nearly "
        "a choice of one key, and W_Q, W_K get little gradient.",
        bad,
        bad[0].logit_spread,
        case.initialise(bad) + "  # and check the factor 1/sqrt(head_dim)",
        *case.evidence,
    )


def _precision(case: Case) -> Finding | None:
    bad = above(case.layers, lambda layer: layer.largest_logit, "precision")
    if not bad:
        return None
    worst = bad[0].largest_logit
    assert worst is not None
    spacing = 2.0 ** (math.floor(math.log2(worst)) - 7)
    overflow = ", and float16 overflows" if worst > 65504 else ""
    drawn = case.fresh and not any(layer.qk_norm for layer in bad)
    return _finding(
        "precision",
        "warning",
        f"Logits reach {worst:.0f} ({some_of(bad)}), where numbers of bfloat16 are {spacing:g} apart{overflow}: in 16 "
        "bits the softmax is rounded away.",
        bad,
        worst,
        case.initialise(bad)
        if drawn
        else 'with torch.autocast("cuda", enabled=False): ...  # around the attention; and a lower rate for Q and K',
        "None is about large logits in training. QK-norm, which rules them out, does no harm: digits 91.8 % (default "
        "91.2), CIFAR-10 31.7 (31.2).",
        TABLES,
    )


def _projection_scale(case: Case) -> Finding | None:
    def smallest(layer: LayerFacts) -> float | None:
        scales = []
        if not layer.qk_norm and _is_small(case, layer.logit_spread, "small-logits"):
            scales += [layer.scale_q, layer.scale_k]
        share = None if layer.scales_itself else layer.attention_share
        if _is_small(case, share, "small-share"):
            scales += [layer.scale_v]
        known = [scale for scale in scales if scale]
        return min(known) if known and not layer.causal else None

    if not case.fresh or case.tokens.kind == "words":
        return None
    bad = [layer for layer in case.layers if (smallest(layer) or math.inf) < THRESHOLDS["projection-scale"].value]
    if not bad:
        return None
    bad.sort(key=lambda layer: smallest(layer) or math.inf)
    worst = smallest(bad[0])
    assert worst is not None
    return _finding(
        "projection-scale",
        "warning",
        f"W_Q, W_K, W_V are small for this width, and so is what they do: sigma sqrt(fan_in) down to {worst:.2g} in "
        f"{some_of(bad)}, 0.55 in a ViT-B.",
        bad,
        worst,
        case.initialise(bad),
        *case.evidence,
    )


def _is_small(case: Case, effect: float | None, kind: str) -> bool:
    """Whether what weights do is small as well.

    Where that is not known, `calibrated` has nothing to go by and leaves them; `gaussian` sets them all the same.
    """
    return not case.has_tokens_to_scale if effect is None else effect < THRESHOLDS[kind].value


def _duplicate_heads(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.duplicate_heads]
    if not bad:
        return None
    pairs = sum(len(layer.duplicate_heads) for layer in bad)
    first, second = bad[0].duplicate_heads[0]
    remedy, evidence, record = _redraw(case, bad, "in which they differ; or prune one of each pair")
    return _finding(
        "duplicate-heads",
        "warning",
        f"{count(pairs, 'pair')} of heads in {some_of(bad)} compare and read the same (heads {first} and {second} of "
        f"{title_of(bad[0])}): one of each pair is wasted.",
        bad,
        float(pairs),
        remedy,
        evidence,
        record,
    )


def _shared_values(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.shared_values]
    if not case.fresh or not bad:
        return None
    return _finding(
        "shared-values",
        "note",
        f"W_V of all heads together has rank {bad[0].head_dim} of {bad[0].width} in {some_of(bad)}: all heads read the "
        "same directions, as conditioned initialises them.",
        bad,
        float(bad[0].head_dim),
        case.initialise(bad, redraw=True),
        "No harm is shown: conditioned, which does so, has 92.9 % on digits and 31.9 on CIFAR-10, gaussian with a W_V "
        "of full rank 92.7 and 31.3.",
        TABLES,
    )


def _not_seen(case: Case) -> Finding | None:
    bad = [layer for layer in case.layers if layer.not_seen]
    if not bad:
        return None
    reasons = dict.fromkeys(reason for layer in bad for reason in layer.not_seen)
    parts = [f"of {some_of([layer for layer in bad if reason in layer.not_seen])}, {reason}" for reason in reasons]
    remedy = "wc.diagnose(model, batch)  # with a batch that reaches every attention layer"
    if any(layer.logits_hidden for layer in bad):
        remedy = f"wc.diagnose(model, batch)  # to see it, {HOW_TO_SEE}"
    return Finding(
        kind="not-seen",
        severity="note",
        verdict=f"Not seen: {'; '.join(parts)}. Rules that need it were not applied, so nothing is said about it.",
        layers=names_of(bad),
        value=float(len(bad)),
        threshold=0.0,
        remedy=remedy,
        evidence=NO_RECORD,
    )


RULES: tuple[Rule, ...] = (
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


def _finding(
    kind: str,
    severity: Severity,
    verdict: str,
    layers: Sequence[LayerFacts],
    value: float,
    remedy: str,
    evidence: str,
    record: str,
) -> Finding:
    return Finding(
        kind=kind,
        severity=severity,
        verdict=verdict,
        layers=names_of(layers),
        value=value,
        threshold=THRESHOLDS[kind].value,
        remedy=remedy,
        evidence=evidence,
        record=record,
    )
